"""The shipped batch scripts in a real SLURM of two nodes: signalled, requeued, gone on, ended; killed."""

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import launch
from tests.slurm_cluster import Cluster, cluster, wait_for
from tests.test_training import same_checkpoint, steps_of

pytestmark = pytest.mark.slow

STEPS = 60
SLEEP_UNTIL_A_TRAP = "while :; do sleep 300 & wait $!; done"
"""For a script in place of a rank. A signal to all processes may end the sleep before the script has got its own."""
SMALL = ["streams.mlm.samples=6", "streams.tlm.samples=8", "train.lr=0.002"]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as made:
        made.environment |= {"VENV": str(launch.BIN.parent), "PATH": launch.environment()["PATH"]}
        made.environment |= {"OMP_NUM_THREADS": "1", "SRUN_FLAGS": "--wait=10"}  # that a loaded machine keeps to
        yield made


def arguments(demo: Path, out: Path, *more: str) -> list[str]:
    args = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "xlm", "--data", str(demo), "--out", str(out)]
    return [*args, "--steps", str(STEPS), "--trace", "--set", *SMALL, *more]


def submit(slurm: Cluster, output: Path, script: str, *words: str, array: str = "") -> int:
    flags = ["--parsable", f"--output={output}", *(["--ntasks-per-node=1"] if script == "pretrain" else [])]
    flags += [f"--array={array}"] if array else []
    return int(slurm.run("sbatch", *flags, f"slurm/{script}.sbatch", *words))


@pytest.fixture(scope="module")
def reference(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run without SLURM."""
    out = tmp_path_factory.mktemp("slurm") / "reference"
    launch.run(2, arguments(demo, out))
    assert status(out) == {"status": "done", "code": 0, "why": f"{STEPS} of {STEPS} steps", "step": STEPS, "rank": 0}
    return out


def status(out: Path) -> dict:
    return {name: value for name, value in json.loads((out / "status.json").read_text()).items() if name != "time"}


def wait_for_step(out: Path, step: int, slurm: Cluster, output: Path) -> None:
    path = out / "metrics.jsonl"

    def told() -> str:
        return slurm.logs() + (output.read_text() if output.exists() else "no output")

    wait_for(lambda: path.exists() and len(path.read_bytes().splitlines()) >= step, 300, told)


def wait_for_state(slurm: Cluster, job: int, state: str, output: Path, restarts: int = 0) -> dict[str, str]:
    def there() -> bool:
        found = slurm.job(job)
        assert found["JobState"] not in {"COMPLETED", "FAILED"} - {state}, output.read_text()
        return found["JobState"] == state and int(found["Restarts"]) >= restarts

    wait_for(there, 300, lambda: f"{slurm.job(job)}\n{output.read_text()}")
    return slurm.job(job)


def same_run(ours: Path, theirs: Path) -> None:
    last = f"checkpoints/step_{STEPS:08d}"
    assert [entry["step"] for entry in launch.metrics(ours)] == list(range(1, STEPS + 1))
    assert launch.without_times(ours) == launch.without_times(theirs)
    assert launch.trace(ours) == launch.trace(theirs)
    same_checkpoint(ours / last, theirs / last)


def test_two_preemptions_leave_no_trace(slurm: Cluster, demo: Path, reference: Path, tmp_path: Path) -> None:
    """Of a run on two nodes: while it imports, and while it trains. One requeue a signal, and the end of an
    undisturbed run bit for bit."""
    out, output = tmp_path / "run", tmp_path / "job.out"
    job = submit(slurm, output, "pretrain", *arguments(demo, out))
    stops = [0]
    for start, step in enumerate((0, 8)):
        wait_for(lambda: f"{job}.{0}" in slurm.run("squeue", "-h", "-s", "-o", "%i"), 60, slurm.logs)
        if step:
            wait_for_step(out, step, slurm, output)
        slurm.run("scancel", "--full", "--signal=USR2", job)
        found = wait_for_state(slurm, job, "PENDING", output, start + 1)
        assert found["Restarts"] == str(start + 1)
        if step:  # the first has at times ended Python before it had imported anything
            told = status(out)
            assert told == {"status": "stopped", "code": 75, "why": "SIGUSR2", "step": steps_of(out), "rank": 0}
            assert step <= told["step"] < STEPS
            stops.append(told["step"])
        release(slurm, job)
    found = wait_for_state(slurm, job, "COMPLETED", output)
    assert found["Restarts"] == "2" and found["ExitCode"] == "0:0"
    assert {"status": "done", "code": 0, "step": STEPS}.items() <= status(out).items()
    same_run(out, reference)
    log = (out / "run.log").read_text()
    assert re.findall(r"steps (\d+) to", log)[-2:] == [f"{step + 1}" for step in stops]
    for rank in (0, 1):
        log = (out / "logs" / f"rank{rank}.log").read_text()
        assert log.count("the run has stopped after step") >= 1 and log.count(f"done: {STEPS} steps") == 1
    assert output.read_text().count("start 1, on") == output.read_text().count("start 3, on") == 1  # appended to


def release(slurm: Cluster, job: int) -> None:
    """A requeued job waits for two minutes; here it does not. In the second of its end nodes would refuse it. A short
    job may be over before it is looked at: its state is then none of a waiting one's."""
    time.sleep(2)
    slurm.run("scontrol", "update", f"jobid={job}", "starttime=now")
    wait_for(lambda: slurm.job(job)["JobState"] != "PENDING", 60, slurm.logs)


def test_a_rank_that_is_killed_ends_the_job(slurm: Cluster, demo: Path, reference: Path, tmp_path: Path) -> None:
    """Kill -9 of a node's rank: the job fails, is not requeued, and status.json says so. The next goes on to the end of
    an undisturbed run."""
    out, output = tmp_path / "run", tmp_path / "job.out"
    job = submit(slurm, output, "pretrain", *arguments(demo, out, "checkpoint.every=5"))
    wait_for_step(out, 12, slurm, output)
    log = (out / "logs" / "rank1.log").read_text()
    psutil.Process(int(log.split("process ")[1].split()[0])).send_signal(signal.SIGKILL)
    found = wait_for_state(slurm, job, "FAILED", output)
    assert found["Restarts"] == "0" and found["ExitCode"] != "0:0"
    told = status(out)
    assert (told["status"], told["code"], told["rank"]) == ("failed", 4, 0) and told["step"] >= 12
    assert "another rank has ended" in told["why"] and "Traceback" in (out / "logs" / "rank0.log").read_text()
    job = submit(slurm, output, "pretrain", *arguments(demo, out, "checkpoint.every=5"))
    wait_for_state(slurm, job, "COMPLETED", output)
    same_run(out, reference)


def test_the_time_limit_signals_the_run(slurm: Cluster, tmp_path: Path) -> None:
    """SLURM sends the signal of --signal before the time limit, and the job is requeued. A job that its user cancels
    has the time to save, and is not requeued. Here the ranks are a script, which ends as the ranks of a run do (see
    test_training.py)."""
    output, saved = tmp_path / "job.out", tmp_path / "saved"
    traps = f"trap 'exit 75' USR2; trap 'sleep 3; touch {saved}; exit 75' TERM"
    rank = f"{traps}; echo a rank is up; {SLEEP_UNTIL_A_TRAP}"
    job = submit_in(slurm, tmp_path, rank, output, "--nodes=1", "--time=1", "--signal=USR2@50")
    wait_for_state(slurm, job, "PENDING", output, restarts=1)
    assert "exit code 75" in output.read_text()
    release(slurm, job)
    wait_for(lambda: output.read_text().count("a rank is up") == 2, 60, output.read_text)
    slurm.run("scancel", job)
    wait_for_state(slurm, job, "CANCELLED", output)
    wait_for(saved.exists, 20, output.read_text)
    assert slurm.job(job)["Restarts"] == "1"


def test_a_signal_that_the_ranks_did_not_get_is_sent_again(slurm: Cluster, tmp_path: Path) -> None:
    """SLURM loses one that comes between a step's creation and its tasks' launch."""
    output = tmp_path / "job.out"
    deaf = f"trap '' USR2; sleep 4; trap 'exit 75' USR2; {SLEEP_UNTIL_A_TRAP}"
    job = submit_in(slurm, tmp_path, deaf, output)
    wait_for(lambda: f"{job}.0" in slurm.run("squeue", "-h", "-s", "-o", "%i"), 60, slurm.logs)
    slurm.run("scancel", "--full", "--signal=USR2", job)
    wait_for_state(slurm, job, "PENDING", output, restarts=1)
    slurm.run("scancel", job)


def submit_in(slurm: Cluster, folder: Path, script: str, output: Path, *more: str) -> int:
    """pretrain.sbatch with more of sbatch's flags, whose ranks run a script in place of Python; tried again once."""
    runs_in = folder / "runs_in"
    runs_in.write_text(f"#!/bin/bash\n{script}\n")
    runs_in.chmod(0o755)
    flags = ["--parsable", f"--output={output}", "--ntasks-per-node=1", *more]
    return int(slurm.run("env", f"RUN_IN={runs_in}", "RETRIES=1", "sbatch", *flags, "slurm/pretrain.sbatch"))


def test_prepare_and_evaluate(slurm: Cluster, demo: Path, reference: Path, tmp_path: Path) -> None:
    """The demo corpus by two processes without MPI is that of one, byte for byte; an evaluation is a job."""
    made, output = tmp_path / "demo", tmp_path / "prepare.out"
    words = ["demo_corpus", "--pairs", "60", "--mono", "60", "--out"]
    fork(f"data_tools.{words[0]}", *words[1:], tmp_path / "alone")
    job = submit(slurm, output, "prepare", *words, str(made))
    wait_for_state(slurm, job, "COMPLETED", output)
    first, second = contents(made), contents(tmp_path / "alone")
    assert first.pop("corpus.yaml") != second.pop("corpus.yaml") and first == second  # it names the files' places
    job = submit(slurm, output, "prepare", "pairs", "--src", "none.en")
    assert wait_for_state(slurm, job, "FAILED", output)["ExitCode"] == "2:0"
    model = tmp_path / "hf"
    fork("xscale.export", reference, model)
    tasks, scores = ["heldout", "retrieval", "alignment"], tmp_path / "scores.json"
    flags = ["--model", str(model), "--data", str(demo / "heldout"), "--limit", "50", "--task", *tasks]
    flags += ["--lexicons", str(next((demo / "lexicon").glob("*.txt"))), "--out", str(scores)]
    job = submit(slurm, tmp_path / "evaluate.out", "evaluate", *flags)
    wait_for_state(slurm, job, "COMPLETED", tmp_path / "evaluate.out")
    found = json.loads(scores.read_text())
    assert list(found["results"]) == tasks


def fork(module: str, *words: object) -> None:
    code, output = launch.fork(0, ["-m", module, *map(str, words)], launch.environment())
    assert code == 0, output[-6000:]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
