"""Steps, made by worker processes: read, tokenise, collate, lay out.

A process draws plans ahead of the others, workers turn each into a StepBatch, in order. A batch carries the mixture's
state after it, so the state saved with step t is what step t consumed, whatever was prefetched.
"""

import atexit
import contextlib
import copy
import ctypes
import errno
import fcntl
import math
import multiprocessing
import os
import signal
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, Dataset

from xscale import rng
from xscale.data.calibration import Calibration, Estimate, estimate, line
from xscale.data.forks import children_that_begin
from xscale.data.mixture import Draw, Mixture, StepPlan, StreamSpec, initial_state
from xscale.data.packed_row import PackedRow, Shape, Work, pack_row
from xscale.data.sequences import Example
from xscale.data.shards import Source, pair_name
from xscale.data.stream_batch import Context, StreamBatch, StreamShare, check_stream_batch
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import TokenWords, stands_alone
from xscale.errors import ENVIRONMENT_ERRNOS, RankError, UserError, blaming
from xscale.ranks import HostGroup, Process, name_process
from xscale.record import Record

Collate = Callable[[list[list[Example]], Any, Context], StreamBatch]
"""(samples, options of the stream, context) -> piece; a sample is a list of one or more examples."""


@dataclass(frozen=True)
class StreamCollate:
    """How a stream's records become pieces of rows."""

    collate: Collate
    options: Any
    words: bool = False
    """Whether the examples carry the words of their texts."""
    lexicons: tuple[Any, ...] | None = None
    """The stream's own; None: the context's."""
    names: tuple[str, ...] = ()
    """Context.names."""
    objective: str = ""
    """Its name; "" of what is no recipe's."""
    terms: frozenset[str] = frozenset()
    """Of its loss."""

    def __call__(self, samples: list[list[Example]], stream: str, context: Context) -> StreamBatch:
        with blaming(f"streams.{stream}, objective {self.objective}: collate"):
            stream_batch = self.collate(samples, self.options, context)
            if self.objective:
                check_stream_batch(stream_batch, self.terms)
        return stream_batch


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of one rank."""

    step: int
    rows: list[PackedRow]
    state: dict[str, Any]

    def samples(self) -> int:
        return sum(row.samples for row in self.rows)

    def too_long(self) -> dict[str, int]:
        """By stream."""
        return {stream: sum(row.too_long[stream] for row in self.rows) for stream in self.rows[0].too_long}

    def targets(self) -> dict[tuple[str, str], int]:
        """Targets on this rank of each (stream, term)."""
        return {key: sum(row.targets[key] for row in self.rows) for key in self.rows[0].targets}

    def auxiliary(self) -> dict[str, int]:
        """By stream, how many states a companion reads."""
        return {
            stream: sum(len(row.inputs.auxiliary[stream][1][0]) - 1 for row in self.rows)
            for stream in self.rows[0].inputs.auxiliary
        }

    def counts(self) -> dict[tuple[str, str, str], int]:
        """Row.counts of all rows."""
        return {key: sum(row.counts[key] for row in self.rows) for key in self.rows[0].counts}

    def work(self) -> Work:
        return Work(*map(sum, zip(*(row.work for row in self.rows), strict=True)))

    def keys(self) -> dict[str, list[str]]:
        """Keys of the records of each stream, in the order of consumption."""
        return {stream: [key for row in self.rows for key in row.keys[stream]] for stream in self.rows[0].keys}


class StepDataset(Dataset):
    """Indexed by StepPlans. Pickles to a worker without open files."""

    def __init__(
        self,
        sources: list[Source],
        streams: dict[str, StreamCollate],
        context: Context,
        seed: int,
        shape: Shape | None = None,
    ):
        """shape: to which rows are filled up."""
        self.sources, self.streams, self.context, self.seed, self.shape = sources, streams, context, seed, shape
        self.source_keys = np.array([rng.key(s.name, s.fingerprint) for s in sources], dtype=np.uint64)

    def __getitem__(self, plan: "StepPlan | Failure") -> "StepBatch | Failure":
        if isinstance(plan, Failure):
            return plan
        try:
            stream_batches = {name: self.stream_batches(name, plan) for name in plan.rows[0]}
        except (UserError, OSError) as error:  # crosses the process boundary as a value: DataLoader would wrap it in a
            return Failure.of(error, f"step {plan.step}: ")  # traceback, and drop errno and file
        rows = [
            replace(
                pack_row(
                    {name: found[row][0] for name, found in stream_batches.items()},
                    self.context.max_length,
                    self.context.tokenizer.sep_id,
                    self.shape,
                    {name: how.names for name, how in self.streams.items()},
                ),
                keys={name: found[row][1] for name, found in stream_batches.items()},
            )
            for row in range(len(plan.rows))
        ]
        return StepBatch(plan.step, rows, plan.state)

    def stream_batches(self, stream: str, plan: StepPlan) -> list[tuple[StreamBatch, list[str]]]:
        """What each row holds of a stream, and the keys of its records. All rows are tokenised at once."""
        how, draws = self.streams[stream], [row[stream] for row in plan.rows]
        examples = iter(self._examples(stream, draws))
        found = []
        for row, draw in enumerate(draws):
            of_row = list(islice(examples, len(draw.sample)))
            samples = [list(group) for _, group in groupby(of_row, key=lambda example: example.number)]
            share = StreamShare(plan.step, row * plan.world + plan.rank, len(draws) * plan.world)
            stream_batch = how(samples, stream, self.context_of(stream, share))
            stream_batch = replace(stream_batch, pairs=self.count_pairs(stream, of_row))
            found.append((stream_batch, [example.key for example in of_row]))
        return found

    def count_pairs(self, stream: str, examples: list[Example]) -> dict[tuple[str, str], int]:
        """How many of each pair of languages are "drawn", and "too_long"."""
        pairs = [name for name in self.streams[stream].names if name not in self.context.language_ids]
        counts = {(what, name): 0 for name in pairs for what in ("drawn", "too_long")}
        room = self.context.max_length - self.context.tokenizer.pair.special
        for example in examples if pairs else ():
            name = pair_name(example.langs)
            counts["drawn", name] += 1
            counts["too_long", name] += sum(map(len, example.ids)) > room
        return counts

    def context_of(self, stream: str, share: StreamShare) -> Context:
        own = self.streams[stream].lexicons
        lexicons = self.context.lexicons if own is None else own
        return replace(self.context, stream=stream, share=share, lexicons=lexicons, names=self.streams[stream].names)

    def _examples(self, stream: str, draws: list[Draw]) -> Iterator[Example]:
        places = [p for d in draws for p in zip(d.source.tolist(), d.shard.tolist(), d.record.tolist(), strict=True)]
        records = [self.sources[source].read(shard, record) for source, shard, record in places]
        if records and len(records[0].texts) > 1:
            records = [self.shortened(record, self.streams[stream].words) for record in records]
        texts = [text for record in records for text in record.texts]
        follows = np.concatenate([self.follows(draw) for draw in draws]).tolist()
        if self.context.tokenizer.keeps_space and len(texts) == len(records):
            spaced = (on and not stands_alone(text) for on, text in zip(follows, texts, strict=True))
            texts = [" " * space + text for space, text in zip(spaced, texts, strict=True)]
        words: list[TokenWords] | None = None
        if self.streams[stream].words:
            records = [self.sources[s].with_words(r) for (s, _, _), r in zip(places, records, strict=True)]
            ids, words = self.context.tokenizer.encode_words(texts)
        else:
            ids = self.context.tokenizer.encode(texts)
        identities = np.concatenate([self.identities(stream, draw) for draw in draws])
        numbers = [number for draw in draws for number in draw.sample.tolist()]
        borders = self.borders(texts, ids) if records and len(records[0].texts) == 1 else {}
        at = 0
        for record, identity, number, on in zip(records, identities, numbers, follows, strict=True):
            end = at + len(record.texts)
            yield Example(
                record.langs,
                tuple(ids[at:end]),
                tuple(words[at:end]) if words else None,
                identity,
                number,
                record.key,
                record.links,
                on,
                borders.get(at, ()),
            )
            at = end

    def shortened(self, pair: Record, words: bool) -> Record:
        """Of a pair that is far too long the beginning says so, in less time. One that is dropped needs no links; one
        that is cut, and whose words are asked for, stays as it is."""
        most = CHARACTERS * self.context.max_length
        if max(map(len, pair.texts)) <= most or (words and self.context.overlong != "drop"):
            return pair
        return pair._replace(texts=tuple(text[:most] for text in pair.texts), links="" if words else pair.links)

    def borders(self, texts: list[str], ids: list[list[int]]) -> dict[int, list[int]]:
        """Where texts longer than a sequence may be cut: number of the text -> places of tokens."""
        long = [i for i, tokens in enumerate(ids) if len(tokens) > self.context.max_length - 2]
        if not long:
            return {}
        _, words = self.context.tokenizer.encode_words([texts[i] for i in long])
        return {i: of_text.borders() for i, of_text in zip(long, words, strict=True)}

    def follows(self, draw: Draw) -> np.ndarray:
        """Whether each record goes on the document of the record before it in its sample [n_records]."""
        found = np.zeros(len(draw.sample), dtype=bool)
        same = [a[1:] == a[:-1] for a in (draw.sample, draw.source, draw.shard)]
        found[1:] = np.logical_and.reduce([*same, draw.record[1:] == draw.record[:-1] + 1])
        for i in np.flatnonzero(found).tolist():
            found[i] = self.sources[draw.source[i]].continues_document(int(draw.shard[i]), int(draw.record[i]))
        return found

    def identities(self, stream: str, draw: Draw) -> np.ndarray:
        """uint64 key of each record in its epoch of the stream [n_records]."""
        per_stream = rng.key(self.seed, stream, "record")
        per_source = rng.hash64(per_stream ^ self.source_keys[draw.source], draw.epoch)
        return rng.hash64(per_source, places_of(draw))


def places_of(draw: Draw) -> np.ndarray:
    """uint64 number of each record in its source [n_records]."""
    return (draw.shard.astype(np.uint64) << np.uint64(40)) + draw.record.astype(np.uint64)


@dataclass(frozen=True)
class Failure:
    """A UserError, or an OSError of the machine, on its way from another process to the main one."""

    message: str
    errno: int | None = None
    file: str = ""

    @classmethod
    def of(cls, error: UserError | OSError, where: str = "") -> "Failure":
        """Raises what is a fault of ours."""
        if isinstance(error, UserError):
            return cls(f"{where}{error}")
        if error.errno not in {*ENVIRONMENT_ERRNOS, errno.ENOMEM}:
            raise error
        return cls(str(error.strerror), error.errno, str(error.filename or "a file"))

    def error(self) -> Exception:
        return RankError(self.message) if self.errno is None else OSError(self.errno, self.message, self.file)


def step_batches(mixture: Mixture, dataset: StepDataset, workers: int, steps: int) -> Iterator[StepBatch]:
    """The next `steps` StepBatches of the mixture, made by `workers` processes by the plans of another; 0: all by this
    one."""
    return batches_of(step_plans(mixture, workers, steps), dataset, workers, mixture.rank)


def worker_count(wanted: int | str, process: Process, device: str) -> int:
    """data.workers; "auto": 2 on a CPU, 4 to 6 for a GPU, where a worker makes fewer tokens than it takes."""
    if wanted != "auto":
        return int(wanted)
    cores = len(os.sched_getaffinity(0))
    if cores == os.cpu_count():  # else the launcher has bound the rank to cores of its own
        cores //= process.local_world
    return 2 if device == "cpu" else min(max(cores - 2, 4), 6)


Plans = Iterator[StepPlan | Failure]


def step_plans(mixture: Mixture, workers: int, steps: int, node: "Node | None" = None) -> Plans:
    """The mixture's next steps, where there are workers drawn by another process from now on; with a node by one for
    all of its ranks."""
    return planned(mixture, steps, node) if workers else (mixture.next_step() for _ in range(steps))


def batches_of(plans: Plans, dataset: StepDataset, workers: int, rank: int) -> Iterator[StepBatch]:
    """Waits for the first plans, and starts the workers."""
    loader: DataLoader = DataLoader(
        dataset,
        sampler=_Plans(plans),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        collate_fn=_same,
        worker_init_fn=partial(_begin_worker, rank),
    )
    with children_that_begin():
        started = iter(loader)
    return map(_unwrap, started)


PLANS_BYTES = 1 << 20
"""Plans wait in a pipe of so many bytes: of a thousand ranks dozens, of one rank one."""


class Node(NamedTuple):
    """Where ranks of a node get their plans."""

    ranks: list[int]
    """Of the node; the first one's planner serves all of them."""
    name: bytes
    """Of its socket, which is in no folder: where processes are killed, nothing is left of it."""
    listener: socket.socket | None
    """Of the first rank."""


def find_node(host_group: HostGroup) -> Node | None:
    """All ranks call it together. None where a rank is alone on its node."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # Linux finds a name
    listener.listen()
    here = Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/net").st_ino
    found = host_group.gather((here, listener.getsockname()))
    ranks = [rank for rank, (of, _) in enumerate(found) if of == here]
    first = host_group.rank == ranks[0] and len(ranks) > 1
    if not first:
        listener.close()
    return Node(ranks, found[ranks[0]][1], listener if first else None) if len(ranks) > 1 else None


def planned(mixture: Mixture, steps: int, node: Node | None = None) -> Plans:
    """The mixture's next steps, drawn by a process that is ahead as far as its pipes take plans: a new window of the
    order may take longer than a step."""
    planner, listener = None, node and node.listener
    if node is None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        with contextlib.suppress(OSError):  # a user's pipes have a limit together
            fcntl.fcntl(theirs.fileno(), fcntl.F_SETPIPE_SZ, PLANS_BYTES)
    if node is None or listener:
        serve = partial(_ranks_of, node) if node else lambda: {mixture.rank: theirs}
        planner = multiprocessing.Process(target=_plan, args=(mixture, steps, serve), name="planner", daemon=True)
        with children_that_begin():
            planner.start()
        atexit.register(planner.kill)
        (listener or theirs).close()  # so that the planner's end is the pipe's
    if node:
        client = socket.socket(socket.AF_UNIX)
        client.connect(node.name)
        ours = Connection(client.detach())
        ours.send_bytes(str(mixture.rank).encode())
    return _received(planner, ours, steps, alone=node is None)


def _ranks_of(node: Node) -> dict[int, Connection]:
    """A connection with each rank of the node."""
    found: dict[int, Connection] = {}
    assert node.listener
    with node.listener as listener:
        while len(found) < len(node.ranks):
            client, _ = listener.accept()
            peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", peer)[1] == os.getuid():
                customer = Connection(client.detach())
                found[int(customer.recv_bytes())] = customer
    return found


def _received(planner: multiprocessing.Process | None, ours: Connection, steps: int, alone: bool) -> Plans:
    """planner: of this rank; alone: it serves nobody else."""
    left = steps
    try:
        while left:
            if planner and planner.exitcode:  # before its time: plans in the pipe are good, but the last
                raise EOFError
            plan = ours.recv()
            left -= 1
            yield plan
            if isinstance(plan, Failure):
                return
    except (EOFError, ConnectionResetError):
        how = "gone, which another rank of this node has"
        if planner:
            planner.join()
            code = planner.exitcode or 0
            how = f"killed by signal: {signal.strsignal(-code)}" if code < 0 else f"gone (exit code {code})"
        raise RuntimeError(f"the process that plans the steps is {how}") from None
    finally:
        if planner and (alone or left):
            atexit.unregister(planner.kill)
            planner.kill()
            planner.join()
        ours.close()


def _plan(mixture: Mixture, steps: int, serve: Callable[[], dict[int, Connection]]) -> None:
    name_process(f"xscale{mixture.rank}-plan")
    _leave_signals_to_parent()
    pipes = serve()

    def send(items: Sequence[StepPlan | Failure]) -> None:
        for (rank, pipe), item in zip([*pipes.items()], items, strict=True):
            try:
                pipe.send(item)
            except (BrokenPipeError, ConnectionResetError):  # this rank has ended
                del pipes[rank]

    try:
        for _ in range(steps):
            send(mixture.plans_of(mixture.next_cut(), [*pipes]))
    except (UserError, OSError) as error:
        send([Failure.of(error)] * len(pipes))


def _unwrap(batch: "StepBatch | Failure") -> StepBatch:
    if isinstance(batch, Failure):
        raise batch.error()
    return batch


class _Plans:
    """An iterator in the clothes of a sampler."""

    def __init__(self, plans: Plans):
        self.plans = plans

    def __iter__(self) -> Plans:
        return self.plans


def _same(batch: Any) -> Any:
    return batch


def _begin_worker(rank: int, worker: int) -> None:
    name_process(f"xscale{rank}-load{worker}")
    _leave_signals_to_parent()


def _leave_signals_to_parent() -> None:
    """A worker inherits the trainer's handlers; the trainer alone decides when to stop, and a worker ends with it."""
    with contextlib.suppress(OSError, AttributeError):
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"


CHARACTERS = 64
"""A text is looked at as far as so many characters for each token that a sequence may have."""
CALIBRATION_DRAWN, CALIBRATION_READ, CALIBRATION_BEYOND, CALIBRATION_GROUP = 2048, 512, 64, 8
"""Of each stream, the first samples in its order: of whose records the bytes are looked up before step 1, how many of
these are tokenised, at most, how many of those that are over max_length, and how many are counted together."""

CALIBRATION_SHARDS, LINE_SHARDS, LINE_RECORDS = 256, 4, 1024
"""Shards that are looked into before step 1, of all sources together, but so many of each at least. And of one shard of
each source together, records that tell how tokens follow from bytes, from 8 to 32 of each, of 8 shards at most."""


def alone(works: list[Callable[[], Any]]) -> list[Any]:
    """What each makes. Ranks share them out (ranks.Control.share)."""
    return [work() for work in works]


def calibrate(
    specs: list[StreamSpec],
    sources: list[Source],
    dataset: StepDataset,
    *,
    seed: int,
    alpha: float,
    max_length: int,
    share: Callable[[list[Callable[[], Any]]], list[Any]] = alone,
) -> Calibration:
    """How the tokens of each stream's samples compare with what their bytes promise. The same on every machine, and
    however it is shared out."""
    tokenizer, number = dataset.context.tokenizer, len(sources)
    shards = max(CALIBRATION_SHARDS // number, LINE_SHARDS)
    sources = [source.spread(shards) for source in sources]
    dataset = copy.copy(dataset)
    dataset.sources = sources
    sample = min(max(LINE_RECORDS // number, 8), 32)
    lines = share([partial(tokens_of_lengths, source, tokenizer, min(shards, 8), sample) for source in sources])
    found = Calibration([slope for slope, _ in lines], {}, lines)

    def measure(spec: StreamSpec) -> Estimate:
        many = replace(spec, samples=CALIBRATION_DRAWN)
        mixture = Mixture(
            [many], sources, found, seed=seed, alpha=alpha, max_length=max_length,
            max_tokens=1 << 40, rank=0, world=1, state=initial_state([many]),
        )  # fmt: skip
        draw = mixture.draw()[0][spec.name].all()
        estimated_tokens = np.bincount(draw.sample, weights=draw.tokens)
        longest = math.inf if spec.packed else max_length  # running text is neither dropped nor cut
        groups = like_samples(estimated_tokens, longest)
        rows = [{spec.name: draw.at(np.flatnonzero(np.isin(draw.sample, group)))} for group in groups]
        stream_batches = [
            stream_batch
            for stream_batch, _ in dataset.stream_batches(spec.name, StepPlan(0, rows, {}, rank=0, world=1))
        ]
        lengths, too_long = (
            [p.sequences.lengths for p in stream_batches],
            np.array([p.too_long for p in stream_batches]),
        )
        counts = dict(sum((Counter(stream_batch.targets) for stream_batch in stream_batches), Counter()))
        return replace(estimate(estimated_tokens, groups, lengths, longest, too_long), counts=counts)

    measured = share([partial(measure, spec) for spec in specs])
    return replace(found, streams={spec.name: of for spec, of in zip(specs, measured, strict=True)})


def like_samples(estimated_tokens: np.ndarray, max_length: float) -> list[np.ndarray]:
    """Groups of samples that are promised about the same, and single ones of those promised over max_length."""
    shortest_first = np.argsort(estimated_tokens, kind="stable")
    within, beyond = np.split(shortest_first, [int((estimated_tokens <= max_length).sum())])
    some = within[:: CALIBRATION_DRAWN // CALIBRATION_READ]
    alone = beyond[:: -(-len(beyond) // CALIBRATION_BEYOND) or 1]
    groups = np.split(some, range(CALIBRATION_GROUP, len(some), CALIBRATION_GROUP)) if len(some) else []
    return [*groups, *np.split(alone, len(alone))] if len(alone) else groups


def tokens_of_lengths(source: Source, tokenizer: Tokenizer, shards: int = 8, sample: int = 32) -> tuple[float, float]:
    """(a, b): a record has about a * bytes + b tokens, by `sample` records of each of `shards` shards."""
    chosen = np.unique(np.linspace(0, len(source.counts) - 1, shards).round().astype(int))
    places = [
        (shard, np.unique(np.linspace(0, source.counts[shard] - 1, sample).round().astype(int)))
        for shard in chosen.tolist()
    ]
    texts = [source.read(shard, record).texts for shard, records in places for record in records.tolist()]
    ids = iter(tokenizer.encode([text for of_record in texts for text in of_record]))
    tokens = np.array([sum(len(next(ids)) + 1 for _ in of_record) for of_record in texts], dtype=float)
    lengths = np.concatenate([source.lengths(*place) for place in places]).astype(float)
    return line(lengths, tokens)


def source_statistics(source: Source, tokenizer: Tokenizer, sample: int = 512) -> float:
    """Tokens per stored byte of a source, from its first records. The same on every machine."""
    n = min(sample, int(source.counts[0]))
    records = [source.read(0, i) for i in range(n)]
    stored = int(source.lengths(0, np.arange(n)).sum())
    return tokenizer.tokens_per_byte([text for record in records for text in record.texts], stored)


def within(languages: list[str], langs: tuple[str, ...]) -> bool:
    """Whether a stream's `languages` name this language or pair: as "en-de", either way round, or each by itself."""
    return not names_of(langs).isdisjoint(languages) or set(langs) <= set(languages)


def names_of(langs: tuple[str, ...]) -> set[str]:
    """Of a language or a pair: "en-de" and "de-en"."""
    return {"-".join(langs), "-".join(langs[::-1])}


def select_sources(stream: str, reads: str, languages: list[str] | None, sources: list[Source]) -> tuple[int, ...]:
    """Sources that a stream draws from. Raises UserError where there is none, or a language has none."""
    fitting = [i for i, source in enumerate(sources) if source.kind == reads]
    available = sorted({sources[i].pair for i in fitting})
    if languages is not None:
        chosen = [i for i in fitting if within(languages, sources[i].langs)]
        covered = {name for i in chosen for name in {*names_of(sources[i].langs), *sources[i].langs}}
        absent = [language for language in languages if language not in covered]
        if absent:
            raise UserError(
                f"streams.{stream}.languages: no {reads} data for {', '.join(absent)}; --data has "
                f"{', '.join(available) or 'none'}. Add a shard directory or take the language out"
            )
        fitting = chosen
    if not fitting:
        kinds = ", ".join(f"{source.pair} ({source.kind})" for source in sources)
        raise UserError(
            f"streams.{stream} reads {reads} records, --data has only: {kinds}. Add a directory written by "
            f"`python -m data_tools.write_shards {'pairs' if reads == 'pair' else 'mono'}`"
        )
    return tuple(fitting)
