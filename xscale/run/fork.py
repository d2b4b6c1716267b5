"""A fork is a run that begins at a checkpoint of another run: `train.py --fork RUN@STEP --out NEW`.

A fork takes over weights, optimizer, schedule, auxiliary states and positions in the data. Its recipe may differ from
the other run's only in fields that are read anew in each step and do not change the order of any source.
"""

import argparse
import copy
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from xscale import files
from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.store import Checkpoint
from xscale.errors import UserError
from xscale.ranks import HostGroup
from xscale.run import folder

ANCESTRY = "ancestry.json"
"""The file of a fork with its ancestor runs, nearest first. Each entry has the ancestor's directory, the step at which
the fork of this ancestor began, and the settings that this fork changed."""
MAY_CHANGE = {
    "model": {"dropout"},
    "data": {"alpha"},
    "train": {"lr", "warmup", "schedule", "decay", "max_grad_norm", "label_smoothing", "z_loss"},
}
"""The fields that a fork may change, besides those that every resume may change."""
OF_STREAMS = {"samples", "tokens", "weight", "warm_in"}
"""The fields of each stream that a fork may change, besides the objective's factors and probabilities."""


def find_checkpoint(args: argparse.Namespace, identity: dict[str, Any], host_group: HostGroup) -> Checkpoint | None:
    """Return the checkpoint to start from: the run's own, or that of --fork if the run has none yet, or None. args: the
    arguments of train.py. Raises UserError."""
    append = args.data_change == "append"
    found = folder.find_checkpoint(args.out, args.resume, identity, host_group, append)
    if found is not None and args.fork and not descends(args.out, args.fork):
        raise UserError(
            f"--fork {args.fork}: {args.out} has checkpoints of a run that did not begin there; choose another --out, "
            f"or leave --fork out to go on with that run"
        )
    if found is None and args.fork:
        found = find_parent(args.fork)
        if problem := checkpoints.verify(found.path, host_group):
            raise UserError(f"checkpoint {found.path} is not usable ({problem}); choose another for --fork")
        if differences := folder.changed(with_new_values(found.identity, identity), identity, append):
            raise UserError(
                f"--fork {args.fork} cannot change these fields. Give that run's values, or start from its weights "
                f"alone: --set model.init={found.path} instead of --fork:\n" + folder.indented(differences)
            )
    return found


def descends(out: Path, fork: str) -> bool:
    """Whether the run in `out` began at the checkpoint that --fork names."""
    with suppress(OSError, ValueError, LookupError):
        nearest = json.loads((out / ANCESTRY).read_text(encoding="utf-8"))[0]
        run, _, step = fork.rpartition("@")
        if run and re.fullmatch(r"\d+", step):
            return (str(Path(run).resolve()), int(step)) == (nearest["run"], nearest["step"])
        return nearest["run"] in map(str, (Path(fork).resolve(), *Path(fork).resolve().parents))
    return False


def find_parent(fork: str) -> Checkpoint:
    """Return the checkpoint that RUN@STEP, RUN or a checkpoint's directory names. Raises UserError."""
    run, _, step = fork.rpartition("@")
    if not run or not re.fullmatch(r"\d+", step):
        return checkpoints.read(checkpoints.find(Path(fork)))
    there = {checkpoints.step_of(path): path for path in checkpoints.complete_steps(Path(run) / "checkpoints")}
    if int(step) not in there:
        steps = ", ".join(map(str, there)) or "none"
        raise UserError(f"--fork {fork}: {run} has no checkpoint of step {step}; it has those of steps {steps}")
    return checkpoints.read(there[int(step)])


def with_new_values(saved: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    """Return the saved identity with the new values of the fields that a fork may change."""
    saved, new = copy.deepcopy(saved), identity["recipe"]
    if fixed_by_phases(saved["recipe"]) == fixed_by_phases(new):
        saved["recipe"] |= {"phases": new.get("phases")}
    for section, names in MAY_CHANGE.items():
        saved["recipe"][section] |= {name: value for name, value in new[section].items() if name in names}
    for name, stream in saved["recipe"]["streams"].items():
        ours = new["streams"].get(name, {})
        stream |= {k: v for k, v in ours.items() if k in OF_STREAMS or (_is_factor(stream.get(k)) and _is_factor(v))}
    return saved


def fixed_by_phases(recipe: dict[str, Any]) -> tuple[Any, int]:
    """Return the values in a recipe's phases on which a saved state depends: the languages of the streams, which decide
    the sources that have a position, and the largest data.max_length, which decides the model's positions."""
    phases = [{}, *(recipe.get("phases") or [])]
    some = recipe["data"].get("languages") or any(stream.get("languages") for stream in recipe["streams"].values())
    languages = [{name: value for name, value in phase.items() if "languages" in name} for phase in phases]
    length = max(phase.get("data.max_length", recipe["data"]["max_length"]) for phase in phases)
    return {json.dumps(of, sort_keys=True) for of in languages} if some else None, length


def _is_factor(value: Any) -> bool:
    """Whether a field's value is a factor or a probability, and not 0. A fork may not change a factor from or to 0,
    since a term whose factor is 0 may have no heads."""
    return type(value) is float and value != 0


def is_own(checkpoint: Checkpoint, out: Path) -> bool:
    return checkpoint.path.parent.resolve() == (out / "checkpoints").resolve()


def write_ancestry(out: Path, parent: Checkpoint, identity: dict[str, Any]) -> None:
    """Write ancestry.json for a new fork in `out`. parent: the checkpoint at which the fork begins. Rank 0 only."""
    run = parent.path.resolve().parent.parent
    entry = {"run": str(run), "step": parent.step, "changed": folder.changed(parent.identity, identity)}
    before: list[Any] = []
    with suppress(OSError, ValueError):
        before = json.loads((run / ANCESTRY).read_text(encoding="utf-8"))
    files.write_text(out / ANCESTRY, json.dumps([entry, *before], indent=1, ensure_ascii=False) + "\n")
