"""Estimates of the number of tokens that a sample adds to a packed row, made before its text is read.

The statistics behind the estimates are measured once, before step 1 (calibrate.py), and saved in the checkpoints. The
bytes of a record predict the tokens of its text. They cannot predict special tokens, dropped pairs and sequences that
are read twice.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from xscale.recipe import Schedule


@dataclass(frozen=True)
class Estimate:
    """Statistics that correct a stream's byte-based token estimates to its real token counts in packed rows."""

    ratio: float = 1.0
    """Real tokens in packed rows for each estimated token. Pairs whose estimate exceeds data.max_length are left
    out."""
    beyond: float | None = None
    """Mean number of real tokens of a pair whose estimate exceeds data.max_length. None: `ratio` is used for such
    pairs, too."""
    too_long: float = 0.0
    """Share of the pairs that are longer than data.max_length."""
    counts: dict[str, int] = field(default_factory=dict)
    """Sum of StreamBatch.target_counts over the samples that the calibration has tokenised."""

    def row_tokens(self, estimated_tokens: np.ndarray, max_length: float) -> np.ndarray:
        """Return the estimated tokens of each sample in a packed row [samples]. They are whole numbers, so that sums
        are exact."""
        tokens = estimated_tokens * self.ratio
        if self.beyond is not None:
            tokens = np.where(estimated_tokens > max_length, self.beyond, tokens)
        return np.rint(tokens).astype(np.int64)


@dataclass(frozen=True)
class Calibration:
    """Estimates the number of tokens of a text from its bytes. All ranks have the same estimates, also after a resume,
    because the estimates decide which samples share a row of the batch."""

    lines: list[tuple[float, float]]
    """(a, b) of each source: the estimate of a record's tokens is a * (number of its bytes) + b."""
    streams: dict[str, Estimate]
    phases: list[dict[str, Estimate]] = field(default_factory=list)
    """The statistics of each stream, by its name, in each phase of the run."""

    def schedule(self, ends: tuple[int, ...]) -> Schedule["Calibration"]:
        """Return the calibration of each step. ends: the first step after each phase."""
        phases = [Calibration(self.lines, streams) for streams in self.phases]
        return Schedule(ends, (*phases, self))

    def estimate_for(self, stream: str) -> Estimate:
        """Return the stream's statistics; if it has none, statistics that leave the byte-based estimates as they
        are."""
        return self.streams.get(stream) or Estimate()

    def estimated_tokens(self, source: int, length: np.ndarray) -> np.ndarray:
        """Return the estimated tokens of some records of a source [n_records]. length: bytes of each record
        [n_records]."""
        a, b = self.lines[source]
        return np.maximum(a * length + b, 1.0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any], sources: int, streams: list[str]) -> "Calibration":
        """Invert `to_dict`. Raises ValueError, KeyError or TypeError if `tree` has other sources or streams."""
        estimates = list[dict[str, Estimate]]()
        for fields_of_streams in (tree["streams"], *tree["phases"]):
            estimates.append({name: Estimate(**fields) for name, fields in fields_of_streams.items()})
        lines = [(a, b) for a, b in tree["lines"]]
        if len(lines) != sources or set(estimates[0]) != set(streams):
            names = ", ".join(estimates[0])
            raise ValueError(f"it has {len(lines)} sources and streams {names}, not those of the run")
        for name, stream_estimate in estimates[0].items():
            if not 0 < stream_estimate.ratio < math.inf:
                raise ValueError(f"streams.{name}.ratio = {stream_estimate.ratio}")
        return cls(lines, estimates[0], estimates[1:])
