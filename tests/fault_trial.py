"""Many random faults in one run, which must end as an undisturbed one ends: `python -m tests.fault_trial`.

Each life of the run is started, let train for a while, and struck; or its files are, between two lives. At the end
every step has read the same records and written the same metrics as in the undisturbed run, and the last checkpoint is
the same bit for bit.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import psutil

from tests import launch
from xscale.checkpoint import store as checkpoints

RANKS, EVERY, STEPS_OF_A_LIFE, STALL_MINUTES = 2, 4, 10, 0.5
LAUNCHERS = ("torchrun", "deepspeed")
WORKERS = 1


class Forked(subprocess.Popen):
    """A life whose ranks tests/forked.py forks. It has what a trial needs of a process."""

    def __init__(self, arguments: list[str], log: TextIO):
        words = [launch.TRAIN, *arguments]
        self.pid, self.log, self.returncode = 0, log, None  # type: ignore[assignment]
        self.ending = ThreadPoolExecutor(1).submit(launch.fork, RANKS, words, launch.environment(), timeout=3600)
        while not self.pid and not self.ending.done():
            time.sleep(0.02)
            for server in launch._forking:
                self.pid = next((child.pid for child in psutil.Process(server.pid).children()), 0)

    def poll(self) -> int | None:
        return self.ending.result()[0] if self.ending.done() else None

    def wait(self, timeout: float | None = None) -> int:
        try:
            code, output = self.ending.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired("a forked life", timeout or 0) from None
        print(output if self.returncode is None else "", file=self.log, flush=True)
        self.returncode = code
        return code


class Trial:
    """A run that is struck, beside one that is not."""

    def __init__(self, folder: Path, demo: Path, faults: int, seed: int, launchers: Sequence[str] = LAUNCHERS):
        self.folder, self.random, self.faults, self.launchers = folder, random.Random(seed), faults, launchers
        self.data, self.out, self.whole = folder / "data", folder / "struck", folder / "whole"
        shutil.copytree(demo, self.data)
        self.steps = 3 * STEPS_OF_A_LIFE * (faults + 1)
        self.done: Counter[str] = Counter()
        self.lives: list[str] = []
        """How each ended."""

    def arguments(self, out: Path) -> list[str]:
        head = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "tlm", "--out", str(out), "--trace"]
        sets = ["streams.tlm.samples=8", f"train.steps={self.steps}", "train.warmup=0", f"data.workers={WORKERS}"]
        sets += [f"train.stall_limit={STALL_MINUTES}", f"checkpoint.every={EVERY}", "checkpoint.keep=3"]
        return [*head, "--data", str(self.data / "pairs"), "--set", f"model.tokenizer={self.data / 'tokenizer'}", *sets]

    def step(self) -> int:
        """Of the newest line of metrics."""
        with suppress(OSError, IndexError, ValueError, KeyError):
            return json.loads((self.out / "metrics.jsonl").read_bytes().splitlines()[-1])["step"]
        return 0

    def start(self, launcher: str) -> subprocess.Popen:
        log = (self.folder / "lives.log").open("a")
        print(f"--- life {len(self.lives)}, {launcher}, from step {self.step()}", file=log, flush=True)
        if launcher == "forked":
            return Forked(self.arguments(self.out), log)
        words = launch.command(RANKS, self.arguments(self.out), launcher)
        options = {"cwd": launch.ROOT, "env": launch.environment(), "start_new_session": True}
        return subprocess.Popen(words, stdout=log, stderr=log, **options)  # type: ignore[call-overload]

    def live(self, strike: Callable[[subprocess.Popen], None] | None) -> int:
        """Start, train on a little, be struck, end. Returns the launcher's exit code."""
        before = len(self.tail())
        process = self.start(self.random.choice(self.launchers))
        begun = self.step()
        goal = begun + self.random.randint(1, 2 * STEPS_OF_A_LIFE - 1)
        tree: list[psutil.Process] = []
        try:
            limit = time.monotonic() + 300
            while strike and process.poll() is None and self.step() < goal and time.monotonic() < limit:
                time.sleep(0.05)
            tree = tree_of(process)
            if process.poll() is None and strike:
                strike(process)
            process.wait(timeout=60 * STALL_MINUTES + 120 if strike else 3600)
            _, alive = psutil.wait_procs(tree, timeout=60)
            assert not alive, f"still alive: {alive}\n{self.tail()[before:]}"
        finally:
            for left in [*tree, *tree_of(process)]:
                with suppress(psutil.Error):
                    left.kill()
            process.wait()
        self.lives.append(f"{process.returncode}")
        return process.returncode

    def tail(self) -> str:
        path = self.folder / "lives.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # Faults

    def ranks(self, process: subprocess.Popen) -> list[int]:
        if isinstance(process, Forked):
            return sorted(child.pid for child in psutil.Process(process.pid).children()) or [process.pid]
        return sorted(launch.rank_pids(process)) or [process.pid]

    def kill_rank(self) -> None:
        self.live(lambda process: os.kill(self.random.choice(self.ranks(process)), signal.SIGKILL))

    def kill_worker(self) -> None:
        def strike(process: subprocess.Popen) -> None:
            ranks = self.ranks(process)
            children = [child.pid for rank in ranks for child in psutil.Process(rank).children()]
            os.kill(self.random.choice(children or ranks), signal.SIGKILL)

        self.live(strike)

    def kill_all(self) -> None:
        self.live(launch.kill)

    def stop_rank(self) -> None:
        """SIGSTOP for good: the others end the run."""
        self.live(lambda process: os.kill(self.random.choice(self.ranks(process)), signal.SIGSTOP))
        said = json.loads((self.out / "status.json").read_text())
        assert said["code"] == 5 and "answer" in said["why"], said

    def preempt(self) -> None:
        self.live(lambda process: os.kill(self.random.choice(self.ranks(process)), signal.SIGUSR2))
        assert json.loads((self.out / "status.json").read_text())["status"] in ("stopped", "done")

    def full_disk(self) -> None:
        """Nothing more can be written for a while; the run continues, or ends and goes on."""
        filler = self.out / "filler"

        def strike(process: subprocess.Popen) -> None:
            with suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(b"0" * (1 << 20))
                    file.flush()
            time.sleep(3)
            filler.unlink()
            time.sleep(1)
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)

        try:
            self.live(strike)
        finally:
            filler.unlink(missing_ok=True)

    def flipped_byte(self) -> None:
        found = checkpoints.list_checkpoints(self.out / "checkpoints")
        if len(found) < 2:
            return self.kill_all()
        files = sorted(path for path in found[-1].iterdir() if path.suffix == ".pt")
        path = self.random.choice(files)
        data = bytearray(path.read_bytes())
        data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        path.write_bytes(data)
        before = len(self.tail())
        self.kill_all()
        assert "cannot be used" in self.tail()[before:]

    def garbage_latest(self) -> None:
        (self.out / "checkpoints").mkdir(parents=True, exist_ok=True)
        (self.out / "checkpoints/latest").write_bytes(self.random.randbytes(20))
        self.kill_all()

    def torn_metrics(self) -> None:
        if (self.out / "metrics.jsonl").exists():
            with (self.out / "metrics.jsonl").open("ab") as file:
                file.write(b'{"step": 99999')
        self.kill_rank()

    def read_error(self) -> None:
        """A record's bytes change under the run: it ends and names shard and record, or has not come by."""
        path = self.random.choice(sorted((self.data / "pairs").glob("*.tar")))
        kept = path.read_bytes()
        before = len(self.tail())

        def strike(process: subprocess.Popen) -> None:
            with path.open("r+b") as file:
                file.write(bytes(len(kept)))
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)

        try:
            self.live(strike)
        finally:
            with path.open("r+b") as file:
                file.write(kept)
        said = self.tail()[before:]
        assert "is damaged: its checksum differs" in said or "done:" in said, said

    KINDS = (
        (kill_rank, 8), (kill_worker, 8), (kill_all, 6), (stop_rank, 3), (preempt, 8), (full_disk, 5),
        (flipped_byte, 6), (garbage_latest, 3), (torn_metrics, 4), (read_error, 4),
    )  # fmt: skip
    """And how often."""

    def strike(self, only: str | None) -> None:
        kinds, weights = zip(*self.KINDS, strict=True)
        if only:
            kinds, weights = tuple(kind for kind in kinds if kind.__name__ == only), (1,)
        # Those that were not there yet come first.
        scarce = [weight / 8 ** self.done[kind.__name__] for kind, weight in zip(kinds, weights, strict=True)]
        (kind,) = self.random.choices(kinds, scarce)
        started = time.monotonic()
        kind(self)
        self.done[kind.__name__] += 1
        told, taken = f"{self.done.total()}/{self.faults} {kind.__name__}", time.monotonic() - started
        print(f"{told}: step {self.step()} of {self.steps}, {taken:.0f} s", flush=True)

    def compare(self) -> None:
        """Raises AssertionError where the struck run differs from the whole one."""
        assert launch.trace(self.out) == launch.trace(self.whole), "other records"
        struck_metrics = launch.without_times(self.out)
        whole_metrics = launch.without_times(self.whole)
        assert len(struck_metrics) == len(whole_metrics), "other steps"
        for ours, theirs in zip(struck_metrics, whole_metrics, strict=True):
            other = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
            assert not other, (
                f"step {ours['step']}: other metrics {[(key, ours.get(key), theirs.get(key)) for key in other]}"
            )
        struck, whole = (
            launch.checkpoint_tensors(checkpoints.resolve_checkpoint(out)) for out in (self.out, self.whole)
        )
        assert struck.keys() == whole.keys()
        assert all(struck[name].equal(whole[name]) for name in whole), "other weights"


def tree_of(process: subprocess.Popen) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def on_small_disk(out: Path, megabytes: int) -> bool:
    """A file system of its own for the run, that can be filled without harm; takes root."""
    out.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(out)]
    return subprocess.run(mount, capture_output=True).returncode == 0


def trial(
    folder: Path, demo: Path, faults: int, seed: int, only: str | None = None, launchers: Sequence[str] = LAUNCHERS
) -> Counter[str]:
    """Raises AssertionError where something ended otherwise than it should."""
    found = Trial(folder, demo, faults, seed, launchers)
    mounted = on_small_disk(found.out, 700)
    try:
        if not mounted:
            print("no root: the disk is not filled")
            found.KINDS = tuple(pair for pair in found.KINDS if pair[0].__name__ != "full_disk")
        while found.done.total() < faults and found.step() < found.steps:
            found.strike(only)
        for _ in range(3):  # what is left, undisturbed
            if found.live(None) == 0 and found.step() == found.steps:
                break
        print(f"{found.done.total()} faults in {len(found.lives)} lives; the undisturbed run", flush=True)
        launch.run(RANKS, found.arguments(found.whole), timeout=3600)
        found.compare()
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(found.out)])
    return found.done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demo", type=Path, default=launch.ROOT / "data" / "demo", help="the demo corpus")
    parser.add_argument("--only", help="one kind of fault")
    parser.add_argument("--keep", type=Path, help="a folder for everything, which stays")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        done = trial(args.keep or Path(temporary), args.demo, args.faults, args.seed, args.only)
    print(f"{done.total()} faults, nothing lost, nothing twice, the same bits: {dict(done)}")


if __name__ == "__main__":
    main()
