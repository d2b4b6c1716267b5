"""The assignment of a step's samples to ranks and packed rows: a pure function of their estimated lengths and costs.

Ranks wait for the slowest one, so they should have equal costs. Two samples of equal length may differ in cost: their
streams predict different shares of the tokens, or read them with a second encoder.
"""

import numpy as np

FREE_SHARE = 0.03
"""Rows leave this share of train.max_tokens free on average, because lengths are only estimates."""
ROUNDS = 32
"""The approximate number of rounds in which samples are assigned; more rounds balance better and take longer."""
FEWEST_BINS = 8
"""Each round assigns samples to at least 1 / FEWEST_BINS of the bins."""


def balance(tokens: np.ndarray, world: int, max_tokens: int, costs: np.ndarray | None = None) -> tuple[np.ndarray, int]:
    """Return the bin of each sample [samples], and the number of packed rows of each rank, at least 1.

    tokens: estimated tokens of each sample of all streams, whole numbers. A bin is one row of one rank; its number is
    `row * world + rank`. A bin has at most `max_tokens` tokens, or a single sample that is longer. costs: the cost of
    each sample. All bins get about the same cost, unless one would then have too many tokens; None, or then: all bins
    get about the same number of tokens.
    """
    short = np.minimum(tokens, 2**16 - 1)
    needed = int(np.ceil(np.minimum(short, max_tokens).sum() * (1 + FREE_SHARE) / (world * max_tokens)))
    most = -(-len(tokens) // world)
    rows = max(min(needed, most), 1)
    if costs is not None:
        by_cost = assign_to_bins(whole_costs(costs), rows * world)
        if not exceeds(by_cost, tokens, max_tokens):
            return by_cost, rows
    while True:
        bins = assign_to_bins(short, rows * world)
        if not exceeds(bins, tokens, max_tokens):
            return bins, rows
        rows = min(rows + 1 + rows // ROUNDS, most)


def exceeds(bins: np.ndarray, tokens: np.ndarray, max_tokens: int) -> bool:
    """Return whether a bin of several samples has more than `max_tokens` tokens."""
    several = np.bincount(bins, minlength=1) > 1
    return bool((np.bincount(bins, weights=tokens, minlength=1)[several] > max_tokens).any())


def whole_costs(costs: np.ndarray) -> np.ndarray:
    """Return the costs as whole numbers of up to 16 bits, so that sums are exact and equal on every machine."""
    largest = costs.max(initial=0)
    return np.rint(costs * ((2**16 - 1) / largest)) if largest > 0 else costs


def assign_to_bins(weights: np.ndarray, bins: int) -> np.ndarray:
    """Return the bin of each sample [samples]. weights: whole numbers below 2^16. bins: the number of bins."""
    short = weights.astype(np.uint16)  # numpy sorts 16-bit numbers in linear time
    heaviest_first = np.argsort(~short, kind="stable")
    assigned = assign_sorted(short[heaviest_first].astype(np.int64), bins)
    bin_of_sample = np.empty_like(assigned)
    bin_of_sample[heaviest_first] = assigned
    return bin_of_sample


def assign_sorted(weights: np.ndarray, bins: int) -> np.ndarray:
    """Return the bin of each sample [samples]. weights: heaviest first. bins: the number of bins.

    Each round assigns samples to the emptiest bins, in ascending order of their weights, then in descending order, and
    so on. These are all bins with at most as much weight as the emptiest one would have with the next sample.
    """
    assigned = np.empty(len(weights), dtype=np.int64)
    turns = -(-len(weights) // (ROUNDS * bins))
    filled = np.zeros(bins)
    at = 0
    while at < len(weights):
        emptiest_first = np.argsort(filled, kind="stable")
        low = np.searchsorted(filled[emptiest_first], filled[emptiest_first[0]] + weights[at], side="right")
        taking = max(int(low), -(-bins // FEWEST_BINS))
        portion = slice(at, at + taking * turns)
        turn = np.arange(len(weights[portion])) % (2 * taking)
        assigned[portion] = emptiest_first[np.minimum(turn, 2 * taking - 1 - turn)]
        filled += np.bincount(assigned[portion], weights=weights[portion], minlength=bins)
        at = portion.stop
    return assigned
