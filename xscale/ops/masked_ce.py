"""The vocabulary head and the cross-entropy, for predicted tokens only, computed in chunks.

Shape letters: M predictions, H width of the features, V vocabulary, C predictions of a chunk, B predictions of a block
of a chunk, K columns.

The logits of all predictions never exist at the same time. As in Liger Kernel's fused linear cross-entropy (Hsu et al.
2024), the forward pass computes each chunk's gradients while its logits exist, and the backward pass only scales them.
On CUDA one kernel (masked_ce_triton.py) computes a chunk's losses and overwrites its logits with their gradient.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS, GPU_LOGITS, BLOCK = 1536, 2**31, 64
"""A chunk has up to ROWS predictions, or on a GPU up to GPU_LOGITS bytes of logits, if these are more predictions. A
block has BLOCK predictions, whose fp32 probabilities should fit into a CPU's cache. Each chunk reads and writes the
weight's gradient in fp32. At V = 250k, with fewer than 4,000 predictions, this takes as long as the product."""

FP16_SCALE = 4096.0
"""In fp16, gradients of logits are multiplied by this factor, and later divided by it in fp32. Then a gradient of 2e-11
does not become 0, and a gradient of 16 is still finite."""


class LossAndCorrect(NamedTuple):
    """The cross-entropy of predictions, and which of them are correct."""

    loss: Tensor
    """The weighted sum of `losses`, the only one of the three with a gradient."""
    losses: Tensor
    """The loss of each prediction [M]."""
    correct: Tensor
    """True for each prediction whose label has the highest logit [M]."""


def max_predictions_of_chunk(device: str, vocab_size: int, bytes_of_logit: int) -> int:
    """Return the maximum number of predictions of a chunk. device: "cpu" or "cuda".
    More predictions are divided into chunks of at least half this number."""
    return max(ROWS, GPU_LOGITS // (vocab_size * bytes_of_logit)) if device == "cuda" else ROWS


def masked_cross_entropy(
    features_MH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_M: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights_M: Tensor | None = None,
    largest_weight: float = 1.0,
) -> LossAndCorrect:
    """Return `largest_weight * (weights * losses).sum(), losses.detach(), x.argmax(-1) == labels` for
    `x = F.linear(features, weight, bias).float(); losses = F.cross_entropy(x, labels, reduction="none",
    label_smoothing=...) + z_loss * x.logsumexp(-1).square()`.

    Weights are from 0 to 1 (None: all 1) and have no gradient. Each is the prediction's true weight divided by
    `largest_weight`, because gradients of logits in 16 bits would underflow with small weights. A prediction of weight
    0 adds exactly 0 to every gradient; its label must be a valid id, too. Features, weight and bias have the same type.
    Of any type, the losses and the sums that become gradients are fp32 (fp64 for fp64). Gradients are cast to the
    inputs' type only after the multiplication by the incoming gradient, so a gradient that a loss scale makes too large
    becomes inf. M = 0 gives 0.
    """
    if weights_M is None:
        weights_M = torch.ones_like(labels_M, dtype=torch.float32)
    return LossAndCorrect(
        *_ChunkedLoss.apply(
            features_MH,
            weight_VH,
            bias_V,
            labels_M,
            weights_M,
            label_smoothing,
            z_loss,
            largest_weight,
            torch.is_grad_enabled(),
        )
    )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_M: Tensor,
        weights_M: Tensor,
        label_smoothing: float,
        z_loss: float,
        largest_weight: float,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs: list[Any] = [features_MH, weight_VH, bias_V]
        wide = torch.promote_types(features_MH.dtype, torch.float32)
        gradients = [
            tensor.new_empty(tensor.shape, dtype=wide) if grad_enabled and needed else None
            for tensor, needed in zip(inputs, ctx.needs_input_grad[:3], strict=True)
        ]
        weights_M = weights_M.to(wide)
        losses_M, right_M = _losses_writing_gradients(
            inputs, labels_M, weights_M, label_smoothing, z_loss, largest_weight, gradients
        )
        ctx.save_for_backward(*gradients)
        ctx.dtype = features_MH.dtype
        ctx.mark_non_differentiable(losses_M, right_M)
        return largest_weight * (weights_M * losses_M).sum(), losses_M, right_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        totals = ctx.saved_tensors
        return *(None if total is None else _scale_gradient(total, d_loss, ctx.dtype) for total in totals), *(None,) * 6


def _losses_writing_gradients(
    inputs: list[Any],
    labels_M: Tensor,
    weights_M: Tensor,
    label_smoothing: float,
    z_loss: float,
    largest_weight: float,
    gradients_out: list[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Return each prediction's loss [M], and whether its label has the highest logit [M]. Write the gradients of
    features, weight and bias to `gradients_out`, except where an element of it is None."""
    features_MH, weight_VH, bias_V = inputs
    M = len(features_MH)
    V = len(weight_VH)
    scale = FP16_SCALE if features_MH.dtype == torch.float16 else 1.0
    factors_M = weights_M * scale if any(gradient is not None for gradient in gradients_out) else None
    kernel = _triton_module_or_none(features_MH)
    chunks = max(1, -(-M // max_predictions_of_chunk(features_MH.device.type, V, features_MH.itemsize)))
    stride = -(-V // kernel.ALIGNED) * kernel.ALIGNED if kernel else V
    buffer_CV = features_MH.new_empty(-(-M // chunks), stride)[:, :V]
    found = []
    for start, end in pairwise(M * i // chunks for i in range(chunks + 1)):
        features_CH = features_MH[start:end]
        labels_C = labels_M[start:end]
        logits_CV = buffer_CV[: end - start]
        for columns in _vocabulary_slices(weight_VH):
            product = features_CH, weight_VH[columns].T
            if kernel or bias_V is None:
                torch.mm(*product, out=logits_CV[:, columns])
            else:
                torch.addmm(bias_V[columns], *product, out=logits_CV[:, columns])
        factors_C = None if factors_M is None else factors_M[start:end]
        arguments = logits_CV, labels_C, factors_C, label_smoothing, z_loss
        found.append(
            kernel.losses_overwriting_logits(bias_V, *arguments) if kernel else _losses_overwriting_logits(*arguments)
        )
        _write_or_add_gradients(logits_CV, features_CH, weight_VH, largest_weight / scale, gradients_out, start)
    losses_M, right_M = (torch.cat(column) for column in zip(*found, strict=True))
    return losses_M, right_M


def _write_or_add_gradients(
    d_logits_CV: Tensor,
    features_CH: Tensor,
    weight_VH: Tensor,
    scale: float,
    gradients: list[Tensor | None],
    first_prediction: int,
) -> None:
    """Add `scale` times the gradients of a chunk to `gradients`, which the first chunk overwrites. first_prediction:
    the index of the chunk's first prediction."""
    d_features_MH, d_weight_VH, d_bias_V = gradients
    for columns in _vocabulary_slices(weight_VH):
        d_logits_CK = d_logits_CV[:, columns]
        if d_features_MH is not None:
            d_features_CH = d_features_MH[first_prediction : first_prediction + len(features_CH)]
            _matmul_into(d_logits_CK, weight_VH[columns], scale, d_features_CH, add=columns.start > 0)
        if d_weight_VH is not None:
            _matmul_into(d_logits_CK.T, features_CH, scale, d_weight_VH[columns], add=first_prediction > 0)
    if d_bias_V is not None:
        total_V = d_logits_CV.sum(0, dtype=d_bias_V.dtype)
        torch.add(d_bias_V if first_prediction else total_V.new_zeros(()), total_V, alpha=scale, out=d_bias_V)


def _vocabulary_slices(weight_VH: Tensor) -> list[slice]:
    """Return slices of the logits' columns; one matrix product computes each slice. On CUDA the fast kernels need a
    multiple of 8 columns, so the last V % 8 columns (XLM-R has 250,002) get a product of their own."""
    V = len(weight_VH)
    fast = V - V % 8 if weight_VH.is_cuda else V
    return [slice(start, end) for start, end in pairwise(sorted({0, fast, V}))]


def _matmul_into(a: Tensor, b: Tensor, scale: float, out: Tensor, add: bool) -> None:
    """Set out = scale * a @ b, or with `add` out += scale * a @ b. If a and b have 16 bits, `out` is fp32."""
    old = 1.0 if add else 0.0
    if a.is_cuda and a.dtype != out.dtype:
        torch.addmm(out, a, b, beta=old, alpha=scale, out_dtype=out.dtype, out=out)
    elif a.dtype == torch.bfloat16:  # on a CPU, this is four times as fast as in fp32, and rounds each chunk once more
        torch.add(out if add else out.new_zeros(1, 1), a @ b, alpha=scale, out=out)  # the result is fp32
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=old, alpha=scale)


def _scale_gradient(total: Tensor, d_loss: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total * d_loss in `dtype`. On a CPU, if d_loss is 1, the result is `total` itself and not a copy, which is
    safe: autograd copies a tensor that another backward pass still needs."""
    if total.dtype == dtype and d_loss.device.type == "cpu" and d_loss == 1:
        return total
    return torch.mul(total, d_loss, out=torch.empty_like(total, dtype=dtype))


def _triton_module_or_none(features_MH: Tensor) -> Any:
    """Return the module of the CUDA kernel, or None if it cannot run. Triton comes with CUDA builds of torch."""
    if not features_MH.is_cuda or features_MH.dtype == torch.float64:
        return None
    from xscale.ops import masked_ce_triton

    return masked_ce_triton


def _losses_overwriting_logits(
    logits_CV: Tensor, labels_C: Tensor, factors_C: Tensor | None, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Return each prediction's loss [C], and whether its label has the highest logit [C]. Unless `factors_C` is None,
    overwrite the logits, which include the bias, with factor * d loss / d logits, one block of predictions at a
    time."""
    C, V = logits_CV.shape
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    buffer_BV = logits_CV.new_empty(min(BLOCK, C), V, dtype=wide)
    found = []
    for block in (slice(start, start + BLOCK) for start in range(0, max(C, 1), BLOCK)):
        logits_BV = logits_CV[block]
        labels_B1 = labels_C[block, None]
        p_BV = torch.softmax(logits_BV, -1, dtype=wide, out=buffer_BV[: len(logits_BV)])
        best_B1, guess_B1 = logits_BV.max(-1, keepdim=True)
        p_best_B1 = p_BV.gather(1, guess_B1)
        label_B1 = logits_BV.gather(1, labels_B1)
        mean_B1 = logits_BV.mean(-1, keepdim=True, dtype=wide) if label_smoothing else best_B1
        found.append((guess_B1, best_B1, p_best_B1, label_B1, mean_B1))
        if factors_C is None:
            continue
        if z_loss:
            p_BV *= 1 + 2 * z_loss * (best_B1 - p_best_B1.log())
        if label_smoothing:
            p_BV -= label_smoothing / V
        d_logits_BV = p_BV.scatter_(1, labels_B1, p_BV.gather(1, labels_B1) - (1 - label_smoothing))
        torch.mul(d_logits_BV, factors_C[block, None], out=logits_BV)
    guess_C, *rest = (torch.cat(column)[:, 0] for column in zip(*found, strict=True))
    best_C, p_best_C, label_C, mean_C = (column.to(wide) for column in rest)
    log_p_C = p_best_C.log()
    losses_C = (best_C - label_C) - log_p_C + label_smoothing * (label_C - mean_C)
    return losses_C + z_loss * (best_C - log_p_C).square(), guess_C == labels_C
