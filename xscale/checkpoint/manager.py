"""What a run saves, and which of its checkpoints stay: the newest, the newest good one, and the best."""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.store import Checkpoint, Saver
from xscale.ranks import HostGroup
from xscale.run.metrics import LOG, Alarm
from xscale.run.validation import Validation
from xscale.run.watch import Watch


class CheckpointManager:
    """Of one run, on every rank; all ranks call `save` and `settle` together."""

    def __init__(
        self,
        engine: Any,
        folder: Path,
        host_group: HostGroup,
        watch: Watch,
        validation: Validation,
        keep: int,
        checkpoint: Checkpoint | None,
    ):
        """keep: how many of the newest stay. checkpoint: that the engine was loaded from."""
        self.folder, self.host_group, self.watch, self.validation, self.keep = (
            folder,
            host_group,
            watch,
            validation,
            keep,
        )
        self.saver, self.alarm = Saver(engine, folder, host_group), Alarm(str(folder))
        self.saved: int | None = checkpoint.step if checkpoint else None
        """The step of the newest checkpoint."""
        self.good: int | None = self.saved
        """The newest checkpoint that was begun while no step was skipped."""
        self.sound = True
        """Whether the checkpoint under way was."""
        self.blocked, self.times = 0.0, dict[str, float]()
        """Seconds that steps have waited for the checkpoint under way; what the next step's metrics say of that."""

    @property
    def under_way(self) -> int | None:
        """The step of the checkpoint that is being written."""
        return self.saver.step

    def save(
        self,
        step: int,
        manifest: dict[str, Any],
        more: Callable[[Path], None],
        *,
        sound: bool,
        behind: bool,
        must: bool,
    ) -> None:
        """A checkpoint of the steps done, where there is none yet. more: writes what belongs to it beside DeepSpeed's
        files, on rank 0. sound: no step is being skipped. behind: write while training goes on. must: wait for it, and
        raise OSError without it."""
        self.settle()
        if step == self.saved:
            return
        started, self.sound = time.monotonic(), sound
        behind = behind and not must
        self.watch.note(f"saving step {step}")
        self.saver.begin(step, manifest, more, copies=behind)
        self.note_wait(started)
        if not behind:
            self.settle(must)

    def settle(self, must: bool = False) -> None:
        """Publish the checkpoint under way, once all ranks have written it."""
        if self.saver.step is None:
            return
        started, step, path = time.monotonic(), self.saver.step, self.saver.final
        self.watch.note(f"waiting for the checkpoint of step {step}")
        problem, seconds = self.saver.finish()
        if problem and must:
            then = "begin" if self.saved is None else f"go on from step {self.saved}"
            text = f"step {step} is not saved ({problem}); free some disk space to {then}"
            raise OSError(errno.EIO, text, str(self.folder))
        if problem and self.host_group.is_main:
            self.alarm.set(
                f"step {step} is not saved ({problem}); training goes on, older checkpoints are untouched, and the "
                f"next save tries again"
            )
        if not problem:
            self.saved, self.good = step, step if self.sound else self.good
            if self.host_group.is_main:
                self.alarm.clear()
                self.validation.saved(step, path)
                needed = self.validation.needed() | ({self.good} if self.good is not None else set())
                checkpoints.clean(self.folder, self.keep, needed)
        self.note_wait(started)
        self.times["save_write_s"] = seconds
        if not problem:
            LOG.info(f"saved {path} in {seconds:.2f} s, for which training waited {self.blocked:.2f} s")
        self.blocked = 0.0

    def note_wait(self, started: float) -> None:
        seconds = time.monotonic() - started
        self.blocked += seconds
        self.times["save_blocked_s"] = self.times.get("save_blocked_s", 0.0) + seconds
