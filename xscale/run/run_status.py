"""A run's directory records which run owns it, and the run's status.

status.json also has the exit code, because some launchers return another one:

    {"status": "stopped", "code": 75, "why": "SIGUSR2", "step": 120, "rank": 0, "time": "2026-01-31T12:00:00+00:00"}

`status` is running, done, stopped or failed. If it is "running" but the run has no process, the run was killed.
"""

import errno
import faulthandler
import fcntl
import json
import logging
import os
import signal
import sys
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xscale import files
from xscale.checkpoint import store as checkpoints
from xscale.errors import (
    ENVIRONMENT_ERRNOS,
    LOG,
    DirectoryTaken,
    ExitCode,
    MachineError,
    NotFinite,
    UserError,
    indent_lines,
    redact,
    redact_and_escape,
)
from xscale.objectives import OBJECTIVES
from xscale.ranks import Process
from xscale.recipe import SECTIONS, StreamConfig, default_values

STATUS = "status.json"
FOREIGN = (
    *("config.yaml", "metrics.jsonl", "checkpoints", "index.json", "*/index.json", "config.json", "tokenizer.json"),
    checkpoints.MANIFEST,
)
"""A folder that has one of these, no status.json and no checkpoint of xscale is another trainer's run, shards, a model,
a tokenizer, or itself a checkpoint."""

# The run that owns a directory


def check_folder_is_free_or_own(out: Path, identity: dict[str, Any], resume: str) -> None:
    """Raise UserError or DirectoryTaken unless directory `out` is free or belongs to this run."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file. Choose a folder")
    saved = identity_from_checkpoints(out)
    is_run = saved is not None or (out / STATUS).exists()
    if not is_run and any(next(out.glob(name), None) for name in FOREIGN):
        raise DirectoryTaken(
            f"--out {out} has files, but is not a run of xscale, because {STATUS} and checkpoints of xscale are "
            "missing. Choose another --out"
        )
    for path in (*out.glob("*"), *out.glob("*/*")):
        if path.is_fifo():  # to open it would wait forever
            raise DirectoryTaken(f"{path} is a named pipe instead of a file. Remove {path}, or choose another --out")
    log = out / "metrics.jsonl"
    if resume == "never" and (saved or (log.exists() and log.stat().st_size > 0)):
        raise DirectoryTaken(
            f"--out {out} already has a run, and `--resume never` can only start a new run. Write `--resume auto` to "
            f"continue the run in {out}, or choose another --out"
        )
    if saved and (differences := identity_differences(saved, identity)):
        raise DirectoryTaken(
            f"--out {out} has a run with other settings than this command. To continue the run in {out}, start with "
            f"the settings of that run. To start a new run, choose another --out; with --set model.init={out}, the new "
            f"run starts from the weights of the run in {out}. These settings differ:\n" + indent_lines(differences)
        )


def identity_from_checkpoints(out: Path) -> dict[str, Any] | None:
    """Return the identity of the run in a directory, from its newest readable checkpoint; None if there is no such
    checkpoint."""
    for path in reversed(checkpoints.list_checkpoints(out / "checkpoints")):
        with suppress(UserError):
            return checkpoints.read_checkpoint(path).identity
    return None


def read_status(out: Path) -> dict[str, Any]:
    """Return the content of the directory's status.json; {} if there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        entry = json.loads((out / STATUS).read_text(encoding="utf-8"))
        if isinstance(entry, dict):
            return entry
    return {}


def is_new_or_unlocked_unfinished_run(out: Path) -> bool:
    """Return whether the directory is new, or belongs to a run that is not done and that no process has locked. If so,
    a start that has failed before it had the lock may write its status there."""
    try:
        if not out.exists():
            return True
        is_run = (out / STATUS).is_file() or not any(out.iterdir())
        if not is_run or read_status(out).get("status") == NAMES[DONE]:
            return False
        with (out / files.LOCK).open("a+") as file:  # "a" would wait forever for the reader of a named pipe
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # also a file, a name that is too long, or a folder of another user
        return error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # a file system without locks
    return True


def identity_differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return a line for every difference between two identities of runs. If one of them lacks a field of the recipe,
    because another version of xscale wrote it, the field has its default there."""
    return list_differences(with_default_fields(saved), with_default_fields(current))


def with_default_fields(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the identity with the default of each field of the recipe that it lacks."""
    recipe = dict(identity.get("recipe", {}))
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


# The logs of a run


def start_logging(out: Path, rank: int) -> Path:
    """Log to logs/rankN.log and the console, which shows only the warnings of ranks other than 0. Rank 0 also logs to
    run.log. Returns the path of logs/rankN.log."""
    LOG.setLevel(logging.DEBUG)  # tracebacks, in the files alone
    LOG.propagate = False
    logging.raiseExceptions = False  # lines that cannot be written, as on a full disk, are dropped
    LOG.handlers.clear()
    (out / "logs").mkdir(exist_ok=True)
    path = out / "logs" / f"rank{rank}.log"
    console: logging.Handler = logging.StreamHandler(sys.stdout)
    console.setLevel(logging.WARNING if rank else logging.INFO)
    handlers = [console, logging.FileHandler(path, encoding="utf-8")]
    if rank == 0:
        handlers.append(logging.FileHandler(out / "run.log", encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(_Printable("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
        LOG.addHandler(handler)
    stacks = path.open("a")
    faulthandler.enable(stacks)  # a crash writes its stacks to the same file
    faulthandler.register(signal.SIGUSR1, stacks)  # the processes of the loader inherit this setting
    LOG.info(f"rank {rank}: host {os.uname().nodename}, process {os.getpid()}")
    return path


class _Printable(logging.Formatter):
    """A formatter that escapes control characters, which names of files and records may have."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_and_escape(super().format(record))


# The status of a run

DONE, FAULT, USER_ERROR, NOT_FINITE, MACHINE, STUCK, STOPPED = 0, 1, 2, 3, 4, 5, 75
"""The exit codes. STOPPED: the run was asked to stop and ended early; another start continues it."""
NAMES = {DONE: "done", STOPPED: "stopped"}
"""The status by exit code. With any other code, the status is "failed"."""
LOST_RANK = "another rank has ended"
CAUSES = (
    (
        ("Unable to find address for",),
        USER_ERROR,
        "gloo cannot use a network interface ({}). Set the environment variable GLOO_SOCKET_IFNAME to an interface of "
        "this host that `ip link` lists, or unset GLOO_SOCKET_IFNAME",
    ),
    (
        ("out of memory", "can't allocate memory", "Cannot allocate memory", "MemoryError"),
        USER_ERROR,
        "out of memory ({}). Lower train.max_tokens, use a ds_config with a higher ZeRO stage, or use more ranks. A "
        "run that you resume may change all three. `xscale train --dry_run` prints the memory that a rank needs",
    ),
    (
        ("killed by signal: Killed", "killed by signal: Bus error"),
        MACHINE,
        "the machine may have run out of memory ({}); `dmesg`, or `sacct` under SLURM, may show whether it did. "
        "Request more memory or lower data.workers, then start the run again: the run continues",
    ),
    (
        (
            *("Connection closed by peer", "Connection reset by peer", "gloo/transport", "DistBackendError"),
            "another rank of this node",
        ),
        MACHINE,
        LOST_RANK
        + " ({}). The log of that rank, logs/rankN.log, ends with the reason, unless the rank was killed. If the "
        "reason is an error in the settings or the data, correct the error. Then start the run again: the run "
        "continues",
    ),
    (
        ("Address already in use", "EADDRINUSE"),
        MACHINE,
        "the ranks cannot connect to each other, because another program uses the port: {}. Choose another port by the "
        "launcher's flag --master_port N or by the environment variable MASTER_PORT",
    ),
    (
        ("DistNetworkError",),
        MACHINE,
        "the ranks cannot connect to each other: {}. Set MASTER_ADDR to the host of rank 0, and MASTER_PORT to a port "
        "of this host that all hosts can reach",
    ),
)
"""Phrases in errors of torch, CUDA, NCCL, gloo and the loader, or names of their classes; the exit code; and the
message, in which {} stands for the error's first line."""


def exit_code_and_message(error: Exception) -> tuple[ExitCode, str]:
    """Return the exit code of an error, and its message, with a remedy if a user or a machine has caused the error."""
    if isinstance(error, MachineError):  # the message, which may be another rank's, already names the remedy
        return MACHINE, str(error)
    if isinstance(error, UserError):
        return USER_ERROR, str(error)
    if isinstance(error, NotFinite):
        return NOT_FINITE, str(error)
    if isinstance(error, OSError) and error.errno in ENVIRONMENT_ERRNOS:
        return (
            MACHINE,
            f"{error.filename or 'a file'}: {error.strerror}. Remove the cause of the error, then start the run "
            "again: the run continues",
        )
    for cause in (error, error.__cause__, error.__context__):
        text = f"{type(cause).__name__}: {cause}"
        for phrases, code, advice in CAUSES:
            if any(phrase in text for phrase in phrases):
                return code, advice.format(text.splitlines()[0])
    return FAULT, ": ".join([*getattr(error, "__notes__", []), f"{type(error).__name__}: {error}"])


class Status:
    """The writer of status.json. Rank 0 writes the run's status, and the first rank that fails writes the reason."""

    def __init__(self, out: Path, process: Process):
        self.out = out
        self.process = process
        self.has_lock = False
        """True once this run has the directory's lock."""
        self.step: int | None = None
        """The number of steps done; None until this start knows its checkpoint."""
        self.status_before_start: dict[str, Any] = {}
        """The content of status.json before this start."""

    def set_steps_done_for_next_write(self, step: int) -> None:
        """Set the number of steps done, which the next write of status.json has."""
        self.step = step

    def note_lock_and_write_running(self, status_before_start: dict[str, Any]) -> None:
        """Note that this run has the directory's lock. Rank 0 writes the status. All ranks call it."""
        self.has_lock = True
        self.status_before_start = status_before_start
        if self.process.is_main:
            self._write("running", None, "")

    def write_end(self, code: ExitCode, why: str) -> None:
        """Write why the run ends. If this rank fails while the run has the lock, and another rank has written a reason,
        that reason stays."""
        is_first = self.process.is_main
        if code not in NAMES and self.has_lock:
            is_first = read_status(self.out).get("status") == "running"
        if not is_first:
            return
        try:
            self._write(NAMES.get(code, "failed"), code, why)
        except OSError as error:  # such as a full disk
            LOG.warning(
                f"{self.out / STATUS} cannot be written ({error.strerror}), so this file does not say how the run ended"
            )

    def record_failure(self, error: Exception) -> None:
        """Log an error that ends the run, and write it to status.json if `out` belongs to this run. If the run was done
        before, and the command is refused before its first step, such as for a wrong --fork, the run is still done."""
        LOG.debug("".join(traceback.format_exception(error)))
        may_write = self.has_lock or (self.process.is_main and is_new_or_unlocked_unfinished_run(self.out))
        if not may_write or isinstance(error, DirectoryTaken):
            return
        if type(error) is UserError and self.status_before_start.get("status") == NAMES[DONE] and self.step is None:
            if self.process.is_main:
                with suppress(OSError):
                    self._write_entry(self.status_before_start)
            return
        self.write_end(*exit_code_and_message(error))

    def _write(self, status: str, code: int | None, why: str) -> None:
        self._write_entry(
            {
                "status": status,
                "code": code,
                "why": redact(why),
                "step": self.step,
                "rank": self.process.rank,
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        )

    def _write_entry(self, entry: dict[str, Any]) -> None:
        partial = self.out / f"{STATUS}.{self.process.rank}"  # two ranks may fail at once
        files.write_text(partial, to_json_text(entry))
        os.replace(partial, self.out / STATUS)
