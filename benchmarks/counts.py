"""Count the operators of an optimizer step, with and without DeepSpeed.

    python benchmarks/counts.py [--data DIR ...]

The operators that compute something (no views, no allocations) in a whole step, forward and backward, as torch's
dispatch mode counts them. One rank trains a model of 12 layers of tiny widths, with attention as one operator, as on a
GPU, in packed rows of 16,384 tokens. `no DeepSpeed`: the passes alone, which neither reduce nor apply
gradients. The exit code is 1 if a goal is missed.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import ALONE, ROOT, free_port, make_run, print_table, text_pairs, write_world
from torch.utils._python_dispatch import TorchDispatchMode

from xscale import ranks
from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import initial_state
from xscale.models import build, flat
from xscale.run.resolve import encoder_of_run
from xscale.step import engine
from xscale.step.ds_config import Hardware, load_ds_config
from xscale.step.module import StepModule
from xscale.step.step import optimizer_step, run_row, shared_states, step_weights

SHAPE = {"num_hidden_layers": 12, "hidden_size": 48, "num_attention_heads": 12, "intermediate_size": 96}
RECIPES = {"mixed": {"streams.ppa.prefill": "false"}, "tlm": {"streams.tlm.samples": 256}}
MOST = {"mixed": 1500, "tlm": 700}
"""The goals: the most operators of a step without DeepSpeed."""
ENGINES = {"ZeRO-1": (1, "fp32"), "ZeRO-2": (2, "fp32"), "ZeRO-2, bf16": (2, "bf16")}
WARM = 2


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if computes(operator):
            self.calls[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


@contextmanager
def operator_counter() -> Iterator[Counter[str]]:
    """In `with operator_counter() as counts`, `counts` has the number of calls of each operator that computes."""
    with _Counting() as mode:
        yield mode.calls


def computes(operator: Any) -> bool:
    """True unless an operator is a view, an allocation, a collective, or only lets the host read a number."""
    others = ("empty", "new_empty", "_unsafe_view", "_local_scalar", "is_", "set_", "resize_", "record_")
    space, name = operator.name().split("::")
    if space in ("c10d", "prim", "profiler") or name.startswith(others):
        return False
    returns = [value.alias_info for value in operator._schema.returns]
    return not any(alias is not None and not alias.is_write for alias in returns)


class OneOperator(torch.autograd.Function):
    """Attention as one operator: it returns a copy of the values."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor) -> torch.Tensor:
        return qkv.chunk(3, 1)[2].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clone().repeat(1, 3)


def batches_of(loader: Loader) -> Iterator[StepBatch]:
    return loader.batches(ALONE, "cpu", initial_state(loader.streams), WARM + 1)


def without_engine(loader: Loader) -> int:
    module = StepModule(encoder_of_run(loader.recipe, loader.corpus), loader.recipe)
    for batch in batches_of(loader):
        module.zero_grad()
        with operator_counter() as counts:
            weights = step_weights(loader.recipe, batch.targets(), batch.step)
            rows = [row.to(torch.device("cpu")) for row in batch.rows]
            seeds = [(batch.step, number) for number in range(len(rows))]
            for row, shared, seed in zip(rows, shared_states(module, rows, seeds), seeds, strict=True):
                loss, _ = run_row(module, row, shared, weights, seed)
                loss.backward()
            for auxiliary_state in module.auxiliary_states.values():
                auxiliary_state.update(True)
    return counts.total()


def with_engine(loader: Loader, stage: int, folder: Path) -> int:
    fields = json.loads((ROOT / "ds_configs/zero2_cpu.json").read_text(encoding="utf-8"))
    fields["zero_optimization"] |= {"stage": stage}
    path = folder / f"{stage}.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    resolved = load_ds_config(path, loader.recipe, ALONE.world, Hardware.here()).resolved
    its_engine = engine.build_engine(StepModule(encoder_of_run(loader.recipe, loader.corpus), loader.recipe), resolved)
    for batch in batches_of(loader):
        with operator_counter() as counts:
            place = {"step": batch.step, "rank": ALONE.rank, "world": ALONE.world}
            optimizer_step(its_engine, loader.recipe, batch.rows, batch.targets(), **place)
    return counts.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", help="directories of shards (default: of the demo world)")
    args = parser.parse_args()
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    build.PRESETS["tiny"] = SHAPE
    flat.attention = lambda qkv, *others, **options: OneOperator.apply(qkv)
    rows = []
    missed = []
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        data = args.data or write_world([*islice(text_pairs(None), 4000)], 8000, Path(folder) / "world")
        ranks.join_process_group(ranks.read_launcher())
        for recipe, fields in RECIPES.items():
            common = {"model.preset": "tiny", "data.workers": 0, "data.overlong": "truncate", "train.steps": 100}
            common |= {"train.max_tokens": 16384, **fields}
            alone = without_engine(make_run(recipe, common, data))
            cells = [f"{alone:,}", f"{MOST[recipe]:,}"]
            for stage, precision in ENGINES.values():
                loader = make_run(recipe, common | {"train.precision": precision}, data)
                cells.append(f"{with_engine(loader, stage, Path(folder)):,}")
            rows.append([recipe, *cells])
            if alone > MOST[recipe]:
                missed.append(f"{recipe}: {alone:,} operators, {MOST[recipe]:,} at most")
        torch.distributed.destroy_process_group()
    print_table("Operators of a step", ["", "no DeepSpeed", "at most", *ENGINES], rows)
    sys.exit(f"goals missed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
