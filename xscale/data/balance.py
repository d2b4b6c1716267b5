"""How a step's samples are dealt out to ranks and rows: a pure function of their estimated lengths."""

import numpy as np

ROOM = 0.03
"""Share of train.max_tokens that is left free on average, since lengths are estimated."""
TURNS = 32
"""Into about so many portions a step is dealt out, whatever its size: more balance better, and take longer."""
FEWEST = 8
"""A portion goes to an eighth of the bins at least."""


def cut(tokens: np.ndarray, world: int, max_tokens: int, rows: int = 1) -> tuple[np.ndarray, int]:
    """The bin of each sample, of rows * world bins of at most `max_tokens` tokens; and the rows of each rank.

    tokens: estimated tokens of each sample of all streams, whole numbers. A sample of several documents counts as their
    sum: it stays whole, and its borders travel within it. rows: at least so many; every rank has the same number. Bin
    row * world + rank is a rank's row. A sample longer than `max_tokens` is alone in its bin.
    """
    short = np.minimum(tokens, 2**16 - 1).astype(np.uint16)  # sorts in linear time
    longest_first = np.argsort(~short, kind="stable")
    sorted_tokens = short[longest_first].astype(np.int64)
    needed = int(np.ceil(np.minimum(sorted_tokens, max_tokens).sum() * (1 + ROOM) / (world * max_tokens)))
    most = -(-len(tokens) // world)
    rows = max(rows, min(needed, most), 1)
    while True:
        dealt = deal(sorted_tokens, rows * world)
        several = np.bincount(dealt, minlength=1) > 1
        if not (np.bincount(dealt, weights=tokens[longest_first], minlength=1)[several] > max_tokens).any():
            bins = np.empty_like(dealt)
            bins[longest_first] = dealt
            return bins, rows
        rows = min(rows + 1 + rows // TURNS, most)


def deal(tokens: np.ndarray, bins: int) -> np.ndarray:
    """The bin of each sample; they come longest first.

    A portion is dealt out, there and back, to the bins that have least so far: those with less than the emptiest would
    have after the next sample.
    """
    dealt = np.empty(len(tokens), dtype=np.int64)
    turns = -(-len(tokens) // (TURNS * bins))
    filled = np.zeros(bins)
    at = 0
    while at < len(tokens):
        emptiest_first = np.argsort(filled, kind="stable")
        low = np.searchsorted(filled[emptiest_first], filled[emptiest_first[0]] + tokens[at], side="right")
        taking = max(int(low), -(-bins // FEWEST))
        portion = slice(at, at + taking * turns)
        turn = np.arange(len(tokens[portion])) % (2 * taking)
        dealt[portion] = emptiest_first[np.minimum(turn, 2 * taking - 1 - turn)]
        filled += np.bincount(dealt[portion], weights=tokens[portion], minlength=bins)
        at = portion.stop
    return dealt
