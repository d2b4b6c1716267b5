"""A run ends early if it is asked to stop (`StopRequest`), or if a rank hangs (`Watch`).

A rank that makes no progress writes what it is doing into a file beside the logs, which the other ranks can read. After
`train.stall_limit` minutes without progress it writes its stacks into logs/rankN.log and the ranks for which it waits
into the log, and ends with exit code 5. The watch notices processes that are suspended or gone, and hangs in a file
system, a collective or a lock.
"""

import faulthandler
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from xscale.errors import hold_signals
from xscale.files import PARTIAL
from xscale.ranks import Process
from xscale.run.folder import STUCK
from xscale.run.metrics import LOG

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
"""The signals that ask a run to save and end."""
SCRIPTS = {"deepspeed", "torchrun", "deepspeed.launcher.launch", "deepspeed.launcher.runner", "torch.distributed.run"}
PROGRAMS = {"mpirun", "mpiexec", "orterun", "prterun"}
LOOK_SECONDS = 5.0
"""The longest time between two checks by the watch thread."""
FIRST_WARNING_SECONDS = 60.0
END_SECONDS = 8.0
"""The time between the report of a stall and the exit, which follows even if writing the report hangs."""
LISTENERS = (0, 1)
"""The ranks that find out which rank is missing. All ranks would be too many, and a single one may be missing."""


class StopRequest:
    """The request that this rank save and end, because of a signal, the time limit or the loss of its launcher. It
    counts as true (`if stop:`) once this rank must stop."""

    def __init__(self, minutes: float | None):
        """Begin to listen to signals. minutes: train.time_limit."""
        self.reason = ""
        self.deadline = time.monotonic() + 60 * minutes if minutes is not None else math.inf
        self.launchers = [process for process in psutil.Process().parents() if _is_launcher(process)]
        """The launchers of this rank. Some launchers leave their ranks running when they are killed."""
        self.has_stepped = False
        """True once this start has made a step. Before that, the time limit has no effect, since a limit that is
        shorter than the startup would allow no progress."""
        for number in SIGNALS:
            # Nohup makes processes ignore SIGHUP.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)  # threads older than `hold_signals` may get SIGUSR2
        hold_signals()

    def _note(self, number: int, frame: Any) -> None:
        self.reason = signal.Signals(number).name

    def arm_time_limit(self) -> None:
        """Let the time limit take effect from now on: this start has made a step."""
        self.has_stepped = True

    @property
    def why(self) -> str:
        return self.reason or "another rank was asked to stop"

    def __bool__(self) -> bool:
        if self.reason:
            return True
        if signal.SIGUSR2 in signal.sigpending():
            self.reason = signal.SIGUSR2.name
        elif self.has_stepped and time.monotonic() >= self.deadline:
            self.reason = "time limit"
        elif not all(map(_is_alive, self.launchers)):
            self.reason = "its launcher is gone"
        return bool(self.reason)


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_launcher(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        program, *words = [Path(word).name for word in process.cmdline()[:4]]
        return program in PROGRAMS or (program.startswith("python") and not SCRIPTS.isdisjoint(words))
    return False


class Watch:
    """Records what this rank is doing, and ends the rank if it hangs."""

    def __init__(self, process: Process, stacks: Path, ended: Callable[[int, str], None]):
        """Prepare a watch, which `begin` starts. stacks: the rank's log, to which stacks are written. ended: a function
        that is called with the exit code and the reason before the process ends."""
        self.process = process
        self.name = f"rank {process.rank} (host {os.uname().nodename}, process {os.getpid()})"
        self.stacks = stacks
        self.ended = ended
        self.doing = "starting"
        self.marks = 0
        """The number of calls of `note` so far, which shows the rank's progress."""
        self.limit = math.inf
        """train.stall_limit in seconds."""
        self.clock = 0.0
        """The seconds since `begin`, without those in which this process was suspended, as by SIGSTOP or SLURM."""
        self.idle = 0.0
        """The seconds without progress."""
        self.closed = threading.Event()

    def note(self, doing: str) -> None:
        """Record that the rank makes progress, and what it does next. The main thread calls this several times in each
        step."""
        self.doing = doing
        self.marks += 1

    def begin(self, minutes: float | None) -> None:
        """Begin to watch, in a thread. minutes: train.stall_limit."""
        if minutes is not None:
            self.limit = 60 * minutes
            threading.Thread(target=self._watch, name="xscale-watch", daemon=True).start()
            # A thread of its own, because a file system may hold it up.
            threading.Thread(target=self._report, name="xscale-watch-report", daemon=True).start()

    def close(self) -> None:
        self.closed.set()

    @property
    def pause(self) -> float:
        """The seconds between two checks by the watch thread."""
        return min(LOOK_SECONDS, self.limit / 8)

    @property
    def first_warning(self) -> float:
        return min(FIRST_WARNING_SECONDS, self.limit / 2)

    def _watch(self) -> None:
        """Until `close`, check whether this rank makes progress."""
        marks = self.marks
        progress = 0.0
        checked = time.monotonic()
        while not self.closed.wait(self.pause):
            now = time.monotonic()
            self.clock += min(now - checked, 2 * self.pause)  # while the process was suspended, it has checked nothing
            checked = now
            if self.marks != marks:
                marks = self.marks
                progress = self.clock
            self.idle = self.clock - progress
            if self.idle >= self.limit:
                self._end()

    def _problem(self) -> str:
        return f"no progress for {self.idle:.0f} s, {self.doing}; {self._describe_other_ranks()}"

    def _beat_path(self, rank: int) -> Path:
        """Return the file in which a rank says what it is doing."""
        return self.stacks.with_name(f"rank{rank}.beat")

    def _report(self) -> None:
        """Warn while this rank makes no progress, each time after twice the seconds. Write what this rank is doing:
        from time to time, and often while it makes no progress."""
        path = self._beat_path(self.process.rank)
        partial = path.with_name(path.name + PARTIAL)
        written_at = -math.inf
        warning = 0.0
        while not self.closed.wait(self.pause):
            if self.idle < self.first_warning:
                warning = self.first_warning
            elif self.idle >= warning and self.process.is_main:
                LOG.warning(self._problem())
                warning = 2 * self.idle
            is_due = max(self.idle, self.clock - written_at) >= self.first_warning / 2
            if is_due and self.process.world > 1:
                with suppress(OSError):
                    partial.write_text(json.dumps([self.name, self.marks, self.doing]))
                    os.replace(partial, path)
                    written_at = self.clock

    def _describe_other_ranks(self) -> str:
        """Return which ranks do not answer, or else which have made the least progress."""
        if self.process.world == 1:
            return "it is the only rank"
        if self.process.rank not in LISTENERS:
            return "logs/rank0.log may say for which rank it waits"
        beats: dict[int, list[Any]] = {}
        silent = list[str]()
        behind = list[str]()
        for rank in range(self.process.world):
            path = self._beat_path(rank)
            try:
                beats[rank] = [path.stat().st_mtime, *json.loads(path.read_text())]
            except (OSError, ValueError):
                silent.append(f"rank {rank} has written nothing")
        newest = max((written for written, *_ in beats.values()), default=0.0)
        least = min((marks for _, _, marks, _ in beats.values()), default=0)
        for written, name, marks, doing in beats.values():
            seconds = newest - written
            if seconds > self.first_warning / 2 + 3 * self.pause:  # a rank at work writes every first_warning / 2
                silent.append(f"{name} has not answered for {seconds:.0f} s (stopped, or its machine is gone)")
            elif marks == least:
                behind.append(f"{name} is behind, {doing}")
        if not silent and len(behind) == self.process.world:
            return "all ranks have made the same progress"
        return "waiting for others: " + "; ".join((silent or behind)[:8])

    def _end(self) -> None:
        """Write the stacks of this rank and of its processes, and end with the exit code."""
        threading.Timer(END_SECONDS, os._exit, [STUCK]).start()
        why = self._problem()
        with suppress(OSError), self.stacks.open("a") as file:
            file.write("stacks of this rank, which makes no progress:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        for child in multiprocessing.active_children():
            with suppress(ProcessLookupError):  # the loader's processes write their stacks into the same file
                if child.pid:
                    os.kill(child.pid, signal.SIGUSR1)
            time.sleep(0.2)
        LOG.error(f"rank {self.process.rank}: {why}. Its stacks are in {self.stacks}; start again: the run continues")
        self.ended(STUCK, why)
        threading.Event().wait()
