"""How a step is cut: every sample once, as many rows on every rank, within the budget, balanced, in no time."""

import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xscale.data.balance import FEWEST_BINS, FREE_SHARE, ROUNDS, assign_to_emptiest_bins, assign_to_ranks_and_rows

NO_BUDGET = 1 << 40


def draw(rng: np.random.Generator, samples: int, median: float, sigma: float, longest: int = 128) -> np.ndarray:
    """Log-normal lengths; those over the longest are drawn again, as if they had been dropped."""
    lengths = np.full(samples, longest + 1.0)
    while (over := lengths > longest).any():
        lengths[over] = np.exp(rng.normal(np.log(median), sigma, over.sum())).round() + 3
    return lengths


def pairs(rng: np.random.Generator, samples: int) -> np.ndarray:
    return draw(rng, samples, 50, 0.6)


def packed(rng: np.random.Generator, samples: int) -> np.ndarray:
    return rng.integers(100, 129, samples).astype(float)


def read_twice(rng: np.random.Generator, samples: int) -> np.ndarray:
    """PPA: both sides together, and one alone."""
    lengths = pairs(rng, samples)
    return lengths + (lengths * rng.uniform(0.35, 0.65, samples)).round()


def five_streams(rng: np.random.Generator, samples: int) -> np.ndarray:
    each = samples // 5
    streams = [packed(rng, each), pairs(rng, each), draw(rng, each, 40, 0.7), read_twice(rng, each)]
    return np.concatenate([*streams, draw(rng, samples - 4 * each, 15, 0.8)])


def text_and_short_pairs(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Bins that get a long one more than others must get fewer of the short ones."""
    return np.concatenate([packed(rng, samples // 5), draw(rng, samples - samples // 5, 20, 0.5)])


def any_length(rng: np.random.Generator, samples: int) -> np.ndarray:
    return draw(rng, samples, 20, 1.0, longest=256)


KINDS = [pairs, packed, read_twice, five_streams, text_and_short_pairs, any_length]
Kind = Callable[[np.random.Generator, int], np.ndarray]
lists_of_tokens = st.lists(st.integers(0, 300), min_size=1, max_size=120)


def of_bins(tokens: np.ndarray, world: int, max_tokens: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens and samples of each bin, and the rows."""
    bins, rows = assign_to_ranks_and_rows(tokens, world, max_tokens)
    assert bins.shape == tokens.shape and bins.min() >= 0 and bins.max() < rows * world
    counts = np.bincount(bins, minlength=rows * world)
    return np.bincount(bins, weights=tokens, minlength=rows * world), counts, rows


# 1. Any step


@settings(max_examples=300, deadline=None)
@given(lists_of_tokens, st.integers(1, 9), st.integers(1, 400))
def test_every_sample_once_and_the_budget_held(tokens: list[int], world: int, max_tokens: int) -> None:
    """A bin is a rank's row, so that all ranks have equally many; each sample has exactly one. A row is over the budget
    only where it is one sample."""
    filled, counts, found = of_bins(np.array(tokens), world, max_tokens)
    assert counts.sum() == len(tokens) and len(counts) == found * world and found >= 1
    assert all(count == 1 for count, total in zip(counts, filled, strict=True) if total > max_tokens)
    assert found <= -(-len(tokens) // world), "rows that nothing is left for"


@settings(max_examples=100, deadline=None)
@given(lists_of_tokens, st.integers(1, 9), st.integers(1, 400))
def test_a_pure_function(tokens: list[int], world: int, max_tokens: int) -> None:
    """Of the lengths alone: the same again, of a copy, of floats, in any memory order. It leaves them as they are."""
    given_tokens = np.array(tokens)
    bins, rows = assign_to_ranks_and_rows(given_tokens, world, max_tokens)
    for same in (given_tokens.copy(), given_tokens.astype(float), np.array([tokens, tokens]).T[:, 1]):
        again, rows_again = assign_to_ranks_and_rows(same, world, max_tokens)
        assert again.tolist() == bins.tolist() and rows_again == rows
    assert given_tokens.tolist() == tokens


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=400), st.integers(1, 30))
def test_no_bin_is_far_above_another(tokens: list[int], bins: int) -> None:
    """Not above the fullest that the average, or the longest sample, needs by more than one sample of each portion."""
    longest_first = np.sort(np.array(tokens))[::-1]
    filled = np.bincount(assign_to_emptiest_bins(longest_first, bins), weights=longest_first, minlength=bins)
    assert filled.sum() == sum(tokens)
    assert filled.max() <= max(sum(tokens) / bins, max(tokens)) + 2 * max(tokens)


def plainly(tokens: list[int], bins: int) -> list[int]:
    """`deal`, sample by sample, where a portion has no bin twice."""
    filled, dealt = [0] * bins, []
    while len(dealt) < len(tokens):
        order = sorted(range(bins), key=lambda b: (filled[b], b))
        low = [b for b in order if filled[b] <= filled[order[0]] + tokens[len(dealt)]]
        for b in order[: max(len(low), -(-bins // FEWEST_BINS))][: len(tokens) - len(dealt)]:
            filled[b] += tokens[len(dealt)]
            dealt.append(b)
    return dealt


@settings(max_examples=100, deadline=None)
@given(lists_of_tokens, st.integers(4, 20))
@example([100] * 8 + [1] * 60, 9)
@example([100] * 15 + [1] * 60, 16)
def test_deal_is_what_it_says(tokens: list[int], bins: int) -> None:
    """Bins of live runs: another way of dealing would give a resumed step other rows, and with dropout another loss."""
    longest_first = sorted(tokens, reverse=True)
    assert len(tokens) <= ROUNDS * bins
    assert assign_to_emptiest_bins(np.array(longest_first), bins).tolist() == plainly(longest_first, bins)


def test_equal_lengths_keep_their_order() -> None:
    """Unstable sorts put them in another order on another machine."""
    tokens = np.tile([7, 9, 8], 500)
    longest_first = sorted(range(1500), key=lambda i: -tokens[i])
    bins, _ = assign_to_ranks_and_rows(tokens, 4, NO_BUDGET)
    assert bins[longest_first].tolist() == assign_to_emptiest_bins(tokens[longest_first], 4).tolist()


def test_there_and_back() -> None:
    """Where a step has many rounds, several are dealt out at once."""
    tokens = np.full(2 * ROUNDS * 4, 7)
    assert assign_to_emptiest_bins(tokens, 4)[:8].tolist() == [0, 1, 2, 3, 3, 2, 1, 0]


# 2. Budgets


def test_a_sample_over_the_budget_is_alone_and_costs_nobody_else_a_row() -> None:
    tokens = np.array([5] * 100 + [900, 300])
    filled, counts, rows = of_bins(tokens, 2, 256)
    assert rows == 3 and sorted(filled)[-2:] == [300, 900] and counts[filled > 256].tolist() == [1, 1]
    huge = np.array([5] * 100 + [2**16 + 5])  # more than a short integer holds
    filled, counts, _ = of_bins(huge, 2, 256)
    assert filled.max() == 2**16 + 5 and counts[filled.argmax()] == 1


def test_samples_that_do_not_go_together() -> None:
    """Just over half the budget each: a row for each, found in a few trials rather than one row at a time."""
    started = time.perf_counter()
    _, counts, rows = of_bins(np.full(20_000, 130), 2, 256)
    assert counts.max() == 1 and rows == 10_000
    assert time.perf_counter() - started < 2


def test_no_more_rows_than_needed() -> None:
    rng = np.random.default_rng(0)
    for kind, world, max_tokens in itertools.product(KINDS, (1, 2, 8), (4096, 16384)):
        tokens = kind(rng, 2048).round()
        _, _, rows = of_bins(tokens, world, max_tokens)
        assert rows == int(np.ceil(tokens.sum() * (1 + FREE_SHARE) / (world * max_tokens))), kind.__name__


def test_nothing_to_read() -> None:
    """A step whose samples are all estimated to be dropped still has a row."""
    bins, rows = assign_to_ranks_and_rows(np.zeros(5), 2, 128)
    assert rows == 1 and np.bincount(bins, minlength=2).max() <= 3


# 3. Balance


def imbalance(kind: Kind, world: int, per_rank: int, max_tokens: int = NO_BUDGET) -> float:
    """The most tokens of a bin, as a share of the average; the worst of a few steps."""
    found = []
    for seed in range(4):
        filled, _, _ = of_bins(kind(np.random.default_rng(seed), world * per_rank).round(), world, max_tokens)
        found.append(filled.max() / filled.mean())
    return max(found)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_balance(kind: Kind) -> None:
    """The fullest bin is the one that all ranks wait for."""
    assert imbalance(kind, 8, 256) <= 1.005
    assert imbalance(kind, 8, 256, max_tokens=4096) <= 1.01, "in several rows a rank"
    assert imbalance(kind, 1024, 8) <= 1.03
    assert imbalance(kind, 1024, 64, max_tokens=1024) <= 1.02, "in several rows a rank"
    assert imbalance(kind, 8, 16) <= 1.02
    assert imbalance(kind, 8, 8192) <= 1.005


# 4. Time


@pytest.mark.parametrize(
    ("kind", "world", "max_tokens"),
    [(pairs, 1, 256), (read_twice, 8, 4096), (any_length, 1024, NO_BUDGET), (pairs, 1024, 256)],
)
def test_a_step_of_64k_samples_is_cut_in_milliseconds(world: int, kind: Kind, max_tokens: int) -> None:
    """About 2 ms measured; ten times as long is a loop over samples or bins."""
    tokens = kind(np.random.default_rng(0), 65_536).round().astype(np.int64)
    took = []
    for _ in range(5):
        started = time.thread_time()
        assign_to_ranks_and_rows(tokens, world, max_tokens)
        took.append(time.thread_time() - started)
    assert min(took) < 0.02
