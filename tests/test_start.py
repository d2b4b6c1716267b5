"""Start-up work is shared out over ranks: files are looked at once, sources are measured once."""

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xscale.data import loader
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
    looked, plain = Counter[str](), os.stat

    def stat(path: Any, **kwargs: Any) -> os.stat_result:
        if str(path).endswith((".tar", ".idx")):
            looked[str(path)] += 1
        return plain(path, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    for ranks in (1, 2, 3):
        looked.clear()
        jobs = on_ranks(ranks, lambda control: prepare("tlm", SETS, [demo], control))
        assert {job.identity() == jobs[0].identity() for job in jobs} == {True}
        assert looked == Counter(str(f) for suffix in ("tar", "idx") for f in demo.glob(f"*/*.{suffix}"))


def test_every_rank_hears_of_a_file_that_is_missing(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = list((demo / "pairs").glob("*.tar"))[:1]
    plain = os.stat

    def stat(path: Any, **kwargs: Any) -> os.stat_result:
        if path == str(shard):
            raise FileNotFoundError
        return plain(path, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
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
    assert len(reads) == 2 and min(reads.values()) > 0.1 * max(reads.values())


def test_few_shards_of_many_are_measured(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every source some at least, from all over it; a run draws from all records all the same."""
    monkeypatch.setattr(loader, "CALIBRATION_SHARDS", 4)
    monkeypatch.setattr(loader, "LINE_SHARDS", 1)
    job, opened, plain = prepare("tlm", SETS, [demo]), list[tuple[str, str]](), Source._open_idx
    job.sources[0].shards *= 50
    job.sources[0].counts = np.tile(job.sources[0].counts, 50)

    def open_idx(self: Source, shard: int) -> np.ndarray:
        opened.append((self.name, self.shards[shard].name))
        return plain(self, shard)

    monkeypatch.setattr(Source, "_open_idx", open_idx)
    before = [source.counts.tolist() for source in job.sources]
    found = job.calibrated().calibration
    assert len(opened) <= 2 * len(job.sources) and {name for name, _ in opened} >= {
        source.name for source in job.sources
    }
    assert found and len(found.lines) == len(job.sources)
    assert [source.counts.tolist() for source in job.sources] == before


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
