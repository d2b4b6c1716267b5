"""A checkpoint's model, as Hugging Face has it."""

import contextlib
import io
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel

from xscale.errors import UserError
from xscale.models.build import dropout_fields
from xscale.ranks import Control
from xscale.run import checkpoint as checkpoints

PREFIX = "encoder.lm."
"""Of the encoder's parameters in the engine's module."""


def full_weights(path: Path) -> dict[str, Tensor]:
    """fp32 weights of the whole module, from the ZeRO partitions where there are any."""
    if list(path.glob("*zero_pp_rank_*_optim_states.pt")):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        unread = io.StringIO()  # progress bars and remarks
        with contextlib.redirect_stdout(unread), contextlib.redirect_stderr(unread):
            return get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)
    return torch.load(path / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)["module"]


def load_model(path: str | Path, dropout: float | None = None) -> PreTrainedModel:
    """The Hugging Face model of a checkpoint or run, fp32; dropout: another one than it was trained with."""
    path = checkpoints.find(Path(path))
    problem = checkpoints.verify(path, Control())
    if problem:
        raise UserError(f"checkpoint {path} is not usable: {problem}")
    config = AutoConfig.from_pretrained(path / checkpoints.HF)
    if dropout is not None:
        config.update(dropout_fields(config.model_type, dropout))
    lm = AutoModelForMaskedLM.from_config(config)
    weights = {name.removeprefix(PREFIX): w for name, w in full_weights(path).items() if name.startswith(PREFIX)}
    missing, unexpected = lm.load_state_dict(weights, strict=False)
    tied = set(getattr(lm, "_tied_weights_keys", None) or ())
    lost = [name for name in missing if name not in tied and not name.endswith(("position_ids", "token_type_ids"))]
    assert not lost and not unexpected, (lost, unexpected)
    lm.tie_weights()
    return lm
