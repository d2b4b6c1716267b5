"""Loads a checkpoint into an engine, or as a Hugging Face model."""

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel

from xscale.checkpoint import store
from xscale.checkpoint.reshard import load_weights_and_optimizer_state
from xscale.checkpoint.store import Checkpoint
from xscale.deepspeed_private import (
    load_checkpoint_file,
    loading_known_types_only,
    model_state_path,
    optimizer_partition_paths,
    weights_and_states_of_stage_0,
)
from xscale.models.build import dropout_fields, load_pretrained, set_untrained_neutral_type_to_mean
from xscale.ranks import CpuGroup

PREFIX = "encoder.lm."
"""The prefix of the encoder's parameter names in the engine's module."""


def load_engine_and_auxiliary_states(engine: Any, checkpoint: Checkpoint, cpu_group: CpuGroup) -> None:
    """Load weights, optimizer, loss scale, schedule and auxiliary states into the engine. All ranks call it together.

    The checkpoint may have another number of ranks, another ZeRO stage, or another order of weights than the engine.
    """
    load_weights_and_optimizer_state(engine, checkpoint.path)
    assert engine.global_steps == checkpoint.step, (engine.global_steps, checkpoint.step)
    if (auxiliary := checkpoint.path / store.AUXILIARY_STATES).exists():
        for name, state in torch.load(auxiliary, map_location="cpu", weights_only=True).items():
            engine.module.auxiliary_states[name].load_state_dict(state)
    cpu_group.barrier()


def read_full_weights(checkpoint_folder: Path) -> dict[str, Tensor]:
    """Return the fp32 weights of the whole module in a checkpoint, by name. ZeRO partitions are joined."""
    if optimizer_partition_paths(checkpoint_folder):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        unread = io.StringIO()  # hides DeepSpeed's progress bars and remarks
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(unread),
            contextlib.redirect_stderr(unread),
            loading_known_types_only(),
        ):
            # DeepSpeed takes the path for a pattern of glob, in which [ and * have a meaning.
            Path(folder, "checkpoint").symlink_to(checkpoint_folder.resolve())
            return get_fp32_state_dict_from_zero_checkpoint(folder, tag="checkpoint")
    return weights_and_states_of_stage_0(load_checkpoint_file(model_state_path(checkpoint_folder)))[0]


def read_and_broadcast_weights(checkpoint_folder: Path, cpu_group: CpuGroup) -> dict[str, Tensor]:
    """Return read_full_weights(checkpoint_folder) on every rank. Rank 0 reads the weights and sends them. All ranks
    call it together."""
    weights = read_full_weights(checkpoint_folder) if cpu_group.is_main else {}
    shapes = cpu_group.all_gather({name: (weight.shape, weight.dtype) for name, weight in weights.items()})[0]
    if not cpu_group.is_main:
        weights = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    if cpu_group.group:
        for weight in weights.values():
            dist.broadcast(weight.contiguous(), 0, cpu_group.group)
    return weights


def load_initial_model(init: str | Path, dropout: float) -> PreTrainedModel:
    """Return the model of model.init in fp32. init: a run, a checkpoint, a Hugging Face directory or a hub name.
    dropout: the model's new dropout probability. Raises UserError."""
    if store.is_run_or_checkpoint(Path(init)):
        return read_and_broadcast_model(init, dropout)
    return load_pretrained(init, dropout)


def read_and_broadcast_model(run_or_checkpoint: str | Path, dropout: float | None = None) -> PreTrainedModel:
    """Return the Hugging Face model of a checkpoint or run in fp32. dropout: the model's new dropout probability; None:
    that of the checkpoint. All ranks call it together. Raises UserError."""
    path = store.resolve_checkpoint(Path(run_or_checkpoint))
    cpu_group = CpuGroup()
    store.read_undamaged_checkpoint(path, cpu_group)
    config = AutoConfig.from_pretrained(path / store.HF, trust_remote_code=False)
    if dropout is not None:
        config.update(dropout_fields(config.model_type, dropout))
    lm = AutoModelForMaskedLM.from_config(config, trust_remote_code=False)
    weights: dict[str, Tensor] = {}
    for name, weight in read_and_broadcast_weights(path, cpu_group).items():
        if name.startswith(PREFIX):
            weights[name.removeprefix(PREFIX)] = weight
    missing, unexpected = lm.load_state_dict(weights, strict=False)
    computed = ("position_ids", "token_type_ids")
    tied = set(getattr(lm, "_tied_weights_keys", None) or ())
    lost = [name for name in missing if name not in tied and not name.endswith(computed)]
    assert not lost and not unexpected, (lost, unexpected)
    lm.tie_weights()
    set_untrained_neutral_type_to_mean(lm)
    return lm
