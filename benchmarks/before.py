"""Compare whole optimizer steps of this checkout with those of another checkout: `step.py --before DIR`.

Each side is a process that trains the recipe with its own xscale/train.py, including the data. The two take turns:
before each step, a process waits for a line that says "go". The waiting time is not measured, and does not count
towards the interval at which the run writes metrics.
"""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent.parent


class Step(NamedTuple):
    wall: float
    """The wall-clock seconds of the step."""
    cpu: float
    """The CPU seconds of the process's threads, without its loader processes."""


class Side:
    """A process that trains with the xscale of a checkout."""

    def __init__(self, checkout: Path, arguments: list[str], out: Path, vocab_size: int, threads: int):
        out.mkdir(parents=True)
        words = [__file__, str(vocab_size), str(threads), *arguments, "--out", str(out / "run")]
        self.process = start_python(checkout, words, out, MASTER_PORT=str(free_port()))
        self.log = out / "log.txt"
        ready = self.answer()
        assert Path(ready["xscale"]).is_relative_to(checkout), ready

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            code, lines = self.process.wait(), self.log.read_text().splitlines()
            sys.exit("\n".join([f"a side of the comparison ended, exit code {code}:", *lines[-30:]]))
        return json.loads(line)

    def step(self) -> Step:
        self.process.stdin.write("go\n")
        return Step(**self.answer())

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def start_python(checkout: Path, words: list[str], out: Path, **environment: str) -> Any:
    """Start a Python process that imports the xscale of `checkout` and writes its stderr to out/log.txt."""
    environment |= {"PYTHONPATH": str(checkout), "GLOO_SOCKET_IFNAME": "lo"}
    pipe = subprocess.PIPE
    with (out / "log.txt").open("w") as log:
        return subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | environment,
            cwd=out,
            stdin=pipe,
            stdout=pipe,
            stderr=log,
            text=True,
            bufsize=1,
        )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def take_turns(sides: list[Side], warm: int, rounds: int) -> list[list[Step]]:
    """Let all sides train a step in each round, in random order. Returns each side's steps after `warm` rounds."""
    order, found = random.Random(0), [[] for _ in sides]
    for number in range(warm + rounds):
        for side in order.sample(range(len(sides)), len(sides)):
            step = sides[side].step()
            if number >= warm:
                found[side].append(step)
    for side in sides:
        side.end()
    return found


def compare(sides: list[Side], warm: int, rounds: int) -> list[list[str]]:
    """The cells of a table row for each side but the first: median ms of the first side and of this one, their median
    ratio, the range of the ratio in the middle 80 % of the rounds, and the median ratio of CPU times."""
    first, *others = take_turns(sides, warm, rounds)
    few, table = rounds // 10, []
    for steps in others:
        ratios = sorted(a.wall / b.wall for a, b in zip(first, steps, strict=True))
        walls = [1e3 * median(step.wall for step in of_side) for of_side in (first, steps)]
        cpu = median(a.cpu / b.cpu for a, b in zip(first, steps, strict=True))
        times = [f"{wall:,.0f}" for wall in walls]
        table.append([*times, f"{median(ratios):.2f}", f"{ratios[few]:.2f}-{ratios[-1 - few]:.2f}", f"{cpu:.2f}"])
    return table


# The functions below run in a side's process, with the xscale that PYTHONPATH names


def answers_alone() -> Any:
    """A file for answers to the parent process. Everything else that is printed goes to stderr, the log."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def train(words: list[str], vocab_size: int, through: Callable[[Any, Iterator[Any]], Iterator[Any]]) -> None:
    """Train with the loop of train.py, in which `through(trainer, batches)` yields each step's batch. Save nothing.

    words: arguments of train.py. vocab_size: the least size of the model's vocabulary; 0: the tokenizer's size.
    """
    try:
        from xscale import ranks
        from xscale.run import start as module
    except ImportError:  # checkouts from before there was run/
        from xscale import distributed as ranks
        from xscale import train as module
    from xscale.train import parse_arguments

    # Older checkouts have the names prepare, Control and announcer.
    resolve = "resolve_run" if hasattr(module, "resolve_run") else "prepare"
    prepare, loop = getattr(module, resolve), module.Trainer.loop

    def prepare_wide(*arguments: Any) -> Any:
        job = prepare(*arguments)
        tokenizer = job.tokenizer if hasattr(job, "tokenizer") else job.text
        tokenizer.vocab_size = max(vocab_size, tokenizer.vocab_size)
        return job

    setattr(module, resolve, prepare_wide)
    module.Trainer.loop = lambda self, batches, *more: loop(self, through(self, batches), *more)
    module.Trainer.save = lambda *arguments, **more: None
    names = ("read_launcher", "find_process", "find_place"), ("join_process_group", "start")
    read, join = (next(getattr(ranks, name) for name in either if hasattr(ranks, name)) for either in names)
    process = read()
    join(process)
    args = parse_arguments(words)
    told = [module.Status(args.out, process)] if hasattr(module, "Status") else []
    host_group = ranks.HostGroup() if hasattr(ranks, "HostGroup") else ranks.Control()
    module.train_run(args, process, host_group, *told)


def main(vocab_size: int, threads: int, words: list[str]) -> None:
    answers = answers_alone()
    import torch

    import xscale

    torch.set_num_threads(threads)

    def in_turns(trainer: Any, batches: Iterator[Any]) -> Iterator[Any]:
        print(json.dumps({"xscale": xscale.__file__}), file=answers)
        while True:
            waiting = time.monotonic()
            if not sys.stdin.readline():
                os._exit(0)
            synchronizer = getattr(trainer, "synchronizer", None) or getattr(trainer, "announcer", trainer)
            synchronizer.last_flush += time.monotonic() - waiting
            wall, cpu = time.perf_counter(), time.process_time()
            yield next(batches)
            step = Step(time.perf_counter() - wall, time.process_time() - cpu)
            print(json.dumps(step._asdict()), file=answers)

    train(words, vocab_size, in_turns)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
