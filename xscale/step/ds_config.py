"""A ds_config file and a recipe made one.

ds_configs are standard DeepSpeed JSON. "auto" (or absence) leaves a value to the recipe; a number that differs from
the recipe's is an error.
"""

import difflib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xscale.config import Recipe
from xscale.errors import UserError
from xscale.step.zero import check_stage, stage_of

AUTO = "auto"
_WARMUP = ("warmup_num_steps", "warmup_max_lr", "warmup_min_lr")
SCHEDULES = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": (*_WARMUP, "total_num_steps"),
    "WarmupCosineLR": ("warmup_num_steps", "total_num_steps"),
}
"""Parameters of DeepSpeed's schedulers that the recipe gives where ds_config does not."""

ROWS = 'the recipe\'s streams say what a step holds, and train.max_tokens how it is cut into rows; write "auto" here'

SECTIONS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("prescale_gradients", "gradient_predivide_factor", "communication_data_type", "zero_allow_untested_optimizer"),
    *("fp16", "bf16", "bfloat16", "zero_optimization", "optimizer", "scheduler", "checkpoint", "data_types"),
    *("torch_autocast", "steps_per_print", "wall_clock_breakdown", "comms_logger", "flops_profiler"),
    *("seq_parallel_communication_data_type", "sparse_gradients", "managed_gradient_accumulation"),
)
"""Keys of a ds_config near which a mistake is looked for; others are left to DeepSpeed."""


@dataclass(frozen=True)
class Hardware:
    """What decides the precision."""

    device: str
    fp16: bool
    bf16: bool

    @classmethod
    def here(cls) -> "Hardware":
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        return cls(accelerator.device_name(), accelerator.is_fp16_supported(), accelerator.is_bf16_supported())


@dataclass(frozen=True)
class EngineConfig:
    """What DeepSpeed is given."""

    resolved: dict[str, Any]
    precision: str
    stage: int
    """Of ZeRO."""
    notes: list[str]
    """Lines to print."""


def load_ds_config(path: Path, recipe: Recipe, world: int, hardware: Hardware) -> EngineConfig:
    return resolve_ds_config(read_ds_config(path), path, recipe, world, hardware)


def read_ds_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
    except FileNotFoundError:
        raise UserError(f"--ds_config {path} not found; shipped ones are in ds_configs/") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"--ds_config {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"--ds_config {path}: needs a JSON object")
    problems = _misnamed(config)
    if problems:
        raise UserError(f"--ds_config {path}:\n" + "\n".join(f"  {problem}" for problem in problems))
    return config


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError for a key that stands twice: the last one would win."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


def _misnamed(config: dict[str, Any]) -> list[str]:
    """What DeepSpeed would ignore, or find only when the engine is built."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    problems = []
    for key, section in config.items():
        meant = difflib.get_close_matches(key, SECTIONS, n=1, cutoff=0.7)
        if meant and key not in SECTIONS:
            problems.append(f"{key} is nothing that DeepSpeed reads; did you mean {meant[0]}?")
        if key in ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16") and not isinstance(section, dict):
            return [*problems, f"{key}: {section!r} is not an object"]
        if key in ("optimizer", "scheduler") and not isinstance(section.get("type"), str):
            return [*problems, f"{key}.type is missing"]
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:
        problems.append(f"zero_optimization.stage = {stage!r}: must be 0, 1, 2 or 3")
    if config.get("managed_gradient_accumulation", True) is not True:
        problems.append("managed_gradient_accumulation = false: a step is one accumulation of xscale's; leave it out")

    if isinstance(section := config.get("checkpoint"), dict) and section.get("writer"):
        problems.append(
            "checkpoint.writer: xscale itself writes in the background (checkpoint.background); leave it out"
        )

    def check(section: str, classes: list[type], extra: Sequence[str] = ()) -> None:
        known = {*extra, *(name for c in classes for name in inspect.signature(c).parameters)}
        for name in sorted(set(config[section].get("params", ())) - known):
            meant = difflib.get_close_matches(name, known, n=1)
            advice = f"; did you mean {meant[0]}?" if meant else ""
            problems.append(f"{section}.params.{name} is no parameter of {config[section]['type']}{advice}")

    kind = config.get("optimizer", {}).get("type", "AdamW")
    if "optimizer" in config and kind.lower() in ("adam", "adamw"):
        own = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
        check("optimizer", [torch.optim.AdamW, DeepSpeedCPUAdam, FusedAdam], own)
    elif kind.lower() not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, kind):
        problems.append(f"optimizer.type: {kind} is none of {', '.join(DEEPSPEED_OPTIMIZERS)}, or of torch.optim")
    kind = config.get("scheduler", {}).get("type", "WarmupDecayLR")
    scheduler = getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind, None)
    if scheduler is None:
        known = ", ".join(lr_schedules.VALID_LR_SCHEDULES)
        problems.append(f"scheduler.type: {kind} is none of {known}, or of torch.optim.lr_scheduler")
    elif "scheduler" in config:
        check("scheduler", [scheduler])
    return problems


def resolve_ds_config(
    config: dict[str, Any], path: Path, recipe: Recipe, world: int, hardware: Hardware
) -> EngineConfig:
    """DeepSpeed's config with every "auto" filled. Raises UserError naming every contradiction."""
    resolved = json.loads(json.dumps(config))
    problems: list[str] = []
    _fill_sizes(resolved, recipe, world, problems)
    _own(problems, resolved, "", "gradient_clipping", recipe.train.max_grad_norm, "train.max_grad_norm")
    _fill_optimizer(resolved, recipe, hardware, problems)
    _fill_scheduler(resolved, recipe, problems)
    zero = resolved.get("zero_optimization", {})
    if zero.get("overlap_comm") == AUTO:
        zero["overlap_comm"] = world > 1  # DeepSpeed then waits for the device after every backward pass

    precision, notes = _resolve_precision(resolved, recipe.train.precision, hardware, problems)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f'ds_config {path} and the recipe disagree; write "auto" or the same value:\n{lines}')
    unfilled = [f"  {key}" for key in _autos(resolved)]
    if unfilled:
        lines = "\n".join(unfilled)
        raise UserError(f'ds_config {path}: no recipe has a value for these; write one instead of "auto":\n{lines}')
    problem = check_stage(stage_of(resolved), precision, recipe.train.compile)
    if problem:
        raise UserError(f"ds_config {path}: {problem}")
    resolved.setdefault("steps_per_print", None)
    resolved.setdefault("zero_allow_untested_optimizer", True)
    return EngineConfig(resolved, precision, stage_of(resolved), notes)


def _own(problems: list[str], section: dict[str, Any], where: str, key: str, value: Any, field: str) -> None:
    """What the recipe's `field` says goes into a section; another value there is a problem."""
    given = section.get(key, AUTO)
    if given not in (AUTO, value):
        problems.append(f"{where}{key} = {given} contradicts the recipe's {field} = {value}")
    section[key] = value


def _fill_sizes(resolved: dict[str, Any], recipe: Recipe, world: int, problems: list[str]) -> None:
    """Nominal: what DeepSpeed counts is a step of one pass on each rank."""
    samples = sum(stream.samples or 0 for stream in recipe.streams.values())
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": world}
    for key, n in sizes.items():
        given = resolved.get(key, AUTO)
        if given != AUTO and not (key == "train_batch_size" and given == samples):
            problems.append(f"{key} = {given}: {ROWS}")
        resolved[key] = n


def _fill_optimizer(resolved: dict[str, Any], recipe: Recipe, hardware: Hardware, problems: list[str]) -> None:
    params = resolved.setdefault("optimizer", {"type": "AdamW"}).setdefault("params", {"torch_adam": True})
    _own(problems, params, "optimizer.params.", "lr", recipe.train.lr, "train.lr")
    _own(problems, params, "optimizer.params.", "weight_decay", recipe.train.weight_decay, "train.weight_decay")
    for key, default in (("betas", [0.9, 0.999]), ("eps", 1e-8)):
        if params.get(key, AUTO) == AUTO:
            params[key] = default
    if params.get("torch_adam") and "foreach" not in params:
        params.setdefault("fused", hardware.device in ("cuda", "cpu"))


def _fill_scheduler(resolved: dict[str, Any], recipe: Recipe, problems: list[str]) -> None:
    scheduler = resolved.setdefault("scheduler", {"type": "WarmupDecayLR"})
    params, takes = scheduler.setdefault("params", {"warmup_type": "linear"}), SCHEDULES.get(scheduler["type"], ())
    if params.get("warmup_min_lr", AUTO) == AUTO and "warmup_min_lr" in takes:
        params["warmup_min_lr"] = 0.0  # also where the decay ends
    owned = {
        "total_num_steps": (recipe.train.steps, "train.steps"),
        "warmup_num_steps": (max(recipe.warmup_steps(), 2), "train.warmup, in steps"),
        "warmup_max_lr": (recipe.train.lr, "train.lr"),
    }
    for key, (value, field) in owned.items():
        if key in params or key in takes:
            _own(problems, params, "scheduler.params.", key, value, field)


def _autos(tree: Any, where: str = "") -> list[str]:
    """Dotted names of the keys whose value is "auto"."""
    if isinstance(tree, dict):
        return [name for key, value in tree.items() for name in _autos(value, f"{where}.{key}" if where else key)]
    return [where] if tree == AUTO else []


def _resolve_precision(
    resolved: dict[str, Any], wanted: str, hardware: Hardware, problems: list[str]
) -> tuple[str, list[str]]:
    """Writes fp16.enabled and bf16.enabled. An explicit request is met or refused; "auto" falls back to fp32."""
    supported = {"fp16": hardware.fp16, "bf16": hardware.bf16, "fp32": True}
    given = {name: resolved.get(name, {}).get("enabled", False) for name in ("fp16", "bf16")}
    demanded = [name for name, enabled in given.items() if enabled is True]
    if len(demanded) == 2:
        problems.append("fp16.enabled = true contradicts bf16.enabled = true")
    if wanted == "auto":
        notes = []
        preferred = demanded or [name for name, enabled in given.items() if enabled == AUTO]
        precision = next((name for name in preferred if supported[name]), [*preferred, "fp32"][0])
        if not supported[precision] and not demanded:
            notes = [f"precision: {precision} is not native on this {hardware.device}; training in fp32"]
            precision = "fp32"
    else:
        notes, precision = [], wanted
        problems += [
            f"{name}.enabled = true contradicts the recipe's train.precision = {wanted}"
            for name in demanded
            if name != wanted
        ]
        problems += [
            f"{name}.enabled = false contradicts the recipe's train.precision = {wanted}"
            for name in ("fp16", "bf16")
            if name == wanted and resolved.get(name, {}).get("enabled") is False
        ]
    if not supported[precision]:
        raise UserError(
            f"precision {precision} was asked for, but this {hardware.device} has no native {precision}. "
            f"Use train.precision auto, bf16 or fp32, or run on a device that has it"
        )
    for name in ("fp16", "bf16"):
        if name in resolved or precision == name:
            resolved[name] = resolved.get(name, {}) | {"enabled": precision == name}
    return precision, notes
