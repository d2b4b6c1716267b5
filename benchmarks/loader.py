"""Measure the loading of data: speed of a worker, time to resume, memory of the order.

    python benchmarks/loader.py [--text SRC TGT] [--records 1000000] [--steps 60] [--max_tokens 4096]

The script writes a corpus of pairs with 15 words on each side and a 16k tokenizer into a temporary directory (from two
parallel files, plain, .gz or .xz, or else from the demo world), and prints
  1. pairs, tokens and packed rows per second of TLM, and of AlignLM if there are links (the demo world): read from
     shards, tokenised, masked, packed into rows of --max_tokens (512 pairs per step), by the process itself and by
     DataLoader with 1 and 2 workers; and the us of a pair of which reading and the tokenizer are parts
  2. seconds from opening the source to the first step, at record 0 (a new run, which measures the tokens per byte) and
     at 90 % of the source (a resume, which knows them)
  3. memory of the order of 10^5, 10^7 and 10^9 records
"""

import argparse
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import (
    ALONE,
    make_run,
    print_table,
    seconds_of,
    text_pairs,
    with_words,
    write_pairs,
    write_tokenizer,
)

from xscale.data.calibrate import calibrate
from xscale.data.calibration import Calibration
from xscale.data.corpus import Corpus
from xscale.data.loader import Loader
from xscale.data.mixture import Plan, initial_state
from xscale.data.order import EpochOrder
from xscale.recipe import Recipe
from xscale.run.resolve import resolve_run

WORDS = 15
SAMPLES = 512
UNIQUE_PAIRS = 20_000
SHARD_RECORDS = 8192
REPEATS = 5


def median_time(work: Callable[[], Any]) -> float:
    return median(seconds_of(work) for _ in range(REPEATS))


def step_plans(loader: Loader, steps: int) -> list[Plan]:
    mixture = loader.mixture(ALONE, "cpu", initial_state(loader.streams))
    return [mixture.next_part() for _ in range(steps)]


def places_of(plans: list[Plan], stream: str) -> list[tuple[int, int]]:
    """The shard and the record of each pair, in the order in which they are read."""
    places: list[tuple[int, int]] = []
    for plan in plans:
        table = plan.tables[stream]
        places += zip(table.shard.tolist(), table.record.tolist(), strict=True)
    return places


def speed(loader: Loader, steps: int) -> None:
    dataset = loader.dataset()
    plans = step_plans(loader, steps)
    batches = [dataset[plan] for plan in plans]
    pairs = steps * SAMPLES
    tokens = sum(batch.cost()["tokens"] for batch in batches)
    rows = sum(len(batch.rows) for batch in batches)

    def through_loader(workers: int) -> float:
        data = replace(loader.recipe.data, workers=workers)
        run = replace(loader, recipe=replace(loader.recipe, data=data))
        loaded = run.batches(ALONE, "cpu", initial_state(run.streams), steps + 8)
        for _ in islice(loaded, 8):  # workers have started and their queues are full
            pass
        return seconds_of(lambda: [*loaded])

    seconds = {"one process, plans given": median_time(lambda: [dataset[plan] for plan in plans])}
    for workers in (0, 1, 2):
        times = [through_loader(workers) for _ in range(REPEATS)]
        seconds[f"DataLoader, {workers} worker(s)"] = median(times)
    table = []
    for name, value in seconds.items():
        table.append([name, f"{pairs / value:,.0f}", f"{tokens / value:,.0f}", f"{rows / value:,.1f}"])
    name = loader.streams[0].name
    title = f"1. {name}: pairs of {WORDS} words a side, {tokens / pairs:.1f} tokens; {rows / steps:.1f} rows a step"
    print_table(title, ["", "pairs/s", "tokens/s", "rows/s"], table)
    parts(loader, plans, seconds["one process, plans given"])


def parts(loader: Loader, plans: list[Plan], whole: float) -> None:
    """Print the time of reading and of the tokenizer, over the same records, of the `whole` time."""
    (source,) = loader.corpus.sources
    name = loader.streams[0].name
    encode = loader.corpus.tokenizer.encode if name == "tlm" else loader.corpus.tokenizer.encode_words
    places = places_of(plans, name)
    texts = [*chain.from_iterable(source.read(*place).texts for place in places)]
    steps = [texts[start : start + 2 * SAMPLES] for start in range(0, len(texts), 2 * SAMPLES)]
    read = median_time(lambda: [source.read(*place) for place in places])
    tokenise = median_time(lambda: [encode(step) for step in steps])
    seconds = {"whole": whole, "read records": read, "tokenise": tokenise, "the rest": whole - read - tokenise}
    rows = [[part, f"{1e6 * value / len(places):.1f}"] for part, value in seconds.items()]
    print_table("   where a pair's time goes", ["", "us/pair"], rows)


def resume(open_run: Any, records: int, known: Calibration) -> None:
    """Print the seconds to the first step. known: the measured lengths, which a checkpoint keeps."""
    rows = []
    for position in (0, int(0.9 * records)):
        seconds = []
        for _ in range(REPEATS):
            seconds.append(seconds_of(lambda position=position: first_step(open_run(), position, known)))
        rows.append([f"record {position:,}", f"{median(seconds):.3f}"])
    print_table(f"2. Seconds to the first step of a source of {records:,} pairs", ["", "s"], rows)


def first_step(recipe: Recipe, corpus: Corpus, position: int, known: Calibration) -> None:
    loader = Loader(recipe, corpus, known if position else calibrate(recipe, corpus))
    state = initial_state(loader.streams)
    state["positions"]["tlm"] = [[0, position]]
    state["step"] = position // SAMPLES
    batch = next(loader.batches(ALONE, "cpu", state, steps=1))
    assert batch.state["positions"]["tlm"] == [[0, position + SAMPLES]]


def memory() -> None:
    rows = []
    for records in (10**5, 10**7, 10**9):
        shards = -(-records // SHARD_RECORDS)
        counts = np.full(shards, SHARD_RECORDS)
        tracemalloc.start()
        order = EpochOrder(counts, np.uint64(1), 0)
        order.take(0, SAMPLES)
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        rows.append([f"{records:,}", f"{shards:,}", f"{kept / 1e6:.2f}", f"{peak / 1e6:.2f}"])
    print_table("3. The order of an epoch", ["records", "shards", "MB with a window", "peak"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs=2, metavar=("SRC", "TGT"), help="parallel files to take words from")
    parser.add_argument("--records", type=int, default=1_000_000, help="pairs of the source")
    parser.add_argument("--steps", type=int, default=60, help="steps of 512 pairs in each repetition of part 1")
    parser.add_argument("--max_tokens", type=int, help="of a row (default: a run's on a CPU)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as name:
        folder = Path(name)
        pool = [*islice(with_words(text_pairs(args.text), WORDS), UNIQUE_PAIRS)]
        write_tokenizer(pool, 16_000, folder / "tokenizer")
        repeated = islice(chain.from_iterable([pool] * (args.records // len(pool) + 1)), args.records)
        write_pairs(repeated, folder / "pairs")

        def fields(recipe: str) -> dict[str, object]:
            rows = {"train.max_tokens": args.max_tokens} if args.max_tokens else {}
            return {f"streams.{recipe}.samples": SAMPLES, "data.max_length": 128, "data.workers": 0, **rows}

        loader = make_run("tlm", fields("tlm"), [folder / "pairs"])
        speed(loader, args.steps)
        if not args.text:
            speed(make_run("alignlm", fields("alignlm"), [folder / "pairs"]), args.steps)
        sets = [f"{key}={value}" for key, value in fields("tlm").items()]
        resume(lambda: resolve_run("tlm", sets, [folder / "pairs"]), args.records, loader.calibration)
        memory()


if __name__ == "__main__":
    main()
