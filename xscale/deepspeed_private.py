"""All uses of DeepSpeed's private attributes and functions. No other file may use them.

pyproject.toml allows DeepSpeed 0.19 only. tests/test_deepspeed_private.py checks the attributes that these functions
need, and fails if an update of DeepSpeed changes them.
"""

import copyreg
import importlib
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

# The process


def disable_shared_memory_op() -> None:
    """Disable DeepSpeed's shared-memory all-reduce. It is meant for inference, needs a C++ build at first use, and
    hangs ranks whose launcher does not set LOCAL_SIZE."""
    import deepspeed

    vars(deepspeed.ops)["__compatible_ops__"] = {}


def import_muon_uncompiled() -> None:
    """Import Muon without torch.compile, if DeepSpeed has Muon. No run uses Muon, but DeepSpeed imports it in every
    process, and compiling it imports 600 files of inductor (0.8 s)."""
    from deepspeed.runtime import compiler

    with suppress(ImportError, AttributeError), mock.patch.object(compiler, "compile"):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def compile_operator(builder: str) -> None:
    """Compile and load an operator. Debugging information is left out, because g++ would take twice as long with it.
    builder: "CPUAdamBuilder" or "FusedAdamBuilder"."""
    from deepspeed.ops import op_builder

    operator = getattr(op_builder, builder)()
    words = operator.cxx_args()
    operator.cxx_args = lambda: [word for word in words if word != "-g"]
    operator.load(verbose=False)


# Weights


def is_partitioned(weight: Tensor) -> bool:
    """Return whether ZeRO stage 3 has partitioned the weight. Stage 3 gathers a weight when its module is called."""
    return hasattr(weight, "ds_id")


def whole_shape(weight: Tensor) -> torch.Size:
    """Return the weight's shape before ZeRO stage 3 partitioned it."""
    return getattr(weight, "ds_shape", weight.shape)


def drop_gradients(module: nn.Module) -> None:
    """Free the gradients of all weights."""
    for weight in module.parameters():
        weight.grad = weight.grad_accum = None  # type: ignore[attr-defined]  # grad_accum: gradients in fp32


# The engine's step


def is_bf16_optimizer(engine: Any) -> bool:
    """Return whether the engine uses BF16_Optimizer; it does at stage 1 in bf16 with gradients in fp32."""
    return hasattr(engine.optimizer, "bf16_groups")


def weights_without_gradient(engine: Any) -> list[nn.Parameter]:
    """Return the trainable weights that have no gradient, because no backward pass of this rank has reached them."""
    # Gradients in fp32 are in an attribute of another name.
    gradient = getattr(engine.optimizer, "get_gradient_for_reduction", lambda weight: weight.grad)
    return [p for p in engine.module.parameters() if p.requires_grad and gradient(p) is None]


@contextmanager
def setting_gradients_by_hand(engine: Any) -> Iterator[None]:
    """Return a context in which the caller sets gradients. DeepSpeed then treats them as those of a backward pass."""
    accumulates = engine.zero_optimization_stage() in (1, 2)
    if accumulates:
        engine.optimizer.backward_prologue()  # BF16_Optimizer clears the gradients of the previous pass
    yield
    if accumulates:
        engine.optimizer.backward_epilogue()


def remove_gradient_hooks(engine: Any) -> None:
    """Remove the hooks that stages 1 and 2 have on every weight. Calls after the first do nothing.

    They reduce gradients during a backward pass. Inside of `coalesce_grad_reduction` they reduce nothing, but each pass
    still calls one for every weight. Without the hooks, only `coalesce_grad_reduction` reduces gradients.
    """
    hooks = getattr(engine.optimizer, "_grad_acc_hooks", [])
    if engine.zero_optimization_stage() in (1, 2) and not is_bf16_optimizer(engine):
        for hook in hooks:
            hook.remove()
        hooks.clear()


def supports_flat_gradients(engine: Any) -> bool:
    """Return whether this engine's gradients can be views of flat tensors, for `average_and_hand_over_partitions`.

    They can be at stages 1 and 2, with three exceptions: the optimizer is in host memory; DeepSpeed keeps gradients in
    fp32 beside 16-bit weights; `reduce_scatter` is false, and DeepSpeed scales gradients in another way.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() not in (1, 2) or is_bf16_optimizer(engine) or optimizer.cpu_offload:
        return False
    return optimizer.reduce_scatter and not optimizer.use_grad_accum_attribute


def allocate_flat_gradients(engine: Any) -> list[Tensor]:
    """Give every trained weight a gradient of zeros, to which backward passes then add. The gradients of a group are
    views of one flat tensor, which has the order and the padding of DeepSpeed's flat weights. Return these tensors."""
    optimizer = engine.optimizer
    flat_gradients = list[Tensor]()
    for weights, flat_weight in zip(optimizer.bit16_groups, optimizer.bit16_groups_flat, strict=True):
        flat_gradient = torch.zeros_like(flat_weight)
        for weight, gradient in zip(weights, optimizer.unflatten(flat_gradient, weights), strict=True):
            weight.grad = gradient
        flat_gradients.append(flat_gradient)
    return flat_gradients


def without_gradient_reduction(engine: Any) -> AbstractContextManager[Any]:
    """Return a context whose backward passes reduce nothing. DeepSpeed's own `no_sync` refuses stage 2, where hooks
    reduce (`remove_gradient_hooks`)."""
    return mock.patch.object(engine, "inside_no_sync_ctxt", True)


def average_and_hand_over_partitions(engine: Any, flat_gradients: list[Tensor]) -> None:
    """Average flat gradients over ranks, and hand this rank's partition of each to DeepSpeed's update. The sum is
    computed in place, so no gradient is copied unless ranks exchange gradients in another data type. On CUDA, only this
    rank's partition is valid afterwards."""
    optimizer = engine.optimizer
    for group, flat_gradient in enumerate(flat_gradients):
        process_group = optimizer.real_dp_process_group[group]
        world = dist.get_world_size(process_group)
        total = flat_gradient.to(optimizer.communication_data_type)
        partition = total.view(world, -1)[dist.get_rank(process_group)]
        if world > 1:
            total.div_(world)
            reduce_scatter_in_place(total, partition, process_group)
        most_parts = len(optimizer.params_in_partition[group])
        optimizer.averaged_gradients[group] = PartitionGradient(partition, most_parts)


def reduce_scatter_in_place(flat: Tensor, partition: Tensor, process_group: Any) -> None:
    """Sum a flat tensor over ranks, in place. partition: this rank's part of it, a view; the rest need not be summed.

    NCCL sends each rank its part only. On CPUs the whole tensor is summed, since Gloo's reduce_scatter is slower
    than its all_reduce.
    """
    if not flat.is_cuda:
        dist.all_reduce(flat, group=process_group)
        return
    # torch 2.13 renamed this function
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(partition, flat, group=process_group)


CHUNK = 1 << 26
CPU_CHUNK = 1 << 20
"""The number of elements of each tensor into which a partition's gradient is split. DeepSpeed's norm copies one of
these tensors at a time to fp64. On CPUs, copies of small tensors are faster, since they use the same memory again."""


class PartitionGradient(list):
    """A partition's flat gradient in the form that DeepSpeed expects: a list of parts, and `flat_partition`, the whole.
    With few parts, DeepSpeed's norm needs few operators."""

    def __init__(self, flat_partition: Tensor, most_parts: int):
        """most_parts: the number of parts that DeepSpeed's norm reads at most."""
        chunk = CHUNK if flat_partition.is_cuda else CPU_CHUNK
        super().__init__(flat_partition.split(max(chunk, -(-len(flat_partition) // max(most_parts, 1)))))
        self.flat_partition = flat_partition


def disable_separate_overflow_check(engine: Any) -> None:
    """Let stages 1 and 2 decide by the norm alone whether the gradient is finite. Called once per engine.

    DeepSpeed otherwise checks every gradient, waits for the device, and then checks the norm, too. If a gradient is not
    finite, the norm is not finite either. In fp32 DeepSpeed checks the norm only.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() in (1, 2) and not is_bf16_optimizer(engine) and not optimizer.cpu_offload:
        optimizer.check_overflow = lambda partition_gradients=True: None


def skip_steps_at_smallest_loss_scale(engine: Any) -> None:
    """Let fp16 skip a step also at the smallest loss scale, where DeepSpeed would raise an error. Called once per
    engine, and after its loss scale is restored."""
    if engine.fp16_enabled():
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False


def set_global_norm(engine: Any, norm: Tensor) -> None:
    """Set the norm that engine.get_global_grad_norm returns."""
    engine._global_grad_norm = norm


def skip_step(engine: Any) -> None:
    """Drop the gradients without an update, and count the step as DeepSpeed counts a skipped step."""
    engine.zero_grad()
    engine.global_steps += 1
    engine.skipped_steps += 1


def set_learning_rate_by_scheduler(engine: Any) -> None:
    """Set the learning rate of the next step by the current schedule. After loading a checkpoint, DeepSpeed would use
    the saved rate, which is wrong if train.steps has changed."""
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
"""The types in DeepSpeed's files other than tensors and plain values. Other types could run code when they are
loaded."""


@contextmanager
def loading_known_types_only() -> Iterator[None]:
    """Return a context in which torch.load, also DeepSpeed's, refuses files with types other than KNOWN_TYPES."""
    types = []
    for name in KNOWN_TYPES:
        module, _, kind = name.rpartition(".")
        types.append(getattr(importlib.import_module(module), kind))
    with torch.serialization.safe_globals(types), mock.patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):
        yield


def load_checkpoint_file(file: Path) -> dict[str, Any]:
    """Return the content of one of DeepSpeed's files. Its tensors are read when they are used."""
    with loading_known_types_only():
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def register_plain_zero_stage_pickling() -> None:
    """Let ZeroStageEnum be pickled without builtins.getattr, which Python 3.11.2 uses and no checkpoint may contain."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))  # type: ignore[arg-type]


def collect_contents_to_save(engine: Any, partial: Path) -> dict[str, Any]:
    """Return the content of the files, by name, that engine.save_checkpoint would write into `partial` on this rank.
    Its tensors are those of the engine, no copies. All ranks call it together.

    DeepSpeed's own writer does not suffice: a failed write ends one rank while the others wait for it.
    """
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    contents: dict[str, Any] = {}

    class Engine(TorchCheckpointEngine):
        def save(self, state_dict: Any, path: str) -> None:
            contents[os.path.basename(path)] = state_dict

    client_state = {"xscale": {"step": engine.global_steps}, "universal_checkpoint_info": {}}
    with mock.patch.multiple(engine, checkpoint_engine=Engine(), _copy_recovery_script=mock.DEFAULT):
        engine.save_checkpoint(str(partial.parent), tag=partial.name, client_state=client_state, save_latest=False)
    return contents


def model_state_path(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*mp_rank_00_model_states.pt"))


def optimizer_partition_paths(checkpoint: Path) -> list[Path]:
    """Return the paths of the optimizer's partitions in the order of ranks; [] at stage 0."""
    files = checkpoint.glob("*zero_pp_rank_*_optim_states.pt")
    return sorted(files, key=lambda file: int(re.findall(r"zero_pp_rank_(\d+)_", file.name)[0]))


def is_saved_at_stage_3(rank_file: dict[str, Any]) -> bool:
    """Return whether each weight is partitioned by itself, as at stage 3. At stages 1 and 2, the flat tensor of a group
    is partitioned. rank_file: the loaded file."""
    return "fp32_flat_groups" in rank_file["optimizer_state_dict"]


def weights_and_states_of_groups(rank_file: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield, for each group, a rank's flat fp32 weights and their optimizer state. rank_file: the loaded file."""
    state = rank_file["optimizer_state_dict"]
    stage_3 = is_saved_at_stage_3(rank_file)
    weights = state["fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"]
    optimizer = state["optimizer_state_dict" if stage_3 else "base_optimizer_state"]["state"]
    for group, flat in enumerate(weights):
        yield flat, optimizer.get(group, {})


def weights_and_states_of_stage_0(model_state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
    """Return {name: weight} and {number: optimizer state} of a checkpoint of stage 0."""
    return model_state["module"], (model_state.get("optimizer") or {}).get("state", {})


Fragment = tuple[nn.Parameter, int, int, int]
"""(weight, first, last, start): the elements [first, last) of a flattened weight, which begin at index `start` of the
flat tensor."""


def partitions_and_fragments(engine: Any) -> Iterator[tuple[Tensor, list[Fragment]]]:
    """Yield each tensor that this rank's optimizer updates, and the fragments in it. At stage 0 the tensors are the
    trained weights, at stages 1 to 3 flat tensors."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 0:
        for weight in engine.module.parameters():
            if weight.requires_grad:
                yield weight, [(weight, 0, weight.numel(), 0)]
        return
    if engine.zero_optimization_stage() == 3:
        rank = optimizer.dp_process_group.rank()
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            fragments: list[Fragment] = []
            start = 0
            for weight in group:
                share = weight.partition_numel()
                first = min(share * rank, weight.ds_numel)
                last = min(share * (rank + 1), weight.ds_numel)
                fragments.append((weight, first, last, start))
                start += share
            yield flat, fragments
        return
    bf16 = is_bf16_optimizer(engine)
    groups = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
    flats = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    for group, flat in zip(groups, flats, strict=True):
        fragments = []
        for weight in group:
            if weight._hp_mapping:
                in_weight = weight._hp_mapping.lp_fragment_address
                in_flat = weight._hp_mapping.hp_fragment_address
                fragments.append((weight, in_weight.start, in_weight.start + in_weight.numel, in_flat.start))
        yield flat, fragments


def set_stage_3_padding_to_zero(engine: Any) -> None:
    """Set the padding of stage 3's partitions to zero. DeepSpeed saves this uninitialised memory, so that two equal
    runs could write different checkpoints."""
    if engine.zero_optimization_stage() == 3:
        for flat, fragments in partitions_and_fragments(engine):
            padding = torch.ones_like(flat, dtype=torch.bool)
            for _, first, last, start in fragments:
                padding[start : start + last - first] = False
            flat.data.masked_fill_(padding, 0)


def torch_optimizer(engine: Any) -> Any:
    """Return the optimizer that DeepSpeed's ZeRO optimizer calls."""
    return engine.optimizer.optimizer if engine.zero_optimization_stage() else engine.optimizer


@contextmanager
def changing_flat_weights(engine: Any) -> Iterator[None]:
    """Return a context in which the caller changes the optimizer's flat fp32 tensors. At its end, they are copied into
    the weights that the engine computes with."""
    optimizer = engine.optimizer
    stage = engine.zero_optimization_stage()
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    yield
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


def restore_scale_schedule_and_counters(engine: Any, model_state: dict[str, Any], scaler: Any) -> None:
    """Restore the loss scale, the state of the ds_config's scheduler, and the engine's counters."""
    if engine.fp16_enabled():
        engine.optimizer.loss_scaler = scaler
        skip_steps_at_smallest_loss_scale(engine)
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(model_state["lr_scheduler"])
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, model_state[counter])
