"""The DeepSpeed engine of a run, and its optimizer step."""

import fcntl
import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
