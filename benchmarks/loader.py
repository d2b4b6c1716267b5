"""The data path: speed of a worker, time to resume, memory of the order, opens of shard files.

    python benchmarks/loader.py [--text SRC TGT] [--records 1000000] [--steps 60]

writes a corpus of pairs of 15 words a side and a 16k tokenizer into a temporary directory (from two parallel files,
plain, .gz or .xz, or else from the demo world), and prints
  1. TLM pairs/s: read from shards, tokenised, masked, collated (512 pairs a step, micro-batches of 32), by the process
     itself and through DataLoader with 1 and 2 workers; then where the time of a pair goes
  2. seconds from opening the source to the first step, at record 0 and at 90 % of it, files cached and not
  3. memory of the order of 10^5, 10^7 and 10^9 records, and the time of drawing one step
  4. how often a shard is opened in an epoch, and how far apart its first and last read lie
"""

import argparse
import os
import pickle
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import median_time, print_table, text_pairs, timed, with_words, write_pairs, write_tokenizer

from data_tools.write_shards import SHARD_LINES
from xscale.data.collate import Context
from xscale.data.encode import TextEncoder
from xscale.data.index import OPEN_SHARDS, Source
from xscale.data.loader import StepDataset, StreamCollate, source_statistics, step_batches
from xscale.data.mixture import Mixture, StepPlan, StreamSpec, initial_state
from xscale.data.order import WINDOW_RECORDS, EpochOrder
from xscale.objectives import OBJECTIVES

WORDS, SAMPLES, MICRO_BATCH, MAX_LENGTH, VOCAB_SIZE = 15, 512, 32, 128, 16_000
UNIQUE_PAIRS = 20_000
SPECS = [StreamSpec("tlm", (0,), SAMPLES, packed=False)]
SMALL_SHARD = 1024
"""Records of a shard as others may write them."""
REPEATS = 5


def mixture(source: Any, tokens_per_byte: float, state: dict[str, Any] | None = None) -> Mixture:
    options: dict[str, Any] = {"seed": 0, "alpha": 0.7, "max_length": MAX_LENGTH, "micro_batch": MICRO_BATCH}
    return Mixture(SPECS, [source], [tokens_per_byte], **options, rank=0, world=1, state=state or initial_state(SPECS))


def step_dataset(source: Source, text: TextEncoder) -> StepDataset:
    tlm = OBJECTIVES["tlm"]
    languages = {language: number for number, language in enumerate(source.langs)}
    context = Context(text, MAX_LENGTH, "drop", languages)
    return StepDataset([source], {"tlm": StreamCollate(tlm.collate, tlm.options(), words=False)}, context, seed=0)


def speed(source: Source, text: TextEncoder, steps: int) -> None:
    rate = source_statistics(source, text)
    dataset = step_dataset(source, text)
    draws = mixture(source, rate)
    plans = [draws.next_step() for _ in range(steps)]
    dataset[plans[0]]
    pairs = steps * SAMPLES

    def through_loader(workers: int) -> float:
        batches = step_batches(mixture(source, rate), dataset, workers, steps + 8)
        for _ in islice(batches, 8):  # workers have started and their queues are full
            pass
        seconds, _ = timed(lambda: list(batches))
        return pairs / seconds

    rates = {"one process, plans given": pairs / median_time(lambda: [dataset[plan] for plan in plans], REPEATS)}
    for workers in (0, 1, 2):
        name = f"DataLoader, {workers} worker{'s' * (workers != 1)}"
        rates[name] = median(through_loader(workers) for _ in range(REPEATS))
    tokens = sum(dataset[plan].total("tokens") for plan in plans) / pairs
    title = f"1. TLM pairs of {WORDS} words a side, {tokens:.1f} tokens (vocabulary {text.vocab_size:,})"
    print_table(title, ["", "pairs/s"], [[name, f"{value:,.0f}"] for name, value in rates.items()])
    parts(source, text, dataset, plans, rate)


def parts(source: Source, text: TextEncoder, dataset: StepDataset, plans: list[StepPlan], rate: float) -> None:
    """Each stage by itself, over the same records."""
    places = [
        place
        for plan in plans
        for draw in plan.micros["tlm"]
        for place in zip(draw.shard.tolist(), draw.record.tolist(), strict=True)
    ]
    texts = [t for shard, record in places for t in source.read(shard, record).texts]
    steps = [texts[i : i + 2 * SAMPLES] for i in range(0, len(texts), 2 * SAMPLES)]
    draws = mixture(source, rate)
    batch = dataset[plans[0]]
    seconds = {
        "draw the step (main process)": median_time(lambda: [draws.next_step() for _ in plans], REPEATS),
        "read records": median_time(lambda: [source.read(*place) for place in places], REPEATS),
        "tokenise": median_time(lambda: [text.encode(step) for step in steps], REPEATS),
    }
    whole = median_time(lambda: [dataset[plan] for plan in plans], REPEATS)
    seconds["mask, collate, the rest"] = whole - seconds["read records"] - seconds["tokenise"]
    seconds["to the main process and back (pickle)"] = len(plans) * median_time(
        lambda: pickle.loads(pickle.dumps(batch)), REPEATS
    )
    rows = [[name, f"{1e6 * value / len(places):.1f}"] for name, value in seconds.items()]
    print_table("   where a pair's time goes", ["", "us/pair"], rows)


def resume(directory: Path, text: TextEncoder) -> None:
    def first_batch(position: int) -> tuple[float, float]:
        def start() -> tuple[Source, float]:
            source = Source(directory)
            source.check_sizes()
            return source, source_statistics(source, text)

        def first(source: Source, rate: float) -> None:
            state = initial_state(SPECS)
            state["positions"]["tlm"] = [[0, position]]
            state["step"] = position // SAMPLES
            batch = next(step_batches(mixture(source, rate, state), step_dataset(source, text), workers=0, steps=1))
            assert batch.state["positions"]["tlm"] == [[0, position + SAMPLES]]

        opened, (source, rate) = timed(start)
        return opened, timed(lambda: first(source, rate))[0]

    records = Source(directory).records
    rows = []
    for cached in (True, False):
        for share in (0.0, 0.9):
            times = []
            for _ in range(REPEATS):
                if not cached:
                    forget(directory)
                times.append(first_batch(int(records * share)))
            opened, step = (median(column) for column in zip(*times, strict=True))
            where = f"record {int(records * share):,}, files {'in' if cached else 'not in'} the page cache"
            rows.append([where, f"{opened:.3f}", f"{step:.3f}", f"{opened + step:.3f}"])
    title = f"2. Seconds to the first step of a source of {records:,} pairs"
    print_table(title, ["", "open, check", "first batch", "sum"], rows)


def forget(directory: Path) -> None:
    """Drop a directory's files from the page cache."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@dataclass
class Sizes:
    """A source of which only the order is looked at."""

    counts: np.ndarray
    name: str = "en-xx"
    fingerprint: str = "none"

    @property
    def records(self) -> int:
        return int(self.counts.sum())

    def lengths(self, shard: int, records: np.ndarray) -> np.ndarray:
        return np.full(len(records), 200)


def memory() -> None:
    rows = []
    for records in (10**5, 10**7, 10**9):
        source = Sizes(np.diff(np.arange(0, records + SHARD_LINES, SHARD_LINES).clip(max=records)))
        tracemalloc.start()
        seconds, order = timed(lambda source=source: EpochOrder(source.counts, np.uint64(1), 0))
        alone = tracemalloc.get_traced_memory()[0]
        order.locate(0, SAMPLES)
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        draws = mixture(source, 0.25)
        first, _ = timed(draws.next_step)
        steps = sorted(timed(draws.next_step)[0] for _ in range(2 * WINDOW_RECORDS // SAMPLES))
        megabytes = [f"{size / 1e6:.2f}" for size in (alone, kept, peak)]
        milliseconds = [f"{1e3 * value:.2f}" for value in (seconds, first, median(steps), steps[-1])]
        rows.append([f"{records:,}", f"{len(source.counts):,}", *megabytes, *milliseconds])
    header = ["records", "shards", "order, MB", "+ window", "peak", "made in, ms", "first step", "median", "longest"]
    print_table(f"3. The order of an epoch, and drawing steps of {SAMPLES}", header, rows)


@contextmanager
def counted_opens() -> Iterator[Counter]:
    """Counts opens of .tar files in this process, by path."""
    counts: Counter = Counter()
    original = os.open

    def counting(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith(".tar"):
            counts[Path(path).name] += 1
        return original(path, *args, **kwargs)

    os.open = counting
    try:
        yield counts
    finally:
        os.open = original


def opens(directory: Path, rate: float) -> None:
    """An epoch's plans by the main process, its reads by a worker's copy of the source."""
    main, worker = Source(directory), Source(directory)
    draws = mixture(main, rate)
    steps = main.records // SAMPLES
    plans = []
    with counted_opens() as of_main:
        plans = [draws.next_step() for _ in range(steps)]
    shards = np.concatenate([draw.shard for plan in plans for draw in plan.micros["tlm"]])
    records = np.concatenate([draw.record for plan in plans for draw in plan.micros["tlm"]])
    most = 0
    with counted_opens() as of_worker:
        for shard, record in zip(shards.tolist(), records.tolist(), strict=True):
            worker.read(shard, record)
            most = max(most, len(worker._files))
    spans = [np.ptp(np.flatnonzero(shards == shard)) + 1 for shard in range(len(main.shards))]
    full = np.random.default_rng(0).permutation(np.repeat(np.arange(len(main.shards)), main.counts))
    small = np.full(main.records // SMALL_SHARD, SMALL_SHARD)
    of_small, _ = EpochOrder(small, np.uint64(1), 0).locate(0, int(small.sum()))
    order = EpochOrder(main.counts, np.uint64(1), 0)
    rows = [
        ["windows of the order", f"{len(order.window_ends)}"],
        ["opens of a shard by a worker, mean", f"{of_worker.total() / len(main.shards):.2f}"],
        ["opens of a shard by a worker, most", f"{max(of_worker.values())}"],
        ["opens of a shard by the main process (for its .idx), mean", f"{of_main.total() / len(main.shards):.2f}"],
        [f"shards open at the same time, most (limit {OPEN_SHARDS})", f"{most}"],
        ["a shard's first to last read, share of the epoch", f"{max(spans) / steps / SAMPLES:.3f}"],
        [f"in shards of {SMALL_SHARD:,}: opens of a shard, mean", f"{cache_misses(of_small) / len(small):,.2f}"],
        ["in a full shuffle: opens of a shard, mean", f"{cache_misses(full) / len(main.shards):,.1f}"],
        ["in a full shuffle: a shard's first to last read", "1.000"],
    ]
    title = f"4. One epoch of {main.records:,} pairs in {len(main.shards)} shards of {SHARD_LINES:,}"
    print_table(title, ["", ""], rows)


def cache_misses(shards: np.ndarray) -> int:
    """Opens, if the OPEN_SHARDS shards that were used last stay open."""
    held: dict[int, None] = {}
    misses = 0
    for shard in shards.tolist():
        if shard in held:
            del held[shard]
        else:
            misses += 1
            if len(held) == OPEN_SHARDS:
                del held[next(iter(held))]
        held[shard] = None
    return misses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs=2, metavar=("SRC", "TGT"), help="parallel files to take words from")
    parser.add_argument("--records", type=int, default=1_000_000, help="pairs of the source")
    parser.add_argument("--steps", type=int, default=60, help="steps of 512 pairs in each repetition of part 1")
    args = parser.parse_args()
    if args.records < 2 * SAMPLES * 10:
        sys.exit(f"error: --records {args.records} must be at least {2 * SAMPLES * 10}")
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        langs, pairs = text_pairs(args.text)
        pool = list(islice(with_words(pairs, WORDS), UNIQUE_PAIRS))
        text = TextEncoder(write_tokenizer(pool, VOCAB_SIZE, Path(folder) / "tokenizer"))
        seconds, source = timed(lambda: write_pairs(pool, langs, Path(folder) / "pairs", args.records))
        shards, size = len(source.shards), source.bytes / 1e6
        print(f"corpus: {source.records:,} pairs, {shards} shards, {size:,.0f} MB, written in {seconds:.0f} s")
        speed(source, text, args.steps)
        resume(source.directory, text)
        memory()
        opens(source.directory, source_statistics(source, text))


if __name__ == "__main__":
    main()
