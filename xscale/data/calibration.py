"""Estimates the number of tokens that a sample adds to a packed row, before the sample's text is read.

The number of bytes of a record predicts the number of tokens of its text, but not special tokens, dropped pairs, and
sequences that a stream uses twice. So the statistics of each stream are measured, too. All statistics are measured once
before step 1 (calibrate.py), and saved in checkpoints.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from xscale.recipe import Schedule


@dataclass(frozen=True)
class Correction:
    """The statistics of a stream. They correct the estimates from bytes to the tokens in packed rows."""

    ratio: float = 1.0
    """The number of tokens in packed rows, divided by the number of estimated tokens. It is measured on samples whose
    estimate is at most data.max_length."""
    beyond: float | None = None
    """The mean number of tokens that a pair whose estimate exceeds data.max_length has in packed rows; 0 for a pair
    that is left out. None: `ratio` applies to such pairs, too."""
    too_long: float = 0.0
    """Share of the pairs that are longer than data.max_length."""

    def tokens_in_packed_rows(self, estimated_tokens: np.ndarray, max_length: float) -> np.ndarray:
        """Return the estimated tokens of each sample in a packed row [samples]. They are whole numbers, so that sums
        are exact."""
        tokens = estimated_tokens * self.ratio
        if self.beyond is not None:
            tokens = np.where(estimated_tokens > max_length, self.beyond, tokens)
        return np.rint(tokens).astype(np.int64)


@dataclass(frozen=True)
class Calibration:
    """The statistics of all estimates. They decide which samples share a packed row. So all ranks have the same ones,
    also after a resume."""

    lines: list[tuple[float, float]]
    """(a, b) of each source: a record has about a * (number of its bytes) + b tokens."""
    streams: dict[str, Correction]
    """The statistics of each stream, by its name, after the last phase."""
    phases: list[dict[str, Correction]] = field(default_factory=list)
    """The statistics of each stream, by its name, in each phase."""

    def corrections_of_streams(self, phase_ends: tuple[int, ...]) -> Schedule[dict[str, Correction]]:
        """Return the statistics of each stream, by its name, in each step. phase_ends: the first step after
        each phase."""
        return Schedule(phase_ends, (*self.phases, self.streams))

    def estimated_tokens(self, source: int, byte_lengths: np.ndarray) -> np.ndarray:
        """Return the estimated tokens of records of a source [n_records]. source: the source's index. byte_lengths:
        bytes of each record [n_records]."""
        a, b = self.lines[source]
        return np.maximum(a * byte_lengths + b, 1.0)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> "Calibration":
        """Return the calibration that a checkpoint has. Version 0.2 also saved statistics that are ignored here."""
        return TypeAdapter(cls).validate_python(tree)
