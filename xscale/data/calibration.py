"""Estimates of how many tokens a sample has in a row, before anything of it is read.

They are measured once, before step 1 (calibrate.py), and kept with the checkpoints. Bytes of records predict tokens
except for what a stream makes of them: special tokens, pairs left out, sequences read twice.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """The correction from byte-based token estimates to a stream's real lengths in rows."""

    ratio: float = 1.0
    """Real tokens in a row for each estimated token. Pairs that are estimated over data.max_length do not count."""
    beyond: float | None = None
    """Mean tokens in a row of a pair that is estimated to be longer, few where these are dropped. None: use `ratio`."""
    tokens: float = 0.0
    """Mean tokens of a sample in a row."""
    sequences: float = 1.0
    """Mean sequences of a sample in a row."""
    noise: float = 0.0
    """Variance of a sample's tokens in a row around their estimate, for each estimated token."""
    counted: int = 0
    """Number of row tokens by which the ratio was measured."""
    too_long: float = 0.0
    """Share of the pairs that are longer than data.max_length."""
    counts: dict[str, int] = field(default_factory=dict)
    """Sum of StreamBatch.targets over the samples that were read."""

    def row_tokens(self, estimated_tokens: np.ndarray, max_length: float) -> np.ndarray:
        """Estimated tokens of each sample in a row: whole numbers, which add up alike on all machines [samples]."""
        tokens = estimated_tokens * self.ratio
        if self.beyond is not None:
            tokens = np.where(estimated_tokens > max_length, self.beyond, tokens)
        return np.rint(tokens).astype(np.int64)

    def variance(self, tokens: np.ndarray) -> np.ndarray:
        """Variance of sums of so many estimated tokens: that of the samples and that of the ratio itself."""
        return self.noise * tokens * (1 + tokens / max(self.counted, 1))


@dataclass(frozen=True)
class Calibration:
    """The estimates of a run. All ranks have the same, also after a resume, because row assignment depends on them."""

    lines: list[tuple[float, float]]
    """(a, b) of each source: its records are estimated at a * bytes + b tokens."""
    streams: dict[str, Estimate]
    phases: list[dict[str, Estimate]] = field(default_factory=list)
    """The streams' estimates in each phase of the run."""

    def of_phases(self) -> list["Calibration"]:
        """The calibration of each phase."""
        return [Calibration(self.lines, streams) for streams in self.phases]

    def estimate_for(self, stream: str) -> Estimate:
        """The stream's estimate, or the identity for a stream that has none."""
        return self.streams.get(stream) or Estimate()

    def estimated_tokens(self, source: int, length: np.ndarray) -> np.ndarray:
        """Estimated tokens of each record of a source, from its bytes [n_records]."""
        a, b = self.lines[source]
        return np.maximum(a * length + b, 1.0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any], sources: int, streams: list[str]) -> "Calibration":
        """The inverse of `to_dict`. Raises ValueError, KeyError or TypeError if sources or streams are others."""
        found, *phases = (
            {name: Estimate(**fields) for name, fields in of_phase.items()}
            for of_phase in (tree["streams"], *tree.get("phases", []))
        )
        lines = [(a, b) for a, b in tree["lines"]]
        if len(lines) != sources or set(found) != set(streams):
            raise ValueError(f"it has {len(lines)} sources and streams {', '.join(found)}")
        wrong = [f"streams.{n}.ratio = {e.ratio}" for n, e in found.items() if not 0 < e.ratio < math.inf]
        if wrong:
            raise ValueError(wrong[0])
        return cls(lines, found, phases)
