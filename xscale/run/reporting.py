"""The metrics of steps. They stay on the device until a flush sums them over ranks and reports them."""

import time
from statistics import median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xscale.data.loader import StepBatch
from xscale.metric_keys import Counts
from xscale.recipe import Recipe
from xscale.run.finite import FiniteCheck
from xscale.run.metrics import LOG, Board, JsonLines
from xscale.run.state import RunContext
from xscale.step.step import StepResult
from xscale.step.sums import language_metrics, stream_metrics

FLUSH_SECONDS = 1.0
"""The minimum number of seconds between two readings of metrics from the device, because each reading waits for the
device."""


LINE_SECONDS = 5.0
"""The minimum number of seconds between progress lines. The first and the last step always have a line."""


class UnreportedStep(NamedTuple):
    """A step whose sums are still on the device."""

    step: int
    """The number of the step, from 1."""
    batch: StepBatch
    result: StepResult
    targets: Counts
    """The step's counts without a language in their key, summed over ranks."""
    numbers: dict[str, Any]
    """The step's other metrics: numbers or tensors."""

    def entry(self, sums_K: list[float], language_counts: list[float], recipe: Recipe) -> dict[str, Any]:
        """Return the step's line of metrics.jsonl. sums_K: the sums of `result`, and language_counts: the counts of
        `batch`, both over all ranks. recipe: the recipe of the run."""
        recipe = recipe.at(self.step - 1)
        sums = dict(zip(self.result.sums.keys, sums_K, strict=True))
        counts = dict(zip(self.batch.language_counts(), map(int, language_counts), strict=True))
        metrics = stream_metrics(sums, self.targets, recipe)
        loss = 0.0
        for stream in recipe.streams:
            if f"loss/{stream}" in metrics:
                loss += recipe.stream_weight(stream, self.step - 1) * metrics[f"loss/{stream}"]
        entry = {"step": self.step, "loss": loss} | metrics
        for key, count in self.targets.items():
            if key.name == "count":  # the first count of a stream is that of its first term
                entry.setdefault(f"count/{key.stream}", count)
        entry |= language_metrics(sums, counts, recipe) | self.numbers
        return {name: float(v) if isinstance(v, Tensor) else v for name, v in entry.items()}


def sum_over_ranks(vectors: list[Tensor]) -> list[list[float]]:
    """Return the sum of each vector over all ranks. All ranks call this together, with vectors of the same lengths,
    which a single all-reduce sums."""
    together = torch.cat(vectors)
    dist.all_reduce(together)
    parts = together.cpu().split([len(vector) for vector in vectors])
    return [part.tolist() for part in parts]


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
        self.is_main = context.process.is_main
        self.lines = JsonLines(context.out / "metrics.jsonl" if self.is_main else None, done)
        self.board = Board(context.out / "tb" if self.is_main else None, done)
        traced = context.out / "trace" / f"rank{context.process.rank}.jsonl" if trace else None
        self.trace = JsonLines(traced, done)
        self.done = done
        self.started = time.monotonic()
        self.last_line = 0.0
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
        excluded = {"step": number, "loss": None, "skipped": 1, "excluded": True}
        self.lines.write(excluded | {"samples": samples, "tokens": tokens})

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
        vectors = list[Tensor]()
        seconds = 0.0
        for step in steps:
            sums_K = step.result.sums.values_K
            vectors += [sums_K, torch.tensor(list(step.batch.language_counts().values())).to(sums_K)]
            seconds += step.numbers["data_wait_s"] + step.result.passes_s()
        seconds_R = vectors[0].new_zeros(self.process.world)
        seconds_R[self.process.rank] = seconds / len(steps)
        *summed, seconds_of_ranks = sum_over_ranks([*vectors, seconds_R])
        pace = pace_metrics(seconds_of_ranks)
        entries = []
        for number, step in enumerate(steps):
            entries.append(step.entry(summed[2 * number], summed[2 * number + 1], self.recipe) | pace)
        for entry in entries:
            self.lines.write(entry)
            self.board.add(entry)
            self.log_progress(entry)
        self.lines.flush()
        self.board.call("flush")
        for entry, step in zip(entries, steps, strict=True):
            self.finite.check(entry, step.batch, bool(step.result.sums.values_K.isfinite().all()))

    def sync(self) -> None:
        """Write all lines to disk, before a checkpoint says that their steps are done."""
        self.lines.flush(to_disk=True)
        self.trace.flush(to_disk=True)

    def log_progress(self, entry: dict[str, Any]) -> None:
        """Log a progress line from time to time, such as
        `step 12/200  loss 8.9 (mlm 8.9, tlm 8.9)  lr 2.4e-04  5,210 tokens/s  0.41 s/step  eta 0:01:17`."""
        step = entry["step"]
        steps = self.recipe.train.steps
        now = time.monotonic()
        is_due = now - self.last_line >= LINE_SECONDS or step in (self.done + 1, steps)
        if not self.is_main or not is_due:
            return
        self.last_line = now
        left = int((now - self.started) / (step - self.done) * (steps - step))
        losses = [f"{name} {entry[f'loss/{name}']:.3f}" for name in self.recipe.streams if f"loss/{name}" in entry]
        LOG.info(
            f"step {step}/{steps}  loss {entry['loss']:.3f} ({', '.join(losses)})  lr {entry['lr']:.1e}  "
            f"{entry['tokens_per_s']:,.0f} tokens/s  {entry['step_s']:.2f} s/step  "
            f"eta {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
        )

    def close(self) -> None:
        self.trace.close()
        self.lines.close()
        self.board.call("close")
