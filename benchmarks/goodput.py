"""Measure the goodput of a run that is often killed: `python benchmarks/goodput.py [--kills 2] [--between 500]`.

Two ranks train in steps of --step_s seconds (each rank sleeps for this time, as if a GPU worked) and save every 20
steps. After every --between steps, kill -9 ends all processes. The script prints the number of steps relative to those
of an uninterrupted run in the same time, and what took the other time. It leaves out the time that any trainer needs:
until the launcher notices a kill, and for the imports and the engine of a start (measured in the first start).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import print_table

from tests import launch

RANKS, EVERY = 2, 20


def arguments(data: Path, out: Path, steps: int) -> list[str]:
    head = [
        "--ds_config",
        "ds_configs/zero2_cpu.json",
        "--recipe",
        "tlm",
        "--out",
        str(out),
    ]
    fields = {
        "streams.tlm.objective": "tests.poison:TLM",
        "streams.tlm.samples": 16,
        "train.steps": steps,
        "checkpoint.every": EVERY,
        "model.tokenizer": data / "tokenizer",
        "train.measure_every": 0,
    }
    return [*head, "--data", str(data / "pairs"), "--set", *(f"{name}={value}" for name, value in fields.items())]


def last_step(out: Path) -> int:
    found = launch.metrics(out) if (out / "metrics.jsonl").exists() else []
    return found[-1]["step"] if found else 0


def life(words: list[str], out: Path, until: int, steps: int) -> tuple[float, float, int]:
    """Train until the end, or kill the run after step `until`. Returns the seconds until its first step has ended, the
    seconds after that, and the number of its first step."""
    started = time.monotonic()
    log = out.with_suffix(".log").open("a")
    process = subprocess.Popen(
        launch.command(RANKS, words), cwd=launch.ROOT, env=launch.environment(), stdout=log, stderr=log,
        start_new_session=True,
    )  # fmt: skip
    try:
        before = last_step(out)
        while last_step(out) in (0, before) or last_step(out) > until:  # a resume cuts the lines past its checkpoint
            time.sleep(0.1)
            assert process.poll() is None, out.with_suffix(".log").read_text()[-3000:]
        first, at = last_step(out), time.monotonic()
        while process.poll() is None and (until >= steps or last_step(out) < until):
            time.sleep(0.1)
        return at - started, time.monotonic() - at, first
    finally:
        launch.kill(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--between", type=int, default=500, help="steps from one kill to the next")
    parser.add_argument("--step_s", type=float, default=1.0)
    parser.add_argument("--data", type=Path, default=launch.ROOT / "data" / "demo", help="the demo corpus")
    args = parser.parse_args()
    os.environ |= {"POISON": f"sleep:1:{args.step_s}", "PYTHONPATH": str(launch.ROOT)}
    steps = (args.kills + 1) * args.between
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = arguments(args.data, out, steps)
        lives = []
        for number in range(args.kills + 1):
            start, trained, first = life(words, out, (number + 1) * args.between, steps)
            lives.append((start, trained, first, last_step(out)))
            print(f"life {number}: first step after {start:.1f} s, steps {first} to {last_step(out)}", flush=True)
        entries = launch.metrics(out)
        step = median(entry["step_s"] + entry["data_wait_s"] for entry in entries)
        blocked = sum(entry.get("save_blocked_s", 0.0) for entry in entries)
    twice = sum(before[3] - after[2] + 1 for before, after in pairwise(lives))
    again = sum(start - lives[0][0] for start, *_ in lives[1:])
    spent = sum(trained for _, trained, *_ in lives) + again + step
    rows = [
        ["steps done twice", twice * step],
        ["saving, while training waits", blocked],
        ["verifying and loading, beyond a first start", again],
        ["the rest", spent - steps * step - twice * step - blocked - again],
    ]
    table = [[name, f"{seconds:.1f}", f"{100 * seconds / spent:.2f}"] for name, seconds in rows]
    title = f"{steps:,} steps of {step:.2f} s, {args.kills} kills: goodput {100 * steps * step / spent:.1f} %"
    print_table(title, ["", "s", "% of the time"], table)


if __name__ == "__main__":
    main()
