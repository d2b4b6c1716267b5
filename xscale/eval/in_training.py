"""The tasks of the recipe's `eval` section measure a run while it trains. All ranks share the work.

An evaluation has its own random numbers, the same every time, so a run with evaluations trains bit for bit like one
without.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from xscale.config import EvalTask, StreamConfig
from xscale.data.calibrate import bytes_to_tokens
from xscale.data.calibration import Calibration
from xscale.data.mixture import PACK_FILL, StreamSpec, initial_state
from xscale.data.remote import Cache, location
from xscale.data.shards import Source, find_sources, take_first
from xscale.data.streams import matches_languages
from xscale.errors import RankError, UserError
from xscale.eval import retrieval
from xscale.eval.alignment_score import FEWEST, AlignmentProbe, find_probe, tokens_of
from xscale.eval.bootstrap import Score, mean
from xscale.eval.model import Exported, read_texts
from xscale.eval.sentence_files import trained_pooling
from xscale.metric_keys import ALL, MetricKey, direction
from xscale.models.build import NEUTRAL
from xscale.ranks import HostGroup, Process
from xscale.run_spec import (
    LinkSample,
    RunSpec,
    check_file_sizes,
    check_language_names,
    check_links,
    languages_of_links,
    linked_sources,
    sample_links,
    shows_neutral,
)
from xscale.step.module import StepModule
from xscale.step.step import gather_rows, measure_rows

LOG = logging.getLogger("xscale")
Results = dict[str, dict[str, float]]
"""A task's numbers by results row and by name. A results row is, for example, a stream or a pair of languages."""
TRIED = 8
"""The number of records that a dry run measures to find out which numbers a task gives."""


def find_measures(
    run_spec: RunSpec, engine: Any, process: Process, alignment: Callable[[], Results], note: Callable[[str], None]
) -> dict[str, Callable[[], Results]]:
    """Return the functions that measure the recipe's tasks, by the task's name. All ranks call a function together, and
    the results are complete on rank 0.

    alignment: the function that measures alignment scores. note: a function that is called with a description of what a
    task is doing. Raises UserError.
    """
    kinds: dict[str, Any] = {"heldout": Heldout, "retrieval": Retrieval}
    return {
        task.name: kinds[task.kind](task, run_spec, engine, process, note).measure if task.kind in kinds else alignment
        for task in run_spec.recipe.eval.tasks
    }


def check_tasks(run_spec: RunSpec, stage: int, host_group: HostGroup) -> list[str]:
    """Check that the tasks can be measured at this ZeRO stage, and that one of them measures the number that
    checkpoint.best names. Returns lines about languages that the run lacks. Raises UserError."""
    best, notes = run_spec.recipe.checkpoint.best, list[str]()
    for task in run_spec.recipe.eval.tasks:
        if stage >= 3:
            raise UserError(
                f"eval.{task.name}: tasks need whole weights, which ZeRO stage 3 partitions; measure with a "
                f"checkpoint.hook, or use a ds_config of stage 2 or lower"
            )
        try:
            sources = [] if task.kind == "alignment" else find_task_sources(task, run_spec)
            rows = row_names(task, run_spec, sources, host_group)
        except UserError as error:
            raise UserError(f"eval.{task.name}: {str(error).removeprefix('--data ')}") from None
        if best and best.partition("/")[0] == task.name and best.split("/", 2)[1] not in rows:
            there = ", ".join(f"{task.name}/{row}" for row in rows)
            raise UserError(f"checkpoint.best: {best} is not measured; choose a number of one of these rows: {there}")
        new = sorted({language for source in sources for language in source.langs} - {*run_spec.languages})
        if new and run_spec.any_stream("language_embeddings"):
            notes.append(f"eval.{task.name} reads {', '.join(new)} with the neutral language embedding: not in --data")
    return notes


def row_names(task: EvalTask, run_spec: RunSpec, sources: list[Source], host_group: HostGroup) -> list[str]:
    """Return the names of the rows in a task's results. Raises UserError if the task cannot be measured."""
    if task.kind == "alignment":
        return list(with_overall_means(task.name, alignment_rows(run_spec)))
    check_file_sizes(sources, host_group)
    if task.kind == "retrieval":
        pairs = list(row_sources(task, sources))
        return [ALL, *pairs]
    samples = sample_heldout_links(run_spec, sources, host_group)
    specs = heldout_stream_specs(run_spec, sources, samples)
    check_links(run_spec.recipe, specs, sources, samples)
    languages = [(spec.name, of) for spec in specs for s in spec.sources for of in (sources[s].pair, *sources[s].langs)]
    names = [(spec.name, ALL) for spec in specs if len({sources[s].pair for s in spec.sources}) > 1] + languages
    return list(dict.fromkeys([*(spec.name for spec in specs), *(" ".join(of_stream) for of_stream in names)]))


def alignment_rows(run_spec: RunSpec) -> Results:
    """Return a results row for each dictionary, with NaN in place of each score for which the dictionary has enough
    words. Raises UserError if the run has no dictionary."""
    lexicons = run_spec.lexicons + run_spec.measured
    if not lexicons:
        raise UserError("the run has no dictionary; set data.lexicons=[PATH/en-de.txt], or put it into lexicon/")
    nothing = {language: np.empty(0, dtype=np.int64) for lexicon in lexicons for language in lexicon.langs}
    probes = find_probe(lexicons, run_spec.lexicons, run_spec.unseen, nothing)
    return {
        name: {kind: math.nan for kind, words in probe.items() if len(words.queries) >= FEWEST}
        for name, probe in probes.items()
    }


def validate_best(run_spec: RunSpec, module: StepModule) -> None:
    """Check, by measuring a few records, that evaluations give the number of checkpoint.best. Raises UserError."""
    best = run_spec.recipe.checkpoint.best
    task = next((task for task in run_spec.recipe.eval.tasks if best and best.partition("/")[0] == task.name), None)
    if best is None or task is None:
        return
    row = best.split("/", 2)[1]
    if task.kind == "alignment":
        results = alignment_rows(run_spec)
    elif task.kind == "retrieval":
        sources_of = row_sources(task, find_task_sources(task, run_spec))
        same = torch.eye(2)
        results = {of: retrieval.accuracies(same, same, "cosine", source.langs) for of, source in sources_of.items()}
    else:
        stream, _, language = row.partition(" ")
        few = replace(task, limit=min(task.limit, TRIED))
        sources = [s for s in find_task_sources(few, run_spec) if language in ("", ALL, s.pair, *s.langs)]
        alone = replace(run_spec, specs=[spec for spec in run_spec.specs if spec.name == stream])
        engine = SimpleNamespace(module=module, device=torch.device("cpu"))
        results = Heldout(few, alone, engine, Process(0, 1, 0, 1), lambda doing: None, sources).measure()
        if language == ALL and row not in with_overall_means(
            task.name, results
        ):  # so few records may be of one language
            results[row] = {
                n: v for name, of in results.items() if name.startswith(f"{stream} ") for n, v in of.items()
            }
    check_number({task.name: with_overall_means(task.name, results)}, best)


def with_overall_means(task: str, rows: Results) -> Results:
    """Return a task's results rows after rows with means over languages or pairs: the row `all`, or for held-out losses
    `STREAM all` for each stream. A number is averaged over the rows that have it, if there are several."""
    groups, losses = dict[str, list[dict[str, float]]](), task.partition(".")[0] == "heldout"
    for row, numbers in rows.items():
        stream, _, language = row.partition(" ")
        if language or not losses:
            groups.setdefault(f"{stream} {ALL}" if losses else ALL, []).append(numbers)
    found: Results = {}
    for row, of_rows in groups.items():
        for name in dict.fromkeys(name for numbers in of_rows for name in numbers if direction(name)):
            values = [numbers[name] for numbers in of_rows if name in numbers]
            if len(values) > 1:
                scores = all(isinstance(value, Score) for value in values)
                found.setdefault(row, {})[name] = mean(values) if scores else sum(values) / len(values)
    return found | rows


def find_task_sources(task: EvalTask, run_spec: RunSpec) -> list[Source]:
    """Return the task's sources. Raises UserError if the run trains on one of them, or does not train a language
    whose loss the task measures. Retrieval reads an untrained language with the neutral language embedding, which the
    run must train."""
    data = run_spec.recipe.data
    cache = Cache.of(data.cache, data.cache_gb)
    sources = take_first(find_sources([*map(location, task.data)], cache), task.limit)
    trained = {source.fingerprint: source for source in run_spec.sources}
    for source in sources:
        if source.fingerprint in trained:
            raise UserError(f"{source.directory} is training data of this run; give records that it does not train on")
        new = sorted(set(source.langs) - set(run_spec.languages))
        if new and task.kind != "retrieval":
            raise UserError(
                f"{source.directory} has text in {' and '.join(new)}, but the run's --data has none; leave it out"
            )
        if new and not shows_neutral(run_spec.recipe):
            raise UserError(
                f"{source.directory} has text in {' and '.join(new)}, which --data lacks. The neutral language "
                f"embedding would be used for it, but with language_dropout 0 no stream trains that one; leave the "
                f"source out, or set streams.NAME.language_dropout=0.1"
            )
    check_language_names([*run_spec.sources, *sources])
    return sources


def sample_heldout_links(run_spec: RunSpec, sources: list[Source], host_group: HostGroup) -> list[LinkSample]:
    """Return samples of the word links of held-out sources, whose languages need not be in `data.languages`."""
    data = replace(run_spec.recipe.data, languages=None)
    return sample_links(languages_of_links(replace(run_spec.recipe, data=data, phases=())), sources, host_group)


def heldout_stream_specs(run_spec: RunSpec, sources: list[Source], samples: list[LinkSample]) -> list[StreamSpec]:
    """Return a spec for each stream that can read held-out sources, with these sources and all their records in one
    step. Raises UserError if no stream can read them."""
    specs = []
    for spec in run_spec.specs:
        kind, languages = "mono" if spec.packed else "pair", run_spec.recipe.streams[spec.name].languages
        chosen = tuple(
            s
            for s, source in enumerate(sources)
            if source.kind == kind and (languages is None or matches_languages(languages, source.langs))
        )
        if chosen:
            chosen = linked_sources(run_spec.recipe.streams[spec.name].objective, chosen, samples)
            specs.append(StreamSpec(spec.name, chosen, sum(sources[s].records for s in chosen), spec.packed))
    if not specs:
        kinds = ", ".join(sorted({f"{source.pair} ({source.kind})" for source in sources}))
        raise UserError(f"no stream of the recipe reads data such as {kinds}; name other data, or leave out the task")
    return specs


class Heldout:
    """A task that measures the run's losses on held-out records, for each stream and each of the stream's languages."""

    def __init__(
        self,
        task: EvalTask,
        run_spec: RunSpec,
        engine: Any,
        process: Process,
        note: Callable[[str], None],
        sources: list[Source] | None = None,
    ):
        """Prepare one evaluation of all held-out records. sources: the data to measure; None: the task's data."""
        self.note = partial(note, f"measuring {task.name}")
        recipe, sources = run_spec.recipe, sources or find_task_sources(task, run_spec)
        tokens = Calibration([bytes_to_tokens(source, run_spec.tokenizer) for source in sources], {})
        samples = sample_heldout_links(run_spec, sources, HostGroup(alone=True))
        specs = heldout_stream_specs(run_spec, sources, samples)
        for i, spec in enumerate(specs):
            if spec.packed:
                text = sum(estimated_size(sources[s], s, tokens) for s in spec.sources)
                specs[i] = replace(spec, samples=max(int(text / (PACK_FILL * recipe.data.max_length)), 1))
        streams = {spec.name: with_languages(recipe.streams[spec.name]) for spec in specs}
        data = replace(recipe.data, alpha=1.0, alpha_by="records", workers=0, first=None)
        recipe = replace(recipe, data=data, streams=streams, phases=())
        run_spec = replace(run_spec, phases=(), fitted=None, calibration=tokens)
        self.run_spec = replace(run_spec, sources=sources, recipe=recipe, specs=specs)
        (self.batch,) = self.run_spec.batches(process, engine.device.type, initial_state(specs), 1)
        for source in sources:
            source.close()
        self.engine, self.process = engine, process

    def measure(self) -> Results:
        """Return a results row for each stream and for each of its languages."""
        recipe, targets, counts = self.run_spec.recipe, self.batch.targets(), self.batch.counts()
        sums = measure_rows(self.engine, recipe, self.batch.rows, rank=self.process.rank, note=self.note)
        numbers = torch.tensor([*targets.values(), *counts.values()], dtype=torch.float64)
        table = torch.cat([sums.values_K, numbers.to(sums.values_K.device)])
        if dist.is_initialized():  # not in a dry run
            dist.all_reduce(table)
        totals_K, *whole = (part.tolist() for part in table.split([len(sums.values_K), len(targets), len(counts)]))
        targets = dict(zip(targets, map(int, whole[0]), strict=True))
        counts = dict(zip(counts, map(int, whole[1]), strict=True))
        results: Results = {}
        found = sums.averages(totals_K, recipe, targets) | sums.by_language(totals_K, recipe, counts)
        for name, number in found.items():
            key = MetricKey.parse(name)
            # A stream has no targets if all its pairs were too long.
            if any(n for (stream, _), n in targets.items() if stream == key.stream):
                row = " ".join(filter(None, [key.stream, key.language]))
                results.setdefault(row, {})[f"{key.name}.{key.term}" if key.term else key.name] = number
        return results


def with_languages(stream: StreamConfig) -> StreamConfig:
    """Return the stream with a language_dropout of 0."""
    if not hasattr(stream.options, "language_dropout"):
        return stream
    return replace(stream, options=replace(stream.options, language_dropout=0.0))


def estimated_size(source: Source, number: int, tokens: Calibration) -> float:
    """Return the number of tokens of a source, estimated from its bytes."""
    return sum(
        float(tokens.estimated_tokens(number, source.lengths(s, slice(0, n))).sum())
        for s, n in enumerate(source.counts)
    )


class ModelInTraining(Exported):
    """The encoder in training, with the interface of an exported model."""

    def __init__(self, run_spec: RunSpec, engine: Any):
        self.device, self.encoder, self.tokenizer = engine.device, engine.module.encoder, run_spec.tokenizer
        self.languages = [NEUTRAL, *run_spec.languages]
        self.language_embeddings = run_spec.any_stream("language_embeddings")
        self.pooling = trained_pooling(run_spec.recipe.identity()["streams"])


def row_sources(task: EvalTask, sources: list[Source]) -> dict[str, Source]:
    """Return the sources that hold pairs, by the names of their results rows. Raises UserError if none holds pairs."""
    pairs = [source for source in sources if source.kind == "pair"]
    if not pairs:
        raise UserError(f"{', '.join(task.data)} has no pairs; retrieval needs sources of pairs")
    times = Counter(source.pair for source in pairs)
    return {s.pair if times[s.pair] == 1 else f"{s.pair} ({s.directory})": s for s in pairs}


class Retrieval:
    """A task that measures how often a sentence's translation is its nearest neighbour. Every rank reads and embeds a
    part of the sentences."""

    def __init__(self, task: EvalTask, run_spec: RunSpec, engine: Any, process: Process, note: Callable[[str], None]):
        """Read this rank's texts. Raises RankError."""
        self.note, self.process, self.limit = partial(note, f"measuring {task.name}"), process, task.limit
        self.sources, self.texts = row_sources(task, find_task_sources(task, run_spec)), list[list[tuple[str, ...]]]()
        for source in self.sources.values():
            self.note()
            try:
                self.texts.append(read_texts(source, task.limit, process.rank, process.world))
            except UserError as error:
                raise RankError(str(error)) from None
        self.model = ModelInTraining(run_spec, engine)

    def measure(self) -> Results:
        results, world, encoder = {}, self.process.world, self.model.encoder
        encoder.eval()
        for (row, source), mine in zip(self.sources.items(), self.texts, strict=True):
            ids, sides, pairs = self.model.language_ids(source.langs), [], min(self.limit, source.records)
            order = torch.tensor([n for rank in range(world) for n in range(rank, pairs, world)]).argsort()
            for side, language in enumerate(source.langs):
                self.note()
                texts = [texts[side] for texts in mine]
                (vectors,) = retrieval.embed(self.model, texts, ids[language], [(self.model.pooling, -1)]).values()
                sides.append(gather_rows(vectors.float())[0][order.to(vectors.device)])
            results[row] = retrieval.accuracies(sides[0], sides[1], "cosine", source.langs)
        encoder.train()
        return results


def check_number(results: dict[str, Results], path: str) -> float | None:
    """Return the number at `path` (TASK/ROW/NUMBER), or None if its task was not measured. Raises UserError if the task
    has no such number."""
    task, row, name = path.split("/", 2)
    if row == ALL and len(rows := results.get(task, {})) == 1:
        (row,) = rows  # the mean over one pair
    if task in results and name not in results[task].get(row, {}):
        there = sorted(f"{task}/{row}/{name}" for row, of in results[task].items() for name in of)
        raise UserError(f"checkpoint.best: {path} is not measured; there are {', '.join(there) or 'none'}")
    return results.get(task, {}).get(row, {}).get(name)


# Alignment scores


def find_probes(run_spec: RunSpec, host_group: HostGroup, note: Callable[[str], None]) -> dict[str, AlignmentProbe]:
    """Return the alignment probe (the words that an alignment score compares) of each of the run's dictionaries, by the
    dictionary's name. All ranks call it together; ranks other than 0 get {}. note: as in find_measures."""
    heldout, lexicons = run_spec.unseen, run_spec.lexicons + run_spec.measured
    tokens = tokens_by_language(run_spec, sorted({lexicon.langs[1] for lexicon in lexicons}), host_group, note)
    if not host_group.is_main:
        return {}
    if heldout < run_spec.recipe.data.lexicon_heldout:
        LOG.warning(
            f"data.lexicon_heldout: {run_spec.recipe.data.lexicon_heldout:g}, but model.init withheld only {heldout:g} "
            f"of the words; alignment/* measures only those"
        )
    found = find_probe(lexicons, run_spec.lexicons, heldout, tokens)
    for lexicon in run_spec.measured:
        LOG.info(f"{lexicon.summary()}; no stream trains on it")
    for name, probe in found.items():
        words = len(probe["withheld"].queries)
        if heldout and words < FEWEST:
            LOG.warning(
                f"alignment/{name} is left out: only {words} withheld words have one token, and {FEWEST} are needed; "
                f"give a larger dictionary or a larger data.lexicon_heldout"
            )
    return found


def tokens_by_language(
    run_spec: RunSpec, languages: list[str], host_group: HostGroup, note: Callable[[str], None]
) -> dict[str, np.ndarray]:
    """Return the ids of the tokens that occur in each language's text. Every rank reads a part of the text."""
    tokens = dict[str, np.ndarray]()
    for language in languages:
        text = language, run_spec.sources, run_spec.tokenizer
        noted = partial(note, f"counting the tokens of the text in {language}")
        parts = range(host_group.size)
        found = host_group.divide_work([partial(tokens_of, *text, part, len(parts), noted) for part in parts])
        tokens[language] = reduce(np.union1d, found)
    return tokens
