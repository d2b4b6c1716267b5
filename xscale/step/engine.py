"""The DeepSpeed engine of a run."""

import fcntl
import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor, nn

from xscale.errors import UserError
from xscale.models.build import decay_groups
from xscale.run.metrics import LOG
from xscale.step.zero import gather_for_every_pass


def build_engine(module: nn.Module, ds_config: dict[str, Any]) -> Any:
    import deepspeed

    companions: Any = getattr(module, "companions", None)
    if companions and ds_config.get("zero_optimization", {}).get("stage", 0) >= 3:
        raise UserError(
            f"streams.{next(iter(companions))} has a momentum encoder, which follows whole weights; "
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
    if encoder := getattr(module, "encoder", None):
        gather_for_every_pass(engine, encoder.lm.get_output_embeddings().parameters())
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


def dump(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=2) + "\n"
