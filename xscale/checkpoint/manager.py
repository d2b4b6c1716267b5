"""Saves the checkpoints of a run, and removes old ones: the newest, the newest good and the best checkpoint are kept.

Every rank writes and hashes its own files, while training waits.
"""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from xscale import files
from xscale.checkpoint import store
from xscale.deepspeed_private import collect_contents_to_save
from xscale.errors import LOG, UserError
from xscale.ranks import CpuGroup

WrittenFilesOrOSError = dict[str, dict[str, Any]] | OSError
"""The size and hash of each file that a rank has written, or the error that kept the rank from writing them."""


class CheckpointManager:
    """Saves the engine of one run. All ranks call `save_and_remove_old` together: each rank writes its files, syncs
    them to disk and hashes them, and rank 0 publishes the checkpoint if no rank has failed."""

    def __init__(
        self,
        engine: Any,
        folder: Path,
        cpu_group: CpuGroup,
        *,
        keep: int,
        saved: int | None,
        write_config_and_tokenizer: Callable[[Path], None],
        note: Callable[[str], None] = lambda doing: None,
        published: Callable[[], set[int]] = set,
    ):
        """folder: the run's folder of checkpoints. keep: the number of newest checkpoints that are kept. saved: the
        step of the run's own checkpoint from which the engine was loaded, or None. write_config_and_tokenizer:
        a function that writes the model's config and the tokenizer into a directory; rank 0 calls it. note: a function
        that gets a description of each action. published: a function that rank 0 calls after each new checkpoint; it
        returns the steps whose checkpoints are kept, too."""
        self.engine = engine
        self.folder = folder
        self.cpu_group = cpu_group
        self.write_config_and_tokenizer = write_config_and_tokenizer
        self.keep = keep
        self.note = note
        self.published = published
        self.saved = saved
        """The step of the newest checkpoint."""
        self.good = saved
        """The step of the newest good checkpoint. A checkpoint is good if fp16 skipped no step just before it."""

    def path_of_step(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def newest_step_before(self, step: int) -> int | None:
        """Return the step of the newest checkpoint of a step before `step`, or None."""
        saved = map(store.step_from_name, store.list_checkpoints(self.folder))
        return max((earlier for earlier in saved if earlier < step), default=None)

    def partial_path_of_step(self, step: int) -> Path:
        """Return the directory into which the ranks write a checkpoint before it is published."""
        return files.checked_partial_path(self.path_of_step(step))

    def save_and_remove_old(
        self, step: int, manifest: dict[str, Any], *, after_skipped_step: bool, must_succeed: bool
    ) -> None:
        """Save a checkpoint of `step`, unless it exists, and remove old ones.

        manifest: the manifest's content besides the step, the number of ranks and the files. after_skipped_step:
        whether fp16 has skipped the last step, so that the checkpoint is not good. must_succeed: raise OSError if the
        save fails.
        """
        if step == self.saved:
            return
        started = time.monotonic()
        self.note(f"saving the checkpoint of step {step}")
        written = self._try_write(step)
        names = [] if isinstance(written, OSError) else list(written)
        self.cpu_group.value_from_main(lambda: remove_and_raise_if_not_loadable(self.partial_path_of_step(step), names))
        problem = self._publish_or_return_problems(step, manifest, written)
        if problem and must_succeed:
            then = "begin at step 1" if self.saved is None else f"continue from step {self.saved}"
            text = (
                f"the checkpoint of step {step} could not be saved ({problem}). The next start of the run will {then}"
            )
            raise OSError(errno.EIO, text, str(self.folder))
        if problem:
            if self.cpu_group.is_main:
                LOG.error(
                    f"{self.folder}: the checkpoint of step {step} could not be saved ({problem}). Training "
                    "continues, and older checkpoints are complete. Remove the cause of the error before the next "
                    "checkpoint"
                )
            return
        self.saved = step
        if not after_skipped_step:
            self.good = step
        if self.cpu_group.is_main:
            needed_steps = set(self.published())
            if self.good is not None:
                needed_steps.add(self.good)
            store.remove_partial_and_old_checkpoints(self.folder, self.keep, needed_steps)
        LOG.info(f"saved the checkpoint {self.path_of_step(step)} in {time.monotonic() - started:.2f} s")

    def _contents_of_own_files(self, step: int) -> dict[str, Any]:
        """Return the content of this rank's files, by their names. All ranks call it together."""
        contents = collect_contents_to_save(self.engine, self.partial_path_of_step(step))
        auxiliary = {name: state.state_dict() for name, state in self.engine.module.auxiliary_states.items()}
        if self.cpu_group.is_main and auxiliary:
            contents[store.AUXILIARY_STATES] = auxiliary
        return contents

    def _try_write(self, step: int) -> WrittenFilesOrOSError:
        """Write, check and hash this rank's files. All ranks call it together."""
        problem = None
        if self.cpu_group.is_main:
            try:
                files.remove(self.partial_path_of_step(step))
                self.partial_path_of_step(step).mkdir(parents=True)
            except OSError as error:
                problem = error
        if not self.cpu_group.value_from_main(lambda: problem is None):
            return problem or {}
        contents = self._contents_of_own_files(step)
        try:
            return self._write_files(step, contents)
        except Exception as error:
            cause = unwrap_os_error(error)
            if not isinstance(cause, OSError):
                raise
            return cause

    def _write_files(self, step: int, contents: dict[str, Any]) -> dict[str, Any]:
        """Write this rank's files, and return the size and hash of each."""
        folder = self.partial_path_of_step(step)
        names = list(contents)
        for name in names:
            self.note(f"saving the checkpoint of step {step}: writing {name}")
            write_state(contents.pop(name), folder / name)
        if self.cpu_group.is_main:
            self.write_config_and_tokenizer(folder)
            names += [str(path.relative_to(folder)) for path in folder.glob(f"{store.HF}/*")]
        sealed: dict[str, Any] = {}
        for name in names:
            self.note(f"saving the checkpoint of step {step}: syncing {name} to the disk")
            sealed[name] = store.sync_and_hash(folder / name)
        return sealed

    def _publish_or_return_problems(
        self, step: int, manifest: dict[str, Any], written_by_own_rank: WrittenFilesOrOSError
    ) -> str:
        """Publish the checkpoint. If a rank has failed, remove the new files; older checkpoints stay. Return an error
        message, or an empty string. written_by_own_rank: its files."""
        problems = list[str]()
        sealed: dict[str, Any] = {}
        for rank, written_by_rank in enumerate(self.cpu_group.all_gather(written_by_own_rank)):
            if isinstance(written_by_rank, OSError):
                problems.append(f"rank {rank}: {written_by_rank}")
            else:
                sealed |= written_by_rank
        if self.cpu_group.is_main:
            if not problems:
                whole = {"step": step, "world_size": self.cpu_group.size, **manifest}
                whole["files"] = dict(sorted(sealed.items()))
                try:
                    store.publish_as_latest_checkpoint(self.partial_path_of_step(step), self.path_of_step(step), whole)
                except OSError as error:
                    problems.append(f"rank 0: {error}")
            if problems:
                files.remove(self.partial_path_of_step(step))
        return self.cpu_group.value_from_main(lambda: "; ".join(problems))


def write_state(state: Any, path: Path) -> None:
    """Save by torch.save into an open file. So a full disk raises OSError, and not a RuntimeError of torch."""
    with path.open("wb") as file:
        torch.save(state, file)


def unwrap_os_error(error: Exception) -> Exception:
    """Return the OSError that caused `error`, or else `error`. torch raises other errors from the OSError of a
    write."""
    cause: BaseException | None = error
    while cause:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return error


def remove_and_raise_if_not_loadable(folder: Path, file_names: list[str]) -> None:
    """Remove the checkpoint and raise UserError if a resume would refuse one of its files. This happens if a
    new version of DeepSpeed writes other types. The files of other ranks have the same types as those of rank 0."""
    for name in file_names:
        problem = store.find_unsafe_content(folder / name) if name.endswith(".pt") else None
        if problem:
            files.remove(folder)
            raise UserError(
                f"the new checkpoint's file {name} {problem}. An untested version of DeepSpeed may write such "
                "files. Install the version of DeepSpeed that constraints.txt of the xscale repository lists"
            )
