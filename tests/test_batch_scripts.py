"""The rules of slurm/*.sbatch, with srun and scontrol that only write down how they were called."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch import ROOT

SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))


def run(tmp_path: Path, script: str, srun: str, **environment: str) -> tuple[int, list[str], list[str]]:
    """Exit code, srun's words, scontrol's. srun: what it does then."""
    for name, body in (("srun", srun), ("scontrol", "")):
        (tmp_path / name).write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/{name}.words\n{body}\n')
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "VENV": "none", "PATH": f"{tmp_path}:{os.environ['PATH']}"} | environment
    command = ["bash", f"slurm/{script}.sbatch", "--recipe", "a b"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=20)
    words = [tmp_path / f"{name}.words" for name in ("srun", "scontrol")]
    return done.returncode, *(path.read_text().splitlines() if path.exists() else [] for path in words)


@pytest.mark.parametrize(
    ("srun", "requeued"),
    [
        ("exit 0", False),
        ("exit 1", False),
        ("exit 2", False),
        ("exit 75", True),
        ("exit 137", False),  # out of memory, or kill -9
        ("exit 139", False),
        ("exit 140", True),  # SIGUSR2 before Python was up
        ("kill -USR2 $PPID; exit 75", True),
        ("kill -USR2 $PPID; exit 143", True),  # some ranks had a handler, others were ended
        ("kill -USR2 $PPID; exit 0", False),  # it was done
        ("kill -USR2 $PPID; exit 1", False),
    ],
)
def test_what_requeues_a_job(tmp_path: Path, srun: str, requeued: bool) -> None:
    _, words, called = run(tmp_path, "pretrain", srun)
    assert words[-4:] == ["python", "xscale/train.py", "--recipe", "a b"]
    assert called == (["requeue", "7"] if requeued else [])


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("x.sqsh", ["--container-image=x.sqsh", "--container-mounts=/a:/a,/b:/b", f"--container-workdir={ROOT}"]),
        ("x.sif", ["apptainer", "exec", "--nv", "--bind", "/a,/b", "--pwd", str(ROOT), "x.sif"]),
    ],
)
def test_container(tmp_path: Path, image: str, expected: list[str]) -> None:
    code, words, called = run(tmp_path, "container", "env > $0.env; exit 75", IMAGE=image, MOUNTS="/a,/b")
    assert words[3:] == [*expected, "python", "xscale/train.py", "--recipe", "a b"]
    assert code == 75 and called == ["requeue", "7"]
    assert "\nMASTER_ADDR=" in (tmp_path / "srun.env").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_short_and_of_the_checkout(tmp_path: Path, script: Path) -> None:
    assert len(script.read_text().splitlines()) < 60
    done = subprocess.run(["bash", str(script), "x"], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert done.returncode and (script.stem == "container" or "submit from xscale's checkout" in done.stderr)
