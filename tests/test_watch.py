"""What a run watches: numbers that are none, ranks that hang, steps that are skipped."""

import json
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests import launch
from tests.test_training import wait_for
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


def wait_without_steps(folder: Path, ready: Any) -> None:
    """A run whose train.stall_limit is 2.4 s, and which makes no step."""
    watch.Watch(Process(0, 1, 0, 1), folder / "rank0.log", 2.4 / 60, print)
    ready.set()
    time.sleep(0.2)
    time.sleep(0.6)  # after the suspension, when it has made no step for longer than the limit


def test_a_run_that_was_suspended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than train.stall_limit, of which its own time alone counts."""
    monkeypatch.setattr(watch, "END_SECONDS", 0.1)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=wait_without_steps, args=(tmp_path, ready))
    process.start()
    assert process.pid and ready.wait(60)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(process.pid, signal.SIGCONT)
    process.join(60)
    assert process.exitcode == 0


def test_no_progress_is_told_at_twice_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again from the beginning, once there was some."""
    said: list[str] = []
    monkeypatch.setattr(watch, "FIRST_WARNING_SECONDS", 0.2)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(watch, "LOG", SimpleNamespace(warning=said.append))
    found = watch.Watch(Process(0, 1, 0, 1), tmp_path / "rank0.log", 1.0, print)
    time.sleep(1.0)
    first = len(said)
    found.note_progress("in step 2")
    time.sleep(0.1)  # until the watch has looked
    said.clear()
    time.sleep(0.25)
    found.close()
    assert 2 <= first <= 3, first  # after 0.2, 0.4 and 0.8 s
    assert len(said) == 1 and "in step 2" in said[0]


def test_ranks_for_which_others_wait_are_named(tmp_path: Path) -> None:
    """Those that have written nothing, or nothing for longer than a rank at work, or else those that are behind."""
    watched = watch.Watch(Process(0, 3, 0, 3), tmp_path / "rank0.log", 40 / 60, print)
    own = tmp_path / "rank0.beat"
    wait_for(own.exists, 4)  # before the first pause of 5 s
    assert own.exists()
    watched.close()

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
