"""Writes a run's metrics: metrics.jsonl, TensorBoard and the trace.

Each file has every step once, because a resume first removes the lines of steps after its checkpoint. The metrics of
steps stay on the device until the ranks sum them and rank 0 writes them, about once a second. A run ends when its loss
or its gradient is not finite. Under fp16, a few skipped steps are normal.
"""

import json
import math
import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from xscale import files
from xscale.checkpoint.manager import CheckpointManager
from xscale.data.loader import StepBatch
from xscale.errors import LOG, NotFinite
from xscale.metric_keys import Counts
from xscale.recipe import Recipe
from xscale.run.watch import RunContext
from xscale.step.metrics import language_metrics, stream_metrics
from xscale.step.step import StepResult

MOST_WAITING = 1 << 24
"""Lines that cannot be written, as on a full disk, stay in memory. If they have more bytes than this, the run ends."""
NOT_FINITE = "not_finite.jsonl"
"""The file that names the records of a step whose loss or gradient is not finite, with one line for each rank."""
MOST_SKIPPED = 100
"""A run fails if fp16 skips this many steps in a row. Fewer are normal while fp16 looks for a loss scale: 32 halvings
lead from 2^32 to 1."""
REPORT_SECONDS = 1.0
"""The minimum number of seconds between two readings of metrics from the device, because each reading waits for the
device."""
LINE_SECONDS = 5.0
"""The minimum number of seconds between progress lines. The first and the last step always have a line."""


class JsonLines:
    """An append-only file of JSON objects with a "step" field, or no file if `path` is None.

    Training continues while lines cannot be written, as on a full disk. They wait in memory; the end of a line may wait
    whose beginning is in the file.
    """

    def __init__(self, path: Path | None, after_step: int):
        """Open the file, without what follows the last complete line of a step up to `after_step`.

        A new file replaces the old one, because a run that has lost this directory may still write to the old file.
        """
        self.path = path
        self.waiting = bytearray()
        """The lines that wait."""
        self.failing = False
        """True if the last attempt to write failed."""
        self.file = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            size = next(
                (end for end, entry in files.read_ends_and_entries_backwards(path) if entry["step"] <= after_step),
                0,
            )
            with files.atomic_write(path) as kept:
                kept.write_bytes(path.read_bytes()[:size])
        self.file = path.open("ab", buffering=0)

    def add_line_for_next_flush(self, entry: dict[str, Any]) -> None:
        """Add a line. It stays in memory until `flush_or_keep_lines`. A number that is not finite becomes null."""
        if self.file:
            line = json.dumps(entry, ensure_ascii=False)
            if "NaN" in line or "Infinity" in line:
                line = json.dumps(json.loads(line, parse_constant=lambda name: None), ensure_ascii=False)
            self.waiting += f"{line}\n".encode()

    def flush_or_keep_lines(self, sync: bool = False) -> None:
        """Write the lines that wait. If the disk is full, they keep waiting. sync: also sync the file to the disk.
        Raises OSError if too many lines wait."""
        if self.file is None:
            return
        was_failing = self.failing
        try:
            while self.waiting:
                del self.waiting[: self.file.write(self.waiting)]
            self.failing = False
        except OSError as error:
            self.failing = True
            if len(self.waiting) > MOST_WAITING:
                error.filename = str(self.path)
                raise
            if not was_failing:
                LOG.error(
                    f"{self.path} cannot be written ({error.strerror}). Training continues, and xscale keeps the new "
                    "lines in memory until the file can be written. Remove the cause of the error"
                )
        if was_failing and not self.failing:
            LOG.warning(f"{self.path} is writable again, and xscale has written the lines that it kept in memory")
        if sync and not self.failing:
            try:
                os.fsync(self.file.fileno())
            except OSError as error:
                LOG.error(
                    f"{self.path} cannot be synced to the disk ({error.strerror}). The last lines of the file "
                    "may be lost"
                )

    def flush_and_log_lost_lines(self) -> None:
        """Write the lines that wait, at the end of the run, and log how many could not be written."""
        self.flush_or_keep_lines(sync=True)
        if self.waiting:
            missing = self.waiting.count(b"\n")
            LOG.error(f"{self.path}: the last lines of the run could not be written (number of lines: {missing:,})")


class TensorBoardWriter:
    """Writes metrics for TensorBoard, in addition to metrics.jsonl. After the first error, it writes nothing more."""

    def __init__(self, folder: Path | None, after_step: int):
        """Begin after a step. folder: where to write; None: nowhere."""
        self.folder = folder
        self.after_step = after_step
        self.writer: Any = None

    def write(self, entries: list[dict[str, Any]]) -> None:
        """Write the numbers of these lines of metrics.jsonl."""
        if self.folder is None:
            return
        try:
            if self.writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(str(self.folder), purge_step=self.after_step + 1)
            for entry in entries:
                for name, value in entry.items():
                    if name != "step" and isinstance(value, int | float):
                        self.writer.add_scalar(name, value, entry["step"])
            self.writer.flush()
        except Exception as error:  # the library may raise any type
            LOG.error(
                f"the files of TensorBoard in {self.folder} cannot be written ({error}). Training continues without "
                "TensorBoard; metrics.jsonl has all metrics"
            )
            self.folder = None


class UnreportedStep(NamedTuple):
    """A step whose sums are still on the device."""

    batch: StepBatch
    result: StepResult
    counts: Counts
    """The step's counts without a language in their key, summed over ranks."""
    other_metrics: dict[str, Any]
    """The step's metrics that are not computed from sums and counts, by name: numbers or tensors."""

    def metrics_line(self, sums_K: list[float], language_counts: list[float], recipe: Recipe) -> dict[str, Any]:
        """Return the step's line of metrics.jsonl. sums_K: the sums of `result`, and language_counts: the counts of
        `batch`, both over all ranks. recipe: the recipe of the run."""
        step = self.batch.step
        recipe = recipe.at(step)
        sums = dict(zip(self.result.sums.keys, sums_K, strict=True))
        counts_by_language = dict(zip(self.batch.counts_by_language(), map(int, language_counts), strict=True))
        metrics = stream_metrics(sums, self.counts, recipe)
        loss = 0.0
        for stream in recipe.streams:
            if f"loss/{stream}" in metrics:
                loss += recipe.stream_weight(stream, step) * metrics[f"loss/{stream}"]
        entry = {"step": step + 1, "loss": loss} | metrics
        for key, count in self.counts.items():
            if key.name == "count":  # the first count of a stream is that of its first term
                entry.setdefault(f"count/{key.stream}", count)
        entry |= language_metrics(sums, counts_by_language, recipe) | self.other_metrics
        return {name: float(v) if isinstance(v, Tensor) else v for name, v in entry.items()}


def slowest_rank_and_ratio_to_median(seconds_R: list[float]) -> dict[str, float]:
    """Return the slowest rank, and the ratio of its time to the median of all ranks.

    seconds_R: each rank's own seconds of a step. They include the wait for records and the forward and backward passes,
    but not the reduction of gradients, in which the ranks wait for each other.
    """
    if len(seconds_R) == 1:
        return {}
    slowest = max(seconds_R)
    return {"slowest_rank": seconds_R.index(slowest), "slowest_ratio": slowest / max(median_low(seconds_R), 1e-9)}


def cut_traces_of_absent_ranks(folder: Path, world: int, after_step: int) -> None:
    """Remove the lines of later steps from the traces of ranks that an earlier start of the run had, and this start,
    with fewer ranks, has not. The ranks of this start read the records of these steps again."""
    for path in folder.glob("rank*.jsonl"):
        rank = path.stem.removeprefix("rank")
        if rank.isdecimal() and int(rank) >= world:
            JsonLines(path, after_step).flush_and_log_lost_lines()


class RunMetrics:
    """The metrics of a run. All ranks call its functions together; rank 0 writes the files."""

    def __init__(self, context: RunContext, recipe: Recipe, manager: CheckpointManager, done: int, trace: bool):
        """Begin after `done` steps. manager: it knows the newest good checkpoint. trace: write the keys of the records
        that each rank reads."""
        self.context = context
        self.recipe = recipe
        self.manager = manager
        self.is_main = context.process.is_main
        out = context.out
        self.lines = JsonLines(out / "metrics.jsonl" if self.is_main else None, done)
        self.board = TensorBoardWriter(out / "tb" if self.is_main else None, done)
        self.trace = JsonLines(out / "trace" / f"rank{context.process.rank}.jsonl" if trace else None, done)
        if trace and self.is_main:
            cut_traces_of_absent_ranks(out / "trace", context.process.world, done)
        self.done = done
        self.started = time.monotonic()
        self.last_line = 0.0
        self.unreported: list[UnreportedStep] = []
        """The steps whose numbers the next `reduce_and_report_steps` reads from the device."""
        self.last_report = time.monotonic()
        """The time at which metrics were last reported, or at which rank 0 asked for it."""
        self.fp16: bool = manager.engine.fp16_enabled()
        self.skipped_in_a_row = 0
        """The number of steps, up to the newest reported one, that fp16 has skipped without a break."""

    def restart_report_timer_if_due(self) -> bool:
        """Return whether it is time to report metrics. If it is, the next interval begins now."""
        if time.monotonic() - self.last_report < REPORT_SECONDS:
            return False
        self.last_report = time.monotonic()
        return True

    def reduce_steps_and_report_excluded(self, number: int, samples: int, tokens: int) -> None:
        """Report an excluded step, whose records were read without changing the model."""
        self.reduce_and_report_steps()
        excluded = {"step": number, "loss": None, "skipped": 1, "excluded": True}
        self.lines.add_line_for_next_flush(excluded | {"samples": samples, "tokens": tokens})

    def trace_records(self, number: int, batch: StepBatch) -> None:
        """Trace the records of a step."""
        for stream, keys in batch.record_keys.items():
            self.trace.add_line_for_next_flush({"step": number, "stream": stream, "keys": keys})

    def reduce_and_report_steps(self) -> None:
        """Read the metrics of unreported steps from the device, sum them over ranks, and report them. Raises NotFinite
        if one of these steps is not finite."""
        self.last_report = time.monotonic()
        if not self.unreported:
            return
        steps = self.unreported
        self.unreported = []
        vectors = list[Tensor]()
        seconds = 0.0
        for step in steps:
            sums_K = step.result.sums.values_K
            vectors += [sums_K, torch.tensor(list(step.batch.counts_by_language().values())).to(sums_K)]
            seconds += step.other_metrics["data_wait_s"] + step.result.seconds_of_passes()
        seconds_R = vectors[0].new_zeros(self.context.process.world)
        seconds_R[self.context.process.rank] = seconds / len(steps)
        vectors.append(seconds_R)
        together = torch.cat(vectors)
        dist.all_reduce(together)
        *summed, seconds_R = together.cpu().split([len(vector) for vector in vectors])
        pace = slowest_rank_and_ratio_to_median(seconds_R.tolist())
        entries = list[dict[str, Any]]()
        for number, step in enumerate(steps):
            sums = summed[2 * number].tolist()
            entries.append(step.metrics_line(sums, summed[2 * number + 1].tolist(), self.recipe) | pace)
        for entry in entries:
            self.lines.add_line_for_next_flush(entry)
            self.log_progress_if_due(entry)
        self.lines.flush_or_keep_lines()
        self.trace.flush_or_keep_lines()
        self.board.write(entries)
        for entry, step in zip(entries, steps, strict=True):
            self.count_skipped_and_check_finite(entry, step.batch, bool(step.result.sums.values_K.isfinite().all()))

    def count_skipped_and_check_finite(self, entry: dict[str, Any], batch: StepBatch, is_rank_finite: bool) -> None:
        """Raise NotFinite on all ranks if a step's losses or its gradient are not finite. fp16 may skip fewer than
        MOST_SKIPPED consecutive steps. entry: the step's line of metrics.jsonl. is_rank_finite: whether this rank's
        own losses are finite."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if entry["skipped"] else 0
        if self.fp16 and 0 < self.skipped_in_a_row < MOST_SKIPPED:
            return
        streams = [name for name in self.recipe.streams if not math.isfinite(entry.get(f"loss/{name}", 0))]
        norm = entry["grad_norm"] or 0.0
        what = ""
        if streams:
            what = f"the loss of {', '.join(streams)}"
        elif not math.isfinite(norm):
            what = f"the norm of the gradient ({norm:g})"
        elif self.skipped_in_a_row:
            scale = entry.get("loss_scale")
            what = f"the fp16 gradient of {self.skipped_in_a_row} consecutive steps (loss scale {scale:g})"
        if what:
            self.write_records_and_raise_not_finite(entry["step"], what, batch, is_rank_finite)

    def write_records_and_raise_not_finite(
        self, number: int, what: str, batch: StepBatch, is_rank_finite: bool
    ) -> NoReturn:
        """Append the keys of the step's records to not_finite.jsonl, a line per rank, and raise NotFinite.
        is_rank_finite: whether this rank's losses are finite."""
        path = self.context.out / NOT_FINITE
        records_of_rank = {"rank": self.context.process.rank, "finite": is_rank_finite, "keys": batch.record_keys}
        lines = list[str]()
        for records in self.context.cpu_group.all_gather(records_of_rank):
            lines.append(json.dumps({"step": number, "what": what} | records, ensure_ascii=False) + "\n")
        if self.is_main:
            with suppress(OSError), path.open("a", encoding="utf-8") as file:  # a full disk must not hide NotFinite
                file.writelines(lines)
        # Steps that fp16 skipped have changed nothing, so the update before them has done the damage.
        bad = number - self.skipped_in_a_row if self.fp16 else number
        skipped = ",".join(map(str, [*self.recipe.train.skip_steps, bad]))
        skip = f"--set train.skip_steps=[{skipped}]"
        newest = self.manager.newest_step_before(bad)
        if bad == self.done:  # a start does not know whether steps of an earlier start were skipped
            remedy = (
                "fp16 has skipped every step since this command was started, so the weights have not changed. Begin "
                "a new run in another --out. Either set train.precision to bf16 or fp32, or start from other weights "
                "(model.init), such as an earlier checkpoint"
            )
        elif newest is None:
            remedy = (
                f"{self.manager.folder} has no checkpoint from before the failure. Begin a new run in another --out. "
                f"Either skip step {bad} by {skip}, or set a lower train.lr or lower weights of the streams"
            )
        else:
            remedy = (
                f"The newest checkpoint before the failure is that of step {newest}. Continue from this checkpoint and "
                f"skip step {bad} by --resume {self.manager.path_of_step(newest)} {skip}. Or begin a new run at this "
                f"checkpoint by --fork {self.context.out}@{newest} and another --out, and set a lower train.lr or "
                "lower weights of the streams"
            )
        problem = f"step {number}: {what} is not finite. {path} lists the records of step {number}."
        if self.done < bad < number:
            problem += (
                f" fp16 has skipped all steps after step {bad}, so step {bad} was the last to change the weights."
            )
        raise NotFinite(f"{problem} {remedy}") from None

    def log_progress_if_due(self, entry: dict[str, Any]) -> None:
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
            f"{entry['tokens_per_s']:,.0f} tokens/s  {entry['step_s']:.2f} s/step  eta {timedelta(seconds=left)}"
        )
