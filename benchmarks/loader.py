"""Measure the loading of data: the speed of a worker.

    python benchmarks/loader.py [--text SRC TGT]

The pairs are those of the files --text, with a vocabulary of 16,000 tokens, or without --text those of the demo corpus.
The first table has the pairs and tokens per second with 0 workers (the training process loads the data itself), 1
worker and 2 workers. The second table has the microseconds (us) of a pair, and how many of them reading and the
tokenizer take. Both tables are printed for TLM, and with the demo corpus for AlignLM, too.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any

from common import ALONE, demo_data, make_loader, print_table, seconds_of

from data_tools import tokenizer, write_shards
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state

SAMPLES = 512
STEPS = 60
PAIRS = STEPS * SAMPLES
DEMO_PAIRS = 20_000
REPEATS = 5


def median_time(work: Callable[[], Any]) -> float:
    return median(seconds_of(work) for _ in range(REPEATS))


def seconds_through_loader(loader: Loader, workers: int) -> float:
    """Return the seconds of STEPS steps after those in which the workers start and fill their queues."""
    data = replace(loader.recipe.data, workers=workers)
    with_workers = replace(loader, recipe=replace(loader.recipe, data=data))
    batches = with_workers.batches(ALONE, "cpu", initial_state(loader.last_streams), STEPS + 8)
    for _ in islice(batches, 8):
        pass
    return seconds_of(lambda: [*batches])


def print_speed(loader: Loader) -> None:
    dataset = loader.dataset()
    mixture = loader.mixture(ALONE, "cpu", initial_state(loader.last_streams))
    plans = [mixture.next_plan_of_rank() for _ in range(STEPS)]
    tokens = sum(dataset[plan].cost()["tokens"] for plan in plans)
    table = []
    for workers in (0, 1, 2):
        seconds = median(seconds_through_loader(loader, workers) for _ in range(REPEATS))
        table.append([f"{workers} worker(s)", f"{PAIRS / seconds:,.0f}", f"{tokens / seconds:,.0f}"])
    name = loader.last_streams[0].name
    print_table(f"{name}: pairs of {tokens / PAIRS:.1f} tokens", ["", "pairs/s", "tokens/s"], table)

    (source,) = loader.corpus.sources
    encode = loader.corpus.tokenizer.encode if name == "tlm" else loader.corpus.tokenizer.encode_words
    places: list[tuple[int, int]] = []
    for plan in plans:
        places += zip(plan.tables[name].shard.tolist(), plan.tables[name].record.tolist(), strict=True)
    texts = [*chain.from_iterable(source.read(*place).texts for place in places)]
    starts = range(0, len(texts), 2 * SAMPLES)
    parts = {"whole": median_time(lambda: [dataset[plan] for plan in plans])}
    parts["reading"] = median_time(lambda: [source.read(*place) for place in places])
    parts["the tokenizer"] = median_time(lambda: [encode(texts[start : start + 2 * SAMPLES]) for start in starts])
    print_table("us of a pair", ["", "us"], [[part, f"{1e6 * value / PAIRS:.1f}"] for part, value in parts.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text",
        nargs=2,
        metavar=("SRC", "TGT"),
        help="two parallel text files, the first in English and the second in German",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as name:
        folder = Path(name) / "corpus"
        if args.text:
            source, target = args.text
            tokenizer.main(["--text", *args.text, "--vocab_size", "16000", "--out", f"{folder}/tokenizer"])
            write_shards.main(["pairs", "--src", source, "--tgt", target, "--langs", "en", "de",
                               "--out", f"{folder}/pairs"])  # fmt: skip
        else:
            demo_data(folder, DEMO_PAIRS)
        for recipe in ("tlm",) if args.text else ("tlm", "alignlm"):
            fields = {f"streams.{recipe}.samples": SAMPLES, "data.max_length": 128, "data.workers": 0}
            print_speed(make_loader(recipe, fields, [folder / "pairs"]))


if __name__ == "__main__":
    main()
