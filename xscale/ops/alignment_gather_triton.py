"""The alignment gather's GPU kernel, for both directions. Imported where there is a GPU: Triton is no requirement."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, AHEAD = 4, 2
"""Rows of a program, and links of each whose loads are issued back to back: 8 loads of 16 bytes a lane."""


def gather_sum(first: Tensor, second: Tensor, offsets: Tensor, columns: Tensor, split: int) -> tuple[Tensor, Tensor]:
    """Row r of the outputs, one after the other, is the sum of the rows columns[offsets[r]:offsets[r + 1]] of the
    inputs, one after the other. One launch, no memset, no host sync."""
    first, second = first.contiguous(), second.contiguous()
    rows, width = len(offsets) - 1, first.shape[1]
    upper, lower = first.new_empty(split, width), first.new_empty(rows - split, width)
    values = first, len(first), _gap(first, second)
    out = upper, split, _gap(upper, lower)
    with torch.cuda.device_of(first):
        sum_rows[(triton.cdiv(rows, ROWS),)](*values, *out, rows, offsets, columns, **launch(width, first.itemsize))
    return upper, lower


def launch(width: int, itemsize: int) -> dict[str, int]:
    """A program makes `ROWS` whole rows; a warp reads 512 bytes of each, 16 a lane."""
    block = triton.next_power_of_2(width)
    warps = min(max(block * itemsize // 512, 1), 16)
    return {"WIDTH": width, "BLOCK": block, "ROWS": ROWS, "AHEAD": AHEAD, "num_warps": warps}


def _gap(first: Tensor, second: Tensor) -> int:
    """Elements between the end of one tensor and the beginning of another."""
    return (second.data_ptr() - first.data_ptr()) // first.element_size() - first.numel()


@triton.jit(do_not_specialize=["n_values", "n_out", "rows"])
def sum_rows(
    values,
    n_values,
    values_gap: tl.int64,
    out,
    n_out,
    out_gap: tl.int64,
    rows,
    offsets,
    columns,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """From row `n_values` on, values lie `values_gap` elements further; from row `n_out` on, outputs `out_gap`."""
    precision: tl.constexpr = tl.float64 if values.dtype.element_ty == tl.float64 else tl.float32
    first = tl.program_id(0) * ROWS
    lane = tl.arange(0, BLOCK)[None, :]
    slot = tl.arange(0, ROWS * AHEAD)
    row = first + slot // AHEAD
    link = tl.load(offsets + row, mask=row < rows, other=0) + slot % AHEAD
    end = tl.load(offsets + row + 1, mask=row < rows, other=0)
    total = tl.zeros([ROWS, BLOCK], dtype=precision)
    longest = tl.max(end - link)
    k = 0
    while k < longest:
        live = link + k < end
        column = tl.load(columns + link + k, mask=live, other=0)[:, None].to(tl.int64)
        place = column * WIDTH + (column >= n_values).to(tl.int64) * values_gap
        found = tl.load(values + place + lane, mask=live[:, None] & (lane < WIDTH), other=0)
        total += tl.sum(found.to(precision).reshape(ROWS, AHEAD, BLOCK), axis=1)
        k += AHEAD
    row = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
    place = row * WIDTH + (row >= n_out).to(tl.int64) * out_gap
    tl.store(out + place + lane, total.to(out.dtype.element_ty), mask=(row < rows) & (lane < WIDTH))
