"""The tests start ranks that have few sockets, and a rank that needs little memory on a CPU."""

import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path

import deepspeed  # noqa: F401  once, before ranks are forked
import pytest
import torch

from tests import launch
from xscale import ranks
from xscale.ranks import CpuGroup

RANKS = 10


def sockets() -> int:
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith("socket:") for link in links if link.is_symlink())


def meet(rank: int, found: "multiprocessing.Queue[tuple[int, list[int], bool]]") -> None:
    """Of a rank that may have few files open."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    few = len(os.listdir("/proc/self/fd")) + 8
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    before = sockets()
    ranks.join_process_group(ranks.read_launcher_and_set_environment())
    started = sockets()
    cpu_group = CpuGroup()
    sums = cpu_group.begin_sum([rank, 1])()
    assert cpu_group.all_gather(rank) == [*range(RANKS)]
    found.put((sockets() - started, sums, resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard and started > before))
    cpu_group.barrier()
    found.close()
    found.join_thread()
    os._exit(0)


def test_a_rank_connects_with_few_others_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it raises the soft limit of open files before that."""
    monkeypatch.setenv("MASTER_PORT", str(launch.free_port()))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}.items():
        monkeypatch.setenv(name, str(value))
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    children = [context.Process(target=meet, args=(rank, found)) for rank in range(RANKS)]
    for child in children:
        child.start()
    try:
        told = [found.get(timeout=60) for _ in children]
    finally:
        for child in children:
            child.join(timeout=5)
            child.kill()
    assert all(sums == [sum(range(RANKS)), RANKS] and raised for _, sums, raised in told)
    *others, main = sorted(opened for opened, _, _ in told)  # rank 0 has the store, with which each rank connects
    assert max(others) <= 4 and main <= 4 + RANKS, told


def test_rows_of_many_sizes_do_not_fill_memory() -> None:
    """On a CPU. PyTorch's GELU keeps code for each number of tokens; without a limit, that is 200 MB here."""
    code = """
import torch
from xscale import ranks
ranks.join_process_group(ranks.read_launcher_and_set_environment(allow_missing_launcher=True))
def resident() -> int:
    return int(open("/proc/self/statm").read().split()[1]) * 4096
states = torch.randn(600, 256, requires_grad=True)
torch.nn.functional.gelu(states[:1]).sum().backward()
before = resident()
for tokens in range(2, 402):
    torch.nn.functional.gelu(states[:tokens]).sum().backward()
print("bytes", resident() - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert int(result.stdout.split("bytes")[1]) < 80e6
