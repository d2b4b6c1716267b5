"""Measure the loading of data: the speed of a worker.

    python benchmarks/loader.py [--text SRC TGT]

The pairs are those of two parallel files (English and German, plain, .gz or .xz), with a tokenizer of 16,000, or else
of the demo corpus. Prints pairs, tokens and packed rows per second of TLM, and of AlignLM with the demo corpus: read
from shards, tokenised, masked and packed into rows (512 pairs per step), by the process itself and by DataLoader with
1 and 2 workers; and the us of a pair that reading and the tokenizer take.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any

from common import ALONE, demo_data, make_loader, print_table, run_tool, seconds_of

from xscale.data.loader import Loader
from xscale.data.mixture import initial_state

SAMPLES = 512
STEPS = 60
DEMO_PAIRS = 20_000
REPEATS = 5


def median_time(work: Callable[[], Any]) -> float:
    return median(seconds_of(work) for _ in range(REPEATS))


def seconds_through_loader(loader: Loader, workers: int) -> float:
    """Return the seconds of STEPS steps after those in which the workers start and fill their queues."""
    data = replace(loader.recipe.data, workers=workers)
    with_workers = replace(loader, recipe=replace(loader.recipe, data=data))
    batches = with_workers.batches(ALONE, "cpu", initial_state(loader.streams), STEPS + 8)
    for _ in islice(batches, 8):
        pass
    return seconds_of(lambda: [*batches])


def print_speed(loader: Loader) -> None:
    dataset = loader.dataset()
    mixture = loader.mixture(ALONE, "cpu", initial_state(loader.streams))
    plans = [mixture.next_part() for _ in range(STEPS)]
    batches = [dataset[plan] for plan in plans]
    pairs = STEPS * SAMPLES
    tokens = sum(batch.cost()["tokens"] for batch in batches)
    rows = sum(len(batch.rows) for batch in batches)

    whole = median_time(lambda: [dataset[plan] for plan in plans])
    seconds = {"one process, plans given": whole}
    for workers in (0, 1, 2):
        runs = [seconds_through_loader(loader, workers) for _ in range(REPEATS)]
        seconds[f"DataLoader, {workers} worker(s)"] = median(runs)
    table = []
    for name, value in seconds.items():
        table.append([name, f"{pairs / value:,.0f}", f"{tokens / value:,.0f}", f"{rows / value:,.1f}"])
    name = loader.streams[0].name
    title = f"{name}: pairs of {tokens / pairs:.1f} tokens; {rows / STEPS:.1f} rows a step"
    print_table(title, ["", "pairs/s", "tokens/s", "rows/s"], table)

    (source,) = loader.corpus.sources
    encode = loader.corpus.tokenizer.encode if name == "tlm" else loader.corpus.tokenizer.encode_words
    places: list[tuple[int, int]] = []
    for plan in plans:
        places += zip(plan.tables[name].shard.tolist(), plan.tables[name].record.tolist(), strict=True)
    texts = [*chain.from_iterable(source.read(*place).texts for place in places)]
    parts = {"whole": whole, "reading": median_time(lambda: [source.read(*place) for place in places])}
    starts = range(0, len(texts), 2 * SAMPLES)
    parts["the tokenizer"] = median_time(lambda: [encode(texts[start : start + 2 * SAMPLES]) for start in starts])
    print_table("us of a pair", ["", "us"], [[part, f"{1e6 * value / pairs:.1f}"] for part, value in parts.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs=2, metavar=("SRC", "TGT"), help="parallel files, en and de")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as name:
        folder = Path(name) / "corpus"
        if args.text:
            source, target = args.text
            run_tool("tokenizer", "--text", *args.text, "--vocab_size", 16_000, "--out", folder / "tokenizer")
            run_tool("write_shards", "pairs", "--src", source, "--tgt", target, "--langs", "en", "de",
                     "--out", folder / "pairs")  # fmt: skip
        else:
            demo_data(folder, DEMO_PAIRS)
        for recipe in ("tlm",) if args.text else ("tlm", "alignlm"):
            fields = {f"streams.{recipe}.samples": SAMPLES, "data.max_length": 128, "data.workers": 0}
            print_speed(make_loader(recipe, fields, [folder / "pairs"]))


if __name__ == "__main__":
    main()
