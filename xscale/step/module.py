"""The module that DeepSpeed wraps computes the loss of a packed row of all streams.

It makes one pass through the encoder, one gather of all states that losses read, and one call of the vocabulary head.

Shape letters: N tokens of a row, P tokens whose states are read, S states that losses read, M predictions, m those of
a term, T targets of a term, G languages and pairs, H hidden width, E width of the vocabulary head's input, K sums,
n samples of a row, V samples of the step, D width of a vector.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from xscale import rng
from xscale.data.packed_row import Row
from xscale.errors import UserError, adding_note_to_errors
from xscale.metric_keys import MetricKey, count_key, loss_key
from xscale.models.encoder import Encoder
from xscale.objectives import OBJECTIVES
from xscale.objectives.base import AuxiliaryState, HasQueue, Losses, Parts, Prediction
from xscale.ops.alignment_gather import alignment_gather
from xscale.recipe import Recipe

Weights = dict[MetricKey, float]
"""The number by which a term's sum over targets is multiplied in the loss of the step, by `loss_key`."""
States = dict[str, dict[str, Tensor]]
"""The states that losses read, by stream and name."""


@dataclass(frozen=True)
class Sums:
    """Sums of losses and metrics over targets, on the device until metrics are read."""

    keys: list[MetricKey]
    """The key of each sum. step/metrics.py divides the sums by counts: a loss by `divisor_of_term`, a metric by the
    count of the key's term."""
    values_K: Tensor

    @staticmethod
    def concatenate_as_fp64(parts: list["Sums"], device: torch.device, common_dtype: torch.dtype) -> "Sums":
        """Return the sums of all parts as one vector in fp64. common_dtype: a data type that can represent the numbers
        of each part."""
        keys = list[MetricKey]()
        values = [torch.zeros(0, dtype=common_dtype, device=device)]
        for part in parts:
            keys += part.keys
            values.append(part.values_K.to(common_dtype))
        return Sums(keys, torch.cat(values).double())

    @staticmethod
    def add_rows(rows: list["Sums"]) -> "Sums":
        """Return the sums over several rows, which have the same keys."""
        total_K = rows[0].values_K
        for row in rows[1:]:
            assert row.keys == rows[0].keys, (
                "`loss` of an objective returned different terms or metrics for two rows of the same step: "
                f"{rows[0].keys} and {row.keys}"
            )
            total_K = total_K + row.values_K
        return Sums(rows[0].keys, total_K)

    def by_key(self) -> dict[MetricKey, float]:
        """Return the sums by key. On CUDA, this waits for the device."""
        return dict(zip(self.keys, self.values_K.tolist(), strict=True))


class StepModule(nn.Module):
    """The encoder, the heads of the objectives, and the computation of a row's loss."""

    def __init__(self, encoder: Encoder, recipe: Recipe):
        super().__init__()
        self.encoder = encoder
        self.smoothing = {"label_smoothing": recipe.train.label_smoothing, "z_loss": recipe.train.z_loss}
        """The options of the vocabulary loss in training. Evaluations have no smoothing."""
        self.head_lr = recipe.train.head_lr
        """The peak learning rate of new heads, or None if they have no own rate."""
        self.heads = nn.ModuleDict()
        self.auxiliary_states: dict[str, AuxiliaryState] = {}
        """The auxiliary states of the streams, by stream. They are not submodules, because DeepSpeed must neither cast
        nor save them."""
        self.set_streams(recipe)
        for name, stream in recipe.streams.items():
            torch.manual_seed(rng.torch_seed(recipe.train.seed, "heads", name))
            objective = OBJECTIVES[stream.objective]
            with self.adding_stream_to_errors(name, "heads or auxiliary_state"):
                heads = objective.heads(encoder, stream.options)
                auxiliary_state = objective.auxiliary_state(encoder, heads, stream.options)
            if heads is not None:
                self.heads[name] = heads
            if auxiliary_state is not None:
                self.auxiliary_states[name] = auxiliary_state
                if hasattr(auxiliary_state, "prefill_samples") and not isinstance(auxiliary_state, HasQueue):
                    raise UserError(
                        f"streams.{name}: the auxiliary state of the objective {stream.objective} has prefill_samples, "
                        "but lacks gather_new_vectors or enqueue_new_vectors, the methods that fill the queue. Write "
                        "both methods"
                    )
                if hasattr(auxiliary_state, "steps"):
                    auxiliary_state.steps = recipe.train.steps
        self.train()  # from_pretrained returns a model in evaluation mode, without dropout

    def set_streams(self, recipe: Recipe) -> None:
        """Use the streams and their options from the recipe of a phase, or of an evaluation."""
        self.streams = recipe.streams

    def adding_stream_to_errors(self, stream: str, function: str) -> AbstractContextManager[None]:
        """Return a context whose errors name the stream, its objective and the objective's function."""
        objective = self.streams[stream].objective
        return adding_note_to_errors(f"streams.{stream}: the function {function} of the objective {objective}")

    def objective_parts(self, stream: str) -> Parts:
        """Return the modules that the functions of the stream's objective get."""
        heads = dict(self.heads.items())  # a ModuleDict has no `get`
        return Parts(self.encoder, heads.get(stream), self.auxiliary_states.get(stream))

    def streams_with_vectors(self) -> list[str]:
        """Return the streams whose objective compares the samples of a whole step. If there are any, the step begins
        with another forward pass of each row, which computes the vectors of these objectives. A step with one row on
        one rank has no such pass."""
        return [name for name, stream in self.streams.items() if OBJECTIVES[stream.objective].vectors]

    def auxiliary_bytes(self) -> int:
        """Return the size of the auxiliary states' tensors."""
        size = 0
        for auxiliary_state in self.auxiliary_states.values():
            for leaf in tree_leaves(auxiliary_state.state_dict()):
                if isinstance(leaf, Tensor):
                    size += leaf.nbytes
        return size

    def compute_vectors(self, stream: str, states: dict[str, Tensor], row: Row) -> Tensor:
        """Return the vectors of a row's samples, which the losses of all rows of the step read [n, D]. states: the
        row's states of the stream."""
        objective = OBJECTIVES[self.streams[stream].objective]
        assert objective.vectors
        with self.adding_stream_to_errors(stream, "vectors"):
            return objective.vectors(
                self.objective_parts(stream), states, row.arrays[stream], self.streams[stream].options
            )

    def compute_losses(self, stream: str, states: dict[str, Tensor], row: Row) -> Losses:
        """Return the losses that the stream's objective computes for a row. states: the row's states of the stream."""
        objective = OBJECTIVES[self.streams[stream].objective]
        if objective.vectors:
            states = states | insert_own_vectors(states, self.compute_vectors(stream, states, row))
        with self.adding_stream_to_errors(stream, "loss"):
            options = self.streams[stream].options
            losses = objective.loss(self.objective_parts(stream), states, row.arrays[stream], options)
            check_losses(losses, stream, row, set(objective.terms(options)))
        return losses

    def forward(
        self, row: Row, precomputed: States, weights: Weights, prediction_weights_M: Tensor, largest_weight: float
    ) -> tuple[Tensor, Sums]:
        """Return the row's loss, and its sums of losses and metrics without gradient.

        row: a row on the device. precomputed: the row's element of what `precompute_and_gather_states` in step.py
        returns. prediction_weights_M: weight of each prediction, divided by `largest_weight`; `compute_row_loss` in
        step.py explains why.
        """
        states = encoder_states_by_stream(self.encoder, row)
        predictions: list[tuple[str, Prediction]] = []
        wide = torch.promote_types(next(self.encoder.parameters()).dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=prediction_weights_M.device)
        sums = list[Sums]()
        for stream in row.state_counts:
            losses = self.compute_losses(stream, states[stream] | precomputed.get(stream, {}), row)
            for prediction in losses.predictions:
                predictions.append((stream, prediction))
            for term, value in losses.sums.items():
                weight = weights[loss_key(stream, term)]
                if weight:  # 0 in evaluations, and for streams that measure_gradient_norms leaves out
                    loss = loss + weight * value
            sums += sums_of_objective(losses, stream, row, wide)
        if predictions:
            loss_of_predictions, sums_of_predictions = self.predict_tokens(
                row, predictions, prediction_weights_M, largest_weight
            )
            loss = loss + loss_of_predictions
            sums = sums_of_predictions + sums  # metrics are reported in this order
        return loss, Sums.concatenate_as_fp64(sums, loss.device, loss.dtype)

    def predict_tokens(
        self, row: Row, predictions: list[tuple[str, Prediction]], prediction_weights_M: Tensor, largest_weight: float
    ) -> tuple[Tensor, list[Sums]]:
        """Call the vocabulary head once for all predictions of the row. It is called even if the row has no predicted
        token, because all ranks must use the head. Returns the loss, and the sums of each term's losses and correct
        predictions, with the sums of the losses by language."""
        features_ME = torch.cat([p.features_ME for _, p in predictions])
        smoothing = self.smoothing if self.training else {}
        loss, losses_M, right_M = self.encoder.vocabulary_loss(
            features_ME, row.labels, weights_M=prediction_weights_M, largest_weight=largest_weight, **smoothing
        )
        sizes = list(row.label_counts.values())
        both_2M = torch.stack([losses_M, right_M.to(losses_M.dtype)])
        sums = list[Sums]()
        for (stream, prediction), both_2m in zip(predictions, both_2M.split(sizes, dim=1), strict=True):
            key = loss_key(stream, prediction.term)
            sums.append(Sums([key, MetricKey(prediction.accuracy, stream, prediction.term)], both_2m.sum(1)))
            sums += language_sums("loss", key, both_2m[0], row)
        return loss, sums


def sums_of_objective(losses: Losses, stream: str, row: Row, sum_dtype: torch.dtype) -> list[Sums]:
    """Return the sums of the losses and metrics that an objective has computed itself. A metric with a number for each
    target is also summed by language, in the data type `sum_dtype`."""
    sums = list[Sums]()
    for term, value in losses.sums.items():
        sums.append(Sums([loss_key(stream, term)], value.detach().reshape(1)))
    for name, (value, term) in losses.metrics.items():
        if value.ndim:
            sums += language_sums(name, loss_key(stream, term), value.to(sum_dtype), row)
        sums.append(Sums([MetricKey(name, stream, term)], value.sum().reshape(1)))
    return sums


def language_sums(name: str, term: MetricKey, values_T: Tensor, row: Row) -> list[Sums]:
    """Return the sums over the targets of each language or pair, or [] if the stream batch has no group_of_target for
    the term. name: what the values are; term: the `loss_key` of the term whose targets have the values."""
    if term not in row.group_of_target:
        return []
    languages = row.language_groups[term.stream]
    sums_G = values_T.new_zeros(len(languages) + 1).index_add_(0, row.group_of_target[term], values_T)
    keys = [MetricKey(name, term.stream, term.term, language) for language in languages]
    return [Sums(keys, sums_G[:-1])]


def encoder_states_by_stream(encoder: Encoder, row: Row) -> States:
    """Return the encoder's states that losses read, by stream and name [S, H]. row: a row on the device, whose gather
    has the states in the order of row.state_counts. The encoder returns only the hidden states of row.places [P, H],
    whose indices are the gather's columns."""
    states_SH = alignment_gather(encoder(row.tokens, row.places), *row.gather, *row.transposed)
    sizes = list[int]()
    for counts in row.state_counts.values():
        sizes += counts.values()
    parts = iter(states_SH.split(sizes))
    states: States = {}
    for stream, counts in row.state_counts.items():
        states[stream] = {name: next(parts) for name in counts}
    return states


def insert_own_vectors(states: dict[str, Tensor], own_vectors_nD: Tensor) -> dict[str, Tensor]:
    """Return "step", the vectors of the whole step [V, D], and "own", the indices of the row's own vectors in it [n].
    Only the row's own vectors have a gradient. states: the row's states of the stream. They have no "step" if the step
    has only this row."""
    if "step" not in states:
        return {"step": own_vectors_nD, "own": torch.arange(len(own_vectors_nD), device=own_vectors_nD.device)}
    own_n = states["own"]
    return {"step": states["step"].index_copy(0, own_n, own_vectors_nD), "own": own_n}


def check_losses(losses: Losses, stream: str, row: Row, terms: set[str]) -> None:
    """Assert that the result of an objective, which may be another package's, fits its stream batch. terms: the terms
    that the objective lists."""
    assert isinstance(losses, Losses), (
        f"`loss` returned {type(losses).__name__}, not Losses of xscale/objectives/base.py"
    )
    labels = [(key.term, count) for key, count in row.label_counts.items() if key.stream == stream]
    predicted = [(prediction.term, len(prediction.features_ME)) for prediction in losses.predictions]
    assert predicted == labels, (
        f"`loss` returned the predictions {predicted}, but `collate` returned the labels {labels}. Both are "
        "lists of (term, number of targets), and must be equal"
    )
    for term, value in losses.sums.items():
        assert term in terms, (
            f"`loss` returned sums with {term!r}, which is not a term that the objective lists in `terms`"
        )
        assert value.numel() == 1, f"`loss` returned sums[{term!r}] of shape {list(value.shape)} instead of a scalar"
    for name, (value, term) in losses.metrics.items():
        targets = row.counts.get(count_key(stream, term))
        assert name != "loss", "`loss` returned a metric with the name loss; choose another name"
        assert targets is not None, (
            f"`loss` returned the metric {name} of the term {term!r}, but the `target_counts` that `collate` returned "
            "lack this term"
        )
        assert not value.ndim or value.shape == (targets,), (
            f"`loss` returned the metric {name} of shape {list(value.shape)}. A metric must be a scalar (the sum over "
            f"all targets), or a vector with one number for each of the {targets} targets of the term {term!r}"
        )


def parameter_names_with_head_lr(module: nn.Module) -> list[str]:
    """Return the names of the parameters with the learning rate train.head_lr, or [] if it is null or the module is not
    a StepModule."""
    if not isinstance(module, StepModule) or module.head_lr is None:
        return []
    encoder = module.encoder
    trained_before = encoder.lm.base_model if encoder.has_new_head else encoder
    # Parameters are compared by `id`, because the first name of XLM-R's tied embeddings is a name in the head.
    old = set(map(id, trained_before.parameters()))
    return [name for name, parameter in module.named_parameters() if id(parameter) not in old]
