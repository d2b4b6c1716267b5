"""Checks of a ds_config find settings that DeepSpeed would ignore, or that would fail only after the start."""

import copy
import difflib
import importlib.util
import inspect
import logging
import math
from collections.abc import Iterable
from types import NoneType
from typing import Any

import torch
from torch import nn

from xscale import deepspeed_private as private

SECTIONS = (
    *("fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "data_types", "aio"),
    *("comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet"),
)
FLAGS = (
    *("prescale_gradients", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"),
)
VALUES: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("gradient_clipping", "gradient_predivide_factor"), ("a number", (int, float))),
    **dict.fromkeys(("communication_data_type", "seq_parallel_communication_data_type"), ("a text", (str, NoneType))),
    "steps_per_print": ("a whole number", (int, NoneType)),
}
"""The keys whose values DeepSpeed uses without a check."""
KEYS = (
    *(*SECTIONS, *FLAGS, *VALUES),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
)
"""The keys of a ds_config that affect a run of xscale."""
ZERO_KEYS = {
    "cpu_offload": "write offload_optimizer",
    "cpu_offload_param": "write offload_param",
    "parameter_alignment": "xscale aligns weights by their order; leave it out",
    "round_robin_gradients": "checkpoints need the weights of a group one behind the other; leave it out",
    "zenflow": "xscale updates all weights in each step; leave it out",
}
"""Keys of zero_optimization that DeepSpeed accepts and xscale does not, with the remedy."""
MONITORS = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}
"""Monitoring section of a ds_config -> the package that it needs, which DeepSpeed imports on rank 0 only."""
ADAM = ("adam", "adamw")
WHOLE_WEIGHTS = ("lamb", "adafactor")
"""Optimizers whose update of a number depends on other numbers of the same weight."""
DEEPSPEED_ADAM = ("torch_adam", "adam_w_mode", "bias_correction", "set_grad_none", "fp32_optimizer_states")
"""Parameters of Adam that only DeepSpeed's own classes have."""


def config_problems(config: dict[str, Any]) -> list[str]:
    """Return a line for each key that DeepSpeed would ignore, and each value that it would misread."""
    problems = [line for key, value in config.items() if (line := _key_problem(key, value))]
    for key in () if problems else ("optimizer", "scheduler"):
        section = config.get(key, {"type": ""})
        if not isinstance(section.get("type"), str):
            return [f"{key}.type is missing"]
        if not isinstance(section.get("params", {}), dict):
            return [f"{key}.params: {section['params']!r} is not an object"]
        problems += _unknown(key, section, ("type", "params", "legacy_fusion"))
    return problems or _value_problems(config) + _type_problems(config)


def _key_problem(key: str, value: Any) -> str:
    """Return what is wrong with a key of the ds_config, or an empty string."""
    if key not in KEYS:
        off = value == {} or (isinstance(value, dict) and value.get("enabled") is False)
        meant = difflib.get_close_matches(key.lower(), KEYS, n=1, cutoff=0.65)
        advice = f"; did you mean {meant[0]}? Else leave it out" if meant else "; leave it out"
        return "" if off and not meant else f"{key} has no effect in a run of xscale{advice}"
    if key in SECTIONS and not isinstance(value, dict):
        return f"{key}: {value!r} is not an object"
    kind, types = ("true or false", (bool,)) if key in FLAGS else VALUES.get(key, ("", (type(value),)))
    if value != "auto" and type(value) not in types:
        return f"{key}: {value!r} is not {kind}"
    return ""


def _value_problems(config: dict[str, Any]) -> list[str]:
    """Return a line for each value that DeepSpeed would silently replace, ignore or read as another."""
    zero, params = config.get("zero_optimization", {}), config.get("optimizer", {}).get("params", {})
    stage, rise = zero.get("stage", 0), config.get("scheduler", {}).get("params", {}).get("warmup_type", "log")
    problems = {
        f"zero_optimization.stage = {stage!r}: must be 0, 1, 2 or 3": type(stage) is not int or not 0 <= stage <= 3,
        f"scheduler.params.warmup_type: {rise!r} would count as log; write log or linear": rise
        not in ("log", "linear"),
        "optimizer.params.maximize would make the loss larger; leave it out": params.get("maximize"),
    }
    for key, value in zero.items():
        if key in ZERO_KEYS:
            problems[f"zero_optimization.{key}: {ZERO_KEYS[key]}"] = value is not False
        nvme = (
            f"zero_optimization.{key}.device = nvme: untested with xscale, and below stage 3 it works as cpu; write cpu"
        )
        problems[nvme] = key.startswith("offload_") and isinstance(value, dict) and value.get("device") == "nvme"
        unused = f"zero_optimization.{key} has no effect below stage 3; take stage 3, or leave it out"
        problems[unused] = key.startswith("zero_quantized_") and value is True and stage != 3
    for name in DEEPSPEED_ADAM:
        flag = params.get(name, True)
        problems[f"optimizer.params.{name}: {flag!r} is not true or false"] = type(flag) is not bool
    for name in ("fp16", "bf16"):
        enabled = config.get(name, {}).get("enabled", "auto")
        wrong = enabled != "auto" and type(enabled) is not bool
        problems[f'{name}.enabled: {enabled!r} is not true, false or "auto"'] = wrong
    for key, package in MONITORS.items():
        line = f"{key}: the package {package} is not installed; pip install {package}, or leave {key} out"
        problems[line] = config.get(key, {}).get("enabled") and not importlib.util.find_spec(package)
    unknown = _unknown("data_types", config.get("data_types", {}), ("grad_accum_dtype",))
    return [line for line, found in problems.items() if found] + unknown


def _unknown(where: str, section: dict[str, Any], known: Iterable[str]) -> list[str]:
    """Return a line for each key of a section of the ds_config that is not one of the `known` keys."""
    problems = []
    for name in sorted(set(section) - set(known)):
        meant = difflib.get_close_matches(name, known, n=1)
        problems.append(f"{where}.{name} is unknown" + (f"; did you mean {meant[0]}?" if meant else ""))
    return problems


def _type_problems(config: dict[str, Any]) -> list[str]:
    """Return a line if the optimizer's or the scheduler's type does not exist or does not work with xscale."""
    kind = config.get("optimizer", {}).get("type", "AdamW")
    own = private.optimizer_names()
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
        there = ", ".join(private.scheduler_classes())
        return [f"scheduler.type: {schedule} is none of {there}, or of torch.optim.lr_scheduler"]
    return []


def scheduler_class(kind: str) -> Any:
    """Return the class of a scheduler, DeepSpeed's or torch's, or None if there is none."""
    if kind in (own := private.scheduler_classes()):
        return own[kind]
    named = _is_class(torch.optim.lr_scheduler, kind, torch.optim.lr_scheduler.LRScheduler)
    return getattr(torch.optim.lr_scheduler, kind) if named else None


def _is_class(module: Any, name: str, base: type) -> bool:
    found = getattr(module, name, None)
    return isinstance(found, type) and issubclass(found, base) and found is not base


def building_problem(resolved: dict[str, Any]) -> str | None:
    """Return the error of building DeepSpeed's configuration, and the optimizer and scheduler for a single weight, and
    of taking a few steps; None if all works. Without this check, a start or a later step would end with a traceback."""
    DeepSpeedConfig, _, DtypeEnum = private.config_error_and_dtypes()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    kind, params = resolved["optimizer"]["type"], resolved["optimizer"].get("params", {})
    stand_in, known = torch.optim.AdamW, set(params) - set(DEEPSPEED_ADAM)
    if kind.lower() not in private.optimizer_names():
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
        if hasattr(error, "errors"):  # pydantic's
            return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['input']!r}: {e['msg']}" for e in error.errors())
        return where + (" ".join(str(error).split()) or type(error).__name__)
    return None
