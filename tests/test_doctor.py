"""What xscale.doctor finds on this machine, and in what SLURM says of others."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from xscale import doctor
from xscale.run_spec import resolve_run

CONFIG = """\
Configuration data as of 2026-01-31T12:00:00
KillWait                = {wait} sec
PreemptMode             = {mode}
PreemptType             = {kind}
SlurmctldParameters     = {more}
"""
PARTITIONS = """\
PartitionName=cpu AllocNodes=ALL Default=YES GraceTime=0 MaxTime=UNLIMITED PreemptMode=OFF
PartitionName=gpu AllocNodes=ALL Default=NO GraceTime={grace} MaxTime=1-00:00:00 PreemptMode={mode}
"""
JOB = "JobId=7 JobName=xscale Partition=gpu Requeue={requeue} Restarts=1 NumNodes=2 NumTasks=16 EndTime=2026-02-01"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """site(...): what is said of a SLURM with these settings, to a job in partition gpu, or outside of any."""

    def say(
        wait: int = 30,
        mode: str = "REQUEUE",
        kind: str = "preempt/qos",
        more: str = "enable_configless,preempt_send_user_signal",
        grace: int = 600,
        requeue: int = 1,
        job: bool = True,
    ) -> list[str]:
        answers = {
            "config": CONFIG.format(wait=wait, mode=mode, kind=kind, more=more),
            "partition": PARTITIONS.format(grace=grace, mode=mode),
            "job": JOB.format(requeue=requeue),
        }
        for name, text in answers.items():
            (tmp_path / name).write_text(text)
        program = tmp_path / "scontrol"
        program.write_text(f'#!/bin/bash\ncat {tmp_path}/"$2"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        if job:
            monkeypatch.setenv("SLURM_JOB_ID", "7")
        return list(doctor.slurm_lines())

    return say


def warnings(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("warning:")]


def test_a_site_that_signals_in_time(site: Callable[..., list[str]]) -> None:
    lines = site()
    assert not warnings(lines) and "partition gpu: jobs are preempted, PreemptMode=REQUEUE, GraceTime=600" in lines
    assert not any("partition cpu" in line for line in lines), "the job is in partition gpu"
    assert not warnings(site(kind="preempt/none", grace=0, more="(null)"))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"more": "(null)"}, "SlurmctldParameters has no preempt_send_user_signal"),
        ({"grace": 0}, "gpu gives 0 s between a preemption and the end"),
        ({"mode": "SUSPEND,GANG"}, "train.stall_limit counts that time"),
        ({"wait": 5}, "KillWait 5 s is too short"),
        ({"requeue": 0}, "sbatch --requeue"),
    ],
)
def test_where_the_signal_does_not_arrive(site: Callable[..., list[str]], settings: dict, named: str) -> None:
    (line,) = warnings(site(**settings))
    assert named in line


def test_outside_of_a_job_all_partitions_are_told(site: Callable[..., list[str]]) -> None:
    lines = site(job=False, grace=0)
    assert "partition cpu: jobs are not preempted" in lines and "gpu gives 0 s" in warnings(lines)[0]


def test_no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert list(doctor.slurm_lines()) == ["none: no scontrol here"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert "MASTER_ADDR" in next(doctor.slurm_lines())
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/bash\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert "scontrol does not answer" in next(doctor.slurm_lines())


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a launcher, far from any SLURM."""
    monkeypatch.setattr(doctor, "slurm_lines", lambda: iter(["none"]))
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD"))}
    monkeypatch.setattr(os, "environ", variables | {"MASTER_PORT": "29500"})


def test_one_screen(demo: Path, tmp_path: Path, alone: None, capsys: pytest.CaptureFixture) -> None:
    code = doctor.main(["--recipe", "ppa", "--data", str(demo), "--out", str(tmp_path / "runs" / "ppa")])
    told = capsys.readouterr().out
    assert code == 0 and "error:" not in told and told.endswith("a run could start\n"), told
    titles = [line.split()[0] for line in told.splitlines() if line[0] not in " ["]  # without DeepSpeed's own lines
    assert titles == ["network", "machine", "launcher", "out", "slurm", "data", "ds_configs", "room"]
    assert len(told.splitlines()) < 50 and not (tmp_path / "runs").exists() and not list(tmp_path.glob(".doctor*"))
    assert "rank 0 of 1, 0 of 1 on this host" in told and "MB/s to disk" in told and "en-xx (pair): 600 records" in told
    runs = next(line for line in told.splitlines() if "run here:" in line)
    assert "zero2_cpu" in runs and "zero3" not in runs and "zero3_fp16_nodes: streams.ppa has a momentum" in told


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--recipe", "nothing"], "recipe 'nothing' not found"),
        (["--recipe", "tlm", "--set", "train.lrr=1"], "train.lrr: unknown key"),
        (["--recipe", "tlm", "--out", "{file}/run"], "file is a file or a broken link"),
        (["--recipe", "tlm", "--data", "{file}"], "error:"),
        (["--recipe", "tlm", "--out", "{nowhere}/run"], "nowhere is a file or a broken link"),
    ],
)
def test_what_keeps_a_run_from_starting(
    demo: Path, tmp_path: Path, alone: None, capsys: pytest.CaptureFixture, words: list[str], named: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    words = [word.format(file=tmp_path / "file", nowhere=tmp_path / "nowhere") for word in words]
    data = [] if "--data" in words else ["--data", str(demo)]
    assert doctor.main([*data, "--out", str(tmp_path / "out"), *words]) == 2
    told = capsys.readouterr().out
    assert named in told and "1 error: a run could not start" in told


def test_a_file_system_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.2)
    monkeypatch.setattr(doctor, "probe_file_system", lambda place: time.sleep(5))
    with pytest.raises(ValueError, match="no answer within"):
        list(doctor.file_system_lines(tmp_path))


def test_a_file_system_without_atomic_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda old, new: None)
    with pytest.raises(OSError, match="a rename does not replace"):
        doctor.probe_file_system(tmp_path)


def test_one_process_where_several_were_meant(alone: None, capsys: pytest.CaptureFixture) -> None:
    os.environ |= {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
    assert doctor.main([]) == 2
    assert "error: this SLURM job has 2 tasks, but this process was started without srun" in capsys.readouterr().out


def test_a_disk_that_has_no_room_for_checkpoints(
    demo: Path, tmp_path: Path, alone: None, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has none for a single one ends a run at its first save; one that lacks some, later."""
    words = ["--recipe", "tlm", "--data", str(demo), "--out", str(tmp_path)]
    size = 14 * sum(p.numel() for p in resolve_run("tlm", [], [demo]).module().parameters())
    for free, kind, code in ((2.5 * size, "warning", 0), (0.5 * size, "error", 2)):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(total=1e12, free=free))
        assert doctor.main(words) == code
        told = capsys.readouterr().out
        assert f"2 checkpoints of {size / 1e9:,.2f} GB stay" in told and f"{kind}: --out {tmp_path} has" in told
