"""Measure steps of packed rows: tokens/s and MFU, launches, the host's time, and the time of kernels in a step.

    python benchmarks/rows.py [--preset xlmr-base --vocab_size 250002] [--steps 1x65536 4x16384] [--mixed]
    python benchmarks/rows.py --preset modern-base --vocab_size 256000 --recipe mlm --goal 380000 \\
        --set data.max_length=1024 streams.mlm.mask_prob=0.3

One process trains with the recipe's dropout, on a GPU in bf16 with ZeRO-2. A step ROWSxTOKENS has ROWS packed rows
(batches without padding) of TOKENS tokens each. The text is that of the demo world, and the rows are made beforehand.
One more step under torch's profiler counts the GPU kernels. The column kernels is their time, as a share of the time of
a step without the profiler. Lines that begin with GOAL say which goals are met.
"""

import argparse
import gc
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path

import common
import torch

from data_tools import write_shards
from data_tools.demo_world import World
from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import initial_state
from xscale.recipe import Schedule

SENTENCES = 50
"""The number of sentences of a document. A sentence of the demo world has 12 tokens."""
FILL = 0.93
"""The share of the packed rows that the samples should fill: lengths vary, and the division into rows leaves 3 %."""
WARM = 3 if common.CUDA else 1
STEPS = 6 if common.CUDA else 2
DS_CONFIG = common.ROOT / f"ds_configs/zero2_{'bf16' if common.CUDA else 'cpu'}.json"
HEADER = ["", "tokens/s", "MFU", "ms a step", "tokens a row", "launches", "host ms", "kernel ms", "kernels"]
GOAL_OF_MFU = 0.45 if common.CUDA and "H100" in torch.cuda.get_device_name() else 0.5
"""The MFU to reach in the first step, on an H100 or an H200."""
MIXED_SHARE = 0.9
"""The MFU to reach in `mixed`, relative to that of --recipe."""


class Measurement:
    """Steps of a recipe with as many samples as fill the packed rows of `step`, ROWSxTOKENS."""

    def __init__(self, recipe: str, step: str, args: argparse.Namespace):
        gc.collect()  # the engine of the last step is a cycle
        row_count, row_tokens = map(int, step.split("x"))
        fields = {"train.max_tokens": row_tokens} | common.step_fields(recipe, args.preset, args.set)
        loader = common.make_loader(recipe, fields, args.data)
        engine = common.RecipeEngine(loader, DS_CONFIG)
        *batches, last = full_batches(loader, row_count * row_tokens * FILL)
        train(engine, batches[:WARM])
        seconds = train(engine, batches[WARM:]) / STEPS
        tokens = 0.0
        flops = 0.0
        for batch in batches[WARM:]:
            tokens += batch.cost()["tokens"] / STEPS
            flops += engine.flops(batch) / STEPS
        self.tokens_per_s = tokens / seconds
        self.mfu = flops / seconds / engine.formula.peak if engine.formula.peak else None
        self.cells = [f"{recipe}, {step}", f"{self.tokens_per_s:,.0f}", f"{self.mfu:.1%}" if self.mfu else ""]
        self.cells += [f"{1e3 * seconds:.1f}", f"{tokens / len(last.rows):,.0f}", *profile_cells(engine, last, seconds)]
        print(*self.cells, sep="  ", flush=True)


def full_batches(loader: Loader, tokens: float) -> Iterable[StepBatch]:
    """Return the batches of all steps, with as many samples of each stream as have this number of tokens in all."""
    state = initial_state(loader.last_streams)
    factor = tokens / loader.mixture(common.ALONE, common.DEVICE, state).next_plan().row_tokens.sum()
    streams = [replace(stream, samples=max(1, round(factor * stream.samples))) for stream in loader.last_streams]
    filled = replace(loader, corpus=replace(loader.corpus, streams=Schedule.constant(streams)))
    return filled.batches(common.ALONE, common.DEVICE, initial_state(streams), WARM + STEPS + 1)


def train(engine: common.RecipeEngine, batches: Iterable[StepBatch]) -> float:
    """Train on these batches. Returns the seconds."""
    started = common.now()
    for batch in batches:
        engine.train(batch)
    return common.now() - started


def profile_cells(engine: common.RecipeEngine, batch: StepBatch, step_seconds: float) -> list[str]:
    """Train one step under the profiler. Returns the cells of launches, host ms, kernel ms, and the share of kernels in
    a step of `step_seconds`, which was not profiled."""
    if not common.CUDA:
        return [""] * 4
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        host_seconds = train(engine, [batch])
    kernels = 0
    kernel_seconds = 0.0
    for event in profiler.events():
        if "CUDA" in str(event.device_type):
            kernels += 1
            kernel_seconds += event.time_range.elapsed_us() / 1e6
        elif "Synchronize" in event.name:
            host_seconds -= event.time_range.elapsed_us() / 1e6
    share = kernel_seconds / step_seconds
    return [f"{kernels:,}", f"{1e3 * host_seconds:.1f}", f"{1e3 * kernel_seconds:.1f}", f"{share:.0%}"]


def write_pages(out: Path, sentences: int) -> Path:
    """Write shards of so many sentences, in documents as long as web pages. Returns their directory."""
    texts = chain.from_iterable(World(0).document("en", number) for number in count())
    lines: list[str] = []
    for _ in range(sentences // SENTENCES):
        lines += [*islice(texts, SENTENCES), ""]
    (out / "pages.txt").write_text("\n".join(lines), encoding="utf-8")
    write_shards.main(["mono", "--text", f"{out}/pages.txt", "--lang", "en", "--documents", "blank",
                       "--whole_lines", "--out", f"{out}/pages"])  # fmt: skip
    return out / "pages"


def print_goal(name: str, value: float | None, least: float, form: str) -> None:
    """Print the line of a goal, which gpu.sh repeats at its end."""
    result = "not measured"
    if value is not None:
        result = f"{'met' if value >= least else 'MISSED'}: {form.format(value)}"
    print(f"GOAL {name}: {result}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", default="xlmr-base", help="the architecture, a value of model.preset (default: xlmr-base)")
    add("--vocab_size", type=int, default=250_002, help="minimum size of the vocabulary (default: 250002)")
    add("--recipe", default="tlm", help="the recipe of the steps (default: tlm)")
    add("--steps", nargs="+", action="extend", metavar="ROWSxTOKENS",
        help="the steps to measure (default: 1x65536 4x16384)")  # fmt: skip
    add("--mixed", action="store_true", help="also measure the recipe mixed in the first of --steps")
    add("--set", nargs="+", action="extend", default=[], metavar="KEY.SUB=VALUE", help="change fields of the recipe")
    add("--pairs", type=int, default=20_000, help="the number of pairs of the demo world (default: 20000)")
    add("--goal", type=int, help="the tokens/s that the fastest step should reach; without it, the goal is an MFU")
    args = parser.parse_args()
    args.steps = args.steps or ["1x65536", "4x16384"]
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        pairs, *_ = common.demo_data(Path(folder) / "demo", args.pairs, args.vocab_size)
        args.data = [pairs, write_pages(Path(folder) / "demo", args.pairs)]
        with common.one_rank():
            measured = [Measurement(args.recipe, step, args) for step in args.steps]
            if args.mixed:
                measured.append(Measurement("mixed", args.steps[0], args))
    title = f"Packed rows; {args.preset}, vocabulary {args.vocab_size:,}"
    common.print_table(title, HEADER, [measurement.cells for measurement in measured])
    first = measured[0]
    if args.goal:
        best = max(measurement.tokens_per_s for measurement in measured)
        print_goal(f"{args.preset}, {args.goal:,} tokens/s", best, args.goal, "{:,.0f}")
    else:
        name = f"{args.preset}, MFU of {GOAL_OF_MFU:.0%} in a step of {args.steps[0]}"
        print_goal(name, first.mfu, GOAL_OF_MFU, "{:.1%}")
    if args.mixed:
        mixed_mfu = measured[-1].mfu
        share = mixed_mfu / first.mfu if mixed_mfu and first.mfu else None
        print_goal(f"mixed, {MIXED_SHARE} of the MFU of {args.recipe}", share, MIXED_SHARE, "{:.2f}")


if __name__ == "__main__":
    main()
