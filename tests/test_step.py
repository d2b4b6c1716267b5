"""The optimizer step against a plain single-process PyTorch loop that shares no code with it but the data."""

import json
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForMaskedLM, AutoTokenizer

from tests import launch
from tests.rows import pass_row
from xscale import export
from xscale.checkpoint.restore import read_full_weights
from xscale.data.packed_row import pack_row
from xscale.data.stream_batch import StreamBatch
from xscale.deepspeed_private import model_state_path
from xscale.metric_keys import loss_key
from xscale.objectives import OBJECTIVES
from xscale.ranks import Process
from xscale.run.start import prefill_queues
from xscale.step.module import StepModule

pytestmark = pytest.mark.slow

STEPS, LR, WARMUP, DECAY, CLIP, EPS = 6, 5e-4, 3, 0.05, 0.7, 1e-5
RECIPE = """
model: {preset: tiny, dropout: 0.0}
streams:
  mlm: {objective: mlm, samples: 6}
  tlm: {objective: tlm, samples: 21, weight: 0.5, reset_positions: true, language_embeddings: true}
"""
SETS = [
    "train.max_tokens=200",
    f"train.lr={LR}",
    f"train.warmup={WARMUP}",
    f"train.weight_decay={DECAY}",
    f"train.max_grad_norm={CLIP}",
    f"checkpoint.every={STEPS}",
]


def test_mixed_zero2_step_equals_plain_pytorch(demo: Path, tmp_path: Path) -> None:
    """Weights after 6 mixed steps on 2 ranks, ZeRO-2, fp32: within 1e-6 of dense logits, torch AdamW, one process."""
    out = tmp_path / "run"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    ds_config = json.loads((launch.ROOT / "ds_configs/zero2_cpu.json").read_text())
    ds_config["optimizer"]["params"]["eps"] = EPS
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    arguments = ["--ds_config", str(tmp_path / "ds.json"), "--recipe", str(recipe), "--data", str(demo)]
    arguments += ["--out", str(out), "--steps", str(STEPS), "--set", *SETS]
    launch.run(2, arguments)
    for shapes in torch.load(model_state_path(out / "checkpoints" / f"step_{STEPS:08d}"), weights_only=False)[
        "param_shapes"
    ]:
        *starts, _ = accumulate([0, *(shape.numel() for shape in shapes.values())])
        assert not [start for start in starts if start % 8], "in 16 bits, each weight begins at a multiple of 16 bytes"
    assert len(AutoTokenizer.from_pretrained(demo / "tokenizer")) % 8, "the vocabulary's bias would not"
    for step in (0, STEPS):
        export.export_and_return_checkpoint(out / "checkpoints" / f"step_{step:08d}", tmp_path / str(step))
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "0").train()
    losses = plain_loop(model, arguments)
    trained = AutoModelForMaskedLM.from_pretrained(tmp_path / str(STEPS)).state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(
            weight, trained[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert [entry["loss"] for entry in launch.metrics(out)] == pytest.approx(losses, rel=1e-5)


def test_all_objectives_in_one_step_equal_plain_autograd(demo: Path, tmp_path: Path) -> None:
    """The recipe `mixed`, 2 ranks, ZeRO-2, several rows: weights, queue and momentum encoder after 6 steps equal
    those of one process that sums whole streams' losses (each tested against its paper elsewhere) and calls AdamW."""
    out = tmp_path / "run"
    small = {"mlm": 5, "tlm": 9, "alignlm": 7, "ppa": 11, "word_contrast": 5, "align_mlm": 3}
    sets = [f"streams.{name}.samples={n}" for name, n in small.items()] + ["streams.ppa.queue_size=30"]
    # Adam divides by the root of a square: where a gradient is mere rounding, a tiny eps makes a whole step of it.
    ds_config = json.loads((launch.ROOT / "ds_configs/zero2_cpu.json").read_text())
    ds_config["optimizer"]["params"]["eps"] = EPS
    ds_config["zero_optimization"]["reduce_bucket_size"] = 50_000  # full several times in a backward pass
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    arguments = ["--ds_config", str(tmp_path / "ds.json"), "--recipe", "mixed", "--data", str(demo)]
    arguments += ["--out", str(out), "--steps", str(STEPS), "--set", "model.dropout=0.0", *SETS, *sets]
    arguments += ["streams.tlm.warm_in=4", "streams.alignlm.warm_in=0.5", "train.measure_every=3"]
    launch.run(2, arguments)
    measured = launch.metrics(out)
    loader = launch.loader_of([*arguments, "data.workers=0"])
    module = StepModule(launch.encoder(loader), loader.recipe)
    process = Process(0, 1, 0, 1)
    fake = SimpleNamespace(module=module, device=torch.device("cpu"))
    prefill_queues(fake.module, loader, process, fake.device, print)
    vectors = [p for p in module.parameters() if p.ndim == 1]
    matrices = [p for p in module.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=EPS)
    for step, stream_batches in enumerate(launch.pieces_of(loader, STEPS)):
        optimizer.zero_grad()
        for name, stream_batch in stream_batches.items():
            row = pack_row({name: stream_batch}, loader.corpus.tokenizer.sep_id)
            objective = OBJECTIVES[loader.recipe.streams[name].objective]
            terms = objective.terms(loader.recipe.streams[name].options)
            shared = {"alignlm": "mono"}  # what divides all terms of a stream
            counts = {term: stream_batch.target_counts[shared.get(name, term)] for term in terms}
            warm = {"tlm": min((step + 1) / 4, 1), "alignlm": min((step + 1) / 3, 1)}.get(name, 1)
            weights = {
                loss_key(name, term): warm * loader.recipe.streams[name].weight * factor / counts[term]
                for term, factor in terms.items()
            }
            loss, _ = pass_row(module, row, weights, (name, step))
            key = f"grad_norm/{name}"
            assert (key in measured[step]) == (step in (0, 2, 5))
            if key in measured[step]:
                # In fp64: torch adds up an fp32 norm of a million numbers to 1.3e-4 only.
                found = torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True, retain_graph=True)
                norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in found]), dtype=torch.float64).item()
                assert measured[step][key] == pytest.approx(norm, rel=1e-5), (step, key)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = warmup_decay(step)
        optimizer.step()
        for auxiliary_state in module.auxiliary_states.values():
            auxiliary_state.update(True)
    path = out / "checkpoints" / f"step_{STEPS:08d}"
    trained, worst = read_full_weights(path), (0.0, "")
    for name, weight in module.named_parameters():
        difference = (weight - trained[name]).abs().max().item()
        worst = max(worst, (difference, name))
    assert worst[0] <= 1e-6, worst
    saved = torch.load(path / "companions.pt", weights_only=True)["ppa"]
    ours = module.auxiliary_states["ppa"].state_dict()
    torch.testing.assert_close(saved["queue"], ours["queue"], rtol=0, atol=1e-5)
    torch.testing.assert_close(saved["momentum"], ours["momentum"], rtol=0, atol=1e-6)


def plain_loop(model: torch.nn.Module, arguments: list[str]) -> list[float]:
    loader = launch.loader_of(arguments)
    vectors = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=EPS)
    weights = {name: stream.weight for name, stream in loader.recipe.streams.items()}
    losses = []
    for step, stream_batches in enumerate(launch.pieces_of(loader, STEPS)):
        optimizer.zero_grad()
        total = torch.zeros(())
        for stream, weight in weights.items():
            total = total + weight * dense_loss(model, stream_batches[stream])
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = warmup_decay(step)
        optimizer.step()
        losses.append(total.item())
    return losses


def dense_loss(model: torch.nn.Module, stream_batch: StreamBatch) -> Tensor:
    """Padded sequences, logits at every position, labels -100 where nothing is predicted; a mean over targets."""
    sequences = stream_batch.sequences
    labels = np.full(len(sequences.ids), -100)
    labels[stream_batch.states["masked"].columns] = stream_batch.labels["mlm"]
    types = getattr(sequences, stream_batch.types) if stream_batch.types else np.zeros_like(labels)
    columns = (sequences.ids, np.ones_like(labels), sequences.positions, types, labels)
    cuts = np.cumsum(sequences.lengths)[:-1]
    fills = (0, 0, 0, 0, -100)
    ids, mask, positions, types_BL, labels_BL = (
        pad_sequence([torch.from_numpy(part) for part in np.split(column, cuts)], True, fill)
        for column, fill in zip(columns, fills, strict=True)
    )
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, token_type_ids=types_BL).logits
    return F.cross_entropy(logits.flatten(0, 1), labels_BL.flatten())


def warmup_decay(step: int) -> float:
    """Linear from LR / WARMUP to LR, and down to LR / (STEPS - WARMUP)."""
    return LR * min((step + 1) / WARMUP, (STEPS - step) / (STEPS - WARMUP))
