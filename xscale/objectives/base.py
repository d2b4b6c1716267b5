"""The interface of an objective: a few functions and a class of options.

In a worker, `collate` turns samples into the stream's batch for one packed row. On the device, `loss` gets the hidden
states that the batch asks for. It returns features for the vocabulary head, which is called once for all streams, or
sums that it has computed itself.

A loss is always a sum over targets. The step divides it by a count over the whole optimizer step (all ranks, all rows):
the number of the term's targets, or the count that `divisors` names. So the loss does not depend on how the global
batch is divided.

Shape letters: M predictions, T targets of a term, S states, H hidden width, E width of the vocabulary head's input,
n samples of a row, V samples of the step, D width of a vector.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from xscale.data.packed_row import Row
from xscale.data.sequences import Example
from xscale.data.stream_batch import CollateContext, StreamBatch
from xscale.models.encoder import Encoder


class Prediction(NamedTuple):
    """The predictions of one loss term. The vocabulary head is called once for all terms of the row."""

    term: str
    """The loss term. The stream batch has its labels by this name."""
    features_ME: Tensor
    """The output of `Encoder.features` for each prediction, in the order of the term's labels."""
    accuracy: str = "accuracy"
    """Name of the metric that reports the share of correct predictions."""


@dataclass(frozen=True)
class Losses:
    """A stream's losses and metrics in one row: tensors on the device, so that the host need not wait."""

    predictions: list[Prediction] = field(default_factory=list)
    """Predictions in the order of the stream batch's labels."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Loss term -> scalar, the sum over its targets."""
    metrics: dict[str, tuple[Tensor, str]] = field(default_factory=dict)
    """Metric -> (value, name of a count). The value has a number for each target [T], or is the sum of these numbers.
    The sum over the step is divided by the count: the number of targets of a term, or another count of
    StreamBatch.target_counts. A metric with a number for each target of a term is also reported by language, if the
    stream batch has group_of_target for this term."""


class AuxiliaryState(Protocol):
    """A stream's state that no optimizer updates, such as a momentum encoder. It is in fp32 and the same on every
    rank."""

    def encode(self, trained: Encoder, row: Row, arrays: list[dict[str, Tensor]]) -> Tensor:
        """Return the states that the loss gets as states["auxiliary"], one for each state that `row` gathers. They have
        no gradient.

        The computation is on the device and in the data type of `trained`. row: the auxiliary rows
        (StreamBatch.auxiliary) of one or more packed rows of a step, concatenated. arrays: the arrays of each of these
        packed rows.
        """

    def update(self, weights_changed: bool) -> None:
        """Update the state; by default, it stays as it is. All ranks call it after each optimizer step.
        weights_changed: False if the step was skipped, for example because its gradient was not finite."""
        return

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class HasQueue(AuxiliaryState, Protocol):
    """An auxiliary state with a queue of vectors of earlier steps. All ranks exchange their new vectors once a step.

    The queue is filled before step 1, with vectors of the initial weights. This is the prefill.
    """

    steps: int
    """Number of optimizer steps of the run, which StepModule sets. It is not saved, because a resume may change it."""
    prefill_samples: int
    """The number of vectors with which the prefill fills the queue, one for each sample; 0 if there is no prefill."""

    def gather_new_vectors(self, vector_counts_of_ranks: list[int] | None) -> None:
        """Exchange the vectors. All ranks call it after `encode` of the last row of a step, before the first loss.
        vector_counts_of_ranks: the number of vectors that each rank has computed; None: the ranks must first exchange
        these numbers."""

    def enqueue_new_vectors(self) -> int:
        """Add the computed vectors to the queue. During the prefill, every rank calls this once per global batch, after
        `encode` of all its rows. Returns the number of vectors in the queue."""


@dataclass(frozen=True)
class Parts:
    """The parts of the model that an objective's functions get."""

    encoder: Encoder
    heads: Any = None
    """The result of the objective's function `heads`: its own trainable module, or None."""
    auxiliary_state: Any = None
    """The result of the objective's function `auxiliary_state`, or None."""


def step_loss_share(losses_V: Tensor, own_n: Tensor) -> Tensor:
    """Return a packed row's part of a loss that compares all samples of the step, for objectives with a function
    `vectors` (see Objective below).

    Its value is the sum of the losses of the row's own samples. Its gradient is that of the sum of all samples'
    losses with respect to this row's vectors; the other rows' vectors have no gradient. So the gradients of all rows
    add up to the gradient of the step. losses_V: the loss of each sample of the step; own_n: the indices of the row's
    samples in the step.
    """
    own = losses_V[own_n].sum().detach()
    everything = losses_V.sum()
    gradient_of_everything = everything - everything.detach()  # its value is 0
    return own + gradient_of_everything


@dataclass(frozen=True)
class Objective:
    """An objective: its functions, the class of its options, and the data that it needs. The fields without a default
    are required."""

    record_kind: Literal["mono", "pair"]
    """The kind of records that a sample consists of. A sample of "pair" is one sentence pair. A sample of "mono" is
    sentences with about data.max_length tokens together."""
    options: type
    """Frozen dataclass of the objective's own fields of a stream. Its class variable `in_phases` names the fields that
    a phase may change. Only collate, loss and terms may read these fields, and `terms` must return the same keys
    whatever their values are."""
    collate: Callable[[list[list[Example]], Any, CollateContext], StreamBatch]
    """(samples, options, context) -> stream batch. It runs in a worker. A sample is a list of examples: one pair, or
    one or more sentences."""
    loss: Callable[[Parts, dict[str, Tensor], dict[str, Tensor], Any], Losses]
    """(parts, states [S, H] by name, arrays, options) -> losses. It runs on the device."""
    terms: Callable[[Any], dict[str, float]]
    """options -> {loss term: its weight in the stream's loss}."""
    divisors: dict[str, str] = field(default_factory=dict)
    """Loss term -> the name of a count (StreamBatch.target_counts). The term's sum is divided by this count over the
    step, and not by the term's number of targets. AlignLM, for example, has {"bi": "mono"}. The losses by language are
    still divided by the number of targets."""
    ratios: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Metric -> the names of two counts (StreamBatch.target_counts). The metric is the first count over the step,
    divided by the second. It is not reported by language."""
    words: Callable[[Any], bool] = lambda options: False
    """options -> True if collate needs the words of the texts (data/words.py)."""
    needs: Literal["", "lexicon", "links"] = ""
    """The data that the objective needs besides text. A run checks them before step 1."""
    heads: Callable[[Encoder, Any], nn.Module | None] = lambda encoder, options: None
    """(encoder, options) -> the objective's own trainable module; None if these options need none."""
    auxiliary_state: Callable[[Encoder, Any, Any], AuxiliaryState | None] = lambda encoder, heads, options: None
    """(encoder, heads, options) -> the auxiliary state, with the initial weights; None if these options need none."""
    vectors: Callable[[Parts, dict[str, Tensor], dict[str, Tensor], Any], Tensor] | None = None
    """(parts, states, arrays, options) -> vectors [n, D] of the row's samples. The losses of all rows of the step read
    them.

    The loss then gets states["step"] [V, D], the vectors of the whole step, and states["own"] [n], the indices of the
    row's own vectors in it. Only the row's own vectors have a gradient. This costs a second forward pass, unless the
    step has only one row on one rank. See `step_loss_share` above.
    """
    check: Callable[[Any, int], str | None] = lambda options, samples: None
    """(options, number of samples of a step) -> an error message with the remedy; None if the options are valid for
    this number."""
    advise: Callable[[Any, int, int], list[str]] = lambda options, records, steps: []
    """(options, number of records that the stream reads, steps of the run) -> warnings."""
