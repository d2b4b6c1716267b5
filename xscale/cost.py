"""What a step costs: memory by ZeRO stage, and model FLOPs."""

from typing import Any

import torch

from xscale.config import Recipe
from xscale.models.encoder import Encoder

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "V100": 125e12, "L40S": 362e12, "B200": 2250e12}
"""Dense 16-bit matrix FLOP/s of a device, from its data sheet; for MFU."""


def estimate(encoder: Encoder, recipe: Recipe, ds_config: dict[str, Any], precision: str, world: int) -> str:
    """Memory of one rank in lines: weights, gradients, optimizer (Rajbhandari et al. 2020), activations (rough)."""
    n = sum(p.numel() for p in encoder.parameters())
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    width = 4 if precision == "fp32" else 2
    weights = n * width / (world if stage >= 3 else 1)
    gradients = n * width / (world if stage >= 2 else 1)
    optimizer = n * (8 if precision == "fp32" else 12) / (world if stage >= 1 else 1)
    c = encoder.lm.config
    tokens = recipe.train.micro_batch * recipe.data.max_length
    # Per token and layer about 34 H + 5 A L bytes at 16 bits (Korthikanti et al. 2022), and the heads' masked rows.
    attention = 5 * c.num_attention_heads * recipe.data.max_length
    activations = tokens * c.num_hidden_layers * (34 * c.hidden_size + attention) * width / 2
    logits = 0.3 * tokens * c.vocab_size * 8
    parts = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations (at most)": activations,
        "logits (at most)": logits,
    }
    total = sum(parts.values())
    lines = [f"memory per rank, ZeRO stage {stage}: about {total / 1e9:.2f} GB"]
    return "\n".join(lines + [f"  {name}: {value / 1e9:.2f} GB" for name, value in parts.items()])


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
