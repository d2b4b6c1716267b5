"""Start-up work is shared out over ranks: files are looked at once, sources are measured once."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import ROOT, open_run
from xscale import train
from xscale.data import calibrate, shards
from xscale.data.mixture import initial_state
from xscale.data.shards import Source
from xscale.errors import UserError
from xscale.ranks import CpuGroup, Process, result_or_caught_user_error, unwrap_or_raise_user_error
from xscale.run.resolve import resolve_run
from xscale.run.start import check_ranks_agree
from xscale.step.ds_config import Hardware, read_and_resolve_ds_config

SETS = ["data.workers=0", "streams.tlm.samples=16"]


class Threads(CpuGroup):
    """Ranks that are threads."""

    board: dict[int, Any]
    barrier_of: threading.Barrier

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.is_main = rank, size, rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        self.board[self.rank] = value
        self.barrier_of.wait(30)
        found = [self.board[rank] for rank in range(self.size)]
        self.barrier_of.wait(30)
        return found

    def value_from_main(self, make: Any) -> Any:
        return unwrap_or_raise_user_error(
            self.all_gather(result_or_caught_user_error(make) if self.is_main else None)[0]
        )


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


def test_ranks_that_were_started_otherwise_are_told(demo: Path) -> None:
    """Each would plan another stream, and train on."""
    hardware = Hardware.of_this_process()  # its imports of deepspeed are not for several threads at once

    def started(cpu_group: Threads, other: list[str], resume: str = "auto") -> str:
        mine = cpu_group.rank == 1
        args = train.parse_arguments(["--ds_config", "x.json", "--out", "run", "--resume", resume if mine else "auto"])
        recipe, corpus = resolve_run("tlm", [*SETS, *(other if mine else [])], [demo])
        config = read_and_resolve_ds_config(ROOT / "ds_configs" / "zero2_cpu.json", recipe, 2, hardware)
        check_ranks_agree(args, recipe, corpus, config, cpu_group)
        return "same"

    assert on_ranks(2, lambda cpu_group: started(cpu_group, [])) == ["same", "same"]
    for other, resume, named in (
        (["train.seed=7"], "auto", r"recipe\.train\.seed: 0 on rank 0, 7 on the other rank"),
        (["train.lr=0.5"], "auto", r"0\.5 on the other rank"),
        ([], "never", r"--resume: auto on rank 0, never on the other rank"),
    ):
        first, second = on_ranks(2, lambda cpu_group, other=other, resume=resume: started(cpu_group, other, resume))
        for error in (first, second):
            assert re.search(
                rf"rank 1 on {os.uname().nodename} was started with other settings(.|\n)*{named}", str(error)
            ), error


def test_files_are_looked_at_once(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a shard, of its tar, whatever the ranks."""
    looked, plain = Counter[str](), os.stat

    def stat(path: Any, **kwargs: Any) -> os.stat_result:
        if str(path).endswith(".tar"):
            looked[str(path)] += 1
        return plain(path, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    for ranks in (1, 2, 3):
        looked.clear()
        opened = on_ranks(ranks, lambda cpu_group: resolve_run("tlm", SETS, [demo], cpu_group)[1])
        assert {corpus.identity() == opened[0].identity() for corpus in opened} == {True}
        assert looked == Counter(map(str, demo.glob("*/*.tar")))


def test_the_index_says_how_many_pairs_have_links(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a pair without links is found before step 1. Of an index without this number, the first pair tells."""
    looked, plain = list[int](), Source.read
    monkeypatch.setattr(Source, "read", lambda self, *place: (looked.append(1), plain(self, *place))[1])
    shutil.copytree(demo / "pairs", tmp_path / "pairs")
    (tmp_path / "tokenizer").symlink_to(demo / "tokenizer")
    path = tmp_path / "pairs" / "index.json"
    index = json.loads(path.read_text())
    pairs = index["records"]
    path.write_text(json.dumps(index | {"linked": pairs - 3}))
    with pytest.raises(
        UserError, match=f"streams.alignlm needs word alignments, but 3 of the {pairs:,} pairs in .*pairs have none"
    ):
        resolve_run("alignlm", ["data.workers=0"], [tmp_path])
    path.write_text(json.dumps(index))
    resolve_run("alignlm", ["data.workers=0"], [tmp_path])
    assert not looked
    del index["linked"]
    path.write_text(json.dumps(index))
    resolve_run("alignlm", ["data.workers=0"], [tmp_path])
    assert len(looked) == 1


def test_every_rank_hears_of_a_file_that_is_missing(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shard,) = list((demo / "pairs").glob("*.tar"))[:1]
    plain = os.stat

    def stat(path: Any, **kwargs: Any) -> os.stat_result:
        if path == str(shard):
            raise FileNotFoundError
        return plain(path, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    found = on_ranks(3, lambda cpu_group: resolve_run("tlm", SETS, [demo], cpu_group))
    assert {str(error).partition(" is missing")[0] for error in found} == {str(shard)}


def test_ranks_measure_together_what_one_would(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, corpus = resolve_run("xlm", ["data.workers=0"], [demo])
    alone = calibrate.calibrate(recipe, corpus, CpuGroup())
    reads, plain = Counter[int](), Source.read
    monkeypatch.setattr(
        Source, "read", lambda self, *place: (reads.update([threading.get_ident()]), plain(self, *place))[1]
    )
    measured = on_ranks(2, lambda cpu_group: calibrate.calibrate(recipe, corpus, cpu_group))
    assert measured == [alone, alone]
    assert len(reads) == 2 and min(reads.values()) > 0.1 * max(reads.values())


def test_few_shards_of_many_are_measured(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every source some at least, from all over it; a run draws from all records all the same."""
    monkeypatch.setattr(calibrate, "SHARDS", 4)
    monkeypatch.setattr(calibrate, "LINE_SHARDS", 1)
    recipe, corpus = resolve_run("tlm", SETS, [demo])
    opened, plain = list[tuple[str, str]](), shards.OpenFile
    first = corpus.sources[0]
    first.shards *= 50
    first.counts = np.tile(first.counts, 50)
    first.starts = np.tile(first.starts, 50)

    def open_file(path: str) -> shards.OpenFile:
        if path.endswith(".tar"):
            opened.append((Path(path).parent.name, path))
        return plain(path)

    monkeypatch.setattr(shards, "OpenFile", open_file)
    before = [source.counts.tolist() for source in corpus.sources]
    found = calibrate.calibrate(recipe, corpus, CpuGroup())
    assert len(opened) <= 2 * len(corpus.sources)
    assert {name for name, _ in opened} >= {source.directory.name for source in corpus.sources}
    assert found and len(found.lines) == len(corpus.sources)
    assert [source.counts.tolist() for source in corpus.sources] == before


@pytest.mark.parametrize(("ranks", "asked"), [(1, True), (4, True), (8, False)])
def test_a_node_asks_for_whole_shards_where_it_reads_much_of_them(
    demo: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, asked: bool
) -> None:
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *_: advised.append(fd))
    loader = open_run("tlm", SETS, [demo])
    assert not advised, "a look at a few records"
    next(loader.batches(Process(0, ranks, 0, 1), "cpu", initial_state(loader.last_streams), 1))
    assert bool(advised) == asked


@pytest.mark.slow
def test_an_engine_does_not_import_a_compiler() -> None:
    """DeepSpeed looks for its Muon with any optimizer, and would. Nor does a CPU need triton."""
    program = """
import sys
sys.modules["triton"] = None
import deepspeed, torch
from xscale.ops.alignment_gather import alignment_gather
i, h = torch.arange(3, dtype=torch.int32), torch.randn(2, 8, requires_grad=True)
alignment_gather(h, i, i[:2], i, i[:2])[1].sum().backward()
assert h.grad[:, 0].tolist() == [0, 1]
from deepspeed.runtime import compiler
before = compiler.compile
from xscale.deepspeed_private import import_muon_uncompiled, disable_shared_memory_op
import_muon_uncompiled()
disable_shared_memory_op()  # which DeepSpeed would compile
from deepspeed.runtime.zero.utils import is_zero_supported_optimizer
assert compiler.compile is before
deepspeed.comm.init_distributed("gloo", False, init_method="file://" + sys.argv[1], rank=0, world_size=1)  # no MPI
assert is_zero_supported_optimizer(torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]))
assert "torch._inductor.compile_fx" not in sys.modules
"""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-c", program, f"{folder}/store"]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
