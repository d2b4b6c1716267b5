"""When a run is measured, where the results go, and which checkpoint was best.

evals.jsonl has an object a line, {"step", "results": {task: {row: {name: number}}}, "seconds"}. A resume cuts what lies
past its checkpoint.
"""

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from xscale import files
from xscale.checkpoint import store as checkpoints
from xscale.ranks import HostGroup
from xscale.run.evals import Results, better, check_number
from xscale.run.hook import Hook
from xscale.run.metrics import LOG, JsonLines, Reporter
from xscale.run.run_spec import RunSpec

EVALS, BEST = "evals.jsonl", "best"


class Validation:
    """Of one run, on every rank; files and the hook are rank 0's."""

    def __init__(
        self,
        run_spec: RunSpec,
        tasks: dict[str, Any],
        out: Path,
        host_group: HostGroup,
        step: int,
        reporter: Reporter | None,
    ):
        """tasks: evals.find_tasks'. step: the last one that was measured and stays; -1: none."""
        self.section, self.best_of = run_spec.recipe.eval, run_spec.recipe.checkpoint.best
        self.tasks, self.out, self.host_group, self.reporter = tasks, out, host_group, reporter
        self.last = run_spec.recipe.train.steps
        has = bool(self.section.tasks) and host_group.is_main
        self.lines = JsonLines(out / EVALS if has else None, step)
        self.hook = Hook(run_spec.recipe.checkpoint.hook, out)
        self.best: tuple[int, float] | None = None
        """Step and number of the best checkpoint there is."""
        self.candidate: tuple[int, float] | None = None
        """Of an evaluation that was better, and has no checkpoint yet."""
        if self.best_of:
            host_group.from_main(self.read_best)

    def read_best(self) -> None:
        """What earlier starts of the run have found, of the checkpoints that are still there. Raises UserError where
        they have no such number. Rank 0 only."""
        assert self.best_of
        folder = self.out / "checkpoints"
        there = {int(path.name.removeprefix("step_")): path for path in checkpoints.complete_steps(folder)}
        for line in (self.out / EVALS).read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            number = check_number(entry.get("results"), self.best_of)
            if entry["step"] in there and self.compare(entry["step"], number):
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
        """The tasks, on all ranks. Returns whether the step is to be saved for what it scored."""
        results, started = dict[str, Results](), time.monotonic()
        for name, task in self.tasks.items():
            results[name] = task()
        seconds = time.monotonic() - started
        if results and self.lines.file:
            self.report(step, results, seconds)
        if not (best := self.best_of):
            return False
        return self.host_group.from_main(lambda: self.compare(step, check_number(results, best)))

    def report(self, step: int, results: dict[str, Results], seconds: float) -> None:
        self.lines.write({"step": step, "results": results, "seconds": round(seconds, 3)})
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
        self.hook.start(step, path)

    def needed(self) -> set[int]:
        """Checkpoints that must stay: the best. Rank 0 only."""
        return {self.best[0]} if self.best else set()

    def close(self) -> None:
        self.hook.look()
        self.lines.close()
