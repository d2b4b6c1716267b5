"""A disk that is full or slow: training continues, nothing half-written is taken for whole, and the end is the same."""

import errno
import json
import os
import time
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import nn

from tests import launch
from tests.test_training import same_checkpoint
from xscale.checkpoint import store
from xscale.checkpoint.manager import CheckpointManager
from xscale.errors import LOG, UserError
from xscale.ranks import CpuGroup
from xscale.run import metrics
from xscale.run.metrics import JsonLines

SCRIPT = str(launch.ROOT / "tests" / "broken_disk.py")
STEPS = 12


class Disk:
    """A file that takes `room` more bytes."""

    def __init__(self, file: Any, room: int):
        self.file, self.room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.file.write(data[: self.room])
        self.room -= taken
        return taken


def test_lines_that_find_no_room_wait(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    """When there is room again, all lines are there in order. Lines that exceed the memory they may take end the run,
    with the name of their file."""
    monkeypatch.setattr(LOG, "propagate", True)
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, 0)
    disk: Any = Disk(lines.file, 30)
    lines.file = disk
    for step in range(1, 9):
        lines.add_line_for_next_flush({"step": step, "loss": 1.5})
        lines.flush_or_keep_lines(sync=True)
        assert path.read_text().startswith('{"step": 1, "loss": 1.5}\n')
    assert path.stat().st_size == 30
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "No space left" in caplog.text
    disk.room = 500
    lines.add_line_for_next_flush({"step": 9, "loss": 1.5})
    lines.flush_or_keep_lines()
    assert [entry["step"] for entry in launch.metrics(tmp_path)] == [*range(1, 10)]
    assert caplog.records[-1].levelname == "WARNING" and "is writable again" in caplog.records[-1].message
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EINVAL, "no sync here")))
        lines.flush_or_keep_lines(sync=True)
    assert not lines.failing and "no sync here). The last lines of the file may be lost" in caplog.text

    monkeypatch.setattr(metrics, "MOST_WAITING", 60)
    disk.room = 0
    for step in range(10, 12):
        lines.add_line_for_next_flush({"step": step, "loss": 1.5})
        lines.flush_and_log_lost_lines()
    assert "the last lines of the run could not be written (number of lines: 2)" in caplog.text
    lines.add_line_for_next_flush({"step": 12, "loss": 1.5})  # three lines of 26 bytes are more than 60
    with pytest.raises(OSError, match="No space left") as raised:
        lines.flush_or_keep_lines()
    assert raised.value.filename == str(path)


class Module(nn.Linear):
    """As much of a step's module as is asked for."""

    auxiliary_states: dict[str, Any] = {}  # noqa: RUF012

    def auxiliary_bytes(self) -> int:
        return 0


class Engine:
    """An engine that saves one object."""

    def __init__(self) -> None:
        self.module, self.global_steps, self.state = Module(2, 2), 0, LossScaler(1.0)
        self.checkpoint_engine: Any = None

    def save_checkpoint(self, folder: str, **_: Any) -> None:
        self.checkpoint_engine.save({"scaler": self.state}, f"{folder}/optim_states.pt")

    def _copy_recovery_script(self, folder: str) -> None:
        pass


def manifest(step: int) -> dict[str, Any]:
    made = {"state": {"step": step}, "identity": {"a": 1}}
    return made | {"calibration": {"lines": []}, "engine": {"stage": 2}}


def manager_in(folder: Path) -> CheckpointManager:
    return CheckpointManager(
        Engine(), folder, CpuGroup(), keep=1, saved=None, write_config_and_tokenizer=lambda path: None
    )


def test_a_type_that_a_resume_would_refuse_ends_the_save(tmp_path: Path) -> None:
    """A DeepSpeed that writes other types than today's fails at the first save, not at a resume a month later."""
    saver = manager_in(tmp_path / "checkpoints")
    saver.save_and_remove_old(0, manifest(0), after_skipped_step=False, must_succeed=False)
    assert (saver.folder / "latest").read_text() == "step_00000000"
    saver.engine.state = Fraction(1, 2)
    with pytest.raises(UserError, match=r"optim_states.pt .*fractions.Fraction.*constraints.txt"):
        saver.save_and_remove_old(1, manifest(1), after_skipped_step=False, must_succeed=False)
    assert sorted(path.name for path in saver.folder.iterdir()) == ["latest", "step_00000000"]


def test_latest_names_a_whole_checkpoint_at_any_moment(tmp_path: Path, monkeypatch: Any) -> None:
    """A kill may come before and after each change of the file system."""
    seen, rename, replace = [], Path.rename, os.replace
    folder = tmp_path / "checkpoints"

    def look() -> None:
        latest = (folder / "latest").read_text() if (folder / "latest").exists() else None
        complete = [path.name for path in store.list_checkpoints(folder)]
        assert latest is None or latest in complete, (latest, complete)
        for path in store.list_checkpoints(folder):
            assert store.find_damage(path, CpuGroup()) is None
        seen.append((latest, complete))

    def looking(change: Any) -> Any:
        def changed(*arguments: Any) -> Any:
            look()
            result = change(*arguments)
            look()
            return result

        return changed

    monkeypatch.setattr(Path, "rename", looking(rename))
    monkeypatch.setattr(os, "replace", looking(replace))
    saver = manager_in(folder)
    for step in (0, 1):
        saver.save_and_remove_old(step, manifest(step), after_skipped_step=False, must_succeed=True)
    assert seen[0] == (None, []) and seen[-1][0] == "step_00000001" and len(seen) >= 10


def test_which_checkpoints_stay(tmp_path: Path) -> None:
    """The newest, the newest that was begun while no step was skipped, and the best, whatever its age."""
    best: set[int] = set()
    folder = tmp_path / "checkpoints"
    saver = CheckpointManager(
        Engine(), folder, CpuGroup(), keep=2, saved=None, write_config_and_tokenizer=lambda path: None,
        published=lambda: best,
    )  # fmt: skip
    for step, good, stay in [
        (0, True, [0]),
        (1, True, [0, 1]),
        (2, True, [1, 2]),
        (3, False, [1, 2, 3]),
        (4, False, [1, 2, 3, 4]),
        (5, True, [1, 4, 5]),
    ]:
        best |= {1} if step == 1 else set()
        saver.save_and_remove_old(step, manifest(step), after_skipped_step=not good, must_succeed=False)
        assert steps_saved(tmp_path) == stay, step
    assert saver.good == 5


# Whole runs


def listed(path: Path, *entries: dict[str, Any]) -> list[str]:
    path.write_text(json.dumps(entries))
    return [str(path)]


def arguments(demo: Path, out: Path, *sets: str) -> list[str]:
    run = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "ppa", "--data", str(demo), "--out", str(out)]
    run += ["--steps", str(STEPS), "--trace", "--set", "streams.ppa.samples=6", "streams.ppa.queue_size=20"]
    return [*run, "checkpoint.every=2", "checkpoint.keep=9", "train.measure_every=0", *sets]


@pytest.fixture(scope="module")
def runs(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The disk of `disturbed` is full for rank 1's part of two checkpoints, and for lines."""
    out = tmp_path_factory.mktemp("disk")
    own = {"arguments": arguments(demo, out / "whole"), "own": str(out / "own")}
    bad = {"save": {"4": [1, "full"], "6": [1, "full"]}, "lines": [5, 8]}
    launch.run(
        2, listed(out / "list.json", own, {"arguments": arguments(demo, out / "disturbed"), **bad}), script=SCRIPT
    )
    return out


def steps_saved(out: Path) -> list[int]:
    return [int(path.name[5:]) for path in store.list_checkpoints(out / "checkpoints")]


@pytest.mark.slow
def test_a_full_disk_changes_no_run(runs: Path) -> None:
    """Rank 1 could not write two checkpoints: they are absent on all, the others are there. Lines of steps 3 to 8
    waited, and the end is the same."""
    whole, disturbed = runs / "whole", runs / "disturbed"
    assert steps_saved(whole) == [0, 2, 4, 6, 8, 10, 12] and steps_saved(disturbed) == [0, 2, 8, 10, 12]
    assert not list((disturbed / "checkpoints").glob("*.incomplete"))
    assert (disturbed / "checkpoints/latest").read_text() == "step_00000012"
    same_checkpoint(disturbed / "checkpoints/step_00000012", whole / "checkpoints/step_00000012")
    assert launch.without_times(disturbed) == launch.without_times(whole)
    assert launch.trace(disturbed) == launch.trace(whole)
    log = (disturbed / "run.log").read_text()
    for step in (4, 6):
        assert f"the checkpoint of step {step} could not be saved (rank 1: [Errno 28] No space left on device)" in log
    for file in ("metrics.jsonl", "trace/rank0.jsonl"):
        assert (
            log.count(f"{disturbed / file} cannot be written") == 1 and f"{disturbed / file} is writable again" in log
        ), file
    assert log.count(f"TensorBoard in {disturbed / 'tb'} cannot be written") == 1


@pytest.mark.slow
def test_a_save_writes_what_deepspeeds_own_writes(runs: Path) -> None:
    """Byte for byte in two runs, and tensor for tensor."""
    for step in (2, 8, 10):
        path = f"checkpoints/step_{step:08d}"
        files = [store.read_checkpoint(runs / run / path).files for run in ("whole", "disturbed")]
        assert files[0] == files[1] and {store.AUXILIARY_STATES, "hf/config.json"} < files[0].keys()
        own = launch.checkpoint_tensors(runs / "own" / str(step))
        ours = launch.checkpoint_tensors(runs / "disturbed" / path)
        assert own and all(torch.equal(own[name], ours[name]) for name in own)
        assert {name for name in ours if not name.startswith(store.AUXILIARY_STATES)} == own.keys()


@pytest.mark.slow
def test_a_kill_while_it_writes_and_a_last_save_without_room(demo: Path, runs: Path, tmp_path: Path) -> None:
    """Killed while a checkpoint was written, a run goes on from the one before. One that cannot save its last
    step ends with 4 and says what to do; started again, it ends as one that was never disturbed."""
    out = tmp_path / "out"
    slow = {"arguments": arguments(demo, out), "save": {"4": [1, "never"]}}
    half = out / "checkpoints/step_00000004.incomplete"

    def is_half_written() -> bool:
        time.sleep(0.5 * half.exists())
        return half.exists()

    launch.fork_and_kill(2, listed(tmp_path / "slow.json", slow), is_half_written, SCRIPT)
    assert steps_saved(out) == [0, 2] and half.exists()
    full = {"arguments": arguments(demo, out), "save": {"12": [1, "full"]}}
    code, output = launch.try_run(2, listed(tmp_path / "full.json", full), script=SCRIPT)
    assert (
        code == 4
        and "the checkpoint of step 12 could not be saved (rank 1: [Errno 28] No space left on device)" in output
    ), output[-3000:]
    assert "The next start of the run will continue from step 10" in output
    assert steps_saved(out) == [0, 2, 4, 6, 8, 10] and not list((out / "checkpoints").glob("*.incomplete"))
    assert json.loads((out / "status.json").read_text())["code"] == 4
    launch.run(2, arguments(demo, out))
    same_checkpoint(out / "checkpoints/step_00000012", runs / "whole/checkpoints/step_00000012")
    assert launch.without_times(out) == launch.without_times(runs / "whole")
    assert launch.trace(out) == launch.trace(runs / "whole")
