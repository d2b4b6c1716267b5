"""Does an objective keep what training relies on?

    python -m xscale.conformance --recipe FILE.yaml [--plugin MODULE] [--data DIR] [--set KEY.SUB=VALUE]

The recipe's first step, in fp64 on a CPU without dropout: the same loss, metrics and gradient on any number of ranks
and rows; the gradient is the loss's; a row without samples of a stream has all that others have; the same records are
collated alike; companions go on from their saved state. Prints a line for each, exits with 1 where one is not kept.
"""

import argparse
import copy
import io
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from xscale.data.mixture import initial_state
from xscale.data.packed_row import PackedRow, pack_row
from xscale.data.stream_batch import StreamBatch, StreamShare
from xscale.errors import UserError
from xscale.plugins import load_plugins
from xscale.ranks import Process
from xscale.run.run_spec import RunSpec, resolve_run
from xscale.step.module import StepModule
from xscale.step.step import RowPass, StepSums, share_vectors, step_weights

CPU = torch.device("cpu")
CLOSE = 1e-9


class Step(NamedTuple):
    """The first optimizer step."""

    loss: float
    gradient: Tensor
    """Of all weights [P]."""
    metrics: dict[str, float]


def rows_of(run_spec: RunSpec, world: int, max_tokens: int) -> list[list[PackedRow]]:
    """Of the first step, by rank."""
    train = replace(run_spec.recipe.train, max_tokens=max(max_tokens, run_spec.recipe.data.max_length))
    run_spec = replace(run_spec, recipe=replace(run_spec.recipe, train=train))
    dataset, start = run_spec.dataset(run_spec.specs), initial_state(run_spec.specs)
    plans = [
        run_spec.mixture(Process(rank, world, rank, world), "cpu", run_spec.specs, start).next_step()
        for rank in range(world)
    ]
    batches = [dataset[plan] for plan in plans]
    for batch in batches:
        if not hasattr(batch, "rows"):
            raise UserError(batch.message)
    return [batch.rows for batch in batches]  # type: ignore[union-attr]


def take_step(module: StepModule, run_spec: RunSpec, ranks: list[list[PackedRow]]) -> Step:
    """All ranks' rows in this process. The companions are updated."""
    module.zero_grad()
    rows = [row for rows in ranks for row in rows]
    totals = {key: sum(row.targets[key] for row in rows) for key in rows[0].targets}
    weights = step_weights(run_spec.recipe, totals, 0)
    passes = [RowPass(module, row, CPU, (0, number)) for number, row in enumerate(rows)]
    share_vectors(module, passes)
    loss, reported = 0.0, torch.zeros(())
    for row_pass in passes:
        of_row, numbers_K = row_pass(module, weights)
        of_row.backward()
        loss, reported = loss + of_row.item(), reported + numbers_K
    for auxiliary_state in module.auxiliary_states.values():
        auxiliary_state.update(applied=True)
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in module.parameters()])
    return Step(
        loss,
        gradient,
        StepSums(module.reported, reported, lambda: 0.0).shares(reported.tolist(), run_spec.recipe, totals),
    )


def check_cuts(module: StepModule, run_spec: RunSpec) -> Iterator[str]:
    """One row, several rows, 2 and 4 ranks."""
    of_whole = copy.deepcopy(module)
    whole = take_step(of_whole, run_spec, rows_of(run_spec, 1, 1 << 30))
    norm = whole.gradient.norm()
    for world, max_tokens in ((1, 0), (2, 1 << 30), (4, 0)):
        of_cut, where = copy.deepcopy(module), f"on {world} rank(s), of short rows"
        found = take_step(of_cut, run_spec, rows_of(run_spec, world, max_tokens))
        for name, auxiliary_state in of_cut.auxiliary_states.items():
            states = tree_leaves([c.state_dict() for c in (auxiliary_state, of_whole.auxiliary_states[name])])
            pairs = zip(states[: len(states) // 2], states[len(states) // 2 :], strict=True)
            if not all(torch.allclose(torch.as_tensor(a).double(), torch.as_tensor(b).double()) for a, b in pairs):
                yield f"{where} the companion of {name} has another state than of one row"
        if abs(found.loss - whole.loss) > CLOSE * abs(whole.loss):
            yield f"{where} the loss is {found.loss!r}, in one row {whole.loss!r}"
        if (found.gradient - whole.gradient).norm() > CLOSE * norm:
            yield f"{where} the gradient differs by {(found.gradient - whole.gradient).norm() / norm:.1e} of its norm"
        for name, value in whole.metrics.items():
            if not np.isclose(found.metrics[name], value, rtol=1e-7, atol=1e-12):
                yield f"{where} {name} is {found.metrics[name]!r}, in one row {value!r}"


def check_gradient(module: StepModule, run_spec: RunSpec) -> Iterator[str]:
    """Against the difference of two losses, in a random direction."""
    ranks, step = rows_of(run_spec, 1, 1 << 30), 1e-6
    found = take_step(copy.deepcopy(module), run_spec, ranks).gradient
    direction = torch.randn(len(found), dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    losses = []
    for sign in (1, -1):
        moved = copy.deepcopy(module)
        with torch.no_grad():
            at = 0
            for p in moved.parameters():
                p.add_(sign * step * direction[at : at + p.numel()].view_as(p))
                at += p.numel()
        losses.append(take_step(moved, run_spec, ranks).loss)
    slope, expected = (losses[0] - losses[1]) / (2 * step), (found @ direction).item()
    if abs(slope - expected) > 1e-4 * found.norm().item():
        yield f"the loss changes by {slope:.6g} in a direction in which its gradient says {expected:.6g}"


def check_empty_rows(module: StepModule, run_spec: RunSpec) -> Iterator[str]:
    """What collate makes of no sample has the same fields, and adds nothing that is not finite, beside a full row."""
    dataset = run_spec.dataset(run_spec.specs)
    plan = run_spec.mixture(Process(0, 1, 0, 1), "cpu", run_spec.specs, initial_state(run_spec.specs)).next_step()
    for name in run_spec.recipe.streams:
        full, how = dataset.stream_batches(name, plan)[0], dataset.streams[name]
        empty: StreamBatch = how.collate([], how.options, dataset.context_of(name, StreamShare()))
        for field in (field for field in fields(StreamBatch) if field.name != "pairs"):  # the loader's own
            there, here = getattr(full, field.name), getattr(empty, field.name)
            if isinstance(there, dict) and there.keys() != here.keys():
                yield f"streams.{name}: without samples {field.name} has {[*here]}, with some {[*there]}"
        if full.reads.keys() != empty.reads.keys():
            continue
        rows = [
            pack_row({name: stream_batch}, run_spec.recipe.data.max_length, run_spec.tokenizer.sep_id)
            for stream_batch in (full, empty)
        ]
        one = copy.deepcopy(module)
        one.streams = {name: module.streams[name]}
        passes = [RowPass(one, row, CPU, (0, number)) for number, row in enumerate(rows)]
        share_vectors(one, passes)
        weights = dict.fromkeys(rows[1].targets, 1.0)
        passes[0](one, weights)
        reported = one.reported
        loss, _ = passes[1](one, weights)
        if one.reported != reported:
            yield f"streams.{name}: without samples it reports {one.reported}, with some {reported}"
        if not loss.isfinite():
            yield f"streams.{name}: without samples the loss is {loss.item()}"
        loss.backward()
        if not all(p.grad is None or p.grad.isfinite().all() for p in one.parameters()):
            yield f"streams.{name}: without samples a gradient is not finite"


def check_collate(module: StepModule, run_spec: RunSpec) -> Iterator[str]:
    """The same records, read twice."""
    first, second = (rows_of(run_spec, 1, 1 << 30)[0][0] for _ in range(2))
    for there, here in zip(tree_leaves(first.inputs), tree_leaves(second.inputs), strict=True):
        if not np.array_equal(there, here):
            yield "the same records were collated in two ways; draw by the records' identities (xscale/rng.py)"
            return


def check_resume(module: StepModule, run_spec: RunSpec) -> Iterator[str]:
    """A fresh module with the weights and the companions' saved state, after two steps."""
    module, ranks, file = copy.deepcopy(module), rows_of(run_spec, 1, 1 << 30), io.BytesIO()
    for _ in range(2):
        take_step(module, run_spec, ranks)
    torch.save({name: auxiliary_state.state_dict() for name, auxiliary_state in module.auxiliary_states.items()}, file)
    file.seek(0)
    fresh = run_spec.module().double()
    fresh.load_state_dict(module.state_dict())
    for name, state in torch.load(file, weights_only=True).items():
        fresh.auxiliary_states[name].load_state_dict(state)
    before, after = take_step(module, run_spec, ranks), take_step(fresh, run_spec, ranks)
    if before.loss != after.loss or not torch.equal(before.gradient, after.gradient):
        yield f"after a resume the loss is {after.loss!r}, before it {before.loss!r}"


CHECKS: dict[str, Callable[[StepModule, RunSpec], Iterator[str]]] = {
    "the same at any cut": check_cuts,
    "the gradient is the loss's": check_gradient,
    "rows without samples": check_empty_rows,
    "records are collated alike": check_collate,
    "companions resume": check_resume,
}


def problems(recipe: str, data: list[Path], sets: list[str]) -> dict[str, list[str]]:
    """What is wrong, by check. Raises UserError."""
    run_spec = resolve_run(recipe, ["model.dropout=0.0", "data.workers=0", *sets], data)
    run_spec = run_spec.calibrated()
    torch.manual_seed(0)
    module = run_spec.module().double()
    with torch.no_grad():
        for p in module.parameters():  # fresh heads may start at a point where gradients vanish
            p.add_(0.02 * torch.randn_like(p))
    return {name: _lines(check, module, run_spec) for name, check in CHECKS.items()}


def _lines(check: Callable[[StepModule, RunSpec], Iterator[str]], module: StepModule, run_spec: RunSpec) -> list[str]:
    try:
        return list(check(module, run_spec))
    except Exception as error:  # whatever the objective's own code raises
        place = traceback.extract_tb(error.__traceback__)[-1]
        return [f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, help="name of a shipped recipe, or a YAML file; few samples do")
    parser.add_argument("--plugin", nargs="+", default=[], metavar="MODULE", help="see xscale.plugins")
    parser.add_argument("--data", type=Path, nargs="+", default=[Path("data/demo")], help="shard directories")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY.SUB=VALUE", help="recipe fields")
    args = parser.parse_args()
    try:
        load_plugins(args.plugin)
        found = problems(args.recipe, args.data, args.set)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, wrong in found.items():
        print(f"{'no ' if wrong else 'yes'} {name}", *(f"      {line}" for line in wrong), sep="\n")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
