"""Checks of a ds_config: what DeepSpeed would ignore or misread in silence, and what it would refuse later."""

import copy
import difflib
import importlib.util
import inspect
import logging
import math
import re
from typing import Any

import torch
from torch import nn

from xscale import deepspeed_private as private

MONITORS = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}
"""Monitoring section of a ds_config -> the package that it needs, which DeepSpeed imports on rank 0 only."""
SECTIONS = (
    *("fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "data_types", "aio"),
    *("comms_logger", "flops_profiler", "csv_monitor", *MONITORS),
)
KEYS = (
    *SECTIONS,
    *("prescale_gradients", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc", "steps_per_print"),
    *("gradient_clipping", "gradient_predivide_factor"),
    *("communication_data_type", "seq_parallel_communication_data_type"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
)
"""The keys of a ds_config that affect a run of xscale."""
KEYS_OF_SECTION = {
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
    "data_types": ("grad_accum_dtype",),
}
"""The keys of the sections in which DeepSpeed ignores other keys."""
ZERO_KEYS = {
    "cpu_offload": "write offload_optimizer",
    "cpu_offload_param": "write offload_param",
    "parameter_alignment": "xscale aligns weights by their order; leave it out",
    "round_robin_gradients": "checkpoints need the weights of a group one behind the other; leave it out",
    "zenflow": "xscale updates all weights in each step; leave it out",
}
"""Keys of zero_optimization that DeepSpeed accepts and xscale does not, with the remedy."""
ADAM = ("adam", "adamw")
DEEPSPEED_ADAM = ("torch_adam", "adam_w_mode", "bias_correction", "set_grad_none", "fp32_optimizer_states")
"""Parameters of Adam that torch's class lacks."""
WHOLE_WEIGHTS = ("lamb", "adafactor", "muon")
"""Optimizers whose update of a number depends on other numbers of the same weight."""
QUOTED = re.compile(r"true|false|yes|no|on|off|null|[-+.\d]+(e[-+]?\d+)?", re.IGNORECASE)


def config_problems(config: dict[str, Any]) -> list[str]:
    """Return a line for each key that DeepSpeed would ignore, and each value that it would misread, in silence."""
    problems = list[str]()
    for key, section in config.items():
        if key not in KEYS:
            problems += unknown_key(key, section)
        elif key in SECTIONS and not isinstance(section, dict):
            problems.append(f"{key}: {section!r} is not an object")
        elif key in KEYS_OF_SECTION:
            for name in section:
                if name not in KEYS_OF_SECTION[key]:
                    problems.append(f"{key}.{name} is unknown; the keys are {', '.join(KEYS_OF_SECTION[key])}")
            if key != "data_types" and not isinstance(section.get("type"), str):
                problems.append(f"{key}.type is missing")
            if not isinstance(section.get("params", {}), dict):
                problems.append(f"{key}.params: {section['params']!r} is not an object")
    return problems or value_problems(config) + zero_problems(config.get("zero_optimization", {}))


def unknown_key(key: str, value: Any) -> list[str]:
    """Return a line about a key that has no effect, unless it is a section of another name that is switched off."""
    similar = difflib.get_close_matches(key.lower(), KEYS, n=1, cutoff=0.65)
    if similar:
        return [f"{key} has no effect in a run of xscale; did you mean {similar[0]}? Else leave it out"]
    if value == {} or (isinstance(value, dict) and value.get("enabled") is False):
        return []
    return [f"{key} has no effect in a run of xscale; leave it out"]


def value_problems(config: dict[str, Any]) -> list[str]:
    problems = list[str]()
    for name, value in leaves(config):
        if isinstance(value, float) and not math.isfinite(value):  # NaN could not be compared between ranks
            problems.append(f"{name} is not a finite number")
        if isinstance(value, str) and QUOTED.fullmatch(value) and name.partition(".")[0] not in MONITORS:
            problems.append(f"{name}: {value!r} is a text; write it without quotes, as true, false, null or a number")
    for name in ("fp16", "bf16"):
        enabled = config.get(name, {}).get("enabled", False)
        if not isinstance(enabled, bool | str):
            problems.append(f'{name}.enabled: {enabled!r} is not true, false or "auto"')
    for section, package in MONITORS.items():
        if config.get(section, {}).get("enabled") and not importlib.util.find_spec(package):
            problems.append(f"{section}: the package {package} is not installed; install it, or leave {section} out")
    optimizer = config.get("optimizer", {"type": ""})
    if optimizer.get("params", {}).get("maximize"):
        problems.append("optimizer.params.maximize would make the loss larger; leave it out")
    if optimizer["type"].lower() in WHOLE_WEIGHTS and config.get("zero_optimization", {}).get("stage"):
        problems.append(
            f"optimizer.type: {optimizer['type']} needs whole weights, and ZeRO divides weights among ranks; write "
            f"AdamW, or zero_optimization.stage 0"
        )
    warmup_type = config.get("scheduler", {}).get("params", {}).get("warmup_type", "log")
    if warmup_type not in ("log", "linear"):
        problems.append(f"scheduler.params.warmup_type: {warmup_type!r} would count as log; write log or linear")
    return problems


def zero_problems(zero: dict[str, Any]) -> list[str]:
    problems = list[str]()
    for key, value in zero.items():
        name = f"zero_optimization.{key}"
        if key in ZERO_KEYS and value is not False:
            problems.append(f"{name}: {ZERO_KEYS[key]}")
        if key.startswith("offload_") and isinstance(value, dict) and value.get("device") == "nvme":
            problems.append(f"{name}.device = nvme: untested with xscale; below stage 3 it works as cpu; write cpu")
        if key.startswith("zero_quantized_") and value is True and zero.get("stage", 0) != 3:
            problems.append(f"{name} has no effect below stage 3; take stage 3, or leave it out")
    return problems


def leaves(tree: Any, where: str = "") -> list[tuple[str, Any]]:
    """Return the values of a tree of dictionaries and lists with their dotted names."""
    if not isinstance(tree, dict | list):
        return [(where, tree)]
    values = list[tuple[str, Any]]()
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        values += leaves(value, f"{where}.{key}" if where else str(key))
    return values


def building_problem(resolved: dict[str, Any]) -> str | None:
    """Return the error of building DeepSpeed's configuration, and the optimizer and scheduler for a single weight, and
    of taking a few steps; None if all works. Without this check, a start or a later step would end with a traceback."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    DeepSpeedConfig, _, _ = private.config_error_and_dtypes()
    part = "DeepSpeed"
    try:
        DeepSpeedConfig({key: value for key, value in copy.deepcopy(resolved).items() if key != "train_batch_size"})
        part = f"optimizer = {resolved['optimizer']}"
        optimizer = build_optimizer(resolved["optimizer"])
        part = f"scheduler = {resolved.get('scheduler')}"
        if "scheduler" in resolved:
            scheduler = build_scheduler(optimizer, resolved["scheduler"])
            for _ in range(3):
                scheduler.step()
    except Exception as error:  # these classes may raise any type
        return f"{part}: {' '.join(str(error).split()) or type(error).__name__}"
    return None


def build_optimizer(optimizer: dict[str, Any]) -> torch.optim.Optimizer:
    """Build an optimizer of a single weight, and take a step. AdamW stands for DeepSpeed's own optimizers, which are
    compiled at the start."""
    kind = optimizer["type"].lower()
    params = optimizer["params"]
    names = set(params)
    optimizer_class: Any = torch.optim.AdamW
    if kind in ADAM:
        names -= set(DEEPSPEED_ADAM)
    elif kind in private.optimizer_names():
        names &= set(inspect.signature(optimizer_class).parameters)
    else:
        optimizer_class = getattr(torch.optim, optimizer["type"])
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.zeros(2, 2)
    built: torch.optim.Optimizer = optimizer_class([weight], **{name: params[name] for name in names})
    built.step()
    return built


def build_scheduler(optimizer: torch.optim.Optimizer, scheduler: dict[str, Any]) -> Any:
    kind = scheduler["type"]
    scheduler_class = private.scheduler_classes().get(kind) or getattr(torch.optim.lr_scheduler, kind)
    return scheduler_class(optimizer, **scheduler.get("params", {}))
