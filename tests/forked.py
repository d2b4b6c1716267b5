"""`python -m tests.forked`: a process that has imported torch, transformers and DeepSpeed, which costs 10 s of a core,
and forks the ranks of each run from itself. Its input has a run in each line: [ranks, environment, folder, output,
words]; 0 ranks: one process without a launcher. It answers with the run's exit code, that of the first rank that fails.
Unlike a launcher's, ranks have one hash seed."""

import json
import os
import runpy
import signal
import sys
from contextlib import suppress

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what modules print as they are imported
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has asked CUDA cannot fork

import deepspeed  # noqa: E402, F401

import data_tools.demo_corpus  # noqa: E402, F401
import xscale.dry_run  # noqa: E402
import xscale.eval.finetune.training  # noqa: E402
import xscale.eval.run  # noqa: E402
import xscale.report.page  # noqa: E402
import xscale.run.start  # noqa: E402, F401

KILL_SECONDS = 30
"""The seconds that ranks have to end after SIGTERM, as with torchrun."""


def launch(world: int, environment: dict[str, str], folder: str, output: str, words: list[str]) -> int:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(environment)
    if world:
        os.environ.update(WORLD_SIZE=f"{world}", LOCAL_WORLD_SIZE=f"{world}", MASTER_ADDR="127.0.0.1")
    os.chdir(folder)
    modules = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [folder if words[0] == "-m" else os.path.dirname(words[0]), *modules]
    sys.argv = words
    pids = [start(rank, world) for rank in range(max(world, 1))]
    signal.signal(signal.SIGALRM, lambda *_: end(pids, signal.SIGKILL))
    code = 0
    for _ in pids:
        status = os.wait()[1]
        if status and not code:
            code = os.waitstatus_to_exitcode(status) % 256
            end(pids, signal.SIGTERM)
            signal.alarm(KILL_SECONDS)
    return code


def start(rank: int, world: int) -> int:
    if pid := os.fork():
        return pid
    if world:
        os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}")
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.modules.pop(sys.argv[0], None)  # runpy warns of a module that has been imported
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def end(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            os._exit(launch(*json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=ANSWERS, flush=True)
