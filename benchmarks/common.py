"""Functions that the benchmarks share: they build engines of recipes, time works in turns and print tables."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

if torch.cuda.is_available():
    import triton.testing

from data_tools import demo_corpus
from xscale import ranks
from xscale.data.calibrate import calibrate
from xscale.data.loader import Loader, StepBatch
from xscale.run.resolve import build_initial_module, resolve_run
from xscale.step import engine
from xscale.step.cost import StepFlops
from xscale.step.ds_config import Hardware, read_and_resolve_ds_config
from xscale.step.step import StepResult, optimizer_step

ROOT = Path(__file__).resolve().parent.parent
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = (torch.float16 if CUDA else torch.float32, torch.bfloat16)
"""The types in which operators are measured."""
ALONE = ranks.Process(0, 1, 0, 1)


def demo_data(out: Path, pairs: int, vocab_size: int = 0) -> list[Path]:
    """Write the demo corpus to the folder `out`. Returns the directories for --data. vocab_size: the least number of
    ids of its tokenizer, of which the last ones are unused."""
    demo_corpus.write_raw_files_and_shards(out, pairs, mono=pairs)
    path = out / "tokenizer/tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    for number in range(len(vocabulary), vocab_size):
        vocabulary[f"[unused{number}]"] = number
    path.write_text(json.dumps(content), encoding="utf-8")
    return [out / "pairs", out / "mono_en", out / "mono_xx"]


def step_fields(recipe: str, preset: str, settings: Sequence[str]) -> dict[str, object]:
    """Return the fields of a recipe whose steps are measured. settings: further ones, KEY.SUB=VALUE."""
    fields: dict[str, object] = {"model.preset": preset, "data.max_length": 128, "data.overlong": "truncate"}
    if recipe.startswith("ppa") or recipe == "mixed":
        fields["streams.ppa.prefill"] = "false"
    return fields | dict(setting.split("=", 1) for setting in settings)


def make_loader(recipe: str, fields: Mapping[str, object], data: Sequence[Path]) -> Loader:
    """Return the loader of a recipe with these fields."""
    resolved, corpus = resolve_run(recipe, [f"{name}={value}" for name, value in fields.items()], [*data])
    return Loader(resolved, corpus, calibrate(resolved, corpus, ranks.CpuGroup(alone=True)))


class RecipeEngine:
    """A recipe's model in the DeepSpeed engine of one process."""

    def __init__(self, loader: Loader, ds_config: Path):
        self.recipe = loader.recipe
        module = build_initial_module(loader.recipe, loader.corpus)
        self.formula = StepFlops(module.encoder, bool(module.streams_with_vectors()))
        config = read_and_resolve_ds_config(ds_config, loader.recipe, ALONE.world, Hardware.of_this_process())
        self.deepspeed = engine.build_engine(module, config.resolved)

    def flops(self, batch: StepBatch) -> float:
        """Return the FLOPs that the recipe's objectives need for the step."""
        return sum(self.formula.flops_by_purpose(batch.cost(), len(batch.rows)).values())

    def train(self, batch: StepBatch) -> StepResult:
        place = {"step": batch.step, "rank": ALONE.rank, "world": ALONE.world}
        return optimizer_step(self.deepspeed, self.recipe, batch.rows, batch.counts_without_languages(), **place)


def train_run(
    checkout: Path, recipe: str, ds_config: Path, data: Sequence[Path], out: Path, fields: Sequence[str]
) -> list[dict[str, Any]]:
    """Train by train.py of a checkout of xscale. Returns the lines of metrics.jsonl."""
    command = [sys.executable, checkout / "xscale/train.py", "--recipe", recipe, "--ds_config", ds_config]
    command += ["--data", *data, "--out", out, "--set", *fields]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, f"exit code {done.returncode} of train.py of {checkout}: {done.stderr[-3000:]}"
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@contextmanager
def one_rank() -> Iterator[None]:
    """Make this process the only rank of a process group."""
    ranks.join_process_group(ranks.read_launcher_and_set_environment(allow_missing_launcher=True))
    yield
    torch.distributed.destroy_process_group()


def operator_arguments(description: str | None, cpu_rounds: int) -> argparse.Namespace:
    """Return the arguments of a benchmark of an operator, prepare the process, and print its device."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    rounds = 3 if CUDA else cpu_rounds
    parser.add_argument("--rounds", type=int, default=rounds, help=f"how often each is timed (default: {rounds})")
    parser.add_argument("--threads", type=int, default=2, help="the number of threads of torch on a CPU (default: 2)")
    parser.add_argument("--small", action="store_true", help="use small inputs, only to see that the script works")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ranks.keep_freed_memory()  # as in training; page faults would dominate the times of large tensors
    print(torch.cuda.get_device_name() if CUDA else f"{args.threads} threads")
    return args


def now() -> float:
    """Wait for the device, and return the time in seconds."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(work: Callable[[], Any]) -> float:
    started = now()
    work()
    return now() - started


def in_turns(works: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each work in each round. In a round, all take turns in random order. On a GPU the
    L2 cache is cold, and the time that the host needs for the launch is hidden."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for name in works:
        works[name]()
    turns = Random(0)
    for _ in range(rounds):
        for name in turns.sample(list(works), len(works)):
            if CUDA:
                seconds[name].append(triton.testing.do_bench(works[name], return_mode="median") / 1e3)
            else:
                seconds[name].append(seconds_of(works[name]))
    return seconds


def ratio_cells(numerators: Sequence[float], denominators: Sequence[float]) -> list[str]:
    """Return the median of the ratios over rounds, and their range in the middle 80 % of the rounds."""
    ratios = sorted(above / below for above, below in zip(numerators, denominators, strict=True))
    few = len(ratios) // 10
    return [f"{median(ratios):.2f}", f"{ratios[few]:.2f}-{ratios[-1 - few]:.2f}"]


def print_comparison(title: str, header: list[str], times: dict[str, list[float]], cells: dict[str, list[str]]) -> None:
    """Print the ms of each work, and how many times those of the first one, beside `cells` of its own. times: the
    seconds of each round."""
    first = next(iter(times.values()))
    rows = []
    for name, seconds in times.items():
        rows.append([name, f"{1e3 * median(seconds):,.3f}", *ratio_cells(seconds, first), *cells[name]])
    print_table(title, ["", "ms", "of ours", "middle 80 %", *header], rows)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with its first column aligned left, and the others aligned right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        print("  " + "  ".join(cells).rstrip(), flush=True)
