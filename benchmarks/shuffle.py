"""Is shuffling within windows of shards as good as a full shuffle?

    python benchmarks/shuffle.py [--seeds 5] [--text DIR]

The records of the corpora are sorted by length or by topic, or in no order, in shards of 8,192. The script prints the
variance of the means of batches over an epoch, relative to a full shuffle: 1.00 is as good, and without any
shuffle the ratio is about the batch size. The table has a row for each corpus and window; * marks the default window.

Then it does so for running text, whose documents are sorted by topic and whose sentences resemble their document:
the variance of batches of samples, relative to a full shuffle of pieces of documents (data/order.py) and to one of
whole documents; and the share of neighbouring sentences of a document that are neighbours in a sequence. If a stream
has many sources, a window is permuted in parts. The corpora are generated ones, and the documents of --text.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from common import print_table

from data_tools import write_shards
from data_tools.write_shards import SHARD_LINES
from xscale import rng
from xscale.data.order import WINDOW_RECORDS, EpochOrder, TextPacking, runs
from xscale.data.shards import Source

BATCHES = (64, 256)
TOPICS = 100
RECORDS = (100_000, 300_000, 1_000_000, 4_000_000)
WINDOWS = (WINDOW_RECORDS >> 3, WINDOW_RECORDS, WINDOW_RECORDS << 2)
ROOM = 115
"""The approximate number of text tokens in a sample, if data.max_length is 128."""
STORED, BYTES_A_TOKEN = 85, 4.5
"""The approximate bytes of a record besides its text, and the approximate bytes of a token."""


def corpora(records: int) -> dict[str, np.ndarray]:
    """Name of a corpus -> a scalar for each record, in the stored order [records]."""
    generator = np.random.default_rng(records)
    ends = np.sort(generator.integers(0, records, TOPICS - 1))
    topic = np.searchsorted(ends, np.arange(records), side="right")
    return {
        "by length": np.sort(generator.lognormal(3.0, 0.5, records)),
        "by topic": generator.normal(size=TOPICS)[topic],
        "in no order": generator.normal(size=records),
    }


def batch_variance(scalars: np.ndarray, batch: int) -> float:
    means = scalars[: len(scalars) // batch * batch].reshape(-1, batch).mean(1)
    return float(((means - scalars.mean()) ** 2).mean())


def epoch_order(records: int, seed: int, window: int) -> tuple[np.ndarray, EpochOrder]:
    """Record numbers in the order of an epoch [records]."""
    starts = np.arange(0, records, SHARD_LINES)
    order = EpochOrder(np.diff(np.append(starts, records)), rng.key(seed, "benchmark"), 0, window)
    found, at = [], 0
    while at < records:
        ends, shard, record, _ = order.take(at, records)
        found.append(starts[shard] + record)
        at = int(ends[-1])
    return np.concatenate(found), order


class Running(NamedTuple):
    """A corpus of documents."""

    name: str
    counts: np.ndarray
    """The number of records of each shard [n_shards]."""
    tokens: np.ndarray
    """The number of tokens of each record [records]."""
    follows: np.ndarray
    """True if a record continues the document of the record before it [records]."""

    def values(self) -> np.ndarray:
        """A scalar for each record, equal within a document and similar within a topic [records]."""
        document = np.cumsum(~self.follows) - 1
        generator = np.random.default_rng(0)
        ends = np.sort(generator.integers(0, document[-1] + 1, TOPICS - 1))
        topic = np.searchsorted(ends, np.arange(document[-1] + 1), side="right")
        return (generator.normal(size=TOPICS)[topic] + generator.normal(size=len(topic)))[document]


def generated(records: int) -> Running:
    """A corpus of documents of 1 to 2,000 sentences, with a median of 12."""
    generator = np.random.default_rng(records)
    starts = np.cumsum(generator.lognormal(2.5, 1.2, records).clip(1, 2000).astype(int))
    follows = ~np.isin(np.arange(records), np.concatenate([[0], starts]))
    follows[::SHARD_LINES] = False
    counts = np.diff(np.append(np.arange(0, records, SHARD_LINES), records))
    return Running("generated", counts, generator.lognormal(3.0, 0.5, records).astype(int) + 1, follows)


def text_of(folder: Path) -> Running:
    with tempfile.TemporaryDirectory() as out:
        arguments = ["mono", "--text", str(folder), "--lang", "xx", "--out", f"{out}/mono"]
        write_shards.main(arguments)
        source, every = Source(Path(out) / "mono"), slice(None)
        shards = range(len(source.shards))
        tokens = np.concatenate([source.lengths(shard, every) for shard in shards])
        tokens = ((tokens - STORED).clip(0) / BYTES_A_TOKEN).astype(int)
        return Running(
            folder.name,
            source.counts,
            tokens + 1,
            np.concatenate([source.lengths_and_follows(s, every)[1] for s in shards]),
        )


def samples_of(corpus: Running, seed: int, window: int, sources: int) -> tuple[np.ndarray, np.ndarray]:
    """The record numbers in the order of an epoch [records], and the places where samples start in it [samples]."""
    first = np.cumsum(corpus.counts) - corpus.counts

    def look(array: np.ndarray, shards: Sequence[int], records: Sequence[slice | np.ndarray]) -> np.ndarray:
        of = [array[first[s] :][: corpus.counts[s]][r] for s, r in zip(shards, records, strict=True)]
        return np.concatenate(of)

    def look_at_both(*places: Any) -> tuple[np.ndarray, np.ndarray]:
        return look(corpus.tokens, *places), look(corpus.follows, *places)

    text = TextPacking(lambda tokens: tokens, ROOM)
    order = EpochOrder(corpus.counts, rng.key(seed, "benchmark"), 0, window, look_at_both, text, sources)
    starts, records, at = [], [], 0
    while at < order.size:
        ends, shard, record, _ = order.take(at, order.size)
        starts.append(np.concatenate([[at], ends[:-1]]))
        records.append(first[shard] + record)
        at = int(ends[-1])
    return np.concatenate(records), np.concatenate(starts)


def permuted(corpus: Running, seed: int, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The results of `samples_of` for a full shuffle of units of records. units: the first record of each unit."""
    order = np.random.default_rng(seed).permutation(len(units))
    sizes = np.diff(units, append=len(corpus.tokens))[order]
    records = np.arange(len(corpus.tokens)) + np.repeat(units[order] - (np.cumsum(sizes) - sizes), sizes)
    starts = runs(corpus.tokens[records], np.zeros(1, dtype=np.int64), ROOM)
    return records, starts


def running_row(corpus: Running, window: int, sources: int, seeds: int) -> list[str]:
    values, documents = corpus.values(), np.flatnonzero(~corpus.follows)
    pieces = runs(corpus.tokens, documents, ROOM)

    def variances(of_seeds: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
        means = [np.add.reduceat(values[o], s) / np.diff(np.append(s, len(o))) for o, s in of_seeds]
        return [mean(batch_variance(sample, batch) for sample in means) for batch in BATCHES]

    made = [samples_of(corpus, seed, window, sources) for seed in range(seeds)]
    ours, together, whole = (
        variances(of_seeds)
        for of_seeds in (made, *([permuted(corpus, s, units) for s in range(seeds)] for units in (pieces, documents)))
    )
    records, starts = made[0]
    inside = ~np.isin(np.arange(1, len(records)), starts) & (np.diff(records) == 1) & corpus.follows[records[1:]]
    ratios = [*(a / b for a, b in zip(ours, together, strict=True)), *(a / b for a, b in zip(ours, whole, strict=True))]
    return [*(f"{ratio:.2f}" for ratio in ratios), f"{inside.sum() / corpus.follows.sum():.3f}"]


def running(corpora_of_text: list[Running], seeds: int) -> None:
    rows = []
    for corpus in corpora_of_text:
        size = f"{corpus.name}, {len(corpus.tokens):,} ({(~corpus.follows).sum():,})"
        for window, sources in ((WINDOWS[0], 1), (WINDOWS[1], 1), (WINDOWS[1], 8), (WINDOWS[1], 100)):
            star = "*" if window == WINDOW_RECORDS else ""
            rows.append([size, f"{window:,}{star}", f"{sources}", *running_row(corpus, window, sources, seeds)])
    header = ["corpus, records (documents)", "window", "sources", *(f"pieces, {b}" for b in BATCHES)]
    header += [*(f"documents, {b}" for b in BATCHES), "neighbours"]
    print_table("Running text: the same of batches of samples, over a full shuffle of", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="epochs to average over")
    parser.add_argument("--records", type=int, nargs="+", default=RECORDS, help="sizes of the corpora")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="folders of monolingual text with documents")
    args = parser.parse_args()
    running([*map(generated, args.records), *map(text_of, args.text)], args.seeds)
    rows = []
    for records in args.records:
        scalars = corpora(records)
        full = [np.random.default_rng(seed).permutation(records) for seed in range(args.seeds)]
        reference = {
            (name, batch): mean(batch_variance(values[order], batch) for order in full)
            for name, values in scalars.items()
            for batch in BATCHES
        }
        orders = {"none": [np.arange(records)]}
        for window in WINDOWS:
            made = [epoch_order(records, seed, window) for seed in range(args.seeds)]
            star = "*" if window == WINDOW_RECORDS else ""
            orders[f"{window:,}{star} ({len(made[0][1].window_ends)})"] = [order for order, _ in made]
        for label, several in orders.items():
            ratios = [
                mean(batch_variance(values[order], batch) for order in several) / reference[name, batch]
                for name, values in scalars.items()
                for batch in BATCHES
            ]
            rows.append([f"{records:,} ({-(-records // SHARD_LINES)})", label, *(f"{ratio:.2f}" for ratio in ratios)])
    header = ["records (shards)", "window (windows)"]
    header += [f"{name}, {batch}" for name in corpora(TOPICS) for batch in BATCHES]
    print_table("Variance of batch means, full shuffle = 1.00; columns: corpus, batch size", header, rows)


if __name__ == "__main__":
    main()
