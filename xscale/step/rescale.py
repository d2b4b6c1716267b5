"""A checkpoint of another number of ranks, or another ZeRO stage: each rank reads its own share of every weight and of
the optimizer's numbers for it, out of the files of all ranks that saved it.

DeepSpeed's own way, its universal checkpoints, writes all of it once more by another program before anybody reads, has
no stage 0, and at stage 3 parts from the third step on (its groups of weights then count their steps together).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WEIGHT = "fp32"
"""The key of a weight, beside the optimizer's own, such as exp_avg."""


@dataclass(frozen=True)
class Place:
    """Where a parameter is in the files."""

    group: int
    start: int
    share: int | None
    """Numbers of it that each rank has from `start` on (stage 3); None: the parts of the ranks are one vector."""


class Saved:
    """A checkpoint, by parameter. Files are mapped: what is not asked for is not read."""

    def __init__(self, path: Path, names: list[str]):
        """names: the module's parameters, in their order."""
        self.model = _load(next(path.glob("*mp_rank_00_model_states.pt")))
        found = sorted(path.glob("*zero_pp_rank_*_optim_states.pt"), key=_rank_of)
        self.ranks = [_load(file)["optimizer_state_dict"] for file in found]
        self.flats: list[dict[str, list[Tensor]]] = []
        """Of each group: by key, what the ranks have."""
        self.steps: list[dict[str, Any]] = []
        """Of each group, the optimizer's other numbers: of steps."""
        self.places: dict[str, Place] = {}
        if self.ranks:
            self._partitioned()
        else:
            self._whole(names)

    def _partitioned(self) -> None:
        """Stages 1 to 3."""
        stage_3 = "fp32_flat_groups" in self.ranks[0]
        weights = "fp32_flat_groups" if stage_3 else "single_partition_of_fp32_groups"
        optimizer = "optimizer_state_dict" if stage_3 else "base_optimizer_state"
        for group, shapes in enumerate(self.model["param_shapes"]):
            states = [of_rank[optimizer]["state"].get(group, {}) for of_rank in self.ranks]
            self._add([of_rank[weights][group] for of_rank in self.ranks], states)
            start = 0
            for name, shape in shapes.items():
                share = -(-shape.numel() // len(self.ranks)) if stage_3 else None
                self.places[name] = Place(group, start, share)
                start += share if share is not None else shape.numel()

    def _whole(self, names: list[str]) -> None:
        """Stage 0: the model's weights are all there is, and the optimizer numbers them by their groups."""
        weights, states = self.model["module"], self.model["optimizer"]["state"]
        decayed_first = sorted(names, key=lambda name: weights[name].ndim <= 1)  # models/build.py's decay_groups
        for group, name in enumerate(decayed_first):
            self._add([weights[name].flatten()], [states.get(group, {})])
            self.places[name] = Place(group, 0, None)

    def _add(self, weights: list[Tensor], states: list[dict[str, Any]]) -> None:
        """A group of parameters."""
        keys = [key for key, value in states[0].items() if torch.is_tensor(value) and value.ndim]
        self.flats.append({WEIGHT: weights} | {key: [of[key].flatten() for of in states] for key in keys})
        self.steps.append({key: value for key, value in states[0].items() if key not in keys})

    def take(self, name: str, key: str, start: int, stop: int) -> Tensor:
        """Numbers start to stop of a flattened parameter."""
        place = self.places[name]
        flats, begin = self.flats[place.group][key], place.start
        if place.share is not None:
            flats, begin = [flat.narrow(0, place.start, place.share) for flat in flats], 0
        return _cut(flats, begin + start, begin + stop)


def _cut(parts: list[Tensor], start: int, stop: int) -> Tensor:
    """parts one behind another, from start to stop."""
    found, begin = [], 0
    for part in parts:
        first, last = max(start - begin, 0), min(stop - begin, len(part))
        if first < last:
            found.append(part[first:last])
        begin += len(part)
    return torch.cat(found)


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def _rank_of(path: Path) -> int:
    (rank,) = re.findall(r"zero_pp_rank_(\d+)_", path.name)
    return int(rank)


@dataclass(frozen=True)
class Share:
    """What this rank has of a parameter: numbers first to last of it, in its flat tensor from `at` on."""

    name: str
    first: int
    last: int
    at: int


def shares(engine: Any) -> Iterator[tuple[Tensor, list[Share]]]:
    """This rank's flat tensors, whose states the optimizer has, and what is in them."""
    names, optimizer = {parameter: name for name, parameter in engine.module.named_parameters()}, engine.optimizer
    stage = engine.zero_optimization_stage()
    if stage == 0:
        for parameter, name in names.items():
            yield parameter, [Share(name, 0, parameter.numel(), 0)]
    elif stage == 3:
        rank = engine.optimizer.dp_process_group.rank()
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            found, at = [], 0
            for parameter in group:
                share = parameter.partition_numel()
                first, last = (min(share * (rank + more), parameter.ds_numel) for more in (0, 1))
                found.append(Share(names[parameter], first, last, at))
                at += share
            yield flat, found
    else:
        bf16 = hasattr(optimizer, "bf16_groups")
        groups = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
        flats = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
        for group, flat in zip(groups, flats, strict=True):
            mapped = [(names[parameter], parameter._hp_mapping) for parameter in group if parameter._hp_mapping]
            yield flat, [_share(name, of.lp_fragment_address, of.hp_fragment_address) for name, of in mapped]


def _share(name: str, of_parameter: Any, of_flat: Any) -> Share:
    return Share(name, of_parameter.start, of_parameter.start + of_parameter.numel, of_flat.start)


@torch.no_grad()
def load_rescaled(engine: Any, path: Path) -> None:
    """Weights, optimizer, loss scale, schedule and counters. All ranks call it together."""
    saved, optimizer = Saved(path, [name for name, _ in engine.module.named_parameters()]), engine.optimizer
    stage = engine.zero_optimization_stage()
    base = optimizer.optimizer if stage else optimizer
    fused = any(group.get("fused") for group in base.param_groups)
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    for flat, of_flat in shares(engine):
        if not of_flat:
            continue
        group = saved.places[of_flat[0].name].group
        state: dict[str, Any] = {}
        for key in saved.flats[group]:
            numbers = torch.zeros_like(flat)
            for share in (share for share in of_flat if share.first < share.last):
                part = saved.take(share.name, key, share.first, share.last)
                numbers.view(-1)[share.at : share.at + len(part)].copy_(part)
            if key == WEIGHT:
                flat.data.copy_(numbers)
            else:
                state[key] = numbers
        for key, value in saved.steps[group].items():
            state[key] = value.to(flat.device if fused else "cpu", copy=True) if torch.is_tensor(value) else value
        if state:
            base.state[flat] = state
    _after(engine, saved)


def _after(engine: Any, saved: Saved) -> None:
    """What else the engine keeps: the weights that it computes with, the loss scale, the schedule, the counters."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        for flat, part in zip(
            optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True
        ):
            part.data.copy_(flat.data)
        for part, group in zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp16_partitioned_groups, strict=True):
            for parameter, numbers in zip(group, optimizer.unflatten(part, group), strict=True):
                parameter.data = numbers.data
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.checkpoint_event_epilogue()
    elif stage:
        optimizer._hp_optimizer_states_linked = False
        optimizer.update_lp_params()
    if engine.fp16_enabled():
        optimizer.loss_scaler = saved.ranks[0]["loss_scaler"]
    engine.lr_scheduler.load_state_dict(saved.model["lr_scheduler"])
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, saved.model[counter])
