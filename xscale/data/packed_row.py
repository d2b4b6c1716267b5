"""A packed row: the sequences of all streams, laid end to end without padding, with what their losses read.

One row is one forward and backward pass of a rank.

Shape letters: N tokens of a row, B sequences, S states that a loss reads, K places summed into them, M predictions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from xscale.data.ragged import indices_within
from xscale.data.sequences import Sequences
from xscale.data.stream_batch import StateIndices, StreamBatch, Types

Index = tuple[Any, Any, Any, Any]
"""For ops.alignment_gather, int32: offsets [S + 1], places [K] of states; offsets [N + 1], states [K] of places."""


class Tokens(NamedTuple):
    """Sequences laid end to end: numpy arrays in a worker, tensors in a step."""

    input_ids: Any
    """Token ids [N], int64."""
    positions: Any
    """Position of each token in its sequence, or in its segment if positions are reset, from 0 [N], int64."""
    types: Any | None
    """Token type of each token, a language or segment number [N], int64; None: 0 everywhere."""
    starts: Any
    """Start of each sequence, and N [B + 1], int32."""
    lengths: Any
    """Tokens of each sequence [B], int32. As a tensor it stays on the CPU, where the host reads it without waiting."""
    longest: int
    """Length of the longest sequence."""


class Inputs(NamedTuple):
    """The part of a row that goes to the device."""

    tokens: Tokens
    gather: Index
    """Index of all states that any loss reads."""
    labels: Any
    """Labels of all predictions [M], int64."""
    names: Any
    """Index in PackedRow.names of each prediction's group [M], int64; len(names) if it is in no group."""
    arrays: dict[str, dict[str, Any]]
    """Further arrays that each stream's loss reads, by stream."""
    auxiliary: dict[str, tuple[Tokens, Index]]
    """Inputs of each stream's auxiliary encoder, and the index of the states that it computes, by stream."""


class RowCost(NamedTuple):
    """What the cost of a row depends on: tokens, the sum of squared sequence lengths (attention), and predictions."""

    tokens: int = 0
    squares: int = 0
    predictions: int = 0
    auxiliary_tokens: int = 0
    auxiliary_squares: int = 0


@dataclass(frozen=True)
class PackedRow:
    inputs: Inputs
    states: dict[str, dict[str, int]]
    """Number of states by stream and name, in the order of `inputs.gather`."""
    predictions: dict[tuple[str, str], int]
    """Number of predictions by (stream, term), in the order of `inputs.labels`."""
    targets: dict[tuple[str, str], int]
    """Number of targets by (stream, term), and other counts of a stream by (stream, name)."""
    work: RowCost
    samples: int
    too_long: dict[str, int]
    """Number of each stream's pairs that were longer than data.max_length."""
    names: list[tuple[str, str, str]] = field(default_factory=list)
    """(stream, term, language or pair) of each group of predictions whose losses are summed separately."""
    counts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """Number of predictions by (stream, term, language or pair), of pairs by (stream, "drawn" or "too_long", pair)."""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Keys of each stream's records, in the order in which they were sampled."""


def pack_row(
    stream_batches: dict[str, StreamBatch], filler: int, *, names: dict[str, tuple[str, ...]] | None = None
) -> PackedRow:
    """Return the packed row of these stream batches.

    filler: the id of the two tokens that a row without any token gets; names: Context.names of each stream.
    """
    parts = list(stream_batches.values())
    tokens, places = lay_out([part.sequences for part in parts], [part.types for part in parts], filler)
    reads = list[StateIndices]()
    states = dict[str, dict[str, int]]()
    labels = [NO_NUMBERS]
    predictions = dict[tuple[str, str], int]()
    targets = dict[tuple[str, str], int]()
    auxiliary = dict[str, tuple[Tokens, Index]]()
    pairs = dict[tuple[str, str, str], int]()
    for (stream, part), place in zip(stream_batches.items(), places, strict=True):
        states[stream] = {}
        for name, read in part.reads.items():
            reads.append(StateIndices(place[read.places], read.counts))
            states[stream][name] = len(read)
        for term, ids in part.labels.items():
            labels.append(ids)
            predictions[stream, term] = len(ids)
        for term, count in part.targets.items():
            targets[stream, term] = count
        if part.auxiliary is not None:
            auxiliary[stream] = _auxiliary_inputs(part, filler)
        for (what, pair), count in part.pairs.items():
            pairs[stream, what, pair] = count
    groups, group_of = group_by_language(stream_batches, names or {})
    counts_of_groups = np.bincount(group_of, minlength=len(groups)).tolist()
    inputs = Inputs(
        tokens,
        gather_index(reads, len(tokens.input_ids)),
        np.concatenate(labels),
        group_of,
        {stream: part.arrays for stream, part in stream_batches.items()},
        auxiliary,
    )
    return PackedRow(
        inputs,
        states=states,
        predictions=predictions,
        targets=targets,
        work=_cost(parts),
        samples=sum(part.samples for part in parts),
        too_long={stream: part.too_long for stream, part in stream_batches.items()},
        names=groups,
        counts=dict(zip(groups, counts_of_groups, strict=False)) | pairs,
        keys={stream: part.keys for stream, part in stream_batches.items()},
    )


NO_NUMBERS = np.empty(0, dtype=np.int64)


def group_by_language(
    stream_batches: dict[str, StreamBatch], names: dict[str, tuple[str, ...]]
) -> tuple[list[tuple[str, str, str]], np.ndarray]:
    """Return the values of PackedRow.names and Inputs.names, which group the predictions by language or pair."""
    groups: list[tuple[str, str, str]] = []
    numbers: list[np.ndarray] = [NO_NUMBERS]
    for stream, stream_batch in stream_batches.items():
        for term, labels in stream_batch.labels.items():
            known = names.get(stream, ()) if term in stream_batch.names else ()
            of_term = stream_batch.names[term] if known else np.zeros(len(labels), dtype=np.int64)
            assert len(of_term) == len(labels), (
                f"streams.{stream}: {len(labels)} labels of {term}, {len(of_term)} names"
            )
            numbers.append(np.where(of_term < len(known), of_term + len(groups), -1))
            groups += [(stream, term, name) for name in known]
    joined = np.concatenate(numbers)
    return groups, np.where(joined < 0, len(groups), joined)


def lay_out(parts: list[Sequences], types: list[Types | None], filler: int) -> tuple[Tokens, list[np.ndarray]]:
    """Return the tokens of all sequences, longest sequence first, and for each of `parts` its tokens' indices in the
    row.

    types: what the token types of each of `parts` mean. A row without any token gets a filler sequence.
    """
    lengths = np.concatenate([part.lengths for part in parts])
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    starts = np.empty_like(lengths)
    starts[order] = ends - lengths[order]
    place = np.repeat(starts, lengths) + indices_within(lengths)
    fill = NO_NUMBERS if len(place) else np.array([2])
    size = len(place) + int(fill.sum())

    def column(values: list[np.ndarray], rest: np.ndarray | int) -> np.ndarray:
        filled = np.empty(size, dtype=np.int64)
        filled[place] = np.concatenate(values)
        filled[len(place) :] = rest
        return filled

    numbers = [getattr(part, of) if of else np.zeros_like(part.ids) for part, of in zip(parts, types, strict=True)]
    lengths = np.concatenate([lengths[order], fill]).astype(np.int32)
    tokens = Tokens(
        column([part.ids for part in parts], filler),
        column([part.positions for part in parts], indices_within(fill)),
        column(numbers, 0) if any(types) else None,
        _ends_from_0(lengths),
        lengths,
        int(lengths.max()),
    )
    return tokens, np.split(place, np.cumsum([len(part.ids) for part in parts])[:-1])


def gather_index(reads: list[StateIndices], tokens: int) -> Index:
    """Return the index of all states: the places that each state sums, and the states that read each place."""
    places = np.concatenate([NO_NUMBERS, *(read.places for read in reads)])
    counts = np.concatenate([NO_NUMBERS, *(read.place_counts for read in reads)])
    by_place = np.argsort(places, kind="stable")
    states = np.repeat(np.arange(len(counts)), counts)[by_place]
    of_place = np.bincount(places, minlength=tokens)
    return _ends_from_0(counts), places.astype(np.int32), _ends_from_0(of_place), states.astype(np.int32)


def _ends_from_0(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _auxiliary_inputs(stream_batch: StreamBatch, filler: int) -> tuple[Tokens, Index]:
    assert stream_batch.auxiliary is not None
    sequences, reads = stream_batch.auxiliary
    tokens, (place,) = lay_out([sequences], [stream_batch.types], filler)
    return tokens, gather_index([StateIndices(place[reads.places], reads.counts)], len(tokens.input_ids))


def join_auxiliary(parts: list[tuple[Tokens, Index]]) -> tuple[Tokens, Index]:
    """Return the auxiliary inputs of several rows as those of one row, with the states in the order of the rows."""
    if len(parts) == 1:
        return parts[0]
    tokens = [part for part, _ in parts]
    indices = [index for _, index in parts]
    first_token = _starts([len(part.input_ids) for part in tokens])
    first_state = _starts([len(offsets) - 1 for offsets, *_ in indices])
    first_pair = _starts([len(places) for _, places, *_ in indices])
    offsets, places, place_offsets, states = zip(*indices, strict=True)
    row = Tokens(
        np.concatenate([part.input_ids for part in tokens]),
        np.concatenate([part.positions for part in tokens]),
        None if tokens[0].types is None else np.concatenate([part.types for part in tokens]),
        _joined_offsets([part.starts for part in tokens], first_token),
        np.concatenate([part.lengths for part in tokens]),
        max(part.longest for part in tokens),
    )
    index = (
        _joined_offsets(offsets, first_pair),
        _joined(places, first_token),
        _joined_offsets(place_offsets, first_pair),
        _joined(states, first_state),
    )
    return row, index


def _starts(sizes: list[int]) -> np.ndarray:
    """Return the index at which each of the joined arrays begins [len(sizes)]."""
    return np.cumsum([0, *sizes])[:-1]


def _joined(arrays: Sequence[np.ndarray], firsts: np.ndarray) -> np.ndarray:
    """Return the arrays, joined, each with its first number added to all of its elements."""
    return np.concatenate([array + first for array, first in zip(arrays, firsts, strict=True)]).astype(np.int32)


def _joined_offsets(arrays: Sequence[np.ndarray], firsts: np.ndarray) -> np.ndarray:
    """Return arrays of offsets, of which each begins with 0, as one such array."""
    return np.concatenate([[0], _joined([array[1:] for array in arrays], firsts)]).astype(np.int32)


def _cost(parts: list[StreamBatch]) -> RowCost:
    tokens, squares = _tokens_and_squares([part.sequences for part in parts])
    auxiliary = [part.auxiliary.sequences for part in parts if part.auxiliary is not None]
    auxiliary_tokens, auxiliary_squares = _tokens_and_squares(auxiliary)
    predictions = 0
    for part in parts:
        predictions += sum(len(ids) for ids in part.labels.values())
    return RowCost(tokens, squares, predictions, auxiliary_tokens, auxiliary_squares)


def _tokens_and_squares(parts: list[Sequences]) -> tuple[int, int]:
    lengths = np.concatenate([NO_NUMBERS, *(part.lengths for part in parts)])
    return int(lengths.sum()), int((lengths**2).sum())
