"""A resume on another number of ranks: each rank opens the files and reads the slices that it needs. The files are laid
out as DeepSpeed's. test_rescale in test_training.py has whole runs."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from xscale import deepspeed_private as private
from xscale.checkpoint import reshard
from xscale.models.build import parameter_groups_by_decay

GROUPS = [{"table": (41, 8), "dense": (16, 16)}, {"norm": (33,), "bias": (16,)}]
KEYS = {reshard.WEIGHT: 0, "exp_avg": 1000, "exp_avg_sq": 2000}


def numbers(group: int, name: str, key: str) -> Tensor:
    """Of a whole weight: no two are alike, and none is 0, which fills up."""
    size = torch.Size(GROUPS[group][name]).numel()
    return 1 + torch.arange(size, dtype=torch.float64) + 10_000 * [*GROUPS[group]].index(name) + KEYS[key] + 1e6 * group


def parts_of(group: int, key: str, ranks: int, stage: int) -> list[Tensor]:
    """A group's flat tensor of each rank: of one vector, filled up to even parts, or of each weight (stage 3)."""
    weights = [numbers(group, name, key) for name in GROUPS[group]]
    if stage < 3:
        flat = torch.cat(weights)
        return [*torch.nn.functional.pad(flat, (0, -len(flat) % (2 * ranks))).chunk(ranks)]
    cut = [[*torch.nn.functional.pad(weight, (0, -len(weight) % ranks)).chunk(ranks)] for weight in weights]
    return [torch.cat([weight[rank] for weight in cut]) for rank in range(ranks)]


def write_checkpoint(out: Path, ranks: int, stage: int) -> None:
    shapes = [{name: torch.Size(shape) for name, shape in group.items()} for group in GROUPS]
    torch.save({"param_shapes": shapes}, out / "mp_rank_00_model_states.pt")
    for rank in range(ranks):
        flats = {key: [parts_of(group, key, ranks, stage)[rank] for group in range(len(GROUPS))] for key in KEYS}
        weights = flats.pop(reshard.WEIGHT)
        if stage < 3 and rank == ranks - 1:  # DeepSpeed leaves out what fills up the weights, not Adam's numbers
            real = [sum(shape.numel() for shape in group.values()) for group in shapes]
            weights = [flat[: n - rank * len(flat)] for flat, n in zip(weights, real, strict=True)]
        states = {group: {"step": torch.tensor(7.0)} | {k: flats[k][group] for k in flats} for group in (0, 1)}
        inner = {"state": states}
        held: dict[str, Any] = {"loss_scaler": f"of rank {rank}"}
        held |= {"single_partition_of_fp32_groups": weights, "base_optimizer_state": inner} if stage < 3 else {}
        held |= {"fp32_flat_groups": weights, "optimizer_state_dict": inner} if stage == 3 else {}
        torch.save({"optimizer_state_dict": held}, out / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def wanted(rank: int, ranks: int, stage: int) -> list[tuple[int, str, int, int]]:
    """(group, weight, first, last) of all that a new rank has: found number by number."""
    found = []
    for group, shapes in enumerate(GROUPS):
        of_rank = set(parts_of(group, reshard.WEIGHT, ranks, stage)[rank].tolist())
        for name in shapes:
            has = [i for i, x in enumerate(numbers(group, name, reshard.WEIGHT).tolist()) if x in of_rank]
            found += [(group, name, has[0], has[-1] + 1)] if has else []
    return found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("old", [1, 2, 4])
def test_a_new_rank_opens_what_it_needs(old: int, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that hold its numbers, and the first; numbers are those of the whole weights."""
    write_checkpoint(tmp_path, old, stage)
    names = [name for group in GROUPS for name in group]
    opened: list[int] = []
    load = private.load_checkpoint_file

    def counting(path: Path) -> Any:
        opened.extend([int(path.name.split("_")[3])] if path.name.startswith("zero") else [])
        return load(path)

    monkeypatch.setattr(private, "load_checkpoint_file", counting)
    for new in (1, 2, 4, 8):
        for rank in range(new):
            opened.clear()
            saved = reshard.SavedPartitions(tmp_path, names)
            needed = set()
            for group, name, first, last in wanted(rank, new, stage):
                for key in KEYS:
                    whole = numbers(group, name, key)[first:last]
                    assert torch.equal(saved.read_elements(name, key, first, last), whole), (new, rank, name, key)
                    of_old = [set(part.tolist()) for part in parts_of(group, key, old, stage)]
                    needed |= {n for n, part in enumerate(of_old) if part & set(whole.tolist())}
            assert needed <= set(opened) and len(opened) == len(set(opened)), (new, rank)
            assert set(opened) - needed <= {0}, (new, rank, needed, opened)
            assert [saved_slice.other_values["step"].item() for saved_slice in saved.like] == [7.0, 7.0]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD])
def test_stage_0_continues_with_any_optimizer(kind: Any, tmp_path: Path) -> None:
    """Adafactor has means of rows and columns; a frozen weight has no optimizer state; BatchNorm has buffers."""
    fixed = {"fp16_enabled": lambda: False, "zero_optimization_stage": lambda: 0, "lr_scheduler": None}
    counters = {"global_steps": 3, "global_samples": 24, "skipped_steps": 0}
    torch.manual_seed(0)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    module = nn.Sequential(frozen, nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    engines = []
    for copied in (module, copy.deepcopy(module)):
        optimizer = kind(parameter_groups_by_decay(copied, 0.01), lr=0.1)
        engines.append(SimpleNamespace(module=copied, optimizer=optimizer, **fixed))
    whole, resumed = engines

    def train(engine: Any) -> None:
        for _ in range(3):
            engine.optimizer.zero_grad()
            engine.module(torch.arange(32.0).reshape(8, 4).sin()).square().mean().backward()
            engine.optimizer.step()

    train(whole)
    state = {"module": module.state_dict(), "optimizer": whole.optimizer.state_dict(), **counters}
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    reshard.load_weights_and_optimizer_state(resumed, tmp_path)
    train(whole)
    train(resumed)
    for name, value in whole.module.state_dict().items():
        assert torch.equal(resumed.module.state_dict()[name], value), name
