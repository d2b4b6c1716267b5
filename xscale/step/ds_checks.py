"""What is wrong with a ds_config whatever the recipe: names, types, what DeepSpeed would ignore or meet too late."""

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

NUMBER = (int, float)
_NULL = type(None)
KEYS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "data_types", "aio"), (dict,)),
    **dict.fromkeys(("comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet"), (dict,)),
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), (int,)),
    **dict.fromkeys(("communication_data_type", "seq_parallel_communication_data_type"), (str, _NULL)),
    **dict.fromkeys(("prescale_gradients", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"), (bool,)),
    **dict.fromkeys(("managed_gradient_accumulation", "wall_clock_breakdown", "memory_breakdown"), (bool,)),
    **dict.fromkeys(("dump_state", "disable_python_gc", "sparse_gradients"), (bool,)),
    "gradient_clipping": NUMBER,
    "gradient_predivide_factor": NUMBER,
    "steps_per_print": (int, _NULL),
}
"""Keys of a ds_config that do something in a run of xscale, and the types of their values."""
NOT_HERE = {
    "bfloat16": "DeepSpeed trains in bf16 by it, but reports fp32; write bf16",
    "amp": "the precision is fp16's, bf16's or fp32; leave it out",
    "torch_autocast": "the precision is fp16's, bf16's or fp32; leave it out",
    "activation_checkpointing": "xscale's is the recipe's train.activation_checkpointing; leave it out",
    "checkpoint": "xscale writes checkpoints itself, in the background (checkpoint.background); leave it out",
    "gradient_allreduce_op": "gradients are summed by targets, over all ranks; leave it out",
}
"""Keys that DeepSpeed knows and that would change what a run does without its knowledge."""
OF_ZERO = {
    "cpu_offload": "write offload_optimizer",
    "cpu_offload_param": "write offload_param",
    "compute_grad_norm": "xscale reports the norm of every step; leave it out",
    "zenflow": "a step of xscale is one update of all weights; leave it out",
}
"""The same of zero_optimization."""
MONITORS = {"wandb": "wandb", "comet": "comet_ml", "tensorboard": "tensorboard"}
"""Sections that need a package of that name."""
KIND = {
    (dict,): "an object",
    (bool,): "true or false",
    (int,): "a whole number",
    NUMBER: "a number",
    (int, _NULL): "a whole number or null",
    (str, _NULL): "a text or null",
}
OWN = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""Parameters of Adam that DeepSpeed itself reads."""


def check_names(config: dict[str, Any]) -> list[str]:
    """Unknown keys and wrong types, a line each."""
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
    problems += [f"zero_optimization.{key}: {why}" for key, why in OF_ZERO.items() if key in zero]
    problems += _check_zero(zero, stage)
    problems += [
        f"{key}: the package {package} is not installed; pip install {package}, or leave {key} out"
        for key, package in MONITORS.items()
        if config.get(key, {}).get("enabled") and not importlib.util.find_spec(package)
    ]
    for name in ("fp16", "bf16"):
        enabled = config.get(name, {}).get("enabled", "auto")
        if enabled != "auto" and type(enabled) is not bool:
            problems.append(f'{name}.enabled: {enabled!r} is not true, false or "auto"')
    if config.get("managed_gradient_accumulation", True) is not True:
        problems.append("managed_gradient_accumulation = false: a step is one accumulation of xscale's; leave it out")
    problems += _unknown("data_types", config.get("data_types", {}), ("grad_accum_dtype",))
    problems += _check_optimizer(config.get("optimizer"))
    return problems + _check_scheduler(config.get("scheduler"))


def _check_key(key: str, value: Any) -> str:
    off = value is False or value == {} or (isinstance(value, dict) and value.get("enabled") is False)
    if key in NOT_HERE:
        return "" if off and key != "bfloat16" else f"{key}: {NOT_HERE[key]}"
    if key not in KEYS:
        meant = difflib.get_close_matches(key.lower(), KEYS, n=1, cutoff=0.7)
        advice = f"; did you mean {meant[0]}?" if meant else "; leave it out"
        return "" if off and not meant else f"{key} is nothing that a run of xscale reads{advice}"
    kinds = KEYS[key]
    if key == "gradient_predivide_factor" and value in (0, False):
        return f"{key}: {value!r} must be positive"
    if (value == "auto" and dict not in kinds) or type(value) in kinds:
        return ""
    return f"{key}: {value!r} is not {KIND[kinds]}"


def _check_zero(zero: dict[str, Any], stage: Any) -> list[str]:
    """What DeepSpeed takes for something else, or ignores, at this stage."""
    problems = [
        f"zero_optimization.{key}.device = nvme: no run of xscale has been tested with it, and below stage 3 DeepSpeed "
        f"takes it for cpu; write cpu"
        for key in ("offload_optimizer", "offload_param")
        if isinstance(zero.get(key), dict) and zero[key].get("device") == "nvme"
    ]
    return problems + [
        f"zero_optimization.{key} = true does nothing at stage {stage}; take stage 3, or leave it out"
        for key in zero
        if key.startswith("zero_quantized_") and zero[key] is True and stage != 3
    ]


def _unknown(where: str, section: dict[str, Any], known: Iterable[str], of: str = "") -> list[str]:
    problems = []
    for name in sorted(set(section) - set(known)):
        meant = difflib.get_close_matches(name, known, n=1)
        advice = f"; did you mean {meant[0]}?" if meant else ""
        problems.append(f"{where}.{name} is no parameter{of and f' of {of}'}{advice}")
    return problems


def _check_optimizer(section: dict[str, Any] | None) -> list[str]:
    if section is None:
        return []
    own = private.optimizers()
    kind, params = section["type"], section.get("params", {})
    if kind.lower() not in own and not _is_class(torch.optim, kind, torch.optim.Optimizer):
        return [f"optimizer.type: {kind} is none of {', '.join(own)}, or of torch.optim"]
    if kind.lower().startswith("mu") and kind.lower() != "muon" and not importlib.util.find_spec("mup"):
        return [f"optimizer.type: {kind} needs the package mup"]
    if params.get("maximize"):
        return ["optimizer.params.maximize: the run would make its loss larger; leave it out"]
    known = parameters(kind)
    if known is None:
        return []
    return _unknown("optimizer.params", params, known, kind) + _mistyped("optimizer.params", params, known)


def _mistyped(where: str, params: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    """Values of another type than the parameter's default."""
    problems = []
    for name, value in params.items():
        default = defaults.get(name)
        numbers = isinstance(value, list) and all(type(part) in NUMBER for part in value)
        if value == "auto" or value is None:
            continue
        if isinstance(default, bool) and type(value) is not bool:
            problems.append(f"{where}.{name}: {value!r} is not true or false")
        elif type(default) in NUMBER and not numbers and type(value) not in NUMBER:
            problems.append(f"{where}.{name}: {value!r} is not a number")
        elif isinstance(default, tuple) and not (numbers and len(value) == len(default)):
            problems.append(f"{where}.{name}: {value!r} is not a list of {len(default)} numbers")
    return problems


def parameters(kind: str) -> dict[str, Any] | None:
    """What an optimizer takes, and the defaults; None: that is not known before it is built."""
    own: dict[str, list[Any]] = {"adagrad": [torch.optim.Adagrad], **private.lamb_and_lion()}
    own["adam"] = own["adamw"] = [torch.optim.AdamW, *private.adam_classes()]
    classes = own.get(kind.lower()) or ([getattr(torch.optim, kind)] if hasattr(torch.optim, kind) else [])
    found = {name: p.default for c in classes for name, p in inspect.signature(c).parameters.items()}
    if kind.lower() in ("adam", "adamw"):
        found |= dict.fromkeys(OWN, False)
    return {**found, "fused": False, "foreach": False} if "fused" in found else found or None


def _check_scheduler(section: dict[str, Any] | None) -> list[str]:
    if section is None:
        return []
    kind, params = section["type"], section.get("params", {})
    scheduler = schedule(kind)
    if scheduler is None:
        known = ", ".join(private.schedulers())
        return [f"scheduler.type: {kind} is none of {known}, or of torch.optim.lr_scheduler"]
    defaults = {name: p.default for name, p in inspect.signature(scheduler).parameters.items()}
    del defaults["optimizer"]
    for name in ("last_batch_iteration", "last_epoch"):  # where a schedule starts is the checkpoint's
        defaults.pop(name, None)
    problems = _unknown("scheduler.params", params, defaults, kind) + _mistyped("scheduler.params", params, defaults)
    rise = params.get("warmup_type", "log")
    if rise not in ("log", "linear"):
        problems.append(f"scheduler.params.warmup_type: {rise!r} is neither log nor linear")
    return problems


def schedule(kind: str) -> Any:
    """The class of a scheduler, or None."""
    if kind in (own := private.schedulers()):
        return own[kind]
    named = _is_class(torch.optim.lr_scheduler, kind, torch.optim.lr_scheduler.LRScheduler)
    return getattr(torch.optim.lr_scheduler, kind) if named else None


def _is_class(module: Any, name: str, base: type) -> bool:
    found = getattr(module, name, None)
    return isinstance(found, type) and issubclass(found, base) and found is not base


def validate_by_building(resolved: dict[str, Any]) -> list[str]:
    """What DeepSpeed says to the filled config, and three steps of optimizer and schedule on one weight: what else
    would end a start, or a later step, with a traceback."""
    DeepSpeedConfig, DeepSpeedConfigError, DtypeEnum = private.config_classes()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    alone = {k: v for k, v in copy.deepcopy(resolved).items() if k != "train_batch_size"}
    kind, params = resolved["optimizer"]["type"], resolved["optimizer"].get("params", {})
    own = _is_class(torch.optim, kind, torch.optim.Optimizer) and kind.lower() not in ("adam", "adamw", "muon")
    stand_in = getattr(torch.optim, kind) if own else torch.optim.AdamW
    takes = inspect.signature(stand_in).parameters
    where = ""
    try:
        DeepSpeedConfig(alone)
        if (dtype := resolved.get("data_types", {}).get("grad_accum_dtype")) is not None:
            where = "data_types.grad_accum_dtype: "
            DtypeEnum(dtype)
        where = "optimizer.params: "
        weight = nn.Parameter(torch.zeros(2, 2))
        weight.grad = torch.zeros(2, 2)
        optimizer = stand_in([weight], **{k: v for k, v in params.items() if own or k in takes})
        optimizer.step()
        where = "scheduler.params: "
        made = schedule(resolved["scheduler"]["type"])(optimizer, **resolved["scheduler"].get("params", {}))
        for _ in range(3):
            made.step()
            if not all(math.isfinite(group["lr"]) for group in optimizer.param_groups):
                raise ValueError("gives a learning rate that is no number")
    except (DeepSpeedConfigError, AssertionError, ArithmeticError, AttributeError, LookupError) as error:
        return [where + _line(error)]
    except (ValueError, TypeError, RuntimeError) as error:
        return [where + _line(error)]
    return []


def _line(error: Exception) -> str:
    """Of pydantic's errors the fields, of others the message."""
    if hasattr(error, "errors"):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['input']!r}: {e['msg']}" for e in error.errors())
    return " ".join(str(error).split()) or type(error).__name__
