"""The training loop makes the steps of a run, and reports, evaluates and saves between them."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.manager import CheckpointManager
from xscale.checkpoint.store import Checkpoint
from xscale.data.corpus import run_identity
from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import describe_sources_read, initial_state
from xscale.deepspeed_private import skip_step
from xscale.errors import LOG, ExitCode, UserError
from xscale.eval.alignment_score import ProbesByMetric, gather_probe_words_on_rank_0, measure_alignment_on_rank_0
from xscale.eval.in_training import make_task_functions
from xscale.run.metrics import RunMetrics, UnreportedStep
from xscale.run.resume import is_checkpoint_of_run
from xscale.run.run_status import DONE, STOPPED
from xscale.run.synchronizer import AgreedStep, StepSynchronizer, check_step_has_targets
from xscale.run.validation import Validation
from xscale.run.watch import RunContext
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
        self.data_state = checkpoint.state if checkpoint else initial_state(loader.last_streams)
        """The mixture's state after the steps done, which has the streams' positions in their data."""
        self.done = self.data_state["step"]
        """The number of steps done, which is also the number of the next step, counted from 0."""
        context.status.set_steps_done_for_next_write(self.done)
        self.flops = StepFlops(engine.module.encoder, bool(engine.module.streams_with_vectors()))
        # The manager first calls `published` when it saves. By then, self.evaluations, which is set below, exists.
        self.manager = CheckpointManager(
            engine,
            context.out / "checkpoints",
            context.cpu_group,
            keep=self.recipe.checkpoint.keep,
            saved=self.done if checkpoint and is_checkpoint_of_run(checkpoint, context.out) else None,
            write_config_and_tokenizer=self.write_config_and_tokenizer,
            note=context.watch.note_progress,
            published=lambda: self.evaluations.write_name_of_best_checkpoint(),
        )
        self.metrics = RunMetrics(context, self.recipe, self.manager, self.done, trace)
        self.synchronizer = StepSynchronizer(context, self.metrics, self.done, self.recipe.train.steps)
        self.probes: ProbesByMetric = {}
        """The dictionary words on which each metric `alignment/...` is measured; {} if there are none, and on other
        ranks than 0."""
        if self.recipe.train.measure_every and (loader.corpus.lexicons or loader.corpus.measured):
            self.probes = gather_probe_words_on_rank_0(loader.corpus, context.cpu_group, context.watch.note_progress)
        tasks = make_task_functions(loader, engine, context.process, context.watch.note_progress)
        # Without a checkpoint, an earlier start may have measured step 0 and been killed before it saved.
        self.evaluations = Validation(context, self.recipe, tasks, self.done if checkpoint else -1, self.metrics)
        self.files = (self.metrics.lines, self.metrics.trace, self.evaluations.lines)

    def evaluate_and_save_start(self) -> None:
        """Save before the first step, unless the run continues from its own checkpoint; and before step 1, also
        evaluate. So a run that cannot save fails at once, and not after a day."""
        if self.manager.saved is None:
            if self.done == 0:
                self.evaluations.evaluate_if_due_and_check_if_best(0)
            self.save(must_succeed=True)

    def loop(self, batches: Iterator[StepBatch]) -> ExitCode:
        """Train to the last step, or until a rank is asked to stop. Returns the exit code."""
        steps = self.recipe.train.steps
        while self.done < steps:
            started = time.monotonic()
            number = self.done + 1  # of the step that begins, counted from 1 as in all that people read
            self.context.watch.begin_step(number)
            agreed = self.synchronizer.next_step(batches)
            if agreed is None:
                self.save(must_succeed=True)
                LOG.info(
                    f"the run has stopped after step {self.done} (reason: {self.context.stop.why}). To continue the "
                    "run, start the same command again. If the command has --resume, remove --resume first"
                )
                return STOPPED
            check_step_has_targets(agreed, number, self.recipe.at(self.done))
            self.context.watch.note_progress(f"training in step {number}")
            if number in self.recipe.train.skip_steps:
                self.metrics.reduce_steps_and_report_excluded(number, agreed.samples, agreed.cost["tokens"])
                skip_step(self.engine)
            else:
                self.metrics.unreported.append(self.train_step(agreed, started))
            self.done = number
            self.data_state = agreed.batch.state
            self.context.stop.arm_time_limit()
            self.context.status.set_steps_done_for_next_write(number)
            self.metrics.trace_records(number, agreed.batch)
            if agreed.report_metrics:
                self.metrics.reduce_and_report_steps()
            try:
                is_best = self.evaluations.evaluate_if_due_and_check_if_best(number)
            except UserError:  # a wrong checkpoint.best, which a resume may set
                self.save(must_succeed=True)
                raise
            if number == steps or is_best or number % self.recipe.checkpoint.every == 0:
                self.save(must_succeed=number == steps)
        LOG.info(f"done: {steps} steps. The run in {self.context.out} is complete")
        return DONE

    def train_step(self, agreed: AgreedStep, started: float) -> UnreportedStep:
        """Do one optimizer step. Returns its numbers; some are still on the device. started: the time, by
        time.monotonic(), at which the step began."""
        engine = self.engine
        number = self.done + 1
        skipped = engine.skipped_steps
        every = self.recipe.train.measure_every
        # The first step measures, too, so that a lack of memory shows at once.
        measure = every > 0 and (number == 1 or number % every == 0)
        result = optimizer_step(
            engine,
            self.recipe,
            agreed.batch.rows,
            agreed.counts,
            step=self.done,
            rank=self.context.process.rank,
            world=self.context.process.world,
            measure_norms=measure and keeps_whole_weights(engine),
            vector_counts_of_ranks=agreed.vector_counts_of_ranks,
        )
        metrics: dict[str, Any] = {
            "grad_norm": engine.get_global_grad_norm(),
            "lr": result.lr,
            "skipped": engine.skipped_steps - skipped,
            "tokens": agreed.cost["tokens"],
            "samples": agreed.samples,
            "too_long": agreed.too_long_pair_count(),
            "data_wait_s": self.synchronizer.read_s,
        }
        if engine.fp16_enabled():
            metrics["loss_scale"] = float(engine.optimizer.loss_scale)
        metrics |= result.gradient_norms
        if measure:
            metrics |= measure_alignment_on_rank_0(engine, self.probes)
        seconds = max(time.monotonic() - started, 1e-9)
        world = self.context.process.world
        metrics |= self.flops.mfu_and_gpu_memory_metrics(agreed.cost, world * len(agreed.batch.rows), seconds, world)
        metrics["step_s"] = seconds
        metrics["tokens_per_s"] = agreed.cost["tokens"] / seconds
        metrics["samples_per_s"] = agreed.samples / seconds
        return UnreportedStep(agreed.batch, result, agreed.counts, metrics)

    def save(self, must_succeed: bool) -> None:
        """Save a checkpoint after the last finished step. must_succeed: raise OSError if it fails."""
        self.metrics.reduce_and_report_steps()
        for lines in self.files:  # before a checkpoint says that their steps are done
            lines.flush_or_keep_lines(sync=True)
        loader = self.loader
        manifest = {
            "identity": run_identity(self.recipe, loader.corpus),
            "state": self.data_state,
            "sources": describe_sources_read(self.data_state, loader.last_streams, loader.corpus.sources),
            "calibration": asdict(loader.calibration),
            "engine": self.config.settings_in_checkpoint(),
            "has_new_head": self.engine.module.encoder.has_new_head,
        }
        self.manager.save_and_remove_old(
            self.done, manifest, after_skipped_step=self.metrics.skipped_in_a_row > 0, must_succeed=must_succeed
        )

    def write_config_and_tokenizer(self, path: Path) -> None:
        """Write the tokenizer and the model's config to a checkpoint. Rank 0 only."""
        self.engine.module.encoder.lm.config.save_pretrained(path / checkpoints.HF)
        self.loader.corpus.tokenizer.hf.save_pretrained(path / checkpoints.HF)

    def flush_files_at_end(self) -> None:
        """Write the lines that still wait in memory, at the end of the run."""
        for lines in self.files:
            lines.flush_and_log_lost_lines()
