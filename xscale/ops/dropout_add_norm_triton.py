"""The GPU kernels of dropout, residual and layer norm. This module is imported only on a machine with a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xscale.ops.triton_dropout import dropout_mask, mask_numbers

PROGRAMS = 528
"""The number of programs of the backward pass, four for each multiprocessor of an H100. Each program sums the gradients
of weight and bias over its rows."""


def forward(
    x_NH: Tensor, residual_NH: Tensor, weight_H: Tensor, bias_H: Tensor, p: float, eps: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normed states and the sums before the norm [N, H], and each row's mean and 1 / deviation [N, 2]."""
    N, H = x_NH.shape
    out_NH, sums_NH = torch.empty_like(x_NH), torch.empty_like(x_NH)
    moments_N2 = x_NH.new_empty(N, 2, dtype=torch.float32)
    tensors = x_NH, residual_NH, weight_H, bias_H, out_NH, sums_NH, moments_N2
    if N:
        with torch.cuda.device_of(x_NH):
            forward_rows[(N,)](*tensors, *mask_numbers(seed, p), eps, DROPOUT=p > 0, **launch(H))
    return out_NH, sums_NH, moments_N2


def backward(
    grad_NH: Tensor, sums_NH: Tensor, moments_N2: Tensor, weight_H: Tensor, p: float, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x [N, H], residual [N, H], weight [H] and bias [H]."""
    N, H = grad_NH.shape
    d_residual_NH = torch.empty_like(grad_NH)
    d_x_NH = torch.empty_like(grad_NH) if p else d_residual_NH
    programs = min(N, PROGRAMS)
    parts_P2H = grad_NH.new_empty(programs, 2, H, dtype=torch.float32)
    tensors = grad_NH, sums_NH, moments_N2, weight_H, d_x_NH, d_residual_NH, parts_P2H
    if N:
        with torch.cuda.device_of(grad_NH):
            backward_rows[(programs,)](*tensors, N, *mask_numbers(seed, p), DROPOUT=p > 0, **launch(H))
    d_weight_H, d_bias_H = parts_P2H.sum(0).to(weight_H.dtype)
    return d_x_NH, d_residual_NH, d_weight_H, d_bias_H


def launch(width: int) -> dict[str, int]:
    """Return the launch parameters. A program processes one row at a time, and a lane processes 8 numbers of the
    row."""
    block = triton.next_power_of_2(width)
    return {"H": width, "BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


@triton.jit(do_not_specialize=["low", "high", "drop"])
def forward_rows(
    x,
    residual,
    weight,
    bias,
    out,
    sums,
    moments,
    low,
    high,
    drop,
    kept: tl.float32,
    eps: tl.float32,
    DROPOUT: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    live = lane < H
    place = row.to(tl.int64) * H + lane
    total = tl.load(x + place, mask=live, other=0).to(tl.float32)
    if DROPOUT:
        total *= dropout_mask(lane, row, low, high, drop, kept)
    total += tl.load(residual + place, mask=live, other=0).to(tl.float32)
    narrow = total.to(out.dtype.element_ty)
    total = narrow.to(tl.float32)
    mean = tl.sum(total, 0) / H
    centred = tl.where(live, total - mean, 0.0)
    inverse = 1 / tl.sqrt(tl.sum(centred * centred, 0) / H + eps)
    w = tl.load(weight + lane, mask=live, other=0).to(tl.float32)
    b = tl.load(bias + lane, mask=live, other=0).to(tl.float32)
    tl.store(out + place, (centred * inverse * w + b).to(out.dtype.element_ty), mask=live)
    tl.store(sums + place, narrow, mask=live)
    tl.store(moments + row * 2, mean)
    tl.store(moments + row * 2 + 1, inverse)


@triton.jit(do_not_specialize=["N", "low", "high", "drop"])
def backward_rows(
    grad,
    sums,
    moments,
    weight,
    d_x,
    d_residual,
    parts,
    N,
    low,
    high,
    drop,
    kept: tl.float32,
    DROPOUT: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    live = lane < H
    w = tl.load(weight + lane, mask=live, other=0).to(tl.float32)
    d_weight = tl.zeros([BLOCK], tl.float32)
    d_bias = tl.zeros([BLOCK], tl.float32)
    row = program
    while row < N:
        place = row.to(tl.int64) * H + lane
        g = tl.load(grad + place, mask=live, other=0).to(tl.float32)
        total = tl.load(sums + place, mask=live, other=0).to(tl.float32)
        mean = tl.load(moments + row * 2)
        inverse = tl.load(moments + row * 2 + 1)
        normed = tl.where(live, (total - mean) * inverse, 0.0)
        d_weight += g * normed
        d_bias += g
        g *= w
        d_total = (g - tl.sum(g, 0) / H - normed * (tl.sum(g * normed, 0) / H)) * inverse
        tl.store(d_residual + place, d_total.to(d_x.dtype.element_ty), mask=live)
        if DROPOUT:
            d_total *= dropout_mask(lane, row, low, high, drop, kept)
            tl.store(d_x + place, d_total.to(d_x.dtype.element_ty), mask=live)
        row += tl.num_programs(0)
    tl.store(parts + program * 2 * H + lane, d_weight, mask=live)
    tl.store(parts + (program * 2 + 1) * H + lane, d_bias, mask=live)
