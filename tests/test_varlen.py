"""No padding: the encoder on one flat row of tokens against the padded one, and against one sequence at a time."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForMaskedLM, BertConfig, CamembertConfig, XLMRobertaConfig

from tests import launch
from tests.test_encoder import CONFIGS, SHAPE
from xscale import checkpoint
from xscale.data.collate import Context, MicroBatch, real_places
from xscale.data.mixture import initial_state
from xscale.distributed import Place
from xscale.engine import StepModule, copy_at_once, to_device
from xscale.job import Job
from xscale.models import varlen
from xscale.models.encoder import Encoder
from xscale.objectives import OBJECTIVES

CPU = torch.device("cpu")
CAMEMBERT = CamembertConfig(**SHAPE, pad_token_id=1, max_position_embeddings=64)
FLAT = {kind: CONFIGS[kind] for kind in ("bert", "roberta", "xlm-roberta")} | {"camembert": CAMEMBERT}
LENGTHS = [9, 2, 13, 4, 13, 8]
DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}


def tensors(arrays: dict[str, np.ndarray], flat: bool) -> dict[str, Tensor]:
    """What to_device gives; flat: on CUDA."""
    return to_device(arrays | real_places(arrays) if flat else arrays, CPU)


def make(config: Any, dtype: torch.dtype = torch.float64) -> Encoder:
    """No weight stays at a special value; in the states of two tokens no number is the same."""
    torch.manual_seed(0)
    encoder = Encoder(AutoModelForMaskedLM.from_config(copy.deepcopy(config))).to(dtype).eval()
    with torch.no_grad():
        for p in encoder.parameters():
            p += 0.1 * torch.randn_like(p)
    return encoder


def ragged(lengths: list[int], pad_id: int, own_positions: bool) -> dict[str, np.ndarray]:
    r = np.random.default_rng(sum(lengths))
    real = np.arange(max(lengths)) < np.array(lengths)[:, None]
    arrays = {"input_ids": np.where(real, r.integers(5, 97, real.shape), pad_id), "attention_mask": real.astype(int)}
    if own_positions:
        arrays["position_ids"] = np.where(real, np.arange(max(lengths)) % 5, 0)
        arrays["token_type_ids"] = np.where(real, r.integers(0, 2, real.shape), 0)
    return arrays


@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, [2], [5, 5]], ids=str)
@pytest.mark.parametrize("kind", FLAT)
def test_states_are_those_of_each_sequence_alone(kind: str, lengths: list[int], own_positions: bool) -> None:
    """To 1e-10 in fp64, without a mask, and positions as the model's paper counts them; padding's states are 0."""
    config = copy.deepcopy(FLAT[kind])
    config.type_vocab_size = 2
    encoder = make(config)
    arrays = ragged(lengths, config.pad_token_id, own_positions)
    hidden_BLH = encoder.hidden(tensors(arrays, flat=True))
    assert hidden_BLH.shape == (len(lengths), max(lengths), 32)
    prefixed = {f"key_{name}": t for name, t in tensors(arrays, flat=True).items()}
    assert torch.equal(encoder.hidden(prefixed, "key_"), hidden_BLH)
    first = 0 if kind == "bert" else config.pad_token_id + 1
    for row, n in enumerate(lengths):
        alone = {name: torch.from_numpy(array[row : row + 1, :n]) for name, array in arrays.items()}
        del alone["attention_mask"]
        alone["position_ids"] = first + alone.get("position_ids", torch.arange(n)[None])
        expected = encoder.lm.base_model(**alone).last_hidden_state[0]
        torch.testing.assert_close(hidden_BLH[row, :n], expected, rtol=0, atol=1e-10)
        assert not hidden_BLH[row, n:].any()


@pytest.mark.parametrize("kind", ["distilbert", "modernbert"])
def test_other_models_are_padded(kind: str) -> None:
    encoder = make(CONFIGS[kind])
    arrays = ragged(LENGTHS, CONFIGS[kind].pad_token_id, own_positions=False)
    assert torch.equal(encoder.hidden(tensors(arrays, flat=True)), encoder.hidden(tensors(arrays, flat=False)))


# All objectives

RECIPE = """
model: {dropout: 0.0}
streams:
  mlm: {objective: mlm, samples: 3, whole_word: true}
  tlm: {objective: tlm, samples: 9, reset_positions: true, language_embeddings: true}
  dict_mlm: {objective: dict_mlm, samples: 3}
  align_mlm: {objective: align_mlm, samples: 2, pairs_per_step: 50}
  alignlm: {objective: alignlm, samples: 7, normalize: mean}
  contextual: {objective: contextual, samples: 5}
  ppa: {objective: ppa, samples: 7, queue_size: 11}
train: {micro_batch: 4}
data: {workers: 0}
"""
READS = {"ppa": ["", "query_", "key_"], "contextual": ["", "anchor_"]}
"""Prefixes of what an objective's encoders read, where that is not [""]."""


@pytest.fixture(scope="module")
def job(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    recipe = tmp_path_factory.mktemp("varlen") / "recipe.yaml"
    recipe.write_text(RECIPE)
    return launch.job_of(["--ds_config", "-", "--recipe", str(recipe), "--data", str(demo)])


@pytest.fixture(scope="module")
def micros(job: Job) -> list[MicroBatch]:
    """Those of two optimizer steps, and one without samples of each stream."""
    place = Place(0, 1, 0, 1)
    steps = [batch.micros for batch in job.batches(place, initial_state(job.specs), 2)]
    context = Context(job.text, 128, "drop", {name: n for n, name in enumerate(job.languages)}, 0, job.lexicons)
    idle = [
        replace(OBJECTIVES[s.objective].collate([], s.options, replace(context, stream=name)), stream=name)
        for name, s in job.recipe.streams.items()
    ]
    return [*steps[0], *idle, *steps[1]]


def small(kind: str, job: Job, dropout: float = 0.0) -> Any:
    fields = SHAPE | {"vocab_size": job.text.vocab_size, "pad_token_id": job.text.pad_id, "type_vocab_size": 2}
    fields |= dict.fromkeys(DROPOUT, dropout)
    return BertConfig(**fields) if kind == "bert" else XLMRobertaConfig(**fields)


def step_module(job: Job, config: Any, dtype: torch.dtype = torch.float64, **train: bool) -> StepModule:
    recipe = replace(job.recipe, train=replace(job.recipe.train, **train))
    module = StepModule(make(config, dtype), recipe).to(dtype)
    ppa: Any = module.companions["ppa"]
    ppa.momentum.masters.to(dtype)
    ppa.queue.push(torch.nn.functional.normalize(torch.randn(8, ppa.queue.ring_KD.shape[1]), dim=-1), 0)
    return module


def steps(module: StepModule, micros: list[MicroBatch], flat: bool) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of each micro-batch, where micro-batches in between change the companions."""
    for number, micro in enumerate(micros):
        torch.manual_seed(number)
        sums = module(micro.stream, tensors(micro.arrays, flat))
        loss = sum(sums.terms.values(), torch.zeros(()))
        module.zero_grad()
        loss.backward()
        yield loss, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        if number + 1 == len(micros) // 2 or number + 1 == len(micros):
            for companion in module.companions.values():
                companion.update(applied=True)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "train"),
    [(torch.float64, 1e-10, True), (torch.float64, 1e-10, False), (torch.float32, 1e-5, True)],
)
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_losses_and_gradients_are_those_of_the_padded_path(
    job: Job, micros: list[MicroBatch], kind: str, dtype: torch.dtype, tolerance: float, train: bool
) -> None:
    """All objectives, idle micro-batches, momentum and frozen encoders. Tolerances are relative to the largest."""
    modules = [step_module(job, small(kind, job), dtype).train(train) for _ in range(2)]
    padded, flat = (steps(module, micros, flat) for module, flat in zip(modules, (False, True), strict=True))
    for micro, (loss, gradients), (other, others) in zip(micros, padded, flat, strict=True):
        torch.testing.assert_close(other, loss, rtol=tolerance, atol=tolerance)
        assert gradients.keys() == others.keys()
        scale = max(float(g.abs().max()) for g in gradients.values())
        for name, g in gradients.items():
            difference = (others[name] - g).abs().max().item()
            assert difference <= tolerance * max(scale, 1e-3), (micro.stream, name, difference, scale)
    ours, theirs = (module.companions["ppa"].state_dict() for module in modules)
    assert ours["step"] == 2 and ours["queue"]["filled"] == (11 if train else 8)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=max(tolerance, 1e-6))


def test_every_encoder_of_an_objective_runs_flat(
    job: Job, micros: list[MicroBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The momentum encoder and the frozen one too: as many tokens as their inputs have ones."""
    seen: list[int] = []
    original = varlen.last_hidden_state

    def watched(model: Any, inputs: dict[str, Tensor], places_N: Tensor, first_position: int) -> Tensor:
        seen.append(len(places_N))
        return original(model, inputs, places_N, first_position)

    monkeypatch.setattr(varlen, "last_hidden_state", watched)
    module = step_module(job, small("bert", job))
    for micro in micros:
        seen.clear()
        module(micro.stream, tensors(micro.arrays, flat=True))
        prefixes = READS.get(micro.stream, [""])
        assert sorted(seen) == sorted(int(micro.arrays[f"{p}attention_mask"].sum()) for p in prefixes), micro.stream


# What the device is asked to do


class Watch(TorchDispatchMode):
    """Every operation, forward and backward."""

    def seen(self, func: Any, args: tuple, out: Any) -> None:
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen(func, args, out)
        return out


class Waits(Watch):
    """Operations whose result's size or value the host needs: it would wait for the device."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def seen(self, func: Any, args: tuple, out: Any) -> None:
        name = func.overloadpacket.__name__
        if name.startswith(self.NAMES):
            self.found.add(name)
        if name.startswith(("index", "_unsafe_index")) and len(args) > 1 and isinstance(args[1], list | tuple):
            self.found |= {f"{name} by a mask" for index in args[1] if index is not None and index.dtype == torch.bool}


def test_the_host_does_not_wait_for_the_device(job: Job, micros: list[MicroBatch]) -> None:
    """Forward, backward and the companions' update of every objective, on the flat path."""
    module = step_module(job, small("bert", job, dropout=0.1), torch.float32)
    for micro in micros:
        batch = tensors(micro.arrays, flat=True)
        with Waits() as waits:
            sum(module(micro.stream, batch).terms.values()).backward()  # type: ignore[union-attr]
        assert not waits.found, micro.stream
    with Waits() as waits:
        for companion in module.companions.values():
            companion.update(applied=True)
    assert not waits.found
    for wait in (lambda x: x.item(), lambda x: x[x > 0], lambda x: bool(x.any()), lambda x: x + torch.tensor(1.0)):
        with Waits() as waits:
            wait(torch.ones(3)[1:2])
        assert waits.found, "the watch sees nothing"


class Squares(Watch):
    """Tensors whose last two sizes are equal to `size`."""

    def __init__(self, *sizes: int):
        super().__init__()
        self.squares, self.found = [(size, size) for size in sizes], 0

    def seen(self, func: Any, args: tuple, out: Any) -> None:
        self.found += sum(tuple(t.shape[-2:]) in self.squares for t in _flatten(out))


def _flatten(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, list | tuple) else [out]) if isinstance(t, Tensor)]


@pytest.mark.parametrize("kind", FLAT)
def test_no_mask_between_all_tokens_is_made(kind: str) -> None:
    """Neither [N, N] nor [B, 1, L, L]."""
    encoder = make(FLAT[kind], torch.float32)
    arrays = ragged(LENGTHS, FLAT[kind].pad_token_id, own_positions=False)
    for flat in (True, False):
        with Squares(max(LENGTHS), sum(LENGTHS)) as squares:
            encoder.hidden(tensors(arrays, flat))
        assert bool(squares.found) != flat


# The kernel


def weights_of(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return torch.softmax(scale * torch.einsum("mad,nad->amn", q, k), -1)


def kept(weights: Tensor, p: float, seed: Tensor) -> Tensor:
    """1 / (1 - p) where dropout keeps a weight, else 0."""
    drawn = torch.rand(weights.shape, generator=torch.Generator().manual_seed(int(seed)), dtype=weights.dtype)
    return (drawn >= p) / (1 - p)


def flash_forward(q: Any, k: Any, v: Any, starts: Any, starts_k: Any, *args: Any, scale: float, **more: Any) -> Any:
    """aten._flash_attention_forward, one sequence after the other [N, A, D]."""
    longest, longest_k, p, causal, debug = args[:5] if len(args) == 5 else (*args, more["return_debug_mask"])
    assert torch.equal(starts, starts_k) and starts.dtype == torch.int32 and not causal and not debug
    assert longest == longest_k == max(starts.diff()) and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    seed = torch.randint(2**31, ())
    out = torch.empty_like(q)
    for n, (a, b) in enumerate(pairwise(starts.tolist())):
        P = weights_of(q[a:b], k[a:b], scale)
        out[a:b] = torch.einsum("amn,nad->mad", P * kept(P, p, seed + n), v[a:b])
    return out, torch.zeros(q.shape[1::-1]), torch.stack([seed, seed]).to(torch.uint64), torch.zeros(()), torch.zeros(0)


def flash_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, starts: Any, *args: Any, **more: Any) -> Any:
    """aten._flash_attention_backward."""
    _, _, _, p, _, rng_state, _ = args
    seed, scale = rng_state[0].long(), more["scale"]
    gradients = tuple(torch.empty_like(x) for x in (q, k, v))
    for n, (a, b) in enumerate(pairwise(starts.tolist())):
        P = weights_of(q[a:b], k[a:b], scale)
        keep = kept(P, p, seed + n)
        dP = torch.einsum("mad,nad->amn", grad[a:b], v[a:b]) * keep
        dS = P * (dP - (dP * P).sum(-1, keepdim=True))
        gradients[0][a:b] = scale * torch.einsum("amn,nad->mad", dS, k[a:b])
        gradients[1][a:b] = scale * torch.einsum("amn,mad->nad", dS, q[a:b])
        gradients[2][a:b] = torch.einsum("amn,mad->nad", P * keep, grad[a:b])
    return gradients


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The CUDA kernel in plain torch on the CPU, below torch's own wiring of it; how often what of it was called."""
    calls = {"forward": 0, "varlen_attn": 0}

    def count(name: str, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return counted

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", count("forward", flash_forward), "CPU")
        library.impl("_flash_attention_backward", flash_backward, "CPU")
        monkeypatch.setattr(varlen, "runs_flash", lambda model: True)
        monkeypatch.setattr(varlen, "varlen_attn", count("varlen_attn", varlen.varlen_attn))
        yield calls


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_kernel_is_told_all(dropout: float, kernel: dict[str, int]) -> None:
    q, k, v = torch.randn(3, sum(LENGTHS), 2, 16).double()
    starts = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    found = []
    for attend in (
        lambda: varlen.flash(q, k, v, varlen.Row(torch.empty(0), starts, len(LENGTHS), 13, True), 0.7, dropout),
        lambda: flash_forward(q, k, v, starts, starts, 13, 13, dropout, False, False, scale=0.7)[0],
    ):
        torch.manual_seed(1)
        found.append(attend())
    assert torch.equal(*found)


def with_attention_dropout(kind: str, p: float) -> Any:
    config = copy.deepcopy(FLAT[kind])
    config.attention_probs_dropout_prob, config.hidden_dropout_prob = p, 0.0
    return config


def loss_and_gradients(encoder: Encoder, arrays: dict[str, np.ndarray], flat: bool) -> list[Tensor]:
    torch.manual_seed(5)
    mask_BL = torch.from_numpy(arrays["attention_mask"]).bool()
    loss = encoder.hidden(tensors(arrays, flat))[mask_BL].pow(3).sum()
    return [loss, *torch.autograd.grad(loss, list(encoder.lm.base_model.parameters()))]


@pytest.mark.parametrize("kind", FLAT)
def test_the_kernel_gives_the_padded_path_s_loss_and_gradients(kind: str, kernel: dict[str, int]) -> None:
    encoder = make(with_attention_dropout(kind, 0.0)).train()
    arrays = ragged(LENGTHS, FLAT[kind].pad_token_id, own_positions=False)
    flat, padded = (loss_and_gradients(encoder, arrays, flat) for flat in (True, False))
    assert kernel == {"forward": 2, "varlen_attn": 2}
    torch.testing.assert_close(flat, padded, rtol=1e-9, atol=1e-9)


def test_the_kernel_drops_weights_and_its_gradients_are_those_of_what_it_kept(kernel: dict[str, int]) -> None:
    """varlen_attn has no dropout. Gradients against differences of losses, along a direction in the weights."""
    encoder = make(with_attention_dropout("bert", 0.3)).train()
    arrays = ragged(LENGTHS, 0, own_positions=False)
    parameters = list(encoder.lm.base_model.parameters())
    directions = [torch.randn_like(p) for p in parameters]

    def moved(by: float) -> Tensor:
        with torch.no_grad():
            torch._foreach_add_(parameters, directions, alpha=by)
        return loss_and_gradients(encoder, arrays, flat=True)[0]

    loss, *gradients = loss_and_gradients(encoder, arrays, flat=True)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
    assert kernel == {"forward": 2, "varlen_attn": 0}
    torch.testing.assert_close((moved(1e-5) - moved(-2e-5)) / 2e-5, slope, rtol=1e-6, atol=0)
    assert not torch.allclose(loss, loss_and_gradients(encoder.eval(), arrays, flat=True)[0])


@pytest.mark.parametrize(
    ("runs", "dtype", "cuda", "capability", "head"),
    [
        (True, torch.float16, True, (8, 0), 64),
        (True, torch.bfloat16, True, (10, 0), 128),
        (False, torch.float32, True, (9, 0), 64),
        (False, torch.float16, False, (9, 0), 64),
        (False, torch.float16, True, (7, 0), 64),
        (False, torch.float16, True, (9, 0), 60),
        (False, torch.float16, True, (9, 0), 256),
    ],
)
def test_the_kernel_runs_where_it_can(
    runs: bool, dtype: torch.dtype, cuda: bool, capability: tuple, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    weight = SimpleNamespace(dtype=dtype, is_cuda=cuda, device=None)
    config = SimpleNamespace(hidden_size=12 * head, num_attention_heads=12)
    table = SimpleNamespace(weight=weight)
    assert varlen.runs_flash(SimpleNamespace(config=config, get_input_embeddings=lambda: table)) is runs


@pytest.mark.parametrize("kind", FLAT)
def test_attention_has_dropout_that_the_seed_repeats(kind: str) -> None:
    encoder = make(with_attention_dropout(kind, 0.3))
    batch = tensors(ragged(LENGTHS, FLAT[kind].pad_token_id, own_positions=False), flat=True)
    exact = encoder.hidden(batch)
    encoder.train()
    states = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        states.append(encoder.hidden(batch))
    assert torch.equal(states[0], states[2])
    assert not torch.allclose(states[0], states[1]) and not torch.allclose(states[0], exact)


# Memory, compilation, files


def saved_bytes(module: nn.Module, loss: Any) -> int:
    """Bytes that the forward pass keeps for the backward pass beside the weights."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss()
    return sum(kept.values())


@pytest.mark.parametrize("flat", [True, False])
def test_checkpointed_activations_give_the_same_step(job: Job, micros: list[MicroBatch], flat: bool) -> None:
    """Bit for bit, with dropout; half as much is kept. The momentum encoder, without backward pass, stays as it is."""
    config = small("bert", job, dropout=0.1)
    plain, checkpointed = (step_module(job, config, activation_checkpointing=on) for on in (False, True))
    for (loss, gradients), (other, others) in zip(
        steps(plain, micros, flat), steps(checkpointed, micros, flat), strict=True
    ):
        assert torch.equal(loss, other) and gradients.keys() == others.keys()
        assert all(torch.equal(others[name], g) for name, g in gradients.items())
    batch = tensors(micros[0].arrays, flat)
    saved = [saved_bytes(m, lambda m=m: m.encoder.hidden(batch)) for m in (plain, checkpointed)]
    assert saved[1] < saved[0] / 2
    modules: Any = [plain.encoder, checkpointed.encoder, checkpointed.companions["ppa"].momentum.masters]
    marks = [{getattr(m, "gradient_checkpointing", False) for m in module.modules()} for module in modules]
    assert marks == [{False}, {False, True}, {False}]
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in checkpointed.named_parameters()]


def test_compiled_layers_give_the_same_step() -> None:
    """Losses and gradients with dropout, of one program for all layers and lengths; parameters keep their names.
    Traced, without generated code, which draws dropout of its own."""
    config = copy.deepcopy(CONFIGS["bert"])
    config.update(DROPOUT)
    eager, compiled = make(config, torch.float32).train(), make(config, torch.float32).train()
    compiled.compile_layers("eager")
    assert eager.state_dict().keys() == compiled.state_dict().keys()
    torch._dynamo.utils.counters.clear()
    for lengths in ([9, 4, 7], [5, 11, 2, 6]):
        arrays = ragged(lengths, config.pad_token_id, own_positions=False)
        expected, found = (loss_and_gradients(encoder, arrays, flat=True) for encoder in (eager, compiled))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_and_checkpointed_training_is_the_same(demo: Path, tmp_path: Path) -> None:
    """6 steps of the recipe `mixed`, generated code, dropout off, gradient norms measured twice."""
    curves = []
    for on in ("false", "true"):
        out = tmp_path / on
        sets = ["model.dropout=0.0", "train.measure_every=3", f"train.compile={on}"]
        sets += [f"train.activation_checkpointing={on}", "streams.ppa.queue_size=50"]
        arguments = ["--ds_config", "ds_configs/zero2_cpu.json", "--data", str(demo), "--out", str(out)]
        launch.run(1, [*arguments, "--steps", "6", "--set", *sets], timeout=900)
        curves.append(launch.metrics(out))
    for plain, compiled in zip(*curves, strict=True):
        names = [name for name in plain if name.startswith(("loss", "grad_norm", "accuracy"))]
        assert {name: compiled[name] for name in names} == pytest.approx({n: plain[n] for n in names}, rel=1e-4)


@pytest.mark.parametrize("kind", FLAT)
def test_saved_models_do_not_name_our_attention(kind: str, tmp_path: Path) -> None:
    """Neither config nor weights: stock transformers loads what was trained."""
    encoder = make(FLAT[kind], torch.float32)
    encoder.lm.save_pretrained(tmp_path)
    assert "xscale" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    batch = tensors(ragged(LENGTHS, FLAT[kind].pad_token_id, own_positions=False), flat=False)
    torch.testing.assert_close(loaded.base_model(**batch).last_hidden_state, encoder.hidden(batch))


# Copies


def test_one_copy_moves_all_arrays() -> None:
    r = np.random.default_rng(0)
    arrays = {
        "a": r.integers(0, 99, (3, 5)), "none": np.empty(0, dtype=np.int64), "narrow": r.integers(0, 9, 7, np.int32),
        "no_rows": np.empty((0, 5), dtype=np.int32), "truth": np.array([True, False, True]), "b": r.random((2, 3, 4)),
    }  # fmt: skip
    moved = copy_at_once(arrays, CPU)
    assert moved.keys() == arrays.keys()
    for name, array in arrays.items():
        assert moved[name].numpy().dtype == array.dtype and np.array_equal(moved[name].numpy(), array), name
        assert moved[name].data_ptr() % 16 == 0 or not array.size
    assert len({t.untyped_storage().data_ptr() for t in moved.values()}) == 1


def test_counters_move_to_where_the_fused_optimizer_reads_them() -> None:
    here, there, plain = (nn.Parameter(torch.zeros(2, device=device)) for device in ("cpu", "meta", "meta"))
    groups = [{"params": [here, there], "fused": True}, {"params": [plain]}]
    optimizer = torch.optim.AdamW(groups)
    for p in (here, there, plain):
        optimizer.state[p] = {"step": torch.tensor(7.0), "exp_avg": torch.zeros_like(p)}
    checkpoint.move_counters(optimizer)
    assert [optimizer.state[p]["step"].device.type for p in (here, there, plain)] == ["cpu", "meta", "cpu"]
    assert optimizer.state[here]["step"] == 7
