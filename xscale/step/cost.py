"""The costs of a run: the memory of a rank by ZeRO stage, the size of a checkpoint, and the FLOPs of a step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from xscale.models.encoder import Encoder
from xscale.models.flat import bert_states, forward_pass_of, modernbert_states
from xscale.ops.masked_ce import chunk_rows
from xscale.recipe import Recipe
from xscale.step.module import StepModule
from xscale.step.zero import offloads, stage_of

WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Precision -> the bytes of one number."""
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "V100": 125e12, "L40S": 362e12, "B200": 2250e12}
"""Part of a GPU's name -> its dense 16-bit matrix FLOP/s by its data sheet, for MFU (model FLOPs utilization)."""


READ_SHARE = 0.4
"""The share of a row's tokens whose states losses read, for the estimate of memory: 0.15 in `tlm`, 0.37 in `mixed`."""


def memory(
    module: StepModule,
    recipe: Recipe,
    ds_config: dict[str, Any],
    precision: str,
    world: int,
    device: str,
    row_tokens: int,
) -> dict[str, float]:
    """Return the bytes that one rank needs at the peak, the backward pass of a packed row: purpose -> bytes.

    Weights, gradients and optimizer states follow Rajbhandari et al. 2020. But until the one reduction of a step, each
    rank holds all of its gradients at stages 2 and 3, too; stages 1 and 2 reduce them in place, and need buckets only
    with an optimizer in host memory, or if gradients are summed in fp32 beside 16-bit weights. row_tokens: the tokens
    of one packed row.
    """
    zero = ds_config.get("zero_optimization", {})
    stage = stage_of(ds_config)
    n = parameter_count(module)
    width = WIDTH[precision]
    sums_in_fp32 = stage == 1 and width == 2 and ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
    parts = {"weights": width * n / (world if stage >= 3 else 1)}
    if not offloads(ds_config):
        master = 0 if precision == "fp32" and stage == 0 else 4
        parts["optimizer"] = (master + 8) * n / (world if stage >= 1 else 1)
        parts["gradients"] = width * n / (world if stage >= 3 else 1)
    if stage in (1, 2) and (offloads(ds_config) or sums_in_fp32):
        bucket = zero.get("reduce_bucket_size", 5e8)
        if device == "cpu":  # pages that are never touched take no memory
            bucket = min(bucket, n)
        parts["gradient buckets"] = width * bucket * (2 if zero.get("overlap_comm") else 1)
    if module.auxiliary_states:  # the momentum encoder has a second copy in the precision of the weights
        parts["momentum encoder, queue"] = module.auxiliary_bytes() * (1 if width == 4 else 1.5)
    parts["activations"] = activation_bytes(module.encoder, recipe, width, device, row_tokens)
    parts["vocabulary head"] = vocabulary_head_bytes(module.encoder, width, device)
    if stage >= 3 or (stage == 2 and offloads(ds_config)):  # until the one reduction of a step
        parts["gradients before they are reduced"] = width * n
    if recipe.train.measure_every and stage < 3:
        parts["gradient norm of a stream"] = (4 + 2 * width) * n
    return parts


def parameter_count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def checkpoint_bytes(module: StepModule, ds_config: dict[str, Any], precision: str) -> float:
    n = parameter_count(module)
    optimizer = 12 * n if stage_of(ds_config) else 8 * n  # at stage 0, there is no fp32 copy of the weights
    return WIDTH[precision] * n + optimizer + module.auxiliary_bytes()


def activation_bytes(encoder: Encoder, recipe: Recipe, width: int, device: str, tokens: int) -> float:
    """Return the bytes that a packed row's forward pass keeps for its backward pass, if all its sequences have
    data.max_length tokens.

    For each token, a layer keeps 9 H + 2 F numbers, where F is the width of the feed-forward layer (4 F if it has a
    gate), and two dropout masks of H elements (with a gate: H and F). That is about 34 H bytes at 16 bits (Korthikanti
    et al. 2022, without attention's probabilities). On a CPU, an element of a mask takes as much as a number, and
    attention keeps its probabilities twice. Behind its attention, the last layer keeps the tokens alone that losses
    read.
    """
    c = encoder.lm.config
    masks = 2 * c.hidden_size
    feed_forward = 2 * c.intermediate_size
    if c.model_type == "modernbert":  # its feed-forward layer has a gate
        masks = c.hidden_size + c.intermediate_size
        feed_forward = 4 * c.intermediate_size
    layer = width * (9 * c.hidden_size + feed_forward)
    if device == "cpu":
        layer += width * (masks + 2 * c.num_attention_heads * recipe.data.max_length)
    else:
        layer += masks
    if recipe.train.activation_checkpointing:
        return tokens * (c.num_hidden_layers * c.hidden_size * width + layer)
    skipped = 0.0
    if after_last_attention(encoder):
        behind_attention = width * (4 * c.hidden_size + feed_forward)
        skipped = behind_attention * (1 - READ_SHARE)
    return tokens * (c.num_hidden_layers * layer - skipped)


def vocabulary_head_bytes(encoder: Encoder, width: int, device: str) -> float:
    """Return the bytes of a chunk of logits, and of the head weight's gradient in fp32 and in `width` bytes."""
    c = encoder.lm.config
    return c.vocab_size * (chunk_rows(device, c.vocab_size, width) * width + c.hidden_size * (4 + width))


def peak_flops() -> float | None:
    """Return the peak FLOP/s of this process's GPU; None for a CPU or an unknown GPU."""
    if torch.cuda.is_available():
        for device, flops in PEAK_FLOPS.items():
            if device in torch.cuda.get_device_name():
                return flops
    return None


def after_last_attention(encoder: Encoder) -> list[nn.Linear]:
    """Return the linear layers behind the last layer's attention, if the encoder's forward pass skips tokens there."""
    base: Any = encoder.lm.base_model
    forward_pass = forward_pass_of(encoder.lm.config)
    if forward_pass is bert_states:
        last = base.encoder.layer[-1]
        return [last.attention.output.dense, last.intermediate.dense, last.output.dense]
    if forward_pass is modernbert_states:
        last = base.layers[-1]
        return [last.attn.Wo, last.mlp.Wi, last.mlp.Wo]
    return []


class StepFlops:
    """The model FLOPs of a step, by purpose. Recomputation and padding are not counted.

    encoder: 6 n for each token, where n is the number of weights in linear layers; what follows the last layer's
    attention counts for the tokens alone whose states are read. attention: 12 H for each layer and
    each pair of tokens in a sequence; local layers count the pairs within their window. head: 6 E (V + H) for each
    predicted token. auxiliary: a third of encoder and attention, for the tokens that auxiliary encoders read. The
    objectives' own heads are small and left out.
    """

    def __init__(self, encoder: Encoder):
        config = encoder.lm.config
        weights = 0
        for module in encoder.lm.base_model.modules():
            if isinstance(module, nn.Linear):
                weights += module.weight.numel()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        self.per_place = 0
        for linear in after_last_attention(encoder):
            self.per_place += 6 * linear.weight.numel()
        self.per_token = 6 * weights - self.per_place
        self.per_pair = 12 * config.hidden_size
        self.local = kinds.count("sliding_attention")
        self.whole = len(kinds) - self.local
        self.window = config.local_attention // 2 if self.local else 0
        self.per_prediction = 6 * (encoder.embeddings.numel() + encoder.head.dense.weight.numel())
        self.peak = peak_flops()

    def flops(self, cost: Mapping[str, int]) -> dict[str, float]:
        """Return the model FLOPs of a step by purpose. cost: the sum of Row.cost over all packed rows."""
        auxiliary = float(self.per_token * cost["auxiliary_tokens"] + self.per_place * cost["auxiliary_places"])
        auxiliary += self.attention(cost["auxiliary_tokens"], cost["auxiliary_squares"])
        return {
            "encoder": self.per_token * cost["tokens"] + self.per_place * cost["places"],
            "attention": self.attention(cost["tokens"], cost["squares"]),
            "head": self.per_prediction * cost["predictions"],
            "auxiliary": auxiliary / 3,
        }

    def attention(self, tokens: int, squares: int) -> float:
        """Return the FLOPs of attention. For layers with a sliding window, every sequence is assumed to have the
        token-weighted mean length, squares / tokens. squares: sum of squared sequence lengths."""
        length = squares / max(tokens, 1)
        window = self.window
        within = 2 * window + 1 - window * (window + 1) / max(length, 1)
        if length <= window + 1:
            within = length
        return self.per_pair * (self.whole * squares + self.local * tokens * within)

    def metrics(self, cost: Mapping[str, int], seconds: float, world: int) -> dict[str, float]:
        """Return the metrics mfu and mem_gb of a step, if there is a GPU. cost: the sum of Row.cost over all ranks."""
        if not torch.cuda.is_available():
            return {}
        metrics = {"mem_gb": torch.cuda.max_memory_allocated() / 1e9}
        if self.peak:
            metrics["mfu"] = sum(self.flops(cost).values()) / (max(seconds, 1e-9) * self.peak * world)
        return metrics
