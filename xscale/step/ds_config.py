"""The ds_config of a run: a DeepSpeed JSON file, completed with the values of the recipe.

If a field is "auto" or absent, the recipe sets it. A value that differs from the recipe's is an error.
"""

import copy
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError

from xscale.errors import UserError, indent_lines
from xscale.recipe import Recipe
from xscale.record import parse_json
from xscale.step.zero import zero_stage

AUTO = "auto"
HALF_PRECISIONS = ("fp16", "bf16")
SECTIONS = (
    *("fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "data_types", "aio"),
    *("comms_logger", "flops_profiler", "csv_monitor", "wandb", "comet", "tensorboard"),
)
KEYS = {
    "": (
        *SECTIONS,
        *("prescale_gradients", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
        *("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc", "steps_per_print"),
        *("gradient_clipping", "gradient_predivide_factor"),
        *("communication_data_type", "seq_parallel_communication_data_type"),
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    ),
    "optimizer": ("type", "params", "legacy_fusion"),
    "scheduler": ("type", "params"),
    "data_types": ("grad_accum_dtype",),
}
"""Section in which DeepSpeed ignores unknown keys ("": the file itself) -> its keys that affect a run of xscale."""
UNSUPPORTED = {
    "parameter_alignment": "xscale already stores the weights at aligned addresses. Remove the key",
    "round_robin_gradients": "xscale cannot save correct checkpoints with this key. Remove the key",
    "zenflow": "with this key, DeepSpeed updates some weights later than others, which xscale does not support. "
    "Remove the key",
    "cpu_offload": 'DeepSpeed has renamed this key. Write "offload_optimizer": {"device": "cpu"} instead',
    "cpu_offload_param": 'DeepSpeed has renamed this key. Write "offload_param": {"device": "cpu"} instead',
}
"""Key of zero_optimization that xscale does not support -> the remedy."""
STAGE_3_KEYS = ("stage3_", "offload_param", "zero_quantized_")
"""The beginnings of the keys of zero_optimization that have an effect only at ZeRO stage 3."""
ADAM = ("adam", "adamw")
TRUTH_VALUE = (bool | None, "true, false or null")
NOT_NEGATIVE = (Literal["auto"] | Annotated[float, Field(ge=0)], 'a number that is 0 or more, or "auto"')
DECAY_RATE = Annotated[float, Field(ge=0, lt=1)]
TYPES: dict[str, tuple[Any, str]] = {
    "steps_per_print": (Annotated[float, Field(ge=1)] | None, "a number that is 1 or more, or null"),
    "scheduler.params.warmup_type": (Literal["log", "linear"], '"log" or "linear"'),
    "optimizer.params.maximize": (Literal[False] | None, "false, because with true the optimizer would raise the loss"),
    **dict.fromkeys(
        (
            *("prescale_gradients", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
            *("wall_clock_breakdown", "memory_breakdown", "dump_state", "disable_python_gc"),
        ),
        TRUTH_VALUE,
    ),
}
"""Dotted key of the ds_config -> the type of its value, and the type in words. DeepSpeed does not check these types."""
TYPES_OF_ADAM: dict[str, tuple[Any, str]] = {
    "betas": (Literal["auto"] | tuple[DECAY_RATE, DECAY_RATE], 'two numbers from 0 to below 1, or "auto"'),
    **dict.fromkeys(("lr", "eps", "weight_decay"), NOT_NEGATIVE),
    **dict.fromkeys(("amsgrad", "capturable", "differentiable", "set_grad_none", "bias_correction"), TRUTH_VALUE),
    **dict.fromkeys(("torch_adam", "adam_w_mode", "fused", "foreach", "fp32_optimizer_states"), TRUTH_VALUE),
}
"""Parameter of Adam and AdamW, in torch or DeepSpeed -> its type, and the type in words."""
WHOLE_WEIGHTS = ("lamb", "adafactor", "muon")
"""Optimizers that need whole weights, because the update of a number depends on other numbers of the same weight."""
_PACKAGE = Path(__file__).parents[1]
SHIPPED = next(folder / "ds_configs" for folder in (_PACKAGE, _PACKAGE.parent) if (folder / "ds_configs").is_dir())
"""The folder of the shipped ds_configs: inside the package of a wheel, beside the package in a checkout."""
SCHEDULES = {
    "WarmupLR": ("warmup_num_steps", "warmup_max_lr"),
    "WarmupDecayLR": ("warmup_num_steps", "warmup_max_lr", "total_num_steps"),
    "WarmupCosineLR": ("warmup_num_steps", "total_num_steps"),
}
"""DeepSpeed's scheduler -> its parameters that the recipe gives if the ds_config leaves them open."""

MAY_CHANGE = ("lr", "weight_decay", "fused", "foreach")
"""The parameters of the ds_config's optimizer that a resume may change."""

ROWS = 'the recipe defines the batch, by the samples of its streams and train.max_tokens. Write "auto" here'


@dataclass(frozen=True)
class Hardware:
    """The properties of a rank's device that decide the precision and the size of packed rows."""

    device: str
    fp16: bool
    bf16: bool
    memory: int | None = None
    """The bytes of the GPU's memory; None on a CPU."""

    def supports(self, precision: str) -> bool:
        return precision == "fp32" or bool(getattr(self, precision))

    @classmethod
    def of_this_process(cls) -> "Hardware":
        """Return this process's device. Raises UserError for a PyTorch that is built for ROCm."""
        from deepspeed.accelerator import get_accelerator

        if torch.version.hip:
            raise UserError(
                f"this PyTorch {torch.__version__} is built for ROCm (AMD), and xscale supports only CUDA and "
                "CPUs. Install a PyTorch for CUDA or for CPUs"
            )
        accelerator = get_accelerator()
        device = accelerator.device_name()
        memory = accelerator.total_memory() if device == "cuda" else None
        return cls(device, accelerator.is_fp16_supported(), accelerator.is_bf16_supported(), memory)


@dataclass(frozen=True)
class EngineConfig:
    """The resolved configuration of the DeepSpeed engine."""

    resolved: dict[str, Any]
    precision: str
    stage: int
    notes: list[str]
    """The lines to print about the precision."""

    def settings_in_checkpoint(self) -> dict[str, Any]:
        """Return the settings that a checkpoint records. A resume refuses other settings, except another stage."""
        optimizer = self.resolved["optimizer"]
        params = dict(optimizer["params"])
        for name in MAY_CHANGE:
            params.pop(name, None)
        return {
            "stage": self.stage,
            "precision": self.precision,
            "optimizer": {"type": optimizer["type"], "params": params},
            "fp16": self.resolved["fp16"] if self.precision == "fp16" else None,
            "scheduler": self.resolved.get("scheduler", {}).get("type"),
        }


def read_and_resolve_ds_config(path: Path, recipe: Recipe, world: int, hardware: Hardware) -> EngineConfig:
    """Read a ds_config and complete it with the recipe's values. Raises UserError. world: the number of ranks."""
    return resolve_ds_config(read_ds_config(path), path, recipe, world, hardware)


def read_ds_config(path: Path) -> dict[str, Any]:
    """Read and check a ds_config, given by its path or by the name of a shipped file, such as zero2_cpu or
    zero2_cpu.json. Raises UserError."""
    shipped = SHIPPED / f"{path.name.removesuffix('.json')}.json"
    if path.parent.name in ("", SHIPPED.name) and not path.exists() and shipped.exists():
        path = shipped
    try:
        config = parse_json(path.read_bytes())
    except OSError as error:
        names = ", ".join(sorted(shipped.stem for shipped in SHIPPED.glob("*.json")))
        raise UserError(
            f"--ds_config {path} cannot be read ({error.strerror}). Use a JSON file, or a configuration of "
            f"xscale: {names}"
        ) from None
    except ValueError as error:
        raise UserError(f"--ds_config {path}: {error}. Correct the file") from None
    if not isinstance(config, dict):
        raise UserError(f"--ds_config {path} is not a JSON object. Use a JSON file with a DeepSpeed configuration")
    if problems := config_problems(config):
        raise UserError(f"--ds_config {path}:\n" + indent_lines(problems))
    return config


def config_problems(config: dict[str, Any]) -> list[str]:
    """Return a line for each key that DeepSpeed would silently ignore, and for each value that it would misread."""
    for name in SECTIONS:
        if not isinstance(config.get(name, {}), dict):
            return [f"{name}: the value {config[name]!r} must be a JSON object"]
    if places := list(non_finite_places(config)):
        return [f"{place} is not a finite number. Write a finite number" for place in places]
    problems = list[str]()
    for name, known in KEYS.items():
        section = config.get(name, {}) if name else config
        for key in section:
            if key not in known:
                place = f"{name}.{key}".removeprefix(".")
                problems.append(
                    f"{place} has no effect in a run of xscale. Remove the key, or use one of {', '.join(known)}"
                )
    for name in ("optimizer", "scheduler"):
        section = config.get(name, {"type": ""})
        if not isinstance(section.get("type"), str) or not isinstance(section.get("params", {}), dict):
            problems.append(f"{name}: {section} must have a string as `type`, and a JSON object as `params`")
    for name in HALF_PRECISIONS:
        enabled = config.get(name, {}).get("enabled", False)
        if enabled not in (True, False, AUTO) or type(enabled) is int:
            problems.append(f'{name}.enabled: the value {enabled!r} must be true, false or "auto"')
    zero = config.get("zero_optimization", {})
    if type(zero.get("stage", 0)) is not int:
        problems.append(f"zero_optimization.stage: the value {zero['stage']!r} must be 0, 1, 2 or 3")
    for key, remedy in UNSUPPORTED.items():
        if zero.get(key) not in (False, None):
            problems.append(f"zero_optimization.{key}: {remedy}")
    if zero.get("stage", 0) != 3:
        for key, value in zero.items():
            device = value.get("device") if isinstance(value, dict) else value
            is_off = device in (False, None, "none")  # accelerate writes {"device": "none"} at all stages
            if key.startswith(STAGE_3_KEYS) and not is_off:
                problems.append(
                    f"zero_optimization.{key} has an effect only at ZeRO stage 3. Remove the key, or set "
                    "zero_optimization.stage to 3"
                )
    kind = config.get("optimizer", {}).get("type")
    types = dict(TYPES)
    if str(kind).lower() in ADAM:
        types |= {f"optimizer.params.{name}": type_and_words for name, type_and_words in TYPES_OF_ADAM.items()}
    problems += type_problems(config, types)
    if str(kind).lower() in WHOLE_WEIGHTS and zero.get("stage"):
        problems.append(
            f"optimizer.type: {kind} computes its update from whole weights, and with ZeRO each rank updates "
            "only a part of the weights. Set optimizer.type to AdamW, or set zero_optimization.stage to 0"
        )
    return problems


def non_finite_places(value: Any, place: str = "") -> Iterator[str]:
    """Yield the place and the value of each number in parsed JSON that is NaN or infinite, such as
    "optimizer.params.eps: NaN". place: that of `value`."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from non_finite_places(item, f"{place}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from non_finite_places(item, f"{place}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{place}: {json.dumps(value)}"


def type_problems(config: dict[str, Any], types: dict[str, tuple[Any, str]]) -> list[str]:
    """Return a line for each value that has another type than `types` says (dotted key -> type, and type in words)."""
    problems = list[str]()
    for place, (value_type, words) in types.items():
        *sections, key = place.split(".")
        section: Any = config
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict) or key not in section:
            continue
        shown = json.dumps(section[key])
        try:
            TypeAdapter(value_type).validate_json(shown, strict=True)
        except ValidationError:
            problems.append(f"{place}: the value {shown} must be {words}")
    return problems


def resolve_ds_config(
    config: dict[str, Any], path: Path, recipe: Recipe, world: int, hardware: Hardware
) -> EngineConfig:
    """Return DeepSpeed's config with a value for every "auto". Raises a UserError that names every contradiction."""
    resolved = copy.deepcopy(config)
    problems = list[str]()
    # For DeepSpeed, a step is one pass of each rank, for any number of rows.
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": world}
    for key, size in sizes.items():
        if resolved.get(key, AUTO) not in (AUTO, size):  # ds_config.json of a run on as many ranks has these sizes
            problems.append(f"{key} = {resolved[key]}: {ROWS}")
        resolved[key] = size
    clipping = {"gradient_clipping": ("train.max_grad_norm", recipe.train.max_grad_norm)}
    fill_section(resolved, "", clipping, problems)
    fill_optimizer(resolved, recipe, problems)
    if "scheduler" in resolved:
        fill_scheduler(resolved["scheduler"], recipe, problems)
    zero = resolved.get("zero_optimization", {})
    if zero.get("overlap_comm") == AUTO:
        # Stages 1 and 2 reduce after the last backward pass (zero.one_reduction), so that nothing could overlap.
        zero["overlap_comm"] = world > 1 and zero_stage(resolved) == 3
    precision = choose_precision(resolved, recipe.train.precision, hardware, problems)
    if problems:
        raise UserError(f"--ds_config {path} cannot be used, for these reasons:\n" + indent_lines(problems))
    if not hardware.supports(precision):
        raise UserError(
            f"this {hardware.device} device does not support {precision}, which train.precision or --ds_config {path} "
            f'sets. Use another device, or set both train.precision and {precision}.enabled to "auto": the run then '
            "trains in a precision that the device supports"
        )
    if precision != "fp32" and zero_stage(resolved) == 0:
        raise UserError(
            f"--ds_config {path}: {precision} does not work with ZeRO stage 0. Set zero_optimization.stage to 1 or 2"
        )
    notes = list[str]()
    for name in HALF_PRECISIONS:
        section = resolved.get(name, {})
        if section.get("enabled") == AUTO and recipe.train.precision == AUTO and precision == "fp32":
            notes = [f"precision: this {hardware.device} device does not support {name}, so the run trains in fp32"]
        if section or precision == name:
            resolved[name] = section | {"enabled": precision == name}
    for key, value in resolved.items():
        if json.dumps(AUTO) in json.dumps(value):
            raise UserError(
                f'--ds_config {path}: {key} is {value}, but the recipe has no value for this "auto". Write a value in '
                'place of "auto"'
            )
    resolved.setdefault("steps_per_print", None)
    resolved.setdefault("zero_allow_untested_optimizer", True)
    check_by_deepspeed(resolved, path)
    return EngineConfig(resolved, precision, zero_stage(resolved), notes)


def fill_section(
    section: dict[str, Any], prefix: str, recipe_values: dict[str, tuple[str, Any]], problems: list[str]
) -> None:
    """Write the recipe's values into a section of the ds_config. Add a line to `problems` for each value of the
    ds_config that differs. recipe_values: key -> (field of the recipe, its value). prefix: the section's, such as
    "optimizer.params."."""
    for key, (field, value) in recipe_values.items():
        in_file = section.get(key, AUTO)
        if in_file not in (AUTO, value) or isinstance(in_file, bool):
            problems.append(
                f'{prefix}{key} = {in_file!r} contradicts the recipe\'s {field} = {value}. Write "auto" in the file'
            )
        section[key] = value


def fill_optimizer(resolved: dict[str, Any], recipe: Recipe, problems: list[str]) -> None:
    """Complete the ds_config's optimizer. Add a line to `problems` for each of its values that contradicts the
    recipe."""
    optimizer = resolved.setdefault("optimizer", {"type": "AdamW"})
    is_adam = optimizer["type"].lower() in ADAM
    params = optimizer.setdefault("params", {"torch_adam": True} if is_adam else {})
    for key, default in (("betas", [0.9, 0.999]), ("eps", 1e-8)):
        if params.get(key) == AUTO:
            del params[key]  # the optimizer then takes its own default
        if is_adam:
            params.setdefault(key, default)
    if params.get("torch_adam") and "foreach" not in params:
        params.setdefault("fused", True)
    owned = {"lr": ("train.lr", recipe.train.lr), "weight_decay": ("train.weight_decay", recipe.train.weight_decay)}
    fill_section(params, "optimizer.params.", owned, problems)


def fill_scheduler(scheduler: dict[str, Any], recipe: Recipe, problems: list[str]) -> None:
    """Complete the ds_config's scheduler. Add a line to `problems` for each contradiction to the recipe. Without a
    scheduler, each step sets the recipe's learning rate."""
    train = recipe.train
    known = SCHEDULES.get(scheduler["type"], ())
    params = scheduler.setdefault("params", {"warmup_type": "linear"} if known else {})
    if known and params.get("warmup_min_lr") == AUTO:
        params["warmup_min_lr"] = 0.0
    values = {
        "total_num_steps": ("train.steps", train.steps),
        "warmup_num_steps": ("train.warmup (in steps)", max(train.steps_of_share(train.warmup), 2)),
        "warmup_max_lr": ("train.lr", train.lr),
    }
    owned = {key: value for key, value in values.items() if key in params or key in known}
    fill_section(params, "scheduler.params.", owned, problems)
    fields = {"train.schedule": train.schedule, "train.decay": train.decay, "train.head_lr": train.head_lr}
    conflict = f"scheduler = {scheduler['type']} contradicts the recipe's"
    for field, value in fields.items():
        if value is not None:
            problems.append(f"{conflict} {field} = {value}. Remove the scheduler from the file, or set {field}=null")
    if any("train.lr" in phase.fields for phase in recipe.phases):
        problems.append(
            f"{conflict} phases, which set train.lr. Remove the scheduler from the file, or train.lr from the phases"
        )


def choose_precision(config: dict[str, Any], wanted: str, hardware: Hardware, problems: list[str]) -> str:
    """Return train.precision. If it is auto, return the precision that the ds_config demands, or else the first one
    that the ds_config allows and the device has. Add a line to `problems` for each contradiction. wanted:
    train.precision."""
    enabled = {name: config[name].get("enabled", False) for name in HALF_PRECISIONS if name in config}
    demanded = [name for name, value in enabled.items() if value is True]
    allowed = [name for name, value in enabled.items() if value == AUTO and hardware.supports(name)]
    if len(demanded) > 1:
        problems.append("fp16.enabled and bf16.enabled are both true. Set fp16.enabled or bf16.enabled to false")
    if wanted == AUTO:
        return [*demanded, *allowed, "fp32"][0]
    for name, value in enabled.items():
        if "enabled" in config[name] and value not in (AUTO, name == wanted):
            problems.append(
                f"{name}.enabled = {json.dumps(value)} contradicts the recipe's train.precision = {wanted}. "
                'Write "auto" in the file'
            )
    return wanted


def check_by_deepspeed(resolved: dict[str, Any], path: Path) -> None:
    """Raise UserError if DeepSpeed refuses the configuration. Errors of the optimizer and the scheduler show only when
    the engine is built (step/engine.py)."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = copy.deepcopy(resolved)
    del config["train_batch_size"]
    try:
        deepspeed.DeepSpeedConfig(config)
    except Exception as error:  # the error may be of any type
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"--ds_config {path}: DeepSpeed refuses this file ({reason}). Correct the file") from None
