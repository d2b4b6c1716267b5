"""The loader: worker processes read, tokenise and collate samples, and pack them into rows. Each plan becomes one
StepBatch.

A planner process makes plans ahead of time (planner.py). A batch carries the mixture's state after its step. So the
state that is saved at step t describes what was consumed up to step t, whatever was prefetched.
"""

import atexit
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import DataLoader, Dataset

from xscale import rng
from xscale.data.calibration import Calibration
from xscale.data.corpus import Corpus
from xscale.data.forks import children_that_begin
from xscale.data.mixture import Mixture, Plan, PlanTable
from xscale.data.packed_row import Row, pack_row
from xscale.data.planner import Failure, Node, Plans, failure_of, find_node, leave_signals_to_parent, start_planner
from xscale.data.sequences import Example
from xscale.data.shards import Source, pair_name
from xscale.data.stream import Stream
from xscale.data.stream_batch import CollateContext, StreamBatch, check_stream_batch
from xscale.data.words import TokenWords, stands_alone
from xscale.errors import UserError, adding_note
from xscale.metric_keys import Counts, MetricKey
from xscale.ranks import HostGroup, Process, name_process
from xscale.recipe import DataConfig, Recipe, Schedule
from xscale.record import Record

Key = TypeVar("Key")
CHARACTERS = 64
"""The maximum number of characters of a text that are tokenised, per token of data.max_length; see `shortened`."""
CPU_TOKENS, GPU_TOKENS = 8192, 65536
"""The default of train.max_tokens on a CPU, a row that fits into its caches, and the highest default on a GPU, a row
that takes the GPU much longer than its host."""
SWEPT = 0.25
"""If the ranks of a node read at least this share of each step, they ask the operating system to read whole shards
ahead."""


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
        """Return the counts of this rank, without those by language."""
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
    """Makes the StepBatch of a rank's part of a plan. Forked workers inherit the object, so it holds no open files."""

    def __init__(
        self,
        sources: list[Source],
        streams: Schedule[Sequence[Stream]],
        contexts: Schedule[CollateContext],
        seed: int,
    ):
        """contexts: the values that all streams of a step share."""
        self.sources = sources
        self.streams = streams
        self.contexts = contexts
        self.seed = seed
        source_keys = [rng.key(source.name, source.fingerprint) for source in sources]
        self.source_keys = np.array(source_keys, dtype=np.uint64)

    def __getitem__(self, plan: Plan | Failure) -> StepBatch | Failure:
        if isinstance(plan, Failure):
            return plan
        context = self.contexts.at(plan.step)
        stream_batches = dict[str, list[StreamBatch]]()
        groups = dict[str, tuple[str, ...]]()
        try:
            for stream in self.streams.at(plan.step):
                groups[stream.name] = stream.language_groups
                stream_batches[stream.name] = self.stream_batches(stream, plan)
        except (UserError, OSError) as error:
            # If the error were raised here, DataLoader would wrap it and lose errno and file.
            return failure_of(error, f"step {plan.step}: ")
        rows = list[Row]()
        for number in range(plan.rows):
            of_row = {name: batches[number] for name, batches in stream_batches.items()}
            rows.append(pack_row(of_row, context.tokenizer.sep_id, language_groups=groups))
        return StepBatch(plan.step, rows, plan.state)

    def stream_batches(self, stream: Stream, plan: Plan) -> list[StreamBatch]:
        """Return the stream batch of each row. The records of all rows are tokenised together."""
        shared = self.context_of(stream, plan.step, plan.rows * plan.world)
        examples = self.examples(stream, plan.tables[stream.name], shared)
        stream_batches = list[StreamBatch]()
        for row, count in enumerate(plan.records_of_rows(stream.name)):
            of_row = list(islice(examples, count))
            samples = list[list[Example]]()
            for _, sample in groupby(of_row, key=lambda example: example.number):
                samples.append(list(sample))
            context = replace(shared, row=row * plan.world + plan.rank)
            with adding_note(f"streams.{stream.name}, objective {stream.objective_name}: collate"):
                stream_batch = stream.objective.collate(samples, stream.options, context)
                check_stream_batch(stream_batch, stream.objective.terms(stream.options).keys())
            too_long = 0
            keys = list[str]()
            for example in of_row:
                too_long += int(is_too_long(example, context))
                keys.append(example.key)
            counts = count_pairs(stream.name, of_row, context)
            stream_batches.append(replace(stream_batch, too_long=too_long, pair_counts=counts, keys=keys))
        return stream_batches

    def context_of(self, stream: Stream, step: int = 0, rows: int = 1) -> CollateContext:
        """Return the context of a stream's collate function. rows: the number of packed rows of all ranks."""
        return replace(
            self.contexts.at(step),
            stream=stream.name,
            step=step,
            rows=rows,
            lexicons=stream.lexicons,
            language_groups=stream.language_groups,
        )

    def examples(self, stream: Stream, table: PlanTable, context: CollateContext) -> Iterator[Example]:
        """Tokenise the records together, and yield their examples."""
        words_wanted = stream.objective.words(stream.options)
        places = list(zip(table.source.tolist(), table.shard.tolist(), table.record.tolist(), strict=True))
        records = list[Record]()
        texts = list[str]()
        for source, shard, number in places:
            record = self.sources[source].read(shard, number)
            if len(record.texts) == 2:
                record = shortened(record, words_wanted, context)
            records.append(record)
            texts += record.texts
        pairs = bool(records) and len(records[0].texts) == 2
        follows = self.continues_document(table).tolist()
        if context.tokenizer.keeps_space and not pairs:
            for number, text in enumerate(texts):
                if follows[number] and not stands_alone(text):
                    texts[number] = " " + text
        words: list[TokenWords] | None = None
        if words_wanted:
            for number, (source, _, _) in enumerate(places):
                records[number] = self.sources[source].with_words(records[number])
            ids, words = context.tokenizer.encode_words(texts)
        else:
            ids = context.tokenizer.encode(texts)
        borders = {} if pairs else borders_of_long_texts(texts, ids, context)
        identities = self.identities(stream.name, table)
        samples = table.sample.tolist()
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

    def continues_document(self, table: PlanTable) -> np.ndarray:
        """Return True for each record that continues the document of the record before it in its sample."""
        follows = np.zeros(len(table.sample), dtype=bool)
        follows[1:] = table.record[1:] == table.record[:-1] + 1
        for column in (table.sample, table.source, table.shard):
            follows[1:] &= column[1:] == column[:-1]
        for number in np.flatnonzero(follows).tolist():
            source = self.sources[table.source[number]]
            follows[number] = source.continues_document(int(table.shard[number]), int(table.record[number]))
        return follows

    def identities(self, stream: str, table: PlanTable) -> np.ndarray:
        """Return the key of all random choices about each record in this stream and epoch, uint64 [n_records]."""
        per_stream = rng.key(self.seed, stream, "record")
        per_source = rng.hash64(per_stream ^ self.source_keys[table.source], table.epoch)
        number = (table.shard.astype(np.uint64) << np.uint64(40)) + table.record.astype(np.uint64)
        return rng.hash64(per_source, number)


def is_too_long(example: Example, context: CollateContext) -> bool:
    """Return True for a pair of more than data.max_length tokens."""
    room = context.max_length - context.tokenizer.pair.special
    return len(example.ids) == 2 and sum(map(len, example.ids)) > room


def count_pairs(stream: str, examples: list[Example], context: CollateContext) -> Counts:
    """Return StreamBatch.pair_counts of the examples of a row."""
    pairs = [name for name in context.language_groups if name not in context.language_ids]
    counts: Counts = {}
    for pair in pairs:
        counts[MetricKey("drawn", stream, language=pair)] = 0
        counts[MetricKey("too_long", stream, language=pair)] = 0
    for example in examples if pairs else ():
        pair = pair_name(example.langs)
        counts[MetricKey("drawn", stream, language=pair)] += 1
        counts[MetricKey("too_long", stream, language=pair)] += is_too_long(example, context)
    return counts


def shortened(pair: Record, words: bool, context: CollateContext) -> Record:
    """Return the pair with its texts cut to CHARACTERS * max_length characters, to save time in tokenisation. words:
    whether the stream needs the pair's words; if so, a pair is cut only if data.overlong will drop it."""
    limit = CHARACTERS * context.max_length
    if max(map(len, pair.texts)) <= limit or (words and context.overlong != "drop"):
        return pair
    first, second = pair.texts
    cut = pair._replace(texts=(first[:limit], second[:limit]))
    return cut._replace(links="") if words else cut


def borders_of_long_texts(texts: list[str], ids: list[list[int]], context: CollateContext) -> dict[int, list[int]]:
    """Return, for each text that is longer than a sequence, the tokens before which it may be cut, by the text's
    index."""
    borders = dict[int, list[int]]()
    for number, tokens in enumerate(ids):
        if len(tokens) > context.max_length - 2:
            _, words = context.tokenizer.encode_words([texts[number]])
            borders[number] = words[0].borders()
    return borders


def collate_context(corpus: Corpus, data: DataConfig, seed: int) -> CollateContext:
    """Return the values that all streams of a step share. data: the section `data` of the recipe in the step's
    phase."""
    return CollateContext(
        corpus.tokenizer, data.max_length, data.overlong, corpus.language_ids, seed, segments=corpus.segments
    )


@dataclass(frozen=True)
class Loader:
    """Makes the batches of a run."""

    recipe: Recipe
    corpus: Corpus
    calibration: Calibration
    gpu_tokens: int = GPU_TOKENS
    """The default of train.max_tokens on the GPUs of this run, by their memory (run/resolve.py row_limit). It is the
    same on all ranks."""

    @property
    def streams(self) -> Sequence[Stream]:
        """The streams after the last phase."""
        return self.corpus.streams.last

    def max_tokens(self, device: str) -> int:
        """Return the maximum number of tokens of a packed row; a row of data.max_length tokens is always allowed."""
        if self.recipe.train.max_tokens:
            return self.recipe.train.max_tokens
        default = self.gpu_tokens if device == "cuda" else CPU_TOKENS
        return max(default, self.recipe.data.max_length)

    def mixture(self, process: Process, device: str, state: dict[str, Any]) -> Mixture:
        """Return the mixture of the run, which continues from this state."""
        recipes = self.recipe.schedule
        return Mixture(
            self.corpus.streams,
            recipes.map(lambda recipe: recipe.data),
            self.calibration.schedule(recipes.ends),
            self.corpus.sources,
            seed=self.recipe.train.seed,
            max_tokens=self.max_tokens(device),
            rank=process.rank,
            world=process.world,
            state=state,
        )

    def dataset(self) -> StepDataset:
        seed = self.recipe.train.seed
        contexts = self.recipe.schedule.map(lambda recipe: collate_context(self.corpus, recipe.data, seed))
        return StepDataset(self.corpus.sources, self.corpus.streams, contexts, seed)

    def plans(
        self, process: Process, device: str, state: dict[str, Any], steps: int, host_group: HostGroup | None = None
    ) -> Plans:
        """Return the plans of the next steps, which `batches` reads. If there are workers, a process makes the plans
        ahead of time. With `host_group`, there is one such process on each node, and all ranks must call this
        together."""
        for source in self.corpus.sources:
            source.close()  # the next read opens the files again
            source.readahead = process.local_world / process.world >= SWEPT
        workers = worker_count(self.recipe.data.workers, process, device)
        node = find_node(host_group) if host_group and self.recipe.data.workers != 0 else None
        return step_plans(self.mixture(process, device, state), workers, steps, node)

    def batches(
        self, process: Process, device: str, state: dict[str, Any], steps: int, plans: Plans | None = None
    ) -> Iterator[StepBatch]:
        """Return an iterator over this rank's share of each step. state: the positions of the streams in their data.
        plans: the result of `plans`, if `plans` was called before."""
        plans = plans or self.plans(process, device, state, steps)
        workers = worker_count(self.recipe.data.workers, process, device)
        return batches_of(plans, self.dataset(), workers, process.rank)


def worker_count(wanted: int | str, process: Process, device: str) -> int:
    """Return a rank's number of loader workers. wanted: data.workers; "auto": 2 on a CPU, 4 to 6 for a GPU."""
    if wanted != "auto":
        return int(wanted)
    cores = len(os.sched_getaffinity(0))
    if cores == os.cpu_count():  # otherwise the launcher has given each rank its own cores
        cores //= process.local_world
    return 2 if device == "cpu" else min(max(cores - 2, 4), 6)


def step_plans(mixture: Mixture, workers: int, steps: int, node: Node | None = None) -> Plans:
    """Return the plans of the mixture's next steps. With workers, a planner process makes the plans."""
    if workers:
        return start_planner(mixture, steps, node)
    return (mixture.next_part() for _ in range(steps))


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
    # Workers ignore SIGTERM, so a parent that terminates them would wait for ever.
    for worker in getattr(started, "_workers", ()):
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
