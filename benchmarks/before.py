"""Whole optimizer steps of this checkout and of another, taken in turns: `step.py --before DIR`.

Either side is a process that trains the recipe by its own xscale/train.py, data included; before each step it waits for
a line that says "go". Waiting counts neither as time nor towards the second after which metrics are written.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Step(NamedTuple):
    wall: float
    """Seconds."""
    cpu: float
    """Seconds of the process's threads; not of its loader processes."""


class Side:
    """A process that trains with the xscale of a checkout."""

    def __init__(self, checkout: Path, arguments: list[str], out: Path, vocab_size: int, threads: int):
        out.mkdir(parents=True)
        self.log = out / "log.txt"
        places = {"PYTHONPATH": str(checkout), "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        words = [sys.executable, __file__, str(vocab_size), str(threads), *arguments, "--out", str(out / "run")]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words, env=os.environ | places, cwd=out, stdin=-1, stdout=-1, stderr=log, text=True, bufsize=1
            )
        ready = self.answer()
        assert Path(ready["xscale"]).is_relative_to(checkout), ready
        self.parameters = ready["parameters"]

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            lines = self.log.read_text().splitlines()
            sys.exit("\n".join(["a side of the comparison ended:", *lines[-30:]]))
        return json.loads(line)

    def step(self) -> Step:
        self.process.stdin.write("go\n")
        return Step(**self.answer())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def take_turns(sides: list[Side], warm: int, rounds: int) -> list[list[Step]]:
    """Steps of each side in each round that counts."""
    order, found = random.Random(0), [[] for _ in sides]
    for number in range(warm + rounds):
        for side in order.sample(range(len(sides)), len(sides)):
            step = sides[side].step()
            if number >= warm:
                found[side].append(step)
    return found


def compare(
    checkout: Path,
    words: list[str],
    more: list[str],
    out: Path,
    *,
    vocab_size: int,
    threads: int,
    warm: int,
    rounds: int,
) -> list[str]:
    """Cells of a table: median ms before and now, ratio of times and its range, ratio of processor time.

    words: arguments of train.py for either side; more: for this checkout's alone.
    """
    sides = [
        Side(checkout.resolve(), words, out / "before", vocab_size, threads),
        Side(HERE, words + more, out / "now", vocab_size, threads),
    ]
    before, now = take_turns(sides, warm, rounds)
    for side in sides:
        side.end()
    ratios = sorted(a.wall / b.wall for a, b in zip(before, now, strict=True))
    walls = [median(step.wall for step in steps) for steps in (before, now)]
    cpu = median(a.cpu / b.cpu for a, b in zip(before, now, strict=True))
    few = len(ratios) // 10
    return [
        *(f"{1e3 * seconds:,.0f}" for seconds in walls),
        f"{median(ratios):.2f}",
        f"{ratios[few]:.2f}-{ratios[-1 - few]:.2f}",
        f"{cpu:.2f}",
    ]


# In the process of a side, with whatever xscale PYTHONPATH finds


def train(vocab_size: int, threads: int, words: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what training prints
    import torch

    import xscale
    from xscale import distributed
    from xscale.job import prepare
    from xscale.train import StopRequest, Trainer, parse_arguments

    class InTurns(Trainer):
        def loop(self, batches: Iterator[Any], first: int, state: dict[str, Any]) -> int:
            parameters = sum(p.numel() for p in self.engine.module.parameters())
            print(json.dumps({"xscale": xscale.__file__, "parameters": parameters}), file=answers)
            return super().loop(self.in_turns(batches), first, state)

        def in_turns(self, batches: Iterator[Any]) -> Iterator[Any]:
            while True:
                waiting = time.monotonic()
                if not sys.stdin.readline():
                    os._exit(0)
                self.last_flush += time.monotonic() - waiting
                wall, cpu = time.perf_counter(), time.process_time()
                yield next(batches)
                seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
                print(json.dumps(seconds), file=answers)

    args = parse_arguments(words)
    torch.set_num_threads(threads)
    distributed.start(distributed.find_place())
    job = prepare(args.recipe, args.set, args.data)
    job.text.vocab_size = max(vocab_size, job.text.vocab_size)  # of the model
    args.out.mkdir(parents=True)
    InTurns(args, job, distributed.find_place(), distributed.Control(), StopRequest(None)).run()


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
