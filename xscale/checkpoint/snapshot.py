"""Takes a snapshot of an engine: the content of the files that DeepSpeed would write. For a background save, the
content is copied to host memory.

DeepSpeed's own engines that write in the background (`checkpoint.writer`, decoupled) do not suffice: they hand live
tensors to another process and wait for it before the next update, they need DeepSpeed's aio operator to be compiled,
and a failed write ends one rank while the others wait for it. `SnapshotEngine` has DeepSpeed's interface but only keeps
the content; checkpoint/manager.py writes it.
"""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xscale import deepspeed_private as private


class SnapshotEngine:
    """A DeepSpeed checkpoint engine that keeps in memory what DeepSpeed saves. If memory runs out, it sets `problem`:
    if it raised an error, the other ranks would wait at DeepSpeed's next barrier."""

    def __init__(self, copies: bool):
        """copies: copy the tensors to host memory, since training continues; otherwise keep the tensors themselves."""
        self.copies = copies
        self.contents: dict[str, Any] = {}
        """The content of each file, by the file's name."""
        self.problem: Exception | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        try:
            self.contents[os.path.basename(path)] = on_host(state_dict) if self.copies else state_dict
        except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when memory runs out
            self.problem = error


def take_snapshot(engine: Any, partial: Path, copies: bool) -> SnapshotEngine:
    """Return the content of the files that this rank would write into `partial`. All ranks call it together."""
    snapshot_engine = SnapshotEngine(copies)
    client_state = {"xscale": {"step": engine.global_steps}, "universal_checkpoint_info": {}}
    private.save_with(engine, snapshot_engine, partial.parent, partial.name, client_state)
    return snapshot_engine


def on_host(state: Any) -> Any:
    """Return a copy of the state in host memory. Tensors that share memory also share memory in the copy, so that
    torch.save writes the same bytes."""
    memo: dict[int, Any] = {}
    storages: dict[int, Any] = {}
    for tensor in _tensors(state):
        memo[id(tensor)] = _tensor_on_host(tensor, storages)
    return copy.deepcopy(state, memo)


def _tensor_on_host(tensor: Tensor, storages: dict[int, Any]) -> Tensor:
    whole = tensor.untyped_storage()
    if whole._cdata not in storages:
        storages[whole._cdata] = whole.clone() if whole.device.type == "cpu" else whole.cpu()
    view = torch.empty(0, dtype=tensor.dtype).set_(
        storages[whole._cdata], tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(view, tensor.requires_grad)
    return view.requires_grad_(tensor.requires_grad)


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, dict | list | tuple):
        for value in item.values() if isinstance(item, dict) else item:
            yield from _tensors(value)
