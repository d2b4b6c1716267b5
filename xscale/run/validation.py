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
from xscale.eval.bootstrap import format_score, intervals
from xscale.eval.in_training import Results, find_number, with_overall_means
from xscale.metric_keys import ALL, is_better
from xscale.recipe import Recipe
from xscale.run.metrics import LOG, JsonLines, entries_from_end
from xscale.run.reporting import RunMetrics
from xscale.run.state import RunContext

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
        """Prepare to measure. tasks: the result of in_training.measure_functions. step: evaluations up to this step are
        kept in evals.jsonl; -1: none."""
        self.context = context
        self.recipe = recipe
        self.tasks = tasks
        self.metrics = metrics
        best = recipe.checkpoint.best
        self.best_of = best.split("/", 2) if best else []
        """The task, the row and the name of the number by which the best checkpoint is chosen, if there is one."""
        path = context.out / EVALS if recipe.eval.tasks and context.host_group.is_main else None
        self.lines = JsonLines(path, step)
        self.best_so_far: int | None = None
        """The last step of this start whose evaluation was better than those of all checkpoints."""
        self.numbers: dict[int, float] = {}
        """Step -> the number that checkpoint.best names, where it is finite. On rank 0 only."""
        if self.best_of:
            self.context.host_group.from_main(lambda: self.read_earlier(context.out / EVALS))

    def read_earlier(self, evaluations: Path) -> None:
        """Read the numbers of the evaluations before this start, and name the best checkpoint. Rank 0 only."""
        task, row, name = self.best_of
        for _, entry in entries_from_end(evaluations):
            number = (entry.get("results") or {}).get(task, {}).get(row, {}).get(name)
            if number is not None:
                self.numbers[entry["step"]] = number
        self.name_best_checkpoint()

    def becomes_best(self, step: int, number: float | None) -> bool:
        """Note the number of an evaluation. Return whether it is better than the numbers of all checkpoints. Rank 0
        only."""
        if number is None or not math.isfinite(number):
            return False
        best = self.best_checkpoint()
        earlier = self.numbers[checkpoints.step_from_name(best)] if best else None
        self.numbers[step] = number
        return is_better(self.best_of[2], number, earlier)

    def best_checkpoint(self) -> Path | None:
        """Return the complete checkpoint with the best number, the earliest if several have it. Rank 0 only."""
        best: Path | None = None
        best_number: float | None = None
        for path in checkpoints.list_checkpoints(self.context.out / "checkpoints"):
            number = self.numbers.get(checkpoints.step_from_name(path))
            if number is not None and is_better(self.best_of[2], number, best_number):
                best = path
                best_number = number
        return best

    def name_best_checkpoint(self) -> set[int]:
        """Write the name of the best checkpoint to checkpoints/best. Return its step, which must stay on disk, or an
        empty set. Rank 0 only."""
        if not self.best_of:
            return set()
        best = self.best_checkpoint()
        if best is None:
            with suppress(OSError):  # the file may name a checkpoint that was best by another number
                (self.context.out / "checkpoints" / checkpoints.BEST).unlink(missing_ok=True)
            return set()
        with suppress(OSError):  # until the next save, the file names the previous checkpoint
            files.write_text(best.with_name(checkpoints.BEST), best.name + "\n")
        return {checkpoints.step_from_name(best)}

    def due(self, step: int) -> bool:
        section = self.recipe.eval
        return bool(section.tasks) and (step % section.every == 0 or step == self.recipe.train.steps)

    def measure(self, step: int) -> None:
        """Measure the tasks, on all ranks together."""
        self.context.watch.note(f"measuring step {step}")
        results = dict[str, Results]()
        started = time.monotonic()
        for name, task in self.tasks.items():
            results[name] = with_overall_means(name, task())
        seconds = time.monotonic() - started
        if results and self.lines.file:
            self.report(step, results, seconds)
        best = self.recipe.checkpoint.best
        if best and self.context.host_group.from_main(lambda: self.becomes_best(step, find_number(results, best))):
            self.best_so_far = step

    def report(self, step: int, results: dict[str, Results], seconds: float) -> None:
        """Write the results of all tasks to evals.jsonl, TensorBoard and the log. Rank 0 only."""
        line = {"step": step, "results": results, "intervals": intervals(results), "seconds": round(seconds, 3)}
        self.lines.write(line)
        entry: dict[str, Any] = {"step": step}
        shown = [f"evaluation of step {step}, which took {seconds:.1f} s"]
        for task, rows in results.items():
            for row, scores in rows.items():
                for name, number in scores.items():
                    entry[f"eval/{task}/{row}/{name}"] = number
                if not is_covered_by_mean(row, rows):
                    texts = [format_score(name, number) for name, number in scores.items()]
                    shown.append(f"  {task} {row}: {', '.join(texts)}")
        self.metrics.board.add(entry)
        LOG.info("\n".join(shown))


def is_covered_by_mean(row: str, rows: dict[str, Any]) -> bool:
    """Return whether a results row is that of one of several languages or pairs. rows: all rows of the task."""
    mean = f"{row.partition(' ')[0]} {ALL}" if " " in row else ALL
    return row != mean and mean in rows
