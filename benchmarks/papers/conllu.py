"""Reads sentences of CoNLL-U files, and writes them with their words in another order."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from xscale.data.text import read_lines
from xscale.errors import UserError

Row = list[str]
"""The ten columns of a line of CoNLL-U."""


class Column(IntEnum):
    ID = 0
    FORM = 1
    UPOS = 3
    HEAD = 6
    DEPREL = 7
    DEPS = 8
    MISC = 9


@dataclass(frozen=True)
class Unit:
    """What moves as a whole: a word, or a multiword token with its words, and the empty nodes behind them."""

    rows: list[Row]

    @property
    def form(self) -> str:
        return self.rows[0][Column.FORM]

    @property
    def words(self) -> list[Row]:
        return [row for row in self.rows if row[Column.ID].isdigit()]


@dataclass(frozen=True)
class Sentence:
    comments: list[str]
    leading: list[Row]
    """The empty nodes before the first word."""
    units: list[Unit]

    @property
    def words(self) -> list[Row]:
        return [row for unit in self.units for row in unit.words]

    def reordered(self, order: list[int], map_forms: Callable[[list[str]], list[str]]) -> str:
        """Return the sentence in CoNLL-U with its units in this order. map_forms: maps the words' forms to those that
        are written."""
        units = [self.units[number] for number in order]
        rows = [*self.leading]
        first_rows = []
        new_number = {"0": "0"}
        for unit in units:
            first_rows.append(len(rows))
            rows += unit.rows
            for word in unit.words:
                new_number[word[Column.ID]] = str(len(new_number))
        forms = map_forms([row[Column.FORM] for row in rows])
        text = " ".join(forms[number] for number in first_rows)
        lines = []
        for comment in self.comments:
            lines.append(f"# text = {text}" if comment.startswith("# text =") else comment)
        for row, form in zip(rows, forms, strict=True):
            lines.append("\t".join(renumbered(row, form, new_number)))
        return "\n".join(lines) + "\n\n"


def renumbered(row: Row, form: str, new_number: dict[str, str]) -> Row:
    """Return the row with another form and with new numbers of words in ID, HEAD and DEPS."""

    def place(old: str) -> str:
        word, dot, empty_node = old.partition(".")
        return new_number.get(word, word) + dot + empty_node

    arcs = []
    for arc in row[Column.DEPS].split("|"):
        head, colon, relation = arc.partition(":")
        arcs.append(place(head) + colon + relation)
    remarks = [remark for remark in row[Column.MISC].split("|") if remark != "SpaceAfter=No"]
    moved = [*row]
    moved[Column.ID] = "-".join(map(place, row[Column.ID].split("-")))
    moved[Column.FORM] = form
    moved[Column.HEAD] = place(row[Column.HEAD])
    moved[Column.DEPS] = "|".join(arcs)
    moved[Column.MISC] = "|".join(remarks) or "_"
    return moved


def read_sentences(path: Path) -> Iterator[tuple[str, Sentence]]:
    """Yield ("FILE: line N", sentence) for each sentence of a file. Raises UserError."""
    for first, lines in blocks_between_blank_lines(read_lines(path)):
        sentence = parse(lines, path, first)
        if sentence.units:
            yield f"{path}: line {first}", sentence


def parse(lines: list[str], path: Path, first: int) -> Sentence:
    """Parse a sentence's lines, whose first has the number `first`. Raises UserError."""
    sentence = Sentence([], [], [])
    word_count = 0
    end_of_token = 0  # the number of the last word of the multiword token that is being read
    for number, line in enumerate(lines, start=first):
        row = line.split("\t")
        if line.startswith("#"):
            sentence.comments.append(line)
            continue
        if len(row) != 10:
            raise UserError(f"{path}: line {number} has {len(row)} columns; CoNLL-U has 10, with tabs between them")
        start, dash, end = row[Column.ID].partition("-")
        if "." in start:
            (sentence.units[-1].rows if sentence.units else sentence.leading).append(row)
            continue
        if start != str(word_count + 1) or (dash and not end.isdecimal()):
            raise UserError(
                f"{path}: line {number}: {row[Column.ID]!r} must be {word_count + 1}, the number of the next word of "
                f"its sentence"
            )
        if dash:
            end_of_token = int(end)
        else:
            word_count += 1
        if dash or word_count > end_of_token:
            sentence.units.append(Unit([row]))
        else:
            sentence.units[-1].rows.append(row)
    if end_of_token > word_count:
        raise UserError(f"{path}: line {first}: a multiword token is longer than its sentence; fix it")
    if not sentence.units and any(comment.startswith("# text =") for comment in sentence.comments):
        raise UserError(f"{path}: line {first}: the sentence has a `# text =` and no words; fix or remove it")
    return sentence


def blocks_between_blank_lines(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    """Yield each block of lines between blank lines, as (number of its first line, its lines)."""
    block: list[str] = []
    first = 0
    for number, line in lines:
        if line.strip():
            first = first if block else number
            block.append(line)
        elif block:
            yield first, block
            block = []
    if block:
        yield first, block
