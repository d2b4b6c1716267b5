"""Parallel plain text: one file per language, and lines n of all files are translations (FLORES, NTREX, Tatoeba).

A file's name has its language and a part that all languages share: `eng_Latn.devtest`, `newstest2019-ref.deu.txt`,
`tatoeba.deu-eng.deu`, `de.txt`; compressed files end in .gz or .xz.
"""

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.eval.model import Exported
from xscale.eval.retrieval import Vectors, embed

NAME = re.compile(
    r"(?P<start>(?:.*\.)?)"
    r"(?P<language>(?!(?:bin|csv|dev|gz|idx|log|md|pdf|py|sh|tar|tsv|txt|xz|zip)(?:\.|$))[a-z]{2,3}(?:[-_][A-Za-z0-9]+)*)"
    r"(?P<end>(?:\.(?:txt|dev|devtest|test))?)"
)
ENGLISH = re.compile(r"eng?(?![a-z])")


class ParallelText:
    """Texts of several languages, and their vectors of one model at a time, so that each text is encoded once."""

    def __init__(self, name: str, files: dict[str, Path]):
        """name: the part that the files' names share. files: the file of each language. Raises UserError."""
        self.name, self.files = name, files
        self.texts = {language: [line for _, line in read_lines(path)] for language, path in files.items()}
        sizes = {language: len(texts) for language, texts in self.texts.items()}
        if len(set(sizes.values())) > 1:
            few, many = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
            raise UserError(
                f"{files[few]} has {sizes[few]:,} lines, {files[many]} has {sizes[many]:,}; lines n of all files "
                f"must be translations. Fix one file, or move it away"
            )
        if not max(sizes.values()):
            raise UserError(
                f"{', '.join(map(str, files.values()))} have no lines; write the texts again, or move them away"
            )
        self._vectors: dict[str, Vectors] = {}
        self._key: object = None

    def pairs(self, every: bool) -> list[tuple[str, str]]:
        """All pairs of languages, in alphabetical order; only those with English if there are any and not `every`."""
        found = list(combinations(sorted(self.files), 2))
        english = [pair for pair in found if any(ENGLISH.match(language) for language in pair)]
        return found if every or not english else english

    def vectors(self, model: Exported, language: str, of: Sequence[tuple[str, int]], limit: int | None) -> Vectors:
        """Unit vectors of the first `limit` lines, as retrieval.embed returns them."""
        key = model, *of, limit
        if key != self._key:
            self._vectors, self._key = {}, key
        if language not in self._vectors:
            number = model.language_ids([language])[language]
            self._vectors[language] = embed(model, self.texts[language][:limit], number, of)
        return self._vectors[language]


def find_parallel(folder: Path) -> list[ParallelText]:
    """The parallel texts of a folder and of the folders in it. Raises UserError if a text's files differ in length."""
    groups: dict[tuple[Path, str], dict[str, Path]] = {}
    for path in sorted(folder.rglob("*")):
        match = NAME.fullmatch(re.sub(r"\.[gx]z$", "", path.name))
        if match and path.is_file():
            start = re.sub(r"-(ref|src)\.$", ".", match["start"])  # NTREX's names, whose source is English
            groups.setdefault((path.parent, f"{start}*{match['end']}"), {})[match["language"]] = path
    return [ParallelText(str(place / name), files) for (place, name), files in groups.items() if len(files) > 1]
