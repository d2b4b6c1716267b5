"""Rotary position embeddings (Su et al. 2021) of the queries and keys of a packed row; values are not changed.

Shape letters: N tokens of a row, A heads, D width of a head, X = 3 * A * D (queries, keys, values).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate_(qkv_NX: Tensor, cos_N11D: Tensor, sin_N11D: Tensor, heads: int) -> Tensor:
    """Rotate the queries and keys in place, and return qkv [N, X].

    Each head x of queries and keys becomes `x * cos + x.roll(D // 2, -1) * sin`, computed in the type of cos and sin,
    which is at least fp32. Number i of a head's first half is rotated with number i of its second half; the first half
    of sin is negated. On a GPU, one kernel does this. It may work in place, because the backward pass of the product
    that made qkv does not read qkv.
    """
    return _Rotation.apply(qkv_NX, cos_N11D, sin_N11D, heads)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_NX: Tensor, cos_N11D: Tensor, sin_N11D: Tensor, heads: int) -> Tensor:
        ctx.mark_dirty(qkv_NX)
        ctx.save_for_backward(cos_N11D, sin_N11D)
        ctx.heads = heads
        if kernel := _triton_module_or_none(qkv_NX):
            kernel.rotate_into(qkv_NX, qkv_NX, cos_N11D, sin_N11D, heads)
        else:
            x = _queries_and_keys(qkv_NX, heads)
            wide = x.to(cos_N11D.dtype)
            x.copy_(torch.addcmul(wide * cos_N11D, wide.roll(x.shape[-1] // 2, -1), sin_N11D))
        return qkv_NX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NX: Tensor) -> tuple[Tensor, None, None, None]:
        """Rotate the gradient back, by the opposite angles."""
        cos_N11D, sin_N11D = ctx.saved_tensors
        if kernel := _triton_module_or_none(grad_NX):
            grad_NX = grad_NX.contiguous()
            back_NX = torch.empty_like(grad_NX)
            kernel.rotate_into(grad_NX, back_NX, cos_N11D, sin_N11D, ctx.heads, inverse=True)
        else:
            back_NX = grad_NX.clone(memory_format=torch.contiguous_format)
            x = _queries_and_keys(back_NX, ctx.heads)
            wide = x.to(cos_N11D.dtype)
            x.copy_(torch.addcmul((wide * sin_N11D).roll(x.shape[-1] // 2, -1), wide, cos_N11D))
        return back_NX, None, None, None


def _queries_and_keys(qkv_NX: Tensor, heads: int) -> Tensor:
    """Return a view of the queries and keys [N, 2, A, D] of qkv."""
    return qkv_NX.unflatten(1, (3, heads, -1)).narrow(1, 0, 2)


def _triton_module_or_none(qkv_NX: Tensor) -> Any:
    """Return the module of the CUDA kernel, or None if it cannot run. Triton comes with CUDA builds of torch."""
    if not qkv_NX.is_cuda:
        return None
    from xscale.ops import rotation_triton

    return rotation_triton
