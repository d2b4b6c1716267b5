"""The loader: worker processes read, tokenise and collate samples and pack them into rows, one StepBatch per plan.

A planner process makes plans ahead of time (planner.py). A batch carries the mixture's state after its step, so that
the state saved at step t describes what was consumed up to step t, whatever was prefetched.
"""

import atexit
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import DataLoader, Dataset

from xscale import rng
from xscale.data.forks import children_that_begin
from xscale.data.mixture import Mixture, SampledRecords, StepPlan, join_records
from xscale.data.packed_row import Row, pack_row
from xscale.data.planner import Failure, Node, Plans, failure_of, leave_signals_to_parent, start_planner
from xscale.data.sequences import Example
from xscale.data.shards import Source, pair_name
from xscale.data.stream_batch import CollateContext, StreamBatch, check_stream_batch
from xscale.data.words import TokenWords, stands_alone
from xscale.errors import UserError, adding_note
from xscale.metric_keys import Counts, MetricKey
from xscale.ranks import Process, name_process
from xscale.record import Record

Key = TypeVar("Key")
CHARACTERS = 64
"""The maximum number of characters of a text that are tokenised, per token of data.max_length; see `shortened`."""


@dataclass(frozen=True)
class StreamObjective:
    """The objective of a stream, whose `collate` makes the stream's batches."""

    objective: Any
    """The Objective (objectives/base.py)."""
    options: Any
    name: str = ""
    """Name of the objective in error messages."""
    lexicons: tuple[Any, ...] = ()
    """The stream's dictionaries (data/lexicon.py), without the withheld words."""
    language_groups: tuple[str, ...] = ()
    """Languages and pairs whose losses are reported separately."""


@dataclass(frozen=True)
class StepBatch:
    """The data of one rank for one optimizer step."""

    step: int
    rows: list[Row]
    state: dict[str, Any]

    def samples(self) -> int:
        return sum(row.samples for row in self.rows)

    def counts(self) -> Counts:
        """Return the counts of this rank, see Row.counts."""
        counts: Counts = {}
        for row in self.rows:
            add_counts(counts, row.counts)
        return counts

    def targets(self) -> Counts:
        """Return the counts of this rank that are not of a single language."""
        return {key: count for key, count in self.counts().items() if not key.language}

    def language_counts(self) -> Counts:
        return {key: count for key, count in self.counts().items() if key.language}

    def auxiliary_vector_counts(self) -> dict[str, int]:
        """Return the number of vectors that the auxiliary encoder of each stream computes, by stream."""
        return {
            stream: sum(row.auxiliary[stream].gather.size for row in self.rows) for stream in self.rows[0].auxiliary
        }

    def cost(self) -> dict[str, int]:
        cost = dict[str, int]()
        for row in self.rows:
            add_counts(cost, row.cost)
        return cost

    def keys(self) -> dict[str, list[str]]:
        """Return the keys of the records of each stream, in the order of consumption."""
        keys: dict[str, list[str]] = {}
        for row in self.rows:
            for stream, row_keys in row.keys.items():
                keys.setdefault(stream, []).extend(row_keys)
        return keys


def add_counts(total: dict[Key, int], counts: Mapping[Key, int]) -> None:
    """Add the counts to `total`, in place."""
    for key, count in counts.items():
        total[key] = total.get(key, 0) + count


class StepDataset(Dataset):
    """Maps a StepPlan to its StepBatch. Forked workers inherit it, so it carries no open files."""

    def __init__(
        self,
        sources: list[Source],
        streams: dict[str, StreamObjective],
        context: CollateContext,
        seed: int,
    ):
        self.sources = sources
        self.streams = streams
        self.context = context
        self.seed = seed
        self.phases: list[tuple[int, StepDataset]] = []
        """The data sets of earlier phases. Each number is that of the first step (from 0) after the phase."""
        source_keys = [rng.key(source.name, source.fingerprint) for source in sources]
        self.source_keys = np.array(source_keys, dtype=np.uint64)

    def __getitem__(self, plan: StepPlan | Failure) -> StepBatch | Failure:
        if isinstance(plan, Failure):
            return plan
        phase = next((phase for end, phase in self.phases if plan.step < end), self)
        try:
            stream_batches = {name: phase.stream_batches(name, plan) for name in plan.rows[0]}
        except (UserError, OSError) as error:  # not raised: DataLoader would wrap it and lose errno and file
            return failure_of(error, f"step {plan.step}: ")
        groups = {name: stream.language_groups for name, stream in phase.streams.items()}
        rows = []
        for row in range(len(plan.rows)):
            of_row = {name: of_rows[row] for name, of_rows in stream_batches.items()}
            rows.append(pack_row(of_row, phase.context.tokenizer.sep_id, language_groups=groups))
        return StepBatch(plan.step, rows, plan.state)

    def stream_batches(self, stream: str, plan: StepPlan) -> list[StreamBatch]:
        """Return the stream batch of each row. The records of all rows are tokenised together."""
        how = self.streams[stream]
        rows = [row[stream] for row in plan.rows]
        examples = self._examples(stream, rows)
        stream_batches = list[StreamBatch]()
        for row, records in enumerate(rows):
            of_row = list(islice(examples, len(records.sample)))
            samples = [list(group) for _, group in groupby(of_row, key=lambda example: example.number)]
            place = {"step": plan.step, "row": row * plan.world + plan.rank, "rows": len(rows) * plan.world}
            with adding_note(f"streams.{stream}, objective {how.name}: collate"):
                stream_batch = how.objective.collate(samples, how.options, self.context_of(stream, **place))
                check_stream_batch(stream_batch, how.objective.terms(how.options).keys())
            stream_batches.append(
                replace(
                    stream_batch,
                    too_long=sum(map(self.is_too_long, of_row)),
                    pair_counts=self.count_pairs(stream, of_row),
                    keys=[example.key for example in of_row],
                )
            )
        return stream_batches

    def context_of(self, stream: str, **place: Any) -> CollateContext:
        how = self.streams[stream]
        return replace(self.context, stream=stream, **place, lexicons=how.lexicons, language_groups=how.language_groups)

    def count_pairs(self, stream: str, examples: list[Example]) -> Counts:
        pairs = [name for name in self.streams[stream].language_groups if name not in self.context.language_ids]
        counts: Counts = {}
        for pair in pairs:
            counts[MetricKey("drawn", stream, language=pair)] = 0
            counts[MetricKey("too_long", stream, language=pair)] = 0
        for example in examples if pairs else ():
            pair = pair_name(example.langs)
            counts[MetricKey("drawn", stream, language=pair)] += 1
            counts[MetricKey("too_long", stream, language=pair)] += self.is_too_long(example)
        return counts

    def is_too_long(self, example: Example) -> bool:
        """Return True for a pair of more than data.max_length tokens."""
        room = self.context.max_length - self.context.tokenizer.pair.special
        return len(example.ids) == 2 and sum(map(len, example.ids)) > room

    def _examples(self, stream: str, rows: list[SampledRecords]) -> Iterator[Example]:
        sampled = join_records(rows)
        objective = self.streams[stream].objective
        words_wanted = objective.words(self.streams[stream].options)
        places = list(zip(sampled.source.tolist(), sampled.shard.tolist(), sampled.record.tolist(), strict=True))
        records = [self.sources[source].read(shard, record) for source, shard, record in places]
        pairs = bool(records) and len(records[0].texts) == 2
        if pairs:
            records = [self.shortened(record, words_wanted) for record in records]
        texts = list(chain.from_iterable(record.texts for record in records))
        follows = self.continues_document(sampled).tolist()
        if self.context.tokenizer.keeps_space and not pairs:
            for number, text in enumerate(texts):
                if follows[number] and not stands_alone(text):
                    texts[number] = " " + text
        words: list[TokenWords] | None = None
        if words_wanted:
            for number, (source, _, _) in enumerate(places):
                records[number] = self.sources[source].with_words(records[number])
            ids, words = self.context.tokenizer.encode_words(texts)
        else:
            ids = self.context.tokenizer.encode(texts)
        borders = {} if pairs else self.borders(texts, ids)
        identities = self.identities(stream, sampled)
        samples = sampled.sample.tolist()
        start = 0
        for number, record in enumerate(records):
            end = start + len(record.texts)
            yield Example(
                record.langs,
                tuple(ids[start:end]),
                tuple(words[start:end]) if words else None,
                identities[number],
                samples[number],
                record.key,
                record.links,
                follows[number],
                borders.get(start, ()),
            )
            start = end

    def shortened(self, pair: Record, words: bool) -> Record:
        """Return the pair, with texts cut to CHARACTERS * max_length characters to save time in tokenisation. words:
        whether the stream needs the pair's words; then it is cut only if data.overlong drops it later."""
        limit = CHARACTERS * self.context.max_length
        if max(map(len, pair.texts)) <= limit or (words and self.context.overlong != "drop"):
            return pair
        return pair._replace(texts=tuple(text[:limit] for text in pair.texts), links="" if words else pair.links)

    def borders(self, texts: list[str], ids: list[list[int]]) -> dict[int, list[int]]:
        """Return the tokens before which a text may be cut, by the text's index, for texts longer than a sequence."""
        long = [i for i, tokens in enumerate(ids) if len(tokens) > self.context.max_length - 2]
        if not long:
            return {}
        _, words = self.context.tokenizer.encode_words([texts[i] for i in long])
        return dict(zip(long, [text_words.borders() for text_words in words], strict=True))

    def continues_document(self, records: SampledRecords) -> np.ndarray:
        """Return True for each record that continues the document of the record before it in its sample."""
        follows = np.zeros(len(records.sample), dtype=bool)
        follows[1:] = records.record[1:] == records.record[:-1] + 1
        for column in (records.sample, records.source, records.shard):
            follows[1:] &= column[1:] == column[:-1]
        for number in np.flatnonzero(follows).tolist():
            source = self.sources[records.source[number]]
            follows[number] = source.continues_document(int(records.shard[number]), int(records.record[number]))
        return follows

    def identities(self, stream: str, records: SampledRecords) -> np.ndarray:
        """Return the key of all random choices about each record in this stream and epoch, uint64 [n_records]."""
        per_stream = rng.key(self.seed, stream, "record")
        per_source = rng.hash64(per_stream ^ self.source_keys[records.source], records.epoch)
        number = (records.shard.astype(np.uint64) << np.uint64(40)) + records.record.astype(np.uint64)
        return rng.hash64(per_source, number)


def worker_count(wanted: int | str, process: Process, device: str) -> int:
    """Return a rank's number of loader workers. wanted: data.workers; "auto": 2 on a CPU, 4 to 6 for a GPU."""
    if wanted != "auto":
        return int(wanted)
    cores = len(os.sched_getaffinity(0))
    if cores == os.cpu_count():  # else the launcher has bound the rank to cores of its own
        cores //= process.local_world
    return 2 if device == "cpu" else min(max(cores - 2, 4), 6)


def step_plans(mixture: Mixture, workers: int, steps: int, node: Node | None = None) -> Plans:
    """Return the plans of the mixture's next steps. With workers, a planner process makes the plans."""
    return start_planner(mixture, steps, node) if workers else (mixture.next_step() for _ in range(steps))


def batches_of(plans: Plans, dataset: StepDataset, workers: int, rank: int) -> Iterator[StepBatch]:
    """Return the batches of these plans. The call starts `workers` worker processes and waits for the first plans; with
    0 workers, all work is in this process."""
    loader: DataLoader = DataLoader(
        dataset,
        sampler=plans,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        collate_fn=lambda batch: batch,
        worker_init_fn=partial(_begin_worker, rank),
    )
    with children_that_begin():
        started = iter(loader)
    for worker in getattr(started, "_workers", ()):  # workers ignore SIGTERM: whoever ends them would wait for ever
        worker.terminate = worker.kill
        atexit.register(worker.kill)
    return map(_raise_failure, started)


def _raise_failure(batch: StepBatch | Failure) -> StepBatch:
    if isinstance(batch, Failure):
        raise batch
    return batch


def _begin_worker(rank: int, worker: int) -> None:
    name_process(f"xscale{rank}-load{worker}")
    leave_signals_to_parent()
