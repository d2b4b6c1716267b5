"""Triton kernels without a GPU: interpreted in a process of its own, and compiled as their launch asks for."""

import ctypes
import mmap
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget


def run_python(code: str, **env: str) -> None:
    found = subprocess.run([sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-4000:]


def fenced(tensor: Tensor) -> Tensor:
    """A copy whose last byte is the last before a page that the process must not touch."""
    if not tensor.numel():
        return tensor.clone()
    size, page = tensor.nbytes, mmap.PAGESIZE
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + room), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=room - size).view(tensor.shape)
    return copy.copy_(tensor)


def compiled(module: Any, name: str, arch: int, work: Callable[[], object]) -> Any:
    """The kernel `module.name` as `work` launches it, for compute capability `arch`; it is not run."""
    kernel, found = getattr(module, name), []

    class Compiler:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **options: found.append(kernel.warmup(*args, grid=grid, **options))

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: arch,
        get_current_stream=lambda device: 0,
    )
    with mock.patch.object(triton.runtime.driver, "_active", driver), mock.patch.object(module, name, Compiler()):
        work()
    (one,) = found
    return one


def memory_instructions(kernel: Any, folder: Path) -> Counter[str]:
    """How many loads, stores and atomics of each width are in its machine code: LDG.E.128 is a load of 16 bytes."""
    (folder / "cubin").write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", folder / "cubin"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Counter(re.findall(r"\s((?:LDG|LDS|LDL|LD|STG|STS|STL|ST|ATOM[GS]?|RED)(?:\.\w+)*) ", listing))
