"""What ranks read from their launcher, what they leave for those who do not see its exit code, and a signal that comes
early."""

import errno
import fcntl
import io
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import launch
from xscale import ranks, train
from xscale.errors import DirectoryTaken, UserError, block_sigusr2_and_trace_on_sigusr1
from xscale.ranks import Process
from xscale.run.run_status import DONE, STATUS, STOPPED, Status, check_folder_is_free_or_own, exit_code_and_message
from xscale.run.watch import StopRequest

BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "2(x3),1"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_LOCALID": "0"}
LAST = BATCH | STEP | {"SLURM_PROCID": "6", "SLURM_NODEID": "3"}
"""The rank of the fourth node."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch):
    """started(environment): the process that a launcher with these variables started."""

    def start(environment: dict[str, str], allow_missing_launcher: bool = False) -> Process:
        monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "127.0.0.1"} | environment)
        process = ranks.read_launcher_and_set_environment(allow_missing_launcher)
        written = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        assert written == [str(process.rank), str(process.world), str(process.local_rank), str(process.local_world)]
        assert os.environ["LOCAL_SIZE"] == str(process.local_world)
        return process

    return start


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (LAST, Process(6, 7, 0, 1)),
        (LAST | {"SLURM_PROCID": "5", "SLURM_NODEID": "2", "SLURM_LOCALID": "1"}, Process(5, 7, 1, 2)),
        (LAST | {"PMI_RANK": "6", "PMI_SIZE": "7"}, Process(6, 7, 0, 1)),  # srun --mpi=pmi2
        (
            LAST | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "PMI_RANK": "1", "PMI_SIZE": "7"},
            Process(1, 7, 1, 2),
        ),
        (
            LAST | {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},  # torchrun below srun
            Process(3, 8, 1, 2),
        ),
    ],
)
def test_ranks_of_launchers(started, environment: dict[str, str], expected: Process) -> None:
    assert started(environment) == expected


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK has the value 'x', which is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2, but says that the number of ranks is only 2 "),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE has the value 'two'"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT has the value 'x', which is not a whole number"),
        ({"WORLD_SIZE": "2"}, r"only one of .* RANK \(not set\) and WORLD_SIZE \(2\) is set"),
        ({"RANK": "0", "WORLD_SIZE": ""}, r"only one of .* RANK \(0\) and WORLD_SIZE \(not set\) is set"),
        ({"SLURM_NTASKS": "x"}, "SLURM_NTASKS has the value 'x', which is not a whole number"),
        (BATCH, "job has 7 tasks.*Start the command with srun"),
        (LAST | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"SLURM_STEP_TASKS_PER_NODE has the value '2\(x'.*with srun"),
        (LAST | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, r"the value '2\(x3\)', which is not .* up to node 3"),
        (LAST | {"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE has the value ''"),
    ],
)
def test_an_environment_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], named: str
) -> None:
    monkeypatch.setattr(os, "environ", {"MASTER_ADDR": "127.0.0.1"} | environment)
    with pytest.raises(UserError, match=named):
        ranks.read_launcher_and_set_environment()


def test_jobs_and_steps_meet_at_ports_of_their_own(started) -> None:
    ports = []
    for job, step in [(7, 0), (7, 1), (8, 0), (8, 1), (12_768 * 90 + 9, 0)]:
        started(LAST | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})
        ports.append(int(os.environ["MASTER_PORT"]))
    assert len(set(ports)) == 5 and all(1024 < port < 32768 for port in ports)


def test_one_process_of_a_job(started) -> None:
    """A lone task of srun, a job of one task, and a dry run in any job."""
    lone = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for environment in (LAST | lone, BATCH | torchrun, BATCH | {"SLURM_NTASKS": "1"}):
        assert started(environment) == Process(0, 1, 0, 1)
    assert started(BATCH, allow_missing_launcher=True) == Process(0, 1, 0, 1)


def read(out: Path) -> tuple[str, int, str, int]:
    entry = json.loads((out / "status.json").read_text())
    return entry["status"], entry["code"], entry["why"], entry["rank"]


def run(out: Path, rank: int, has_lock: bool) -> Status:
    status = Status(out, Process(rank, 2, rank, 2))
    status.has_lock = has_lock
    return status


def test_the_first_rank_that_fails_says_why(tmp_path: Path) -> None:
    first, second = run(tmp_path, 0, True), run(tmp_path, 1, True)
    first.note_lock_and_write_running({})
    second.note_lock_and_write_running({})
    assert read(tmp_path)[0] == "running"
    second.record_failure(UserError("record 7 is damaged"))
    first.record_failure(RuntimeError("Connection closed by peer"))
    assert read(tmp_path) == ("failed", 2, "record 7 is damaged", 1)
    first.note_lock_and_write_running({})  # the next start
    second.write_end(STOPPED, "told")
    assert read(tmp_path)[0] == "running"
    first.write_end(STOPPED, "SIGUSR2")
    assert read(tmp_path) == ("stopped", STOPPED, "SIGUSR2", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_start_that_fails_early_writes_only_where_nobody_else_is(tmp_path: Path) -> None:
    new, other, shards = tmp_path / "new", tmp_path / "other", tmp_path / "shards"
    error = UserError("no such field")
    run(new, 1, False).record_failure(error)
    assert not new.exists()
    for _ in range(2):
        run(new, 0, False).record_failure(error)
        assert read(new) == ("failed", 2, "no such field", 0)
    assert sorted(path.name for path in new.iterdir()) == ["lock", STATUS]
    for folder, name in ((other, STATUS), (shards, "index.json")):
        folder.mkdir()
        (folder / name).write_text("{}")
    run(shards, 0, False).record_failure(error)
    assert not (shards / STATUS).exists()
    run(other, 0, False).record_failure(DirectoryTaken("another run's"))
    with (other / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(other, 0, False).record_failure(error)  # in use
        assert (other / STATUS).read_text() == "{}"
    run(other, 0, False).record_failure(error)
    assert read(other)[0] == "failed"
    (other / "lock").unlink()
    (other / "lock").mkdir()  # cannot be opened, like another user's lock
    run(other, 0, False).record_failure(UserError("later"))
    assert "later" not in (other / STATUS).read_text()


def test_a_refused_command_leaves_a_run_that_is_done(tmp_path: Path) -> None:
    """It may be refused before it has the lock, or after; a start that does more steps can fail like any other."""
    first = run(tmp_path, 0, True)
    first.set_steps_done_for_next_write(8)
    first.write_end(DONE, "8 of 8 steps")
    done = json.loads((tmp_path / STATUS).read_text())
    run(tmp_path, 0, False).record_failure(UserError("no such field"))
    assert json.loads((tmp_path / STATUS).read_text()) == done
    for rank in (1, 0):
        again = run(tmp_path, rank, True)
        again.note_lock_and_write_running(done)
        again.record_failure(UserError("--fork: another run"))
    assert json.loads((tmp_path / STATUS).read_text()) == done
    again.note_lock_and_write_running(done)
    again.record_failure(RuntimeError("CUDA out of memory"))
    assert read(tmp_path)[:2] == ("failed", 2), "this start was not refused"
    again.set_steps_done_for_next_write(8)
    again.note_lock_and_write_running(done)
    again.record_failure(UserError("record 7 is damaged"))
    assert read(tmp_path) == ("failed", 2, "record 7 is damaged", 0)


@pytest.mark.parametrize(("is_typo", "code"), [(True, 2), (False, 4)])
def test_a_folder_that_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, is_typo: bool, code: int
) -> None:
    """Its name is too long. The error is one line, also if the run fails for another reason before."""

    def fail(args: Any, *_: Any) -> None:
        if is_typo:
            raise UserError("no such field")
        check_folder_is_free_or_own(args.out, {}, "auto")

    monkeypatch.setattr(train, "join_group_and_train", fail)
    out = str(tmp_path / ("x" * 256))
    assert train.main(["--ds_config", "none.json", "--data", "d", "--out", out]) == code
    assert len(capsys.readouterr().err.splitlines()) == 1


def take_early_signals(folder: Path) -> None:
    """A run whose signals come between the first line of a command and its imports."""
    with (folder / "stacks").open("w") as stacks:
        os.dup2(stacks.fileno(), 2)
    block_sigusr2_and_trace_on_sigusr1()
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR1)
    stop = StopRequest(None)
    assert stop and stop.why == "SIGUSR2"
    child = subprocess.Popen(["sleep", "30"])
    child.send_signal(signal.SIGUSR2)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    child.kill()


def test_a_signal_during_the_imports_is_kept(tmp_path: Path) -> None:
    """And one to all processes of a job, as SLURM sends it, ends none of a run; nor is one that asks for
    stacks its end, before there is a log that takes them."""
    assert launch.fork_ranks(0, take_early_signals, tmp_path) == [0], (tmp_path / "stacks").read_text()
    stacks = (tmp_path / "stacks").read_text()
    assert "most recent call first" in stacks and "in take_early_signals" in stacks
    assert signal.SIGUSR2 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def run_in_terminal(ends: tuple[int, int], nohup: bool, ready: Any, why: Path) -> None:
    """A run that ends by itself after a while, in a session of its own with a terminal, of which it has both ends."""
    os.close(ends[0])
    os.setsid()
    fcntl.ioctl(ends[1], termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)  # also if the tests run under nohup
    stop = StopRequest(None)
    ready.set()
    end = time.monotonic() + (0.5 if nohup else 30)
    while not stop and time.monotonic() < end:
        time.sleep(0.01)
    why.write_text(stop.reason)


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_is_closed_stops_the_run(tmp_path: Path, nohup: bool) -> None:
    """A closed terminal stops the run as SIGTERM does. Under nohup the run continues."""
    context, ends = multiprocessing.get_context("fork"), os.openpty()
    ready = context.Event()
    process = context.Process(target=run_in_terminal, args=(ends, nohup, ready, tmp_path / "why"))
    process.start()
    assert ready.wait(60)
    for end in ends:
        os.close(end)
    process.join(60)
    assert process.exitcode == 0 and (tmp_path / "why").read_text() == ("" if nohup else "SIGHUP")


def test_a_network_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eht0")
    with pytest.raises(RuntimeError) as raised:
        ranks.join_process_group(Process(0, 1, 0, 1))
    code, message = exit_code_and_message(raised.value)
    assert code == 2 and "Unable to find address for: eht0" in message
    assert "Set the environment variable GLOO_SOCKET_IFNAME to an interface of this host" in message


MEET = """
import json, os, sys
import psutil
from xscale import ranks

def listening():
    return {found.laddr for found in psutil.Process().net_connections() if found.status == psutil.CONN_LISTEN}

before = listening()
process = ranks.read_launcher_and_set_environment()
ranks.join_process_group(process)
group = ranks.CpuGroup()
assert group.begin_sum([3])() == [3 * process.world]
places = group.all_gather([process.rank, process.world, process.local_rank, process.local_world])
if process.is_main:
    with open(__file__ + ".json", "w") as file:
        json.dump([places, sorted({address.ip for address in listening() - before})], file)
group.barrier()
os._exit(0)  # as the commands do, since threads of libraries may abort the normal exit
"""


@pytest.mark.parametrize("started", ["alone", "mpirun", "two ranks"])
def test_ranks_of_one_host_listen_to_no_other_host(tmp_path: Path, started: str) -> None:
    """Under mpirun, mpi4py finds the ranks; other launchers tell each its rank."""
    script = tmp_path / "script.py"
    script.write_text(MEET)
    if started == "mpirun":
        environment = {
            name: value for name, value in launch.environment().items() if not name.startswith(launch.LAUNCHERS)
        }
        environment["MASTER_PORT"] = str(launch.free_port())
        words = launch.command(2, [], "mpirun", str(script))
        subprocess.run(words, check=True, timeout=240, env=environment, cwd=launch.ROOT)
    else:
        launch.fork_ranks(0 if started == "alone" else 2, runpy.run_path, str(script))
    places, listening = json.loads((tmp_path / "script.py.json").read_text())
    assert places == ([[0, 1, 0, 1]] if started == "alone" else [[0, 2, 0, 2], [1, 2, 1, 2]])
    assert listening == ["127.0.0.1"] or (started == "alone" and not listening)


def test_an_mpi_that_is_not_that_of_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would train alone."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMIX"))}
    monkeypatch.setattr(os, "environ", environment | {"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2"})
    communicator = SimpleNamespace(Get_size=lambda: 1)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=communicator)))
    with pytest.raises(UserError, match="mpirun has started 2 processes, but mpi4py finds only 1"):
        ranks.read_launcher_and_set_environment()


def allocate() -> Exception:
    """torch's own error of a host whose memory ends."""
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "code", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), 2, "Lower train.max_tokens"),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might"), 2, "Lower train.max_tokens"),
        (dist.DistBackendError("NCCL error in: x.cpp:1\nCuda failure 2 'out of memory'"), 2, "Lower train.max_tokens"),
        (MemoryError(), 2, "Lower train.max_tokens"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), 2, "Lower train.max_tokens"),
        (allocate(), 2, "Lower train.max_tokens"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"), 4, "another rank has ended"),
        (dist.DistBackendError("NCCL error in: x.cpp:1, remote process exited"), 4, "another rank has ended"),
        (dist.DistNetworkError("port 29500 of 127.0.0.1: [Errno 98] Address already in use"), 4, "--master_port"),
        (dist.DistNetworkError("The client socket has timed out"), 4, "Set MASTER_ADDR"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl"), 4, "metrics.jsonl: No space left"),
        (KeyError("a fault of ours"), 1, "KeyError"),
    ],
    ids=str,
)
def test_what_an_error_is_and_what_to_do(error: Exception, code: int, advice: str) -> None:
    """status.json has this text itself."""
    assert exit_code_and_message(error)[0] == code and advice in exit_code_and_message(error)[1]
    assert "status.json" not in exit_code_and_message(error)[1]


SILENT = """
import sys, threading, time
from xscale.errors import run_and_exit
threading.Thread(target=time.sleep, args=(60,)).start()  # as libraries have them

def main():
    if sys.argv[1] == "raises":
        raise RuntimeError("a fault of ours")
    sys.stdout.write("almost done")
    return int(sys.argv[1])

run_and_exit(main)
"""


@pytest.mark.parametrize(("how", "code"), [("raises", 1), ("0", 0), ("4", 4)])
def test_a_command_ends_where_nobody_hears_it(how: str, code: int) -> None:
    """Its output is on a disk that is full."""
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", SILENT, how], stdout=full, stderr=full, env=buffered, timeout=30)
    assert done.returncode == code


def test_an_error_that_cannot_be_printed_keeps_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_room(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")

    monkeypatch.setattr(train, "join_group_and_train", no_room)
    monkeypatch.setattr(sys, "stderr", Full())
    assert train.main(["--ds_config", "none.json", "--data", "d", "--out", str(tmp_path)]) == 4
    assert "metrics.jsonl" in json.loads((tmp_path / "status.json").read_text())["why"]


def test_a_launcher_that_is_killed_while_its_rank_imports_is_known(tmp_path: Path) -> None:
    """After the kill, the rank has another parent process, so StopRequest asks the launchers that were found before."""
    (tmp_path / "rank.py").write_text(
        "import os, time\nfrom xscale.errors import find_launchers\nparent = os.getppid()\nfind_launchers()\n"
        "print('found', flush=True)\nwhile os.getppid() == parent:\n    time.sleep(0.01)\n"
        "print(*[launcher.pid for launcher in find_launchers()], flush=True)\n"
    )
    (tmp_path / "deepspeed").write_text("import subprocess, sys\nsubprocess.run([sys.executable, 'rank.py'])\n")
    words = [sys.executable, "deepspeed"]
    environment = launch.environment() | {"PYTHONPATH": str(launch.ROOT)}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout and launcher.stdout.readline() == "found\n"
        launcher.kill()
        assert launcher.stdout.readline() == f"{launcher.pid}\n"


def test_rank_0_prints_its_error_with_a_wrong_local_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LOCAL_RANK may be of another job. No other rank would print the error."""
    monkeypatch.setattr(ranks, "read_launcher_and_set_environment", lambda allow_missing_launcher: Process(0, 1, 3, 1))
    words = ["--dry_run", "--recipe", "none", "--ds_config", "zero2_cpu", "--data", "d", "--out", str(tmp_path)]
    assert train.main(words) == 2
    assert "error: recipe 'none' not found" in capsys.readouterr().err
