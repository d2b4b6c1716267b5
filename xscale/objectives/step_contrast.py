"""The contrast of two sides over all samples of an optimizer step, for objectives with `Objective.vectors`.

    s_ij = cosine of u_i and v_j;   e_ij = exp((s_ij - m [i = j]) / tau)
    loss of sample i = - 1/2 ( log e_ii / sum over j of e_ij  +  log e_ii / sum over j of e_ji )

u_i and v_i are the two sides of sample i. The sums run over the samples of all ranks and packed rows. A sample that has
a text in common with sample i is not a negative of it, and is left out of both sums. Each packed row computes all V x V
cosines, so memory grows with the square of the samples of a step.

Shape letters: S samples of a packed row, V samples of the step, H width of a vector, D width of what rows exchange.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.objectives.base import Losses, Parts, step_loss_share
from xscale.objectives.ppa import have_common_text, is_nearest

_BYTES = 8
"""The number of bytes of a text hash. Every floating type represents a byte exactly, so hashes are sent as further
columns of the vectors."""


def vectors_and_text_hashes(parts: Parts, states: dict[str, Tensor], arrays: dict[str, Tensor], options: Any) -> Tensor:
    """Return what the other packed rows of the step need of the row's samples: the unit vectors of the states "first"
    and "second", and the hashes in the array "texts", in fp32 or wider [S, D]. Only the direction of a vector matters,
    so a sum may replace a mean."""
    wide = torch.promote_types(states["first"].dtype, torch.float32)
    sides = [F.normalize(states[name].to(wide), dim=-1) for name in ("first", "second")]
    return torch.cat([*sides, to_byte_columns(arrays["texts"]).to(wide)], 1)


def to_byte_columns(numbers_S2: Tensor) -> Tensor:
    """Return the bytes of int64 numbers [S, 16]."""
    return (numbers_S2[..., None] >> _bit_shifts_of_bytes(numbers_S2) & 255).flatten(1)


def from_byte_columns(bytes_V16: Tensor) -> Tensor:
    """Return the int64 numbers that have these bytes [V, 2]. It is the inverse of `to_byte_columns`."""
    bytes_V28 = bytes_V16.to(torch.int64).unflatten(1, (2, _BYTES))
    return (bytes_V28 << _bit_shifts_of_bytes(bytes_V28)).sum(-1)


def _bit_shifts_of_bytes(tensor: Tensor) -> Tensor:
    return torch.arange(0, 8 * _BYTES, 8, device=tensor.device)


def step_contrast_losses(states: dict[str, Tensor], term: str, temperature: float, margin: float = 0.0) -> Losses:
    """Return the packed row's part of the contrast as the sum `term`. Also return the metric contrastive_accuracy: the
    share of samples whose u is nearer to their own v than to all negatives. states: the states of the loss, with "step"
    and "own"."""
    step_VD = states["step"]
    own_n = states["own"]
    texts_V2 = from_byte_columns(step_VD[:, -2 * _BYTES :].detach())
    u_VH, v_VH = step_VD[:, : -2 * _BYTES].chunk(2, 1)
    s_VV = u_VH @ v_VH.T
    itself_VV = torch.eye(len(s_VV), dtype=torch.bool, device=s_VV.device)
    left_out_VV = have_common_text(texts_V2, texts_V2) & ~itself_VV
    logits_VV = ((s_VV - margin * itself_VV.to(s_VV.dtype)) / temperature).masked_fill(left_out_VV, -torch.inf)
    targets_V = torch.arange(len(s_VV), device=s_VV.device)
    forth_V = F.cross_entropy(logits_VV, targets_V, reduction="none")
    back_V = F.cross_entropy(logits_VV.T, targets_V, reduction="none")
    with torch.no_grad():
        negative_VV = s_VV.masked_fill(left_out_VV | itself_VV, -torch.inf)
        right_V = is_nearest(s_VV.diagonal()[:, None], negative_VV)
    return Losses(
        sums={term: step_loss_share((forth_V + back_V) / 2, own_n)},
        metrics={"contrastive_accuracy": (right_V[own_n].sum(), term)},
    )
