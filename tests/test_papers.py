"""benchmarks/papers: a grid that is killed and resumed has the same table, and the shipped grids fit the recipes."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests import launch

PAPERS = launch.ROOT / "benchmarks" / "papers"
GRIDS = sorted(path for path in PAPERS.glob("*.yaml") if path.stem != "scales")


@pytest.mark.parametrize("path", GRIDS, ids=lambda path: path.stem)
def test_grids_name_what_there_is(path: Path) -> None:
    grid = yaml.safe_load(path.read_text(encoding="utf-8"))
    for cells in grid["cells"]:
        assert set(cells["worlds"]) <= grid["worlds"].keys() and set(cells["arms"]) <= grid["arms"].keys()
    arms = [arm for arm in [*grid["arms"].values(), grid.get("pretrain")] if arm]
    for arm in arms:
        recipe = yaml.safe_load((launch.ROOT / f"xscale/recipes/{arm['recipe']}.yaml").read_text(encoding="utf-8"))
        named = {key.split(".")[1] for key in arm if key.startswith("streams.")}
        assert named <= recipe["streams"].keys(), arm
    assert {arm for pair in grid["compare"] for arm in pair} <= grid["arms"].keys()


@pytest.mark.slow
def test_a_killed_grid_has_the_same_table(tmp_path: Path) -> None:
    """Killed while it trains, then while it measures; then the cell alone from its beginning."""
    command = [
        sys.executable,
        str(PAPERS / "run.py"),
        "--grid",
        "tang",
        "--scale",
        "smoke",
        "--only",
        "trans.inv/align_mlm",
    ]
    command += ["--out", str(tmp_path)]
    for made in ("runs/trans.inv/align_mlm.0/checkpoints/step_00000004", "parts/trans.inv/align_mlm.0.withheld.json"):
        with subprocess.Popen(command, env=launch.environment()) as running:
            while running.poll() is None and not (tmp_path / made).exists():
                time.sleep(0.05)
            launch.kill(running)
        assert running.returncode < 0
    subprocess.run(command, env=launch.environment(), check=True)
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "align_mlm, seed 0: did not converge" in table and "pos Δ" in table  # 8 steps
    assert "| 8 |" in (tmp_path / "cells.md").read_text() and (tmp_path / "words.png").stat().st_size > 1000
    for folder in ("runs", "hf", "parts", "scores"):
        shutil.rmtree(tmp_path / folder)
    subprocess.run(command, env=launch.environment(), check=True)
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == table
