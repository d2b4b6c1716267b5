"""Measure packed rows of several sizes: tokens/s and MFU of whole steps, launches, host time, and how busy the GPU is.

    python benchmarks/rows.py [--preset xlmr-base --vocab_size 250002] [--rows 4096 8192 16384 32768] [--seconds 150]
    python benchmarks/rows.py --preset modern-base --vocab_size 256000 --recipe mlm --max_length 1024 --goal 216000

One process trains with the recipe's dropout, on a GPU in bf16 with ZeRO-2, on text of the demo world in documents as
long as web pages. A step has --rows_per_step packed rows, made beforehand (loader.py measures the loader). Prints
  1. for --recipe and packed rows of each size: real tokens/s, MFU by cost.StepFlops, ms of a step;
     and for one step under torch's profiler: the number of kernels launched (on a CPU, of operators that compute), the
     ms that the host worked (without waits for the GPU), and the share of the time that the GPU was busy
  2. for `mixed` in packed rows of --mixed_rows tokens: the same numbers, with the shipped samples and with as many
     samples as fill the rows, compared with --recipe
The first size of --rows is measured first; the script names sizes for which --seconds leaves no time. Lines that begin
with GOAL say which goals are met; a missed goal does not make the script fail.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from common import ALONE, CUDA, DEVICE, ROOT, free_port, make_run, now, print_table, text_pairs, write_world
from counts import operator_counter

from xscale import ranks
from xscale.data.loader import StepBatch
from xscale.data.mixture import initial_state
from xscale.run_spec import RunSpec
from xscale.step import engine
from xscale.step.cost import StepFlops
from xscale.step.ds_config import Hardware, load_ds_config
from xscale.step.module import StepModule
from xscale.step.step import optimizer_step

FILL = 0.93
"""The share of the packed rows that the samples should fill: lengths vary, and the division into rows leaves 3 %."""
WARM = 3 if CUDA else 1
STEPS = 6 if CUDA else 2
HEADER = ["", "tokens/s", "MFU", "ms a step", "rows", "tokens a row", "launches", "host ms", "GPU busy"]


@dataclass
class Profile:
    """What a step does under the profiler."""

    launches: int
    host_seconds: float
    """The seconds that the host works."""
    busy: float | None = None
    """The share of the time that the GPU is busy."""


@dataclass
class Measured:
    seconds: float
    """The seconds of a step."""
    tokens: float
    rows: int
    mfu: float | None
    profile: Profile

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def cells(self) -> list[str]:
        cells = [f"{self.rate:,.0f}", percent(self.mfu), f"{1e3 * self.seconds:.1f}", f"{self.rows}"]
        cells += [f"{self.tokens / self.rows:,.0f}", f"{self.profile.launches:,}"]
        return [*cells, f"{1e3 * self.profile.host_seconds:.1f}", percent(self.profile.busy)]


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


class Bench:
    """An engine with a recipe's model, whose steps may have other samples and packed rows than the recipe says."""

    def __init__(self, recipe: str, data: list[Path], args: argparse.Namespace):
        self.recipe = recipe
        self.data = data
        self.args = args
        run_spec = self.run_spec(args.rows[0])
        encoder = run_spec.encoder()
        self.formula = StepFlops(encoder)
        config = load_ds_config(args.ds_config, run_spec.recipe, 1, Hardware.here())
        self.precision = config.precision
        self.engine = engine.build_engine(StepModule(encoder, run_spec.recipe), config.resolved)

    def run_spec(self, max_tokens: int) -> RunSpec:
        fields: dict[str, object] = {"model.preset": self.args.preset, "data.max_length": self.args.max_length}
        fields |= {"train.max_tokens": max_tokens, "data.workers": self.args.workers, "data.overlong": "truncate"}
        if self.recipe == "mixed":
            fields |= {"streams.ppa.prefill": "false", "streams.ppa.queue_size": 4096}
        if self.recipe == self.args.recipe:
            fields |= dict(field.split("=", 1) for field in self.args.set)
        return make_run(self.recipe, fields, self.data, self.args.vocab_size)

    def filled(self, max_tokens: int) -> RunSpec:
        """The run with its samples multiplied so that they fill --rows_per_step packed rows of `max_tokens` tokens."""
        run_spec = self.run_spec(max_tokens)
        mixture = run_spec.mixture(ALONE, DEVICE.type, run_spec.specs, initial_state(run_spec.specs))
        tokens = mixture.next_batch().tokens_of_bins().sum()
        factor = self.args.rows_per_step * max_tokens * FILL / tokens
        specs = [replace(spec, samples=max(1, round(factor * spec.samples))) for spec in run_spec.specs]
        return replace(run_spec, specs=specs)

    def measure(self, run_spec: RunSpec) -> Measured:
        *batches, last = run_spec.batches(ALONE, DEVICE.type, initial_state(run_spec.specs), WARM + STEPS + 1)
        self.train(run_spec, batches[:WARM])
        seconds = self.train(run_spec, batches[WARM:]) / STEPS
        works = [batch.cost() for batch in batches[WARM:]]
        tokens = sum(work["tokens"] for work in works) / STEPS
        flops = 0.0
        for work in works:
            flops += sum(self.formula.flops(work).values()) / STEPS
        mfu = flops / seconds / self.formula.peak if self.formula.peak else None
        return Measured(seconds, tokens, len(last.rows), mfu, self.profile(run_spec, last))

    def train(self, run_spec: RunSpec, batches: Iterable[StepBatch]) -> float:
        """Train on these batches. Returns the seconds."""
        started = now()
        for batch in batches:
            place = {"step": batch.step, "rank": ALONE.rank, "world": ALONE.world}
            optimizer_step(self.engine, run_spec.recipe, batch.rows, batch.targets(), **place)
        return now() - started

    def profile(self, run_spec: RunSpec, batch: StepBatch) -> Profile:
        if not CUDA:
            started = time.process_time()
            with operator_counter() as counts:
                self.train(run_spec, [batch])
            return Profile(counts.total(), time.process_time() - started)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            seconds = self.train(run_spec, [batch])
        return read_profile(profiler.events(), seconds)


def read_profile(events: Iterable[Any], seconds: float) -> Profile:
    """seconds: those of the profiled step."""
    spans = []
    for event in events:
        if "CUDA" in str(event.device_type):
            spans.append((event.time_range.start, event.time_range.end))
        elif "Synchronize" in event.name:
            seconds -= event.time_range.elapsed_us() / 1e6
    spans.sort()
    busy = 0.0
    reached = float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return Profile(len(spans), seconds, busy / (reached - spans[0][0]))


def print_goal(name: str, value: float | None, least: float, form: str) -> None:
    """Print the line of a goal, which gpu.sh repeats at its end."""
    result = "not measured"
    if value is not None:
        result = f"{'met' if value >= least else 'MISSED'}: {form.format(value)}"
    print(f"GOAL {name}: {result}", flush=True)


def measure_mixed(bench: Bench, args: argparse.Namespace, alone: Measured | None) -> None:
    """Measure `mixed`. alone: the measurement of --recipe in packed rows of the same size."""
    shipped = bench.measure(bench.run_spec(args.mixed_rows))
    full = bench.measure(bench.filled(args.mixed_rows))
    rows = [["mixed as shipped", *shipped.cells()], ["mixed", *full.cells()]]
    print_table(f"`mixed` in rows of {args.mixed_rows:,} tokens", HEADER, rows)
    ratio = full.rate / alone.rate if alone else None
    print_goal(f"mixed within 10 % of {args.recipe}, tokens/s", ratio, 0.9, "{:.2f} times")


def measure_sizes(bench: Bench, args: argparse.Namespace, data: list[Path], deadline: float) -> dict[int, Measured]:
    """Measure --recipe in packed rows of each size, and `mixed` after the first size."""
    results: dict[int, Measured] = {}
    for size in args.rows:
        if time.monotonic() < deadline:
            results[size] = bench.measure(bench.filled(size))
            print(size, *results[size].cells(), sep="  ", flush=True)
        if args.mixed_rows and size == args.rows[0]:
            measure_mixed(Bench("mixed", data, args), args, results.get(args.mixed_rows))
    return results


def report(bench: Bench, args: argparse.Namespace, results: dict[int, Measured]) -> None:
    model = f"{args.preset}, vocabulary {args.vocab_size:,}, {bench.precision}"
    rows = [[f"{size:,}", *results[size].cells()] for size in sorted(results)]
    print_table(f"{args.recipe} in rows; {model}, {args.max_length} tokens a sequence", HEADER, rows)
    late = [f"{size:,}" for size in args.rows if size not in results]
    if late:
        print(f"  no time left for rows of {', '.join(late)}")
    if args.goal:
        best = max(result.rate for result in results.values())
        print_goal(f"{args.preset}, {args.goal:,} tokens/s", best, args.goal, "{:,.0f}")
    else:
        mfu = results[16384].mfu if 16384 in results else None
        print_goal(f"{args.preset}, MFU of 40 % in rows of 16,384", mfu, 0.4, "{:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", default="xlmr-base")
    add("--vocab_size", type=int, default=250_002, help="of the model; 0: the tokenizer's")
    add("--recipe", default="tlm", help="of the rows of several sizes")
    add("--rows", type=int, nargs="+", default=[16384, 4096, 8192, 32768], help="train.max_tokens")
    add("--rows_per_step", type=int, default=4)
    add("--mixed_rows", type=int, default=16384, help="train.max_tokens of `mixed`; 0: without mixed")
    add("--max_length", type=int, default=128)
    add("--ds_config", type=Path, default=ROOT / f"ds_configs/zero2_{'bf16' if CUDA else 'cpu'}.json")
    add("--set", nargs="+", default=[], metavar="KEY.SUB=VALUE", help="fields of --recipe")
    add("--workers", type=int, default=4, help="loader processes")
    add("--seconds", type=float, default=150, help="after which no other size is begun")
    add("--pairs", type=int, default=20_000, help="of the demo world")
    add("--goal", type=int, help="tokens/s, to be printed")
    args = parser.parse_args()
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    deadline = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        pairs = [*islice(text_pairs(None), args.pairs)]
        data = write_world(pairs, 30_000, Path(folder) / "world", documents=True)
        ranks.join_process_group(ranks.read_launcher())
        bench = Bench(args.recipe, data, args)
        report(bench, args, measure_sizes(bench, args, data, deadline))
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
