"""Estimates against what torch really keeps."""

import re
from itertools import accumulate

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMaskedLM, BertConfig

from xscale import cost
from xscale.config import Recipe, load_recipe
from xscale.data.row import Tokens, Work
from xscale.models.encoder import Encoder
from xscale.objectives import OBJECTIVES
from xscale.ops.masked_ce import masked_cross_entropy
from xscale.step import StepModule


def recipe_of(*sets: str) -> Recipe:
    options = {name: objective.options for name, objective in OBJECTIVES.items()}
    return load_recipe("mlm", ["data.max_length=64", *sets], options)


def make(layers: int = 4, attention_dropout: float = 0.1, vocab_size: int = 500) -> Encoder:
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=256,
        attention_probs_dropout_prob=attention_dropout,
    )
    return Encoder(AutoModelForMaskedLM.from_config(config).train())


def row_of(sequences: int, length: int) -> Tokens:
    """A row of equal sequences."""
    ids = torch.randint(5, 500, (sequences * length,))
    starts = torch.arange(sequences + 1, dtype=torch.int32) * length
    return Tokens(ids, torch.arange(length).repeat(sequences), None, starts, starts.diff(), length)


def saved_bytes(encoder: Encoder, sequences: int, length: int) -> int:
    """Of all tensors that the forward pass keeps, without the weights."""
    kept = {}
    weights = {p.untyped_storage().data_ptr() for p in encoder.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = encoder(row_of(sequences, length))
    del hidden
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_activations(device: str, dtype: torch.dtype) -> None:
    """On a CPU attention keeps its probabilities, before and after dropout; CUDA's kernel none."""
    encoder = make().to(dtype)
    kept = saved_bytes(encoder, 8, 64)
    probabilities = 4 * 2 * 512 * 2 * 64 * dtype.itemsize  # layers, twice, tokens, heads, length
    estimate = cost.activations(encoder, recipe_of(), dtype.itemsize, device, 512)
    assert estimate == pytest.approx(kept - (probabilities if device == "cuda" else 0), rel=0.25)


def test_activations_of_checkpointed_layers() -> None:
    """The layers' inputs, and all of the one that is computed again."""
    recipe = recipe_of("train.activation_checkpointing=true")
    two, one = (saved_bytes(make(layers), 8, 64) for layers in (2, 1))
    encoder = make(layers=8)
    encoder.checkpoint_activations()
    inputs = saved_bytes(encoder, 8, 64)
    assert cost.activations(encoder, recipe, 4, "cpu", 512) == pytest.approx(inputs + two - one, rel=0.25)


def test_vocabulary_head() -> None:
    encoder = make()
    rows, weight = torch.randn(3000, 64, requires_grad=True), torch.randn(20_000, 64, requires_grad=True)
    labels = torch.randint(20_000, (3000,))
    with torch.profiler.profile(profile_memory=True) as profile:
        masked_cross_entropy(rows, weight, None, labels)[0].backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    encoder.lm.config.vocab_size = 20_000
    assert cost.vocabulary_head(encoder, 4, "cpu") == pytest.approx(peak, rel=0.2)


@pytest.mark.parametrize(
    ("zero", "precision", "kept"),
    [
        ({"stage": 0}, "fp32", {"weights": 4, "optimizer": 8, "gradients": 4}),
        ({"stage": 0}, "bf16", {"weights": 2, "optimizer": 12, "gradients": 2}),
        ({"stage": 1}, "fp16", {"weights": 2, "optimizer": 12 / 8, "gradients": 2}),
        ({"stage": 2}, "fp16", {"weights": 2, "optimizer": 12 / 8, "gradients": 2 / 8}),
        ({"stage": 3}, "fp16", {"weights": 2 / 8, "optimizer": 12 / 8, "gradients": 2 / 8}),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "fp16", {"weights": 2}),
    ],
)
def test_what_stays_is_that_of_the_zero_paper(zero: dict, precision: str, kept: dict[str, float]) -> None:
    """Bytes a parameter on each of 8 ranks (Rajbhandari et al. 2020, figure 1)."""
    module = StepModule(make(vocab_size=150_000), recipe_of())
    bucket = {"reduce_bucket_size": 10**6, "overlap_comm": True}
    lines = cost.estimate(
        module, recipe_of(), {"zero_optimization": zero | bucket}, precision, 8, "cuda", 512
    ).splitlines()
    n = sum(p.numel() for p in module.parameters()) / 1e6
    found = {name: int(value) for name, value in re.findall(r"(\w+) ([\d,]+) MB", lines[1].replace(",", ""))}
    expected = {name: round(factor * n) for name, factor in kept.items()}
    buckets = {"buckets": 2 * (4 if precision == "fp32" else 2)} if zero["stage"] in (1, 2) else {}
    assert found == expected | buckets


def test_flops_by_term() -> None:
    """6 n a token of the encoder against torch's own count; 12 H L a token and layer, 6 H (V + H) a prediction."""
    encoder = make(attention_dropout=0.0)
    work = Work(tokens=512, squares=8 * 64**2, predictions=30)
    with FlopCounterMode(display=False) as counter:
        hidden = encoder(row_of(8, 64))
        hidden.sum().backward()
    found = cost.StepFlops(encoder).flops(work)
    assert counter.get_total_flops() == found["encoder"], "attention is an operator that torch does not count"
    assert found["attention"] == 12 * 64 * 4 * 8 * 64**2 and found["head"] == 6 * 64 * 564 * 30
    beside = cost.StepFlops(encoder).flops(Work(beside_tokens=512, beside_squares=8 * 64**2))
    assert beside["beside"] == pytest.approx((found["encoder"] + found["attention"]) / 3)
