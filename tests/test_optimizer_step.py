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


@pytest.mark.parametrize(
    ("tokens", "groups"),
    [([0], [[0]]), ([3, 4, 5], [[0, 1], [2]]), ([9, 1, 8], [[0], [1], [2]]), ([0, 0, 0], [[0, 1, 2]])],
)
def test_auxiliary_rows_are_encoded_in_groups(tokens: list[int], groups: list[list[int]]) -> None:
    """Of at most 8 tokens, in order; a longer row is alone."""
    assert stepping.group_rows_by_tokens(tokens, 8) == groups


def test_a_step_has_its_own_weights_and_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number decides how it weighs its streams, and with seed, row and rank the dropout of a row."""
    asked: list[int] = []
    seeds: list[Any] = []

    class Stop(Exception):
        pass

    def stop(module: Any, rows: Any, seeds_of_step: list[Any], *arguments: Any) -> None:
        seeds.extend(seeds_of_step)
        raise Stop

    monkeypatch.setattr(stepping, "weights_of_term_sums", lambda recipe, totals, step: asked.append(step))
    monkeypatch.setattr(stepping, "set_learning_rate_unless_scheduler", lambda engine, recipe, step: 0.1)
    monkeypatch.setattr(stepping, "precompute_and_gather_states", stop)
    encoder = SimpleNamespace(set_dropout_unless_none=lambda p: None)
    module = SimpleNamespace(set_streams=lambda recipe: None, encoder=encoder)
    engine: Any = SimpleNamespace(module=module, device="cpu")
    train, model = SimpleNamespace(seed=7), SimpleNamespace(dropout=0.1)
    recipe: Any = SimpleNamespace(at=lambda step: recipe, model=model, train=train)
    row: Any = SimpleNamespace(to=lambda device: row)
    for step, rank in ((4, 0), (5, 0), (5, 1)):
        with pytest.raises(Stop):
            stepping.optimizer_step(engine, recipe, [row, row], {}, step=step, rank=rank, world=2)
    assert asked == [4, 5, 5] and len(set(seeds)) == len(seeds) == 6
