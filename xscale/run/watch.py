"""A run ends early if it is asked to stop (`StopRequest`), or if a rank hangs (`Watch`).

A thread of every rank tells the other ranks what its own rank is doing, through torch's TCPStore, by which the ranks
found each other. A rank that makes no progress for `train.stall_limit` minutes writes its stacks into logs/rankN.log,
logs which ranks it waits for, and ends with exit code 5. The watch notices processes that are suspended or gone, and
hangs in a file system, a collective or a lock. A rank that was asked to stop and has not begun its last
save after `train.stop_limit` minutes ends with exit code 75.
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
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

from xscale.errors import hold_signals
from xscale.ranks import HostGroup, Process
from xscale.run.folder import STOPPED, STUCK
from xscale.run.metrics import LOG

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
"""The signals that ask a run to save and end."""
SCRIPTS = {"deepspeed", "torchrun", "deepspeed.launcher.launch", "deepspeed.launcher.runner", "torch.distributed.run"}
PROGRAMS = {"mpirun", "mpiexec", "orterun", "prterun"}
LOOK_SECONDS = 5.0
"""The longest time between two checks by the watch thread."""
FIRST_WARNING_SECONDS = 60.0
ANSWER_SECONDS = 3.0
"""The longest wait for the store, whose own timeouts do not notice that rank 0, where it runs, is suspended."""
END_SECONDS = 8.0
"""The time between the report of a stall and the exit, which follows even if writing the report hangs."""
KEY = "xscale/beat/{}"
"""The name of a rank's beat in the store."""
LISTENERS = (0, 1)
"""The ranks that ask the store which rank is missing. All ranks would be too many, and a single one may be missing."""


class StopRequest:
    """The request that this rank save and end, because of a signal, the time limit or the loss of its launcher. It
    counts as true (`if stop:`) once this rank must stop."""

    def __init__(self, minutes: float | None):
        """Begin to listen to signals. minutes: train.time_limit."""
        self.reason = ""
        self.deadline = time.monotonic() + 60 * minutes if minutes is not None else None
        self.launchers = [process for process in psutil.Process().parents() if _is_launcher(process)]
        """The launchers of this rank. Some launchers leave their ranks running when they are killed."""
        self.has_stepped = False
        """True once this start has made a step. Before that, the time limit has no effect, since a limit that is
        shorter than the startup would allow no progress."""
        self.terminals = [number for number in range(3) if os.isatty(number)]
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                signal.signal(number, self._note)  # threads older than `hold_signals` may get SIGUSR2
        # Python runs handlers between its own instructions, and so never while a collective hangs. Each signal is
        # therefore also written into a pipe at once.
        self.woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        hold_signals()

    def _note(self, number: int, frame: Any) -> None:
        self.reason = signal.Signals(number).name
        if number == signal.SIGHUP:  # a closed terminal takes no more lines
            nowhere = os.open(os.devnull, os.O_RDWR)
            for terminal in self.terminals:
                os.dup2(nowhere, terminal)
            os.close(nowhere)

    @property
    def why(self) -> str:
        return self.reason or "another rank was asked to stop"

    @property
    def late(self) -> bool:
        """Whether the time limit has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def __bool__(self) -> bool:
        with suppress(BlockingIOError):
            for number in os.read(self.woken, 64):
                self.reason = self.reason or (signal.Signals(number).name if number in SIGNALS else "")
        if not self.reason and signal.SIGUSR2 in signal.sigpending():
            self.reason = signal.SIGUSR2.name
        if not self.reason and self.has_stepped and self.late:
            self.reason = "time limit"
        if not self.reason and not all(map(_lives, self.launchers)):
            self.reason = "its launcher is gone"
        return bool(self.reason)


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_launcher(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        program, *words = (Path(word).name for word in process.cmdline()[:4])
        return program in PROGRAMS or (program.startswith("python") and not SCRIPTS.isdisjoint(words))
    return False


class Beat(NamedTuple):
    """A message from a rank's watch thread to the other ranks."""

    number: int
    """The number of the thread's check. It does not grow while the process is suspended."""
    marks: int
    """The number of calls of `note` so far, which shows the rank's progress."""
    doing: str


class Watch:
    """Records what this rank is doing, and ends the rank if it hangs."""

    def __init__(
        self, process: Process, names: list[str], stacks: Path, ended: Callable[[int, str], None], stop: StopRequest
    ):
        """Prepare a watch, which `begin` starts. stacks: the file to which stacks are written. ended: a function that
        is called with the exit code and the reason before the process ends."""
        self.process, self.names, self.stacks, self.ended, self.stop = process, names, stacks, ended, stop
        self.doing, self.marks, self.since = "starting", 0, time.monotonic()
        self.limit = self.stop_limit = math.inf
        """train.stall_limit and train.stop_limit in seconds."""
        self.stopping = False
        """True once the run makes no further step and only saves, so that `stop_limit` no longer applies."""
        self.heard: dict[int, tuple[Beat, float]] = {}
        """The last beat of each rank and the time when it came."""
        self.closed = threading.Event()
        self.asking: threading.Thread | None = None

    def note(self, doing: str) -> None:
        """Record that the rank makes progress, and what it does next. The main thread calls this many times a step."""
        self.doing, self.marks, self.since = doing, self.marks + 1, time.monotonic()

    def begin(self, minutes: float | None, stop_minutes: float | None) -> None:
        """Begin to watch, in a thread. minutes: train.stall_limit. stop_minutes: train.stop_limit."""
        self.note("starting")
        self.limit, self.stop_limit = (math.inf if limit is None else 60 * limit for limit in (minutes, stop_minutes))
        if min(self.limit, self.stop_limit) < math.inf:
            threading.Thread(target=self._look, name="xscale-watch", daemon=True).start()

    def close(self) -> None:
        self.closed.set()

    def _look(self) -> None:
        ticked = time.monotonic()
        store = self._within(self._join)
        pause = min(LOOK_SECONDS, self.limit / 8, self.stop_limit / 8)
        warned, number, told, marks = FIRST_WARNING_SECONDS, 0, math.inf, self.marks
        while True:
            number += 1
            if store:
                beat = json.dumps(Beat(number, self.marks, self._doing()))
                self._within(partial(store.set, KEY.format(self.process.rank), beat))
            asked = time.monotonic()
            if self.closed.wait(pause):
                return
            now = time.monotonic()
            late = now - asked - pause + max(asked - ticked - (2 * ANSWER_SECONDS if store else 0.0), 0.0)
            ticked = now
            if late > pause:
                self._wake(late, now)
                told += late
            told = min(told, now if self.stop else math.inf)
            if time.monotonic() - told >= self.stop_limit and not self.stopping:
                why = f"{self.stop.why}, but the last save has not begun after {self.stop_limit:.0f} s, {self.doing}"
                self._end(f"{why}; {self._listen(store)}", STOPPED)
            still = time.monotonic() - self.since
            if self.marks != marks:
                warned, marks = FIRST_WARNING_SECONDS, self.marks
            if still < min(self.limit / 2, warned):
                continue
            others = self._listen(store)
            if still >= self.limit:
                self._end(f"no progress for {still:.0f} s, {self._doing()}; {others}", STUCK)
            if still >= warned and self.limit < math.inf and self.process.is_main:
                LOG.warning(f"no progress for {still:.0f} s, {self._doing()}; {others}")
                warned = 2 * still

    def _wake(self, late: float, now: float) -> None:
        """Leave out of all times the `late` seconds in which this process was suspended, as by SIGSTOP or SLURM."""
        self.since = min(self.since + late, now)
        self.heard = {rank: (beat, at + late) for rank, (beat, at) in self.heard.items()}

    def _doing(self) -> str:
        """Return what the rank is doing, and which of its child processes are stopped."""
        if time.monotonic() - self.since < LOOK_SECONDS:
            return self.doing
        stopped = []
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # the child has ended
                if child.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    stopped.append(f"{child.name()} (process {child.pid}) is stopped")
        return "; ".join([self.doing, *stopped])

    def _join(self) -> dist.Store | None:
        """Connect this thread to the store, since the main thread's connection may be waiting for an answer."""
        if self.process.world == 1:
            return None
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=ANSWER_SECONDS)
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)

    def _within(self, ask: Callable[[], Any]) -> Any:
        """Return the store's answer to `ask`; None if it does not answer this or an earlier question in time."""
        answers: list[Any] = []

        def run() -> None:
            with suppress(Exception):
                answers.append(ask())

        if self.asking is None or not self.asking.is_alive():
            self.asking = threading.Thread(target=run, name="xscale-watch-ask", daemon=True)
            self.asking.start()
            self.asking.join(ANSWER_SECONDS)
        return answers[0] if answers else None

    def _listen(self, store: dist.Store | None) -> str:
        """Return which ranks this rank waits for, as far as it knows."""
        if self.process.world == 1:
            return "it is the only rank"
        if self.process.rank not in LISTENERS:
            return "logs/rank0.log may say for which rank it waits"
        if store is None:
            return "the other ranks cannot be asked"
        beats = self._within(partial(self._beats, store))
        if beats is None:
            return f"{self.names[0]} does not answer"
        now = time.monotonic()
        for rank, beat in beats.items():
            if rank not in self.heard or self.heard[rank][0].number != beat.number:
                self.heard[rank] = beat, now
        return self._missing(now)

    def _beats(self, store: dist.Store) -> dict[int, Beat]:
        keys = {rank: KEY.format(rank) for rank in range(self.process.world)}
        return {rank: Beat(*json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}

    def _missing(self, now: float) -> str:
        absent = [name for rank, name in enumerate(self.names) if rank not in self.heard]
        silent = 3 * min(LOOK_SECONDS, self.limit / 8, self.stop_limit / 8)
        stopped = [
            f"{self.names[rank]} has not answered for {now - at:.0f} s (stopped, or its machine is gone)"
            for rank, (_, at) in sorted(self.heard.items())
            if now - at > silent
        ]
        found = [f"{name} has sent nothing" for name in absent] + stopped
        if not found:
            least = min(beat.marks for beat, _ in self.heard.values())
            behind = [rank for rank, (beat, _) in sorted(self.heard.items()) if beat.marks == least]
            if len(behind) == self.process.world:
                return "all ranks have made the same progress"
            found = [f"{self.names[rank]} is behind, {self.heard[rank][0].doing}" for rank in behind]
        return "waiting for others: " + "; ".join(found[:8])

    def _end(self, why: str, code: int) -> None:
        threading.Timer(END_SECONDS, os._exit, [code]).start()
        with suppress(OSError), self.stacks.open("a") as file:
            file.write("stacks of this rank, which makes no progress:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        for pid in [child.pid for child in multiprocessing.active_children() if child.pid]:
            with suppress(ProcessLookupError):  # the loader's processes write their stacks into the same file
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.2)
        LOG.error(f"rank {self.process.rank}: {why}. Its stacks are in {self.stacks}; start again: the run goes on")
        self.ended(code, why)
        threading.Event().wait()


def names_of_ranks(host_group: HostGroup) -> list[str]:
    """Return the names of all ranks, such as "rank 3 (host node7, process 4711)"."""
    return host_group.gather(f"rank {host_group.rank} (host {os.uname().nodename}, process {os.getpid()})")
