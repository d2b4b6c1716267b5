"""Statistics of a source's texts that need no knowledge of the languages: duplicates, scripts and lengths.

A survey takes bounded memory. The results on duplicates and lengths do not depend on the order in which records are
added and surveys are joined: duplicates are counted among the texts whose 64-bit hash is below a limit, which is halved
whenever there are too many of them; lengths are rounded logarithms, 8 steps to a doubling.
"""

import unicodedata
from collections import Counter
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from xscale.data.scripts import scripts_of

HASHES = 1 << 16
"""The maximum number of distinct texts, for each side of a pair, whose hashes are kept."""
BATCH = 256
"""The number of records that are counted together."""
ONE_IN = 16
"""Letters are counted in all texts of the first BATCH records, and afterwards in one of this many texts."""
OCTAVE = 8
"""Lengths are rounded to this number of steps per doubling."""
DUPLICATES, SAME, IN_SCRIPT, RATIO, CORRELATION, FEWEST = 0.5, 0.1, 0.5, 8.0, 0.2, 1000
"""The bounds beyond which a result of `Survey.statistics` causes a warning. FEWEST: the number of pairs that are needed
to judge the correlation."""


class Survey:
    """Statistics of records of one language or pair of languages. `sides` is 1 or 2."""

    def __init__(self, sides: int):
        self.records = self.same = 0
        self.limits = [1 << 64] * sides
        self.seen: list[Counter[int]] = [Counter() for _ in range(sides)]
        self.letters: list[Counter[str]] = [Counter() for _ in range(sides)]
        self.ratios: Counter[int] = Counter()
        self.moments = np.zeros(
            5, dtype=object
        )  # sums of x, y, xx, yy and xy, of the rounded log lengths x and y of the two sides
        self.pending: list[tuple[str, ...]] = []

    def add(self, texts: tuple[str, ...]) -> None:
        self.pending.append(texts)
        if len(self.pending) == BATCH:
            self.flush()

    def flush(self) -> None:
        if not self.pending:
            return
        columns = list(zip(*self.pending, strict=True))
        for side, texts in enumerate(columns):
            digests = b"".join([blake2b(text.encode(), digest_size=8).digest() for text in texts])
            hashes = np.frombuffer(digests, dtype="<u8")
            limit = self.limits[side]
            self.seen[side].update((hashes[hashes < limit] if limit < 1 << 64 else hashes).tolist())
            self._forget(side)
            self.letters[side].update(Counter("".join(texts[:: ONE_IN if self.records else 1])))
        if len(columns) == 2:
            self.same += sum(a == b for a, b in self.pending)
            x, y = (_steps([len(text) for text in texts]) for texts in columns)
            self.ratios.update((y - x).tolist())
            self.moments += [int(product.sum()) for product in (x, y, x * x, y * y, x * y)]
        self.records += len(self.pending)
        self.pending = []

    def _forget(self, side: int) -> None:
        """Halve the limit of a side's hashes until at most HASHES are kept."""
        while len(self.seen[side]) > HASHES:
            self.limits[side] >>= 1
            self.seen[side] = _below(self.limits[side], self.seen[side])

    def join(self, other: "Survey") -> None:
        """Add the counts of another survey."""
        self.flush()
        other.flush()
        self.records, self.same = self.records + other.records, self.same + other.same
        self.ratios.update(other.ratios)
        self.moments += other.moments
        for side, limit in enumerate(other.limits):
            self.letters[side].update(other.letters[side])
            if limit < self.limits[side]:
                self.limits[side], self.seen[side] = limit, _below(limit, self.seen[side])
            self.seen[side].update(_below(self.limits[side], other.seen[side]))
            self._forget(side)

    def statistics(self) -> dict[str, Any]:
        """Return the statistics by name.

        duplicates: for each side, the share of texts that occurred before. scripts: for each side, the share of letters
        in each of the 5 commonest scripts. Only for pairs: same_text: share of pairs whose sides are equal;
        length_ratio: characters of the second text divided by those of the first; length_correlation: correlation of
        the logarithms of both lengths.
        """
        self.flush()
        found: dict[str, Any] = {
            "duplicates": [round(1 - len(seen) / max(seen.total(), 1), 4) for seen in self.seen],
            "scripts": [_shares(letters) for letters in self.letters],
        }
        if len(self.seen) == 1:
            return found
        steps = np.repeat(*(np.array(column) for column in zip(*sorted(self.ratios.items()), strict=True)))
        low, median, high = (2.0 ** (np.percentile(steps, [5, 50, 95]) / OCTAVE)).round(2).tolist()
        x, y, xx, yy, xy = map(int, self.moments)
        n = self.records
        variance = (n * xx - x * x) * (n * yy - y * y)
        correlation = round((n * xy - x * y) / variance**0.5, 2) if variance > 0 else None
        return found | {
            "same_text": round(self.same / n, 4),
            "length_ratio": {"p5": low, "median": median, "p95": high},
            "length_correlation": correlation,
        }


def _below(limit: int, seen: Counter[int]) -> Counter[int]:
    return Counter({text: n for text, n in seen.items() if text < limit})


def _steps(lengths: list[int]) -> np.ndarray:
    return np.rint(OCTAVE * np.log2(np.array(lengths))).astype(np.int64)


def _shares(letters: Counter[str]) -> dict[str, float]:
    scripts: Counter[str] = Counter()
    for character, n in letters.items():
        if character.isalpha():
            scripts[script_of(character)] += n
    total = scripts.total()
    in_order = sorted(scripts.items(), key=lambda entry: (-entry[1], entry[0]))
    return {script: round(n / total, 4) for script, n in in_order[:5]}


@lru_cache(maxsize=1 << 16)
def script_of(character: str) -> str:
    """Return the first word of the character's name in Unicode: LATIN, CYRILLIC, CJK, HIRAGANA, ..."""
    words = unicodedata.name(character, "OTHER").replace("-", " ").split()
    return words[1] if words[0] in ("FULLWIDTH", "HALFWIDTH") and len(words) > 1 else words[0]


def warning_lines(statistics: dict[str, Any], langs: tuple[str, ...], records: int) -> list[str]:
    """Return a line about each result of `Survey.statistics` that is beyond its bound."""
    lines, scripts = [], statistics["scripts"]
    shares = [[sum(of_side.get(s, 0) for s in scripts_of(lang)) for lang in langs] for of_side in scripts]
    foreign = False
    for side, lang in enumerate(langs):
        if scripts_of(lang) and scripts[side] and shares[side][side] < IN_SCRIPT:
            foreign = True
            most = next(iter(scripts[side]))
            lines.append(
                f"{lang}: {scripts[side][most]:.0%} of the letters are {most}, {shares[side][side]:.0%} are "
                f"{' or '.join(scripts_of(lang))}, in which {lang} is written"
            )
        if statistics["duplicates"][side] > DUPLICATES:
            lines.append(
                f"{lang}: {statistics['duplicates'][side]:.0%} of the texts repeat an earlier one; remove duplicates"
            )
    if foreign and len(langs) == 2 and all(shares[side][1 - side] >= IN_SCRIPT for side in (0, 1)):
        lines.append(f"the languages look swapped: {langs[1]} {langs[0]} would fit the scripts")
    if len(langs) == 1:
        return lines
    if statistics["same_text"] > SAME:
        lines.append(
            f"{statistics['same_text']:.0%} of the pairs have the same text on both sides; are these translations?"
        )
    ratio, correlation = statistics["length_ratio"]["median"], statistics["length_correlation"]
    if not 1 / RATIO <= ratio <= RATIO:
        lines.append(f"a text in {langs[1]} has {ratio:g} times the characters of its pair's text in {langs[0]}")
    if correlation is not None and correlation < CORRELATION and records >= FEWEST:
        lines.append(
            f"long texts in {langs[0]} do not go with long ones in {langs[1]} (correlation {correlation:g}): is line n "
            f"of one file the translation of line n of the other?"
        )
    return lines
