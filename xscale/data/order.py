"""The order of a source's records: a pure function of (shard sizes, seed, epoch), and of monolingual text's documents.

Each epoch deals the shards out to windows of about `window` records and permutes the records of a window. So a shard
is opened and read through once an epoch, while neighbours in a batch come from all over the source
(benchmarks/shuffle.py measures how well), and memory is that of one window whatever the size of the source.

Of monolingual text, pieces are permuted instead: a document, or of a long one consecutive sentences that fill a sample.
Samples are whole pieces; a position is a number of records all the same.
"""

import bisect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from xscale import rng

WINDOW_RECORDS = 1 << 20
WINDOW_SHARDS = 256
"""A window has no more shards than a reader keeps open."""

Sizes = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Shard numbers -> of their records, behind one another: tokens, whole numbers from 1 [n]; whether each goes on the
document of the record before it [n]."""


class Window(NamedTuple):
    number: int
    ordinals: np.ndarray
    """Records in the order of the epoch, numbered as the epoch deals out their shards [n]."""
    ends: np.ndarray
    """Positions behind each sample of running text [samples]."""


class EpochOrder:
    """Maps positions of one epoch to (shard, record)."""

    def __init__(
        self,
        counts: np.ndarray,
        seed: np.uint64,
        epoch: int,
        window: int = WINDOW_RECORDS,
        sizes: Sizes | None = None,
        room: int = 0,
    ):
        """counts: records of each shard [n_shards]; seed: 64-bit key of the stream and source; sizes: of running text,
        of which a sample has at most `room` tokens, or one record."""
        self.counts, self.sizes, self.room = counts, sizes, room
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
        self._window = Window(-1, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

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
            number, first, end = self.bounds(start)
            until = min(stop, end)
            ordinals.append(self._look(number, first, end).ordinals[start - first : until - first])
            start = until
        ordinal = np.concatenate(ordinals)
        slot = np.searchsorted(self.ends, ordinal, side="right")
        return self.shards[slot], ordinal - (self.ends[slot] - self.counts[self.shards[slot]])

    def samples(self, start: int, wanted: int) -> np.ndarray:
        """Positions behind each of the next samples from position `start` < size on: at most `wanted` of them, and one
        at least. Without `sizes` a sample is a record; samples of running text lie within a window."""
        if self.sizes is None:
            return np.arange(start, min(start + wanted, self.size)) + 1
        ends = self._look(*self.bounds(start)).ends
        at = int(np.searchsorted(ends, start, side="right"))
        return ends[at : at + wanted]

    def _look(self, number: int, first: int, end: int) -> Window:
        if self._window.number != number:
            key = rng.hash64(self.key, np.uint64(number + 1))
            if self.sizes is None:
                ordinals, ends = rng.permutation(key, end - first), self._window.ends
            else:
                shards = self.shards[self.window_ends[number - 1] if number else 0 : self.window_ends[number]]
                ordinals, ends = arrange(*self.sizes(shards), self.room, key)
            self._window = Window(number, ordinals + first, ends + first)
        return self._window


def arrange(sizes: np.ndarray, follows: np.ndarray, room: int, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Records of running text in their order [n], and where samples end in it [samples]. See Sizes."""
    first = runs(sizes, np.flatnonzero(~follows), room)
    piece = rng.permutation(key, len(first))
    records = np.diff(first, append=len(sizes))[piece]
    ends = np.cumsum(records)
    ordinals = np.arange(len(sizes)) + np.repeat(first[piece] - (ends - records), records)
    samples = runs(np.add.reduceat(sizes, first)[piece], np.zeros(1, dtype=np.int64), room)
    return ordinals, ends[np.append(samples[1:], len(piece)) - 1]


def runs(sizes: np.ndarray, borders: np.ndarray, room: int) -> np.ndarray:
    """Where runs begin that hold as much as fits into `room`, one item at least, and end at borders.

    sizes: from 1 [n]; borders: items at which a run begins in any case, the first of them 0.
    """
    if len(borders) == len(sizes):
        return borders
    filled = np.cumsum(sizes)
    behind = np.searchsorted(filled, filled - sizes + room, side="right")
    border = np.append(borders, len(sizes))
    ends = np.repeat(border[1:], np.diff(border))
    following = memoryview(np.clip(behind, np.arange(1, len(sizes) + 1), ends))
    starts, at = bytearray(len(sizes)), 0
    while at < len(sizes):
        starts[at] = 1
        at = following[at]
    return np.flatnonzero(np.frombuffer(starts, dtype=np.uint8))
