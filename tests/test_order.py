"""One epoch is every record once, in an order that is a function of (shard sizes, seed, epoch) and nothing else."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xscale import rng
from xscale.data import order as order_module
from xscale.data.order import shuffle_and_pack_text
from xscale.data.shards import OPEN_FILES

SEED = np.uint64(1234567)
counts_of_shards = st.lists(st.integers(1, 40), min_size=1, max_size=12)
windows = st.integers(1, 120)


def empty_records(shards: Sequence[int], records: Sequence[slice | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of records of no bytes, and that none goes on a document."""
    count = sum(map(len, records))  # type: ignore[arg-type]
    return np.zeros(count, dtype=int), np.zeros(count, dtype=bool)


def make_order(
    counts: np.ndarray, seed: np.uint64, epoch: int, window: int = order_module.WINDOW_RECORDS, **further: Any
) -> order_module.EpochOrder:
    return order_module.EpochOrder(counts, seed, epoch, window=window, **{"read_lengths": empty_records} | further)


def locate(order: order_module.EpochOrder, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Shard and number of the records of positions start..stop-1, at which samples begin and end."""
    found = []
    while start < stop:
        ends, *records, _ = order.take_samples(start, stop - start)
        found.append(records)
        start = int(ends[-1])
    shard, record = zip(*found, strict=True)
    return np.concatenate(shard), np.concatenate(record)


def places(counts: list[int], seed: np.uint64 = SEED, epoch: int = 0, window: int = 100) -> list[tuple[int, int]]:
    """The whole epoch, read at once."""
    order = make_order(np.array(counts), seed, epoch, window)
    return list(zip(*(array.tolist() for array in locate(order, 0, sum(counts))), strict=True))


@settings(max_examples=60, deadline=None)
@given(counts_of_shards, st.integers(0, 2**63), st.integers(0, 1000), windows)
def test_an_epoch_is_every_record_once(counts: list[int], seed: int, epoch: int, window: int) -> None:
    found = Counter(places(counts, np.uint64(seed), epoch, window))
    expected = {(shard, record) for shard, count in enumerate(counts) for record in range(count)}
    assert expected - set(found) == set(), "missing"
    assert {place for place, times in found.items() if times > 1} == set(), "duplicate"
    assert set(found) - expected == set(), "invented"


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
    one = make_order(np.array(counts), SEED, 0, window)
    for start, stop in data.draw(st.permutations(pieces)):
        for order in (one, make_order(np.array(counts), SEED, 0, window)):
            shard, record = locate(order, start, stop)
            assert list(zip(shard.tolist(), record.tolist(), strict=True)) == whole[start:stop]


@settings(max_examples=60, deadline=None)
@given(counts_of_shards, windows, st.integers(0, 50))
def test_a_shard_lies_in_one_window(counts: list[int], window: int, epoch: int) -> None:
    order = make_order(np.array(counts), SEED, epoch, window)
    whole = places(counts, epoch=epoch, window=window)
    window_of = [order.window_at(position) for position in range(len(whole))]
    windows_of = {shard: {window_of[i] for i, (s, _) in enumerate(whole) if s == shard} for shard in range(len(counts))}
    assert all(len(found) == 1 for found in windows_of.values())
    # Windows follow one another; as many as the records fill, and their numbers of shards differ by one at most.
    assert window_of == sorted(window_of)
    assert set(window_of) == set(range(min(max(sum(counts) // window, 1), len(counts))))
    shards = Counter(next(iter(found)) for found in windows_of.values())
    assert max(shards.values()) - min(shards.values()) <= 1


def test_a_window_has_no_more_shards_than_stay_open() -> None:
    """Many tiny shards: windows shrink rather than open a shard twice."""
    order = make_order(np.full(5000, 10), SEED, 0)
    shards, _ = locate(order, 0, 50_000)
    for window in range(5000 // 256 + 1):
        of_window = {shard for i, shard in enumerate(shards.tolist()) if order.window_at(i) == window}
        assert len(of_window) <= 256 <= OPEN_FILES / 4


def test_every_window_is_a_cross_section() -> None:
    """A source sorted by topic: each window holds its share of each tenth of the source."""
    order = make_order(np.full(200, 50), SEED, 0, window=1000)
    shards, _ = locate(order, 0, 10_000)
    for start in range(0, 10_000, 1000):
        tenths = Counter((shards[start : start + 1000] // 20).tolist())
        assert sorted(tenths.values()) == [100] * 10


# Running text


def fits(tokens: list[int], starts: list[int], room: int) -> list[int]:
    """Where runs begin, item by item."""
    found, filled = [0], tokens[0]
    for i, n in enumerate(tokens[1:], start=1):
        if i in starts or filled + n > room:
            found.append(i)
            filled = 0
        filled += n
    return found


def documents(counts: list[int], together: float = 0.7, room: int = 50, seed: int = 0):
    """Tokens of each record of each shard, and whether it goes on a document; and both as EpochOrder asks for them."""
    draw = np.random.default_rng(seed)
    tokens = [draw.integers(1, 30, count) for count in counts]
    on = [(draw.random(count) < together) & (np.arange(count) > 0) for count in counts]

    def look(shards: Sequence[int], records: Sequence[slice | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        both = [(tokens[s][r], on[s][r]) for s, r in zip(shards, records, strict=True)]
        lengths, follows = zip(*both, strict=True)
        return np.concatenate(lengths), np.concatenate(follows)

    limits = ((sum(counts), room),)
    return tokens, on, {"read_lengths": look, "estimate": lambda lengths: lengths, "sample_limits": limits}


@settings(max_examples=30, deadline=None)
@given(counts_of_shards, windows, st.integers(1, 80), st.sampled_from([0.0, 0.7, 1.0]), st.integers(0, 9))
def test_an_epoch_of_documents(counts: list[int], window: int, room: int, together: float, epoch: int) -> None:
    """Every record once; pieces of documents stay whole; windows tile the epoch as they do for pairs; samples are whole
    pieces that fit, the same from any sample's start on, however many are asked for."""
    tokens, on, sizes = documents(counts, together, room)
    order = make_order(np.array(counts), SEED, epoch, window, **sizes)
    whole = list(zip(*(array.tolist() for array in locate(order, 0, order.size)), strict=True))
    assert sorted(whole) == [(shard, record) for shard, count in enumerate(counts) for record in range(count)]
    pieces = {
        (shard, start): [(shard, record) for record in range(start, end)]
        for shard, count in enumerate(counts)
        for starts in [fits(tokens[shard].tolist(), np.flatnonzero(~on[shard]).tolist(), room)]
        for start, end in pairwise([*starts, count])
    }
    found = [pieces[place] for place in whole if place in pieces]
    assert [place for piece in found for place in piece] == whole, "a piece is torn"
    assert [order.window_at(p) for p in range(order.size)] == [
        make_order(np.array(counts), SEED, epoch, window).window_at(p) for p in range(order.size)
    ]
    ends = [0]
    while ends[-1] < order.size:
        ends += order.take_samples(ends[-1], order.size)[0].tolist()
    size = {piece[0]: sum(int(tokens[s][r]) for s, r in piece) for piece in pieces.values()}
    light = Counter[int]()
    for start, end in pairwise(ends):
        assert whole[start] in pieces and order.window_at(start) == order.window_at(end - 1), "a sample is whole pieces"
        of_sample = [size[place] for place in whole[start:end] if place in pieces]
        assert sum(of_sample) <= room or len(of_sample) == 1, "a sample holds more than fits"
        light[order.window_at(start)] += 2 * sum(of_sample) <= room
    assert max(light.values()) <= 1, "two samples of a window would fit into one"
    for i, start in enumerate(ends[:-1]):
        got = make_order(np.array(counts), SEED, epoch, window, **sizes).take_samples(start, 3)[0].tolist()
        assert got == ends[i + 1 : i + 1 + len(got)] and 1 <= len(got) <= 3


@pytest.mark.parametrize("sentences", [1, 3, 10, 100])
def test_samples_are_full(sentences: int) -> None:
    """Of documents of so many sentences of about 28 tokens; before pieces were put together, 77 to 96 % were filled."""
    draw = np.random.default_rng(0)
    sizes = np.maximum(draw.gamma(2, 14, 50_000).astype(np.int64), 1)
    follows = (draw.random(50_000) > 1 / sentences) & (np.arange(50_000) > 0)
    _, ends = shuffle_and_pack_text(sizes, follows, 480, np.uint64(7))
    assert sizes.sum() / len(ends) > 0.95 * 480


def test_a_long_document_comes_in_many_pieces() -> None:
    """All over its window, and no two in their old order more often than chance says."""
    _, _, sizes = documents([5000], together=1.0, room=100)
    order = make_order(np.array([5000]), SEED, 0, **sizes)
    _, record = locate(order, 0, 5000)
    breaks = np.flatnonzero(np.diff(record) != 1)
    assert 5000 / 8 < len(breaks) < 5000 / 4 and (np.diff(record)[breaks] < 0).mean() == pytest.approx(0.5, abs=0.1)


# Windows in parts, in streams of many sources


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "WINDOW_RECORDS", 64)
    monkeypatch.setattr(order_module, "PART_RECORDS", 8)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts_of_shards, st.integers(2, 50), st.integers(0, 9))
def test_pairs_come_in_the_same_order_in_parts(small_parts: None, counts: list[int], sources: int, epoch: int) -> None:
    """Also their lengths, and however the epoch is read."""
    bytes_of, _, looks = documents(counts)
    whole = places(counts, epoch=epoch)
    one = make_order(np.array(counts), SEED, epoch, 100, read_lengths=looks["read_lengths"], sources=sources)
    at = 0
    while at < len(whole):
        end = int(one.take_samples(at, 7)[0][-1])
        fresh = make_order(np.array(counts), SEED, epoch, 100, read_lengths=looks["read_lengths"], sources=sources)
        for order in (one, fresh):
            shard, record = locate(order, at, end)
            assert list(zip(shard.tolist(), record.tolist(), strict=True)) == whole[at:end]
            assert order.take_samples(at, 7)[3].tolist() == [bytes_of[s][r] for s, r in whole[at:end]]
        at = end


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts_of_shards, st.integers(2, 50), st.sampled_from([0.0, 0.7, 1.0]), st.integers(0, 9))
def test_running_text_in_parts(small_parts: None, counts: list[int], sources: int, together: float, epoch: int) -> None:
    """Every record once. A part is a stretch of each of its window's shards, its samples are whole and fit, and a
    resume at any of them goes on."""
    tokens, _, looks = documents(counts, together)
    order = make_order(np.array(counts), SEED, epoch, 100, **looks, sources=sources)
    whole = list(zip(*(array.tolist() for array in locate(order, 0, order.size)), strict=True))
    assert sorted(whole) == [(shard, record) for shard, count in enumerate(counts) for record in range(count)]
    at = 0
    while at < order.size:
        part = order.part_at(at)
        assert part.first == at, "parts tile the epoch"
        n, window = len(part.ordinals), order.window_at(at)
        held = whole[at : at + n]
        for shard in {shard for shard, _ in held}:
            records = sorted(record for s, record in held if s == shard)
            assert records == list(range(records[0], records[-1] + 1))
        parts = order.part_count(window)
        assert parts == 1 or n <= order.window_records[window] / parts + len(counts)
        start = at
        for end in order.take_samples(at, n)[0].tolist():
            sizes = [int(tokens[s][r]) for s, r in whole[start:end]]
            assert sum(sizes) <= 50 or all(b == (a[0], a[1] + 1) for a, b in pairwise(whole[start:end]))
            fresh = make_order(np.array(counts), SEED, epoch, 100, **looks, sources=sources)
            assert fresh.take_samples(start, 1)[0].tolist() == [end]
            start = end
        at += n
        assert start == at, "a sample lies in two parts"


def test_a_part_is_a_cross_section_of_its_window(small_parts: None) -> None:
    """Text that is sorted by topic: each part has as much of each tenth of the window."""
    _, _, looks = documents([40] * 20)
    order = make_order(np.full(20, 40), SEED, 0, 10_000, **looks, sources=2)
    assert order.part_count(0) == 25
    at = 0
    while at < 800:
        part = order.part_at(at)
        held = Counter(order.take_samples(at, 800)[1].tolist())
        assert len(held) == 20 and set(held.values()) <= {1, 2}
        at += len(part.ordinals)
    assert make_order(np.full(20, 40), SEED, 0, 10_000, **looks, sources=1).part_count(0) == 12
