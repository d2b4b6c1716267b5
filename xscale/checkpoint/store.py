"""Finds, checks, publishes and removes checkpoints on disk. A checkpoint is either complete or absent.

A checkpoint is written into checkpoints/step_X.incomplete. When all ranks have written their files, rank 0 adds
manifest.json (files, sizes, hashes, the run's identity, the streams' state), renames the directory and replaces the
file `latest`. A kill at any moment leaves the older checkpoints, and at most an incomplete directory, which a later
save removes.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from xscale import files
from xscale.deepspeed_private import KNOWN_TYPES
from xscale.errors import UserError
from xscale.files import PARTIAL
from xscale.ranks import HostGroup

MANIFEST = "manifest.json"
BEST = "best"
OWN_HASH = "sha256"
"""The manifest's key for the hash of its other keys."""
HF = "hf"
"""The folder of a checkpoint with the model's Hugging Face config and the tokenizer."""
AUXILIARY_STATES = "companions.pt"
"""The file with the momentum encoders and queues, by stream. Rank 0 writes it, since they are the same on all ranks."""
NAME = re.compile(r"step_\d{8,}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's directory and its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Return the number of optimizer steps that the run had done."""
        return self.manifest["step"]

    @property
    def world_size(self) -> int:
        """Return the number of ranks that saved the checkpoint."""
        return self.manifest["world_size"]

    @property
    def identity(self) -> dict[str, Any]:
        """Return the run's identity (data/corpus.py identity_of)."""
        return self.manifest["identity"]

    @property
    def state(self) -> dict[str, Any]:
        """Return the positions of the streams in their data (data/mixture.py)."""
        return self.manifest["state"]

    @property
    def calibration(self) -> dict[str, Any]:
        """Return the run's estimated lengths in tokens (data/calibration.py)."""
        return self.manifest["calibration"]

    @property
    def engine(self) -> dict[str, Any]:
        """Return the DeepSpeed engine's ZeRO stage, precision and optimizer."""
        return self.manifest["engine"]


# Finding


def complete_steps(folder: Path) -> list[Path]:
    """Return the directories step_X in the folder that have a manifest, oldest first."""
    if not folder.is_dir():
        return []
    paths = sorted(folder.glob("step_*"))
    return [path for path in paths if NAME.fullmatch(path.name) and (path / MANIFEST).exists()]


def is_run(path: Path) -> bool:
    """Return True if `path` is a run or a checkpoint of xscale, False for a Hugging Face directory."""
    return (path / MANIFEST).exists() or (path / "checkpoints").is_dir()


def resolve_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest checkpoint of the run `path`. Raises UserError."""
    if (path / MANIFEST).exists():
        return path
    steps = complete_steps(path / "checkpoints") or complete_steps(path)
    if not steps:
        raise UserError(f"{path} is neither a checkpoint (no {MANIFEST}) nor a run with a complete checkpoint")
    return steps[-1]


def newest_valid(
    folder: Path, host_group: HostGroup, warn: Callable[[str], None], upto: float = math.inf
) -> Checkpoint | None:
    """Return the newest checkpoint up to step `upto` whose files match their hashes in the manifest, or None. All ranks
    call it together and get the same one. warn: called with a message for each damaged checkpoint."""
    for path in reversed(complete_steps(folder)):
        if step_of(path) > upto:
            continue
        problem = find_damage(path, host_group)
        if problem is None:
            return read_checkpoint(path)
        warn(f"checkpoint {path} is not usable ({problem}); trying the one before")
    return None


def step_of(path: Path) -> int:
    """Return the number in the name step_X."""
    return int(path.name.removeprefix("step_"))


def find_damage(path: Path, host_group: HostGroup) -> str | None:
    """Compare the checkpoint's files with their hashes, each file on one rank. Return a description of the damage, or
    None. All ranks call it together."""
    try:
        checkpoint = read_checkpoint(path)
    except UserError as error:
        return str(error)
    expected = checkpoint.manifest["files"]
    if NAME.fullmatch(path.name) and step_of(path) != checkpoint.step:
        return f"its {MANIFEST} belongs to step {checkpoint.step}, so it is a copy under another name"
    problems = list[str]()
    for name in sorted(expected)[host_group.rank :: host_group.size]:
        problem = file_problem(path / name, expected[name])
        if problem:
            problems.append(f"{name} {problem}")
    for file in sorted(path.glob("*.pt")) if host_group.is_main else ():
        if file.name not in expected:
            problems.append(f"{file.name} is not in its manifest")
    return "; ".join(chain.from_iterable(host_group.gather(problems))) or None


def file_problem(file: Path, expected: dict[str, Any]) -> str | None:
    """Return how a file differs from its entry in the manifest, or None."""
    if not file.exists():
        return "is missing"
    size = file.stat().st_size
    if size != expected["bytes"]:
        return f"has {size:,} bytes, not {expected['bytes']:,}"
    if files.sha256_file(file) != expected["sha256"]:
        return "differs from its hash"
    foreign = foreign_types(file) if file.suffix == ".pt" else []
    if foreign:
        return f"holds {', '.join(foreign)}, which no run of xscale writes and which may run code"
    return None


def foreign_types(path: Path) -> list[str]:
    """Return the types in a file of torch.save that are not known to be harmless. No code in the file is run."""
    try:
        types = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:
        return [f"content that cannot be read ({str(error).splitlines()[0][:80]})"]
    return sorted(set(types) - KNOWN_TYPES)


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a directory. Only the manifest is read. Raises UserError if it is absent or damaged."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        kinds = {"step": int, "world_size": int, OWN_HASH: str}
        kinds |= dict.fromkeys(("identity", "state", "calibration", "engine", "files"), dict)
        for key, kind in kinds.items():
            if type(manifest.get(key)) is not kind or manifest[key] == {}:
                raise ValueError(f"{key}: missing or malformed")
        if manifest_text(manifest) != manifest_text(manifest, manifest[OWN_HASH]):
            raise ValueError("it differs from its own hash")
        if manifest["state"].get("step") != manifest["step"]:
            raise ValueError("step: malformed")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a checkpoint: {MANIFEST} cannot be read ({error})") from None
    return Checkpoint(path, manifest)


# Publishing


def publish(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Turn the directory that all ranks have written into a checkpoint: write the manifest, rename the directory and
    write `latest`, in this order. Only rank 0 calls it."""
    files.write_text(partial / MANIFEST, manifest_text(manifest))
    files.remove(final)
    partial.rename(final)
    files.sync(final.parent)
    files.write_text(final.parent / "latest", final.name)


def manifest_text(manifest: dict[str, Any], digest: str | None = None) -> str:
    """Return the manifest as JSON, with a hash of its content, or with `digest` in the place of this hash."""
    content = {key: value for key, value in manifest.items() if key != OWN_HASH}
    digest = digest or hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, OWN_HASH: digest}, indent=1)


def sync_and_hash(path: Path) -> dict[str, Any]:
    """Sync a file to disk. Return its size and hash in the manifest's form."""
    files.sync(path)
    return {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)}


def remove_old(folder: Path, keep: int, needed_steps: set[int]) -> None:
    """Remove old checkpoints, and incomplete directories that a kill has left. The newest `keep` checkpoints are kept,
    and the checkpoints of the steps `needed_steps`."""
    for path in folder.glob(f"step_*{PARTIAL}"):
        files.remove(path)
    for path in complete_steps(folder)[:-keep]:
        if step_of(path) in needed_steps:
            continue
        # The rename comes first: a kill in the middle of rmtree must not leave half a checkpoint that looks whole.
        gone = path.with_name(path.name + PARTIAL)
        with suppress(OSError):  # the next save tries again
            path.rename(gone)
            files.remove(gone)
