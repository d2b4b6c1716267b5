"""What a run watches: numbers that are none, ranks that hang, steps that are skipped."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests import launch
from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.manager import CheckpointManager
from xscale.errors import NotFinite
from xscale.ranks import CpuGroup, Process
from xscale.run import watch
from xscale.run.metrics import RunMetrics, slowest_rank_and_ratio_to_median

CONFIGS = ("zero0_fp32", "zero1_bf16", "zero2_cpu", "zero3_bf16")
BAD = 7


def arguments(config: str, demo: Path, out: Path, *fields: str) -> list[str]:
    head = ["--ds_config", f"ds_configs/{config}.json", "--recipe", "mlm", "--data", str(demo), "--out", str(out)]
    poison = "streams.mlm.objective=tests.poison:MLM"
    return [*head, "--set", poison, "streams.mlm.samples=4", "train.warmup=0", *fields]


def test_the_slowest_rank_is_compared_with_the_median() -> None:
    metrics = slowest_rank_and_ratio_to_median([1.0, 2.0, 1.1])
    assert metrics == {"slowest_rank": 1, "slowest_ratio": pytest.approx(2 / 1.1)}
    assert slowest_rank_and_ratio_to_median([1.0]) == {}


def failure_message(out: Path, skipped_in_a_row: int = 0, fp16: bool = False, done: int = 0) -> str:
    """Return the message of a run with the checkpoints of the steps 2, 4 and 6 that ends at step BAD. done: the step
    after which it began."""
    for step in (2, 4, 6):
        (out / f"step_0000000{step}").mkdir()
        (out / f"step_0000000{step}" / checkpoints.MANIFEST).write_text("{}")
    manager = CheckpointManager(None, out, CpuGroup(alone=True), keep=2, saved=6, write_config_and_tokenizer=print)
    process = Process(0, 1, 0, 1)
    run: Any = SimpleNamespace(
        context=SimpleNamespace(out=out, process=process, cpu_group=manager.cpu_group),
        recipe=SimpleNamespace(train=SimpleNamespace(skip_steps=[3, 5])),
        manager=manager,
        is_main=True,
        fp16=fp16,
        done=done,
        skipped_in_a_row=skipped_in_a_row,
    )
    batch: Any = SimpleNamespace(record_keys={"mlm": ["a"]})
    with pytest.raises(NotFinite) as caught:
        RunMetrics.write_records_and_raise_not_finite(run, BAD, "the loss of mlm", batch, is_rank_finite=False)
    return str(caught.value)


def test_the_advice_keeps_the_steps_that_are_skipped_already(tmp_path: Path) -> None:
    """--set replaces the whole list, and the run may do these steps again."""
    assert f"skip step {BAD} by --resume {tmp_path}/step_00000006 --set train.skip_steps=[3,5,{BAD}]. Or" in (
        failure_message(tmp_path)
    )


def test_the_advice_after_skipped_steps_is_a_checkpoint_before_the_last_update(tmp_path: Path) -> None:
    """The checkpoint of step 4 has the update of step 4, which a resume from it cannot skip."""
    message = failure_message(tmp_path, skipped_in_a_row=3, fp16=True)
    assert f"lists the records of step {BAD}. fp16 has skipped all steps after step 4" in message
    assert f"skip step 4 by --resume {tmp_path}/step_00000002 --set train.skip_steps=[3,5,4]" in message


@pytest.mark.parametrize("done", [0, 4])
def test_no_step_is_to_be_skipped_if_none_has_changed_the_weights(tmp_path: Path, done: int) -> None:
    """A start does not know whether the last step before it was skipped too."""
    message = failure_message(tmp_path, skipped_in_a_row=BAD - done, fp16=True, done=done)
    assert "fp16 has skipped every step since this command was started" in message and "skip_steps" not in message
    assert "was the last to change" not in message


class Clock:
    """The time of a watch without threads, and its event `closed`: a wait lasts as long as it is asked to, or as
    `waits` says."""

    def __init__(self, waits: Iterable[float | None]):
        """waits: the seconds of each wait, after the last of which the watch is closed; None: those asked for."""
        self.now = 0.0
        self.waits = list(waits)
        self.then: dict[float, Callable[[], object]] = {}
        """Time -> what happens at this time."""

    def monotonic(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return not self.waits

    def wait(self, pause: float) -> bool:
        if not self.waits:
            return True
        seconds = self.waits.pop(0)
        self.now = round(self.now + (pause if seconds is None else seconds), 3)
        self.then.pop(self.now, lambda: None)()
        return False


@pytest.fixture
def start_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., watch.Watch]:
    """start_watch(clock, limit, world): a watch with train.stall_limit `limit`, in seconds, and without threads."""

    def start(clock: Clock, limit: float, world: int = 1) -> watch.Watch:
        threads = SimpleNamespace(Event=lambda: clock, Thread=lambda **_: SimpleNamespace(start=lambda: None))
        monkeypatch.setattr(watch, "threading", threads)
        monkeypatch.setattr(watch, "time", clock)
        return watch.Watch(Process(0, world, 0, world), tmp_path / "rank0.log", limit / 60, print)

    return start


@pytest.mark.parametrize(
    ("waits", "ends"), [([None] * 9, True), ([None] * 7, False), ([None, 3600.0, *[None] * 4], False)]
)
def test_a_run_ends_at_the_limit_of_its_own_time(
    start_watch: Any, monkeypatch: pytest.MonkeyPatch, waits: list[float | None], ends: bool
) -> None:
    """An hour in which it was suspended counts as two pauses. There are eight pauses in the limit."""
    ended: list[float] = []
    clock = Clock(waits)
    watched = start_watch(clock, 40.0)
    monkeypatch.setattr(watched, "_end_process", lambda: ended.append(clock.now))
    watched._end_if_stalled_until_closed()
    assert ended[:1] == [40.0] * ends


def test_no_progress_is_told_at_twice_the_time(start_watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again from the beginning, once there was some."""
    said: list[tuple[float, str]] = []
    clock = Clock([None] * 14)
    watched = start_watch(clock, 800.0)

    def look(pause: float) -> bool:
        """Let the watch wait `pause` seconds, without progress."""
        watched.idle += pause
        return Clock.wait(clock, pause)

    def step() -> None:
        watched.note_progress("in step 2")
        watched.idle = 0.0

    monkeypatch.setattr(watch, "LOG", SimpleNamespace(warning=lambda text: said.append((clock.now, text))))
    monkeypatch.setattr(watched, "pause", 30.0)
    monkeypatch.setattr(clock, "wait", look)
    clock.then = {330.0: step}
    watched._write_beats_and_warn_until_closed()
    assert [at for at, _ in said] == [60.0, 120.0, 240.0, 390.0]
    assert ["in step 2" in text for _, text in said] == [False, False, False, True]


def test_ranks_for_which_others_wait_are_named(start_watch: Any, tmp_path: Path) -> None:
    """Those that have written nothing, or nothing for longer than a rank at work, or else those that are behind."""
    watched = start_watch(Clock([None]), 40.0, world=3)
    watched._write_beats_and_warn_until_closed()
    assert (tmp_path / "rank0.beat").exists()

    def told(*written: float, notes: tuple[int, int, int] = (2, 2, 2)) -> str:
        for rank, at in enumerate(written):
            path = tmp_path / f"rank{rank}.beat"
            beat = {"doing": f"rank {rank} (host h, process {rank}), in step 3", "progress": [3, notes[rank]]}
            path.write_text(json.dumps(beat))
            os.utime(path, (at, at))
        return watched._describe_other_ranks()

    assert told(0, 0) == "no answer from rank2 (the process has stopped, or its machine has failed)"
    assert told(0, 0, 20) == f"all ranks are at the same point; {tmp_path}/rank*.beat say what each rank is doing"
    other = "rank 1 (host h, process 1), in step 3"
    assert told(0, 0, 20, notes=(10, 9, 10)) == f"waiting for {other}"
    assert told(31, 0, 31) == f"no answer from {other} (the process has stopped, or its machine has failed)"


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_a_step_that_is_not_finite_ends_the_run_and_can_be_left_out(
    config: str, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN in one rank's batch, at ZeRO stages 0 to 3: no checkpoint has it, and the next start can leave
    the step out."""
    monkeypatch.setenv("POISON", f"batch:{BAD}")
    monkeypatch.setenv("PYTHONPATH", str(launch.ROOT))
    out = tmp_path / "run"
    words = arguments(config, demo, out, "train.steps=9", "checkpoint.every=1", "checkpoint.keep=99")

    code, output = launch.try_run(2, words)
    assert code == 3 and f"train.skip_steps=[{BAD}]" in output and "is that of step 6" in output, output[-3000:]
    lines = [json.loads(line) for line in (out / "not_finite.jsonl").read_text().splitlines()]
    assert [(line["step"], line["rank"], line["finite"]) for line in lines] == [(BAD, 0, True), (BAD, 1, False)]
    assert all(line["keys"]["mlm"] for line in lines)
    launch.run(2, [*words, f"train.skip_steps=[{BAD}]"])
    assert [(entry["step"], entry.get("excluded", False)) for entry in launch.metrics(out)] == [
        (n, n == BAD) for n in range(1, 10)
    ]
    tensors = {}
    for path in checkpoints.list_checkpoints(out / "checkpoints"):
        tensors[checkpoints.step_from_name(path)] = launch.checkpoint_tensors(path)
    assert list(tensors) == list(range(10))
    for of_step in tensors.values():
        assert all((tensor.abs() < 1e30).all() for tensor in of_step.values() if tensor.is_floating_point())
    kinds = ("fp32_flat", "single_partition", "exp_avg")
    weights = [name for name in tensors[6] if any(kind in name for kind in kinds)]
    changed = {}
    for step in (5, 6, 7):
        changed[step] = not all(tensors[step][name].equal(tensors[step + 1][name]) for name in weights)
    assert weights and changed == {5: True, 6: False, 7: True}


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_ends_the_run(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP, which neither a collective nor a launcher notices; also of rank 0. Two
    runs at once, in one of which rank 0 stops, in the other rank 1."""
    monkeypatch.setenv("POISON", "none:0")
    monkeypatch.setenv("PYTHONPATH", str(launch.ROOT))
    limit, processes = 20, []
    try:
        for which in (0, 1):
            fields = ("train.steps=100000", f"train.stall_limit={limit / 60}")
            processes.append(launch.start(2, arguments("zero2_cpu", demo, tmp_path / f"{which}", *fields), "deepspeed"))
        stopped = [
            psutil.Process(stop_rank(process, tmp_path / f"{which}", which)) for which, process in enumerate(processes)
        ]
        end = time.monotonic() + limit + 10
        for which, process in enumerate(processes):
            out = tmp_path / f"{which}"
            while (named := json.loads((out / "status.json").read_text()))["status"] == "running":
                assert time.monotonic() < end
                time.sleep(0.5)
            rank = stopped[which]
            named_rank = f"rank {which} (host {os.uname().nodename}, process {rank.pid})"
            assert named["code"] == 5 and named_rank in named["why"] and "answer" in named["why"]
            process.communicate(timeout=60)
            assert process.returncode == 5
            assert not psutil.wait_procs([rank], timeout=10)[1]  # the launcher kills it, and does not wait for it
            log = _log(out, 1 - which)
            assert "stack traces of this rank" in log and 'run/loop.py", line' in log  # in a step or between two
    finally:
        for process in processes:
            launch.kill(process)


def stop_rank(process: subprocess.Popen, out: Path, which: int) -> int:
    """Stop a rank of a run that trains. Returns its pid."""
    end = time.monotonic() + 180
    while not ((out / "metrics.jsonl").exists() and len(launch.metrics(out)) > 2):
        assert time.monotonic() < end and process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.2)
    (stopped,) = (pid for pid in launch.rank_pids(process) if f"process {pid}" in _log(out, which))
    os.kill(stopped, signal.SIGSTOP)
    return stopped


def _log(out: Path, rank: int) -> str:
    return (out / "logs" / f"rank{rank}.log").read_text()
