"""The rules of slurm/*.sbatch, with srun and scontrol that only write down how they were called."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch import ROOT

SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))


def run(tmp_path: Path, script: str, srun: str, *more: str, **environment: str) -> tuple[int, list[str], list[str]]:
    """Exit code, srun's words, and the lines of scontrol's calls, which knows a job's comment. srun: what it does."""
    words = {name: tmp_path / f"{name}.words" for name in ("srun", "scontrol")}
    comment = f'sed -n "s/.*comment=/   Comment=/p" {words["scontrol"]} | tail -n 1'
    bodies = {
        "srun": f'printf "%s\\n" "$@" > {words["srun"]}\n{srun}',
        "sleep": "exec $(PATH=/usr/bin:/bin command -v sleep) 0.05",
        "scontrol": f'[ "$1" = show ] && {comment} || echo "$@" >> {words["scontrol"]}',
    }
    for name, body in bodies.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "VENV": "none", "PATH": f"{tmp_path}:{os.environ['PATH']}"} | environment
    command = ["bash", f"slurm/{script}.sbatch", *more, "--recipe", "a b"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=20)
    return done.returncode, *(path.read_text().splitlines() if path.exists() else [] for path in words.values())


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
    assert called == (["requeue 7"] if requeued else [])


def test_a_requeued_job_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """Not from the --resume of its first start, from which it would begin again in each life, and whose later
    checkpoints it would withdraw. The code is null after a kill, and the step before the checkpoint was loaded."""
    words = [f"--out={tmp_path}", "--resume", str(tmp_path / "checkpoints" / "step_00000005")]
    for starts, code, step, resumed in [
        *(("0", 75, 5, False), ("1", 75, 5, True), ("1", 4, None, False), ("1", 4, 5, True)),
        *(("1", None, 5, True), ("1", None, None, False), ("1", 3, 5, False)),
    ]:
        shutil.rmtree(tmp_path / "logs", ignore_errors=True)
        status = {"status": "stopped", "code": code, "why": "", "step": step, "rank": 0}
        (tmp_path / "status.json").write_text(json.dumps(status, indent=2))
        _, called, _ = run(tmp_path, "pretrain", "exit 0", *words, SLURM_RESTART_COUNT=starts)
        assert called[called.index("xscale/train.py") + 1 :] == [
            *words, "--recipe", "a b", *(["--resume", "auto"] if resumed else []),
        ]  # fmt: skip


def test_a_requeued_job_remembers_that_it_has_begun(tmp_path: Path) -> None:
    """Its second start trained; its third one failed before it had loaded the checkpoint."""
    words = [f"--out={tmp_path}", "--resume", str(tmp_path / "checkpoints" / "step_00000005")]
    for starts, step in (("1", 5), ("2", None)):
        status = {"status": "failed", "code": 4, "why": "", "step": step, "rank": 0}
        (tmp_path / "status.json").write_text(json.dumps(status, indent=2))
        _, called, _ = run(tmp_path, "pretrain", "exit 0", *words, SLURM_RESTART_COUNT=starts)
        assert called[-2:] == ["--resume", "auto"]


@pytest.mark.parametrize(
    ("words", "out"),
    [(["--recipe", "d/my.yml"], "my"), (["--recipe=my.yaml"], "my"), (["--recipe", "xlm"], "xlm"), ([], "mixed")],
)
def test_the_default_of_out_is_that_of_the_run(tmp_path: Path, words: list[str], out: str) -> None:
    for path in (tmp_path / "xscale" / "train.py", tmp_path / "runs" / out / "status.json"):
        path.parent.mkdir(parents=True)
        path.write_text('{"code": 75, "step": 5}')
    (tmp_path / "srun").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    variables = {"SLURM_JOB_ID": "7", "VENV": "none", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "slurm" / "pretrain.sbatch"), *words]
    variables |= {"SLURM_RESTART_COUNT": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True, timeout=20)
    assert f"{' '.join(['train.py', *words])} --resume auto\n" in done.stdout


@pytest.mark.parametrize("code", [4, 5])
def test_what_the_machine_has_ended_is_tried_again(tmp_path: Path, code: int) -> None:
    """Three times in a row, and three times more once there is a new checkpoint; then the job ends with its code."""
    latest = tmp_path / "run" / "checkpoints" / "latest"
    tries = []
    for newest in ("", "", "step_00000005", *["step_00000010"] * 5):
        if newest:
            latest.parent.mkdir(parents=True, exist_ok=True)
            latest.write_text(newest)
        ended, _, called = run(tmp_path, "pretrain", f"exit {code}", f"--out={tmp_path / 'run'}")
        assert ended == code
        tries.append(called.count("requeue 7"))
    assert tries == [1, 2, 3, 4, 5, 6, 6, 6]
    assert called[-2:] == ["update jobid=7 comment=retry 3 step_00000010", "requeue 7"]


@pytest.mark.parametrize(("said", "code", "requeued"), [(2, 2, False), (3, 3, False), (1, 1, False), (4, 4, True)])
def test_what_one_rank_alone_has_ended_is_not_tried_again(tmp_path: Path, said: int, code: int, requeued: bool) -> None:
    """srun has the code of those that lost it; status.json has its own, if it is of this start."""
    (tmp_path / "run").mkdir()
    status = tmp_path / "run" / "status.json"
    (tmp_path / "new").write_text(json.dumps({"status": "failed", "code": said, "why": "x"}, indent=2))
    out = f"--out={tmp_path / 'run'}"
    ended, _, called = run(tmp_path, "pretrain", f"cp {tmp_path / 'new'} {status}; exit 4", out)
    assert (ended, "requeue 7" in called) == (code, requeued)
    (tmp_path / "scontrol.words").unlink(missing_ok=True)
    ended, _, called = run(tmp_path, "pretrain", "exit 4", out)
    assert ended == 4 and "requeue 7" in called, "it is of an earlier start"


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
    assert code == 75 and called == ["requeue 7"]
    assert "\nMASTER_ADDR=" in (tmp_path / "srun.env").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_short_and_of_the_checkout(tmp_path: Path, script: Path) -> None:
    assert len(script.read_text().splitlines()) <= 60
    done = subprocess.run(["bash", str(script), "x"], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert done.returncode and (script.stem == "container" or "submit from xscale's checkout" in done.stderr)


@pytest.mark.parametrize("tool", ["prepare", "data_tools.prepare"])
def test_prepare_is_one_process(tmp_path: Path, tool: str) -> None:
    """srun would start it once for each task, and all would write the same folder."""
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\nexit 2\n')
    (tmp_path / "python").chmod(0o755)
    variables = {"VENV": "none", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "slurm/prepare.sbatch", tool, "a b.yaml", "--out", "corpus"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=20)
    expected = ["-m", "data_tools.prepare", "a b.yaml", "--out", "corpus"]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (2, expected, "")


def test_an_evaluation_of_a_checkpoint_removes_only_its_own_export(tmp_path: Path) -> None:
    """Two jobs may have the same OUT.json."""
    (tmp_path / "python").write_text('#!/bin/bash\n[ "$2" != xscale.export ] || mkdir "$4"\n')
    (tmp_path / "python").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", "slurm/evaluate_checkpoint.sh", "runs/a", str(tmp_path / "a b.json"), "--task", "retrieval"]
    model = tmp_path / "a b.model"
    for is_there in (False, True):
        if is_there:
            model.mkdir()
        done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=20)
        assert (done.returncode != 0, model.exists()) == (is_there, is_there), done.stderr


def test_an_evaluation_gets_the_flags(tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\nexit 2\n')
    (tmp_path / "python").chmod(0o755)
    variables = {"VENV": "none", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["--model", "m", "--task", "retrieval", "--texts", "a b", "--out", "scores.json"]
    command = ["bash", "slurm/evaluate.sbatch", *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=20)
    expected = ["-m", "xscale.eval.run", *words]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (2, expected, "")
