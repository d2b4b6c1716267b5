"""The training loop, and what it keeps between steps."""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.manager import CheckpointManager
from xscale.checkpoint.store import Checkpoint
from xscale.data.loader import StepBatch
from xscale.deepspeed_private import leave_out_step
from xscale.errors import MachineError, NotFinite, Replaced, UserError
from xscale.eval.alignment_score import AlignmentProbe
from xscale.files import Lock
from xscale.objectives import Gathering
from xscale.ranks import HostGroup, Process
from xscale.run.alignment_probe import probe_of
from xscale.run.evals import Results, find_tasks
from xscale.run.metrics import LOG, JsonLines, Reporter, StepRecord
from xscale.run.pace import Alike, Pace, Skips
from xscale.run.run_spec import RunSpec
from xscale.run.status import MACHINE, STOPPED, USER_ERROR, code_of, message_of
from xscale.run.stop import StopRequest
from xscale.run.synchronizer import GlobalCounts, StepSynchronizer, check_targets
from xscale.run.validation import Validation
from xscale.run.watch import Watch
from xscale.step.cost import StepFlops
from xscale.step.ds_config import EngineConfig
from xscale.step.step import optimizer_step
from xscale.step.zero import keeps_whole_weights, whole_weight

NOT_FINITE = "not_finite.jsonl"
"""The records of every step that was not finite, a line for each rank."""
MOST_SKIPPED = 100
"""Steps in a row that fp16 may skip while it looks for a loss scale; from 2^32 to 1 are 32."""
FEW_SAMPLES = 1000
"""Of fewer, a share of dropped pairs says little: it is taken of so many."""


class TrainerContext(NamedTuple):
    """What a trainer works with, and the next one where the run goes back."""

    config: EngineConfig
    engine: Any
    out: Path
    process: Process
    host_group: HostGroup
    stop: StopRequest
    watch: Watch
    locks: list[Lock]
    """On `out`; of rank 0."""


class UnreportedStep(NamedTuple):
    """A step whose numbers nobody has looked at yet."""

    record: StepRecord
    batch: StepBatch


class Trainer:
    """An engine on its way through the steps of a job."""

    def __init__(
        self,
        run_spec: RunSpec,
        context: TrainerContext,
        state: dict[str, Any],
        checkpoint: Checkpoint | None,
        excluded_steps: list[int],
        trace: bool = False,
    ):
        """state: what the streams have consumed. checkpoint: that the engine was loaded from. condemned: steps that
        read their records and change nothing, since the run was not finite with them; 1 for the first."""
        self.run_spec, self.recipe, self.state, self.excluded_steps = run_spec, run_spec.recipe, state, excluded_steps
        self.config, self.engine, self.out, self.process, self.host_group, self.stop, self.watch, locks = context
        self.step: int = state["step"]
        """Steps done."""
        self.first, self.too_long, self.skips = self.step, Counter[str](), Skips()
        """The step that it began with; of each stream since then, how many pairs were over data.max_length."""
        self.warned = set(run_spec.dropped())
        self.unreported: list[UnreportedStep] = []
        self.pace, self.alike = Pace(context.watch.names), Alike()
        auxiliary_states = context.engine.module.auxiliary_states.items()
        self.gathering = {stream: one for stream, one in auxiliary_states if isinstance(one, Gathering)}
        self.flops = StepFlops(context.engine.module.encoder)
        self.reporter = Reporter(context.out, self.step, self.recipe) if context.process.is_main else None
        tasks = find_tasks(run_spec, context.engine, context.process, self.measured_words, context.watch.note)
        measured = self.step if checkpoint else -1  # a start that was cut off has measured step 0, and saved nothing
        self.validation = Validation(run_spec, tasks, context.out, context.host_group, measured, self.reporter)
        folder, keep = context.out / "checkpoints", self.recipe.checkpoint.keep
        self.checkpoint_manager = CheckpointManager(
            context.engine, folder, context.host_group, context.watch, self.validation, keep, checkpoint
        )
        around = context.process, context.host_group, context.stop, context.watch, self.checkpoint_manager
        self.synchronizer = StepSynchronizer(
            self.step, self.recipe.train.steps, frozenset(self.gathering), *around, locks
        )
        self.trace = JsonLines(
            context.out / "trace" / f"rank{context.process.rank}.jsonl" if trace else None, self.step
        )
        self.probes: dict[str, AlignmentProbe] = {}
        """Of rank 0."""
        if (run_spec.lexicons or run_spec.measured) and (
            self.recipe.train.measure_every or self.measured_words in tasks.values()
        ):
            context.host_group.from_main(lambda: self.probes.update(probe_of(run_spec, context.out)))

    def loop(self, batches: Iterator[StepBatch]) -> int:
        """To the last step, or until one of the ranks is told to stop. Returns the exit code."""
        recipe, started = self.recipe, time.monotonic()
        pending_step = self.synchronizer.next(batches)
        if self.stop.late and not self.stop.moved and self.process.is_main:
            LOG.warning(
                f"train.time_limit: {recipe.train.time_limit:g} minutes were over before step {self.step + 1} began; "
                f"this start makes a few steps, saves and stops: take a longer limit"
            )
        while pending_step:
            self.watch.note(f"at the beginning of step {self.step + 1}")
            if pending_step.failed():
                self.end_all(pending_step.error)
            if pending_step.stopped():
                return self.stop_early()
            counts, batch = pending_step.counts(), pending_step.batch
            check_targets(counts, self.step + 1, recipe)
            self.synchronizer.announce(batches, counts.ahead)
            self.watch.note(f"in step {self.step + 1}")
            if self.step + 1 in self.excluded_steps:
                self.leave_out(counts)
            else:
                self.unreported.append(UnreportedStep(self.train_step(batch, counts, started), batch))
                self.unreported[-1].record.measured.update(self.checkpoint_manager.times)
                self.checkpoint_manager.times.clear()
            self.trace_step(batch)
            self.step, self.state, self.stop.moved = self.step + 1, batch.state, True
            self.count_dropped(counts.too_long)
            if counts.written == self.process.world and pending_step.saving == self.checkpoint_manager.under_way:
                self.checkpoint_manager.settle()
            last, due = self.step == recipe.train.steps, self.step % recipe.checkpoint.every == 0
            measured = self.validation.due(self.step)
            if counts.flush or last or due or measured:
                self.flush()
            self.watch.stopping = last
            if (due or measured) and self.synchronizer.stops_next():
                due = measured = False  # it stops now, and saves
            due |= measured and self.measure()
            if last or due:
                self.save(must=last)
            pending_step, started = self.synchronizer.next(batches), time.monotonic()
        if self.too_long.total():
            long = f"{self.too_long.total():,} pairs were over data.max_length ({recipe.data.overlong})"
            LOG.info(long + (f", since step {self.first}" if self.first else ""))
        LOG.info(f"done: {recipe.train.steps} steps, {self.out}")
        return 0

    def leave_out(self, counts: GlobalCounts) -> None:
        """A step that reads its records and changes nothing."""
        self.flush()
        leave_out_step(self.engine)
        if self.reporter:
            numbers = {"samples": counts.samples, "tokens": counts.work.tokens}
            self.reporter.metrics.write({"step": self.step + 1, "loss": None, "skipped": 1, "excluded": True} | numbers)

    def end_all(self, error: Exception | None) -> NoReturn:
        """Some rank could not read its records: raises its error there, and on the others what it says. What is done is
        written first, unless another run has the directory."""
        told = self.host_group.gather(error and (code_of(error), message_of(error), isinstance(error, Replaced)))
        replaced = any(of_rank[2] for of_rank in told if of_rank)
        if replaced:
            for lines in (self.trace, self.validation.lines, *([self.reporter.metrics] if self.reporter else [])):
                lines.drop()
        else:
            self.flush()
            self.checkpoint_manager.settle()
        if error:
            raise error
        rank, (code, text, _) = next((rank, of_rank) for rank, of_rank in enumerate(told) if of_rank)
        if replaced:
            raise Replaced(text)
        raise {USER_ERROR: UserError, MACHINE: MachineError}.get(code, RuntimeError)(f"rank {rank}: {text}")

    def count_dropped(self, too_long: Counter[str]) -> None:
        """Of a step that is done. Warns once of each stream that drops more than a few per cent."""
        self.too_long.update(too_long)
        steps = self.step - self.first
        shares = {
            spec.name: self.too_long[spec.name] / max(steps * spec.samples, FEW_SAMPLES) for spec in self.run_spec.specs
        }
        for stream, line in self.run_spec.dropped(shares).items():
            if stream not in self.warned and self.process.is_main:
                LOG.warning(line)
            self.warned.add(stream)

    def train_step(self, batch: StepBatch, counts: GlobalCounts, started: float) -> StepRecord:
        engine, train = self.engine, self.recipe.train
        lr, skipped = engine.get_lr()[0], engine.skipped_steps
        # Also in the first step: what a measurement takes of memory shows at once.
        measure = bool(train.measure_every) and (self.step == 0 or (self.step + 1) % train.measure_every == 0)
        for stream, auxiliary_state in self.gathering.items():
            auxiliary_state.counts = counts.auxiliary[stream]
        try:
            sums, norms = optimizer_step(
                engine,
                self.recipe,
                batch.rows,
                counts.targets,
                step=self.step,
                rank=self.process.rank,
                world=self.process.world,
                measure=measure and keeps_whole_weights(engine),
            )
        except NotFinite as error:  # fp16, on all ranks
            self.flush()
            self.skips.count(True, None)
            self.not_finite(self.step + 1, f"the gradient ({error})", batch, finite=True)
        measured = norms | (self.alignment_scores() if measure else {})
        seconds, waited = time.monotonic() - started, self.synchronizer.waited
        self.synchronizer.waited = 0.0
        return StepRecord(
            step=self.step + 1,
            sums=sums,
            targets=counts.targets,
            lr=lr,
            skipped=engine.skipped_steps - skipped,
            tokens=counts.work.tokens,
            samples=counts.samples,
            too_long=counts.too_long.total(),
            data_wait_s=waited,
            step_s=seconds,
            loss_scale=float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None,
            grad_norm=engine.get_global_grad_norm(),
            measured=measured | self.flops.metrics(counts.work, seconds, self.process.world),
        )

    def alignment_scores(self) -> dict[str, float]:
        """On rank 0, which has the dictionaries' words."""
        scores: dict[str, float | None] = {}
        with whole_weight(self.engine, self.engine.module.encoder.embeddings) as table:
            for name, probes in self.probes.items():
                scores[f"alignment/{name}"], scores[f"alignment_trained/{name}"] = probes.scores(table)
        return {name: score for name, score in scores.items() if score is not None}

    def measured_words(self) -> Results:
        """alignment_scores, as the results of a task."""
        found: Results = {}
        for name, score in self.alignment_scores().items():
            kind, _, pair = name.partition("/")
            found.setdefault(pair, {})["trained" if kind.endswith("trained") else "withheld"] = score
        return found

    def measure(self) -> bool:
        """The tasks of the recipe's section eval. Returns whether the step is to be saved for what it scored."""
        self.watch.note(f"measuring step {self.step}")
        return self.validation.measure(self.step)

    def flush(self) -> None:
        """Read pending sums from the device, add them up over ranks, and report. All ranks call it together."""
        self.synchronizer.last_flush = time.monotonic()
        if not self.unreported:
            return
        done, self.unreported = self.unreported, []
        sums = torch.stack([record.sums.values_K for record, _ in done])
        own_R = sums.new_zeros(self.process.world)
        own_R[self.process.rank] = sum(record.data_wait_s + record.sums.own_s() for record, _ in done) / len(done)
        of_rows = [batch.counts() for _, batch in done]
        counts = torch.tensor([list(of_step.values()) for of_step in of_rows]).to(sums)
        table = torch.cat([sums.flatten(), own_R, counts.flatten()])
        dist.all_reduce(table)
        totals, own, counted = table.split([sums.numel(), len(own_R), counts.numel()])
        pace = self.pace.metrics(own.tolist())
        entries = [
            record.entry(of_step, self.recipe, dict(zip(names, map(int, numbers), strict=True))) | pace
            for (record, _), of_step, names, numbers in zip(
                done, totals.view_as(sums).tolist(), of_rows, counted.view_as(counts).tolist(), strict=True
            )
        ]
        if self.reporter:
            for entry in entries:
                self.reporter.report(entry)
            self.reporter.flush()
            self.validation.hook.look()
            for line in [*self.pace.warnings(), *chain.from_iterable(map(self.alike.warnings, entries))]:
                LOG.warning(line)
        for entry, unreported in zip(entries, done, strict=True):
            self.check_finite(entry, unreported)

    def check_finite(self, entry: dict[str, Any], unreported: UnreportedStep) -> None:
        """Raises NotFinite on all ranks, before anything of it is saved. In fp16 a skipped step is none of it."""
        fp16 = self.engine.fp16_enabled()
        warning = self.skips.count(bool(entry["skipped"]), entry.get("loss_scale"))
        if warning and fp16 and self.process.is_main:
            LOG.warning(warning)
        in_a_row = self.skips.in_a_row
        if fp16 and 0 < in_a_row < MOST_SKIPPED:
            return
        streams = [name for name in self.recipe.streams if not math.isfinite(entry[f"loss/{name}"])]
        norm = entry["grad_norm"] or 0.0
        if not streams and math.isfinite(norm) and not in_a_row:
            return
        what = f"the loss of {', '.join(streams)}" if streams else f"the gradient's norm ({norm:g})"
        if not streams and math.isfinite(norm):
            what = f"fp16's gradient for {in_a_row} steps in a row (loss scale {entry.get('loss_scale'):g})"
        self.not_finite(entry["step"], what, unreported.batch, bool(unreported.record.sums.values_K.isfinite().all()))

    def not_finite(self, step: int, what: str, batch: StepBatch, finite: bool) -> NoReturn:
        """Raises NotFinite, when the records of the step are written down. finite: this rank's own losses."""
        self.checkpoint_manager.settle()
        path, newest = self.out / NOT_FINITE, self.checkpoint_manager.good
        ranks = self.host_group.gather({"rank": self.process.rank, "finite": finite, "keys": batch.keys()})
        if self.process.is_main:
            lines = [{"step": step, "what": what} | of_rank for of_rank in ranks]
            with suppress(OSError), path.open("a", encoding="utf-8") as file:  # a full disk is not what ends the run
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        good = "none was saved" if newest is None else f"the newest good checkpoint is of step {newest}"
        raise NotFinite(
            f"step {step}: {what} is not finite; {good}, in {self.out / 'checkpoints'}. {path} names the records. Go "
            f"on from there into another --out (--resume DIR) with a lower train.lr or weight, or let the run go back "
            f"by itself (train.rollbacks)",
            # What fp16 skips has changed nothing: of steps skipped in a row the update before them is the bad one.
            step - self.skips.in_a_row if self.engine.fp16_enabled() else step,
            newest,
        )

    def trace_step(self, batch: StepBatch) -> None:
        if self.trace.file:
            for stream, keys in batch.keys().items():
                self.trace.write({"step": self.step + 1, "stream": stream, "keys": keys})

    def stop_early(self) -> int:
        self.watch.stopping = True
        self.flush()
        self.save(must=True)
        LOG.info(f"stopped at step {self.step} ({self.stop.why}); start again to go on")
        return STOPPED

    def save(self, must: bool) -> None:
        """A checkpoint of the steps done. must: wait for it, and raise OSError without it."""
        if self.reporter:
            self.reporter.flush(to_disk=True)
        self.trace.flush(to_disk=True)
        self.validation.lines.flush(to_disk=True)
        behind, sound = self.recipe.checkpoint.background, not self.skips.in_a_row
        self.checkpoint_manager.save(self.step, self.manifest(), self.write_more, sound=sound, behind=behind, must=must)

    def manifest(self) -> dict[str, Any]:
        """What checkpoint.Checkpoint reads, beside its own."""
        assert self.run_spec.calibration is not None
        kept = {"calibration": self.run_spec.calibration.to_dict(), "engine": self.config.saved()}
        return {
            "identity": self.run_spec.identity(),
            "state": self.state,
            "excluded_steps": self.excluded_steps,
            **kept,
        }

    def write_more(self, path: Path) -> None:
        """What belongs to a checkpoint beside DeepSpeed's files. Rank 0 only."""
        self.engine.module.encoder.lm.config.save_pretrained(path / checkpoints.HF)
        self.run_spec.tokenizer.hf.save_pretrained(path / checkpoints.HF)

    def close(self) -> None:
        self.trace.close()
        self.validation.close()
        if self.reporter:
            self.reporter.close()
