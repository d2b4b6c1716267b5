"""Evaluates a run while it trains, and finds its best checkpoint.

evals.jsonl has an object in each line, {"step", "results": {task: {row: {name: number}}}, "intervals", "seconds"};
"intervals", the 95 % intervals, has the form of "results". A resume removes the lines of steps after its checkpoint.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from xscale import files
from xscale.checkpoint import store as checkpoints
from xscale.errors import LOG, UserError
from xscale.eval.bootstrap import format_name_and_score, intervals_of_scores
from xscale.eval.in_training import Results, check_metric_is_measured
from xscale.metric_keys import ALL, better_direction
from xscale.recipe import Recipe
from xscale.run.metrics import JsonLines, RunMetrics
from xscale.run.watch import RunContext

EVALS = "evals.jsonl"


class Validation:
    """The evaluations of one run, on every rank. Rank 0 writes the files."""

    def __init__(
        self,
        context: RunContext,
        recipe: Recipe,
        tasks: dict[str, Callable[[], Results]],
        step: int,
        metrics: RunMetrics,
    ):
        """Prepare to measure. tasks: the result of in_training.make_task_functions. step: evaluations up to this step
        are kept in evals.jsonl; -1: none."""
        self.context = context
        self.recipe = recipe
        self.tasks = tasks
        self.metrics = metrics
        self.checkpoints = context.out / "checkpoints"
        self.goodness: dict[int, float] = {}
        """Step -> the number that checkpoint.best names, where it is finite, and negative if lower numbers are better.
        On rank 0 only."""
        self.best = recipe.checkpoint.best or ""
        """The path TASK/ROW/METRIC of the number by which the best checkpoint is chosen, or an empty string."""
        if self.best:
            context.cpu_group.value_from_main(lambda: self.read_evaluations_and_write_best(step))
        self.lines = JsonLines(context.out / EVALS if recipe.eval.tasks and context.cpu_group.is_main else None, step)

    def read_evaluations_and_write_best(self, step: int) -> None:
        """Note the numbers of the evaluations up to `step`, and write the name of the best checkpoint. Rank 0 only.
        Raises UserError if evals.jsonl has no line of the checkpoint that the file `best` names."""
        path = self.context.out / EVALS
        evaluated = set[float]()
        for _, entry in files.read_ends_and_entries_backwards(path) if path.exists() else ():
            with suppress(LookupError, AttributeError, TypeError, OverflowError):  # a damaged line
                if entry["step"] <= step:
                    self.note_score_of_step(entry["step"], entry["results"])
                    evaluated.add(entry["step"])
        file = self.checkpoints / checkpoints.BEST
        name = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
        for checkpoint in checkpoints.list_checkpoints(self.checkpoints):
            saved = checkpoints.step_from_name(checkpoint)
            if checkpoint.name == name and saved <= step and saved not in evaluated:  # later ones are made again
                raise UserError(
                    f"{path} has no undamaged line with the scores of the best checkpoint, {checkpoint}. Restore "
                    f"{path} from a copy, or remove {file} to choose the best checkpoint by the other scores"
                )
        self.write_name_of_best_checkpoint()

    def note_score_of_step(self, step: int, results: dict[str, Any]) -> None:
        """Note the number that checkpoint.best names, if the results of a step have it. Rank 0 only."""
        task, row, name = self.best.split("/", 2)
        number = results.get(task, {}).get(row, {}).get(name)
        if number is not None and math.isfinite(number):
            self.goodness[step] = -number if better_direction(name) < 0 else number

    def best_checkpoint(self) -> Path | None:
        """Return the complete checkpoint with the best number, the earliest if several have it. Rank 0 only."""
        complete = checkpoints.list_checkpoints(self.checkpoints)
        measured = [path for path in complete if checkpoints.step_from_name(path) in self.goodness]
        return max(measured, key=lambda path: self.goodness[checkpoints.step_from_name(path)], default=None)

    def write_name_of_best_checkpoint(self) -> set[int]:
        """Write the name of the best checkpoint to checkpoints/best. Return its step, because this checkpoint must stay
        on disk. Rank 0 only."""
        best = self.best_checkpoint()
        file = self.checkpoints / checkpoints.BEST
        with suppress(OSError):  # until the next save, the file names the previous checkpoint
            if best:
                files.write_text(file, best.name + "\n")
            else:
                file.unlink(missing_ok=True)
        return {checkpoints.step_from_name(best)} if best else set()

    def evaluate_if_due_and_check_if_best(self, step: int) -> bool:
        """Evaluate after a step, if it is due, on all ranks together. Return whether the step is better than all
        checkpoints, by the number that checkpoint.best names."""
        section = self.recipe.eval
        if not section.tasks or (step % section.every and step != self.recipe.train.steps):
            return False
        self.metrics.reduce_and_report_steps()
        self.context.watch.note_progress(f"evaluating after step {step}")
        results = dict[str, Results]()
        started = time.monotonic()
        for name, task in self.tasks.items():
            results[name] = task()
        if self.lines.file:
            self.report_results(step, results, time.monotonic() - started)
        return bool(self.best) and self.context.cpu_group.value_from_main(
            lambda: self.note_score_and_check_if_best_on_disk(step, results)
        )

    def note_score_and_check_if_best_on_disk(self, step: int, results: dict[str, Results]) -> bool:
        """Note the number of an evaluation. Return whether it is better than those of all checkpoints. Rank 0 only.
        Raises UserError if the results lack the number."""
        check_metric_is_measured(results, self.best)
        best = self.best_checkpoint()
        self.note_score_of_step(step, results)
        least = -math.inf if best is None else self.goodness[checkpoints.step_from_name(best)]
        return self.goodness.get(step, -math.inf) > least

    def report_results(self, step: int, results: dict[str, Results], seconds: float) -> None:
        """Write the results of all tasks to evals.jsonl, TensorBoard and the log. Rank 0 only."""
        self.lines.add_line_for_next_flush(
            {
                "step": step,
                "results": results,
                "intervals": intervals_of_scores(results),
                "seconds": round(seconds, 3),
            }
        )
        entry: dict[str, Any] = {"step": step}
        shown = [f"evaluation after step {step} took {seconds:.1f} s"]
        for task, rows in results.items():
            for row, scores in rows.items():
                for name, number in scores.items():
                    entry[f"eval/{task}/{row}/{name}"] = number
                if row == ALL or (ALL not in rows and " " not in row):  # without the single languages and pairs
                    texts = [format_name_and_score(name, number) for name, number in scores.items()]
                    shown.append(f"  {task} {row}: {', '.join(texts)}")
        self.metrics.board.write([entry])
        LOG.info("\n".join(shown))
