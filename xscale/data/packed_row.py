"""A row: the sequences of all streams behind one another, without padding, and what their losses read.

One row is one forward and backward pass of a rank.

Shape letters: N tokens of a row, B sequences, S states that a loss reads, K places summed into them, M predictions.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from xscale.data.ragged import offsets
from xscale.data.sequences import Sequences
from xscale.data.stream_batch import Reads, StreamBatch, Types

Index = tuple[Any, Any, Any, Any]
"""What ops.alignment_gather reads, int32: offsets [S + 1] and places [K] of each state, offsets [N + 1] and states [K]
of each place."""


class Tokens(NamedTuple):
    """Sequences behind one another. numpy arrays in a worker, tensors in a step."""

    input_ids: Any
    """[N], int64."""
    positions: Any
    """Of each token in its sequence, or in its segment where positions are reset, counted from 0 [N], int64."""
    types: Any | None
    """Language number of each token, for the token-type table [N], int64; None: 0 everywhere."""
    starts: Any
    """Where each sequence starts, and N [B + 1], int32. One that ends where it starts fills up the count."""
    lengths: Any
    """Tokens of each sequence [B], int32. As a tensor it stays on the CPU: the host reads it without waiting."""
    longest: int
    """No sequence is longer; the same in all rows that are filled up, else the row's own longest."""


class Shape(NamedTuple):
    """To which a compiled row is filled up."""

    tokens: int
    sequences: int


class Inputs(NamedTuple):
    """What goes to the device."""

    tokens: Tokens
    gather: Index
    """Of all states that any loss reads."""
    labels: Any
    """Of all predictions [M], int64."""
    names: Any
    """Which of Row.names each prediction is of [M], int64; their number: none."""
    arrays: dict[str, dict[str, Any]]
    """Stream -> what else its loss reads."""
    auxiliary: dict[str, tuple[Tokens, Index]]
    """Stream -> what its companion's encoder reads, and what ops.alignment_gather reads of the states that it gives."""


class Work(NamedTuple):
    """What a row costs, whatever the model: tokens, sums of squared lengths (attention), predictions."""

    tokens: int = 0
    squares: int = 0
    predictions: int = 0
    auxiliary_tokens: int = 0
    auxiliary_squares: int = 0


@dataclass(frozen=True)
class PackedRow:
    inputs: Inputs
    states: dict[str, dict[str, int]]
    """Stream -> name -> number of states, in the order of `inputs.gather`."""
    predictions: dict[tuple[str, str], int]
    """(stream, term) -> number of predictions, in the order of `inputs.labels`."""
    targets: dict[tuple[str, str], int]
    """(stream, term) -> number of targets, and other counts of the stream."""
    work: Work
    samples: int
    too_long: dict[str, int]
    """Stream -> how many of its pairs, or sentences, were over max_length."""
    names: list[tuple[str, str, str]] = field(default_factory=list)
    """(stream, term, language or pair) by which the sums of predictions are told apart."""
    counts: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """(stream, term, language or pair) -> number of predictions; and of the pairs "drawn", and of those "too_long"."""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Stream -> keys of its records, in the order in which they were drawn."""


def pack_row(
    stream_batches: dict[str, StreamBatch],
    longest: int,
    filler: int,
    shape: Shape | None = None,
    names: dict[str, tuple[str, ...]] | None = None,
) -> PackedRow:
    """longest: data.max_length; filler: id of the tokens that fill a row up. What exceeds `shape` is not filled.
    names: Context.names of each stream."""
    parts = list(stream_batches.values())
    tokens, places = lay_out([p.sequences for p in parts], [p.types for p in parts], longest, filler, shape)
    reads = [
        Reads(place[read.places], read.counts)
        for p, place in zip(parts, places, strict=True)
        for read in p.reads.values()
    ]
    labels = [ids for p in parts for ids in p.labels.values()]
    told_apart, of_predictions = names_of_predictions(stream_batches, names or {})
    predicted = np.bincount(of_predictions, minlength=len(told_apart) + 1).tolist()
    auxiliary = {
        name: _auxiliary_inputs(p, longest, filler) for name, p in stream_batches.items() if p.auxiliary is not None
    }
    return PackedRow(
        Inputs(
            tokens,
            gather_index(reads, len(tokens.input_ids)),
            np.concatenate([np.empty(0, dtype=np.int64), *labels]),
            of_predictions,
            {name: p.arrays for name, p in stream_batches.items()},
            auxiliary,
        ),
        states={name: {read: len(p.reads[read]) for read in p.reads} for name, p in stream_batches.items()},
        predictions={(name, term): len(ids) for name, p in stream_batches.items() for term, ids in p.labels.items()},
        targets={(name, term): n for name, p in stream_batches.items() for term, n in p.targets.items()},
        names=told_apart,
        work=_work(parts),
        samples=sum(p.samples for p in parts),
        too_long={name: p.too_long for name, p in stream_batches.items()},
        counts=dict(zip(told_apart, predicted, strict=False))
        | {(stream, what, name): n for stream, p in stream_batches.items() for (what, name), n in p.pairs.items()},
    )


def names_of_predictions(
    stream_batches: dict[str, StreamBatch], names: dict[str, tuple[str, ...]]
) -> tuple[list[tuple[str, str, str]], np.ndarray]:
    """Row.names, and Inputs.names."""
    told_apart: list[tuple[str, str, str]] = []
    numbers: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    for stream, stream_batch in stream_batches.items():
        for term, labels in stream_batch.labels.items():
            known = names.get(stream, ()) if term in stream_batch.names else ()
            of_term = stream_batch.names[term] if known else np.zeros(len(labels), dtype=np.int64)
            assert len(of_term) == len(labels), (
                f"streams.{stream}: {len(labels)} labels of {term}, {len(of_term)} names"
            )
            numbers.append(np.where(of_term < len(known), of_term + len(told_apart), -1))
            told_apart += [(stream, term, name) for name in known]
    joined = np.concatenate(numbers)
    return told_apart, np.where(joined < 0, len(told_apart), joined)


def lay_out(
    parts: list[Sequences], types: list[Types | None], longest: int, filler: int, shape: Shape | None = None
) -> tuple[Tokens, list[np.ndarray]]:
    """The sequences of all parts, longest first; and for each part the index in the row of each of its tokens.

    types: what each part's token types say. The row never is quite empty.
    """
    lengths = np.concatenate([part.lengths for part in parts])
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    starts = np.empty_like(lengths)
    starts[order] = ends - lengths[order]
    place = np.repeat(starts, lengths) + offsets(lengths)
    fill = _fillers(int(lengths.sum()), len(lengths), longest, shape)
    room = len(place) + int(fill.sum())

    def column(values: list[np.ndarray], rest: np.ndarray | int) -> np.ndarray:
        filled = np.empty(room, dtype=np.int64)
        filled[place] = np.concatenate(values)
        filled[len(place) :] = rest
        return filled

    numbers = [getattr(part, of) if of else np.zeros_like(part.ids) for part, of in zip(parts, types, strict=True)]
    lengths = np.concatenate([lengths[order], fill]).astype(np.int32)
    tokens = Tokens(
        column([part.ids for part in parts], filler),
        column([part.positions for part in parts], offsets(fill)),
        column(numbers, 0) if any(types) else None,
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        lengths,
        longest if (room, len(lengths)) == shape else int(lengths.max()),
    )
    return tokens, np.split(place, np.cumsum([len(part.ids) for part in parts])[:-1])


def _fillers(tokens: int, sequences: int, longest: int, shape: Shape | None) -> np.ndarray:
    """Lengths of the sequences that fill a row up; none longer than `longest`."""
    if shape is None:
        return np.full(int(tokens == 0), 2)
    rest = shape.tokens - tokens
    whole = [longest] * (rest // longest) + [rest % longest] * bool(rest % longest)
    if rest < 0 or sequences + len(whole) > shape.sequences:
        return _fillers(tokens, sequences, longest, None)
    return np.array(whole + [0] * (shape.sequences - sequences - len(whole)), dtype=np.int64)


def gather_index(reads: list[Reads], tokens: int) -> Index:
    """All states' places in the row, by state and by place."""
    columns = np.concatenate([np.empty(0, dtype=np.int64), *(read.places for read in reads)])
    counts = np.concatenate(
        [
            np.empty(0, dtype=np.int64),
            *(np.ones_like(read.places) if read.counts is None else read.counts for read in reads),
        ]
    )
    by_place = np.argsort(columns, kind="stable")
    states = np.repeat(np.arange(len(counts)), counts)[by_place]
    of_place = np.bincount(columns, minlength=tokens)
    return _starts(counts), columns.astype(np.int32), _starts(of_place), states.astype(np.int32)


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _auxiliary_inputs(stream_batch: StreamBatch, longest: int, filler: int) -> tuple[Tokens, Index]:
    assert stream_batch.auxiliary is not None
    tokens, (place,) = lay_out([stream_batch.auxiliary.sequences], [stream_batch.types], longest, filler)
    reads = stream_batch.auxiliary.reads
    return tokens, gather_index([Reads(place[reads.places], reads.counts)], len(tokens.input_ids))


def _work(parts: list[StreamBatch]) -> Work:
    lengths = np.concatenate([p.sequences.lengths for p in parts])
    auxiliary = [p.auxiliary.sequences.lengths for p in parts if p.auxiliary is not None]
    beside_lengths = np.concatenate([np.empty(0, dtype=np.int64), *auxiliary])
    return Work(
        int(lengths.sum()),
        int((lengths**2).sum()),
        sum(len(ids) for p in parts for ids in p.labels.values()),
        int(beside_lengths.sum()),
        int((beside_lengths**2).sum()),
    )
