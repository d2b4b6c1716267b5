"""Forward passes over a packed (flat) row of tokens with Hugging Face's weights. They yield the hidden states of each
layer: of all tokens, and in the last layer only of those tokens that a loss reads.

The last layer computes its feed-forward part only for the tokens whose states are returned: nothing else reads it.

If ZeRO-3 partitions the weights, the forward passes use them only by calling the modules that own them, so that ZeRO-3
can gather them.

Shape letters: N tokens of a row, P places (tokens) whose states are returned, B sequences, L tokens of the longest,
H hidden width, A heads, D width of a head.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xscale.data.packed_row import Tokens
from xscale.deepspeed_private import is_partitioned
from xscale.models.attention import attention, dropout
from xscale.ops.dropout_add_norm import fused_dropout_add_norm, should_fuse
from xscale.ops.rotation import rotate_


def _active_dropout_rate(drop: nn.Module) -> float:
    return getattr(drop, "p", 0.0) if drop.training else 0.0


class _TakePlaces(torch.autograd.Function):
    """`x[places]`. Its backward pass writes each row once, because no place occurs twice."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, places_P: Tensor) -> Tensor:
        ctx.save_for_backward(places_P)
        ctx.tokens = len(x_NH)
        return x_NH.index_select(0, places_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PH: Tensor) -> tuple[Tensor, None]:
        (places_P,) = ctx.saved_tensors
        return grad_PH.new_zeros(ctx.tokens, grad_PH.shape[1]).index_copy_(0, places_P, grad_PH), None


def take_places(x_NH: Tensor, places_P: Tensor | None) -> Tensor:
    """Return the states [P, H] at these places; no place occurs twice. Without places, return all states."""
    return x_NH if places_P is None else _TakePlaces.apply(x_NH, places_P)


def bert_states(model: Any, tokens: Tokens, seed: int, places: Tensor | None) -> Iterator[Tensor]:
    """Yield the hidden states of a row [N, H] after the embeddings and after each layer, for BertModel and models of
    the same structure. After the last layer, these are only the states at `places` [P, H], unless `places` is None."""
    e = model.embeddings
    types = tokens.input_ids.new_zeros(1) if tokens.types is None else tokens.types
    positions = tokens.positions + first_position_id(model.config)
    x = e.word_embeddings(tokens.input_ids) + e.position_embeddings(positions) + e.token_type_embeddings(types)
    x = dropout(e.LayerNorm(x), _active_dropout_rate(e.dropout))
    last = len(model.encoder.layer) - 1
    for number, layer in enumerate(model.encoder.layer):
        yield x
        x = _bert_layer(layer, x, tokens, seed, number, places if number == last else None)
    yield x


def _bert_layer(layer: Any, x: Tensor, tokens: Tokens, seed: int, number: int, places: Tensor | None) -> Tensor:
    attention_weights = layer.attention.self
    out = layer.attention.output
    ffn = layer.output
    p = _active_dropout_rate(attention_weights.dropout)
    qkv = _project_qkv(attention_weights, x)
    attended = attention(
        qkv, tokens.starts, tokens.lengths, tokens.longest, seed + number, attention_weights.num_attention_heads, p
    )
    attended = take_places(attended, places)
    x = take_places(x, places)
    x = _dropout_add_norm(out.dense(attended), x, _active_dropout_rate(out.dropout), out.LayerNorm, seed, 2 * number)
    return _dropout_add_norm(
        ffn.dense(layer.intermediate(x)), x, _active_dropout_rate(ffn.dropout), ffn.LayerNorm, seed, 2 * number + 1
    )


def _dropout_add_norm(x: Tensor, residual: Tensor, p: float, norm: Any, seed: int, norm_number: int) -> Tensor:
    if should_fuse(x, norm):
        # The seeds of attention are below 2^62 + layers.
        return fused_dropout_add_norm(x, residual, p, norm, seed + 2**62 + norm_number)
    return norm(dropout(x, p, residual))


def _project_qkv(attention_weights: Any, x: Tensor) -> Tensor:
    """Return queries, keys and values [N, 3 * H] by one product, or, if ZeRO-3 partitions the weights, by module
    calls."""
    parts = attention_weights.query, attention_weights.key, attention_weights.value
    if is_partitioned(attention_weights.query.weight):
        return torch.cat([part(x) for part in parts], 1)
    return F.linear(x, torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts]))


def modernbert_states(model: Any, tokens: Tokens, seed: int, places: Tensor | None) -> Iterator[Tensor]:
    """Yield the same as bert_states, for ModernBertModel (Warner et al. 2024). The last states are normalised."""
    c = model.config
    e = model.embeddings
    x = dropout(e.norm(e.tok_embeddings(tokens.input_ids)), _active_dropout_rate(e.drop))
    rotations = {kind: _rotary_cos_sin(c, tokens.positions, kind, x.dtype) for kind in dict.fromkeys(c.layer_types)}
    last = len(model.layers) - 1
    for number, (layer, kind) in enumerate(zip(model.layers, c.layer_types, strict=True)):
        window = c.local_attention // 2 if kind == "sliding_attention" else None
        places_here = places if number == last else None
        yield x
        x = _modernbert_layer(layer, x, tokens, seed, number, rotations[kind], window, places_here)
    yield model.final_norm(x)


def _modernbert_layer(
    layer: Any,
    x: Tensor,
    tokens: Tokens,
    seed: int,
    number: int,
    rotation: tuple[Tensor, Tensor],
    window: int | None,
    places: Tensor | None,
) -> Tensor:
    attn = layer.attn
    mlp = layer.mlp
    heads = attn.config.num_attention_heads
    p = attn.attention_dropout if attn.training else 0.0
    qkv = rotate_(attn.Wqkv(layer.attn_norm(x)), *rotation, heads)
    attended = attention(qkv, tokens.starts, tokens.lengths, tokens.longest, seed + number, heads, p, window)
    attended = take_places(attended, places)
    x = take_places(x, places)
    x = dropout(attn.Wo(attended), _active_dropout_rate(attn.out_drop), x)
    states, gate = mlp.Wi(layer.mlp_norm(x)).chunk(2, -1)
    return x + mlp.Wo(dropout(mlp.act(states) * gate, _active_dropout_rate(mlp.drop)))


def _rotary_cos_sin(config: Any, positions_N: Tensor, layer_type: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines [N, 1, 1, D] for ops/rotation.py.

    They are computed here, because the frequencies of a model that was cast to 16 bits are rounded.
    """
    D = config.hidden_size // config.num_attention_heads
    steps = torch.arange(0, D, 2, device=positions_N.device, dtype=torch.float32) / D
    angles = positions_N[:, None].float() * (1 / config.rope_parameters[layer_type]["rope_theta"] ** steps)
    cos, sin = (turn.to(torch.promote_types(dtype, torch.float32)) for turn in (angles.cos(), angles.sin()))
    return torch.cat([cos, cos], 1)[:, None, None], torch.cat([-sin, sin], 1)[:, None, None]


def last_states_by_padded_pass(model: Any, tokens: Tokens, seed: int, places: Tensor | None) -> Iterator[Tensor]:
    """Yield only the last hidden states of any Hugging Face encoder [N, H], or those at `places` [P, H], computed by
    the encoder's own forward pass over padded sequences."""
    yield take_places(layer_states_by_padded_pass(model, tokens)[-1], places)


def layer_states_by_padded_pass(model: Any, tokens: Tokens, all_layers: bool = False) -> list[Tensor]:
    """Return the last layer's hidden states [N, H], computed by the model's own forward pass over padded sequences.
    With `all_layers`, return the states of the embeddings and of all layers."""
    B = len(tokens.lengths)
    L = int(tokens.lengths.max())
    N = len(tokens.input_ids)
    device = tokens.input_ids.device
    pad = model.config.pad_token_id or 0
    lengths_B = tokens.starts.diff().long()
    shifts_B = torch.arange(B, device=device) * L - tokens.starts[:-1]
    places_N = torch.arange(N, device=device) + shifts_B.repeat_interleave(lengths_B, output_size=N)

    def padded(values_N: Tensor, fill: int = 0) -> Tensor:
        return values_N.new_full((B * L,), fill).index_copy(0, places_N, values_N).view(B, L)

    first = first_position_id(model.config)
    optional_inputs = {"position_ids": padded(tokens.positions + first, first)}
    if tokens.types is not None:
        optional_inputs["token_type_ids"] = padded(tokens.types)
    accepted = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {name: values for name, values in optional_inputs.items() if name in accepted}
    mask_BL = torch.arange(L, device=device) < lengths_B.clamp(min=1)[:, None]  # a softmax over no token would be NaN
    if all_layers:
        inputs["output_hidden_states"] = True
    output = model(padded(tokens.input_ids, pad), attention_mask=mask_BL.long(), **inputs)
    layers = output.hidden_states if all_layers else [output.last_hidden_state]
    return [hidden_BLH.flatten(0, 1).index_select(0, places_N) for hidden_BLH in layers]


FLAT: dict[str, Callable[..., Iterator[Tensor]]] = {
    "bert": bert_states,
    "roberta": bert_states,
    "xlm-roberta": bert_states,
    "camembert": bert_states,
    "modernbert": modernbert_states,
}
"""Model type -> its flat forward pass. Models of other types read padded sequences."""


def choose_forward_pass(config: Any) -> Callable[..., Iterator[Tensor]]:
    """Return the model's forward pass: a flat one if its type has one and its rotary embeddings are not scaled,
    otherwise last_states_by_padded_pass."""
    ropes = (getattr(config, "rope_parameters", None) or {}).values()
    plain = all(rope["rope_type"] == "default" for rope in ropes)
    return FLAT.get(config.model_type, last_states_by_padded_pass) if plain else last_states_by_padded_pass


def first_position_id(config: Any) -> int:
    """Return the model's position number of a sequence's first token: 0, or the padding id + 1 in RoBERTa's family."""
    return config.pad_token_id + 1 if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
