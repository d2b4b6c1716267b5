"""Steps, made by worker processes: read, tokenise, collate.

The main process draws plans (cheap, numpy), workers turn each into a StepBatch, in order. A batch carries the
mixture's state after it, so the state saved with step t is what step t consumed, whatever was prefetched.
"""

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from xscale import rng
from xscale.data.collate import Context, MicroBatch, Share
from xscale.data.encode import Example, Words
from xscale.data.index import Source
from xscale.data.mixture import Draw, Mixture, StepPlan, StreamSpec
from xscale.errors import RankError, UserError

Collate = Callable[[list[list[Example]], Any, Context], MicroBatch]
"""(samples, options of the stream, context) -> micro-batch; a sample is a list of one or more examples."""


@dataclass(frozen=True)
class StreamCollate:
    """How a stream's records become micro-batches."""

    collate: Collate
    options: Any
    words: Words | None = None
    """Whose word numbers the examples carry."""


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of one rank."""

    step: int
    micros: list[MicroBatch]
    state: dict[str, Any]

    def total(self, field: str) -> int:
        return sum(getattr(micro, field) for micro in self.micros)

    def targets(self) -> dict[tuple[str, str], int]:
        """Targets on this rank of each (stream, term)."""
        counts: dict[tuple[str, str], int] = {}
        for micro in self.micros:
            for term, n in micro.targets.items():
                counts[micro.stream, term] = counts.get((micro.stream, term), 0) + n
        return counts

    def keys(self) -> dict[str, list[str]]:
        """Keys of the records of each stream, in the order of consumption."""
        keys: dict[str, list[str]] = {}
        for micro in self.micros:
            keys.setdefault(micro.stream, []).extend(micro.keys)
        return keys


class StepDataset(Dataset):
    """Indexed by StepPlans. Pickles to a worker without open files."""

    def __init__(self, sources: list[Source], streams: dict[str, StreamCollate], context: Context, seed: int):
        self.sources, self.streams, self.context, self.seed = sources, streams, context, seed
        self.source_keys = np.array([rng.key(s.name, s.fingerprint) for s in sources], dtype=np.uint64)

    def __getitem__(self, plan: StepPlan) -> "StepBatch | Failure":
        try:
            micros = [m for name in plan.micros for m in self._stream(name, plan)]
            return StepBatch(plan.step, micros, plan.state)
        except UserError as error:  # crosses the process boundary as a value: DataLoader would wrap it in a traceback
            return Failure(f"step {plan.step}: {error}")

    def _stream(self, name: str, plan: StepPlan) -> Iterator[MicroBatch]:
        stream, draws = self.streams[name], plan.micros[name]
        places = [zip(d.source.tolist(), d.shard.tolist(), d.record.tolist(), strict=True) for d in draws]
        records = [[self.sources[s].read(shard, record) for s, shard, record in place] for place in places]
        texts = [text for micro in records for record in micro for text in record.texts]
        words: list[list[int]] | None = None
        if stream.words:
            ids, words = self.context.encoder.encode_words(texts, stream.words)
        else:
            ids = self.context.encoder.encode(texts)
        at = 0
        for step, (draw, micro) in enumerate(zip(draws, records, strict=True)):
            identities = self.identities(name, draw)
            samples: list[list[Example]] = []
            last = -1
            for record, identity, sample in zip(micro, identities, draw.sample.tolist(), strict=True):
                end = at + len(record.texts)
                example = Example(
                    record.langs,
                    tuple(ids[at:end]),
                    tuple(words[at:end]) if words else None,
                    identity,
                    sample,
                    record.key,
                    record.links,
                    tuple(len(text.split()) for text in record.texts) if stream.words == "whitespace" else None,
                )
                at = end
                if sample != last:
                    samples.append([])
                    last = sample
                samples[-1].append(example)
            share = Share(plan.step, step * plan.world + plan.rank, len(draws) * plan.world)
            batch = stream.collate(samples, stream.options, replace(self.context, stream=name, share=share))
            yield replace(batch, stream=name, keys=[record.key for record in micro])

    def identities(self, stream: str, draw: Draw) -> np.ndarray:
        """uint64 key of each record in its epoch of the stream [n_records]."""
        per_stream = rng.key(self.seed, stream, "record")
        place = (draw.shard.astype(np.uint64) << np.uint64(40)) + draw.record.astype(np.uint64)
        per_source = rng.hash64(per_stream ^ self.source_keys[draw.source], draw.epoch)
        return rng.hash64(per_source, place)


@dataclass(frozen=True)
class Failure:
    """A UserError on its way from a worker to the main process."""

    message: str


def step_batches(mixture: Mixture, dataset: StepDataset, workers: int, steps: int) -> Iterator[StepBatch]:
    """The next `steps` StepBatches of the mixture, made by `workers` processes (0: by this one)."""
    allow_open_files()
    plans = (mixture.next_step() for _ in range(steps))
    loader: DataLoader = DataLoader(
        dataset,
        sampler=_Plans(plans),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        collate_fn=_same,
        worker_init_fn=_leave_signals_to_parent,
    )
    return map(_unwrap, iter(loader))  # workers start now


def _unwrap(batch: "StepBatch | Failure") -> StepBatch:
    if isinstance(batch, Failure):
        raise RankError(batch.message)
    return batch


class _Plans:
    """An iterator in the clothes of a sampler."""

    def __init__(self, plans: Iterator[StepPlan]):
        self.plans = plans

    def __iter__(self) -> Iterator[StepPlan]:
        return self.plans


def _same(batch: Any) -> Any:
    return batch


def _leave_signals_to_parent(worker: int) -> None:
    """A worker inherits the trainer's handlers; the trainer alone decides when to stop, and a worker ends with it."""
    with contextlib.suppress(OSError, AttributeError):
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    allow_open_files()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = "1"


def allow_open_files() -> None:
    """Each source keeps up to OPEN_SHARDS files open; the usual soft limit is 1,024 in all."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def source_statistics(source: Source, encoder: Any, sample: int = 512) -> float:
    """Tokens per stored byte of a source, from its first records. The same on every machine."""
    n = min(sample, source.shards[0].records)
    records = [source.read(0, i) for i in range(n)]
    stored = int(source.lengths(0, np.arange(n)).sum())
    return encoder.tokens_per_byte([text for record in records for text in record.texts], stored)


def select_sources(stream: str, reads: str, languages: list[str] | None, sources: list[Source]) -> tuple[int, ...]:
    """Sources that a stream draws from. Raises UserError where there is none, or a language has none."""
    fitting = [i for i, source in enumerate(sources) if source.kind == reads]
    available = sorted({sources[i].name for i in fitting})
    if languages is not None:

        def wanted(source: Source) -> bool:
            return source.name in languages or set(source.langs) <= set(languages)

        chosen = [i for i in fitting if wanted(sources[i])]
        covered = {sources[i].name for i in chosen} | {lang for i in chosen for lang in sources[i].langs}
        absent = [language for language in languages if language not in covered]
        if absent:
            raise UserError(
                f"streams.{stream}.languages: no {reads} data for {', '.join(absent)}; --data has "
                f"{', '.join(available) or 'none'}. Add a shard directory or take the language out"
            )
        fitting = chosen
    if not fitting:
        kinds = ", ".join(f"{source.name} ({source.kind})" for source in sources)
        raise UserError(
            f"streams.{stream} reads {reads} records, --data has only: {kinds}. Add a directory written by "
            f"`python -m data_tools.write_shards {'pairs' if reads == 'pair' else 'mono'}`"
        )
    return tuple(fitting)


def stream_specs(streams: Mapping[str, tuple[str, list[str] | None, int]], sources: list[Source]) -> list[StreamSpec]:
    """streams: {name: (reads, languages, samples)}."""
    return [
        StreamSpec(name, select_sources(name, reads, languages, sources), samples, packed=reads == "mono")
        for name, (reads, languages, samples) in streams.items()
    ]
