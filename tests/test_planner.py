"""Plans are made by a process of their own: the same ones, and whatever befalls it is told."""

import atexit
import errno
import faulthandler
import multiprocessing.util
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

from tests import launch
from tests.launch import open_run
from tests.streams import pairs
from tests.test_mixture import SOURCES, STREAMS, FakeSource, mixture, plain
from xscale.data import planner
from xscale.data.loader import start_batch_workers, worker_count
from xscale.data.mixture import Plan, initial_state
from xscale.data.planner import Failure, Node, gather_node_and_listen, start_planner
from xscale.errors import MachineError, RankError, UserError
from xscale.ranks import CpuGroup, Process
from xscale.run import run_status
from xscale.run.run_status import MACHINE, USER_ERROR, exit_code_and_message


class Plans(Dataset):
    """Workers that give back what they got."""

    def __getitem__(self, plan: Plan | Failure) -> Any:
        return plan


def through_workers(run: Any, workers: int, steps: int) -> Iterator[Any]:
    dataset: Any = Plans()
    plans = (
        start_planner(run, steps, gather_node_and_listen(CpuGroup(alone=True)))
        if workers
        else (run.next_plan_of_rank() for _ in range(steps))
    )
    return start_batch_workers(plans, dataset, workers)


@pytest.mark.parametrize(
    ("device", "cores", "ranks", "count"),
    [("cpu", 64, 2, 2), ("cuda", 16, 8, 4), ("cuda", 56, 8, 5), ("cuda", 128, 8, 6), ("cuda", 12, 1, 6)],
)
def test_workers_by_device_and_cores(monkeypatch: Any, device: str, cores: int, ranks: int, count: int) -> None:
    """4 to 6 a GPU, of its share of the host's cores, or of the cores that its launcher has bound it to."""
    process = Process(0, ranks, 0, ranks)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert worker_count("auto", process, device) == count and worker_count(3, process, device) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    assert worker_count("auto", process, device) == (2 if device == "cpu" else 6)


def test_plans_of_the_process_are_those_of_the_mixture() -> None:
    one, other = (list(through_workers(mixture(1, 3, 100), workers, 12)) for workers in (0, 2))
    assert len(one) == len(other) == 12
    for a, b in zip(one, other, strict=True):
        assert (a.step, a.state, plain(a)) == (b.step, b.state, plain(b))
    assert multiprocessing.active_children() == []


def of_node(steps: int, **how: Any) -> list[Iterator[Any]]:
    """The plans of three of four ranks, by one planner; as of processes that meet on a node."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen()
    ranks, name = [0, 1, 3], listener.getsockname()
    places = [Node(3, name, listener), Node(3, name, None), Node(3, name, None)]
    runs = [mixture(rank, 4, 100, **how) for rank in ranks]
    return [start_planner(run, steps, node) for run, node in zip(runs, places, strict=True)]


def test_one_process_plans_for_all_ranks_of_a_node() -> None:
    alone = [[run.next_plan_of_rank() for _ in range(60)] for run in (mixture(rank, 4, 100) for rank in (0, 1, 3))]
    found = list(zip(*of_node(60), strict=True))  # as ranks go, step by step
    assert len(multiprocessing.active_children()) <= 1
    for steps, expected in zip(found, zip(*alone, strict=True), strict=True):
        for a, b in zip(steps, expected, strict=True):
            assert (a.step, a.rank, a.world, a.state, plain(a)) == (b.step, b.rank, b.world, b.state, plain(b))


def test_a_rank_of_a_node_that_ends_stops_no_other() -> None:
    """What its end means is for the others to see where they meet it; and the planner ends with the last of them."""
    first, second, third = of_node(10**6)
    next(second)
    second.close()  # type: ignore[attr-defined]
    for _ in range(300):  # more than a socket takes
        assert next(first).step == next(third).step
    (planner,) = multiprocessing.active_children()
    first.close()  # type: ignore[attr-defined]
    assert not planner.is_alive()
    with pytest.raises(RuntimeError, match=r"plans the steps has ended. It was started by another rank of this node"):
        list(third)


@pytest.mark.parametrize("hangs", [1, 2])
def test_a_child_that_does_not_come_out_of_its_fork_is_made_again(hangs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's first, or a worker's: as where a library's thread held a lock of the interpreter's."""
    forked, plain = [0], os.fork

    def fork() -> int:
        forked[0] += 1
        pid = plain()
        while not pid and forked[0] == hangs:
            time.sleep(1)
        return pid

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(planner, "BEGIN_SECONDS", 3.0)  # a busy machine takes its time
    assert len(list(through_workers(mixture(1, 3, 100), 2, 12))) == 12
    assert forked == [4] and os.fork is fork and multiprocessing.active_children() == []


def test_processes_of_the_loader_tell_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the log of their rank, when a run that hangs asks for it."""
    monkeypatch.setattr(run_status.LOG, "propagate", True)
    monkeypatch.setattr(run_status.LOG, "handlers", [])
    monkeypatch.setattr(faulthandler, "enable", lambda _: None)  # pytest's own stays
    log = run_status.start_logging(tmp_path, 0)
    others = set(multiprocessing.active_children())
    batches = through_workers(mixture(1, 3, 100), 2, 10**6)  # the planner is not done
    list(islice(batches, 2))
    children, found = set(multiprocessing.active_children()) - others, []
    try:
        for child in children:
            before, deadline = len(log.read_text()), time.monotonic() + 60
            assert child.pid
            os.kill(child.pid, signal.SIGUSR1)
            while not (where := re.search(r" in (_worker_loop|_run_planner)\n", log.read_text()[before:])):
                assert time.monotonic() < deadline, log.read_text() + Path(f"/proc/{child.pid}/status").read_text()
                time.sleep(0.05)
            time.sleep(0.2)  # it goes on to the stack's end
            found.append(where[1])
        assert sorted(found) == ["_run_planner", "_worker_loop", "_worker_loop"]
        assert all(child.is_alive() for child in children)
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        del batches  # pytest keeps the names of a test that fails, and with them these processes


def test_an_error_of_the_plan_is_the_run_s() -> None:
    """After the steps before it."""

    class Damaged(FakeSource):
        def byte_lengths_and_continuations(
            self, shard: int, records: np.ndarray | slice
        ) -> tuple[np.ndarray, np.ndarray]:
            if shard == 1:
                raise UserError("entries is damaged")
            return super().byte_lengths_and_continuations(shard, records)

    source: Any = Damaged("en-xx", [300] * 3)
    run = mixture(sources=[source], streams=[pairs("tlm", (0,), 30)])
    with pytest.raises(RankError, match="entries is damaged"):
        list(through_workers(run, 1, 100))


@pytest.mark.parametrize(
    ("which", "number"),
    [
        ("the planner", errno.EIO),
        ("a worker", errno.ESTALE),
        ("the trainer", errno.ETIMEDOUT),
        ("a worker", errno.ENOMEM),
    ],
)
def test_what_a_file_system_answers_names_the_file(
    which: str, number: int, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its exit code, also from another process, whose errors torch makes anew without errno and file."""
    workers = "data.workers=0" if which == "the trainer" else "data.workers=1"
    loader = open_run("tlm", [workers, "streams.tlm.samples=8"], [demo], measured=False)
    trainer, pread = os.getpid(), os.pread

    def broken(fd: int, size: int, at: int) -> bytes:
        here = "the planner" if multiprocessing.current_process().name == "planner" else "a worker"
        if which == ("the trainer" if os.getpid() == trainer else here):
            raise OSError(number, os.strerror(number))
        return pread(fd, size, at)

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(OSError) as raised:
        list(loader.batches(Process(0, 1, 0, 1), "cpu", initial_state(loader.last_streams), 3))
    error, memory = raised.value, number == errno.ENOMEM
    assert exit_code_and_message(error)[0] == (USER_ERROR if memory else MACHINE)
    said = exit_code_and_message(error)[1]
    assert str(demo / "pairs" / "entries") in said and os.strerror(number) in said
    assert ("max_tokens" if memory else "start the run again") in said and "\n" not in said


def test_a_worker_that_is_killed_is_the_machine_s() -> None:
    """In a process of its own, since torch raises the error wherever the main thread is when the worker dies. The
    process then ends while it holds batches: its workers, which leave SIGTERM to it, do not keep it."""
    assert launch.fork_ranks(0, lose_workers, timeout=30) == [0]


def lose_workers() -> None:
    atexit._clear()  # what this fork has to do at its end is its own
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    batches = through_workers(mixture(1, 3, 100), 1, 100_000)
    next(batches)
    (worker,) = [child for child in multiprocessing.active_children() if child.name != "planner"]
    try:
        os.kill(worker.pid or 0, signal.SIGKILL)
        list(batches)
    except RuntimeError as error:
        code, said = exit_code_and_message(error)[0], exit_code_and_message(error)[1]
    assert exit_code_and_message(MachineError(f"rank 0: {said}"))[1] == f"rank 0: {said}"  # on the others, once
    assert code == MACHINE and f"pid {worker.pid}" in said and "\n" not in said
    assert "memory" in said and "data.workers" in said
    kept = through_workers(mixture(1, 3, 100), 1, 9)
    next(kept)
    atexit._run_exitfuncs()  # as where an interpreter ends


def test_a_planner_that_is_killed_before_the_ranks_connect_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the rank that has started the planner, and on the others of the node."""
    start = multiprocessing.Process.start

    def start_and_kill(process: multiprocessing.Process) -> None:
        start(process)
        process.kill()
        process.join()

    monkeypatch.setattr(multiprocessing.Process, "start", start_and_kill)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen()
    nodes = {0: Node(2, listener.getsockname(), listener), 1: Node(2, listener.getsockname(), None)}
    for rank, node in nodes.items():
        with pytest.raises(RuntimeError, match="plans the steps") as raised:
            start_planner(mixture(rank, 2, 100), 9, node)
        code, said = exit_code_and_message(raised.value)
        assert code == MACHINE and ("another rank of this node" if rank else "killed by signal: Killed") in said


def test_a_planner_that_is_killed_is_missed() -> None:
    others = set(multiprocessing.active_children())
    batches = through_workers(mixture(sources=SOURCES, streams=STREAMS), 1, 100_000)
    next(batches)
    (planner,) = [child for child in set(multiprocessing.active_children()) - others if child.name == "planner"]
    os.kill(planner.pid or 0, signal.SIGTERM)  # a launcher's, to all processes: the trainer decides
    time.sleep(0.1)
    assert planner.is_alive()
    os.kill(planner.pid or 0, signal.SIGKILL)
    try:  # pytest.raises would keep the error, and with it the worker
        list(batches)
    except RuntimeError as error:
        code, said = exit_code_and_message(error)[0], exit_code_and_message(error)[1]
    del batches
    assert code == MACHINE and "plans the steps" in said and "memory" in said
