"""Compare packed rows in 16 bits and the kernel of dropout, residual and norm with wider types, and train in fp16, on a
GPU: `pytest benchmarks/gpu_check.py`. benchmarks/gather.py checks the alignment gather.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.nn.functional as F
from common import ALONE, CUDA, DEVICE, ROOT, demo_data, make_loader, train_run
from torch import Tensor

from xscale.data.loader import Loader
from xscale.data.mixture import initial_state
from xscale.data.packed_row import Row
from xscale.ops.dropout_add_norm import fused_dropout_add_norm
from xscale.run.resolve import build_initial_module
from xscale.step.module import StepModule
from xscale.step.step import compute_row_loss, precompute_and_gather_states, weights_of_term_sums

DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.bfloat16]
KERNEL_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""The largest ||out - reference|| / ||reference||, whose reference is in fp64, from the same rounded inputs."""
ROW_ERROR = {torch.bfloat16: 6e-2, torch.float16: 6e-3}
"""The tolerances of a whole row, whose weights are rounded, too."""
SAMPLES = {"mlm": 4, "tlm": 16, "alignlm": 16, "ppa": 16, "word_contrast": 16, "align_mlm": 4}
PRESETS = ["mini", "modern-small"] if CUDA else ["tiny"]
RECIPES = ["align_mlm", "alignlm", "contextual", "dict_mlm", "mixed", "ppa", "xlm"] if CUDA else ["mixed"]
STEPS = 30 if CUDA else 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return demo_data(tmp_path_factory.mktemp("data") / "demo", 1000)


def assert_close(results: Iterable[Tensor], references: Iterable[Tensor], limit: float) -> None:
    for result, reference in zip(results, references, strict=True):
        exact = reference.detach().double()
        assert (result.detach().cpu().double() - exact).norm() / exact.norm() < limit


@pytest.mark.skipif(not CUDA, reason="the kernel needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_add_norm(dtype: torch.dtype) -> None:
    """The gradient of x shows the mask, which keeps 90 %. The states are right for this mask, so the forward pass has
    the same; all gradients are right."""
    torch.manual_seed(0)
    x, residual, incoming = torch.randn(3, 700, 320, device=DEVICE).to(dtype)
    norm = torch.nn.LayerNorm(320).to(DEVICE, dtype)
    leaves = [x.requires_grad_(), residual.requires_grad_(), *map(torch.nn.init.normal_, norm.parameters())]
    out = fused_dropout_add_norm(x, residual, 0.1, norm, 5)
    gradients = torch.autograd.grad(out, leaves, incoming)
    kept = ((gradients[0] != 0) | (gradients[1] == 0)).cpu()
    assert kept.double().mean().item() == pytest.approx(0.9, abs=0.01)
    exact = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    expected = F.layer_norm(exact[0] * kept / 0.9 + exact[1], (320,), *exact[2:])
    references = torch.autograd.grad(expected, exact, incoming.cpu().double())
    assert_close([out, *gradients], [expected, *references], KERNEL_ERROR[dtype])


def row_results(loader: Loader, row: Row, module: StepModule) -> Iterator[Tensor]:
    """Yield the loss, the sums of all losses, and all gradients as one vector. A loss scale is used, as in fp16."""
    scale = 2.0**10
    on_device = row.to(next(module.parameters()).device)
    (shared,) = precompute_and_gather_states(module, [on_device], [(0,)])
    loss, sums = compute_row_loss(module, on_device, shared, weights_of_term_sums(loader.recipe, row.counts, 0), (0,))
    losses = [number for number, key in enumerate(sums.keys) if key.name == "loss"]
    gradients = torch.autograd.grad(loss * scale, list(module.parameters()), materialize_grads=True)
    yield loss.detach()
    yield sums.values_K[losses]
    yield torch.cat([gradient.flatten().float() / scale for gradient in gradients])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_row(data: list[Path], preset: str, dtype: torch.dtype) -> None:
    """The losses of all streams of `mixed` and the gradients in 16 bits agree with those in fp32 on the CPU."""
    fields: dict[str, object] = {f"streams.{name}.samples": samples for name, samples in SAMPLES.items()}
    fields |= {"streams.ppa.tlm_weight": 1.0, "streams.ppa.queue_size": 64, "data.workers": 0}
    fields |= {"train.max_tokens": 16384, "model.preset": preset, "model.dropout": 0.0}
    loader = make_loader("mixed", fields, data)
    (row,) = next(loader.batches(ALONE, DEVICE, initial_state(loader.last_streams), 1)).rows
    modules = []
    for _ in range(2):
        module = build_initial_module(loader.recipe, loader.corpus)
        queue = module.auxiliary_states["ppa"].queue
        torch.manual_seed(1)
        queue.push_and_zero_nonfinite(F.normalize(torch.randn(queue.ring_KD.shape), dim=-1), 0)
        modules.append(module)
    narrow = row_results(loader, row, modules[0].to(DEVICE, dtype))
    assert_close(narrow, row_results(loader, row, modules[1]), ROW_ERROR[dtype])


@pytest.mark.parametrize("recipe", RECIPES)
def test_training(recipe: str, data: list[Path], tmp_path: Path) -> None:
    """train.py in fp16 on a GPU. Losses are finite, and the last are lower. A loss scale of 2^24 overflows in `mixed`:
    the first steps are skipped, and the scale falls until they are not. With deterministic algorithms, a resume of
    `mixed` from the middle repeats all losses, gradient norms and accuracies."""
    ds_config = json.loads((ROOT / "ds_configs/zero2_fp16.json").read_text(encoding="utf-8"))
    fields = ["train.lr=0.002", "train.measure_every=20", f"checkpoint.every={STEPS // 2}"]
    if recipe == "mixed":
        ds_config["fp16"] |= {"initial_scale_power": 24, "hysteresis": 1}
        fields += ["train.deterministic=true", "train.max_tokens=1024"]
    (tmp_path / "fp16.json").write_text(json.dumps(ds_config), encoding="utf-8")
    if recipe in ("ppa", "mixed"):
        fields.append("streams.ppa.queue_size=64")
    if not CUDA:
        fields += ["model.preset=tiny", *(f"streams.{stream}.samples=4" for stream in SAMPLES)]
    fields.append(f"train.steps={STEPS}")
    run = (ROOT, recipe, tmp_path / "fp16.json", data, tmp_path / "run", fields)
    whole = train_run(*run)
    losses = [line["loss"] for line in whole]
    assert len(losses) == STEPS and all(map(math.isfinite, losses)) and mean(losses[-5:]) < mean(losses[:5])
    if recipe != "mixed":
        return
    if CUDA:
        assert whole[0]["skipped"] and not whole[-1]["skipped"]
        assert whole[-1]["loss_scale"] < whole[0]["loss_scale"]
    shutil.rmtree(tmp_path / f"run/checkpoints/step_{STEPS:08d}")
    for before, after in zip(whole, train_run(*run), strict=True):
        for key, value in before.items():
            if key.startswith(("loss", "grad_norm", "accuracy")):
                assert after[key] == value, f"{key} of step {before['step']}"
