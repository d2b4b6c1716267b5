"""Encoders on one flat row of tokens, without padding: attention within each sequence, by cumulative lengths.

Shape letters: B sequences, L tokens of the longest, N tokens of all, A heads, D width of a head, H hidden width.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface

MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "camembert")
"""Those whose embeddings depend on a token and its position alone, and whose attention is full."""
NAME = "xscale_varlen"
"""Of the attention function in Hugging Face's table. Not written into a saved config."""


class Row(NamedTuple):
    """How a flat row is made up."""

    places_N: Tensor
    """Index of each token in the flattened [B * L]."""
    starts_B1: Tensor
    """Where each sequence starts, and N; int32."""
    sequences: int
    longest: int
    flash: bool


def last_hidden_state(model: Any, inputs: dict[str, Tensor], places_N: Tensor, first_position: int) -> Tensor:
    """`model(**inputs).last_hidden_state` [B, L, H], with 0 at padding.

    inputs [B, L]; attention_mask begins each row with its ones. places: where all of these are. The host does not
    wait for the device.
    """
    mask_BL = inputs["attention_mask"]
    sequences, longest = mask_BL.shape
    flat = {name: values_BL.take(places_N)[None] for name, values_BL in inputs.items() if name != "attention_mask"}
    flat.setdefault("position_ids", (places_N % longest + first_position)[None])
    starts_B1 = F.pad(mask_BL.sum(1).cumsum(0), (1, 0)).int()
    row = Row(places_N, starts_B1, sequences, longest, runs_flash(model))
    hidden_NH = model(**flat, row=row).last_hidden_state[0]
    return _padded(hidden_NH, row)


def runs_flash(model: Any) -> bool:
    """Whether the flash kernel takes the model's device, type and heads: 16 bits, Ampere or newer."""
    weight, head = model.get_input_embeddings().weight, model.config.hidden_size // model.config.num_attention_heads
    fits = weight.dtype in (torch.float16, torch.bfloat16) and head % 8 == 0 and head <= 128
    return fits and weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= (8, 0)


def _padded(values_N: Tensor, row: Row) -> Tensor:
    """[N, ...] as [B, L, ...], 0 at padding."""
    zeros = values_N.new_zeros(row.sequences * row.longest, *values_N.shape[1:])
    return zeros.index_copy(0, row.places_N, values_N).unflatten(0, (row.sequences, row.longest))


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    row: Row | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What Hugging Face calls, with query, key, value [1, A, N, D]; returns [1, N, A, D]. Without `row`, its sdpa."""
    if row is None:
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    attend = flash if row.flash else exact
    q_NAD, k_NAD, v_NAD = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q_NAD, k_NAD, v_NAD, row, scaling, dropout)[None], None


def flash(q_NAD: Tensor, k_NAD: Tensor, v_NAD: Tensor, row: Row, scaling: float, dropout: float) -> Tensor:
    """`exact` by the flash kernel. varlen_attn has no dropout: with it, the operator that varlen_attn calls."""
    cut = (row.starts_B1, row.starts_B1, row.longest, row.longest)
    if not dropout:
        return varlen_attn(q_NAD, k_NAD, v_NAD, *cut, scale=scaling)  # type: ignore[return-value]
    causal = debug = False
    operator = torch.ops.aten._flash_attention_forward
    return operator(q_NAD, k_NAD, v_NAD, *cut, dropout, causal, debug, scale=scaling)[0]


def exact(q_NAD: Tensor, k_NAD: Tensor, v_NAD: Tensor, row: Row, scaling: float, dropout: float) -> Tensor:
    """softmax(scaling * q k^T) v within each sequence [N, A, D], on any device and in any type, by way of padding."""
    q_BALD, k_BALD, v_BALD = (_padded(x, row).transpose(1, 2) for x in (q_NAD, k_NAD, v_NAD))
    real_B11L = torch.arange(row.longest, device=q_NAD.device) < row.starts_B1.diff()[:, None, None, None]
    out_BALD = F.scaled_dot_product_attention(
        q_BALD, k_BALD, v_BALD, attn_mask=real_B11L, dropout_p=dropout, scale=scaling
    )
    return out_BALD.transpose(1, 2).flatten(0, 1).index_select(0, row.places_N)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
