"""The start of a run: find and check its recipe and corpus, claim its folder, build the engine, and enter the loop."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from xscale import __version__, files, ranks, rng
from xscale.checkpoint.restore import load_engine_and_auxiliary_states
from xscale.checkpoint.store import Checkpoint
from xscale.data.calibration import Calibration, Correction
from xscale.data.corpus import Corpus, run_identity
from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import initial_state
from xscale.data.stream import Stream
from xscale.deepspeed_private import set_learning_rate_by_scheduler
from xscale.errors import LOG, ExitCode, UserError, indent_lines, redact
from xscale.eval.in_training import check_eval_tasks
from xscale.objectives import HasQueue
from xscale.ranks import CpuGroup, Process
from xscale.recipe import Recipe, Schedule
from xscale.run import describe, resolve, resume, run_status
from xscale.run.loop import Trainer
from xscale.run.watch import RunContext, StopRequest, Watch
from xscale.step import engine as engines
from xscale.step.ds_config import EngineConfig, Hardware, read_and_resolve_ds_config
from xscale.step.module import StepModule
from xscale.step.step import set_learning_rate_unless_scheduler


@dataclass(frozen=True)
class ResolvedRun:
    """The recipe, the corpus and the settings of a run. They are checked before the folder of the run is touched."""

    recipe: Recipe
    corpus: Corpus
    config: EngineConfig
    hardware: Hardware
    identity: dict[str, Any]
    notes: list[str]
    """The lines to print before the first step."""


def train_run(args: argparse.Namespace, process: Process, cpu_group: CpuGroup, status: run_status.Status) -> ExitCode:
    """Train one run in the existing process group: check it, claim its folder, set up the training, train. args: the
    arguments of train.py. Returns the exit code."""
    run = resolve_and_check_run(args, process, Hardware.of_this_process(), cpu_group)
    steps = run.recipe.train.steps
    context = lock_folder_and_start_watch(args, run, process, cpu_group, status)
    with closing(context.watch):
        checkpoint = resume.find_starting_checkpoint(args, run.recipe, run.corpus, run.identity, run.config, cpu_group)
        if checkpoint and checkpoint.step >= steps:
            LOG.info(f"the run in {args.out} is complete: it has done {checkpoint.step} of {steps} steps")
            status.set_steps_done_for_next_write(checkpoint.step)
            status.write_end(run_status.DONE, f"{checkpoint.step} of {steps} steps")
            return run_status.DONE
        trainer, batches = set_up_training(args, run, context, checkpoint)
        if run_status.read_status(args.out).get("status") == "running":  # no other rank has failed meanwhile
            # The status now has the number of steps done, by which slurm/pretrain.sbatch sees that training has begun.
            status.note_lock_and_write_running(status.status_before_start)
        try:
            trainer.evaluate_and_save_start()
            code = trainer.loop(batches)
        finally:
            trainer.flush_files_at_end()
        status.write_end(code, context.stop.why if code == run_status.STOPPED else f"{trainer.done} of {steps} steps")
    return code


def resolve_and_check_run(
    args: argparse.Namespace, process: Process, hardware: Hardware, cpu_group: CpuGroup
) -> ResolvedRun:
    """Find and check the recipe, the corpus and the settings of a run on this hardware. All ranks call it together.
    Raises UserError."""
    recipe, corpus = resolve.resolve_run(args.recipe, args.set, args.data, cpu_group)
    config = read_and_resolve_ds_config(args.ds_config, recipe, process.world, hardware)
    check_eval_tasks(recipe, corpus, config.stage, cpu_group)
    check_ranks_agree(args, recipe, corpus, config, cpu_group)
    ranks.set_deterministic(recipe.train.deterministic)
    notes = [*config.notes, *describe.notes_before_first_step(recipe, corpus)]
    return ResolvedRun(recipe, corpus, config, hardware, run_identity(recipe, corpus), notes)


def lock_folder_and_start_watch(
    args: argparse.Namespace, run: ResolvedRun, process: Process, cpu_group: CpuGroup, status: run_status.Status
) -> RunContext:
    """Lock the run's folder, start to log there, to listen to signals and to watch this rank. All ranks call it
    together; rank 0 locks the folder. Raises UserError if the folder has another run, or cannot be used."""
    out: Path = args.out
    stop = StopRequest(run.recipe.train.time_limit)
    locks = list[files.Lock]()

    def claim() -> dict[str, Any]:
        run_status.check_folder_is_free_or_own(out, run.identity, args.resume)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {out} cannot be created ({error.strerror}). Choose another folder") from None
        locks.append(files.Lock(out))
        # The lock may have waited for another run.
        run_status.check_folder_is_free_or_own(out, run.identity, args.resume)
        return run_status.read_status(out)

    status.note_lock_and_write_running(cpu_group.value_from_main(claim))
    if not out.is_dir():
        raise UserError(
            f"--out {out} does not exist on {os.uname().nodename}, the host of rank {process.rank}. Choose a "
            "folder that all hosts share"
        )
    stacks = run_status.start_logging(out, process.rank)
    watch = Watch(process, stacks, run.recipe.train.stall_limit, status.write_end)
    for lock in locks:
        if lock.problem:
            LOG.warning(lock.problem)
    for note in run.notes:
        LOG.info(note)
    return RunContext(out, process, cpu_group, status, stop, watch, locks)


def set_up_training(
    args: argparse.Namespace, run: ResolvedRun, context: RunContext, checkpoint: Checkpoint | None
) -> tuple[Trainer, Iterator[StepBatch]]:
    """Write the run's config files, build the model and the engine, and load the checkpoint. Return the trainer and the
    batches of the steps after the checkpoint, or of all steps. With --resume DIR, later checkpoints become partial."""
    recipe = run.recipe
    context.watch.note_progress("estimating the number of tokens of the data")
    calibration = resume.restore_or_measure_calibration(recipe, run.corpus, checkpoint, context.cpu_group)
    context.watch.note_progress("building the model")
    module = resolve.build_initial_module(recipe, run.corpus)
    if checkpoint and checkpoint.has_new_head is not None:  # model.init may have changed since the start of the run
        module.encoder.has_new_head = checkpoint.has_new_head
    loader = Loader(recipe, run.corpus, calibration)
    loader = resolve.fit_rows_into_gpu_memory(
        loader, module, run.config, run.hardware.memory, context.cpu_group, LOG.info
    )
    context.cpu_group.value_from_main(lambda: write_config_and_log_shares(args.out, run, loader, checkpoint))
    data_state = checkpoint.state if checkpoint else initial_state(loader.last_streams)
    left = recipe.train.steps - data_state["step"]
    # The planner makes the first plans while the engine is built.
    plans = loader.start_planning(context.process, run.hardware.device, data_state, left, context.cpu_group)
    context.watch.note_progress("building the engine")
    engine = engines.build_engine(module, run.config.resolved)
    if checkpoint:
        load_engine_and_auxiliary_states(engine, checkpoint, context.cpu_group)
        set_learning_rate_by_scheduler(engine)
        if checkpoint.step:  # a fork saves its first checkpoint before any step, with the rate of the last step done
            set_learning_rate_unless_scheduler(engine, recipe, checkpoint.step - 1)
        if context.process.is_main and args.resume != "auto":
            resume.rename_later_checkpoints_to_partial(args.out, checkpoint)
        LOG.info(f"the run continues from {checkpoint.path}, after step {checkpoint.step}")
    LOG.info(f"xscale {code_version()}, torch {torch.__version__}: {redact(' '.join(sys.argv))}")
    LOG.info(
        f"training {sum(p.numel() for p in engine.module.parameters()):,} parameters in {run.config.precision} on "
        f"{context.process.world} rank(s) on {engine.device.type}, ZeRO stage {run.config.stage}, "
        f"steps {data_state['step'] + 1} to {recipe.train.steps}"
    )
    if not checkpoint:
        prefill_queues(engine.module, loader, context.process, engine.device, context.watch.note_progress)
    trainer = Trainer(loader, engine, run.config, context, checkpoint, args.trace)
    return trainer, loader.start_workers(context.process, engine.device.type, plans)


def code_version() -> str:
    """Return xscale's version, with the commit if the code is a git checkout. "-dirty": files differ from the
    commit."""
    root = Path(__file__).resolve().parents[2]
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    if (root / ".git").exists():
        with suppress(OSError, subprocess.CalledProcessError):
            commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
            return f"{__version__} (commit {commit})"
    return __version__


def write_config_and_log_shares(out: Path, run: ResolvedRun, loader: Loader, checkpoint: Checkpoint | None) -> None:
    """Write the run's configuration and the state at which it starts, and log the shares of the data. Rank 0 only.
    Raises UserError if the entries of a source are damaged."""
    text = yaml.safe_dump(run.recipe.to_dict(), sort_keys=False, allow_unicode=True)
    files.write_text(out / "config.yaml", redact(text))
    files.write_text(out / "ds_config.json", run_status.to_json_text(run.config.resolved))
    if checkpoint and not resume.is_checkpoint_of_run(checkpoint, out):
        resume.write_ancestry(out, checkpoint, run.identity)
    lines = [*describe.dropped_pairs_warnings(loader), *describe.unlisted_shards_warnings(run.corpus)]
    for line in (*lines, *describe.language_share_lines(loader)):
        LOG.info(line)


def check_ranks_agree(
    args: argparse.Namespace, recipe: Recipe, corpus: Corpus, config: EngineConfig, cpu_group: CpuGroup
) -> None:
    """Raise UserError on all ranks unless all were started alike, so that they plan the same data."""
    settings = corpus.identity() | {
        "recipe": recipe.to_dict(),
        "--ds_config": config.resolved,
        "--resume": args.resume,
        "--fork": args.fork,
        "--out": str(args.out),
    }
    settings_of_main = cpu_group.value_from_main(lambda: settings)
    differences = run_status.list_differences(settings_of_main, settings, form="{} on rank 0, {} on the other rank")
    for rank, (host, lines) in enumerate(cpu_group.all_gather((os.uname().nodename, differences[:3]))):
        if lines:
            raise UserError(
                f"rank {rank} on {host} was started with other settings than rank 0. Start all ranks with the same "
                "command and the same files. These settings differ:\n" + indent_lines(lines)
            )


def make_loader_for_prefill(loader: Loader, stream: Stream) -> Loader:
    """Return a loader that has only this stream and reads its data in a different order: the new name changes the
    stream's random keys."""
    name = f"{stream.name}.prefill"
    recipe = replace(loader.recipe, streams={name: loader.recipe.streams[stream.name]}, phases=())
    corpus = replace(loader.corpus, streams=Schedule.constant([replace(stream, name=name)]))
    correction = loader.calibration.streams.get(stream.name, Correction())
    calibration = Calibration(loader.calibration.lines, {name: correction})
    return replace(loader, recipe=recipe, corpus=corpus, calibration=calibration)


def prefill_queues(
    module: StepModule, loader: Loader, process: Process, device: torch.device, note_progress: Callable[[str], None]
) -> None:
    """Fill the queues before step 1, with vectors from the initial weights. All ranks call it together. Each
    stream's data are read in a different order than training reads them, and the stream's position does not change.
    note_progress: a function that gets what this rank is doing, as often as the rank makes progress."""
    for stream in loader.last_streams:
        name = stream.name
        auxiliary_state = module.auxiliary_states.get(name)
        if not isinstance(auxiliary_state, HasQueue) or not auxiliary_state.prefill_samples:
            continue
        prefill_loader = make_loader_for_prefill(loader, stream)
        wanted = auxiliary_state.prefill_samples
        have = 0
        LOG.info(f"streams.{name}: before step 1, the run fills the queue of {wanted:,} sentence vectors")
        steps = 2 * -(-wanted // prefill_loader.last_streams[0].samples)
        for batch in prefill_loader.batches(process, device.type, initial_state(prefill_loader.last_streams), steps):
            for number, row in enumerate(batch.rows):
                place = (batch.step, number, process.rank)
                torch.manual_seed(rng.torch_seed(loader.recipe.train.seed, "prefill", name, *place))
                (auxiliary,) = row.auxiliary.values()
                (arrays,) = row.to(device).arrays.values()
                auxiliary_state.encode(module.encoder, auxiliary.to(device), [arrays])
            have = auxiliary_state.enqueue_new_vectors()
            if have >= wanted:
                break
            note_progress(f"filling the queue of streams.{name}, which has {have:,} of {wanted:,} sentence vectors")
        if have < wanted:
            LOG.warning(
                f"streams.{name}: the queue of the contrastive loss has only {have:,} of {wanted:,} sentence vectors, "
                "because most pairs are longer than data.max_length. Set a larger data.max_length or "
                "data.overlong=truncate"
            )
