"""The DeepSpeed engine of a run, and the compilation of DeepSpeed's own Adam, once on each machine."""

import fcntl
import functools
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xscale import deepspeed_private as private
from xscale.errors import LOG, UserError
from xscale.models.build import parameter_groups_by_decay
from xscale.step.module import StepModule, parameter_names_with_head_lr
from xscale.step.zero import offloads_optimizer, register_weights_read_directly, zero_stage

REFUSALS = (ValueError, TypeError, AttributeError, ImportError, NotImplementedError, AssertionError)
"""The types of errors with which DeepSpeed refuses a configuration, besides its own."""


def build_engine(module: nn.Module, ds_config: dict[str, Any]) -> Any:
    """Build the engine. Raises UserError if DeepSpeed refuses the ds_config.

    ZeRO makes each weight a view of one flat tensor per group. CUDA's fast kernels of matrix products and layer norms
    need weights that begin at a multiple of 16 bytes. Therefore a weight whose size is not a multiple of 8, such as the
    vocabulary's bias of XLM-R (250,002), comes last in its group.
    """
    import deepspeed

    private.register_plain_zero_stage_pickling()
    check_objectives_support_stage(module, zero_stage(ds_config))
    optimizer = ds_config["optimizer"]
    if optimizer["type"].lower() in ("adam", "adamw") and not optimizer["params"].get("torch_adam"):
        load_or_compile_adam("CPUAdamBuilder" if offloads_optimizer(ds_config) else "FusedAdamBuilder")
    groups = parameter_groups_by_decay(
        module, optimizer["params"]["weight_decay"], parameter_names_with_head_lr(module)
    )
    if zero_stage(ds_config):
        for group in groups:
            group["params"].sort(key=lambda weight: weight.numel() % 8 > 0)
    private.import_muon_uncompiled()
    try:
        engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=ds_config)
    except (*REFUSALS, deepspeed.DeepSpeedConfigError) as error:
        raise UserError(f"DeepSpeed refuses the ds_config: {error}. Correct the file of --ds_config") from error
    private.disable_separate_overflow_check(engine)
    private.skip_steps_at_smallest_loss_scale(engine)
    private.set_stage_3_padding_to_zero(engine)
    if encoder := getattr(module, "encoder", None):
        register_weights_read_directly(engine, encoder.lm.get_output_embeddings().parameters())
    return engine


def check_objectives_support_stage(module: nn.Module, stage: int) -> None:
    """Raise UserError if stage 3 partitions weights that a stream reads whole, outside of the engine's forward pass."""
    if stage < 3 or not isinstance(module, StepModule):
        return
    for name in module.streams:
        if name in module.auxiliary_states or name in module.streams_with_vectors():
            raise UserError(
                f"streams.{name}: the objective needs whole weights, but ZeRO stage 3 divides each weight among the "
                "ranks. Use a ds_config of stage 2 or lower"
            )


def operators_directory() -> Path:
    """Return the directory where DeepSpeed's operators are compiled for xscale."""
    from torch.utils import cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    return root / f"xscale_python{sys.version_info.major}.{sys.version_info.minor}_torch{torch.__version__}"


@functools.cache
def load_or_compile_adam(builder: str) -> None:
    """Load DeepSpeed's own Adam, which the first call on a machine compiles. Raises UserError.

    torch guards a build with a lock file. A killed process leaves this file behind, and later builds wait for ever for
    its removal. Therefore the build takes place in a directory that only xscale uses, under a lock that ends with its
    process, and such files are removed first.
    """
    directory = operators_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.environ["TORCH_EXTENSIONS_DIR"] = str(directory)
        with (directory / "xscale.lock").open("w") as lock:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
                for guard in directory.glob("*/lock"):
                    guard.unlink()
            LOG.info(
                f"loading DeepSpeed's Adam from {directory}; at the first start, DeepSpeed compiles Adam, which "
                "takes minutes"
            )
            private.compile_operator(builder)
    except Exception as error:
        raise UserError(
            "the ds_config uses DeepSpeed's Adam, but Adam could not be compiled. Install a C++ compiler (and nvcc on "
            "a GPU). To use PyTorch's Adam instead, set optimizer.params.torch_adam to true in the file of "
            "--ds_config, and remove zero_optimization.offload_optimizer. The error:\n"
            f"{directory}: {error}"
        ) from None
