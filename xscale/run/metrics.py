"""Writes a run's metrics and logs: metrics.jsonl, TensorBoard, the trace, the console and run.log.

Each file has every step once, because a resume first removes the lines of steps after its checkpoint.
"""

import faulthandler
import json
import logging
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from xscale import files
from xscale.errors import safe_to_show

LOG = logging.getLogger("xscale")
BUFFER = 1 << 16
"""Lines wait in memory until they have more than this number of bytes, or until the next flush."""
MOST_WAITING = 1 << 24
"""Lines that cannot be written, as on a full disk, stay in memory. If they have more bytes than this, they are lost."""


def start_logging(out: Path, rank: int) -> Path:
    """Log to logs/rankN.log and the console, which shows only the warnings of ranks other than 0. Rank 0 also logs to
    run.log. Returns the path of logs/rankN.log."""
    LOG.setLevel(logging.DEBUG)  # tracebacks, in the files alone
    LOG.propagate = False
    logging.raiseExceptions = False  # lines that cannot be written, as on a full disk, are dropped
    LOG.handlers.clear()
    console: logging.Handler = logging.StreamHandler(sys.stdout)
    console.setLevel(logging.WARNING if rank else logging.INFO)
    (out / "logs").mkdir(exist_ok=True)
    path = out / "logs" / f"rank{rank}.log"
    rank_log = logging.FileHandler(path, encoding="utf-8")
    for handler in [rank_log, console] + ([] if rank else [logging.FileHandler(out / "run.log", encoding="utf-8")]):
        date = "%Y-%m-%d %H:%M:%S" if handler is rank_log else "%H:%M:%S"
        handler.setFormatter(_Printable("%(asctime)s %(message)s", datefmt=date))
        LOG.addHandler(handler)
    stacks = path.open("a")
    faulthandler.enable(stacks)  # a crash writes its stacks to the same file
    faulthandler.register(signal.SIGUSR1, stacks)  # the processes of the loader inherit this setting
    LOG.info(f"rank {rank}: host {os.uname().nodename}, process {os.getpid()}")
    return path


class _Printable(logging.Formatter):
    """A formatter that escapes control characters, which names of files and records may have."""

    def format(self, record: logging.LogRecord) -> str:
        return safe_to_show(super().format(record))


# Files of lines


class JsonLines:
    """An append-only file of JSON objects with a "step" field, or no file if `path` is None.

    Training continues while lines cannot be written, as on a full disk. The lines wait in memory, up to MOST_WAITING
    bytes; more are lost.
    """

    def __init__(self, path: Path | None, after_step: int):
        """Open the file, without what follows the last complete line of a step up to `after_step`.

        A new file replaces the old one, because a run that has lost this directory may still write to the old file.
        """
        self.file = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self.end = 0
        """The size of the file up to its last complete line, in bytes."""
        if path.exists():
            self.end = next((end for end, entry in entries_from_end(path) if entry["step"] <= after_step), 0)
            with files.publish(path) as kept:
                shutil.copyfile(path, kept)
                os.truncate(kept, self.end)
        self.path = path
        self.file = path.open("ab", buffering=0)
        self.lines = list[bytes]()
        """The lines that wait."""
        self.size = 0
        """The size of `lines` in bytes."""
        self.failing = False
        """True if the last attempt to write failed."""

    def write(self, entry: dict[str, Any]) -> None:
        """Add a line. It stays in memory until `flush`, or until more than BUFFER bytes wait. A number that
        is not finite becomes null."""
        if self.file:
            self.lines.append(_encoded(entry))
            self.size += len(self.lines[-1])
            if self.size > BUFFER:
                self.flush()

    def flush(self, to_disk: bool = False) -> None:
        if self.file and self.lines:
            problem = self._append_or_error(b"".join(self.lines))
            if problem and not self.failing:
                LOG.error(f"{self.path}: {problem}; training continues, and the lines wait until this is fixed")
            elif self.failing and not problem:
                LOG.warning(f"{self.path}: works again")
            self.failing = problem is not None
            if problem and self.size > MOST_WAITING:
                LOG.error(f"{self.path}: {len(self.lines):,} lines could not wait any longer and are lost")
            if not problem or self.size > MOST_WAITING:
                self.lines = []
                self.size = 0
        if self.file and to_disk:
            try:
                os.fsync(self.file.fileno())
            except OSError as error:
                LOG.error(f"{self.path}: {error.strerror}; its last lines may be lost")

    def _append_or_error(self, data: bytes) -> str | None:
        """Write all of the data or nothing. Returns an error's message, or None."""
        assert self.file
        try:
            if os.fstat(self.file.fileno()).st_size > self.end:
                # An earlier write failed, and left a part of a line that could not be removed.
                self.file.truncate(self.end)
            rest = memoryview(data)
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self.file.truncate(self.end)
            return error.strerror or str(error)
        self.end += len(data)
        return None

    def close(self) -> None:
        self.flush(to_disk=True)
        if self.file and self.failing:
            LOG.error(f"{self.path}: its last {len(self.lines):,} lines are missing")


def _encoded(entry: dict[str, Any]) -> bytes:
    return (json.dumps(_null_if_not_finite(entry), ensure_ascii=False, allow_nan=False) + "\n").encode()


def _null_if_not_finite(value: Any) -> Any:
    """Return the value; every number in it that is not finite becomes None."""
    if isinstance(value, dict):
        return {name: _null_if_not_finite(of) for name, of in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def entries_from_end(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file of lines from the last to the first, each with the offset at which its line ends.
    Lines that are incomplete, or have no step, are left out."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    while end:
        start = data.rfind(b"\n", 0, end - 1) + 1
        entry: Any = None
        with suppress(ValueError, RecursionError):
            entry = json.loads(data[start:end])
        # Numbers of more than 308 digits are no floats, so that math.isfinite would raise an error.
        if isinstance(entry, dict) and type(entry.get("step")) in (int, float) and abs(entry["step"]) < math.inf:
            yield end, entry
        end = start


class Board:
    """Writes metrics for TensorBoard, in addition to metrics.jsonl. After the first error, it writes nothing more."""

    def __init__(self, folder: Path | None, after_step: int):
        """Begin after a step. folder: where to write; None: nowhere."""
        self.folder = folder
        self.writer: Any = None
        if folder:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = self.attempt(SummaryWriter, str(folder), purge_step=after_step + 1)

    def attempt(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:  # the library may raise any type
            self.writer = None
            LOG.error(
                f"{self.folder}: {error}; training continues without TensorBoard, and metrics.jsonl has all metrics"
            )

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the writer, such as "flush"."""
        if self.writer:
            self.attempt(getattr(self.writer, function), *arguments)

    def add(self, entry: dict[str, Any]) -> None:
        """Add the numbers of a step's line of metrics.jsonl."""
        for name, value in entry.items():
            if name != "step" and isinstance(value, int | float):
                self.call("add_scalar", name, value, entry["step"])
