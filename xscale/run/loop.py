"""The training loop makes the steps of a run, and reports, evaluates and saves between them."""

import copy
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.manager import CheckpointManager
from xscale.checkpoint.store import Checkpoint
from xscale.data.corpus import run_identity
from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import describe_sources_read, initial_state
from xscale.data.tokenizer import Tokenizer
from xscale.deepspeed_private import count_skipped_step
from xscale.errors import NotFinite
from xscale.eval.alignment_score import Probes, alignment_metrics, find_probes
from xscale.eval.in_training import measure_functions
from xscale.models.encoder import set_rope_theta
from xscale.recipe import Recipe
from xscale.run.finite import FiniteCheck
from xscale.run.folder import STOPPED
from xscale.run.metrics import LOG
from xscale.run.reporting import RunMetrics, UnreportedStep
from xscale.run.resume import is_checkpoint_of_run
from xscale.run.state import RunContext
from xscale.run.synchronizer import GlobalCounts, StepSynchronizer, check_targets, end_all_ranks
from xscale.run.validation import Validation
from xscale.step.cost import StepFlops
from xscale.step.ds_config import EngineConfig
from xscale.step.step import optimizer_step
from xscale.step.zero import keeps_whole_weights


class Trainer:
    """Trains an engine from a checkpoint, or from the beginning, to the last step of the run."""

    def __init__(
        self,
        loader: Loader,
        engine: Any,
        config: EngineConfig,
        context: RunContext,
        checkpoint: Checkpoint | None,
        trace: bool,
    ):
        """Prepare the loop. checkpoint: the checkpoint that was loaded into the engine; None: begin at step 1. trace:
        write the keys of the records that are read."""
        self.loader = loader
        self.recipe = loader.recipe
        self.engine = engine
        self.config = config
        self.context = context
        self.resumed = checkpoint is not None
        self.positions = checkpoint.state if checkpoint else initial_state(loader.streams)
        """The positions of the streams in their data after the steps done (data/mixture.py)."""
        self.done = self.positions["step"]
        """The number of steps done."""
        context.status.note_step(self.done)

        self.flops = StepFlops.of(engine.module)
        self.manager = CheckpointManager(
            engine,
            context.out / "checkpoints",
            context.host_group,
            keep=self.recipe.checkpoint.keep,
            saved=self.done if checkpoint and is_checkpoint_of_run(checkpoint, context.out) else None,
            write_model=partial(write_model, self.recipe, loader.corpus.tokenizer, engine.module.encoder.lm),
            note=context.watch.note,
            published=lambda step, path: self.evaluations.name_best_checkpoint(),
        )
        self.finite = FiniteCheck(context, self.recipe, self.manager)
        self.metrics = RunMetrics(context, self.recipe, self.finite, self.done, trace)
        self.synchronizer = StepSynchronizer(
            context, self.metrics, engine.module.auxiliary_states, self.done, self.recipe.train.steps
        )
        self.probes: Probes = {}
        if self.recipe.train.measure_every and (loader.corpus.lexicons or loader.corpus.measured):
            self.probes = find_probes(loader.corpus, context.host_group, context.watch.note)
        tasks = measure_functions(loader, engine, context.process, context.watch.note)
        # An earlier start may have measured step 0 and been killed before it saved.
        measured = self.done if checkpoint else -1
        self.evaluations = Validation(context, self.recipe, tasks, measured, self.metrics)

    def begin(self) -> None:
        """Evaluate and save before the first step of a run. So a run that cannot save fails at once, and not after a
        day."""
        if not self.resumed and self.evaluations.due(0):
            self.evaluations.measure(0)
        if self.manager.saved is None:
            self.save(must_succeed=True)

    def loop(self, batches: Iterator[StepBatch]) -> int:
        """Train to the last step, or until a rank is asked to stop. Returns the exit code."""
        while self.done < self.recipe.train.steps:
            started = time.monotonic()
            number = self.done + 1
            step = self.synchronizer.next(batches)
            self.context.watch.note(f"at the beginning of step {number}")
            if step.failed():
                end_all_ranks(step.error, self.context.host_group, self.metrics)
            if step.stopped():
                self.save(must_succeed=True)
                LOG.info(f"stopped at step {self.done} ({self.context.stop.why}); start again to continue")
                return STOPPED
            counts = step.counts()
            check_targets(counts, number, self.recipe.at(self.done))
            self.context.watch.note(f"in step {number}")
            if number in self.recipe.train.skip_steps:
                self.metrics.add_excluded(number, counts.samples, counts.cost["tokens"])
                count_skipped_step(self.engine)
            else:
                self.metrics.add(self.train_step(step.batch, counts, started))
            self.done = number
            self.positions = step.batch.state
            self.context.stop.arm_time_limit()
            self.context.status.note_step(number)
            self.metrics.after_step(number, step.batch, flush=counts.flush > 0)
            if self.evaluations.due(number) and not self.synchronizer.stops_next():
                self.metrics.flush()
                self.evaluations.measure(number)
            # A run that is about to stop saves when it stops.
            is_due = number % self.recipe.checkpoint.every == 0 or self.evaluations.best_so_far == number
            is_last = number == self.recipe.train.steps
            if is_last or (is_due and not self.synchronizer.stops_next()):
                self.save(must_succeed=is_last)
        LOG.info(f"done: {self.recipe.train.steps} steps, {self.context.out}")
        return 0

    def train_step(self, batch: StepBatch, counts: GlobalCounts, started: float) -> UnreportedStep:
        """Do one optimizer step. Returns its numbers; some are still on the device. started: the time at which the step
        began."""
        engine = self.engine
        train = self.recipe.train
        number = self.done + 1
        skipped = engine.skipped_steps
        # The first step measures, too, so that a lack of memory shows at once.
        measure = bool(train.measure_every) and (number == 1 or number % train.measure_every == 0)
        try:
            result = optimizer_step(
                engine,
                self.recipe,
                batch.rows,
                counts.targets,
                step=self.done,
                rank=self.context.process.rank,
                world=self.context.process.world,
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
        numbers |= self.flops.metrics(counts.cost, seconds, self.context.process.world)
        numbers["step_s"] = seconds
        numbers["tokens_per_s"] = counts.cost["tokens"] / seconds
        numbers["samples_per_s"] = counts.samples / seconds
        return UnreportedStep(number, batch, result, counts.targets, numbers)

    def save(self, must_succeed: bool) -> None:
        """Save a checkpoint after the last finished step. must_succeed: raise OSError if it fails."""
        self.metrics.flush()
        self.metrics.sync()
        self.evaluations.lines.flush(to_disk=True)
        loader = self.loader
        manifest = {
            "identity": run_identity(self.recipe, loader.corpus),
            "state": self.positions,
            "sources": describe_sources_read(self.positions, loader.streams, loader.corpus.sources),
            "calibration": loader.calibration.to_dict(),
            "engine": self.config.saved(),
        }
        self.manager.save(self.done, manifest, good=not self.finite.skipped_in_a_row, must_succeed=must_succeed)

    def close(self) -> None:
        self.evaluations.lines.close()
        self.metrics.close()


def write_model(recipe: Recipe, tokenizer: Tokenizer, lm: Any, step: int, path: Path) -> None:
    """Write the tokenizer and the model's config, with the settings of the last finished step, to a checkpoint. Rank 0
    only."""
    config = copy.deepcopy(lm.config)
    theta = recipe.at(max(step - 1, 0)).model.rope_theta
    if theta:
        set_rope_theta(config, theta)  # after a resume, the model has that of step 0 until its first step
    config.save_pretrained(path / checkpoints.HF)
    tokenizer.hf.save_pretrained(path / checkpoints.HF)
