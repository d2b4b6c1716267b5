"""What the code needs of DeepSpeed that DeepSpeed promises nobody: all of it stands here, under names of ours.

pyproject.toml allows DeepSpeed 0.19 alone. tests/test_deepspeed_private.py names what each of these must be, so that an
update fails there; no other file may use a private part. What is public is used where it is needed: initialize,
init_distributed, the engine's backward, step, no_sync, coalesce_grad_reduction, save_checkpoint and load_checkpoint.
"""

import copyreg
import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

# A process


def leave_out_shared_memory_op() -> None:
    """A shared-memory all-reduce for inference that training never calls: it costs a C++ build at first use and hangs
    ranks whose launcher does not set LOCAL_SIZE."""
    import deepspeed

    vars(deepspeed.ops)["__compatible_ops__"] = {}


def import_muon_uncompiled() -> None:
    """DeepSpeed asks of any optimizer whether it is its Muon, whose functions are compiled: that alone imports
    inductor, 600 files and 0.8 s in every process. A DeepSpeed without Muon has nothing to import."""
    from deepspeed.runtime import compiler

    def as_it_is(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda function: function

    with suppress(ImportError, AttributeError), mock.patch.object(compiler, "compile", as_it_is):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


# A ds_config


def config_classes() -> tuple[Any, Any, Any]:
    """The class that reads a ds_config, its error, and the enum of types of numbers."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError, DtypeEnum

    return DeepSpeedConfig, DeepSpeedConfigError, DtypeEnum


def optimizers() -> list[str]:
    """Names that optimizer.type may have, beside torch's."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    return list(DEEPSPEED_OPTIMIZERS)


def adam_classes() -> list[Any]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    return [DeepSpeedCPUAdam, FusedAdam]


def lamb_and_lion() -> dict[str, list[Any]]:
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import FusedLion

    return {"lamb": [FusedLamb], "lion": [FusedLion]}


def schedulers() -> dict[str, Any]:
    """The classes that scheduler.type may name, beside torch's."""
    from deepspeed.runtime import lr_schedules

    return {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}


def compile_operator(builder: str) -> None:
    """CPUAdamBuilder or FusedAdamBuilder."""
    from deepspeed.ops import op_builder

    getattr(op_builder, builder)().load(verbose=False)


# A weight


def is_cut_up(weight: Tensor) -> bool:
    """By stage 3, which gathers it where its module is called."""
    return hasattr(weight, "ds_id")


def whole_shape(weight: Tensor) -> torch.Size:
    return getattr(weight, "ds_shape", weight.shape)


def drop_gradients(module: nn.Module) -> None:
    for weight in module.parameters():
        weight.grad = weight.grad_accum = None  # type: ignore[attr-defined]  # where it accumulates in fp32


# An engine's step


def is_bf16_optimizer(engine: Any) -> bool:
    """What DeepSpeed takes for stage 1 in bf16 with gradients accumulated in fp32."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    return isinstance(engine.optimizer, BF16_Optimizer)


def without_gradient(engine: Any) -> list[nn.Parameter]:
    """Trainable weights that no pass of this rank has used."""
    # Where gradients are accumulated in fp32, backward_epilogue has moved them into an attribute of another name.
    gradient = getattr(engine.optimizer, "get_gradient_for_reduction", lambda weight: weight.grad)
    return [p for p in engine.module.parameters() if p.requires_grad and gradient(p) is None]


@contextmanager
def gradients_by_hand(engine: Any) -> Iterator[None]:
    """What is set as .grad within counts as of a backward pass."""
    accumulates = engine.zero_optimization_stage() in (1, 2)
    if accumulates:
        engine.optimizer.backward_prologue()  # BF16_Optimizer's clears the last pass's gradients, which it has taken
    yield
    if accumulates:
        engine.optimizer.backward_epilogue()


CHUNK = 1 << 26
"""Numbers of a reduced gradient whose norm is taken at a time: DeepSpeed makes a copy of them in fp64."""


def join_reduced(engine: Any) -> None:
    """Make the reduced gradients of this rank, a tensor a weight, one tensor a group, as the update does later anyway.

    DeepSpeed's norm (2 operators) and its look for overflow (12, in 16 bits) are then of a few tensors instead of all.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() not in (1, 2) or is_bf16_optimizer(engine) or optimizer.cpu_offload:
        return
    for group, gradients in optimizer.averaged_gradients.items():
        if gradients:
            flat = getattr(gradients, "flat_partition", None)
            joined = Joined(optimizer.flatten(gradients) if flat is None else flat)
            weights = len(optimizer.params_in_partition[group])  # the norm is of no more tensors than weights
            joined.extend(joined.flat_partition.split(max(CHUNK, -(-len(joined.flat_partition) // max(weights, 1)))))
            optimizer.averaged_gradients[group] = joined


class Joined(list):
    """Parts of a flat gradient that DeepSpeed does not flatten again."""

    def __init__(self, flat: Tensor):
        super().__init__()
        self.flat_partition = flat


def look_at_norm_alone(engine: Any) -> None:
    """Once: let stages 1 and 2 find out by the gradient's norm whether it is finite.

    DeepSpeed looks at every gradient first, waits for the device, and then at the norm as well, which says the same:
    of a number that is not finite it is not either. In fp32 the norm is all that DeepSpeed looks at.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() in (1, 2) and not is_bf16_optimizer(engine) and not optimizer.cpu_offload:
        optimizer.check_overflow = lambda partition_gradients=True: None


def note_norm(engine: Any, norm: Tensor) -> None:
    """What engine.get_global_grad_norm says."""
    engine._global_grad_norm = norm


def leave_out_step(engine: Any) -> None:
    """Count a step as DeepSpeed counts one that it skips."""
    engine.zero_grad()
    engine.global_steps += 1
    engine.skipped_steps += 1


def no_smaller_scale(error: Exception) -> bool:
    """Whether fp16 has no loss scale left."""
    return "loss scale already at minimum" in str(error)


def follow_schedule(engine: Any) -> None:
    """Take the next step's learning rate from the schedule as it is now. DeepSpeed restores the saved one, which is
    that of another length where train.steps changed."""
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
"""What DeepSpeed's files hold besides tensors and plain values. Anything else could run code as it is loaded."""


def pickle_stage_plainly() -> None:
    """Python 3.11.2 pickles a member of an enum by builtins.getattr, which no checkpoint may hold."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))  # type: ignore[arg-type]


def save_by(engine: Any, snapshot_engine: Any, folder: Path, tag: str, client_state: dict[str, Any]) -> None:
    """engine.save_checkpoint, whose files `taker` takes: it has makedirs(path, exist_ok) and save(state_dict, path)."""
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
    """zero_to_fp32.py."""
    engine._copy_recovery_script(str(folder))


def model_file(path: Path) -> Path:
    return next(path.glob("*mp_rank_00_model_states.pt"))


def partition_files(path: Path) -> list[Path]:
    """In the order of ranks; none at stage 0."""

    def rank_of(file: Path) -> int:
        (rank,) = re.findall(r"zero_pp_rank_(\d+)_", file.name)
        return int(rank)

    return sorted(path.glob("*zero_pp_rank_*_optim_states.pt"), key=rank_of)


def saved_groups(model: dict[str, Any], rank: dict[str, Any]) -> Iterator[tuple[dict[str, torch.Size], bool]]:
    """Of each group of weights at stages 1 to 3, their shapes in order, and whether each weight is cut up (stage 3) or
    the group, one weight behind the other. model, rank: what model_file and one of partition_files hold."""
    for shapes in model["param_shapes"]:
        yield shapes, "fp32_flat_groups" in rank["optimizer_state_dict"]


def saved_partition(rank: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Of each group, a rank's fp32 weights and the optimizer's state of them."""
    state = rank["optimizer_state_dict"]
    stage_3 = "fp32_flat_groups" in state
    weights = state["fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"]
    optimizer = state["optimizer_state_dict" if stage_3 else "base_optimizer_state"]["state"]
    for group, flat in enumerate(weights):
        yield flat, optimizer.get(group, {})


def saved_scaler(rank: dict[str, Any]) -> Any:
    """The loss scale, which all ranks have alike."""
    return rank["optimizer_state_dict"].get("loss_scaler")


def saved_whole(model: dict[str, Any]) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    """Weights by name, and the optimizer's states by number; all there is at stage 0."""
    return model["module"], (model.get("optimizer") or {}).get("state", {})


Fragment = tuple[nn.Parameter, int, int, int]
"""Of a weight numbers first to last, and where they are in a flat tensor."""


def partitions(engine: Any) -> Iterator[tuple[Tensor, list[Fragment]]]:
    """This rank's flat tensors at stages 1 to 3, whose states the optimizer has, and what is in them."""
    optimizer = engine.optimizer
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


def torch_optimizer(engine: Any) -> Any:
    return engine.optimizer.optimizer if engine.zero_optimization_stage() else engine.optimizer


def before_flats_change(engine: Any) -> None:
    if engine.zero_optimization_stage() == 3:
        engine.optimizer.checkpoint_event_prologue()


def take_over_flats(engine: Any) -> None:
    """Bring the weights that the engine computes with to what its flat tensors now say."""
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


def take_over_counters(engine: Any, model: dict[str, Any], scaler: Any) -> None:
    """Loss scale, schedule, and what the engine counts."""
    if engine.fp16_enabled():
        engine.optimizer.loss_scaler = scaler
    engine.lr_scheduler.load_state_dict(model["lr_scheduler"])
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, model[counter])
