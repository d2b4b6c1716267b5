"""Measures a run while it trains, by the tasks of the recipe's `eval` section.

Evaluations have random numbers of their own, the same in each evaluation. So a run trains bit for bit the same with and
without evaluations.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from xscale.data.calibrate import fit_tokens_to_bytes
from xscale.data.calibration import Calibration
from xscale.data.corpus import Corpus, check_file_sizes_against_index, select_sources_with_word_links
from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import SAMPLE_FILL, initial_state, source_sizes
from xscale.data.remote import parse_location
from xscale.data.shards import Source, drop_later_records_per_language, find_sources
from xscale.data.stream import Stream, matching_source_indices, unify_language_names
from xscale.errors import LOG, UserError
from xscale.eval import retrieval
from xscale.eval.bootstrap import mean
from xscale.eval.model import ExportedModel, read_texts
from xscale.eval.sentence_files import choose_pooling
from xscale.metric_keys import ALL, MetricKey
from xscale.models.build import NEUTRAL
from xscale.ranks import CpuGroup, Process
from xscale.recipe import EvalTask, Recipe, Schedule
from xscale.step.metrics import language_metrics, stream_metrics
from xscale.step.step import sum_evaluation_losses

Results = dict[str, dict[str, float]]
"""{results row: {metric: number}} of one task. A results row is, for example, a stream or a pair of languages."""


def make_task_functions(
    loader: Loader, engine: Any, process: Process, note_progress: Callable[[str], None]
) -> dict[str, Callable[[], Results]]:
    """Return {task of the recipe: the function that measures it}. All ranks call such a function together, and its
    results are complete on rank 0.

    note_progress: a function that is called again and again with a description of the work. Raises UserError.
    """
    functions: dict[str, Callable[[], Results]] = {}
    for task in loader.recipe.eval.tasks:
        show_progress = partial(note_progress, f"measuring {task.name}")
        if task.kind == "heldout":
            of_task = make_heldout_loader(task, loader)
            state = initial_state(of_task.last_streams)
            (batch,) = of_task.batches(process, engine.device.type, state, 1)
            functions[task.name] = partial(
                measure_heldout_losses, engine, of_task.recipe, batch, process.rank, show_progress
            )
        else:
            model = ModelInTraining(loader.recipe, loader.corpus, engine)
            sources = find_and_check_task_sources(task, loader.recipe, loader.corpus)
            show_progress()
            texts = [read_texts(source, task.limit) for source in sources]
            functions[task.name] = partial(measure_retrieval, model, sources, texts, show_progress)
    return functions


def check_eval_tasks(recipe: Recipe, corpus: Corpus, stage: int, cpu_group: CpuGroup) -> None:
    """Raise UserError if a task cannot be measured, or not at this ZeRO stage. All ranks call it together."""
    for task in recipe.eval.tasks:
        if stage >= 3:
            raise UserError(
                f"eval.{task.name}: evaluation needs whole weights, and ZeRO stage 3 divides each weight among the "
                "ranks. Use a ds_config of stage 2 or lower, or evaluate exported checkpoints (`xscale export`, "
                "then `xscale eval`)"
            )
        try:
            sources = find_and_check_task_sources(task, recipe, corpus)
            check_file_sizes_against_index(sources, cpu_group)
            rows = [ALL, *(source.sorted_langs_name for source in sources)]
            if task.kind == "heldout":
                rows = [stream.name for stream in make_heldout_streams(recipe, corpus, sources)]
        except UserError as error:
            raise UserError(f"eval.{task.name}: {str(error).removeprefix('--data ')}") from None
        check_task_has_row_of_best(recipe.checkpoint.best or "", task.name, rows)


def check_task_has_row_of_best(metric_path: str, task: str, rows: list[str]) -> None:
    """Raise UserError if checkpoint.best names a row that the task does not have. metric_path: TASK/ROW/METRIC, or an
    empty string. rows: the names with which the task's rows begin; a language or a folder may follow."""
    named_task, _, row_and_metric = metric_path.partition("/")
    first_word = row_and_metric.partition("/")[0].partition(" ")[0]
    if named_task == task and first_word not in rows:
        raise UserError(
            f"checkpoint.best: the evaluation does not measure {metric_path}. Write TASK/ROW/METRIC. In the results of "
            f"the task {task}, each ROW begins with {' or '.join(rows)}"
        )


def find_and_check_task_sources(task: EvalTask, recipe: Recipe, corpus: Corpus) -> list[Source]:
    """Return the sources that the task reads. Raises UserError if the run trains on one of them or has no text in a
    language of theirs, and if a task of retrieval has no pairs."""
    sources = find_sources([*map(parse_location, task.data)], recipe.data.cache)
    unify_language_names(sources, preferred=corpus.languages)
    sources = drop_later_records_per_language(sources, task.limit)
    trained = {source.fingerprint for source in corpus.sources}
    for source in sources:
        if source.fingerprint in trained:
            raise UserError(f"this run trains on {source.directory}. Use other shards for the evaluation")
        new = sorted(set(source.langs) - set(corpus.languages))
        if new:
            raise UserError(
                f"{source.directory} has text in {' and '.join(new)}, but the --data of this run has no text in "
                f"{' or '.join(new)}. Remove {source.directory} from the task, and evaluate an exported checkpoint on "
                f"{source.directory} (`xscale export`, then `xscale eval`)"
            )
    if task.kind == "retrieval":
        sources = [source for source in sources if source.kind == "pair"]
        if not sources:
            raise UserError(
                f"{', '.join(task.data)} has no sentence pairs, which task retrieval needs. Use shards of pairs"
            )
    return sources


# Held-out losses


def make_heldout_streams(recipe: Recipe, corpus: Corpus, sources: list[Source]) -> list[Stream]:
    """Return the streams that can read held-out sources, with all their records as one step. Raises UserError if there
    is none, and if only some pairs of a source have the word links that a stream needs."""
    streams = list[Stream]()
    without_links = list[str]()
    for stream in corpus.streams.last:
        chosen = matching_source_indices(stream.objective.record_kind, recipe.streams[stream.name].languages, sources)
        if chosen and stream.objective.needs == "links":
            if not any(sources[number].linked_pair_count for number in chosen):
                without_links.append(stream.name)
                LOG.info(f"evaluation leaves out streams.{stream.name}: its evaluation data has no word alignments")
                continue
            chosen = select_sources_with_word_links(stream.name, chosen, sources)
        if chosen:
            stream = replace(stream, sources=chosen).with_sources_of_all_phases(sources, chosen)
            streams.append(replace(stream, samples=stream.active_record_count(sources)))
    if not streams:
        problem = "no stream of the recipe reads"
        if without_links:
            problem = (
                f"the data has no word alignments for the streams that need them ({', '.join(without_links)}), and no "
                "other stream of the recipe reads"
            )
        raise UserError(
            f"the evaluation data is {', '.join(f'{source.sorted_langs_name} ({source.kind})' for source in sources)}, "
            f"but {problem} text of this kind in these languages. Use other data, or remove the task"
        )
    return streams


def make_heldout_loader(task: EvalTask, loader: Loader) -> Loader:
    """Return a loader whose first step has all records of a task of held-out losses. Raises UserError."""
    recipe = loader.recipe
    sources = find_and_check_task_sources(task, recipe, loader.corpus)
    calibration = Calibration([fit_tokens_to_bytes(source, loader.corpus.tokenizer) for source in sources], {})
    tokens = source_sizes(sources, calibration, "tokens")
    streams = list[Stream]()
    measured = {}
    for stream in make_heldout_streams(recipe, loader.corpus, sources):
        if stream.reads_running_text:
            text = sum(tokens[source] for source in stream.sources)
            stream = replace(stream, samples=max(int(text / (SAMPLE_FILL * recipe.data.max_length)), 1))
        if hasattr(stream.options, "language_dropout"):
            stream = replace(stream, options=replace(stream.options, language_dropout=0.0))
        streams.append(stream)
        measured[stream.name] = replace(recipe.streams[stream.name], options=stream.options)
    data = replace(recipe.data, alpha=1.0, alpha_by="records", workers=0, first=None)
    recipe = replace(recipe, data=data, streams=measured, phases=())
    corpus = replace(loader.corpus, sources=sources, streams=Schedule.constant(streams))
    return replace(loader, recipe=recipe, corpus=corpus, calibration=calibration)


def measure_heldout_losses(
    engine: Any, recipe: Recipe, batch: StepBatch, rank: int, show_progress: Callable[[], None]
) -> Results:
    """Return a results row for each stream, and for each language of a stream. All ranks call it together. recipe and
    batch: those of `make_heldout_loader`."""
    sums = sum_evaluation_losses(engine, recipe, batch.rows, rank=rank, show_progress=show_progress)
    counts = batch.counts()
    counts_K = torch.tensor(list(counts.values()), dtype=torch.float64, device=sums.values_K.device)
    if dist.is_initialized():
        dist.all_reduce(sums.values_K)
        dist.all_reduce(counts_K)
    counts = dict(zip(counts, map(int, counts_K.tolist()), strict=True))
    sums_by_key = sums.by_key()
    metrics = stream_metrics(sums_by_key, counts, recipe) | language_metrics(sums_by_key, counts, recipe)
    with_targets = {key.stream for key, count in counts.items() if key.name == "count" and count}
    results: Results = {}
    for name, number in metrics.items():
        key = MetricKey.parse(name)
        if key.stream in with_targets:  # if all pairs are too long, a stream has no targets
            row = f"{key.stream} {key.language}".strip()
            results.setdefault(row, {})[f"{key.name}.{key.term}".rstrip(".")] = number
    return results


# Retrieval


class ModelInTraining(ExportedModel):
    """The encoder in training, with the interface of an exported model."""

    def __init__(self, recipe: Recipe, corpus: Corpus, engine: Any):
        self.device = engine.device
        self.encoder = engine.module.encoder
        self.tokenizer = corpus.tokenizer
        self.languages = [NEUTRAL, *corpus.languages]
        self.language_embeddings = recipe.any_stream_sets("language_embeddings")
        self.pooling = choose_pooling(recipe.identity()).pooling


def measure_retrieval(
    model: ModelInTraining,
    sources: list[Source],
    texts_of_sources: list[list[tuple[str, ...]]],
    show_progress: Callable[[], None],
) -> Results:
    """Return the results row `all` with the mean accuracy, and a row for each source: how often is a sentence's
    translation its nearest neighbour? Every rank encodes all sentences."""
    pairs = [source.sorted_langs_name for source in sources]
    results: Results = {}
    model.encoder.eval()
    for source, texts in zip(sources, texts_of_sources, strict=True):
        show_progress()
        row = source.sorted_langs_name
        if pairs.count(row) > 1:
            row += f" ({source.directory})"
        (results[row],) = retrieval.evaluate(model, texts, source.langs).values()
    model.encoder.train()
    accuracies = [scores["accuracy"] for scores in results.values()]
    means: Results = {ALL: {"accuracy": mean(accuracies)}}
    return means | results


# Results


def check_metric_is_measured(results: dict[str, Results], metric_path: str) -> None:
    """Raise UserError if a task was measured and lacks the metric of checkpoint.best. metric_path:
    TASK/ROW/METRIC."""
    task, row, name = metric_path.split("/", 2)
    if task in results and name not in results[task].get(row, {}):
        raise UserError(
            f"checkpoint.best: the evaluation does not measure {metric_path}. Write TASK/ROW/METRIC. The results of "
            f"the task {task} have the rows {', '.join(results[task])}. The row {row} has the metrics "
            f"{', '.join(results[task].get(row, {})) or '(none, because there is no such row)'}"
        )
