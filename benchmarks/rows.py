"""Measure packed rows of several sizes: tokens/s and MFU of whole steps, launches, host time, and how busy the GPU is.

    python benchmarks/rows.py [--preset xlmr-base --vocab_size 250002] [--rows 4096 8192 16384 32768] [--seconds 150]
    python benchmarks/rows.py --preset modern-base --vocab_size 256000 --recipe mlm --max_length 1024 --goal 216000

One process trains with the recipe's dropout, on a GPU in bf16 with ZeRO-2, on text of the demo world in documents as
long as web pages. A step has --rows_per_step packed rows, made beforehand (loader.py measures the loader). Prints
  1. for --recipe and packed rows of each size: real tokens/s, MFU by cost.StepFlops, ms of a step;
     and for one step under torch's profiler: the number of kernels launched (on a CPU, of operators that compute), the
     ms that the host worked (without waits for the GPU), and the share of the time that the GPU was busy
  2. for `mixed` in packed rows of --mixed_rows tokens: the same numbers, with the shipped samples and with as many
     samples as fill the rows, compared with the sum of its streams alone and with --recipe
--kernels N also prints the N kernels that take most of the GPU's time in each profiled step.
Sizes in --first are measured first. The script names sizes for which --seconds leaves no time. Lines that begin with
GOAL say which goals are met; a missed goal does not make the script fail.
"""

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from before import HERE, free_port
from common import print_table, text_pairs, write_world
from counts import operator_counter

from xscale import ranks
from xscale.data.loader import StepBatch
from xscale.data.mixture import StreamSpec, initial_state
from xscale.ranks import Process
from xscale.run_spec import RunSpec, resolve_run
from xscale.step import engine
from xscale.step.cost import StepFlops
from xscale.step.ds_config import Hardware, load_ds_config
from xscale.step.module import StepModule
from xscale.step.step import optimizer_step

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ALONE = Process(0, 1, 0, 1)
FILL = 0.93
"""The share of the packed rows that the samples should fill: lengths vary, and the division into rows leaves 3 %."""
WARM, STEPS = (3, 6) if CUDA else (1, 2)
HEADER = ["", "tokens/s", "MFU", "ms a step", "rows", "tokens a row", "launches", "host ms", "GPU busy"]


class Measured(NamedTuple):
    seconds: float
    """The seconds of a step."""
    tokens: float
    rows: int
    mfu: float | None
    launches: int
    host: float
    """The seconds that the host works in a step."""
    busy: float | None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def cells(self) -> list[str]:
        share = [f"{value:.1%}" if value is not None else "" for value in (self.mfu, self.busy)]
        sizes = [f"{1e3 * self.seconds:.1f}", f"{self.rows}", f"{self.tokens / self.rows:,.0f}"]
        return [
            f"{self.rate:,.0f}",
            share[0],
            *sizes,
            f"{self.launches:,}" if self.launches else "",
            f"{1e3 * self.host:.1f}",
            share[1],
        ]


class Bench:
    """An engine with a recipe's model, whose steps may have other samples and packed rows than the recipe says."""

    def __init__(self, recipe: str, data: list[Path], args: argparse.Namespace):
        self.recipe, self.data, self.args = recipe, data, args
        run_spec = self.run_spec(args.rows[0])
        encoder = run_spec.encoder()
        self.formula = StepFlops(encoder)
        config = load_ds_config(args.ds_config, run_spec.recipe, 1, Hardware.here())
        self.precision = config.precision
        module = StepModule(encoder, run_spec.recipe)
        self.engine = engine.build_engine(module, config.resolved)

    def run_spec(self, max_tokens: int) -> RunSpec:
        fields = {"model.preset": self.args.preset, "data.max_length": self.args.max_length}
        fields |= {"train.max_tokens": max_tokens, "data.workers": self.args.workers, "data.overlong": "truncate"}
        if self.recipe == "mixed":
            fields |= {"streams.ppa.prefill": "false", "streams.ppa.queue_size": 4096}
        more = self.args.set if self.recipe == self.args.recipe else []
        run_spec = resolve_run(self.recipe, [*(f"{key}={value}" for key, value in fields.items()), *more], self.data)
        run_spec.tokenizer.vocab_size = self.args.vocab_size or run_spec.tokenizer.vocab_size  # of the model
        return run_spec.calibrated()

    def filled(self, run_spec: RunSpec, max_tokens: int) -> RunSpec:
        """The run with its samples multiplied so that they fill --rows_per_step packed rows of `max_tokens` tokens."""
        mixture = run_spec.mixture(ALONE, DEVICE, run_spec.specs, initial_state(run_spec.specs))
        tokens = mixture.next_batch().tokens_of_bins().sum()
        times = self.args.rows_per_step * max_tokens * FILL / tokens
        return replace(
            run_spec, specs=[replace(spec, samples=max(1, round(times * spec.samples))) for spec in run_spec.specs]
        )

    def measure(self, run_spec: RunSpec, specs: list[StreamSpec] | None = None) -> Measured:
        """Measure steps of a run. specs: the streams that the steps have; None: all streams."""
        run_spec = replace(run_spec, specs=specs or run_spec.specs)
        made = run_spec.batches(ALONE, DEVICE, initial_state(run_spec.specs), WARM + STEPS + 1)
        *batches, last = list(made)
        self.run(run_spec, batches[:WARM])
        seconds = self.run(run_spec, batches[WARM:]) / STEPS
        launches, host, busy = self.profile(run_spec, last)
        works = [batch.work() for batch in batches[WARM:]]
        flops = sum(sum(self.formula.flops(work).values()) for work in works) / STEPS
        tokens = sum(work.tokens for work in works) / STEPS
        mfu = flops / seconds / self.formula.peak if self.formula.peak else None
        return Measured(seconds, tokens, len(last.rows), mfu, launches, host, busy)

    def run(self, run_spec: RunSpec, batches: Iterable[StepBatch]) -> float:
        streams = {spec.name: run_spec.recipe.streams[spec.name] for spec in run_spec.specs}
        recipe = replace(run_spec.recipe, streams=streams)
        synchronize()
        started = time.perf_counter()
        for batch in batches:
            totals = defaultdict(int, batch.targets())
            optimizer_step(self.engine, recipe, batch.rows, totals, step=batch.step, rank=0, world=1)
        synchronize()
        return time.perf_counter() - started

    def profile(self, run_spec: RunSpec, batch: StepBatch) -> tuple[int, float, float | None]:
        """A step's launches, the seconds that the host works, and the share of time that the GPU is busy, or None."""
        if not CUDA:
            started = time.process_time()
            with operator_counter() as found:
                self.run(run_spec, [batch])
            return sum(found.values()), time.process_time() - started, None
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            seconds = self.run(run_spec, [batch])
        if self.args.kernels:
            print_kernels(profiler.events(), self.args.kernels)
        return of_profile(profiler.events(), seconds)


def of_profile(events: Iterable[Any], seconds: float) -> tuple[int, float, float]:
    on_gpu = sorted((e.time_range.start, e.time_range.end) for e in events if "CUDA" in str(e.device_type))
    waits = sum(e.time_range.elapsed_us() for e in events if "Synchronize" in e.name and "CPU" in str(e.device_type))
    busy, reached = 0.0, float("-inf")
    for start, end in on_gpu:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    span = max(reached - on_gpu[0][0], 1e-9) if on_gpu else 1.0
    return len(on_gpu), seconds - waits / 1e6, busy / span


def print_kernels(events: Iterable[Any], count: int) -> None:
    """Print the kernels and copies that take most of the GPU's time, with their number and their ms."""
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if "CUDA" in str(event.device_type):
            times[event.name].append(event.time_range.elapsed_us() / 1e3)
    largest = sorted(times.items(), key=lambda item: -sum(item[1]))[:count]
    whole = sum(map(sum, times.values()))
    print_table(
        f"the {count} largest kernels of {whole:.1f} ms",
        ["kernel", "calls", "ms"],
        [[name[:100], str(len(each)), f"{sum(each):.2f}"] for name, each in largest],
    )


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


class Sizes:
    """Measures --recipe in packed rows of each size."""

    def __init__(self, bench: Bench, args: argparse.Namespace, deadline: float):
        self.bench, self.args, self.deadline = bench, args, deadline
        self.found: dict[int, Measured] = {}

    def measure(self, sizes: Iterable[int]) -> None:
        for size in sizes:
            if time.monotonic() < self.deadline:
                started = time.monotonic()
                run_spec = self.bench.filled(self.bench.run_spec(size), size)
                found = self.found[size] = self.bench.measure(run_spec)
                print(size, *found.cells(), f"(took {time.monotonic() - started:.0f} s)", sep="  ", flush=True)

    def print(self) -> None:
        args, goal = self.args, f"; goal: {self.args.goal:,} tokens/s" if self.args.goal else ""
        model = f"{args.preset}, vocabulary {args.vocab_size:,}, {self.bench.precision}"
        rows = [[f"{size:,}", *self.found[size].cells()] for size in sorted(self.found)]
        title = f"{args.recipe} in rows; {model}, {args.max_length} tokens a sequence{goal}"
        print_table(title, HEADER, rows)
        if late := [f"{size:,}" for size in args.rows if size not in self.found]:
            print(f"  no time left for rows of {', '.join(late)}")

    def goals(self) -> None:
        """Print whether the best measurement meets the goal: tokens/s, or MFU in rows of 16,384."""
        if goal := self.args.goal:
            rates = [found.rate for found in self.found.values()]
            tell_goal(f"{self.args.preset}, {goal:,} tokens/s", max(rates, default=None), goal, "{:,.0f}")
            return
        shares = [found.mfu for size, found in self.found.items() if size == 16384 and found.mfu is not None]
        tell_goal(f"{self.args.preset}, MFU of 40 % in rows of 16,384", max(shares, default=None), 0.4, "{:.1%}")


def tell_goal(name: str, found: float | None, least: float, form: str) -> None:
    """Print the line of a goal, which gpu.sh repeats at its end."""
    result = "not measured" if found is None else f"{'met' if found >= least else 'MISSED'}: {form.format(found)}"
    print(f"GOAL {name}: {result}", flush=True)


def mixed(bench: Bench, args: argparse.Namespace, alone: Measured | None) -> None:
    """Measure `mixed`. alone: the measurement of --recipe in packed rows of the same size."""
    shipped = bench.run_spec(args.mixed_rows)
    full = bench.filled(shipped, args.mixed_rows)
    whole = bench.measure(full)
    parts = {spec.name: bench.measure(full, [spec]) for spec in full.specs}
    table = [["mixed as shipped", *bench.measure(shipped).cells()], ["mixed", *whole.cells()]]
    table += [[f"  {name} alone", *part.cells()] for name, part in parts.items()]
    print_table(f"`mixed` in rows of {args.mixed_rows:,} tokens, and its streams alone", HEADER, table)
    total = sum(part.seconds for part in parts.values())
    print(f"  sum of its streams alone: {1e3 * total:.1f} ms, {total / whole.seconds:.2f} times mixed")
    ratio = whole.rate / alone.rate if alone else None
    tell_goal(f"mixed within 10 % of {args.recipe}, tokens/s", ratio, 0.9, "{:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="xlmr-base")
    parser.add_argument("--vocab_size", type=int, default=250_002, help="of the model; 0: the tokenizer's")
    parser.add_argument("--recipe", default="tlm", help="of the rows of several sizes")
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 8192, 16384, 32768], help="train.max_tokens")
    parser.add_argument("--first", type=int, default=16384, help="of --rows, measured before all others")
    parser.add_argument("--rows_per_step", type=int, default=4)
    parser.add_argument("--mixed_rows", type=int, default=16384, help="train.max_tokens of `mixed`; 0: without mixed")
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--ds_config", type=Path, default=HERE / f"ds_configs/zero2_{'bf16' if CUDA else 'cpu'}.json")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY.SUB=VALUE", help="fields of --recipe")
    parser.add_argument("--workers", type=int, default=4, help="loader processes")
    parser.add_argument("--seconds", type=float, default=150, help="after which no other size is begun")
    parser.add_argument("--pairs", type=int, default=20_000, help="of the demo world")
    parser.add_argument("--goal", type=int, help="tokens/s, to be printed")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="print the N largest kernels of a step")
    args = parser.parse_args()
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    deadline = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        data = write_world(
            list(islice(text_pairs(None)[1], args.pairs)), 30_000, Path(folder) / "world", documents=True
        )
        ranks.join_process_group(ranks.read_launcher())
        sizes = Sizes(Bench(args.recipe, data, args), args, deadline)
        first, *others = sorted(args.rows, key=lambda size: (size != args.first, size))
        sizes.measure([first])
        if args.mixed_rows:
            mixed(Bench("mixed", data, args), args, sizes.found.get(args.mixed_rows))
        sizes.measure(others)
        sizes.print()
        sizes.goals()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
