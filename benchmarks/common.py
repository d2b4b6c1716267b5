"""Functions that the benchmarks share: they build engines of recipes, time works in turns and print tables."""

import argparse
import os
import socket
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
from xscale.run.resolve import module_of_run, resolve_run
from xscale.step import engine
from xscale.step.cost import StepFlops
from xscale.step.ds_config import Hardware, load_ds_config
from xscale.step.step import StepResult, optimizer_step

ROOT = Path(__file__).resolve().parent.parent
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ALONE = ranks.Process(0, 1, 0, 1)
STEADY_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
"""glibc's malloc keeps freed memory. By default it returns large tensors to the system; new ones cost page faults."""


def demo_data(out: Path, pairs: int) -> list[Path]:
    """Write the demo corpus to the folder `out`. Returns the directories for --data."""
    demo_corpus.build(out, pairs, mono=pairs)
    return [out / "pairs", out / "mono_en", out / "mono_xx"]


def run_tool(name: str, *words: object) -> None:
    """Run a tool of data_tools; if it fails, end with its message."""
    command = [sys.executable, "-m", f"data_tools.{name}", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)


# Engines


def make_loader(recipe: str, fields: Mapping[str, object], data: Sequence[Path], vocab_size: int = 0) -> Loader:
    """Return the loader of a recipe with these fields. vocab_size: the model's; 0: the tokenizer's."""
    resolved, corpus = resolve_run(recipe, [f"{name}={value}" for name, value in fields.items()], [*data])
    corpus.tokenizer.vocab_size = vocab_size or corpus.tokenizer.vocab_size
    return Loader(resolved, corpus, calibrate(resolved, corpus, ranks.HostGroup(alone=True)))


class RecipeEngine:
    """A recipe's model in the DeepSpeed engine of one process."""

    def __init__(self, loader: Loader, ds_config: Path):
        self.recipe = loader.recipe
        module = module_of_run(loader.recipe, loader.corpus)
        self.formula = StepFlops.of(module)
        config = load_ds_config(ds_config, loader.recipe, ALONE.world, Hardware.of_this_machine())
        self.deepspeed = engine.build_engine(module, config.resolved)

    def flops(self, batch: StepBatch) -> float:
        """Return the FLOPs that the recipe's objectives need for the step."""
        return sum(self.formula.flops(batch.cost()).values())

    def train(self, batch: StepBatch) -> StepResult:
        place = {"step": batch.step, "rank": ALONE.rank, "world": ALONE.world}
        return optimizer_step(self.deepspeed, self.recipe, batch.rows, batch.counts_without_languages(), **place)


@contextmanager
def one_rank() -> Iterator[None]:
    """Make this process the only rank of a process group."""
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    ranks.join_process_group(ranks.read_launcher(may_be_alone=True))
    yield
    torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def use_allocator(name: str) -> None:
    """Start this program again with the allocator's settings `name` ("steady" or "default"), unless it has them."""
    environment = {key: value for key, value in os.environ.items() if key not in STEADY_ALLOCATOR}
    if name == "steady":
        environment |= STEADY_ALLOCATOR
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


# Times and tables


def operator_arguments(description: str | None, cpu_rounds: int) -> argparse.Namespace:
    """Return the arguments of a benchmark of an operator, prepare the process, and print its device."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default=DEVICE)
    parser.add_argument("--rounds", type=int, help=f"default: 3 on a GPU, {cpu_rounds} on a CPU")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="small inputs, which show that the script works")
    args = parser.parse_args()
    use_allocator("steady")
    torch.set_num_threads(args.threads)
    on_gpu = args.device == "cuda"
    args.rounds = args.rounds or (3 if on_gpu else cpu_rounds)
    args.dtypes = (torch.float16 if on_gpu else torch.float32, torch.bfloat16)
    print(torch.cuda.get_device_name() if on_gpu else f"{args.threads} threads")
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


def print_comparison(
    title: str, header: Sequence[str], times: Mapping[str, list[float]], cells: Mapping[str, list[str]]
) -> None:
    """Print the ms of each work, and how many times those of the first one, beside `cells` of its own. times: the
    seconds of each round."""
    first = next(iter(times.values()))
    rows = []
    for name, seconds in times.items():
        rows.append([name, f"{1e3 * median(seconds):,.3f}", *ratio_cells(seconds, first), *cells[name]])
    print_table(title, header, rows)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with its first column aligned left, and the others aligned right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        print("  " + "  ".join(cells).rstrip(), flush=True)
