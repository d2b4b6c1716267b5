"""The assignment of a step's samples to ranks and packed rows: a pure function of their estimated lengths."""

import numpy as np

FREE_SHARE = 0.03
"""Rows leave this share of train.max_tokens free on average, because lengths are only estimates."""
ROUNDS = 32
"""The approximate number of rounds in which samples are assigned; more rounds balance better and take longer."""
FEWEST_BINS = 8
"""Each round assigns samples to at least 1 / FEWEST_BINS of the bins."""


def balance(tokens: np.ndarray, world: int, max_tokens: int) -> tuple[np.ndarray, int]:
    """Return the bin of each sample [samples], and the number of packed rows of each rank, at least 1.

    tokens: estimated tokens of each sample of all streams, whole numbers. A bin is one row of one rank; its number is
    `row * world + rank`. A bin has at most `max_tokens` tokens, or a single sample that is longer.
    """
    short = np.minimum(tokens, 2**16 - 1).astype(np.uint16)  # numpy sorts 16-bit numbers in linear time
    longest_first = np.argsort(~short, kind="stable")
    sorted_tokens = short[longest_first].astype(np.int64)
    needed = int(np.ceil(np.minimum(sorted_tokens, max_tokens).sum() * (1 + FREE_SHARE) / (world * max_tokens)))
    most = -(-len(tokens) // world)
    rows = max(min(needed, most), 1)
    while True:
        assigned = assign_to_bins(sorted_tokens, rows * world)
        several = np.bincount(assigned, minlength=1) > 1
        if not (np.bincount(assigned, weights=tokens[longest_first], minlength=1)[several] > max_tokens).any():
            bins = np.empty_like(assigned)
            bins[longest_first] = assigned
            return bins, rows
        rows = min(rows + 1 + rows // ROUNDS, most)


def assign_to_bins(tokens: np.ndarray, bins: int) -> np.ndarray:
    """Return the bin of each sample [samples]. tokens: their lengths, longest first. bins: the number of bins.

    Each round assigns samples to the emptiest bins, in ascending order of their tokens, then in descending order, and
    so on. These are all bins with at most as many tokens as the emptiest one would have with the next sample.
    """
    assigned = np.empty(len(tokens), dtype=np.int64)
    turns = -(-len(tokens) // (ROUNDS * bins))
    filled = np.zeros(bins)
    at = 0
    while at < len(tokens):
        emptiest_first = np.argsort(filled, kind="stable")
        low = np.searchsorted(filled[emptiest_first], filled[emptiest_first[0]] + tokens[at], side="right")
        taking = max(int(low), -(-bins // FEWEST_BINS))
        portion = slice(at, at + taking * turns)
        turn = np.arange(len(tokens[portion])) % (2 * taking)
        assigned[portion] = emptiest_first[np.minimum(turn, 2 * taking - 1 - turn)]
        filled += np.bincount(assigned[portion], weights=tokens[portion], minlength=bins)
        at = portion.stop
    return assigned
