"""When a run should save and end before its last step."""

import signal
import time
from typing import Any


class StopRequest:
    """Set by a signal or the time limit; read at step boundaries."""

    def __init__(self, minutes: float | None):
        self.reason = ""
        self.deadline = time.monotonic() + 60 * minutes if minutes is not None else None
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.reason = signal.Signals(number).name

    def __bool__(self) -> bool:
        if not self.reason and self.deadline is not None and time.monotonic() >= self.deadline:
            self.reason = "time limit"
        return bool(self.reason)
