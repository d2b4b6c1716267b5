"""Finds the lines at which the documents of monolingual text files start, while the files are read as streams."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from xscale.data.text import read_lines
from xscale.errors import UserError

HEAD_LINES, HEAD_CHARACTERS = 500, 1 << 24
"""The number of first lines by which the form of a file is found; fewer, if they have so many characters."""
SHARE = 0.8
"""A file is no text if at least this share of its first lines are of another format. In real text at most 6 % are."""
BLOCK_LINES = 50
"""Blank lines separate documents if, on average, at most this many lines are between two of them."""
Lines = Iterable[tuple[int, str]]
"""Lines with their numbers in the file, from 1."""


class Passage(NamedTuple):
    line: int
    """The number of the line in its file, from 1."""
    starts: bool
    """True if the line starts a document."""
    texts: list[str]
    """The paragraphs of the line. A blank line or a line of markup has none."""


def take_head(lines: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the first lines of a file."""
    head, size = list[tuple[int, str]](), 0
    for number, line in islice(lines, HEAD_LINES):
        head.append((number, line))
        size += len(line)
        if size >= HEAD_CHARACTERS:
            break
    return head


def check_text(path: Path, head: list[tuple[int, str]]) -> None:
    """Raise UserError if most first lines of a file are rows of a table, JSON or markup instead of text."""
    lines = [line.strip(" ") for _, line in head if line.strip()]
    columns = [line.count("\t") for line in lines]
    counts = {
        "rows of a table": max(map(columns.count, set(columns) - {0}), default=0),
        "JSON": sum(line.startswith(("{", "[{")) and line.endswith(("}", "},")) for line in lines),
        "XML or HTML": sum(map(is_markup, lines)),
    }
    if lines and (lines[0].lower().startswith(("<?xml", "<tmx")) or lines[0] in ("{", "[")):
        counts["XML or JSON"] = len(lines)
    for form, count in counts.items():
        if count >= SHARE * len(lines) > 0:
            raise UserError(
                f"{path} is not lines of text: {count} of its first {len(lines)} lines are {form}. In corpus.yaml, "
                f"`python -m data_tools.prepare` reads tables by `tsv:`, JSON lines by `jsonl:` and TMX by `tmx:`"
            )


def is_markup(line: str) -> bool:
    """Return True if a line begins with a tag, but not with WikiExtractor's, whose content is text."""
    begins = line[0] == "<" and (line[1:2].isalpha() or line[1:2] in ("/", "!", "?"))
    return begins and not line.startswith(("<doc ", "</doc>"))


def read_passages(path: Path, form: str) -> Iterator[Passage]:
    """Yield a passage for each line of a file. form: a key of FORMS, or "auto" for the form that the first lines show.
    Raises UserError."""
    lines = read_lines(path)
    head = take_head(lines)
    if form == "auto":
        check_text(path, head)
        form = guess_form([line.strip() for _, line in head])
    return FORMS[form](path, chain(head, lines))


def guess_form(head: list[str]) -> str:
    """Return the form of a file with these first lines: "doc" if it begins with WikiExtractor's tag, "blank" if blank
    lines divide it into short blocks, else "lines"."""
    texts = [line for line in head if line]
    if texts and texts[0].startswith("<doc "):
        return "doc"
    starts = [text for before, text in zip(["", *head], head, strict=False) if text and not before]
    return "blank" if len(starts) > 1 and len(texts) <= BLOCK_LINES * len(starts) else "lines"


def passages_by_markup(path: Path, lines: Lines) -> Iterator[Passage]:
    starts = True
    for number, line in lines:
        line = line.strip()
        if line.startswith(("<doc ", "</doc>")):
            if not line.endswith(">") or "</doc>" in line[1:]:
                raise UserError(f"{path}: line {number}: text beside a tag of <doc>; put a line end between them")
            starts = True
            yield Passage(number, False, [])
        else:
            yield Passage(number, starts and bool(line), [line] if line else [])
            starts = starts and not line


def passages_by_blank_lines(path: Path, lines: Lines) -> Iterator[Passage]:
    starts = True
    for number, line in lines:
        line = line.strip()
        yield Passage(number, starts and bool(line), [line] if line else [])
        starts = not line


def passages_by_lines(path: Path, lines: Lines) -> Iterator[Passage]:
    for number, line in lines:
        line = line.strip()
        yield Passage(number, True, [line] if line else [])


FORMS: dict[str, Callable[[Path, Lines], Iterator[Passage]]] = {
    "doc": passages_by_markup,
    "blank": passages_by_blank_lines,
    "lines": passages_by_lines,
}
"""What a document is in each form. doc: the text from `<doc ...>` to `</doc>` (WikiExtractor); blank: the lines between
blank lines; lines: one line."""
