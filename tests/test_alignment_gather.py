"""The alignment gather against a dense A^T H; its Triton kernel without a GPU: interpreted, and compiled ahead."""

import mmap
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.triton_kernel import compiled, fenced, memory_instructions, run_python
from xscale.ops import alignment_gather_triton as kernel
from xscale.ops.alignment_gather import _gather_sum_cuda, alignment_gather

Rows = list[list[int]]
"""The columns that each row sums."""
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random_rows(number: int, places: int, seed: int = 0, most: int = 5) -> Rows:
    """Rows of none to `most` columns, some of them repeated, and one of many columns."""
    r = np.random.default_rng(seed)
    rows = [sorted(r.integers(0, places, r.integers(0, most + 1)).tolist()) for _ in range(number)]
    if number > 3:
        rows[number // 2] = sorted(r.integers(0, places, 40).tolist())
        rows[-1] = [places - 1, places - 1]
    return rows


def transposed(rows: Rows, places: int) -> Rows:
    return [[r for r, columns in enumerate(rows) for c in columns if c == place] for place in range(places)]


def csr(rows: Rows) -> tuple[Tensor, Tensor]:
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return torch.from_numpy(offsets), torch.tensor([c for columns in rows for c in columns], dtype=torch.int32)


def index_of(rows: Rows, places: int) -> list[Tensor]:
    return [*csr(rows), *csr(transposed(rows, places))]


def dense(rows: Rows, places: int) -> Tensor:
    A = torch.zeros(len(rows), places, dtype=torch.float64)
    for row, columns in enumerate(rows):
        for column in columns:
            A[row, column] += 1
    return A


def assert_close(real: Tensor, A: Tensor, values: Tensor) -> None:
    """real is A @ values: to 1e-12, or to one unit in the last place of its type, next to an fp32 sum's own error."""
    exact = A @ values.double()
    if real.dtype == torch.float64:
        bound = 1e-12 * (A @ values.double().abs())
    else:
        ulp = torch.finfo(real.dtype).eps * torch.exp2(torch.frexp(exact).exponent - 1.0)
        bound = ulp + (A.sum(1, keepdim=True) + 1) * torch.finfo(torch.float32).eps * (A @ values.double().abs())
    assert ((real.double() - exact).abs() <= bound).all()


# 1. What it computes

CASES: dict[str, tuple[Rows, int, int]] = {
    "all kinds of rows": (random_rows(30, 50), 50, 64),
    "odd width": (random_rows(9, 20, 1), 20, 37),
    "width 1": (random_rows(5, 8, 2), 8, 1),
    "no links": ([[], [], []], 4, 8),
    "no rows": ([], 6, 8),
    "one place": ([[0], [0, 0, 0]], 1, 8),
    "as a row of sequences has them": ([[1], [3], [4], [0, 2], [4]], 6, 8),
}
"""Rows, places, width."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_dense_product_and_so_is_its_gradient(case: str, dtype: torch.dtype) -> None:
    rows, places, width = CASES[case]
    torch.manual_seed(0)
    hidden = torch.randn(places, width).to(dtype).requires_grad_()
    index, A = index_of(rows, places), dense(rows, places)
    out = alignment_gather(hidden, *index)
    assert out.shape == (len(rows), width) and out.dtype == dtype
    assert_close(out.detach(), A, hidden.detach())
    upstream = torch.randn(out.shape).to(dtype)
    (gradient,) = torch.autograd.grad(out, hidden, upstream)
    assert gradient.dtype == dtype
    assert_close(gradient, A.T, upstream)


def test_it_is_its_line_of_torch() -> None:
    rows, places, width = CASES["all kinds of rows"]
    hidden = torch.randn(places, width, dtype=torch.float64)
    offsets, columns, *rest = index_of(rows, places)
    line = torch.stack([hidden[columns[a:b]].sum(0) for a, b in pairwise(offsets)])
    torch.testing.assert_close(alignment_gather(hidden, offsets, columns, *rest), line, rtol=1e-14, atol=1e-14)


def test_strides_do_not_matter() -> None:
    rows, places, width = CASES["all kinds of rows"]
    index, A = index_of(rows, places), dense(rows, places)
    wide = torch.randn(places, 2 * width, dtype=torch.float64)
    for hidden in (wide[:, ::2], wide[:, 3 : width + 3], wide.T[:width].T, wide[:1, :width].expand(places, width)):
        assert_close(alignment_gather(hidden, *index), A, hidden)
    hidden = wide[:, :width].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(alignment_gather(hidden, *index).sum(), hidden)
    assert_close(gradient, A.T, torch.ones(len(rows), width))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reruns_give_the_same_bits(dtype: torch.dtype) -> None:
    rows, places = random_rows(400, 300), 300
    index = index_of(rows, places)
    hidden = torch.randn(places, 65).to(dtype).requires_grad_()
    weight = torch.randn(len(rows), 65).to(dtype)
    runs, threads = [], torch.get_num_threads()
    for number in (1, 2, 2):
        torch.set_num_threads(number)
        out = alignment_gather(hidden, *index)
        runs.append((out, *torch.autograd.grad(out, hidden, weight)))
    torch.set_num_threads(threads)
    assert all(torch.equal(real, first) for run in runs for real, first in zip(run, runs[0], strict=True))


# 2. The kernel, interpreted. In a process of its own: what lies outside of a tensor is out of reach there


@pytest.mark.slow
def test_the_interpreted_kernels_are_plain_torch() -> None:
    """This one, and those of the loss, rotations, short attention, and dropout with residual and norm."""
    files = ("alignment_gather", "masked_ce", "rotation", "fused_kernels")
    run_python("".join(f"import tests.test_{of} as t; t.interpret()\n" for of in files), TRITON_INTERPRET="1")


def interpret() -> None:
    torch.manual_seed(0)
    cases = [CASES[name] for name in CASES if name != "all kinds of rows"]
    cases += [(random_rows(9, 72, 5, most=3), 72, 768), (random_rows(6, 30, 6), 30, 771)]
    original = Tensor.new_empty

    def new_empty(like: Tensor, *shape: int, **where: Any) -> Tensor:
        """Triton's interpreter says where."""
        return original(like, *shape, **where) if where else fenced(torch.zeros(shape, dtype=like.dtype))

    with mock.patch.object(Tensor, "new_empty", new_empty):
        for rows, places, width in cases:
            A = dense(rows, places)
            index = [fenced(array) for array in index_of(rows, places)]
            back = index[2:] + index[:2]
            for dtype in (DTYPES[width % 2], DTYPES[2 + places % 2]):
                hidden = fenced(torch.randn(places, width).to(dtype))
                out = _gather_sum_cuda(hidden, *index)
                assert_close(out, A, hidden)
                upstream = fenced(torch.randn(out.shape).to(dtype))
                assert_close(_gather_sum_cuda(upstream, *back), A.T, upstream)
        strided = torch.randn(771, 2 * places, dtype=torch.float64).T[::2]
        assert_close(_gather_sum_cuda(strided, *index), A, strided)
    places = 2**31 // 768 + 9
    memory = mmap.mmap(-1, places * 768 * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # no reserve
    hidden = torch.frombuffer(memory, dtype=torch.float16).view(places, 768)
    hidden[-1] = torch.arange(768)
    rows = [[], [places - 1], [1, places - 1]]
    far = kernel.gather_sum(hidden, *csr(rows))
    assert far.tolist() == [[0] * 768, list(range(768)), list(range(768))]


# 3. The kernel, compiled


@pytest.mark.parametrize(("dtype", "width", "arch"), [*zip(DTYPES[1:], (768, 1024, 768), (80, 90, 90), strict=True)])
def test_the_compiled_kernel_moves_16_bytes_a_lane(dtype: torch.dtype, width: int, arch: int, tmp_path: Path) -> None:
    """All loads and stores of hidden states do, and nothing is spilled, added atomically or shared; places in tensors
    are computed in 64 bits."""
    hidden, index = torch.zeros(9, width, dtype=dtype), csr([[], [3], [1, 8]])
    program = compiled(kernel, "sum_rows", arch, lambda: kernel.gather_sum(hidden, *index))
    assert not re.search(r"muli .*tensor<.*i32>", program.asm["ttir"])
    found = memory_instructions(program, tmp_path)
    assert set(found) == {"LDG.E", "LDG.E.128", "STG.E.128"}
    assert (found["LDG.E.128"], found["STG.E.128"]) == (kernel.ROWS * kernel.AHEAD, kernel.ROWS)
