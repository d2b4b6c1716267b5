"""Warnings about texts that can be found without knowledge of their languages: scripts, repeated texts, lengths of
pairs."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import eq

import numpy as np

from xscale.data.scripts import scripts_of

REPEATED = 0.5
SAME = 0.1
IN_SCRIPT = 0.5
CORRELATION = 0.2
"""There is a warning if a share is above its limit, or if the lengths of at least FEWEST pairs have a lower correlation
than CORRELATION."""
FEWEST = 1000


def script_of(character: str) -> str:
    """Return the first word of the character's name in Unicode: LATIN, CYRILLIC, CJK, HIRAGANA, ..."""
    name = unicodedata.name(character, "OTHER").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
    return name.replace("-", " ").split()[0]


def count_scripts(texts: Iterable[str]) -> Counter[str]:
    """Return the number of letters of the texts in each script."""
    scripts = Counter[str]()
    for character, count in Counter("".join(texts)).items():
        if character.isalpha():
            scripts[script_of(character)] += count
    return scripts


def share_in_language(letters: Counter[str], lang: str) -> float:
    """Return the share of letters in the scripts of a language, or 1.0 if these or the letters are not known."""
    expected = scripts_of(lang)
    if not expected or not letters:
        return 1.0
    return sum(map(letters.__getitem__, expected)) / letters.total()


def warning_lines(langs: tuple[str, ...], records: Sequence[Sequence[str]]) -> list[str]:
    """Return a line about each suspicious property of the texts. records: the texts of each record, one in each
    language."""
    sides = list(zip(*records, strict=True))
    lines = list[str]()
    letters = list[Counter[str]]()
    for lang, texts in zip(langs, sides, strict=True):
        letters.append(count_scripts(texts))
        if share_in_language(letters[-1], lang) < IN_SCRIPT:
            script, count = letters[-1].most_common(1)[0]
            lines.append(f"{lang}: {count / letters[-1].total():.0%} of the letters are {script}; {lang} is written in "
                         f"{' or '.join(scripts_of(lang))}")  # fmt: skip
        repeated = 1 - len(set(texts)) / len(texts)
        if repeated > REPEATED:
            lines.append(f"{lang}: {repeated:.0%} of the texts repeat an earlier one; remove duplicates")
    if len(sides) < 2:
        return lines
    as_given = min(map(share_in_language, letters, langs))
    swapped = min(map(share_in_language, letters, reversed(langs)))
    if as_given < IN_SCRIPT <= swapped:
        lines.append(f"the languages look swapped: {langs[1]} {langs[0]} would fit the scripts")
    same = sum(map(eq, *sides)) / len(records)
    if same > SAME:
        lines.append(f"{same:.0%} of the pairs have the same text on both sides; are these translations?")
    lengths = np.log([list(map(len, texts)) for texts in sides])
    if len(records) >= FEWEST and lengths.std(axis=1).min() > 0 and np.corrcoef(lengths)[0, 1] < CORRELATION:
        lines.append(f"long texts in {langs[0]} do not have long translations in {langs[1]}: is line n of one file the "
                     f"translation of line n of the other?")  # fmt: skip
    return lines
