"""Validation measures a run and finds its best checkpoint.

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
from xscale.run.state import RunContext, TrainState
from xscale.run.stopper import Stopper

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
        stopper: Stopper,
    ):
        """Prepare to measure. tasks: the result of in_training.measure_functions. step: evaluations up to this step are
        kept in evals.jsonl; -1: none."""
        self.section = recipe.eval
        self.best_of = recipe.checkpoint.best
        self.last = recipe.train.steps
        self.tasks = tasks
        self.folder = context.out / "checkpoints"
        self.host_group = context.host_group
        self.watch = context.watch
        self.metrics = metrics
        self.stopper = stopper
        path = context.out / EVALS if self.section.tasks and context.host_group.is_main else None
        self.lines = JsonLines(path, step)
        self.best_so_far: int | None = None
        """The last step of this start whose evaluation was the best so far."""
        self.best: tuple[int, float] | None = None
        """The step and the number of the best checkpoint."""
        self.candidate: tuple[int, float] | None = None
        """The step and the number of a better evaluation, if its checkpoint is not published yet."""
        if self.best_of:
            self.host_group.from_main(lambda: self.find_best(context.out / EVALS))

    def find_best(self, evaluations: Path) -> None:
        """Find the best of the existing checkpoints. evaluations: the file of those before this start. Rank 0
        only."""
        assert self.best_of
        there = {checkpoints.step_of(path): path for path in checkpoints.list_checkpoints(self.folder)}
        earlier = list(entries_from_end(evaluations))
        for _, entry in reversed(earlier):
            task, row, name = self.best_of.split("/", 2)
            number = (entry.get("results") or {}).get(task, {}).get(row, {}).get(name)
            if entry["step"] in there and self.becomes_candidate(entry["step"], number):
                self.best = self.candidate
        with suppress(OSError):
            if self.best is None:
                (self.folder / checkpoints.BEST).unlink(missing_ok=True)
            else:
                files.write_text(self.folder / checkpoints.BEST, there[self.best[0]].name + "\n")

    def becomes_candidate(self, step: int, number: float | None) -> bool:
        """Return whether the step is the best so far; if it is, make it the candidate. Rank 0 only."""
        assert self.best_of
        best = self.best and self.best[1]
        if number is None or not math.isfinite(number) or not is_better(self.best_of.split("/", 2)[2], number, best):
            return False
        self.candidate = (step, number)
        return True

    def due(self, step: int) -> bool:
        return bool(self.section.tasks) and (step % self.section.every == 0 or step == self.last)

    def after_step(self, state: TrainState) -> None:
        """Measure the tasks if an evaluation is due, unless the run is about to stop."""
        if self.due(state.step) and not self.stopper.stops_next():
            self.metrics.flush()
            self.measure(state.step)

    def measure(self, step: int) -> None:
        """Measure the tasks, on all ranks together."""
        self.watch.note(f"measuring step {step}")
        results = dict[str, Results]()
        started = time.monotonic()
        for name, task in self.tasks.items():
            results[name] = with_overall_means(name, task())
        seconds = time.monotonic() - started
        if results and self.lines.file:
            self.report(step, results, seconds)
        best = self.best_of
        if best and self.host_group.from_main(lambda: self.becomes_candidate(step, find_number(results, best))):
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
                if not is_single(row, rows):
                    texts = [format_score(name, number) for name, number in scores.items()]
                    shown.append(f"  {task} {row}: {', '.join(texts)}")
        if self.metrics.reporter:
            self.metrics.reporter.add(entry)
        LOG.info("\n".join(shown))

    def published(self, step: int, path: Path) -> set[int]:
        """Note a new checkpoint. Returns the steps whose checkpoints must stay. Rank 0 only."""
        if self.candidate and self.candidate[0] == step:
            with suppress(OSError):  # until then, the file `best` names the previous checkpoint
                files.write_text(path.parent / checkpoints.BEST, path.name + "\n")
                self.best = self.candidate
        return {self.best[0]} if self.best else set()

    def sync(self) -> None:
        """Write all lines to disk."""
        self.lines.flush(to_disk=True)

    def close(self) -> None:
        self.lines.close()


def is_single(row: str, rows: dict[str, Any]) -> bool:
    """Return whether a results row is that of one of several languages or pairs. rows: all rows of the task."""
    mean = f"{row.partition(' ')[0]} {ALL}" if " " in row else ALL
    return row != mean and mean in rows
