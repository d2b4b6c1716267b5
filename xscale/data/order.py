"""The order of a source's records: a function of shard sizes, seed, epoch and, for running text, its documents.

Each epoch divides the shards into windows of about a million records, and permutes the records of each window. So each
shard is read about once an epoch, and only one window is in memory. A window has shards from all over the source
(benchmarks/RESULTS.md says how evenly its records represent the source).

Running text is permuted in pieces instead of records. A piece is a document, or consecutive sentences of a long
document that fill a sample. If a piece leaves room in its sample, shorter pieces fill this room. A position in the
epoch is a number of records, also for running text.

A stream of many sources has only one part of each window in memory. For single records, the window is permuted, and
its parts are slices of the result. For running text, a part is a slice of each of the window's shards, and each part is
permuted by itself.

The maximum number of tokens of a sample may change within a part. Then the part's remaining records are packed again.
"""

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from xscale import rng
from xscale.data.ragged import NO_NUMBERS

WINDOW_RECORDS = 1 << 20
"""The wanted number of records of a window."""
WINDOW_SHARDS = 256
"""The maximum number of shards of a window, which a reader can keep open."""
PART_RECORDS = 1 << 15
"""The minimum number of records of a part, if its window has several parts."""

ReadLengths = Callable[[Sequence[int], Sequence[slice | np.ndarray]], tuple[np.ndarray, np.ndarray]]
"""A function of some shards, and of some records of each of them. It returns the length in bytes of each record [n],
and True for each record that continues the document of the record before it [n]."""


class OrderedSamples(NamedTuple):
    """Consecutive samples of an epoch, with n records."""

    ends: np.ndarray
    """The position in the epoch at which each sample ends [samples]."""
    shards: np.ndarray
    """Number of each record's shard [n]."""
    records: np.ndarray
    """Number of each record in its shard [n]."""
    lengths: np.ndarray
    """Bytes of each record [n]."""


class WindowPart(NamedTuple):
    """A part of a window, or the whole window, in the order of the epoch."""

    first: int
    """Position in the epoch of the part's first record."""
    ordinals: np.ndarray
    """Number of each record in the window, whose shards follow one another [n]."""
    lengths: np.ndarray
    """Bytes of each record [n]."""
    sample_ends: np.ndarray
    """Number of the part's records up to the end of each sample [samples]; empty for single records."""


EMPTY_PART = WindowPart(0, NO_NUMBERS, NO_NUMBERS, NO_NUMBERS)


class EpochOrder:
    """The order of one source in one epoch: one window of about a million records after another."""

    def __init__(
        self,
        counts: np.ndarray,
        seed: np.uint64,
        epoch: int,
        read_lengths: ReadLengths,
        window: int = WINDOW_RECORDS,
        estimate: Callable[[np.ndarray], np.ndarray] | None = None,
        sample_limits: Sequence[tuple[int, int]] = (),
        sources: int = 1,
    ):
        """counts: number of records of each shard [n_shards]. seed: the key of the stream and source. window: the
        wanted number of records of a window. estimate: a function that estimates the tokens of records of running text,
        at least 1, from their bytes. sample_limits: for running text, (position, limit) for each limit in the epoch. Up
        to `position`, the maximum number of tokens of a sample is `limit`; the last position is the end of the epoch.
        Empty: each record is a sample. sources: the number of sources of the stream."""
        self.counts = counts
        self.epoch = epoch
        self.read_lengths = read_lengths
        self.estimate = estimate
        self.sample_limits = sample_limits
        self.sources = sources
        self.key = rng.hash64(seed, np.uint64(epoch))
        # Each window gets one of every `windows` consecutive shards, so that it has all topics and lengths of a sorted
        # source.
        windows = window_count(counts, window)
        number = np.arange(len(counts))
        shuffled = np.lexsort((rng.hash64(rng.hash64(self.key, np.uint64(0)), number), number // windows))
        self.window_shards = [shuffled[first::windows] for first in range(windows)]
        """The shards of each window."""
        self.window_records = [int(counts[shards].sum()) for shards in self.window_shards]
        self.window_starts = np.cumsum([0, *self.window_records[:-1]]).tolist()
        """The position in the epoch of each window's first record."""
        self.size = sum(self.window_records)
        self._part = EMPTY_PART
        self._leading = (-1, NO_NUMBERS)
        """The number of a window, and the leading bits of the hash of each of its records. These bits decide in which
        part a record is."""

    def window_at(self, position: int) -> int:
        """Return the number of the window that has the record at `position`."""
        return bisect.bisect_right(self.window_starts, position) - 1

    def part_count(self, window: int) -> int:
        """Return the number of parts of a window. One part is in memory at a time."""
        records = self.window_records[window]
        return max(min(records * self.sources // WINDOW_RECORDS, records // PART_RECORDS), 1)

    def take_samples(self, start: int, samples: int) -> OrderedSamples:
        """Return the samples from position `start` on: at most `samples`, at least one, and all from one part of a
        window. The next call continues at the last of their `ends`."""
        part = self.part_at(start)
        first = start - part.first
        if self.sample_limits:
            sample = int(np.searchsorted(part.sample_ends, first, side="right"))
            ends = part.sample_ends[sample : sample + samples].astype(np.int64)
        else:
            ends = np.arange(first, min(first + samples, len(part.ordinals))) + 1
        taken = slice(first, int(ends[-1]))
        shards = self.window_shards[self.window_at(start)]
        shard_ends = np.cumsum(self.counts[shards])
        ordinals = part.ordinals[taken].astype(np.int64)
        slot = np.searchsorted(shard_ends, ordinals, side="right")
        records = ordinals - (shard_ends - self.counts[shards])[slot]
        return OrderedSamples(ends + part.first, shards[slot], records, part.lengths[taken])

    def part_at(self, position: int) -> WindowPart:
        """Return the part that has the record at `position`. It stays in memory until another part is wanted."""
        if not 0 <= position - self._part.first < len(self._part.ordinals):
            self._part = EMPTY_PART  # frees the memory of the old part first
            if self.sample_limits:
                self._part = self._make_part_of_running_text(position)
            else:
                self._part = self._make_part_of_single_records(position)
        return self._part

    def _make_part_of_single_records(self, position: int) -> WindowPart:
        """Return the part that has the record at `position`, for single records."""
        window = self.window_at(position)
        window_start = self.window_starts[window]
        records = self.window_records[window]
        shards = self.window_shards[window]
        key = rng.hash64(self.key, np.uint64(window + 1))
        bits = min((self.part_count(window) - 1).bit_length(), 8)
        if bits:
            if self._leading[0] != window:
                self._leading = (window, rng.leading_bits_of_hashes(key, records, bits))
            part = rng.part_of_permutation_at(key, self._leading[1], bits, position - window_start)
        else:
            part = rng.PermutedPart(0, np.arange(records), rng.permutation(key, records))
        ends = np.cumsum(self.counts[shards])
        by_shard = np.split(part.ascending, np.searchsorted(part.ascending, ends[:-1]))
        chosen = list[slice | np.ndarray]()
        for shard_ordinals, shard_start in zip(by_shard, ends - self.counts[shards], strict=True):
            chosen.append(shard_ordinals - shard_start)
        lengths, _ = self.read_lengths(shards.tolist(), chosen)
        ordinals = part.ascending[part.order].astype(np.uint32)
        return WindowPart(window_start + part.first, ordinals, lengths[part.order].astype(np.uint32), NO_NUMBERS)

    def _make_part_of_running_text(self, position: int) -> WindowPart:
        """Return the part that has the record at `position`, for running text."""
        assert self.estimate
        window = self.window_at(position)
        window_start = self.window_starts[window]
        parts = self.part_count(window)
        shards = self.window_shards[window]
        key = rng.hash64(self.key, np.uint64(window + 1))
        counts = self.counts[shards]
        edges = counts * np.arange(parts + 1)[:, None] // parts
        places = edges.sum(1)
        number = int(np.searchsorted(places, position - window_start, side="right")) - 1
        first, end = edges[number : number + 2]
        begin = window_start + int(places[number])
        slices = [slice(*borders) for borders in zip(first.tolist(), end.tolist(), strict=True)]
        lengths, follows = self.read_lengths(shards.tolist(), slices)
        starts = np.cumsum(end - first) - (end - first)
        follows[starts[end > first]] = False
        if parts > 1:
            key = rng.hash64(key, np.uint64(number))
        tokens = np.rint(self.estimate(lengths)).astype(np.int64)
        order, sample_ends = shuffle_and_pack_text_with_limit_changes(tokens, follows, self.sample_limits, begin, key)
        skipped = np.repeat(np.cumsum(counts) - counts + first - starts, end - first)
        ordinals = (order + skipped[order]).astype(np.uint32)
        return WindowPart(begin, ordinals, lengths[order].astype(np.uint32), sample_ends.astype(np.uint32))


def shuffle_and_pack_text_with_limit_changes(
    tokens: np.ndarray, follows: np.ndarray, sample_limits: Sequence[tuple[int, int]], begin: int, key: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of `shuffle_and_pack_text` for a part. If the limit has changed within the part, the records
    after the change are arranged again, with the new limit. sample_limits: see EpochOrder. begin: the part's position
    in the epoch."""
    *before, (_, last_limit) = sample_limits
    ends = list[int]()
    limits_of_part = list[int]()
    for position, limit in before:
        if 0 < position - begin < len(tokens):
            ends.append(position - begin)
            limits_of_part.append(limit)
    limits_of_part.append(last_limit)
    order, sample_ends = shuffle_and_pack_text(tokens, follows, limits_of_part[0], key)
    for done, limit in zip(ends, limits_of_part[1:], strict=True):
        left = np.sort(order[done:])
        left_follows = follows[left] & (np.diff(left, prepend=-1) == 1)
        left_follows[0] = False
        left_order, left_ends = shuffle_and_pack_text(
            tokens[left], left_follows, limit, rng.hash64(key, np.uint64(done))
        )
        order = np.append(order[:done], left[left_order])
        sample_ends = np.append(sample_ends[sample_ends <= done], left_ends + done)
    return order, sample_ends


def window_count(records_of_shards: np.ndarray, wanted_records: int) -> int:
    """Return the number of windows of a source. records_of_shards: the number of records of each shard [n_shards].
    wanted_records: the wanted number of records of a window."""
    shards = len(records_of_shards)
    windows_by_records = int(records_of_shards.sum()) // wanted_records
    windows_by_shards = -(-shards // WINDOW_SHARDS)
    return min(max(windows_by_records, windows_by_shards, 1), shards)


def shuffle_and_pack_text(
    tokens_of_records: np.ndarray, follows: np.ndarray, max_sample_tokens: int, key: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle records of running text and pack them into samples. Return their order [n], and the number of records up
    to each sample's end [samples].

    follows: True for each record that continues the document of the record before it [n]. max_sample_tokens: a sample
    has more tokens only if it is a single record."""
    first = find_run_starts(tokens_of_records, np.flatnonzero(~follows), max_sample_tokens)
    shuffled = rng.permutation(key, len(first))
    sample = pack_into_bins_numbered_by_item(np.add.reduceat(tokens_of_records, first)[shuffled], max_sample_tokens)
    # numpy sorts 16-bit numbers in linear time.
    together = np.argsort(sample.astype(np.min_scalar_type(len(first))), kind="stable")
    piece = shuffled[together]
    sample = sample[together]
    records = np.diff(first, append=len(tokens_of_records))[piece]
    ends = np.cumsum(records)
    ordinals = np.arange(len(tokens_of_records)) + np.repeat(first[piece] - (ends - records), records)
    return ordinals, ends[np.append(sample[1:] != sample[:-1], True)]


def pack_into_bins_numbered_by_item(sizes: np.ndarray, bin_size: int) -> np.ndarray:
    """Pack items into bins of size `bin_size`, and return the bin of each item [n]. The number of a bin is the number
    of one of its items.

    sizes: the size of each item, at least 1 [n]. An item larger than `bin_size` is alone in its bin. In each round,
    every bin that is more than half full is joined with the largest other bin that fits, fullest bins first; the
    remaining bins are joined in pairs.
    """
    # Sizes above `bin_size` need no exact value, and numpy sorts small integers in linear time.
    bin_of = np.arange(len(sizes))
    filled = np.minimum(sizes, bin_size + 1).astype(np.min_scalar_type(bin_size + 1))
    still = bin_of
    while True:
        still = still[np.argsort(filled[still], kind="stable")]
        half = np.searchsorted(filled[still], bin_size // 2, side="right")
        small = still[:half]
        large = still[half:][::-1]
        number = np.arange(len(large))
        fitting = np.searchsorted(filled[small], bin_size - filled[large].astype(np.int64), side="right")
        # Each large bin gets the largest fitting small bin that no later large bin needs: `chosen` is strictly
        # increasing and below `fitting`.
        chosen = number + np.minimum.accumulate((fitting - 1 - number)[::-1])[::-1]
        joins = chosen >= 0
        left = np.delete(small, chosen[joins])
        left = left[len(left) % 2 :]
        into = np.append(large[joins], left[1::2])
        joined = np.append(small[chosen[joins]], left[::2])
        if not len(into):
            break
        filled[into] += filled[joined]
        bin_of[joined] = into
        still = still[bin_of[still] == still]
    while (bin_of[bin_of] != bin_of).any():
        bin_of = bin_of[bin_of]
    return bin_of


def find_run_starts(sizes: np.ndarray, borders: np.ndarray, max_run_size: int) -> np.ndarray:
    """Divide items into runs of consecutive items, and return the first item of each run. A run has as many items as
    fit into `max_run_size`, at least one, and ends before the next border.

    sizes: the size of each item, at least 1 [n]. borders: the items at which a run must begin; the first is 0.
    """
    if len(borders) == len(sizes):
        return borders
    filled = np.cumsum(sizes)
    behind = np.searchsorted(filled, filled - sizes + max_run_size, side="right")
    border = np.append(borders, len(sizes))
    ends = np.repeat(border[1:], np.diff(border))
    following = np.clip(behind, np.arange(1, len(sizes) + 1), ends)
    starts = np.zeros(len(sizes) + 1, dtype=bool)
    starts[border] = True
    at = following[borders]
    is_start = starts.data  # a memoryview reads and writes single items faster than numpy
    next_start = following.data
    for start in at[~starts[at]].tolist():
        while not is_start[start]:
            is_start[start] = True
            start = next_start[start]
    return np.flatnonzero(starts[:-1])
