"""Measure what a start and a resume cost besides imports on a large corpus, with real files and real ranks.

    python benchmarks/start.py [--records 1000000000] [--shards 100000] [--kinds pair mono] [--sources 1 100]
                               [--far MS]

The corpus of 10^9 records has one written shard for each source and hard links to it; its index lists each link as a
shard. A second corpus, of two shards, shows what any start costs. Each corpus is trained on for 8 steps on 1 and on 2
ranks, from the start and again from the checkpoint of step 1. The script prints rank 0's seconds from the end of the
imports to the first step: in all, and for reading indices and file sizes (`prepare`), for finding and checking a
checkpoint, measuring the data (`calibrate`), building the engine, saving step 0 and waiting for the first step's
records; then how often all processes of all ranks asked for the size of a file of the corpus (stat) or opened one, and
the memory of rank 0. --far: each stat and open of a file of the corpus takes this many ms, as on a network's file
system.
"""

import argparse
import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import print_table, text_pairs, write_tokenizer

from data_tools.write_shards import InputLine, write_shards
from xscale.data.shards import ENTRIES
from xscale.record import Record
from xscale.run import synchronizer

RECIPES = {"pair": "tlm", "mono": "mlm"}
MOST_LINKS = 50_000
"""The most hard links to one file; ext4 allows 65,000."""
PHASES = {
    "resolve_run": "prepare", "find_checkpoint": "checkpoint", "calibration": "calibrate", "make_engine": "engine",
    "save": "save", "batches": "records", "next": "records",
}  # fmt: skip


def write_corpus(out: Path, kind: str, sources: int, shards: int, records: int) -> Path:
    """Write `sources` sources with `records` records and `shards` shards in all; each source has its own languages."""
    pairs = list(islice(text_pairs(None)[1], records // shards))
    write_tokenizer(pairs[:2000], 2000, out / "tokenizer")
    for number in range(sources):
        langs = ("en", f"l{number:02}") if kind == "pair" else (f"l{number:02}",)
        lines = (
            InputLine(n, "", [Record(f"k-{n:09d}", langs, pair[: len(langs)], doc=None if kind == "pair" else n // 10)])
            for n, pair in enumerate(pairs, start=1)
        )
        write_shards(lines, out / langs[-1], "text", len(pairs), {"tool": "benchmarks"})
        link_shards(out / langs[-1], shards // sources)
    return out


def link_shards(directory: Path, shards: int) -> None:
    """Turn the only shard of a directory into `shards` shards by hard links."""
    index = json.loads((directory / "index.json").read_text())
    (shard,) = index["shards"]
    real = directory / shard["name"]
    for number in range(1, shards):
        path = directory / f"text-{number:06d}.tar"
        for new, old in ((path, real), (path.with_suffix(".idx"), real.with_suffix(".idx"))):
            if number % MOST_LINKS:
                os.link(old, new)
            else:
                shutil.copy(old, new)
        real = real if number % MOST_LINKS else path
    entries = (directory / ENTRIES).read_bytes()
    with (directory / ENTRIES).open("wb") as file:
        for _ in range(shards):
            file.write(entries)
    index["shards"] = [shard | {"name": f"text-{number:06d}.tar"} for number in range(shards)]
    for field in ("records", "bytes"):
        index[field] = shards * shard[field]
    (directory / "index.json").write_text(json.dumps(index, indent=1) + "\n")


class Counts:
    """Counts of stat and of open in all forked processes, such as loader workers and planners. There is no lock, so two
    counts at the same instant may be one. Counting takes time, so seconds are those of a run without it."""

    def __init__(self, data: str, far: float, counting: bool):
        self.map, self.data, self.far = mmap.mmap(-1, 16), data, far
        if counting or far:
            self.begin()

    def begin(self) -> None:
        stat = os.stat

        def counting(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            self.add(0, path)
            return stat(path, *args, **kwargs)

        os.stat = counting  # type: ignore[assignment]
        sys.addaudithook(lambda event, args: self.add(1, args[0]) if event == "open" else None)

    def add(self, place: int, path: Any) -> None:
        if str(path).startswith(self.data):
            if self.far:
                time.sleep(self.far)
            count = struct.unpack_from("q", self.map, 8 * place)[0]
            struct.pack_into("q", self.map, 8 * place, count + 1)

    def both(self) -> list[int]:
        return list(struct.unpack("qq", self.map))


def rank(words: list[str], result: str) -> None:
    """Train one rank of a run. Writes its seconds, memory and counts until the first step to `result`."""
    import deepspeed  # noqa: F401

    from xscale import run_spec, train
    from xscale.run import going_on, loop, start

    data, far = train.parse_arguments(words).data[0].as_posix(), float(os.environ.get("XSCALE_FAR", 0))
    counts, took = Counts(data, far, "XSCALE_COUNTS" in os.environ), dict.fromkeys(PHASES.values(), 0.0)
    started = time.perf_counter()

    def clock(owner: Any, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                took[PHASES[name]] += time.perf_counter() - begun

        setattr(owner, name, timed)

    for owner, name in (
        (start, "resolve_run"),
        (going_on, "calibration"),
        (start, "make_engine"),
        (run_spec.RunSpec, "batches"),
    ):
        clock(owner, name)
    clock(going_on, "find_checkpoint")
    clock(loop.Trainer, "save")
    clock(synchronizer.StepSynchronizer, "next")
    step = loop.Trainer.train_step

    def first_step(self: loop.Trainer, *args: Any) -> Any:
        if not Path(f"{result}.{self.process.rank}").exists():
            memory = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
            found = took | {"all": time.perf_counter() - started, "MB": int(memory.split()[1]) / 1e3}
            Path(f"{result}.{self.process.rank}").write_text(json.dumps(found | {"counts": counts.both()}))
        return step(self, *args)

    loop.Trainer.train_step = first_step  # type: ignore[method-assign]
    code = train.main(words)
    sys.stdout.flush()
    os._exit(code)


def measure(name: str, data: Path, kind: str, world: int, folder: Path) -> list[list[str]]:
    """The rows of the table for a start and for a resume."""
    timed, counted = (train_twice(data, kind, world, folder, counting) for counting in (False, True))
    rows = []
    for what, of_ranks, others in zip(("start", "resume"), timed, counted, strict=True):
        seconds = [f"{of_ranks[0][phase]:.2f}" for phase in ("all", *dict.fromkeys(PHASES.values()))]
        stats, opens = (sum(of["counts"][place] for of in others) for place in (0, 1))
        rows.append([f"{name}, {world} rank{'s' * (world > 1)}: {what}", *seconds, f"{stats:,}", f"{opens:,}",
                     f"{of_ranks[0]['MB']:,.0f}"])  # fmt: skip
    return rows


def train_twice(data: Path, kind: str, world: int, folder: Path, counting: bool) -> list[list[dict[str, Any]]]:
    """Start a run and resume it. Returns what each rank measured in the start, and in the resume."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    found = []
    for what in ("start", "resume"):
        result = folder / f"{what}.json"
        for old in folder.glob(f"{result.name}.*"):
            old.unlink()
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(world)]
        words = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", RECIPES[kind], "--data", str(data)]
        sets = [
            "train.measure_every=0",
            "train.steps=8",
            f"streams.{RECIPES[kind]}.samples=64",
            "checkpoint.every=1",
            "checkpoint.keep=99",
        ]
        command = [*launcher, "--master_port", "29519", __file__, "--rank", str(result), *words, "--out", str(out)]
        env = os.environ | {"OMP_NUM_THREADS": "1"} | ({"XSCALE_COUNTS": "1"} if counting else {})
        done = subprocess.run([*command, "--set", *sets], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
        if what == "start":  # as if it had ended behind step 1
            for step in (out / "checkpoints").glob("step_0000000[2-8]"):
                shutil.rmtree(step)
            (out / "checkpoints" / "latest").write_text("step_00000001")
        found.append([json.loads(Path(f"{result}.{rank}").read_text()) for rank in range(world)])
    return found


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[3:], sys.argv[2])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=10**9)
    parser.add_argument("--shards", type=int, default=10**5)
    parser.add_argument("--kinds", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--sources", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--far", type=float, default=0, metavar="MS")
    args = parser.parse_args()
    os.environ["XSCALE_FAR"] = str(args.far / 1e3)
    cases = [(kind, number, args.shards) for kind in args.kinds for number in [0, *args.sources]]
    rows = []
    with tempfile.TemporaryDirectory() as where:
        for kind, number, shards in cases:
            small = not number
            name = f"{kind}, " + ("2 shards" if small else f"{number} source{'s' * (number > 1)}")
            data, each = Path(where) / "data", args.records // args.shards
            write_corpus(data, kind, number or 1, 2 if small else shards, each * (2 if small else shards))
            for world in args.ranks:
                rows += measure(name, data, kind, world, Path(where))
            shutil.rmtree(data)
    columns = ["", "all, s", *dict.fromkeys(PHASES.values()), "stat", "open", "MB"]
    print_table(f"Start: {args.records:,} records in {args.shards:,} shards, seconds beyond imports", columns, rows)


if __name__ == "__main__":
    main()
