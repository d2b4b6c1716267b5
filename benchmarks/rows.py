"""Measure steps of packed rows: tokens/s and MFU, launches, the host's time, and the time of kernels in a step.

    python benchmarks/rows.py [--preset xlmr-base --vocab_size 250002] [--steps 1x65536 4x16384] [--seconds 150]
    python benchmarks/rows.py --preset modern-base --vocab_size 256000 --recipe mlm --max_length 1024 --goal 380000

One process trains with the recipe's dropout, on a GPU in bf16 with ZeRO-2, on text of the demo world in documents as
long as web pages. A step ROWSxTOKENS has that many packed rows of that many tokens, made beforehand (loader.py measures
the loader). The script measures the steps of --recipe, and the first of them for `mixed` too. Kernels are counted in
one more step under torch's profiler, and their time is divided by the time of a step without the profiler, which slows
the host. The script names steps for which --seconds leaves no time. Lines that begin with GOAL say which goals are met;
a missed goal does not make the script fail.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import ALONE, CUDA, DEVICE, ROOT, free_port, make_run, now, print_table, text_pairs, write_world

from xscale import ranks
from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import initial_state
from xscale.recipe import Schedule
from xscale.run.resolve import module_of_run
from xscale.step import engine
from xscale.step.cost import StepFlops
from xscale.step.ds_config import Hardware, load_ds_config
from xscale.step.step import optimizer_step

FILL = 0.93
"""The share of the packed rows that the samples should fill: lengths vary, and the division into rows leaves 3 %."""
WARM = 3 if CUDA else 1
STEPS = 6 if CUDA else 2
HEADER = ["", "tokens/s", "MFU", "ms a step", "tokens a row", "launches", "host ms", "kernel ms", "kernels"]
GOALS = {"H100": 0.45, "H200": 0.5}
"""The MFU to reach in the first step, by GPU."""
MIXED_SHARE = 0.9
"""The MFU to reach in `mixed`, relative to that of --recipe."""


class Step(NamedTuple):
    """A step of packed rows."""

    rows: int
    tokens: int
    """train.max_tokens."""

    @classmethod
    def parse(cls, text: str) -> "Step":
        rows, tokens = text.split("x")
        return cls(int(rows), int(tokens))

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens:,}"


@dataclass
class Measured:
    seconds: float
    """The seconds of a step."""
    tokens: float
    """The tokens of a step."""
    rows: int
    mfu: float | None
    """None: the device's peak is not known."""
    profile: list[str]
    """The cells of launches, host ms, kernel ms, and their share of the step."""

    def cells(self, name: str) -> list[str]:
        mfu = "" if self.mfu is None else f"{self.mfu:.1%}"
        cells = [name, f"{self.tokens / self.seconds:,.0f}", mfu, f"{1e3 * self.seconds:.1f}"]
        return [*cells, f"{self.tokens / self.rows:,.0f}", *self.profile]


class Bench:
    """An engine with a recipe's model, whose steps may have other samples and packed rows than the recipe says."""

    def __init__(self, recipe: str, fields: dict[str, object], data: list[Path], args: argparse.Namespace):
        self.recipe = recipe
        self.fields: dict[str, object] = {"model.preset": args.preset, "data.max_length": args.max_length}
        self.fields |= {"data.workers": args.workers, "data.overlong": "truncate", **fields}
        self.data = data
        self.args = args
        loader = self.loader(args.steps[0].tokens)
        config = load_ds_config(args.ds_config, loader.recipe, 1, Hardware.here())
        module = module_of_run(loader.recipe, loader.corpus)
        self.formula = StepFlops.of(module)
        self.engine = engine.build_engine(module, config.resolved)

    def loader(self, max_tokens: int) -> Loader:
        return make_run(self.recipe, self.fields | {"train.max_tokens": max_tokens}, self.data, self.args.vocab_size)

    def measure(self, step: Step) -> Measured:
        """Measure steps with as many samples as fill the step's packed rows."""
        loader = self.loader(step.tokens)
        mixture = loader.mixture(ALONE, DEVICE.type, initial_state(loader.streams))
        tokens = mixture.next_plan().row_tokens.sum()
        factor = step.rows * step.tokens * FILL / tokens
        streams = [replace(of, samples=max(1, round(factor * of.samples))) for of in loader.streams]
        loader = replace(loader, corpus=replace(loader.corpus, streams=Schedule.constant(streams)))
        *batches, last = loader.batches(ALONE, DEVICE.type, initial_state(streams), WARM + STEPS + 1)
        self.train(loader, batches[:WARM])
        seconds = self.train(loader, batches[WARM:]) / STEPS
        tokens = 0.0
        flops = 0.0
        for batch in batches[WARM:]:
            tokens += batch.cost()["tokens"] / STEPS
            flops += sum(self.formula.flops(batch.cost()).values()) / STEPS
        mfu = flops / seconds / self.formula.peak if self.formula.peak else None
        return Measured(seconds, tokens, len(last.rows), mfu, self.profile(loader, last, seconds))

    def train(self, loader: Loader, batches: Iterable[StepBatch]) -> float:
        """Train on these batches. Returns the seconds."""
        started = now()
        for batch in batches:
            place = {"step": batch.step, "rank": ALONE.rank, "world": ALONE.world}
            optimizer_step(self.engine, loader.recipe, batch.rows, batch.targets(), **place)
        return now() - started

    def profile(self, loader: Loader, batch: StepBatch, step_seconds: float) -> list[str]:
        if not CUDA:
            return [""] * 4
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            seconds = self.train(loader, [batch])
        return profile_cells(profiler.events(), seconds, step_seconds)


def profile_cells(events: Iterable[Any], seconds: float, step_seconds: float) -> list[str]:
    """Return the cells of a profiled step. seconds: its duration; step_seconds: that of a step without the profiler."""
    spans = []
    for event in events:
        if "CUDA" in str(event.device_type):
            spans.append((event.time_range.start, event.time_range.end))
        elif "Synchronize" in event.name:
            seconds -= event.time_range.elapsed_us() / 1e6
    busy = 0.0
    reached = float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached)) / 1e6
        reached = max(reached, end)
    return [f"{len(spans):,}", f"{1e3 * seconds:.1f}", f"{1e3 * busy:.1f}", f"{busy / step_seconds:.0%}"]


def print_goal(name: str, value: float | None, least: float, form: str) -> None:
    """Print the line of a goal, which gpu.sh repeats at its end."""
    result = "not measured"
    if value is not None:
        result = f"{'met' if value >= least else 'MISSED'}: {form.format(value)}"
    print(f"GOAL {name}: {result}", flush=True)


def run(args: argparse.Namespace, data: list[Path]) -> None:
    deadline = time.monotonic() + args.seconds
    bench = Bench(args.recipe, dict(field.split("=", 1) for field in args.set), data, args)
    results = list[Measured]()
    rows = []
    for step in args.steps:
        if time.monotonic() < deadline:
            results.append(bench.measure(step))
            rows.append(results[-1].cells(f"{args.recipe}, {step}"))
        else:
            rows.append([f"{args.recipe}, {step}", "no time left", *[""] * (len(HEADER) - 2)])
    first = results[0]
    if args.goal:
        best = max(result.tokens / result.seconds for result in results)
        print_goal(f"{args.preset}, {args.goal:,} tokens/s", best, args.goal, "{:,.0f}")
    else:
        gpu = torch.cuda.get_device_name() if CUDA else ""
        least = next((goal for name, goal in GOALS.items() if name in gpu), max(GOALS.values()))
        print_goal(f"{args.preset}, MFU of {least:.0%} in a step of {args.steps[0]}", first.mfu, least, "{:.1%}")
    if args.mixed:
        del bench
        mixed = Bench("mixed", {"streams.ppa.prefill": "false", "streams.ppa.queue_size": 4096}, data, args)
        result = mixed.measure(args.steps[0])
        rows.append(result.cells(f"mixed, {args.steps[0]}"))
        share = result.mfu / first.mfu if result.mfu and first.mfu else None
        print_goal(f"mixed, {MIXED_SHARE} of the MFU of {args.recipe}", share, MIXED_SHARE, "{:.2f}")
    title = f"Packed rows; {args.preset}, vocabulary {args.vocab_size:,}, {args.max_length} tokens a sequence"
    print_table(title, HEADER, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", default="xlmr-base")
    add("--vocab_size", type=int, default=250_002, help="of the model; 0: the tokenizer's")
    add("--recipe", default="tlm", help="of the rows of several sizes")
    add("--steps", type=Step.parse, nargs="+", default=[Step(1, 65536), Step(4, 16384)], metavar="ROWSxTOKENS")
    add("--mixed", action="store_true", help="measure `mixed` too")
    add("--max_length", type=int, default=128)
    add("--ds_config", type=Path, default=ROOT / f"ds_configs/zero2_{'bf16' if CUDA else 'cpu'}.json")
    add("--set", nargs="+", default=[], metavar="KEY.SUB=VALUE", help="fields of --recipe")
    add("--workers", type=int, default=4, help="loader processes")
    add("--seconds", type=float, default=150, help="after which no other size is begun")
    add("--pairs", type=int, default=20_000, help="of the demo world")
    add("--goal", type=int, help="tokens/s, to be printed")
    args = parser.parse_args()
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        pairs = [*islice(text_pairs(None), args.pairs)]
        data = write_world(pairs, 30_000, Path(folder) / "world", documents=True)
        ranks.join_process_group(ranks.read_launcher())
        run(args, data)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
