"""What DeepSpeed would write of an engine: its files' content, in host memory.

DeepSpeed's own engines that write behind (`checkpoint.writer`, decoupled) do not serve. They hand live tensors to
another process and wait for it before the next update, so that they hide no more than one pass of a step; they need a
compiled aio; and a write that fails ends one rank while the others wait for it. Here DeepSpeed's interface is kept and
nothing is written: checkpoint/store.py does that.
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
    """Takes what it is told to save. No exception of it may come between DeepSpeed's barriers: others wait there."""

    def __init__(self, copies: bool):
        """copies: copy tensors, since training goes on; else take them as they are."""
        self.copies = copies
        self.taken: dict[str, Any] = {}
        """By the file's name."""
        self.problem: Exception | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def save(self, state_dict: Any, path: str) -> None:
        try:
            self.taken[os.path.basename(path)] = on_host(state_dict) if self.copies else state_dict
        except (MemoryError, RuntimeError) as error:  # torch's own, where memory ends
            self.problem = error


def snapshot(engine: Any, partial: Path, copies: bool) -> SnapshotEngine:
    """The content of the files that this rank would write into `partial`. All ranks call it together."""
    snapshot_engine = SnapshotEngine(copies)
    client_state = {"xscale": {"step": engine.global_steps}, "universal_checkpoint_info": {}}
    private.save_by(engine, snapshot_engine, partial.parent, partial.name, client_state)
    return snapshot_engine


def on_host(state: Any) -> Any:
    """A copy with tensors in host memory that torch.save makes the same bytes of: those that share memory still do."""
    memo: dict[int, Any] = {}
    storages: dict[int, Any] = {}
    for tensor in _tensors(state):
        memo[id(tensor)] = _on_host(tensor, storages)
    return copy.deepcopy(state, memo)


def _on_host(tensor: Tensor, storages: dict[int, Any]) -> Tensor:
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
    elif isinstance(item, dict):
        for value in item.values():
            yield from _tensors(value)
    elif isinstance(item, list | tuple):
        for value in item:
            yield from _tensors(value)
