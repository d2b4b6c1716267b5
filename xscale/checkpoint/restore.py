"""What a run or another model has learnt: the model, as Hugging Face has it, and the objectives' heads."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel

from xscale.checkpoint import store as checkpoints
from xscale.deepspeed_private import model_file, partition_files, saved_whole
from xscale.errors import UserError
from xscale.models.build import dropout_fields, load_pretrained, settle_neutral
from xscale.models.heads import KeptHeads, load_heads
from xscale.ranks import HostGroup

PREFIX = "encoder.lm."
"""Of the encoder's parameters in the engine's module."""
HEADS = "heads."
"""Of the objectives' own parameters; the stream's name follows."""


def full_weights(path: Path) -> dict[str, Tensor]:
    """fp32 weights of the whole module, from the ZeRO partitions where there are any."""
    if partition_files(path):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        unread = io.StringIO()  # progress bars and remarks
        with contextlib.redirect_stdout(unread), contextlib.redirect_stderr(unread):
            return get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)
    return saved_whole(torch.load(model_file(path), map_location="cpu", weights_only=False))[0]


def load_initial(init: str | Path, dropout: float) -> tuple[PreTrainedModel, dict[str, KeptHeads]]:
    """Of `model.init`: a run, a checkpoint, a Hugging Face directory or a hub name, fp32. Raises UserError."""
    if checkpoints.is_run(Path(init)):
        return load_run(init, dropout)
    return load_pretrained(init, dropout), load_heads(Path(init))


def load_run(path: str | Path, dropout: float | None = None) -> tuple[PreTrainedModel, dict[str, KeptHeads]]:
    """The Hugging Face model of a checkpoint or run, and its heads by stream, fp32; dropout: another one than it was
    trained with."""
    path = checkpoints.find(Path(path))
    problem = checkpoints.verify(path, HostGroup())
    if problem:
        raise UserError(f"checkpoint {path} is not usable: {problem}")
    config = AutoConfig.from_pretrained(path / checkpoints.HF, trust_remote_code=False)
    if dropout is not None:
        config.update(dropout_fields(config.model_type, dropout))
    lm = AutoModelForMaskedLM.from_config(config, trust_remote_code=False)
    trained = full_weights(path)
    weights = {name.removeprefix(PREFIX): w for name, w in trained.items() if name.startswith(PREFIX)}
    missing, unexpected = lm.load_state_dict(weights, strict=False)
    tied = set(getattr(lm, "_tied_weights_keys", None) or ())
    lost = [name for name in missing if name not in tied and not name.endswith(("position_ids", "token_type_ids"))]
    assert not lost and not unexpected, (lost, unexpected)
    lm.tie_weights()
    settle_neutral(lm)
    return lm, _heads(trained, checkpoints.read(path).identity["recipe"]["streams"])


def _heads(weights: dict[str, Tensor], streams: dict[str, Any]) -> dict[str, KeptHeads]:
    kept: dict[str, KeptHeads] = {}
    for name, weight in weights.items():
        if name.startswith(HEADS):
            stream, _, part = name.removeprefix(HEADS).partition(".")
            kept.setdefault(stream, KeptHeads(streams[stream], {})).weights[part] = weight
    return kept
