"""Reads sentences of CoNLL-U files, and writes them with their words in another order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
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
class Sentence:
    place: str
    """The file and the number of the first line, for errors."""
    comments: list[str]
    leading: list[Row]
    """The empty nodes before the first word."""
    units: list[list[Row]]
    """Rows of a sentence that move together: the row of a word, or the rows of a multiword token and its words; the
    rows of the empty nodes behind them belong to the unit."""

    @property
    def forms(self) -> list[str]:
        """The form of each unit."""
        return [unit[0][Column.FORM] for unit in self.units]

    def words(self) -> list[tuple[int, Row]]:
        """Return the number of its unit and the row of each word."""
        words = []
        for number, unit in enumerate(self.units):
            words += [(number, row) for row in unit if row[Column.ID].isdigit()]
        return words

    def reordered(self, order: list[int], map_word: Callable[[str], str]) -> str:
        """Return the sentence in CoNLL-U with its units in this order. map_word: maps a word's form to the form that is
        written."""
        text = " ".join(map_word(self.forms[number]) for number in order)
        rows = [*self.leading]
        for number in order:
            rows += self.units[number]
        new_number = {"0": "0"}
        for row in rows:
            if row[Column.ID].isdigit():
                new_number[row[Column.ID]] = str(len(new_number))
        lines = []
        for comment in self.comments:
            lines.append(f"# text = {text}" if comment.startswith("# text =") else comment)
        for row in rows:
            lines.append("\t".join(renumbered(row, map_word(row[Column.FORM]), new_number)))
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


def read_sentences(path: Path) -> Iterator[Sentence]:
    """Yield each sentence of a file. Raises UserError."""
    for lines in blocks_between_blank_lines(path):
        sentence = Sentence(f"{path}: line {lines[0][0]}", [], [], [])
        word_count = 0
        end_of_token = 0  # the number of the last word of the multiword token that is being read
        for number, line in lines:
            if line.startswith("#"):
                sentence.comments.append(line)
                continue
            row = line.split("\t")
            if len(row) != 10:
                raise UserError(f"{path}: line {number} has {len(row)} columns; CoNLL-U has 10, with tabs between them")
            start, dash, end = row[Column.ID].partition("-")
            if "." in start:
                (sentence.units[-1] if sentence.units else sentence.leading).append(row)
                continue
            expected = word_count + 1
            if start != str(expected):
                raise UserError(f"{path}: line {number}: {start!r} must be {expected}, the number of the next word")
            if dash and not end.isdecimal():
                raise UserError(
                    f"{path}: line {number}: {row[Column.ID]!r} must be the numbers of the first and the last word "
                    f"of a multiword token, such as {expected}-{expected + 1}. Correct the line"
                )
            if dash:
                end_of_token = int(end)
            else:
                word_count += 1
            if dash or word_count > end_of_token:
                sentence.units.append([row])
            else:
                sentence.units[-1].append(row)
        if sentence.units:
            yield sentence


def blocks_between_blank_lines(path: Path) -> Iterator[list[tuple[int, str]]]:
    """Yield each block of a file's lines between blank lines: the number and the text of each line."""
    for is_blank, lines in groupby(read_lines(path), key=lambda line: not line[1].strip()):
        if not is_blank:
            yield [*lines]
