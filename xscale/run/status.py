"""OUT/status.json: how a run stands, for whoever does not see its exit code, as launchers lose it.

    {"status": "stopped", "code": 75, "why": "SIGUSR2", "step": 120, "rank": 0, "time": "2026-01-31T12:00:00+00:00"}

`status` is running, done, stopped or failed. One that says running while no process is was killed.
"""

import errno
import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from xscale import files
from xscale.errors import ENVIRONMENT_ERRNOS, MachineError, NotFinite, Replaced, UserError
from xscale.ranks import Process
from xscale.run import folder
from xscale.run.metrics import LOG, log_to_files

DONE, FAULT, USER_ERROR, NOT_FINITE, MACHINE, STUCK, STOPPED = 0, 1, 2, 3, 4, 5, 75
"""Exit codes. STOPPED: saved, and ended early; another start goes on."""
OF_LOST_RANK = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "another rank of this node")
NO_MEMORY = ("can't allocate memory", "out of memory")
"""What torch says of the CPU's, and what CUDA and NCCL say, in errors of other classes."""
OF_KILLED = ("killed by signal: Killed", "killed by signal: Bus error")
"""What torch says of a worker that somebody else has ended, and data/loader.py of its planner."""
NAMES = {DONE: "done", STOPPED: "stopped"}
"""Of exit codes; all others are failures."""


def code_of(error: Exception) -> int:
    if isinstance(error, UserError) or out_of_memory(error):
        return USER_ERROR
    if isinstance(error, NotFinite):
        return NOT_FINITE
    is_environment_error = isinstance(error, MachineError) or (
        isinstance(error, OSError) and error.errno in ENVIRONMENT_ERRNOS
    )
    is_environment_error |= isinstance(error, dist.DistNetworkError) or lost_rank(error) or bool(killed(error))
    return MACHINE if is_environment_error else FAULT


def lost_rank(error: Exception) -> bool:
    """Whether a collective failed because another rank ended: NCCL has a class for it, gloo has not."""
    return isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in OF_LOST_RANK)


def killed(error: Exception) -> str:
    """What is said of a process of the loader that was killed; "": nothing."""
    said = (str(of) for of in (error, error.__cause__, error.__context__))
    return next((text.splitlines()[0] for text in said if any(sign in text for sign in OF_KILLED)), "")


def out_of_memory(error: Exception) -> bool:
    if isinstance(error, UserError | MachineError | OSError):
        return isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in NO_MEMORY)


def message_of(error: Exception) -> str:
    """A line; of what users and the machine cause with the remedy."""
    if isinstance(error, MachineError):  # it may tell what another rank has said, with the remedy
        return str(error)
    code = code_of(error)
    if out_of_memory(error):
        said = (str(error) or type(error).__name__).splitlines()[0]
        return (
            f"out of memory ({said}); lower train.max_tokens, which a run may change from start to start, or take "
            f"train.activation_checkpointing, a higher ZeRO stage or more ranks; --dry_run tells what each needs"
        )
    if said := killed(error):
        return (
            f"{said.rstrip('. ')}: the machine's memory may have run out (dmesg or the job's accounting tell of it); "
            f"ask for more, or take fewer data.workers, and start again: the run goes on"
        )
    if lost_rank(error):
        first = str(error).splitlines()[0]
        return f"another rank has ended; status.json or its log says why ({first}). Start again: the run goes on"
    if code == MACHINE and isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror}; mend that and start again: the run goes on"
    if code == MACHINE:
        advice = "where another run has the port, give --master_port N to the launcher, or set MASTER_PORT"
        return f"the ranks cannot meet: {str(error).splitlines()[0]}; {advice}"
    if code == FAULT:
        return "; ".join([*getattr(error, "__notes__", []), f"{type(error).__name__}: {error}"])
    return str(error)


class Status:
    """What a rank tells of its run. Rank 0 tells all; of failures, the first rank that has one."""

    def __init__(self, out: Path, process: Process):
        self.out, self.process = out, process
        self.ours: bool | None = None
        """Whether this run has the directory; None: it has not asked for it yet."""
        self.step: Callable[[], int | None] = lambda: None
        """Steps done."""

    def running(self) -> None:
        if self.process.is_main:
            self._write("running", None, "")

    def ended(self, code: int, why: str) -> None:
        if code not in NAMES and self.ours:
            self.cut_off(code, why)
        elif self.process.is_main:
            self._tell(code, why)

    def cut_off(self, code: int, why: str) -> None:
        """An end that the ranks do not come to together: the first of them says why."""
        if self._read() == "running":
            self._tell(code, why)

    def _tell(self, code: int, why: str) -> None:
        try:
            self._write(NAMES.get(code, "failed"), code, why)
        except OSError as error:  # such as a full disk: the run has ended all the same
            LOG.warning(f"{self.out / folder.STATUS} cannot be written ({error.strerror})")

    @contextmanager
    def of_failures(self) -> Iterator[None]:
        """Tells what goes wrong within, and raises it further."""
        try:
            yield
        except Exception as error:
            log_to_files(traceback.format_exc())
            if isinstance(error, Replaced):
                pass  # it is another run's now
            elif self.ours or (self.ours is None and self.process.is_main and folder.is_idle(self.out)):
                self.ended(code_of(error), message_of(error))
            raise

    def _read(self) -> str:
        try:
            return json.loads((self.out / folder.STATUS).read_text(encoding="utf-8"))["status"]
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    def _write(self, status: str, code: int | None, why: str) -> None:
        entry = {"status": status, "code": code, "why": why, "step": self.step(), "rank": self.process.rank}
        entry["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        own = self.out / f"{folder.STATUS}.{self.process.rank}"  # two ranks may fail at once
        files.write_text(own, folder.dump(entry))
        os.replace(own, self.out / folder.STATUS)
