"""What a step costs: memory by ZeRO stage, and model FLOPs."""

from typing import Any

import torch
from torch import nn

from xscale.config import Recipe
from xscale.data.row import Work
from xscale.models.encoder import Encoder
from xscale.ops.masked_ce import chunk_rows
from xscale.step.module import StepModule

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "V100": 125e12, "L40S": 362e12, "B200": 2250e12}
"""Dense 16-bit matrix FLOP/s of a device, from its data sheet; for MFU."""


def estimate(
    module: StepModule,
    recipe: Recipe,
    ds_config: dict[str, Any],
    precision: str,
    world: int,
    device: str,
    row_tokens: int,
) -> str:
    """Memory of one rank, in lines: what stays, and the greatest of a row's passes, the update and a measurement.

    Weights, gradients, optimizer after Rajbhandari et al. 2020. row_tokens: of a row, see data/mixture.py's `fit`.
    """
    zero = ds_config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    offload = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    n = sum(p.numel() for p in module.parameters())
    width = 4 if precision == "fp32" else 2
    owned = n / world if stage >= 1 else n
    gradients = n / world if stage >= 2 else n
    master = 0 if precision == "fp32" and stage == 0 else 4
    kept = {"weights": n * width / (world if stage >= 3 else 1)}
    if not offload:
        kept["optimizer"] = (master + 8) * owned
        kept["gradients"] = width * gradients
    if stage in (1, 2):
        bucket = zero.get("reduce_bucket_size", 5e8)
        if device == "cpu":  # pages never touched take no memory
            bucket = min(bucket, n)
        kept["gradient buckets"] = width * bucket * (2 if zero.get("overlap_comm") else 1)
    if module.companions:  # the momentum encoder has a copy in the weights' type
        kept["momentum encoder, queue"] = module.companion_bytes() * (1 if width == 4 else 1.5)
    backward = {
        "activations": activations(module.encoder, recipe, width, device, row_tokens),
        "vocabulary head": vocabulary_head(module.encoder, width, device),
    }
    if stage >= 2:  # until the one reduction of a step, each rank has all its gradients
        backward["gradients before they are reduced"] = width * n
    update = {"fp32 gradients": 0 if offload else 4 * owned + width * gradients}
    phases = {f"a row of {row_tokens:,} tokens": backward, "or update": update}
    if recipe.train.measure_every and stage < 3:
        phases["or gradient norms"] = backward | {"a stream's gradient": (4 + 2 * width) * n}
    most = max(phases.values(), key=lambda parts: sum(parts.values()))
    lines = [f"memory per rank, ZeRO stage {stage}: about {sum((kept | most).values()) / 1e9:.2f} GB"]
    for title, parts in ({"kept": kept} | phases).items():
        lines.append(f"  {title}: " + ", ".join(f"{name} {value / 1e6:,.0f} MB" for name, value in parts.items()))
    return "\n".join(lines)


def activations(encoder: Encoder, recipe: Recipe, width: int, device: str, tokens: int) -> float:
    """Bytes that the backward pass of a row reads, if all sequences are of data.max_length.

    Of a token and layer 9 H + 2 F numbers, F the feed-forward's width, 4 F where it has a gate; and dropout's masks, of
    H each, or F. That is some 34 H bytes at 16 bits (Korthikanti et al. 2022, without attention's probabilities). On a
    CPU masks are numbers, and attention keeps its probabilities twice.
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


def vocabulary_head(encoder: Encoder, width: int, device: str) -> float:
    """Bytes of one chunk's logits, and of the weight's gradient in fp32 and then in the weight's type."""
    c = encoder.lm.config
    return c.vocab_size * (chunk_rows(device, c.vocab_size, width) * width + c.hidden_size * (4 + width))


class StepFlops:
    """Model FLOPs of a step, by what they are spent on; recomputation and what fills rows up are not counted.

    encoder: 6 n for each token, n the weights of its products. attention: 12 H for each layer and pair of tokens of a
    sequence, in local layers of those within the window. head: 6 E (V + H) for each predicted token. beside: a third of
    the first two, of what companions read. Objectives' own heads, which are small, are left out.
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

    def flops(self, work: Work) -> dict[str, float]:
        attention = self.attention(work.tokens, work.squares)
        beside = self.per_token * work.beside_tokens + self.attention(work.beside_tokens, work.beside_squares)
        return {
            "encoder": self.per_token * work.tokens,
            "attention": attention,
            "head": self.per_prediction * work.predictions,
            "beside": beside / 3,
        }

    def attention(self, tokens: int, squares: int) -> float:
        """A local layer's as if all sequences were as long as a token's is on average."""
        w, length = self.window, squares / max(tokens, 1)
        within = length if length <= w + 1 else 2 * w + 1 - w * (w + 1) / length
        return self.per_pair * (self.whole * squares + self.local * tokens * within)

    def metrics(self, work: Work, seconds: float, world: int) -> dict[str, float]:
        """mfu and mem_gb of a step, on a GPU. work: of all ranks."""
        if not torch.cuda.is_available():
            return {}
        found = {"mem_gb": torch.cuda.max_memory_allocated() / 1e9}
        if self.peak:
            found["mfu"] = sum(self.flops(work).values()) / (max(seconds, 1e-9) * self.peak * world)
        return found
