"""A thread of every rank that looks whether the run still moves, and ends it where it does not.

Each tells the others, through the store by which they met, what its rank is doing. A rank that has come no further for
`train.stall_limit` minutes writes its stacks into logs/rankN.log, says for whom it waits, and ends with exit code 5:
of a process that is stopped, of one that hangs in a file system, in a collective or in a lock. So does, with exit code
75, one that was told to stop and for `train.stop_limit` minutes has not come to the end of a step.
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

from xscale.ranks import HostGroup, Process
from xscale.run.metrics import LOG
from xscale.run.status import STOPPED, STUCK
from xscale.run.stop import StopRequest

LOOK_SECONDS = 5.0
"""Between looks, at most."""
FIRST_WARNING_SECONDS = 60.0
ANSWER = 3.0
"""Seconds that the store is waited for. It may live in rank 0, which may be the one that is stopped: of that no timeout
of the store's own knows."""
END_SECONDS = 8.0
"""From a rank's last words to its end: others, which look at other moments, must have said theirs. It ends then also
where its log is on the file system that hangs."""
LISTEN = (0, 1)
"""Ranks that ask who is missing; a thousand would be too many at once, and one may be missing itself."""


class Beat(NamedTuple):
    """What a rank's thread tells."""

    number: int
    """Of its look; one that stands still belongs to a process that is stopped."""
    marks: int
    """How far the rank has come."""
    doing: str


class Watch:
    """What this rank is doing, and the thread that looks after it."""

    def __init__(
        self, process: Process, names: list[str], stacks: Path, ended: Callable[[int, str], None], stop: StopRequest
    ):
        """names: host and process of each rank; stacks: the file that they are written to; ended: told the exit code
        and why, before the run ends so."""
        self.process, self.names, self.stacks, self.ended, self.stop = process, names, stacks, ended, stop
        self.doing, self.marks, self.since = "starting", 0, time.monotonic()
        self.limit = self.stop_limit = math.inf
        """Seconds."""
        self.stopping = False
        """Whether the step after which the run stops is over."""
        self.heard: dict[int, tuple[Beat, float]] = {}
        """The last new beat of each rank, and when it came."""
        self.closed = threading.Event()
        self.asking: threading.Thread | None = None

    def note(self, doing: str) -> None:
        """The rank has come so far: called from its main thread, many times a step."""
        self.doing, self.marks, self.since = doing, self.marks + 1, time.monotonic()

    def begin(self, minutes: float | None, stop_minutes: float | None) -> None:
        """minutes: train.stall_limit; stop_minutes: train.stop_limit."""
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
            late = now - asked - pause + max(asked - ticked - (2 * ANSWER if store else 0.0), 0.0)
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
        """This process was suspended for so long, as by SIGSTOP, docker pause or SLURM, and could not move."""
        self.since = min(self.since + late, now)
        self.heard = {rank: (beat, at + late) for rank, (beat, at) in self.heard.items()}

    def _doing(self) -> str:
        """And which of the rank's processes, such as a loader, is stopped."""
        if time.monotonic() - self.since < LOOK_SECONDS:
            return self.doing
        stopped = []
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # it has ended meanwhile
                if child.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    stopped.append(f"{child.name()} (process {child.pid}) is stopped")
        return "; ".join([self.doing, *stopped])

    def _join(self) -> dist.Store | None:
        """A connection of the thread's own: the main thread's may be waiting for an answer."""
        if self.process.world == 1:
            return None
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=ANSWER)
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
            self.asking.join(ANSWER)
        return answers[0] if answers else None

    @staticmethod
    def _key(rank: int) -> str:
        return f"xscale/beat/{rank}"

    def _listen(self, store: dist.Store | None) -> str:
        """For whom this rank waits, as far as it can tell."""
        if self.process.world == 1:
            return "it is the only rank"
        if self.process.rank not in LISTEN:
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
            with suppress(ProcessLookupError):  # the loader's: their stacks come to the same file (metrics.py), in turn
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.2)
        LOG.error(f"rank {self.process.rank}: {why}. Its stacks are in {self.stacks}; start again: the run goes on")
        self.ended(code, why)
        threading.Event().wait()


def names_of_ranks(host_group: HostGroup) -> list[str]:
    """Such as "rank 3 (host node7, process 4711)"."""
    return host_group.gather(f"rank {host_group.rank} (host {os.uname().nodename}, process {os.getpid()})")
