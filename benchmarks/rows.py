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
import gc
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from common import (
    ALONE,
    CUDA,
    DEVICE,
    ROOT,
    RecipeEngine,
    demo_data,
    make_loader,
    now,
    one_rank,
    print_table,
    run_tool,
)

from data_tools.demo_world import World
from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import initial_state
from xscale.recipe import Schedule

SENTENCES = (3.4, 1.0)
"""The mean and the standard deviation of the logarithm of a document's number of sentences. With the demo world's
sentences of 12 tokens, a document has a median of 360 tokens and a mean of 590, as web pages have."""
FILL = 0.93
"""The share of the packed rows that the samples should fill: lengths vary, and the division into rows leaves 3 %."""
WARM = 3 if CUDA else 1
STEPS = 6 if CUDA else 2
DS_CONFIG = ROOT / f"ds_configs/zero2_{'bf16' if CUDA else 'cpu'}.json"
HEADER = ["", "tokens/s", "MFU", "ms a step", "tokens a row", "launches", "host ms", "kernel ms", "kernels"]
GOALS = {"H100": 0.45, "H200": 0.5}
"""The MFU to reach in the first step, by GPU."""
MIXED_SHARE = 0.9
"""The MFU to reach in `mixed`, relative to that of --recipe."""


@dataclass
class Measured:
    tokens_per_s: float
    mfu: float | None
    """None: the device's peak is not known."""
    cells: list[str]


def measure(recipe: str, fields: Mapping[str, object], step: str, args: argparse.Namespace) -> Measured:
    """Measure steps with as many samples as fill the packed rows of `step`, ROWSxTOKENS."""
    gc.collect()  # the engine of the last step is a cycle
    row_count, row_tokens = map(int, step.split("x"))
    common = {"model.preset": args.preset, "data.max_length": args.max_length, "data.workers": args.workers}
    common |= {"data.overlong": "truncate", "train.max_tokens": row_tokens}
    loader = make_loader(recipe, common | fields, args.data, args.vocab_size)
    engine = RecipeEngine(loader, DS_CONFIG)
    *batches, last = full_batches(loader, row_count * row_tokens * FILL)
    train(engine, batches[:WARM])
    seconds = train(engine, batches[WARM:]) / STEPS
    tokens = 0.0
    flops = 0.0
    for batch in batches[WARM:]:
        tokens += batch.cost()["tokens"] / STEPS
        flops += engine.flops(batch) / STEPS
    mfu = flops / seconds / engine.formula.peak if engine.formula.peak else None
    cells = [f"{recipe}, {step}", f"{tokens / seconds:,.0f}", "" if mfu is None else f"{mfu:.1%}"]
    cells += [f"{1e3 * seconds:.1f}", f"{tokens / len(last.rows):,.0f}", *profile_cells(engine, last, seconds)]
    return Measured(tokens / seconds, mfu, cells)


def full_batches(loader: Loader, tokens: float) -> Iterable[StepBatch]:
    """Return the batches of all steps, with as many samples of each stream as have this number of tokens in all."""
    state = initial_state(loader.streams)
    factor = tokens / loader.mixture(ALONE, DEVICE, state).next_plan().row_tokens.sum()
    streams = [replace(stream, samples=max(1, round(factor * stream.samples))) for stream in loader.streams]
    filled = replace(loader, corpus=replace(loader.corpus, streams=Schedule.constant(streams)))
    return filled.batches(ALONE, DEVICE, initial_state(streams), WARM + STEPS + 1)


def train(engine: RecipeEngine, batches: Iterable[StepBatch]) -> float:
    """Train on these batches. Returns the seconds."""
    started = now()
    for batch in batches:
        engine.train(batch)
    return now() - started


def profile_cells(engine: RecipeEngine, batch: StepBatch, step_seconds: float) -> list[str]:
    """Train one step under the profiler. Returns the cells of launches, host ms, kernel ms, and the share of kernels in
    a step of `step_seconds`, which was not profiled."""
    if not CUDA:
        return [""] * 4
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        host_seconds = train(engine, [batch])
    kernels = []
    for event in profiler.events():
        if "CUDA" in str(event.device_type):
            kernels.append((event.time_range.start, event.time_range.end))
        elif "Synchronize" in event.name:
            host_seconds -= event.time_range.elapsed_us() / 1e6
    busy = 0.0
    reached = float("-inf")
    for start, end in sorted(kernels):
        busy += max(0.0, end - max(start, reached)) / 1e6
        reached = max(reached, end)
    return [f"{len(kernels):,}", f"{1e3 * host_seconds:.1f}", f"{1e3 * busy:.1f}", f"{busy / step_seconds:.0%}"]


def write_pages(out: Path, sentences: int) -> Path:
    """Write shards of about so many sentences of the demo world, in documents as long as web pages. Returns their
    directory."""
    random = Random(0)
    texts = chain.from_iterable(World(0).document("en", number) for number in count())
    lines: list[str] = []
    while len(lines) < sentences:
        lines += [*islice(texts, round(random.lognormvariate(*SENTENCES)) + 1), ""]
    (out / "pages.txt").write_text("\n".join(lines), encoding="utf-8")
    run_tool("write_shards", "mono", "--text", out / "pages.txt", "--lang", "en", "--documents", "blank",
             "--whole_lines", "--out", out / "pages")  # fmt: skip
    return out / "pages"


def print_goal(name: str, value: float | None, least: float, form: str) -> None:
    """Print the line of a goal, which gpu.sh repeats at its end."""
    result = "not measured"
    if value is not None:
        result = f"{'met' if value >= least else 'MISSED'}: {form.format(value)}"
    print(f"GOAL {name}: {result}", flush=True)


def run(args: argparse.Namespace) -> None:
    deadline = time.monotonic() + args.seconds
    fields: dict[str, Any] = dict(field.split("=", 1) for field in args.set)
    results = list[Measured]()
    rows = []
    for step in args.steps:
        if time.monotonic() < deadline:
            results.append(measure(args.recipe, fields, step, args))
            rows.append(results[-1].cells)
        else:
            rows.append([f"{args.recipe}, {step}", "no time left", *[""] * (len(HEADER) - 2)])
    first = results[0]
    if args.goal:
        best = max(result.tokens_per_s for result in results)
        print_goal(f"{args.preset}, {args.goal:,} tokens/s", best, args.goal, "{:,.0f}")
    else:
        gpu = torch.cuda.get_device_name() if CUDA else ""
        least = next((goal for name, goal in GOALS.items() if name in gpu), max(GOALS.values()))
        print_goal(f"{args.preset}, MFU of {least:.0%} in a step of {args.steps[0]}", first.mfu, least, "{:.1%}")
    if args.mixed:
        queue = {"streams.ppa.prefill": "false", "streams.ppa.queue_size": 4096}
        mixed = measure("mixed", queue, args.steps[0], args)
        rows.append(mixed.cells)
        share = mixed.mfu / first.mfu if mixed.mfu and first.mfu else None
        print_goal(f"mixed, {MIXED_SHARE} of the MFU of {args.recipe}", share, MIXED_SHARE, "{:.2f}")
    title = f"Packed rows; {args.preset}, vocabulary {args.vocab_size:,}, {args.max_length} tokens a sequence"
    print_table(title, HEADER, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", default="xlmr-base")
    add("--vocab_size", type=int, default=250_002, help="of the model; 0: the tokenizer's")
    add("--recipe", default="tlm", help="of the rows of several sizes")
    add("--steps", nargs="+", default=["1x65536", "4x16384"], metavar="ROWSxTOKENS")
    add("--mixed", action="store_true", help="measure `mixed` too")
    add("--max_length", type=int, default=128)
    add("--set", nargs="+", default=[], metavar="KEY.SUB=VALUE", help="fields of --recipe")
    add("--workers", type=int, default=4, help="loader processes")
    add("--seconds", type=float, default=150, help="after which no other size is begun")
    add("--pairs", type=int, default=20_000, help="of the demo world")
    add("--goal", type=int, help="tokens/s, to be printed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        pairs, *_ = demo_data(Path(folder) / "demo", args.pairs)
        args.data = [pairs, write_pages(Path(folder) / "demo", args.pairs)]
        with one_rank():
            run(args)


if __name__ == "__main__":
    main()
