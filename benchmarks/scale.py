"""Measure what a step of a thousand ranks on a large corpus costs besides GPU work, without a thousand ranks.

    python benchmarks/scale.py

10^9 records in 10^5 shards are divided evenly among 1 source or 100 sources (folders of shards), which exist in memory
only. Of 1,024 ranks, the 8 ranks of one node are planned. Prints the CPU time in which a run's own code plans the first
step (with the order of an epoch) and each of 24 later steps, and the memory that the plans keep. A step has 8k samples,
or as many as fill a packed row of 16k tokens on each rank.
"""

import multiprocessing
import pickle
import time
from itertools import product
from statistics import mean
from typing import Any

import numpy as np
import psutil
from common import print_table

from xscale.data.calibration import Calibration
from xscale.data.mixture import Mixture
from xscale.data.shards import FOLLOWS, IDX_DTYPE, Source
from xscale.data.stream import Stream
from xscale.objectives import OBJECTIVES
from xscale.recipe import DataConfig, Schedule

RECORDS = 10**9
SHARDS = 10**5
SOURCES = (1, 100)
RANKS = 1024
NODE = 8
"""The number of ranks for which one process plans."""
STEPS = 24
MAX_LENGTH = 128
MAX_TOKENS = 16384
BATCH = 8192
PER_RANK = {"pair": 234, "mono": 128}
"""The samples of a step; the samples of each rank, by kind of record, that fill a packed row of MAX_TOKENS tokens."""
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

    def index_entries(self, shard: int) -> np.ndarray:
        return self.index_of_all[self.documents[shard % len(self.documents)] :][: self.counts[shard]]


def planning_cells(kind: str, source_count: int, batch: int) -> list[str]:
    """Plan steps of `batch` samples. Returns the cells of the table."""
    counts = np.full(SHARDS // source_count, RECORDS // SHARDS)
    sources: list[Any] = [InMemory(number, kind, counts) for number in range(source_count)]
    objective = OBJECTIVES["mlm" if kind == "mono" else "tlm"]
    stream = Stream("stream", objective, None, tuple(range(source_count)), batch)
    schedules = (
        Schedule.constant([stream]),
        Schedule.constant(DataConfig(max_length=MAX_LENGTH)),
        Calibration([(0.25, 0.0)] * source_count, {}),
    )
    memory = psutil.Process().memory_info
    bytes_before = memory().rss
    times = [time.process_time()]
    mixture = Mixture(*schedules, sources, seed=0, max_tokens=MAX_TOKENS, rank=0, world=RANKS)
    for _ in range(STEPS + 1):
        for plan in mixture.next_plan().parts_of_ranks([*range(NODE)]):
            pickle.dumps(plan)  # as it is sent
        times.append(time.process_time())
    first, *steps = np.diff(times).tolist()
    kept = (memory().rss - bytes_before) / 1e6
    return [f"{first:.2f}", f"{1e3 * mean(steps):,.1f}", f"{1e3 * max(steps):,.1f}", f"{kept:,.0f}"]


def main() -> None:
    rows = []
    for kind, source_count in product(BYTES, SOURCES):
        for batch in (BATCH, PER_RANK[kind] * RANKS):
            with multiprocessing.get_context("fork").Pool(1) as pool:  # its memory is that of this case
                cells = pool.apply(planning_cells, (kind, source_count, batch))
            rows.append([f"{kind}, sources: {source_count}, {batch // 1024}k", *cells])
    title = f"Planning: {RECORDS:,} records in {SHARDS:,} shards, {RANKS:,} ranks"
    print_table(title, ["", "first, s", "mean, ms", "longest, ms", "kept, MB"], rows)


if __name__ == "__main__":
    main()
