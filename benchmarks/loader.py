"""Measure the loading of data: speed of a worker, time to resume, memory of the order, opens of shard files.

    python benchmarks/loader.py [--text SRC TGT] [--records 1000000] [--steps 60] [--max_tokens 4096]

The script writes a corpus of pairs with 15 words on each side and a 16k tokenizer into a temporary directory (from two
parallel files, plain, .gz or .xz, or else from the demo world), and prints
  1. pairs, tokens and packed rows per second of TLM, and of AlignLM if there are links (the demo world): read from
     shards, tokenised, masked, packed into rows of --max_tokens (512 pairs per step), by the process itself and by
     DataLoader with 1 and 2 workers; then the parts of a pair's time
  2. seconds from opening the source to the first step, at record 0 (a new run, which measures the tokens per byte) and
     at 90 % of the source (a resume, which knows them), with files cached and not cached
  3. memory of the order of 10^5, 10^7 and 10^9 records, and the time to select the records of one step
  4. how often a shard is opened in an epoch, and the distance between its first and its last read
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
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import median_time, print_table, text_pairs, timed, with_words, write_pairs, write_tokenizer

from data_tools.steps import CHUNK_UNITS as SHARD_LINES
from xscale.data import shards as shards_of
from xscale.data.calibration import Calibration
from xscale.data.loader import StepDataset
from xscale.data.mixture import Mixture, StepPlan, StreamSpec, initial_state
from xscale.data.order import WINDOW_RECORDS, WINDOW_SHARDS, EpochOrder
from xscale.data.shards import OPEN_FILES, Source
from xscale.ranks import Process
from xscale.run_spec import RunSpec, resolve_run

WORDS, SAMPLES, MAX_LENGTH, VOCAB_SIZE = 15, 512, 128, 16_000
UNIQUE_PAIRS = 20_000
SPECS = [StreamSpec("tlm", (0,), SAMPLES, packed=False)]
ALONE, DEVICE = Process(0, 1, 0, 1), "cpu"
SMALL_SHARD = 1024
"""The number of records in a shard of the small size that other tools may write."""
REPEATS = 5


def open_job(directory: Path, max_tokens: int | None, recipe: str = "tlm") -> RunSpec:
    """A run of a recipe on a directory of pairs, with the tokenizer beside it; lengths are not measured yet."""
    fields = {
        f"streams.{recipe}.samples": SAMPLES,
        "data.max_length": MAX_LENGTH,
        "train.max_tokens": "null" if max_tokens is None else max_tokens,
    }
    return resolve_run(recipe, [f"{name}={value}" for name, value in fields.items()], [directory])


def with_workers(run_spec: RunSpec, workers: int) -> RunSpec:
    return replace(run_spec, recipe=replace(run_spec.recipe, data=replace(run_spec.recipe.data, workers=workers)))


def first_mixture(run_spec: RunSpec) -> Mixture:
    return run_spec.mixture(ALONE, DEVICE, run_spec.specs, initial_state(run_spec.specs))


def speed(run_spec: RunSpec, steps: int) -> None:
    dataset, draws = run_spec.dataset(run_spec.specs), first_mixture(run_spec)
    plans = [draws.next_step() for _ in range(steps)]
    dataset[plans[0]]

    def through_loader(workers: int) -> float:
        batches = with_workers(run_spec, workers).batches(ALONE, DEVICE, initial_state(run_spec.specs), steps + 8)
        for _ in islice(batches, 8):  # workers have started and their queues are full
            pass
        return timed(lambda: list(batches))[0]

    seconds = {"one process, plans given": median_time(lambda: [dataset[plan] for plan in plans], REPEATS)}
    for workers in (0, 1, 2):
        name = f"DataLoader, {workers} worker{'s' * (workers != 1)}"
        seconds[name] = median(through_loader(workers) for _ in range(REPEATS))
    batches = [dataset[plan] for plan in plans]
    pairs, rows = steps * SAMPLES, sum(len(batch.rows) for batch in batches)
    tokens = sum(batch.work().tokens for batch in batches)
    title = (
        f"1. {run_spec.specs[0].name}: pairs of {WORDS} words a side, {tokens / pairs:.1f} tokens (vocabulary "
        f"{run_spec.tokenizer.vocab_size:,}); "
        f"{rows / steps:.1f} rows a step, of {tokens / rows:,.0f} tokens (max_tokens {run_spec.max_tokens(DEVICE):,})"
    )
    table = [[name, *(f"{n / s:,.0f}" for n in (pairs, tokens)), f"{rows / s:,.1f}"] for name, s in seconds.items()]
    print_table(title, ["", "pairs/s", "tokens/s", "rows/s"], table)
    parts(run_spec, dataset, plans)


def parts(run_spec: RunSpec, dataset: StepDataset, plans: list[StepPlan]) -> None:
    """Print the time of each stage of loading by itself, over the same records."""
    (source,), (spec,) = run_spec.sources, run_spec.specs
    encode = run_spec.tokenizer.encode if spec.name == "tlm" else run_spec.tokenizer.encode_words
    places = [
        place
        for plan in plans
        for row in plan.rows
        for place in zip(row[spec.name].shard.tolist(), row[spec.name].record.tolist(), strict=True)
    ]
    texts = [t for shard, record in places for t in source.read(shard, record).texts]
    steps = [texts[i : i + 2 * SAMPLES] for i in range(0, len(texts), 2 * SAMPLES)]
    draws = first_mixture(run_spec)
    batch = dataset[plans[0]]
    seconds = {
        "draw the step, cut it into rows (main process)": median_time(
            lambda: [draws.next_step() for _ in plans], REPEATS
        ),
        "read records": median_time(lambda: [source.read(*place) for place in places], REPEATS),
        "tokenise": median_time(lambda: [encode(step) for step in steps], REPEATS),
    }
    whole = median_time(lambda: [dataset[plan] for plan in plans], REPEATS)
    seconds["mask, collate, lay out, the rest"] = whole - seconds["read records"] - seconds["tokenise"]
    seconds["to the main process and back (pickle)"] = len(plans) * median_time(
        lambda: pickle.loads(pickle.dumps(batch)), REPEATS
    )
    rows = [[name, f"{1e6 * value / len(places):.1f}"] for name, value in seconds.items()]
    print_table("   where a pair's time goes", ["", "us/pair"], rows)


def resume(directory: Path, max_tokens: int | None, found: Calibration) -> None:
    """Print the seconds to the first step. found: the measured lengths, which a checkpoint keeps."""

    def first_batch(position: int) -> tuple[float, ...]:
        opened, run_spec = timed(lambda: with_workers(open_job(directory, max_tokens), 0))
        measured, run_spec = timed(lambda: run_spec.calibrated(found if position else None))
        state = initial_state(run_spec.specs)
        state["positions"]["tlm"] = [[0, position]]
        state["step"] = position // SAMPLES
        made, batch = timed(lambda: next(run_spec.batches(ALONE, DEVICE, state, steps=1)))
        assert batch.state["positions"]["tlm"] == [[0, position + SAMPLES]]
        return opened, measured, made, opened + measured + made

    records = Source(directory).records
    rows = []
    for cached in (True, False):
        for share in (0.0, 0.9):
            times = []
            for _ in range(REPEATS):
                if not cached:
                    forget(directory)
                times.append(first_batch(int(records * share)))
            where = f"record {int(records * share):,}, files {'in' if cached else 'not in'} the page cache"
            rows.append([where, *(f"{median(column):.3f}" for column in zip(*times, strict=True))])
    title = f"2. Seconds to the first step of a source of {records:,} pairs"
    print_table(title, ["", "open, check", "measure lengths", "first batch", "sum"], rows)


def forget(directory: Path) -> None:
    """Drop a directory's files from the page cache."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@dataclass
class Sizes:
    """A source without records, which has the sizes that the order of an epoch needs."""

    counts: np.ndarray
    name: str = "en-xx"
    fingerprint: str = "none"

    @property
    def records(self) -> int:
        return int(self.counts.sum())

    def lengths(self, shard: int, records: np.ndarray) -> np.ndarray:
        return np.full(len(records), 200)


def memory(max_tokens: int) -> None:
    rows = []
    for records in (10**5, 10**7, 10**9):
        source = Sizes(np.diff(np.arange(0, records + SHARD_LINES, SHARD_LINES).clip(max=records)))
        tracemalloc.start()
        seconds, order = timed(lambda source=source: EpochOrder(source.counts, np.uint64(1), 0))
        alone = tracemalloc.get_traced_memory()[0]
        order.take(0, SAMPLES)
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        draws = Mixture(
            SPECS, [source], Calibration([(0.25, 0.0)], {}), seed=0, alpha=0.7, max_length=MAX_LENGTH,
            max_tokens=max_tokens, rank=0, world=1,
        )  # fmt: skip
        first, _ = timed(draws.next_step)
        steps = sorted(timed(draws.next_step)[0] for _ in range(2 * WINDOW_RECORDS // SAMPLES))
        megabytes = [f"{size / 1e6:.2f}" for size in (alone, kept, peak)]
        milliseconds = [f"{1e3 * value:.2f}" for value in (seconds, first, median(steps), steps[-1])]
        rows.append([f"{records:,}", f"{len(source.counts):,}", *megabytes, *milliseconds])
    header = ["records", "shards", "order, MB", "+ window", "peak", "made in, ms", "first step", "median", "longest"]
    print_table(f"3. The order of an epoch, and drawing steps of {SAMPLES}", header, rows)


@contextmanager
def counted_opens() -> Iterator[Counter]:
    """Count how often each .tar file is opened in this process, by file name."""
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


def opens(run_spec: RunSpec) -> None:
    """Print how often shards are opened in an epoch: by the main process, which plans, and by a worker, which reads."""
    main, worker = (Source(run_spec.sources[0].directory) for _ in range(2))
    draws = first_mixture(replace(run_spec, sources=[main]))
    steps = main.records // SAMPLES
    plans = []
    with counted_opens() as of_main:
        plans = [draws.next_step() for _ in range(steps)]
    shards = np.concatenate([row["tlm"].shard for plan in plans for row in plan.rows])
    records = np.concatenate([row["tlm"].record for plan in plans for row in plan.rows])
    most = 0
    with counted_opens() as of_worker:
        for shard, record in zip(shards.tolist(), records.tolist(), strict=True):
            worker.read(shard, record)
            most = max(most, len(shards_of._open))
    spans = [np.ptp(np.flatnonzero(shards == shard)) + 1 for shard in range(len(main.shards))]
    full = np.random.default_rng(0).permutation(np.repeat(np.arange(len(main.shards)), main.counts))
    small = np.full(main.records // SMALL_SHARD, SMALL_SHARD)
    _, of_small, _, _ = EpochOrder(small, np.uint64(1), 0).take(0, int(small.sum()))
    order = EpochOrder(main.counts, np.uint64(1), 0)
    rows = [
        ["windows of the order", f"{len(order.window_ends)}"],
        ["opens of a shard by a worker, mean", f"{of_worker.total() / len(main.shards):.2f}"],
        ["opens of a shard by a worker, most", f"{max(of_worker.values())}"],
        ["opens of a shard by the main process, mean", f"{of_main.total() / len(main.shards):.2f}"],
        [f"shards open at the same time, most (limit {OPEN_FILES // 2})", f"{most}"],
        ["a shard's first to last read, share of the epoch", f"{max(spans) / steps / SAMPLES:.3f}"],
        [f"in shards of {SMALL_SHARD:,}: opens of a shard, mean", f"{cache_misses(of_small) / len(small):,.2f}"],
        ["in a full shuffle: opens of a shard, mean", f"{cache_misses(full) / len(main.shards):,.1f}"],
        ["in a full shuffle: a shard's first to last read", "1.000"],
    ]
    title = f"4. One epoch of {main.records:,} pairs in {len(main.shards)} shards of {SHARD_LINES:,}"
    print_table(title, ["", ""], rows)


def cache_misses(shards: np.ndarray) -> int:
    """The number of opens of shards, if the WINDOW_SHARDS shards that were used last stay open."""
    held: dict[int, None] = {}
    misses = 0
    for shard in shards.tolist():
        if shard in held:
            del held[shard]
        else:
            misses += 1
            if len(held) == WINDOW_SHARDS:
                del held[next(iter(held))]
        held[shard] = None
    return misses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs=2, metavar=("SRC", "TGT"), help="parallel files to take words from")
    parser.add_argument("--records", type=int, default=1_000_000, help="pairs of the source")
    parser.add_argument("--steps", type=int, default=60, help="steps of 512 pairs in each repetition of part 1")
    parser.add_argument("--max_tokens", type=int, help="of a row (default: a run's on a CPU)")
    args = parser.parse_args()
    if args.records < 2 * SAMPLES * 10:
        sys.exit(f"error: --records {args.records} must be at least {2 * SAMPLES * 10}")
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        langs, pairs = text_pairs(args.text)
        pool = list(islice(with_words(pairs, WORDS), UNIQUE_PAIRS))
        write_tokenizer(pool, VOCAB_SIZE, Path(folder) / "tokenizer")
        seconds, source = timed(lambda: write_pairs(pool, langs, Path(folder) / "pairs", args.records))
        shards, size = len(source.shards), source.bytes / 1e6
        print(f"corpus: {source.records:,} pairs, {shards} shards, {size:,.0f} MB, written in {seconds:.0f} s")
        run_spec = open_job(source.directory, args.max_tokens).calibrated()
        speed(run_spec, args.steps)
        if not args.text:
            speed(open_job(source.directory, args.max_tokens, "alignlm").calibrated(), args.steps)
        resume(source.directory, args.max_tokens, run_spec.calibration)
        memory(run_spec.max_tokens(DEVICE))
        opens(run_spec)


if __name__ == "__main__":
    main()
