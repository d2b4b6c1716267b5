"""Validation measures a run and finds its best checkpoint.

evals.jsonl has an object in each line, {"step", "results": {task: {row: {name: number}}}, "intervals", "seconds"};
"intervals", the 95 % intervals, has the form of "results". A resume removes the lines of steps after its checkpoint.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from xscale import files
from xscale.checkpoint import store as checkpoints
from xscale.eval.bootstrap import intervals
from xscale.eval.in_training import Results, find_number, with_overall_means
from xscale.metric_keys import ALL, is_better
from xscale.recipe import Recipe
from xscale.run.metrics import LOG, JsonLines, entries_from_end
from xscale.run.reporting import RunMetrics
from xscale.run.state import RunContext, TrainState
from xscale.run.stopper import Stopper

EVALS = "evals.jsonl"
ROWS = 12
MAIN = ("loss", "accuracy", "withheld")
"""The log shows at most ROWS results rows. For each row, it shows the first score in MAIN that the row has."""


class ResultsRow(NamedTuple):
    """The scores of one row of a task's results."""

    task: str
    name: str
    scores: dict[str, float]

    @property
    def title(self) -> str:
        return f"{self.task} {self.name}"

    @property
    def main(self) -> str:
        """The name of the score that the log shows."""
        return next((name for name in MAIN if name in self.scores), next(iter(self.scores)))


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
        self.best_numbers: dict[str, tuple[int, float]] = {}
        """Title of a results row -> the best step and its main score."""
        earlier = list[tuple[int, dict[str, Results]]]()
        for _, entry in entries_from_end(path) if path else ():
            earlier.insert(0, (entry["step"], with_nan(entry.get("results") or {})))
        for earlier_step, results in earlier:
            self.log_lines(earlier_step, results)
        if self.best_of:
            self.host_group.from_main(lambda: self.find_best(earlier))

    def find_best(self, earlier: list[tuple[int, dict[str, Results]]]) -> None:
        """Find the best of the existing checkpoints. earlier: the step and the results of each evaluation before
        this start. Rank 0 only. Raises UserError if an evaluation lacks the score that checkpoint.best names."""
        assert self.best_of
        there = {checkpoints.step_of(path): path for path in checkpoints.complete_steps(self.folder)}
        for step, results in earlier:
            number = find_number(results, self.best_of)
            if step in there and self.becomes_candidate(step, number):
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
        for row in self.rows_in_order(results):
            for name, number in row.scores.items():
                entry[f"eval/{row.task}/{row.name}/{name}"] = number
        if self.metrics.reporter:
            self.metrics.reporter.add(entry)
        heading = f"evaluation of step {step}, which took {seconds:.1f} s"
        LOG.info("\n".join([heading, *self.log_lines(step, results)]))

    def log_lines(self, step: int, results: dict[str, Results]) -> list[str]:
        """Return a line for each of the most important results rows: the row's main number, and the best such number so
        far with its step. ✓ means that this step is the best so far."""
        rows = self.rows_in_order(results)
        title_width = max((len(row.title) for row in rows), default=0)
        number_width = max((len(f"{row.main} {row.scores[row.main]:.4g}") for row in rows), default=0)
        lines = list[str]()
        for row in rows:
            number = f"{row.main} {row.scores[row.main]:.4g}"
            mark = self.mark_of(row, step)
            lines.append(f"  {row.title:{title_width}}  {number:{number_width}}  {mark}".rstrip())
        if len(rows) > ROWS:
            lines[ROWS:] = [f"  and {len(rows) - ROWS} more in {EVALS}"]
        return lines

    def rows_in_order(self, results: dict[str, Results]) -> list[ResultsRow]:
        """Return the rows with numbers: first the row that chooses the best checkpoint, then streams and means, then
        single languages."""
        best_row = (self.best_of or "").rpartition("/")[0]
        first = list[ResultsRow]()
        whole = list[ResultsRow]()
        single = list[ResultsRow]()
        for task, rows in results.items():
            for name, scores in rows.items():
                row = ResultsRow(task, name, scores)
                if not scores:
                    continue
                if f"{task}/{name}" == best_row:
                    first.append(row)
                elif is_single(row, rows):
                    single.append(row)
                else:
                    whole.append(row)
        return first + whole + single

    def mark_of(self, row: ResultsRow, step: int) -> str:
        """Note the row's number of this step, and return what the log says about the best number so far."""
        number = row.scores[row.main]
        best = self.best_numbers.get(row.title)
        if math.isfinite(number) and is_better(row.main, number, best and best[1]):
            self.best_numbers[row.title] = (step, number)
            return "✓ best"
        if best is None:
            return ""
        return f"best {best[1]:.4g} at step {best[0]}"

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


def is_single(row: ResultsRow, rows: Results) -> bool:
    """Return whether a row has the scores of a single language or pair. rows: all rows of the task."""
    if row.task.startswith("heldout"):
        return " " in row.name
    return row.name != ALL and ALL in rows


def with_nan(results: dict[str, Results]) -> dict[str, Results]:
    """Return the results of a line of evals.jsonl, with NaN in place of null."""
    with_numbers = dict[str, Results]()
    for task, rows in results.items():
        with_numbers[task] = {}
        for row, numbers in rows.items():
            with_numbers[task][row] = {name: math.nan if v is None else v for name, v in numbers.items()}
    return with_numbers
