"""Train one encoder on a recipe: `deepspeed xscale/train.py --ds_config ds_configs/zero2_fp16.json --recipe xlm`.

Exit codes: 0 done, 2 user error, 75 saved and stopped early on a signal or time limit (start again to go on).
"""

import sys
from pathlib import Path

# A launcher puts xscale/ itself first on sys.path, where our module names would hide others'.
if Path(sys.path[0] or ".").resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import argparse
import os
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import yaml

from xscale import ranks, rng
from xscale.data.calibration import Calibration
from xscale.data.loader import StepBatch
from xscale.data.mixture import initial_state, positions_report
from xscale.data.row import Work
from xscale.errors import RankError, UserError
from xscale.eval import alignment_score
from xscale.objectives import Prefilled
from xscale.ranks import Control, Process
from xscale.run import checkpoint as checkpoints
from xscale.run import folder
from xscale.run.job import Job, describe, prepare
from xscale.run.metrics import LINE_SECONDS, LOG, JsonLines, Reporter, start_logging
from xscale.step import cost, engine
from xscale.step.ds_config import Hardware, read_ds_config, resolve_ds_config
from xscale.step.step import StepModule, StepSums, optimizer_step, to_device

EXIT_USER_ERROR, EXIT_STOPPED = 2, 75
DEMO = Path("data/demo")
FLUSH_SECONDS = 1.0
"""Metrics are read from the device this often at most, since reading waits for it."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds_config", type=Path, required=True, help="DeepSpeed JSON, e.g. ds_configs/zero2_fp16.json")
    parser.add_argument("--recipe", default="mixed", help="name of a shipped recipe, or a YAML file (default: mixed)")
    parser.add_argument("--data", type=Path, nargs="+", help="shard directories (default: the generated demo corpus)")
    parser.add_argument("--out", type=Path, help="the run's directory (default: runs/<recipe>)")
    parser.add_argument(
        "--resume", default="auto", help="auto (newest valid checkpoint in --out), never, or a directory"
    )
    parser.add_argument("--steps", type=int, help="short for --set train.steps=N")
    parser.add_argument("--seed", type=int, help="short for --set train.seed=N")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY.SUB=VALUE", help="recipe fields")
    parser.add_argument("--dry_run", action="store_true", help="resolve, validate and print everything; train nothing")
    parser.add_argument("--trace", action="store_true", help="write the keys of every consumed record")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.set += [f"train.{name}={getattr(args, name)}" for name in ("steps", "seed") if getattr(args, name) is not None]
    args.out = args.out or Path("runs") / Path(args.recipe).stem
    return args


class StopRequest:
    """Set by a signal or the time limit; read at step boundaries."""

    def __init__(self, minutes: float | None):
        self.reason = ""
        self.deadline = time.monotonic() + 60 * minutes if minutes is not None else None
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.reason = signal.Signals(number).name

    def __bool__(self) -> bool:
        if not self.reason and self.deadline is not None and time.monotonic() >= self.deadline:
            self.reason = "time limit"
        return bool(self.reason)


class Trainer:
    """The loop and what it keeps between steps."""

    def __init__(self, args: argparse.Namespace, job: Job, process: Process, control: Control, stop: StopRequest):
        self.args, self.job, self.process, self.control, self.stop = args, job, process, control, stop
        self.recipe = job.recipe
        self.folder = args.out / "checkpoints"
        self.pending: list[tuple[dict[str, Any], StepSums, dict[tuple[str, str], int]]] = []
        self.last_flush = time.monotonic()

    def run(self) -> int:
        args, recipe, process, control = self.args, self.recipe, self.process, self.control
        hardware = Hardware.here()
        ds_config, precision, notes = resolve_ds_config(
            read_ds_config(args.ds_config),
            args.ds_config,
            recipe,
            process.world,
            hardware,
        )
        for note in [*notes, *(lexicon.summary() for lexicon in self.job.lexicons)]:
            LOG.info(note)
        checkpoint = folder.find_checkpoint(args.out, args.resume, self.job.identity(), process, control)
        first = checkpoint.step if checkpoint else 0
        if first >= recipe.train.steps:
            LOG.info(f"{args.out} is complete: {first} of {recipe.train.steps} steps")
            return 0
        self.saved = checkpoint.step if checkpoint else None
        self.device = hardware.device
        self.job = self.job.calibrated(self.calibration(checkpoint))
        self.write_config(ds_config)
        state = checkpoint.manifest["state"] if checkpoint else initial_state(self.job.specs)
        fitted = self.job.fit(process, self.device) if recipe.train.compile else None
        batches = self.job.batches(process, self.device, state, recipe.train.steps - first, fitted=fitted)
        stage = ds_config.get("zero_optimization", {}).get("stage", 0)
        if checkpoint is not None and checkpoint.manifest["world_size"] != process.world:
            if stage >= 3:
                raise UserError(
                    f"{checkpoint.path} was saved by {checkpoint.manifest['world_size']} ranks, this run has "
                    f"{process.world}; with ZeRO stage 3 a run goes on with as many as before (stages 0 to 2 rescale)"
                )
            if stage > 0:
                ds_config["checkpoint"] = ds_config.get("checkpoint", {}) | {"load_universal": True}
        module = StepModule(self.job.encoder(), recipe)
        module.encoder.compiled_shape = fitted and (fitted[1].tokens, fitted[1].sequences)
        parameters = sum(p.numel() for p in module.parameters())
        self.flops = cost.StepFlops(module.encoder)
        self.engine = engine.build_engine(module, ds_config)
        if checkpoint:
            checkpoints.load(self.engine, checkpoint, process, control)
            engine.follow_schedule(self.engine)
            for name, companion_state in checkpoints.companions(checkpoint).items():
                self.engine.module.companions[name].load_state_dict(companion_state)
            LOG.info(
                f"resumed from {checkpoint.path}: step {first}; "
                + "; ".join(positions_report(checkpoint.manifest["state"], self.job.specs, self.job.sources))
            )
        LOG.info(
            f"training {parameters:,} parameters in {precision} on {process.world} rank(s) of {hardware.device}, "
            f"ZeRO stage {stage}, steps {first} to {recipe.train.steps}"
            + ("; the first step compiles the encoder, which may take minutes" if recipe.train.compile else "")
        )
        self.reporter = Reporter(args.out, first, recipe.train.steps, list(recipe.streams)) if process.is_main else None
        trace = args.out / "trace" / f"rank{process.rank}.jsonl" if args.trace else None
        self.trace = JsonLines(trace, first)
        self.word_pairs = {
            lexicon.name: alignment_score.word_pairs(lexicon, self.job.sources, self.job.tokenizer)
            for lexicon in (self.job.lexicons if process.is_main and recipe.train.measure_every else ())
        }
        if not checkpoint:
            self.prefill()
            self.save(0, state, must=True)  # a run that cannot save fails now, not after a day
        try:
            return self.loop(batches, first, state)
        finally:
            if self.reporter:
                self.reporter.close()

    def prefill(self) -> None:
        """Companions that start from samples read them in an order of their own, which uses up none of the stream."""
        for name, companion in self.engine.module.companions.items():
            if not isinstance(companion, Prefilled) or not companion.prefill_samples:
                continue
            spec = next(spec for spec in self.job.specs if spec.name == name)
            spec = replace(spec, name=f"{name}.prefill")
            wanted, have, said = companion.prefill_samples, 0, time.monotonic()
            LOG.info(f"{name}: reading {wanted:,} samples with the initial weights before step 1")
            records = sum(self.job.sources[source].records for source in spec.sources)
            if wanted > records:
                LOG.warning(
                    f"streams.{name}.queue_size {wanted:,} exceeds the {records:,} records that it draws from: a pair "
                    f"is contrasted with earlier keys of its own; a smaller queue_size avoids it"
                )
            steps = 2 * -(-wanted // spec.samples)
            for batch in self.job.batches(self.process, self.device, initial_state([spec]), steps, [spec]):
                for number, row in enumerate(batch.rows):
                    process = (batch.step, number, self.process.rank)
                    torch.manual_seed(rng.torch_seed(self.recipe.train.seed, "prefill", name, *process))
                    inputs = to_device(row.inputs, self.engine.device)
                    (beside,), (arrays,) = inputs.beside.values(), inputs.arrays.values()
                    companion.read(self.engine.module.encoder, *beside, arrays)
                have = companion.finish_prefill()
                if time.monotonic() - said > LINE_SECONDS:
                    said = time.monotonic()
                    LOG.info(f"{name}: {have:,} of {wanted:,} samples read")
                if have >= wanted:
                    break
            if have < wanted:
                LOG.warning(f"{name}: only {have:,} of {wanted:,}; more than half of what was read is over max_length")

    def calibration(self, checkpoint: checkpoints.Checkpoint | None) -> Calibration:
        """The checkpoint's, or rank 0's measurement."""
        if checkpoint and "calibration" in checkpoint.manifest:
            return Calibration.from_dict(checkpoint.manifest["calibration"])
        return self.control.from_main(lambda: self.job.calibrated().calibration)

    def loop(self, batches: Iterator[StepBatch], first: int, state: dict[str, Any]) -> int:
        recipe, process = self.recipe, self.process
        too_long = 0
        for step in range(first, recipe.train.steps):
            started = time.monotonic()
            batch = next(batches)
            waited = time.monotonic() - started
            assert batch.step == step, (batch.step, step)
            targets, here = batch.targets(), batch.work()
            flush = process.is_main and started - self.last_flush >= FLUSH_SECONDS
            *numbers, samples, long, stopping, flushing = self.control.sum(
                [
                    *targets.values(),
                    *here,
                    batch.total("samples"),
                    batch.total("too_long"),
                    int(bool(self.stop)),
                    int(flush),
                ]
            )
            if stopping:
                return self.stop_early(step, state)
            work = Work(*numbers[len(targets) :])
            global_targets = dict(zip(targets, numbers, strict=False))
            lr, skipped = self.engine.get_lr()[0], self.engine.skipped_steps
            # Also in the first step: what a measurement takes of memory shows at once.
            measure = bool(recipe.train.measure_every) and (step == 0 or (step + 1) % recipe.train.measure_every == 0)
            sums, norms = optimizer_step(
                self.engine,
                recipe,
                batch.rows,
                global_targets,
                step=step,
                rank=process.rank,
                world=process.world,
                measure=measure and engine.keeps_whole_weights(self.engine),
            )
            entry: dict[str, Any] = {"step": step + 1, "lr": lr, "skipped": self.engine.skipped_steps - skipped}
            entry |= {f"count/{stream}": count for (stream, _), count in reversed(global_targets.items())}
            entry |= {"tokens": work.tokens, "samples": samples, "too_long": long, "data_wait_s": waited}
            if self.engine.fp16_enabled():
                entry["loss_scale"] = float(self.engine.optimizer.loss_scale)
            norm = self.engine.get_global_grad_norm()
            if norm is not None:
                entry["grad_norm"] = norm
            entry |= norms
            if measure:
                entry |= self.alignment_scores()
            entry["step_s"] = time.monotonic() - started
            entry |= self.flops.metrics(work, entry["step_s"], process.world)
            self.pending.append((entry, sums, global_targets))
            self.trace_step(step + 1, batch)
            state, too_long = batch.state, too_long + long
            last = step + 1 == recipe.train.steps
            if flushing or last or (step + 1) % recipe.checkpoint.every == 0:
                self.flush()
            if last or (step + 1) % recipe.checkpoint.every == 0:
                self.save(step + 1, state, must=last)
        if too_long:
            LOG.info(f"{too_long:,} sentences or pairs were over data.max_length ({recipe.data.overlong})")
        LOG.info(f"done: {recipe.train.steps} steps, {self.args.out}")
        return 0

    def stop_early(self, step: int, state: dict[str, Any]) -> int:
        self.flush()
        self.save(step, state, must=True)
        LOG.info(f"stopped at step {step} ({self.stop.reason or 'another rank was told to'}); start again to go on")
        return EXIT_STOPPED

    def save(self, step: int, state: dict[str, Any], must: bool) -> None:
        if self.reporter:
            self.reporter.flush(to_disk=True)
        self.trace.flush(to_disk=True)
        if step == self.saved:
            return
        started = time.monotonic()
        path = checkpoints.save(
            self.engine, self.folder, step, self.manifest(state), self.write_more, self.process, self.control
        )
        if path is None:
            message = f"no disk space for a checkpoint in {self.folder}; free some"
            if must:
                raise UserError(message + " and start again from the newest one")
            LOG.error(message + "; training goes on, older checkpoints are untouched")
            return
        if self.process.is_main:
            checkpoints.clean(self.folder, self.recipe.checkpoint.keep)
        self.saved = step
        LOG.info(f"saved {path} in {time.monotonic() - started:.1f} s")

    def manifest(self, state: dict[str, Any]) -> dict[str, Any]:
        assert self.job.calibration is not None
        return {"identity": self.job.identity(), "state": state, "calibration": self.job.calibration.to_dict()}

    def write_more(self, path: Path) -> None:
        """What belongs to a checkpoint beside DeepSpeed's files. Rank 0 only."""
        self.engine.module.encoder.lm.config.save_pretrained(path / checkpoints.HF)
        self.job.tokenizer.hf.save_pretrained(path / checkpoints.HF)
        companions = self.engine.module.companions
        if companions:
            states = {name: companion.state_dict() for name, companion in companions.items()}
            torch.save(states, path / checkpoints.COMPANIONS)

    def flush(self) -> None:
        """Read pending sums from the device, add them up over ranks, and report. All ranks call it together."""
        self.last_flush = time.monotonic()
        if not self.pending:
            return
        table = torch.stack([sums.values_K for _, sums, _ in self.pending])
        dist.all_reduce(table)
        for (entry, sums, targets), totals in zip(self.pending, table.tolist(), strict=True):
            values = sums.shares(totals, self.recipe, targets)
            weights = {name: self.recipe.stream_weight(name, entry["step"] - 1) for name in self.recipe.streams}
            loss = sum(weight * values[f"loss/{name}"] for name, weight in weights.items())
            seconds = max(entry["step_s"], 1e-9)
            entry = {"step": entry.pop("step"), "loss": loss} | values | {"grad_norm": None} | entry
            entry = {name: float(v) if isinstance(v, torch.Tensor) else v for name, v in entry.items()}
            entry |= {"tokens_per_s": entry["tokens"] / seconds, "samples_per_s": entry["samples"] / seconds}
            if self.reporter:
                self.reporter.report(entry)
        self.pending.clear()
        if self.reporter:
            self.reporter.flush()

    def alignment_scores(self) -> dict[str, float]:
        """On rank 0, which has the dictionaries' tokens."""
        with engine.whole_weight(self.engine, self.engine.module.encoder.embeddings) as table:
            return {f"alignment/{name}": gold.score(table) for name, gold in self.word_pairs.items()}

    def trace_step(self, step: int, batch: StepBatch) -> None:
        if self.args.trace:
            for stream, keys in batch.keys().items():
                self.trace.write({"step": step, "stream": stream, "keys": keys})

    def write_config(self, ds_config: dict[str, Any]) -> None:
        if self.process.is_main:
            out = self.args.out
            (out / "config.yaml").write_text(
                yaml.safe_dump(self.recipe.to_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8"
            )
            (out / "ds_config.json").write_text(engine.dump(ds_config), encoding="utf-8")
            (out / "identity.json").write_text(engine.dump(self.job.identity()), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    process = ranks.find_process()
    try:
        return train(args, process)
    except UserError as error:
        # Most mistakes are seen by every rank: one message a node is enough.
        if process.local_rank == 0 or isinstance(error, RankError):
            where = f"[rank {process.rank}] " if process.world > 1 else ""
            print(f"{where}error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return 130


def train(args: argparse.Namespace, process: Process) -> int:
    if args.dry_run and not process.is_main:
        return 0
    if args.data is None:
        args.data = [DEMO]
        if process.is_main and not DEMO.exists():
            from data_tools import demo_corpus

            print(f"no --data given: generating the demo corpus in {DEMO}", flush=True)
            demo_corpus.build(DEMO)
    if args.dry_run:
        job = prepare(args.recipe, args.set, args.data)
        folder.claim_out(args.out, job.identity(), args.resume)
        checkpoint = folder.find_checkpoint(args.out, args.resume, job.identity(), Process(0, 1, 0, 1), Control())
        hardware = Hardware.here()
        resolved, precision, notes = resolve_ds_config(
            read_ds_config(args.ds_config),
            args.ds_config,
            job.recipe,
            process.world,
            hardware,
        )
        print(*notes, sep="\n")
        describe(job.calibrated(), resolved, precision, process, hardware.device)
        print(f"out: {args.out}, " + (f"going on from step {checkpoint.step}" if checkpoint else "a new run"))
        return 0
    ranks.start(process)
    control = Control()
    code = train_run(args, process, control)
    control.barrier()
    dist.destroy_process_group()
    return code


def train_run(args: argparse.Namespace, process: Process, control: Control) -> int:
    """One run, in a process group that is up."""
    job = prepare(args.recipe, args.set, args.data)
    ranks.set_deterministic(job.recipe.train.deterministic)
    stop = StopRequest(job.recipe.train.time_limit)
    problem = None
    if process.is_main:
        try:
            folder.claim_out(args.out, job.identity(), args.resume)
            args.out.mkdir(parents=True, exist_ok=True)
            lock = folder.lock_out(args.out)  # noqa: F841  held until this process ends
            start_logging(args.out)
        except UserError as error:
            problem = str(error)
    problem = control.gather(problem)[0]
    if problem:
        raise UserError(problem)
    return Trainer(args, job, process, control, stop).run()


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code) if code not in (0, EXIT_STOPPED) else sys.exit(code)
