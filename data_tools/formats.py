"""Refuses files that are not plain text, and says how to give them instead."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from xscale.errors import UserError

Item = TypeVar("Item", bound=Any)
HEAD_LINES = 500
"""The number of first lines of a file of pairs that are checked."""
HEAD_CHARACTERS = 1 << 24
"""The number of characters after which no further line is checked."""
SHARE = 0.8
"""A file is refused if at least this share of its first lines has another format. In real text at most 6 % of the lines
look like another format."""
SAME_SHARE, FEWEST = 0.9, 20
"""Two files count as one text if at least SAME_SHARE of their first FEWEST or more pairs have equal sides."""
_ADDRESS, _NUMBER = re.compile(r"\w+://\S+"), re.compile(r"[\d\s.,:;eE+-]+")
_XML_HEADS = ("<?xml", "<!doctype", "<tmx", "<html")


def take_head(
    lines: Iterator[Item], most: int, characters: Callable[[Item], int] = lambda line: len(line[1])
) -> list[Item]:
    """Return the first `most` items, such as (number, line) pairs, or fewer if these have HEAD_CHARACTERS. characters:
    a function that counts the characters of an item."""
    head, size = list[Item](), 0
    for line in islice(lines, most):
        head.append(line)
        size += characters(line)
        if size >= HEAD_CHARACTERS:
            break
    return head


def check_text(path: Path, head: list[str], json_allowed: bool = False) -> None:
    """Raise UserError if a file's first lines are a table, XML or JSON. json_allowed: accept JSON, because the file is
    read as JSON, or because the user says that its lines are text."""
    lines = [line.strip(" \r\n") for line in head if line and not line.isspace()]
    if not lines:
        return
    columns, times = Counter(line.count("\t") + 1 for line in lines).most_common(1)[0]
    if columns > 1 and times >= SHARE * len(lines):
        raise UserError(
            f"{path} looks like a table: {times} of its first {len(lines)} lines have {columns} columns; let `python "
            f"-m data_tools.prepare` read its pairs (`tsv:` in corpus.yaml), or take out one column with `cut -f1`"
        )
    if lines[0].lower().startswith(_XML_HEADS) or sum(map(_is_tag, lines)) >= SHARE * len(lines):
        if not any("<tmx" in line or "<tuv" in line for line in lines):
            raise UserError(f"{path} looks like XML or HTML; take its text out, one sentence per line")
        raise UserError(f"{path} looks like a TMX; let `python -m data_tools.prepare` read it (`tmx:` in corpus.yaml)")
    if json_allowed:
        return
    if lines[0] in ("[", "{") or lines[0].startswith("[{"):
        raise UserError(
            f"{path} looks like JSON of several lines; write one object per line, as `jq -c` does, or, if it is text, "
            f"name the form of the files by --documents"
        )
    if sum(parse_object(line) is not None for line in lines) >= SHARE * len(lines):
        raise UserError(
            f"{path} looks like JSON, one object per line; let `python -m data_tools.prepare` read it (`jsonl:` in "
            f"corpus.yaml)"
        )


def check_sides_differ(prefix: str, pairs: Iterable[Sequence[str]]) -> None:
    """Raise UserError, which begins with `prefix`, if most of the pairs have the same text on both sides."""
    stripped = [(a.strip(), b.strip()) for a, b in pairs if a.strip() and b.strip()]
    same = sum(a == b for a, b in stripped)
    if len(stripped) >= FEWEST and same >= SAME_SHARE * len(stripped):
        raise UserError(
            f"{prefix}: {same} of the first {len(stripped)} pairs have the same text on both sides; give the "
            f"translation for one of them"
        )


def check_pairs(paths: list[str], pairs: list[list[str]], has_columns: bool) -> None:
    """Raise UserError if the two sides of most first pairs of a source are the same, or, for a source with columns, if
    a side consists of addresses or numbers."""
    for side, which in enumerate(("first", "second") if has_columns else ()):
        texts = [pair[side].strip() for pair in pairs if pair[side].strip()]
        odd = [text for text in texts if _ADDRESS.fullmatch(text) or _NUMBER.fullmatch(text)]
        if len(pairs) >= FEWEST and odd and len(odd) >= SHARE * len(texts):
            raise UserError(
                f"{paths[0]}: {len(odd)} of the first {len(texts)} texts of the {which} language are addresses or "
                f"numbers, such as {odd[0][:80]}; name the two columns of text in `columns`"
            )
    check_sides_differ(", ".join(paths), pairs)


def _is_tag(line: str) -> bool:
    """Return True if the line is a tag. WikiExtractor's tags do not count, because there is plain text between them."""
    return (
        line[0] == "<"
        and (line[1:2].isalpha() or line[1:2] in ("/", "!", "?"))
        and not line.startswith(("<doc ", "</doc>"))
    )


def parse_object(line: str) -> dict[str, Any] | None:
    """Return the JSON object that a line consists of, or None if it is not one."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):  # a number of more than 4,300 digits raises ValueError
        return None
    return fields if isinstance(fields, dict) else None
