"""The GPU kernel of the alignment gather, for the forward and the backward pass. It is imported only on a machine with
a GPU, since Triton is not a required package."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, AHEAD = 4, 2
"""ROWS: the output rows of a program. AHEAD: the number of summands of a row that are loaded together; a lane then has
8 loads of 16 bytes in flight."""


def gather_sum(values: Tensor, offsets: Tensor, columns: Tensor) -> Tensor:
    """Return a matrix whose row r is the sum of the rows columns[offsets[r]:offsets[r + 1]] of `values`. This is a
    single kernel launch, without a memset and without a wait for the device."""
    values = values.contiguous()
    rows = len(offsets) - 1
    width = values.shape[1]
    out = values.new_empty(rows, width)
    with torch.cuda.device_of(values):
        sum_rows[(triton.cdiv(rows, ROWS),)](
            values, out, rows, offsets, columns, **launch_parameters(width, values.itemsize)
        )
    return out


def launch_parameters(width: int, itemsize: int) -> dict[str, int]:
    """Return the launch parameters. A program computes ROWS whole rows; a warp reads 512 bytes, 16 per lane."""
    block = triton.next_power_of_2(width)
    warps = min(max(block * itemsize // 512, 1), 16)
    return {"WIDTH": width, "BLOCK": block, "ROWS": ROWS, "AHEAD": AHEAD, "num_warps": warps}


@triton.jit(do_not_specialize=["rows"])
def sum_rows(
    values,
    out,
    rows,
    offsets,
    columns,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    precision: tl.constexpr = tl.float64 if values.dtype.element_ty == tl.float64 else tl.float32
    first = tl.program_id(0) * ROWS
    lane = tl.arange(0, BLOCK)[None, :]
    slot = tl.arange(0, ROWS * AHEAD)
    row = first + slot // AHEAD
    link = tl.load(offsets + row, mask=row < rows, other=0) + slot % AHEAD
    end = tl.load(offsets + row + 1, mask=row < rows, other=0)
    total = tl.zeros([ROWS, BLOCK], dtype=precision)
    left = end - link
    longest = tl.max(left)
    k = 0
    while k < longest:
        live = k < left
        column = tl.load(columns + link + k, mask=live, other=0)[:, None].to(tl.int64)
        found = tl.load(values + column * WIDTH + lane, mask=live[:, None] & (lane < WIDTH), other=0)
        total += tl.sum(found.to(precision).reshape(ROWS, AHEAD, BLOCK), axis=1)
        k += AHEAD
    row = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
    tl.store(out + row * WIDTH + lane, total.to(out.dtype.element_ty), mask=(row < rows) & (lane < WIDTH))
