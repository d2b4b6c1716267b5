"""The order of a source's records: a pure function of (shard sizes, seed, epoch).

Each epoch deals the shards out to windows of about `window` records and permutes the records of a window. So a shard
is opened and read through once an epoch, while neighbours in a batch come from all over the source
(benchmarks/shuffle.py measures how well), and memory is that of one window whatever the size of the source.
"""

import bisect

import numpy as np

from xscale import rng

WINDOW_RECORDS = 1 << 20
WINDOW_SHARDS = 256
"""A window has no more shards than a reader keeps open."""


class EpochOrder:
    """Maps positions of one epoch to (shard, record)."""

    def __init__(self, counts: np.ndarray, seed: np.uint64, epoch: int, window: int = WINDOW_RECORDS):
        """counts: records of each shard [n_shards]; seed: 64-bit key of the stream and source."""
        self.counts = counts
        self.key = rng.hash64(seed, np.uint64(epoch))
        # Of each run of `windows` neighbouring shards one goes to each window, so that every window is a cross-section
        # of a source that is sorted by topic or length.
        number = np.arange(len(counts))
        enough = max(int(counts.sum()) // window, -(-len(counts) // WINDOW_SHARDS), 1)
        windows = min(enough, len(counts))
        drawn = np.lexsort((rng.hash64(rng.hash64(self.key, np.uint64(0)), number), number // windows))
        members = [drawn[w::windows] for w in range(windows)]
        self.shards = np.concatenate(members)
        self.window_ends = np.cumsum([len(m) for m in members]).tolist()
        self.ends = np.cumsum(counts[self.shards])
        self.size = int(self.ends[-1])
        self._window: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def bounds(self, position: int) -> tuple[int, int, int]:
        """(window, first position, end position) of the window that holds `position`."""
        shard = int(np.searchsorted(self.ends, position, side="right"))
        window = bisect.bisect_right(self.window_ends, shard)
        first_shard = self.window_ends[window - 1] if window else 0
        first = int(self.ends[first_shard - 1]) if first_shard else 0
        return window, first, int(self.ends[self.window_ends[window] - 1])

    def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Shard and record numbers [stop - start] of positions start..stop-1; 0 <= start < stop <= size."""
        ordinals = []
        while start < stop:
            window, first, end = self.bounds(start)
            if self._window[0] != window:
                self._window = (
                    window,
                    rng.permutation(rng.hash64(self.key, np.uint64(window + 1)), end - first) + first,
                )
            until = min(stop, end)
            ordinals.append(self._window[1][start - first : until - first])
            start = until
        ordinal = np.concatenate(ordinals)
        slot = np.searchsorted(self.ends, ordinal, side="right")
        return self.shards[slot], ordinal - (self.ends[slot] - self.counts[self.shards[slot]])
