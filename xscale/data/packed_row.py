"""The packed row: the sequences of all streams in one array, without padding, and all other input of their losses.

A rank does one forward and backward pass for each row. Its arrays are numpy arrays in a worker, and tensors after
`Row.to(device)`.

Shape letters: N tokens of a row, P places (tokens whose hidden states are read), B sequences, S states that a loss
reads, M predictions, T targets of a term.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from xscale.data.ragged import NO_NUMBERS, concatenated_ranges, offsets_and_end_from_counts
from xscale.data.stream_batch import Gather, StreamBatch
from xscale.metric_keys import Counts, MetricKey, count_key, loss_key


class Tokens(NamedTuple):
    """Sequences in one array, one after the other."""

    input_ids: Any
    """Token ids [N], int64."""
    positions: Any
    """Position of each token in its sequence, or in its segment if positions are reset, from 0 [N], int64."""
    types: Any | None
    """Token type of each token, a language or segment number [N], int64; None: 0 everywhere."""
    starts: Any
    """Index of each sequence's first token, and N at the end [B + 1], int32."""
    lengths: Any
    """Number of tokens of each sequence [B], int32. As a tensor it stays on the CPU, so that reading it does not wait
    for the device."""
    longest: int
    """Length of the longest sequence."""


@dataclass(frozen=True)
class Row:
    """A packed row."""

    tokens: Tokens
    places: Any
    """Indices of the tokens whose hidden states a loss reads, in ascending order, at least one [P], int64."""
    gather: Gather
    """The states that the losses of all streams read. Its columns are indices of `places`."""
    transposed: Gather
    """gather.transpose(P), for the backward pass."""
    state_counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Stream -> name of the states -> their number. The order is that of the states in `gather`."""
    labels: Any = field(default_factory=lambda: NO_NUMBERS)
    """Labels of all predictions [M], int64."""
    label_counts: Counts = field(default_factory=dict)
    """Number of predictions by `loss_key`, in the order in which `labels` has them."""
    language_groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The languages and pairs whose losses are reported separately, by stream."""
    group_of_target: dict[MetricKey, Any] = field(default_factory=dict)
    """`loss_key` of a term that is reported by language -> the index of each target's language or pair in the stream's
    `language_groups`, or len(language_groups) if it is none of them [T], int64."""
    arrays: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other arrays that each stream's loss reads, by stream and name."""
    auxiliary: dict[str, "Row"] = field(default_factory=dict)
    """The row of a stream's auxiliary encoder, by stream: tokens and states, without labels."""
    counts: Counts = field(default_factory=dict)
    """Counts of the row by key: the number of targets of each term, and other counts of the stream batches, by
    `count_key`, some of them also by language; the number of sampled pairs, with the name "drawn", by stream and pair
    of languages; and that of pairs of more than max_length tokens, with the name "too_long", by stream, and by stream
    and pair of languages."""
    samples: int = 0
    """Number of samples of all streams."""
    cost: dict[str, int] = field(default_factory=dict)
    """The numbers on which the cost of the row depends: "tokens"; "places", the tokens whose states are read;
    "predictions"; and "squares", the sum of the squared lengths of sequences, for attention. "auxiliary_tokens",
    "auxiliary_places" and "auxiliary_squares" are the corresponding numbers of the auxiliary rows."""

    @staticmethod
    def concat_auxiliary_rows(rows: Sequence["Row"]) -> "Row":
        """Return the sequences and states of several auxiliary rows as one row, in the order of the rows."""
        if len(rows) == 1:
            return rows[0]
        tokens = list[Tokens]()
        places = list[np.ndarray]()
        gathers = list[Gather]()
        first_token = 0
        first_place = 0
        for row in rows:
            tokens.append(row.tokens)
            places.append(row.places + first_token)
            gathers.append(row.gather.shift(first_place))
            first_token += len(row.tokens.input_ids)
            first_place += len(row.places)
        gather = Gather.concat(gathers)
        return Row(concat_tokens(tokens), np.concatenate(places), gather, gather.transpose(first_place))

    def to(self, device: torch.device) -> "Row":
        """Return the row with its arrays as tensors on the device. Tokens.lengths becomes a tensor on the host.
        Auxiliary rows are not copied."""
        copy = partial(tree_map_only, np.ndarray, partial(copy_to_device, device=device))
        tokens = copy(self.tokens._replace(lengths=None))
        return replace(
            self,
            tokens=tokens._replace(lengths=torch.from_numpy(self.tokens.lengths)),
            places=copy(self.places),
            gather=copy(self.gather),
            transposed=copy(self.transposed),
            labels=copy(self.labels),
            group_of_target=copy(self.group_of_target),
            arrays=copy(self.arrays),
        )


def copy_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the array as a tensor on the device. The host does not wait for the copy to a GPU."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def pack_row(stream_batches: Mapping[str, StreamBatch], id_if_empty: int) -> Row:
    """Return the packed row of these stream batches. stream_batches: by stream. id_if_empty: a token id; a row without
    any token gets two tokens of it."""
    batches = list(stream_batches.values())
    tokens, row_indices = lay_out_longest_first(batches, id_if_empty)
    states = join_gathers(batches, row_indices)  # its columns are tokens of the row
    places, place_of_column = np.unique(states.columns, return_inverse=True)
    gather = Gather(states.offsets, place_of_column.astype(np.int32))  # its columns are indices of `places`
    # If no loss reads a state, the first token is in `places`, so that no kernel gets an empty tensor.
    if not len(places):
        places = np.zeros(1)
    state_counts = dict[str, dict[str, int]]()
    labels = [NO_NUMBERS]
    label_counts: Counts = {}
    counts: Counts = {}
    language_groups = dict[str, tuple[str, ...]]()
    group_of_target = dict[MetricKey, np.ndarray]()
    arrays = dict[str, dict[str, np.ndarray]]()
    auxiliary = dict[str, Row]()
    for stream, batch in stream_batches.items():
        state_counts[stream] = {name: gathered.state_count for name, gathered in batch.states.items()}
        for term, ids in batch.labels.items():
            labels.append(ids)
            label_counts[loss_key(stream, term)] = len(ids)
        for name, count in batch.target_counts.items():
            counts[count_key(stream, name)] = count
        counts |= batch.pair_counts
        language_groups[stream] = batch.language_groups
        for term, groups in batch.group_of_target.items():
            assert len(groups) == batch.target_counts[term], (
                f"streams.{stream}: `collate` returned group_of_target[{term!r}] with {len(groups)} items, but "
                f"target_counts[{term!r}] is {batch.target_counts[term]}"
            )
            group_of_target[loss_key(stream, term)] = groups
            targets_of_groups = np.bincount(groups, minlength=len(batch.language_groups)).tolist()
            # If a target belongs to none of the languages and pairs, there is one count more, which zip leaves out.
            for language, targets in zip(batch.language_groups, targets_of_groups, strict=False):
                counts[count_key(stream, term, language)] = targets
        if batch.auxiliary is not None:
            auxiliary[stream] = pack_row({stream: batch.auxiliary}, id_if_empty)
        arrays[stream] = batch.arrays
    return Row(
        tokens=tokens,
        places=places.astype(np.int64),
        gather=gather,
        transposed=gather.transpose(len(places)),
        state_counts=state_counts,
        labels=np.concatenate(labels),
        label_counts=label_counts,
        language_groups=language_groups,
        group_of_target=group_of_target,
        arrays=arrays,
        auxiliary=auxiliary,
        counts=counts,
        samples=sum(batch.samples for batch in batches),
        cost=row_cost(batches, len(places), list(auxiliary.values())),
    )


def join_gathers(stream_batches: Sequence[StreamBatch], row_indices: Sequence[np.ndarray]) -> Gather:
    """Return the states of all stream batches. row_indices: the index in the row of each token of each stream batch."""
    gathers = list[Gather]()
    for stream_batch, row_index in zip(stream_batches, row_indices, strict=True):
        for states in stream_batch.states.values():
            gathers.append(Gather(states.offsets, row_index[states.columns]))
    return Gather.concat(gathers)


def lay_out_longest_first(stream_batches: Sequence[StreamBatch], id_if_empty: int) -> tuple[Tokens, list[np.ndarray]]:
    """Return the tokens of all sequences, and for each stream batch the index of each of its tokens in the row.

    Longer sequences come first, because attention without a fused kernel pads consecutive sequences to one length. A
    row without any token gets one sequence, twice the token `id_if_empty`.
    """
    ids = list[np.ndarray]()
    positions = list[np.ndarray]()
    types = list[np.ndarray]()
    sequence_lengths = list[np.ndarray]()
    ends = list[int]()
    for stream_batch in stream_batches:
        sequences = stream_batch.sequences
        ids.append(sequences.ids)
        positions.append(sequences.positions)
        types.append(getattr(sequences, stream_batch.types) if stream_batch.types else np.zeros_like(sequences.ids))
        sequence_lengths.append(sequences.lengths)
        ends.append(sum(map(len, ids)))  # of all tokens so far
    if ends[-1] == 0:
        ids.append(np.full(2, id_if_empty))
        positions.append(np.arange(2))
        types.append(np.zeros(2))
        sequence_lengths.append(np.array([2]))
    has_types = any(stream_batch.types for stream_batch in stream_batches)

    # Sequences of 2, 5 and 3 tokens, for example, begin at the tokens 8, 0 and 5 of the row.
    lengths = np.concatenate(sequence_lengths)
    longest_first = np.argsort(-lengths, kind="stable")
    starts = np.empty_like(lengths)
    starts[longest_first] = np.cumsum(lengths[longest_first]) - lengths[longest_first]
    row_index = np.repeat(starts, lengths) + concatenated_ranges(lengths)
    sorted_lengths = lengths[longest_first].astype(np.int32)
    tokens = Tokens(
        input_ids=concatenate_and_scatter(ids, row_index),
        positions=concatenate_and_scatter(positions, row_index),
        types=concatenate_and_scatter(types, row_index) if has_types else None,
        starts=offsets_and_end_from_counts(sorted_lengths),
        lengths=sorted_lengths,
        longest=int(sorted_lengths[0]),
    )
    # After the last end come only the two tokens of a row without any token; they belong to no stream batch.
    return tokens, np.split(row_index, ends)[:-1]


def concatenate_and_scatter(arrays: list[np.ndarray], destinations: np.ndarray) -> np.ndarray:
    """Return the elements of all arrays in another order, int64 [N]. destinations: the index of each element in the
    result [N]."""
    row = np.empty(len(destinations), dtype=np.int64)
    row[destinations] = np.concatenate(arrays)
    return row


def concat_tokens(tokens_of_rows: Sequence[Tokens]) -> Tokens:
    """Return the sequences of several rows, in the order of the rows."""
    input_ids, positions, types, _, lengths_of_rows, longest = zip(*tokens_of_rows, strict=True)
    joined_types = None if types[0] is None else np.concatenate(types)
    lengths = np.concatenate(lengths_of_rows)
    return Tokens(
        input_ids=np.concatenate(input_ids),
        positions=np.concatenate(positions),
        types=joined_types,
        starts=offsets_and_end_from_counts(lengths),
        lengths=lengths,
        longest=max(longest),
    )


def row_cost(stream_batches: Sequence[StreamBatch], tokens_read: int, auxiliary_rows: Sequence[Row]) -> dict[str, int]:
    """Return Row.cost of a row with these stream batches. tokens_read: the number of tokens whose states losses
    read."""
    cost = Counter(tokens=0, squares=0, places=tokens_read, predictions=0)
    for stream_batch in stream_batches:
        lengths = stream_batch.sequences.lengths
        cost["tokens"] += int(lengths.sum())
        cost["squares"] += int((lengths**2).sum())
        cost["predictions"] += sum(map(len, stream_batch.labels.values()))
    for name in ("tokens", "squares", "places"):
        cost[f"auxiliary_{name}"] = sum(row.cost[name] for row in auxiliary_rows)
    return dict(cost)
