"""Rows against loops: where each token and state goes, what a row costs, how it gets to a device."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xscale.data.packed_row import Row, Tokens, lay_out_longest_first, pack_row
from xscale.data.ragged import concatenated_ranges
from xscale.data.sequences import Sequences
from xscale.data.stream_batch import Gather, StreamBatch
from xscale.metric_keys import MetricKey, loss_key

LONGEST, FILLER = 9, 77
LENGTHS = st.lists(st.integers(1, LONGEST), max_size=6)


def sequences(lengths: list[int], first: int = 1000) -> Sequences:
    """Ids that tell the tokens apart; positions and languages that follow from them."""
    total = sum(lengths)
    ids = first + np.arange(total)
    sizes = np.array(lengths, dtype=np.int64)
    identities = np.arange(len(lengths), dtype=np.uint64)
    starts = np.cumsum(sizes) - sizes
    return Sequences(ids, sizes, concatenated_ranges(sizes) // 2, 1 + ids % 3, ids % 2, None, identities, starts)


PARTS = st.lists(LENGTHS, min_size=1, max_size=4).map(
    lambda parts: [sequences(lengths, 1000 * (number + 1)) for number, lengths in enumerate(parts)]
)


def sequences_in(tokens: Tokens) -> list[list[int]]:
    starts = tokens.starts.tolist()
    return [tokens.input_ids[a:b].tolist() for a, b in pairwise(starts)]


def split(part: Sequences) -> list[list[int]]:
    starts = part.starts.tolist()
    return [part.ids[a : a + n].tolist() for a, n in zip(starts, part.lengths.tolist(), strict=True)]


# 1. Tokens


@settings(deadline=None)
@given(PARTS, st.data())
def test_every_token_once_longest_first(parts: list[Sequences], data: st.DataObject) -> None:
    some_types = st.sampled_from([None, "languages", "segments"])
    types = data.draw(st.lists(some_types, min_size=len(parts), max_size=len(parts)))
    tokens, places = lay_out_longest_first(
        [StreamBatch(p, {}, {}, 0, types=t) for p, t in zip(parts, types, strict=True)], FILLER
    )
    expected = [sequence for part in parts for sequence in split(part)]
    expected.sort(key=len, reverse=True)  # stable: equally long ones stay in order
    assert sequences_in(tokens) == (expected or [[FILLER] * 2]), "a row is never quite empty"
    assert tokens.lengths.tolist() == [len(sequence) for sequence in sequences_in(tokens)]
    assert tokens.longest == max(map(len, sequences_in(tokens)))
    assert (tokens.input_ids.dtype, tokens.positions.dtype) == (np.int64, np.int64)
    assert (tokens.starts.dtype, tokens.lengths.dtype) == (np.int32, np.int32)
    for part, place, used in zip(parts, places, types, strict=True):
        assert (tokens.input_ids[place] == part.ids).all() and (tokens.positions[place] == part.positions).all()
        if tokens.types is not None:
            assert tokens.types[place].tolist() == (getattr(part, used).tolist() if used else [0] * len(part.ids))
    assert (tokens.types is not None) == any(types)
    every = np.concatenate(places)
    assert sorted(every.tolist()) == list(range(len(every)))


# 2. Gathers

STATES = st.lists(st.lists(st.integers(0, 11), max_size=4), max_size=6)
"""The tokens that each state sums, of 12 tokens; also one token twice."""


def gather_of(states: list[list[int]]) -> Gather:
    tokens = np.array([token for state in states for token in state], dtype=np.int64)
    return Gather.sums(tokens, np.array([len(state) for state in states], dtype=np.int64))


def lists(gather: Gather) -> list[list[int]]:
    assert len(gather.offsets) == gather.state_count + 1 and gather.offsets.dtype == gather.columns.dtype == np.int32
    return [gather.columns[a:b].tolist() for a, b in pairwise(gather.offsets.tolist())]


def transposed(states: list[list[int]], tokens: int) -> list[list[int]]:
    return [[s for s, state in enumerate(states) for t in state if t == token] for token in range(tokens)]


@settings(deadline=None)
@given(STATES)
def test_a_gather_and_its_transpose(states: list[list[int]]) -> None:
    gather = gather_of(states)
    assert lists(gather) == states
    assert lists(gather.transpose(12)) == transposed(states, 12)
    assert lists(gather.transpose(12).transpose(len(states))) == [sorted(state) for state in states]


@settings(deadline=None)
@given(st.lists(STATES, max_size=3))
def test_gathers_of_several_parts(parts: list[list[list[int]]]) -> None:
    """The states of all parts, whose tokens stand one after the other."""
    gathers = [gather_of(states) for states in parts]
    first_state = np.cumsum([0, *map(len, parts)])[:-1].tolist()
    whole = Gather.concat(gather.shift(12 * number) for number, gather in enumerate(gathers))
    expected = [[12 * n + token for token in state] for n, states in enumerate(parts) for state in states]
    assert lists(whole) == expected
    backward = Gather.concat(
        gather.transpose(12).shift(first) for gather, first in zip(gathers, first_state, strict=True)
    )
    assert lists(backward) == lists(whole.transpose(12 * len(parts)))


def test_a_gather_of_single_tokens() -> None:
    assert lists(Gather.single(np.array([3, 1, 3]))) == [[3], [1], [3]]


# 3. Rows


def random_stream_batches(seed: int, empty: bool = False) -> dict[str, StreamBatch]:
    """Three streams: with types; with an auxiliary encoder and several kinds of states; without predictions."""
    draw = np.random.default_rng(seed)

    def some(first: int) -> Sequences:
        return sequences(draw.integers(1, LONGEST + 1, 0 if empty else draw.integers(1, 6)).tolist(), first)

    def places(part: Sequences, count: int) -> np.ndarray:
        return draw.integers(0, max(len(part.ids), 1), 0 if empty else count)

    a, b, c, d = (some(first) for first in (1000, 2000, 3000, 4000))
    counts = np.array([] if empty else [2, 0, 3], dtype=np.int64)
    states_d = Gather.sums(places(d, 2), counts[:2])
    states_b = {"one": Gather.single(places(b, 4)), "sums": Gather.sums(places(b, 5), counts)}
    masked = Gather.single(places(a, 3))
    return {
        "a": StreamBatch(a, {"masked": masked}, {"mlm": 3, "extra": 1}, 2, {"mlm": places(a, 3)}, types="languages"),
        "b": StreamBatch(
            b, states_b, {"x": 4, "y": 2}, 3, {"x": places(b, 4), "y": places(b, 2)},
            arrays={"number": np.arange(3)}, auxiliary=StreamBatch(d, {"key": states_d}, {}, 3),
            pair_counts={MetricKey("too_long", "b"): 1},
        ),
        "c": StreamBatch(c, {"first": Gather.single(places(c, 1))}, {"z": 1}, 1),
    }  # fmt: skip


def test_a_row_has_the_sequences_and_states_of_its_streams() -> None:
    for seed, empty in [*((seed, False) for seed in range(20)), (20, True)]:
        stream_batches = random_stream_batches(seed, empty)
        row = pack_row(stream_batches, FILLER)
        ids = row.tokens.input_ids
        real = [sequence for stream_batch in stream_batches.values() for sequence in split(stream_batch.sequences)]
        assert sequences_in(row.tokens)[: len(real)] == sorted(real, key=len, reverse=True)
        assert len(ids) == max(sum(map(len, real)), 2 * empty)

        summed, counts = [], {}
        for stream, stream_batch in stream_batches.items():
            counts[stream] = {name: states.state_count for name, states in stream_batch.states.items()}
            for states in stream_batch.states.values():
                summed += [stream_batch.sequences.ids[tokens].tolist() for tokens in lists(states)]
        read = ids[row.places]
        assert [read[columns].tolist() for columns in lists(row.gather)] == summed and row.state_counts == counts
        assert lists(row.transposed) == lists(row.gather.transpose(len(row.places)))
        assert row.places.tolist() == (sorted(set(row.places.tolist())) if any(summed) else [0])
        assert len(row.places) == max(1, len(set(row.gather.columns.tolist()))), "a place that no state reads"

        auxiliary = stream_batches["b"].auxiliary
        assert list(row.auxiliary) == ["b"] and auxiliary is not None
        alone = pack_row({"b": auxiliary}, FILLER)
        assert sequences_in(row.auxiliary["b"].tokens) == sequences_in(alone.tokens)
        assert lists(row.auxiliary["b"].gather) == lists(alone.gather)
        assert row.auxiliary["b"].tokens.types is None, "of a stream without types"


@pytest.mark.parametrize("empty", [False, True])
def test_a_row_counts_labels_targets_and_cost(empty: bool) -> None:
    stream_batches = random_stream_batches(1, empty)
    row = pack_row(stream_batches, FILLER)
    labels = [(s, t, ids.tolist()) for s, batch in stream_batches.items() for t, ids in batch.labels.items()]
    assert row.labels.tolist() == [label for *_, ids in labels for label in ids] and row.labels.dtype == np.int64
    assert list(row.label_counts.items()) == [(loss_key(stream, term), len(ids)) for stream, term, ids in labels]
    targets = {"count/a.mlm": 3, "count/a.extra": 1, "count/b.x": 4, "count/b.y": 2, "count/c.z": 1}
    assert {str(key): count for key, count in row.counts.items()} == targets | {"too_long/b": 1} and row.samples == 6
    assert {stream: list(arrays) for stream, arrays in row.arrays.items()} == {"a": [], "b": ["number"], "c": []}
    lengths = [n for batch in stream_batches.values() for n in batch.sequences.lengths.tolist()]
    auxiliary = stream_batches["b"].auxiliary
    assert auxiliary is not None
    assert row.cost == {
        "tokens": sum(lengths),
        "squares": sum(n**2 for n in lengths),
        "predictions": 0 if empty else 9,
        "auxiliary_tokens": int(auxiliary.sequences.lengths.sum()),
        "auxiliary_squares": sum(n**2 for n in auxiliary.sequences.lengths.tolist()),
        "places": len(row.places),
        "auxiliary_places": len(row.auxiliary["b"].places),
    }


def test_targets_by_language() -> None:
    """Of two streams, one tells the languages of a term that it predicts and of one that it does not; 2 is no language
    of the stream."""
    stream_batches = random_stream_batches(1)
    del stream_batches["c"]
    groups = {"x": np.array([1, 2, 0, 1]), "y": np.array([2, 2])}
    stream_batches["b"] = replace(stream_batches["b"], group_of_target=groups, language_groups=("de", "en"))
    row = pack_row(stream_batches, FILLER).to(torch.device("cpu"))
    assert row.language_groups == {"a": (), "b": ("de", "en")}
    found = {str(key): groups.tolist() for key, groups in row.group_of_target.items()}
    assert found == {"loss/b.x": [1, 2, 0, 1], "loss/b.y": [2, 2]}
    counts = {str(key): count for key, count in row.counts.items() if key.language}
    assert counts == {"count/b.x/de": 1, "count/b.x/en": 2, "count/b.y/de": 0, "count/b.y/en": 0}


def test_types_of_streams_without_them_are_0() -> None:
    tokens = pack_row(random_stream_batches(1), FILLER).tokens
    for token, kind in zip(tokens.input_ids.tolist(), tokens.types.tolist(), strict=True):
        assert kind == (1 + token % 3 if token < 2000 else 0)


def test_auxiliary_rows_as_one_row() -> None:
    rows = [pack_row(random_stream_batches(seed, seed == 2), FILLER).auxiliary["b"] for seed in range(4)]
    whole = Row.concat_auxiliary_rows(rows)
    assert sequences_in(whole.tokens) == [sequence for row in rows for sequence in sequences_in(row.tokens)]
    assert whole.tokens.positions.tolist() == [n for row in rows for n in row.tokens.positions.tolist()]
    assert whole.tokens.longest == max(row.tokens.longest for row in rows)
    summed = []
    for row in rows:
        read = row.tokens.input_ids[row.places]
        summed += [read[columns].tolist() for columns in lists(row.gather)]
    read = whole.tokens.input_ids[whole.places]
    assert [read[columns].tolist() for columns in lists(whole.gather)] == summed
    assert lists(whole.transposed) == lists(whole.gather.transpose(len(whole.places)))


# 4. To the device


@pytest.mark.parametrize("empty", [False, True])
def test_a_row_on_the_device_has_the_same_numbers(empty: bool) -> None:
    row = pack_row(random_stream_batches(0, empty), FILLER)
    moved = row.to(torch.device("cpu"))
    on_device = [*moved.tokens[:5], moved.places, *moved.gather, *moved.transposed, moved.labels]
    on_host = [*row.tokens[:5], row.places, *row.gather, *row.transposed, row.labels]
    for there, here in zip(
        [*on_device, moved.arrays["b"]["number"]], [*on_host, row.arrays["b"]["number"]], strict=True
    ):
        assert isinstance(there, torch.Tensor) and np.array_equal(there.numpy(), here)
    assert moved.tokens.lengths.data_ptr() == row.tokens.lengths.ctypes.data, "the lengths were moved"
    assert moved.auxiliary is row.auxiliary and moved.tokens.longest == row.tokens.longest
    assert (moved.state_counts, moved.label_counts, moved.cost) == (row.state_counts, row.label_counts, row.cost)
