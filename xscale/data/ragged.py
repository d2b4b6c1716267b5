"""Functions on arrays of numbers, such as rows of different lengths in one array."""

from itertools import chain
from typing import NamedTuple

import numpy as np

NO_NUMBERS = np.empty(0, dtype=np.int64)
"""An empty array. np.concatenate refuses a list without arrays, so a list of arrays may begin with this one."""


class Ragged(NamedTuple):
    """Lists of numbers in one array, one list after the other."""

    values: np.ndarray
    """The numbers of all lists."""
    lengths: np.ndarray
    """Length of each list."""

    @property
    def starts(self) -> np.ndarray:
        """Index in `values` of each list's first number."""
        return np.cumsum(self.lengths) - self.lengths

    def select_lists(self, numbers: np.ndarray) -> "Ragged":
        """Return the lists with these indices."""
        lengths = self.lengths[numbers]
        places = np.repeat(self.starts[numbers], lengths) + concatenated_ranges(lengths)
        return Ragged(self.values[places], lengths)

    @classmethod
    def from_lists(cls, lists: list[list[int]]) -> "Ragged":
        values = np.array(list(chain.from_iterable(lists)), dtype=np.int64)
        return cls(values, np.array(list(map(len, lists)), dtype=np.int64))


def concatenated_ranges(lengths: np.ndarray) -> np.ndarray:
    """Return the numbers 0, 1, ..., n - 1 for each n in `lengths`, concatenated."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def offsets_and_end_from_counts(counts: np.ndarray) -> np.ndarray:
    """Return the index at which each part begins, and the end of the last part, int32 [parts + 1]. counts: the size of
    each part [parts]."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    offsets[1:] = np.cumsum(counts)
    return offsets


def distinct_pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return `np.unique(np.stack([first, second], axis=1), axis=0)` in a tenth of the time. No number is negative."""
    width = int(second.max(initial=0)) + 1
    codes = np.unique(first * width + second)
    return np.stack(np.divmod(codes, width), axis=1)


def evenly_spaced_indices(count: int, max_indices: int) -> np.ndarray:
    """Return at most `max_indices` evenly spaced numbers of range(count), including the first and the last."""
    return np.unique(np.linspace(0, count - 1, max_indices).round().astype(int))
