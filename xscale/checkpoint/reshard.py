"""Loads a checkpoint of any number of ranks and any ZeRO stage into an engine: `load_weights_and_optimizer_state`.

Each rank reads only its own slices of each weight and of the weight's optimizer states, from the files of all ranks of
the checkpoint. DeepSpeed's universal checkpoints are not used: another program must first write the whole checkpoint
again, they do not support stage 0, and at stage 3 the training differs from the third step on.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xscale import deepspeed_private as private
from xscale.step.module import parameter_names_with_head_lr

WEIGHT = "fp32"
"""The key of the weights in SavedSlice.flats. The other keys, such as exp_avg, are the optimizer's states."""


class SavedPlace(NamedTuple):
    """The place of a parameter in a checkpoint. Each rank's file has a flat tensor of each group of weights. Its
    `length` elements from `first` on, joined over the ranks in their order, form one vector. At stage 3, this vector
    has only the parameter; at other stages, it has the whole group."""

    group: int
    start: int
    """The index in the vector at which the parameter begins."""
    first: int
    length: int


class SavedSlice(NamedTuple):
    """One rank's saved slice of a group of weights."""

    flats: dict[str, Tensor]
    """The flat tensors of the weights and of the optimizer's states, by key."""
    other_values: dict[str, Any]
    """Other values of the optimizer's state, such as its count of steps, or Adafactor's means of rows and columns."""

    @classmethod
    def from_state(cls, weights: Tensor, state: dict[str, Any]) -> "SavedSlice":
        """Return the slice with these weights and their optimizer state. A tensor of the state with at least as
        many elements as the weights goes into `flats`, and any other value into `other_values`."""
        flats = {WEIGHT: weights}
        other_values = dict[str, Any]()
        for key, value in state.items():
            if torch.is_tensor(value) and value.ndim and value.numel() >= weights.numel():
                flats[key] = value.flatten()
            else:
                other_values[key] = value
        return cls(flats, other_values)


class SavedPartitions:
    """The weights and optimizer states of a checkpoint, by parameter. A rank's file is mapped into memory when it is
    first needed, and only the elements that `read_elements` returns are read from disk."""

    def __init__(self, path: Path, names: list[str], new_heads: Collection[str] = ()):
        """Open the first file, which has the places of all parameters.

        names: the names of the module's parameters, in their order. new_heads: those of `names` that have parameter
        groups of their own, see parameter_groups_by_decay.
        """
        self.model = private.load_checkpoint_file(private.model_state_path(path))
        self.files = private.optimizer_partition_paths(path)
        self.opened: dict[int, list[SavedSlice]] = {}
        """Number of a rank -> its slice of each group, for files that are open."""
        self.places: dict[str, SavedPlace] = {}
        if self.files:
            # Not the last file: its slice has no padding, so it may be shorter than the others.
            partition = self._open_partition(0)
            self.scaler = partition["optimizer_state_dict"].get("loss_scaler")
            self._fill_places_from_partition(private.is_saved_at_stage_3(partition))
        else:
            self.scaler = None
            self._fill_places_from_whole_weights(names, new_heads)
        self.like = self.opened[0]

    def _fill_places_from_partition(self, stage_3: bool) -> None:
        """Fill `places` from the first rank's file, at ZeRO stage 1, 2 or 3."""
        for group, shapes in enumerate(self.model["param_shapes"]):  # {name: shape} in the order of the flat tensor
            at = 0
            for name, shape in shapes.items():
                if stage_3:
                    share = -(-shape.numel() // len(self.files))
                    self.places[name] = SavedPlace(group, 0, at, share)
                    at += share
                else:
                    self.places[name] = SavedPlace(group, at, 0, len(self.opened[0][group].flats[WEIGHT]))
                    at += shape.numel()

    def _open_partition(self, rank: int) -> dict[str, Any]:
        """Open the file of a rank, store its slices in `opened`, and return its content."""
        content = private.load_checkpoint_file(self.files[rank])
        self.opened[rank] = [SavedSlice.from_state(*saved) for saved in private.weights_and_states_of_groups(content)]
        return content

    def _fill_places_from_whole_weights(self, names: list[str], new_heads: Collection[str]) -> None:
        """Fill `places` and `opened` from a checkpoint of ZeRO stage 0. Its only file has all weights, and
        numbers instead of names for the optimizer's states."""
        weights, states = private.weights_and_states_of_stage_0(self.model)
        # The order of models/build.py's parameter_groups_by_decay.
        decayed_first = sorted(names, key=lambda name: (name in new_heads, weights[name].ndim <= 1))
        flats = [weights[name].flatten() for name in decayed_first]
        self.places = {name: SavedPlace(n, 0, 0, len(flats[n])) for n, name in enumerate(decayed_first)}
        self.opened[0] = [SavedSlice.from_state(flat, states.get(n, {})) for n, flat in enumerate(flats)]

    def read_elements(self, name: str, key: str, start: int, stop: int) -> Tensor:
        """Return the elements `start` to `stop` - 1 of a flattened parameter (key WEIGHT) or of its optimizer state
        `key`."""
        group, offset, before, length = self.places[name]
        parts = list[Tensor]()
        for rank in range((start + offset) // length, -(-(stop + offset) // length)):
            if rank not in self.opened:
                self._open_partition(rank)
            first = max(start + offset - rank * length, 0)
            last = min(stop + offset - rank * length, length)
            parts.append(self.opened[rank][group].flats[key][before + first : before + last])
        return torch.cat(parts)


@torch.no_grad()
def load_weights_and_optimizer_state(engine: Any, path: Path) -> None:
    """Load trained weights, buffers, optimizer, loss scale, schedule and counters into the engine. All ranks call it
    together."""
    names = {weight: name for name, weight in engine.module.named_parameters() if weight.requires_grad}
    base = private.torch_optimizer(engine)
    saved = SavedPartitions(path, [*names.values()], parameter_names_with_head_lr(engine.module))
    fused = any(group.get("fused") for group in base.param_groups)
    with private.changing_flat_weights(engine):
        for flat, fragments in private.partitions_and_fragments(engine):
            if not fragments:
                continue
            group = saved.places[names[fragments[0][0]]].group
            state: dict[str, Any] = {}
            for key in saved.like[group].flats:
                numbers = torch.zeros_like(flat)
                for weight, first, last, at in fragments:
                    if first < last:
                        part = saved.read_elements(names[weight], key, first, last)
                        assert len(part) == last - first, (names[weight], first, last, len(part))
                        numbers.view(-1)[at : at + len(part)].copy_(part)
                if key == WEIGHT:
                    flat.data.copy_(numbers)
                else:
                    state[key] = numbers
            for key, value in saved.like[group].other_values.items():
                if torch.is_tensor(value):
                    value = value.to(flat.device if fused or value.ndim else "cpu", copy=True)
                state[key] = value
            if state:
                base.state[flat] = state
    for name, buffer in engine.module.named_buffers():
        if name in saved.model["module"]:  # a head of another package may change its buffers
            buffer.copy_(saved.model["module"][name])
    private.restore_scale_schedule_and_counters(engine, saved.model, saved.scaler)
