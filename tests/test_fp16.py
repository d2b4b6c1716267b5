"""fp16 where the processor has it: ZeRO 1, 2 and 3, through an overflow and a lost checkpoint.

Elsewhere the shipped fp16 ds_configs fall back to fp32, and the same runs train and resume in that.
"""

import json
import math
import shutil
from pathlib import Path

import pytest

from tests import launch
from xscale.step.ds_config import Hardware

pytestmark = pytest.mark.slow

STEPS, KEPT = 8, 4
CASES = [("mixed", 1), ("mixed", 2), ("alignlm", 3), ("dict_mlm", 3)]
"""`mixed` has PPA's queue and momentum encoder, which follow whole weights: ZeRO 3 does not take them."""


@pytest.fixture(scope="module")
def runs(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT/RECIPE-STAGE, trained on 2 ranks; metrics.jsonl of the first time beside, as whole.jsonl. Then the last
    checkpoint is lost, and the run continues from the one before."""
    out = tmp_path_factory.mktemp("fp16")
    listed = []
    for recipe, stage in CASES:
        ds_config = json.loads((launch.ROOT / "ds_configs" / f"zero{stage}_fp16.json").read_text())
        ds_config["fp16"] |= {"initial_scale_power": 20, "hysteresis": 1}  # too large for the first steps
        path = out / f"zero{stage}.json"
        path.write_text(json.dumps(ds_config))
        common = ["--ds_config", str(path), "--recipe", recipe, "--data", str(demo), "--steps", str(STEPS)]
        sets = ["train.lr=0.001", "data.workers=0", f"checkpoint.every={KEPT}", "train.max_tokens=512"]
        for stream in launch.loader_of([*common, "--set", *sets], measured=False).recipe.streams:
            sets.append(f"streams.{stream}.samples=8")
        if recipe == "mixed":
            sets += ["streams.ppa.queue_size=16", "train.measure_every=0"]
        listed.append([*common, "--out", str(out / f"{recipe}-{stage}"), "--set", *sets])
    launch.run_all(2, out, listed)
    for recipe, stage in CASES:
        run = out / f"{recipe}-{stage}"
        shutil.copy(run / "metrics.jsonl", run / "whole.jsonl")
        shutil.rmtree(run / "checkpoints" / f"step_{STEPS:08d}")
    launch.run_all(2, out, listed)
    return out


@pytest.mark.parametrize(("recipe", "stage"), CASES)
def test_fp16_overflows_and_resumes(runs: Path, recipe: str, stage: int) -> None:
    run = runs / f"{recipe}-{stage}"
    entries = launch.without_times(run)
    if Hardware.of_this_process().fp16:
        overflown = [entry for entry in entries if entry["skipped"]]
        assert overflown and all(entry["grad_norm"] is None for entry in overflown)
        assert entries[-1]["loss_scale"] == 2.0 ** (20 - len(overflown))
        assert not entries[-1]["skipped"], "the scale fits by now"
    assert all(math.isfinite(entry["loss"]) for entry in entries)
    (run / "metrics.jsonl").write_text((run / "whole.jsonl").read_text())
    assert entries == launch.without_times(run)
