"""Estimates against what torch really keeps."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMaskedLM, BertConfig

from tests import launch
from tests.launch import open_run
from tests.rows import CPU, saved_bytes, shared_of
from xscale.data.mixture import initial_state
from xscale.data.packed_row import Row, Tokens
from xscale.models.build import preset_config
from xscale.models.encoder import Encoder
from xscale.objectives import OBJECTIVES
from xscale.ops.masked_ce import masked_cross_entropy
from xscale.ranks import Process
from xscale.recipe import Recipe, load_recipe
from xscale.step import cost
from xscale.step.module import StepModule
from xscale.step.step import compute_row_loss


def recipe_of(*sets: str) -> Recipe:
    return load_recipe("mlm", ["data.max_length=64", *sets], OBJECTIVES)


ROW = {"tokens": 512, "places": int(cost.READ_SHARE * 512), "predictions": 77, "squares": 8 * 64**2}
"""Row.cost of 8 sequences of 64 tokens."""


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


def saved_by_pass(encoder: Encoder) -> int:
    """Bytes that the encoder keeps of a row of 8 sequences of 64 tokens."""
    return saved_bytes(encoder, lambda: encoder(row_of(8, 64), torch.arange(ROW["places"])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_activations(device: str, dtype: torch.dtype) -> None:
    """On a CPU attention keeps its probabilities, before and after dropout; CUDA's kernel none."""
    encoder = make().to(dtype)
    kept = saved_by_pass(encoder)
    probabilities = 4 * 2 * 512 * 2 * 64 * dtype.itemsize  # layers, twice, tokens, heads, length
    estimate = cost.activation_bytes(encoder, dtype.itemsize, device, ROW)
    assert estimate == pytest.approx(kept - (probabilities if device == "cuda" else 0), rel=0.25)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activations_of_gated_layers(dropout: float) -> None:
    config = preset_config("modern-small", 500, 0, 64, dropout)
    config.num_hidden_layers, config.layer_types = 4, config.layer_types[:4]
    encoder = Encoder(AutoModelForMaskedLM.from_config(config).train())
    estimate = cost.activation_bytes(encoder, 4, "cpu", ROW)
    assert estimate == pytest.approx(saved_by_pass(encoder), rel=0.1 if dropout else 0.31)


def test_vocabulary_head() -> None:
    encoder = make()
    rows, weight = torch.randn(3000, 64, requires_grad=True), torch.randn(20_000, 64, requires_grad=True)
    labels = torch.randint(20_000, (3000,))
    with torch.profiler.profile(profile_memory=True) as profile:
        masked_cross_entropy(rows, weight, None, labels)[0].backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    encoder.lm.config.vocab_size = 20_000
    assert cost.vocabulary_head_bytes(encoder, 4, "cpu", 3000) == pytest.approx(peak, rel=0.2)


@pytest.mark.parametrize(
    ("zero", "precision", "kept"),
    [
        ({"stage": 0}, "fp32", {"weights": 4, "optimizer": 8, "gradients": 4}),
        ({"stage": 0}, "bf16", {"weights": 2, "optimizer": 12, "gradients": 2}),
        ({"stage": 1}, "fp16", {"weights": 2, "optimizer": 12 / 8, "gradients": 2}),
        ({"stage": 2}, "fp16", {"weights": 2, "optimizer": 12 / 8, "gradients": 2}),
        ({"stage": 3}, "fp16", {"weights": 2 / 8, "optimizer": 12 / 8, "gradients": 2 / 8}),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "fp16", {"weights": 2}),
    ],
)
def test_what_stays_is_that_of_the_zero_paper(zero: dict, precision: str, kept: dict[str, float]) -> None:
    """Bytes a parameter on each of 8 ranks (Rajbhandari et al. 2020, figure 1), but at stage 2 all gradients, which are
    reduced at the end of a step."""
    module = StepModule(make(vocab_size=150_000), recipe_of())
    recipe = recipe_of("train.measure_every=0")
    memory = cost.peak_bytes_by_purpose(module, recipe, {"zero_optimization": zero}, precision, 8, "cuda", ROW)
    n = cost.parameter_count(module)
    assert {name: memory[name] for name in kept} == pytest.approx({name: factor * n for name, factor in kept.items()})
    assert ("optimizer" in memory) == ("optimizer" in kept)


def test_the_moment_that_needs_most() -> None:
    """A stream's gradient is measured before the gradients of the step exist. At stage 3 these wait whole for their
    reduction."""
    module = StepModule(make(), recipe_of())
    n = cost.parameter_count(module)
    for stage in range(4):
        memory = cost.peak_bytes_by_purpose(
            module, recipe_of(), {"zero_optimization": {"stage": stage}}, "bf16", 8, "cuda", ROW
        )
        assert memory.get("gradient of one stream (train.measure_every)", 0) == (6 * n if stage < 3 else 0)
        assert memory.get("unreduced gradients", 0) == (2 * n if stage == 3 else 0)
        assert ("gradients" in memory) == (stage == 3)


SHAPES = {"mini": 30_000, "xlmr-base": 250_002, "modern-base": 256_000, "base": 120_000}
"""The vocabulary of a preset."""


@pytest.mark.parametrize(
    ("preset", "tokens"),
    [
        ("mini", [65536, 65536, 65536, 65536]),
        ("xlmr-base", [19456, 51200, 65536, 65536]),
        ("modern-base", [10240, 28672, 65536, 65536]),
        ("base", [26624, 59392, 65536, 65536]),
    ],
)
def test_the_default_row_of_a_gpu(preset: str, tokens: list[int]) -> None:
    """24, 40, 80 and 141 GiB: the tokens whose activations fit beside weights, optimizer and gradients of one rank."""
    with torch.device("meta"):
        config = preset_config(preset, SHAPES[preset], 1, 128, 0.1)
        module = StepModule(Encoder(AutoModelForMaskedLM.from_config(config)), recipe_of())
    ds_config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}}
    for gibibytes, expected in zip((24, 40, 80, 141), tokens, strict=True):
        assert cost.default_max_tokens(module, recipe_of(), ds_config, "bf16", 1, gibibytes * 2**30) == expected


@pytest.mark.parametrize(("recipe", "preset"), [("tlm", "tiny"), ("mixed", "tiny"), ("mixed", "mini")])
def test_peak_of_a_row(demo: Path, recipe: str, preset: str) -> None:
    """Activations, head and gradients: what a row allocates at most, on a CPU."""
    module, row = first_row(demo, recipe, f"model.preset={preset}", "model.dropout=0.1")
    on_device = row.to(CPU)
    (shared,) = shared_of(module, [on_device], [(0,)])
    weights = {key._replace(name="loss"): 1e-3 for key in row.counts}
    with torch.profiler.profile(profile_memory=True) as profile:
        compute_row_loss(module, on_device, shared, weights, (0,))[0].backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    expected = cost.activation_bytes(module.encoder, 4, "cpu", row.cost)
    expected += cost.vocabulary_head_bytes(module.encoder, 4, "cpu", row.cost["predictions"])
    expected += 4 * cost.parameter_count(module)
    assert expected == pytest.approx(peak, rel=0.2)


# FLOPs


IN_PLACE: dict[Any, Any] = {
    torch.ops.aten.addmm_: lambda out, a, b, **_: 2 * a[0] * a[1] * b[1],
    torch.ops.aten.baddbmm_: lambda out, a, b, **_: 2 * a[0] * a[1] * a[2] * b[2],
}
"""Products that torch does not count."""
ATTENTION = (torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.baddbmm_)


def counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=IN_PLACE)


def first_row(demo: Path, recipe: str, *sets: str) -> tuple[StepModule, Row]:
    loader = open_run(recipe, ["data.workers=0", *sets], [demo], measured=False)
    (batch,) = loader.batches(Process(0, 1, 0, 1), "cpu", initial_state(loader.last_streams), 1)
    return StepModule(launch.encoder(loader), loader.recipe), batch.rows[0]


@pytest.mark.parametrize("preset", ["tiny", "mini"])
def test_flops_by_term(preset: str) -> None:
    """Against torch's own count of each part, forward and backward: exact where sequences are equally long."""
    encoder = Encoder(AutoModelForMaskedLM.from_config(preset_config(preset, 900, 0, 64, 0.0)).train())
    row_cost = {"tokens": 512, "places": 75, "squares": 8 * 64**2, "predictions": 30}
    row_cost |= {"auxiliary_tokens": 128, "auxiliary_places": 128, "auxiliary_squares": 2 * 64**2}
    found = cost.StepFlops(encoder).flops_by_purpose(row_cost, 1)
    with counter() as counted:
        encoder(row_of(8, 64), torch.arange(75)).sum().backward()
    in_attention = sum(counted.get_flop_counts()["Global"].get(operator, 0) for operator in ATTENTION)
    assert in_attention == found["attention"]
    assert counted.get_total_flops() - in_attention == found["encoder"]
    states = torch.randn(30, encoder.width, requires_grad=True)
    with counter() as counted:
        encoder.vocabulary_loss(encoder.features(states), torch.arange(30))[0].backward()
    assert counted.get_total_flops() == found["head"]
    with counter() as counted, torch.no_grad():
        encoder(row_of(2, 64))
    assert counted.get_total_flops() == pytest.approx(found["auxiliary"])


def test_flops_of_local_attention() -> None:
    """A token of a local layer meets those within the window; sequences up to it are read whole."""
    config = preset_config("modern-small", 900, 0, 512, 0.0)
    config.num_hidden_layers, config.layer_types = 3, ["full_attention", "sliding_attention", "sliding_attention"]
    flops = cost.StepFlops(Encoder(AutoModelForMaskedLM.from_config(config)))
    for length in (1, 30, 64, 65, 66, 128, 300):
        near = sum(abs(i - j) <= 64 for i in range(length) for j in range(length))
        assert flops.attention_flops(4 * length, 4 * length**2) == pytest.approx(12 * 384 * 4 * (length**2 + 2 * near))
    assert flops.attention_flops(0, 0) == 0
    mixed = flops.attention_flops(30 + 300, 30**2 + 300**2) / (
        flops.attention_flops(30, 30**2) + flops.attention_flops(300, 300**2)
    )
    assert 1 <= mixed < 1.1, "of sequences of different length a little too many"


@pytest.mark.parametrize(
    ("recipe", "row_count"),
    [("mlm", 1), ("ppa", 1), ("contextual", 1), ("mixed", 1), ("word_contrast", 1), ("mixed", 2)],
)
def test_flops_of_whole_rows(demo: Path, recipe: str, row_count: int) -> None:
    """Forward and backward, auxiliary states included, within 5 %: what is left out are AlignLM's and PPA's own small
    heads, and the padding of attention's blocks."""
    module, row = first_row(demo, recipe)
    weights = {key._replace(name="loss"): 1e-3 for key in row.counts}
    rows = [row.to(CPU)] * row_count
    seeds = [(number,) for number in range(row_count)]
    with counter() as counted:
        for row_of_step, shared, seed in zip(rows, shared_of(module, rows, seeds), seeds, strict=True):
            compute_row_loss(module, row_of_step, shared, weights, seed)[0].backward()
    row_costs = {name: row_count * number for name, number in row.cost.items()}
    found = cost.StepFlops(module.encoder, bool(module.streams_with_vectors())).flops_by_purpose(row_costs, row_count)
    assert set(found) == {"encoder", "attention", "head", "auxiliary", "vectors"}
    assert (found["vectors"] > 0) == (recipe in ("mixed", "word_contrast") and row_count > 1)
    assert sum(found.values()) == pytest.approx(counted.get_total_flops(), rel=0.05)
    assert sum(found.values()) <= counted.get_total_flops() * 1.001
