"""What a SLURM site does to a run that it preempts, cancels or requeues, as far as it tells: where SIGUSR2 would not
arrive, or too late."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

ANSWER_SECONDS = 5
LEAD_SECONDS = 30
"""Less time than this between a signal and the end is told."""
OF_SIGNAL = "preempt_send_user_signal"


def advice() -> Iterator[str]:
    """Lines for a user; those that begin with "warning:" ask for something."""
    job = os.environ.get("SLURM_JOB_ID")
    if not shutil.which("scontrol"):
        within = f"in job {job}, but without scontrol: as in a container, where MASTER_ADDR must be set"
        yield within if job else "none: no scontrol here"
        return
    try:
        config = settings(_scontrol("config"))
        partitions = [fields(line) for line in _scontrol("partition", "-o").splitlines()]
        own = fields(_scontrol("job", job, "-o")) if job else {}
    except (OSError, subprocess.SubprocessError):
        yield "warning: scontrol does not answer; outside of its cluster nothing can be said of it"
        return
    if own:
        yield (
            f"job {job} in partition {own.get('Partition')}: {own.get('NumNodes')} node(s), {own.get('NumTasks')} "
            f"tasks, until {own.get('EndTime')}, restarts {own.get('Restarts')}"
        )
        if own.get("Requeue") == "0":
            yield "warning: this job may not be requeued, and would end for good at a signal: sbatch --requeue"
        partitions = [found for found in partitions if found.get("PartitionName") == own.get("Partition")]
    yield from of_ends(config)
    for partition in partitions:
        yield from of_preemption(config, partition)


def of_ends(config: dict[str, str]) -> Iterator[str]:
    """How long a run has that is cancelled, or that comes to its time limit without --signal."""
    wait = _seconds(config.get("KillWait", ""))
    yield f"KillWait {wait} s from SIGTERM to SIGKILL, for scancel and a time limit without --signal"
    if wait < LEAD_SECONDS:
        yield f"warning: KillWait {wait} s is short for a save; stop a run by `scancel --full --signal=USR2 JOB`"


def of_preemption(config: dict[str, str], partition: dict[str, str]) -> Iterator[str]:
    name = f"partition {partition.get('PartitionName')}"
    mode = partition.get("PreemptMode") or config.get("PreemptMode", "OFF")
    if config.get("PreemptType", "preempt/none") == "preempt/none" or mode.split(",")[-1] == "OFF":
        yield f"{name}: jobs are not preempted"
        return
    grace = _seconds(partition.get("GraceTime", "0"))
    yield f"{name}: jobs are preempted, PreemptMode={mode}, GraceTime={grace}"
    if "SUSPEND" in mode or "GANG" in mode:
        yield (
            f"warning: {name} stops processes where they are, and train.stall_limit counts that time: set it to null, "
            f"or to more minutes than a suspension takes"
        )
        return
    if OF_SIGNAL not in config.get("SlurmctldParameters", ""):
        yield (
            f"warning: {name} preempts without the SIGUSR2 of --signal, since SlurmctldParameters has no {OF_SIGNAL}; "
            f"ask for it, or let runs stop in time by themselves: train.time_limit"
        )
    if grace < LEAD_SECONDS:
        yield (
            f"warning: {name} gives {grace} s between a preemption and the end: steps since the last checkpoint are "
            f"lost. Ask for a GraceTime of a step and two saves, or save often: checkpoint.every"
        )


def settings(text: str) -> dict[str, str]:
    """Of `scontrol show config`: lines "KillWait   = 30 sec"."""
    return {name: value for name, value in re.findall(r"^(\w+) *= *(.*?) *$", text, re.MULTILINE)}


def fields(line: str) -> dict[str, str]:
    """Of `scontrol show ... -o`: words "GraceTime=0"."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _seconds(value: str) -> int:
    found = re.match(r"\d+", value)
    return int(found.group()) if found else 0


def _scontrol(*words: str) -> str:
    command = ["scontrol", "show", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWER_SECONDS).stdout
