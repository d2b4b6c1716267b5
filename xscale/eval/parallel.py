"""Reads parallel plain text: files of one language each whose lines n are translations (FLORES, NTREX, Tatoeba).

The names of the files differ only in the language: `eng_Latn.devtest`, `newstest2019-ref.deu.txt`, `de.txt`,
`tatoeba.deu-eng.deu`. Compressed files end in .gz or .xz.
"""

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.eval.model import ExportedModel
from xscale.eval.retrieval import Vectors, embed

NAME = re.compile(
    r"(?P<start>(?:.*\.)?)"
    r"(?P<language>(?!(?:bin|csv|dev|gz|idx|log|md|pdf|py|sh|tar|tsv|txt|xz|zip)(?:\.|$))[a-z]{2,3}(?:[-_][A-Za-z0-9]+)*)"
    r"(?P<end>(?:\.(?:txt|dev|devtest|test))?)"
)
ENGLISH = re.compile(r"eng?(?![a-z])")


class ParallelText:
    """A text in several languages, with the sentence vectors of one model, so that each language is encoded once."""

    def __init__(self, name: str, files: dict[str, Path]):
        """Read the files {language: path}. name: their path, with * in place of the language. Raises UserError if they
        differ in the number of lines."""
        self.name, self.files = name, files
        self.texts = {language: [line for _, line in read_lines(path)] for language, path in files.items()}
        sizes = {language: len(texts) for language, texts in self.texts.items()}
        if len(set(sizes.values())) > 1:
            few, many = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
            raise UserError(
                f"{files[few]} has {sizes[few]:,} lines, {files[many]} has {sizes[many]:,}; lines n of all files "
                f"must be translations of one another. Correct the wrong file, or move it elsewhere"
            )
        if not max(sizes.values()):
            raise UserError(f"{', '.join(map(str, files.values()))} have no lines; fill them, or move them elsewhere")
        self._vectors: dict[str, Vectors] = {}
        self._key: object = None

    def pairs(self, with_all: bool) -> list[tuple[str, str]]:
        """Return the sorted pairs of languages; only pairs with English if there are any, unless `with_all`."""
        pairs = list(combinations(sorted(self.files), 2))
        english = [pair for pair in pairs if any(ENGLISH.match(language) for language in pair)]
        return pairs if with_all or not english else english

    def vectors(
        self, model: ExportedModel, language: str, keys: Sequence[tuple[str, int]], limit: int | None
    ) -> Vectors:
        """Return unit vectors [lines, H] of the language's first `limit` lines for each (pooling, layer) in `keys`."""
        key = model, *keys, limit
        if key != self._key:
            self._vectors, self._key = {}, key
        if language not in self._vectors:
            language_id = model.language_ids([language])[language]
            self._vectors[language] = embed(model, self.texts[language][:limit], language_id, keys)
        return self._vectors[language]


def find_parallel_texts(folder: Path) -> list[ParallelText]:
    """Return the parallel texts in a folder and its subfolders. Raises UserError if a text's files differ in length."""
    groups: dict[tuple[Path, str], dict[str, Path]] = {}
    for path in sorted(folder.rglob("*")):
        match = NAME.fullmatch(re.sub(r"\.[gx]z$", "", path.name))
        if match and path.is_file():
            start = re.sub(r"-(ref|src)\.$", ".", match["start"])  # NTREX's names, whose source is English
            groups.setdefault((path.parent, f"{start}*{match['end']}"), {})[match["language"]] = path
    return [ParallelText(str(parent / name), files) for (parent, name), files in groups.items() if len(files) > 1]
