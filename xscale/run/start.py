"""A start of a run resolves its arguments, builds an engine that is ready for its next step, and enters the loop."""

import argparse
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import yaml

from xscale import files, ranks, rng
from xscale.checkpoint.restore import load_engine
from xscale.checkpoint.store import Checkpoint
from xscale.data.mixture import initial_state, positions_report
from xscale.data.planner import Plans
from xscale.data.remote import location
from xscale.deepspeed_private import apply_schedule
from xscale.errors import UserError, redact
from xscale.eval.in_training import review_tasks
from xscale.objectives import HasQueue
from xscale.ranks import HostGroup, Process
from xscale.run import folder, going_on
from xscale.run.describe import dropped_pairs_warnings, share_lines, start_notes
from xscale.run.folder import DONE, STOPPED, Status, dump, indented
from xscale.run.loop import Trainer
from xscale.run.metrics import LINE_SECONDS, LOG, start_logging
from xscale.run.state import RunContext
from xscale.run.watch import StopRequest, Watch, names_of_ranks
from xscale.run_spec import RunSpec, resolve_run
from xscale.step import engine as engines
from xscale.step.ds_config import EngineConfig, Hardware, load_ds_config
from xscale.step.module import StepModule

DEMO = Path("data/demo")
"""The directory of the generated demo corpus."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what a run is, which train.py and its dry run share."""
    parser.add_argument("--recipe", default="mixed", help="name of a shipped recipe, or a YAML file (default: mixed)")
    parser.add_argument(
        "--data", type=location, nargs="+", help="shard directories or URLs (default: the generated demo corpus)"
    )
    parser.add_argument("--out", help="the run's directory (default: runs/<recipe>)")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY.SUB=VALUE", help="recipe fields")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)


def train_run(args: argparse.Namespace, process: Process, host_group: HostGroup, status: Status) -> int:
    """Train one run in the existing process group. args: the arguments of train.py. Returns the exit code."""
    run_spec = resolve_run(args.recipe, args.set, args.data, host_group)
    hardware = Hardware.here()
    config = load_ds_config(args.ds_config, run_spec.recipe, process.world, hardware)
    task_notes = review_tasks(run_spec, config.stage, host_group)
    check_ranks_agree(args, run_spec, config, host_group)
    recipe = run_spec.recipe
    ranks.set_deterministic(recipe.train.deterministic)
    stop = StopRequest(recipe.train.time_limit)
    locks: list[files.Lock] = []  # rank 0 holds one until this function returns
    host_group.from_main(lambda: locks.append(take_folder(args, run_spec, status)))
    status.running()
    if not args.out.is_dir():
        raise UserError(
            f"--out {args.out} does not exist on {os.uname().nodename}, where rank {process.rank} runs; choose a "
            f"folder that all hosts share"
        )
    watch = Watch(process, names_of_ranks(host_group), start_logging(args.out, process.rank), status.cut_off, stop)
    watch.begin(recipe.train.stall_limit, recipe.train.stop_limit)
    with closing(watch):
        for problem in (lock.problem for lock in locks if lock.problem):
            LOG.warning(problem)
        for note in [*config.notes, *start_notes(run_spec), *task_notes]:
            LOG.info(note)
        checkpoint = going_on.find_checkpoint(args, run_spec.identity(), host_group)
        checkpoint = checkpoint and going_on.with_other_data(checkpoint, run_spec)
        going_on.check_engine(checkpoint, config)
        first = checkpoint.step if checkpoint else 0
        if checkpoint and first >= recipe.train.steps and not going_on.is_own(checkpoint, args.out):
            raise UserError(
                f"--fork {args.fork} is at step {first}, and train.steps is {recipe.train.steps}; set more steps"
            )
        if first >= recipe.train.steps:
            LOG.info(f"{args.out} is complete: {first} of {recipe.train.steps} steps")
            status.ended(DONE, f"{first} of {recipe.train.steps} steps")
            return DONE
        watch.note("measuring the data")
        run_spec = run_spec.calibrated(going_on.resume_calibration(run_spec, checkpoint, host_group))
        if process.is_main:
            write_config(args.out, run_spec, config)
            if checkpoint and not going_on.is_own(checkpoint, args.out):
                going_on.write_ancestry(args.out, checkpoint, run_spec.identity())
            for line in dropped_pairs_warnings(run_spec):
                LOG.warning(line)
            folder.note_start(args.out, first, process.world)
        state, left = checkpoint.state if checkpoint else initial_state(run_spec.specs), recipe.train.steps - first
        plans = run_spec.plans(process, hardware.device, state, left, host_group)
        watch.note("building the engine")
        engine = make_engine(run_spec, config, checkpoint, host_group)
        log_start(run_spec, engine, config, process, first)
        if not checkpoint:
            warm_up_queues(engine.module, run_spec, process, engine.device)
        context = RunContext(config, engine, args.out, process, host_group, status, stop, watch, locks)
        code = run_loop(run_spec, context, checkpoint, plans, args.trace)
        status.ended(code, stop.why if code == STOPPED else f"{status.step} of {recipe.train.steps} steps")
    return code


def log_start(run_spec: RunSpec, engine: Any, config: EngineConfig, process: Process, first: int) -> None:
    train = run_spec.recipe.train
    if process.is_main:
        for line in share_lines(run_spec):
            LOG.info(line)
    LOG.info(
        f"training {sum(p.numel() for p in engine.module.parameters()):,} parameters in {config.precision} on "
        f"{process.world} rank(s) of {engine.device.type}, ZeRO stage {config.stage}, steps {first} to {train.steps}"
    )


def run_loop(run_spec: RunSpec, context: RunContext, checkpoint: Checkpoint | None, plans: Plans, trace: bool) -> int:
    """Run the loop from the checkpoint that the engine was loaded from. Returns the exit code."""
    trainer = Trainer(run_spec, context, checkpoint, trace)
    left = run_spec.recipe.train.steps - trainer.state.step
    batches = run_spec.batches(context.process, context.engine.device.type, trainer.state.data, left, plans)
    with closing(trainer):
        trainer.begin()
        return trainer.loop(batches)


def check_ranks_agree(args: argparse.Namespace, run_spec: RunSpec, config: EngineConfig, host_group: HostGroup) -> None:
    """Raise UserError on all ranks unless all were started alike, so that they plan the same data."""
    ours = run_spec.identity() | {
        "recipe": run_spec.recipe.to_dict(),
        "--ds_config": config.resolved,
        "--resume": args.resume,
        "--fork": args.fork,
        "--out": str(args.out),
    }
    theirs = host_group.from_main(lambda: ours)
    found = folder.compare(theirs, ours, form="{} on rank 0, {} there")
    for rank, (host, lines) in enumerate(host_group.gather((os.uname().nodename, found[:3]))):
        if lines:
            raise UserError(
                f"rank {rank} on {host} was started differently from rank 0. Start all ranks with the same command and "
                f"the same files:\n" + indented(lines)
            )


def take_folder(args: argparse.Namespace, run_spec: RunSpec, status: Status) -> files.Lock:
    """Check, create and lock the run's directory. Rank 0 only. Raises UserError."""
    status.has_lock = False  # until train_run calls `running`
    out: Path = args.out
    folder.check_out(out, run_spec.identity(), args.resume)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be created ({error.strerror}); choose another") from None
    lock = files.Lock(out)
    folder.check_out(out, run_spec.identity(), args.resume)  # it may have waited
    return lock


def write_config(out: Path, run_spec: RunSpec, config: EngineConfig) -> None:
    recipe = yaml.safe_dump(run_spec.recipe.to_dict(), sort_keys=False, allow_unicode=True)
    files.write_text(out / "config.yaml", redact(recipe))
    files.write_text(out / "ds_config.json", dump(config.resolved))
    files.write_text(out / folder.IDENTITY, dump(run_spec.identity()))


def make_engine(run_spec: RunSpec, config: EngineConfig, checkpoint: Checkpoint | None, host_group: HostGroup) -> Any:
    """Build an engine with the initial weights, or with the checkpoint's whole state."""
    module = run_spec.module()
    for note in [] if checkpoint else module.notes:
        LOG.info(note)
    engine = engines.build_engine(module, config.resolved)
    if checkpoint:
        load_engine(engine, checkpoint, host_group)
        apply_schedule(engine)
        consumed = positions_report(checkpoint.state, run_spec.specs, run_spec.sources)
        LOG.info(f"resumed from {checkpoint.path}: step {checkpoint.step}; " + "; ".join(consumed))
    return engine


def warm_up_queues(module: StepModule, run_spec: RunSpec, process: Process, device: torch.device) -> None:
    """Fill the queues before step 1, with vectors from the initial weights. All ranks call it together. The warm-up
    reads each stream's data in a different order than training does, and does not change the stream's position."""
    for name, auxiliary_state in module.auxiliary_states.items():
        if not isinstance(auxiliary_state, HasQueue) or not auxiliary_state.prefill_samples:
            continue
        warm_up = run_spec.copy_of_stream(name, f"{name}.prefill")
        wanted, have, logged = auxiliary_state.prefill_samples, 0, time.monotonic()
        LOG.info(f"{name}: reading {wanted:,} samples with the initial weights before step 1, to fill the queue")
        steps = 2 * -(-wanted // warm_up.specs[0].samples)
        for batch in warm_up.batches(process, device.type, initial_state(warm_up.specs), steps):
            for number, row in enumerate(batch.rows):
                place = (batch.step, number, process.rank)
                torch.manual_seed(rng.torch_seed(run_spec.recipe.train.seed, "prefill", name, *place))
                (auxiliary,) = row.auxiliary.values()
                (arrays,) = row.to(device).arrays.values()
                auxiliary_state.encode(module.encoder, auxiliary.to(device), [arrays])
            have = auxiliary_state.finish_warmup()
            if time.monotonic() - logged > LINE_SECONDS:
                logged = time.monotonic()
                LOG.info(f"{name}: {have:,} of {wanted:,} samples for the queue are read")
            if have >= wanted:
                break
        if have < wanted:
            LOG.warning(
                f"{name}: only {have:,} of {wanted:,} samples for the queue were read, as most are over data.max_length"
            )
