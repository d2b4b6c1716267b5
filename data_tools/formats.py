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
"""The number of first lines that are checked in each of the two files of pairs."""
HEAD_CHARACTERS = 1 << 24
"""No further line is checked once the first lines have this many characters."""
SHARE = 0.8
"""A file is refused if at least this share of its first lines has another format; real text has 6 % at most."""
SAME_SHARE, FEWEST = 0.9, 20
"""Two files count as the same text if at least SAME_SHARE of their first FEWEST pairs or more have equal sides."""
_ADDRESS, _NUMBER = re.compile(r"\w+://\S+"), re.compile(r"[\d\s.,:;eE+-]+")
_XML_HEADS = ("<?xml", "<!doctype", "<tmx", "<html")


def take_head(
    lines: Iterator[Item], most: int, characters: Callable[[Item], int] = lambda line: len(line[1])
) -> list[Item]:
    """Take (number, line) pairs, or other items, until there are `most`, or they have HEAD_CHARACTERS."""
    head, size = list[Item](), 0
    for line in islice(lines, most):
        head.append(line)
        size += characters(line)
        if size >= HEAD_CHARACTERS:
            break
    return head


def check_text(path: Path, head: list[str], json_lines: bool = False) -> None:
    """Raise UserError if a file's first lines are a table, XML or JSON. json_lines: accept JSON, since it is read as
    JSON or the user says that these lines are text."""
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
    if json_lines:
        return
    if lines[0] in ("[", "{") or lines[0].startswith("[{"):
        raise UserError(
            f"{path} looks like JSON of several lines; write one object per line, as `jq -c` does, or, if it is text, "
            f"name the form of the files by --documents"
        )
    if sum(object_of(line) is not None for line in lines) >= SHARE * len(lines):
        raise UserError(
            f"{path} looks like JSON, one object per line; let `python -m data_tools.prepare` read it (`jsonl:` in "
            f"corpus.yaml)"
        )


def refuse_equal_sides(what: str, pairs: Iterable[Sequence[str]]) -> None:
    """Raise UserError, which begins with `what`, if the sides of most pairs are the same."""
    stripped = [(a.strip(), b.strip()) for a, b in pairs if a.strip() and b.strip()]
    same = sum(a == b for a, b in stripped)
    if len(stripped) >= FEWEST and same >= SAME_SHARE * len(stripped):
        raise UserError(
            f"{what}: {same} of the first {len(stripped)} pairs have the same text on both sides; give the translation "
            f"for one of them"
        )


def check_pairs(paths: list[str], pairs: list[list[str]], columns: bool) -> None:
    """Raise UserError if both sides of a source's first pairs are the same or, if the source has columns, if a side has
    addresses or numbers."""
    for side, which in enumerate(("first", "second") if columns else ()):
        texts = [pair[side].strip() for pair in pairs if pair[side].strip()]
        odd = [text for text in texts if _ADDRESS.fullmatch(text) or _NUMBER.fullmatch(text)]
        if len(pairs) >= FEWEST and odd and len(odd) >= SHARE * len(texts):
            raise UserError(
                f"{paths[0]}: {len(odd)} of the first {len(texts)} texts of the {which} language are addresses or "
                f"numbers, such as {odd[0][:80]}; name the two columns of text in `columns`"
            )
    refuse_equal_sides(", ".join(paths), pairs)


def _is_tag(line: str) -> bool:
    """True if the line is a tag. WikiExtractor's tags do not count, since plain text stands between them."""
    return (
        line[0] == "<"
        and (line[1:2].isalpha() or line[1:2] in ("/", "!", "?"))
        and not line.startswith(("<doc ", "</doc>"))
    )


def object_of(line: str) -> dict[str, Any] | None:
    """The JSON object of a line, whose "text" (WikiExtractor, mC4) or "content" (OSCAR) is a document; else None."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):  # a number of more than 4,300 digits raises ValueError
        return None
    return fields if isinstance(fields, dict) else None
