"""Saves the checkpoints of a run. Decides which of them to keep: the newest ones, the newest good one, and the best
one.

Every rank writes and hashes its own files. With checkpoint.background a thread does this while training continues.
"""

import errno
import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from xscale import files
from xscale.checkpoint import store
from xscale.checkpoint.snapshot import take_snapshot
from xscale.deepspeed_private import copy_conversion_script
from xscale.errors import UserError
from xscale.ranks import HostGroup

LOG = logging.getLogger("xscale")
SPARE_BYTES = 1 << 28
"""The number of bytes that must stay free on the disk after a save."""
WriteModel = Callable[[int, Path], None]
"""A function that writes the model's config and the tokenizer of a step into a checkpoint's directory. Rank 0 calls
it."""


class RankFiles(NamedTuple):
    """The files that one rank has written of a checkpoint."""

    problem: Exception | None
    """The error that kept the rank from writing its files."""
    sealed: dict[str, Any]
    """The size and hash of each file."""
    seconds: float


class Save(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    manifest: dict[str, Any]
    """The manifest without its list of files."""
    good: bool
    """True if fp16 is not skipping steps at the moment, so that the weights are probably sound."""
    files: "Future[RankFiles]"
    """The files of this rank, once they are written."""


class Publication(NamedTuple):
    """The result of publishing a checkpoint."""

    path: Path
    problem: str
    """An error message; "" if all ranks succeeded."""
    seconds: float
    """The longest writing time of a rank."""


class CheckpointManager:
    """Saves the engine of one run, one checkpoint at a time. All ranks call `save` and `finish_save` together.

    `save` takes a snapshot of the engine, and each rank writes its files, syncs them to disk and hashes them, in a
    thread if `background`. `finish_save` waits for all ranks and publishes the checkpoint, if no rank has failed.
    """

    def __init__(
        self,
        engine: Any,
        folder: Path,
        host_group: HostGroup,
        *,
        keep: int,
        saved: int | None,
        write_model: WriteModel,
        note: Callable[[str], None] = lambda doing: None,
        published: Callable[[int, Path], set[int]] = lambda step, path: set(),
    ):
        """keep: how many of the newest checkpoints are kept. saved: the step of the run's checkpoint from which the
        engine was loaded, or None. note: a function that is called with a description of what the rank is doing.
        published: a function that rank 0 calls with each new checkpoint; it returns the steps to keep."""
        self.engine = engine
        self.folder = folder
        self.host_group = host_group
        self.write_model = write_model
        self.keep = keep
        self.note = note
        self.published = published
        self.saved = saved
        """The step of the newest checkpoint."""
        self.good = saved
        """The step of the newest good checkpoint: one that was saved while fp16 skipped no steps."""
        self.pending_times: dict[str, float] = {}
        """Metrics of saves (seconds) that `pop_times` has not returned yet."""
        self.current: Save | None = None
        """The checkpoint that is being written, or None."""

    @property
    def under_way(self) -> int | None:
        """The step of the checkpoint that is being written, or None."""
        return self.current.step if self.current else None

    @property
    def is_written(self) -> bool:
        """Return whether this rank has written its files of the checkpoint under way."""
        return self.current is not None and self.current.files.done()

    def path_of(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def partial_of(self, step: int) -> Path:
        """Return the directory into which the ranks write a checkpoint before it is published."""
        return files.partial_path(self.path_of(step))

    def save(self, step: int, manifest: dict[str, Any], *, good: bool, background: bool, must_succeed: bool) -> None:
        """Save a checkpoint of `step`, unless it exists.

        manifest: the manifest without its list of files. good: True if fp16 is not skipping steps, so that the weights
        are probably sound. background: write the files from a copy in host memory while training continues.
        must_succeed: wait until the files are written, and raise OSError if that fails.
        """
        self.finish_save()
        if step == self.saved:
            return
        started = time.monotonic()
        background = background and not must_succeed
        self.note(f"saving step {step}")
        contents, problem = self._snapshot(step, background)
        self.current = Save(step, manifest, good, Future())
        writing = partial(self._write, self.current, contents, problem)
        if background:
            threading.Thread(target=writing, name="checkpoint", daemon=True).start()
        else:
            writing()
        self._add_wait(started)
        if not background:
            self.finish_save(must_succeed)

    def finish_save(self, must_succeed: bool = False) -> None:
        """Wait until all ranks have written the checkpoint under way, then publish it and remove old ones."""
        if self.current is None:
            return
        started = time.monotonic()
        save = self.current
        step = save.step
        self.note(f"waiting for the checkpoint of step {step}")
        publication = self._publish(save)
        problem = publication.problem
        if problem and must_succeed:
            then = "begin" if self.saved is None else f"go on from step {self.saved}"
            text = f"step {step} is not saved ({problem}); free some disk space to {then}"
            raise OSError(errno.EIO, text, str(self.folder))
        if problem and self.host_group.is_main:
            LOG.error(
                f"{self.folder}: step {step} is not saved ({problem}). Training continues, older checkpoints are "
                f"untouched, and the next save tries again"
            )
        if not problem:
            self.saved = step
            if save.good:
                self.good = step
            if self.host_group.is_main:
                needed_steps = set(self.published(step, publication.path))
                if self.good is not None:
                    needed_steps.add(self.good)
                store.remove_old(self.folder, self.keep, needed_steps)
        self._add_wait(started)
        self.pending_times["save_write_s"] = publication.seconds
        if not problem:
            LOG.info(f"saved {publication.path} in {publication.seconds:.2f} s")

    def _add_wait(self, started: float) -> None:
        self.pending_times["save_blocked_s"] = (
            self.pending_times.get("save_blocked_s", 0.0) + time.monotonic() - started
        )

    def pop_times(self) -> dict[str, float]:
        """Return {metric: seconds} of saving since the last call."""
        times = self.pending_times
        self.pending_times = {}
        return times

    def _snapshot(self, step: int, copies: bool) -> tuple[dict[str, Any], Exception | None]:
        """Return (content of this rank's files by name, None). If any rank has an error, return ({}, this rank's own
        error or None)."""
        problem = self._make_room(self.partial_of(step)) if self.host_group.is_main else None
        if not self.host_group.agree(problem is None):
            return {}, problem
        snapshot = take_snapshot(self.engine, self.partial_of(step), copies)
        auxiliary = {name: state.state_dict() for name, state in self.engine.module.auxiliary_states.items()}
        if self.host_group.is_main and auxiliary:
            snapshot.save(auxiliary, store.AUXILIARY_STATES)
        if snapshot.problem:
            text = f"{snapshot.problem}; checkpoint.background=false makes no copy in memory"
            return {}, OSError(errno.ENOMEM, text)
        return snapshot.contents, None

    def _make_room(self, folder: Path) -> OSError | None:
        """Make the checkpoint's empty directory, on rank 0. Return an OSError if that fails or the disk is too full."""
        parameters = sum(p.numel() for p in self.engine.module.parameters())
        needed = 16 * parameters + self.engine.module.auxiliary_bytes() + SPARE_BYTES
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.remove(folder)
            free = shutil.disk_usage(self.folder).free
            if free <= needed:
                return OSError(errno.ENOSPC, f"{free / 2**30:.1f} GB are free, {needed / 2**30:.1f} GB needed")
            folder.mkdir()
        except OSError as error:
            return error
        return None

    def _write(self, save: Save, contents: dict[str, Any], problem: Exception | None) -> None:
        """Write, check and hash this rank's files, and give the result to `save.files`."""
        started = time.monotonic()
        sealed = dict[str, Any]()
        if contents:
            try:
                sealed = self._write_files(save.step, contents)
            except Exception as error:
                problem = unwrap_os_error(error)
        save.files.set_result(RankFiles(problem, sealed, time.monotonic() - started))

    def _write_files(self, step: int, contents: dict[str, Any]) -> dict[str, Any]:
        """Write this rank's files. Returns the size and hash of each file."""
        folder = self.partial_of(step)
        names = list(contents)
        for name in names:
            write_state(contents.pop(name), folder / name)
        if self.host_group.is_main:
            self.write_model(step, folder)
            copy_conversion_script(self.engine, self.folder)
            names += [str(path.relative_to(folder)) for path in folder.glob(f"{store.HF}/*")]
        check_types([folder / name for name in names if name.endswith(".pt")])
        return {name: store.sync_and_hash(folder / name) for name in names}

    def _publish(self, save: Save) -> Publication:
        """Publish the checkpoint. If a rank has failed, the new files are removed, and older checkpoints stay."""
        own = save.files.result()
        if own.problem and not isinstance(own.problem, OSError | UserError):
            raise own.problem
        ranks = self.host_group.gather(own)
        problems = [f"rank {rank}: {written.problem}" for rank, written in enumerate(ranks) if written.problem]
        path = self.path_of(save.step)
        if self.host_group.is_main:
            if not problems:
                try:
                    store.publish(self.partial_of(save.step), path, self._whole_manifest(save, ranks))
                except OSError as error:
                    problems.append(f"rank 0: {error}")
            if problems:
                files.remove(self.partial_of(save.step))
        problem = self.host_group.gather("; ".join(problems))[0]
        self.current = None
        for written in ranks:
            if isinstance(written.problem, UserError):
                raise written.problem
        return Publication(path, problem, max(written.seconds for written in ranks))

    def _whole_manifest(self, save: Save, ranks: list[RankFiles]) -> dict[str, Any]:
        """Return the manifest with the files of all ranks, in the order of their names."""
        sealed: dict[str, Any] = {}
        for written in ranks:
            sealed |= written.sealed
        manifest = {"step": save.step, "world_size": self.host_group.size, **save.manifest}
        return manifest | {"files": dict(sorted(sealed.items()))}


def write_state(state: Any, path: Path) -> None:
    """Save with torch.save through a Python file, so that a full disk raises OSError instead of a bare RuntimeError."""
    with path.open("wb") as file:
        torch.save(state, file)


def unwrap_os_error(error: Exception) -> Exception:
    """Return the OSError that caused `error`, or else `error`. torch wraps the OSError of a failed write."""
    at: BaseException | None = error
    while at and not isinstance(at, OSError):
        at = at.__cause__ or at.__context__
    return at if isinstance(at, OSError) else error


def check_types(paths: list[Path]) -> None:
    """Raise UserError if a resume would refuse one of the files, because a new version of DeepSpeed may write unknown
    types."""
    for path in paths:
        if foreign := store.foreign_types(path):
            import deepspeed

            raise UserError(
                f"{path.name} holds {', '.join(foreign)}, which a resume would refuse: DeepSpeed "
                f"{deepspeed.__version__} writes types that xscale does not know. Install the version that "
                f"constraints.txt names"
            )
