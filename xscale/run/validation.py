"""When a run is measured, where the results go, which checkpoint was best, and jobs that measure beside the run.

evals.jsonl has an object a line, {"step", "results": {task: {row: {name: number}}}, "seconds"}; of a job a line of its
own, when it ends. A resume cuts what lies past its checkpoint.
"""

import json
import math
import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from xscale import files, ranks
from xscale.config import EvalTask
from xscale.errors import UserError
from xscale.ranks import Control
from xscale.run import checkpoint as checkpoints
from xscale.run.evals import Results, better, number_of
from xscale.run.job import Job
from xscale.run.metrics import LOG, JsonLines, Reporter
from xscale.run.stop import StopRequest

EVALS, BEST = "evals.jsonl", "best"
READ_LEXICONS = "alignment", "induction"
"""Tasks of xscale.eval.run that take the run's dictionaries."""
LAST_WAIT = 600.0
"""Seconds that a run that is done waits for its jobs."""
LONGEST_LINE, LONGEST_WHY = 4096, 200
"""Bytes of a job's log, and letters of its last line, that say why it failed."""


class Validation:
    """Of one run, on every rank; files and jobs are rank 0's."""

    def __init__(
        self, job: Job, tasks: dict[str, Any], out: Path, control: Control, step: int, reporter: Reporter | None
    ):
        """tasks: evals.find_tasks'. step: that the run begins with."""
        self.section, self.best_of = job.recipe.eval, job.recipe.checkpoint.best
        self.tasks, self.out, self.control, self.reporter = tasks, out, control, reporter
        self.last = job.recipe.train.steps
        has = bool(self.section.tasks) and control.is_main
        self.lines = JsonLines(out / EVALS if has else None, step)
        self.jobs: list[Beside] = []
        self.held: list[tuple[EvalTask, int, Path]] = []
        """Of the last step, while the same task of an earlier one still runs."""
        self.lexicons = [str(lexicon.path) for lexicon in (*job.lexicons, *job.measured)]
        self.waiting = [task for task in self.section.tasks if task.mode == "job"]
        self.best: tuple[int, float] | None = None
        """Step and number of the best checkpoint there is."""
        self.candidate: tuple[int, float] | None = None
        """Of an evaluation that was better, and has no checkpoint yet."""
        if has and self.best_of:
            self.read_best()

    def read_best(self) -> None:
        """What earlier starts of the run have found, of the checkpoints that are still there."""
        assert self.best_of
        folder = self.out / "checkpoints"
        there = {int(path.name.removeprefix("step_")): path for path in checkpoints.complete_steps(folder)}
        for line in (self.out / EVALS).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["step"] in there and self.compare(entry["step"], number_of(entry["results"], self.best_of)):
                self.best = self.candidate
        with suppress(OSError):
            if self.best is None:
                (folder / BEST).unlink(missing_ok=True)
            else:
                files.write_text(folder / BEST, there[self.best[0]].name + "\n")

    def compare(self, step: int, number: float | None) -> bool:
        assert self.best_of
        if number is None or not math.isfinite(number) or not better(self.best_of, number, self.best and self.best[1]):
            return False
        self.candidate = step, number
        return True

    def due(self, step: int) -> bool:
        return bool(self.section.tasks) and (step % self.section.every == 0 or step == self.last)

    def measure(self, step: int) -> bool:
        """The inline tasks, on all ranks. Returns whether the step is to be saved, for what it scored or for a job."""
        results, started = dict[str, Results](), time.monotonic()
        for name, task in self.tasks.items():
            results[name] = task()
        seconds = time.monotonic() - started
        if results and self.lines.file:
            self.report(step, results, seconds)
        wanted = bool(self.waiting)
        if self.best_of:
            wanted |= self.control.from_main(lambda: self.is_best(step, results))
        return wanted

    def is_best(self, step: int, results: dict[str, Results]) -> bool:
        """Rank 0 only. Raises UserError for a number that there is not."""
        assert self.best_of
        number = number_of(results, self.best_of)
        if number is None and self.best_of.partition("/")[0] in results:
            there = sorted(
                f"{t}/{row}/{name}" for t, rows in results.items() for row, of in rows.items() for name in of
            )
            raise UserError(f"checkpoint.best: {self.best_of} is not measured; there are {', '.join(there)}")
        return self.compare(step, number)

    def report(self, step: int, results: dict[str, Results], seconds: float, **more: Any) -> None:
        self.lines.write({"step": step, "results": results, "seconds": round(seconds, 3)} | more)
        flat = {
            f"eval/{t}/{row}/{n}": v for t, rows in results.items() for row, of in rows.items() for n, v in of.items()
        }
        if self.reporter:
            self.reporter.add({"step": step} | flat)
        shown = [
            f"{t} {row} {name} {of[name]:.4g}"
            for t, rows in results.items()
            for row, of in rows.items()
            for name in list(of)[:1]
        ]
        LOG.info(f"step {step}, measured in {seconds:.1f} s: {'; '.join(shown[:8])}{' ...' * (len(shown) > 8)}")

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint is whole. Rank 0 only."""
        if self.candidate and self.candidate[0] == step:
            with suppress(OSError):  # the one before stays
                files.write_text(path.parent / BEST, path.name + "\n")
                self.best = self.candidate
        if self.due(step):
            for task in self.waiting:
                self.start(task, step, path)

    def start(self, task: EvalTask, step: int, path: Path) -> None:
        running = [beside for beside in self.jobs if beside.task is task]
        if running and step == self.last:
            self.held.append((task, step, path))
            return
        if running:
            LOG.warning(f"eval.{task.name} of step {step} is left out: that of step {running[0].step} is not done")
            return
        try:
            self.jobs.append(Beside(task, step, path, self.out, self.lexicons))
        except OSError as error:
            LOG.warning(f"eval.{task.name} of step {step} could not be started: {error}")

    def needed(self) -> set[int]:
        """Checkpoints that must stay: the best, and those that a job has yet to read. Rank 0 only."""
        best = {self.best[0]} if self.best else set()
        return best | {beside.step for beside in self.jobs if not beside.model.exists()}

    def poll(self) -> None:
        """What jobs have found by now. Rank 0 only."""
        for beside in [beside for beside in self.jobs if beside.process.poll() is not None]:
            self.jobs.remove(beside)
            results, problem = beside.results()
            if results or beside.process.returncode:  # else its own job may still be at work
                with suppress(OSError):
                    files.remove(beside.model)
            if problem:
                LOG.warning(f"eval.{beside.task.name} of step {beside.step} failed ({problem}); {beside.log} says why")
                self.lines.write({"step": beside.step, "failed": {beside.task.name: problem}, "results": {}})
            if results:
                self.report(beside.step, results, time.monotonic() - beside.started, job=True)

    def close(self) -> None:
        if self.jobs:
            self.poll()
        for beside in self.jobs:
            LOG.info(f"eval.{beside.task.name} of step {beside.step} still runs; it will write {beside.scores}")
        self.lines.close()

    def finish(self, stop: StopRequest, longest: float) -> None:
        """Of a run that is done: wait for the jobs, at most so many seconds, and not when told to stop. Rank 0 only."""
        started = time.monotonic()
        if self.jobs:
            LOG.info(f"waiting for {', '.join(beside.task.name for beside in self.jobs)}")
        while (self.jobs or self.held) and not stop and time.monotonic() - started < longest:
            time.sleep(0.2)
            self.poll()
            waiting, self.held = self.held, []
            for held in waiting:
                self.start(*held)


class Beside:
    """A job on the export of a checkpoint, in a session of its own."""

    def __init__(self, task: EvalTask, step: int, path: Path, out: Path, lexicons: list[str]):
        """lexicons: the run's dictionaries."""
        folder = out / "evals" / f"step_{step:08d}" / task.name
        while folder.exists():  # an earlier start's job may still be at work there
            folder = folder.with_name(folder.name + "+")
        folder.mkdir(parents=True)
        self.task, self.step, self.started = task, step, time.monotonic()
        self.model, self.scores, self.log = folder / "model", folder / "scores.json", folder / "log.txt"
        python, model, scores = (
            shlex.quote(str(part)) for part in (sys.executable, self.model.resolve(), self.scores.resolve())
        )
        data = " ".join(shlex.quote(path) for path in task.data)
        if task.name.partition(".")[0] in READ_LEXICONS and lexicons:
            data += " --lexicons " + " ".join(shlex.quote(path) for path in lexicons)
        own = f"{python} -m xscale.eval.run --model {{model}} --task {task.name.partition('.')[0]} --data {data}"
        command = task.command or f"{own} --limit {task.limit} --out {{out}}"
        for name, value in {"model": model, "out": scores, "step": str(step)}.items():
            command = command.replace(f"{{{name}}}", value)
        export = f"{python} -m xscale.export {shlex.quote(str(path.resolve()))} {model}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", f"{export} && {command}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=ranks.without_launcher(dict(os.environ)),
                start_new_session=True,
            )

    def results(self) -> tuple[dict[str, Results], str]:
        """By the task's name, and by row, with the name of its task where there are several; and what went wrong: a
        command that measures several things may have failed at one."""
        problem = ""
        if self.process.returncode:
            problem = ": ".join(filter(None, [f"exit code {self.process.returncode}", last_line(self.log)]))
        try:
            found = self.found()
            rows = {
                row if len(found) == 1 else f"{name} {row}": _numbers(numbers)
                for name, of_task in found.items()
                for row, numbers in of_task.items()
            }
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            return {}, problem or f"{self.scores}: {type(error).__name__}: {error}"
        return ({self.task.name: rows}, problem) if rows else ({}, problem or f"{self.scores}: has no results")

    def found(self) -> dict[str, Any]:
        """What the command wrote, or an array of it, such as slurm/evaluate.sbatch: scores.TASK.json."""
        paths = sorted(self.scores.parent.glob(f"{self.scores.stem}.*{self.scores.suffix}"))
        if self.scores.exists() or not paths:
            paths = [self.scores]
        return {
            name: rows
            for path in paths
            for name, rows in json.loads(path.read_text(encoding="utf-8"))["results"].items()
        }


def last_line(log: Path) -> str:
    """Of what a job said, its end alone being read; "" where it said nothing."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LONGEST_LINE))
        lines = file.read().decode("utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[-LONGEST_WHY:]
    return ""


def _numbers(of: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in of.items() if isinstance(value, int | float)}
