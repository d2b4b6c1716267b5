"""The loader: worker processes read, tokenise and collate the samples of a plan, and pack them into a StepBatch.

A planner process makes plans before they are needed (planner.py). Each batch has the mixture's state after its step. So
a checkpoint has the state of the steps that were trained, although later steps have been planned and read.
"""

import atexit
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from xscale import rng
from xscale.data.calibration import Calibration
from xscale.data.corpus import Corpus
from xscale.data.mixture import Mixture, Plan, PlanTable
from xscale.data.packed_row import Row, pack_row
from xscale.data.planner import (
    Failure,
    Plans,
    failure_or_raise_bug,
    gather_node_and_listen,
    ignore_signals_and_die_with_parent,
    retry_hung_forks,
    start_planner,
)
from xscale.data.sequences import Example
from xscale.data.shards import Source, sorted_pair_name
from xscale.data.stream import Stream
from xscale.data.stream_batch import CollateContext, StreamBatch, check_stream_batch
from xscale.data.words import TokenWords, begins_with_unspaced_script
from xscale.errors import UserError, adding_note_to_errors
from xscale.metric_keys import Counts, MetricKey
from xscale.ranks import CpuGroup, Process
from xscale.recipe import Recipe, Schedule
from xscale.record import Record

CHARACTERS = 64
"""The maximum number of characters of a text of a pair for each token of data.max_length. The rest is cut;
cut_texts_before_tokenization has the exception."""
CPU_TOKENS, GPU_TOKENS = 8192, 65536
"""The default of train.max_tokens on a CPU, and the highest default on a GPU. A CPU's caches have room for such a row.
A GPU computes such a row for much longer than its host needs to launch the kernels, so longer rows gain little."""
READAHEAD_SHARE = 0.25
"""If the ranks of a node read at least this share of each step, they read most of a shard soon after they have opened
it. So they request the whole shard from the file system when they open it."""


@dataclass(frozen=True)
class StepBatch:
    """The data of one rank for one optimizer step."""

    step: int
    """The number of the step, counted from 0."""
    rows: list[Row]
    state: dict[str, Any]
    """The mixture's state after the step."""
    record_keys: dict[str, list[str]] = field(default_factory=dict)
    """The keys of the records of each stream, in the order in which they are read."""

    def sample_count(self) -> int:
        return sum(row.samples for row in self.rows)

    def counts(self) -> Counts:
        """Return the sum of the rows' counts (Row.counts)."""
        counts = Counter[MetricKey]()
        for row in self.rows:
            counts.update(row.counts)
        return dict(counts)

    def counts_without_languages(self) -> Counts:
        """Return the counts of this rank, except those by language."""
        return {key: count for key, count in self.counts().items() if not key.language}

    def counts_by_language(self) -> Counts:
        """Return the counts of this rank by language."""
        return {key: count for key, count in self.counts().items() if key.language}

    def auxiliary_vector_counts(self) -> dict[str, int]:
        """Return the number of vectors that the auxiliary encoder of each stream computes, by stream."""
        counts = Counter[str]()
        for row in self.rows:
            for stream, auxiliary_row in row.auxiliary.items():
                counts[stream] += auxiliary_row.gather.state_count
        return dict(counts)

    def cost(self) -> dict[str, int]:
        """Return the sum of the rows' costs (Row.cost)."""
        cost = Counter[str]()
        for row in self.rows:
            cost.update(row.cost)
        return dict(cost)


class StepDataset(Dataset):
    """Makes StepBatches for torch's DataLoader: `dataset[plan]` is the StepBatch of a rank's part of a plan. DataLoader
    gets the plans as its sampler, in place of numbers. Forked workers inherit this object, so it has no open files."""

    def __init__(
        self,
        sources: list[Source],
        streams: Schedule[Sequence[Stream]],
        contexts: Schedule[CollateContext],
        readahead: bool = False,
    ):
        """streams, contexts: those of each step. A context has the values that all streams of a step share. readahead:
        see Source.read."""
        self.sources = sources
        self.streams = streams
        self.contexts = contexts
        self.readahead = readahead
        self.source_keys = np.array(
            [rng.key(source.langs_name, source.fingerprint) for source in sources], dtype=np.uint64
        )

    def __getitem__(self, plan: Plan | Failure) -> StepBatch | Failure:
        """Return this rank's StepBatch of a part of a plan. A failure of the planner is passed on, and an error that a
        user can mend becomes a failure."""
        if isinstance(plan, Failure):
            return plan
        context = self.contexts.at(plan.step)
        record_keys = dict[str, list[str]]()
        stream_batches = dict[str, list[StreamBatch]]()
        try:
            for stream in self.streams.at(plan.step):
                examples = self.read_and_tokenise(stream, plan)
                record_keys[stream.name] = [example.key for example in examples]
                stream_batches[stream.name] = self.collate_rows(stream, plan, examples)
        except (UserError, OSError) as error:
            # DataLoader would wrap a raised error, and lose its errno and file.
            return failure_or_raise_bug(error, f"step {plan.step + 1}: ")
        rows = list[Row]()
        for number in range(plan.rows):
            row_batches = {name: batches[number] for name, batches in stream_batches.items()}
            rows.append(pack_row(row_batches, context.tokenizer.sep_id))
        return StepBatch(plan.step, rows, plan.state, record_keys)

    def collate_rows(self, stream: Stream, plan: Plan, examples: list[Example]) -> list[StreamBatch]:
        """Return the stream's part of each packed row. examples: those of the plan's records, in their order, which is
        that of the rows."""
        stream_batches = list[StreamBatch]()
        context = self.stream_context(stream, plan.step, plan.rows * plan.world)
        start = 0
        for row, count in enumerate(plan.record_counts_of_rows(stream.name)):
            row_examples = examples[start : start + count]
            start += count
            samples = list[list[Example]]()
            for _, sample in groupby(row_examples, key=lambda example: example.sample_number):
                samples.append(list(sample))
            row_context = replace(context, row=row * plan.world + plan.rank)
            with adding_note_to_errors(
                f"streams.{stream.name}: the function collate of the objective {stream.objective_name}"
            ):
                stream_batch = stream.objective.collate(samples, stream.options, row_context)
                check_stream_batch(stream_batch, stream.objective.terms(stream.options).keys())
            stream_batches.append(
                replace(
                    stream_batch,
                    pair_counts=count_drawn_and_overlong_pairs(stream.name, row_examples, context),
                    language_groups=stream.language_groups,
                )
            )
        return stream_batches

    def stream_context(self, stream: Stream, step: int = 0, rows: int = 1) -> CollateContext:
        """Return the context of a stream's collate function in a step. step: counted from 0. rows: the number of packed
        rows of all ranks."""
        return replace(
            self.contexts.at(step),
            stream=stream.name,
            step=step,
            rows=rows,
            lexicons=stream.lexicons,
            language_groups=stream.language_groups,
        )

    def read_records_to_tokenise(self, stream: Stream, table: PlanTable, context: CollateContext) -> list[Record]:
        """Return the records of a table. Very long texts of pairs are cut, see cut_texts_before_tokenization. If the
        stream's objective needs words, word links get the numbers of the words of data/words.py."""
        records = list[Record]()
        places = zip(table.source.tolist(), table.shard.tolist(), table.record.tolist(), strict=True)
        for source_number, shard, record_number in places:
            source = self.sources[source_number]
            record = source.read(shard, record_number, self.readahead)
            if not stream.reads_running_text:
                record = cut_texts_before_tokenization(record, stream.needs_words, context)
            if stream.needs_words:
                record = source.renumber_links_by_xscale_words(record)
            records.append(record)
        return records

    def read_and_tokenise(self, stream: Stream, plan: Plan) -> list[Example]:
        """Read the stream's records of a plan, tokenise them together, and return an example for each record."""
        table = plan.tables[stream.name]
        context = self.stream_context(stream, plan.step)
        records = self.read_records_to_tokenise(stream, table, context)
        texts = list(chain.from_iterable(record.texts for record in records))
        # A record of running text has one text, so `follows` and `texts` have the same numbers below.
        follows = self.document_continuation_flags(table).tolist()
        if context.tokenizer.keeps_space and stream.reads_running_text:
            for number, text in enumerate(texts):
                if follows[number] and not begins_with_unspaced_script(text):
                    texts[number] = " " + text
        words: list[TokenWords] | None = None
        if stream.needs_words:
            ids, words = context.tokenizer.encode_words(texts)
        else:
            ids = context.tokenizer.encode(texts)
        borders = token_borders_of_long_texts(texts, ids, context) if stream.reads_running_text else {}
        random_keys = self.random_keys_of_records(context, table)
        sample_numbers = table.sample.tolist()
        examples = list[Example]()
        start = 0
        for number, record in enumerate(records):
            end = start + len(record.texts)
            examples.append(
                Example(
                    langs=record.langs,
                    ids=tuple(ids[start:end]),
                    words=tuple(words[start:end]) if words else None,
                    random_key=random_keys[number],
                    sample_number=sample_numbers[number],
                    key=record.key,
                    links=record.links,
                    follows=follows[number],
                    borders=borders.get(start, ()),
                )
            )
            start = end
        return examples

    def document_continuation_flags(self, table: PlanTable) -> np.ndarray:
        """Return True for each record that continues the document of the record before it in its sample [n_records]."""
        follows = np.zeros(len(table.sample), dtype=bool)
        follows[1:] = table.record[1:] == table.record[:-1] + 1
        for column in (table.sample, table.source, table.shard):
            follows[1:] &= column[1:] == column[:-1]
        for number in np.flatnonzero(follows).tolist():
            source = self.sources[table.source[number]]
            follows[number] = source.continues_document(int(table.shard[number]), int(table.record[number]))
        return follows

    def random_keys_of_records(self, context: CollateContext, table: PlanTable) -> np.ndarray:
        """Return for each record the key of all random choices about it in the context's stream and this epoch, uint64
        [n_records]. It becomes Example.random_key."""
        per_stream = rng.key(context.seed, context.stream, "record")
        per_source = rng.hash64(per_stream ^ self.source_keys[table.source], table.epoch)
        number = (table.shard.astype(np.uint64) << np.uint64(40)) + table.record.astype(np.uint64)
        return rng.hash64(per_source, number)


def count_drawn_and_overlong_pairs(stream: str, examples: list[Example], context: CollateContext) -> Counts:
    """Return the counts of sampled and of overlong pairs in a row (StreamBatch.pair_counts)."""
    max_text_tokens = context.max_length - context.tokenizer.pair.special_count
    all_too_long = MetricKey("too_long", stream)
    counts = Counter({all_too_long: 0})
    for name in context.language_groups:
        if name not in context.language_ids:  # a pair of languages
            counts[MetricKey("drawn", stream, language=name)] = 0
            counts[all_too_long._replace(language=name)] = 0
    for example in examples:
        if len(example.ids) == 2:
            pair = sorted_pair_name(example.langs)
            is_too_long = sum(map(len, example.ids)) > max_text_tokens
            counts[all_too_long] += is_too_long
            counts[all_too_long._replace(language=pair)] += is_too_long
            counts[MetricKey("drawn", stream, language=pair)] += 1
    return counts


def cut_texts_before_tokenization(pair: Record, needs_words: bool, context: CollateContext) -> Record:
    """Return the pair with each text cut to CHARACTERS * max_length characters, because tokenisation of very long texts
    takes long. needs_words: whether the stream needs the pair's words. If so, a pair is cut only if data.overlong is
    drop, which leaves out so long a pair afterwards."""
    limit = CHARACTERS * context.max_length
    if max(map(len, pair.texts)) <= limit or (needs_words and context.overlong != "drop"):
        return pair
    first, second = pair.texts
    cut = pair._replace(texts=(first[:limit], second[:limit]))
    # Links of words that were cut off would be errors. No loss needs the links, because the pair is left out.
    return cut._replace(links="") if needs_words else cut


def token_borders_of_long_texts(
    texts: list[str], ids: list[list[int]], context: CollateContext
) -> dict[int, list[int]]:
    """Return {index of a text that is longer than a sequence: the tokens before which it may be cut}. ids: the token
    ids of each text."""
    borders = dict[int, list[int]]()
    for number, tokens in enumerate(ids):
        if len(tokens) > context.max_length - 2:
            _, words = context.tokenizer.encode_words([texts[number]])
            borders[number] = words[0].tokens_to_cut_before()
    return borders


def shared_collate_context(corpus: Corpus, phase_recipe: Recipe) -> CollateContext:
    """Return what is the same for the collate functions of all streams in a phase."""
    return CollateContext(
        tokenizer=corpus.tokenizer,
        max_length=phase_recipe.data.max_length,
        overlong=phase_recipe.data.overlong,
        language_ids=corpus.language_ids,
        seed=phase_recipe.train.seed,
        has_two_token_types=corpus.has_two_token_types,
    )


@dataclass(frozen=True)
class Loader:
    """Makes the plans and batches of a run."""

    recipe: Recipe
    corpus: Corpus
    calibration: Calibration
    gpu_tokens: int = GPU_TOKENS
    """The default of train.max_tokens on GPUs. It depends on their memory (run/resolve.py), and is the same
    on all ranks."""

    @property
    def last_streams(self) -> Sequence[Stream]:
        """The streams of the steps after the last phase. A phase has streams of the same names, with its own
        values."""
        return self.corpus.streams.last

    def max_tokens(self, device: str) -> int:
        """Return train.max_tokens, or if it is null, its default on this device: "cuda" or "cpu". Mixture.next_plan
        allows a row of data.max_length tokens even if that is more."""
        if self.recipe.train.max_tokens:
            return self.recipe.train.max_tokens
        return self.gpu_tokens if device == "cuda" else CPU_TOKENS

    def mixture(self, process: Process, device: str, state: dict[str, Any]) -> Mixture:
        """Return the mixture of the run. state: the state from which it continues."""
        return Mixture(
            self.corpus.streams,
            self.recipe.schedule.map(lambda recipe: recipe.data),
            self.calibration,
            self.corpus.sources,
            seed=self.recipe.train.seed,
            max_tokens=self.max_tokens(device),
            rank=process.rank,
            world=process.world,
            state=state,
        )

    def dataset(self, readahead: bool = False) -> StepDataset:
        """Return the dataset that makes batches from plans. readahead: see Source.read."""
        contexts = self.recipe.schedule.map(lambda recipe: shared_collate_context(self.corpus, recipe))
        return StepDataset(self.corpus.sources, self.corpus.streams, contexts, readahead)

    def start_planning(
        self, process: Process, device: str, state: dict[str, Any], steps: int, cpu_group: CpuGroup | None = None
    ) -> Plans:
        """Return this rank's parts of the plans of the next `steps` steps. state: the state before the first of them.
        If there are workers, a planner process makes the plans: one for each rank, or with `cpu_group` one for each
        node. All ranks of `cpu_group` call it together."""
        mixture = self.mixture(process, device, state)
        if self.recipe.data.workers == 0:
            return (mixture.next_plan_of_rank() for _ in range(steps))
        return start_planner(mixture, steps, gather_node_and_listen(cpu_group or CpuGroup(alone=True)))

    def batches(self, process: Process, device: str, state: dict[str, Any], steps: int) -> Iterator[StepBatch]:
        """Return an iterator over this rank's batches of the next `steps` steps. state: the mixture's state before the
        first of them."""
        return self.start_workers(process, device, self.start_planning(process, device, state, steps))

    def start_workers(self, process: Process, device: str, plans: Plans) -> Iterator[StepBatch]:
        """Start the workers, and return an iterator over this rank's batch of each plan."""
        workers = worker_count(self.recipe.data.workers, process, device)
        readahead = process.local_world / process.world >= READAHEAD_SHARE
        return start_batch_workers(plans, self.dataset(readahead), workers)


def worker_count(wanted: int | str, process: Process, device: str) -> int:
    """Return a rank's number of loader workers. wanted: data.workers; "auto" means 2 on a CPU, and 4 to 6 on a GPU."""
    if wanted != "auto":
        return int(wanted)
    cores = len(os.sched_getaffinity(0))
    if cores == os.cpu_count():  # otherwise the launcher has given each rank its own cores
        cores //= process.local_world
    return 2 if device == "cpu" else min(max(cores - 2, 4), 6)


def start_batch_workers(plans: Plans, dataset: StepDataset, workers: int) -> Iterator[StepBatch]:
    """Return the batches of these plans. The call starts `workers` worker processes, and waits for the first plans.
    With 0 workers, this process makes the batches."""
    loader: DataLoader = DataLoader(
        dataset,
        sampler=plans,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        collate_fn=lambda batch: batch,
        worker_init_fn=lambda worker: ignore_signals_and_die_with_parent(),
    )
    with retry_hung_forks():
        started = iter(loader)
    # Workers ignore SIGTERM, and DataLoader would wait for ever after it has sent SIGTERM.
    for worker in getattr(started, "_workers", ()):
        worker.terminate = worker.kill
        atexit.register(worker.kill)
    return map(batch_or_raise_failure, started)


def batch_or_raise_failure(batch: StepBatch | Failure) -> StepBatch:
    """Return the batch, or raise the failure of the process that should have made it."""
    if isinstance(batch, Failure):
        raise batch
    return batch
