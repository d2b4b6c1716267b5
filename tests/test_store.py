"""Publishing and cleaning of checkpoints, unused weights, and the number of the step that weighs its streams."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xscale import files
from xscale.checkpoint import manager, store
from xscale.checkpoint.manager import CheckpointManager
from xscale.ranks import HostGroup
from xscale.step import step as stepping
from xscale.step.zero import one_reduction


def published(folder: Path, step: int) -> Path:
    final = folder / f"step_{step:08d}"
    partial = final.with_name(final.name + files.PARTIAL)
    partial.mkdir(parents=True)
    (partial / "weights").write_bytes(b"w")
    store.publish(partial, final, {"step": step})
    return final


def test_latest_never_names_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kill between any two of publish's actions would leave it."""
    write, rename = files.write_text, Path.rename
    seen: list[str] = []

    def look() -> None:
        if (tmp_path / "latest").exists():
            seen.append((tmp_path / "latest").read_text())
            assert (tmp_path / seen[-1] / store.MANIFEST).exists()

    monkeypatch.setattr(files, "write_text", lambda *args: (write(*args), look()))
    monkeypatch.setattr(Path, "rename", lambda self, to: (rename(self, to), look())[0])
    for step in (1, 2):
        published(tmp_path, step)
    assert set(seen) == {"step_00000001", "step_00000002"}


def test_the_best_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest two, and the one that the run calls the best."""
    monkeypatch.setattr(manager, "CheckpointWriter", lambda *args: SimpleNamespace(step=None))
    checkpoints = CheckpointManager(
        None, tmp_path, HostGroup(), keep=2, saved=None, write_more=lambda path: None, published=lambda step, path: {3}
    )
    for step in range(1, 8):
        final = published(tmp_path, step)
        checkpoints.writer = SimpleNamespace(step=step, final=final, finish=lambda: ("", 0.0), written=True)  # type: ignore[assignment]
        checkpoints.settle()
    kept = [store.step_of(path) for path in store.complete_steps(tmp_path)]
    assert kept == [3, 6, 7]


def test_a_weight_that_no_pass_used_has_a_gradient_of_zeros() -> None:
    module = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)])
    engine = SimpleNamespace(
        module=module, optimizer=None, zero_optimization_stage=lambda: 0, no_sync=nullcontext,
        allreduce_gradients=lambda: None,
    )  # fmt: skip
    with one_reduction(engine):
        module[0](torch.ones(1, 2)).sum().backward()
    assert all(weight.grad is not None for weight in module.parameters())
    assert module[0].weight.grad.any() and not module[1].weight.grad.any()


def test_a_step_weighs_its_streams_by_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Stop(Exception):
        pass

    def weights(recipe: Any, totals: Any, step: int) -> Any:
        asked.append(step)
        raise Stop

    monkeypatch.setattr(stepping, "step_weights", weights)
    with pytest.raises(Stop):
        engine: Any = SimpleNamespace(module=SimpleNamespace(follow=lambda recipe: None))
        recipe: Any = SimpleNamespace(at=lambda step: recipe, model=SimpleNamespace(rope_theta=None))
        stepping.optimizer_step(engine, recipe, [], {}, step=4, rank=0, world=1)
    assert asked == [4]
