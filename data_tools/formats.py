"""Refuses files that are not plain text, with a command that converts them."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from xscale.errors import UserError

HEAD_LINES = 500
"""The number of first lines that are checked in each of the two files of pairs."""
HEAD_CHARACTERS = 1 << 24
"""No further line is checked once the first lines have this many characters."""
SHARE = 0.8
"""A file is refused if at least this share of its first lines has another format; real text has 6 % at most."""
SAME_SHARE, FEWEST = 0.9, 20
"""Two files count as the same text if at least SAME_SHARE of their first FEWEST pairs or more have equal sides."""
_CAT = {".gz": "gzip -dc", ".xz": "xz -dc"}
_ADDRESS, _NUMBER = re.compile(r"\w+://\S+"), re.compile(r"[\d\s.,:;eE+-]+")
_XML_HEADS = ("<?xml", "<!doctype", "<tmx", "<html")


def take_head(lines: Iterator[tuple[int, str]], most: int) -> list[tuple[int, str]]:
    """Take (number, line) pairs from `lines` until there are `most`, or their lines have HEAD_CHARACTERS."""
    head, size = list[tuple[int, str]](), 0
    for line in lines:
        head.append(line)
        size += len(line[1])
        if len(head) == most or size >= HEAD_CHARACTERS:
            break
    return head


def check_text(path: Path, head: list[str], side: int = 0, lang: str = "", json_lines: bool = False) -> None:
    """Raise UserError if a file's first lines are a table, XML or JSON. side, lang: the side (0 or 1) and the language
    of the wanted text. json_lines: accept JSON, since it is read as JSON or the user says that these lines are text."""
    lines = [line.strip(" \r\n") for line in head if line and not line.isspace()]
    if not lines:
        return
    cat = f"{_CAT.get(path.suffix, 'cat')} {quote(str(path))}"
    out = quote(f"{path.name.partition('.')[0]}.{lang or side + 1}.txt")
    columns, times = Counter(line.count("\t") + 1 for line in lines).most_common(1)[0]
    if columns > 1 and times >= SHARE * len(lines):
        raise UserError(
            f"{path} looks like a table: {times} of its first {len(lines)} lines have {columns} columns; take out the "
            f"one that you need: `{cat} | cut -f{min(side + 1, columns)} > {out}`"
        )
    if lines[0].lower().startswith(_XML_HEADS) or sum(map(_is_tag, lines)) >= SHARE * len(lines):
        if not any("<tmx" in line or "<tuv" in line for line in lines):
            raise UserError(f"{path} looks like XML or HTML; take its text out, one sentence per line")
        of_language = f"any(k[-4:] == 'lang' and x.lower().startswith('{lang.lower()}') for k, x in v.items())"
        raise UserError(
            f'{path} looks like a TMX; take each language out: `{cat} | python -c "import sys, xml.etree.ElementTree '
            f"as E; [print(*''.join(v.find('seg').itertext()).split()) for v in E.parse(sys.stdin.buffer).iter('tuv') "
            f'if {of_language}]" > {out}`'
        )
    if json_lines:
        return
    if lines[0] in ("[", "{") or lines[0].startswith("[{"):
        raise UserError(
            f"{path} looks like JSON of several lines; write one object per line, as `jq -c` does"
            + ("" if lang else ", or name the form of the files by --documents")
        )
    objects = [fields for fields in map(object_of, lines) if fields is not None]
    if len(objects) >= SHARE * len(lines):
        program = quote(_place(objects[0], side, lang) + ' | gsub("\\n"; " ")')
        raise UserError(
            f"{path} looks like JSON, one object per line; take out the text that you need: `{cat} | jq -r {program} "
            f"> {out}`"
        )


def refuse_equal_sides(src: Path, tgt: Path, heads: list[list[str]]) -> None:
    """Raise UserError if the target is the source file, or looks like a copy of it."""
    pairs = [(a.strip(), b.strip()) for a, b in zip(*heads, strict=False) if a.strip() and b.strip()]
    same = sum(a == b for a, b in pairs)
    if src.resolve() == tgt.resolve() and not src.is_fifo():
        raise UserError(f"{src} and {tgt} are the same file; give the translation for one of them")
    if len(pairs) >= FEWEST and same >= SAME_SHARE * len(pairs):
        raise UserError(
            f"{tgt} looks like a copy of {src}: {same} of the first {len(pairs)} pairs have the same text on both "
            f"sides; give the translation for one of them"
        )


def check_pairs(paths: list[str], pairs: list[list[str]], columns: bool) -> None:
    """Raise UserError if both sides of a source's first pairs are the same or, if the source has columns, if a side has
    addresses or numbers."""
    if len(pairs) < FEWEST:
        return
    for side, which in enumerate(("first", "second") if columns else ()):
        texts = [pair[side].strip() for pair in pairs if pair[side].strip()]
        odd = [text for text in texts if _ADDRESS.fullmatch(text) or _NUMBER.fullmatch(text)]
        if odd and len(odd) >= SHARE * len(texts):
            raise UserError(
                f"{paths[0]}: {len(odd)} of the first {len(texts)} texts of the {which} language are addresses or "
                f"numbers, such as {odd[0][:80]}; name the two columns of text in `columns`"
            )
    same = sum(a.strip() == b.strip() != "" for a, b in pairs)
    if same >= SAME_SHARE * len(pairs):
        raise UserError(
            f"{', '.join(paths)}: {same} of the first {len(pairs)} pairs have the same text on both sides; give the "
            f"translation for one of them"
        )


def _place(fields: Any, side: int, lang: str) -> str:
    """The path, in jq's notation, to the text of a JSON object in this language or, if it names none, on this side."""
    place = ""
    while isinstance(fields, dict) and fields:
        texts = [name for name, value in fields.items() if isinstance(value, str)] or [*fields]
        objects = [name for name, value in fields.items() if isinstance(value, dict)]
        name = lang if lang in fields else objects[0] if objects else texts[min(side, len(texts) - 1)]
        place, fields = f"{place or '.'}[{json.dumps(name, ensure_ascii=False)}]", fields[name]
    return place or "."


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
