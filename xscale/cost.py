"""What a step costs: memory by ZeRO stage, and model FLOPs."""

from typing import Any

import torch

from xscale.config import Recipe
from xscale.engine import StepModule
from xscale.models.encoder import Encoder
from xscale.ops.masked_ce import CHUNK

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "V100": 125e12, "L40S": 362e12, "B200": 2250e12}
"""Dense 16-bit matrix FLOP/s of a device, from its data sheet; for MFU."""


def estimate(
    module: StepModule, recipe: Recipe, ds_config: dict[str, Any], precision: str, world: int, device: str
) -> str:
    """Memory of one rank, in lines: what stays, and the greater of a backward pass and the update.

    Weights, gradients, optimizer after Rajbhandari et al. 2020; an upper bound of the rest, as no sequence may be full.
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
        "activations": activations(module.encoder, recipe, width, device),
        "vocabulary head": vocabulary_head(module.encoder, width),
    }
    update = {"fp32 gradients": 0 if offload else 4 * owned + width * gradients}
    most = max(backward, update, key=lambda parts: sum(parts.values()))
    sequences = f"{recipe.train.micro_batch} sequences of {recipe.data.max_length} tokens"
    lines = [f"memory per rank, ZeRO stage {stage}: about {sum((kept | most).values()) / 1e9:.2f} GB"]
    for title, parts in (("kept", kept), (f"backward pass of {sequences}", backward), ("or update", update)):
        lines.append(f"  {title}: " + ", ".join(f"{name} {value / 1e6:,.0f} MB" for name, value in parts.items()))
    return "\n".join(lines)


def activations(encoder: Encoder, recipe: Recipe, width: int, device: str) -> float:
    """Bytes that the backward pass of a full micro-batch reads: some 34 H a token and layer at 16 bits (Korthikanti et
    al. 2022, without attention's probabilities), and 14 A L more on a CPU, whose attention keeps these in fp32."""
    c = encoder.lm.config
    tokens = recipe.train.micro_batch * recipe.data.max_length
    probabilities = 14 * c.num_attention_heads * recipe.data.max_length if device == "cpu" else 0
    layer = 17 * c.hidden_size * width + probabilities
    if recipe.train.activation_checkpointing:
        return tokens * (c.num_hidden_layers * c.hidden_size * width + layer)
    return tokens * c.num_hidden_layers * layer


def vocabulary_head(encoder: Encoder, width: int) -> float:
    """Bytes of one chunk's logits, and of the weight's gradient in fp32 and then in the weight's type."""
    c = encoder.lm.config
    return c.vocab_size * (CHUNK * width + c.hidden_size * (4 + width))


class StepFlops:
    """Model FLOPs of a step: 6 N t for the encoder's N matrix weights and t tokens, 6 H V for each predicted row.

    Attention's own products (12 H L a token and layer) use the mean length. Recomputation is not counted.
    """

    def __init__(self, encoder: Encoder):
        c = encoder.lm.config
        embeddings = c.vocab_size * c.hidden_size
        matrices = sum(p.numel() for p in encoder.parameters() if p.ndim == 2)
        self.per_token = 6 * max(matrices - embeddings, 0)
        self.per_attention = 12 * c.hidden_size * c.num_hidden_layers
        self.per_row = 6 * embeddings
        self.peak = None
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name()
            self.peak = next((flops for device, flops in PEAK_FLOPS.items() if device in name), None)

    def flops(self, tokens: int, sequences: int, rows: int) -> float:
        return self.per_token * tokens + self.per_attention * tokens * tokens / max(sequences, 1) + self.per_row * rows

    def metrics(self, entry: dict[str, Any], world: int) -> dict[str, float]:
        """mfu and mem_gb of a metrics entry, on a GPU."""
        if not torch.cuda.is_available():
            return {}
        found = {"mem_gb": torch.cuda.max_memory_allocated() / 1e9}
        if self.peak:
            rows = sum(value for name, value in entry.items() if name.startswith("count/"))
            flops = self.flops(entry["tokens"], entry["samples"], rows)
            found["mfu"] = flops / (max(entry["step_s"], 1e-9) * self.peak * world)
        return found
