"""Training on a disk that fails now and then: `torchrun ... broken_disk.py FILE.json`.

FILE.json: a list of {"arguments": of xscale/train.py, "save": {step: [rank, how]}, "lines": [first, last], "own": DIR}.
`save`: of the rank's files of that step's checkpoint the first is half written, then the disk is "full", or "never"
goes on. `lines`: while these steps are written, metrics.jsonl, the
trace and TensorBoard find the disk full. `own`: DeepSpeed's stock writer saves each checkpoint there too. A list of one
ends with train.py's exit code.
"""

import errno
import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from tensorboard.summary.writer.record_writer import RecordWriter

from xscale import ranks, train
from xscale.checkpoint import manager
from xscale.ranks import CpuGroup
from xscale.run import loop, metrics, validation
from xscale.run.run_status import Status
from xscale.run.start import train_run

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
now: dict[str, Any] = {"step": 0}
"""The run's entry of FILE.json, and its step."""


def full() -> bool:
    first, last = now.get("lines", (0, -1))
    return first <= now["step"] <= last


def write_state(state: Any, path: Path) -> None:
    step = int(path.parent.name[5:13])
    rank, how = now.get("save", {}).get(str(step), (None, ""))
    if rank == int(os.environ["RANK"]):
        path.write_bytes(b"PK half")
        if how == "full":
            raise FULL
        time.sleep(600)
    with path.open("wb") as file:
        torch.save(state, file)


class Half:
    """A file that takes half of what it is given, then nothing."""

    def __init__(self, file: Any):
        self.file, self.halves = file, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        if not full():
            return self.file.write(data)
        self.halves += 1
        if self.halves % 2 == 0:
            raise FULL
        return self.file.write(data[: len(data) // 2])


class Lines(metrics.JsonLines):
    def flush_or_keep_lines(self, sync: bool = False) -> None:
        if self.file and not isinstance(self.file, Half):
            self.file: Any = Half(self.file)
        super().flush_or_keep_lines(sync)


def noted(optimizer_step: Any) -> Any:
    def step(*args: Any, **options: Any) -> Any:
        now["step"] = options["step"] + 1
        return optimizer_step(*args, **options)

    return step


def patch() -> None:
    record = RecordWriter.write

    def write(self: RecordWriter, data: bytes) -> None:
        if full():
            raise FULL
        record(self, data)

    snapshot = manager.CheckpointManager._contents_of_own_files

    def also_own(self: manager.CheckpointManager, step: int) -> Any:
        states = snapshot(self, step)
        if "own" in now:
            state = {"xscale": {"step": step}, "universal_checkpoint_info": {}}
            self.engine.save_checkpoint(now["own"], tag=str(step), client_state=state, save_latest=False)
        return states

    vars(manager)["write_state"] = write_state
    vars(loop).update(optimizer_step=noted(loop.optimizer_step))
    for module in (metrics, validation):
        vars(module)["JsonLines"] = Lines
    RecordWriter.write, manager.CheckpointManager._contents_of_own_files = write, also_own  # type: ignore[method-assign]


def run(entries: list[dict[str, Any]]) -> int:
    if len(entries) == 1:
        now.update(entries[0])
        return train.main(entries[0]["arguments"])
    process = ranks.read_launcher_and_set_environment()
    ranks.join_process_group(process)
    cpu_group = CpuGroup()
    for entry in entries:
        now.clear()
        now.update(entry, step=0)
        args = train.parse_arguments(entry["arguments"])
        assert train_run(args, process, cpu_group, Status(args.out, process)) == 0, entry
        gc.collect()
    cpu_group.barrier()
    return 0


patch()
try:
    code = run(json.loads(Path(sys.argv[-1]).read_text()))
except Exception:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
