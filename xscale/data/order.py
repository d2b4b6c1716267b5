"""The order of a source's records: a pure function of (shard sizes, seed, epoch), and of monolingual text's documents.

Each epoch deals the shards out to windows of about `window` records and permutes the records of a window. So a shard
is opened and read through once an epoch, while neighbours in a batch come from all over the source
(benchmarks/shuffle.py measures how well), and memory is that of one window whatever the size of the source.

Of monolingual text, pieces are permuted instead: a document, or of a long one consecutive sentences that fill a sample.
What a piece leaves free in a sample is filled with shorter pieces. Samples are whole pieces; a position is a number of
records all the same.

A stream of many sources looks ahead in all of them, and not by a window in each: a window is made in parts. Those of a
permutation are cut out of it. Where pieces are permuted, a part is permuted by itself: some of each of its shards.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from xscale import rng

WINDOW_RECORDS = 1 << 20
WINDOW_SHARDS = 256
"""A window has no more shards than a reader keeps open."""
PART_RECORDS = 1 << 15
"""A part of a window has no fewer."""

Look = Callable[[Sequence[int], Sequence[slice | np.ndarray]], np.ndarray]
"""Shards, and records of each -> something of these records, behind one another [n]."""


class Text(NamedTuple):
    """What running text is packed by."""

    look: Callable[[Sequence[int], Sequence[slice | np.ndarray]], tuple[np.ndarray, np.ndarray]]
    """Of Look's arguments, bytes of each record, and whether it goes on the document of the record before it."""
    tokens: Callable[[np.ndarray], np.ndarray]
    """Of bytes, about; from 1."""
    room: int
    """Of tokens a sample has no more, or one record."""


class Part(NamedTuple):
    """Of a window, or all of it."""

    first: int
    """Its first position."""
    ordinals: np.ndarray
    """Records in the order of the epoch, numbered through the window's shards [n]."""
    lengths: np.ndarray
    """Bytes of each record, where asked for [n]."""
    ends: np.ndarray
    """Behind each sample of running text, as places of the part [samples]."""
    shards: np.ndarray
    """The window's shards as the epoch deals them out."""
    shard_ends: np.ndarray
    """Ordinals behind each shard's last record."""

    def locate(self, places: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Shard and record numbers at these places of the part."""
        ordinals = self.ordinals[places].astype(np.int64)
        slot = np.searchsorted(self.shard_ends, ordinals, side="right")
        return self.shards[slot], ordinals - np.append(0, self.shard_ends)[slot]


NOTHING = Part(0, *[np.empty(0, dtype=np.int64)] * 5)


class EpochOrder:
    """Maps positions of one epoch to (shard, record)."""

    def __init__(
        self,
        counts: np.ndarray,
        seed: np.uint64,
        epoch: int,
        window: int = WINDOW_RECORDS,
        lengths: Look | None = None,
        text: Text | None = None,
        sources: int = 1,
    ):
        """counts: records of each shard [n_shards]; seed: 64-bit key of the stream and source; lengths: bytes of
        records that are no running text; text: of running text; sources: of the stream."""
        self.counts, self.lengths, self.text, self.sources = counts, lengths, text, sources
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
        self._part = NOTHING
        self._leading = -1, NOTHING.ordinals
        """Of the window with this first shard, by what its records are dealt out to parts: a byte of each."""

    def bounds(self, position: int) -> tuple[int, int, int]:
        """(window, first position, end position) of the window that holds `position`."""
        shard = int(np.searchsorted(self.ends, position, side="right"))
        window = bisect.bisect_right(self.window_ends, shard)
        first_shard = self.window_ends[window - 1] if window else 0
        first = int(self.ends[first_shard - 1]) if first_shard else 0
        return window, first, int(self.ends[self.window_ends[window] - 1])

    def parts(self, position: int) -> int:
        """In how many parts the window that holds `position` is made."""
        _, first, end = self.bounds(position)
        return max(min((end - first) * self.sources // WINDOW_RECORDS, (end - first) // PART_RECORDS), 1)

    def locate(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Shard and record numbers [stop - start] of positions start..stop-1; 0 <= start < stop <= size."""
        found = []
        while start < stop:
            part = self.part(start)
            found.append(part.locate(slice(start - part.first, stop - part.first)))
            start += len(found[-1][0])
        shard, record = zip(*found, strict=True)
        return np.concatenate(shard), np.concatenate(record)

    def samples(self, start: int, wanted: int) -> np.ndarray:
        """Positions behind each of the next samples from position `start` < size on: at most `wanted` of them, and one
        at least, all of a part. A sample is a record, or of running text what fits."""
        part = self.part(start)
        if self.text is None:
            return np.arange(start, min(start + wanted, part.first + len(part.ordinals))) + 1
        at = int(np.searchsorted(part.ends, start - part.first, side="right"))
        return part.ends[at : at + wanted] + np.int64(part.first)

    def part(self, position: int) -> Part:
        """The part that holds it."""
        if not 0 <= position - self._part.first < len(self._part.ordinals):
            self._part = NOTHING  # its memory is free for the next
            number, first, _ = self.bounds(position)
            window = self.shards[self.window_ends[number - 1] if number else 0 : self.window_ends[number]]
            key, parts = rng.hash64(self.key, np.uint64(number + 1)), self.parts(position)
            made = self._arranged if self.text else self._permuted
            before, *arrays = made(window, key, parts, position - first)
            ordinals, lengths, ends = (array.astype(np.uint32) for array in arrays)
            self._part = Part(first + before, ordinals, lengths, ends, window, np.cumsum(self.counts[window]))
        return self._part

    def _permuted(
        self, window: np.ndarray, key: np.ndarray, parts: int, at: int
    ) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """The part of a permutation that holds place `at`."""
        counts = self.counts[window]
        bits = min((parts - 1).bit_length(), 8)
        if bits and self._leading[0] != window[0]:
            self._leading = int(window[0]), rng.leading_bits(key, int(counts.sum()), bits)
        first, ordinals, order = rng.part_of_permutation(key, int(counts.sum()), at, bits, self._leading[1])
        lengths = NOTHING.lengths
        if self.lengths:
            ends = np.cumsum(counts)
            of_shards = np.split(ordinals, np.searchsorted(ordinals, ends[:-1]))
            records = [of - start for of, start in zip(of_shards, (ends - counts).tolist(), strict=True)]
            lengths = self.lengths(window.tolist(), records)[order]
        return first, ordinals[order], lengths, NOTHING.ends

    def _arranged(
        self, window: np.ndarray, key: np.ndarray, parts: int, at: int
    ) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """The part of running text that holds place `at`."""
        assert self.text
        counts = self.counts[window]
        edges = counts * np.arange(parts + 1)[:, None] // parts
        places = edges.sum(1)
        number = int(np.searchsorted(places, at, side="right")) - 1
        first, end = edges[number : number + 2]
        shards, records = window.tolist(), [slice(*of) for of in zip(first.tolist(), end.tolist(), strict=True)]
        lengths, follows = self.text.look(shards, records)
        starts = np.cumsum(end - first) - (end - first)
        follows[starts[end > first]] = False
        if parts > 1:
            key = rng.hash64(key, np.uint64(number))
        tokens = np.rint(self.text.tokens(lengths)).astype(np.int64)
        order, ends = arrange(tokens, follows, self.text.room, key)
        skipped = np.repeat(np.cumsum(counts) - counts + first - starts, end - first)
        return int(places[number]), order + skipped[order], lengths[order], ends


def arrange(sizes: np.ndarray, follows: np.ndarray, room: int, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Records of running text in their order [n], and where samples end in it [samples]. sizes: tokens of each."""
    first = runs(sizes, np.flatnonzero(~follows), room)
    shuffled = rng.permutation(key, len(first))
    sample = fill(np.add.reduceat(sizes, first)[shuffled], room)
    together = np.argsort(sample.astype(np.min_scalar_type(len(first))), kind="stable")  # 16 bits in linear time
    piece, sample = shuffled[together], sample[together]
    records = np.diff(first, append=len(sizes))[piece]
    ends = np.cumsum(records)
    ordinals = np.arange(len(sizes)) + np.repeat(first[piece] - (ends - records), records)
    return ordinals, ends[np.append(sample[1:] != sample[:-1], True)]


def fill(sizes: np.ndarray, room: int) -> np.ndarray:
    """The bin of each item, such that the items of a bin fit into `room` or are one; a bin bears the number of one of
    its items. sizes: from 1 [n].

    Each round gives bins that are more than half full, the fullest first, one bin of the others each, the largest that
    fits; what is left of those is joined two by two.
    """
    # What exceeds the room fits nowhere, however large it is; a few bits are sorted in linear time.
    bin_of, filled = np.arange(len(sizes)), np.minimum(sizes, room + 1).astype(np.min_scalar_type(room + 1))
    still = bin_of
    while True:
        still = still[np.argsort(filled[still], kind="stable")]
        half = np.searchsorted(filled[still], room // 2, side="right")
        small, large = still[:half], still[half:][::-1]
        number = np.arange(len(large))
        fitting = np.searchsorted(filled[small], room - filled[large].astype(np.int64), side="right")
        # Largest first of those that no bin behind it wants: strictly increasing, and below `fitting`.
        chosen = number + np.minimum.accumulate((fitting - 1 - number)[::-1])[::-1]
        into, joined = large[chosen >= 0], small[chosen[chosen >= 0]]
        left = np.delete(small, chosen[chosen >= 0])
        left = left[len(left) % 2 :]
        into, joined = np.append(into, left[1::2]), np.append(joined, left[::2])
        if not len(into):
            break
        filled[into] += filled[joined]
        bin_of[joined] = into
        still = still[bin_of[still] == still]
    while (bin_of[bin_of] != bin_of).any():
        bin_of = bin_of[bin_of]
    return bin_of


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
    following = np.clip(behind, np.arange(1, len(sizes) + 1), ends)
    starts = np.zeros(len(sizes) + 1, dtype=bool)
    starts[border] = True
    at = following[borders]
    while len(at := at[~starts[at]]) > FEW:  # a run of each at once
        starts[at] = True
        at = following[at]
    found, after = starts.data, following.data
    for start in at.tolist():
        while not found[start]:
            found[start] = True
            start = after[start]
    return np.flatnonzero(starts[:-1])


FEW = 32
"""Runs that are found faster one by one."""
