"""Is shuffling within windows of shards as good as a full shuffle?

    python benchmarks/shuffle.py [--seeds 5]

Takes corpora whose records lie in the worst order, sorted by a scalar (say, length) or topic by topic, in shards of
8,192, and prints the variance of batch means over an epoch as a ratio to a full shuffle's: 1.00 is as good, and
without any shuffle the ratio is about the batch size. Rows: corpora and windows; the default window is marked *.
"""

import argparse
from statistics import mean

import numpy as np
from common import print_table

from data_tools.write_shards import SHARD_LINES
from xscale import rng
from xscale.data.order import WINDOW_RECORDS, EpochOrder

BATCHES = (64, 256)
TOPICS = 100
RECORDS = (100_000, 300_000, 1_000_000, 4_000_000)
WINDOWS = (WINDOW_RECORDS >> 3, WINDOW_RECORDS, WINDOW_RECORDS << 2)


def corpora(records: int) -> dict[str, np.ndarray]:
    """A scalar of each record, in the order of the records [records]."""
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
    shard, record = order.locate(0, records)
    return starts[shard] + record, order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="epochs to average over")
    parser.add_argument("--records", type=int, nargs="+", default=RECORDS, help="sizes of the corpora")
    args = parser.parse_args()
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
