"""The training loop makes the steps of a run, and reports, evaluates and saves between them."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from xscale.checkpoint.manager import CheckpointManager
from xscale.checkpoint.store import Checkpoint
from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import initial_state
from xscale.deepspeed_private import count_skipped_step
from xscale.errors import NotFinite
from xscale.eval.alignment_score import AlignmentProbe
from xscale.eval.in_training import alignment_metrics, find_probes, measure_functions
from xscale.run.finite import FiniteCheck
from xscale.run.folder import STOPPED
from xscale.run.going_on import is_own
from xscale.run.metrics import LOG
from xscale.run.reporting import RunMetrics, UnreportedStep
from xscale.run.saving import Checkpoints, write_model
from xscale.run.state import RunContext, TrainState
from xscale.run.stopper import Stopper
from xscale.run.synchronizer import GlobalCounts, StepSynchronizer, check_targets
from xscale.run.validation import Validation
from xscale.step.cost import StepFlops
from xscale.step.step import optimizer_step
from xscale.step.zero import keeps_whole_weights


class Trainer:
    """Trains an engine from a checkpoint, or from the beginning, to the last step of the run."""

    def __init__(self, loader: Loader, context: RunContext, checkpoint: Checkpoint | None, trace: bool = False) -> None:
        """Prepare the loop. checkpoint: the checkpoint that was loaded into the engine; None: begin at step 1. trace:
        write the keys of the records that are read."""
        self.recipe = loader.recipe
        self.engine = context.engine
        self.out = context.out
        self.process = context.process
        self.watch = context.watch
        self.stop = context.stop
        self.resumed = checkpoint is not None
        steps = self.recipe.train.steps
        data = checkpoint.state if checkpoint else initial_state(loader.streams)
        self.state = TrainState(data["step"], data)
        done = self.state.step

        self.flops = StepFlops.of(self.engine.module)
        self.manager = CheckpointManager(
            self.engine,
            self.out / "checkpoints",
            context.host_group,
            keep=self.recipe.checkpoint.keep,
            saved=done if checkpoint and is_own(checkpoint, self.out) else None,
            write_model=partial(write_model, self.recipe, loader.corpus.tokenizer, self.engine.module.encoder.lm),
            note=self.watch.note,
            published=lambda step, path: self.evaluations.published(step, path),
        )
        self.finite = FiniteCheck(context, self.recipe, self.manager)
        self.metrics = RunMetrics(context, self.recipe, self.finite, done, trace)
        self.synchronizer = StepSynchronizer(context, self.metrics, done, steps)
        self.stopper = Stopper(context, self.synchronizer, self.metrics, self.state)
        self.probes: dict[str, AlignmentProbe] = {}
        if self.recipe.train.measure_every and (loader.corpus.lexicons or loader.corpus.measured):
            self.probes = find_probes(loader.corpus, context.host_group, self.watch.note)
        tasks = measure_functions(loader, self.engine, self.process, self.watch.note)
        # An earlier start may have measured step 0 and been killed before it saved.
        measured = done if checkpoint else -1
        self.evaluations = Validation(context, self.recipe, tasks, measured, self.metrics, self.stopper)
        self.checkpoints = Checkpoints(
            context, loader, self.manager, self.finite, self.metrics, self.evaluations, self.stopper
        )

    def begin(self) -> None:
        """Evaluate and save before the first step of a run. So a run that cannot save fails at once, and not after a
        day."""
        if not self.resumed and self.evaluations.due(0):
            self.evaluations.measure(0)
        if self.manager.saved is None:
            self.checkpoints.save(self.state, must_succeed=True)

    def loop(self, batches: Iterator[StepBatch]) -> int:
        """Train to the last step, or until a rank is asked to stop. Returns the exit code."""
        while self.state.step < self.recipe.train.steps:
            started = time.monotonic()
            number = self.state.step + 1
            step = self.synchronizer.next(batches)
            self.watch.note(f"at the beginning of step {number}")
            if step.failed():
                self.stopper.end_failed(step.error)
            if step.stopped():
                return self.stop_early()
            counts = step.counts()
            check_targets(counts, number, self.recipe.at(self.state.step))
            self.watch.note(f"in step {number}")
            if number in self.recipe.train.skip_steps:
                self.metrics.add_excluded(number, counts.samples, counts.cost["tokens"])
                count_skipped_step(self.engine)
            else:
                self.metrics.add(self.train_step(step.batch, counts, started))
            self.state = TrainState(number, step.batch.state)
            self.stopper.after_step(self.state)
            self.metrics.after_step(number, step.batch, flush=counts.flush > 0)
            self.evaluations.after_step(self.state)
            self.checkpoints.after_step(self.state)
        LOG.info(f"done: {self.recipe.train.steps} steps, {self.out}")
        return 0

    def train_step(self, batch: StepBatch, counts: GlobalCounts, started: float) -> UnreportedStep:
        """Do one optimizer step. Returns its numbers; some are still on the device. started: the time at which the step
        began."""
        engine = self.engine
        train = self.recipe.train
        number = self.state.step + 1
        skipped = engine.skipped_steps
        # The first step measures, too, so that a lack of memory shows at once.
        measure = bool(train.measure_every) and (number == 1 or number % train.measure_every == 0)
        try:
            result = optimizer_step(
                engine,
                self.recipe,
                batch.rows,
                counts.targets,
                step=self.state.step,
                rank=self.process.rank,
                world=self.process.world,
                measure=measure and keeps_whole_weights(engine),
                vector_counts=counts.auxiliary,
            )
        except NotFinite as error:  # all ranks raise it under fp16
            self.metrics.flush()
            self.finite.end_without_scale(number, error, batch)
        numbers: dict[str, Any] = {
            "grad_norm": engine.get_global_grad_norm(),
            "lr": result.lr,
            "skipped": engine.skipped_steps - skipped,
            "tokens": counts.cost["tokens"],
            "samples": counts.samples,
            "too_long": counts.too_long(),
            "data_wait_s": self.synchronizer.take_wait(),
        }
        if engine.fp16_enabled():
            numbers["loss_scale"] = float(engine.optimizer.loss_scale)
        numbers |= result.gradient_norms
        if measure:
            numbers |= alignment_metrics(engine, self.probes)
        seconds = max(time.monotonic() - started, 1e-9)
        numbers |= self.flops.metrics(counts.cost, seconds, self.process.world)
        numbers["step_s"] = seconds
        numbers["tokens_per_s"] = counts.cost["tokens"] / seconds
        numbers["samples_per_s"] = counts.samples / seconds
        return UnreportedStep(number, batch, result, counts.targets, numbers)

    def stop_early(self) -> int:
        """Save a checkpoint after the last finished step, and return the exit code."""
        self.checkpoints.save(self.state, must_succeed=True)
        LOG.info(f"stopped at step {self.state.step} ({self.stop.why}); start again to continue")
        return STOPPED

    def close(self) -> None:
        self.evaluations.close()
        self.metrics.close()
