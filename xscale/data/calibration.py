"""How many tokens a sample will have, before anything of it is read: measured once, before step 1, and kept.

Bytes of records tell tokens but for what a stream makes of them: special tokens, pairs left out, sequences read twice.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """Of a stream. In a row its samples have other numbers of tokens than their texts, which the bytes promise."""

    ratio: float = 1.0
    """Tokens in a row for each that is promised, of running text, or of pairs promised data.max_length at most."""
    beyond: float | None = None
    """Tokens in a row of a pair that is promised more: few where these are dropped. None: as `ratio` says."""
    tokens: float = 0.0
    """Tokens in a row of a sample, on average."""
    sequences: float = 1.0
    """Sequences in a row of a sample, on average."""
    noise: float = 0.0
    """Variance of a sample's tokens in a row around what is estimated, for each estimated token."""
    counted: int = 0
    """Tokens in rows by which the ratio was measured."""
    too_long: float = 0.0
    """Share of its pairs that are longer than data.max_length."""
    counts: dict[str, int] = field(default_factory=dict)
    """StreamBatch.targets of what was read, summed up."""

    def of(self, estimated_tokens: np.ndarray, max_length: float) -> np.ndarray:
        """Estimated tokens in a row of each sample: whole numbers, which no machine adds up otherwise [samples]."""
        tokens = estimated_tokens * self.ratio
        if self.beyond is not None:
            tokens = np.where(estimated_tokens > max_length, self.beyond, tokens)
        return np.rint(tokens).astype(np.int64)

    def variance(self, tokens: np.ndarray) -> np.ndarray:
        """Of so many estimated tokens together: that of the samples, and of the ratio itself."""
        return self.noise * tokens * (1 + tokens / max(self.counted, 1))


@dataclass(frozen=True)
class Calibration:
    """The same on all ranks, and after every resume: how a step is cut depends on it."""

    tokens_per_byte: list[float]
    """Of each source, where there are no `lines`."""
    streams: dict[str, Estimate]
    lines: list[tuple[float, float]] = field(default_factory=list)
    """Of each source (a, b): its records are promised a * bytes + b tokens. Empty: as `tokens_per_byte` says."""

    def of(self, stream: str) -> Estimate:
        """`ppa.prefill` is read as `ppa`; what was not measured is taken as it is."""
        return self.streams.get(stream) or self.streams.get(stream.rpartition(".")[0]) or Estimate()

    def estimated_tokens(self, source: int, length: np.ndarray) -> np.ndarray:
        """Tokens of each record of a source, of its bytes [n_records]."""
        a, b = self.lines[source] if self.lines else (self.tokens_per_byte[source], 0.0)
        return np.maximum(a * length + b, 1.0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any], sources: int, streams: list[str]) -> "Calibration":
        """Raises ValueError, KeyError or TypeError where it is not of so many sources and these streams."""
        found = {name: Estimate(**fields) for name, fields in tree["streams"].items()}
        made = cls(tree["tokens_per_byte"], found, [(a, b) for a, b in tree["lines"]])
        if {len(made.tokens_per_byte), len(made.lines)} != {sources} or set(found) != set(streams):
            raise ValueError(f"of {len(made.lines)} sources and streams {', '.join(found)}")
        wrong = [f"streams.{n}.ratio = {e.ratio}" for n, e in found.items() if not 0 < e.ratio < math.inf]
        if wrong:
            raise ValueError(wrong[0])
        return made


def line(lengths: np.ndarray, tokens: np.ndarray) -> tuple[float, float]:
    """(a, b) with tokens close to a * lengths + b, and equal on average. Both [n_records]."""
    spread = lengths.var()
    slope = ((lengths - lengths.mean()) * tokens).mean() / spread if spread else 0.0
    if slope <= 0:
        slope = tokens.mean() / lengths.mean()
    slope = round(float(slope), 6)
    return slope, round(float(tokens.mean() - slope * lengths.mean()), 3)


def estimate(
    estimated_tokens: np.ndarray,
    groups: list[np.ndarray],
    lengths: list[np.ndarray],
    max_length: float,
    too_long: np.ndarray | int = 0,
) -> Estimate:
    """promised: tokens of each of many samples. groups: of those that were read, samples alike, either all of them
    promised over max_length or none. lengths: of each group's sequences in a row; too_long: how many of each group's
    samples are longer than max_length [groups]."""
    expected = np.array([estimated_tokens[group].sum() for group in groups])
    samples = np.array([len(group) for group in groups])
    tokens = np.array([of_group.sum() for of_group in lengths])
    over = expected > max_length * samples
    read, there = (
        np.bincount(over, weights=samples, minlength=2),
        np.bincount(estimated_tokens > max_length, minlength=2),
    )
    within, beyond = np.bincount(over, weights=tokens, minlength=2)
    found = Estimate(
        ratio=round(float(within / expected[~over].sum()), 4) if read[0] else 1.0,
        beyond=round(float(beyond / read[1]), 1) if read[1] else None,
        sequences=round(sum(map(len, lengths)) / len(np.concatenate(groups)), 3),
        counted=int(within),
    )
    estimated = np.where(over, samples * (found.beyond or 0.0), expected * found.ratio)
    stands_for = (there / np.maximum(read, 1))[over.astype(int)]
    noise = (stands_for * (tokens - estimated) ** 2).sum() / max((stands_for * estimated).sum(), 1.0)
    average = found.of(estimated_tokens, max_length).mean()
    share = (stands_for * too_long).sum() / len(estimated_tokens)
    return replace(
        found, noise=round(float(noise), 3), tokens=round(float(average), 2), too_long=round(float(share), 4)
    )
