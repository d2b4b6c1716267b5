"""What a run writes while it trains: metrics.jsonl, TensorBoard, the trace, the console and run.log.

Each file has every step once: a resume first cuts what lies past its checkpoint.
"""

import faulthandler
import hashlib
import importlib
import json
import logging
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from xscale import files
from xscale.config import Recipe
from xscale.errors import printable
from xscale.step.step import StepSums

LOG = logging.getLogger("xscale")
LINE_SECONDS = 5.0
"""Least time between progress lines where the console is not a terminal."""
BUFFER, MOST_KEPT = 1 << 16, 1 << 26
"""Bytes of lines after which a file of them is written without a flush; of lines that wait for a disk with room."""
RETRY_SECONDS, MOST_ENTRIES = 600.0, 10_000
"""How long TensorBoard's files rest after a failure; how many steps are kept for them meanwhile."""


def start_logging(out: Path, rank: int) -> Path:
    """Console lines, of other ranks than 0 warnings alone; all of them in logs/rankN.log, and rank 0's in run.log.
    Returns the rank's own file."""
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    LOG.handlers.clear()
    console: logging.Handler = _TqdmHandler() if sys.stderr.isatty() else logging.StreamHandler(sys.stdout)
    console.setLevel(logging.WARNING if rank else logging.INFO)
    (out / "logs").mkdir(exist_ok=True)
    path = out / "logs" / f"rank{rank}.log"
    own = _FileHandler(path, encoding="utf-8")
    handlers = [own, console] + ([] if rank else [_FileHandler(out / "run.log", encoding="utf-8")])
    for handler in handlers:
        date = "%Y-%m-%d %H:%M:%S" if handler is own else "%H:%M:%S"
        handler.setFormatter(_Printable("%(asctime)s %(message)s", datefmt=date))
        LOG.addHandler(handler)
    stacks = path.open("a")
    faulthandler.enable(stacks)  # of a crash
    faulthandler.register(signal.SIGUSR1, stacks)  # when somebody asks; also of the loader's processes, as they fork
    LOG.info(f"rank {rank}: host {os.uname().nodename}, process {os.getpid()}")
    return path


def log_to_files(line: str) -> None:
    """What the console shows by another way."""
    for handler in LOG.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(LOG.makeRecord("xscale", logging.INFO, "", 0, line, (), None))


def flat(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Such as {"data.alpha": 0.7}."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return found


class _Printable(logging.Formatter):
    """Names of files and records may hold characters that a terminal obeys."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _FileHandler(logging.FileHandler):
    """A line that a full disk does not take is on the console: no traceback a line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _TqdmHandler(logging.Handler):
    """Writes a line above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


class Alarm:
    """Says once that something does not work, and once that it does again."""

    def __init__(self, what: str):
        self.what, self.on = what, False

    def set(self, problem: str) -> None:
        if not self.on:
            LOG.error(f"{self.what}: {problem}")
        self.on = True

    def clear(self) -> None:
        if self.on:
            LOG.warning(f"{self.what}: works again")
        self.on = False


class JsonLines:
    """An append-only file of objects with a "step" field, or nothing where `path` is None.

    Lines that cannot be written, as on a full disk, are kept for the next time, up to MOST_KEPT bytes.
    """

    def __init__(self, path: Path | None, after_step: int):
        """Keeps the lines of steps up to `after_step` and drops the rest, half-written ones too."""
        self.file = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with files.publish(path) as kept, path.open("rb") as old, kept.open("wb") as new:
                new.writelines(line for line in old if _step_of(line) <= after_step)
        self.path, self.file = path, path.open("ab", buffering=0)
        self.end = path.stat().st_size
        """Of the last whole line."""
        self.lines: deque[bytes] = deque()
        self.size, self.lost = 0, 0
        """Bytes of `lines`; how many lines there was no room for."""
        self.alarm = Alarm(str(path))

    def write(self, entry: dict[str, Any]) -> None:
        """What is not finite, such as the gradient norm of an overflow, becomes null: JSON has no word for it."""
        if self.file:
            self.lines.append((json.dumps(_finite(entry), ensure_ascii=False, allow_nan=False) + "\n").encode())
            self.size += len(self.lines[-1])
            if self.size > BUFFER:
                self.flush()
            while self.size > MOST_KEPT:
                self.size -= len(self.lines.popleft())
                self.lost += 1

    def flush(self, to_disk: bool = False) -> None:
        if not self.file:
            return
        try:
            if os.fstat(self.file.fileno()).st_nlink == 0:
                self._begin_anew()
            if self.lines:
                self._append(b"".join(self.lines))
                self.lines.clear()
                self.size = 0
            if to_disk:
                os.fsync(self.file.fileno())
        except OSError as error:
            self.alarm.set(f"{error.strerror}; training goes on, and its lines are kept in memory until this is mended")
            return
        if self.lost:
            LOG.error(f"{self.alarm.what}: {self.lost:,} lines are lost, for which there was no room in memory")
            self.lost = 0
        self.alarm.clear()

    def _begin_anew(self) -> None:
        """Of a file that somebody has removed, whose lines nobody would see. Its folder is not made again: it may be
        another run's soon."""
        assert self.file
        anew = self.path.open("ab", buffering=0)
        self.file.close()
        self.file, self.end = anew, self.path.stat().st_size
        LOG.error(f"{self.path} was removed while the run goes on; a new one has the lines from now on")

    def _append(self, data: bytes) -> None:
        """All of it, or nothing: what a write that failed has left is cut off."""
        assert self.file
        if os.fstat(self.file.fileno()).st_size > self.end:
            self.file.truncate(self.end)  # it could not be cut off then
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError:
            with suppress(OSError):
                self.file.truncate(self.end)
            raise
        self.end += len(data)

    def drop(self) -> None:
        """Nothing more is written, also not what waits."""
        self.file = None

    def close(self) -> None:
        self.flush(to_disk=True)
        if self.file and self.lines:
            LOG.error(f"{self.alarm.what}: its last {len(self.lines):,} lines are lost")


def _finite(value: Any) -> Any:
    """Null in the place of every number that is none."""
    if isinstance(value, dict):
        return {name: _finite(of) for name, of in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: bytes) -> float:
    """The line's step; infinity for a line that is half-written, or that no run has written."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, LookupError, TypeError, RecursionError):
        step = None
    return step if isinstance(step, int | float) and not isinstance(step, bool) else math.inf


@dataclass
class StepRecord:
    """What a step leaves for the metrics; sums stay on the device until somebody looks."""

    step: int
    sums: StepSums
    targets: dict[tuple[str, str], int]
    """Of all ranks, by stream and term."""
    lr: float
    skipped: int
    tokens: int
    samples: int
    too_long: int
    data_wait_s: float
    step_s: float
    loss_scale: float | None
    grad_norm: Any
    """A number, or a tensor."""
    measured: dict[str, Any]
    """Further metrics."""

    def entry(
        self, totals_K: list[float], recipe: Recipe, counts: dict[tuple[str, str, str], int] | None = None
    ) -> dict[str, Any]:
        """The step's line of metrics.jsonl. totals: `sums` of all ranks; counts: so Row.counts."""
        shares = self.sums.shares(totals_K, recipe, self.targets)
        loss = sum(recipe.stream_weight(name, self.step - 1) * shares[f"loss/{name}"] for name in recipe.streams)
        entry = {"step": self.step, "loss": loss} | shares
        entry |= {"grad_norm": self.grad_norm, "lr": self.lr, "skipped": self.skipped}
        entry |= {f"count/{stream}": count for (stream, _), count in reversed(self.targets.items())}
        entry |= self.sums.by_language(totals_K, recipe, counts or {})
        entry |= {name: getattr(self, name) for name in ("tokens", "samples", "too_long", "data_wait_s")}
        entry |= {} if self.loss_scale is None else {"loss_scale": self.loss_scale}
        entry |= self.measured | {"step_s": self.step_s}
        seconds = max(self.step_s, 1e-9)
        entry |= {"tokens_per_s": self.tokens / seconds, "samples_per_s": self.samples / seconds}
        return {name: float(v) if isinstance(v, Tensor) else v for name, v in entry.items()}


class Board:
    """The metrics for TensorBoard. After a failed write a new file is begun, later, with what was not flushed."""

    def __init__(self, folder: Path, first_step: int):
        self.folder, self.alarm = folder, Alarm(str(folder))
        self.kept: deque[dict[str, Any]] = deque(maxlen=MOST_ENTRIES)
        self.failed = 0.0
        self.writer = self._open(first_step + 1)

    def _open(self, purge_step: int | None = None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder), purge_step=purge_step)

    def add(self, entry: dict[str, Any]) -> None:
        self.kept.append(entry)
        if self.writer is None and time.monotonic() - self.failed < RETRY_SECONDS:
            return
        with self._alarm():
            entries = [entry] if self.writer else [*self.kept]
            self.writer = self.writer or self._open()
            for entry in entries:
                for name, value in entry.items():
                    if name != "step" and isinstance(value, int | float):
                        self.writer.add_scalar(name, value, entry["step"])

    def describe(self, fields: dict[str, Any]) -> None:
        """The recipe's fields, for TensorBoard's table of runs."""
        from torch.utils.tensorboard.summary import hparams

        plain = {name: value if isinstance(value, int | float | str) else str(value) for name, value in fields.items()}
        if self.writer is not None:
            with self._alarm():
                for summary in hparams(plain, {"loss": 0}):
                    self.writer.file_writer.add_summary(summary)

    def flush(self) -> None:
        if self.writer is not None:
            with self._alarm():
                self.writer.flush()
                self.kept.clear()
                self.alarm.clear()

    @contextmanager
    def _alarm(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a thread of TensorBoard's; TensorFlow, where it is installed, has its own
            self.alarm.set(f"{error}; training goes on, metrics.jsonl has what is missing here")
            if self.writer is not None:
                with suppress(Exception):
                    self.writer.file_writer.event_writer.close()
            self.writer, self.failed = None, time.monotonic()

    def close(self) -> None:
        self.flush()
        if self.writer is not None:
            with self._alarm():
                self.writer.close()


class Tracker:
    """wandb, or what has its calls, as trackio. One that fails is left alone from then on."""

    def __init__(self, name: str, out: Path, fields: dict[str, Any]):
        self.name, self.alarm = name, Alarm(name)
        # The same run after a resume, by the directory.
        os.environ.setdefault("WANDB_RUN_ID", hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16])
        project = os.environ.get("XSCALE_PROJECT", "xscale")
        self._call("init", project=project, name=out.name, config=fields, resume="allow")

    def add(self, entry: dict[str, Any]) -> None:
        numbers = {name: value for name, value in entry.items() if name != "step" and value is not None}
        self._call("log", numbers, step=entry["step"])

    def _call(self, function: str, /, *arguments: Any, **named: Any) -> None:
        if self.alarm.on:
            return
        try:
            getattr(importlib.import_module(self.name), function)(*arguments, **named)
        except Exception as error:
            self.alarm.set(f"{error}; training goes on without, metrics.jsonl has everything")

    def close(self) -> None:
        self._call("finish")


class Reporter:
    """Rank 0's view of the run: one call for each step, in order."""

    def __init__(self, out: Path, first_step: int, recipe: Recipe):
        self.metrics = JsonLines(out / "metrics.jsonl", first_step)
        self.board = Board(out / "tb", first_step)
        self.steps, self.streams = recipe.train.steps, list(recipe.streams)
        self.measured_every = recipe.eval.every if recipe.eval.tasks else 0
        fields = flat(recipe.to_dict())
        self.board.describe(fields)
        self.tracker = Tracker(recipe.train.tracker, out, fields) if recipe.train.tracker else None
        self.started, self.first_step = time.monotonic(), first_step
        self.last_line = 0.0
        self.bar = tqdm(total=self.steps, initial=first_step, unit="step") if sys.stderr.isatty() else None

    def report(self, entry: dict[str, Any]) -> None:
        self.metrics.write(entry)
        self.add(entry)
        step = entry["step"]
        if self.bar is not None:
            self.bar.update()
            self.bar.set_postfix_str(f"loss {entry['loss']:.3f}, {entry['tokens_per_s']:,.0f} tokens/s")
        now = time.monotonic()
        measured = self.measured_every and step % self.measured_every == 0  # its own loss stands before held-out ones
        if now - self.last_line >= LINE_SECONDS or measured or step in (self.first_step + 1, self.steps):
            self.last_line = now
            if self.bar is None:
                LOG.info(self.line(entry))
            else:
                log_to_files(self.line(entry))

    def add(self, entry: dict[str, Any]) -> None:
        """Numbers of a step, for the pictures."""
        self.board.add(entry)
        if self.tracker:
            self.tracker.add(entry)

    def line(self, entry: dict[str, Any]) -> str:
        """Such as `step 12/200  loss 8.9 (mlm 8.9, tlm 8.9)  lr 2.4e-04  5,210 tokens/s  0.41 s/step  eta 0:01:17`."""
        step = entry["step"]
        done = step - self.first_step
        left = int((time.monotonic() - self.started) / max(done, 1) * (self.steps - step))
        parts = ", ".join(f"{name} {entry[f'loss/{name}']:.3f}" for name in self.streams)
        eta = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
        return (
            f"step {step}/{self.steps}  loss {entry['loss']:.3f} ({parts})  lr {entry['lr']:.1e}  "
            f"{entry['tokens_per_s']:,.0f} tokens/s  {entry['step_s']:.2f} s/step  eta {eta}"
        )

    def flush(self, to_disk: bool = False) -> None:
        self.metrics.flush(to_disk)
        self.board.flush()

    def close(self) -> None:
        self.metrics.close()
        self.board.close()
        if self.tracker:
            self.tracker.close()
        if self.bar is not None:
            self.bar.close()
