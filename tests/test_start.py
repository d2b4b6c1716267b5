"""Start-up work is shared out over ranks: files are looked at once, sources are measured once."""

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from xscale.data.mixture import initial_state
from xscale.data.shards import Source
from xscale.errors import UserError
from xscale.ranks import Control, Process
from xscale.run.job import prepare

SETS = ["data.workers=0", "streams.tlm.samples=16"]


class Threads(Control):
    """Ranks that are threads."""

    board: dict[int, Any]
    barrier_of: threading.Barrier

    def __init__(self, rank: int, size: int):
        self.number, self.of = rank, size

    rank = property(lambda self: self.number)  # type: ignore[assignment]
    size = property(lambda self: self.of)  # type: ignore[assignment]

    def gather(self, value: Any) -> list[Any]:
        self.board[self.rank] = value
        self.barrier_of.wait(30)
        found = [self.board[rank] for rank in range(self.size)]
        self.barrier_of.wait(30)
        return found


def on_ranks(size: int, work: Any) -> list[Any]:
    """What each rank returns, or the UserError that it raises."""
    Threads.board, Threads.barrier_of = {}, threading.Barrier(size)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(Threads(rank, size))
        except UserError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_files_are_looked_at_once(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls a shard, of its tar and its .idx, whatever the ranks."""
    looked, plain = Counter[str](), Path.stat

    def stat(self: Path, **kwargs: Any) -> os.stat_result:
        if self.suffix in (".tar", ".idx"):
            looked[str(self)] += 1
        return plain(self, **kwargs)

    monkeypatch.setattr(Path, "stat", stat)
    for ranks in (1, 2, 3):
        looked.clear()
        jobs = on_ranks(ranks, lambda control: prepare("tlm", SETS, [demo], control))
        assert {job.identity() == jobs[0].identity() for job in jobs} == {True}
        assert looked == Counter(str(f) for suffix in ("tar", "idx") for f in demo.glob(f"*/*.{suffix}"))


def test_every_rank_hears_of_a_file_that_is_missing(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = list((demo / "pairs").glob("*.tar"))[:1]
    plain = Path.stat

    def stat(self: Path, **kwargs: Any) -> os.stat_result:
        if self == shard:
            raise FileNotFoundError
        return plain(self, **kwargs)

    monkeypatch.setattr(Path, "stat", stat)
    found = on_ranks(3, lambda control: prepare("tlm", SETS, [demo], control))
    assert {str(error).partition(" is missing")[0] for error in found} == {str(shard)}


def test_ranks_measure_together_what_one_would(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare("mixed", ["data.workers=0"], [demo])
    alone = job.calibrated().calibration
    reads, plain = Counter[int](), Source.read
    monkeypatch.setattr(
        Source, "read", lambda self, *place: (reads.update([threading.get_ident()]), plain(self, *place))[1]
    )
    measured = on_ranks(2, lambda control: job.calibrated(control=control).calibration)
    assert measured == [alone, alone]
    assert len(reads) == 2 and min(reads.values()) > 0.2 * max(reads.values())


@pytest.mark.parametrize(("ranks", "asked"), [(1, True), (4, True), (8, False)])
def test_a_node_asks_for_whole_shards_where_it_reads_much_of_them(
    demo: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, asked: bool
) -> None:
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *_: advised.append(fd))
    job = prepare("tlm", SETS, [demo]).calibrated()
    assert not advised, "a look at a few records"
    next(job.batches(Process(0, ranks, 0, 1), "cpu", initial_state(job.specs), 1))
    assert bool(advised) == asked
