"""What a step consumes: the same at every world size and row length, resumable, every record once an epoch."""

import itertools
import json
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.streams import make_mixture, mono, pairs
from xscale import rng
from xscale.data.calibration import Calibration, Correction
from xscale.data.mixture import (
    Mixture,
    Plan,
    PlanTable,
    draw_source_per_sample_systematically,
    group_of_each_value_in_sorted_order,
    probabilities_of_stream_sources,
)
from xscale.data.stream import Stream
from xscale.errors import UserError

LENGTH = 64
Process = tuple[int, int, int, int]  # source, epoch, shard, record


class FakeSource:
    """As much of a Source as drawing needs."""

    def __init__(self, langs: str, counts: list[int], longest: int = 40, together: float = 0.0):
        """together: share of the records that go on the document of the record before."""
        self.langs_name, self.fingerprint = langs, f"{langs} {counts}"
        self.sorted_langs_name = "-".join(sorted(langs.split("-")))
        self.counts, self.records = np.array(counts), sum(counts)
        self.remote = None
        self.sizes = [np.random.default_rng(i).integers(1, longest, count) for i, count in enumerate(counts)]
        self.on = [np.random.default_rng(i).random(count) < together for i, count in enumerate(counts)]
        for shard in self.on:
            shard[0] = False

    def byte_lengths(self, shard: int, records: np.ndarray | slice) -> np.ndarray:
        return self.sizes[shard][records]

    def byte_lengths_and_continuations(self, shard: int, records: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        return self.byte_lengths(shard, records), self.on[shard][records]


SOURCES: list[Any] = [
    FakeSource("en", [30, 20, 7], longest=100, together=0.8),  # some records are longer than a sequence
    FakeSource("de", [11]),
    FakeSource("en-de", [25, 25]),
    FakeSource("en-fr", [9, 5, 6]),
]
STREAMS = [
    mono("mlm", (0, 1), 10),
    pairs("tlm", (2, 3), 13),
    pairs("again", (2,), 3),
]
CORRECTIONS = {"again": Correction(ratio=2.0, beyond=0.0)}


def mixture(
    rank: int = 0,
    world: int = 1,
    max_tokens: int = 10_000,
    *,
    sources: list[Any] = SOURCES,
    streams: list[Stream] = STREAMS,
    corrections: dict[str, Correction] = CORRECTIONS,
    seed: int = 5,
    alpha: float = 0.7,
    state: dict[str, Any] | None = None,
) -> Mixture:
    return make_mixture(
        streams,
        sources,
        Calibration([(1.0, 0.0)] * len(sources), corrections),
        seed=seed,
        alpha=alpha,
        max_length=LENGTH,
        max_tokens=max_tokens,
        rank=rank,
        world=world,
        state=state,
    )


def plain(plan: Plan) -> dict[str, list[list[tuple[int, Process]]]]:
    """stream -> rows -> (number of the sample, place) of each record."""

    def records(draw: PlanTable) -> list[tuple[int, Process]]:
        columns = (draw.sample, draw.source, draw.epoch, draw.shard, draw.record)
        return [(sample, tuple(place)) for sample, *place in zip(*(c.tolist() for c in columns), strict=True)]

    found = defaultdict[str, list[list[tuple[int, Process]]]](list)
    for row in rows_of(plan):
        for name, draw in row.items():
            found[name].append(records(draw))
    return dict(found)


def rows_of(plan: Plan) -> list[dict[str, PlanTable]]:
    """The records of each row of a rank, by stream."""
    rows: list[dict[str, PlanTable]] = [{} for _ in range(plan.rows)]
    for name, table in plan.tables.items():
        for number, row in enumerate(rows):
            row[name] = table.select_records(np.flatnonzero(table.row // plan.world == number))
    return rows


def samples(plans: list[Plan]) -> dict[str, dict[int, list[Process]]]:
    """The step's global batch: stream -> sample -> its records in order, over the plans of all ranks."""
    batch: dict[str, dict[int, list[Process]]] = defaultdict(dict)
    for plan in plans:
        for name, rows in plain(plan).items():
            for row in rows:
                for sample, group in itertools.groupby(row, key=lambda record: record[0]):
                    assert sample not in batch[name], "a sample is torn apart or given twice"
                    batch[name][sample] = [place for _, place in group]
    return dict(batch)


def consumed(steps: int, **arguments: Any) -> dict[tuple[str, int], list[list[Process]]]:
    """(stream, source) -> samples in order of consumption."""
    found: dict[tuple[str, int], list[list[Process]]] = defaultdict(list)
    for plan in itertools.islice(iter(mixture(**arguments).next_plan_of_rank, None), steps):
        for name, batch in samples([plan]).items():
            for sample in sorted(batch):
                found[name, batch[sample][0][0]].append(batch[sample])
    return found


# 1. Ranks and rows


@pytest.mark.parametrize(("world", "max_tokens"), [(1, 64), (2, 200), (3, 10_000), (4, 64), (16, 200)])
def test_global_batch_does_not_depend_on_the_cut(world: int, max_tokens: int) -> None:
    """Nor does its order within a row: samples come in the order of their numbers."""
    whole = mixture()
    ranks = [mixture(rank, world, max_tokens) for rank in range(world)]
    for _ in range(12):
        expected, plans = whole.next_plan_of_rank(), [rank.next_plan_of_rank() for rank in ranks]
        assert expected.rows == 1 and samples(plans) == samples([expected])
        assert [plan.state for plan in plans] == [expected.state] * world
        assert len({plan.rows for plan in plans}) == 1, "ranks differ in their number of rows"
        for row in (row for plan in plans for row in rows_of(plan)):
            numbers = {name: draw.sample.tolist() for name, draw in row.items()}
            assert [*row] == [stream.name for stream in STREAMS] and all(n == sorted(n) for n in numbers.values())
            if sum(len(set(n)) for n in numbers.values()) > 1:
                # A record has a token a byte; "again" reads it twice, and drops what is over the length.
                sizes = {name: draw.tokens for name, draw in row.items()}
                sizes["again"] = np.where(sizes["again"] > LENGTH, 0, 2 * sizes["again"])
                assert sum(size.sum() for size in sizes.values()) <= max_tokens


def test_ranks_get_like_lengths() -> None:
    """No rank waits for another: their rows have equally many tokens."""
    sources = [FakeSource("en-de", [2000])]
    streams = [pairs("tlm", (0,), 64)]
    ranks = [mixture(rank, 4, 200, sources=sources, streams=streams) for rank in range(4)]
    for _ in range(5):
        tokens = [row["tlm"].tokens.sum() for rank in ranks for row in rows_of(rank.next_plan_of_rank())]
        assert len(tokens) > 4 and max(tokens) - min(tokens) <= 0.05 * max(tokens)


def test_an_estimate_decides_how_steps_are_cut_and_not_what_they_hold() -> None:
    streams = [pairs("tlm", (2,), 12), pairs("ppa", (2,), 12)]
    shares, batches = [], []
    for ratio in (1.0, 3.0):
        arguments: Any = {"streams": streams, "corrections": {"ppa": Correction(ratio=ratio)}}
        plan = mixture(0, 4, **arguments).next_plan()
        table = plan.tables["ppa"]
        tokens = plan.tables["tlm"].tokens.sum() + ratio * table.tokens.sum()
        assert plan.row_tokens.sum() == tokens and (plan.row_tokens % 1 == 0).all()
        shares.append(np.bincount(table.row, weights=table.tokens))
        batches.append(samples([mixture(rank, 4, **arguments).next_plan_of_rank() for rank in range(4)]))
    assert batches[0] == batches[1] and shares[0].tolist() != shares[1].tolist()


def test_records_are_promised_what_their_source_s_line_says() -> None:
    plain_lines, lines = Calibration([(1.0, 0.0)] * 4, {}), Calibration([(0.5, 3.0)] * 4, {})
    places: Any = {"seed": 5, "alpha": 0.7, "max_length": LENGTH, "max_tokens": 999, "rank": 0, "world": 1}
    one, other = (make_mixture(STREAMS, SOURCES, found, **places).next_plan_of_rank() for found in (plain_lines, lines))
    assert samples([one])["tlm"] == samples([other])["tlm"]
    for name in ("mlm", "tlm"):
        draw = next(row[name] for row in rows_of(other) if len(row[name].sample))
        sizes = [SOURCES[s].sizes[shard][r] for s, shard, r in zip(draw.source, draw.shard, draw.record, strict=True)]
        assert draw.tokens.tolist() == [0.5 * size + 3 for size in sizes]


# 2. State


@pytest.mark.parametrize("stop", [1, 2, 7, 19])
def test_resume_continues_exactly(stop: int) -> None:
    """From the state of any step, through JSON as in a checkpoint, at another world size too."""
    first = mixture()
    plans = [first.next_plan_of_rank() for _ in range(40)]
    state = json.loads(json.dumps(plans[stop - 1].state))
    again = mixture(state=state)
    for plan in plans[stop:]:
        resumed = again.next_plan_of_rank()
        assert (resumed.step, resumed.state) == (plan.step, plan.state)
        assert plain(resumed) == plain(plan)
    ranks = [mixture(rank, 3, 100, state=state) for rank in range(3)]
    for plan in plans[stop:]:
        assert samples([rank.next_plan_of_rank() for rank in ranks]) == samples([plan])


def test_a_state_of_an_earlier_order_is_refused_for_running_text() -> None:
    run = mixture()
    plans = [run.next_plan_of_rank() for _ in range(4)]
    for old in ({}, {"order": 2}):
        state = {name: value for name, value in plans[1].state.items() if name != "order"} | old
        with pytest.raises(UserError, match=r"step 2 .*model\.init=CHECKPOINT"):
            mixture(state=state)
        mixture(streams=[stream for stream in STREAMS if not stream.reads_running_text], state=state)
    mixture(state=plans[1].state)


# 3. Epochs


def test_streams_and_seeds_have_their_own_order() -> None:
    runs = [consumed(4, seed=seed) for seed in (0, 1)]
    orders = [
        [place[2:] for sample in run[key] for place in sample][:10]
        for run in runs
        for key in (("tlm", 2), ("again", 2))
    ]
    assert len({tuple(order) for order in orders}) == 4


# 4. Languages


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 1.0])
def test_weights_are_those_of_the_paper(alpha: float) -> None:
    """p_i = n_i^alpha / sum_j n_j^alpha over languages; several sources of a language share by their records."""
    sources: Any = [FakeSource("en", [600]), FakeSource("de", [50, 50]), FakeSource("en", [100, 200])]
    found = probabilities_of_stream_sources(
        pairs("tlm", (0, 1, 2), 1), sources, alpha, [source.records for source in sources]
    )
    p_en, p_de = 900**alpha / (900**alpha + 100**alpha), 100**alpha / (900**alpha + 100**alpha)
    assert found == pytest.approx([p_en * 600 / 900, p_de, p_en * 300 / 900])
    assert found.sum() == pytest.approx(1)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7, 1.0])
def test_a_pair_of_languages_is_the_same_either_way_round(alpha: float) -> None:
    """hi-en beside en-hi: 300 + 100 records of one pair, which share by their records; also among what is drawn."""
    sources: Any = [FakeSource("en-hi", [300]), FakeSource("de-en", [800]), FakeSource("hi-en", [60, 40])]
    p = 400**alpha / (400**alpha + 800**alpha)
    weights = probabilities_of_stream_sources(
        pairs("tlm", (0, 1, 2), 1), sources, alpha, [source.records for source in sources]
    )
    assert weights == pytest.approx([p * 3 / 4, 1 - p, p / 4])
    drawn = consumed(60, sources=sources, streams=[pairs("tlm", (0, 1, 2), 40)], alpha=alpha)
    assert abs(len(drawn["tlm", 2]) - 2400 * p / 4) < 4.5 * (2400 * p / 4) ** 0.5


# 5. Packing


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=2),
    st.booleans(),
    st.integers(1, 5),
    st.integers(64, 200),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_mixture_is_complete_and_cut_evenly(
    counts: list[list[int]], wanted: list[int], packed: bool, world: int, max_tokens: int, together: float
) -> None:
    """Tiny sources, so that a step may take several epochs of one."""
    sources = [FakeSource(f"l{i}", c, together=together) for i, c in enumerate(counts)]
    streams = [(mono if packed else pairs)(f"s{i}", tuple(range(len(counts))), n) for i, n in enumerate(wanted)]
    arguments: Any = {"sources": sources, "streams": streams}
    whole = mixture(**arguments)
    ranks = [mixture(rank, world, max_tokens, **arguments) for rank in range(world)]
    seen: Counter = Counter()
    for _ in range(6):
        plans = [rank.next_plan_of_rank() for rank in ranks]
        batch = samples(plans)
        assert batch == samples([whole.next_plan_of_rank()])
        assert len({plan.rows for plan in plans}) == 1
        assert {name: sorted(found) for name, found in batch.items()} == {s.name: [*range(s.samples)] for s in streams}
        for name, found in batch.items():
            seen.update((name, place) for places in found.values() for place in places)
    assert set(seen.values()) == {1}
    for stream in streams:
        for source, (epoch, position) in zip(stream.sources, whole.state["positions"][stream.name], strict=True):
            drawn = sum(name == stream.name and place[0] == source for name, place in seen)
            assert drawn == epoch * sources[source].records + position


# 6. Real shards


def plain_group_of_each_value_in_sorted_order(values: np.ndarray, group_end_positions: np.ndarray) -> np.ndarray:
    """Sort all values."""
    rank = np.empty(len(values), dtype=np.int64)
    rank[np.argsort(values, kind="stable")] = np.arange(len(values))
    return np.searchsorted(group_end_positions, rank, side="right")


@pytest.mark.parametrize("values", [1 << 53, 20])
def test_sources_are_chosen_by_the_order_of_random_numbers(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest go to the first source, of equal ones the earlier; 20 values make many equal ones."""
    uniform, random = rng.uniform, np.random.default_rng(0)
    monkeypatch.setattr(rng, "uniform", lambda *key: np.floor(uniform(*key) * values) / values)
    for number in range(200):
        samples, weights = int(random.integers(1, 300)), random.random(int(random.integers(1, 40))) ** 4
        weights /= weights.sum()
        drawn = rng.uniform(np.uint64(number), np.arange(samples + 1, dtype=np.uint64))
        points = (np.arange(samples) + drawn[-1]) / samples
        source = np.minimum(np.searchsorted(np.cumsum(weights), points, side="right"), len(weights) - 1)
        expected = np.empty(samples, dtype=np.int64)
        expected[np.argsort(drawn[:-1], kind="stable")] = source
        assert (draw_source_per_sample_systematically(weights, samples, np.uint64(number)) == expected).all()
        ends = np.searchsorted(source, np.arange(len(weights)), side="right")
        assert (
            plain_group_of_each_value_in_sorted_order(drawn[:-1], ends)
            == group_of_each_value_in_sorted_order(drawn[:-1], ends)
        ).all()
