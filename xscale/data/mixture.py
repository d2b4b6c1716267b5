"""What an optimizer step consumes: the global batch, drawn before it is cut for ranks.

A stream draws `samples` samples a step from its sources. Languages (or language pairs) are chosen with
p_i proportional to n_i^alpha (Conneau & Lample 2019), as evenly as whole numbers allow; each source is read in its
epoch order. A sample is one record, or, in a packed stream, running text that fills about one sequence: as many
sentences of a document as fit, or several short documents (order.py). The state is a position per source; it and the
step number determine all that follows. Samples of all streams are then dealt out to ranks and rows (cut.py).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from xscale import rng
from xscale.data.balance import cut
from xscale.data.calibration import Calibration
from xscale.data.order import EpochOrder, Part, Text
from xscale.data.packed_row import Shape
from xscale.data.shards import Source
from xscale.errors import UserError
from xscale.files import parallel_map

PACK_FILL = 0.94
"""Share of `max_length` that a packed sample aims at; token counts are estimated from bytes, so some room is left."""

ORDER = 3
"""Version of the order of running text. Before 3, a sample was pieces that follow one another in a permutation."""


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
    """As many as its bytes promise, float."""

    def at(self, places: np.ndarray) -> "Draw":
        """The records at these places of the arrays."""
        return Draw(*(getattr(self, name)[places] for name in self.__dataclass_fields__))


class Stretch(NamedTuple):
    """Records that follow one another in the order of a source."""

    source: int
    epoch: int
    part: Part
    start: int
    """Its first place of the part."""


@dataclass(frozen=True)
class Drawn:
    """A stream's global batch, stretch by stretch. Where its records lie is looked up for those that a rank reads."""

    stretches: list[Stretch]
    starts: np.ndarray
    """First record of each stretch."""
    sample: np.ndarray
    """Of each record, as in Draw [n_records]."""
    tokens: np.ndarray

    def all(self) -> Draw:
        return self.of(np.ones(int(self.sample.max()) + 1, dtype=bool))

    def of(self, wanted: np.ndarray) -> Draw:
        """The records of the samples that are wanted [samples], in order of samples."""
        places = np.flatnonzero(wanted[self.sample])
        borders = np.searchsorted(places, self.starts[1:])
        several = [
            (stretch, of + stretch.start - start)
            for stretch, of, start in zip(self.stretches, np.split(places, borders), self.starts.tolist(), strict=True)
            if len(of)
        ]
        located = [stretch.part.locate(of) for stretch, of in several]
        records = [len(of) for _, of in several]
        nothing = np.empty(0, dtype=np.int64)
        draw = Draw(
            self.sample[places],
            source=np.repeat(np.array([stretch.source for stretch, _ in several], dtype=np.int64), records),
            epoch=np.repeat(np.array([stretch.epoch for stretch, _ in several], dtype=np.int64), records),
            shard=np.concatenate([nothing, *(shard for shard, _ in located)]),
            record=np.concatenate([nothing, *(record for _, record in located)]),
            tokens=self.tokens[places],
        )
        return draw.at(np.argsort(draw.sample, kind="stable"))


@dataclass(frozen=True)
class StepPlan:
    """What one rank does in one optimizer step."""

    step: int
    rows: list[dict[str, Draw]]
    """Of each row what it holds of each stream; every rank has equally many rows, some of which may be empty."""
    state: dict[str, Any]
    """State of the mixture after this step."""
    rank: int
    world: int


@dataclass(frozen=True)
class StepCut:
    """A step's global batch and how it is dealt out, by stream."""

    draws: dict[str, Drawn]
    tokens: dict[str, np.ndarray]
    """Estimated tokens in a row of each sample [samples]."""
    bins: dict[str, np.ndarray]
    """Bin of each sample [samples]; bin row * world + rank is a rank's row."""
    rows: int
    """Of each rank."""


class Mixture:
    """Iterates over the StepPlans of one rank from `state` on."""

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
        rows: int = 1,
        state: dict[str, Any] | None = None,
    ):
        """rows: of a step, at least."""
        self.streams, self.sources, self.calibration = streams, sources, calibration
        self.seed, self.max_length, self.max_tokens = seed, max_length, max_tokens
        self.rank, self.world, self.rows = rank, world, rows
        self.weights = [source_weights([sources[s] for s in stream.sources], alpha) for stream in streams]
        self.state = state or initial_state(streams)
        self._orders: dict[tuple[str, int], tuple[int, EpochOrder]] = {}
        if self.state.get("order") != ORDER:
            self.check_order()

    def __iter__(self) -> Iterator[StepPlan]:
        while True:
            yield self.next_step()

    def check_order(self) -> None:
        """Raises UserError where a state of an earlier version lies within text that is in another order now."""
        for stream in self.streams:
            for source, (epoch, position) in zip(stream.sources, self.state["positions"][stream.name], strict=True):
                order = self._order(stream, source, epoch)
                if stream.packed and order.bounds(position)[1] < position:
                    raise UserError(
                        f"the checkpoint of step {self.state['step']} was saved by an earlier xscale, and stream "
                        f"{stream.name} is among records of {self.sources[source].name} whose order has changed since; "
                        f"go on with that version, or start a new run from it: model.init=DIR and another --out"
                    )

    def next_step(self) -> StepPlan:
        return self.plans_of(self.next_cut(), [self.rank])[0]

    def plans_of(self, cut: StepCut, ranks: list[int]) -> list[StepPlan]:
        """What these ranks do in the step that next_cut has just made."""
        rows: list[list[dict[str, Draw]]] = [[{} for _ in range(cut.rows)] for _ in ranks]
        for name, drawn in cut.draws.items():
            row, rank_of = np.divmod(cut.bins[name], self.world)
            wanted = np.zeros(self.world, dtype=bool)
            wanted[ranks] = True
            of_all = drawn.of(wanted[rank_of])  # where a record lies is looked up once for all of them
            for rank, of_rank in zip(ranks, rows, strict=True):
                draw = of_all.at(np.flatnonzero(rank_of[of_all.sample] == rank))
                by_row = np.argsort(row[draw.sample], kind="stable")
                borders = np.searchsorted(row[draw.sample][by_row], np.arange(1, cut.rows))
                for of_row, places in zip(of_rank, np.split(by_row, borders), strict=True):
                    of_row[name] = draw.at(places)
        step = self.state["step"] - 1
        return [
            StepPlan(step, of_rank, self.state, rank, self.world) for rank, of_rank in zip(ranks, rows, strict=True)
        ]

    def next_cut(self) -> StepCut:
        """The next step's global batch, dealt out."""
        draws, positions = self.draw()
        tokens = {}
        for stream in self.streams:
            draw = draws[stream.name]
            estimated_tokens = np.bincount(draw.sample, weights=draw.tokens, minlength=stream.samples)
            tokens[stream.name] = self.calibration.of(stream.name).of(estimated_tokens, self.max_length)
        self.state = {"step": self.state["step"] + 1, "positions": positions, "order": ORDER}
        return StepCut(draws, tokens, *self.deal(tokens, self.rows))

    def deal(self, tokens: dict[str, np.ndarray], rows: int) -> tuple[dict[str, np.ndarray], int]:
        """StepCut's bins and rows, of at least `rows` rows a rank."""
        bins, rows = cut(np.concatenate(list(tokens.values())), self.world, self.max_tokens, rows)
        borders = np.cumsum([len(of_stream) for of_stream in tokens.values()])[:-1]
        return dict(zip(tokens, np.split(bins, borders), strict=True)), rows

    def draw(self) -> tuple[dict[str, Drawn], dict[str, list[list[int]]]]:
        """The global batch of the next step by stream, and the positions after it."""
        drawn = {
            stream.name: self._draw(stream, weights, self.state["step"])
            for stream, weights in zip(self.streams, self.weights, strict=True)
        }
        return {name: draw for name, (draw, _) in drawn.items()}, {name: after for name, (_, after) in drawn.items()}

    def _draw(self, stream: StreamSpec, weights: np.ndarray, step: int) -> tuple[Drawn, list[list[int]]]:
        """The stream's global batch of a step, and its positions after it."""
        chosen = choose(weights, stream.samples, rng.key(self.seed, stream.name, "source", step))
        in_order = np.argsort(chosen, kind="stable")  # of so few bits in linear time
        by_source = np.split(in_order, np.cumsum(np.bincount(chosen, minlength=len(weights)))[:-1])
        positions = [list(position) for position in self.state["positions"][stream.name]]
        taken = [
            part
            for source, samples, position in zip(stream.sources, by_source, positions, strict=True)
            for part in self._take(stream, source, samples, position)
        ]
        stretches, sample, tokens = zip(*taken, strict=True)
        starts = np.cumsum([0, *map(len, sample[:-1])])
        return Drawn([*stretches], starts, np.concatenate(sample), np.concatenate(tokens)), positions

    def _take(
        self, stream: StreamSpec, source: int, samples: np.ndarray, position: list[int]
    ) -> Iterator[tuple[Stretch, np.ndarray, np.ndarray]]:
        """Advance `position` ([epoch, position], in place) by as many samples as `samples` names. Yields stretches, and
        of each record the sample and the tokens."""
        taken = 0
        while taken < len(samples):
            epoch, start = position
            order = self._order(stream, source, epoch)
            ends = order.samples(start, len(samples) - taken)
            stop, part = int(ends[-1]), order.part(start)
            of = samples[taken : taken + len(ends)]
            number = np.repeat(of, np.diff(ends, prepend=start)) if stream.packed else of
            at = start - part.first
            estimated_tokens = self.calibration.estimated_tokens(source, part.lengths[at : at + stop - start])
            yield Stretch(source, epoch, part, at), number, estimated_tokens
            taken += len(ends)
            position[:] = [epoch, stop] if stop < order.size else [epoch + 1, 0]

    def _order(self, stream: StreamSpec, source: int, epoch: int) -> EpochOrder:
        cached = self._orders.get((stream.name, source))
        if cached is None or cached[0] != epoch:
            of = self.sources[source]
            seed = rng.key(self.seed, stream.name, "order", of.name, of.fingerprint)
            text = None
            if stream.packed:
                estimated_tokens = partial(self.calibration.estimated_tokens, source)
                text = Text(partial(_look, of), estimated_tokens, int(PACK_FILL * self.max_length))
            lengths, sources = partial(_lengths, of), len(stream.sources)
            order = EpochOrder(of.counts, seed, epoch, lengths=lengths, text=text, sources=sources)
            cached = self._orders[stream.name, source] = (epoch, order)
        return cached[1]


def _lengths(source: Source, shards: Sequence[int], records: Sequence[slice | np.ndarray]) -> np.ndarray:
    """order.Look, of bytes."""
    return np.concatenate(parallel_map(source.lengths, shards, records))


def _look(
    source: Source, shards: Sequence[int], records: Sequence[slice | np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """order.Text.look"""
    lengths, follows = zip(*parallel_map(source.look, shards, records), strict=True)
    return np.concatenate(lengths), np.concatenate(follows)


FIT_SAMPLES = 2**15
"""About so many samples of the first steps, of MIN_STEPS to MAX_STEPS of them, tell the shape of rows."""
MIN_STEPS, MAX_STEPS = 4, 64
UNCOMPILED = 1.5
"""Time of a row that does not fit, of one that does."""
ROUND = 16
"""Compiled rows have a multiple of so many tokens."""


def fit(mixture: Mixture, longest: int) -> tuple[int, Shape]:
    """The rows of a step, and a shape of at most max_tokens that nearly all of them fit, by the first steps of a
    mixture that has made none. longest: data.max_length, of a sequence that fills a row up.

    Rows differ as steps do, and from what was estimated; both are taken as normal. A row that exceeds the shape after
    all is computed as it is, uncompiled.
    """
    start, samples = mixture.state, sum(stream.samples for stream in mixture.streams)
    steps = min(max(FIT_SAMPLES // samples, MIN_STEPS), MAX_STEPS)
    cuts = [mixture.next_cut() for _ in range(steps)]
    mixture.state = start
    rows = max(cut.rows for cut in cuts)
    while True:
        tokens, variance, sequences = np.hstack([expected(mixture, cut, rows) for cut in cuts])
        mean, deviation = tokens.mean(), np.sqrt(tokens.var() + variance.mean())
        room = mean + deviation * deviations(deviation / mean, mixture.world)
        room = ROUND * int(np.ceil(room / ROUND))
        if room <= mixture.max_tokens or rows * mixture.world >= samples:
            return rows, Shape(room, 8 * int(np.ceil((1.1 * sequences.max() + 0.1 * room / longest) / 8 + 1)))
        rows += 1


def deviations(relative: float, ranks: int) -> float:
    """How many standard deviations more than the mean a row should hold. Room costs time in every row; a row that does
    not fit costs more, and all ranks wait for it. relative: the deviation over the mean."""
    z = np.arange(1.0, 6.0, 0.05)
    all_fit = (0.5 + 0.5 * np.array([math.erf(x) for x in z / math.sqrt(2)])) ** ranks
    return float(z[np.argmin((1 + z * relative) * (UNCOMPILED - (UNCOMPILED - 1) * all_fit))])


def expected(mixture: Mixture, step: StepCut, rows: int) -> np.ndarray:
    """Tokens of each bin of a step that is cut into at least `rows`, their variance, and sequences [3, bins]."""
    bins, rows = mixture.deal(step.tokens, rows)
    found = np.zeros((3, rows * mixture.world))
    for name, tokens in step.tokens.items():
        estimate = mixture.calibration.of(name)
        of_bin = np.bincount(bins[name], weights=tokens, minlength=found.shape[1])
        samples = np.bincount(bins[name], minlength=found.shape[1])
        found += of_bin, estimate.variance(of_bin), estimate.sequences * samples
    return found


def initial_state(streams: list[StreamSpec]) -> dict[str, Any]:
    """Positions [epoch, position] of every source of every stream before step 0."""
    positions = {stream.name: [[0, 0] for _ in stream.sources] for stream in streams}
    return {"step": 0, "positions": positions, "order": ORDER}


def choose(weights: np.ndarray, samples: int, key: np.uint64) -> np.ndarray:
    """A source for each sample, with p = weights; each is chosen p * samples times, rounded up or down.

    Systematic sampling (Madow 1949) in shuffled order: steps differ less in length than by independent draws.
    """
    drawn = rng.uniform(key, np.arange(samples + 1, dtype=np.uint64))
    points = (np.arange(samples) + drawn[-1]) / samples
    ends = np.append(np.searchsorted(points, np.cumsum(weights)[:-1]), samples)
    # The lowest draws go to the first source, and so on. Their leading bits tell nearly all; those that share them with
    # a draw of another source are sorted.
    bits = (drawn[:-1] * BUCKETS).astype(np.uint16)
    behind = np.cumsum(np.bincount(bits, minlength=BUCKETS))
    first, last = (np.searchsorted(ends, at, side="right") for at in (np.append(0, behind[:-1]), behind - 1))
    chosen = first.astype(np.min_scalar_type(len(weights)))[bits]
    unclear = np.flatnonzero((first < last)[bits])
    unclear = unclear[np.argsort(drawn[unclear], kind="stable")]
    of_bits = bits[unclear]
    place = np.arange(len(unclear)) - np.searchsorted(of_bits, of_bits)
    chosen[unclear] = np.searchsorted(ends, np.append(0, behind)[of_bits] + place, side="right")
    return chosen


BUCKETS = 1 << 12
"""Of draws, by their leading bits."""


def source_weights(sources: list[Source], alpha: float) -> np.ndarray:
    """p of each source: n^alpha over languages or pairs of them, whichever way round; proportional to records within
    one. Sums to 1."""
    names = [source.pair for source in sources]
    records = Counter[str]()
    for name, source in zip(names, sources, strict=True):
        records[name] += source.records
    total = sum(n**alpha for n in records.values())
    shares = [records[name] ** alpha / total for name in names]
    return np.array([p * s.records / records[name] for p, name, s in zip(shares, names, sources, strict=True)])


def positions_report(state: dict[str, Any], streams: list[StreamSpec], sources: list[Source]) -> list[str]:
    """Lines such as "tlm en-de: epoch 1, 6,120 of 29,000 records"."""
    lines = []
    for stream in streams:
        for source, (epoch, position) in zip(stream.sources, state["positions"][stream.name], strict=True):
            name, total = sources[source].pair, sources[source].records
            lines.append(f"{stream.name} {name}: epoch {epoch}, {position:,} of {total:,} records")
    return lines
