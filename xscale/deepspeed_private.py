"""This module has all uses of DeepSpeed's private attributes and functions.

pyproject.toml allows DeepSpeed 0.19 only. tests/test_deepspeed_private.py checks what these functions need, so that an
incompatible update fails there. No other file may use them.
"""

import copyreg
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

# The process


def leave_out_shared_memory_op() -> None:
    """Disable DeepSpeed's shared-memory all-reduce. It is for inference, needs a C++ build at first use, and hangs
    ranks whose launcher does not set LOCAL_SIZE."""
    import deepspeed

    vars(deepspeed.ops)["__compatible_ops__"] = {}


def import_muon_uncompiled() -> None:
    """Import Muon, which no run of xscale uses, without torch.compile. DeepSpeed imports it in every process, and
    compiling imports 600 files of inductor (0.8 s). A DeepSpeed without Muon has nothing to import."""
    from deepspeed.runtime import compiler

    with suppress(ImportError, AttributeError), mock.patch.object(compiler, "compile"):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


# The ds_config


def config_classes() -> tuple[Any, Any, Any]:
    """Return the class that reads a ds_config, its exception class, and its enum of number types."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError, DtypeEnum

    return DeepSpeedConfig, DeepSpeedConfigError, DtypeEnum


def optimizers() -> list[str]:
    """Return the names of DeepSpeed's own optimizers, which optimizer.type may have besides torch's."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    return list(DEEPSPEED_OPTIMIZERS)


def schedulers() -> dict[str, Any]:
    """Return DeepSpeed's own scheduler classes by name, which scheduler.type may have besides torch's."""
    from deepspeed.runtime import lr_schedules

    return {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}


def compile_operator(builder: str) -> None:
    """Compile and load an operator, without debugging information, which doubles the time that g++ takes. builder:
    CPUAdamBuilder or FusedAdamBuilder."""
    from deepspeed.ops import op_builder

    made = getattr(op_builder, builder)()
    words = made.cxx_args()
    made.cxx_args = lambda: [word for word in words if word != "-g"]
    made.load(verbose=False)


# Weights


def is_cut_up(weight: Tensor) -> bool:
    """Whether ZeRO stage 3 has partitioned the weight. Stage 3 gathers a weight when the weight's module is called."""
    return hasattr(weight, "ds_id")


def whole_shape(weight: Tensor) -> torch.Size:
    return getattr(weight, "ds_shape", weight.shape)


def drop_gradients(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.grad = weight.grad_accum = None  # type: ignore[attr-defined]  # grad_accum: gradients in fp32


# The engine's step


def is_bf16_optimizer(engine: Any) -> bool:
    """Whether the engine uses BF16_Optimizer, as at stage 1 in bf16 with gradients in fp32."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    return isinstance(engine.optimizer, BF16_Optimizer)


def without_gradient(engine: Any) -> list[nn.Parameter]:
    """Return the trainable weights without a gradient, since no backward pass of this rank has reached them."""
    # Gradients in fp32 are in an attribute of another name.
    gradient = getattr(engine.optimizer, "get_gradient_for_reduction", lambda weight: weight.grad)
    return [p for p in engine.module.parameters() if p.requires_grad and gradient(p) is None]


@contextmanager
def gradients_by_hand(engine: Any) -> Iterator[None]:
    """A context in which the caller sets gradients, which DeepSpeed then treats as those of a backward pass."""
    accumulates = engine.zero_optimization_stage() in (1, 2)
    if accumulates:
        engine.optimizer.backward_prologue()  # BF16_Optimizer clears the last pass's gradients, which it has read
    yield
    if accumulates:
        engine.optimizer.backward_epilogue()


CHUNK = 1 << 26
"""The number of elements in a part of a reduced gradient. For the norm, DeepSpeed copies one part at a time to fp64."""


def join_reduced(engine: Any) -> None:
    """Join this rank's reduced gradients, one tensor per weight, into one tensor per group, as the update does later
    anyway.

    DeepSpeed's norm (2 operators per tensor) and overflow check (12 per 16-bit tensor) then run on few tensors.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() not in (1, 2) or is_bf16_optimizer(engine) or optimizer.cpu_offload:
        return
    for group, gradients in optimizer.averaged_gradients.items():
        if gradients:
            flat = getattr(gradients, "flat_partition", None)
            joined = JoinedGradient(optimizer.flatten(gradients) if flat is None else flat)
            weights = len(optimizer.params_in_partition[group])  # DeepSpeed expects at most this many parts
            joined.extend(joined.flat_partition.split(max(CHUNK, -(-len(joined.flat_partition) // max(weights, 1)))))
            optimizer.averaged_gradients[group] = joined


class JoinedGradient(list):
    """The parts of a flat gradient, which DeepSpeed does not flatten again."""

    def __init__(self, flat: Tensor):
        super().__init__()
        self.flat_partition = flat


def look_at_norm_alone(engine: Any) -> None:
    """Let stages 1 and 2 decide by the norm alone whether the gradient is finite. Called once per engine.

    DeepSpeed otherwise checks every gradient, waits for the device, and checks the norm, too. The norm of a gradient
    that is not finite is not finite either. In fp32 DeepSpeed checks the norm only.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() in (1, 2) and not is_bf16_optimizer(engine) and not optimizer.cpu_offload:
        optimizer.check_overflow = lambda partition_gradients=True: None


def note_norm(engine: Any, norm: Tensor) -> None:
    """Set the norm that engine.get_global_grad_norm returns."""
    engine._global_grad_norm = norm


def leave_out_step(engine: Any) -> None:
    """Skip the update, and count the step as DeepSpeed counts a skipped one."""
    engine.zero_grad()
    engine.global_steps += 1
    engine.skipped_steps += 1


def no_smaller_scale(error: Exception) -> bool:
    """Whether the error says that fp16 cannot lower its loss scale any more."""
    return "loss scale already at minimum" in str(error)


def follow_schedule(engine: Any) -> None:
    """Take the next step's learning rate from the present schedule. DeepSpeed restores the saved rate, which is wrong
    if train.steps has changed."""
    scheduler = engine.lr_scheduler
    if scheduler is not None and scheduler.last_batch_iteration >= 0:
        scheduler.step(scheduler.last_batch_iteration)


# Checkpoints

KNOWN_TYPES = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
"""The types in DeepSpeed's files besides tensors and plain values. Other types could run code when they are loaded."""


def pickle_stage_plainly() -> None:
    """Pickle ZeroStageEnum without builtins.getattr, which Python 3.11.2 uses and no checkpoint may contain."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))  # type: ignore[arg-type]


def save_by(engine: Any, snapshot_engine: Any, folder: Path, tag: str, client_state: dict[str, Any]) -> None:
    """Call engine.save_checkpoint with `makedirs` and `save` of `snapshot_engine` in the place of DeepSpeed's."""
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    class Engine(TorchCheckpointEngine):
        makedirs, save = staticmethod(snapshot_engine.makedirs), staticmethod(snapshot_engine.save)

    kept = engine.checkpoint_engine
    engine.checkpoint_engine, engine._copy_recovery_script = Engine(), lambda folder: None
    try:
        engine.save_checkpoint(str(folder), tag=tag, client_state=client_state, save_latest=False)
    finally:
        engine.checkpoint_engine = kept
        del engine._copy_recovery_script


def copy_script(engine: Any, folder: Path) -> None:
    """Copy zero_to_fp32.py into a checkpoint."""
    engine._copy_recovery_script(str(folder))


def model_file(path: Path) -> Path:
    return next(path.glob("*mp_rank_00_model_states.pt"))


def partition_files(path: Path) -> list[Path]:
    """Return the files of the optimizer's partitions in the order of ranks; [] at stage 0."""

    def rank_of(file: Path) -> int:
        (rank,) = re.findall(r"zero_pp_rank_(\d+)_", file.name)
        return int(rank)

    return sorted(path.glob("*zero_pp_rank_*_optim_states.pt"), key=rank_of)


def saved_groups(model: dict[str, Any], rank: dict[str, Any]) -> Iterator[tuple[dict[str, torch.Size], bool]]:
    """Yield, for each group of weights at stages 1 to 3, the weights' shapes in order, and whether each weight is
    partitioned by itself (stage 3) or the whole flat group is. model, rank: the loaded files of model and rank."""
    for shapes in model["param_shapes"]:
        yield shapes, "fp32_flat_groups" in rank["optimizer_state_dict"]


def has_weights_in_order(engine: Any, path: Path) -> bool:
    """Return True if a checkpoint of the engine's ZeRO stage has the weights in the engine's order. Its flat tensors
    can then be loaded as they are."""
    if engine.zero_optimization_stage() == 0:
        return True
    saved = torch.load(model_file(path), map_location="cpu", mmap=True, weights_only=False)["param_shapes"]
    return [[*shapes] for shapes in saved] == [[*shapes] for shapes in engine._get_zero_param_shapes()]


def saved_partition(rank: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield, for each group, a rank's flat fp32 weights and their optimizer state."""
    state = rank["optimizer_state_dict"]
    stage_3 = "fp32_flat_groups" in state
    weights = state["fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"]
    optimizer = state["optimizer_state_dict" if stage_3 else "base_optimizer_state"]["state"]
    for group, flat in enumerate(weights):
        yield flat, optimizer.get(group, {})


def saved_scaler(rank: dict[str, Any]) -> Any:
    """Return the loss scaler, which is the same on all ranks."""
    return rank["optimizer_state_dict"].get("loss_scaler")


def saved_whole(model: dict[str, Any]) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    """Return the weights by name and the optimizer states by number of a checkpoint of stage 0."""
    return model["module"], (model.get("optimizer") or {}).get("state", {})


Fragment = tuple[nn.Parameter, int, int, int]
"""(weight, first, last, at): the elements [first, last) of a flattened weight, which begin at `at` in a flat tensor."""


def partitions(engine: Any) -> Iterator[tuple[Tensor, list[Fragment]]]:
    """Yield the tensors that this rank's optimizer updates, and the fragments in each. At stage 0 they are the weights,
    at stages 1 to 3 flat tensors."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 0:
        yield from ((weight, [(weight, 0, weight.numel(), 0)]) for weight in engine.module.parameters())
        return
    if engine.zero_optimization_stage() == 3:
        rank = optimizer.dp_process_group.rank()
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            found: list[Fragment] = []
            at = 0
            for weight in group:
                share = weight.partition_numel()
                first, last = (min(share * (rank + more), weight.ds_numel) for more in (0, 1))
                found.append((weight, first, last, at))
                at += share
            yield flat, found
        return
    bf16 = hasattr(optimizer, "bf16_groups")
    groups = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
    flats = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    for group, flat in zip(groups, flats, strict=True):
        mapped = [(weight, weight._hp_mapping) for weight in group if weight._hp_mapping]
        places = [(weight, of.lp_fragment_address, of.hp_fragment_address) for weight, of in mapped]
        yield flat, [(weight, of.start, of.start + of.numel, at.start) for weight, of, at in places]


def zero_padding(engine: Any) -> None:
    """Set the padding of stage 3's partitions to zero. DeepSpeed leaves it uninitialised and saves it, so that two
    equal runs could write different checkpoints."""
    if engine.zero_optimization_stage() == 3:
        for flat, fragments in partitions(engine):
            padding = torch.ones_like(flat, dtype=torch.bool)
            for _, first, last, at in fragments:
                padding[at : at + last - first] = False
            flat.data.masked_fill_(padding, 0)


def torch_optimizer(engine: Any) -> Any:
    return engine.optimizer.optimizer if engine.zero_optimization_stage() else engine.optimizer


def before_flats_change(engine: Any) -> None:
    if engine.zero_optimization_stage() == 3:
        engine.optimizer.checkpoint_event_prologue()


def update_weights_from_flats(engine: Any) -> None:
    """Copy the flat tensors into the weights that the engine computes with."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        parts = optimizer.fp16_partitioned_groups_flat
        for flat, part in zip(optimizer.fp32_partitioned_groups_flat, parts, strict=True):
            part.data.copy_(flat.data)
        for part, group in zip(parts, optimizer.fp16_partitioned_groups, strict=True):
            for weight, numbers in zip(group, optimizer.unflatten(part, group), strict=True):
                weight.data = numbers.data
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.checkpoint_event_epilogue()
    elif stage:
        optimizer._hp_optimizer_states_linked = False
        optimizer.update_lp_params()


def restore_counters(engine: Any, model: dict[str, Any], scaler: Any) -> None:
    """Restore the loss scale, the ds_config's scheduler and the engine's counters."""
    if engine.fp16_enabled():
        engine.optimizer.loss_scaler = scaler
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(model["lr_scheduler"])
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, model[counter])
