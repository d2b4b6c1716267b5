"""What an optimizer step consumes: the global batch, drawn before it is cut for ranks.

A stream draws `samples` samples a step from its sources. Languages (or language pairs) are chosen with
p_i proportional to n_i^alpha (Conneau & Lample 2019), each source is then read in its epoch order. A sample is one
record, or, in a packed stream, a run of records that fills about one sequence. The state is a position per source;
it and the step number determine all that follows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from xscale import rng
from xscale.data.index import Source
from xscale.data.order import EpochOrder

PACK_FILL = 0.9
"""Share of `max_length` that a packed sample aims at; token counts are estimated from bytes, so some room is left."""


@dataclass(frozen=True)
class StreamSpec:
    """A stream of the recipe, as far as drawing is concerned."""

    name: str
    sources: tuple[int, ...]
    samples: int
    packed: bool


@dataclass(frozen=True)
class Draw:
    """Records of some samples of one stream, in order of samples. Arrays are [n_records]."""

    sample: np.ndarray
    """Which sample of the step's global batch the record belongs to; a sample's number is its global rank."""
    source: np.ndarray
    epoch: np.ndarray
    shard: np.ndarray
    record: np.ndarray
    tokens: np.ndarray
    """Estimated number of tokens, float."""

    def of_samples(self, samples: np.ndarray) -> "Draw":
        """The records of `samples`, in the order of `samples`."""
        first = np.searchsorted(self.sample, samples, side="left")
        last = np.searchsorted(self.sample, samples, side="right")
        pick = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)] or [np.empty(0, int)])
        pick = pick.astype(np.int64)
        return Draw(*(getattr(self, name)[pick] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class StepPlan:
    """What one rank does in one optimizer step."""

    step: int
    micros: dict[str, list[Draw]]
    """For each stream its micro-batches; every rank has equally many, some of which may be empty."""
    state: dict[str, Any]
    """State of the mixture after this step."""
    rank: int
    world: int


class Mixture:
    """Iterates over the StepPlans of one rank from `state` on."""

    def __init__(
        self,
        streams: list[StreamSpec],
        sources: list[Source],
        tokens_per_byte: list[float],
        *,
        seed: int,
        alpha: float,
        max_length: int,
        micro_batch: int,
        rank: int,
        world: int,
        state: dict[str, Any] | None = None,
    ):
        self.streams, self.sources, self.tokens_per_byte = streams, sources, tokens_per_byte
        self.seed, self.max_length, self.micro_batch = seed, max_length, micro_batch
        self.rank, self.world = rank, world
        self.weights = [source_weights([sources[s] for s in stream.sources], alpha) for stream in streams]
        self.state = state or initial_state(streams)
        self._orders: dict[tuple[str, int], tuple[int, EpochOrder]] = {}

    def __iter__(self) -> Iterator[StepPlan]:
        while True:
            yield self.next_step()

    def next_step(self) -> StepPlan:
        step = self.state["step"]
        micros = {}
        positions: dict[str, list[list[int]]] = {}
        for stream, weights in zip(self.streams, self.weights, strict=True):
            draw, positions[stream.name] = self._draw(stream, weights, step)
            micros[stream.name] = cut(draw, stream.samples, self.micro_batch, self.rank, self.world)
        self.state = {"step": step + 1, "positions": positions}
        return StepPlan(step, micros, self.state, self.rank, self.world)

    def _draw(self, stream: StreamSpec, weights: np.ndarray, step: int) -> tuple[Draw, list[list[int]]]:
        """The stream's global batch of a step, and its positions after it."""
        slots = np.arange(stream.samples, dtype=np.uint64)
        choice = rng.uniform(rng.key(self.seed, stream.name, "source", step), slots)
        chosen = np.minimum(np.searchsorted(np.cumsum(weights), choice, side="right"), len(weights) - 1)
        positions = [list(position) for position in self.state["positions"][stream.name]]
        parts = []
        for i, source in enumerate(stream.sources):
            samples = np.flatnonzero(chosen == i)
            if len(samples):
                parts.append(self._take(stream, source, samples, positions[i]))
        joined = {name: np.concatenate([getattr(p, name) for p in parts]) for name in Draw.__dataclass_fields__}
        by_sample = np.argsort(joined["sample"], kind="stable")
        return Draw(**{name: array[by_sample] for name, array in joined.items()}), positions

    def _take(self, stream: StreamSpec, source: int, samples: np.ndarray, position: list[int]) -> Draw:
        """Advance `position` ([epoch, position], in place) by as many samples as `samples` names."""
        parts, taken, per_sample = [], 0, 16 if stream.packed else 1
        while taken < len(samples):
            epoch, start = position
            order = self._order(stream.name, source, epoch)
            wanted = len(samples) - taken
            # Packed samples hold an unknown number of records: look at many, and at more if that was too few.
            stop = min(order.size, start + wanted * per_sample)
            per_sample *= 2 if stream.packed else 1
            shard, record = order.locate(start, stop)
            tokens = self._tokens(source, shard, record)
            if stream.packed:
                ends = pack(tokens, PACK_FILL * self.max_length, wanted, final=stop == order.size)
            else:
                ends = np.arange(1, stop - start + 1)
            used = int(ends[-1]) if len(ends) else 0
            number = np.repeat(samples[taken : taken + len(ends)], np.diff(ends, prepend=0))
            full = np.full(used, source), np.full(used, epoch)
            parts.append(Draw(number, *full, shard[:used], record[:used], tokens[:used]))
            taken += len(ends)
            position[1] = start + used
            if position[1] == order.size:
                position[:] = [epoch + 1, 0]
        return Draw(*(np.concatenate([getattr(p, name) for p in parts]) for name in Draw.__dataclass_fields__))

    def _order(self, stream: str, source: int, epoch: int) -> EpochOrder:
        cached = self._orders.get((stream, source))
        if cached is None or cached[0] != epoch:
            seed = rng.key(self.seed, stream, "order", self.sources[source].name, self.sources[source].fingerprint)
            cached = (epoch, EpochOrder(self.sources[source].counts, seed, epoch))
            self._orders[stream, source] = cached
        return cached[1]

    def _tokens(self, source: int, shard: np.ndarray, record: np.ndarray) -> np.ndarray:
        tokens = np.empty(len(shard))
        for s in np.unique(shard):
            at = shard == s
            tokens[at] = self.sources[source].lengths(int(s), record[at])
        return tokens * self.tokens_per_byte[source]


def initial_state(streams: list[StreamSpec]) -> dict[str, Any]:
    """Positions [epoch, position] of every source of every stream before step 0."""
    return {"step": 0, "positions": {stream.name: [[0, 0] for _ in stream.sources] for stream in streams}}


def source_weights(sources: list[Source], alpha: float) -> np.ndarray:
    """p of each source: n^alpha over languages, proportional to records within a language. Sums to 1."""
    per_language: dict[str, int] = {}
    for source in sources:
        per_language[source.name] = per_language.get(source.name, 0) + source.records
    total = sum(n**alpha for n in per_language.values())
    return np.array([per_language[s.name] ** alpha / total * s.records / per_language[s.name] for s in sources])


def pack(tokens: np.ndarray, room: float, wanted: int, final: bool) -> np.ndarray:
    """Greedy cut of consecutive records into at most `wanted` samples of at most `room` tokens (one record at least).

    Returns the end of each sample. The last run is left out unless it is full or `final` (nothing follows).
    """
    ends: list[int] = []
    filled = 0.0
    for i, n in enumerate(tokens):
        if filled and filled + n > room:
            ends.append(i)
            filled = 0.0
            if len(ends) == wanted:
                return np.array(ends)
        filled += n
    if final and len(tokens):
        ends.append(len(tokens))
    return np.array(ends, dtype=np.int64)


def cut(draw: Draw, samples: int, micro_batch: int, rank: int, world: int) -> list[Draw]:
    """One rank's micro-batches of a global batch.

    Samples are sorted by length, longest first (the largest step comes first, a micro-batch holds equal lengths),
    and dealt out in turn, so that all ranks work on equal lengths at the same time.
    """
    tokens = np.bincount(draw.sample, weights=draw.tokens, minlength=samples)
    longest_first = np.argsort(-tokens, kind="stable")
    block = micro_batch * world
    return [draw.of_samples(longest_first[i + rank : i + block : world]) for i in range(0, samples, block)]


def micro_steps(stream: StreamSpec, micro_batch: int, world: int) -> int:
    """Micro-batches of the stream in one optimizer step, the same on every rank."""
    return -(-stream.samples // (micro_batch * world))


def positions_report(state: dict[str, Any], streams: list[StreamSpec], sources: list[Source]) -> list[str]:
    """Lines such as "tlm en-de: epoch 1, 6,120 of 29,000 records"."""
    lines = []
    for stream in streams:
        for source, (epoch, position) in zip(stream.sources, state["positions"][stream.name], strict=True):
            name, total = sources[source].name, sources[source].records
            lines.append(f"{stream.name} {name}: epoch {epoch}, {position:,} of {total:,} records")
    return lines
