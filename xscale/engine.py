"""The DeepSpeed engine of a run: ds_config and recipe made one, and the optimizer step.

ds_configs are standard DeepSpeed JSON. "auto" (or absence) leaves a value to the recipe; a number that differs from
the recipe's is an error.
"""

import difflib
import fcntl
import functools
import inspect
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from xscale import rng
from xscale.config import Recipe
from xscale.data.collate import MicroBatch, real_places
from xscale.errors import UserError
from xscale.metrics import LOG
from xscale.models.encoder import Encoder, decay_groups
from xscale.objectives import OBJECTIVES, Companion, LossSums, Parts

AUTO = "auto"
_WARMUP = ("warmup_num_steps", "warmup_max_lr", "warmup_min_lr")
SCHEDULES = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": (*_WARMUP, "total_num_steps"),
    "WarmupCosineLR": ("warmup_num_steps", "total_num_steps"),
}
"""Parameters of DeepSpeed's schedulers that the recipe gives where ds_config does not."""

SECTIONS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("prescale_gradients", "gradient_predivide_factor", "communication_data_type", "zero_allow_untested_optimizer"),
    *("fp16", "bf16", "bfloat16", "zero_optimization", "optimizer", "scheduler", "checkpoint", "data_types"),
    *("torch_autocast", "steps_per_print", "wall_clock_breakdown", "comms_logger", "flops_profiler"),
    *("seq_parallel_communication_data_type", "sparse_gradients"),
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


def read_ds_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--ds_config {path} not found; shipped ones are in ds_configs/") from None
    except json.JSONDecodeError as error:
        raise UserError(f"--ds_config {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"--ds_config {path}: needs a JSON object")
    problems = _misnamed(config)
    if problems:
        raise UserError(f"--ds_config {path}:\n" + "\n".join(f"  {problem}" for problem in problems))
    return config


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
    config: dict[str, Any], path: Path, recipe: Recipe, micro_steps: int, world: int, hardware: Hardware
) -> tuple[dict[str, Any], str, list[str]]:
    """DeepSpeed's config with every "auto" filled, the precision, and lines to print.

    micro_steps: forward and backward passes of one rank in an optimizer step. Raises UserError naming every
    contradiction.
    """
    resolved = json.loads(json.dumps(config))
    train = recipe.train
    warmup = max(recipe.warmup_steps(), 2)
    problems: list[str] = []

    def own(section: dict[str, Any], where: str, key: str, value: Any, field: str, also: Sequence[Any] = ()) -> None:
        given = section.get(key, AUTO)
        if given != AUTO and given != value and given not in also:
            problems.append(f"{where}{key} = {given} contradicts the recipe's {field} = {value}")
        section[key] = value

    samples = sum(stream.samples for stream in recipe.streams.values())
    nominal = train.micro_batch * micro_steps * world
    own(resolved, "", "train_micro_batch_size_per_gpu", train.micro_batch, "train.micro_batch")
    own(resolved, "", "gradient_accumulation_steps", micro_steps, "micro-batches of all streams in a step")
    own(resolved, "", "train_batch_size", nominal, f"streams' samples ({samples} a step)", also=(samples,))
    own(resolved, "", "gradient_clipping", train.max_grad_norm, "train.max_grad_norm")

    optimizer = resolved.setdefault("optimizer", {"type": "AdamW"})
    params = optimizer.setdefault("params", {"torch_adam": True})
    own(params, "optimizer.params.", "lr", train.lr, "train.lr")
    own(params, "optimizer.params.", "weight_decay", train.weight_decay, "train.weight_decay")
    for key, default in (("betas", [0.9, 0.999]), ("eps", 1e-8)):
        if params.get(key, AUTO) == AUTO:
            params[key] = default
    if params.get("torch_adam") and "foreach" not in params:
        params.setdefault("fused", hardware.device in ("cuda", "cpu"))

    scheduler = resolved.setdefault("scheduler", {"type": "WarmupDecayLR"})
    params = scheduler.setdefault("params", {"warmup_type": "linear"})
    owned = {
        "total_num_steps": (train.steps, "train.steps"),
        "warmup_num_steps": (warmup, "train.warmup, in steps"),
        "warmup_max_lr": (train.lr, "train.lr"),
    }
    if params.get("warmup_min_lr", AUTO) == AUTO and "warmup_min_lr" in SCHEDULES.get(scheduler["type"], ()):
        params["warmup_min_lr"] = 0.0  # also where the decay ends
    for key, (value, field) in owned.items():
        if key in params or key in SCHEDULES.get(scheduler["type"], ()):
            own(params, "scheduler.params.", key, value, field)

    zero = resolved.get("zero_optimization", {})
    if zero.get("overlap_comm") == AUTO:
        zero["overlap_comm"] = world > 1  # DeepSpeed then waits for the device after every backward pass

    precision, notes = _resolve_precision(resolved, train.precision, hardware, problems)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise UserError(f'ds_config {path} and the recipe disagree; write "auto" or the same value:\n{lines}')
    unfilled = [f"  {key}" for key in _autos(resolved)]
    if unfilled:
        lines = "\n".join(unfilled)
        raise UserError(f'ds_config {path}: no recipe has a value for these; write one instead of "auto":\n{lines}')
    stage = zero.get("stage", 0)
    if precision != "fp32" and stage == 0:
        raise UserError(
            f"ds_config {path}: {precision} at ZeRO stage 0, where DeepSpeed does not scale the loss; set "
            f"zero_optimization.stage to 1 or 2"
        )
    offload = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if stage >= 3 and offload and len(recipe.streams) > 1:
        raise UserError(
            f"ds_config {path}: ZeRO stage 3 with offload_optimizer, where DeepSpeed loses gradients of weights that "
            f"not all streams use; train one stream, or take stage 2, or no offload_optimizer"
        )
    resolved.setdefault("steps_per_print", None)
    resolved.setdefault("zero_allow_untested_optimizer", True)
    return resolved, precision, notes


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


class StepModule(nn.Module):
    """What DeepSpeed wraps: the encoder, the objectives' own heads, and the way from a micro-batch to its loss."""

    def __init__(self, encoder: Encoder, recipe: Recipe):
        super().__init__()
        self.encoder = encoder
        encoder.label_smoothing, encoder.z_loss = recipe.train.label_smoothing, recipe.train.z_loss
        self.heads = nn.ModuleDict()
        self.companions: dict[str, Companion] = {}
        """Not modules: DeepSpeed must neither cast nor save them."""
        self.streams = {name: (OBJECTIVES[stream.objective], stream.options) for name, stream in recipe.streams.items()}

        for name, (objective, options) in self.streams.items():
            torch.manual_seed(rng.torch_seed(recipe.train.seed, "heads", name))
            heads = objective.heads and objective.heads(encoder, options)
            if heads is not None:
                self.heads[name] = heads
            companion = objective.companion and objective.companion(encoder, heads, options)
            if companion is not None:
                self.companions[name] = companion
        if recipe.train.activation_checkpointing:
            encoder.checkpoint_activations()
        if recipe.train.compile:
            encoder.compile_layers()
        self.train()  # from_pretrained leaves a model without dropout

    def parts(self, stream: str) -> Parts:
        heads = dict(self.heads.items()).get(stream)
        return Parts(self.encoder, heads, self.companions.get(stream))

    def companion_bytes(self) -> int:
        """Size of the companions' tensors."""
        leaves = tree_leaves([companion.state_dict() for companion in self.companions.values()])
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))

    def forward(self, stream: str, batch: dict[str, Tensor]) -> LossSums:
        objective, options = self.streams[stream]
        return objective.loss(self.parts(stream), batch, options)


def build_engine(module: StepModule, ds_config: dict[str, Any]) -> Any:
    import deepspeed

    if getattr(module, "companions", None) and ds_config.get("zero_optimization", {}).get("stage", 0) >= 3:
        raise UserError(
            f"streams.{next(iter(module.companions))} has a momentum encoder, which follows whole weights; "
            f"ZeRO stage 3 cuts them up. Use a ds_config of stage 2 or lower"
        )
    optimizer = ds_config["optimizer"]
    if optimizer["type"].lower() in ("adam", "adamw") and not optimizer["params"].get("torch_adam"):
        offload = ds_config.get("zero_optimization", {}).get("offload_optimizer") or {}
        load_adam("CPUAdamBuilder" if offload.get("device", "none") != "none" else "FusedAdamBuilder")
    groups = decay_groups(module, optimizer["params"]["weight_decay"])
    try:
        engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=ds_config)
    except pydantic.ValidationError as error:
        raise UserError(f"ds_config: DeepSpeed does not take it: {error}") from None
    return engine


def operators_directory() -> Path:
    """Where DeepSpeed's operators are compiled for xscale alone."""
    from torch.utils import cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    return root / f"xscale_python{sys.version_info.major}.{sys.version_info.minor}_torch{torch.__version__}"


@functools.cache
def load_adam(builder: str) -> None:
    """Load DeepSpeed's own Adam; the first time on a machine, compile it.

    torch guards a build by a file that a killed process leaves behind, and all later ones wait on it for ever. So build
    in a directory that only xscale uses, under a lock that ends with its holder: a guard found there is nobody's.
    """
    from deepspeed.ops import op_builder

    directory = operators_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.environ["TORCH_EXTENSIONS_DIR"] = str(directory)
        with (directory / "xscale.lock").open("w") as lock:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
                for guard in directory.glob("*/lock"):
                    guard.unlink()
            if not any(directory.glob("*/*.so")):
                LOG.info(f"compiling DeepSpeed's Adam in {directory}, once on this machine")
            getattr(op_builder, builder)().load(verbose=False)
    except Exception as error:
        raise UserError(
            "ds_config asks for DeepSpeed's own Adam, which takes a C++ compiler (on a GPU also nvcc) and could not be "
            "compiled; make one available, or take torch's: optimizer.params.torch_adam = true, no offload_optimizer.\n"
            f"{directory}: {error}"
        ) from None


def follow_schedule(engine: Any) -> None:
    """Take the next step's learning rate from the schedule as it is now. DeepSpeed restores the saved one, which is
    that of another length where train.steps changed."""
    scheduler = engine.lr_scheduler
    if scheduler is not None and scheduler.last_batch_iteration >= 0:
        scheduler.step(scheduler.last_batch_iteration)


def keeps_whole_weights(engine: Any) -> bool:
    """ZeRO stage 3 cuts them up."""
    return engine.zero_optimization_stage() < 3


@contextmanager
def whole_weight(engine: Any, weight: Tensor) -> Iterator[Tensor]:
    """A weight of the module, to be read. All ranks call it together."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight], enabled=not keeps_whole_weights(engine)):
        yield weight


class StepSums:
    """Sums of one optimizer step on this rank, kept on the device until somebody looks."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double() if value.device.type == "cpu" else value.detach().float()
        self.sums[name] = self.sums[name] + value if name in self.sums else value


class GradientNorms:
    """L2 norm of each stream's share of an optimizer step's gradient, before clipping, by a backward pass of its own.

    The micro-batches of a stream follow one another, in the same order on all ranks.
    """

    def __init__(self, engine: Any):
        self.parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self.size = sum(p.numel() for p in self.parameters)
        self.scale = float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0
        self.stream = ""
        self.norms: dict[str, Tensor] = {}

    def add(self, stream: str, loss: Tensor) -> None:
        """loss: this rank's share of what the stream adds to the step's loss."""
        if stream != self.stream:
            self.close()
            self.stream, self.sum = stream, torch.zeros(self.size, device=loss.device)
        if loss.requires_grad:
            scaled = loss * self.scale
            gradients = torch.autograd.grad(scaled, self.parameters, retain_graph=True, materialize_grads=True)
            self.sum += torch.cat([gradient.flatten() for gradient in gradients])

    def close(self) -> dict[str, Tensor]:
        if self.stream:
            dist.all_reduce(self.sum)
            self.norms[f"grad_norm/{self.stream}"] = self.sum.norm() / self.scale
            self.stream = ""
        return self.norms


def optimizer_step(
    engine: Any,
    recipe: Recipe,
    micros: list[MicroBatch],
    totals: dict[tuple[str, str], int],
    *,
    step: int,
    rank: int,
    world: int,
    norms: GradientNorms | None = None,
) -> dict[str, Tensor]:
    """One optimizer step: a forward and backward pass for each micro-batch, then one update.

    The step's loss is sum over streams of weight * sum over terms of factor * (sum over targets / targets of all
    ranks). DeepSpeed divides gradients by the number of ranks and of micro-steps; the loss is multiplied by both.

    totals: targets of all ranks by (stream, term). Returns this rank's share of each metric, already divided by the
    global number of targets, so that a sum over ranks gives the step's value.
    """
    sums = StepSums()
    skipped = engine.skipped_steps
    undo_mean = world * len(micros)
    for number, micro in enumerate(micros):
        torch.manual_seed(rng.torch_seed(recipe.train.seed, "dropout", step, number, rank))
        batch = to_device(micro.arrays, engine.device)
        losses = engine(micro.stream, batch)
        stream = recipe.streams[micro.stream]
        factors = OBJECTIVES[stream.objective].terms(stream.options)
        loss = torch.zeros((), device=engine.device)
        for term, value in losses.terms.items():
            share = value / max(totals[micro.stream, term], 1)
            loss = loss + factors[term] * share
            if len(factors) > 1:
                sums.add(f"loss/{micro.stream}.{term}", share)
        sums.add(f"loss/{micro.stream}", loss)
        for name, (value, term) in losses.metrics.items():
            sums.add(f"{name}/{micro.stream}", value / max(totals[micro.stream, term], 1))
        loss = loss * recipe.stream_weight(micro.stream, step)
        if norms:
            norms.add(micro.stream, loss)
        backward(engine, loss * undo_mean)
        engine.step()
    for companion in engine.module.companions.values():
        companion.update(applied=engine.skipped_steps == skipped)
    return sums.sums


def backward(engine: Any, loss: Tensor) -> None:
    """engine.backward, after what DeepSpeed leaves out for a module like ours.

    It tells ZeRO's optimizer of a pass, and whether it is the step's last, from hooks on the tensors that a module
    returns, which it does not find in LossSums. And an optimizer offloaded, or of stage 1 with overlap_comm, takes a
    parameter's gradient over from its hook in each pass: those that another stream alone uses need one too, of zeros.
    """
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    if isinstance(engine.optimizer, ZeROOptimizer):
        engine.optimizer.backward_prologue()
        engine.optimizer.set_gradient_accumulation_boundary(engine.is_gradient_accumulation_boundary())
        stage = engine.zero_optimization_stage()
        by_hook = stage < 3 and (engine.zero_use_cpu_optimizer() or (stage == 1 and engine.zero_overlap_comm()))
        if by_hook and len(engine.module.streams) > 1:
            loss = loss + sum(p.flatten()[:0].sum(dtype=loss.dtype) for p in engine.module.parameters())
    engine.backward(loss)


def dump(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2) + "\n"


def to_device(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The arrays on the device; on CUDA with `places`, without which the encoder computes padding."""
    if device.type != "cuda":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    return copy_at_once(arrays | real_places(arrays), device)


def copy_at_once(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """One pinned buffer, one copy that the host does not wait for."""
    sizes = [-(-array.nbytes // 16) * 16 for array in arrays.values()]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for piece, array in zip(buffer.split(sizes), arrays.values(), strict=True):
        piece.numpy()[: array.nbytes] = array.reshape(-1).view(np.uint8)
    moved = buffer.to(device, non_blocking=True).split(sizes)
    return {
        name: piece[: array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for piece, (name, array) in zip(moved, arrays.items(), strict=True)
    }
