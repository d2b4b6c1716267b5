"""The optimizer step against a plain single-process PyTorch loop that shares no code with it but the data."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForMaskedLM

from tests import launch
from xscale import export
from xscale.data.mixture import initial_state
from xscale.distributed import Place

pytestmark = pytest.mark.slow

STEPS, LR, WARMUP, DECAY, CLIP = 10, 5e-4, 3, 0.05, 0.7
SETS = [
    "model.dropout=0.0",
    "streams.mlm.samples=6",
    "streams.tlm.samples=21",
    "streams.tlm.weight=0.5",
    "streams.tlm.reset_positions=true",
    "streams.tlm.language_embeddings=true",
    "train.micro_batch=4",
    f"train.lr={LR}",
    f"train.warmup={WARMUP}",
    f"train.weight_decay={DECAY}",
    f"train.max_grad_norm={CLIP}",
    f"checkpoint.every={STEPS}",
]


def test_mixed_zero2_step_equals_plain_pytorch(demo: Path, tmp_path: Path) -> None:
    """Weights after 10 mixed steps on 2 ranks, ZeRO-2, fp32: within 1e-6 of dense logits, torch AdamW, one process."""
    out = tmp_path / "run"
    arguments = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "mixed", "--data", str(demo)]
    arguments += ["--out", str(out), "--steps", str(STEPS), "--set", *SETS]
    launch.run(2, arguments, "deepspeed")
    for step in (0, STEPS):
        export.export(out / "checkpoints" / f"step_{step:08d}", tmp_path / str(step))
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "0").train()
    losses = plain_loop(model, arguments)
    trained = AutoModelForMaskedLM.from_pretrained(tmp_path / str(STEPS)).state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(
            weight, trained[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert [entry["loss"] for entry in launch.metrics(out)] == pytest.approx(losses, rel=1e-5)


def plain_loop(model: torch.nn.Module, arguments: list[str]) -> list[float]:
    job = launch.job_of(arguments)
    vectors = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    weights = {name: stream.weight for name, stream in job.recipe.streams.items()}
    state = initial_state(job.specs)
    losses = []
    for batch in job.batches(Place(0, 1, 0, 1), state, STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for stream, weight in weights.items():
            micros = [micro for micro in batch.micros if micro.stream == stream]
            count = sum(len(micro.arrays["labels"]) for micro in micros)
            total = total + weight * sum(dense_loss(model, micro.arrays) for micro in micros) / count
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = warmup_decay(batch.step)
        optimizer.step()
        losses.append(total.item())
    return losses


def dense_loss(model: torch.nn.Module, arrays: dict) -> Tensor:
    """Logits at every position, labels -100 where nothing is predicted."""
    inputs = {k: torch.from_numpy(v) for k, v in arrays.items() if k not in ("rows", "labels")}
    labels = torch.full((inputs["input_ids"].numel(),), -100)
    labels[torch.from_numpy(arrays["rows"])] = torch.from_numpy(arrays["labels"])
    logits = model(**inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum", ignore_index=-100)


def warmup_decay(step: int) -> float:
    """DeepSpeed's WarmupDecayLR, linear from lr / warm-up steps; its counter starts one step late."""
    least = LR / WARMUP
    if step == 0:
        return least
    done = step - 1
    share = done / WARMUP if done < WARMUP else (STEPS - done) / (STEPS - WARMUP)
    return least + (LR - least) * share
