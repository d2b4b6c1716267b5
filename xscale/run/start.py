"""From a job to an engine that is ready for its next step, and into the loop."""

import argparse
import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from xscale import files, ranks
from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.store import Checkpoint
from xscale.data.calibration import Calibration
from xscale.data.mixture import initial_state, positions_report
from xscale.data.packed_row import RowShape
from xscale.data.planner import Plans
from xscale.deepspeed_private import follow_schedule
from xscale.errors import NotFinite, UserError
from xscale.ranks import HostGroup, Process
from xscale.run import folder
from xscale.run.evals import check_tasks
from xscale.run.folder import dump
from xscale.run.loop import Trainer, TrainerContext
from xscale.run.metrics import LOG, start_logging
from xscale.run.queue_warmup import warm_up_queues
from xscale.run.run_spec import RunSpec, resolve_run
from xscale.run.status import DONE, STOPPED, Status
from xscale.run.stop import StopRequest
from xscale.run.watch import Watch, names_of_ranks
from xscale.step import engine as engines
from xscale.step.ds_config import EngineConfig, Hardware, load_ds_config


def train_run(args: argparse.Namespace, process: Process, host_group: HostGroup, status: Status) -> int:
    """One run, in a process group that is up. args: train.py's. Returns the exit code."""
    run_spec = resolve_run(args.recipe, args.set, args.data, host_group)
    hardware = Hardware.here()
    config = load_ds_config(args.ds_config, run_spec.recipe, process.world, hardware)
    check_tasks(run_spec, config.stage, host_group)
    check_same(args, run_spec, config, host_group)
    ranks.set_deterministic(run_spec.recipe.train.deterministic)
    stop = StopRequest(run_spec.recipe.train.time_limit)
    locks: list[files.Lock] = []  # of rank 0, held until this returns
    host_group.from_main(lambda: locks.append(take_folder(args.out, run_spec, args.resume, status)))
    status.ours = True
    if not args.out.is_dir():
        raise UserError(
            f"--out {args.out} is not there on {os.uname().nodename}, where rank {process.rank} runs; it has to be a "
            f"folder that all hosts share"
        )
    log = start_logging(args.out, process.rank)
    watch = Watch(process, names_of_ranks(host_group), log, status.cut_off, stop)
    watch.begin(run_spec.recipe.train.stall_limit, run_spec.recipe.train.stop_limit)
    with closing(watch):
        for lock in locks:
            if lock.problem:
                LOG.warning(lock.problem)
        for note in [*config.notes, *run_spec.notes()]:
            LOG.info(note)
        checkpoint = folder.find_checkpoint(args.out, args.resume, run_spec.identity(), host_group)
        check_engine(checkpoint, config)
        first = checkpoint.step if checkpoint else 0
        if first >= run_spec.recipe.train.steps:
            LOG.info(f"{args.out} is complete: {first} of {run_spec.recipe.train.steps} steps")
            status.ended(DONE, f"{first} of {run_spec.recipe.train.steps} steps")
            return DONE
        watch.note("measuring the data")
        run_spec = run_spec.calibrated(calibration(run_spec, checkpoint, host_group))
        if process.is_main:
            write_config(args.out, run_spec, config)
            for line in [*run_spec.dropped().values(), *run_spec.shortfalls()]:
                LOG.warning(line)
            folder.note_start(args.out, first, process.world)
        # From one rank, since a sum of fractions may differ in its last bit on another kind of processor.
        fit = partial(run_spec.fit, process, hardware.device)
        fitted = host_group.from_main(fit) if run_spec.recipe.train.compile else None
        state = checkpoint.state if checkpoint else initial_state(run_spec.specs)
        left = run_spec.recipe.train.steps - first
        plans = run_spec.plans(process, hardware.device, state, left, fitted=fitted, host_group=host_group)
        watch.note("building the engine")
        engine = make_engine(run_spec, config, checkpoint, fitted, host_group)
        LOG.info(
            f"training {sum(p.numel() for p in engine.module.parameters()):,} parameters in {config.precision} on "
            f"{process.world} rank(s) of {hardware.device}, ZeRO stage {config.stage}, steps {first} to "
            f"{run_spec.recipe.train.steps}"
            + ("; the first step compiles the encoder, which may take minutes" if run_spec.recipe.train.compile else "")
        )
        if not checkpoint:
            warm_up_queues(engine.module, run_spec, process, engine.device)
        context = TrainerContext(config, engine, args.out, process, host_group, stop, watch, locks)
        code, step = train_on(run_spec, context, checkpoint, fitted, plans, status, args.trace)
        status.ended(code, stop.why if code == STOPPED else f"{step} of {run_spec.recipe.train.steps} steps")
    return code


def train_on(
    run_spec: RunSpec,
    context: TrainerContext,
    checkpoint: Checkpoint | None,
    fitted: tuple[int, RowShape] | None,
    plans: Plans | None,
    status: Status,
    trace: bool,
) -> tuple[int, int]:
    """The loop, from the checkpoint that the engine has, and again from another where the run goes back. plans: its
    first. Returns the exit code and the steps done."""
    excluded_steps = list(checkpoint.excluded_steps) if checkpoint else []
    while True:
        state = checkpoint.state if checkpoint else initial_state(run_spec.specs)
        trainer = Trainer(run_spec, context, state, checkpoint, excluded_steps, trace)
        status.step = partial(getattr, trainer, "step")
        left = run_spec.recipe.train.steps - trainer.step
        device = context.engine.device.type
        plans = plans or run_spec.plans(
            context.process, device, state, left, fitted=fitted, host_group=context.host_group
        )
        batches = run_spec.batches(context.process, device, state, left, fitted=fitted, plans=plans)
        try:
            with closing(trainer):
                if not checkpoint:
                    if trainer.validation.due(0):
                        trainer.measure()
                    trainer.save(must=True)  # a run that cannot save fails now, not after a day
                return trainer.loop(batches), trainer.step
        except NotFinite as error:
            checkpoint, plans = go_back(error, excluded_steps, trainer), None


def go_back(error: NotFinite, excluded_steps: list[int], trainer: Trainer) -> Checkpoint:
    """Load the newest good checkpoint into the engine, and condemn the step that was bad. Raises the error again where
    the recipe's rollbacks are used up, or there is nothing to go back to."""
    recipe, host_group, folder = trainer.recipe, trainer.host_group, trainer.out / "checkpoints"
    if len(excluded_steps) >= recipe.train.rollbacks or error.good is None or error.step <= error.good:
        raise error
    tell = LOG.warning if host_group.is_main else LOG.info
    tell(f"{error}")
    found = checkpoints.newest_valid(folder, host_group, tell, error.good)
    if found is None:
        raise error
    excluded_steps.append(error.step)
    trainer.watch.note(f"loading {found.path}")
    checkpoints.load(trainer.engine, found, host_group)
    follow_schedule(trainer.engine)
    tell(
        f"went back to step {found.step}; step {error.step} will read its records and change nothing "
        f"({len(excluded_steps)} of {recipe.train.rollbacks} rollbacks)"
    )
    return found


def check_same(args: argparse.Namespace, run_spec: RunSpec, config: EngineConfig, host_group: HostGroup) -> None:
    """Raises UserError, on all ranks, where one was started otherwise than rank 0: each would plan another stream."""
    ours = run_spec.identity() | {
        "recipe": run_spec.recipe.to_dict(),
        "--ds_config": config.resolved,
        "--resume": args.resume,
        "--out": str(args.out),
    }
    theirs = host_group.from_main(lambda: ours)
    found = folder.compare(theirs, ours, form="{} on rank 0, {} there")
    for rank, (host, lines) in enumerate(host_group.gather((os.uname().nodename, found[:3]))):
        if lines:
            raise UserError(
                f"rank {rank} on {host} was started otherwise than rank 0; start all ranks by the same command, with "
                f"the same files:\n" + "\n".join(f"  {line}" for line in lines)
            )


def check_engine(checkpoint: Checkpoint | None, config: EngineConfig) -> None:
    """Raises UserError where DeepSpeed could not load the checkpoint into such an engine."""
    saved = checkpoint.engine if checkpoint else None
    if checkpoint is None:
        return
    if saved and saved["precision"] != config.precision:
        raise UserError(
            f"{checkpoint.path} was saved in {saved['precision']}, this ds_config asks for {config.precision}; go on "
            f"with the former, or start a new run from it: model.init={checkpoint.path} and another --out"
        )
    kept = {key: saved[key] for key in ("optimizer", "fp16") if key in saved} if saved else {}
    changed = folder.compare(kept, {key: config.saved()[key] for key in kept})
    if changed:
        raise UserError(
            f"{checkpoint.path} was saved with another optimizer, which DeepSpeed would go on with; go on with the "
            f"ds_config that it was started with:\n" + "\n".join(f"  {line}" for line in changed)
        )


def take_folder(out: Path, run_spec: RunSpec, resume: str, status: Status) -> files.Lock:
    """Claim and lock the run's directory. Rank 0 only."""
    status.ours = False
    folder.claim_out(out, run_spec.identity(), resume)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be made ({error.strerror}); choose another") from None
    lock = files.Lock(out)
    status.running()
    return lock


def calibration(run_spec: RunSpec, checkpoint: Checkpoint | None, host_group: HostGroup) -> Calibration:
    """The checkpoint's, or what the ranks measure, each a share of it."""
    if checkpoint and checkpoint.calibration:
        try:
            return Calibration.from_dict(checkpoint.calibration, len(run_spec.sources), list(run_spec.recipe.streams))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{checkpoint.path}: the manifest's calibration is damaged ({error}); remove this checkpoint to go on "
                f"from the one before"
            ) from None
    found = run_spec.calibrated(host_group=host_group).calibration
    assert found is not None
    return found


def write_config(out: Path, run_spec: RunSpec, config: EngineConfig) -> None:
    recipe = yaml.safe_dump(run_spec.recipe.to_dict(), sort_keys=False, allow_unicode=True)
    files.write_text(out / "config.yaml", recipe)
    files.write_text(out / "ds_config.json", dump(config.resolved))
    files.write_text(out / folder.IDENTITY, dump(run_spec.identity()))
    folder.write_lexicons(out, run_spec.lexicons + run_spec.measured)


def make_engine(
    run_spec: RunSpec,
    config: EngineConfig,
    checkpoint: Checkpoint | None,
    fitted: tuple[int, RowShape] | None,
    host_group: HostGroup,
) -> Any:
    """With the initial weights, or the checkpoint's everything. fitted: Job.fit's, where rows are filled up."""
    module = run_spec.module()
    for note in [] if checkpoint else module.notes:
        LOG.info(note)
    module.encoder.compiled_shape = fitted and (fitted[1].tokens, fitted[1].sequences)
    engine = engines.build_engine(module, config.resolved)
    if checkpoint:
        checkpoints.load(engine, checkpoint, host_group)
        follow_schedule(engine)
        consumed = positions_report(checkpoint.state, run_spec.specs, run_spec.sources)
        LOG.info(f"resumed from {checkpoint.path}: step {checkpoint.step}; " + "; ".join(consumed))
    return engine
