"""What an objective is: a few functions and a class of options.

In a worker, `collate` turns samples into the objective's piece of a row. On the device, `loss` turns the states that
the piece reads into features, of which one call of the vocabulary head for all streams makes losses, or into sums of
its own.

A loss is always a sum over targets. The step divides it by a count of the whole optimizer step (all ranks, all rows),
the term's targets or what `divisors` says, so a loss does not depend on how the global batch was cut up.

Shape letters: M predictions, H width of the head, S states.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from xscale.data.loader import Collate
from xscale.data.packed_row import Index, Tokens
from xscale.models.encoder import Encoder


class Prediction(NamedTuple):
    """Rows for the one call of the vocabulary head."""

    term: str
    """By which the piece names their labels."""
    features_MH: Tensor
    accuracy: str = "accuracy"
    """Name of the share predicted right, among the metrics."""


@dataclass(frozen=True)
class Losses:
    """What a piece adds to a step, as tensors on the device, never read in the hot loop."""

    predictions: list[Prediction] = field(default_factory=list)
    """In the order of the piece's labels."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Term -> scalar, the sum over its targets."""
    metrics: dict[str, tuple[Tensor, str]] = field(default_factory=dict)
    """Name -> (scalar, the term by whose targets it is divided)."""


class AuxiliaryState(Protocol):
    """State of a stream that no optimizer owns, such as a momentum encoder; fp32, the same on every rank."""

    def read(self, trained: Encoder, tokens: Tokens, index: Index, arrays: dict[str, Tensor]) -> Tensor:
        """What the loss gets as states["auxiliary"], of the sequences that the piece has beside; once a row, without
        gradient, where and in the type that the trained encoder computes in. index: what alignment_gather reads."""

    def update(self, applied: bool) -> None:
        """Called on all ranks after each optimizer step; `applied` is False where fp16 overflow skipped it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Scheduled(AuxiliaryState, Protocol):
    """A companion that changes in another way early in the run than late."""

    steps: int
    """Optimizer steps of the run; set when the step's module is made. No part of the state: a resume may change it."""


@runtime_checkable
class Gathering(AuxiliaryState, Protocol):
    """A companion that gathers what it has read of all ranks, once a step."""

    counts: list[int] | None
    """How many states each rank reads in the step under way; None: the companion has to ask."""

    def gather(self) -> None:
        """Called on all ranks when all rows of the step are read, before the first loss."""


@runtime_checkable
class HasQueue(AuxiliaryState, Protocol):
    """A companion that reads samples of its stream before step 1, with the initial weights."""

    prefill_samples: int
    """How many; 0: none."""

    def finish_warmup(self) -> int:
        """Called on all ranks after `read` of the rows of a global batch. Returns how many samples it has by now."""


@dataclass(frozen=True)
class Parts:
    """What a stream's loss is computed with."""

    encoder: Encoder
    heads: Any = None
    """The objective's own trainable module, where it has one."""
    auxiliary_state: Any = None


def step_loss_share(losses_V: Tensor, own_S: Tensor) -> Tensor:
    """The term of a row whose loss compares samples of the whole step: the sum over its own as value, and the gradient
    of the sum over all, since other rows' losses depend on its vectors too. losses: of every sample of the step."""
    everything = losses_V.sum()
    return losses_V[own_S].sum().detach() + (everything - everything.detach())


@dataclass(frozen=True)
class Objective:
    reads: Literal["mono", "pair"]
    """The kind of record a sample is made of; "mono" samples are packed to max_length."""
    options: type
    """Frozen dataclass: the objective's own fields of a stream."""
    collate: Collate
    """Runs in a worker: samples -> piece."""
    loss: Callable[[Parts, dict[str, Tensor], dict[str, Tensor], Any], Losses]
    """Runs on the device: (parts, states [S, H] by name, arrays, options) -> losses."""
    terms: Callable[[Any], dict[str, float]]
    """options -> factor of each term in the stream's loss."""
    divisors: dict[str, str] = field(default_factory=dict)
    """Term -> which of the piece's counts, summed over the step, divides it, where it is not its own targets."""
    ratios: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Metrics that are one of a piece's counts divided by another."""
    words: Callable[[Any], bool] = lambda options: False
    """options -> whether collate needs the words of the texts (data/words.py)."""
    needs: Literal["", "lexicon", "links"] = ""
    """What must be there before step 1."""
    heads: Callable[[Encoder, Any], nn.Module | None] | None = None
    """(encoder, options) -> the objective's own trainable module, where these options need one."""
    auxiliary_state: Callable[[Encoder, Any, Any], AuxiliaryState | None] | None = None
    """(encoder, heads, options) -> state beside the optimizer, made from the initial weights, where needed."""
    vectors: Callable[[Parts, dict[str, Tensor], dict[str, Tensor], Any], Tensor] | None = None
    """Called like `loss`: vectors [n, D] of the row's samples, which the losses of all rows of the step read. The loss
    gets states["step"] [V, D], those of the whole step, in which the row's own have a gradient, and states["own"] [n],
    the places of these. It costs a second forward pass. See `step_loss_share`."""
    check: Callable[[Any, int], str | None] = lambda options, samples: None
    """(options, samples of a step) -> what is wrong with the two together, with the remedy."""
    advise: Callable[[Any, int, int], list[str]] = lambda options, records, steps: []
    """(options, records that the stream draws from, steps of the run) -> what had better be otherwise."""
    shortfall: Callable[[Any, dict[str, int]], list[str]] = lambda options, counts: []
    """(options, counts of some of the stream's pieces) -> what the data do not give."""
