"""What pip installs elsewhere: that it is whole, and that all it imports is declared."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests import launch

OTHERWISE = {"fasttext": "fasttext-predict", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Modules whose distribution has another name."""


def test_all_that_is_imported_is_declared() -> None:
    project = tomllib.loads((launch.ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {re.split(r"[<>=!;\[ ]", line)[0].lower() for line in lines}
    found: dict[str, str] = {}
    for path in (p for folder in ("xscale", "data_tools") for p in (launch.ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            found |= {name.partition(".")[0]: str(path) for name in names}
    ours = sys.stdlib_module_names | {"xscale", "data_tools"}
    assert {
        name: path for name, path in found.items() if name not in ours and OTHERWISE.get(name, name) not in declared
    } == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git would give, where nothing of an earlier build is."""
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    for name in ("xscale", "data_tools", "ds_configs"):
        shutil.copytree(launch.ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(launch.ROOT / name, source)
    pip("wheel", str(source), "--no-deps", "--no-build-isolation", "--wheel-dir", str(out))
    (built,) = out.glob("*.whl")
    return built


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with the wheel in it, and all other packages as they are here: without their .pth
    files, one of which has the checkout."""
    out = tmp_path_factory.mktemp("elsewhere")
    venv.create(out / "env", symlinks=True)
    pip("--python", str(out / "env" / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = (out / "env").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return out


@pytest.mark.slow
def test_the_wheel_is_whole(wheel: Path) -> None:
    """Every file that is not of tests, with the tools and ds_configs inside the one package."""
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {"xscale": "xscale", "data_tools": "xscale/data_tools", "ds_configs": "xscale/ds_configs"}
    expected = {
        f"{inside}/{path.relative_to(launch.ROOT / folder)}"
        for folder, inside in folders.items()
        for path in (launch.ROOT / folder).rglob("*.*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected == {name for name in names if ".dist-info/" not in name}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    page = zipfile.ZipFile(wheel).read(metadata).decode()
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert len(links) > 10 and all(link.startswith("https://") for link in links)
    assert "/raw/main/docs/report.png)" in page


SCRIPTS = """
import json, runpy, sys
*before, last = json.loads(sys.argv[1])
for sys.argv, code in [*((words, 0) for words in before), (last, None)]:
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if code is None:
            raise
        assert (end.code or 0) == code, sys.argv
"""
"""It runs scripts of pip one after the other, which all import the same: torch, transformers and DeepSpeed."""


@pytest.mark.slow
def test_the_wheel_trains_from_another_folder(elsewhere: Path, tmp_path: Path) -> None:
    """The tools, 5 steps by deepspeed's launcher and an evaluation; the checkout cannot be imported."""
    bin, environment = elsewhere / "env" / "bin", launch.environment()
    environment = {k: v for k, v in environment.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{bin}:{os.environ['PATH']}"

    def run(*words: str, code: int = 0) -> str:
        command = [str(bin / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout + done.stderr

    def scripts(*lines: str, code: int = 0) -> str:
        """Output of scripts, of which the last ends with this code and all others with 0."""
        words = [line.split() for line in lines]
        return run("python", "-c", SCRIPTS, json.dumps([[str(bin / name), *more] for name, *more in words]), code=code)

    where = run("python", "-c", "import xscale, importlib.util as u; print(xscale.__file__, u.find_spec('data_tools'))")
    assert str(elsewhere) in where and where.split()[1] == "None"
    assert "write_shards" in run("xscale", "data", code=2) and run("xscale", "--version").startswith("xscale ")
    (tmp_path / "empty").mkdir()
    made = "xscale data demo_corpus --out data/demo --pairs 200 --mono 200"
    told = scripts(made, "xscale train --ds_config zero2_cpu --dry_run --data empty", code=2)
    assert "`xscale data write_shards`" in told  # a remedy that works there
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", str(launch.free_port())]
    sets = ["--steps", "5", "--set", "data.workers=0", "streams.ppa.queue_size=64", "train.lr=0.001"]
    run("python", *launcher, "--module", "xscale.train", "--ds_config", "zero2_cpu.json", "--out", "run", *sets)
    assert [entry["step"] for entry in launch.metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]
    evaluate = "xscale eval --model hf --task retrieval --data data/demo/heldout --limit 20 --out o.json"
    for line in ("xscale-export run hf --pooling mean", evaluate, "xscale report run --out r.html"):
        run(*line.split())  # these commands end their process, so that they cannot share one
    assert "5 of 5 steps" in (tmp_path / "r.html").read_text(encoding="utf-8")
