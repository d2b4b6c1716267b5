"""Checks of a ds_config: for keys and values that DeepSpeed would silently ignore or misread, or that it refuses."""

import copy
import difflib
import logging
from collections.abc import Iterator
from typing import Any

SECTIONS = (
    *("fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "data_types", "aio"),
    *("comms_logger", "flops_profiler", "csv_monitor", "wandb", "comet", "tensorboard"),
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
    "parameter_alignment": "xscale aligns weights by their order; leave it out",
    "round_robin_gradients": "checkpoints need the weights of a group one behind the other; leave it out",
    "zenflow": "xscale updates all weights in each step; leave it out",
}
"""Key of zero_optimization with which xscale would train wrongly or save wrong checkpoints -> the remedy."""
ADAM = ("adam", "adamw")
WHOLE_WEIGHTS = ("lamb", "adafactor", "muon")
"""Optimizers that need whole weights, because the update of a number depends on other numbers of the same weight."""


def config_problems(config: dict[str, Any]) -> list[str]:
    """Return a line for each key that DeepSpeed would silently ignore, and for each value that it would misread."""
    problems = list[str]()
    for key, section in config.items():
        if key not in KEYS:
            problems += unknown_key(key, section)
        elif key in SECTIONS and not isinstance(section, dict):
            problems.append(f"{key}: {section!r} is not an object")
        elif key in KEYS_OF_SECTION:
            problems += section_problems(key, section)
    if problems:
        return problems
    for name in ("fp16", "bf16"):
        enabled = config.get(name, {}).get("enabled", False)
        if enabled not in (True, False, "auto") or type(enabled) is int:
            problems.append(f'{name}.enabled: {enabled!r} is not true, false or "auto"')
    zero = config.get("zero_optimization", {})
    if type(zero.get("stage", 0)) is not int:
        problems.append(f"zero_optimization.stage: {zero['stage']!r} is not a number")
    for key, remedy in ZERO_KEYS.items():
        if zero.get(key, False) is not False:
            problems.append(f"zero_optimization.{key}: {remedy}")
    optimizer = config.get("optimizer", {"type": ""})["type"]
    if optimizer.lower() in WHOLE_WEIGHTS and zero.get("stage"):
        problems.append(
            f"optimizer.type: {optimizer} needs whole weights, and ZeRO divides weights among ranks; write AdamW, or "
            f"zero_optimization.stage 0"
        )
    return problems


def section_problems(name: str, section: dict[str, Any]) -> list[str]:
    """Return a line for each unknown or missing key of the section `name`, one of KEYS_OF_SECTION."""
    known = KEYS_OF_SECTION[name]
    problems = [f"{name}.{key} is unknown; the keys are {', '.join(known)}" for key in section if key not in known]
    if "params" in known:
        if not isinstance(section.get("type"), str):
            problems.append(f"{name}.type is missing")
        if not isinstance(section.get("params", {}), dict):
            problems.append(f"{name}.params: {section['params']!r} is not an object")
    return problems


def unknown_key(key: str, value: Any) -> list[str]:
    """Return a line about a key that has no effect, or [] if it is a section that is switched off."""
    similar = difflib.get_close_matches(key.lower(), KEYS, n=1, cutoff=0.65)
    if similar:
        return [f"{key} has no effect in a run of xscale; did you mean {similar[0]}? Else leave it out"]
    if value == {} or (isinstance(value, dict) and value.get("enabled") is False):
        return []
    return [f"{key} has no effect in a run of xscale; leave it out"]


def leaf_values(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree of dictionaries with their dotted names."""
    if not isinstance(tree, dict):
        yield where, tree
        return
    for key, value in tree.items():
        yield from leaf_values(value, f"{where}.{key}" if where else str(key))


def deepspeed_problem(resolved: dict[str, Any]) -> str | None:
    """Return the error with which DeepSpeed refuses a configuration, or None. Errors of the optimizer and the scheduler
    show only when the engine is built (step/engine.py)."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = copy.deepcopy(resolved)
    del config["train_batch_size"]
    try:
        deepspeed.DeepSpeedConfig(config)
    except Exception as error:  # the error may be of any type
        return f"DeepSpeed: {' '.join(str(error).split()) or type(error).__name__}"
    return None
