"""Plans are made by a process of their own: the same ones, and whatever befalls it is told."""

import faulthandler
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

from tests.test_mixture import SOURCES, STREAMS, FakeSource, mixture, plain
from xscale.data import forks, loader
from xscale.data.loader import Failure, step_batches
from xscale.data.mixture import StepPlan, StreamSpec
from xscale.errors import RankError, UserError
from xscale.run import metrics


class Plans(Dataset):
    """Workers that give back what they got."""

    def __getitem__(self, plan: StepPlan | Failure) -> Any:
        return plan


def through_workers(run: Any, workers: int, steps: int) -> Iterator[Any]:
    dataset: Any = Plans()
    return step_batches(run, dataset, workers, steps)


def test_plans_of_the_process_are_those_of_the_mixture() -> None:
    one, other = (list(through_workers(mixture(1, 3, 100), workers, 12)) for workers in (0, 2))
    assert len(one) == len(other) == 12
    for a, b in zip(one, other, strict=True):
        assert (a.step, a.state, plain(a)) == (b.step, b.state, plain(b))
    assert multiprocessing.active_children() == []


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
    monkeypatch.setattr(forks, "BEGIN_SECONDS", 0.5)
    assert len(list(through_workers(mixture(1, 3, 100), 2, 12))) == 12
    assert forked == [4] and os.fork is fork and multiprocessing.active_children() == []


def test_processes_are_called_by_what_they_are() -> None:
    """A worker's signal, or its memory, is not taken for the trainer's."""
    batches = through_workers(mixture(1, 3, 100), 2, 100)
    list(islice(batches, 2))  # one of each worker
    names = {Path(f"/proc/{child.pid}/comm").read_text() for child in multiprocessing.active_children()}
    assert names == {"xscale1-plan\n", "xscale1-load0\n", "xscale1-load1\n"}


def test_processes_of_the_loader_tell_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the log of their rank, when a run that hangs asks for it."""
    monkeypatch.setattr(metrics.LOG, "propagate", True)
    monkeypatch.setattr(metrics.LOG, "handlers", [])
    monkeypatch.setattr(faulthandler, "enable", lambda _: None)  # pytest's own stays
    log = metrics.start_logging(tmp_path, 0)
    batches = through_workers(mixture(1, 3, 100), 2, 10**6)  # the planner is not done
    list(islice(batches, 2))
    children, found = multiprocessing.active_children(), []
    try:
        for child in children:
            before, deadline = len(log.read_text()), time.monotonic() + 20
            assert child.pid
            os.kill(child.pid, signal.SIGUSR1)
            while not (where := re.search(r" in (_worker_loop|_plan)\n", log.read_text()[before:])):
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            time.sleep(0.2)  # it goes on to the stack's end
            found.append(where[1])
        assert sorted(found) == ["_plan", "_worker_loop", "_worker_loop"]
        assert all(child.is_alive() for child in children)
    except AssertionError:
        for child in children:  # which would be waited for at the end of all tests
            child.kill()
        raise
    faulthandler.unregister(signal.SIGUSR1)


def test_an_error_of_the_plan_is_the_run_s() -> None:
    """After the steps before it."""

    class Damaged(FakeSource):
        def lengths(self, shard: int, records: np.ndarray | slice) -> np.ndarray:
            if shard == 1:
                raise UserError("xx-000001.idx is damaged")
            return super().lengths(shard, records)

    source: Any = Damaged("en-xx", [300] * 3)
    run = mixture(sources=[source], streams=[StreamSpec("tlm", (0,), 30, packed=False)])
    with pytest.raises(RankError, match=r"xx-000001\.idx is damaged"):
        list(through_workers(run, 1, 100))


def test_a_planner_that_is_killed_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "PLANS_BYTES", 1 << 12)
    batches = through_workers(mixture(sources=SOURCES, streams=STREAMS), 1, 100_000)
    next(batches)
    (planner,) = [child for child in multiprocessing.active_children() if child.name == "planner"]
    os.kill(planner.pid or 0, signal.SIGTERM)  # a launcher's, to all processes: the trainer decides
    time.sleep(0.1)
    assert planner.is_alive()
    os.kill(planner.pid or 0, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"plans the steps is gone \(exit code -9\)"):
        list(batches)
