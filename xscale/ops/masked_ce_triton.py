"""The GPU kernel of the losses of a chunk of logits and their gradient. It is imported only if there is a GPU."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

LAUNCH = {"BLOCK": 4096, "num_warps": 8}
"""The launch parameters. A program processes BLOCK columns at a time, so each thread processes 16 numbers."""
ALIGNED = 16
"""Each row of logits begins at a multiple of this many numbers, so that loads and stores of 16 bytes are aligned."""


def losses_overwriting_logits(
    bias_V: Tensor | None,
    logits_CV: Tensor,
    labels_C: Tensor,
    factors_C: Tensor | None,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Return, for each row of logits + bias, the loss in fp32 [C], and whether the label is the first column with the
    maximum [C].

    Unless the factors (fp32) are None, the logits are overwritten with factor * d loss / d logits. A row's stride is a
    multiple of `ALIGNED`; the padding between rows may hold any numbers, and is overwritten.
    """
    C, V = logits_CV.shape
    stride = logits_CV.stride(0)
    assert stride % ALIGNED == 0 and logits_CV.stride(1) == 1
    losses_C, right_C = (torch.empty_like(labels_C, dtype=dtype) for dtype in (torch.float32, torch.bool))
    bias = logits_CV if bias_V is None else F.pad(bias_V, (0, stride - V))
    factors = losses_C if factors_C is None else factors_C.contiguous()
    tensors = logits_CV, bias, labels_C.contiguous(), factors, losses_C, right_C
    numbers = stride, V, label_smoothing, z_loss
    choices = {"BIAS": bias_V is not None, "SMOOTH": label_smoothing > 0, "GRADIENT": factors_C is not None}
    if C:
        with torch.cuda.device_of(logits_CV):
            softmax_losses[(C,)](*tensors, *numbers, **choices, **LAUNCH)
    return losses_C, right_C


@triton.jit(do_not_specialize=["V"])
def softmax_losses(
    logits,
    bias,
    labels,
    factors,
    losses,
    right,
    stride,
    V,
    label_smoothing: tl.float32,
    z_loss: tl.float32,
    BIAS: tl.constexpr,
    SMOOTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row. In the first pass over the row, each lane keeps its own maximum and sum of exponentials (Milakov
    & Gimelshein 2018), which are combined once, at the end of the pass."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    label = tl.load(labels + row).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -3.0e38, tl.float32)  # not -inf, because -inf - (-inf) is NaN
    place = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    of_label = tl.zeros([BLOCK], tl.float32)
    of_all = tl.zeros([BLOCK], tl.float32)
    for start in range(0, stride, BLOCK):
        column = start + lane
        x = _load_logits_plus_bias(logits, bias, column, stride, V, BIAS)
        place = tl.where(x > best, column, place)
        top = tl.maximum(best, x)
        total = total * tl.exp(best - top) + tl.exp(x - top)
        best = top
        of_label += tl.where(column == label, x, 0.0)
        if SMOOTH:
            of_all += tl.where(column < V, x, 0.0)
    maximum = tl.max(best, 0)
    denominator = tl.sum(total * tl.exp(best - maximum), 0)
    guess = tl.min(tl.where(best == maximum, place, V), 0)
    label_logit = tl.sum(of_label, 0)
    log_sum = maximum + tl.log(denominator)
    loss = (maximum - label_logit) + tl.log(denominator) + z_loss * log_sum * log_sum
    if SMOOTH:
        loss += label_smoothing * (label_logit - tl.sum(of_all, 0) / V)
    tl.store(losses + row, loss)
    tl.store(right + row, guess == label)
    if GRADIENT:
        scale = tl.load(factors + row)
        factor = (1 + 2 * z_loss * log_sum) / denominator
        for start in range(0, stride, BLOCK):
            column = start + lane
            x = _load_logits_plus_bias(logits, bias, column, stride, V, BIAS)
            d_x = tl.exp(x - maximum) * factor - tl.where(column == label, 1 - label_smoothing, 0.0)
            if SMOOTH:
                d_x -= label_smoothing / V
            tl.store(logits + column, (d_x * scale).to(logits.dtype.element_ty), mask=column < stride)


@triton.jit
def _load_logits_plus_bias(logits, bias, column, stride, V, BIAS: tl.constexpr):
    """Return logits plus bias in fp32; -inf in columns beyond the vocabulary."""
    x = tl.load(logits + column, mask=column < stride, other=0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + column, mask=column < stride, other=0).to(tl.float32)
    return tl.where(column < V, x, float("-inf"))
