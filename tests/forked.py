"""Runs commands one after the other in processes that are forked from one which has imported torch and transformers,
which takes each seconds: `python -m tests.forked '[[RANKS, "SCRIPT.py" or "-m", "MODULE", ARGUMENT, ...], ...]'`.

Each has so many processes with the variables that a launcher sets; with 0 it is one without. The first that fails ends
the others of its command, and is the last command. Unlike those of a launcher, ranks have the same hash seed.
"""

import json
import os
import runpy
import signal
import socket
import sys

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a process that has asked CUDA cannot fork

import xscale.dry_run  # noqa: F401


def run(words: list[str]) -> None:
    """What the interpreter does with these words."""
    module = words[0] == "-m"
    sys.argv = words[module:]
    if module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def start(ranks: int, words: list[str]) -> set[int]:
    """The pids of the command's processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    pids = set()
    for rank in range(max(ranks, 1)):
        pid = os.fork()
        if not pid:
            if ranks:
                names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                os.environ.update({name: str(number) for name, number in names.items()})
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            run(words)
            sys.exit()
        pids.add(pid)
    return pids


def main() -> None:
    for ranks, *words in json.loads(sys.argv[1]):
        print("$", *words, flush=True)
        left, failed = start(ranks, words), 0
        while left:
            pid, status = os.wait()
            left.discard(pid)
            if status and not failed:
                failed = status
                for other in left:
                    os.kill(other, signal.SIGKILL)
        if failed:
            sys.exit(f"ended with {os.waitstatus_to_exitcode(failed)}")


if __name__ == "__main__":
    main()
