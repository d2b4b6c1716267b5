"""The optimizer step makes a forward and backward pass for each packed row, one reduction over ranks and one update.

Shape letters: N tokens of a row, S states that losses read, M predictions, K reported numbers, H hidden width.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from xscale import rng
from xscale.data.packed_row import Row, copy_at_once
from xscale.objectives import OBJECTIVES, HasQueue
from xscale.recipe import Recipe
from xscale.step.module import Reported, States, StepModule, Weights
from xscale.step.zero import one_reduction, take_step


@dataclass
class StepSums:
    """The sums of losses and metrics over this rank's targets in one step; on the device until metrics are read."""

    reported: list[Reported]
    values_K: Tensor
    lr: float = 0.0
    times: tuple[Any, Any] = (0.0, 0.0)
    """The begin and the end of this rank's passes, without the reduction, by `time_on`."""

    def own_s(self) -> float:
        """Return the seconds that this rank's passes took. On CUDA it waits for the device."""
        first, last = self.times
        if isinstance(first, float):
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1000

    def averages(self, totals_K: list[float], recipe: Recipe, targets: dict[tuple[str, str], int]) -> dict[str, float]:
        """Return losses and metrics by name, each divided by its targets. totals_K, targets: sums over all ranks."""
        shares: dict[str, float] = {}
        for (name, stream, term, language), value in zip(self.reported, totals_K, strict=True):
            if language or recipe.streams[stream].samples == 0:
                continue
            if name != "loss":
                shares[f"{name}/{stream}"] = value / max(targets[stream, term], 1)
                continue
            config = recipe.streams[stream]
            objective = OBJECTIVES[config.objective]
            factors = objective.terms(config.options)
            share = value / max(targets[stream, objective.divisors.get(term, term)], 1)
            shares[f"loss/{stream}"] = shares.get(f"loss/{stream}", 0.0) + factors[term] * share
            if len(factors) > 1:
                shares[f"loss/{stream}.{term}"] = share
        for stream, config in recipe.streams.items():
            for name, (part, whole) in OBJECTIVES[config.objective].ratios.items() if config.samples != 0 else ():
                shares[f"{name}/{stream}"] = targets[stream, part] / max(targets[stream, whole], 1)
        return shares

    def by_language(
        self, totals_K: list[float], recipe: Recipe, counts: dict[tuple[str, str, str], int]
    ) -> dict[str, float]:
        """Return metrics of the languages and pairs in the step: loss/mlm/en, count/mlm/en, and too_long/tlm/de-en, the
        share of pairs over data.max_length. totals_K and counts: sums over all ranks."""
        sums, found = dict(zip(self.reported, totals_K, strict=True)), dict[str, float]()
        for (stream, what, language), count in counts.items():
            if what == "too_long" and count:
                found[f"too_long/{stream}/{language}"] = count / counts[stream, "drawn", language]
            elif what != "drawn" and count:
                config = recipe.streams[stream]
                term = f".{what}" if len(OBJECTIVES[config.objective].terms(config.options)) > 1 else ""
                found[f"loss/{stream}{term}/{language}"] = sums[Reported("loss", stream, what, language)] / count
                found[f"count/{stream}{term}/{language}"] = count
        return found


Seed = tuple[str | int, ...]
"""The seed of everything random about a row."""


def run_row(module: Any, row: Row, shared: States, weights: Weights, seed: Seed) -> tuple[Tensor, Tensor]:
    """Make the forward pass of a StepModule, or of the engine around it. Returns the loss and the numbers [K].

    row: a row on the device. shared: its states that `shared_states` returns. Every pass with the same seed draws the
    same dropout masks.
    """
    weight_of_term = np.array([weights[term] for term in row.label_counts], dtype=np.float64)
    largest = float(weight_of_term.max(initial=0)) or 1.0
    weights_M = np.repeat(weight_of_term / largest, list(row.label_counts.values()))
    torch.manual_seed(rng.torch_seed("dropout", *seed))
    moved = copy_at_once({"weights": weights_M}, row.labels.device)
    return module(row, shared, weights, moved["weights"], largest)


def optimizer_step(
    engine: Any,
    recipe: Recipe,
    rows: list[Row],
    totals: dict[tuple[str, str], int],
    *,
    step: int,
    rank: int,
    world: int,
    measure: bool = False,
    vector_counts: Mapping[str, list[int]] = {},
) -> tuple[StepSums, dict[str, Tensor]]:
    """Train on the rows of one step.

    The step's loss is sum over streams of weight * sum over terms of factor * (sum over targets / targets of all
    ranks). DeepSpeed divides gradients by the number of ranks, so the weights are multiplied by it.

    totals: the targets of all ranks by (stream, term). vector_counts: stream -> number of vectors of each rank that
    enter the stream's queue. Returns this rank's sums of losses and targets and, if `measure`, the gradient norm of
    each stream.
    """
    recipe = recipe.at(step)
    engine.module.set_options(recipe)
    engine.module.encoder.set_dropout(recipe.model.dropout)
    if recipe.model.rope_theta:
        engine.module.encoder.set_rope_theta(recipe.model.rope_theta)
    weights, lr = step_weights(recipe, totals, step), set_learning_rate(engine, recipe, step)
    rows = [row.to(engine.device) for row in rows]
    seeds: list[Seed] = [(recipe.train.seed, step, number, rank) for number in range(len(rows))]
    shared = shared_states(engine.module, rows, seeds, vector_counts)
    norms = dict[str, Tensor]()
    if measure:
        norms = gradient_norms(engine, rows, shared, weights, seeds)
    undo_mean = {term: world * weight for term, weight in weights.items()}
    of_rows: list[Tensor] = []
    reported: list[Reported] = []
    first = time_on(engine.device)
    with one_reduction(engine):
        for row, states, seed in zip(rows, shared, seeds, strict=True):
            loss, reported_K = run_row(engine, row, states, undo_mean, seed)
            reported = reported or engine.module.reported
            assert engine.module.reported == reported, "an objective reports other numbers for one row than for another"
            of_rows.append(reported_K.double() if reported_K.device.type == "cpu" else reported_K)
            engine.backward(loss)
        last = time_on(engine.device)
    applied = take_step(engine)
    for auxiliary_state in engine.module.auxiliary_states.values():
        auxiliary_state.update(applied)
    return StepSums(reported, reduce(torch.add, of_rows), lr, (first, last)), norms


@torch.no_grad()
def measure_rows(
    engine: Any, recipe: Recipe, rows: list[Row], *, rank: int, note: Callable[[], None] = lambda: None
) -> StepSums:
    """Return this rank's sums over evaluation rows, without dropout and smoothing. The training state does not change.

    recipe: a recipe with the streams of the rows. All ranks must have the same number of rows. note: it is called
    before each row.
    """
    module = engine.module
    module.set_options(recipe)
    module.eval()
    try:
        nothing = {
            (name, term): 0.0
            for name, stream in recipe.streams.items()
            for term in OBJECTIVES[stream.objective].terms(stream.options)
        }
        rows = [row.to(engine.device) for row in rows]
        seeds: list[Seed] = [("eval", number, rank) for number in range(len(rows))]
        of_rows = []
        for row, states, seed in zip(rows, shared_states(module, rows, seeds), seeds, strict=True):
            note()
            _, reported_K = run_row(module, row, states, nothing, seed)
            of_rows.append(reported_K.double())
        return StepSums(module.reported, reduce(torch.add, of_rows))
    finally:
        module.train()


def time_on(device: torch.device) -> Any:
    """Return the present time in seconds, or on CUDA an event, so that the host does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def encode_auxiliary(module: StepModule, rows: list[Row], seeds: list[Seed]) -> list[States]:
    """Return each row's states of auxiliary encoders, by stream and name.

    The encoders get as many rows at a time as together have no more tokens than the largest row. A pass over few tokens
    costs a GPU's host as much as one over many.
    """
    shared: list[States] = [{} for _ in rows]
    most = max(len(row.tokens.input_ids) for row in rows)
    for group in group_rows([row.cost["auxiliary_tokens"] for row in rows], most):
        torch.manual_seed(rng.torch_seed("beside", *seeds[group[0]]))  # this string is part of the seed and must stay
        for stream in rows[0].auxiliary:
            joined = Row.concat([rows[number].auxiliary[stream] for number in group])
            arrays = [rows[number].arrays[stream] for number in group]
            on_device = joined.to(rows[0].labels.device)
            states = module.auxiliary_states[stream].encode(module.encoder, on_device, arrays)
            sizes = [rows[number].auxiliary[stream].gather.size for number in group]
            for number, states_of_row in zip(group, states.split(sizes), strict=True):
                shared[number][stream] = {"auxiliary": states_of_row}
    return shared


def group_rows(tokens: list[int], most: int) -> list[list[int]]:
    """Return groups of consecutive rows, by number, that have at most `most` tokens together; a longer row is alone.
    tokens: the number of tokens of each row, at least one."""
    groups: list[list[int]] = [[0]]
    held = tokens[0]
    for number in range(1, len(tokens)):
        held += tokens[number]
        if held > most:
            groups.append([])
            held = tokens[number]
        groups[-1].append(number)
    return groups


def shared_states(
    module: StepModule, rows: list[Row], seeds: list[Seed], vector_counts: Mapping[str, list[int]] = {}
) -> list[States]:
    """Return for each row the states of the auxiliary encoders and, for objectives that compare the samples of a whole
    step, the vectors of all rows and ranks. Also let the auxiliary states gather their vectors from all ranks.
    vector_counts: see `optimizer_step`.

    The vectors of rows have no gradient. In a row's forward pass, its own vectors are computed again with gradient
    (module.py). The sum of the rows' gradients is then the gradient of the whole step (as in GradCache, Gao et al.
    2021).
    """
    shared = encode_auxiliary(module, rows, seeds)
    for stream, auxiliary_state in module.auxiliary_states.items():
        if isinstance(auxiliary_state, HasQueue):
            auxiliary_state.gather(vector_counts.get(stream))
    if not any(objective.vectors for objective, _ in module.streams.values()):
        return shared
    vectors = list[dict[str, Tensor]]()
    for row, seed in zip(rows, seeds, strict=True):
        torch.manual_seed(rng.torch_seed("dropout", *seed))
        vectors.append(module.vectors(row))
    for stream in vectors[0]:
        vectors_of_rows = [row_vectors[stream].detach() for row_vectors in vectors]
        step_VD, start = gather_rows(torch.cat(vectors_of_rows))
        for states, row_ND in zip(shared, vectors_of_rows, strict=True):
            own_S = torch.arange(start, start + len(row_ND), device=row_ND.device)
            states[stream] = states.get(stream, {}) | {"step": step_VD, "own": own_S}
            start += len(row_ND)
    return shared


def gather_rows(mine_ND: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all ranks' matrices, in the order of ranks, and the index of this rank's first row."""
    if not dist.is_initialized():
        return mine_ND, 0
    sizes = [torch.zeros(1, dtype=torch.int64, device=mine_ND.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine_ND)], device=mine_ND.device))
    counts = torch.cat(sizes).tolist()
    room = mine_ND.new_zeros(max(counts), mine_ND.shape[1])
    room[: len(mine_ND)] = mine_ND
    everyone = [torch.empty_like(room) for _ in counts]
    dist.all_gather(everyone, room)
    parts = [rows[:count] for rows, count in zip(everyone, counts, strict=True)]
    return torch.cat(parts), sum(counts[: dist.get_rank()])


def targets_of(totals: dict[tuple[str, str], int], stream: str, recipe: Recipe, term: str) -> int:
    """Return the count over the whole step by which a term's sum is divided, at least 1."""
    objective = recipe.streams[stream].objective
    counted = OBJECTIVES[objective].divisors.get(term, term)
    if (stream, counted) not in totals:
        there = ", ".join(name for of, name in totals if of == stream)
        raise ValueError(
            f"streams.{stream}, objective {objective}: collate's target_counts have {there}, but not {counted}"
        )
    return max(totals[stream, counted], 1)


def step_weights(recipe: Recipe, totals: dict[tuple[str, str], int], step: int) -> Weights:
    """Return the factor of each term's sum over targets in the loss of the step."""
    return {
        (name, term): recipe.stream_weight(name, step) * factor / targets_of(totals, name, recipe, term)
        for name, stream in recipe.streams.items()
        for term, factor in OBJECTIVES[stream.objective].terms(stream.options).items()
    }


def set_learning_rate(engine: Any, recipe: Recipe, step: int) -> float:
    """Set the recipe's learning rate of a step, unless the ds_config has a scheduler. Returns the rate."""
    for group in engine.optimizer.param_groups if engine.lr_scheduler is None else ():
        group["lr"] = recipe.train.learning_rate(step)
    return float(engine.get_lr()[0])


def gradient_norms(
    engine: Any, rows: list[Row], shared: list[States], weights: Weights, seeds: list[Seed]
) -> dict[str, Tensor]:
    """Return the L2 norm of each stream's part of the gradient, before clipping, by metric name. In the passes that
    measure a stream, the other streams' weights are 0."""
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
    norms = {}
    for stream in engine.module.streams:
        alone = {key: weight if key[0] == stream else 0.0 for key, weight in weights.items()}
        total = torch.zeros(sum(p.numel() for p in parameters), device=engine.device)
        for row, states, seed in zip(rows, shared, seeds, strict=True):
            loss, _ = run_row(engine.module, row, states, alone, seed)
            gradients = torch.autograd.grad(loss * scale, parameters, materialize_grads=True)
            total += torch.cat([gradient.flatten() for gradient in gradients])
            del gradients
        dist.all_reduce(total)
        norms[f"grad_norm/{stream}"] = torch.linalg.vector_norm(total, dtype=torch.float64) / scale
    return norms
