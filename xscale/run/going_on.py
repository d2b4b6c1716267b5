"""A run continues from a checkpoint: its own, or for a fork another run's (`train.py --fork RUN@STEP --out NEW`).

A fork takes over weights, optimizer, schedule, auxiliary states and positions in the data. Its recipe may differ from
the other run's only in fields that every step reads again and that do not change the order of any source. It may read
other data: a source that the other run had continues with its next record, and a new source begins with epoch 0.
"""

import argparse
import copy
import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from xscale import files
from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.store import Checkpoint
from xscale.data.calibrate import calibrate
from xscale.data.calibration import Calibration
from xscale.data.corpus import Corpus, run_identity
from xscale.errors import UserError
from xscale.models.build import run_fields_of
from xscale.ranks import HostGroup
from xscale.recipe import Recipe
from xscale.run import folder
from xscale.run.metrics import LOG, entries_from_end
from xscale.step.ds_config import EngineConfig

ANCESTRY = "ancestry.json"
"""The file in which a fork lists its ancestor runs, nearest first. Each entry has the ancestor's directory, the step at
which it was forked, and the settings that the fork changed."""
MAY_CHANGE = {
    "model": {"dropout"},
    "data": {"alpha"},
    "train": {"lr", "warmup", "schedule", "decay", "max_grad_norm", "label_smoothing", "z_loss"},
}
"""The fields that a fork may change, besides those that every resume may change."""
OF_STREAMS = {"samples", "weight", "warm_in"}
"""The fields of each stream that a fork may change, besides the objective's factors and probabilities."""

# The checkpoint from which a start continues


def find_checkpoint(args: argparse.Namespace, identity: dict[str, Any], host_group: HostGroup) -> Checkpoint | None:
    """Return the checkpoint to start from: the run's own, or if it has none yet, that of --fork. Without either, return
    None. args: the arguments of train.py. Raises UserError if the checkpoint belongs to another run, or if all are
    damaged."""
    if args.resume == "never":
        return None
    if found := find_own(args.out, args.resume, host_group):
        if differences := folder.compare_identities(found.identity, identity):
            raise UserError(
                f"checkpoint {found.path} was made with other settings. Start with the old ones, or begin a new run "
                f"with model.init={found.path} instead of --resume:\n" + folder.indented(differences)
            )
        if args.fork and not began_at(args.out, args.fork):
            raise UserError(
                f"--fork {args.fork}: {args.out} has checkpoints of a run that did not begin there; choose another "
                f"--out, or leave --fork out to go on with that run"
            )
    elif args.fork:
        found = verified(find_parent(args.fork), "--fork", host_group)
        if differences := folder.compare_identities(with_new_values(found.identity, identity), identity):
            raise UserError(
                f"--fork {args.fork} cannot change these fields. Give that run's values, or start from its weights "
                f"alone: --set model.init={found.path} instead of --fork:\n" + folder.indented(differences)
            )
    return found


def find_own(out: Path, resume: str, host_group: HostGroup) -> Checkpoint | None:
    """Return the checkpoint that --resume names or, for `auto`, the newest valid one of the run in `out`, or None."""
    path = out / "checkpoints" if resume == "auto" else Path(resume)
    if resume != "auto" and (path / "checkpoints").is_dir():
        path /= "checkpoints"
    if (path / checkpoints.MANIFEST).exists():
        return verified(path, "--resume", host_group)
    found = checkpoints.find_newest_valid(path, host_group, LOG.warning)
    if found:
        return found
    if resume != "auto":
        raise UserError(f"--resume {resume} has no complete checkpoint; give a checkpoint or a run that has one")
    remedy = f"or move {out} away to begin again at step 0"
    if checkpoints.list_checkpoints(path):
        raise UserError(f"no checkpoint in {path} is usable; restore one, {remedy}")
    metrics = out / "metrics.jsonl"
    if metrics.exists() and any(entries_from_end(metrics)):
        raise UserError(
            f"{metrics} has lines of steps, but no checkpoint in {path} has its {checkpoints.MANIFEST}: restore the "
            f"checkpoints, {remedy}"
        )
    return None


def verified(path: Path, option: str, host_group: HostGroup) -> Checkpoint:
    """Return the checkpoint in directory `path`, the value of `option`. Raises UserError if it is damaged."""
    if problem := checkpoints.find_damage(path, host_group):
        raise UserError(f"checkpoint {path} is not usable ({problem}); choose another for {option}")
    return checkpoints.read_checkpoint(path)


def check_engine(checkpoint: Checkpoint | None, config: EngineConfig) -> None:
    """Raise UserError if DeepSpeed cannot load the checkpoint into an engine of this configuration."""
    if checkpoint is None:
        return
    saved = checkpoint.engine
    if saved["precision"] != config.precision:
        raise UserError(
            f"{checkpoint.path} was saved in {saved['precision']}, and this ds_config asks for {config.precision}. "
            f"Choose a ds_config of {saved['precision']}, or start a new run from the checkpoint by "
            f"model.init={checkpoint.path} and another --out"
        )
    if changed := folder.compare(saved | {"stage": config.stage}, config.saved()):
        raise UserError(
            f"{checkpoint.path} was saved with another optimizer or scheduler, which DeepSpeed would continue to use. "
            f"Give the ds_config of the run's first start:\n" + folder.indented(changed)
        )


def resume_calibration(
    recipe: Recipe, corpus: Corpus, checkpoint: Checkpoint | None, host_group: HostGroup
) -> Calibration:
    """Return the checkpoint's calibration. All ranks together measure what it lacks: the sources that are new to the
    run, and the phases of a fork with other phases. Without a checkpoint, they measure everything."""
    if checkpoint is None:
        return calibrate(recipe, corpus, host_group)
    before = checkpoint.identity
    now = run_identity(recipe, corpus)
    saved = Calibration.from_dict(checkpoint.calibration, len(before["data"]), list(recipe.streams))
    if before["data"] != now["data"]:
        # Streams and old sources keep their estimates, because the order of running text and the packed rows depend on
        # them.
        line_of = dict(zip(fingerprints(now), calibrate(recipe, corpus, host_group).lines, strict=True))
        line_of |= zip(fingerprints(before), saved.lines, strict=True)
        saved = replace(saved, lines=[line_of[source] for source in fingerprints(now)])
    if before["recipe"].get("phases") != now["recipe"].get("phases"):
        saved = calibrate(recipe, corpus, host_group, saved)
    return saved


def fingerprints(identity: dict[str, Any]) -> list[str]:
    return [entry["fingerprint"] for entry in identity["data"]]


# Forks


def split_fork(fork: str) -> tuple[Path, int | None]:
    """Return the run and the step that RUN@STEP names. The step is None if --fork names a run or a checkpoint."""
    run, _, step = fork.rpartition("@")
    return (Path(run), int(step)) if run and re.fullmatch(r"\d+", step) else (Path(fork), None)


def began_at(out: Path, fork: str) -> bool:
    """Return whether the run in `out` began at the checkpoint that --fork names."""
    path, step = split_fork(fork)
    ancestors = read_ancestry(out)
    if not ancestors:
        return False
    parent = Path(ancestors[0]["run"])
    began = ancestors[0]["step"]
    if path.resolve() == parent:
        return step is None or step == began
    return step is None and path.resolve() == parent / "checkpoints" / f"step_{began:08d}"


def find_parent(fork: str) -> Path:
    """Return the checkpoint that RUN@STEP, RUN or a checkpoint's directory names. Raises UserError."""
    run, step = split_fork(fork)
    if step is None:
        return checkpoints.resolve_checkpoint(run)
    there = {checkpoints.step_of(path): path for path in checkpoints.list_checkpoints(run / "checkpoints")}
    if step not in there:
        steps = ", ".join(map(str, there)) or "none"
        raise UserError(f"--fork {fork}: {run} has no checkpoint of step {step}; it has those of steps {steps}")
    return there[step]


def with_new_values(saved: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """Return the saved identity with the new values of the fields that a fork may change, and with its data."""
    saved = copy.deepcopy(saved) | {"data": identity["data"]}
    recipe = saved["recipe"]
    new = identity["recipe"]
    if fixed_by_phases(recipe) == fixed_by_phases(new):
        recipe["phases"] = new.get("phases")
    for section, names in MAY_CHANGE.items():
        for name in names & new[section].keys():
            recipe[section][name] = new[section][name]
    for name, stream in recipe["streams"].items():
        for field, value in new["streams"].get(name, {}).items():
            if field in OF_STREAMS or (_is_factor(stream.get(field)) and _is_factor(value)):
                stream[field] = value
    return saved


def fixed_by_phases(recipe: dict[str, Any]) -> tuple[Any, int]:
    """Return the values in a recipe's phases on which a saved state depends: the languages of the streams, because they
    decide which sources have a position, and the largest data.max_length, because it is the number of the model's
    positions."""
    languages = set[str]()
    lengths = [recipe["data"]["max_length"]]
    for phase in [{}, *(recipe.get("phases") or [])]:
        of_phase = {name: value for name, value in phase.items() if "languages" in name}
        languages.add(json.dumps(of_phase, sort_keys=True))
        lengths.append(phase.get("data.max_length", lengths[0]))
    streams = recipe["streams"].values()
    some = recipe["data"].get("languages") or any(stream.get("languages") for stream in streams)
    return languages if some else None, max(lengths)


def _is_factor(value: Any) -> bool:
    """Return whether a field's value is a factor or a probability other than 0. A fork may not change a factor from or
    to 0, because a term with the factor 0 may have no heads."""
    return type(value) is float and value != 0


def is_own(checkpoint: Checkpoint, out: Path) -> bool:
    return checkpoint.path.parent.resolve() == (out / "checkpoints").resolve()


def read_ancestry(out: Path) -> list[dict[str, Any]]:
    with suppress(OSError, ValueError):
        return json.loads((out / ANCESTRY).read_text(encoding="utf-8"))
    return []


def write_ancestry(out: Path, parent: Checkpoint, identity: dict[str, Any]) -> None:
    """Write ancestry.json for a new fork in `out`. parent: the checkpoint at which the fork begins. Rank 0 only."""
    run = parent.path.resolve().parent.parent
    entry = {"run": str(run), "step": parent.step, "changed": folder.compare_identities(parent.identity, identity)}
    text = json.dumps([entry, *read_ancestry(run)], indent=1, ensure_ascii=False)
    files.write_text(out / ANCESTRY, text + "\n")


def with_other_data(checkpoint: Checkpoint, recipe: Recipe, corpus: Corpus) -> Checkpoint:
    """Return the checkpoint with a position in each source of a fork. Raises UserError if recipe or model forbid other
    data.

    A source that the other run had keeps its position and its order. If a stream has lost a source, it is unknown which
    position belongs to which of its sources, and all of them begin a new epoch.
    """
    before = fingerprints(checkpoint.identity)
    now = [source.fingerprint for source in corpus.sources]
    if before == now:
        return checkpoint
    check_other_data(checkpoint, recipe, corpus)
    state = checkpoint.state
    positions = dict[str, list[list[int]]]()
    sources_at_start = dict(state.get("sources_at_start", {}))
    for stream in corpus.streams.last:
        saved = state["positions"][stream.name]
        known = [source for source in stream.sources if now[source] in before]
        known.sort(key=lambda source: before.index(now[source]))
        if len(known) == len(saved):
            position_of = dict(zip(known, saved, strict=True))
            positions[stream.name] = [position_of.get(source, [0, 0]) for source in stream.sources]
            sources_at_start.setdefault(stream.name, len(saved))
        else:
            epoch = 1 + max(position[0] for position in saved)
            positions[stream.name] = [[epoch, 0] for _ in stream.sources]
            sources_at_start.pop(stream.name, None)
    new = sum(fingerprint not in before for fingerprint in now)
    gone = sum(fingerprint not in now for fingerprint in before)
    LOG.info(f"{new} sources are new, and {gone} sources of {checkpoint.path} are left out")
    state = state | {"positions": positions, "sources_at_start": sources_at_start}
    return replace(checkpoint, state=state)


def check_other_data(checkpoint: Checkpoint, recipe: Recipe, corpus: Corpus) -> None:
    """Raise UserError if a fork cannot read other data than the run of the checkpoint."""
    if recipe.data.first:
        raise UserError(
            "--fork: data.first limits the number of records of a language in all data together, so that other data "
            "would change which of the old records are read; give the same --data, or start a new run from the "
            f"weights: model.init={checkpoint.path}"
        )
    if not recipe.any_stream("language_embeddings"):
        return
    _, *trained = run_fields_of(checkpoint.path / checkpoints.HF)["languages"]
    if trained != corpus.languages:
        raise UserError(
            f"--fork: the model has language embeddings of {', '.join(trained)}, but --data has text in "
            f"{', '.join(corpus.languages)}; give data in the same languages, or start a new run with "
            f"model.init={checkpoint.path}, which adds language embeddings"
        )
