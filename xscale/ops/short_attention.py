"""Self-attention over a packed row of sequences of up to 128 tokens on a GPU. One program computes one head of one
sequence, and holds all of its scores.

PyTorch's flash kernel works in blocks of 128 tokens, and a sentence fills a third of a block. Its backward pass needs
four kernels and three more passes over memory.

Shape letters: N tokens of a row, B sequences, A heads, D width of a head, H = A * D, X = 3 * H (queries, keys, values).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LONGEST, WIDTHS = 128, (16, 32, 64)
"""The kernel supports sequences up to this length, and heads of these widths."""


def short_attention(
    qkv_NX: Tensor,
    starts_B1: Tensor,
    longest: int,
    seed: Tensor,
    layer: int,
    heads: int,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Return `dropout(softmax(q k^T / sqrt(D))) v` within each sequence [N, H]. window: a token attends only to
    positions with |i - j| <= window.

    qkv has 16 bits. `seed` (int64, on the CPU) and `layer` determine the dropout mask, so that the backward pass can
    draw the same mask. Only the arguments are kept for the backward pass. Results have the same bits every time.
    """
    return _ShortAttention.apply(qkv_NX, starts_B1, longest, seed, layer, heads, dropout, window)


class _ShortAttention(torch.autograd.Function):
    """Calls the kernel. Outside of torch.compile, the kernel is called directly, because an operator of torch.library
    would double the host's time for a launch."""

    @staticmethod
    def forward(ctx: Any, qkv_NX: Tensor, starts_B1: Tensor, longest: int, seed: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(qkv_NX, starts_B1, seed)
        ctx.longest, ctx.rest = longest, rest
        attend = attend_op if torch.compiler.is_compiling() else _attend
        return attend(qkv_NX, starts_B1, longest, seed, *rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor | None, ...]:
        qkv_NX, starts_B1, seed = ctx.saved_tensors
        gradient = gradient_op if torch.compiler.is_compiling() else _gradient
        return gradient(grad_NH, qkv_NX, starts_B1, ctx.longest, seed, *ctx.rest), *[None] * 7


def _attend(
    qkv_NX: Tensor,
    starts_B1: Tensor,
    longest: int,
    seed: Tensor,
    layer: int,
    heads: int,
    dropout: float,
    window: int | None,
) -> Tensor:
    from xscale.ops import short_attention_triton as kernel  # Triton comes with CUDA builds of torch

    out_NH = qkv_NX.new_empty(len(qkv_NX), qkv_NX.shape[1] // 3)
    kernel.attend(qkv_NX.contiguous(), starts_B1, out_NH, longest, int(seed) + layer, heads, dropout, window)
    return out_NH


def _gradient(
    grad_NH: Tensor,
    qkv_NX: Tensor,
    starts_B1: Tensor,
    longest: int,
    seed: Tensor,
    layer: int,
    heads: int,
    dropout: float,
    window: int | None,
) -> Tensor:
    from xscale.ops import short_attention_triton as kernel

    qkv_NX = qkv_NX.contiguous()
    grad_NX = torch.empty_like(qkv_NX)
    more = longest, int(seed) + layer, heads, dropout, window
    kernel.attend(qkv_NX, starts_B1, grad_NH.contiguous(), *more, grad_NX=grad_NX)
    return grad_NX


attend_op = torch.library.custom_op("xscale::short_attention", _attend, mutates_args=())
gradient_op = torch.library.custom_op("xscale::short_attention_backward", _gradient, mutates_args=())


@attend_op.register_fake
def _(qkv_NX: Tensor, *_: Any) -> Tensor:
    return qkv_NX.new_empty(len(qkv_NX), qkv_NX.shape[1] // 3)


@gradient_op.register_fake
def _(grad_NH: Tensor, qkv_NX: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(qkv_NX, memory_format=torch.contiguous_format)
