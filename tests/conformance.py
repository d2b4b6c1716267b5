"""A test helper for authors of objectives: `assert check_objective("my.yaml", ["shards"]) == []`.

It computes the first step of a recipe in fp64 on a CPU, without dropout, for several numbers of ranks and packed rows.
"""

import copy
import io
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests import launch
from tests.launch import open_run
from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import initial_state
from xscale.data.packed_row import Row, pack_row
from xscale.data.stream_batch import StreamBatch
from xscale.ranks import Process
from xscale.step.metrics import stream_metrics
from xscale.step.module import StepModule, Sums
from xscale.step.step import compute_row_loss, loss_keys, precompute_and_gather_states, weights_of_term_sums

CPU = torch.device("cpu")
TOLERANCE = 1e-9
WHOLE = 1 << 30
"""A value of train.max_tokens that is so large that a step is one packed row."""


def check_objective(recipe: str, data: Sequence[str | Path], sets: Sequence[str] = ()) -> list[str]:
    """Return a line for each rule of training that the recipe's objectives break, or []. A few samples per step
    suffice.

    The rules: loss, metrics, gradient and auxiliary states are the same for any number of ranks and rows; the gradient
    is that of the loss; packed rows without samples of a stream work like others; the same records are always collated
    in the same way; auxiliary states continue from what they saved.
    """
    sets = ["model.dropout=0.0", "data.workers=0", *sets]
    loader = open_run(recipe, sets, [Path(folder) for folder in data], measured=False)
    torch.manual_seed(0)
    module = launch.module(loader).double()
    with torch.no_grad():
        for p in module.parameters():  # fresh heads may start at a point where gradients vanish
            p.add_(0.02 * torch.randn_like(p))
    checks = (division_problems, gradient_problems, empty_row_problems, collate_problems, resume_problems)
    return [line for check in checks for line in check(module, loader)]


class FirstStep(NamedTuple):
    """The results of the first optimizer step."""

    loss: float
    gradient: Tensor
    """The gradient of all P weights, flattened [P]."""
    metrics: dict[str, float]


def first_rows(loader: Loader, world: int = 1, max_tokens: int = WHOLE) -> list[list[Row]]:
    """Return the packed rows of the first step on `world` ranks: a list for each rank."""
    train = replace(loader.recipe.train, max_tokens=max(max_tokens, loader.recipe.data.max_length))
    loader = replace(loader, recipe=replace(loader.recipe, train=train))
    dataset, start = loader.dataset(), initial_state(loader.last_streams)
    found = []
    for rank in range(world):
        mixture = loader.mixture(Process(rank, world, rank, world), "cpu", start)
        batch = dataset[mixture.next_plan_of_rank()]
        if isinstance(batch, Exception):
            raise batch
        found.append(batch.rows)
    return found


def compute_step(module: StepModule, loader: Loader, ranks: list[list[Row]]) -> FirstStep:
    """Return the results of a step. This process computes all ranks' rows, and updates the auxiliary states."""
    module.zero_grad()
    rows = [row.to(CPU) for rows in ranks for row in rows]
    totals = StepBatch(0, rows, {}).counts_without_languages()
    weights = weights_of_term_sums(loader.recipe, totals, 0)
    seeds = [(0, number) for number in range(len(rows))]
    loss, sums_of_rows = 0.0, []
    for row, shared, seed in zip(rows, precompute_and_gather_states(module, rows, seeds), seeds, strict=True):
        of_row, sums = compute_row_loss(module, row, shared, weights, seed)
        of_row.backward()
        loss += of_row.item()
        sums_of_rows.append(sums)
    for auxiliary_state in module.auxiliary_states.values():
        auxiliary_state.update(True)
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in module.parameters()])
    metrics = stream_metrics(Sums.add_rows(sums_of_rows).by_key(), totals, loader.recipe)
    return FirstStep(loss, gradient, metrics)


def auxiliary_leaves(module: StepModule) -> list[Tensor]:
    leaves = tree_leaves({name: state.state_dict() for name, state in module.auxiliary_states.items()})
    return [torch.as_tensor(leaf).double() for leaf in leaves]


def division_problems(module: StepModule, loader: Loader) -> Iterator[str]:
    """Yield a line for each result of several packed rows, also on 2 or 4 ranks, that differs from that of one row."""
    in_one = copy.deepcopy(module)
    whole = compute_step(in_one, loader, first_rows(loader))
    norm = whole.gradient.norm()
    for world, max_tokens in ((1, 0), (2, WHOLE), (4, 0)):
        cut, where = copy.deepcopy(module), f"on {world} rank(s)" + ", in short rows" * (not max_tokens)
        found = compute_step(cut, loader, first_rows(loader, world, max_tokens))
        if not all(map(torch.allclose, auxiliary_leaves(cut), auxiliary_leaves(in_one))):
            yield f"{where} the auxiliary state differs from that of one row"
        if abs(found.loss - whole.loss) > TOLERANCE * abs(whole.loss):
            yield f"{where} the loss is {found.loss!r}, in one row {whole.loss!r}"
        if (found.gradient - whole.gradient).norm() > TOLERANCE * norm:
            yield f"{where} the gradient differs by {(found.gradient - whole.gradient).norm() / norm:.1e} of its norm"
        for name, value in whole.metrics.items():
            if not np.isclose(found.metrics[name], value, rtol=1e-7, atol=1e-12):
                yield f"{where} {name} is {found.metrics[name]!r}, in one row {value!r}"


def gradient_problems(module: StepModule, loader: Loader) -> Iterator[str]:
    """Yield a line if the gradient in a random direction is not the difference quotient of the loss."""
    ranks, step = first_rows(loader), 1e-6
    found = compute_step(copy.deepcopy(module), loader, ranks).gradient
    direction = torch.randn(len(found), dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    losses = []
    for sign in (1, -1):
        moved = copy.deepcopy(module)
        weights = torch.nn.utils.parameters_to_vector(moved.parameters()).detach()
        torch.nn.utils.vector_to_parameters(weights + sign * step * direction, moved.parameters())
        losses.append(compute_step(moved, loader, ranks).loss)
    slope, expected = (losses[0] - losses[1]) / (2 * step), (found @ direction).item()
    if abs(slope - expected) > 1e-4 * found.norm().item():
        yield f"the loss changes by {slope:.6g} in a direction in which its gradient predicts {expected:.6g}"


def empty_row_problems(module: StepModule, loader: Loader) -> Iterator[str]:
    """Yield a line for each empty stream batch with other fields than a full one, or a loss or gradient that is not
    finite."""
    dataset = loader.dataset()
    plan = loader.mixture(Process(0, 1, 0, 1), "cpu", initial_state(loader.last_streams)).next_plan_of_rank()
    for stream in loader.last_streams:
        name = stream.name
        full = dataset.collate_rows(stream, plan, dataset.read_and_tokenise(stream, plan))[0]
        empty: StreamBatch = stream.objective.collate([], stream.options, dataset.stream_context(stream))
        empty = replace(empty, language_groups=stream.language_groups)  # as the loader does
        for field in (field for field in fields(StreamBatch) if field.name != "pair_counts"):  # set by the loader
            there, here = getattr(full, field.name), getattr(empty, field.name)
            if isinstance(there, dict) and there.keys() != here.keys():
                yield f"streams.{name}: without samples {field.name} has {[*here]}, with some {[*there]}"
        if full.states.keys() != empty.states.keys():
            continue
        separator = loader.corpus.tokenizer.sep_id
        rows = [pack_row({name: stream_batch}, separator).to(CPU) for stream_batch in (full, empty)]
        one = copy.deepcopy(module)
        one.streams = {name: module.streams[name]}
        shared = precompute_and_gather_states(one, rows, [(0, 0), (0, 1)])
        weights = dict.fromkeys(loss_keys(loader.recipe), 1.0)
        _, reported = compute_row_loss(one, rows[0], shared[0], weights, (0, 0))
        loss, sums = compute_row_loss(one, rows[1], shared[1], weights, (0, 1))
        if sums.keys != reported.keys:
            yield f"streams.{name}: without samples it reports {sums.keys}, with some {reported.keys}"
        loss.backward()
        if not loss.isfinite() or not all(p.grad is None or p.grad.isfinite().all() for p in one.parameters()):
            yield f"streams.{name}: without samples the loss ({loss.item()}) or its gradient is not finite"


def row_leaves(row: Row) -> list:
    """Return the arrays and numbers of a row and of its auxiliary rows."""
    return tree_leaves(vars(row) | {"auxiliary": [vars(auxiliary) for auxiliary in row.auxiliary.values()]})


def collate_problems(module: StepModule, loader: Loader) -> Iterator[str]:
    """Yield a line if the same records give other arrays when they are read again."""
    first, second = (row_leaves(first_rows(loader)[0][0]) for _ in range(2))
    if not all(map(np.array_equal, first, second)):
        yield (
            "the same records were collated in two ways; draw random numbers by xscale/rng.py, with the field "
            "random_key of an Example as the key"
        )


def resume_problems(module: StepModule, loader: Loader) -> Iterator[str]:
    """Yield a line if, after two steps, a fresh module with the saved weights and states computes another step."""
    module, ranks, file = copy.deepcopy(module), first_rows(loader), io.BytesIO()
    for _ in range(2):
        compute_step(module, loader, ranks)
    torch.save({name: auxiliary_state.state_dict() for name, auxiliary_state in module.auxiliary_states.items()}, file)
    file.seek(0)
    fresh = launch.module(loader).double()
    fresh.load_state_dict(module.state_dict())
    for name, state in torch.load(file, weights_only=True).items():
        fresh.auxiliary_states[name].load_state_dict(state)
    before, after = compute_step(module, loader, ranks), compute_step(fresh, loader, ranks)
    if before.loss != after.loss or not torch.equal(before.gradient, after.gradient):
        yield f"after a resume the loss is {after.loss!r}, before it {before.loss!r}"
