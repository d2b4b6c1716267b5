"""Measure what a step of a thousand ranks on a large corpus costs besides GPU work, without a thousand ranks.

    python benchmarks/scale.py [--records 1000000000] [--shards 100000] [--ranks 1024] [--steps 24]
                               [--sources 1 100]

The records are divided evenly among 1 and 100 sources, which exist in memory only (.idx data without text). Prints
for planning with a run's own code, for the ranks of a node: CPU time of the first step (which includes the order of an
epoch) and of a later step, also as the share of one rank, and the longest one; the memory that is kept, and its peak.
Steps have 8k samples, or as many as fill a packed row of 16k tokens on each rank.
"""

import argparse
import multiprocessing
import pickle
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from common import print_table

from xscale.data.calibration import Calibration
from xscale.data.mixture import Mixture
from xscale.data.shards import FOLLOWS, IDX_DTYPE, Source
from xscale.data.stream import Stream
from xscale.objectives import OBJECTIVES
from xscale.recipe import DataConfig, Schedule

MAX_LENGTH = 128
MAX_TOKENS = 16384
BATCH = 8192
PER_RANK = {"pair": 234, "mono": 128}
"""The samples of a step; the samples of each rank, by kind of record, that fill a packed row of MAX_TOKENS tokens."""
NODE = 8
"""The number of ranks for which one process plans."""
BYTES = {"pair": 250, "mono": 120}
"""The mean number of bytes of a record; a token has 4 bytes."""
DOCUMENT = 10
"""The mean number of sentences of a document."""


class InMemory(Source):
    """A source without files: every shard's index is a stretch of one array."""

    def __init__(self, number: int, kind: str, counts: np.ndarray):
        self.langs = (f"l{number:02}",) if kind == "mono" else ("en", f"l{number:02}")
        self.counts = counts
        self.records = int(counts.sum())
        self.fingerprint = f"{number}"
        self.remote = None
        random = np.random.default_rng(number)
        most = int(counts.max())
        self.index_of_all = np.zeros(2 * most, dtype=IDX_DTYPE)
        lengths = random.gamma(4, BYTES[kind] / 4, 2 * most).clip(20, 1000).astype(np.uint32)
        self.index_of_all["length"] = lengths | np.where(random.random(2 * most) < 1 - 1 / DOCUMENT, FOLLOWS, 0)
        self.index_of_all["offset"] = np.cumsum(lengths)
        self.documents = np.flatnonzero(self.index_of_all["length"][:most] < FOLLOWS)

    def entries(self, shard: int) -> np.ndarray:
        return self.index_of_all[self.documents[shard % len(self.documents)] :][: self.counts[shard]]


def sources_of(kind: str, sources: int, records: int, shards: int) -> list[Any]:
    """`sources` sources in memory, with `records` records and `shards` shards in all."""
    counts = np.full(shards // sources, records // shards)
    return [InMemory(number, kind, counts) for number in range(sources)]


def mixture_of(kind: str, sources: list[Any], batch: int, ranks: int) -> Mixture:
    objective = OBJECTIVES["mlm" if kind == "mono" else "tlm"]
    stream = Stream("stream", objective, None, tuple(range(len(sources))), batch)
    return Mixture(
        Schedule.constant([stream]),
        Schedule.constant(DataConfig(max_length=MAX_LENGTH)),
        Schedule.constant(Calibration([(0.25, 0.0)] * len(sources), {})),
        sources,
        seed=0,
        max_tokens=MAX_TOKENS,
        rank=0,
        world=ranks,
    )


def memory(field: str) -> float:
    """Return the MB of memory of this process. field: VmRSS, the present value, or VmHWM, the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1e3


def planning(kind: str, number: int, batch: int, args: argparse.Namespace) -> list[str]:
    sources = sources_of(kind, number, args.records, args.shards)
    before = memory("VmRSS")
    started = time.process_time()
    mixture = mixture_of(kind, sources, batch, args.ranks)
    times = [started]
    for _ in range(args.steps + 1):
        for plan in mixture.next_plan().parts([*range(min(NODE, args.ranks))]):
            pickle.dumps(plan)  # as it is sent
        times.append(time.process_time())
    first, *steps = np.diff(times).tolist()
    values = (median(steps), mean(steps), mean(steps) / min(NODE, args.ranks), max(steps))
    cells = [f"{first:.2f}", *(f"{1e3 * value:,.1f}" for value in values)]
    return cells + [f"{memory(field) - before:,.0f}" for field in ("VmRSS", "VmHWM")]


def alone(work: Callable[..., Any], *args: Any) -> Any:
    """Run `work` in a process of its own, so that the process's memory is that of `work`. Returns its result."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(work, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10**9)
    parser.add_argument("--shards", type=int, default=10**5)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=24, help="planned in each case, after the first")
    parser.add_argument("--sources", type=int, nargs="+", default=[1, 100])
    args = parser.parse_args()
    cases = {}
    for kind, number in product(BYTES, args.sources):
        for batch in (BATCH, PER_RANK[kind] * args.ranks):
            cases[f"{kind}, sources: {number}, {batch // 1024}k"] = (kind, number, batch)
    rows = [[name, *alone(planning, *case, args)] for name, case in cases.items()]
    title = f"Planning: {args.records:,} records in {args.shards:,} shards, {args.ranks:,} ranks"
    print_table(title, ["", "first, s", "median, ms", "mean", "of a rank", "longest", "kept, MB", "peak, MB"], rows)


if __name__ == "__main__":
    main()
