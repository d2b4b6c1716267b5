"""Vocabulary projection and cross-entropy over the predicted rows only, a chunk of rows at a time.

Shape letters: M predicted rows, H hidden width, V vocabulary, C rows of a chunk, B rows of a block of a chunk.

Logits of all rows never exist together. As in Liger Kernel's fused linear cross-entropy (Hsu et al. 2024), the forward
pass already takes the gradients, each chunk's while its logits are there; the backward pass only scales them.
On CUDA one kernel (masked_ce_triton.py) makes a chunk's losses and puts the gradient in the place of the logits.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK, BLOCK = 1024, 64
"""Rows. Fewer in a chunk would read the weight too often; a block's fp32 probabilities should stay in a CPU's cache."""

FP16_SCALE = 4096.0
"""Of the logits' gradients in fp16, taken off in fp32: they stay apart from 0 down to 2e-11, and finite up to 16."""


def masked_cross_entropy(
    rows_MH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_M: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`x = F.linear(rows, weight, bias).float(); F.cross_entropy(x, labels, reduction="sum", label_smoothing=...) +
    z_loss * x.logsumexp(-1).square().sum(), (x.argmax(-1) == labels).sum()`.

    The loss is fp32 whatever the inputs are (fp64 of fp64). So are the sums that make the gradients, which are cast
    after they met the incoming gradient: what a loss scale makes too large becomes inf. M = 0 gives 0.
    """
    inputs = rows_MH, weight_VH, bias_V
    device = rows_MH.device.type
    if torch.is_autocast_enabled(device) and rows_MH.dtype != torch.float64:  # as F.linear
        dtype = torch.get_autocast_dtype(device)
        cast = (None if tensor is None else tensor.to(dtype) for tensor in inputs)
        with torch.autocast(device, enabled=False):
            return _ChunkedLoss.apply(*cast, labels_M, label_smoothing, z_loss, torch.is_grad_enabled())
    return _ChunkedLoss.apply(*inputs, labels_M, label_smoothing, z_loss, torch.is_grad_enabled())


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_M: Tensor,
        label_smoothing: float,
        z_loss: float,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(rows_MH.dtype, torch.float32)
        scale = FP16_SCALE if rows_MH.dtype == torch.float16 else 1.0
        needed = [grad_enabled and wanted for wanted in ctx.needs_input_grad[:3]]
        sums = [
            tensor.new_empty(tensor.shape, dtype=wide) if wanted and tensor is not None else None
            for tensor, wanted in zip((rows_MH, weight_VH, bias_V), needed, strict=True)
        ]
        d_rows_MH, d_weight_VH, d_bias_V = sums
        if d_bias_V is not None:
            d_bias_V.zero_()
        M, V = len(rows_MH), len(weight_VH)
        kernel = _kernel(rows_MH)
        chunks = max(1, round(M / CHUNK))
        stride = -(-V // kernel.ALIGNED) * kernel.ALIGNED if kernel else V
        buffer_CV = rows_MH.new_empty(-(-M // chunks), stride)[:, :V]
        found = []
        for start, end in pairwise(M * i // chunks for i in range(chunks + 1)):
            rows_CH, labels_C, logits_CV = rows_MH[start:end], labels_M[start:end], buffer_CV[: end - start]
            if kernel or bias_V is None:
                torch.mm(rows_CH, weight_VH.T, out=logits_CV)
            else:
                torch.addmm(bias_V, rows_CH, weight_VH.T, out=logits_CV)
            arguments = logits_CV, labels_C, label_smoothing, z_loss, scale if any(needed) else None
            found.append(kernel.losses_(bias_V, *arguments) if kernel else _losses_(*arguments))
            if d_bias_V is not None:
                d_bias_V += logits_CV.sum(0, dtype=wide) / scale
            if d_rows_MH is not None:
                _product(logits_CV, weight_VH, 1 / scale, out=d_rows_MH[start:end])
            if d_weight_VH is not None:
                _product(logits_CV.T, rows_CH, 1 / scale, out=d_weight_VH, add=start > 0)
        loss, correct = (torch.cat(column).sum() for column in zip(*found, strict=True))
        ctx.save_for_backward(*sums)
        ctx.dtype = rows_MH.dtype
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            None if total is None else torch.mul(total, d_loss, out=torch.empty_like(total, dtype=ctx.dtype))
            for total in ctx.saved_tensors
        )
        return *gradients, None, None, None, None


def _kernel(rows_MH: Tensor) -> Any:
    """The module of the CUDA kernel, where it runs: Triton comes with CUDA builds of torch."""
    if not rows_MH.is_cuda or rows_MH.dtype == torch.float64:
        return None
    from xscale.ops import masked_ce_triton

    return masked_ce_triton


def _losses_(
    logits_CV: Tensor, labels_C: Tensor, label_smoothing: float, z_loss: float, scale: float | None
) -> tuple[Tensor, Tensor]:
    """As masked_ce_triton.losses_, of logits with the bias in them, a block of rows at a time."""
    V = logits_CV.shape[1]
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    buffer_BV = logits_CV.new_empty(min(BLOCK, len(logits_CV)), V, dtype=wide)
    found = []
    for logits_BV, labels_B1 in zip(logits_CV.split(BLOCK), labels_C[:, None].split(BLOCK), strict=True):
        p_BV = torch.softmax(logits_BV, -1, dtype=wide, out=buffer_BV[: len(logits_BV)])
        best_B1, guess_B1 = logits_BV.max(-1, keepdim=True)
        p_best_B1, label_B1 = p_BV.gather(1, guess_B1), logits_BV.gather(1, labels_B1)
        mean_B1 = logits_BV.mean(-1, keepdim=True, dtype=wide) if label_smoothing else best_B1
        found.append((guess_B1, best_B1, p_best_B1, label_B1, mean_B1))
        if scale is None:
            continue
        if z_loss:
            p_BV *= 1 + 2 * z_loss * (best_B1 - p_best_B1.log())
        if label_smoothing:
            p_BV -= label_smoothing / V
        d_logits_BV = p_BV.scatter_(1, labels_B1, p_BV.gather(1, labels_B1) - (1 - label_smoothing))
        torch.mul(d_logits_BV, scale, out=logits_BV)
    guess_C, *rest = (torch.cat(column)[:, 0] for column in zip(*found, strict=True))
    best_C, p_best_C, label_C, mean_C = (column.to(wide) for column in rest)
    log_p_C = p_best_C.log()
    losses_C = (best_C - label_C) - log_p_C + label_smoothing * (label_C - mean_C)
    return losses_C + z_loss * (best_C - log_p_C).square(), guess_C == labels_C


def _product(a: Tensor, b: Tensor, scale: float, out: Tensor, add: bool = False) -> None:
    """out = scale * a @ b, or out += scale * a @ b, with `out` in fp32 where a and b are half precision."""
    old = 1.0 if add else 0.0
    if a.is_cuda and a.dtype != out.dtype:
        torch.addmm(out, a, b, beta=old, alpha=scale, out_dtype=out.dtype, out=out)
    elif a.dtype == torch.bfloat16:  # on a CPU four times as fast as in fp32, for one more rounding of each chunk
        torch.add(a @ b, out if add else 0.0, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=old, alpha=scale)
