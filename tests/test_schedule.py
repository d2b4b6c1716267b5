"""The learning rate of each step, against formulas and torch's own schedulers."""

import math
from types import SimpleNamespace

import pytest

from xscale.errors import UserError
from xscale.objectives import OBJECTIVES
from xscale.recipe import Recipe, TrainConfig, load_recipe
from xscale.step.step import set_learning_rate_unless_scheduler

STEPS, LR = 40, 0.02


def load(*sets: str) -> Recipe:
    return load_recipe(
        "mlm", [f"train.steps={STEPS}", f"train.lr={LR}", *(f"train.{field}" for field in sets)], OBJECTIVES
    )


def curve(*sets: str) -> list[float]:
    train = load(*sets).train
    return [train.learning_rate(step) / LR for step in range(STEPS)]


FALLS = {"linear": lambda x: 1 - x, "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2, "1-sqrt": lambda x: 1 - x**0.5}


@pytest.mark.parametrize("schedule", FALLS)
@pytest.mark.parametrize(("warmup", "decay"), [(0, None), (8, None), (8, 10), (0.2, 0.25), (0, 1), (8, 0), (8, 32)])
def test_warm_up_stable_and_decay(schedule: str, warmup: float, decay: float | None) -> None:
    rise = round(warmup * STEPS) if warmup < 1 else warmup
    fall = STEPS - rise if decay is None else round(decay * STEPS) if decay < 1 else decay
    falling = [FALLS[schedule](i / fall) for i in range(int(fall))]
    expected = [(i + 1) / rise for i in range(int(rise))] + [1.0] * int(STEPS - rise - fall) + falling
    sets = [f"warmup={warmup}", *([] if decay is None else [f"decay={decay}"])]
    found = curve(f"schedule={schedule}", *sets)
    assert found == pytest.approx(expected, abs=1e-12) and min(found) > 0
    if schedule == "linear":
        assert curve(*sets) == found


def test_a_step_has_the_recipe_s_rate_unless_the_ds_config_has_a_scheduler() -> None:
    recipe, groups = load("warmup=4"), [{"lr": 7.0}, {"lr": 7.0}]
    optimizer = SimpleNamespace(param_groups=groups)
    engine = SimpleNamespace(optimizer=optimizer, lr_scheduler=object(), get_lr=lambda: [g["lr"] for g in groups])
    assert set_learning_rate_unless_scheduler(engine, recipe, 1) == 7.0
    engine.lr_scheduler = None
    assert set_learning_rate_unless_scheduler(engine, recipe, 1) == LR / 2 and [g["lr"] for g in groups] == [LR / 2] * 2


def test_a_decay_must_fit_beside_the_warm_up() -> None:
    with pytest.raises(UserError, match=r"decay: 30 steps of decay and 11 steps of warm-up are more than the 40"):
        load("warmup=11", "decay=0.75")
    assert TrainConfig(steps=40, warmup=10, decay=30).learning_rate(9) == TrainConfig().lr


def test_steps_that_are_left_out() -> None:
    assert load("skip_steps=[3, 7]").train.skip_steps == [3, 7]
    assert load("skip_steps=[3, 7]").identity() == load().identity(), "a resume may name others"
    for wrong in ("[7-9]", "[-3]", "[a]", "[1.5]", "3", "[0]"):
        with pytest.raises(UserError, match=r"train.skip_steps"):
            load(f"skip_steps={wrong}")
