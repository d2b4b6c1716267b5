"""What an objective is: four functions and a class of options.

A loss is always a sum over targets. The step divides it by the number of targets of the whole optimizer step (all
ranks, all micro-steps), so a loss does not depend on how the global batch was cut up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from xscale.data.encode import Words
from xscale.data.loader import Collate
from xscale.models.encoder import Encoder


@dataclass(frozen=True)
class LossSums:
    """What one micro-batch adds to a step. Scalars on the device, never read in the hot loop."""

    terms: dict[str, Tensor]
    """Sum over the targets of each term."""
    metrics: dict[str, tuple[Tensor, str]]
    """Name -> (sum, the term by whose targets it is divided)."""


class Companion(Protocol):
    """State of a stream that no optimizer owns, such as a momentum encoder; fp32, the same on every rank."""

    def update(self, applied: bool) -> None:
        """Called on all ranks after each optimizer step; `applied` is False where fp16 overflow skipped it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Prefilled(Companion, Protocol):
    """A companion that reads samples of its stream before step 1, with the initial weights."""

    prefill_samples: int
    """How many; 0: none."""

    def prefill(self, batch: dict[str, Tensor]) -> None:
        """One micro-batch of this rank."""

    def finish_prefill(self) -> int:
        """Called on all ranks after the micro-batches of a global batch. Returns how many samples it has by now."""


@dataclass(frozen=True)
class Parts:
    """What a stream's loss is computed with."""

    encoder: Encoder
    heads: Any = None
    """The objective's own trainable module, where it has one."""
    companion: Any = None


@dataclass(frozen=True)
class Objective:
    reads: Literal["mono", "pair"]
    """The kind of record a sample is made of; "mono" samples are packed to max_length."""
    options: type
    """Frozen dataclass: the objective's own fields of a stream."""
    collate: Collate
    """Runs in a worker: samples -> arrays."""
    loss: Callable[[Parts, dict[str, Tensor], Any], LossSums]
    """Runs on the device: (parts, arrays, options) -> sums."""
    terms: Callable[[Any], dict[str, float]]
    """options -> factor of each term in the stream's loss."""
    words: Callable[[Any], Words | None] = lambda options: None
    """options -> whose word numbers collate needs."""
    needs: Literal["", "lexicon", "links"] = ""
    """What must be there before step 1."""
    heads: Callable[[Encoder, Any], nn.Module | None] | None = None
    """(encoder, options) -> the objective's own trainable module, where these options need one."""
    companion: Callable[[Encoder, Any, Any], Companion | None] | None = None
    """(encoder, heads, options) -> state beside the optimizer, made from the initial weights, where needed."""
    check: Callable[[Any, int], str | None] = lambda options, samples: None
    """(options, samples of a step) -> what is wrong with the two together, with the remedy."""
