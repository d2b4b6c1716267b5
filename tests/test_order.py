"""One epoch is every record once, in an order that is a function of (shard sizes, seed, epoch) and nothing else."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xscale import rng
from xscale.data.order import EpochOrder
from xscale.data.shards import OPEN_SHARDS

SEED = np.uint64(1234567)
counts_of_shards = st.lists(st.integers(1, 40), min_size=1, max_size=12)
windows = st.integers(1, 120)


def places(counts: list[int], seed: np.uint64 = SEED, epoch: int = 0, window: int = 100) -> list[tuple[int, int]]:
    """The whole epoch, read at once."""
    order = EpochOrder(np.array(counts), seed, epoch, window)
    return list(zip(*(array.tolist() for array in order.locate(0, sum(counts))), strict=True))


@settings(max_examples=60, deadline=None)
@given(counts_of_shards, st.integers(0, 2**63), st.integers(0, 1000), windows)
def test_an_epoch_is_every_record_once(counts: list[int], seed: int, epoch: int, window: int) -> None:
    found = Counter(places(counts, np.uint64(seed), epoch, window))
    expected = {(shard, record) for shard, count in enumerate(counts) for record in range(count)}
    assert expected - set(found) == set(), "missing"
    assert {place for place, times in found.items() if times > 1} == set(), "duplicate"
    assert set(found) - expected == set(), "invented"


def test_orders_differ_between_epochs_and_seeds() -> None:
    counts = [30, 50, 20, 40]
    orders = [places(counts, np.uint64(seed), epoch) for seed in range(5) for epoch in range(5)]
    assert len({tuple(order) for order in orders}) == 25
    assert tuple(sorted(orders[0])) not in {tuple(order) for order in orders}
    starts = Counter(order[0] for order in orders)
    assert max(starts.values()) <= 3
    # No order is a rotation or a close relative of another: few places are taken by the same record.
    same = [sum(a == b for a, b in zip(x, y, strict=True)) for i, x in enumerate(orders) for y in orders[:i]]
    assert max(same) < 15 and np.mean(same) < 3


def splitmix64(state: int) -> int:
    """Steele, Lea and Flood 2014, in plain integers."""
    x = (state + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_hashes_are_splitmix64() -> None:
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # the generator's first numbers, seed 0
    assert rng.hash64(np.uint64(0), np.arange(3)).tolist() == published
    assert [splitmix64(i * 0x9E3779B97F4A7C15) for i in range(3)] == published


def test_the_order_is_the_documented_one() -> None:
    """A pinned order: another one would break the resume of every run that was ever started."""
    golden, seed, epoch, window = 0x9E3779B97F4A7C15, 99, 2, 60

    def draw(key: int, n: int) -> int:
        return splitmix64((key + n * golden) % 2**64)

    def shuffled(key: int, items: list) -> list:
        return [items[i] for i in sorted(range(len(items)), key=lambda i: draw(key, i))]

    counts = [17, 5, 30, 9, 22, 41, 8, 13]
    key = draw(seed, epoch)
    n_windows = sum(counts) // window
    assert n_windows == 2
    # Of each run of n_windows neighbouring shards, the one with the least hash goes to the first window, and so on.
    groups: list[list[tuple[int, int]]] = [[] for _ in range(n_windows)]
    for first in range(0, len(counts), n_windows):
        run = range(first, min(first + n_windows, len(counts)))
        for group, shard in zip(groups, sorted(run, key=lambda i: draw(draw(key, 0), i)), strict=False):
            group += [(shard, record) for record in range(counts[shard])]
    expected = [place for number, group in enumerate(groups) for place in shuffled(draw(key, number + 1), group)]
    assert places(counts, np.uint64(seed), epoch, window) == expected


@settings(max_examples=60, deadline=None)
@given(counts_of_shards, windows, st.data())
def test_any_splitting_gives_the_same_order(counts: list[int], window: int, data: st.DataObject) -> None:
    """A fresh object for each piece (a resume), and one object for pieces in any order (seeks)."""
    total = sum(counts)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=6))})
    pieces = list(pairwise(cuts))
    whole = places(counts, window=window)
    one = EpochOrder(np.array(counts), SEED, 0, window)
    for start, stop in data.draw(st.permutations(pieces)):
        for order in (one, EpochOrder(np.array(counts), SEED, 0, window)):
            shard, record = order.locate(start, stop)
            assert list(zip(shard.tolist(), record.tolist(), strict=True)) == whole[start:stop]


def test_one_by_one_equals_at_once() -> None:
    counts = [17, 5, 30, 9, 22]
    order = EpochOrder(np.array(counts), SEED, 3, 25)
    singles = [tuple(int(array[0]) for array in order.locate(i, i + 1)) for i in range(sum(counts))]
    assert singles == places(counts, epoch=3, window=25)


@settings(max_examples=60, deadline=None)
@given(counts_of_shards, windows, st.integers(0, 50))
def test_a_shard_lies_in_one_window(counts: list[int], window: int, epoch: int) -> None:
    order = EpochOrder(np.array(counts), SEED, epoch, window)
    whole = places(counts, epoch=epoch, window=window)
    bounds = [order.bounds(position) for position in range(len(whole))]
    windows_of = {shard: {bounds[i][0] for i, (s, _) in enumerate(whole) if s == shard} for shard in range(len(counts))}
    assert all(len(found) == 1 for found in windows_of.values())
    # Windows tile the epoch in order; as many as the records fill, and their numbers of shards differ by one at most.
    tiles = sorted(set(bounds))
    assert [tile[0] for tile in tiles] == list(range(len(tiles)))
    assert [tile[1] for tile in tiles] == [0, *(tile[2] for tile in tiles[:-1])] and tiles[-1][2] == len(whole)
    assert all(start <= i < end for i, (_, start, end) in enumerate(bounds))
    assert len(tiles) == min(max(sum(counts) // window, 1), len(counts))
    shards = Counter(next(iter(found)) for found in windows_of.values())
    assert max(shards.values()) - min(shards.values()) <= 1


def test_a_window_has_no_more_shards_than_stay_open() -> None:
    """Many tiny shards: windows shrink rather than open a shard twice."""
    order = EpochOrder(np.full(5000, 10), SEED, 0)
    shards, _ = order.locate(0, 50_000)
    for window in range(5000 // 256 + 1):
        _, first, end = order.bounds(window * 50_000 // 20 + 1)
        assert len(set(shards[first:end].tolist())) <= 256 == OPEN_SHARDS


def test_every_window_is_a_cross_section() -> None:
    """A source sorted by topic: each window holds its share of each tenth of the source."""
    order = EpochOrder(np.full(200, 50), SEED, 0, window=1000)
    shards, _ = order.locate(0, 10_000)
    for start in range(0, 10_000, 1000):
        tenths = Counter((shards[start : start + 1000] // 20).tolist())
        assert sorted(tenths.values()) == [100] * 10


def test_few_shards_are_read_at_a_time() -> None:
    """From first to last record of a shard: a window's length at most, whatever the size of the source."""
    counts = [50] * 200
    whole = places(counts, window=500)
    spans = [[i for i, (shard, _) in enumerate(whole) if shard == wanted] for wanted in range(200)]
    assert max(span[-1] - span[0] for span in spans) < 2 * 500 + 50


def test_the_whole_source_is_one_window_where_it_fits() -> None:
    whole = places([50] * 200, window=10_000)
    first_half = Counter(shard for shard, _ in whole[:5000])
    assert len(first_half) == 200 and max(first_half.values()) < 45  # binomial: 25 +- 3.5


@pytest.mark.parametrize("window", [500, 10_000])
def test_neighbours_are_unrelated(window: int) -> None:
    """Within a window a shuffle is full: neighbours come from the same shard as often as chance says."""
    whole = places([50] * 200, window=window)
    chance = min(1.0, 49 / (window - 1))
    same_shard = sum(a[0] == b[0] for a, b in pairwise(whole)) / len(whole)
    assert abs(same_shard - chance) < 5 * (chance / len(whole)) ** 0.5
    in_turn = sum(b == (a[0], a[1] + 1) for a, b in pairwise(whole))
    assert in_turn < 5 + 3 * len(whole) / window
    record = np.array([record for _, record in whole])
    assert abs(np.corrcoef(record[:-1], record[1:])[0, 1]) < 0.05
