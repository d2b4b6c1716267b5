"""The GPU kernels of attention over short sequences. This module is imported only on a machine with a GPU, since Triton
is not a required package."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xscale.ops.triton_dropout import dropout_mask, dropout_mask_arguments


def launch_attention_kernels(
    qkv_NX: Tensor,
    starts_B1: Tensor,
    out_or_d_out_NH: Tensor,
    longest: int,
    seed: int,
    heads: int,
    dropout: float,
    window: int | None,
    d_qkv_NX: Tensor | None = None,
) -> None:
    """Without `d_qkv_NX`, write the attended values [N, H] to `out_or_d_out_NH`. With `d_qkv_NX`, `out_or_d_out_NH` is
    their gradient, and the gradient of qkv is written to `d_qkv_NX`. All tensors are contiguous."""
    numbers = *dropout_mask_arguments(seed, dropout), window or 0
    choices = {"DROPOUT": dropout > 0, "WINDOW": window is not None, "HEADS": heads, "D": qkv_NX.shape[1] // 3 // heads}
    programs, kernel = (len(starts_B1) - 1) * heads, forward_heads if d_qkv_NX is None else backward_heads
    tensors = qkv_NX, starts_B1, out_or_d_out_NH, *([] if d_qkv_NX is None else [d_qkv_NX])
    with torch.cuda.device_of(qkv_NX):
        for shortest, block in BLOCKS if len(qkv_NX) else ():
            if longest >= shortest:
                warps = 8 if block > 64 else 4
                kernel[(programs,)](*tensors, *numbers, shortest, **choices, BLOCK=block, num_warps=warps, num_stages=1)


BLOCKS = (65, 128), (33, 64), (1, 32)
"""The ranges of sequence lengths (shortest, longest) for which the kernel is launched. The longest length is the
kernel's block size. With blocks of 128 tokens only, a multiprocessor would run fewer programs at a time."""


@triton.jit(do_not_specialize=["low", "high", "drop", "window", "shortest"])
def forward_heads(
    qkv,
    starts,
    out,
    low,
    high,
    drop,
    kept: tl.float32,
    window,
    shortest,
    DROPOUT: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    first = tl.load(starts + program // HEADS)
    length = tl.load(starts + program // HEADS + 1) - first
    if (length >= shortest) & (length <= BLOCK):
        q, k, v = _load_queries_keys_values(qkv, first, length, program, HEADS, D, BLOCK)
        weights = _attention_weights(q, k, length, window, WINDOW, D, BLOCK)
        if DROPOUT:
            weights *= dropout_mask(_pair_numbers(BLOCK), program, low, high, drop, kept)
        attended = tl.dot(weights.to(v.dtype), v)
        place, live = _addresses_and_mask(first, length, program, HEADS * D, HEADS, D, BLOCK)
        tl.store(out + place, attended.to(v.dtype), mask=live)


@triton.jit(do_not_specialize=["low", "high", "drop", "window", "shortest"])
def backward_heads(
    qkv,
    starts,
    grad_out,
    grad,
    low,
    high,
    drop,
    kept: tl.float32,
    window,
    shortest,
    DROPOUT: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    first = tl.load(starts + program // HEADS)
    length = tl.load(starts + program // HEADS + 1) - first
    if (length >= shortest) & (length <= BLOCK):
        q, k, v = _load_queries_keys_values(qkv, first, length, program, HEADS, D, BLOCK)
        place, live = _addresses_and_mask(first, length, program, HEADS * D, HEADS, D, BLOCK)
        g = tl.load(grad_out + place, mask=live, other=0)
        weights = _attention_weights(q, k, length, window, WINDOW, D, BLOCK)
        dropped = weights
        if DROPOUT:
            dropped = weights * dropout_mask(_pair_numbers(BLOCK), program, low, high, drop, kept)
        place, live = _addresses_and_mask(first, length, program, 3 * HEADS * D, HEADS, D, BLOCK)
        d_v = tl.dot(tl.trans(dropped.to(v.dtype)), g)
        tl.store(grad + place + 2 * HEADS * D, d_v.to(v.dtype), mask=live)
        products = dropped * tl.dot(g, tl.trans(v))  # needs no mask, which would take the registers of one more matrix
        d_scores = (products - weights * tl.sum(products, 1)[:, None]).to(v.dtype)
        scale: tl.constexpr = D**-0.5
        tl.store(grad + place, (tl.dot(d_scores, k) * scale).to(v.dtype), mask=live)
        tl.store(grad + place + HEADS * D, (tl.dot(tl.trans(d_scores), q) * scale).to(v.dtype), mask=live)


@triton.jit
def _addresses_and_mask(first, length, program, stride, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Return the addresses of one head's numbers in a sequence, whose rows have `stride` numbers, and which of them
    exist [BLOCK, D]."""
    token = tl.arange(0, BLOCK)[:, None]
    lane = tl.arange(0, D)[None, :]
    place = (first + token).to(tl.int64) * stride + (program % HEADS) * D + lane
    return place, (token < length) & (lane < D)


@triton.jit
def _load_queries_keys_values(qkv, first, length, program, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    place, live = _addresses_and_mask(first, length, program, 3 * HEADS * D, HEADS, D, BLOCK)
    q = tl.load(qkv + place, mask=live, other=0)
    k = tl.load(qkv + place + HEADS * D, mask=live, other=0)
    v = tl.load(qkv + place + 2 * HEADS * D, mask=live, other=0)
    return q, k, v


@triton.jit
def _attention_weights(q, k, length, window, WINDOW: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Return the attention weights [BLOCK, BLOCK] in fp32. Rows beyond the sequence hold arbitrary finite numbers."""
    scale: tl.constexpr = D**-0.5 * 1.4426950408889634  # log2(e)
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    near = j < length
    if WINDOW:
        near = near & (tl.abs(i - j) <= window)
    scores = tl.where(near, tl.dot(q, tl.trans(k)) * scale, -1.0e30)
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def _pair_numbers(BLOCK: tl.constexpr):
    """Return a different number for each pair of a query and a key [BLOCK, BLOCK]."""
    return tl.arange(0, BLOCK)[:, None] * 128 + tl.arange(0, BLOCK)[None, :]
