"""When a run should save and end before its last step."""

import signal
import time
from typing import Any


def hold() -> None:
    """Keep a SIGUSR2 until a StopRequest is there to note it: it would kill a process that is still importing."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})


class StopRequest:
    """Set by a signal or the time limit; read at step boundaries."""

    def __init__(self, minutes: float | None):
        self.reason = ""
        self.deadline = time.monotonic() + 60 * minutes if minutes is not None else None
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})  # what came since `hold`

    def _note(self, number: int, frame: Any) -> None:
        self.reason = signal.Signals(number).name

    @property
    def why(self) -> str:
        return self.reason or "another rank was told to"

    def __bool__(self) -> bool:
        if not self.reason and self.deadline is not None and time.monotonic() >= self.deadline:
            self.reason = "time limit"
        return bool(self.reason)
