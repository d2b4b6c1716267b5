"""Checks of a ds_config find settings that DeepSpeed would ignore, or that would fail only after the start."""

import copy
import difflib
import importlib.util
import inspect
import logging
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from xscale import deepspeed_private as private

_NULL = type(None)
NUMBER = (int, float)
KEYS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "data_types", "aio"), (dict,)),
    **dict.fromkeys(("comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet"), (dict,)),
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), (int,)),
    **dict.fromkeys(("communication_data_type", "seq_parallel_communication_data_type"), (str, _NULL)),
    **dict.fromkeys(("prescale_gradients", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), (bool,)),
    **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"), (bool,)),
    "gradient_clipping": NUMBER,
    "gradient_predivide_factor": NUMBER,
    "steps_per_print": (int, _NULL),
}
"""The keys of a ds_config that affect a run of xscale, and the types of their values."""
ZERO_KEYS = {
    "cpu_offload": "write offload_optimizer",
    "cpu_offload_param": "write offload_param",
    "zenflow": "xscale updates all weights in each step; leave it out",
}
"""Keys of zero_optimization that DeepSpeed accepts and xscale does not, with the remedy."""
MONITORS = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}
"""Monitoring section of a ds_config -> the package that it needs."""
KIND = {
    (dict,): "an object",
    (bool,): "true or false",
    (int,): "a whole number",
    NUMBER: "a number",
    (int, _NULL): "a whole number or null",
    (str, _NULL): "a text or null",
}
ADAM = ("adam", "adamw")
WHOLE_WEIGHTS = ("lamb", "adafactor")
"""Optimizers whose update of a number depends on other numbers of the same weight."""
DEEPSPEED_ADAM = ("torch_adam", "adam_w_mode", "bias_correction", "set_grad_none", "fp32_optimizer_states")
"""Parameters of Adam that only DeepSpeed's own classes have."""


def check_names(config: dict[str, Any]) -> list[str]:
    """Return a line for each key that DeepSpeed would ignore, and each value that it would misread."""
    problems = [line for key, value in config.items() if (line := _check_key(key, value))]
    if problems:
        return problems
    for key in ("optimizer", "scheduler"):
        section = config.get(key, {"type": ""})
        if not isinstance(section.get("type"), str):
            return [f"{key}.type is missing"]
        if not isinstance(section.get("params", {}), dict):
            return [f"{key}.params: {section['params']!r} is not an object"]
        problems += _unknown(key, section, ("type", "params", "legacy_fusion"))
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        problems.append(f"zero_optimization.stage = {stage!r}: must be 0, 1, 2 or 3")
    problems += [f"zero_optimization.{key}: {why}" for key, why in ZERO_KEYS.items() if key in zero]
    problems += _check_zero(zero)
    problems += _check_params(config.get("optimizer", {}).get("params", {}))
    rise = config.get("scheduler", {}).get("params", {}).get("warmup_type", "log")
    if rise not in ("log", "linear"):
        problems.append(f"scheduler.params.warmup_type: {rise!r} would count as log; write log or linear")
    problems += [
        f"{key}: the package {package} is not installed; pip install {package}, or leave {key} out"
        for key, package in MONITORS.items()
        if config.get(key, {}).get("enabled") and not importlib.util.find_spec(package)
    ]
    for name in ("fp16", "bf16"):
        enabled = config.get(name, {}).get("enabled", "auto")
        if enabled != "auto" and type(enabled) is not bool:
            problems.append(f'{name}.enabled: {enabled!r} is not true, false or "auto"')
    problems += _unknown("data_types", config.get("data_types", {}), ("grad_accum_dtype",))
    return problems + _check_types(config)


def _check_key(key: str, value: Any) -> str:
    if key not in KEYS:
        off = value == {} or (isinstance(value, dict) and value.get("enabled") is False)
        meant = difflib.get_close_matches(key.lower(), KEYS, n=1, cutoff=0.65)
        advice = f"; did you mean {meant[0]}? Else leave it out" if meant else "; leave it out"
        return "" if off and not meant else f"{key} has no effect in a run of xscale{advice}"
    kinds = KEYS[key]
    if (value == "auto" and dict not in kinds) or type(value) in kinds:
        return ""
    return f"{key}: {value!r} is not {KIND[kinds]}"


def _check_zero(zero: dict[str, Any]) -> list[str]:
    """Return a line for each setting that DeepSpeed silently replaces or ignores below stage 3."""
    problems = [
        f"zero_optimization.{key}.device = nvme: untested with xscale, and below stage 3 it works as cpu; write cpu"
        for key in ("offload_optimizer", "offload_param")
        if isinstance(zero.get(key), dict) and zero[key].get("device") == "nvme"
    ]
    return problems + [
        f"zero_optimization.{key} has no effect below stage 3; take stage 3, or leave it out"
        for key in zero
        if key.startswith("zero_quantized_") and zero[key] is True and zero.get("stage", 0) != 3
    ]


def _check_params(params: dict[str, Any]) -> list[str]:
    """Return a line for each wrong optimizer parameter that the optimizer itself would not refuse."""
    problems = ["optimizer.params.maximize would make the loss larger; leave it out"] if params.get("maximize") else []
    return problems + [
        f"optimizer.params.{name}: {params[name]!r} is not true or false"
        for name in DEEPSPEED_ADAM
        if name in params and type(params[name]) is not bool
    ]


def _unknown(where: str, section: dict[str, Any], known: Iterable[str]) -> list[str]:
    problems = []
    for name in sorted(set(section) - set(known)):
        meant = difflib.get_close_matches(name, known, n=1)
        problems.append(f"{where}.{name} is unknown" + (f"; did you mean {meant[0]}?" if meant else ""))
    return problems


def _check_types(config: dict[str, Any]) -> list[str]:
    """Return a line if the type of the optimizer or of the scheduler does not exist."""
    kind = config.get("optimizer", {}).get("type", "AdamW")
    own = private.optimizers()
    if kind.lower() not in own and not _is_class(torch.optim, kind, torch.optim.Optimizer):
        return [f"optimizer.type: {kind} is none of {', '.join(own)}, or of torch.optim"]
    if kind.lower() == "muon":
        return [f"optimizer.type: {kind} needs two learning rates, and a run has one, train.lr; write AdamW"]
    if kind.lower() in WHOLE_WEIGHTS and config.get("zero_optimization", {}).get("stage", 0):
        return [
            f"optimizer.type: {kind} needs whole weights, and ZeRO divides weights among ranks; write AdamW, or "
            f"zero_optimization.stage 0"
        ]
    schedule = config.get("scheduler", {}).get("type", "WarmupLR")
    if scheduler_class(schedule) is None:
        there = ", ".join(private.schedulers())
        return [f"scheduler.type: {schedule} is none of {there}, or of torch.optim.lr_scheduler"]
    return []


def scheduler_class(kind: str) -> Any:
    """Return the class of a scheduler, or None."""
    if kind in (own := private.schedulers()):
        return own[kind]
    named = _is_class(torch.optim.lr_scheduler, kind, torch.optim.lr_scheduler.LRScheduler)
    return getattr(torch.optim.lr_scheduler, kind) if named else None


def _is_class(module: Any, name: str, base: type) -> bool:
    found = getattr(module, name, None)
    return isinstance(found, type) and issubclass(found, base) and found is not base


def validate_by_building(resolved: dict[str, Any]) -> list[str]:
    """Build DeepSpeed's configuration, the optimizer and the scheduler for a single weight, take a few steps and return
    the error, if any. Without this check, a start or a later step would end with a traceback."""
    DeepSpeedConfig, _, DtypeEnum = private.config_classes()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    kind, params = resolved["optimizer"]["type"], resolved["optimizer"].get("params", {})
    stand_in, known = torch.optim.AdamW, set(params) - set(DEEPSPEED_ADAM)
    if kind.lower() not in private.optimizers():
        stand_in = getattr(torch.optim, kind)
    elif kind.lower() not in ADAM:  # DeepSpeed's other optimizers check their own parameters
        known &= set(inspect.signature(stand_in).parameters)
    where = ""
    try:
        DeepSpeedConfig({k: v for k, v in copy.deepcopy(resolved).items() if k != "train_batch_size"})
        if (dtype := resolved.get("data_types", {}).get("grad_accum_dtype")) is not None:
            where = "data_types.grad_accum_dtype: "
            DtypeEnum(dtype)
        where = f"optimizer.params = {params}: "
        weight = nn.Parameter(torch.zeros(2, 2))
        weight.grad = torch.zeros(2, 2)
        optimizer = stand_in([weight], **{name: params[name] for name in known})
        optimizer.step()
        scheduler = resolved.get("scheduler", {})
        where = f"scheduler.params = {scheduler.get('params', {})}: "
        made = scheduler and scheduler_class(scheduler["type"])(optimizer, **scheduler.get("params", {}))
        for _ in range(3 if made else 0):
            made.step()
            if not all(math.isfinite(group["lr"]) for group in optimizer.param_groups):
                raise ValueError("the learning rate is not finite")
    except Exception as error:  # these classes may raise any type
        return [where + _line(error)]
    return []


def _line(error: Exception) -> str:
    """Return the error in one line: the fields of a pydantic error, or the message of another."""
    if hasattr(error, "errors"):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['input']!r}: {e['msg']}" for e in error.errors())
    return " ".join(str(error).split()) or type(error).__name__
