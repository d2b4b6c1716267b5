"""The training loop makes the steps of a run, and reports, evaluates and saves between them."""

import copy
import json
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.manager import CheckpointManager
from xscale.checkpoint.store import Checkpoint
from xscale.data.loader import StepBatch
from xscale.data.mixture import initial_state
from xscale.deepspeed_private import count_skipped_step
from xscale.errors import DirectoryTaken, MachineError, NotFinite, UserError
from xscale.eval.alignment_score import AlignmentProbe
from xscale.eval.in_training import Results, find_probes, measure_functions
from xscale.metric_keys import MetricKey
from xscale.models.encoder import set_rope_theta
from xscale.run.folder import MACHINE, STOPPED, USER_ERROR, explain
from xscale.run.going_on import is_own
from xscale.run.metrics import LOG, JsonLines, Reporter, Skips, UnreportedStep, pace_metrics, sum_over_ranks
from xscale.run.synchronizer import GlobalCounts, StepSynchronizer, TrainerContext, check_targets
from xscale.run.validation import Validation
from xscale.run_spec import RunSpec
from xscale.step.cost import StepFlops
from xscale.step.step import optimizer_step
from xscale.step.zero import keeps_whole_weights, whole_weight

NOT_FINITE = "not_finite.jsonl"
"""The file with the record keys of a step whose loss or gradient is not finite; a line per rank."""
MOST_SKIPPED = 100
"""The number of consecutive steps skipped by fp16 at which a run fails. Fewer are normal while fp16 looks for a loss
scale: 32 halvings lead from 2^32 to 1."""


class RankFailure(NamedTuple):
    """Why a rank cannot go on, for the other ranks."""

    code: int
    """The exit code."""
    text: str
    directory_taken: bool


class Trainer:
    """Trains an engine from a checkpoint, or from the beginning, to the last step of the run."""

    def __init__(
        self,
        run_spec: RunSpec,
        context: TrainerContext,
        checkpoint: Checkpoint | None,
        trace: bool = False,
    ):
        """Prepare to go on from the checkpoint that the engine was loaded from, or to begin if it is None."""
        self.run_spec = run_spec
        self.recipe = run_spec.recipe
        self.config = context.config
        self.engine = context.engine
        self.out = context.out
        self.process = context.process
        self.host_group = context.host_group
        self.status = context.status
        self.stop = context.stop
        self.watch = context.watch
        self.state = checkpoint.state if checkpoint else initial_state(run_spec.specs)
        """The positions of the streams in their data."""
        self.step: int = self.state["step"]
        """The number of steps done."""
        self.first = self.step
        """The step at which this start began."""
        self.too_long = 0
        """The number of pairs longer than data.max_length in the steps of this start."""
        self.skips = Skips()
        self.unreported: list[UnreportedStep] = []
        self.flops = StepFlops(self.engine.module.encoder)
        self.reporter = Reporter(self.out, self.step, self.recipe) if self.process.is_main else None
        tasks = measure_functions(run_spec, self.engine, self.process, self.alignment_scores, self.watch.note)
        measured = self.step if checkpoint else -1  # a start that was killed may have measured step 0 and saved nothing
        self.validation = Validation(run_spec, tasks, self.out, self.host_group, measured, self.reporter)
        self.checkpoint_manager = CheckpointManager(
            self.engine,
            self.out / "checkpoints",
            self.host_group,
            keep=self.recipe.checkpoint.keep,
            saved=checkpoint.step if checkpoint and is_own(checkpoint, self.out) else None,
            write_more=self.write_model,
            note=self.watch.note,
            published=self.validation.published,
        )
        self.synchronizer = StepSynchronizer(context, self.checkpoint_manager, self.step, self.recipe.train.steps)
        traced = self.out / "trace" / f"rank{self.process.rank}.jsonl" if trace else None
        self.trace = JsonLines(traced, self.step)
        self.probes: dict[str, AlignmentProbe] = {}
        """The words that alignment scores compare, by dictionary. Only rank 0 has them."""
        asked = self.recipe.train.measure_every or self.alignment_scores in tasks.values()
        if asked and (run_spec.lexicons or run_spec.measured):
            self.probes = find_probes(run_spec, self.host_group, self.watch.note)
        self.status.step = self.step

    def loop(self, batches: Iterator[StepBatch]) -> int:
        """Train to the last step, or until a rank is asked to stop. Returns the exit code."""
        recipe = self.recipe
        started = time.monotonic()
        pending_step = self.synchronizer.next(batches)
        if self.stop.late and not self.stop.has_stepped and self.process.is_main:
            LOG.warning(
                f"train.time_limit: {recipe.train.time_limit:g} minutes passed before step {self.step + 1} began; "
                f"the run trains a few steps, saves a checkpoint and stops. Set a longer limit"
            )
        while pending_step:
            self.watch.note(f"at the beginning of step {self.step + 1}")
            if pending_step.failed():
                self.end_all(pending_step.error)
            if pending_step.stopped():
                return self.stop_early()
            counts = pending_step.counts()
            batch = pending_step.batch
            check_targets(counts, self.step + 1, recipe.at(self.step))
            self.synchronizer.announce(batches, counts.ahead)
            self.watch.note(f"in step {self.step + 1}")
            if recipe.train.skips(self.step + 1):
                self.exclude_step(counts)
            else:
                self.unreported.append(self.train_step(batch, counts, started))
            self.trace_step(batch)
            self.end_step(batch, counts)
            if counts.written == self.process.world and pending_step.saving == self.checkpoint_manager.under_way:
                self.checkpoint_manager.finish_save()
            self.measure_and_save(bool(counts.flush))
            pending_step = self.synchronizer.next(batches)
            started = time.monotonic()
        if self.too_long:
            since = f", since step {self.first}" if self.first else ""
            LOG.info(f"{self.too_long:,} pairs were over data.max_length ({recipe.data.overlong}){since}")
        LOG.info(f"done: {recipe.train.steps} steps, {self.out}")
        return 0

    def exclude_step(self, counts: GlobalCounts) -> None:
        """Count a step whose records were read, but do not change the weights."""
        self.flush()
        count_skipped_step(self.engine)
        if self.reporter:
            numbers = {"samples": counts.samples, "tokens": counts.cost["tokens"]}
            self.reporter.metrics.write({"step": self.step + 1, "loss": None, "skipped": 1, "excluded": True} | numbers)

    def end_step(self, batch: StepBatch, counts: GlobalCounts) -> None:
        self.step += 1
        self.state = batch.state
        self.stop.has_stepped = True
        self.status.step = self.step
        self.too_long += counts.too_long()

    def measure_and_save(self, flush: bool) -> None:
        """After a step, read the metrics, evaluate and save a checkpoint, each only if it is due."""
        last = self.step == self.recipe.train.steps
        due = self.step % self.recipe.checkpoint.every == 0
        measured = self.validation.due(self.step)
        if flush or last or due or measured:
            self.flush()
        if last:
            self.watch.stopping = True
        if (due or measured) and self.synchronizer.stops_next():
            due = False  # the run stops before the next step and saves then
            measured = False
        if measured and self.evaluate():
            due = True
        if last or due:
            self.save(must_succeed=last)

    def end_all(self, error: Exception | None) -> NoReturn:
        """End all ranks after one could not read its records. That rank raises its error, and the others an error with
        the same message. First write the metrics and the checkpoint, unless another run has taken the directory."""
        failure = RankFailure(*explain(error), isinstance(error, DirectoryTaken)) if error else None
        failures = dict[int, RankFailure]()
        for rank, failure_of_rank in enumerate(self.host_group.gather(failure)):
            if failure_of_rank:
                failures[rank] = failure_of_rank
        replaced = any(of_rank.directory_taken for of_rank in failures.values())
        if not replaced:
            self.flush()
            self.checkpoint_manager.finish_save()
        if error:
            raise error
        rank, first = next(iter(failures.items()))
        if replaced:
            raise DirectoryTaken(first.text)
        raise {USER_ERROR: UserError, MACHINE: MachineError}.get(first.code, RuntimeError)(f"rank {rank}: {first.text}")

    def train_step(self, batch: StepBatch, counts: GlobalCounts, started: float) -> UnreportedStep:
        """Do one optimizer step. Returns its sums, which are still on the device. started: when the step began."""
        engine = self.engine
        train = self.recipe.train
        skipped = engine.skipped_steps
        # The first step measures too, so that a lack of memory for it shows at once.
        measure = bool(train.measure_every) and (self.step == 0 or (self.step + 1) % train.measure_every == 0)
        try:
            result = optimizer_step(
                engine,
                self.recipe,
                batch.rows,
                counts.targets,
                step=self.step,
                rank=self.process.rank,
                world=self.process.world,
                measure=measure and keeps_whole_weights(engine),
                vector_counts=counts.auxiliary,
            )
        except NotFinite as error:  # under fp16 all ranks raise it
            self.flush()
            self.skips.count(True, None)
            self.raise_not_finite(self.step + 1, f"the gradient ({error})", batch, finite=True)
        numbers = {
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
            numbers |= self.alignment_metrics()
        seconds = max(time.monotonic() - started, 1e-9)
        numbers |= self.flops.metrics(counts.cost, seconds, self.process.world)
        numbers |= self.checkpoint_manager.pop_times()
        numbers["step_s"] = seconds
        numbers["tokens_per_s"] = counts.cost["tokens"] / seconds
        numbers["samples_per_s"] = counts.samples / seconds
        return UnreportedStep(self.step + 1, batch, result, counts.targets, numbers)

    def alignment_scores(self) -> Results:
        """Return the alignment scores by dictionary on rank 0, {} on other ranks. All ranks call it together."""
        results: Results = {}
        with whole_weight(self.engine, self.engine.module.encoder.embeddings) as table:
            for pair, probe in self.probes.items():
                for kind, words in probe.items():
                    score = words.score(table)
                    if score is not None:
                        results.setdefault(pair, {})[kind] = score
        return results

    def alignment_metrics(self) -> dict[str, float]:
        names = {"withheld": "alignment", "trained": "alignment_trained"}
        metrics = dict[str, float]()
        for pair, scores in self.alignment_scores().items():
            for kind, score in scores.items():
                metrics[str(MetricKey(names[kind], pair))] = score
        return metrics

    def evaluate(self) -> bool:
        """Measure the recipe's tasks. Returns True if this step is the best so far and should be saved."""
        self.watch.note(f"measuring step {self.step}")
        return self.validation.measure(self.step)

    def flush(self) -> None:
        """Read the metrics of unreported steps from the device, sum them over ranks, report them. All ranks call it."""
        self.synchronizer.last_flush = time.monotonic()
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
            self.check_finite(entry, step)

    def check_finite(self, metrics: dict[str, Any], step: UnreportedStep) -> None:
        """Raise NotFinite on all ranks, before the step is saved, if its losses or its gradient are not finite. fp16
        may skip fewer than MOST_SKIPPED consecutive steps. metrics: the step's line of metrics.jsonl."""
        fp16 = self.engine.fp16_enabled()
        warning = self.skips.count(bool(metrics["skipped"]), metrics.get("loss_scale"))
        if warning and fp16 and self.process.is_main:
            LOG.warning(warning)
        in_a_row = self.skips.in_a_row
        if fp16 and 0 < in_a_row < MOST_SKIPPED:
            return
        streams = [name for name in self.recipe.streams if not math.isfinite(metrics.get(f"loss/{name}", 0))]
        norm = metrics["grad_norm"] or 0.0
        if not streams and math.isfinite(norm) and not in_a_row:
            return
        what = f"the loss of {', '.join(streams)}" if streams else f"the gradient's norm ({norm:g})"
        if not streams and math.isfinite(norm):
            what = f"fp16's gradient for {in_a_row} steps in a row (loss scale {metrics.get('loss_scale'):g})"
        self.raise_not_finite(step.step, what, step.batch, bool(step.result.sums.values_K.isfinite().all()))

    def raise_not_finite(self, step: int, what: str, batch: StepBatch, finite: bool) -> NoReturn:
        """Write the step's records to not_finite.jsonl, and raise. finite: whether this rank's losses are finite."""
        self.checkpoint_manager.finish_save()
        path = self.write_records(step, what, batch, finite)
        newest = self.checkpoint_manager.good
        good = "none was saved" if newest is None else f"the newest good checkpoint is of step {newest}"
        # Steps that fp16 skipped have changed nothing, so the update before them is the bad one.
        bad = step - self.skips.in_a_row if self.engine.fp16_enabled() else step
        raise NotFinite(
            f"step {step}: {what} is not finite; {good}, in {self.out / 'checkpoints'}. {path} names the records. "
            f"Continue from that checkpoint without the step (--resume DIR --set train.skip_steps=[{bad}]), or in "
            f"another --out (--fork DIR) with a lower train.lr or stream weight"
        )

    def write_records(self, step: int, what: str, batch: StepBatch, finite: bool) -> Path:
        """Append the keys of a step's records to not_finite.jsonl, a line per rank. Returns its path."""
        path = self.out / NOT_FINITE
        records = {"rank": self.process.rank, "finite": finite, "keys": batch.keys()}
        records_of_ranks = self.host_group.gather(records)
        if self.process.is_main:
            lines = [json.dumps({"step": step, "what": what} | of, ensure_ascii=False) for of in records_of_ranks]
            with suppress(OSError), path.open("a", encoding="utf-8") as file:  # a full disk must not hide NotFinite
                file.writelines(f"{line}\n" for line in lines)
        return path

    def trace_step(self, batch: StepBatch) -> None:
        if self.trace.file:
            for stream, keys in batch.keys().items():
                self.trace.write({"step": self.step + 1, "stream": stream, "keys": keys})

    def stop_early(self) -> int:
        self.watch.stopping = True
        self.flush()
        self.save(must_succeed=True)
        LOG.info(f"stopped at step {self.step} ({self.stop.why}); start again to go on")
        return STOPPED

    def save(self, must_succeed: bool) -> None:
        """Save a checkpoint of the steps done. must_succeed: wait until it is written, and raise OSError if it
        fails."""
        if self.reporter:
            self.reporter.flush(to_disk=True)
        self.trace.flush(to_disk=True)
        self.validation.lines.flush(to_disk=True)
        self.checkpoint_manager.save(
            self.step,
            self.manifest(),
            good=not self.skips.in_a_row,
            background=self.recipe.checkpoint.background,
            must_succeed=must_succeed,
        )

    def manifest(self) -> dict[str, Any]:
        """Return a checkpoint's manifest without its list of files; see Checkpoint in checkpoint/store.py."""
        return {
            "identity": self.run_spec.identity(),
            "state": self.state,
            "calibration": self.run_spec.calibration.to_dict(),
            "engine": self.config.saved(),
        }

    def write_model(self, path: Path) -> None:
        """Write the model's config, with the last step's settings, and the tokenizer to a checkpoint. Rank 0 only."""
        config = copy.deepcopy(self.engine.module.encoder.lm.config)
        if theta := self.recipe.at(max((self.checkpoint_manager.under_way or 0) - 1, 0)).model.rope_theta:
            set_rope_theta(config, theta)  # the next step may have set another while this thread writes
        config.save_pretrained(path / checkpoints.HF)
        self.run_spec.tokenizer.hf.save_pretrained(path / checkpoints.HF)

    def close(self) -> None:
        self.trace.close()
        self.validation.close()
        if self.reporter:
            self.reporter.close()
