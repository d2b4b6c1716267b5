"""Measures a run while it trains, by the tasks of the recipe's `eval` section. All ranks share the work.

Evaluations have random numbers of their own, the same in each evaluation. So a run trains bit for bit the same with and
without evaluations.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from xscale.data.calibrate import fit_tokens_to_bytes
from xscale.data.calibration import Calibration
from xscale.data.corpus import (
    Corpus,
    check_file_sizes,
    first_record_has_links,
    select_linked_sources,
)
from xscale.data.loader import Loader
from xscale.data.mixture import PACK_FILL, initial_state, source_sizes
from xscale.data.remote import Cache, parse_location
from xscale.data.shards import Source, find_sources, keep_first_records
from xscale.data.stream import Stream, languages_and_pairs, matches_languages, unify_language_names
from xscale.errors import RankError, UserError
from xscale.eval import retrieval
from xscale.eval.alignment_score import FEWEST, AlignmentProbe, build_probes, language_tokens
from xscale.eval.bootstrap import Score, mean
from xscale.eval.model import ExportedModel, read_texts
from xscale.eval.sentence_files import choose_vectors
from xscale.metric_keys import ALL, MetricKey, direction
from xscale.models.build import NEUTRAL
from xscale.ranks import HostGroup, Process
from xscale.recipe import EvalTask, Recipe, Schedule
from xscale.step.step import measure_rows
from xscale.step.sums import Sums, language_metrics, stream_metrics
from xscale.step.zero import whole_weight

LOG = logging.getLogger("xscale")
Results = dict[str, dict[str, float]]
"""{results row: {metric: number}} of one task. A results row is, for example, a stream or a pair of languages."""


def measure_functions(
    loader: Loader, engine: Any, process: Process, note: Callable[[str], None]
) -> dict[str, Callable[[], Results]]:
    """Return {task of the recipe: the function that measures it}. All ranks call such a function together, and its
    results are complete on rank 0.

    note: a function that is called again and again with a description of the work, to show progress. Raises UserError.
    """
    functions: dict[str, Callable[[], Results]] = {}
    for task in loader.recipe.eval.tasks:
        measured = HeldoutTask if task.kind == "heldout" else RetrievalTask
        functions[task.name] = measured(task, loader, engine, process, note).measure
    return functions


def review_tasks(recipe: Recipe, corpus: Corpus, stage: int, host_group: HostGroup) -> None:
    """Raise UserError if a task cannot be measured, or not at this ZeRO stage. All ranks call it together."""
    for task in recipe.eval.tasks:
        if stage >= 3:
            raise UserError(
                f"eval.{task.name}: tasks need whole weights, which ZeRO stage 3 partitions; evaluate exports of "
                f"checkpoints (`xscale export`, `xscale eval`), or use a ds_config of stage 2 or lower"
            )
        try:
            sources = find_task_sources(task, recipe, corpus)
            check_file_sizes(sources, host_group)
            if task.kind == "retrieval":
                sources_by_row(task, sources)
            else:
                heldout_streams(recipe, corpus, sources, first_record_has_links(sources, [None], host_group))
        except UserError as error:
            raise UserError(f"eval.{task.name}: {str(error).removeprefix('--data ')}") from None


def with_overall_means(task: str, rows: Results) -> Results:
    """Return rows of means over languages or pairs, followed by the task's own rows. The row of means is `all`; for
    held-out losses, each stream has a row `STREAM all`. A number is averaged over the rows that have it."""
    is_heldout = task.partition(".")[0] == "heldout"
    values: dict[str, dict[str, list[float]]] = {}
    for row, numbers in rows.items():
        stream, _, language = row.partition(" ")
        if is_heldout and not language:  # the row of the whole stream
            continue
        averaged = values.setdefault(f"{stream} {ALL}" if is_heldout else ALL, {})
        for name, value in numbers.items():
            if direction(name) and "->" not in name:  # "->": the accuracy of one direction
                averaged.setdefault(name, []).append(value)
    means: Results = {}
    for mean_row, values_of_name in values.items():
        means[mean_row] = {name: average(numbers) for name, numbers in values_of_name.items()}
    return means | rows


def average(values: list[float]) -> float:
    """Return the mean of the values, with its interval if they are Scores."""
    return mean(values) if isinstance(values[0], Score) else sum(values) / len(values)


def find_task_sources(task: EvalTask, recipe: Recipe, corpus: Corpus) -> list[Source]:
    """Return the sources of the task's data. Raises UserError if the run trains on one of them, or has no text in a
    language of theirs."""
    cache = Cache.from_settings(recipe.data.cache, recipe.data.cache_gb)
    sources = find_sources([*map(parse_location, task.data)], cache)
    unify_language_names(sources, preferred=corpus.languages)
    sources = keep_first_records(sources, task.limit)
    trained = {source.fingerprint: source for source in corpus.sources}
    for source in sources:
        if source.fingerprint in trained:
            raise UserError(
                f"{source.directory} is training data of this run; give records that the run does not train on"
            )
        new = sorted(set(source.langs) - set(corpus.languages))
        if new:
            raise UserError(
                f"{source.directory} has text in {' and '.join(new)}, but the run's --data has none; leave it out, and "
                f"evaluate exports on it (`xscale eval`)"
            )
    return sources


def heldout_streams(recipe: Recipe, corpus: Corpus, sources: list[Source], linked: Sequence[bool]) -> list[Stream]:
    """Return the streams that can read held-out sources, with all their records as one step. Raises UserError."""
    streams = list[Stream]()
    for stream in corpus.streams.last:
        languages = recipe.streams[stream.name].languages
        read = list[int]()
        for number, source in enumerate(sources):
            wanted = languages is None or matches_languages(languages, source.langs)
            if source.kind == stream.objective.record_kind and wanted:
                read.append(number)
        if read:
            chosen = tuple(read)
            if stream.objective.needs == "links":
                chosen = select_linked_sources(stream.name, chosen, sources, linked)
            groups = languages_and_pairs(sources, chosen)
            of_heldout = replace(stream, sources=chosen, idle=frozenset(), language_groups=groups)
            streams.append(replace(of_heldout, samples=of_heldout.records(sources)))
    if not streams:
        kinds = ", ".join(sorted({f"{source.pair} ({source.kind})" for source in sources}))
        raise UserError(
            f"the evaluation data ({kinds}) fit no stream of the recipe; give other data, or leave out the task"
        )
    return streams


class HeldoutTask:
    """A task that measures the run's losses on held-out records, by stream, and by language of each stream."""

    def __init__(self, task: EvalTask, loader: Loader, engine: Any, process: Process, note: Callable[[str], None]):
        """Prepare one step of all held-out records. Raises UserError."""
        self.note = partial(note, f"measuring {task.name}")
        recipe = loader.recipe
        sources = find_task_sources(task, recipe, loader.corpus)
        calibration = Calibration([fit_tokens_to_bytes(source, loader.corpus.tokenizer) for source in sources], {})
        tokens = source_sizes(sources, calibration, "tokens")
        linked = first_record_has_links(sources, [None], HostGroup(alone=True))
        streams = list[Stream]()
        for stream in heldout_streams(recipe, loader.corpus, sources, linked):
            if stream.packed:
                text = sum(tokens[source] for source in stream.sources)
                stream = replace(stream, samples=max(int(text / (PACK_FILL * recipe.data.max_length)), 1))
            streams.append(without_language_dropout(stream))
        data = replace(recipe.data, alpha=1.0, alpha_by="records", workers=0, first=None)
        measured = {}
        for stream in streams:
            measured[stream.name] = replace(recipe.streams[stream.name], options=stream.options)
        recipe = replace(recipe, data=data, streams=measured, phases=())
        corpus = replace(loader.corpus, sources=sources, streams=Schedule.constant(streams))
        self.loader = replace(loader, recipe=recipe, corpus=corpus, calibration=calibration)
        (self.batch,) = self.loader.batches(process, engine.device.type, initial_state(streams), 1)
        for source in sources:
            source.close()
        self.engine = engine
        self.process = process

    def measure(self) -> Results:
        """Return a results row for each stream, and for each language of a stream. All ranks call it together."""
        recipe = self.loader.recipe
        counts = self.batch.counts()
        sums = measure_rows(self.engine, recipe, self.batch.rows, rank=self.process.rank, note=self.note)
        numbers = torch.tensor(list(counts.values()), dtype=torch.float64)
        table = torch.cat([sums.values_K, numbers.to(sums.values_K.device)])
        if dist.is_initialized():
            dist.all_reduce(table)
        sums_of_ranks, counts_of_ranks = table.split([len(sums.values_K), len(counts)])
        sums_by_key = Sums(sums.keys, sums_of_ranks).by_key()
        counts = dict(zip(counts, map(int, counts_of_ranks.tolist()), strict=True))
        metrics = stream_metrics(sums_by_key, counts, recipe) | language_metrics(sums_by_key, counts, recipe)
        with_targets = {key.stream for key, count in counts.items() if key.name == "count" and count}
        results: Results = {}
        for name, number in metrics.items():
            key = MetricKey.parse(name)
            if key.stream in with_targets:  # if all pairs are too long, a stream has no targets
                row = " ".join(filter(None, [key.stream, key.language]))
                results.setdefault(row, {})[f"{key.name}.{key.term}" if key.term else key.name] = number
        return results


def without_language_dropout(stream: Stream) -> Stream:
    """Return the stream with a language_dropout of 0."""
    if not hasattr(stream.options, "language_dropout"):
        return stream
    return replace(stream, options=replace(stream.options, language_dropout=0.0))


class ModelInTraining(ExportedModel):
    """The encoder in training, with the interface of an exported model."""

    def __init__(self, recipe: Recipe, corpus: Corpus, engine: Any):
        self.device = engine.device
        self.encoder = engine.module.encoder
        self.tokenizer = corpus.tokenizer
        self.languages = [NEUTRAL, *corpus.languages]
        self.language_embeddings = recipe.any_stream("language_embeddings")
        self.pooling = choose_vectors(recipe.identity()).pooling


def sources_by_row(task: EvalTask, sources: list[Source]) -> dict[str, Source]:
    """Return {results row: source} for the sources of sentence pairs. Raises UserError without such a source."""
    pairs = [source for source in sources if source.kind == "pair"]
    if not pairs:
        raise UserError(f"{', '.join(task.data)} has no pairs; retrieval needs sources of pairs")
    times = Counter(source.pair for source in pairs)
    return {s.pair if times[s.pair] == 1 else f"{s.pair} ({s.directory})": s for s in pairs}


class RetrievalTask:
    """A task that measures how often a sentence's translation is its nearest neighbour. Each rank encodes a share of
    the sentences."""

    def __init__(self, task: EvalTask, loader: Loader, engine: Any, process: Process, note: Callable[[str], None]):
        """Read this rank's texts. Raises RankError."""
        self.note = partial(note, f"measuring {task.name}")
        self.sources = sources_by_row(task, find_task_sources(task, loader.recipe, loader.corpus))
        self.texts: list[list[tuple[str, ...]]] = []
        for source in self.sources.values():
            self.note()
            try:
                self.texts.append(read_texts(source, task.limit, process.rank, process.world))
            except UserError as error:
                raise RankError(str(error)) from None
        self.model = ModelInTraining(loader.recipe, loader.corpus, engine)

    def measure(self) -> Results:
        results: Results = {}
        self.model.encoder.eval()
        for (row, source), texts in zip(self.sources.items(), self.texts, strict=True):
            self.note()
            (results[row],) = retrieval.evaluate(self.model, texts, source.langs).values()
        self.model.encoder.train()
        return results


def find_number(results: dict[str, Results], path: str) -> float | None:
    """Return the number at the path TASK/ROW/METRIC, or None if the task was not measured. Raises UserError if the task
    was measured and lacks the number."""
    task, row, name = path.split("/", 2)
    if task in results and name not in results[task].get(row, {}):
        known = sorted(f"{task}/{row}/{name}" for row, numbers in results[task].items() for name in numbers)
        raise UserError(
            f"checkpoint.best: the evaluation does not measure {path}; choose one of {', '.join(known) or '(none)'}"
        )
    return results.get(task, {}).get(row, {}).get(name)


# Alignment scores


def alignment_metrics(engine: Any, probes: dict[str, AlignmentProbe]) -> dict[str, float]:
    """Return {metric: alignment score of the run's embeddings} on rank 0, and {} on other ranks. All ranks call it
    together. probes: {name of a dictionary: words to score}; {} on other ranks than 0."""
    metrics = dict[str, float]()
    with whole_weight(engine, engine.module.encoder.embeddings) as table:
        for pair, probe in probes.items():
            for kind, words in probe.items():
                score = words.score(table)
                if score is not None:
                    name = "alignment" if kind == "withheld" else "alignment_trained"
                    metrics[str(MetricKey(name, pair))] = score
    return metrics


def find_probes(corpus: Corpus, host_group: HostGroup, note: Callable[[str], None]) -> dict[str, AlignmentProbe]:
    """Return {name of a dictionary: words to score} on rank 0, and {} on other ranks. All ranks call it together."""
    withheld_share = corpus.unseen
    lexicons = corpus.lexicons + corpus.measured
    tokens = tokens_by_language(corpus, sorted({lexicon.langs[1] for lexicon in lexicons}), host_group, note)
    if not host_group.is_main:
        return {}
    probes = build_probes(lexicons, corpus.lexicons, withheld_share, tokens)
    for lexicon in corpus.measured:
        LOG.info(f"{lexicon.summary()}; no stream trains on it")
    for name, probe in probes.items():
        words = len(probe["withheld"].queries)
        if withheld_share and words < FEWEST:
            LOG.warning(
                f"alignment/{name} is left out: only {words} withheld words have one token, and {FEWEST} are needed; "
                f"give a larger dictionary or a larger data.lexicon_heldout"
            )
    return probes


def tokens_by_language(
    corpus: Corpus, languages: list[str], host_group: HostGroup, note: Callable[[str], None]
) -> dict[str, np.ndarray]:
    """Return {language: ids of the tokens that occur in its text}. Every rank reads a share of the text."""
    tokens = dict[str, np.ndarray]()
    for language in languages:
        text = language, corpus.sources, corpus.tokenizer
        noted = partial(note, f"counting the tokens of the text in {language}")
        count = host_group.size
        ids = host_group.divide_work([partial(language_tokens, *text, i, count, noted) for i in range(count)])
        tokens[language] = reduce(np.union1d, ids)
    return tokens
