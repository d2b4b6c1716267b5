"""The order of a source's records: a pure function of (shard sizes, seed, epoch).

Each epoch permutes the shards, groups them into windows of at least `window` records and permutes the records of a
window. So a shard is read through once an epoch, while neighbours in a batch come from all over the source, and
memory is that of one window whatever the size of the source.
"""

import bisect

import numpy as np

from xscale import rng

WINDOW_RECORDS = 1 << 17


class EpochOrder:
    """Maps positions of one epoch to (shard, record)."""

    def __init__(self, counts: np.ndarray, seed: np.uint64, epoch: int, window: int = WINDOW_RECORDS):
        """counts: records of each shard [n_shards]; seed: 64-bit key of the stream and source."""
        self.counts = counts
        self.key = rng.hash64(seed, np.uint64(epoch))
        self.shards = rng.permutation(rng.hash64(self.key, np.uint64(0)), len(counts))
        self.ends = np.cumsum(counts[self.shards])
        self.size = int(self.ends[-1])
        # A window is a run of permuted shards; `window_ends[w]` is the number of shards up to its end.
        self.window_ends: list[int] = []
        start = 0
        for i, end in enumerate(self.ends):
            if end - start >= window:
                self.window_ends.append(i + 1)
                start = int(end)
        if not self.window_ends:
            self.window_ends = [len(counts)]
        self.window_ends[-1] = len(counts)  # the remainder joins the last window
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
