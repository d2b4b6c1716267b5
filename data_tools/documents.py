"""Finds the lines at which the documents of monolingual text files start, while the files are read as streams."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path

from xscale.data.text import read_lines
from xscale.errors import UserError, can_be_encoded

from .formats import check_text, object_of, take_head

HEAD_LINES = 1000
"""The number of a file's first lines that decide which form it has."""
BLOCK_LINES = 50
"""Blank lines separate documents if, on average, at most this many lines are between two of them."""

Passage = tuple[int, bool, list[str]]
"""A line: (its number in the file, whether it starts a document, its paragraphs: none if it is blank or markup)."""


def passages(path: Path, form: str) -> tuple[str, Iterator[Passage]]:
    """The form of a file, and a passage for each of its lines. form: a key of FORMS, or "auto" to find the form by the
    file's name or first lines. Raises UserError."""
    lines = read_lines(path)
    head = take_head(lines, HEAD_LINES)
    named = "json" if ".jsonl" in (suffix.lower() for suffix in path.suffixes) else None
    found = named or form_of([line.strip() for _, line in head]) if form == "auto" else form
    check_text(path, [line for _, line in head], json_lines=form != "auto" or found == "json")
    return found, FORMS[found](path, chain(head, lines))


def form_of(head: list[str]) -> str:
    """The form of a file according to its first lines; "lines" if they show no other form."""
    blocks = [list(block) for there, block in groupby(head, key=bool) if there]
    if not blocks:
        return "lines"
    if blocks[0][0].startswith("<doc "):
        return "doc"
    if object_of(blocks[0][0]) is not None:
        return "json"
    return "blank" if len(blocks) > 1 and sum(map(len, blocks)) <= BLOCK_LINES * len(blocks) else "lines"


def by_markup(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Passage]:
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


def by_blank_lines(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Passage]:
    starts = True
    for number, line in lines:
        line = line.strip()
        yield number, starts and bool(line), [line] if line else []
        starts = not line


def by_lines(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Passage]:
    for number, line in lines:
        yield number, True, [line.strip()] if line.strip() else []


def by_objects(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Passage]:
    for number, line in lines:
        fields = object_of(line) if line.strip() else {"text": ""}
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
    "doc": by_markup,
    "blank": by_blank_lines,
    "json": by_objects,
    "lines": by_lines,
}
"""What a document is in each form. doc: the text from `<doc ...>` to `</doc>` (WikiExtractor); blank: the lines between
blank lines; json: one JSON object; lines: one line."""
