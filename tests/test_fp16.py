"""fp16 where the processor has it: every recipe, and ZeRO 1, 2 and 3, through an overflow and a lost checkpoint.

Elsewhere the shipped fp16 ds_configs fall back to fp32, and the same runs train and resume in that.
"""

import json
import math
import shutil
from pathlib import Path

import pytest

from tests import launch
from xscale.config import RECIPES
from xscale.step.ds_config import Hardware

pytestmark = pytest.mark.slow

STEPS, KEPT = 12, 6
RECIPE_NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
WITH_COMPANION = ("contextual", "mixed", "ppa", "ppa_mlm", "ppa_no_tlm")
"""Which follow whole weights: ZeRO 3 takes none of them."""
WITHOUT = [recipe for recipe in RECIPE_NAMES if recipe not in WITH_COMPANION]
CASES = [(recipe, 1 + n % 2) for n, recipe in enumerate(WITH_COMPANION)] + [("mixed", 1)]
CASES += [(recipe, 1 + n % 3) for n, recipe in enumerate(WITHOUT)]
"""Each recipe once, and `mixed`, with all companions, at both stages that take them."""


@pytest.fixture(scope="module")
def runs(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT/RECIPE-STAGE, trained on 2 ranks; metrics.jsonl of the first time beside, as whole.jsonl. Then the last
    checkpoint is lost, and the run goes on from the one before."""
    out = tmp_path_factory.mktemp("fp16")
    listed = []
    for recipe, stage in CASES:
        ds_config = json.loads((launch.ROOT / "ds_configs" / f"zero{stage}_fp16.json").read_text())
        ds_config["fp16"] |= {"initial_scale_power": 20, "hysteresis": 1}  # too large for the first steps
        path = out / f"zero{stage}.json"
        path.write_text(json.dumps(ds_config))
        common = ["--ds_config", str(path), "--recipe", recipe, "--data", str(demo), "--steps", str(STEPS)]
        sets = ["train.lr=0.001", "data.workers=0", f"checkpoint.every={KEPT}", "train.max_tokens=512"]
        for stream in launch.run_spec_of([*common, "--set", *sets]).recipe.streams:
            sets.append(f"streams.{stream}.samples=8")
        if recipe.startswith("ppa") or recipe == "mixed":
            sets.append("streams.ppa.queue_size=16")
        if recipe in ("contextual", "mixed"):
            sets.append(
                "streams.contextual.weight=0.01"
            )  # its gradients are of hundreds: the scale would fall for long
        listed.append([*common, "--out", str(out / f"{recipe}-{stage}"), "--set", *sets])
    (out / "list.json").write_text(json.dumps(listed))
    script = str(launch.ROOT / "tests" / "many_runs.py")
    launch.run(2, [str(out / "list.json")], script=script, timeout=900)
    for recipe, stage in CASES:
        run = out / f"{recipe}-{stage}"
        shutil.copy(run / "metrics.jsonl", run / "whole.jsonl")
        shutil.rmtree(run / "checkpoints" / f"step_{STEPS:08d}")
    launch.run(2, [str(out / "list.json")], script=script, timeout=900)
    return out


@pytest.mark.parametrize(("recipe", "stage"), CASES)
def test_fp16_overflows_and_resumes(runs: Path, recipe: str, stage: int) -> None:
    run = runs / f"{recipe}-{stage}"
    entries = launch.without_times(run)
    if Hardware.here().fp16:
        overflown = [entry for entry in entries if entry["skipped"]]
        assert overflown and all(entry["grad_norm"] is None for entry in overflown)
        assert entries[-1]["loss_scale"] == 2.0 ** (20 - len(overflown))
        assert not entries[-1]["skipped"], "the scale fits by now"
    assert all(math.isfinite(entry["loss"]) for entry in entries)
    (run / "metrics.jsonl").write_text((run / "whole.jsonl").read_text())
    assert entries == launch.without_times(run)
