"""Measure the loading of data: the speed of a worker.

    python benchmarks/loader.py [--text SRC TGT] [--pairs 200000] [--steps 60] [--max_tokens 4096]

The script writes a corpus of pairs with 15 words on each side and a 16k tokenizer into a temporary directory (from two
parallel files, plain, .gz or .xz, or else from the demo world), and prints pairs, tokens and packed rows per second of
TLM, and of AlignLM if there are links (the demo world): read from shards, tokenised, masked, packed into rows of
--max_tokens (512 pairs per step), by the process itself and by DataLoader with 1 and 2 workers; and the us of a pair
that reading and the tokenizer take.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any

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

from xscale.data.loader import Loader
from xscale.data.mixture import initial_state

WORDS = 15
SAMPLES = 512
UNIQUE_PAIRS = 20_000
REPEATS = 5


def median_time(work: Callable[[], Any]) -> float:
    return median(seconds_of(work) for _ in range(REPEATS))


def speed(loader: Loader, steps: int) -> None:
    dataset = loader.dataset()
    mixture = loader.mixture(ALONE, "cpu", initial_state(loader.streams))
    plans = [mixture.next_part() for _ in range(steps)]
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
        seconds[f"DataLoader, {workers} worker(s)"] = median(through_loader(workers) for _ in range(REPEATS))
    table = []
    for name, value in seconds.items():
        table.append([name, f"{pairs / value:,.0f}", f"{tokens / value:,.0f}", f"{rows / value:,.1f}"])
    name = loader.streams[0].name
    title = f"{name}: pairs of {WORDS} words a side, {tokens / pairs:.1f} tokens; {rows / steps:.1f} rows a step"
    print_table(title, ["", "pairs/s", "tokens/s", "rows/s"], table)

    (source,) = loader.corpus.sources
    encode = loader.corpus.tokenizer.encode if name == "tlm" else loader.corpus.tokenizer.encode_words
    places: list[tuple[int, int]] = []
    for plan in plans:
        places += zip(plan.tables[name].shard.tolist(), plan.tables[name].record.tolist(), strict=True)
    texts = [*chain.from_iterable(source.read(*place).texts for place in places)]
    read = median_time(lambda: [source.read(*place) for place in places])
    starts = range(0, len(texts), 2 * SAMPLES)
    tokenise = median_time(lambda: [encode(texts[start : start + 2 * SAMPLES]) for start in starts])
    parts = {"whole": seconds["one process, plans given"], "reading": read, "the tokenizer": tokenise}
    print_table("us of a pair", ["", "us"], [[part, f"{1e6 * value / pairs:.1f}"] for part, value in parts.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs=2, metavar=("SRC", "TGT"), help="parallel files to take words from")
    parser.add_argument("--pairs", type=int, default=200_000, help="of the source")
    parser.add_argument("--steps", type=int, default=60, help="steps of 512 pairs in each repetition")
    parser.add_argument("--max_tokens", type=int, help="of a row (default: a run's on a CPU)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as name:
        folder = Path(name)
        pool = [*islice(with_words(text_pairs(args.text), WORDS), UNIQUE_PAIRS)]
        write_tokenizer(pool, 16_000, folder / "tokenizer")
        repeated = islice(chain.from_iterable([pool] * (args.pairs // len(pool) + 1)), args.pairs)
        write_pairs(repeated, folder / "pairs")
        for recipe in ("tlm",) if args.text else ("tlm", "alignlm"):
            fields = {f"streams.{recipe}.samples": SAMPLES, "data.max_length": 128, "data.workers": 0}
            if args.max_tokens:
                fields["train.max_tokens"] = args.max_tokens
            speed(make_run(recipe, fields, [folder / "pairs"]), args.steps)


if __name__ == "__main__":
    main()
