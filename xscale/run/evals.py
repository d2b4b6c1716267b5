"""What a run is measured with while it trains: the inline tasks of the recipe's `eval` section, split over the ranks.

All randomness of an evaluation is its own, and the same every time: a run that is measured trains bit for bit like one
that is not.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xscale.config import EvalTask
from xscale.data.calibration import Calibration
from xscale.data.loader import source_statistics, within
from xscale.data.mixture import PACK_FILL, StreamSpec, initial_state
from xscale.data.shards import Source, find_sources, take_first
from xscale.errors import UserError
from xscale.eval import retrieval
from xscale.eval.model import Exported, read_all
from xscale.eval.tasks import TASKS
from xscale.ranks import Process
from xscale.run.job import Job
from xscale.step.step import StepSums, gather_rows, measure_rows

Results = dict[str, dict[str, float]]
"""Row, such as a stream or a pair of languages -> name -> number."""
MEASURED = [name for name in TASKS if name not in ("aer", "mining", "mteb")]
"""Tasks of xscale.eval.run that need no more than --data."""
LEAST = "loss", "perplexity", "aer"
"""Numbers that are best where they are least have one of these in their names."""


def find_tasks(
    job: Job, engine: Any, process: Process, alignment: Callable[[], Results], note: Callable[[str], None]
) -> dict[str, Callable[[], Results]]:
    """The recipe's inline tasks by name, ready to be measured by all ranks together; rank 0's results are whole.
    alignment: measures the dictionaries' words. note: told how far a task has come. Raises UserError."""
    found: dict[str, Callable[[], Results]] = {}
    for task in job.recipe.eval.tasks:
        kind = task.name.partition(".")[0]
        if task.mode == "job":
            continue
        if engine.zero_optimization_stage() >= 3:
            raise UserError(
                f"eval.{task.name}: inline tasks take whole weights, which ZeRO stage 3 cuts up; use mode: job, or a "
                f"ds_config of stage 2 or lower"
            )
        if kind == "alignment":
            found[task.name] = alignment
        elif kind == "heldout":
            found[task.name] = Heldout(task, job, engine, process, note).measure
        else:
            found[task.name] = Retrieval(task, job, engine, process, note).measure
    return found


def check_tasks(job: Job) -> None:
    """Raises UserError for tasks that cannot be measured, as far as that is known before the run."""
    for task in job.recipe.eval.tasks:
        kind = task.name.partition(".")[0]
        if task.mode == "inline" and task.data:
            sources_of(task, job)
        elif task.mode == "job" and not task.command and kind not in MEASURED:
            raise UserError(
                f"eval.{task.name}: of --data alone xscale.eval.run measures {', '.join(MEASURED)}; or give a command"
            )
        elif task.mode == "job" and task.data and not task.command:
            find_data(task)


def sources_of(task: EvalTask, job: Job) -> list[Source]:
    """Raises UserError for data that the run trains on, or whose languages it does not know."""
    sources = take_first(find_data(task), task.limit)
    trained = {source.fingerprint: source for source in job.sources}
    for source in sources:
        if source.fingerprint in trained:
            raise UserError(f"eval.{task.name}: {source.directory} is trained on; give records that are held out")
        new = sorted(set(source.langs) - set(job.languages))
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


class Heldout:
    """The run's objectives on records that nothing is trained on: losses of every stream, and of every language."""

    def __init__(self, task: EvalTask, job: Job, engine: Any, process: Process, note: Callable[[str], None]):
        self.note = partial(note, f"measuring {task.name}")
        recipe, sources = job.recipe, sources_of(task, job)
        tokens = Calibration([source_statistics(source, job.tokenizer) for source in sources], {})
        specs = []
        for spec in job.specs:
            kind, languages = "mono" if spec.packed else "pair", recipe.streams[spec.name].languages
            chosen = [
                s
                for s, source in enumerate(sources)
                if source.kind == kind and (languages is None or within(languages, source.langs))
            ]
            samples = sum(sources[s].records for s in chosen)
            if spec.packed:
                samples = int(
                    sum(text_of(sources[s], s, tokens) for s in chosen) / (PACK_FILL * recipe.data.max_length)
                )
            if chosen:
                specs.append(StreamSpec(spec.name, tuple(chosen), max(samples, 1), spec.packed))
        if not specs:
            kinds = ", ".join(sorted({f"{source.name} ({source.kind})" for source in sources}))
            raise UserError(f"eval.{task.name}: no stream of the recipe reads any of {kinds}")
        streams = {spec.name: recipe.streams[spec.name] for spec in specs}
        data = replace(recipe.data, alpha=1.0, workers=0, first=None)
        recipe = replace(recipe, data=data, streams=streams)
        self.job = replace(job, sources=sources, recipe=recipe, specs=specs, calibration=tokens)
        (self.batch,) = self.job.batches(process, engine.device.type, initial_state(specs), 1)
        for source in sources:
            source.close()
        self.engine, self.process = engine, process

    def measure(self) -> Results:
        targets, counts = self.batch.targets(), self.batch.counts()
        sums = measure_rows(self.engine, self.job.recipe, self.batch.rows, rank=self.process.rank, note=self.note)
        numbers = torch.tensor([*targets.values(), *counts.values()], dtype=torch.float64)
        table = torch.cat([sums.values_K, numbers.to(sums.values_K.device)])
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
        found = sums.shares(totals_K, self.job.recipe, targets)
        results: Results = {}
        for name, number in (found | sums.by_language(totals_K, self.job.recipe, counts)).items():
            what, stream, *language = name.split("/")
            stream, _, term = stream.partition(".")
            results.setdefault(" ".join([stream, *language]), {})[f"{what}.{term}" if term else what] = number
        return results


def text_of(source: Source, number: int, tokens: Calibration) -> float:
    """Tokens of a source, as its bytes promise."""
    return sum(
        float(tokens.promised(number, source.lengths(s, slice(0, n))).sum()) for s, n in enumerate(source.counts)
    )


class Trained(Exported):
    """The encoder in training, in the clothes of an exported one."""

    def __init__(self, job: Job, engine: Any):
        self.device, self.encoder, self.tokenizer = engine.device, engine.module.encoder, job.tokenizer
        self.heads, self.languages, self.segments = {}, job.languages, job.segments
        self.language_embeddings = job.any_stream("language_embeddings")
        self.reset_positions = job.any_stream("reset_positions")
        self.lexicon_heldout = job.unseen


class Retrieval:
    """Which translations are nearest neighbours: every rank embeds a share of the sentences."""

    def __init__(self, task: EvalTask, job: Job, engine: Any, process: Process, note: Callable[[str], None]):
        self.note = partial(note, f"measuring {task.name}")
        self.sources = [source for source in sources_of(task, job) if source.kind == "pair"]
        if not self.sources:
            raise UserError(f"eval.{task.name}: {', '.join(task.data)} has no pairs")
        self.texts = [[texts for _, _, texts in read_all(source, task.limit)] for source in self.sources]
        self.model, self.process = Trained(job, engine), process
        self.encoder = engine.module.encoder

    def measure(self) -> Results:
        results, world = {}, self.process.world
        self.encoder.eval()
        for source, pairs in zip(self.sources, self.texts, strict=True):
            ids, sides = self.model.language_ids(source), []
            order = torch.tensor([n for rank in range(world) for n in range(rank, len(pairs), world)]).argsort()
            for side, language in enumerate(source.langs):
                self.note()
                texts = [texts[side] for texts in pairs[self.process.rank :: world]]
                (mine,) = retrieval.embed(self.model, texts, ids[language], ["mean"], [-1]).values()
                sides.append(gather_rows(mine.float())[0][order.to(mine.device)])
            results[source.pair] = retrieval.accuracies(sides[0], sides[1], "cosine", source.langs)
        self.encoder.train()
        return results


def number_of(results: dict[str, Results], path: str) -> float | None:
    """Of TASK/ROW/NUMBER."""
    task, row, name = path.split("/", 2)
    return results.get(task, {}).get(row, {}).get(name)


def better(path: str, number: float, than: float | None) -> bool:
    """Whether a number of this name is better than another; None: there is none."""
    name = path.rpartition("/")[2]
    return than is None or (number < than if any(part in name for part in LEAST) else number > than)
