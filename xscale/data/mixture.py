"""Chooses the samples of each optimizer step, and plans the step: each record gets a rank and a packed row.

In each step a stream takes `samples` samples from its sources. A language, or pair of languages, i is sampled with
probability proportional to n_i^alpha (Conneau & Lample 2019), as evenly as whole numbers allow. Each source is read in
the order of its epoch: in windows of about a million records, which are shuffled (order.py). A sample is one record; in
a stream of running text, it is text that fills about one sequence. The samples of a step are chosen first, and then
assigned to ranks and packed rows (balance.py). A packed row has the sequences of one forward and backward pass in one
array, without padding.

The state has the number of steps planned, and the position of each stream in each of its sources. All later samples
follow from the state.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from xscale import rng
from xscale.data.balance import assign_to_ranks_and_rows
from xscale.data.calibration import Calibration, Correction
from xscale.data.order import EpochOrder
from xscale.data.ragged import NO_NUMBERS, evenly_spaced_indices
from xscale.data.shards import Source
from xscale.data.stream import Stream
from xscale.errors import UserError
from xscale.files import map_in_threads
from xscale.recipe import DataConfig, Schedule

SAMPLE_FILL = 0.94
"""A sample of running text has at most this share of data.max_length in estimated tokens, unless it is a single
record. The rest is a margin for the errors of the estimates."""

ORDER = 3
"""The version of the order of running text. A checkpoint with another version cannot resume."""


class Position(NamedTuple):
    """The place up to which a stream has read one of its sources."""

    epoch: int
    records: int
    """The number of records read in the epoch."""
    sample_limits: tuple[tuple[int, int], ...] = ()
    """(records, limit) for each limit of a sample's tokens that has changed within the epoch: the limit held until
    `records` records were read. Empty if the limit has not changed."""

    @classmethod
    def from_list(cls, numbers: list[int]) -> "Position":
        """Return the position that `to_list` has written, for example to a checkpoint."""
        epoch, records, *sample_limits = numbers
        return cls(epoch, records, tuple(zip(sample_limits[::2], sample_limits[1::2], strict=True)))

    def to_list(self) -> list[int]:
        """Return the epoch, the number of records and, one after the other, the numbers of `sample_limits`."""
        return [self.epoch, self.records, *chain.from_iterable(self.sample_limits)]


class PlanTable(NamedTuple):
    """The records that one stream reads in a step. Each array has an element for each record."""

    sample: np.ndarray
    """Number of the record's sample among the stream's samples of the step."""
    source: np.ndarray
    """Index of the source in Mixture.sources."""
    epoch: np.ndarray
    shard: np.ndarray
    record: np.ndarray
    """Number of the record in its shard."""
    tokens: np.ndarray
    """Number of tokens as estimated from the record's bytes, float."""
    row: np.ndarray = NO_NUMBERS
    """Number of the packed row among those of all ranks: row r of rank k has the number r * world + k. Empty until rows
    are assigned."""

    def select_records(self, indices: np.ndarray) -> "PlanTable":
        """Return the records at these indices."""
        return PlanTable(*[column[indices] for column in self])


@dataclass(frozen=True)
class Plan:
    """The records of one optimizer step. A whole plan has the records of all ranks, ordered by source. A part of a plan
    has the records of one rank, ordered by row, sample and place in the sample."""

    step: int
    """The number of the step, counted from 0."""
    tables: dict[str, PlanTable]
    """The records of each stream, by its name."""
    rows: int
    """The number of packed rows of each rank. Some may be empty."""
    world: int
    """The number of ranks."""
    state: dict[str, Any]
    """The mixture's state after the step."""
    rank: int = -1
    """The rank of a part; -1 for a whole plan."""
    row_tokens: np.ndarray = field(default_factory=lambda: NO_NUMBERS)
    """The estimated number of tokens of each packed row, in the order of PlanTable.row [rows * world]; empty in the
    part of a rank."""

    def parts_of_ranks(self, ranks: Sequence[int]) -> list["Plan"]:
        """Return the part of each of these ranks."""
        parts = list[Plan]()
        for rank in ranks:
            parts.append(Plan(self.step, {}, self.rows, self.world, self.state, rank))
        for name, table in self.tables.items():
            by_row = np.argsort(table.row, kind="stable")  # numpy sorts 16-bit numbers in linear time
            borders = np.append(0, np.cumsum(np.bincount(table.row, minlength=self.rows * self.world)))
            for part in parts:
                places = list[np.ndarray]()
                for row in range(part.rank, self.rows * self.world, self.world):
                    in_row = by_row[borders[row] : borders[row + 1]]
                    places.append(in_row[np.argsort(table.sample[in_row], kind="stable")])
                part.tables[name] = table.select_records(np.concatenate(places))
        return parts

    def record_counts_of_rows(self, stream: str) -> list[int]:
        """Return the number of the stream's records in each row of a rank's part."""
        return np.bincount(self.tables[stream].row // self.world, minlength=self.rows).tolist()


class Mixture:
    """Plans the steps of a run, beginning at `state`."""

    def __init__(
        self,
        streams: Schedule[Sequence[Stream]],
        data: Schedule[DataConfig],
        calibration: Calibration,
        sources: list[Source],
        *,
        seed: int,
        max_tokens: int,
        rank: int,
        world: int,
        state: dict[str, Any] | None = None,
    ):
        """sources: the sources of the run, which Stream.sources numbers. max_tokens: the maximum number of tokens of a
        packed row; a row of data.max_length tokens is always allowed. world: the number of ranks. state: the state of a
        checkpoint; None: the beginning."""
        self.streams = streams
        self.data = data
        self.calibration = calibration
        self.corrections = calibration.corrections_of_streams(streams.ends)
        self.sources = sources
        self.seed = seed
        self.max_tokens = max_tokens
        self.rank = rank
        self.world = world
        self.state = state or initial_state(streams.last)
        """The state, as checkpoints have it: "step", the number of planned steps; "positions" of each stream, by its
        name, in each of its sources; "order", see ORDER; "room", `max_tokens_of_text_sample` of the last planned
        step. A fork is a run that starts from the checkpoint of another run. If it has other sources than that run,
        "sources_at_start" has the number of sources that each stream had there."""
        weights = list[list[np.ndarray]]()
        for phase_streams, config in zip(streams.values, data.values, strict=True):
            sizes = source_sizes(sources, calibration, config.alpha_by)
            weights.append(
                [probabilities_of_stream_sources(stream, sources, config.alpha, sizes) for stream in phase_streams]
            )
        self.weights = Schedule(streams.ends, tuple(weights))
        """For each phase and stream, the probability of each of the stream's sources."""
        self._orders: dict[tuple[str, int], EpochOrder] = {}
        """The order of the epoch that is being read, by stream and source."""
        if self.state.get("order") != ORDER and any(stream.reads_running_text for stream in streams.last):
            raise UserError(
                f"the checkpoint of step {self.state['step']} was saved by a version of xscale that reads text in "
                "another order than this version. Continue the run with the version of xscale that began the run, or "
                "start a new run from the weights of the checkpoint: --set model.init=CHECKPOINT, and another --out"
            )

    def next_plan_of_rank(self) -> Plan:
        """Return this rank's part of the next step's plan, and advance the state."""
        return self.next_plan().parts_of_ranks([self.rank])[0]

    def next_plan(self) -> Plan:
        """Return the plan of the next step, and advance the state."""
        step = self.state["step"]
        max_length = self.data.at(step).max_length
        tables: dict[str, PlanTable] = {}
        tokens: dict[str, np.ndarray] = {}
        positions: dict[str, list[list[int]]] = {}
        for stream, weights in zip(self.streams.at(step), self.weights.at(step), strict=True):
            table, positions[stream.name] = self._choose_records_and_positions(stream, weights)
            estimated = np.bincount(table.sample, weights=table.tokens, minlength=stream.samples)
            correction = self.corrections.at(step).get(stream.name, Correction())
            tables[stream.name] = table
            tokens[stream.name] = correction.tokens_in_packed_rows(estimated, max_length)
        # The samples of all streams get their rows together. Then each record gets the row of its sample.
        tokens_of_samples = np.concatenate(list(tokens.values()))
        row_of_sample, rows = assign_to_ranks_and_rows(tokens_of_samples, self.world, max(self.max_tokens, max_length))
        row_tokens = np.bincount(row_of_sample, weights=tokens_of_samples, minlength=rows * self.world)
        row_of_sample = row_of_sample.astype(np.min_scalar_type(rows * self.world))  # see Plan.parts_of_ranks
        first_sample = 0
        for name, table in tables.items():
            tables[name] = table._replace(row=row_of_sample[first_sample + table.sample])
            first_sample += len(tokens[name])
        self.state = self.state | {
            "step": step + 1,
            "positions": positions,
            "order": ORDER,
            "room": self.max_tokens_of_text_sample,
        }
        return Plan(step, tables, rows, self.world, self.state, row_tokens=row_tokens)

    def _choose_records_and_positions(self, stream: Stream, weights: np.ndarray) -> tuple[PlanTable, list[list[int]]]:
        """Return the records that a stream reads in the next step, and its positions after the step, in the form of the
        state. weights: the probability of each of the stream's sources."""
        pieces = list[PlanTable]()
        positions = list[list[int]]()
        for source_index, samples, position in zip(
            stream.sources, self._sample_numbers_by_source(stream, weights), self._positions(stream), strict=True
        ):
            source_pieces, new_position = self._take_samples(stream, source_index, samples, position)
            pieces += source_pieces
            positions.append(new_position.to_list())
        table = PlanTable(*[NO_NUMBERS] * 6)
        if pieces:
            table = PlanTable(*map(np.concatenate, zip(*pieces, strict=True)))
        return table, positions

    @property
    def max_tokens_of_text_sample(self) -> int:
        """The maximum number of estimated tokens of a sample of running text in the next step."""
        return int(SAMPLE_FILL * self.data.at(self.state["step"]).max_length)

    def _sample_numbers_by_source(self, stream: Stream, weights: np.ndarray) -> list[np.ndarray]:
        """Return, for each of the stream's sources, the numbers of the samples that it gives to the next step."""
        read = np.flatnonzero(weights).astype(np.min_scalar_type(len(weights)))
        key = rng.key(self.seed, stream.name, "source", self.state["step"])
        chosen = read[draw_source_per_sample_systematically(weights[read], stream.samples, key)]
        in_order = np.argsort(chosen, kind="stable")  # numpy sorts small integers in linear time
        return np.split(in_order, np.cumsum(np.bincount(chosen, minlength=len(weights)))[:-1])

    def _positions(self, stream: Stream) -> list[Position]:
        """Return the stream's position in each of its sources. A change of max_tokens_of_text_sample since the last
        step is added."""
        limit_before = self.state.get("room", self.max_tokens_of_text_sample)
        positions = list[Position]()
        for numbers in self.state["positions"][stream.name]:
            position = Position.from_list(numbers)
            if stream.reads_running_text and limit_before != self.max_tokens_of_text_sample:
                change = (position.records, limit_before)
                position = position._replace(sample_limits=(*position.sample_limits, change))
            positions.append(position)
        return positions

    def _take_samples(
        self, stream: Stream, source_index: int, samples: np.ndarray, position: Position
    ) -> tuple[list[PlanTable], Position]:
        """Return the source's next records, which form these samples, as a table for each part of an epoch from which
        they come, and the position after them. samples: the numbers of the samples."""
        pieces = list[PlanTable]()
        taken = 0
        while taken < len(samples):
            order = self._epoch_order(stream, source_index, position)
            ends, shard, record, lengths = order.take_samples(position.records, len(samples) - taken)
            pieces.append(
                PlanTable(
                    sample=np.repeat(samples[taken : taken + len(ends)], np.diff(ends, prepend=position.records)),
                    source=np.full(len(record), source_index, dtype=np.int32),
                    epoch=np.full(len(record), position.epoch, dtype=np.int32),
                    shard=shard,
                    record=record,
                    tokens=self.calibration.estimated_tokens(source_index, lengths),
                )
            )
            taken += len(ends)
            position = position._replace(records=int(ends[-1]))
            if position.records == order.size:
                position = Position(position.epoch + 1, 0)
        return pieces, position

    def remote_shards_needed_soon(self) -> Iterator[tuple[Source, int]]:
        """Yield each remote source with the number of each shard of its current window, and of the next window of the
        epoch."""
        for stream in self.streams.at(self.state["step"]):
            for number, position in zip(stream.sources, self._positions(stream), strict=True):
                if self.sources[number].remote and number not in stream.idle:
                    order = self._epoch_order(stream, number, position)
                    window = order.window_at(position.records)
                    for shard in np.concatenate(order.window_shards[window : window + 2]).tolist():
                        yield self.sources[number], shard

    def _epoch_order(self, stream: Stream, source_index: int, position: Position) -> EpochOrder:
        """Return the order of a source in the epoch of `position`. The order is kept until the epoch or the maximum
        length of samples changes."""
        source = self.sources[source_index]
        sample_limits: tuple[tuple[int, int], ...] = ()
        if stream.reads_running_text:
            sample_limits = (*position.sample_limits, (source.records, self.max_tokens_of_text_sample))
        kept = self._orders.get((stream.name, source_index))
        if kept and kept.epoch == position.epoch and kept.sample_limits == sample_limits:
            return kept
        order = EpochOrder(
            source.counts,
            rng.key(self.seed, stream.name, "order", source.langs_name, source.fingerprint),
            position.epoch,
            read_lengths=partial(byte_lengths_and_continuations_of_shards, source),
            estimate=partial(self.calibration.estimated_tokens, source_index),
            sample_limits=sample_limits,
            # A fork may add sources (run/resume.py), which must not change the order of the others.
            sources=self.state.get("sources_at_start", {}).get(stream.name) or len(stream.sources),
        )
        self._orders[stream.name, source_index] = order
        return order


def byte_lengths_and_continuations_of_shards(
    source: Source, shards: Sequence[int], records: Sequence[slice | np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the length in bytes of records of several shards [n], and True for each record that continues the document
    of the record before it [n]. records: the records of each shard."""
    lengths, follows = zip(*map_in_threads(source.byte_lengths_and_continuations, shards, records), strict=True)
    return np.concatenate(lengths), np.concatenate(follows)


def source_sizes(sources: list[Source], calibration: Calibration, unit: str) -> list[float]:
    """Return the size of each source. unit: "records", "bytes" or "tokens". Bytes and tokens are estimated from at most
    SIZED shards of the source."""
    if unit == "records":
        return [source.records for source in sources]
    lines = calibration.lines if unit == "tokens" else [(1.0, 0.0)] * len(sources)
    sizes = []
    for source, (a, b) in zip(sources, lines, strict=True):
        shards = evenly_spaced_indices(len(source.counts), SIZED).tolist()
        lengths = np.concatenate([source.byte_lengths(shard, slice(None)) for shard in shards])
        sizes.append(source.records * (a * float(lengths.mean()) + b))
    return sizes


SIZED = 4
"""The number of shards from which the mean length of a source's records is estimated."""


def probabilities_of_stream_sources(
    stream: Stream, sources_of_run: list[Source], alpha: float, sizes_of_run_sources: Sequence[float]
) -> np.ndarray:
    """Return the probability of each of the stream's sources; idle sources have the probability 0. alpha: data.alpha.
    sizes_of_run_sources: the size of each source of the run.

    The probability of a language, or of an undirected pair of languages, is proportional to n^alpha, where n is the
    size of all its sources. It is divided among these sources in proportion to their sizes.
    """
    size_of_pair = defaultdict[str, float](float)
    for number in stream.active_sources:
        size_of_pair[sources_of_run[number].sorted_langs_name] += sizes_of_run_sources[number]
    total = sum(size**alpha for size in size_of_pair.values())
    weights = np.zeros(len(stream.sources))
    for place, number in enumerate(stream.sources):
        if number not in stream.idle:
            size = size_of_pair[sources_of_run[number].sorted_langs_name]
            weights[place] = size**alpha / total * sizes_of_run_sources[number] / size
    return weights


def initial_state(streams: Sequence[Stream]) -> dict[str, Any]:
    """Return the state before the first step. It has the position of every stream in each of its sources, as
    Position.to_list."""
    positions: dict[str, list[list[int]]] = {}
    for stream in streams:
        positions[stream.name] = [Position(0, 0).to_list()] * len(stream.sources)
    return {"step": 0, "positions": positions, "order": ORDER}


def draw_source_per_sample_systematically(probabilities: np.ndarray, sample_count: int, key: np.uint64) -> np.ndarray:
    """Return the source of each sample, as an index of `probabilities`. Source i is chosen probabilities[i] *
    sample_count times, rounded up or down. key: that of the random numbers.

    This is systematic sampling (Madow 1949) in shuffled order. The tokens of a step vary less than with
    independent draws.
    """
    drawn = rng.uniform(key, np.arange(sample_count + 1, dtype=np.uint64))
    points = (np.arange(sample_count) + drawn[-1]) / sample_count
    ends = np.append(np.searchsorted(points, np.cumsum(probabilities)[:-1]), sample_count)
    return group_of_each_value_in_sorted_order(drawn[:-1], ends)


def group_of_each_value_in_sorted_order(values: np.ndarray, group_end_positions: np.ndarray) -> np.ndarray:
    """Rank the values in ascending order, from 0. Return 0 for ranks below group_end_positions[0], 1 for the other
    ranks below group_end_positions[1], and so on. values: in [0, 1). group_end_positions: in ascending order; the last
    is len(values).

    The leading bits of nearly every value decide its group. Only the other values are sorted. For 65,536 values, this
    takes a tenth of the time of sorting all (tests/test_mixture.py has the plain form).
    """
    bits = (values * BUCKETS).astype(np.uint16)
    borders = np.append(0, np.cumsum(np.bincount(bits, minlength=BUCKETS)))
    choice_of_lowest = np.searchsorted(group_end_positions, borders[:-1], side="right")
    choice_of_highest = np.searchsorted(group_end_positions, borders[1:] - 1, side="right")
    chosen = choice_of_lowest.astype(np.min_scalar_type(len(group_end_positions)))[bits]
    unclear = np.flatnonzero((choice_of_lowest < choice_of_highest)[bits])
    unclear = unclear[np.argsort(values[unclear], kind="stable")]
    unclear_bits = bits[unclear]
    place_in_bucket = np.arange(len(unclear)) - np.searchsorted(unclear_bits, unclear_bits)
    chosen[unclear] = np.searchsorted(group_end_positions, borders[unclear_bits] + place_in_bucket, side="right")
    return chosen


BUCKETS = 1 << 12
"""The number of entries of the table in which `group_of_each_value_in_sorted_order` looks up the leading bits of a
value."""


def describe_sources_read(
    state: dict[str, Any], streams: Sequence[Stream], sources: list[Source]
) -> list[dict[str, Any]]:
    """Return each source from which records were read, as {"name", "languages", "licence", "streams"}. "licence" is
    None if index.json has none. "streams" has the number of records that each stream has read, over all epochs. state:
    the mixture's state. sources: those of the run."""
    records_read: dict[int, dict[str, int]] = {}
    """Index of a source -> the number of records that each stream has read from it."""
    for stream in streams:
        for number, numbers in zip(stream.sources, state["positions"][stream.name], strict=True):
            position = Position.from_list(numbers)
            if position.epoch or position.records:
                stream_records = records_read.setdefault(number, {})
                stream_records[stream.name] = position.epoch * sources[number].records + position.records
    listed: list[dict[str, Any]] = []
    for number in sorted(records_read):
        source = sources[number]
        listed.append(
            {
                "name": source.directory.name,
                "languages": list(source.langs),
                "licence": source.index["made_by"].get("licence"),
                "streams": records_read[number],
            }
        )
    return listed
