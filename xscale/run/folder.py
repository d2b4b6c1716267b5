"""A run's directory records which run owns it, and the run's status.

status.json also has the exit code, because some launchers return another one:

    {"status": "stopped", "code": 75, "why": "SIGUSR2", "step": 120, "rank": 0, "time": "2026-01-31T12:00:00+00:00"}

`status` is running, done, stopped or failed. If it is "running" but the run has no process, the run was killed.
"""

import errno
import fcntl
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xscale import files
from xscale.checkpoint import store as checkpoints
from xscale.errors import ENVIRONMENT_ERRNOS, DirectoryTaken, MachineError, NotFinite, UserError, indent_lines, redact
from xscale.objectives import OBJECTIVES
from xscale.ranks import Process
from xscale.recipe import SECTIONS, StreamConfig, default_values
from xscale.run.metrics import LOG

IDENTITY, STARTS, STATUS = "identity.json", "starts.jsonl", "status.json"
FOREIGN = ("config.yaml", "metrics.jsonl", "checkpoints", "index.json", "*/index.json", "config.json", "tokenizer.json")
"""A folder that has one of these and no identity.json is not a run of xscale, but another trainer's run, shards, a
model or a tokenizer."""

# The run that owns a directory


def check_folder(out: Path, identity: dict[str, Any], resume: str) -> None:
    """Raise UserError unless directory `out` is free or belongs to this run."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; choose another")
    path = out / IDENTITY
    log = out / "metrics.jsonl"
    begun = any(out.glob("checkpoints/step_*")) or (log.exists() and log.stat().st_size > 0)
    saved = read_identity(out) if begun else None  # a start that failed before its first step does not own the folder
    if saved is None and not path.exists() and any(next(out.glob(name), None) for name in FOREIGN):
        raise UserError(f"{out} holds something that is not an xscale run (no identity.json); choose another --out")
    if resume == "never" and begun and (saved or path.exists()):
        raise UserError(f"{out} already holds a run; --resume auto continues it, or choose another --out")
    if saved and (differences := identity_differences(saved, identity)):
        raise UserError(
            f"{out} belongs to another run. Start with that run's settings, or choose another --out; with --set "
            f"model.init={out}, the new run starts from that run's weights. The settings that differ:\n"
            + indent_lines(differences)
        )


def read_identity(out: Path) -> dict[str, Any] | None:
    """Return the identity of the run in a directory, from identity.json, or else from the newest readable
    checkpoint."""
    with suppress(OSError, ValueError):
        saved = json.loads((out / IDENTITY).read_text(encoding="utf-8"))
        if isinstance(saved, dict) and saved:
            return saved
    for path in reversed(checkpoints.list_checkpoints(out / "checkpoints")):
        with suppress(UserError):
            return checkpoints.read_checkpoint(path).identity
    return None


def may_write_status(out: Path) -> bool:
    """Return whether the directory is new, or belongs to a run that no process has locked. If so, a start that has
    failed before it had the lock may write its status there."""
    if not out.exists():
        return True
    if not out.is_dir() or not ((out / IDENTITY).exists() or (out / STATUS).exists() or not any(out.iterdir())):
        return False
    try:
        with (out / files.LOCK).open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def append_start(out: Path, step: int, ranks: int) -> None:
    """Add a line to starts.jsonl, with the step, git commit, host and command of this start. Rank 0 only."""
    entry = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "ranks": ranks,
        "host": os.uname().nodename,
        "job": os.environ.get("SLURM_JOB_ID"),
        "command": list(map(redact, sys.argv)),
        "revision": code_revision(),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
    }
    with (out / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def code_revision() -> str | None:
    """Return the checkout's commit, with "-dirty" if files differ from it; None outside of git."""
    root = Path(__file__).resolve().parents[2]
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return None


def identity_differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return a line for every difference between two identities of runs. If one of them lacks a field of the recipe,
    because another version of xscale wrote it, the field has its default there."""
    return list_differences(add_default_fields(saved), add_default_fields(current))


def add_default_fields(identity: dict[str, Any]) -> dict[str, Any]:
    if "recipe" not in identity:
        return identity
    recipe = dict(identity["recipe"])
    for section, cls in SECTIONS.items():
        recipe[section] = default_values(cls) | recipe.get(section, {})
    streams = dict[str, Any]()
    for name, stream in recipe.get("streams", {}).items():
        streams[name] = default_values(StreamConfig) | stream
        if stream.get("objective") in OBJECTIVES:
            streams[name] = default_values(OBJECTIVES[stream["objective"]].options) | streams[name]
    return identity | {"recipe": recipe | {"streams": streams}}


def list_differences(saved: Any, current: Any, where: str = "", form: str = "was {}, is now {}") -> list[str]:
    """Return a line `field: was X, is now Y` for every difference between two nested dictionaries."""
    if not isinstance(saved, dict) or not isinstance(current, dict):
        return [] if saved == current else [f"{where}: {form.format(saved, current)}"]
    lines = list[str]()
    for key in saved | current:
        place = f"{where}.{key}" if where else str(key)
        lines += list_differences(saved.get(key), current.get(key), place, form)
    return lines


def to_json_text(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2) + "\n"


# The status of a run

DONE, FAULT, USER_ERROR, NOT_FINITE, MACHINE, STUCK, STOPPED = 0, 1, 2, 3, 4, 5, 75
"""The exit codes. STOPPED: the run was asked to stop and ended early; another start continues it."""
NAMES = {DONE: "done", STOPPED: "stopped"}
"""The status by exit code. With any other code, the status is "failed"."""
LOST_RANK = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "another rank of this node")
NO_MEMORY = ("can't allocate memory", "out of memory")
"""Phrases in errors of torch, CUDA and NCCL about a lack of memory for which there is no exception class."""
KILLED = ("killed by signal: Killed", "killed by signal: Bus error")
"""Phrases that identify errors of torch and of data/loader.py about a killed worker or planner process."""


def exit_code_and_message(error: Exception) -> tuple[int, str]:
    """Return the exit code of an error, and its message, with a remedy if a user or a machine has caused the error."""
    text = str(error)
    first = (text or type(error).__name__).splitlines()[0]
    if isinstance(error, MachineError):  # the message, which may be another rank's, already names the remedy
        return MACHINE, text
    if isinstance(error, UserError):
        return USER_ERROR, text
    if isinstance(error, NotFinite):
        return NOT_FINITE, text
    if is_out_of_memory(error):
        return USER_ERROR, (
            f"out of memory ({first}); lower train.max_tokens, which a run may change from start to start, or take "
            f"train.activation_checkpointing, a higher ZeRO stage or more ranks; --dry_run tells what each needs"
        )
    if said := killed_process_line(error):
        return MACHINE, (
            f"{said.rstrip('. ')}: the machine's memory may have run out (see dmesg or the job's accounting); "
            f"ask for more memory, or set a lower data.workers, and start again: the run continues"
        )
    if is_lost_rank(error):
        return MACHINE, (
            f"another rank has ended; status.json or its log says why ({first}). Start again: the run continues"
        )
    if isinstance(error, OSError) and error.errno in ENVIRONMENT_ERRNOS:
        return MACHINE, f"{error.filename or 'a file'}: {error.strerror}; fix that and start again: the run continues"
    if isinstance(error, dist.DistNetworkError):
        advice = "if another run uses the port, give --master_port N to the launcher, or set MASTER_PORT"
        return MACHINE, f"the ranks cannot meet: {first}; {advice}"
    return FAULT, "; ".join([*getattr(error, "__notes__", []), f"{type(error).__name__}: {error}"])


def is_lost_rank(error: Exception) -> bool:
    """Return whether a collective failed because another rank ended: by the class with NCCL, by the text with gloo."""
    return isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in LOST_RANK)


def killed_process_line(error: Exception) -> str:
    """Return the error's first line if it says that a process of the loader was killed, otherwise an empty string."""
    for exception in (error, error.__cause__, error.__context__):
        text = str(exception)
        if any(sign in text for sign in KILLED):
            return text.splitlines()[0]
    return ""


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, UserError | MachineError | OSError):
        return isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in NO_MEMORY)


class Status:
    """The writer of status.json. Rank 0 writes the run's status, and the first rank that fails writes the reason."""

    def __init__(self, out: Path, process: Process):
        self.out = out
        self.process = process
        self.has_lock: bool | None = None
        """True if this run has the directory's lock, False if it asked for the lock and did not get it, None before it
        asks."""
        self.step: int | None = None
        """The number of steps done."""

    def note_step(self, step: int) -> None:
        """Note the number of steps done."""
        self.step = step

    def asks_for_lock(self) -> None:
        """Note that this run asks for the directory's lock. It has the lock once `write_running` is called."""
        self.has_lock = False

    def write_running(self) -> None:
        """Note that this run has the directory's lock. All ranks call it."""
        self.has_lock = True
        if self.process.is_main:
            self._write("running", None, "")

    def write_end(self, code: int, why: str) -> None:
        """Write why the run ends. If this rank fails while the run has the lock, and another rank has written a reason,
        that reason stays."""
        if code not in NAMES and self.has_lock:
            self.write_first_failure(code, why)
        elif self.process.is_main:
            self._write_reason(code, why)

    def write_first_failure(self, code: int, why: str) -> None:
        """Write why this rank ends, unless another rank has already written why it ended."""
        with suppress(OSError, ValueError, LookupError, TypeError):
            if json.loads((self.out / STATUS).read_text(encoding="utf-8"))["status"] == "running":
                self._write_reason(code, why)

    def _write_reason(self, code: int, why: str) -> None:
        try:
            self._write(NAMES.get(code, "failed"), code, why)
        except OSError as error:  # such as a full disk
            LOG.warning(f"{self.out / STATUS} cannot be written ({error.strerror})")

    @contextmanager
    def recording_failures(self) -> Iterator[None]:
        """Log an exception of the `with` block, write it to status.json if `out` belongs to this run, and re-raise
        it."""
        try:
            yield
        except Exception as error:
            LOG.debug(traceback.format_exc())
            may_write = self.has_lock or (self.has_lock is None and self.process.is_main and may_write_status(self.out))
            if may_write and not isinstance(error, DirectoryTaken):
                self.write_end(*exit_code_and_message(error))
            raise

    def _write(self, status: str, code: int | None, why: str) -> None:
        entry = {"status": status, "code": code, "why": redact(why), "step": self.step, "rank": self.process.rank}
        entry["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        partial = self.out / f"{STATUS}.{self.process.rank}"  # two ranks may fail at once
        files.write_text(partial, to_json_text(entry))
        os.replace(partial, self.out / STATUS)
