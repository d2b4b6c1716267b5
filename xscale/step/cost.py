"""The costs of a run: memory and communication by ZeRO stage, the size of a checkpoint, and the FLOPs of a step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from xscale.models.encoder import Encoder
from xscale.ops.masked_ce import chunk_rows
from xscale.recipe import Recipe
from xscale.step.module import StepModule
from xscale.step.zero import offloads, stage_of

WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Precision -> the bytes of one number."""
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "V100": 125e12, "L40S": 362e12, "B200": 2250e12}
"""Part of a GPU's name -> its dense 16-bit matrix FLOP/s by its data sheet, for MFU (model FLOPs utilization)."""


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

    Weights, gradients and optimizer states follow Rajbhandari et al. 2020. row_tokens: the tokens of one packed row.
    """
    zero = ds_config.get("zero_optimization", {})
    stage = stage_of(ds_config)
    n = parameter_count(module)
    width = WIDTH[precision]
    parts = {"weights": width * n / (world if stage >= 3 else 1)}
    if not offloads(ds_config):
        master = 0 if precision == "fp32" and stage == 0 else 4
        parts["optimizer"] = (master + 8) * n / (world if stage >= 1 else 1)
        parts["gradients"] = width * n / (world if stage >= 2 else 1)
    if stage in (1, 2):
        bucket = zero.get("reduce_bucket_size", 5e8)
        if device == "cpu":  # pages that are never touched take no memory
            bucket = min(bucket, n)
        parts["gradient buckets"] = width * bucket * (2 if zero.get("overlap_comm") else 1)
    if module.auxiliary_states:  # the momentum encoder has a second copy in the precision of the weights
        parts["momentum encoder, queue"] = module.auxiliary_bytes() * (1 if width == 4 else 1.5)
    parts["activations"] = activation_bytes(module.encoder, recipe, width, device, row_tokens)
    parts["vocabulary head"] = vocabulary_head_bytes(module.encoder, width, device)
    if stage >= 2:  # until the one reduction of a step, each rank holds all of its gradients
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


def communication(
    module: StepModule, recipe: Recipe, samples: Mapping[str, int], ds_config: dict[str, Any], precision: str, rows: int
) -> dict[str, tuple[str, float]]:
    """Return the large collectives of a step: purpose -> (operation, bytes of the whole tensors).

    Each gradient is reduced once a step, however many rows it has (step/zero.py). Stages 1 and 2 reduce whole buckets
    by all-reduce, then gather the weights that each rank has updated. Stage 3 gathers large weights once for each
    packed row, since the forward and the backward pass share them up to stage3_max_live_parameters (10^9), and small
    weights once a step. samples: the samples of each stream in a step.
    """
    n, stage, width = parameter_count(module), stage_of(ds_config), WIDTH[precision]
    reduced = WIDTH.get(ds_config.get("communication_data_type") or precision, width)
    found = {"gradients": ("reduce_scatter" if stage >= 3 else "all_reduce", float(n * reduced))}
    if stage in (1, 2):
        found["weights"] = ("all_gather", float(n * width))
    if stage >= 3:
        least = ds_config.get("zero_optimization", {}).get("stage3_param_persistence_threshold", 1e5)
        small = sum(p.numel() for p in module.parameters() if p.numel() <= least)
        found["weights"] = ("all_gather", float(width * (small + (n - small) * rows)))
    vectors = sum(
        samples[name] * (4 * stream.options.projection + 24)
        for name, stream in recipe.streams.items()
        if name in module.auxiliary_states and hasattr(stream.options, "projection")
    )
    if vectors:
        found["keys"] = ("all_gather", float(vectors))
    if recipe.train.measure_every and stage < 3:
        found["gradient norms"] = ("all_reduce", 4.0 * n * len(recipe.streams) / recipe.train.measure_every)
    return found


def bytes_sent(collective: str, size: float, world: int) -> float:
    """Return the bytes that a rank sends in a ring algorithm, whose all-reduce is a reduce-scatter and an
    all-gather."""
    return (2 if collective == "all_reduce" else 1) * size * (world - 1) / world


def activation_bytes(encoder: Encoder, recipe: Recipe, width: int, device: str, tokens: int) -> float:
    """Return the bytes that a packed row's forward pass keeps for its backward pass, if all its sequences have
    data.max_length tokens.

    For each token, a layer keeps 9 H + 2 F numbers, where F is the width of the feed-forward layer (4 F if it has a
    gate), and two dropout masks of H elements (with a gate: H and F). That is about 34 H bytes at 16 bits (Korthikanti
    et al. 2022, without attention's probabilities). On a CPU, an element of a mask takes as much as a number, and
    attention keeps its probabilities twice.
    """
    c = encoder.lm.config
    gated = c.model_type == "modernbert"
    masks = c.hidden_size + (c.intermediate_size if gated else c.hidden_size)
    layer = width * (9 * c.hidden_size + (4 if gated else 2) * c.intermediate_size)
    if device == "cpu":
        layer += width * (masks + 2 * c.num_attention_heads * recipe.data.max_length)
    else:
        layer += masks
    if recipe.train.activation_checkpointing:
        return tokens * (c.num_hidden_layers * c.hidden_size * width + layer)
    return tokens * c.num_hidden_layers * layer


def vocabulary_head_bytes(encoder: Encoder, width: int, device: str) -> float:
    """Return the bytes of a chunk of logits, and of the head weight's gradient in fp32 and in `width` bytes."""
    c = encoder.lm.config
    return c.vocab_size * (chunk_rows(device, c.vocab_size, width) * width + c.hidden_size * (4 + width))


class StepFlops:
    """The model FLOPs of a step, by purpose. Recomputation and padding are not counted.

    encoder: 6 n for each token, where n is the number of weights in linear layers. attention: 12 H for each layer and
    each pair of tokens in a sequence; local layers count the pairs within their window. head: 6 E (V + H) for each
    predicted token. auxiliary: a third of encoder and attention, for the tokens that auxiliary encoders read. The
    objectives' own heads are small and left out.
    """

    def __init__(self, encoder: Encoder):
        c = encoder.lm.config
        linear = [module for module in encoder.lm.base_model.modules() if isinstance(module, nn.Linear)]
        kinds = getattr(c, "layer_types", None) or ["full_attention"] * c.num_hidden_layers
        self.per_token = 6 * sum(module.weight.numel() for module in linear)
        self.per_pair = 12 * c.hidden_size
        self.local = kinds.count("sliding_attention")
        self.whole = len(kinds) - self.local
        self.window = c.local_attention // 2 if self.local else 0
        self.per_prediction = 6 * (encoder.embeddings.numel() + encoder.head.dense.weight.numel())
        self.peak = None
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name()
            self.peak = next((flops for device, flops in PEAK_FLOPS.items() if device in name), None)

    def flops(self, cost: Mapping[str, int]) -> dict[str, float]:
        """Return the model FLOPs of a step by purpose. cost: the sum of Row.cost over all packed rows."""
        auxiliary = float(self.per_token * cost["auxiliary_tokens"])
        auxiliary += self.attention(cost["auxiliary_tokens"], cost["auxiliary_squares"])
        return {
            "encoder": self.per_token * cost["tokens"],
            "attention": self.attention(cost["tokens"], cost["squares"]),
            "head": self.per_prediction * cost["predictions"],
            "auxiliary": auxiliary / 3,
        }

    def attention(self, tokens: int, squares: int) -> float:
        """Return the FLOPs of attention. For layers with a sliding window, every sequence is assumed to have the
        token-weighted mean length, squares / tokens. squares: sum of squared sequence lengths."""
        w, length = self.window, squares / max(tokens, 1)
        within = length if length <= w + 1 else 2 * w + 1 - w * (w + 1) / length
        return self.per_pair * (self.whole * squares + self.local * tokens * within)

    def metrics(self, cost: Mapping[str, int], seconds: float, world: int) -> dict[str, float]:
        """Return the metrics mfu and mem_gb of a step, if there is a GPU. cost: the sum of Row.cost over all ranks."""
        if not torch.cuda.is_available():
            return {}
        found = {"mem_gb": torch.cuda.max_memory_allocated() / 1e9}
        if self.peak:
            found["mfu"] = sum(self.flops(cost).values()) / (max(seconds, 1e-9) * self.peak * world)
        return found
