"""The benchmarks that only a GPU or a reader runs, at toy size, so that they cannot rot."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import launch


def run(*command: str, **env: str) -> str:
    whole = launch.environment() | {"PYTHONPATH": str(launch.ROOT)} | env
    done = subprocess.run(command, cwd=launch.ROOT, env=whole, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
def test_the_stock_loop_has_about_the_same_loss(demo: Path) -> None:
    """The stock loop against which steps are measured computes the same objectives, with masks of its own."""
    recipes = ["tlm", "alignlm"]
    words = ["--recipes", *recipes, "--preset", "tiny", "--vocab_size", "0", "--samples", "64", "--rounds", "2"]
    found = run(sys.executable, "benchmarks/step.py", *words, "--data", str(demo / "pairs"))
    losses = re.findall(r"^ +(?:xscale|stock), .* (\S+)$", found, re.MULTILINE)
    assert len(losses) == 4
    for ours, theirs in ((losses[1], losses[0]), (losses[3], losses[2])):
        assert float(ours) == pytest.approx(float(theirs), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["rows modern", "check head gather train"])
def test_gpu_sh_at_toy_size(parts: str, tmp_path: Path) -> None:
    """Each part runs, and the end says of each goal whether it is met. benchmarks/step.py has a test of its own."""
    found = run("bash", "benchmarks/gpu.sh", "--cpu", OUT=str(tmp_path), PARTS=parts)
    assert {path.stem for path in tmp_path.iterdir()} == set(parts.split())
    assert all(f"=== {part}: exit code 0" in found for part in parts.split())
    if "modern" in parts:
        goals = re.findall(r"^GOAL (.+?): (?:not measured|(?:met|MISSED): \S+)", found, re.MULTILINE)
        expected = ["tiny, 380,000 tokens/s", "tiny, MFU of 50% in a step of 1x1024"]
        assert goals[-3:] == [*expected, "mixed, 0.9 of the MFU of tlm"]


def test_gpu_sh_asks_for_parts() -> None:
    """All of them take more than a call's 8 minutes."""
    env = launch.environment() | {"PARTS": ""}
    done = subprocess.run(["bash", "benchmarks/gpu.sh"], cwd=launch.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    for parts in ("rows check", "step modern", "train head gather"):
        assert f'"{parts}"' in done.stderr


def test_benchmarks_start_as_their_first_lines_say() -> None:
    """`python benchmarks/X.py` finds its own folder, not the package `benchmarks`."""
    for path in sorted((launch.ROOT / "benchmarks").glob("*.py")):
        assert "from benchmarks" not in path.read_text(encoding="utf-8"), path


def test_the_benchmark_of_planning_for_a_thousand_ranks_runs() -> None:
    folders = f"{launch.ROOT}:{launch.ROOT}/benchmarks"
    cells = run(sys.executable, "-c", "import scale; print(*scale.planning_cells('mono', 1, 1024))", PYTHONPATH=folders)
    assert all(float(cell.replace(",", "")) >= 0 for cell in cells.split()) and len(cells.split()) == 4
