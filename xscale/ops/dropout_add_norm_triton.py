"""The GPU kernels of dropout, residual and layer norm. This module is imported only on a machine with a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xscale.ops.triton_dropout import dropout_mask, dropout_mask_arguments

PROGRAMS, ROWS = 660, 2
"""The number of programs of the backward pass, five for each multiprocessor of an H100, as many as it has registers for
if a program processes ROWS rows at a time. Each program sums the gradients of weight and bias over its rows."""


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
            forward_rows[(N,)](*tensors, *dropout_mask_arguments(seed, p), eps, DROPOUT=p > 0, **launch_parameters(H))
    return out_NH, sums_NH, moments_N2


def backward(
    grad_NH: Tensor, sums_NH: Tensor, moments_N2: Tensor, weight_H: Tensor, p: float, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x [N, H], residual [N, H], weight [H] and bias [H]."""
    N, H = grad_NH.shape
    d_residual_NH = torch.empty_like(grad_NH)
    d_x_NH = torch.empty_like(grad_NH) if p else d_residual_NH
    programs = min(-(-N // ROWS), PROGRAMS)
    parts_P2H = grad_NH.new_empty(programs, 2, H, dtype=torch.float32)
    tensors = grad_NH, sums_NH, moments_N2, weight_H, d_x_NH, d_residual_NH, parts_P2H
    if N:
        with torch.cuda.device_of(grad_NH):
            backward_rows[(programs,)](
                *tensors, N, *dropout_mask_arguments(seed, p), DROPOUT=p > 0, ROWS=ROWS, **launch_parameters(H)
            )
    d_weight_H, d_bias_H = parts_P2H.sum(0).to(weight_H.dtype)
    return d_x_NH, d_residual_NH, d_weight_H, d_bias_H


def launch_parameters(width: int) -> dict[str, int]:
    """Return the launch parameters. A lane processes 8 numbers of a row."""
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
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + lane, mask=lane < H, other=0).to(tl.float32)
    d_weight = tl.zeros([1, BLOCK], tl.float32)
    d_bias = tl.zeros([1, BLOCK], tl.float32)
    first = program * ROWS
    while first < N:
        row = first + tl.arange(0, ROWS)[:, None]
        live = (lane < H) & (row < N)
        place = row.to(tl.int64) * H + lane
        g = tl.load(grad + place, mask=live, other=0).to(tl.float32)
        total = tl.load(sums + place, mask=live, other=0).to(tl.float32)
        mean = tl.load(moments + row * 2, mask=row < N, other=0)
        inverse = tl.load(moments + row * 2 + 1, mask=row < N, other=0)
        normed = tl.where(live, (total - mean) * inverse, 0.0)
        d_weight += tl.sum(g * normed, 0)[None, :]
        d_bias += tl.sum(g, 0)[None, :]
        g *= w
        of_mean = tl.sum(g, 1)[:, None] / H
        of_deviation = tl.sum(g * normed, 1)[:, None] / H
        d_total = (g - of_mean - normed * of_deviation) * inverse
        tl.store(d_residual + place, d_total.to(d_x.dtype.element_ty), mask=live)
        if DROPOUT:
            d_total *= dropout_mask(lane, row, low, high, drop, kept)
            tl.store(d_x + place, d_total.to(d_x.dtype.element_ty), mask=live)
        first += tl.num_programs(0) * ROWS
    tl.store(parts + program * 2 * H + lane, d_weight, mask=lane < H)
    tl.store(parts + (program * 2 + 1) * H + lane, d_bias, mask=lane < H)
