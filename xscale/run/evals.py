"""What a run is measured with while it trains: the tasks of the recipe's `eval` section, split over the ranks.

All randomness of an evaluation is its own, and the same every time: a run that is measured trains bit for bit like one
that is not.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from xscale.config import EvalTask, StreamConfig
from xscale.data.calibrate import tokens_per_byte
from xscale.data.calibration import Calibration
from xscale.data.mixture import PACK_FILL, StreamSpec, initial_state
from xscale.data.shards import Source, find_sources, take_first
from xscale.data.streams import matches_languages
from xscale.errors import UserError
from xscale.eval import retrieval
from xscale.eval.alignment_score import FEWEST, find_probe
from xscale.eval.model import Exported, read_all
from xscale.models.build import NEUTRAL
from xscale.ranks import HostGroup, Process
from xscale.run.checks import check_needs
from xscale.run.run_spec import RunSpec, check_sizes
from xscale.step.module import StepModule
from xscale.step.step import StepSums, gather_rows, measure_rows

Results = dict[str, dict[str, float]]
"""Row, such as a stream or a pair of languages -> name -> number."""
REHEARSED = 8
"""Records that a dry run measures, to see that a number is there."""
LEAST = "loss", "perplexity", "aer"
"""Numbers that are best where they are least have one of these in their names."""


def find_tasks(
    run_spec: RunSpec, engine: Any, process: Process, alignment: Callable[[], Results], note: Callable[[str], None]
) -> dict[str, Callable[[], Results]]:
    """The recipe's tasks by name, ready to be measured by all ranks together; rank 0's results are whole. alignment:
    measures the dictionaries' words. note: told how far a task has come. Raises UserError."""
    found: dict[str, Callable[[], Results]] = {}
    for task in run_spec.recipe.eval.tasks:
        if task.kind == "alignment":
            found[task.name] = alignment
        elif task.kind == "heldout":
            found[task.name] = Heldout(task, run_spec, engine, process, note).measure
        else:
            found[task.name] = Retrieval(task, run_spec, engine, process, note).measure
    return found


def check_tasks(run_spec: RunSpec, stage: int, host_group: HostGroup | None = None) -> None:
    """Raises UserError for tasks that cannot be measured, as training does for its own streams. stage: of ZeRO."""
    best = run_spec.recipe.checkpoint.best
    for task in run_spec.recipe.eval.tasks:
        if stage >= 3:
            raise UserError(
                f"eval.{task.name}: tasks take whole weights, which ZeRO stage 3 cuts up; measure by checkpoint.hook, "
                f"or take a ds_config of stage 2 or lower"
            )
        try:
            rows = rows_of(task, run_spec, host_group)
        except UserError as error:
            text = str(error).removeprefix("--data ")
            raise UserError(text if text.startswith("eval.") else f"eval.{task.name}: {text}") from None
        if best and best.partition("/")[0] == task.name and best.split("/", 2)[1] not in rows:
            there = ", ".join(f"{task.name}/{row}" for row in rows)
            raise UserError(f"checkpoint.best: {best} is not measured; there are numbers of {there}")


def rows_of(task: EvalTask, run_spec: RunSpec, host_group: HostGroup | None) -> list[str]:
    """Of its results. Raises UserError where they cannot be measured."""
    if task.kind == "alignment":
        return list(alignment_rows(run_spec))
    sources = sources_of(task, run_spec)
    check_sizes(sources, host_group)
    if task.kind == "retrieval":
        return list(pairs_of(task, sources))
    specs = heldout_specs(task, run_spec, sources)
    check_needs(run_spec.recipe, run_spec.tokenizer, specs, sources)
    names = [(spec.name, of) for spec in specs for s in spec.sources for of in (sources[s].pair, *sources[s].langs)]
    return list(dict.fromkeys([*(spec.name for spec in specs), *(" ".join(of_stream) for of_stream in names)]))


def alignment_rows(run_spec: RunSpec) -> Results:
    """By dictionary the scores that enough of its words are there for, without numbers. Raises UserError for none."""
    lexicons = run_spec.lexicons + run_spec.measured
    if not lexicons:
        raise UserError("the run has no dictionary; set data.lexicons=[PATH/en-de.txt], or put it into lexicon/")
    nothing = {language: np.empty(0, dtype=np.int64) for lexicon in lexicons for language in lexicon.langs}
    gold = find_probe(lexicons, run_spec.lexicons, run_spec.unseen, nothing)
    enough = {
        name: {kind: pairs for kind, pairs in zip(("withheld", "trained"), (of.withheld, of.trained), strict=True)}
        for name, of in gold.items()
    }
    return {
        name: {kind: math.nan for kind, pairs in kinds.items() if len(pairs.queries) >= FEWEST}
        for name, kinds in enough.items()
    }


def validate_best(run_spec: RunSpec, module: StepModule) -> None:
    """Raises UserError for a checkpoint.best that the first evaluation would not find, by a few records of it."""
    best = run_spec.recipe.checkpoint.best
    task = next((task for task in run_spec.recipe.eval.tasks if best and best.partition("/")[0] == task.name), None)
    if best is None or task is None:
        return
    row = best.split("/", 2)[1]
    if task.kind == "alignment":
        results = alignment_rows(run_spec)
    elif task.kind == "retrieval":
        ((_, source),) = [of for of in pairs_of(task, sources_of(task, run_spec)).items() if of[0] == row]
        results = {row: retrieval.accuracies(torch.eye(2), torch.eye(2), "cosine", source.langs)}
    else:
        stream, _, language = row.partition(" ")
        few = replace(task, limit=min(task.limit, REHEARSED))
        sources = [s for s in sources_of(few, run_spec) if not language or language in (s.pair, *s.langs)]
        alone = replace(run_spec, specs=[spec for spec in run_spec.specs if spec.name == stream])
        engine = SimpleNamespace(module=module, device=torch.device("cpu"))
        results = Heldout(few, alone, engine, Process(0, 1, 0, 1), lambda doing: None, sources).measure()
    check_number({task.name: results}, best)


def sources_of(task: EvalTask, run_spec: RunSpec) -> list[Source]:
    """Raises UserError for data that the run trains on, or whose languages it does not know."""
    sources = take_first(find_data(task), task.limit)
    trained = {source.fingerprint: source for source in run_spec.sources}
    for source in sources:
        if source.fingerprint in trained:
            raise UserError(f"eval.{task.name}: {source.directory} is trained on; give records that are held out")
        new = sorted(set(source.langs) - set(run_spec.languages))
        if new:
            raise UserError(
                f"eval.{task.name}: {source.directory} is in {' and '.join(new)}, which no --data of the run has"
            )
    return sources


def find_data(task: EvalTask) -> list[Source]:
    """Raises UserError, which names the task."""
    try:
        return find_sources([Path(path) for path in task.data])
    except UserError as error:
        raise UserError(f"eval.{task.name}: {str(error).removeprefix('--data ')}") from None


def heldout_specs(task: EvalTask, run_spec: RunSpec, sources: list[Source]) -> list[StreamSpec]:
    """Which of the sources each stream reads, all records of pairs. Raises UserError for none."""
    specs = []
    for spec in run_spec.specs:
        kind, languages = "mono" if spec.packed else "pair", run_spec.recipe.streams[spec.name].languages
        chosen = [
            s
            for s, source in enumerate(sources)
            if source.kind == kind and (languages is None or matches_languages(languages, source.langs))
        ]
        if chosen:
            specs.append(StreamSpec(spec.name, tuple(chosen), sum(sources[s].records for s in chosen), spec.packed))
    if not specs:
        kinds = ", ".join(sorted({f"{source.pair} ({source.kind})" for source in sources}))
        raise UserError(f"eval.{task.name}: no stream of the recipe reads any of {kinds}")
    return specs


class Heldout:
    """The run's objectives on records that nothing is trained on: losses of every stream, and of every language."""

    def __init__(
        self,
        task: EvalTask,
        run_spec: RunSpec,
        engine: Any,
        process: Process,
        note: Callable[[str], None],
        sources: list[Source] | None = None,
    ):
        """sources: instead of all of the task's."""
        self.note = partial(note, f"measuring {task.name}")
        recipe, sources = run_spec.recipe, sources or sources_of(task, run_spec)
        tokens = Calibration([(tokens_per_byte(source, run_spec.tokenizer), 0.0) for source in sources], {})
        specs = heldout_specs(task, run_spec, sources)
        for i, spec in enumerate(specs):
            if spec.packed:
                text = sum(text_of(sources[s], s, tokens) for s in spec.sources)
                specs[i] = replace(spec, samples=max(int(text / (PACK_FILL * recipe.data.max_length)), 1))
        streams = {spec.name: with_languages(recipe.streams[spec.name]) for spec in specs}
        data = replace(recipe.data, alpha=1.0, workers=0, first=None)
        recipe = replace(recipe, data=data, streams=streams)
        self.run_spec = replace(run_spec, sources=sources, recipe=recipe, specs=specs, calibration=tokens)
        (self.batch,) = self.run_spec.batches(process, engine.device.type, initial_state(specs), 1)
        for source in sources:
            source.close()
        self.engine, self.process = engine, process

    def measure(self) -> Results:
        targets, counts = self.batch.targets(), self.batch.counts()
        sums = measure_rows(self.engine, self.run_spec.recipe, self.batch.rows, rank=self.process.rank, note=self.note)
        numbers = torch.tensor([*targets.values(), *counts.values()], dtype=torch.float64)
        table = torch.cat([sums.values_K, numbers.to(sums.values_K.device)])
        if dist.is_initialized():  # not in a dry run
            dist.all_reduce(table)
        totals, *whole = (part.tolist() for part in table.split([len(sums.values_K), len(targets), len(counts)]))
        of_all = [map(int, part) for part in whole]
        return self.results(
            sums, totals, dict(zip(targets, of_all[0], strict=True)), dict(zip(counts, of_all[1], strict=True))
        )

    def results(
        self,
        sums: StepSums,
        totals_K: list[float],
        targets: dict[tuple[str, str], int],
        counts: dict[tuple[str, str, str], int],
    ) -> Results:
        """A row for each stream, and for each of its languages. All numbers are of all ranks."""
        found = sums.shares(totals_K, self.run_spec.recipe, targets)
        results: Results = {}
        for name, number in (found | sums.by_language(totals_K, self.run_spec.recipe, counts)).items():
            what, stream, *language = name.split("/")
            stream, _, term = stream.partition(".")
            if not any(n for (of, _), n in targets.items() if of == stream):
                continue  # all of it was too long: its sums are 0 of nothing
            results.setdefault(" ".join([stream, *language]), {})[f"{what}.{term}" if term else what] = number
        return results


def with_languages(stream: StreamConfig) -> StreamConfig:
    """Which hides the language of no sequence."""
    if not hasattr(stream.options, "language_dropout"):
        return stream
    return replace(stream, options=replace(stream.options, language_dropout=0.0))


def text_of(source: Source, number: int, tokens: Calibration) -> float:
    """Tokens of a source, as its bytes promise."""
    return sum(
        float(tokens.estimated_tokens(number, source.lengths(s, slice(0, n))).sum())
        for s, n in enumerate(source.counts)
    )


class Trained(Exported):
    """The encoder in training, in the clothes of an exported one."""

    def __init__(self, run_spec: RunSpec, engine: Any):
        self.device, self.encoder, self.tokenizer = engine.device, engine.module.encoder, run_spec.tokenizer
        self.heads, self.languages, self.segments = {}, [NEUTRAL, *run_spec.languages], run_spec.segments
        self.language_embeddings = run_spec.any_stream("language_embeddings")
        self.reset_positions = run_spec.any_stream("reset_positions")
        self.lexicon_heldout = run_spec.unseen


def pairs_of(task: EvalTask, sources: list[Source]) -> dict[str, Source]:
    """Sources of pairs by the names of their rows. Raises UserError for none."""
    pairs = [source for source in sources if source.kind == "pair"]
    if not pairs:
        raise UserError(f"eval.{task.name}: {', '.join(task.data)} has no pairs")
    times = Counter(source.pair for source in pairs)
    return {s.pair if times[s.pair] == 1 else f"{s.pair} ({s.directory})": s for s in pairs}


class Retrieval:
    """Which translations are nearest neighbours: every rank embeds a share of the sentences."""

    def __init__(self, task: EvalTask, run_spec: RunSpec, engine: Any, process: Process, note: Callable[[str], None]):
        self.note = partial(note, f"measuring {task.name}")
        self.sources = pairs_of(task, sources_of(task, run_spec))
        self.texts = [[texts for _, _, texts in read_all(source, task.limit)] for source in self.sources.values()]
        self.model, self.process = Trained(run_spec, engine), process
        self.encoder = engine.module.encoder

    def measure(self) -> Results:
        results, world = {}, self.process.world
        self.encoder.eval()
        for (row, source), pairs in zip(self.sources.items(), self.texts, strict=True):
            ids, sides = self.model.language_ids(source), []
            order = torch.tensor([n for rank in range(world) for n in range(rank, len(pairs), world)]).argsort()
            for side, language in enumerate(source.langs):
                self.note()
                texts = [texts[side] for texts in pairs[self.process.rank :: world]]
                (mine,) = retrieval.embed(self.model, texts, ids[language], ["mean"], [-1]).values()
                sides.append(gather_rows(mine.float())[0][order.to(mine.device)])
            results[row] = retrieval.accuracies(sides[0], sides[1], "cosine", source.langs)
        self.encoder.train()
        return results


def number_of(results: dict[str, Results], path: str) -> float | None:
    """Of TASK/ROW/NUMBER."""
    task, row, name = path.split("/", 2)
    return results.get(task, {}).get(row, {}).get(name)


def check_number(results: dict[str, Results], path: str) -> float | None:
    """The same. Raises UserError where its task was measured and there is no number of this name."""
    task, row, name = path.split("/", 2)
    if task in results and name not in results[task].get(row, {}):
        there = sorted(f"{task}/{row}/{name}" for row, of in results[task].items() for name in of)
        raise UserError(f"checkpoint.best: {path} is not measured; there are {', '.join(there) or 'none'}")
    return number_of(results, path)


def better(path: str, number: float, than: float | None) -> bool:
    """Whether a number of this name is better than another; None: there is none."""
    name = path.rpartition("/")[2]
    return than is None or (number < than if any(part in name for part in LEAST) else number > than)
