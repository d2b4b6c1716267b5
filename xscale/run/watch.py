"""What ends a run early: a request to stop, and a rank that hangs.

A thread of every rank tells the others, through the store by which they met, what its rank is doing. A rank that makes
no progress for `train.stall_limit` minutes writes its stacks into logs/rankN.log, says for whom it waits, and ends with
exit code 5. It notices processes that are stopped or gone, and hangs in a file system, a collective or a lock. A rank
that was told to stop and does not come to the end of a step for `train.stop_limit` minutes ends with exit code 75.
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
"""These signals ask a run to save and end."""
SCRIPTS = {"deepspeed", "torchrun", "deepspeed.launcher.launch", "deepspeed.launcher.runner", "torch.distributed.run"}
PROGRAMS = {"mpirun", "mpiexec", "orterun", "prterun"}
LOOK_SECONDS = 5.0
"""The time between looks, at most."""
FIRST_WARNING_SECONDS = 60.0
ANSWER_SECONDS = 3.0
"""How long the store is waited for. It lives in rank 0, which may be the one that is stopped; no timeout of the store's
own notices that."""
END_SECONDS = 8.0
"""The delay between the report of a stall and the exit, so that every rank can report, even if its log hangs."""
LISTENERS = (0, 1)
"""The ranks that ask who is missing. A thousand would be too many at once, and one may be missing itself."""


class StopRequest:
    """Whether this rank should save and end: after a signal, at the time limit, or without its launcher."""

    def __init__(self, minutes: float | None):
        """minutes: train.time_limit."""
        self.reason = ""
        self.deadline = time.monotonic() + 60 * minutes if minutes is not None else None
        self.launchers = [process for process in psutil.Process().parents() if _is_launcher(process)]
        """The launchers of this rank. Some of them leave their ranks running when they are killed."""
        self.moved = False
        """Whether a step was made since the start. A time limit shorter than a start would never advance otherwise."""
        self.terminals = [number for number in range(3) if os.isatty(number)]
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it
                signal.signal(number, self._note)  # SIGUSR2 may come to threads from before `hold_signals`
        # Python runs a handler between two of its own instructions, and never while a collective hangs: a signal is
        # also written into a pipe, at once.
        self.woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        hold_signals()

    def _note(self, number: int, frame: Any) -> None:
        self.reason = signal.Signals(number).name
        if number == signal.SIGHUP:  # a terminal that is gone takes no more lines
            nowhere = os.open(os.devnull, os.O_RDWR)
            for terminal in self.terminals:
                os.dup2(nowhere, terminal)
            os.close(nowhere)

    def note_step(self) -> None:
        """A step was made."""
        self.moved = True

    @property
    def why(self) -> str:
        return self.reason or "another rank was told to"

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
        if not self.reason and self.moved and self.late:
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
    """What a rank's thread tells the others."""

    number: int
    """The number of its look. It stands still if the process is stopped."""
    marks: int
    """The number of the rank's notes, which says how far it has come."""
    doing: str


class Watch:
    """Notes what this rank is doing, and ends it if it hangs."""

    def __init__(
        self, process: Process, names: list[str], stacks: Path, ended: Callable[[int, str], None], stop: StopRequest
    ):
        """names: host and process of each rank. stacks: the file for the stacks. ended: called with the exit code and
        the reason before the process ends."""
        self.process, self.names, self.stacks, self.ended, self.stop = process, names, stacks, ended, stop
        self.doing, self.marks, self.since = "starting", 0, time.monotonic()
        self.limit = self.stop_limit = math.inf
        """train.stall_limit and train.stop_limit in seconds."""
        self.stopping = False
        """Whether the run has come to the end of its last step, and saves."""
        self.heard: dict[int, tuple[Beat, float]] = {}
        """The last beat of each rank, and when it came."""
        self.closed = threading.Event()
        self.asking: threading.Thread | None = None

    def note(self, doing: str) -> None:
        """The rank makes progress. Its main thread calls this many times a step."""
        self.doing, self.marks, self.since = doing, self.marks + 1, time.monotonic()

    def note_end(self) -> None:
        """The last step is over: what comes may take its time."""
        self.stopping = True

    def begin(self, minutes: float | None, stop_minutes: float | None) -> None:
        """minutes: train.stall_limit. stop_minutes: train.stop_limit."""
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
                self._within(partial(store.set, self._key(self.process.rank), beat))
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
                why = f"{self.stop.why}, but no step has ended in {self.stop_limit:.0f} s, {self.doing}"
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
        """This process was suspended for `late` seconds, as by SIGSTOP, docker pause or SLURM: they do not count."""
        self.since = min(self.since + late, now)
        self.heard = {rank: (beat, at + late) for rank, (beat, at) in self.heard.items()}

    def _doing(self) -> str:
        """What the rank is doing, and which of its child processes is stopped."""
        if time.monotonic() - self.since < LOOK_SECONDS:
            return self.doing
        stopped = []
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has ended
                if child.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    stopped.append(f"{child.name()} (process {child.pid}) is stopped")
        return "; ".join([self.doing, *stopped])

    def _join(self) -> dist.Store | None:
        """Open a connection for this thread: the main thread's may be waiting for an answer."""
        if self.process.world == 1:
            return None
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=ANSWER_SECONDS)
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)

    def _within(self, ask: Callable[[], Any]) -> Any:
        """What the store answers; None where it does not, now or since before."""
        answers: list[Any] = []

        def run() -> None:
            with suppress(Exception):
                answers.append(ask())

        if self.asking is None or not self.asking.is_alive():
            self.asking = threading.Thread(target=run, name="xscale-watch-ask", daemon=True)
            self.asking.start()
            self.asking.join(ANSWER_SECONDS)
        return answers[0] if answers else None

    @staticmethod
    def _key(rank: int) -> str:
        return f"xscale/beat/{rank}"

    def _listen(self, store: dist.Store | None) -> str:
        """For whom this rank waits, as far as it knows."""
        if self.process.world == 1:
            return "it is the only rank"
        if self.process.rank not in LISTENERS:
            return "logs/rank0.log may say for whom it waits"
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
        keys = {rank: self._key(rank) for rank in range(self.process.world)}
        return {rank: Beat(*json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}

    def _missing(self, now: float) -> str:
        absent = [name for rank, name in enumerate(self.names) if rank not in self.heard]
        silent = 3 * min(LOOK_SECONDS, self.limit / 8, self.stop_limit / 8)
        stopped = [
            f"{self.names[rank]} has not answered for {now - at:.0f} s (stopped, or its machine is gone)"
            for rank, (_, at) in sorted(self.heard.items())
            if now - at > silent
        ]
        found = [f"nothing was heard of {name}" for name in absent] + stopped
        if not found:
            least = min(beat.marks for beat, _ in self.heard.values())
            behind = [rank for rank, (beat, _) in sorted(self.heard.items()) if beat.marks == least]
            if len(behind) == self.process.world:
                return "all ranks have come as far"
            found = [f"{self.names[rank]} is behind, {self.heard[rank][0].doing}" for rank in behind]
        return "waiting for others: " + "; ".join(found[:8])

    def _end(self, why: str, code: int) -> None:
        threading.Timer(END_SECONDS, os._exit, [code]).start()
        with suppress(OSError), self.stacks.open("a") as file:
            file.write("stacks of this rank, which has come no further:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        for pid in [child.pid for child in multiprocessing.active_children() if child.pid]:
            with suppress(ProcessLookupError):  # the loader's processes write their stacks to the same file
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.2)
        LOG.error(f"rank {self.process.rank}: {why}. Its stacks are in {self.stacks}; start again: the run goes on")
        self.ended(code, why)
        threading.Event().wait()


def names_of_ranks(host_group: HostGroup) -> list[str]:
    """The names of all ranks, such as "rank 3 (host node7, process 4711)"."""
    return host_group.gather(f"rank {host_group.rank} (host {os.uname().nodename}, process {os.getpid()})")
