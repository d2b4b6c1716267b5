"""Self-attention over a packed row of sequences of up to 128 tokens on a GPU. One program computes one head of one
sequence, and holds all of its scores.

PyTorch's flash kernel works in blocks of 128 tokens, and a sentence fills a third of a block. The backward pass of
PyTorch's kernel needs four kernels and three more passes over memory.

Shape letters: N tokens of a row, B sequences, A heads, D width of a head, H = A * D, X = 3 * H (queries, keys, values).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LONGEST, WIDTHS = 128, (16, 32, 64)
"""The kernel supports sequences up to this length, and heads of these widths."""


def short_attention(
    qkv_NX: Tensor, starts_B1: Tensor, longest: int, seed: int, heads: int, dropout: float, window: int | None
) -> Tensor:
    """Return `dropout(softmax(q k^T / sqrt(D))) v` within each sequence [N, H]. window: a token attends only to
    positions with |i - j| <= window.

    qkv has 16 bits. The seed determines the dropout mask, so that the backward pass can draw the same mask. The
    backward pass reads only the arguments. Results have the same bits every time.
    """
    return _ShortAttention.apply(qkv_NX, starts_B1, longest, seed, heads, dropout, window)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_NX: Tensor,
        starts_B1: Tensor,
        longest: int,
        seed: int,
        heads: int,
        dropout: float,
        window: int | None,
    ) -> Tensor:
        from xscale.ops import short_attention_triton as kernel  # Triton comes with CUDA builds of torch

        ctx.save_for_backward(qkv_NX, starts_B1)
        ctx.arguments = longest, seed, heads, dropout, window
        out_NH = qkv_NX.new_empty(len(qkv_NX), qkv_NX.shape[1] // 3)
        kernel.launch_attention_kernels(qkv_NX.contiguous(), starts_B1, out_NH, *ctx.arguments)
        return out_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor | None, ...]:
        from xscale.ops import short_attention_triton as kernel

        qkv_NX, starts_B1 = ctx.saved_tensors
        qkv_NX = qkv_NX.contiguous()
        grad_NX = torch.empty_like(qkv_NX)
        longest, seed, heads, dropout, window = ctx.arguments
        kernel.launch_attention_kernels(
            qkv_NX, starts_B1, grad_NH.contiguous(), longest, seed, heads, dropout, window, grad_NX
        )
        return grad_NX, None, None, None, None, None, None
