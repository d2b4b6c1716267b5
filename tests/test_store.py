"""Unused weights, and the number of the step that weighs its streams."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xscale.step import step as stepping
from xscale.step.zero import one_reduction


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
        encoder = SimpleNamespace(set_dropout=lambda p: None)
        engine: Any = SimpleNamespace(module=SimpleNamespace(set_options=lambda recipe: None, encoder=encoder))
        recipe: Any = SimpleNamespace(at=lambda step: recipe, model=SimpleNamespace(rope_theta=None, dropout=0.1))
        stepping.optimizer_step(engine, recipe, [], {}, step=4, rank=0, world=1)
    assert asked == [4]
