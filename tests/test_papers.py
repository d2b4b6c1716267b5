"""benchmarks/papers: a grid that is killed goes on, and the shipped grids fit the recipes."""

import importlib
import itertools
import json
import math
import re
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import scipy.stats
import yaml

from tests import launch
from xscale.errors import UserError
from xscale.objectives import OBJECTIVES
from xscale.recipe import RECIPES, load_recipe

PAPERS = launch.ROOT / "benchmarks" / "papers"
GRIDS = ("tang", "sizes", "methods", "controls", "mixtures", "public", "rates")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PAPERS)
    return importlib.import_module("run")


def arguments(folder: Path, **fields: Any) -> Namespace:
    """Arguments of the driver, with these fields."""
    common = {"grid": "tang", "scale": "cpu", "out": folder, "data": folder, "encoder": folder, "only": [], "set": []}
    return Namespace(**common | fields)


@pytest.mark.parametrize("scale", ["cpu", "h100", "paper"])
@pytest.mark.parametrize("name", GRIDS)
def test_grids_name_what_there_is(driver: Any, tmp_path: Path, name: str, scale: str) -> None:
    grid = driver.Grid(arguments(tmp_path, grid=name, scale=scale))
    for product in grid.grid["cells"]:
        assert set(product["worlds"]) <= grid.grid["worlds"].keys() and set(product["arms"]) <= grid.grid["arms"].keys()
    cells = [f"{world}/{arm}" for part in grid.grid["cells"] for world in part["worlds"] for arm in part["arms"]]
    assert {one for pair in grid.grid["compare"] for one in pair} <= grid.grid["arms"].keys() | set(cells)
    assert "steps" in grid.scale
    for kind in filter(None, [grid.scale["tune"], grid.scale.get("probe")]):
        assert {"epochs", "limit", "lr", "seeds"} == kind.keys() - {"tasks", "batch", "test_limit"}
    dropouts = set()
    for arm in filter(None, [*grid.grid["arms"].values(), grid.grid.get("pretrain")]):
        shipped = yaml.safe_load((RECIPES / f"{arm['recipe']}.yaml").read_text(encoding="utf-8"))
        assert {key.split(".")[1] for key in arm if key.startswith("streams.")} <= shipped["streams"].keys(), arm
        composed = grid.recipe(arm, 20, tmp_path, grid.encoder)
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(composed), encoding="utf-8")
        recipe = load_recipe(str(tmp_path / "recipe.yaml"), [], OBJECTIVES)
        assert recipe.train.steps == 20
        dropouts.add(recipe.model.dropout)
    assert len(dropouts) == 1, "arms that are compared have one dropout"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--grid", "tong"], r"--grid tong: .*tang"),
        (["--only", "trans/xml"], r"--only trans/xml.*trans/xlm"),
        (["--set", "stps=3"], r"--set stps=3.*steps"),
        (["--scale", "paper"], r"--scale paper needs data.*--data"),
        (["--grid", "public"], r"--grid public needs a public encoder.*--encoder"),
        (["--data", "nowhere"], r"nowhere/parallel/bible/bible.en.xz.*--data"),
    ],
)
def test_errors_name_value_and_remedy(
    driver: Any, tmp_path: Path, capsys: pytest.CaptureFixture, words: list[str], told: str
) -> None:
    data = [] if "paper" in words else ["--data", str(tmp_path)]
    code = driver.main(["--grid", "tang", "--scale", "cpu", "--out", str(tmp_path), *data, *words])
    assert code == 2 and re.fullmatch(rf"error: .*{told}.*\n", capsys.readouterr().err)


def test_cells_of_one_folder_have_the_same_settings(driver: Any, tmp_path: Path) -> None:
    def grid(*given: str) -> Any:
        return driver.Grid(arguments(tmp_path, set=given))

    assert grid("steps=200", "seeds=[0]").scale["steps"] == 200
    assert len(grid("steps=200", "seeds=[0, 1]").cells) == 24
    with pytest.raises(UserError, match=r"settings.json.*--out"):
        grid("steps=300")


def cell(arm: str, seed: int, **scores: float) -> dict[str, Any]:
    """A cell of the world w that has converged, unless its scores say otherwise."""
    scores = {"TLM loss": 5.0, "unigram entropy": 6.0} | scores
    return {"cell": {"world": "w", "arm": arm, "seed": seed}, "scores": scores, "problem": "", "loss fell": True}


def test_table_leaves_out_what_did_not_converge(driver: Any, tmp_path: Path) -> None:
    tables = importlib.import_module("tables")
    values = {"mlm": [20.0, 31.0, 25.0, 90.0], "align_mlm": [40.0, 47.0, 49.0, 1.0]}
    done = []
    for arm, seed in itertools.product(values, range(4)):
        value = values[arm][seed]
        scores = {"retrieval": value, "aligned all": value / 2, "pos Δ": 60 - value}
        done.append(cell(arm, seed, **scores, **({"TLM loss": 9.0} if seed == 3 else {})))
    done.append(cell("mlm", 4) | {"problem": "the loss was not finite", "scores": {}})
    good = tables.converged_scores(done)
    (table,) = tables.world_tables(tables.all_scores(done), good)
    assert "| mlm | 3 | 5.00 ± 0.00 | 6.00 ± 0.00 | 25.3 ± 5.5 |" in table
    assert "| mlm, seed 3: did not converge |  | 9.00 | 6.00 | 90.0 |" in table
    assert "| mlm, seed 4: did not converge |  | - | - | - |" in table
    p = scipy.stats.ttest_rel(values["align_mlm"][:3], values["mlm"][:3]).pvalue
    for pair in (["align_mlm", "mlm"], ["w/align_mlm", "w/mlm"]):
        (text,) = tables.comparisons([pair], good)
        assert f"| w/align_mlm - w/mlm | retrieval | 20.0 ± 4.0 | 3 | {p:.3f} | {min(3 * p, 1):.3f} |" in text
    assert tables.correlations(good) == [], "two arms are two points"
    tables.draw_alignment(tmp_path / "alignment.png", good)
    assert (tmp_path / "alignment.png").stat().st_size > 1000


def test_statistics_of_a_table(driver: Any) -> None:
    """Holm by hand; the means of arms as points, with an exact p; two seeds have no p."""
    tables = importlib.import_module("tables")
    assert tables.holm([0.01, math.nan, 0.04, 0.03, 0.005]) == pytest.approx(
        [0.03, math.nan, 0.06, 0.06, 0.02], nan_ok=True
    )
    assert math.isnan(tables.paired_p(pd.Series([1.0, 1.1])))
    aligned, deltas = {"a": 0.2, "b": 1.0, "c": 15.9, "d": 25.9}, {"a": 56.0, "b": 56.3, "c": 51.0, "d": 40.4}
    done = []
    for arm, seed in itertools.product(aligned, range(3)):
        done.append(cell(arm, seed, **{"aligned all": aligned[arm] + seed / 10, "pos Δ": deltas[arm] + seed / 10}))
    (line,) = tables.correlations(tables.all_scores(done))
    assert "rho -0.800 (Spearman), p 0.333, 4 means of arms" in line


@pytest.mark.parametrize("suffix", ["", " trained"])
def test_words_of_a_grid_are_measured_with_and_without_a_training_dictionary(driver: Any, suffix: str) -> None:
    assert driver.aligned_share({f"words{suffix}": 30, f"en->de{suffix}": 0.25}, "en->de") == 0.25


@pytest.mark.slow
def test_a_killed_grid_goes_on(driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it trains, it goes on from a checkpoint; given again, it makes the table of what it has. Only the
    driver that is killed starts processes; its world was there."""
    words = ["--grid", "tang", "--scale", "smoke", "--only", "trans.inv/align_mlm", "--out", str(tmp_path)]
    cell = "trans.inv/align_mlm.0"

    def run(grid: Any, *command: object) -> None:
        code, output = launch.fork(0, [*map(str, command)], launch.environment() | {"PYTHONPATH": str(launch.ROOT)})
        assert code == 0, f"{command}\n{output[-6000:]}"

    monkeypatch.setattr(driver.Grid, "run", run)
    made = Namespace(
        grid="tang", scale="smoke", out=tmp_path, data=None, encoder=tmp_path, only=["trans.inv/align_mlm"], set=[]
    )
    driver.Grid(made).world("trans.inv")
    with subprocess.Popen([sys.executable, str(PAPERS / "run.py"), *words], env=launch.environment()) as running:
        while running.poll() is None and not (tmp_path / f"runs/{cell}/checkpoints/step_00000002").exists():
            time.sleep(0.05)
        launch.kill(running)
    assert running.returncode < 0 and not (tmp_path / "table.md").exists()
    assert driver.main(words) == 0
    log = (tmp_path / f"runs/{cell}/run.log").read_text()
    assert int(re.findall(r"the run continues from .*, after step (\d+)", log)[-1]) >= 2
    table, model = (tmp_path / "table.md").read_text(encoding="utf-8"), tmp_path / f"hf/{cell}/model.safetensors"
    assert "| align_mlm | 1 |" in table and "pos Δ" in table
    assert not math.isnan(json.loads((tmp_path / f"scores/{cell}.json").read_text())["scores"]["aligned all"])
    assert "| 4 |" in (tmp_path / "cells.md").read_text() and (tmp_path / "words.png").stat().st_size > 1000
    written = model.stat().st_mtime_ns
    (tmp_path / "table.md").unlink()
    assert driver.main(words) == 0
    assert (tmp_path / "table.md").read_text(encoding="utf-8") == table and model.stat().st_mtime_ns == written
