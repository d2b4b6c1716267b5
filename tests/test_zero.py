"""A step of several rows, reduced once, is that of plain PyTorch: every ZeRO stage and precision, real processes."""

import json
from typing import Any

import pytest

from tests import launch

pytestmark = pytest.mark.slow

TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 5e-2}
"""Of an update against that of fp64, relative, in each weight."""
SMALL = {"bucket": 2_000, "overlap": True}


def case(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "precision": precision} | more


CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "zero0": case(0, "fp32", heads="rows"),
        "zero1-fp16": case(1, "fp16", heads="rows", overflow=[6]),
        "zero2-bf16-sum32": case(2, "bf16", heads="rows", accumulate="fp32", overflow=[6]),
        "zero3-fp16": case(3, "fp16", heads="rows", overflow=[0, 6]),
    },
    2: {
        "zero0": case(0, "fp32", heads="ranks", norms=True),
        "zero1": case(1, "fp32", heads="ranks", **SMALL),
        "zero1-bf16-sum32-overlap": case(1, "bf16", heads="all", accumulate="fp32", **SMALL),
        "zero1-bf16-sum32-offload": case(1, "bf16", heads="ranks", accumulate="fp32", offload=True),
        "zero1-fp16": case(1, "fp16", heads="ranks", overflow=[6, 7], norms=True, **SMALL),
        "zero2": case(2, "fp32", heads="ranks", overflow=[6]),
        "zero2-bf16-scattered": case(2, "bf16", heads="ranks", scattered=True),
        "zero2-bf16": case(2, "bf16", heads="ranks", overflow=[0, 6], norms=True),
        "zero2-bf16-sum32": case(2, "bf16", heads="ranks", accumulate="fp32", **SMALL),
        "zero2-fp16": case(2, "fp16", heads="ranks", overflow=[0, 6], norms=True, **SMALL),
        "zero2-offload": case(2, "fp32", heads="ranks", offload=True),
        "zero2-fp16-offload": case(2, "fp16", heads="all", overflow=[6], offload=True, **SMALL),
        "zero3": case(3, "fp32", heads="rows"),
        "zero3-bf16-sum32": case(3, "bf16", heads="rows", accumulate="fp32", **SMALL),
        "zero3-fp16": case(3, "fp16", heads="all", overflow=[2, 6]),
        "zero3-offload": case(3, "fp32", heads="rows", offload=True),
        "zero0-fails": case(0, "fp32", fails=True),
        "zero1-bf16-sum32-fails": case(1, "bf16", accumulate="fp32", fails=True),
        "zero2-fails": case(2, "fp32", fails=True, **SMALL),
        "zero3-fails": case(3, "fp32", fails=True),
    },
    4: {
        "zero2": case(2, "fp32", heads="ranks", **SMALL),
        "zero3": case(3, "fp32", heads="all", **SMALL),
    },
}
NAMES = [(world, name) for world, cases in CASES.items() for name in cases]
TRAINED = [(world, name) for world, name in NAMES if not name.endswith("fails")]
FAILING = [(world, name) for world, name in NAMES if name.endswith("fails")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What the worker found, by number of ranks and case; without those whose precision the machine has not."""
    found = {}
    for world, cases in CASES.items():
        path = tmp_path_factory.mktemp(f"ranks{world}")
        (path / "cases.json").write_text(json.dumps(cases))
        worker = str(launch.ROOT / "tests" / "zero_worker.py")
        launch.run(world, [str(path / "cases.json"), str(path / "results.json")], script=worker, timeout=900)
        found[world] = json.loads((path / "results.json").read_text())
    return found


def result(results: dict[int, dict[str, Any]], world: int, name: str) -> dict[str, Any]:
    if name not in results[world]:
        pytest.skip(f"no native {CASES[world][name]['precision']}")
    return results[world][name]


@pytest.mark.parametrize(("world", "name"), TRAINED)
def test_steps_are_those_of_plain_pytorch(results: dict[int, dict[str, Any]], world: int, name: str) -> None:
    """10 steps of one to four rows, heads without samples in some, and a weight that nothing uses."""
    found, tolerance = result(results, world, name), TOLERANCE[CASES[world][name]["precision"]]
    assert {weight: error for weight, error in found["errors"].items() if not error < tolerance} == {}
    assert found["norm_error"] < tolerance


@pytest.mark.parametrize(("world", "name"), TRAINED)
def test_an_overflow_on_one_rank_is_one_skipped_step(results: dict[int, dict[str, Any]], world: int, name: str) -> None:
    found, overflow = result(results, world, name), CASES[world][name].get("overflow", [])
    assert found["skipped"] == len(overflow) and found["norms_skipped"] == ["inf"] * len(overflow)
    if CASES[world][name]["precision"] == "fp16":
        scales = [2.0**10 / 2 ** sum(step <= now for step in overflow) for now in range(len(found["scales"]))]
        assert found["scales"] == scales


@pytest.mark.parametrize(("world", "name"), TRAINED)
def test_gradients_are_reduced_once_a_step(results: dict[int, dict[str, Any]], world: int, name: str) -> None:
    """The number and the sizes of the collectives do not depend on the number of rows. Together they have the size of
    the weights, at stages 1 and 2 one for each of the two groups."""
    calls = result(results, world, name)["calls"]
    assert set(calls) == {"1", "2", "3", "4"}
    assert calls["1"] == calls["2"] == calls["3"] == calls["4"]
    buckets = [size for sizes in calls["1"].values() for size in sizes if size > 8]
    width = {"fp32": 4, "fp16": 2, "bf16": 2}[CASES[world][name]["precision"]]
    if is_flat(name):
        assert len(buckets) == (2 if world > 1 else 0)
    else:
        assert (len(buckets) > 1) == ("bucket" in CASES[world][name] and name != "zero1-bf16-sum32-overlap")
    if buckets:
        assert 6411 * width <= sum(buckets) < 6411 * width + 200, "padding at most"


def is_flat(name: str) -> bool:
    """Return whether the gradients of a case are views of flat tensors."""
    return name[:5] in ("zero1", "zero2") and "offload" not in name and not name.startswith("zero1-bf16-sum32")


@pytest.mark.parametrize(("world", "name"), [(w, n) for w, n in TRAINED if n[:5] in ("zero1", "zero2")])
def test_an_update_looks_at_gradients_once(results: dict[int, dict[str, Any]], world: int, name: str) -> None:
    """A norm of each of the two groups and of both, and a few tests of these, whatever the number of weights."""
    found, settings = result(results, world, name), CASES[world][name]
    assert not found["hooks"] or name[:16] == "zero1-bf16-sum32"
    if not settings.get("offload") and name[:16] != "zero1-bf16-sum32":  # DeepSpeed goes other ways there
        assert found["looks"] <= 8


@pytest.mark.parametrize(("world", "name"), FAILING)
def test_an_exception_is_seen_and_nothing_reduced(results: dict[int, dict[str, Any]], world: int, name: str) -> None:
    assert result(results, world, name) == {"raised": "ValueError: a row is bad", "reduced": []}
