"""The metrics of steps. They stay on the device until a flush sums them over ranks and reports them."""

import time
from statistics import median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xscale.data.loader import StepBatch
from xscale.metric_keys import Counts, MetricKey
from xscale.ranks import Process
from xscale.recipe import Recipe
from xscale.run.finite import FiniteCheck
from xscale.run.metrics import JsonLines, Reporter
from xscale.run.state import RunContext
from xscale.step.step import StepResult
from xscale.step.sums import language_metrics, stream_metrics

FLUSH_SECONDS = 1.0
"""The minimum number of seconds between two readings of metrics from the device, because each reading waits for the
device."""


class UnreportedStep(NamedTuple):
    """A step whose sums are still on the device."""

    step: int
    """The number of the step, from 1."""
    batch: StepBatch
    result: StepResult
    targets: Counts
    """The counts of the step that are not of a single language, summed over ranks."""
    numbers: dict[str, Any]
    """The step's other metrics: numbers or tensors."""

    def entry(self, totals: "StepTotals", recipe: Recipe) -> dict[str, Any]:
        """Return the step's line of metrics.jsonl. recipe: the recipe of the run."""
        recipe = recipe.at(self.step - 1)
        metrics = stream_metrics(totals.sums, self.targets, recipe)
        loss = 0.0
        for stream in recipe.streams:
            if f"loss/{stream}" in metrics:
                loss += recipe.stream_weight(stream, self.step - 1) * metrics[f"loss/{stream}"]
        entry = {"step": self.step, "loss": loss} | metrics
        for key, count in self.targets.items():
            if key.name == "count":  # the first count of a stream is that of its first term
                entry.setdefault(f"count/{key.stream}", count)
        entry |= language_metrics(totals.sums, totals.language_counts, recipe) | self.numbers
        return {name: float(v) if isinstance(v, Tensor) else v for name, v in entry.items()}


class StepTotals(NamedTuple):
    """The numbers of a step, summed over ranks."""

    sums: dict[MetricKey, float]
    """The sums of losses and metrics over targets."""
    language_counts: Counts
    """The counts of languages and pairs."""


class FlushedSums(NamedTuple):
    """The numbers that the ranks exchange to report some steps."""

    steps: list[StepTotals]
    seconds_R: list[float]
    """Each rank's own seconds of a step, see `pace_metrics`."""


def sum_over_ranks(steps: list[UnreportedStep], process: Process) -> FlushedSums:
    """Return the sums of each step over ranks. All ranks call this together, with the same steps. A single all-reduce
    has all numbers: the sums and counts of each step, and the seconds of each rank."""
    parts = list[Tensor]()
    counts_of_steps = list[Counts]()
    seconds = 0.0
    for step in steps:
        sums = step.result.sums.values_K
        counts = step.batch.language_counts()
        counts_of_steps.append(counts)
        parts += [sums, torch.tensor(list(counts.values())).to(sums)]
        seconds += step.numbers["data_wait_s"] + step.result.own_s()
    seconds_R = parts[0].new_zeros(process.world)
    seconds_R[process.rank] = seconds / len(steps)
    parts.append(seconds_R)
    table = torch.cat(parts)
    dist.all_reduce(table)

    summed = iter(table.cpu().split([len(part) for part in parts]))
    totals = list[StepTotals]()
    for step, counts in zip(steps, counts_of_steps, strict=True):
        sums_by_key = dict(zip(step.result.sums.keys, next(summed).tolist(), strict=True))
        numbers = map(int, next(summed).tolist())
        totals.append(StepTotals(sums_by_key, dict(zip(counts, numbers, strict=True))))
    return FlushedSums(totals, next(summed).tolist())


def pace_metrics(seconds_R: list[float]) -> dict[str, float]:
    """Return the slowest rank, and the ratio of its time to the median of all ranks.

    seconds_R: each rank's own seconds of a step. They include the wait for records and the forward and backward passes,
    but not the reduction of gradients, in which the ranks wait for each other.
    """
    if len(seconds_R) == 1:
        return {}
    slowest = max(seconds_R)
    return {"slowest_rank": seconds_R.index(slowest), "slowest_ratio": slowest / max(median_low(seconds_R), 1e-9)}


class RunMetrics:
    """The metrics of a run. All ranks call its functions together; rank 0 writes the files."""

    def __init__(self, context: RunContext, recipe: Recipe, finite: FiniteCheck, done: int, trace: bool):
        """Begin after `done` steps. trace: write the keys of the records that each rank reads."""
        self.recipe = recipe
        self.process = context.process
        self.finite = finite
        self.reporter = Reporter(context.out, done, recipe) if context.process.is_main else None
        traced = context.out / "trace" / f"rank{context.process.rank}.jsonl" if trace else None
        self.trace = JsonLines(traced, done)
        self.unreported: list[UnreportedStep] = []
        self.last_flush = time.monotonic()
        """The time at which metrics were last read, or at which rank 0 asked to read them."""

    def wants_flush(self) -> bool:
        """Return whether it is time to read metrics. If it is, the next interval begins."""
        if time.monotonic() - self.last_flush < FLUSH_SECONDS:
            return False
        self.last_flush = time.monotonic()
        return True

    def add(self, step: UnreportedStep) -> None:
        """Note a step. The next `flush` reads its numbers from the device."""
        self.unreported.append(step)

    def add_excluded(self, number: int, samples: int, tokens: int) -> None:
        """Report an excluded step, whose records were read without changing the model."""
        self.flush()
        if self.reporter:
            excluded = {"step": number, "loss": None, "skipped": 1, "excluded": True}
            self.reporter.metrics.write(excluded | {"samples": samples, "tokens": tokens})

    def after_step(self, number: int, batch: StepBatch, flush: bool) -> None:
        """Trace the records of a step, and read the metrics if rank 0 has asked for that."""
        if self.trace.file:
            for stream, keys in batch.keys().items():
                self.trace.write({"step": number, "stream": stream, "keys": keys})
        if flush:
            self.flush()

    def flush(self) -> None:
        """Read the metrics of unreported steps from the device, sum them over ranks, and report them. Raises NotFinite
        if one of these steps is not finite."""
        self.last_flush = time.monotonic()
        if not self.unreported:
            return
        steps = self.unreported
        self.unreported = []
        sums = sum_over_ranks(steps, self.process)
        pace = pace_metrics(sums.seconds_R)
        entries = []
        for step, totals in zip(steps, sums.steps, strict=True):
            entries.append(step.entry(totals, self.recipe) | pace)
        if self.reporter:
            for entry in entries:
                self.reporter.report(entry)
            self.reporter.flush()
        for entry, step in zip(entries, steps, strict=True):
            self.finite.check(entry, step.batch, bool(step.result.sums.values_K.isfinite().all()))

    def sync(self) -> None:
        """Write all lines to disk, before a checkpoint says that their steps are done."""
        if self.reporter:
            self.reporter.flush(to_disk=True)
        self.trace.flush(to_disk=True)

    def close(self) -> None:
        self.trace.close()
        if self.reporter:
            self.reporter.close()
