"""Arrays of lists of other lengths, end to end."""

import numpy as np


def offsets(lengths: np.ndarray) -> np.ndarray:
    """0..length-1 for each length, concatenated."""
    ends = np.cumsum(lengths)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
