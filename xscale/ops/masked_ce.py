"""Vocabulary projection and cross-entropy over the predicted rows only.

Shape letters: M predicted rows, H hidden width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_cross_entropy(
    rows_MH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_M: Tensor
) -> tuple[Tensor, Tensor]:
    """`F.cross_entropy(F.linear(rows, weight, bias).float(), labels, reduction="sum")`, and how many rows are right.

    The loss is fp32 whatever the inputs are. M = 0 gives 0 with zero gradients.
    """
    logits_MV = F.linear(rows_MH, weight_VH, bias_V)
    if logits_MV.dtype in (torch.float16, torch.bfloat16):
        logits_MV = logits_MV.float()
    loss = F.cross_entropy(logits_MV, labels_M, reduction="sum")
    with torch.no_grad():
        correct = (logits_MV.argmax(-1) == labels_M).sum()
    return loss, correct
