"""Small functions on arrays of numbers."""

import numpy as np


def indices_within(lengths: np.ndarray) -> np.ndarray:
    """Return the numbers 0, 1, ..., n - 1 for each n in `lengths`, concatenated."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def evenly_spaced(n: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced numbers of range(n), including the first and the last."""
    return np.unique(np.linspace(0, n - 1, most).round().astype(int))
