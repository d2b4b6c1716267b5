"""Rows against loops: where each token and state goes, what a row costs, how it gets to a device."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from xscale.data.packed_row import Index, RowCost, Tokens, gather_index, lay_out, pack_row
from xscale.data.ragged import indices_within
from xscale.data.sequences import Sequences
from xscale.data.stream_batch import AuxiliaryInputs, StateIndices, StreamBatch
from xscale.step.step import to_device

LONGEST, FILLER = 9, 77
LENGTHS = st.lists(st.integers(1, LONGEST), max_size=6)


def sequences(lengths: list[int], first: int = 1000) -> Sequences:
    """Ids that tell the tokens apart; positions and languages that follow from them."""
    total = sum(lengths)
    ids = first + np.arange(total)
    sizes = np.array(lengths, dtype=np.int64)
    identities = np.arange(len(lengths), dtype=np.uint64)
    starts = np.cumsum(sizes) - sizes
    return Sequences(ids, sizes, indices_within(sizes) // 2, 1 + ids % 3, ids % 2, None, identities, starts)


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
    types = data.draw(
        st.lists(st.sampled_from([None, "languages", "segments"]), min_size=len(parts), max_size=len(parts))
    )
    tokens, places = lay_out(parts, types, FILLER)
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


# 2. The index

READS = st.lists(
    st.tuples(st.booleans(), st.lists(st.lists(st.integers(0, 11), max_size=4, unique=True), max_size=5)), max_size=4
)


def reads_of(drawn: list[tuple[bool, list[list[int]]]]) -> tuple[list[StateIndices], list[list[int]]]:
    """Reads of one place each, without counts, or of several; and the places of every state."""
    reads, states = [], []
    for several, places in drawn:
        if several:
            flat = [place for of_state in places for place in of_state]
            counts = np.array([len(of_state) for of_state in places], dtype=np.int64)
            reads.append(StateIndices(np.array(flat, dtype=np.int64), counts))
            states += places
        else:
            singles = [of_state[0] for of_state in places if of_state]
            reads.append(StateIndices(np.array(singles, dtype=np.int64)))
            states += [[place] for place in singles]
        assert len(reads[-1]) == (len(places) if several else len(singles))
    return reads, states


def lists(starts: Any, values: Any) -> list[list[int]]:
    return [values[a:b].tolist() for a, b in pairwise(starts.tolist())]


@settings(deadline=None)
@given(READS)
def test_the_index_and_its_transpose(drawn: list[tuple[bool, list[list[int]]]]) -> None:
    reads, states = reads_of(drawn)
    index: Index = gather_index(reads, 12)
    assert lists(*index[:2]) == states
    assert lists(*index[2:]) == [[s for s, places in enumerate(states) if place in places] for place in range(12)]
    assert all(array.dtype == np.int32 for array in index)


def test_a_place_that_a_state_sums_twice() -> None:
    index = gather_index([StateIndices(np.array([3, 1, 3]), np.array([3]))], 4)
    assert lists(*index[:2]) == [[3, 1, 3]] and lists(*index[2:]) == [[], [0], [], [0, 0]]


# 3. Rows


def random_pieces(seed: int, empty: bool = False) -> dict[str, StreamBatch]:
    """Three streams: with types; with a companion and several kinds of reads; without predictions."""
    draw = np.random.default_rng(seed)

    def some(first: int) -> Sequences:
        return sequences(draw.integers(1, LONGEST + 1, 0 if empty else draw.integers(1, 6)).tolist(), first)

    def places(part: Sequences, count: int) -> np.ndarray:
        return draw.integers(0, max(len(part.ids), 1), 0 if empty else count)

    a, b, c, d = (some(first) for first in (1000, 2000, 3000, 4000))
    counts = np.array([] if empty else [2, 0, 3])
    reads_d = StateIndices(places(d, 2), counts[:2].astype(np.int64))
    reads_b = {"one": StateIndices(places(b, 4)), "sums": StateIndices(places(b, 5), counts.astype(np.int64))}
    return {
        "a": StreamBatch(
            a,
            {"masked": StateIndices(places(a, 3))},
            {"mlm": 3, "extra": 1},
            2,
            {"mlm": places(a, 3)},
            types="languages",
        ),
        "b": StreamBatch(
            b, reads_b, {"x": 4, "y": 2}, 3, {"x": places(b, 4), "y": places(b, 2)},
            arrays={"number": np.arange(3)}, auxiliary=AuxiliaryInputs(d, reads_d), too_long=1,
        ),
        "c": StreamBatch(c, {"first": StateIndices(places(c, 1))}, {"z": 1}, 1, too_long=2),
    }  # fmt: skip


@pytest.mark.parametrize("empty", [False, True])
def test_a_row_is_its_pieces(empty: bool) -> None:
    for seed in range(20):
        stream_batches = random_pieces(seed, empty)
        row = pack_row(stream_batches, FILLER)
        ids = row.inputs.tokens.input_ids
        real = [sequence for stream_batch in stream_batches.values() for sequence in split(stream_batch.sequences)]
        assert sequences_in(row.inputs.tokens)[: len(real)] == sorted(real, key=len, reverse=True)
        assert len(ids) == max(sum(map(len, real)), 2 * empty)

        # What the states sum, by the tokens' ids.
        expected, names = [], {}
        for name, stream_batch in stream_batches.items():
            for read, (where, counts) in stream_batch.reads.items():
                sizes = [1] * len(where) if counts is None else counts.tolist()
                ends = np.cumsum([0, *sizes]).tolist()
                expected += [stream_batch.sequences.ids[where[x:y]].tolist() for x, y in pairwise(ends)]
                names[name, read] = len(sizes)
        index = row.inputs.gather
        assert [ids[places].tolist() for places in lists(*index[:2])] == expected
        assert len(index[2]) == len(ids) + 1
        assert {(name, read): n for name, of in row.states.items() for read, n in of.items()} == names
        assert list(row.states) == list(stream_batches)

        labels = [
            (name, term, ids)
            for name, stream_batch in stream_batches.items()
            for term, ids in stream_batch.labels.items()
        ]
        assert row.inputs.labels.tolist() == [label for *_, ids in labels for label in ids.tolist()]
        assert row.inputs.labels.dtype == np.int64
        assert list(row.predictions.items()) == [((name, term), len(ids)) for name, term, ids in labels]
        targets = {("a", "mlm"): 3, ("a", "extra"): 1, ("b", "x"): 4, ("b", "y"): 2, ("c", "z"): 1}
        assert row.targets == targets and (row.samples, row.too_long) == (6, {"a": 0, "b": 1, "c": 2})
        assert {name: set(arrays) for name, arrays in row.inputs.arrays.items()} == {
            "a": set(),
            "b": {"number"},
            "c": set(),
        }
        (tokens, index) = row.inputs.auxiliary["b"]
        assert list(row.inputs.auxiliary) == ["b"] and tokens.types is None, "of a stream without types"
        auxiliary = stream_batches["b"].auxiliary
        assert auxiliary is not None
        summed = [tokens.input_ids[places].tolist() for places in lists(*index[:2])]
        assert summed == ([] if empty else [auxiliary.sequences.ids[auxiliary.reads.places].tolist(), []])
        assert len(index[2]) == len(tokens.input_ids) + 1
        own = sorted(split(auxiliary.sequences), key=len, reverse=True)
        assert sequences_in(tokens) == (own or [[FILLER] * 2])

        work = RowCost()
        for stream_batch in stream_batches.values():
            for sequence in split(stream_batch.sequences):
                work = work._replace(tokens=work.tokens + len(sequence), squares=work.squares + len(sequence) ** 2)
        for sequence in split(auxiliary.sequences):
            square = work.auxiliary_squares + len(sequence) ** 2
            work = work._replace(auxiliary_tokens=work.auxiliary_tokens + len(sequence), auxiliary_squares=square)
        assert row.work == work._replace(predictions=0 if empty else 9)


def test_types_of_streams_without_them_are_0() -> None:
    row = pack_row(random_pieces(1), FILLER)
    tokens = row.inputs.tokens
    for token, kind in zip(tokens.input_ids.tolist(), tokens.types.tolist(), strict=True):
        assert kind == (1 + token % 3 if token < 2000 else 0)


# 4. To the device


class OtherDevice:
    """A device that is not the CPU, as far as the copy asks."""

    type = "other"


@pytest.mark.parametrize("device", [torch.device("cpu"), OtherDevice()], ids=["cpu", "one copy"])
def test_to_device_keeps_values(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, types and values of arrays of any size, all moved at once; lengths stay on the host."""
    copies = []
    real = torch.Tensor.to

    def to(tensor: torch.Tensor, where: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if where is not device:
            return real(tensor, where, *args, **kwargs)
        copies.append(tensor)
        return tensor.clone()

    if device.type != "cpu":
        monkeypatch.setattr(torch.Tensor, "to", to)
    for seed, empty in ((0, False), (1, False), (2, True)):
        inputs = pack_row(random_pieces(seed, empty), FILLER).inputs
        inputs.arrays["a"]["odd"] = np.arange(15, dtype=np.int32).reshape(5, 3)
        inputs.arrays["c"]["bits"] = np.array([True, False, True])
        inputs.arrays["c"]["reals"] = np.linspace(0, 1, 7).reshape(7, 1)
        moved = to_device(inputs, device)
        for there, here in zip(tree_leaves(moved), tree_leaves(inputs), strict=True):
            if isinstance(here, np.ndarray):
                assert isinstance(there, torch.Tensor) and there.dtype == torch.from_numpy(here[:0].copy()).dtype
                assert tuple(there.shape) == here.shape and np.array_equal(there.numpy(), here)
            else:
                assert there == here and not isinstance(there, torch.Tensor)
        on_host = [(moved.tokens, inputs.tokens), (moved.auxiliary["b"][0], inputs.auxiliary["b"][0])]
        for there, here in on_host:
            assert there.lengths.data_ptr() == here.lengths.ctypes.data, "the lengths were moved"
            if device.type != "cpu":
                assert there.starts.data_ptr() != here.starts.ctypes.data
        assert type(moved) is type(inputs) and type(moved.tokens) is Tokens
        assert moved.tokens.longest == inputs.tokens.longest
    assert len(copies) == (0 if device.type == "cpu" else 3), "one copy a row"
