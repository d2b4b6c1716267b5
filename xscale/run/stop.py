"""When a run should save and end before its last step."""

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
SCRIPTS = {"deepspeed", "torchrun", "deepspeed.launcher.launch", "deepspeed.launcher.runner", "torch.distributed.run"}
PROGRAMS = {"mpirun", "mpiexec", "orterun", "prterun"}


def hold() -> None:
    """Keep SIGUSR2 pending, where StopRequest sees it, for this process and all that it starts.

    SLURM sends it to every process of a job: it would end one that is still importing, or a compiler at work for it.
    So would SIGUSR1, which asks for stacks: they go to the console until the rank has its log (metrics.py).
    """
    faulthandler.register(signal.SIGUSR1, 2)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})


class StopRequest:
    """Set by a signal or the time limit; read at step boundaries, and by the thread that waits for one (watch.py)."""

    def __init__(self, minutes: float | None):
        self.reason = ""
        self.deadline = time.monotonic() + 60 * minutes if minutes is not None else None
        self.launchers = [process for process in psutil.Process().parents() if _is_launcher(process)]
        """Killed, some of them leave their ranks alone."""
        self.moved = False
        """Whether a step was made since the start: a time limit that is shorter than that would never advance."""
        self.terminals = [number for number in range(3) if os.isatty(number)]
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as of nohup
                signal.signal(number, self._note)  # of SIGUSR2 for threads from before `hold`
        # Python runs a handler between two of its own instructions, and a collective that hangs is one: a signal is
        # also written into a pipe, at once.
        self.woken, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        hold()

    def _note(self, number: int, frame: Any) -> None:
        self.reason = signal.Signals(number).name
        if number == signal.SIGHUP:  # a terminal that is gone takes no more lines
            nowhere = os.open(os.devnull, os.O_RDWR)
            for terminal in self.terminals:
                os.dup2(nowhere, terminal)
            os.close(nowhere)

    @property
    def why(self) -> str:
        return self.reason or "another rank was told to"

    @property
    def late(self) -> bool:
        """Whether the time limit is over."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def __bool__(self) -> bool:
        with contextlib.suppress(BlockingIOError):
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
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_launcher(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        program, *words = (Path(word).name for word in process.cmdline()[:4])
        return program in PROGRAMS or (program.startswith("python") and not SCRIPTS.isdisjoint(words))
    return False
