"""Every shipped recipe and ds_config trains, on 2 ranks, in one launch."""

import json
import math
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

from tests import launch
from xscale import export
from xscale.config import RECIPES
from xscale.engine import operators_directory

pytestmark = pytest.mark.slow

STEPS = 20
RECIPE_NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
DS_CONFIGS = sorted(path.stem for path in (launch.ROOT / "ds_configs").glob("*.json"))
STAGE_3 = [name for name in DS_CONFIGS if name.startswith("zero3")]
"""These take no momentum encoder, which `mixed` has."""


@pytest.fixture(scope="module")
def runs(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT/recipe-NAME and OUT/ds-NAME, from one launch."""
    out = tmp_path_factory.mktemp("runs")

    def arguments(name: str, recipe: str, ds_config: str, *sets: str) -> list[str]:
        path = ds_config if ds_config.endswith(".json") else f"ds_configs/{ds_config}.json"
        common = ["--ds_config", path, "--recipe", recipe, "--data", str(demo)]
        return [*common, "--out", str(out / name), "--steps", str(STEPS), "--set", *sets, "data.workers=0"]

    listed = []
    for recipe in RECIPE_NAMES:
        sets = ["train.lr=0.003"]
        for stream in launch.job_of(arguments("", recipe, "zero2_cpu")).recipe.streams:
            sets.append(f"streams.{stream}.samples=16")
        if recipe.startswith("ppa") or recipe == "mixed":
            sets.append("streams.ppa.queue_size=64")
        listed.append(arguments(f"recipe-{recipe}", recipe, "zero2_cpu", *sets))
    small = ["streams.ppa.queue_size=32", "streams.tlm.samples=8", "streams.alignlm.samples=8"]
    same = ["model.dropout=0", "train.micro_batch=4", "train.max_grad_norm=1000"]
    for name in DS_CONFIGS:
        # The shipped file, with gradient buckets that fill several times in a backward pass, as a large model's do.
        ds_config = json.loads((launch.ROOT / "ds_configs" / f"{name}.json").read_text())
        ds_config.setdefault("zero_optimization", {})["reduce_bucket_size"] = 50_000
        path = out / f"{name}.json"
        path.write_text(json.dumps(ds_config))
        recipe, sets = ("alignlm", ["streams.alignlm.samples=16"]) if name in STAGE_3 else ("mixed", small)
        listed.append(arguments(f"ds-{name}", recipe, str(path), *sets, *same))
    listed.append(arguments("ds-alignlm", "alignlm", "zero2_cpu", "streams.alignlm.samples=16", *same))
    (out / "list.json").write_text(json.dumps(listed))
    # A killed run left the guard of a build (zero2_offload compiles): torch alone would wait for it for ever.
    guard = operators_directory() / "cpu_adam" / "lock"
    guard.parent.mkdir(parents=True, exist_ok=True)
    guard.touch()
    launch.run(2, [str(out / "list.json")], script=str(launch.ROOT / "tests" / "many_runs.py"), timeout=570)
    return out


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_recipe_learns_and_exports(runs: Path, tmp_path: Path, recipe: str) -> None:
    """The loss falls, all numbers are finite, and the export is a plain Hugging Face model."""
    entries = launch.metrics(runs / f"recipe-{recipe}")
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
    numbers = [value for entry in entries for value in entry.values() if isinstance(value, float)]
    assert all(math.isfinite(number) for number in numbers)
    start, end = (sum(entry["loss"] for entry in part) / 4 for part in (entries[:4], entries[-4:]))
    assert end < start, (start, end)
    export.export(runs / f"recipe-{recipe}", tmp_path / "hf")
    AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")


@pytest.mark.parametrize("name", DS_CONFIGS)
def test_ds_config_trains(runs: Path, name: str) -> None:
    entries = launch.metrics(runs / f"ds-{name}")
    start, end = (sum(entry["loss"] for entry in part) / 4 for part in (entries[:4], entries[-4:]))
    assert end < start, (start, end)
    # The arithmetic is the same but for the precision; tests/test_step.py compares zero2_cpu's with plain PyTorch.
    expected = launch.metrics(runs / ("ds-alignlm" if name in STAGE_3 else "ds-zero2_cpu"))
    tolerance = 2e-2 if name.endswith("bf16") else 2e-4
    for entry, other in zip(entries, expected, strict=True):
        assert entry["loss"] == pytest.approx(other["loss"], rel=tolerance), entry["step"]
        if name != "zero0_fp32":  # DeepSpeed has no norm there
            assert entry["grad_norm"] == pytest.approx(other["grad_norm"], rel=5 * tolerance), entry["step"]
