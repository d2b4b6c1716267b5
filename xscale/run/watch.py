"""A run ends early if it is asked to stop (`StopRequest`), or if a rank hangs (`Watch`).

Each rank writes what it is doing into a file beside the logs, which the other ranks can read. After `train.stall_limit`
minutes without progress, a rank writes its stacks into logs/rankN.log and the ranks for which it waits into the log,
and ends with exit code 5. The watch notices processes that are suspended or gone, and hangs in a file system, a
collective or a lock.
"""

import faulthandler
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from xscale import files
from xscale.errors import LOG, block_sigusr2_and_trace_on_sigusr1, find_launchers
from xscale.ranks import CpuGroup, Process
from xscale.run.run_status import STUCK, Status

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
"""The signals that ask a run to save and end."""
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
        self.launchers = find_launchers()
        """The launchers of this rank. Some launchers leave their ranks running when they are killed."""
        self.has_stepped = False
        """True once this start has made a step. Before that, the time limit has no effect, since a limit that is
        shorter than the startup would allow no progress."""
        for number in SIGNALS:
            # Nohup makes processes ignore SIGHUP.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                # For SIGUSR2 too, because threads older than `block_sigusr2_and_trace_on_sigusr1` may get it.
                signal.signal(number, self._note_signal)
        block_sigusr2_and_trace_on_sigusr1()

    def _note_signal(self, number: int, frame: Any) -> None:
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
            self.reason = "the launcher of the run has ended"
        return bool(self.reason)


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Watch:
    """Records what this rank is doing, and ends the rank if it hangs."""

    def __init__(self, process: Process, stacks: Path, minutes: float | None, write_end: Callable[[int, str], None]):
        """Begin to watch. stacks: the rank's log, to which stacks are written. minutes: train.stall_limit; None: do not
        watch. write_end: a function that gets the exit code and the reason before the process ends."""
        self.process = process
        self.name = f"rank {process.rank} (host {os.uname().nodename}, process {os.getpid()})"
        self.stacks = stacks
        self.write_end = write_end
        self.doing = "starting"
        self.progress = [0, 0]
        """The number of the step in which this rank is, and the number of calls of `note_progress` in this step."""
        self.clock = 0.0
        """The seconds of watching, without those in which this process was suspended, as by SIGSTOP or SLURM."""
        self.idle = 0.0
        """The seconds without progress."""
        self.closed = threading.Event()
        if minutes is None:
            return
        self.limit = 60 * minutes
        self.pause = min(LOOK_SECONDS, self.limit / 8)
        """The seconds between two checks."""
        self.first_warning = min(FIRST_WARNING_SECONDS, self.limit / 2)
        # Each function has its own thread, because a file system may hold up the report.
        for function in (self._end_if_stalled_until_closed, self._write_beats_and_warn_until_closed):
            threading.Thread(target=function, daemon=True).start()

    def note_progress(self, doing: str) -> None:
        """Record that the rank makes progress, and what it does next. The main thread calls this several times in each
        step."""
        self.doing = doing
        self.progress[1] += 1

    def begin_step(self, number: int) -> None:
        """Record that the rank begins a step. Its notes are counted from here, because some ranks make more notes than
        others when they save."""
        self.progress = [number, 0]

    def close(self) -> None:
        self.closed.set()

    def _end_if_stalled_until_closed(self) -> None:
        """Until `close`, check whether this rank makes progress, and end the process if it has stalled."""
        seen = [*self.progress]
        progress = 0.0
        checked = time.monotonic()
        while not self.closed.wait(self.pause):
            now = time.monotonic()
            self.clock += min(now - checked, 2 * self.pause)  # while the process was suspended, it has checked nothing
            checked = now
            if self.progress != seen:
                seen = [*self.progress]
                progress = self.clock
            self.idle = self.clock - progress
            if self.idle >= self.limit:
                self._end_process()

    def _write_beats_and_warn_until_closed(self) -> None:
        """Warn while this rank makes no progress, each time after twice the seconds. Write what this rank is doing:
        from time to time, and often while it makes no progress."""
        written_at = -math.inf
        warning = 0.0
        while not self.closed.is_set():
            if self.idle < self.first_warning:
                warning = self.first_warning
            elif self.idle >= warning and self.process.is_main:
                LOG.warning(self._describe_stall())
                warning = 2 * self.idle
            is_due = max(self.idle, self.clock - written_at) >= self.first_warning / 2
            if is_due and self.process.world > 1:
                path = self._beat_path(self.process.rank)
                partial = path.with_name(path.name + files.PARTIAL)
                beat = {"doing": f"{self.name}, {self.doing}", "progress": self.progress}
                with suppress(OSError):  # `out` may have been removed, and must not be made again
                    partial.write_text(json.dumps(beat))
                    os.replace(partial, path)
                    written_at = self.clock
            self.closed.wait(self.pause)

    def _beat_path(self, rank: int) -> Path:
        """Return the file in which a rank says what it is doing."""
        return self.stacks.with_name(f"rank{rank}.beat")

    def _describe_stall(self) -> str:
        return f"no progress for {self.idle:.0f} s while {self.doing}; {self._describe_other_ranks()}"

    def _describe_other_ranks(self) -> str:
        """Return which ranks do not answer, or else which have made the least progress."""
        if self.process.world == 1:
            return "this is the only rank"
        if self.process.rank not in LISTENERS:
            return "logs/rank0.log may say for which rank this rank waits"
        silent = list[str]()
        beats = list[dict[str, Any]]()
        for rank in range(self.process.world):
            path = self._beat_path(rank)
            try:
                beats.append(json.loads(path.read_text()) | {"written_at": path.stat().st_mtime})
            except (OSError, ValueError):
                silent.append(path.stem)
        newest = max((beat["written_at"] for beat in beats), default=0.0)
        limit = self.first_warning / 2 + 3 * self.pause  # a rank at work writes every first_warning / 2
        silent += [beat["doing"] for beat in beats if newest - beat["written_at"] > limit]
        if silent:
            return f"no answer from {'; '.join(silent[:8])} (the process has stopped, or its machine has failed)"
        least = min(beat["progress"] for beat in beats)
        behind = [beat["doing"] for beat in beats if beat["progress"] == least]
        if len(behind) == len(beats):
            return f"all ranks are at the same point; {self.stacks.parent}/rank*.beat say what each rank is doing"
        return f"waiting for {'; '.join(behind[:8])}"

    def _end_process(self) -> None:
        """Write this rank's stacks and the reason, and end with the exit code."""
        threading.Timer(END_SECONDS, os._exit, [STUCK]).start()
        why = self._describe_stall()
        with suppress(OSError), self.stacks.open("a") as file:
            file.write("stack traces of this rank, which makes no progress:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        LOG.error(
            f"rank {self.process.rank}: {why}. The stack traces of this rank are in {self.stacks}. Start the run "
            "again: it continues from its newest checkpoint, or begins again if it has none. If the machine was only "
            "slow, also raise train.stall_limit"
        )
        self.write_end(STUCK, why)
        threading.Event().wait()


@dataclass(frozen=True)
class RunContext:
    """The objects that the parts of a run share on this rank, from the time when the run has locked its folder."""

    out: Path
    process: Process
    cpu_group: CpuGroup
    status: Status
    stop: StopRequest
    watch: Watch
    locks: list[files.Lock]
    """The lock on `out` on rank 0; empty on the other ranks. The lock lasts as long as this object."""
