"""Checks of a ds_config find settings that DeepSpeed would ignore, or that would fail only after the start."""

import copy
import logging
from collections.abc import Iterable
from typing import Any

from xscale import deepspeed_private as private

MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
"""The sections in which any text may stand."""
SECTIONS = (
    *("fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "data_types", "aio"),
    *("comms_logger", "flops_profiler", *MONITORS),
)
KEYS = (
    *(*SECTIONS, "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "gradient_predivide_factor", "prescale_gradients", "communication_data_type"),
    *("seq_parallel_communication_data_type", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"),
)
"""The keys of a ds_config that affect a run of xscale."""
ZERO_KEYS = {
    "cpu_offload": "write offload_optimizer",
    "cpu_offload_param": "write offload_param",
    "zenflow": "xscale updates all weights in each step; leave it out",
}
"""Keys of zero_optimization that DeepSpeed accepts and xscale does not, with the remedy."""
ADAM = ("adam", "adamw")
WHOLE_WEIGHTS = ("lamb", "adafactor")
"""Optimizers whose update of a number depends on other numbers of the same weight."""


def check_names(config: dict[str, Any]) -> list[str]:
    """Return a line for each key that DeepSpeed would ignore, and each value that it would misread."""
    problems = [f"{key}: {config[key]!r} is not an object" for key in SECTIONS if type(config.get(key, {})) is not dict]
    for key in () if problems else ("optimizer", "scheduler"):
        section = config.get(key, {"type": ""})
        if not isinstance(section.get("type"), str):
            return [f"{key}.type is missing"]
        if not isinstance(section.get("params", {}), dict):
            return [f"{key}.params: {section['params']!r} is not an object"]
        problems += _unused(f"{key}.", section, ("type", "params", "legacy_fusion"))
    return problems or _unused("", config, KEYS) + _check_values(config)


def _unused(where: str, section: dict[str, Any], known: Iterable[str]) -> list[str]:
    on = [key for key, of in section.items() if of != {} and not (isinstance(of, dict) and of.get("enabled") is False)]
    advice = f"has no effect in a run of xscale; leave it out. Keys with an effect are {', '.join(known)}"
    return [f"{where}{key} {advice}" for key in sorted(set(on) - set(known))]


def _check_values(config: dict[str, Any]) -> list[str]:
    """Return a line for each value that DeepSpeed would silently replace, ignore or read as another."""
    zero, optimizer = config.get("zero_optimization", {}), config.get("optimizer", {})
    kind, stage = optimizer.get("type", "AdamW"), zero.get("stage", 0)
    rise = config.get("scheduler", {}).get("params", {}).get("warmup_type", "log")
    problems = {
        f"zero_optimization.stage = {stage!r}: must be 0, 1, 2 or 3": type(stage) is not int or not 0 <= stage <= 3,
        f"scheduler.params.warmup_type: {rise!r} would count as log; write log or linear": rise
        not in ("log", "linear"),
        "optimizer.params.maximize would make the loss larger; leave it out": optimizer.get("params", {}).get(
            "maximize"
        ),
        f"optimizer.type: {kind} needs two learning rates, and a run has one, train.lr; write AdamW": kind.lower()
        == "muon",
        f"optimizer.type: {kind} needs whole weights, and ZeRO divides weights among ranks; write AdamW, or "
        "zero_optimization.stage 0": kind.lower() in WHOLE_WEIGHTS and stage,
    }
    for key, value in zero.items():
        if key in ZERO_KEYS:
            problems[f"zero_optimization.{key}: {ZERO_KEYS[key]}"] = True
        nvme = (
            f"zero_optimization.{key}.device = nvme: untested with xscale, and below stage 3 it works as cpu; write cpu"
        )
        problems[nvme] = key.startswith("offload_") and isinstance(value, dict) and value.get("device") == "nvme"
        unused = f"zero_optimization.{key} has no effect below stage 3; take stage 3, or leave it out"
        problems[unused] = key.startswith("zero_quantized_") and value is True and stage != 3
    for name in ("fp16", "bf16"):
        enabled = config.get(name, {}).get("enabled", "auto")
        wrong = enabled != "auto" and type(enabled) is not bool
        problems[f'{name}.enabled: {enabled!r} is not true, false or "auto"'] = wrong
    unused_types = _unused("data_types.", config.get("data_types", {}), ("grad_accum_dtype",))
    return [line for line, found in problems.items() if found] + unused_types


def deepspeed_refusal(resolved: dict[str, Any]) -> str | None:
    """Return the error with which DeepSpeed refuses to read a configuration, or None if it reads it."""
    DeepSpeedConfig, _ = private.config_classes()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        DeepSpeedConfig({k: v for k, v in copy.deepcopy(resolved).items() if k != "train_batch_size"})
    except Exception as error:  # its classes raise ValidationError, AssertionError, AttributeError and others
        if hasattr(error, "errors"):  # pydantic's
            return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['input']!r}: {e['msg']}" for e in error.errors())
        return " ".join(str(error).split()) or type(error).__name__
    return None
