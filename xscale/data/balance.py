"""Assigns a step's samples to ranks and packed rows. The result depends on their estimated lengths alone."""

import numpy as np

FREE_SHARE = 0.03
"""The share of train.max_tokens that is free in a row on average, because lengths are estimates."""
ROUNDS = 32
"""The approximate number of rounds in which samples are assigned. More rounds balance better, but take longer."""
FEWEST_BINS = 8
"""Each round assigns samples to at least one in FEWEST_BINS bins."""


def assign_to_ranks_and_rows(tokens_of_samples: np.ndarray, world: int, max_row_tokens: int) -> tuple[np.ndarray, int]:
    """Return the bin of each sample [samples], and the number of packed rows of each rank, at least 1.

    tokens_of_samples: the estimated tokens of each sample of all streams, whole numbers. A bin is one row of one rank;
    its number is `row * world + rank`. A bin has at most `max_row_tokens` tokens, or a single sample that is longer.
    """
    short = np.minimum(tokens_of_samples, 2**16 - 1).astype(np.uint16)  # numpy sorts 16-bit numbers in linear time
    longest_first = np.argsort(~short, kind="stable")
    sorted_tokens = short[longest_first].astype(np.int64)
    needed = int(np.ceil(np.minimum(sorted_tokens, max_row_tokens).sum() * (1 + FREE_SHARE) / (world * max_row_tokens)))
    most = -(-len(tokens_of_samples) // world)
    rows = max(min(needed, most), 1)
    while True:
        assigned = assign_to_emptiest_bins(sorted_tokens, rows * world)
        several = np.bincount(assigned, minlength=1) > 1
        if not (
            np.bincount(assigned, weights=tokens_of_samples[longest_first], minlength=1)[several] > max_row_tokens
        ).any():
            bins = np.empty_like(assigned)
            bins[longest_first] = assigned
            return bins, rows
        rows = min(rows + 1 + rows // ROUNDS, most)


def assign_to_emptiest_bins(tokens_longest_first: np.ndarray, bin_count: int) -> np.ndarray:
    """Return the bin of each sample [samples].

    Each round assigns samples to the emptiest bins: to those with at most as many tokens as the emptiest bin would have
    with the next sample. The bins get samples in ascending order of their tokens, then in descending order, and so on.
    """
    assigned = np.empty(len(tokens_longest_first), dtype=np.int64)
    turns = -(-len(tokens_longest_first) // (ROUNDS * bin_count))
    filled = np.zeros(bin_count)
    at = 0
    while at < len(tokens_longest_first):
        emptiest_first = np.argsort(filled, kind="stable")
        low = np.searchsorted(
            filled[emptiest_first], filled[emptiest_first[0]] + tokens_longest_first[at], side="right"
        )
        taking = max(int(low), -(-bin_count // FEWEST_BINS))
        portion = slice(at, at + taking * turns)
        turn = np.arange(len(tokens_longest_first[portion])) % (2 * taking)
        assigned[portion] = emptiest_first[np.minimum(turn, 2 * taking - 1 - turn)]
        filled += np.bincount(assigned[portion], weights=tokens_longest_first[portion], minlength=bin_count)
        at = portion.stop
    return assigned
