"""Compare kernels and packed rows with wider types, and train in fp16: `pytest benchmarks/gpu_check.py`, on a GPU.

Unless a test says otherwise, errors are ||out - reference|| / ||reference||; the reference is computed in fp64 on the
CPU from the same (rounded) inputs. benchmarks/gather.py checks the alignment gather.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import ALONE, CUDA, DEVICE, ROOT, free_port, text_pairs, write_world
from torch import Tensor

from xscale.data.calibrate import calibrate
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state
from xscale.data.packed_row import Row
from xscale.models.attention import attention, runs_flash
from xscale.ops import masked_ce
from xscale.ops.dropout_add_norm import fused_dropout_add_norm
from xscale.ops.masked_ce import masked_cross_entropy
from xscale.run.resolve import module_of_run, resolve_run
from xscale.step.module import StepModule
from xscale.step.step import encode_auxiliary, run_row, step_weights

NARROW = [torch.bfloat16, torch.float16] if CUDA else [torch.bfloat16]
DTYPES = [torch.float32, *NARROW]
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""The largest allowed error of the result of a few operations."""
OF_A_ROW = {torch.bfloat16: 6e-2, torch.float16: 6e-3}
"""The largest allowed error of a whole model, whose weights are rounded too. The gradient of the contextual objective,
which is the largest at random weights, differs by 5 % in bf16."""
FP16 = ROOT / "ds_configs/zero2_fp16.json"
STEPS = 30 if CUDA else 8
SHIPPED = ["align_mlm", "alignlm", "contextual", "dict_mlm", "mixed", "ppa", "xlm"]
Entries = list[dict[str, Any]]
FEW_SAMPLES = {"mlm": 4, "tlm": 16, "alignlm": 16, "ppa": 16, "contextual": 16, "align_mlm": 4}


def error(out: Tensor, reference: Tensor) -> float:
    out, reference = (tensor.detach().cpu().double() for tensor in (out, reference))
    difference = out - reference
    assert difference.isfinite().all()
    return float(difference.norm() / reference.norm().clamp(min=1e-30))


def wide(tensor: Tensor) -> Tensor:
    """Return a leaf tensor with the same values, in fp64 on the CPU."""
    return tensor.detach().cpu().double().requires_grad_()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# Operators


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "smoothing", "z_loss"), [(0, 0.0, 0.0), (1, 0.0, 0.0), (1500, 0.0, 0.0), (1500, 0.1, 1e-3)]
)
def test_masked_cross_entropy(
    rows: int, smoothing: float, z_loss: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, right predictions and the three gradients of weighted rows, in chunks, are right with a loss scale."""
    monkeypatch.setattr(masked_ce, "ROWS", 512)
    monkeypatch.setattr(masked_ce, "GPU_LOGITS", 0)
    H, V, scale, largest = 256, 20_011 if CUDA else 1_003, 2.0**10, 1 / max(rows, 1)
    inputs = [torch.randn(rows, H), torch.randn(V, H) * 0.1, torch.randn(V) * 0.1]
    on_device = [tensor.to(DEVICE, dtype).requires_grad_() for tensor in inputs]
    labels, weights = torch.randint(V, (rows,)), torch.rand(rows)
    weights[::7], weights[:1] = 0.0, 1.0
    loss, losses, right = masked_cross_entropy(
        *on_device, labels.to(DEVICE), smoothing, z_loss, weights.to(DEVICE), largest
    )
    plain = [wide(tensor) for tensor in on_device]
    logits = F.linear(*plain)
    each = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    each = each + z_loss * logits.logsumexp(-1).square()
    expected = largest * (weights * each).sum()
    assert loss.dtype == losses.dtype == torch.float32 and not losses.requires_grad
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5 if dtype == torch.float32 else 3e-3)
    assert losses.shape == right.shape == (rows,) and error(losses, each) < LIMIT[dtype]
    if dtype == torch.float32:
        assert torch.equal(right.cpu(), logits.argmax(-1) == labels)
    ours = torch.autograd.grad(loss * scale, on_device)
    theirs = torch.autograd.grad(expected * scale, plain)
    assert not ours[0][weights.to(DEVICE) == 0].any()
    for gradient, reference in zip(ours, theirs, strict=True):
        assert gradient.dtype == dtype and error(gradient, reference) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(
    "lengths", [[128] * 8, [128, 65, 64, 3], [512, 300, 128, 127, 64, 9, 1, 0, 5, 0], [1]], ids=str
)
def test_attention(lengths: list[int], window: int | None, dtype: torch.dtype) -> None:
    """The kernels, and the padded blocks in fp32, agree with the blocks in fp64."""
    heads = 4
    qkv = torch.randn(sum(lengths), 3 * heads * 64).to(dtype)
    incoming = torch.randn(sum(lengths), heads * 64)
    assert runs_flash(qkv.to(DEVICE), heads) == (dtype in NARROW and CUDA)
    lengths_B = torch.tensor(lengths, dtype=torch.int32)
    starts_B1 = F.pad(lengths_B.cumsum(0), (1, 0)).int()

    def run(x: Tensor) -> list[Tensor]:
        x = x.requires_grad_()
        out = attention(x, starts_B1.to(x.device), lengths_B, max(lengths), 0, heads, window=window)
        return [out, *torch.autograd.grad(out, x, incoming.to(out))]

    for ours, exact in zip(run(qkv.to(DEVICE)), run(wide(qkv)), strict=True):
        assert ours.dtype == dtype and error(ours, exact) < LIMIT[dtype]


@pytest.mark.skipif(not CUDA, reason="plain operators elsewhere")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("shape", [(4000, 768), (3, 1024), (700, 320), (0, 768)], ids=str)
def test_dropout_add_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The dropout mask is read from the gradient of x. States and all four gradients are right for this mask, and it
    keeps the share 1 - p."""
    p = 0.1
    norm = torch.nn.LayerNorm(shape[1]).to(DEVICE, dtype)
    for weight in norm.parameters():
        torch.nn.init.normal_(weight)
    x, residual, incoming = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(3))
    leaves = [tensor.requires_grad_() for tensor in (x, residual)] + [*norm.parameters()]
    runs = []
    for _ in range(2):
        out = fused_dropout_add_norm(x, residual, p, norm, 5)
        runs.append([out, *torch.autograd.grad(out, leaves, incoming)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    _, d_x, d_residual, *_ = runs[0]
    kept = (d_x != 0) | (d_residual == 0)
    if kept.numel() > 10_000:
        assert kept.float().mean().item() == pytest.approx(1 - p, abs=0.01)
    plain = [wide(tensor) for tensor in leaves]
    total = plain[0] * kept.cpu() / (1 - p) + plain[1]
    expected = F.layer_norm(total, shape[1:], *plain[2:])
    exact = [expected, *torch.autograd.grad(expected, plain, incoming.cpu().double())]
    for ours, reference in zip(runs[0], exact, strict=True):
        assert ours.dtype == dtype and error(ours, reference) < LIMIT[dtype]


# Rows


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_world([*islice(text_pairs(None), 1000)], 3000, tmp_path_factory.mktemp("world") / "data")


@pytest.fixture
def loader(world: list[Path]) -> Loader:
    """Return the loader of a run of the recipe `mixed` with few samples, without dropout."""
    sets = [f"streams.{name}.samples={n}" for name, n in FEW_SAMPLES.items()]
    sets += ["streams.ppa.tlm_weight=1.0", "streams.ppa.queue_size=64", "data.workers=0", "train.max_tokens=16384"]
    sets += [f"model.preset={'mini' if CUDA else 'tiny'}", "model.dropout=0.0"]
    recipe, corpus = resolve_run("mixed", sets, world)
    return Loader(recipe, corpus, calibrate(recipe, corpus))


def first_row(loader: Loader) -> Row:
    (row,) = next(loader.batches(ALONE, DEVICE.type, initial_state(loader.streams), 1)).rows
    return row


def ready_module(loader: Loader) -> StepModule:
    """Return the run's module in fp32 on the CPU, with a filled queue. Each call returns the same values."""
    module = module_of_run(loader.recipe, loader.corpus)
    queue = module.auxiliary_states["ppa"].queue
    torch.manual_seed(1)
    queue.push(F.normalize(torch.randn(queue.ring_KD.shape), dim=-1), 0)
    return module


def row_results(loader: Loader, row: Row, module: StepModule) -> Iterator[Tensor]:
    """Yield the loss, the sums of all losses, and all gradients as one vector. A loss scale is used, as in fp16."""
    scale = 2.0**10
    device = next(module.parameters()).device
    weights = step_weights(loader.recipe, row.counts, 0)
    on_device = row.to(device)
    (shared,) = encode_auxiliary(module, [on_device], [(0,)])
    loss, sums = run_row(module, on_device, shared, weights, (0,))
    losses = [number for number, key in enumerate(sums.keys) if key.name == "loss"]
    gradients = torch.autograd.grad(loss * scale, list(module.parameters()), materialize_grads=True)
    yield loss.detach()
    yield sums.values_K[losses]
    yield torch.cat([gradient.flatten().float() / scale for gradient in gradients])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_row(loader: Loader, dtype: torch.dtype) -> None:
    """The losses of all streams and the gradients in 16 bits agree with those in fp32 on the CPU."""
    row = first_row(loader)
    reference = ready_module(loader)
    module = ready_module(loader).to(DEVICE, dtype)
    results = zip(row_results(loader, row, module), row_results(loader, row, reference), strict=True)
    for ours, other in results:
        assert error(ours, other) < OF_A_ROW[dtype]


# Training by train.py, in fp16 on a GPU


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def train(world: list[Path], out: Path, recipe: str, *sets: str, ds_config: Path = FP16, steps: int = STEPS) -> Entries:
    """Train to the last step. Returns the lines of metrics.jsonl; their losses are finite, and the last are lower."""
    fields = [*sets, "train.lr=0.002", "train.measure_every=20", f"checkpoint.every={STEPS // 2}"]
    if recipe in ("ppa", "mixed"):
        fields.append("streams.ppa.queue_size=64")
    if not CUDA:
        fields.append("model.preset=tiny")
        fields += [f"streams.{stream}.samples=4" for stream in (FEW_SAMPLES if recipe == "mixed" else [recipe])]
    command = [sys.executable, ROOT / "xscale/train.py", "--ds_config", ds_config, "--recipe", recipe]
    command += ["--data", *world, "--out", out, "--steps", steps, "--set", *fields]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MASTER_PORT": str(free_port())}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [entry["loss"] for entry in entries]
    assert [entry["step"] for entry in entries] == [*range(1, steps + 1)]
    assert all(map(math.isfinite, losses)) and mean(losses[-5:]) < mean(losses[:5])
    assert all(("loss_scale" in entry) == CUDA for entry in entries)
    return entries


@pytest.mark.parametrize("recipe", SHIPPED if CUDA else ["tlm"])
def test_training(recipe: str, world: list[Path], folder: Path) -> None:
    train(world, folder / recipe, recipe)


@pytest.mark.skipif(not CUDA, reason="fp32 does not overflow")
def test_training_heals_overflow(world: list[Path], folder: Path) -> None:
    """A loss scale of 2^32 overflows: the first steps are skipped, and the scale falls until they are not."""
    fields = json.loads(FP16.read_text(encoding="utf-8"))
    fields["fp16"]["initial_scale_power"] = 32
    ds_config = folder / "overflow.json"
    ds_config.write_text(json.dumps(fields), encoding="utf-8")
    entries = train(world, folder / "overflow", "mixed", ds_config=ds_config, steps=STEPS + 25)
    assert entries[0]["skipped"] and not entries[-1]["skipped"]
    assert entries[-1]["loss_scale"] < entries[0]["loss_scale"]


def test_training_resumes_bit_for_bit(world: list[Path], folder: Path) -> None:
    """With deterministic algorithms, a resume from the middle repeats all losses, gradient norms and accuracies."""
    exact = ("train.deterministic=true", "train.max_tokens=1024")
    whole = train(world, folder / "exact", "mixed", *exact)
    shutil.copytree(folder / "exact", folder / "resumed")
    shutil.rmtree(folder / f"resumed/checkpoints/step_{STEPS:08d}")
    for before, after in zip(whole, train(world, folder / "resumed", "mixed", *exact), strict=True):
        for key, value in before.items():
            if key.startswith(("loss", "grad_norm", "accuracy")):
                assert after[key] == value, f"{key} of step {before['step']}"
