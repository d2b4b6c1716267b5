"""The ds_config of a run: a DeepSpeed JSON file, completed with the values of the recipe.

"auto", or no value, leaves a field to the recipe. A value that differs from the recipe's is an error.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale.errors import UserError
from xscale.recipe import Recipe
from xscale.record import parse_json
from xscale.step.ds_checks import ADAM, building_problem, config_problems, leaves
from xscale.step.zero import stage_of, stage_problem

AUTO = "auto"
_PACKAGE = Path(__file__).parents[1]
SHIPPED = next(folder / "ds_configs" for folder in (_PACKAGE, _PACKAGE.parent) if (folder / "ds_configs").is_dir())
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
        optimizer = self.resolved["optimizer"]
        params = {name: value for name, value in optimizer["params"].items() if name not in MAY_CHANGE}
        return {
            "stage": self.stage,
            "precision": self.precision,
            "optimizer": {"type": optimizer["type"], "params": params},
            "fp16": self.resolved["fp16"] if self.precision == "fp16" else None,
            "scheduler": self.resolved.get("scheduler", {}).get("type"),
        }


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
    if problems := config_problems(config):
        raise UserError(f"--ds_config {path}:\n" + indented(problems))
    return config


def resolve_ds_config(
    config: dict[str, Any], path: Path, recipe: Recipe, world: int, hardware: Hardware
) -> EngineConfig:
    """Return DeepSpeed's config with a value for every "auto". Raises a UserError that names every contradiction."""
    resolved = copy.deepcopy(config)
    problems = list[str]()
    # Whatever the number of rows, DeepSpeed counts a step as one pass of each rank.
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": world}
    problems += [f"{key} = {resolved[key]}: {ROWS}" for key in sizes if resolved.get(key, AUTO) != AUTO]
    resolved |= sizes
    problems += fill(resolved, "", {"gradient_clipping": ("train.max_grad_norm", recipe.train.max_grad_norm)})
    problems += fill_optimizer(resolved, recipe, hardware)
    problems += fill_scheduler(resolved, recipe)
    zero = resolved.get("zero_optimization", {})
    if zero.get("overlap_comm") == AUTO:
        # Stages 1 and 2 reduce after the last backward pass (zero.one_reduction), so that nothing could overlap.
        zero["overlap_comm"] = world > 1 and stage_of(resolved) == 3
    problems += precision_problems(resolved, recipe.train.precision)
    if problems:
        raise UserError(
            f'ds_config {path} and the recipe disagree; write "auto" or the same value:\n{indented(problems)}'
        )
    precision, notes = fill_precision(resolved, recipe.train.precision, hardware)
    if unfilled := [key for key, value in leaves(resolved) if value == AUTO]:
        raise UserError(
            f'ds_config {path}: the recipe has no value for these keys; replace their "auto":\n{indented(unfilled)}'
        )
    resolved.setdefault("steps_per_print", None)
    resolved.setdefault("zero_allow_untested_optimizer", True)
    problem = stage_problem(resolved, precision, world) or building_problem(resolved)
    if problem:
        raise UserError(f"ds_config {path}: {problem}")
    return EngineConfig(resolved, precision, stage_of(resolved), notes)


def indented(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def fill(section: dict[str, Any], where: str, owned: dict[str, tuple[str, Any]]) -> list[str]:
    """Write the recipe's values into a section of the ds_config, and return a line for each value there that differs.
    owned: key -> (field of the recipe, its value). where: the section's place, such as "optimizer.params."."""
    problems = list[str]()
    for key, (field, value) in owned.items():
        in_file = section.get(key, AUTO)
        if in_file not in (AUTO, value) or isinstance(in_file, bool):
            problems.append(f"{where}{key} = {in_file!r} contradicts the recipe's {field} = {value}")
        section[key] = value
    return problems


def fill_optimizer(resolved: dict[str, Any], recipe: Recipe, hardware: Hardware) -> list[str]:
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
    return fill(params, "optimizer.params.", owned)


def fill_scheduler(resolved: dict[str, Any], recipe: Recipe) -> list[str]:
    """Complete the ds_config's scheduler. Without a scheduler, the recipe's learning rate is set in each step."""
    if "scheduler" not in resolved:
        return []
    scheduler, train = resolved["scheduler"], recipe.train
    problems = list[str]()
    for field in ("schedule", "decay"):
        if (value := getattr(train, field)) is not None:
            problems.append(f"scheduler = {scheduler['type']} contradicts the recipe's train.{field} = {value}")
    if any("train.lr" in phase.fields for phase in recipe.phases):
        problems.append(f"scheduler = {scheduler['type']} contradicts the train.lr of a phase")
    takes = SCHEDULES.get(scheduler["type"], ())
    params = scheduler.setdefault("params", {"warmup_type": "linear"} if takes else {})
    if "warmup_min_lr" in takes and params.get("warmup_min_lr", AUTO) == AUTO:
        params["warmup_min_lr"] = 0.0  # the decay ends at 0, too
    owned = {
        "total_num_steps": ("train.steps", train.steps),
        "warmup_num_steps": ("train.warmup, in steps", max(train.whole_steps(train.warmup), 2)),
        "warmup_max_lr": ("train.lr", train.lr),
    }
    owned = {key: entry for key, entry in owned.items() if key in params or key in takes}
    return problems + fill(params, "scheduler.params.", owned)


def precision_problems(resolved: dict[str, Any], wanted: str) -> list[str]:
    """Return a line for each contradiction about the precision. wanted: train.precision."""
    problems = list[str]()
    in_file = {name: resolved[name].get("enabled", AUTO) for name in ("fp16", "bf16") if name in resolved}
    if list(in_file.values()) == [True, True]:
        problems.append("fp16.enabled = true contradicts bf16.enabled = true")
    for name, enabled in in_file.items():
        if wanted != AUTO and enabled not in (AUTO, name == wanted):
            shown = str(enabled).lower()
            problems.append(f"{name}.enabled = {shown} contradicts the recipe's train.precision = {wanted}")
    return problems


def fill_precision(resolved: dict[str, Any], wanted: str, hardware: Hardware) -> tuple[str, list[str]]:
    """Write fp16.enabled and bf16.enabled. Return the precision and the lines to print. Raises UserError if a precision
    other than "auto" is set that the device lacks; "auto" falls back to fp32."""
    supported = {"fp16": hardware.fp16, "bf16": hardware.bf16, "fp32": True}
    notes = list[str]()
    precision = wanted
    if wanted == AUTO:
        enabled = {name: resolved.get(name, {}).get("enabled", False) for name in ("fp16", "bf16")}
        demanded = [name for name in enabled if enabled[name] is True]
        preferred = demanded or [name for name in enabled if enabled[name] == AUTO]
        precision = next((name for name in preferred if supported[name]), [*preferred, "fp32"][0])
        if not supported[precision] and not demanded:
            notes = [f"precision: {precision} is not native on this {hardware.device}; this run trains in fp32"]
            precision = "fp32"
    if not supported[precision]:
        raise UserError(
            f"precision {precision} was requested, but this {hardware.device} has no native {precision}. "
            f"Use train.precision auto, bf16 or fp32, or a device that has {precision}"
        )
    for name in ("fp16", "bf16"):
        if name in resolved or precision == name:
            resolved[name] = resolved.get(name, {}) | {"enabled": precision == name}
    return precision, notes
