"""Measure packed rows of several sizes: tokens/s and MFU of whole steps, launches, host time, and how busy the GPU is.

    python benchmarks/rows.py [--preset xlmr-base --vocab_size 250002] [--rows 4096 8192 16384 32768] [--seconds 150]
    python benchmarks/rows.py --preset modern-base --vocab_size 256000 --recipe mlm --max_length 1024 --goal 216000

One process trains with the recipe's dropout, on a GPU in bf16 with ZeRO-2, on text of the demo world in documents as
long as web pages. A step has --rows_per_step packed rows, made beforehand (loader.py measures the loader). Prints for
--recipe and packed rows of each size, and for `mixed` in packed rows of --mixed_rows tokens: real tokens/s, MFU by
cost.StepFlops, ms of a step; and on a GPU, for one step under torch's profiler, the number of kernels launched, the ms
that the host worked (without waits for the GPU), and the share of the time that the GPU was busy. The script names
sizes for which --seconds leaves no time. Lines that begin with GOAL say which goals are met; a missed goal does not
make the script fail.
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

from xscale import ranks
from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import initial_state
from xscale.recipe import Schedule
from xscale.run.resolve import encoder_of_run
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
class Measured:
    seconds: float
    """The seconds of a step."""
    tokens: float
    """The tokens of a step."""
    rows: int
    mfu: float | None
    """None: the device's peak is not known."""
    profile: list[str]
    """The cells of launches, host ms and GPU busy."""

    def cells(self, name: str) -> list[str]:
        mfu = "" if self.mfu is None else f"{self.mfu:.1%}"
        cells = [name, f"{self.tokens / self.seconds:,.0f}", mfu, f"{1e3 * self.seconds:.1f}"]
        return [*cells, f"{self.rows}", f"{self.tokens / self.rows:,.0f}", *self.profile]


class Bench:
    """An engine with a recipe's model, whose steps may have other samples and packed rows than the recipe says."""

    def __init__(self, recipe: str, fields: dict[str, object], data: list[Path], args: argparse.Namespace):
        self.recipe = recipe
        self.fields: dict[str, object] = {"model.preset": args.preset, "data.max_length": args.max_length}
        self.fields |= {"data.workers": args.workers, "data.overlong": "truncate", **fields}
        self.data = data
        self.args = args
        loader = self.loader(args.rows[0])
        encoder = encoder_of_run(loader.recipe, loader.corpus)
        self.formula = StepFlops(encoder)
        config = load_ds_config(args.ds_config, loader.recipe, 1, Hardware.here())
        self.engine = engine.build_engine(StepModule(encoder, loader.recipe), config.resolved)

    def loader(self, max_tokens: int) -> Loader:
        return make_run(self.recipe, self.fields | {"train.max_tokens": max_tokens}, self.data, self.args.vocab_size)

    def measure(self, max_tokens: int) -> Measured:
        """Measure steps whose samples are as many as fill --rows_per_step packed rows of `max_tokens` tokens."""
        loader = self.loader(max_tokens)
        mixture = loader.mixture(ALONE, DEVICE.type, initial_state(loader.streams))
        tokens = mixture.next_plan().row_tokens.sum()
        factor = self.args.rows_per_step * max_tokens * FILL / tokens
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
        return Measured(seconds, tokens, len(last.rows), mfu, self.profile(loader, last))

    def train(self, loader: Loader, batches: Iterable[StepBatch]) -> float:
        """Train on these batches. Returns the seconds."""
        started = now()
        for batch in batches:
            place = {"step": batch.step, "rank": ALONE.rank, "world": ALONE.world}
            optimizer_step(self.engine, loader.recipe, batch.rows, batch.targets(), **place)
        return now() - started

    def profile(self, loader: Loader, batch: StepBatch) -> list[str]:
        if not CUDA:
            return ["", "", ""]
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            seconds = self.train(loader, [batch])
        return profile_cells(profiler.events(), seconds)


def profile_cells(events: Iterable[Any], seconds: float) -> list[str]:
    """The cells of a profiled step that took `seconds`."""
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
    return [f"{len(spans):,}", f"{1e3 * seconds:.1f}", f"{busy / (reached - spans[0][0]):.1%}"]


def print_goal(name: str, value: float | None, least: float, form: str) -> None:
    """Print the line of a goal, which gpu.sh repeats at its end."""
    result = "not measured"
    if value is not None:
        result = f"{'met' if value >= least else 'MISSED'}: {form.format(value)}"
    print(f"GOAL {name}: {result}", flush=True)


def run(args: argparse.Namespace, data: list[Path]) -> None:
    deadline = time.monotonic() + args.seconds
    sizes = Bench(args.recipe, dict(field.split("=", 1) for field in args.set), data, args)
    results: dict[int, Measured] = {}
    rows = []
    for size in args.rows:
        if time.monotonic() < deadline:
            results[size] = sizes.measure(size)
            rows.append(results[size].cells(f"{args.recipe}, {size:,}"))
        else:
            rows.append([f"{args.recipe}, {size:,}", "no time left", *[""] * (len(HEADER) - 2)])
    rates = {size: result.tokens / result.seconds for size, result in results.items()}
    if args.goal:
        print_goal(f"{args.preset}, {args.goal:,} tokens/s", max(rates.values()), args.goal, "{:,.0f}")
    else:
        mfu = results[16384].mfu if 16384 in results else None
        print_goal(f"{args.preset}, MFU of 40 % in rows of 16,384", mfu, 0.4, "{:.1%}")
    if args.mixed_rows:
        mixed = Bench("mixed", {"streams.ppa.prefill": "false", "streams.ppa.queue_size": 4096}, data, args)
        result = mixed.measure(args.mixed_rows)
        rows.append(result.cells(f"mixed, {args.mixed_rows:,}"))
        alone = rates.get(args.mixed_rows)
        ratio = result.tokens / result.seconds / alone if alone else None
        print_goal(f"mixed within 10 % of {args.recipe}, tokens/s", ratio, 0.9, "{:.2f} times")
    title = f"Packed rows; {args.preset}, vocabulary {args.vocab_size:,}, {args.max_length} tokens a sequence"
    print_table(title, HEADER, rows)


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
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        pairs = [*islice(text_pairs(None), args.pairs)]
        data = write_world(pairs, 30_000, Path(folder) / "world", documents=True)
        ranks.join_process_group(ranks.read_launcher())
        run(args, data)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
