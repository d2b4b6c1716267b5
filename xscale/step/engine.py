"""The DeepSpeed engine of a run."""

from typing import Any

from torch import nn

from xscale import deepspeed_private as private
from xscale.errors import UserError
from xscale.models.build import decay_groups
from xscale.step.adam import load_adam
from xscale.step.module import StepModule
from xscale.step.zero import check_auxiliary_states, gather_for_every_pass, stage_of


def build_engine(module: nn.Module, ds_config: dict[str, Any]) -> Any:
    import deepspeed

    _, ConfigError, _ = private.config_classes()
    private.pickle_stage_plainly()
    check_module(module, stage_of(ds_config))
    optimizer = ds_config["optimizer"]
    if optimizer["type"].lower() in ("adam", "adamw") and not optimizer["params"].get("torch_adam"):
        offload = ds_config.get("zero_optimization", {}).get("offload_optimizer") or {}
        load_adam("CPUAdamBuilder" if offload.get("device", "none") != "none" else "FusedAdamBuilder")
    groups = decay_groups(module, optimizer["params"]["weight_decay"])
    if optimizer["type"].lower() != "muon":
        private.import_muon_uncompiled()
    try:
        engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=ds_config)
    except (ValueError, TypeError, ImportError, NotImplementedError, AssertionError, ConfigError) as error:
        raise UserError(f"--ds_config: DeepSpeed refuses this configuration: {error}") from error
    private.look_at_norm_alone(engine)
    private.zero_padding(engine)
    if encoder := getattr(module, "encoder", None):
        gather_for_every_pass(engine, encoder.lm.get_output_embeddings().parameters())
    return engine


def check_module(module: nn.Module, stage: int) -> None:
    """Check that the ZeRO stage can train the module. Raises UserError."""
    if isinstance(module, StepModule):
        comparing = [stream for stream, (objective, _) in module.streams.items() if objective.vectors]
        check_auxiliary_states(stage, [*module.auxiliary_states, *comparing])
