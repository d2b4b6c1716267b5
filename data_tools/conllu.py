"""Reads sentences of CoNLL-U files, and writes them with their words in another order."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from xscale.data.text import read_lines
from xscale.errors import UserError

from .word_order import Parsed

_ID, _FORM, _UPOS, _HEAD, _DEPREL, _DEPS, _MISC = 0, 1, 3, 6, 7, 8, 9
Row = list[str]
"""The ten columns of a line of CoNLL-U."""


def blocks_between_blank_lines(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, list[str]]]:
    """Yield each block of lines between blank lines, as (number of its first line, its lines)."""
    first, block = 0, list[str]()
    for number, line in lines:
        if line.strip():
            first = first if block else number
            block.append(line)
        elif block:
            yield first, block
            block = []
    if block:
        yield first, block


@dataclass(frozen=True)
class Sentence:
    comments: list[str]
    words: list[Row]
    ranges: dict[int, tuple[Row, int]]
    """The index of the first word of each multiword token -> (the token's columns, its number of words)."""
    empty: dict[int, list[Row]]
    """The index of a word -> the empty nodes after it. The key -1 has those before the first word."""

    def units(self) -> list[tuple[str, range]]:
        """Return the words and multiword tokens that are moved as a whole: (written form, indices of its words)."""
        found, number = [], 0
        while number < len(self.words):
            row, size = self.ranges.get(number, (self.words[number], 1))
            found.append((row[_FORM], range(number, number + size)))
            number += size
        return found

    def parsed_words(self) -> list[Parsed]:
        return [Parsed(row[_FORM], row[_UPOS], int(row[_HEAD]) - 1, row[_DEPREL]) for row in self.words]

    def reordered_lines(self, order: list[int], map_forms: Callable[[list[str]], list[str]]) -> str:
        """Return the sentence in CoNLL-U, with its units in the order `order` (indices in `units()`). map_forms: a
        function that maps the list of the words' forms to the forms that are written."""
        units = self.units()
        words = [number for unit in order for number in units[unit][1]]
        number_of = {"0": "0"} | {str(old + 1): str(new) for new, old in enumerate(words, start=1)}

        def renumbered(place: str) -> str:
            whole, dot, part = place.partition(".")
            return number_of.get(whole, whole) + dot + part

        rows: list[Row] = [*self.empty.get(-1, [])]
        written = []
        for unit in order:
            written.append(len(rows))
            for number in units[unit][1]:
                rows += [self.ranges[number][0]] if number in self.ranges else []
                rows += [self.words[number], *self.empty.get(number, [])]
        forms = map_forms([row[_FORM] for row in rows])
        lines = []
        for row, form in zip(rows, forms, strict=True):
            place = "-".join(map(renumbered, row[_ID].split("-")))
            links = (part.partition(":") for part in row[_DEPS].split("|"))
            deps = "|".join(renumbered(head) + colon + relation for head, colon, relation in links)
            misc = "|".join(part for part in row[_MISC].split("|") if part != "SpaceAfter=No") or "_"
            lines.append("\t".join([place, form, *row[2:_HEAD], renumbered(row[_HEAD]), row[_DEPREL], deps, misc]))
        text = " ".join(forms[number] for number in written)
        comments = [f"# text = {text}" if line.startswith("# text =") else line for line in self.comments]
        return "\n".join([*comments, *lines]) + "\n\n"


def read_sentences(path: Path) -> Iterator[tuple[str, Sentence]]:
    """Yield ("FILE: line N", sentence) for each sentence of a file. Raises UserError."""
    for first, block in blocks_between_blank_lines(read_lines(path)):
        comments = [line for line in block if line.startswith("#")]
        words: list[Row] = []
        ranges: dict[int, tuple[Row, int]] = {}
        empty: dict[int, list[Row]] = {}
        for number, line in enumerate(block, start=first):
            if line.startswith("#"):
                continue
            row = line.split("\t")
            where = f"{path}: line {number}"
            if len(row) != 10:
                raise UserError(f"{where} has {len(row)} columns; CoNLL-U has 10, with tabs between them")
            if found := re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", row[_ID]):
                ranges[int(found[1]) - 1] = row, int(found[2]) - int(found[1]) + 1
            elif "." in row[_ID]:
                empty.setdefault(len(words) - 1, []).append(row)
            elif row[_ID] == str(len(words) + 1):
                words.append(row)
            else:
                raise UserError(
                    f"{where}: {row[_ID]!r} must be {len(words) + 1}, the number of the next word of its sentence"
                )
        if any(start + size > len(words) for start, (_, size) in ranges.items()):
            raise UserError(f"{path}: line {first}: a multiword token is longer than its sentence; fix it")
        if not words and any(line.startswith("# text =") for line in comments):
            raise UserError(f"{path}: line {first}: the sentence has a `# text =` and no words; fix or remove it")
        if words:
            yield f"{path}: line {first}", Sentence(comments, words, ranges, empty)


def check_heads(sentence: Sentence, where: str) -> None:
    """Raise UserError unless the HEAD column of every word is 0 or the number of a word of the sentence. where: the
    sentence's file and line."""
    for row in sentence.words:
        if not row[_HEAD].isdigit() or int(row[_HEAD]) > len(sentence.words):
            raise UserError(f"{where}: the head of {row[_FORM]!r} is {row[_HEAD]!r}; --how syn needs a number")
