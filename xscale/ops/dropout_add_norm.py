"""Dropout, residual and layer norm after each dense layer of a BERT layer. On a GPU, the forward and the backward pass
are one kernel each.

Separate operators would read and write the states five times instead of twice, with nine launches instead of two.

Shape letters: N tokens of a row, H hidden width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xscale.deepspeed_private import is_partitioned


def should_fuse(x_NH: Tensor, norm: nn.Module) -> bool:
    """Return True if the fused kernel should be used: in 16 bits on CUDA, for a norm whose weights are not partitioned,
    and if a backward pass follows (otherwise plain operators cost the host less)."""
    if not x_NH.is_cuda or not torch.is_grad_enabled() or not isinstance(norm, nn.LayerNorm) or norm.bias is None:
        return False
    return x_NH.dtype in (torch.float16, torch.bfloat16) and not is_partitioned(norm.weight)


def fused_dropout_add_norm(x_NH: Tensor, residual_NH: Tensor, p: float, norm: nn.LayerNorm, seed: int) -> Tensor:
    """Return `norm(dropout(x, p) + residual)` [N, H]. The sum is rounded to the type of x, and then normed in fp32.
    `seed` determines the dropout mask. Results have the same bits every time."""
    return _DropoutAddNorm.apply(x_NH, residual_NH, norm.weight, norm.bias, p, norm.eps, seed)


class _DropoutAddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NH: Tensor, residual_NH: Tensor, weight_H: Tensor, bias_H: Tensor, p: float, eps: float, seed: int
    ) -> Tensor:
        from xscale.ops import dropout_add_norm_triton as kernel  # Triton comes with CUDA builds of torch

        out_NH, *saved = kernel.forward(x_NH.contiguous(), residual_NH.contiguous(), weight_H, bias_H, p, eps, seed)
        ctx.save_for_backward(*saved, weight_H)
        ctx.dropout = p, seed
        return out_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor | None, ...]:
        from xscale.ops import dropout_add_norm_triton as kernel

        return *kernel.backward(grad_NH.contiguous(), *ctx.saved_tensors, *ctx.dropout), None, None, None
