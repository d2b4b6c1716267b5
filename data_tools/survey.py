"""Warnings about a source's texts that need no knowledge of its languages: scripts, repeated texts, lengths."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from xscale.data.scripts import scripts_of

REPEATED, SAME, IN_SCRIPT, CORRELATION, FEWEST = 0.5, 0.1, 0.5, 0.2, 1000
"""The shares, and the correlation of FEWEST or more pairs' lengths, beyond which there is a warning."""


@lru_cache(maxsize=1 << 16)
def script_of(character: str) -> str:
    """Return the first word of the character's name in Unicode: LATIN, CYRILLIC, CJK, HIRAGANA, ..."""
    words = unicodedata.name(character, "OTHER").replace("-", " ").split()
    return words[1] if words[0] in ("FULLWIDTH", "HALFWIDTH") and len(words) > 1 else words[0]


def script_shares(texts: Sequence[str]) -> dict[str, float]:
    """Return the share of the letters of texts in each script, the commonest script first."""
    scripts = Counter[str]()
    for character, count in Counter("".join(texts)).items():
        if character.isalpha():
            scripts[script_of(character)] += count
    return {script: count / scripts.total() for script, count in scripts.most_common()}


def warning_lines(langs: tuple[str, ...], records: Sequence[Sequence[str]]) -> list[str]:
    """Return a line about each suspicious property of the records' texts. records: the texts of each record, of which
    there is one in each language."""
    lines, foreign = [], []
    sides = [list(side) for side in zip(*records, strict=True)]
    shares = [script_shares(texts) for texts in sides]
    for lang, texts, scripts in zip(langs, sides, shares, strict=True):
        expected = scripts_of(lang)
        if expected and scripts and sum(scripts.get(script, 0) for script in expected) < IN_SCRIPT:
            most = next(iter(scripts))
            foreign.append(lang)
            lines.append(f"{lang}: {scripts[most]:.0%} of the letters are {most}; {lang} is written in "
                         f"{' or '.join(expected)}")  # fmt: skip
        repeated = 1 - len(set(texts)) / max(len(texts), 1)
        if repeated > REPEATED:
            lines.append(f"{lang}: {repeated:.0%} of the texts repeat an earlier one; remove duplicates")
    if len(langs) == 1:
        return lines
    fits = [sum(shares[1 - side].get(script, 0) for script in scripts_of(lang)) for side, lang in enumerate(langs)]
    if foreign and min(fits) >= IN_SCRIPT:
        lines.append(f"the languages look swapped: {langs[1]} {langs[0]} would fit the scripts")
    same = sum(first == second for first, second in records) / max(len(records), 1)
    if same > SAME:
        lines.append(f"{same:.0%} of the pairs have the same text on both sides; are these translations?")
    if len(records) >= FEWEST:
        lengths = np.log([[len(text) for text in record] for record in records])
        if lengths.std(axis=0).min() > 0 and np.corrcoef(lengths.T)[0, 1] < CORRELATION:
            lines.append(f"long texts in {langs[0]} do not go with long ones in {langs[1]}: is line n of one file the "
                         f"translation of line n of the other?")  # fmt: skip
    return lines
