"""The order of a source's records: a function of shard sizes, seed, epoch and, for running text, its documents.

Each epoch divides the shards into windows of about WINDOW_RECORDS records and permutes the records of each window. So a
shard is read through about once an epoch, a batch has records from all over the source (benchmarks/RESULTS.md has how
well), and only one window is in memory, whatever the size of the source.

Running text is permuted in pieces instead of records. A piece is a document, or consecutive sentences of a long
document that fill a sample. The room that a piece leaves in its sample is filled with shorter pieces. A position is
always a number of records, not of pieces.

A stream of many sources keeps only one part of each window in memory. The parts of a permuted window are slices of
it; a part of running text takes a slice of each of the window's shards and is permuted by itself.

If the room of a sample (its maximum tokens) changes within a part, the part's remaining records are packed anew.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from xscale import rng

WINDOW_RECORDS = 1 << 20
WINDOW_SHARDS = 256
"""The maximum number of shards of a window, so that a reader can keep all of them open."""
PART_RECORDS = 1 << 15
"""The minimum number of records of a part, if its window has several parts."""

Look = Callable[[Sequence[int], Sequence[slice | np.ndarray]], tuple[np.ndarray, np.ndarray]]
"""A function that maps shards, and records of each, to the bytes of every record [n], and to True for every record that
continues the document of the record before it [n]."""


class TextPacking(NamedTuple):
    """The rule that packs running text into samples."""

    tokens: Callable[[np.ndarray], np.ndarray]
    """A function that estimates tokens from bytes; an estimate is at least 1."""
    room: int
    """The maximum number of tokens of a sample; a sample of a single record may have more."""
    before: tuple[tuple[int, int], ...] = ()
    """(position, room) for each change of the room within the epoch: `room` was used up to `position`."""


class WindowPart(NamedTuple):
    """A part of a window, or a whole window, in the order of the epoch."""

    first: int
    """Position in the epoch of the part's first record."""
    ordinals: np.ndarray
    """Number of each record within its window, counted through the window's shards [n]."""
    lengths: np.ndarray
    """Bytes of each record [n]; empty if EpochOrder has no `look`."""
    sample_ends: np.ndarray
    """End of each sample of running text, in records from the part's start [samples]."""


NO_RECORDS = np.empty(0, dtype=np.int64)
EMPTY_PART = WindowPart(0, NO_RECORDS, NO_RECORDS, NO_RECORDS)


class EpochOrder:
    """The order of one source in one epoch: maps positions to shards and records."""

    def __init__(
        self,
        counts: np.ndarray,
        seed: np.uint64,
        epoch: int,
        window: int = WINDOW_RECORDS,
        look: Look | None = None,
        text: TextPacking | None = None,
        sources: int = 1,
    ):
        """counts: records of each shard [n_shards]; seed: key of the stream and source; text: None unless the source
        is running text; sources: number of sources of the stream."""
        self.counts, self.look, self.text, self.sources = counts, look, text, sources
        self.key = rng.hash64(seed, np.uint64(epoch))
        # Of every `windows` consecutive shards, each window gets one, so that a window is a cross-section
        # of a source that is sorted by topic or length.
        number, windows = np.arange(len(counts)), window_count(counts, window)
        drawn = np.lexsort((rng.hash64(rng.hash64(self.key, np.uint64(0)), number), number // windows))
        members = [drawn[w::windows] for w in range(windows)]
        self.shards = np.concatenate(members)
        self.window_ends = np.cumsum([len(m) for m in members]).tolist()
        self.ends = np.cumsum(counts[self.shards])
        self.size = int(self.ends[-1])
        self._part = EMPTY_PART
        self._leading = -1, NO_RECORDS
        """A window's number, and the leading bits of its records' hashes. A record's bits determine its part."""

    def bounds(self, position: int) -> tuple[int, int, int]:
        """Return (window, first position, end position) of the window that holds `position`."""
        shard = int(np.searchsorted(self.ends, position, side="right"))
        window = bisect.bisect_right(self.window_ends, shard)
        return window, self.first_of_window(window), int(self.ends[self.window_ends[window] - 1])

    def first_of_window(self, window: int) -> int:
        return int(self.ends[self.window_ends[window - 1] - 1]) if window else 0

    def part_count(self, position: int) -> int:
        """Return the number of parts (records in memory at a time) in the window that holds `position`."""
        _, first, end = self.bounds(position)
        return max(min((end - first) * self.sources // WINDOW_RECORDS, (end - first) // PART_RECORDS), 1)

    def take(self, start: int, samples: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Read the next samples from position `start` on: at least one, at most `samples`, all from one part.

        Returns the position after each sample [samples], and the shard, number and bytes of each of their records [n].
        """
        part = self.part(start)
        at = start - part.first
        if self.text:
            number = int(np.searchsorted(part.sample_ends, at, side="right"))
            ends = part.sample_ends[number : number + samples].astype(np.int64)
        else:
            ends = np.arange(at, min(at + samples, len(part.ordinals))) + 1
        records = slice(at, int(ends[-1]))
        shards = self.window_shards(self.bounds(start)[0])
        shard_ends = np.cumsum(self.counts[shards])
        ordinals = part.ordinals[records].astype(np.int64)
        slot = np.searchsorted(shard_ends, ordinals, side="right")
        number_in_shard = ordinals - np.append(0, shard_ends)[slot]
        return ends + part.first, shards[slot], number_in_shard, part.lengths[records]

    def part(self, position: int) -> WindowPart:
        if not 0 <= position - self._part.first < len(self._part.ordinals):
            self._part = EMPTY_PART  # frees its memory for the next part
            window, first, _ = self.bounds(position)
            make = self._make_text_part if self.text else self._make_permuted_part
            before, *arrays = make(window, self.part_count(position), position - first)
            self._part = WindowPart(first + before, *(array.astype(np.uint32) for array in arrays))
        return self._part

    def window_shards(self, window: int) -> np.ndarray:
        return self.shards[self.window_ends[window - 1] if window else 0 : self.window_ends[window]]

    def _make_permuted_part(self, window: int, parts: int, at: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Return WindowPart's fields for the part with record `at`; `first` and `at` count from the window."""
        shards, key = self.window_shards(window), rng.hash64(self.key, np.uint64(window + 1))
        counts = self.counts[shards]
        bits = min((parts - 1).bit_length(), 8)
        if bits and self._leading[0] != window:
            self._leading = window, rng.leading_bits(key, int(counts.sum()), bits)
        first, ordinals, order = rng.part_of_permutation(key, int(counts.sum()), at, bits, self._leading[1])
        lengths = NO_RECORDS
        if self.look:
            ends = np.cumsum(counts)
            of_shards = np.split(ordinals, np.searchsorted(ordinals, ends[:-1]))
            records = [of - start for of, start in zip(of_shards, (ends - counts).tolist(), strict=True)]
            lengths = self.look(shards.tolist(), records)[0][order]
        return first, ordinals[order], lengths, NO_RECORDS

    def _make_text_part(self, window: int, parts: int, at: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Return WindowPart's fields for the part of running text with record `at`, counted from the window."""
        assert self.text and self.look
        shards, key = self.window_shards(window), rng.hash64(self.key, np.uint64(window + 1))
        counts = self.counts[shards]
        edges = counts * np.arange(parts + 1)[:, None] // parts
        places = edges.sum(1)
        number = int(np.searchsorted(places, at, side="right")) - 1
        first, end = edges[number : number + 2]
        records = [slice(*of) for of in zip(first.tolist(), end.tolist(), strict=True)]
        lengths, follows = self.look(shards.tolist(), records)
        starts = np.cumsum(end - first) - (end - first)
        follows[starts[end > first]] = False
        if parts > 1:
            key = rng.hash64(key, np.uint64(number))
        tokens = np.rint(self.text.tokens(lengths)).astype(np.int64)
        begin = self.first_of_window(window) + int(places[number])
        changes = [
            (position - begin, room) for position, room in self.text.before if 0 < position - begin < len(tokens)
        ]
        rooms = [*(room for _, room in changes), self.text.room]
        order, sample_ends = arrange(tokens, follows, rooms[0], key)
        for (done, _), room in zip(changes, rooms[1:], strict=True):
            left = np.sort(order[done:])
            on = follows[left] & (np.diff(left, prepend=-1) == 1)
            on[0] = False
            again, ends = arrange(tokens[left], on, room, rng.hash64(key, np.uint64(done)))
            order = np.append(order[:done], left[again])
            sample_ends = np.append(sample_ends[sample_ends <= done], ends + done)
        skipped = np.repeat(np.cumsum(counts) - counts + first - starts, end - first)
        return int(places[number]), order + skipped[order], lengths[order], sample_ends


def window_count(counts: np.ndarray, window: int = WINDOW_RECORDS) -> int:
    """Return the number of windows of a source. counts: records of each shard. window: wanted records of a window."""
    return min(max(int(counts.sum()) // window, -(-len(counts) // WINDOW_SHARDS), 1), len(counts))


def arrange(sizes: np.ndarray, follows: np.ndarray, room: int, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of records of running text [n], and each sample's end [samples]. sizes: tokens of records."""
    first = runs(sizes, np.flatnonzero(~follows), room)
    shuffled = rng.permutation(key, len(first))
    sample = fill(np.add.reduceat(sizes, first)[shuffled], room)
    together = np.argsort(sample.astype(np.min_scalar_type(len(first))), kind="stable")  # 16 bits: linear time
    piece, sample = shuffled[together], sample[together]
    records = np.diff(first, append=len(sizes))[piece]
    ends = np.cumsum(records)
    ordinals = np.arange(len(sizes)) + np.repeat(first[piece] - (ends - records), records)
    return ordinals, ends[np.append(sample[1:] != sample[:-1], True)]


def fill(sizes: np.ndarray, room: int) -> np.ndarray:
    """Pack items into bins of size `room`. Returns the bin of each item, named by the number of one of the bin's items.

    sizes: at least 1 [n]; an item larger than `room` is alone in its bin. Each round joins every bin that is more than
    half full, fullest first, with the largest other bin that fits; the remaining bins are joined in pairs.
    """
    # Sizes above the room need no exact value, and numbers of few bits are sorted in linear time.
    bin_of, filled = np.arange(len(sizes)), np.minimum(sizes, room + 1).astype(np.min_scalar_type(room + 1))
    still = bin_of
    while True:
        still = still[np.argsort(filled[still], kind="stable")]
        half = np.searchsorted(filled[still], room // 2, side="right")
        small, large = still[:half], still[half:][::-1]
        number = np.arange(len(large))
        fitting = np.searchsorted(filled[small], room - filled[large].astype(np.int64), side="right")
        # Each large bin gets the largest small bin that no later one needs: strictly increasing, and below `fitting`.
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
    """Return the first item of each run. A run has as many items as fit into `room`, at least one, and crosses no
    border.

    sizes: at least 1 [n]; borders: the items at which a run begins in any case; the first is 0.
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
    while len(at := at[~starts[at]]) > FEW:  # one run after each border at a time
        starts[at] = True
        at = following[at]
    found, after = starts.data, following.data
    for start in at.tolist():
        while not found[start]:
            found[start] = True
            start = after[start]
    return np.flatnonzero(starts[:-1])


FEW = 32
"""When at most this many borders have runs left, finding these runs one by one is faster."""
