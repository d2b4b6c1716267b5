"""Finds the lines at which the documents of monolingual text files start, while the files are read as streams."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path

from xscale.data.text import read_lines
from xscale.errors import UserError, can_be_encoded

from .formats import check_text, parse_object, take_head

HEAD_LINES = 1000
"""The number of first lines by which the form of a file is found."""
BLOCK_LINES = 50
"""Blank lines separate documents if, on average, at most this many lines are between two of them."""

Passage = tuple[int, bool, list[str]]
"""A line: (its number in the file, from 1; whether it starts a document; its paragraphs, of which a blank line or a
line of markup has none)."""


def read_passages(path: Path, form: str) -> tuple[str, Iterator[Passage]]:
    """Return the form of a file, and an iterator over a passage for each of its lines. form: a key of FORMS, or "auto":
    find the form by the file's name or first lines. Raises UserError."""
    lines = read_lines(path)
    head = take_head(lines, HEAD_LINES)
    named = "json" if ".jsonl" in (suffix.lower() for suffix in path.suffixes) else None
    found = named or guess_form([line.strip() for _, line in head]) if form == "auto" else form
    check_text(path, [line for _, line in head], json_allowed=form != "auto" or found == "json")
    return found, FORMS[found](path, chain(head, lines))


def guess_form(head: list[str]) -> str:
    """Return the key of FORMS that the first lines suggest; "lines" if they suggest none."""
    blocks = [list(block) for there, block in groupby(head, key=bool) if there]
    if not blocks:
        return "lines"
    if blocks[0][0].startswith("<doc "):
        return "doc"
    if parse_object(blocks[0][0]) is not None:
        return "json"
    return "blank" if len(blocks) > 1 and sum(map(len, blocks)) <= BLOCK_LINES * len(blocks) else "lines"


def passages_by_markup(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Passage]:
    starts = True
    for number, line in lines:
        line = line.strip()
        if line.startswith(("<doc ", "</doc>")):
            if not line.endswith(">") or "</doc>" in line[1:]:
                raise UserError(f"{path}: line {number}: text beside a tag of <doc>; put a line end between them")
            starts = True
            yield number, False, []
        else:
            yield number, starts and bool(line), [line] if line else []
            starts = starts and not line


def passages_by_blank_lines(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Passage]:
    starts = True
    for number, line in lines:
        line = line.strip()
        yield number, starts and bool(line), [line] if line else []
        starts = not line


def passages_by_lines(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Passage]:
    for number, line in lines:
        yield number, True, [line.strip()] if line.strip() else []


def passages_by_objects(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Passage]:
    for number, line in lines:
        fields = parse_object(line) if line.strip() else {"text": ""}
        if fields is None:
            raise UserError(f"{path}: line {number} is not a JSON object; remove it, or name the form by --documents")
        found = [name for name in ("text", "content") if isinstance(fields.get(name), str)]
        if len(found) != 1:
            raise UserError(
                f"{path}: line {number} has the fields {', '.join(fields) or 'none'}; a document is one string, either "
                f"`text` or `content`: `jq -c '{{text: .body}}'` makes `text` of another field"
            )
        text = fields[found[0]]
        if not can_be_encoded(text):
            raise UserError(
                f"{path}: line {number}: its {found[0]} has an unpaired surrogate, such as \\ud800; fix or "
                f"remove the line"
            )
        yield number, True, [paragraph.strip() for paragraph in text.split("\n") if paragraph.strip()]


FORMS: dict[str, Callable[[Path, Iterable[tuple[int, str]]], Iterator[Passage]]] = {
    "doc": passages_by_markup,
    "blank": passages_by_blank_lines,
    "json": passages_by_objects,
    "lines": passages_by_lines,
}
"""What a document is in each form. doc: the text from `<doc ...>` to `</doc>` (WikiExtractor); blank: the lines between
blank lines; json: one JSON object; lines: one line."""
