"""Validation measures a run and finds its best checkpoint.

evals.jsonl has an object in each line, {"step", "results": {task: {row: {name: number}}}, "intervals", "seconds"};
"intervals", the 95 % intervals, has the form of "results". A resume removes the lines of steps after its checkpoint.
"""

import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from xscale import files
from xscale.checkpoint import store as checkpoints
from xscale.eval.bootstrap import intervals
from xscale.eval.in_training import Results, find_number, with_overall_means
from xscale.metric_keys import ALL, is_better
from xscale.ranks import HostGroup
from xscale.run.metrics import LOG, JsonLines, Reporter, entries_from_end
from xscale.run_spec import RunSpec

EVALS = "evals.jsonl"
MAIN, ROWS = ("loss", "accuracy", "withheld"), 12
"""The log shows at most ROWS results rows, and of each row the first number in MAIN that the row has."""


class Validation:
    """The evaluations of one run, on every rank. Rank 0 writes the files."""

    def __init__(
        self,
        run_spec: RunSpec,
        tasks: dict[str, Any],
        out: Path,
        host_group: HostGroup,
        step: int,
        reporter: Reporter | None,
    ):
        """Prepare to measure. tasks: the result of in_training.measure_functions. step: the last step whose evaluation
        is kept, or -1."""
        self.section = run_spec.recipe.eval
        self.best_of = run_spec.recipe.checkpoint.best
        self.tasks = tasks
        self.out = out
        self.host_group = host_group
        self.reporter = reporter
        self.last = run_spec.recipe.train.steps
        has = bool(self.section.tasks) and host_group.is_main
        self.lines = JsonLines(out / EVALS if has else None, step)
        self.best: tuple[int, float] | None = None
        """The step and the number of the best checkpoint."""
        self.candidate: tuple[int, float] | None = None
        """The step and the number of a better evaluation whose checkpoint is not published yet."""
        self.best_numbers: dict[tuple[str, str], tuple[int, float]] = {}
        """The best step, and its main number, by task and results row."""
        entries = [entry for _, entry in entries_from_end(out / EVALS)][::-1] if has else []
        earlier = [(entry["step"], with_nan(entry.get("results") or {})) for entry in entries]
        for line in earlier:
            self.lines_of(*line)
        if self.best_of:
            host_group.from_main(lambda: self.find_best(earlier))

    def find_best(self, earlier: list[tuple[int, dict[str, Results]]]) -> None:
        """Find the best of the existing checkpoints. earlier: the step and the results of each evaluation before
        this start. Rank 0 only. Raises UserError if an evaluation lacks the score that checkpoint.best names."""
        assert self.best_of
        folder = self.out / "checkpoints"
        there = {checkpoints.step_of(path): path for path in checkpoints.complete_steps(folder)}
        for step, results in earlier:
            number = find_number(results, self.best_of)
            if step in there and self.becomes_candidate(step, number):
                self.best = self.candidate
        with suppress(OSError):
            if self.best is None:
                (folder / checkpoints.BEST).unlink(missing_ok=True)
            else:
                files.write_text(folder / checkpoints.BEST, there[self.best[0]].name + "\n")

    def becomes_candidate(self, step: int, number: float | None) -> bool:
        """Return whether the step is the best so far; if it is, make it the candidate. Rank 0 only."""
        assert self.best_of
        best = self.best and self.best[1]
        if number is None or not math.isfinite(number) or not is_better(self.best_of.split("/", 2)[2], number, best):
            return False
        self.candidate = step, number
        return True

    def due(self, step: int) -> bool:
        return bool(self.section.tasks) and (step % self.section.every == 0 or step == self.last)

    def measure(self, step: int) -> bool:
        """Measure the tasks, on all ranks together. Returns True if the step is the best so far."""
        results = dict[str, Results]()
        started = time.monotonic()
        for name, task in self.tasks.items():
            results[name] = with_overall_means(name, task())
        seconds = time.monotonic() - started
        if results and self.lines.file:
            self.report(step, results, seconds)
        best = self.best_of
        if best is None:
            return False
        return self.host_group.from_main(lambda: self.becomes_candidate(step, find_number(results, best)))

    def report(self, step: int, results: dict[str, Results], seconds: float) -> None:
        numbers = {"results": results, "intervals": intervals(results)}
        self.lines.write({"step": step, **numbers, "seconds": round(seconds, 3)})
        entry: dict[str, Any] = {"step": step}
        for task, rows in results.items():
            for row, numbers_of_row in rows.items():
                for name, number in numbers_of_row.items():
                    entry[f"eval/{task}/{row}/{name}"] = number
        if self.reporter:
            self.reporter.add(entry)
        LOG.info("\n".join([f"evaluation of step {step}, which took {seconds:.1f} s", *self.lines_of(step, results)]))

    def lines_of(self, step: int, results: dict[str, Results]) -> list[str]:
        """Return a line for each of the most important results rows: the row's main number, and the best such number so
        far with its step. ✓ means that this step is the best so far."""
        titles: list[str] = []
        numbers: list[str] = []
        marks: list[str] = []
        for task, row in self.rows_in_order(results):
            scores = results[task][row]
            name = next((name for name in MAIN if name in scores), next(iter(scores)))
            titles.append(f"{task} {row}")
            numbers.append(f"{name} {scores[name]:.4g}")
            marks.append(self.mark_of(task, row, step, name, scores[name]))
        title_width = max(map(len, titles), default=0)
        number_width = max(map(len, numbers), default=0)
        lines = []
        for title, number, mark in list(zip(titles, numbers, marks, strict=True))[:ROWS]:
            lines.append(f"  {title:{title_width}}  {number:{number_width}}  {mark}".rstrip())
        if len(titles) > ROWS:
            lines.append(f"  and {len(titles) - ROWS} more in {EVALS}")
        return lines

    def rows_in_order(self, results: dict[str, Results]) -> list[tuple[str, str]]:
        """Return (task, results row) of the rows with numbers: first the row that chooses the best checkpoint, then
        streams and means, then single languages."""
        best_row = (self.best_of or "").rpartition("/")[0]
        first: list[tuple[str, str]] = []
        whole: list[tuple[str, str]] = []
        single: list[tuple[str, str]] = []
        for task, rows in results.items():
            for row, scores in rows.items():
                is_single = " " in row if task.startswith("heldout") else row != ALL and ALL in rows
                if not scores:
                    continue
                if f"{task}/{row}" == best_row:
                    first.append((task, row))
                elif is_single:
                    single.append((task, row))
                else:
                    whole.append((task, row))
        return first + whole + single

    def mark_of(self, task: str, row: str, step: int, name: str, number: float) -> str:
        """Return what the log says about the row's best number so far, after noting this step's number."""
        best = self.best_numbers.get((task, row))
        if math.isfinite(number) and is_better(name, number, best and best[1]):
            self.best_numbers[task, row] = (step, number)
            return "✓ best"
        if best is None:
            return ""
        return f"best {best[1]:.4g} at step {best[0]}"

    def published(self, step: int, path: Path) -> set[int]:
        """Note a new checkpoint. Returns the steps whose checkpoints must stay. Rank 0 only."""
        if self.candidate and self.candidate[0] == step:
            with suppress(OSError):  # the file `best` then still names the checkpoint before
                files.write_text(path.parent / checkpoints.BEST, path.name + "\n")
                self.best = self.candidate
        return {self.best[0]} if self.best else set()

    def close(self) -> None:
        self.lines.close()


def with_nan(results: dict[str, Results]) -> dict[str, Results]:
    """Return the results of a line of evals.jsonl with NaN for null."""
    with_numbers = dict[str, Results]()
    for task, rows in results.items():
        with_numbers[task] = {}
        for row, numbers in rows.items():
            with_numbers[task][row] = {name: math.nan if v is None else v for name, v in numbers.items()}
    return with_numbers
