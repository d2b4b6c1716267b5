"""The DeepSpeed engine of a run."""

import copyreg
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest import mock

from torch import nn

from xscale.errors import UserError
from xscale.models.build import decay_groups
from xscale.step.adam import load_adam
from xscale.step.module import StepModule
from xscale.step.zero import check_companions, gather_for_every_pass, stage_of


def build_engine(module: nn.Module, ds_config: dict[str, Any]) -> Any:
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfigError
    from deepspeed.runtime.zero.config import ZeroStageEnum

    # Python 3.11.2 pickles a member of an enum by builtins.getattr, which no checkpoint may hold (run/checkpoint.py).
    copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))  # type: ignore[arg-type]
    check_module(module, stage_of(ds_config))
    optimizer = ds_config["optimizer"]
    if optimizer["type"].lower() in ("adam", "adamw") and not optimizer["params"].get("torch_adam"):
        offload = ds_config.get("zero_optimization", {}).get("offload_optimizer") or {}
        load_adam("CPUAdamBuilder" if offload.get("device", "none") != "none" else "FusedAdamBuilder")
    groups = decay_groups(module, optimizer["params"]["weight_decay"])
    if optimizer["type"].lower() != "muon":
        import_muon_uncompiled()
    try:
        engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=ds_config)
    except (ValueError, TypeError, NotImplementedError, AssertionError, DeepSpeedConfigError) as error:
        raise UserError(f"--ds_config: DeepSpeed does not take it: {error}") from error
    if encoder := getattr(module, "encoder", None):
        gather_for_every_pass(engine, encoder.lm.get_output_embeddings().parameters())
    return engine


def import_muon_uncompiled() -> None:
    """DeepSpeed asks of any optimizer whether it is its Muon, whose functions are compiled: that alone imports
    inductor, 600 files and 0.8 s in every process. A DeepSpeed without Muon has nothing to import."""
    from deepspeed.runtime import compiler

    def as_it_is(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda function: function

    with suppress(ImportError, AttributeError), mock.patch.object(compiler, "compile", as_it_is):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def follow_schedule(engine: Any) -> None:
    """Take the next step's learning rate from the schedule as it is now. DeepSpeed restores the saved one, which is
    that of another length where train.steps changed."""
    scheduler = engine.lr_scheduler
    if scheduler is not None and scheduler.last_batch_iteration >= 0:
        scheduler.step(scheduler.last_batch_iteration)


def check_module(module: nn.Module, stage: int) -> None:
    """Raises UserError where ZeRO's stage cannot train it."""
    if isinstance(module, StepModule):
        comparing = [stream for stream, (objective, _) in module.streams.items() if objective.vectors]
        check_companions(stage, [*module.companions, *comparing])
