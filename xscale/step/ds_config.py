"""The ds_config of a run: a DeepSpeed JSON file, completed with the values of the recipe.

If a field is "auto" or absent, the recipe sets it. A value that differs from the recipe's is an error.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xscale.errors import UserError, indent_lines
from xscale.recipe import Recipe
from xscale.record import parse_json
from xscale.step.ds_checks import ADAM, config_problems, deepspeed_problem, leaf_values
from xscale.step.zero import stage_problem, zero_stage

AUTO = "auto"
HALF_PRECISIONS = ("fp16", "bf16")
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

ROWS = 'the streams of the recipe define a step, and train.max_tokens its rows; write "auto" here'


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
    def here(cls) -> "Hardware":
        """Return this process's device. Raises UserError for a PyTorch that is built for ROCm."""
        from deepspeed.accelerator import get_accelerator

        if torch.version.hip:
            raise UserError(
                f"this PyTorch {torch.__version__} is built for ROCm (AMD), on which xscale has never been tested, and "
                f"its attention is chosen by the generations of NVIDIA's GPUs; install a PyTorch for CUDA or for CPUs"
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

    def saved(self) -> dict[str, Any]:
        """Return the settings that a checkpoint records. On a resume, DeepSpeed restores them from the checkpoint and
        ignores those of the ds_config."""
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


def load_ds_config(path: Path, recipe: Recipe, world: int, hardware: Hardware) -> EngineConfig:
    """Read a ds_config and complete it with the recipe's values. Raises UserError. world: the number of ranks."""
    return resolve_ds_config(read_ds_config(path), path, recipe, world, hardware)


def locate_ds_config(path: Path) -> Path:
    """Return the path, or if it does not exist, the shipped file of this name (zero2_cpu or zero2_cpu.json)."""
    shipped = SHIPPED / f"{path.name.removesuffix('.json')}.json"
    if path.parent.name in ("", SHIPPED.name) and not path.exists() and shipped.exists():
        return shipped
    return path


def read_ds_config(path: Path) -> dict[str, Any]:
    """Read and check a ds_config, given by its path or by the name of a shipped file. Raises UserError."""
    path = locate_ds_config(path)
    try:
        config = parse_json(path.read_bytes())
    except FileNotFoundError:
        names = ", ".join(sorted(shipped.stem for shipped in SHIPPED.glob("*.json")))
        raise UserError(f"--ds_config {path} not found; shipped ones are {names}") from None
    except OSError as error:
        raise UserError(f"--ds_config {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"--ds_config {path}: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"--ds_config {path}: needs a JSON object")
    if problems := config_problems(config):
        raise UserError(f"--ds_config {path}:\n" + indent_lines(problems))
    return config


def resolve_ds_config(
    config: dict[str, Any], path: Path, recipe: Recipe, world: int, hardware: Hardware
) -> EngineConfig:
    """Return DeepSpeed's config with a value for every "auto". Raises a UserError that names every contradiction."""
    resolved = copy.deepcopy(config)
    problems = list[str]()
    # For DeepSpeed, a step is one pass of each rank, for any number of rows.
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": world}
    for key, size in sizes.items():
        if resolved.get(key, AUTO) != AUTO:
            problems.append(f"{key} = {resolved[key]}: {ROWS}")
        resolved[key] = size
    problems += fill_section(resolved, "", {"gradient_clipping": ("train.max_grad_norm", recipe.train.max_grad_norm)})
    problems += fill_optimizer(resolved, recipe, hardware)
    problems += fill_scheduler(resolved, recipe)
    zero = resolved.get("zero_optimization", {})
    if zero.get("overlap_comm") == AUTO:
        # Stages 1 and 2 reduce after the last backward pass (zero.one_reduction), so that nothing could overlap.
        zero["overlap_comm"] = world > 1 and zero_stage(resolved) == 3
    problems += precision_problems(resolved, recipe.train.precision)
    if problems:
        raise UserError(
            f'ds_config {path} and the recipe disagree; write "auto" or the same value:\n{indent_lines(problems)}'
        )
    precision = choose_precision(resolved, recipe.train.precision, hardware)
    notes = precision_notes(resolved, recipe.train.precision, precision, hardware)
    for name in HALF_PRECISIONS:
        if name in resolved or precision == name:
            resolved[name] = resolved.get(name, {}) | {"enabled": precision == name}
    unfilled = [key for key, value in leaf_values(resolved) if value == AUTO]
    if unfilled:
        raise UserError(
            f'ds_config {path}: "auto" cannot be filled from the recipe for these keys; write values:\n'
            f"{indent_lines(unfilled)}"
        )
    resolved.setdefault("steps_per_print", None)
    resolved.setdefault("zero_allow_untested_optimizer", True)
    problem = stage_problem(resolved, precision, world) or deepspeed_problem(resolved)
    if problem:
        raise UserError(f"ds_config {path}: {problem}")
    return EngineConfig(resolved, precision, zero_stage(resolved), notes)


def fill_section(section: dict[str, Any], where: str, owned: dict[str, tuple[str, Any]]) -> list[str]:
    """Write the recipe's values into a section of the ds_config. Return a line for each value of the ds_config that
    differs. owned: key -> (field of the recipe, its value). where: its prefix, such as "optimizer.params."."""
    problems = list[str]()
    for key, (field, value) in owned.items():
        in_file = section.get(key, AUTO)
        if in_file not in (AUTO, value) or isinstance(in_file, bool):
            problems.append(f"{where}{key} = {in_file!r} contradicts the recipe's {field} = {value}")
        section[key] = value
    return problems


def fill_optimizer(resolved: dict[str, Any], recipe: Recipe, hardware: Hardware) -> list[str]:
    """Complete the ds_config's optimizer. Return a line for each of its values that contradicts the recipe."""
    optimizer = resolved.setdefault("optimizer", {"type": "AdamW"})
    is_adam = optimizer["type"].lower() in ADAM
    params = optimizer.setdefault("params", {"torch_adam": True} if is_adam else {})
    for key, default in (("betas", [0.9, 0.999]), ("eps", 1e-8)):
        if params.get(key, AUTO) == AUTO:
            params.pop(key, None)  # the optimizer then takes its own default
            if is_adam:
                params[key] = default
    if params.get("torch_adam") and "foreach" not in params:
        params.setdefault("fused", hardware.device in ("cuda", "cpu"))
    owned = {"lr": ("train.lr", recipe.train.lr), "weight_decay": ("train.weight_decay", recipe.train.weight_decay)}
    return fill_section(params, "optimizer.params.", owned)


def fill_scheduler(resolved: dict[str, Any], recipe: Recipe) -> list[str]:
    """Complete the ds_config's scheduler, if it has one. Return a line for each contradiction to the recipe. Without a
    scheduler, each step sets the recipe's learning rate."""
    if "scheduler" not in resolved:
        return []
    scheduler = resolved["scheduler"]
    train = recipe.train
    problems = list[str]()
    for field in ("schedule", "decay"):
        value = getattr(train, field)
        if value is not None:
            problems.append(f"scheduler = {scheduler['type']} contradicts the recipe's train.{field} = {value}")
    if any("train.lr" in phase.fields for phase in recipe.phases):
        problems.append(f"scheduler = {scheduler['type']} contradicts the train.lr of a phase")
    known = SCHEDULES.get(scheduler["type"], ())
    params = scheduler.setdefault("params", {"warmup_type": "linear"} if known else {})
    if known and params.get("warmup_min_lr") == AUTO:
        params["warmup_min_lr"] = 0.0
    values = {
        "total_num_steps": ("train.steps", train.steps),
        "warmup_num_steps": ("train.warmup, in steps", max(train.whole_steps(train.warmup), 2)),
        "warmup_max_lr": ("train.lr", train.lr),
    }
    owned = {key: value for key, value in values.items() if key in params or key in known}
    return problems + fill_section(params, "scheduler.params.", owned)


def precision_problems(resolved: dict[str, Any], wanted: str) -> list[str]:
    """Return a line for each contradiction about the precision. wanted: train.precision."""
    problems = list[str]()
    if all(resolved.get(name, {}).get("enabled") is True for name in HALF_PRECISIONS):
        problems.append("fp16.enabled = true contradicts bf16.enabled = true")
    for name in HALF_PRECISIONS:
        enabled = resolved.get(name, {}).get("enabled", AUTO)
        if wanted != AUTO and enabled not in (AUTO, name == wanted):
            shown = str(enabled).lower()
            problems.append(f"{name}.enabled = {shown} contradicts the recipe's train.precision = {wanted}")
    return problems


def choose_precision(resolved: dict[str, Any], wanted: str, hardware: Hardware) -> str:
    """Return train.precision. If it is auto, return the precision that the ds_config demands, or else the first one
    that the ds_config allows and the device has. Raises UserError if the device lacks it."""
    enabled = {name: resolved.get(name, {}).get("enabled", False) for name in HALF_PRECISIONS}
    if wanted == AUTO:
        wanted = "fp32"
        for name in HALF_PRECISIONS:
            if enabled[name] is True or (enabled[name] == AUTO and wanted == "fp32" and hardware.supports(name)):
                wanted = name
    if hardware.supports(wanted):
        return wanted
    raise UserError(
        f"precision {wanted} was requested, but this {hardware.device} has no native {wanted}. "
        f"Use train.precision auto, bf16 or fp32, or a device that has {wanted}"
    )


def precision_notes(resolved: dict[str, Any], wanted: str, precision: str, hardware: Hardware) -> list[str]:
    """Return the line to print if a precision that the ds_config leaves open is not that of the device."""
    for name in HALF_PRECISIONS:
        if wanted == AUTO and precision == "fp32" and resolved.get(name, {}).get("enabled") == AUTO:
            return [f"precision: {name} is not native on this {hardware.device}; this run trains in fp32"]
    return []
