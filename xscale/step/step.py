"""The optimizer step makes a forward and backward pass for each packed row, one reduction over ranks and one update.

Shape letters: M predictions, n samples of a row, V samples of the step, D width of a vector.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from xscale import rng
from xscale.data.packed_row import Row, copy_to_device
from xscale.metric_keys import Counts, MetricKey, count_key, loss_key
from xscale.objectives import OBJECTIVES, HasQueue
from xscale.ops.rank_rows import all_gather_rows, is_only_rank
from xscale.recipe import Recipe
from xscale.step.module import States, StepModule, Sums, Weights, encoder_states_by_stream
from xscale.step.zero import one_reduction, update_weights_if_finite


@dataclass(frozen=True)
class StepResult:
    """The numbers of a step for its metrics. The tensors are on the device."""

    sums: Sums
    """The sums over this rank's rows."""
    gradient_norms: dict[str, Tensor]
    """The norm of each stream's gradient by metric name, if they were measured."""
    lr: float
    """The learning rate of the encoder."""
    begin: Any
    """The time at which this rank's forward and backward passes began, by `record_device_time`."""
    end: Any
    """The time at which the passes ended, before the reduction."""

    def seconds_of_passes(self) -> float:
        """Return the seconds that this rank's passes took. On CUDA it waits for the device."""
        if isinstance(self.begin, float):
            return self.end - self.begin
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1000


Seed = tuple[str | int, ...]
"""The seed of the dropout masks in the passes of a row."""


def compute_row_loss(module: Any, row: Row, precomputed: States, weights: Weights, seed: Seed) -> tuple[Tensor, Sums]:
    """Make the forward pass of a StepModule, or of the engine around it. Returns the loss and the sums of the row.

    row: a row on the device. precomputed: the row's element of what `precompute_and_gather_states` returns. Every pass
    with the same seed draws the same dropout masks.

    The module applies `weights` only to the sums that an objective has computed itself (Losses.sums). The weight of a
    prediction is about 1 / targets, which may be below what fp16 can represent. The vocabulary head therefore gets
    prediction_weights_M = weight / largest_weight, which is at most 1, and multiplies the sum of the losses by
    `largest_weight` in fp32.
    """
    weight_of_term = np.array([weights[key] for key in row.label_counts], dtype=np.float64)
    largest_weight = float(weight_of_term.max(initial=0)) or 1.0
    prediction_weights_M = np.repeat(weight_of_term / largest_weight, list(row.label_counts.values()))
    torch.manual_seed(rng.torch_seed("dropout", *seed))
    return module(row, precomputed, weights, copy_to_device(prediction_weights_M, row.labels.device), largest_weight)


def optimizer_step(
    engine: Any,
    recipe: Recipe,
    rows: list[Row],
    counts: Counts,
    *,
    step: int,
    rank: int,
    world: int,
    measure_norms: bool = False,
    vector_counts_of_ranks: Mapping[str, list[int]] = {},
) -> StepResult:
    """Train on the rows of one step.

    The loss of the step is a sum over the terms of all streams. A term adds weight * factor * (sum over its targets on
    all ranks) / divisor: the stream's `Recipe.stream_weight`, the term's factor in `Objective.terms`, and the count
    that `divisor_of_term` returns. DeepSpeed divides gradients by the number of ranks, so the weights are multiplied
    by it.

    counts: the step's counts over all ranks (AgreedStep.counts in run/synchronizer.py). step: the number of steps done
    before this one, so the first step is 0. measure_norms: measure the gradient norm of each stream.
    vector_counts_of_ranks: stream -> number of vectors of each rank that enter the stream's queue.
    """
    recipe = recipe.at(step)
    engine.module.set_streams(recipe)
    engine.module.encoder.set_dropout_unless_none(recipe.model.dropout)
    weights = weights_of_term_sums(recipe, counts, step)
    lr = set_learning_rate_unless_scheduler(engine, recipe, step)
    rows = [row.to(engine.device) for row in rows]
    seeds: list[Seed] = [(recipe.train.seed, step, number, rank) for number in range(len(rows))]
    precomputed = precompute_and_gather_states(engine.module, rows, seeds, vector_counts_of_ranks)
    norms = dict[str, Tensor]()
    if measure_norms:
        norms = measure_gradient_norms(engine, rows, precomputed, weights, seeds)
    weights_for_mean_over_ranks = {key: world * weight for key, weight in weights.items()}
    sums_of_rows = list[Sums]()
    begin = record_device_time(engine.device)
    with one_reduction(engine):
        for row, states, seed in zip(rows, precomputed, seeds, strict=True):
            loss, sums = compute_row_loss(engine, row, states, weights_for_mean_over_ranks, seed)
            sums_of_rows.append(sums)
            engine.backward(loss)
        end = record_device_time(engine.device)
    applied = update_weights_if_finite(engine)
    for auxiliary_state in engine.module.auxiliary_states.values():
        auxiliary_state.update(applied)
    return StepResult(Sums.add_rows(sums_of_rows), norms, lr, begin, end)


@torch.no_grad()
def sum_evaluation_losses(
    engine: Any, recipe: Recipe, rows: list[Row], *, rank: int, show_progress: Callable[[], None] = lambda: None
) -> Sums:
    """Return this rank's sums over evaluation rows, without dropout, label smoothing and z loss. The weights and the
    auxiliary states do not change.

    recipe: its streams are those of the rows. All ranks must have the same number of rows. show_progress: it is called
    before each row.
    """
    module = engine.module
    module.set_streams(recipe)
    module.eval()
    try:
        weights = dict.fromkeys(loss_keys(recipe), 0.0)
        rows = [row.to(engine.device) for row in rows]
        seeds: list[Seed] = [("eval", number, rank) for number in range(len(rows))]
        sums_of_rows = list[Sums]()
        for row, states, seed in zip(rows, precompute_and_gather_states(module, rows, seeds), seeds, strict=True):
            show_progress()
            _, sums = compute_row_loss(module, row, states, weights, seed)
            sums_of_rows.append(sums)
        return Sums.add_rows(sums_of_rows)
    finally:
        module.train()


def record_device_time(device: torch.device) -> float | torch.cuda.Event:
    """Return the present time in seconds, or on CUDA an event, so that the host does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def encode_auxiliary(module: StepModule, rows: list[Row], seeds: list[Seed]) -> list[States]:
    """Return for each row what the auxiliary encoders compute for it: {stream: {"auxiliary": states}}.

    A pass over few tokens costs a GPU's host as much as a pass over many. So an auxiliary encoder reads several
    consecutive rows in one pass, if their auxiliary rows together have at most as many tokens as the largest row of
    this rank. The dropout masks of a pass depend on the seed of its first row.
    """
    states_of_rows: list[States] = [{} for _ in rows]
    max_tokens = max(len(row.tokens.input_ids) for row in rows)
    for group in group_rows_by_tokens([row.cost["auxiliary_tokens"] for row in rows], max_tokens):
        torch.manual_seed(rng.torch_seed("beside", *seeds[group[0]]))  # this string is part of the seed and must stay
        for stream in rows[0].auxiliary:
            joined = Row.concat_auxiliary_rows([rows[number].auxiliary[stream] for number in group])
            arrays = [rows[number].arrays[stream] for number in group]
            on_device = joined.to(rows[0].labels.device)
            states = module.auxiliary_states[stream].encode(module.encoder, on_device, arrays)
            sizes = [rows[number].auxiliary[stream].gather.state_count for number in group]
            for number, states_of_row in zip(group, states.split(sizes), strict=True):
                states_of_rows[number][stream] = {"auxiliary": states_of_row}
    return states_of_rows


def group_rows_by_tokens(tokens_of_rows: list[int], max_tokens: int) -> list[list[int]]:
    """Return the numbers of the rows in groups of consecutive rows that have at most max_tokens tokens together. A
    longer row is a group by itself. tokens_of_rows: of at least one row."""
    groups: list[list[int]] = [[0]]
    held = tokens_of_rows[0]
    for number in range(1, len(tokens_of_rows)):
        held += tokens_of_rows[number]
        if held > max_tokens:
            groups.append([])
            held = tokens_of_rows[number]
        groups[-1].append(number)
    return groups


def precompute_and_gather_states(
    module: StepModule, rows: list[Row], seeds: list[Seed], vector_counts_of_ranks: Mapping[str, list[int]] = {}
) -> list[States]:
    """Return the states that each row's losses read in addition to those of the row's forward pass.

    These are the states of the auxiliary encoders and, for objectives that compare the samples of a whole step, the
    vectors of all rows and ranks. If the step has only one row on all ranks, the forward pass of this row computes all
    vectors, so they are not computed here.

    The auxiliary states with a queue also gather their new vectors from all ranks. vector_counts_of_ranks: see
    `optimizer_step`.
    """
    precomputed = encode_auxiliary(module, rows, seeds)
    for stream, auxiliary_state in module.auxiliary_states.items():
        if isinstance(auxiliary_state, HasQueue):
            auxiliary_state.gather_new_vectors(vector_counts_of_ranks.get(stream))
    is_only_row = len(rows) == 1 and is_only_rank()
    if module.streams_with_vectors() and not is_only_row:
        add_gathered_vectors_of_step(precomputed, module, rows, seeds)
    return precomputed


def add_gathered_vectors_of_step(
    precomputed: list[States], module: StepModule, rows: list[Row], seeds: list[Seed]
) -> None:
    """Add the vectors of the step to the states of each row: "step" [V, D], the vectors of all rows and ranks, and
    "own" [n], the indices of the row's own vectors in it.

    These vectors have no gradient. A row's forward pass computes its own vectors again, with gradient, and puts them
    into "step" (module.py). The sum of the rows' gradients is then the gradient of the whole step (as in GradCache, Gao
    et al. 2021).
    """
    streams = module.streams_with_vectors()
    vectors = list[dict[str, Tensor]]()
    for row, seed in zip(rows, seeds, strict=True):
        torch.manual_seed(rng.torch_seed("dropout", *seed))
        # The encoder runs as in training, with gradient, so that its kernels draw the same masks.
        states = encoder_states_by_stream(module.encoder, row)
        vectors.append({stream: module.compute_vectors(stream, states[stream], row).detach() for stream in streams})
        del states
    for stream in streams:
        vectors_of_rows = [row_vectors[stream] for row_vectors in vectors]
        step_VD, start = all_gather_rows(torch.cat(vectors_of_rows))
        for row_states, row_nD in zip(precomputed, vectors_of_rows, strict=True):
            own_n = torch.arange(start, start + len(row_nD), device=row_nD.device)
            row_states[stream] = row_states.get(stream, {}) | {"step": step_VD, "own": own_n}
            start += len(row_nD)


def loss_keys(recipe: Recipe) -> list[MetricKey]:
    """Return the key of each term of each stream."""
    keys = list[MetricKey]()
    for name, stream in recipe.streams.items():
        for term in OBJECTIVES[stream.objective].terms(stream.options):
            keys.append(loss_key(name, term))
    return keys


def weights_of_term_sums(recipe: Recipe, counts: Counts, step: int) -> Weights:
    """Return the number by which each term's sum over targets is multiplied in the loss of the step."""
    weights: Weights = {}
    for key in loss_keys(recipe):
        stream = recipe.streams[key.stream]
        factor = OBJECTIVES[stream.objective].terms(stream.options)[key.term]
        weights[key] = recipe.stream_weight(key.stream, step) * factor / divisor_of_term(counts, key, recipe)
    return weights


def divisor_of_term(counts: Counts, key: MetricKey, recipe: Recipe) -> int:
    """Return the count over the whole step by which a term's sum is divided, at least 1. key: the term's `loss_key`."""
    objective = recipe.streams[key.stream].objective
    counted = OBJECTIVES[objective].divisors.get(key.term, key.term)
    count = counts.get(count_key(key.stream, counted))
    assert count is not None, (
        f"streams.{key.stream}: the function collate of the objective {objective}: the returned `target_counts` "
        f"have no key {counted!r}. Add this key"
    )
    return max(count, 1)


def set_learning_rate_unless_scheduler(engine: Any, recipe: Recipe, step: int) -> float:
    """Set the recipe's learning rates of a step, unless the ds_config has a scheduler. Returns the encoder's rate."""
    if engine.lr_scheduler is None:
        for group in engine.optimizer.param_groups:
            peak = recipe.train.head_lr if group.get("new_heads") else None
            group["lr"] = recipe.train.learning_rate(step, peak)
    return float(engine.get_lr()[0])


def measure_gradient_norms(
    engine: Any, rows: list[Row], precomputed: list[States], weights: Weights, seeds: list[Seed]
) -> dict[str, Tensor]:
    """Return the L2 norm of each stream's part of the gradient, before clipping, by metric name. In the passes that
    measure a stream, the other streams' weights are 0. The losses are multiplied by fp16's loss scale, as in training,
    so that small gradients do not become 0."""
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
    norms = dict[str, Tensor]()
    for stream in engine.module.streams:
        alone = dict.fromkeys(weights, 0.0)
        alone |= {key: weight for key, weight in weights.items() if key.stream == stream}
        total = torch.zeros(sum(p.numel() for p in parameters), device=engine.device)
        for row, states, seed in zip(rows, precomputed, seeds, strict=True):
            loss, _ = compute_row_loss(engine.module, row, states, alone, seed)
            gradients = torch.autograd.grad(loss * scale, parameters, materialize_grads=True)
            total += torch.cat([gradient.flatten() for gradient in gradients])
            del gradients
        dist.all_reduce(total)
        norms[f"grad_norm/{stream}"] = torch.linalg.vector_norm(total, dtype=torch.float64) / scale
    return norms
