"""What an objective is: four functions and a class of options.

A loss is always a sum over targets. The step divides it by the number of targets of the whole optimizer step (all
ranks, all micro-steps), so a loss does not depend on how the global batch was cut up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from xscale.data.loader import Collate
from xscale.models.encoder import Encoder


@dataclass(frozen=True)
class LossSums:
    """What one micro-batch adds to a step. Scalars on the device, never read in the hot loop."""

    terms: dict[str, Tensor]
    """Sum over the targets of each term."""
    metrics: dict[str, tuple[Tensor, str]]
    """Name -> (sum, the term by whose targets it is divided)."""


@dataclass(frozen=True)
class Objective:
    reads: Literal["mono", "pair"]
    """The kind of record a sample is made of; "mono" samples are packed to max_length."""
    options: type
    """Frozen dataclass: the objective's own fields of a stream."""
    collate: Collate
    """Runs in a worker: samples -> arrays."""
    loss: Callable[[Encoder, dict[str, Tensor], Any], LossSums]
    """Runs on the device: (encoder, arrays, options) -> sums."""
    terms: Callable[[Any], dict[str, float]]
    """options -> factor of each term in the stream's loss."""
    words: Callable[[Any], bool] = lambda options: False
    """options -> whether collate needs word numbers."""
