"""The samples that each optimizer step consumes, and each rank's plan: which records are in which packed row.

In each step a stream takes `samples` samples from its sources. Languages (or language pairs) are sampled with p_i
proportional to n_i^alpha (Conneau & Lample 2019), as evenly as whole numbers allow, and each source is read in its
epoch order. A sample is one record; in a packed stream, it is running text that fills about one sequence (order.py).
The state has the step number and each stream's position in each source; it determines all later samples. A step's
global batch is sampled first and then assigned to ranks and rows (balance.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from xscale import rng
from xscale.data.balance import balance
from xscale.data.calibration import Calibration
from xscale.data.order import NO_RECORDS, EpochOrder, TextPacking, window_count
from xscale.data.ragged import evenly_spaced
from xscale.data.shards import Source
from xscale.errors import UserError
from xscale.files import parallel_map

PACK_FILL = 0.94
"""The share of `max_length` that a packed sample fills. The rest is room for errors of the estimated token counts."""

ORDER = 3
"""Version of the order of running text. Before version 3, samples were consecutive pieces of a permuted window."""


@dataclass(frozen=True)
class StreamSpec:
    """The part of a stream's recipe that sampling needs."""

    name: str
    sources: tuple[int, ...]
    samples: int
    packed: bool
    idle: frozenset[int] = frozenset()
    """The sources that the stream does not sample from in this phase, but does in another phase of the run."""


@dataclass(frozen=True)
class SampledRecords:
    """Records of some samples of one stream. All arrays are [n_records]. A sample's records are in reading order."""

    sample: np.ndarray
    """Index, in the stream's global batch, of the sample to which the record belongs."""
    source: np.ndarray
    epoch: np.ndarray
    shard: np.ndarray
    record: np.ndarray
    tokens: np.ndarray
    """Tokens estimated from the record's bytes, float."""

    def select(self, places: np.ndarray) -> "SampledRecords":
        """Return the records at these indices of the arrays, in the order of their samples."""
        places = places[np.argsort(self.sample[places], kind="stable")]
        return SampledRecords(*(getattr(self, name)[places] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class StepPlan:
    """The work of one rank in one optimizer step."""

    step: int
    rows: list[dict[str, SampledRecords]]
    """Each row's records by stream. Every rank has the same number of rows; some may be empty."""
    state: dict[str, Any]
    rank: int
    world: int


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step over all ranks, by stream, and the bin to which each is assigned.

    A stream's records are ordered by source. To save time, `plans` orders only its ranks' records by sample.
    """

    records: dict[str, SampledRecords]
    tokens: dict[str, np.ndarray]
    """Estimated tokens that each sample adds to a packed row [samples]."""
    bins: dict[str, np.ndarray]
    """Bin of each sample; bin row * world + rank is one row of one rank [samples]."""
    rows: int
    world: int
    state: dict[str, Any]

    def tokens_of_bins(self) -> np.ndarray:
        """Return the estimated tokens of each packed row of each rank [rows * world]."""
        total = np.zeros(self.rows * self.world)
        for name, tokens in self.tokens.items():
            total += np.bincount(self.bins[name], weights=tokens, minlength=len(total))
        return total

    def plans(self, ranks: list[int]) -> list[StepPlan]:
        """Return the plan of each of these ranks."""
        step = self.state["step"] - 1
        plans = list[StepPlan]()
        for rank in ranks:
            rows: list[dict[str, SampledRecords]] = [{} for _ in range(self.rows)]
            plans.append(StepPlan(step, rows, self.state, rank, self.world))
        bins = self.rows * self.world
        for name, records in self.records.items():
            # Numbers of 16 bits are sorted in linear time.
            record_bins = self.bins[name].astype(np.min_scalar_type(bins))[records.sample]
            by_bin = np.argsort(record_bins, kind="stable")
            borders = np.append(0, np.cumsum(np.bincount(record_bins, minlength=bins)))
            for plan in plans:
                for number, row in enumerate(plan.rows):
                    own_bin = number * self.world + plan.rank
                    row[name] = records.select(by_bin[borders[own_bin] : borders[own_bin + 1]])
        return plans


class Mixture:
    """Samples global batches, beginning at `state`."""

    def __init__(
        self,
        streams: list[StreamSpec],
        sources: list[Source],
        calibration: Calibration,
        *,
        seed: int,
        alpha: float,
        max_length: int,
        max_tokens: int,
        rank: int,
        world: int,
        state: dict[str, Any] | None = None,
        alpha_by: str = "records",
    ):
        """alpha_by: see data.alpha_by."""
        self.streams = streams
        self.sources = sources
        self.calibration = calibration
        self.seed = seed
        self.max_length = max_length
        self.max_tokens = max_tokens
        self.rank = rank
        self.world = world
        self.room = int(PACK_FILL * max_length)
        sizes = source_sizes(sources, calibration, alpha_by)
        self.weights = [stream_weights(stream, sources, alpha, sizes) for stream in streams]
        self.state = state or initial_state(streams)
        self._orders: dict[tuple[str, int], tuple[Any, EpochOrder]] = {}
        self.phases: list[tuple[int, Mixture]] = []
        """The mixtures of earlier phases. Each number is that of the first step (from 0) after the phase."""
        self._begun: dict[tuple[str, int], tuple[int, int]] = {}
        """The last epoch and window that `remote_shards` yielded for each stream and source."""
        if self.state.get("order") != ORDER and any(stream.packed for stream in streams):
            raise UserError(
                f"the checkpoint of step {self.state['step']} was saved by an xscale that orders text in another way; "
                f"continue with that version, or start a new run from the checkpoint: model.init=DIR, another --out"
            )

    def next_step(self) -> StepPlan:
        """Return this rank's plan of the next step, and advance the state."""
        return self.next_batch().plans([self.rank])[0]

    def next_batch(self) -> GlobalBatch:
        """Return the next step's global batch, and advance the state."""
        mixture = self._of_next_step()
        batch = mixture._sample()
        self.state = mixture.state
        return batch

    def _of_next_step(self) -> "Mixture":
        """Return the mixture of the next step's phase, set to this mixture's state."""
        mixture = next((phase for end, phase in self.phases if self.state["step"] < end), self)
        mixture.state = self.state
        mixture._orders = self._orders  # most orders are the same in all phases
        return mixture

    def _sample(self) -> GlobalBatch:
        step = self.state["step"]
        records: dict[str, SampledRecords] = {}
        positions: dict[str, list[list[int]]] = {}
        tokens: dict[str, np.ndarray] = {}
        for stream, weights in zip(self.streams, self.weights, strict=True):
            drawn, positions[stream.name] = self._draw(stream, weights, step)
            estimated = np.bincount(drawn.sample, weights=drawn.tokens, minlength=stream.samples)
            records[stream.name] = drawn
            tokens[stream.name] = self.calibration.estimate_for(stream.name).row_tokens(estimated, self.max_length)
        self.state = self.state | {"step": step + 1, "positions": positions, "order": ORDER, "room": self.room}
        return GlobalBatch(records, tokens, *self.assign(tokens), self.world, self.state)

    def assign(self, tokens: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], int]:
        """Assign each stream's samples to packed rows. Returns the bin of each sample, `row * world + rank`, and the
        number of rows of each rank."""
        bins, rows = balance(np.concatenate(list(tokens.values())), self.world, self.max_tokens)
        borders = np.cumsum([len(stream_tokens) for stream_tokens in tokens.values()])[:-1]
        return dict(zip(tokens, np.split(bins, borders), strict=True)), rows

    def _draw(self, stream: StreamSpec, weights: np.ndarray, step: int) -> tuple[SampledRecords, list[list[int]]]:
        """Return the stream's records of a step, and the stream's positions after the step."""
        read = np.flatnonzero(weights).astype(np.min_scalar_type(len(weights)))
        chosen = read[choose(weights[read], stream.samples, rng.key(self.seed, stream.name, "source", step))]
        in_order = np.argsort(chosen, kind="stable")  # few bits are sorted in linear time
        by_source = np.split(in_order, np.cumsum(np.bincount(chosen, minlength=len(weights)))[:-1])
        positions = [list(position) for position in self.state["positions"][stream.name]]
        if stream.packed and self.state.get("room", self.room) != self.room:
            for position in positions:
                position += [position[1], self.state["room"]]
        pieces = list[SampledRecords]()
        for source, samples, position in zip(stream.sources, by_source, positions, strict=True):
            pieces += self._take(stream, source, samples, position)
        return join_records(pieces), positions

    def _take(
        self, stream: StreamSpec, source: int, samples: np.ndarray, position: list[int]
    ) -> Iterator[SampledRecords]:
        """Yield the source's next records for these samples. Advances `position` in place."""
        taken = 0
        while taken < len(samples):
            epoch, start = position[:2]
            order = self._order(stream, source, position)
            ends, shard, record, lengths = order.take(start, len(samples) - taken)
            yield SampledRecords(
                sample=np.repeat(samples[taken : taken + len(ends)], np.diff(ends, prepend=start)),
                source=np.full(len(record), source, dtype=np.int32),
                epoch=np.full(len(record), epoch, dtype=np.int32),
                shard=shard,
                record=record,
                tokens=self.calibration.estimated_tokens(source, lengths),
            )
            taken += len(ends)
            position[1] = int(ends[-1])
            if position[1] == order.size:
                position[:] = [epoch + 1, 0]

    def remote_shards(self) -> Iterator[tuple[Source, int]]:
        """Yield the shards of each remote source's current window and, if the cache has room, of the next window of the
        epoch. A source whose window is the same as in the last call is left out."""
        mixture = self._of_next_step()
        for stream in mixture.streams:
            for number, position in zip(stream.sources, self.state["positions"][stream.name], strict=True):
                source = self.sources[number]
                if not source.remote or number in stream.idle:
                    continue
                order = mixture._order(stream, number, position)
                window = order.window_at(position[1]).number
                begun = (position[0], window)
                if self._begun.get((stream.name, number)) == begun:
                    continue
                self._begun[stream.name, number] = begun
                shards = order.window_shards(window).tolist()
                room_for_two = 2 * remote_window_bytes(mixture.streams, self.sources) <= source.remote.cache.size
                if room_for_two and window + 1 < len(order.window_ends):
                    shards += order.window_shards(window + 1).tolist()
                for shard in shards:
                    yield source, shard

    def _order(self, stream: StreamSpec, source: int, position: list[int]) -> EpochOrder:
        """Return the order of a source in the epoch of `position`. It is kept until the epoch or the room changes."""
        epoch = position[0]
        earlier_rooms = tuple(zip(position[2::2], position[3::2], strict=True))
        version = (epoch, (*earlier_rooms, self.room) if stream.packed else None)
        kept = self._orders.get((stream.name, source))
        if kept and kept[0] == version:
            return kept[1]
        opened = self.sources[source]
        text = None
        if stream.packed:
            text = TextPacking(partial(self.calibration.estimated_tokens, source), self.room, earlier_rooms)
        order = EpochOrder(
            opened.counts,
            rng.key(self.seed, stream.name, "order", opened.name, opened.fingerprint),
            epoch,
            look=partial(lengths_and_follows, opened),
            text=text,
            # The further data of a fork (run/going_on.py) must not change the order of the other sources.
            sources=self.state.get("sources_at_start", {}).get(stream.name) or len(stream.sources),
        )
        self._orders[stream.name, source] = (version, order)
        return order


def join_records(pieces: list[SampledRecords]) -> SampledRecords:
    """Return the records of all pieces, in order."""
    if not pieces:
        return SampledRecords(*[NO_RECORDS] * 6)
    columns = list[np.ndarray]()
    for name in SampledRecords.__dataclass_fields__:
        columns.append(np.concatenate([getattr(piece, name) for piece in pieces]))
    return SampledRecords(*columns)


def remote_window_bytes(streams: list[StreamSpec], sources: list[Source]) -> int:
    """Return the maximum number of bytes of remote shards that the windows of all streams hold at one time."""
    total = 0
    for number, source in enumerate(sources):
        if not source.remote:
            continue
        window_shards = -(-len(source.shards) // window_count(source.counts))
        shard_bytes = sorted((shard.bytes for shard in source.shards), reverse=True)
        readers = [stream for stream in streams if number in stream.sources]
        total += min(len(readers) * sum(shard_bytes[:window_shards]), source.bytes)
    return total


def lengths_and_follows(
    source: Source, shards: Sequence[int], records: Sequence[slice | np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of records of a source, and whether each continues a document (order.Look)."""
    lengths, follows = zip(*parallel_map(source.lengths_and_follows, shards, records), strict=True)
    return np.concatenate(lengths), np.concatenate(follows)


def source_sizes(sources: list[Source], calibration: Calibration, by: str) -> list[float]:
    """Return each source's size in `by`: records, bytes or tokens. Bytes and tokens are estimated from some shards."""
    if by == "records":
        return [source.records for source in sources]
    lines = calibration.lines if by == "tokens" else [(1.0, 0.0)] * len(sources)
    sizes = []
    for source, (a, b) in zip(sources, lines, strict=True):
        shards = evenly_spaced(len(source.counts), SIZED).tolist()
        lengths = np.concatenate([source.lengths(shard, slice(None)) for shard in shards])
        sizes.append(source.records * (a * float(lengths.mean()) + b))
    return sizes


SIZED = 4
"""The number of shards of each source from which the mean length of its records is estimated."""


def stream_weights(stream: StreamSpec, sources: list[Source], alpha: float, sizes: list[float]) -> np.ndarray:
    """Return the probability with which each of the stream's sources is drawn; 0 for the sources in `stream.idle`.
    sizes: the size of every source of the run."""
    read = [source for source in stream.sources if source not in stream.idle]
    read_sources = [sources[source] for source in read]
    read_sizes = [sizes[source] for source in read]
    weights = np.zeros(len(stream.sources))
    weights[np.isin(stream.sources, read)] = source_weights(read_sources, alpha, read_sizes)
    return weights


def initial_state(streams: list[StreamSpec]) -> dict[str, Any]:
    """Return the state before step 0: [epoch, position] of every source of every stream. If the room of a sample of
    running text has changed within the epoch, the numbers of TextPacking.before come after these two."""
    positions: dict[str, list[list[int]]] = {}
    for stream in streams:
        positions[stream.name] = [[0, 0] for _ in stream.sources]
    return {"step": 0, "positions": positions, "order": ORDER}


def choose(weights: np.ndarray, samples: int, key: np.uint64) -> np.ndarray:
    """Return a source for each sample. Source i is chosen weights[i] * samples times, rounded up or down.

    This is systematic sampling (Madow 1949) in shuffled order: step lengths vary less than with independent draws.
    """
    drawn = rng.uniform(key, np.arange(samples + 1, dtype=np.uint64))
    points = (np.arange(samples) + drawn[-1]) / samples
    ends = np.append(np.searchsorted(points, np.cumsum(weights)[:-1]), samples)
    return ranked_choice(drawn[:-1], ends)


def plain_ranked_choice(numbers: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return for each number, by its rank k among all, the first i with k < ends[i]: the lowest ends[0] numbers get 0,
    and so on. ends: never falling, the last is the number of numbers."""
    rank = np.empty(len(numbers), dtype=np.int64)
    rank[np.argsort(numbers, kind="stable")] = np.arange(len(numbers))
    return np.searchsorted(ends, rank, side="right")


def ranked_choice(numbers: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return what plain_ranked_choice returns, in a third of its time. numbers: in [0, 1).

    The leading bits of a number decide nearly all. Only the numbers whose leading bits do not decide are sorted.
    """
    bits = (numbers * BUCKETS).astype(np.uint16)
    borders = np.append(0, np.cumsum(np.bincount(bits, minlength=BUCKETS)))
    of_lowest = np.searchsorted(ends, borders[:-1], side="right")
    of_highest = np.searchsorted(ends, borders[1:] - 1, side="right")
    chosen = of_lowest.astype(np.min_scalar_type(len(ends)))[bits]
    unclear = np.flatnonzero((of_lowest < of_highest)[bits])
    unclear = unclear[np.argsort(numbers[unclear], kind="stable")]
    unclear_bits = bits[unclear]
    place_in_bucket = np.arange(len(unclear)) - np.searchsorted(unclear_bits, unclear_bits)
    chosen[unclear] = np.searchsorted(ends, borders[unclear_bits] + place_in_bucket, side="right")
    return chosen


BUCKETS = 1 << 12
"""The number of entries of the table that `ranked_choice` looks up by the leading bits of a random number."""


def source_weights(sources: list[Source], alpha: float, sizes: list[float] | None = None) -> np.ndarray:
    """Return the probability of each source: proportional to n^alpha over languages or (undirected) pairs of languages,
    and to n among the sources of one language or pair. sizes: n of each source; None: its number of records."""
    if sizes is None:
        sizes = [source.records for source in sources]
    size_of_pair: dict[str, float] = {}
    for source, size in zip(sources, sizes, strict=True):
        size_of_pair[source.pair] = size_of_pair.get(source.pair, 0.0) + size
    total = sum(pair_size**alpha for pair_size in size_of_pair.values())
    weights = list[float]()
    for source, size in zip(sources, sizes, strict=True):
        pair_size = size_of_pair[source.pair]
        weights.append(pair_size**alpha / total * size / pair_size)
    return np.array(weights)


def positions_report(state: dict[str, Any], streams: list[StreamSpec], sources: list[Source]) -> list[str]:
    """Return lines such as "tlm en-de: epoch 1, 6,120 of 29,000 records"."""
    lines = []
    for stream in streams:
        for number, position in zip(stream.sources, state["positions"][stream.name], strict=True):
            source = sources[number]
            epoch, done = position[:2]
            lines.append(f"{stream.name} {source.pair}: epoch {epoch}, {done:,} of {source.records:,} records")
    return lines


def sources_read(state: dict[str, Any], streams: list[StreamSpec], sources: list[Source]) -> list[dict[str, Any]]:
    """Return the sources from which records were read: "name", "languages", "licence" (None: not stated), and
    "streams": {stream: its number of records, those of earlier epochs included}."""
    listed: list[dict[str, Any]] = []
    for number, source in enumerate(sources):
        records: dict[str, int] = {}
        for stream in streams:
            for read, position in zip(stream.sources, state["positions"][stream.name], strict=True):
                if read == number and any(position[:2]):
                    records[stream.name] = position[0] * source.records + position[1]
        if records:
            licence = source.index["made_by"].get("licence")
            entry = {"name": source.directory.name, "languages": list(source.langs), "licence": licence}
            listed.append(entry | {"streams": records})
    return listed
