"""Finds, checks, publishes and removes checkpoints on disk. A checkpoint is either complete or absent.

The ranks write their files into checkpoints/step_X.incomplete. Then rank 0 adds manifest.json (class Checkpoint),
renames the directory, and replaces the file `latest`. After a kill at any moment, the older checkpoints are complete.
An incomplete directory is removed by a later save.
"""

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from xscale import files
from xscale.deepspeed_private import KNOWN_TYPES
from xscale.errors import LOG, UserError
from xscale.files import PARTIAL
from xscale.ranks import CpuGroup

MANIFEST = "manifest.json"
LATEST = "latest"
BEST = "best"
OWN_HASH = "sha256"
"""The manifest's key for the hash of its other keys."""
HF = "hf"
"""The folder of a checkpoint with the model's Hugging Face config and the tokenizer."""
AUXILIARY_STATES = "companions.pt"
"""The file with the momentum encoders and queues, by stream. They are the same on all ranks, and rank 0 writes them."""
NAME = re.compile(r"step_\d{8,}")
"""Matches the name of a checkpoint's directory."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's directory and the content of its manifest."""

    path: Path
    step: int
    """The number of optimizer steps that the run had done."""
    world_size: int
    """The number of ranks that saved the checkpoint."""
    identity: dict[str, Any]
    """The values of the run that must be the same when it resumes (data/corpus.py run_identity)."""
    state: dict[str, Any]
    """The positions of the streams in their data (data/mixture.py)."""
    calibration: dict[str, Any]
    """The run's estimates of the tokens of samples (data/calibration.py)."""
    engine: dict[str, Any]
    """The DeepSpeed engine's ZeRO stage, precision and optimizer."""
    files: dict[str, dict[str, Any]]
    """The size and hash of each file, by its path in the directory."""
    sources: list[dict[str, Any]] = field(default_factory=list)
    """The sources that the run had read (data/mixture.py describe_sources_read)."""
    has_new_head: bool | None = None
    """True if the masked-LM head had random weights at the start of the run; None if an older version saved it."""


# Finding


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the directories step_X in the folder that have a manifest, oldest first."""
    return [path for path in sorted(folder.glob("step_*")) if NAME.fullmatch(path.name) and (path / MANIFEST).exists()]


def is_run_or_checkpoint(path: Path) -> bool:
    """Return True if `path` is a run or a checkpoint of xscale, False for a Hugging Face directory."""
    return (path / MANIFEST).exists() or (path / "checkpoints").is_dir() or (path / "status.json").exists()


def resolve_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, or the newest checkpoint of the run `path`. Raises UserError."""
    if (path / MANIFEST).exists():
        return path
    steps = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not steps and (path / "status.json").exists():
        raise UserError(
            f"the run {path} has no complete checkpoint (a folder checkpoints/step_N with the file {MANIFEST}). "
            f"{path / 'status.json'} says how the run ended. Start the run again, or use another run"
        )
    if not steps:
        raise UserError(
            f"{path} is not a checkpoint (a folder step_N with the file {MANIFEST}), and contains none. Use the "
            "folder of a run that has saved a checkpoint, or the folder of a checkpoint"
        )
    return steps[-1]


def find_newest_undamaged(folder: Path, cpu_group: CpuGroup) -> Checkpoint | None:
    """Return the newest checkpoint whose files have the hashes of its manifest, or None. All ranks call it together and
    get the same one."""
    for path in reversed(list_checkpoints(folder)):
        problem = find_damage(path, cpu_group)
        if problem is None:
            return read_checkpoint(path)
        LOG.warning(f"checkpoint {path} cannot be used. {problem}. xscale tries the next older checkpoint")
    return None


def read_undamaged_checkpoint(path: Path, cpu_group: CpuGroup) -> Checkpoint:
    """Return the checkpoint in a directory. Raises UserError if it is damaged. All ranks call it together."""
    if problem := find_damage(path, cpu_group):
        raise UserError(
            f"checkpoint {path} cannot be used. {problem}. Use another checkpoint, such as an earlier folder step_N in "
            f"{path.parent}"
        )
    return read_checkpoint(path)


def step_from_name(path: Path) -> int:
    """Return the step in the name of a checkpoint's directory."""
    return int(path.name.removeprefix("step_"))


def find_damage(path: Path, cpu_group: CpuGroup) -> str | None:
    """Compare a checkpoint's files with their hashes, and return a description of the damage, or None. Each file is
    read by one rank. All ranks call it together."""
    try:
        checkpoint = read_manifest(path / MANIFEST)
    except ValueError as error:
        return f"{MANIFEST}: {error}"
    if NAME.fullmatch(path.name) and step_from_name(path) != checkpoint.step:
        return f"{MANIFEST} says step {checkpoint.step}, so the folder was renamed or copied to another name"
    problems = list[str]()
    for name in sorted(checkpoint.files)[cpu_group.rank :: cpu_group.size]:
        problem = find_file_damage(path / name, checkpoint.files[name])
        if problem:
            problems.append(f"{name} {problem}")
    for file in sorted(path.glob("*.pt")) if cpu_group.is_main else ():
        if file.name not in checkpoint.files:
            problems.append(f"{file.name} is not listed in {MANIFEST}")
    return "; ".join(chain.from_iterable(cpu_group.all_gather(problems))) or None


def find_file_damage(file: Path, expected: dict[str, Any]) -> str | None:
    """Return a description of a file's difference from its entry in the manifest, or None. expected: the entry."""
    if not file.exists():
        return "is missing"
    size = file.stat().st_size
    if size != expected["bytes"]:
        return f"has {size:,} bytes instead of {expected['bytes']:,}"
    if files.sha256_file(file) != expected["sha256"]:
        return f"does not have the SHA-256 that {MANIFEST} lists"
    return find_unsafe_content(file) if file.suffix == ".pt" else None


def find_unsafe_content(path: Path) -> str | None:
    """Return a description of what xscale does not load in a file of torch.save, or None. No code of the file is
    run."""
    try:
        types = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:
        return f"cannot be read as a file of torch.save ({str(error).splitlines()[0][:80]})"
    foreign = sorted(set(types) - KNOWN_TYPES)
    if foreign:
        return f"has the Python types {', '.join(foreign)}, which xscale does not load, because loading may run code"
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a directory. Only the manifest is read. Raises UserError if it is absent or damaged."""
    try:
        return read_manifest(folder / MANIFEST)
    except ValueError as error:
        raise UserError(
            f"{folder} is not a usable checkpoint. {folder / MANIFEST}: {error}. Use another checkpoint, such as an "
            f"earlier folder step_N in {folder.parent}"
        ) from None


def read_manifest(manifest_path: Path) -> Checkpoint:
    """Return the checkpoint whose manifest is this file. Raises ValueError with the problem."""
    if manifest_path.is_fifo():
        raise ValueError("the file is a named pipe")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the content cannot be read ({error})") from None
    if not isinstance(manifest, dict) or manifest_hash(manifest) != manifest.pop(OWN_HASH, None):
        raise ValueError(f"the content does not have the SHA-256 in the key `{OWN_HASH}`, so the content was changed")
    kinds = dict.fromkeys(("identity", "state", "calibration", "engine", "files"), dict)
    for key, kind in {"step": int, "world_size": int, **kinds}.items():
        if type(manifest.get(key)) is not kind or manifest[key] == {}:
            raise ValueError(f"the key `{key}` is missing or has a wrong type")
    for key in sorted(manifest.keys() - Checkpoint.__dataclass_fields__.keys()):
        if manifest.pop(key):  # version 0.2 wrote `excluded_steps`, which is empty unless the run rolled back
            raise ValueError(
                f"the key `{key}` shows that another version of xscale wrote the checkpoint. Only that version can "
                "continue the run from this checkpoint or export it. The file run.log of the run names the version"
            )
    return Checkpoint(manifest_path.parent, **manifest)


# Publishing


def publish_as_latest_checkpoint(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Complete the checkpoint that all ranks have written: write the manifest, rename the directory `partial` to
    `final`, and write `latest`, in this order. Only rank 0 calls it."""
    files.write_text(partial / MANIFEST, manifest_json_with_hash(manifest))
    files.remove(final)
    partial.rename(final)
    files.fsync_file_or_directory(final.parent)
    files.write_text(final.parent / LATEST, final.name)


def manifest_json_with_hash(manifest: dict[str, Any]) -> str:
    """Return the manifest as JSON, with its own hash."""
    return json.dumps(manifest | {OWN_HASH: manifest_hash(manifest)}, indent=1)


def manifest_hash(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content, without the entry of the hash itself."""
    content = {key: value for key, value in manifest.items() if key != OWN_HASH}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def sync_and_hash(path: Path) -> dict[str, Any]:
    """Sync a file to disk, and return its entry in the manifest."""
    files.fsync_file_or_directory(path)
    return {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)}


def remove_partial_and_old_checkpoints(folder: Path, keep: int, needed_steps: set[int]) -> None:
    """Remove incomplete directories, and all checkpoints but the newest `keep` and those of `needed_steps`."""
    for path in folder.glob(f"step_*{PARTIAL}"):
        files.remove(path)
    for path in list_checkpoints(folder)[:-keep]:
        if step_from_name(path) in needed_steps:
            continue
        # A renamed directory is no checkpoint any more, if a kill leaves half of its files.
        removed = path.with_name(path.name + PARTIAL)
        with suppress(OSError):  # the next save tries again
            path.rename(removed)
            files.remove(removed)
