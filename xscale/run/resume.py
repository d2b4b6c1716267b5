"""Finds the checkpoint from which a run continues: its own, or for a fork that of a parent run.

A fork, `train.py --fork PARENT@STEP --out NEW`, takes over weights, optimizer, schedule, auxiliary states and positions
in the data. Its recipe may differ from the parent's only in fields that every step reads again and that do not change
the order of any source. A fork may read other data: a source that the parent had continues with its next record, and a
new source begins with epoch 0.
"""

import argparse
import copy
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from xscale import files
from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.store import Checkpoint
from xscale.data.calibrate import calibrate
from xscale.data.calibration import Calibration
from xscale.data.corpus import Corpus
from xscale.errors import LOG, UserError, indent_lines
from xscale.models.build import xscale_field_of_init
from xscale.ranks import CpuGroup
from xscale.recipe import Recipe
from xscale.run import run_status
from xscale.step.ds_config import EngineConfig

ANCESTRY = "ancestry.json"
"""The file in which a fork names its parent: a list of one object with the parent's directory, the step at which it was
forked, and the changed settings, except those that every resume may change."""
FORK_FIELDS = {
    "model": {"dropout"},
    "data": {"alpha"},
    "train": {"lr", "warmup", "schedule", "decay", "max_grad_norm", "label_smoothing", "z_loss"},
}
"""The fields that a fork may change, besides those that every resume may change."""
FORK_STREAM_FIELDS = {"samples", "weight", "warm_in"}
"""The fields of each stream that a fork may change, besides the objective's factors and probabilities."""

# The checkpoint from which a start continues


def find_starting_checkpoint(
    args: argparse.Namespace,
    recipe: Recipe,
    corpus: Corpus,
    identity: dict[str, Any],
    config: EngineConfig,
    cpu_group: CpuGroup,
) -> Checkpoint | None:
    """Return the checkpoint from which a start continues, with a position in each source of the corpus; None: the start
    begins at step 0. args: the arguments of train.py. All ranks call it together. Raises UserError."""
    checkpoint = find_own_or_fork_checkpoint(args, identity, cpu_group)
    if checkpoint is None:
        return None
    checkpoint = with_corpus_positions(checkpoint, recipe, corpus)
    check_engine_can_load(checkpoint, config)
    steps = recipe.train.steps
    if checkpoint.step >= steps and not is_checkpoint_of_run(checkpoint, args.out):
        flag = f"--fork {args.fork}" if args.fork else f"--resume {args.resume}"
        raise UserError(
            f"{flag}: the checkpoint has done {checkpoint.step} steps, but train.steps is only {steps}. Set a larger "
            "train.steps"
        )
    return checkpoint


def find_own_or_fork_checkpoint(
    args: argparse.Namespace, identity: dict[str, Any], cpu_group: CpuGroup
) -> Checkpoint | None:
    """Return the run's own checkpoint, or if it has none yet, that of --fork. Without either, return None. args: the
    arguments of train.py. Raises UserError if the checkpoint belongs to another run, or if all are damaged."""
    if args.resume == "never":
        return None
    if checkpoint := find_resume_checkpoint(args.out, args.resume, cpu_group):
        if differences := run_status.identity_differences(checkpoint.identity, identity):
            raise UserError(
                f"checkpoint {checkpoint.path} belongs to a run with other settings than this command. To continue the "
                "run of the checkpoint, start with the settings of that run. To start a new run from the weights of "
                f"the checkpoint, replace --resume by --set model.init={checkpoint.path}, and choose another --out. "
                "These settings differ:\n" + indent_lines(differences)
            )
        if args.fork and not began_at_checkpoint(args.out, args.fork):
            raise UserError(
                f"--fork {args.fork}: --out {args.out} has checkpoints of a run that did not begin at {args.fork}. "
                f"Choose another --out. To continue the run in {args.out}, remove --fork"
            )
    elif args.fork:
        checkpoint = checkpoints.read_undamaged_checkpoint(complete_checkpoint_path(args.fork), cpu_group)
        if differences := run_status.identity_differences(with_fork_fields(checkpoint.identity, identity), identity):
            raise UserError(
                f"--fork {args.fork}: settings that a fork cannot change differ from those of the forked run. Use the "
                "values of the forked run, or start a new run from the weights of the forked run by --set "
                f"model.init={checkpoint.path} instead of --fork. These settings differ:\n" + indent_lines(differences)
            )
    return checkpoint


def find_resume_checkpoint(out: Path, resume: str, cpu_group: CpuGroup) -> Checkpoint | None:
    """Return the checkpoint that --resume names or, for `auto`, the newest valid one of the run in `out`, or None."""
    if resume != "auto":
        return checkpoints.read_undamaged_checkpoint(checkpoints.resolve_checkpoint(Path(resume)), cpu_group)
    path = out / "checkpoints"
    if checkpoint := checkpoints.find_newest_undamaged(path, cpu_group):
        return checkpoint
    metrics = out / "metrics.jsonl"
    if checkpoints.list_checkpoints(path) or (metrics.exists() and any(files.read_ends_and_entries_backwards(metrics))):
        raise UserError(
            f"the run in {out} has trained, but {path} has no undamaged checkpoint. A checkpoint without "
            f"{checkpoints.MANIFEST} counts as damaged. Restore a checkpoint from a copy, or move {out} to another "
            "place to begin the run again at step 1"
        )
    return None


def rename_later_checkpoints_to_partial(out: Path, checkpoint: Checkpoint) -> None:
    """Make the checkpoints in `out` of steps after `checkpoint` partial, and let `latest` name `checkpoint`, from which
    --resume DIR continues the run; the next save removes the partial ones. Without this, a later start would continue
    from them, and not from the steps that are done again. Rank 0 only."""
    directory = out / "checkpoints"
    for path in reversed(checkpoints.list_checkpoints(directory)):
        if checkpoints.step_from_name(path) <= checkpoint.step:
            files.write_text(directory / checkpoints.LATEST, path.name)
            break
        withdrawn = files.checked_partial_path(path)  # the next save removes it
        files.remove(withdrawn)
        path.rename(withdrawn)
        LOG.warning(
            f"checkpoint {path} is of a later step than {checkpoint.path}, from which the run continues. The run "
            f"removes {path} when it saves the next checkpoint"
        )


def check_engine_can_load(checkpoint: Checkpoint, config: EngineConfig) -> None:
    """Raise UserError if DeepSpeed cannot load the checkpoint into an engine of this configuration."""
    changed = run_status.list_differences(checkpoint.engine | {"stage": config.stage}, config.settings_in_checkpoint())
    if changed:
        raise UserError(
            f"checkpoint {checkpoint.path} was saved with another precision, optimizer or scheduler. To continue "
            "the run, use the ds_config with which the run was first started, on a device that supports the run's "
            "precision. To start a new run from the weights of the checkpoint, write --set "
            f"model.init={checkpoint.path} and another --out. These settings differ:\n" + indent_lines(changed)
        )


def restore_or_measure_calibration(
    recipe: Recipe, corpus: Corpus, checkpoint: Checkpoint | None, cpu_group: CpuGroup
) -> Calibration:
    """Return the checkpoint's calibration. All ranks together measure the sources that are new to the run. Without a
    checkpoint, they measure everything."""
    if checkpoint is None:
        return calibrate(recipe, corpus, cpu_group)
    before = source_fingerprints(checkpoint.identity)
    now = source_fingerprints(corpus.identity())
    saved = Calibration.from_dict(checkpoint.calibration)
    if before == now:
        return saved
    # Streams and old sources keep their estimates, because the order of running text and the rows depend on them.
    line_of = dict(zip(now, calibrate(recipe, corpus, cpu_group).lines, strict=True))
    line_of |= zip(before, saved.lines, strict=True)
    return replace(saved, lines=[line_of[source] for source in now])


def source_fingerprints(identity: dict[str, Any]) -> list[str]:
    """Return the fingerprints of the sources in the identity of a run."""
    return [source["fingerprint"] for source in identity["data"]]


# Forks


def checkpoint_path(run_at_step: str) -> Path:
    """Return the directory of the checkpoint RUN@STEP. Raises UserError."""
    run, _, step = run_at_step.rpartition("@")
    if not run or not step.isdecimal():
        raise UserError(
            f"--fork {run_at_step}: the form must be RUN@STEP, the folder of a run and the step of one of its "
            "checkpoints, such as runs/xlm@8000"
        )
    return Path(run) / "checkpoints" / f"step_{int(step):08d}"


def began_at_checkpoint(out: Path, run_at_step: str) -> bool:
    """Return whether the run in `out` is a fork that began at the checkpoint RUN@STEP. Raises UserError."""
    path = checkpoint_path(run_at_step)
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        (parent, *_) = json.loads((out / ANCESTRY).read_text(encoding="utf-8"))
        return path.resolve() == checkpoint_path(f"{parent['run']}@{parent['step']}").resolve()
    return False


def complete_checkpoint_path(run_at_step: str) -> Path:
    """Return the directory of the checkpoint RUN@STEP. Raises UserError if there is no such checkpoint."""
    path = checkpoint_path(run_at_step)
    complete = checkpoints.list_checkpoints(path.parent)
    if path not in complete:
        steps = ", ".join(str(checkpoints.step_from_name(other)) for other in complete)
        raise UserError(
            f"--fork {run_at_step}: there is no complete checkpoint {path}. Choose another run, or a step with a "
            f"complete checkpoint in {path.parent} (steps with a complete checkpoint: {steps or 'none'})"
        )
    return path


def with_fork_fields(saved: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """Return the saved identity with the data of `identity`, and with its values of the fields that a fork may
    change."""
    saved = copy.deepcopy(saved) | {"data": identity["data"]}
    recipe = identity["recipe"]
    for section, names in FORK_FIELDS.items():
        for name in names:
            saved["recipe"][section][name] = recipe[section][name]
    if saved["recipe"]["train"].get("head_lr") and recipe["train"]["head_lr"]:
        # Not from or to null: new heads have parameter groups of their own only if train.head_lr is set.
        saved["recipe"]["train"]["head_lr"] = recipe["train"]["head_lr"]
    for name, stream in saved["recipe"]["streams"].items():
        for field, value in recipe["streams"].get(name, {}).items():
            if field in FORK_STREAM_FIELDS or (is_nonzero_float(stream.get(field)) and is_nonzero_float(value)):
                stream[field] = value
    return saved


def is_nonzero_float(value: Any) -> bool:
    """Return whether a stream's field is a factor or a probability other than 0. A fork may not change a factor from or
    to 0, because a term with the factor 0 may have no heads."""
    return type(value) is float and value != 0


def is_checkpoint_of_run(checkpoint: Checkpoint, out: Path) -> bool:
    """Return whether the checkpoint is in the run's own folder `out`."""
    return checkpoint.path.parent.resolve() == (out / "checkpoints").resolve()


def write_ancestry(out: Path, parent: Checkpoint, identity: dict[str, Any]) -> None:
    """Write ancestry.json for a new fork in `out`. parent: the checkpoint at which the fork begins. Rank 0 only."""
    run = parent.path.absolute().parent.parent.resolve()  # the checkpoint, or its folder, may be a symbolic link
    entry = {
        "run": str(run),
        "step": parent.step,
        "changed": run_status.identity_differences(parent.identity, identity),
    }
    files.write_text(out / ANCESTRY, json.dumps([entry], indent=1, ensure_ascii=False) + "\n")


def with_corpus_positions(checkpoint: Checkpoint, recipe: Recipe, corpus: Corpus) -> Checkpoint:
    """Return the checkpoint with a position in each source of a fork. Raises UserError if recipe or model forbid other
    data.

    A source that the other run had keeps its position and its order. If a stream has lost a source, it is unknown which
    position belongs to which of its sources, and all of them begin a new epoch.
    """
    before = source_fingerprints(checkpoint.identity)
    now = source_fingerprints(corpus.identity())
    if before == now:
        return checkpoint
    check_fork_corpus(checkpoint, recipe, corpus)
    positions = dict[str, list[list[int]]]()
    sources_at_start = dict(checkpoint.state.get("sources_at_start", {}))
    for stream in corpus.streams.last:
        saved = checkpoint.state["positions"][stream.name]
        known = [source for source in stream.sources if now[source] in before]
        known.sort(key=lambda source: before.index(now[source]))
        position = [0, 0]
        position_of = dict(zip(known, saved, strict=False))
        if len(known) == len(saved):
            sources_at_start.setdefault(stream.name, len(saved))
        else:
            LOG.info(
                f"streams.{stream.name}: a folder of shards that the stream had read before has changed or is not in "
                "--data, so the stream begins a new epoch in each of its folders"
            )
            position = [1 + max(epoch for epoch, *_ in saved), 0]
            position_of = {}
            sources_at_start.pop(stream.name, None)
        positions[stream.name] = [position_of.get(source, [*position]) for source in stream.sources]
    LOG.info(
        f"--data differs from the data of {checkpoint.path}. New or changed folders of shards are read from their "
        "beginning"
    )
    return replace(checkpoint, state=checkpoint.state | {"positions": positions, "sources_at_start": sources_at_start})


def check_fork_corpus(checkpoint: Checkpoint, recipe: Recipe, corpus: Corpus) -> None:
    """Raise UserError if a fork cannot read other data than the run of the checkpoint."""
    if recipe.data.first:
        raise UserError(
            "--fork: the recipe sets data.first, the maximum number of records of each language. data.first counts "
            "the records of all folders of --data, so the fork needs the same --data as the forked run. Use the same "
            f"--data, or start a new run from the weights by --set model.init={checkpoint.path}"
        )
    if not recipe.any_stream_sets("language_embeddings"):
        return
    _, *trained = xscale_field_of_init(checkpoint.path / checkpoints.HF)["languages"]
    if trained != corpus.languages:
        raise UserError(
            f"--fork: the model has language embeddings of {', '.join(trained)}, but --data has text in "
            f"{', '.join(corpus.languages)}. Use data in the same languages, or start a new run by --set "
            f"model.init={checkpoint.path}: a new run adds embeddings for new languages"
        )
