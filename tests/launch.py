"""Runs the training command as a user would, with real processes."""

import contextlib
import json
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  once, before ranks are forked
import psutil
import torch

from xscale.data.calibrate import calibrate, fit_tokens_to_bytes
from xscale.data.calibration import Calibration
from xscale.data.corpus import run_identity
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state
from xscale.data.stream_batch import StreamBatch
from xscale.models.encoder import Encoder
from xscale.ranks import CpuGroup, Process
from xscale.run.resolve import build_initial_module, resolve_run
from xscale.step.module import StepModule
from xscale.train import parse_arguments

ROOT = Path(__file__).resolve().parent.parent
TRAIN = str(ROOT / "xscale" / "train.py")
BIN = Path(sys.executable).parent
LAUNCHERS = ("GLOO_SOCKET_", "NCCL_SOCKET_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
"""How the names of variables begin by which a launcher tells a process its rank."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(world: int, arguments: list[str], launcher: str = "torchrun", script: str = TRAIN) -> list[str]:
    port = str(free_port())
    if launcher == "deepspeed":
        head = [str(BIN / "deepspeed"), "--num_gpus", str(world), "--master_port", port, script]
    elif launcher == "mpirun":
        head = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-n", str(world), sys.executable, script]
    else:
        head = [str(BIN / "torchrun"), "--nproc_per_node", str(world), "--master_port", port, script]
    return head + arguments


def environment() -> dict[str, str]:
    # One thread a rank: what the machine's cores allow, and bit-exact sums whatever their number.
    extra = {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}", "MASTER_PORT": str(free_port())}
    return os.environ | extra


def start(world: int, arguments: list[str], launcher: str = "torchrun", script: str = TRAIN) -> subprocess.Popen:
    return subprocess.Popen(
        command(world, arguments, launcher, script),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(world: int, arguments: list[str], launcher: str = "forked", script: str = TRAIN, timeout: int = 300) -> str:
    """Output of a run that must succeed. It has no launcher (world 0: and one process), unless it names one."""
    code, output = try_run(world, arguments, launcher, script, timeout)
    assert code == 0, f"exit code {code}\n{output[-6000:]}"
    return output


def try_run(
    world: int, arguments: list[str], launcher: str = "forked", script: str = TRAIN, timeout: int = 300
) -> tuple[int, str]:
    if launcher == "forked":
        return fork(world, [script, *arguments], environment(), timeout=timeout)
    process = start(world, arguments, launcher, script)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(process)
        raise AssertionError(f"no end after {timeout} s:\n{process.communicate()[0][-6000:]}") from None
    return process.returncode, output


def run_all(world: int, folder: Path, runs: list[list[str]], launcher: str = "forked", timeout: int = 900) -> None:
    """Several runs in one launch, each by its arguments, whose list is FOLDER/list.json (tests/many_runs.py)."""
    folder.mkdir(exist_ok=True)
    (folder / "list.json").write_text(json.dumps(runs))
    run(world, [str(folder / "list.json")], launcher, str(ROOT / "tests" / "many_runs.py"), timeout)


_forking: list[subprocess.Popen] = []
"""tests/forked.py, which ends with this process."""


def fork(
    world: int, words: list[str], variables: dict[str, str], folder: Path = ROOT, timeout: int = 300
) -> tuple[int, str]:
    """Exit code and output of ranks that tests/forked.py forks. words: of a script, or "-m" and those of a module."""
    if not _forking:
        command, pipe = [sys.executable, "-m", "tests.forked"], subprocess.PIPE
        options = {"cwd": ROOT, "env": environment(), "start_new_session": True}
        _forking.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, **options))  # type: ignore
    process = _forking[0]
    assert process.stdin and process.stdout
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        print(json.dumps([world, variables, str(folder), output.name, words]), file=process.stdin, flush=True)
        if select.select([process.stdout], [], [], timeout)[0]:
            return int(process.stdout.readline()), output.read()
        kill(_forking.pop())
        raise AssertionError(f"no end after {timeout} s:\n{output.read()[-6000:]}")


def fork_and_kill(world: int, arguments: list[str], is_moment: Callable[[], bool], script: str = TRAIN) -> None:
    """kill -9 of all ranks of a forked run and of their loader workers at once, when is_moment() says so."""
    run = threading.Thread(target=fork, args=(world, [script, *arguments], environment()))
    run.start()
    while run.is_alive() and not is_moment():
        time.sleep(0.02)
    killed = psutil.Process(_forking[0].pid).children(recursive=True)
    _kill_all(killed)
    run.join()
    assert not psutil.wait_procs(killed, timeout=30)[1]


def fork_ranks(
    world: int, function: Callable[..., object], *arguments: object, timeout: float = 60
) -> list[int | None]:
    """Exit codes of ranks that are forked from this process and call the function. 0 ranks: one without a launcher."""
    context, port = multiprocessing.get_context("fork"), free_port()
    of_rank = (world, port, function, arguments)
    children = [context.Process(target=_call_on_rank, args=(rank, *of_rank)) for rank in range(max(world, 1))]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout)
        child.kill()
        child.join()
    return [child.exitcode for child in children]


def _call_on_rank(
    rank: int, world: int, port: int, function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    for name in [*os.environ]:
        if name.startswith(LAUNCHERS):
            del os.environ[name]
    if world:
        os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{world}", LOCAL_WORLD_SIZE=f"{world}")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
    function(*arguments)
    os._exit(0)  # as the commands do, since threads of libraries may abort the normal exit


def kill(process: subprocess.Popen) -> None:
    """kill -9 of launcher, ranks and loader workers at once."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        _kill_all([*parent.children(recursive=True), parent])  # torchrun puts its ranks into sessions of their own
    process.wait()


def _kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def rank_pids(process: subprocess.Popen) -> list[int]:
    """The ranks of a started run, without launchers and loader workers."""
    ours: dict[int, int] = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            ours |= {child.pid: child.ppid()} if _is_rank(child.cmdline()) else {}
    return [pid for pid, parent in ours.items() if parent not in ours]


def _is_rank(words: list[str]) -> bool:
    return TRAIN in words and not any("torchrun" in w or w.endswith("deepspeed") or "launch" in w for w in words[:5])


def open_run(recipe_name: str, sets: list[str], data: Sequence[Path | str], measured: bool = True) -> Loader:
    """The loader of a run, as the training command makes it. If not `measured`, it takes a tenth of the time, and a row
    has as many tokens as the bytes of its records tell."""
    recipe, corpus = resolve_run(recipe_name, sets, data)
    if measured:
        return Loader(recipe, corpus, calibrate(recipe, corpus, CpuGroup(alone=True)))
    lines = [fit_tokens_to_bytes(source, corpus.tokenizer) for source in corpus.sources]
    return Loader(recipe, corpus, Calibration(lines, {}))


def identity(loader: Loader) -> dict[str, Any]:
    return run_identity(loader.recipe, loader.corpus)


def module(loader: Loader) -> StepModule:
    """The module of step 0."""
    return build_initial_module(loader.recipe, loader.corpus)


def encoder(loader: Loader) -> Encoder:
    return build_initial_module(loader.recipe, loader.corpus).encoder


def loader_of(arguments: list[str], measured: bool = True) -> Loader:
    """The loader of the training command with these arguments."""
    args = parse_arguments(arguments)
    return open_run(args.recipe, args.set, args.data, measured)


def pieces_of(loader: Loader, steps: int) -> Iterator[dict[str, StreamBatch]]:
    """The whole of each of the first optimizer steps, by stream."""
    train = replace(loader.recipe.train, max_tokens=1 << 30)
    loader = replace(loader, recipe=replace(loader.recipe, train=train))
    mixture = loader.mixture(Process(0, 1, 0, 1), "cpu", initial_state(loader.last_streams))
    dataset = loader.dataset()
    for _ in range(steps):
        plan = mixture.next_plan_of_rank()
        stream_batches = {}
        for stream in loader.last_streams:
            (stream_batches[stream.name],) = dataset.collate_rows(stream, plan, dataset.read_and_tokenise(stream, plan))
        yield stream_batches


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


TIMES = (*("step_s", "slowest_rank", "slowest_ratio", "data_wait_s", "tokens_per_s", "samples_per_s"),)


def without_times(out: Path) -> list[dict]:
    return [{k: v for k, v in entry.items() if k not in TIMES} for entry in metrics(out)]


def trace(out: Path) -> dict[tuple[int, str], list[str]]:
    """Keys of all ranks by (step, stream)."""
    keys: dict[tuple[int, str], list[str]] = {}
    for path in sorted((out / "trace").glob("rank*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            keys.setdefault((entry["step"], entry["stream"]), []).extend(entry["keys"])
    return keys


def checkpoint_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of every DeepSpeed file of a checkpoint, by its place."""
    tensors: dict[str, torch.Tensor] = {}

    def walk(where: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            tensors[where] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{where}/{key}", inner)
        elif isinstance(value, list | tuple):
            for key, inner in enumerate(value):
                walk(f"{where}/{key}", inner)
        elif isinstance(value, int | float):
            tensors[where] = torch.tensor(float(value), dtype=torch.float64)

    for file in sorted(path.glob("*.pt")):
        walk(file.name, torch.load(file, weights_only=False))
    return tensors
