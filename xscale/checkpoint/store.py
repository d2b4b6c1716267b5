"""Checkpoints that are complete or absent.

What DeepSpeed would write goes into checkpoints/step_X.incomplete; every rank writes and hashes its own files, in the
background; when all have, rank 0 writes manifest.json (files, sizes, hashes, the run's identity, the stream's state),
then renames the directory and replaces `latest`. A kill at any moment leaves the older checkpoints and at most a
directory that a later save removes.
"""

import errno
import hashlib
import json
import math
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xscale import files
from xscale.deepspeed_private import KNOWN_TYPES, copy_script
from xscale.errors import UserError
from xscale.files import PARTIAL
from xscale.ranks import HostGroup

MANIFEST = "manifest.json"
OWN_HASH = "sha256"
"""Of the manifest but for itself; not in checkpoints from before it was noted."""
HF = "hf"
"""Folder of a checkpoint that holds the model's Hugging Face config and the tokenizer."""
AUXILIARY_STATES = "companions.pt"
"""Momentum encoders, queues and the like, by stream; the same on every rank, so one file."""
NAME = re.compile(r"step_\d{8,}")
SPARE_BYTES = 1 << 28
"""Free disk space that must be left after a save."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory and its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest["step"]

    @property
    def ranks(self) -> int:
        """How many saved it."""
        return self.manifest["world_size"]

    @property
    def identity(self) -> dict[str, Any]:
        """Of the run (Job.identity)."""
        return self.manifest["identity"]

    @property
    def state(self) -> dict[str, Any]:
        """What the streams have consumed (data/mixture.py)."""
        return self.manifest["state"]

    @property
    def excluded_steps(self) -> list[int]:
        """Steps that have changed nothing, since the run was not finite with them."""
        return self.manifest.get("excluded_steps", self.manifest.get("condemned", []))

    @property
    def calibration(self) -> dict[str, Any] | None:
        """Estimates of the run (data/calibration.py); None in checkpoints from before there were any."""
        return self.manifest.get("calibration")

    @property
    def engine(self) -> dict[str, Any] | None:
        """ZeRO's stage and the precision; None in older checkpoints."""
        return self.manifest.get("engine")


# Finding


def complete_steps(folder: Path) -> list[Path]:
    """Directories step_X with a manifest, oldest first; not copies of other names."""
    found = folder.glob("step_*") if folder.is_dir() else []
    return sorted(path for path in found if NAME.fullmatch(path.name) and (path / MANIFEST).exists())


def is_run(path: Path) -> bool:
    """Whether `path` is a run or a checkpoint of ours rather than a Hugging Face directory."""
    return (path / MANIFEST).exists() or (path / "checkpoints").is_dir()


def find(path: Path) -> Path:
    """The checkpoint directory that `path` is, or the newest complete one of the run that it is."""
    if (path / MANIFEST).exists():
        return path
    steps = complete_steps(path / "checkpoints") or complete_steps(path)
    if not steps:
        raise UserError(f"{path} is neither a checkpoint (no {MANIFEST}) nor a run with a complete one")
    return steps[-1]


def newest_valid(folder: Path, host_group: HostGroup, say: Any, upto: float = math.inf) -> Checkpoint | None:
    """The newest checkpoint, of no later step than `upto`, whose files are all there with the right hashes, agreed by
    all ranks."""
    for path in reversed([path for path in complete_steps(folder) if int(path.name[len("step_") :]) <= upto]):
        problem = verify(path, host_group)
        if problem is None:
            return read(path)
        say(f"checkpoint {path} is not usable ({problem}); trying the one before")
    return None


def verify(path: Path, host_group: HostGroup) -> str | None:
    """Hash the checkpoint's files, split over the ranks. Returns what is wrong, or None."""
    try:
        checkpoint = read(path)
    except UserError as error:
        return str(error)
    expected = checkpoint.manifest["files"]
    if NAME.fullmatch(path.name) and int(path.name.removeprefix("step_")) != checkpoint.step:
        return f"its {MANIFEST} is of step {checkpoint.step}: a copy under another name"
    problems = []
    for name in sorted(expected)[host_group.rank :: host_group.size]:
        if not (path / name).exists():
            problems.append(f"{name} is missing")
        elif (path / name).stat().st_size != expected[name]["bytes"]:
            problems.append(f"{name} has {(path / name).stat().st_size:,} bytes, not {expected[name]['bytes']:,}")
        elif files.sha256_file(path / name) != expected[name]["sha256"]:
            problems.append(f"{name} differs from its hash")
        elif name.endswith(".pt") and (foreign := foreign_types(path / name)):
            problems.append(f"{name} holds {', '.join(foreign)}, which no run of xscale writes and which may run code")
    loose = sorted(file.name for file in path.glob("*.pt") if file.name not in expected) if host_group.is_main else []
    problems += [f"{name} is not in its manifest" for name in loose]
    found = [problem for part in host_group.gather(problems) for problem in part]
    return "; ".join(found) or None


def foreign_types(path: Path) -> list[str]:
    """Names that a file of torch.save refers to, outside of those that are known. Nothing of it is run."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:
        return [f"what cannot be read ({str(error).splitlines()[0][:80]})"]
    return sorted(set(found) - KNOWN_TYPES)


def refuse_foreign(written: list[Path]) -> None:
    """Raises UserError for files that a resume would refuse: DeepSpeed may write other types one day."""
    for path in written:
        if foreign := foreign_types(path):
            import deepspeed

            raise UserError(
                f"{path.name} holds {', '.join(foreign)}, which a resume would refuse: DeepSpeed "
                f"{deepspeed.__version__} writes other types than xscale knows. Install the version that "
                f"constraints.txt names"
            )


def read(path: Path) -> Checkpoint:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        kinds = {"step": int, "world_size": int, "identity": dict, "state": dict, "files": dict}
        wrong = [key for key, kind in kinds.items() if type(manifest.get(key)) is not kind or manifest[key] == {}]
        wrong += [name for name, file in manifest["files"].items() if not {"bytes", "sha256"} <= set(file)]
        if OWN_HASH in manifest and sealed_manifest(manifest) != sealed_manifest(manifest, manifest[OWN_HASH]):
            raise ValueError("it differs from its own hash")
        if wrong or manifest["state"].get("step") != manifest["step"]:
            raise ValueError(f"without a sound {', '.join(wrong) or 'step'}")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a checkpoint: {MANIFEST} cannot be read ({error})") from None
    return Checkpoint(path, manifest)


# Saving


class Saver:
    """Saves an engine, one checkpoint at a time, in two parts that all ranks do together.

    `begin` takes what is to be saved, and a thread of each rank writes, forces to disk and hashes its files. `finish`
    waits for all of them and publishes the checkpoint, if no rank failed.
    """

    def __init__(self, engine: Any, folder: Path, host_group: HostGroup):
        self.engine, self.folder, self.host_group = engine, folder, host_group
        self.step: int | None = None
        """Of the checkpoint under way."""
        self.kept: dict[str, Any] = {}
        self.thread: threading.Thread | None = None
        self.problem: Exception | None = None
        """Of this rank."""
        self.sealed: dict[str, Any] = {}
        self.seconds = 0.0
        """That this rank's writing took."""

    @property
    def final(self) -> Path:
        return self.folder / f"step_{self.step:08d}"

    @property
    def partial(self) -> Path:
        return files.beside(self.final)

    @property
    def written(self) -> bool:
        """Whether `finish` would not wait for this rank."""
        return self.step is not None and not (self.thread and self.thread.is_alive())

    def begin(self, step: int, kept: dict[str, Any], write_more: Callable[[Path], None], copies: bool) -> None:
        """kept: what else the manifest says, such as the stream's state. write_more: rank 0's further files.

        copies: a thread writes a copy in host memory, so that training may go on; else it is all written on return.
        """
        from xscale.checkpoint.snapshot import snapshot  # DeepSpeed, which this module's other readers do without

        assert self.step is None
        self.step, self.kept, self.sealed, self.thread, self.seconds = step, kept, {}, None, 0.0
        self.problem = self._make_room() if self.host_group.is_main else None
        if not self.host_group.agree(self.problem is None):
            return
        snapshot_engine = snapshot(self.engine, self.partial, copies)
        auxiliary_states = self.engine.module.auxiliary_states
        if self.host_group.is_main and auxiliary_states:
            snapshot_engine.save(
                {name: auxiliary_state.state_dict() for name, auxiliary_state in auxiliary_states.items()},
                AUXILIARY_STATES,
            )
        if snapshot_engine.problem:
            self.problem = OSError(
                errno.ENOMEM, f"{snapshot_engine.problem}; checkpoint.background=false takes no copy"
            )
            return
        more = [write_more, self._copy_scripts] if self.host_group.is_main else []
        if copies:
            self.thread = threading.Thread(
                target=self._write, args=(snapshot_engine.taken, more), name="checkpoint", daemon=True
            )
            self.thread.start()
        else:
            self._write(snapshot_engine.taken, more)

    def _make_room(self) -> OSError | None:
        """An empty directory, and disk space. Rank 0 only."""
        parameters = sum(p.numel() for p in self.engine.module.parameters())
        needed = 16 * parameters + self.engine.module.auxiliary_bytes() + SPARE_BYTES
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.remove(self.partial)
            free = shutil.disk_usage(self.folder).free
            if free <= needed:
                return OSError(errno.ENOSPC, f"{free / 2**30:.1f} GB are free, {needed / 2**30:.1f} GB needed")
            self.partial.mkdir()
        except OSError as error:
            return error
        return None

    def _write(self, states: dict[str, Any], more: list[Callable[[Path], None]]) -> None:
        """This rank's files."""
        started = time.monotonic()
        try:
            names = list(states)
            for name in names:
                write_state(states.pop(name), self.partial / name)
            for write in more:
                write(self.partial)
            names += [str(path.relative_to(self.partial)) for path in self.partial.glob(f"{HF}/*")] if more else []
            refuse_foreign([self.partial / name for name in names if name.endswith(".pt")])
            self.sealed = {name: _seal(self.partial / name) for name in names}
        except Exception as error:
            self.problem = _cause(error)
        self.seconds = time.monotonic() - started

    def _copy_scripts(self, partial: Path) -> None:
        """DeepSpeed's zero_to_fp32.py, beside the checkpoints."""
        copy_script(self.engine, self.folder)

    def finish(self) -> tuple[str, float]:
        """Returns what went wrong ("": nothing), and the longest time that a rank has written.

        Where something did, nothing of the checkpoint stays, and older ones are untouched.
        """
        if self.thread:
            self.thread.join()
        if self.problem and not isinstance(self.problem, OSError | UserError):
            raise self.problem
        parts = self.host_group.gather((self.problem, self.sealed, self.seconds))
        problem = "; ".join(f"rank {rank}: {part[0]}" for rank, part in enumerate(parts) if part[0])
        if self.host_group.is_main:
            try:
                if not problem:
                    self._publish({name: entry for part in parts for name, entry in part[1].items()})
            except OSError as error:
                problem = f"rank 0: {error}"
            if problem:
                files.remove(self.partial)
        problem = self.host_group.gather(problem)[0]
        self.step, self.thread = None, None
        if refused := next((part[0] for part in parts if isinstance(part[0], UserError)), None):
            raise refused
        return problem, max(part[2] for part in parts)

    def _publish(self, sealed: dict[str, Any]) -> None:
        """The manifest, the rename, `latest`. Rank 0 only."""
        manifest = {
            "step": self.step,
            "world_size": self.host_group.size,
            **self.kept,
            "files": dict(sorted(sealed.items())),
        }
        files.write_text(self.partial / MANIFEST, sealed_manifest(manifest))
        files.remove(self.final)
        self.partial.rename(self.final)
        files.sync(self.folder)
        files.write_text(self.folder / "latest", self.final.name)


def write_state(state: Any, path: Path) -> None:
    """By a file of Python's: a full disk is an OSError then, and no RuntimeError of unknown cause."""
    with path.open("wb") as file:
        torch.save(state, file)


def _cause(error: Exception) -> Exception:
    """The OSError behind it: torch raises its own over that of a failed write."""
    at: BaseException | None = error
    while at and not isinstance(at, OSError):
        at = at.__cause__ or at.__context__
    return at if isinstance(at, OSError) else error


def sealed_manifest(manifest: dict[str, Any], digest: str | None = None) -> str:
    """Its text, with a hash of all else that it says."""
    content = {key: value for key, value in manifest.items() if key != OWN_HASH}
    digest = digest or hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, OWN_HASH: digest}, indent=1)


def _seal(path: Path) -> dict[str, Any]:
    """Force a file to disk and describe it."""
    files.sync(path)
    return {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)}


def clean(folder: Path, keep: int, needed: set[int]) -> None:
    """Remove what a kill left behind and all but the newest `keep` checkpoints and those of the steps `needed`."""
    for path in folder.glob(f"step_*{PARTIAL}"):
        files.remove(path)
    kept = {f"step_{step:08d}" for step in needed}
    for path in (path for path in complete_steps(folder)[:-keep] if path.name not in kept):
        # Unmake it first: a kill in the middle of rmtree must not leave half a checkpoint that looks whole.
        gone = path.with_name(path.name + PARTIAL)
        with suppress(OSError):  # the next save tries again
            path.rename(gone)
            files.remove(gone)


# Loading


def load(engine: Any, checkpoint: Checkpoint, host_group: HostGroup) -> None:
    """Weights, optimizer, loss scale and schedule. The step and the stream's state are in the manifest.

    One of another number of ranks, or another ZeRO stage, is read by parameter (checkpoint/reshard.py).
    """
    from xscale.checkpoint.reshard import load_rescaled

    path, stage = checkpoint.path, engine.zero_optimization_stage()
    before = checkpoint.engine["stage"] if checkpoint.engine else stage
    if (checkpoint.ranks, before) != (host_group.size, stage):
        load_rescaled(engine, path)
    elif engine.load_checkpoint(str(path.parent), tag=path.name)[0] is None:
        raise UserError(f"{path}: DeepSpeed found nothing to load there")
    assert engine.global_steps == checkpoint.step, (engine.global_steps, checkpoint.step)
    for name, state in _saved_auxiliary(checkpoint).items():
        engine.module.auxiliary_states[name].load_state_dict(state)
    host_group.barrier()


def _saved_auxiliary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Saved companion states by stream."""
    path = checkpoint.path / AUXILIARY_STATES
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}
