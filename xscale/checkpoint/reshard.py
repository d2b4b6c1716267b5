"""Loading a checkpoint of another number of ranks, or another ZeRO stage.

Each rank reads its own slices of every weight, and of the optimizer's numbers for it, from the files of all ranks that
saved them. DeepSpeed's universal checkpoints do not serve: another program has to write everything once more, they have
no stage 0, and at stage 3 the training differs from the third step on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xscale import deepspeed_private as private

WEIGHT = "fp32"
"""The key of the weights. The optimizer has keys of its own, such as exp_avg."""


@dataclass(frozen=True)
class SavedPlace:
    """Where a parameter is in the files."""

    group: int
    start: int
    share: int | None
    """How many of its numbers each rank has from `start` on (stage 3). None: the ranks' parts are one vector."""


class SavedGroup(NamedTuple):
    """What one rank has saved of a group of weights."""

    flats: dict[str, Tensor]
    """The flat tensors by key."""
    steps: dict[str, Any]
    """What the optimizer has beside tensors, such as its count of steps."""

    @classmethod
    def from_state(cls, weights: Tensor, state: dict[str, Any]) -> "SavedGroup":
        keys = [key for key, value in state.items() if torch.is_tensor(value) and value.ndim]
        flats = {WEIGHT: weights} | {key: state[key].flatten() for key in keys}
        return cls(flats, {key: value for key, value in state.items() if key not in keys})


class SavedPartitions:
    """A checkpoint's numbers by parameter. A rank's file is opened when it is needed, and mapped: only what is taken
    is read."""

    def __init__(self, path: Path, names: list[str], at: float = 0.0):
        """names: the module's parameters, in their order. at: about where among the ranks, from 0 to 1, this rank's
        slices are; one file there tells what is alike in all of them."""
        self.model = _load(private.model_file(path))
        self.files = private.partition_files(path)
        self.opened: dict[int, list[SavedGroup]] = {}
        """The groups of the ranks whose files are open."""
        self.places: dict[str, SavedPlace] = {}
        if self.files:
            # Not the last file: it lacks the numbers that fill up all parts to one length.
            self.scaler, self.like = self._partitioned(max(min(int(at * len(self.files)), len(self.files) - 2), 0))
        else:
            self.scaler, self.like = None, self._whole(names)

    def _partitioned(self, rank: int) -> tuple[Any, list[SavedGroup]]:
        """Find the places at stages 1 to 3. Returns the loss scaler and a rank's groups."""
        start_of = self._open(rank)
        for group, (shapes, each_cut) in enumerate(private.saved_groups(self.model, start_of)):
            start = 0
            for name, shape in shapes.items():
                share = -(-shape.numel() // len(self.files)) if each_cut else None
                self.places[name] = SavedPlace(group, start, share)
                start += share if share is not None else shape.numel()
        return private.saved_scaler(start_of), self.opened[rank]

    def _open(self, rank: int) -> dict[str, Any]:
        """Open the file of a rank, and return its content."""
        found = _load(self.files[rank])
        self.opened[rank] = [SavedGroup.from_state(*saved) for saved in private.saved_partition(found)]
        return found

    def _whole(self, names: list[str]) -> list[SavedGroup]:
        """Find the places at stage 0, where the model file has everything and the optimizer numbers the weights."""
        weights, states = private.saved_whole(self.model)
        decayed_first = sorted(names, key=lambda name: weights[name].ndim <= 1)  # models/build.py's decay_groups
        self.places = {name: SavedPlace(group, 0, None) for group, name in enumerate(decayed_first)}
        groups = [
            SavedGroup.from_state(weights[name].flatten(), states.get(n, {})) for n, name in enumerate(decayed_first)
        ]
        self.opened[0] = groups
        return groups

    def take(self, name: str, key: str, start: int, stop: int) -> Tensor:
        """The numbers from start to stop of a flattened parameter."""
        place = self.places[name]
        length, within = place.share, place.start
        if length is None:
            length, within = len(self.like[place.group].flats[WEIGHT]), 0
            start, stop = start + place.start, stop + place.start
        found = []
        for rank in range(start // length, -(-stop // length)):
            if rank not in self.opened:
                self._open(rank)
            first, last = max(start - rank * length, 0), min(stop - rank * length, length)
            found.append(self.opened[rank][place.group].flats[key][within + first : within + last])
        return torch.cat(found)


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


@dataclass(frozen=True)
class PartitionSlice:
    """A rank's slice of a parameter: its numbers from first to last, in the rank's flat tensor from `at` on."""

    name: str
    first: int
    last: int
    at: int


def partition_slices(engine: Any) -> Iterator[tuple[Tensor, list[PartitionSlice]]]:
    """This rank's flat tensors, for which the optimizer has states, with their slices."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    if engine.zero_optimization_stage() == 0:
        for parameter, name in names.items():
            yield parameter, [PartitionSlice(name, 0, parameter.numel(), 0)]
        return
    for flat, fragments in private.partitions(engine):
        yield flat, [PartitionSlice(names[parameter], first, last, at) for parameter, first, last, at in fragments]


@torch.no_grad()
def load_rescaled(engine: Any, path: Path) -> None:
    """Load weights, optimizer, loss scale, schedule and counters. All ranks call it together."""
    names = [name for name, _ in engine.module.named_parameters()]
    saved, base = SavedPartitions(path, names, dist.get_rank() / dist.get_world_size()), private.torch_optimizer(engine)
    fused = any(group.get("fused") for group in base.param_groups)
    private.before_flats_change(engine)
    for flat, of_flat in partition_slices(engine):
        if not of_flat:
            continue
        group = saved.places[of_flat[0].name].group
        state: dict[str, Any] = {}
        for key in saved.like[group].flats:
            numbers = torch.zeros_like(flat)
            for share in (share for share in of_flat if share.first < share.last):
                part = saved.take(share.name, key, share.first, share.last)
                assert len(part) == share.last - share.first, (share, len(part))
                numbers.view(-1)[share.at : share.at + len(part)].copy_(part)
            if key == WEIGHT:
                flat.data.copy_(numbers)
            else:
                state[key] = numbers
        for key, value in saved.like[group].steps.items():
            state[key] = value.to(flat.device if fused else "cpu", copy=True) if torch.is_tensor(value) else value
        if state:
            base.state[flat] = state
    private.take_over_flats(engine)
    private.take_over_counters(engine, saved.model, saved.scaler)
