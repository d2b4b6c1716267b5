"""The training loop, and what it keeps between steps."""

import errno
import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from xscale.config import Recipe
from xscale.data.loader import StepBatch
from xscale.data.row import Work
from xscale.errors import NotFinite, UserError
from xscale.eval.alignment_score import Gold
from xscale.ranks import Control, Process
from xscale.run import checkpoint as checkpoints
from xscale.run.checkpoint import Saver
from xscale.run.gold import gold_of
from xscale.run.job import Job
from xscale.run.metrics import LOG, Alarm, JsonLines, Reporter, StepRecord
from xscale.run.status import STOPPED
from xscale.run.stop import StopRequest
from xscale.step.cost import StepFlops
from xscale.step.ds_config import EngineConfig
from xscale.step.step import optimizer_step
from xscale.step.zero import keeps_whole_weights, whole_weight

MOST_SKIPPED = 100
"""Steps in a row that fp16 may skip while it looks for a loss scale; from 2^32 to 1 are 32."""
FLUSH_SECONDS = 1.0
"""Metrics are read from the device this often at most, since reading waits for it."""
FEW_SAMPLES = 1000
"""Of fewer, a share of dropped pairs says little: it is taken of so many."""


class Agreed(NamedTuple):
    """A step's numbers, summed over ranks."""

    targets: dict[tuple[str, str], int]
    work: Work
    too_long: Counter[str]
    """By stream."""
    samples: int
    stop: int
    """How many ranks were told to stop."""
    flush: int
    written: int = 0
    """How many ranks have written their part of the checkpoint under way."""


def check_targets(agreed: Agreed, step: int, recipe: Recipe) -> None:
    """Raises UserError, on all ranks, where a step has nothing to learn from."""
    if any(agreed.targets.values()):
        return
    data = recipe.data
    raise UserError(
        f"step {step} has no targets: of its pairs {agreed.too_long.total():,} were longer than data.max_length "
        f"{data.max_length} (data.overlong: {data.overlong}). Take a larger max_length, data.overlong=truncate, or "
        f"more samples a step"
    )


class Trainer:
    """An engine on its way through the steps of a job."""

    def __init__(
        self,
        job: Job,
        config: EngineConfig,
        engine: Any,
        state: dict[str, Any],
        out: Path,
        process: Process,
        control: Control,
        stop: StopRequest,
        *,
        resumed: bool,
        trace: bool = False,
    ):
        """state: what the streams have consumed. resumed: from a checkpoint of this step."""
        self.job, self.recipe, self.state, self.out = job, job.recipe, state, out
        self.config, self.engine = config, engine
        self.process, self.control, self.stop = process, control, stop
        self.step: int = state["step"]
        """Steps done."""
        self.saved = self.step if resumed else None
        self.saver = Saver(engine, out / "checkpoints", control)
        self.alarm = Alarm(str(out / "checkpoints"))
        self.blocked, self.times = 0.0, dict[str, float]()
        """Seconds that steps have waited for the checkpoint under way; what the next step's metrics say of that."""
        self.first, self.too_long, self.skipped = self.step, Counter[str](), 0
        """The step that it began with; of each stream since then, how many pairs were over data.max_length; steps in a
        row that fp16 has skipped."""
        self.warned = set(job.dropped())
        self.pending: list[StepRecord] = []
        self.last_flush = time.monotonic()
        self.flops = StepFlops(engine.module.encoder)
        steps, streams = self.recipe.train.steps, list(self.recipe.streams)
        self.reporter = Reporter(out, self.step, steps, streams) if process.is_main else None
        self.trace = JsonLines(out / "trace" / f"rank{process.rank}.jsonl" if trace else None, self.step)
        self.gold: dict[str, Gold] = {}
        """Of rank 0."""
        if (job.lexicons or job.measured) and self.recipe.train.measure_every:
            control.from_main(lambda: self.gold.update(gold_of(job, out)))

    def loop(self, batches: Iterator[StepBatch]) -> int:
        """To the last step, or until one of the ranks is told to stop. Returns the exit code."""
        recipe = self.recipe
        while self.step < recipe.train.steps:
            started = time.monotonic()
            batch = next(batches)
            waited = time.monotonic() - started
            assert batch.step == self.step, (batch.step, self.step)
            agreed = self.agree(batch, flush=started - self.last_flush >= FLUSH_SECONDS)
            if agreed.stop:
                return self.stop_early()
            check_targets(agreed, self.step + 1, recipe)
            self.pending.append(self.train_step(batch, agreed, started, waited))
            self.pending[-1].measured.update(self.times)
            self.times.clear()
            self.trace_step(batch)
            self.step, self.state = self.step + 1, batch.state
            self.count_dropped(agreed.too_long)
            if agreed.written == self.process.world:
                self.settle()
            last, due = self.step == recipe.train.steps, self.step % recipe.checkpoint.every == 0
            if agreed.flush or last or due:
                self.flush()
            if last or due:
                self.save(must=last)
        if self.too_long.total():
            LOG.info(f"{self.too_long.total():,} pairs were over data.max_length ({recipe.data.overlong})")
        LOG.info(f"done: {recipe.train.steps} steps, {self.out}")
        return 0

    def agree(self, batch: StepBatch, flush: bool) -> Agreed:
        """The step's numbers of all ranks, by one small message."""
        targets, work, long = batch.targets(), batch.work(), batch.too_long()
        asked = [int(bool(self.stop)), int(flush and self.process.is_main), int(self.saver.written)]
        sums = iter(self.control.sum([*targets.values(), *work, *long.values(), batch.samples(), *asked]))
        return Agreed(
            {key: next(sums) for key in targets},
            Work(*(next(sums) for _ in work)),
            Counter({stream: next(sums) for stream in long}),
            *sums,
        )

    def count_dropped(self, too_long: Counter[str]) -> None:
        """Of a step that is done. Warns once of each stream that drops more than a few per cent."""
        self.too_long.update(too_long)
        steps = self.step - self.first
        shares = {
            spec.name: self.too_long[spec.name] / max(steps * spec.samples, FEW_SAMPLES) for spec in self.job.specs
        }
        for stream, line in self.job.dropped(shares).items():
            if stream not in self.warned and self.process.is_main:
                LOG.warning(line)
            self.warned.add(stream)

    def train_step(self, batch: StepBatch, agreed: Agreed, started: float, waited: float) -> StepRecord:
        engine, train = self.engine, self.recipe.train
        lr, skipped = engine.get_lr()[0], engine.skipped_steps
        # Also in the first step: what a measurement takes of memory shows at once.
        measure = bool(train.measure_every) and (self.step == 0 or (self.step + 1) % train.measure_every == 0)
        sums, norms = optimizer_step(
            engine,
            self.recipe,
            batch.rows,
            agreed.targets,
            step=self.step,
            rank=self.process.rank,
            world=self.process.world,
            measure=measure and keeps_whole_weights(engine),
        )
        measured = norms | (self.alignment_scores() if measure else {})
        seconds = time.monotonic() - started
        return StepRecord(
            step=self.step + 1,
            sums=sums,
            targets=agreed.targets,
            lr=lr,
            skipped=engine.skipped_steps - skipped,
            tokens=agreed.work.tokens,
            samples=agreed.samples,
            too_long=agreed.too_long.total(),
            data_wait_s=waited,
            step_s=seconds,
            loss_scale=float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None,
            grad_norm=engine.get_global_grad_norm(),
            measured=measured | self.flops.metrics(agreed.work, seconds, self.process.world),
        )

    def alignment_scores(self) -> dict[str, float]:
        """On rank 0, which has the dictionaries' words."""
        scores: dict[str, float | None] = {}
        with whole_weight(self.engine, self.engine.module.encoder.embeddings) as table:
            for name, gold in self.gold.items():
                scores[f"alignment/{name}"], scores[f"alignment_trained/{name}"] = gold.scores(table)
        return {name: score for name, score in scores.items() if score is not None}

    def flush(self) -> None:
        """Read pending sums from the device, add them up over ranks, and report. All ranks call it together."""
        self.last_flush = time.monotonic()
        if not self.pending:
            return
        table = torch.stack([record.sums.values_K for record in self.pending])
        dist.all_reduce(table)
        entries = [
            record.entry(totals, self.recipe) for record, totals in zip(self.pending, table.tolist(), strict=True)
        ]
        self.pending.clear()
        if self.reporter:
            for entry in entries:
                self.reporter.report(entry)
            self.reporter.flush()
        for entry in entries:
            self.check_finite(entry)

    def check_finite(self, entry: dict[str, Any]) -> None:
        """Raises NotFinite on all ranks, before anything of it is saved. In fp16 a skipped step is none of it."""
        self.skipped = self.skipped + 1 if entry["skipped"] else 0
        if self.engine.fp16_enabled() and 0 < self.skipped < MOST_SKIPPED:
            return
        streams = [name for name in self.recipe.streams if not math.isfinite(entry[f"loss/{name}"])]
        norm = entry["grad_norm"] or 0.0
        if not streams and math.isfinite(norm) and not self.skipped:
            return
        what = f"the loss of {', '.join(streams)}" if streams else f"the gradient's norm ({norm:g})"
        if not streams and math.isfinite(norm):
            what = f"fp16's gradient for {self.skipped} steps in a row (loss scale {entry.get('loss_scale'):g})"
        self.settle()
        good = f"the newest good checkpoint is of step {self.saved}" if self.saved is not None else "none was saved"
        raise NotFinite(
            f"step {entry['step']}: {what} is not finite; {good}, in {self.out / 'checkpoints'}. Go on from there into "
            f"another --out (--resume DIR) with a lower train.lr or weight, or look at the step's records (--trace)"
        )

    def trace_step(self, batch: StepBatch) -> None:
        if self.trace.file:
            for stream, keys in batch.keys().items():
                self.trace.write({"step": self.step + 1, "stream": stream, "keys": keys})

    def stop_early(self) -> int:
        self.flush()
        self.save(must=True)
        LOG.info(f"stopped at step {self.step} ({self.stop.why}); start again to go on")
        return STOPPED

    def save(self, must: bool) -> None:
        """A checkpoint of the steps done, where there is none yet. must: wait for it, and raise OSError without it."""
        if self.reporter:
            self.reporter.flush(to_disk=True)
        self.trace.flush(to_disk=True)
        self.settle()
        if self.step == self.saved:
            return
        wait, started = must or not self.recipe.checkpoint.background, time.monotonic()
        self.saver.begin(self.step, self.manifest(), self.write_more, copies=not wait)
        self.note_wait(started)
        if wait:
            self.settle(must)

    def settle(self, must: bool = False) -> None:
        """Publish the checkpoint under way, once all ranks have written it. All ranks call it together."""
        if self.saver.step is None:
            return
        started, step, path = time.monotonic(), self.saver.step, self.saver.final
        problem, seconds = self.saver.finish()
        if problem and must:
            then = "begin" if self.saved is None else f"go on from step {self.saved}"
            text = f"step {step} is not saved ({problem}); free some disk space to {then}"
            raise OSError(errno.EIO, text, str(self.saver.folder))
        if problem and self.process.is_main:
            self.alarm.set(
                f"step {step} is not saved ({problem}); training goes on, older checkpoints are untouched, and the "
                f"next save tries again"
            )
        if not problem:
            self.saved = step
            if self.process.is_main:
                self.alarm.clear()
                checkpoints.clean(self.saver.folder, self.recipe.checkpoint.keep)
        self.note_wait(started)
        self.times["save_write_s"] = seconds
        if not problem:
            LOG.info(f"saved {path} in {seconds:.2f} s, for which training waited {self.blocked:.2f} s")
        self.blocked = 0.0

    def note_wait(self, started: float) -> None:
        seconds = time.monotonic() - started
        self.blocked += seconds
        self.times["save_blocked_s"] = self.times.get("save_blocked_s", 0.0) + seconds

    def manifest(self) -> dict[str, Any]:
        """What checkpoint.Checkpoint reads, beside its own."""
        assert self.job.calibration is not None
        engine = {"stage": self.config.stage, "precision": self.config.precision}
        calibration = self.job.calibration.to_dict()
        return {"identity": self.job.identity(), "state": self.state, "calibration": calibration, "engine": engine}

    def write_more(self, path: Path) -> None:
        """What belongs to a checkpoint beside DeepSpeed's files. Rank 0 only."""
        self.engine.module.encoder.lm.config.save_pretrained(path / checkpoints.HF)
        self.job.tokenizer.hf.save_pretrained(path / checkpoints.HF)

    def close(self) -> None:
        self.trace.close()
        if self.reporter:
            self.reporter.close()
