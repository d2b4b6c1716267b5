"""A run ends early if it is asked to stop (`StopRequest`), or if a rank hangs (`Watch`).

A thread of every rank tells the other ranks what its rank is doing. It uses torch's TCPStore, through which the ranks
found each other. A rank that makes no progress for `train.stall_limit` minutes writes its stacks into logs/rankN.log,
logs which ranks it waits for, and ends with exit code 5. The watch notices processes that are suspended or gone, and
hangs in a file system, a collective or a lock. A rank that was asked to stop and has not begun its last save after
`train.stop_limit` minutes ends with exit code 75.
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
"""The longest wait for an answer of the store. The store runs on rank 0, and its own timeouts do not notice that rank 0
is suspended."""
END_SECONDS = 8.0
"""The seconds from the report of a stall to the exit. The process exits even if writing the report hangs."""
KEY = "xscale/beat/{}"
"""The name of a rank's beat in the store."""
LISTENERS = (0, 1)
"""The ranks that ask the store which rank is missing. All ranks would ask too often, and a single rank may itself be
missing."""


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
        """True once this start has made a step. Before that, the time limit has no effect; otherwise a limit shorter
        than the start-up would allow no progress."""
        self.terminals = [number for number in range(3) if os.isatty(number)]
        for number in SIGNALS:
            # Nohup makes processes ignore SIGHUP.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)  # threads older than `hold_signals` may get SIGUSR2
        # Python runs handlers between its own instructions, and so never while a collective hangs. Each signal is
        # therefore also written into a pipe at once.
        self.pipe, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        hold_signals()

    def _note(self, number: int, frame: Any) -> None:
        self.reason = signal.Signals(number).name
        if number == signal.SIGHUP:  # nothing can be written to a closed terminal
            nowhere = os.open(os.devnull, os.O_RDWR)
            for terminal in self.terminals:
                os.dup2(nowhere, terminal)
            os.close(nowhere)

    def note_step(self) -> None:
        """Note that this start has made a step."""
        self.has_stepped = True

    @property
    def why(self) -> str:
        return self.reason or "another rank was asked to stop"

    @property
    def late(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() >= self.deadline

    def __bool__(self) -> bool:
        if not self.reason:
            self.reason = self._find_reason()
        return bool(self.reason)

    def _find_reason(self) -> str:
        with suppress(BlockingIOError):
            for number in os.read(self.pipe, 64):
                if number in SIGNALS:
                    return signal.Signals(number).name
        if signal.SIGUSR2 in signal.sigpending():
            return signal.SIGUSR2.name
        if self.has_stepped and self.late:
            return "time limit"
        if not all(map(_lives, self.launchers)):
            return "its launcher is gone"
        return ""


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_launcher(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        program, *words = [Path(word).name for word in process.cmdline()[:4]]
        return program in PROGRAMS or (program.startswith("python") and not SCRIPTS.isdisjoint(words))
    return False


class Beat(NamedTuple):
    """A message from a rank's watch thread to the other ranks."""

    number: int
    """The number of the thread's check. It does not grow while the process is suspended."""
    marks: int
    """The number of calls of `note` so far, which shows the rank's progress."""
    doing: str


class LastBeat(NamedTuple):
    """The last beat of a rank, as another rank knows it."""

    beat: Beat
    came: float
    """The time of the listener's clock at which the beat was first seen."""


class Store:
    """The store through which the ranks found each other. The watch has its own connection, because that of the main
    thread may be waiting for an answer. The store runs on rank 0 and hangs while rank 0 is suspended, so an answer that
    does not come in time is None."""

    def __init__(self) -> None:
        self.asking: threading.Thread | None = None
        self.store = self.ask_or_none(self._join)

    def _join(self) -> dist.Store:
        timeout = timedelta(seconds=ANSWER_SECONDS)
        port = int(os.environ["MASTER_PORT"])
        return dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=timeout, wait_for_workers=False)

    def ask_or_none(self, question: Callable[[], Any]) -> Any:
        """Return the answer; None if the store does not answer this or an earlier question in time."""
        answers = list[Any]()

        def run() -> None:
            with suppress(Exception):
                answers.append(question())

        if self.asking is None or not self.asking.is_alive():
            self.asking = threading.Thread(target=run, name="xscale-watch-ask", daemon=True)
            self.asking.start()
            self.asking.join(ANSWER_SECONDS)
        return answers[0] if answers else None

    def send(self, rank: int, beat: Beat) -> None:
        self.ask_or_none(lambda: self.store.set(KEY.format(rank), json.dumps(beat)))

    def beats(self, world: int) -> dict[int, Beat] | None:
        """Return the last beat of each rank that has sent one; None if the store does not answer."""

        def read() -> dict[int, Beat]:
            beats = {}
            for rank in range(world):
                key = KEY.format(rank)
                if self.store.check([key]):
                    beats[rank] = Beat(*json.loads(self.store.get(key)))
            return beats

        return self.ask_or_none(read)


class Watch:
    """Records what this rank is doing, and ends the rank if it hangs."""

    def __init__(
        self, process: Process, names: list[str], stacks: Path, ended: Callable[[int, str], None], stop: StopRequest
    ):
        """Prepare a watch, which `begin` starts. stacks: the file to which stacks are written. ended: a function that
        is called with the exit code and the reason before the process ends."""
        self.process = process
        self.names = names
        self.stacks = stacks
        self.ended = ended
        self.stop = stop
        self.doing = "starting"
        self.marks = 0
        self.limit = math.inf
        """train.stall_limit in seconds."""
        self.stop_limit = math.inf
        """train.stop_limit in seconds."""
        self.stopping = False
        """True once the run makes no further step and only saves, so that `stop_limit` no longer applies."""
        self.clock = 0.0
        """The seconds since `begin`, without the time in which this process was suspended, for example by SIGSTOP or
        SLURM."""
        self.last_beats: dict[int, LastBeat] = {}
        self.closed = threading.Event()

    def note(self, doing: str) -> None:
        """Record that the rank makes progress, and what it does next. The main thread calls this several times in each
        step."""
        self.doing = doing
        self.marks += 1

    def note_last_save(self) -> None:
        """Note that the run makes no further step and only saves."""
        self.stopping = True

    def begin(self, minutes: float | None, stop_minutes: float | None) -> None:
        """Begin to watch, in a thread. minutes: train.stall_limit. stop_minutes: train.stop_limit."""
        if minutes is not None:
            self.limit = 60 * minutes
        if stop_minutes is not None:
            self.stop_limit = 60 * stop_minutes
        if min(self.limit, self.stop_limit) < math.inf:
            threading.Thread(target=self._watch, name="xscale-watch", daemon=True).start()

    def close(self) -> None:
        self.closed.set()

    @property
    def pause(self) -> float:
        """The seconds between two checks by the watch thread."""
        return min(LOOK_SECONDS, self.limit / 8, self.stop_limit / 8)

    def _watch(self) -> None:
        """Until `close`, check that this rank makes progress, and that it stops in time when it is asked to."""
        store = Store() if self.process.world > 1 else None
        number = 0
        marks = self.marks
        progress = 0.0
        asked_to_stop = 0.0
        warning = FIRST_WARNING_SECONDS
        checked = time.monotonic()
        while not self.closed.wait(self.pause):
            now = time.monotonic()
            self.clock += min(now - checked, 2 * self.pause)  # while the process was suspended, it has checked nothing
            checked = now
            number += 1
            if store:
                store.send(self.process.rank, Beat(number, self.marks, self.doing))

            if not self.stop:
                asked_to_stop = self.clock
            elif self.clock - asked_to_stop >= self.stop_limit and not self.stopping:
                late = f"but the last save has not begun after {self.stop_limit:.0f} s, {self.doing}"
                self._end(f"{self.stop.why}, {late}; {self._others(store)}", STOPPED)

            if self.marks != marks:
                marks = self.marks
                progress = self.clock
                warning = FIRST_WARNING_SECONDS
            idle = self.clock - progress
            if idle < min(self.limit / 2, warning):
                continue
            line = f"no progress for {idle:.0f} s, {self.doing}; {self._others(store)}"
            if idle >= self.limit:
                self._end(line, STUCK)
            if idle >= warning and self.process.is_main:
                LOG.warning(line)
                warning = 2 * idle

    def _others(self, store: Store | None) -> str:
        """Return which ranks this rank waits for, as far as it knows."""
        if store is None:
            return "it is the only rank"
        if self.process.rank not in LISTENERS:
            return "logs/rank0.log may say for which rank it waits"
        if store.store is None:
            return "the other ranks cannot be asked"
        beats = store.beats(self.process.world)
        if beats is None:
            return f"{self.names[0]} does not answer"
        return self._waits_for(beats)

    def _waits_for(self, beats: dict[int, Beat]) -> str:
        """Return which ranks do not answer; if all answer, return which ranks have made the least progress. beats: the
        last beat of each rank that has sent one."""
        for rank, beat in beats.items():
            last = self.last_beats.get(rank)
            if last is None or last.beat.number != beat.number:
                self.last_beats[rank] = LastBeat(beat, self.clock)
        silent = list[str]()
        behind = list[str]()
        least = min((last.beat.marks for last in self.last_beats.values()), default=0)
        for rank, name in enumerate(self.names):
            last = self.last_beats.get(rank)
            if last is None:
                silent.append(f"{name} has sent nothing")
            elif self.clock - last.came > 3 * self.pause:
                seconds = self.clock - last.came
                silent.append(f"{name} has not answered for {seconds:.0f} s (stopped, or its machine is gone)")
            elif last.beat.marks == least:
                behind.append(f"{name} is behind, {last.beat.doing}")
        if not silent and len(behind) == self.process.world:
            return "all ranks have made the same progress"
        return "waiting for others: " + "; ".join((silent or behind)[:8])

    def _end(self, why: str, code: int) -> None:
        """Write the stacks of this rank and of its processes, and end with the exit code."""
        threading.Timer(END_SECONDS, os._exit, [code]).start()
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
        self.ended(code, why)
        threading.Event().wait()


def names_of_ranks(host_group: HostGroup) -> list[str]:
    """Return the names of all ranks, such as "rank 3 (host node7, process 4711)"."""
    return host_group.gather(f"rank {host_group.rank} (host {os.uname().nodename}, process {os.getpid()})")
