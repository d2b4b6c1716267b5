"""The ds_config of a run: a DeepSpeed JSON file, completed with the values of the recipe.

"auto", or no value, leaves a field to the recipe. A value that differs from the recipe's is an error.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale.errors import UserError
from xscale.recipe import Recipe
from xscale.record import parse_json
from xscale.step.ds_checks import ADAM, building_problem, config_problems
from xscale.step.zero import stage_of, stage_problem

AUTO = "auto"
_INSIDE, _BESIDE = (Path(__file__).parents[up] / "ds_configs" for up in (1, 2))
SHIPPED = _INSIDE if _INSIDE.is_dir() else _BESIDE
"""The folder of the shipped ds_configs: inside the package of a wheel, beside the package in a checkout."""
_WARMUP = ("warmup_num_steps", "warmup_max_lr", "warmup_min_lr")
SCHEDULES = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": (*_WARMUP, "total_num_steps"),
    "WarmupCosineLR": ("warmup_num_steps", "total_num_steps"),
}
"""DeepSpeed's scheduler -> its parameters that the recipe gives if the ds_config leaves them open."""

MAY_CHANGE = ("lr", "weight_decay", "fused", "foreach")
"""The parameters of the ds_config's optimizer that a resume may change."""

ROWS = 'the streams of the recipe define a step, and train.max_tokens its rows; write "auto" here'


@dataclass(frozen=True)
class Hardware:
    """The properties of the device that decide the precision."""

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
    """The resolved configuration of the DeepSpeed engine."""

    resolved: dict[str, Any]
    precision: str
    stage: int
    notes: list[str]
    """The lines to print about the precision."""

    def saved(self) -> dict[str, Any]:
        """Return the settings that a checkpoint records, since DeepSpeed restores them whatever the ds_config says."""
        optimizer, fp16 = self.resolved["optimizer"], self.resolved.get("fp16") if self.precision == "fp16" else None
        params = {k: v for k, v in optimizer.get("params", {}).items() if k not in MAY_CHANGE}
        kept = {"optimizer": {"type": optimizer["type"], "params": params}, "fp16": fp16}
        kept["scheduler"] = self.resolved.get("scheduler", {}).get("type")
        return {"stage": self.stage, "precision": self.precision, **kept}


def load_ds_config(path: Path, recipe: Recipe, world: int, hardware: Hardware) -> EngineConfig:
    return resolve_ds_config(read_ds_config(path), path, recipe, world, hardware)


def find_ds_config(path: Path) -> Path:
    """Return the path, or if it does not exist, the shipped file of this name (zero2_cpu or zero2_cpu.json)."""
    shipped = SHIPPED / f"{path.name.removesuffix('.json')}.json"
    return shipped if path.parent.name in ("", SHIPPED.name) and not path.exists() and shipped.exists() else path


def read_ds_config(path: Path) -> dict[str, Any]:
    """Read and check a file, given by its path or by the name of a shipped one. Raises UserError."""
    path = find_ds_config(path)
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
    for name, value in _leaves(config):
        if isinstance(value, float) and not math.isfinite(value):  # NaN could not be compared between ranks
            raise UserError(f"--ds_config {path}: {name} is not a finite number")
    problems = config_problems(config)
    if problems:
        raise UserError(f"--ds_config {path}:\n" + "\n".join(f"  {problem}" for problem in problems))
    return config


def resolve_ds_config(
    config: dict[str, Any], path: Path, recipe: Recipe, world: int, hardware: Hardware
) -> EngineConfig:
    """Return DeepSpeed's config with a value for every "auto". Raises a UserError that names every contradiction."""
    resolved = json.loads(json.dumps(config))
    problems: list[str] = []
    # Whatever the number of rows, DeepSpeed counts a step as one pass of each rank.
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": world}
    problems += [f"{key} = {resolved[key]}: {ROWS}" for key in sizes if resolved.get(key, AUTO) != AUTO]
    resolved |= sizes
    _set_owned(problems, resolved, "", "gradient_clipping", recipe.train.max_grad_norm, "train.max_grad_norm")
    _fill_optimizer(resolved, recipe, hardware, problems)
    _fill_scheduler(resolved, recipe, problems)
    zero = resolved.get("zero_optimization", {})
    if zero.get("overlap_comm") == AUTO:
        zero["overlap_comm"] = world > 1  # if it is on, DeepSpeed waits for the device after every backward pass

    precision, notes = _resolve_precision(resolved, recipe.train.precision, hardware, problems)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f'ds_config {path} and the recipe disagree; write "auto" or the same value:\n{lines}')
    if unfilled := "\n".join(f"  {key}" for key, value in _leaves(resolved) if value == AUTO):
        raise UserError(f'ds_config {path}: the recipe has no value for these keys; replace their "auto":\n{unfilled}')
    resolved.setdefault("steps_per_print", None)
    resolved.setdefault("zero_allow_untested_optimizer", True)
    problem = stage_problem(resolved, precision, world) or building_problem(resolved)
    if problem:
        raise UserError(f"ds_config {path}: {problem}")
    return EngineConfig(resolved, precision, stage_of(resolved), notes)


def _set_owned(problems: list[str], section: dict[str, Any], where: str, key: str, value: Any, field: str) -> None:
    """Write the value of the recipe's `field` into a section; a different value there is a problem."""
    given = section.get(key, AUTO)
    if given not in (AUTO, value) or isinstance(given, bool):
        shown = repr(given) if isinstance(given, str) else given
        problems.append(f"{where}{key} = {shown} contradicts the recipe's {field} = {value}")
    section[key] = value


def _fill_optimizer(resolved: dict[str, Any], recipe: Recipe, hardware: Hardware, problems: list[str]) -> None:
    optimizer = resolved.setdefault("optimizer", {"type": "AdamW"})
    kind = optimizer["type"].lower()
    params = optimizer.setdefault("params", {"torch_adam": True} if kind in ADAM else {})
    _set_owned(problems, params, "optimizer.params.", "lr", recipe.train.lr, "train.lr")
    _set_owned(problems, params, "optimizer.params.", "weight_decay", recipe.train.weight_decay, "train.weight_decay")
    for key, default in (("betas", [0.9, 0.999]), ("eps", 1e-8)):
        if params.get(key, AUTO) == AUTO:
            params.pop(key, None)  # the optimizer then takes its own default
            if kind in ADAM:
                params[key] = default
    if params.get("torch_adam") and "foreach" not in params:
        params.setdefault("fused", hardware.device in ("cuda", "cpu"))


def _fill_scheduler(resolved: dict[str, Any], recipe: Recipe, problems: list[str]) -> None:
    """Complete the ds_config's scheduler. Without a scheduler, the recipe's learning rate is set in each step."""
    if "scheduler" not in resolved:
        return
    scheduler, train = resolved["scheduler"], recipe.train
    takes = SCHEDULES.get(scheduler["type"], ())
    for field in ("schedule", "decay"):
        if (value := getattr(train, field)) is not None:
            problems.append(f"scheduler = {scheduler['type']} contradicts the recipe's train.{field} = {value}")
    if any("train.lr" in phase.fields for phase in recipe.phases):
        problems.append(f"scheduler = {scheduler['type']} contradicts the train.lr of a phase")
    params = scheduler.setdefault("params", {"warmup_type": "linear"} if takes else {})
    if params.get("warmup_min_lr", AUTO) == AUTO and "warmup_min_lr" in takes:
        params["warmup_min_lr"] = 0.0  # the decay ends at 0, too
    owned = {
        "total_num_steps": (train.steps, "train.steps"),
        "warmup_num_steps": (max(train.whole_steps(train.warmup), 2), "train.warmup, in steps"),
        "warmup_max_lr": (train.lr, "train.lr"),
    }
    for key, (value, field) in owned.items():
        if key in params or key in takes:
            _set_owned(problems, params, "scheduler.params.", key, value, field)


def _leaves(tree: Any, where: str = "") -> list[tuple[str, Any]]:
    """Return the values of a tree of dictionaries and lists with their dotted names."""
    if isinstance(tree, dict | list):
        inside = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [leaf for key, value in inside for leaf in _leaves(value, f"{where}.{key}" if where else str(key))]
    return [(where, tree)]


def _resolve_precision(
    resolved: dict[str, Any], wanted: str, hardware: Hardware, problems: list[str]
) -> tuple[str, list[str]]:
    """Write fp16.enabled and bf16.enabled. Returns the precision and lines to print. Raises UserError if a precision
    other than "auto" is set that the device lacks; "auto" falls back to fp32."""
    supported = {"fp16": hardware.fp16, "bf16": hardware.bf16, "fp32": True}
    given = {name: resolved[name].get("enabled") for name in ("fp16", "bf16") if name in resolved}
    demanded = [name for name, enabled in given.items() if enabled is True]
    notes, precision = list[str](), wanted
    if len(demanded) == 2:
        problems.append("fp16.enabled = true contradicts bf16.enabled = true")
    if wanted == "auto":
        preferred = demanded or [name for name, enabled in given.items() if enabled == AUTO]
        precision = next((name for name in preferred if supported[name]), [*preferred, "fp32"][0])
        if not supported[precision] and not demanded:
            notes = [f"precision: {precision} is not native on this {hardware.device}; this run trains in fp32"]
            precision = "fp32"
    for name, enabled in given.items() if wanted != "auto" else ():
        if enabled not in (AUTO, None, name == wanted):
            shown = str(enabled).lower()
            problems.append(f"{name}.enabled = {shown} contradicts the recipe's train.precision = {wanted}")
    if not supported[precision]:
        raise UserError(
            f"precision {precision} was requested, but this {hardware.device} has no native {precision}. "
            f"Use train.precision auto, bf16 or fp32, or a device that has {precision}"
        )
    for name in ("fp16", "bf16"):
        if name in resolved or precision == name:
            resolved[name] = resolved.get(name, {}) | {"enabled": precision == name}
    return precision, notes
