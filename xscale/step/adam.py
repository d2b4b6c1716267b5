"""This module compiles DeepSpeed's own Adam, once on each machine."""

import fcntl
import functools
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

from xscale.deepspeed_private import compile_operator
from xscale.errors import LOG, UserError


def operators_directory() -> Path:
    """Return the directory where DeepSpeed's operators are compiled for xscale."""
    from torch.utils import cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    return root / f"xscale_python{sys.version_info.major}.{sys.version_info.minor}_torch{torch.__version__}"


@functools.cache
def load_adam(builder: str) -> None:
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
            compile_operator(builder)
    except Exception as error:
        raise UserError(
            "the ds_config uses DeepSpeed's Adam, which could not be compiled. Install a C++ compiler (on a GPU "
            "also nvcc), or use PyTorch's Adam: set optimizer.params.torch_adam to true, and remove "
            f"offload_optimizer. The error of the compiler:\n{directory}: {error}"
        ) from None
