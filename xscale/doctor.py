"""Reports what a machine and a job provide for a run, and what would keep the run from starting:

    python -m xscale.doctor [--recipe xlm] [--data shards] [--out runs/xlm] [--set key.sub=value ...]
    srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 python -m xscale.doctor    # also the network between ranks

Exit codes: 0 a run could start, 2 it could not: lines with "error:" say why, and what to do.
"""

import argparse
import fcntl
import logging
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from xscale import files, ranks
from xscale.dry_run import data_lines, disk_warnings
from xscale.errors import UserError, run_command
from xscale.plugins import load_plugins
from xscale.ranks import HostGroup, Process
from xscale.run import folder
from xscale.run.start import DEMO, add_run_arguments
from xscale.run_spec import RunSpec, resolve_run
from xscale.step import cost
from xscale.step.ds_config import SHIPPED, Hardware, load_ds_config
from xscale.step.engine import check_module
from xscale.step.module import StepModule

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "triton", "mpi4py")
SECONDS = 60.0
"""The time limit of each check that may hang, such as those of a file system or a network. It ends with a UserError."""
PROBE_BYTES = 64 << 20
"""The size of the file that is written to --out, and of the tensors that are sent between ranks."""
OPEN_FILES, SHM_BYTES = 1 << 12, 1 << 30
"""A limit of open files below OPEN_FILES, or with GPUs a /dev/shm below SHM_BYTES, gives a warning."""
LEAD_SECONDS = 30
"""If there are fewer seconds between SLURM's signal and the end of a job, the report warns."""
USER_SIGNAL = "preempt_send_user_signal"

Lines = Iterator[str]
"""Lines of the report. "error:" begins those that keep a run from starting, "warning:" others."""


def call_within_limit(check: Callable[[], Any]) -> Any:
    try:
        return ThreadPoolExecutor(1).submit(check).result(SECONDS)
    except TimeoutError:
        raise UserError(f"no answer within {SECONDS:.0f} seconds") from None


# The machine


def machine_lines(hardware: Hardware) -> Lines:
    packages = [f"python {platform.python_version()}"]
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages.append(f"{name} {version(name)}")
    yield ", ".join(packages)
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        yield "error: xscale runs on Python 3.11 and 3.12; make its environment with one of these"
    memory = psutil.virtual_memory()
    yield (
        f"host {platform.node()}: {len(os.sched_getaffinity(0))} cores for this process, {memory.total / 1e9:,.0f} GB "
        f"of memory, {memory.available / 1e9:,.0f} free; OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'unset')}"
    )
    native = ", ".join([*(name for name in ("fp16", "bf16") if getattr(hardware, name)), "fp32"])
    yield f"device: {hardware.device}; native precisions: {native}"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield f"GPU {number}: {gpu.name}, {gpu.total_memory / 1e9:,.0f} GB"
    if hardware.device != "cuda" and shutil.which("nvidia-smi"):
        yield (
            f"error: this host has a driver (nvidia-smi), but torch finds no GPU. torch's CUDA version is "
            f"{torch.version.cuda}, CUDA_VISIBLE_DEVICES {os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')!r}; install "
            f"torch with CUDA, or ask for GPUs (--gpus-per-node)"
        )
    files_open, shm = resource.getrlimit(resource.RLIMIT_NOFILE)[1], shutil.disk_usage("/dev/shm").total
    yield f"at most {files_open:,} open files; /dev/shm has {shm / 1e9:,.2f} GB"
    if files_open != resource.RLIM_INFINITY and files_open < OPEN_FILES:
        yield f"warning: with {files_open:,} open files shards are opened again and again: ulimit -Hn {OPEN_FILES}"
    if hardware.device == "cuda" and shm < SHM_BYTES:
        yield "warning: NCCL needs /dev/shm between ranks of a host; give the container more: --shm-size=8g"


def file_system_lines(out: Path) -> Lines:
    """Yield lines about the file system of --out, or of the nearest folder above --out that exists."""
    place = files.nearest_existing(out)
    if not place.is_dir():
        yield f"error: --out {out}: {place} is a file or a broken link; choose another"
        return
    try:
        speed, free, locks = call_within_limit(lambda: probe_file_system(place))
    except OSError as error:
        yield f"error: --out {out}: {place} cannot be written ({error.strerror}); choose another place"
        return
    mounts = [m for m in psutil.disk_partitions(all=True) if place.is_relative_to(m.mountpoint)]
    kind = max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else "unknown"
    yield f"{place} ({kind}): one process writes {speed / 1e6:,.0f} MB/s to disk, {free / 1e9:,.1f} GB free"
    if not locks:
        yield f"warning: {place} has no locks: nothing prevents a second run with the same --out"


def probe_file_system(place: Path) -> tuple[float, int, bool]:
    """Return the bytes per second that are written to disk, the free bytes, and whether files can be locked. Raises
    OSError if files cannot be written, or if a rename does not replace an existing file."""
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as made:
        speed = files.measure_write_speed(Path(made), PROBE_BYTES)
        old, new = Path(made) / "old", Path(made) / "new"
        for path in (old, new):
            path.write_text(path.name)
        new.replace(old)
        if old.read_text() != "new" or new.exists():
            raise OSError(0, "a rename does not replace an existing file; checkpoints need that")
        locks = True
        with old.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                locks = False
    return speed, shutil.disk_usage(place).free, locks


# The job


def rank_layout(process: Process) -> Lines:
    """Yield lines about the number of ranks, their address and this rank, with an error if ranks would share a GPU."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    where = f"{process.local_rank} of {process.local_world} on this host"
    yield f"rank {process.rank} of {process.world}, {where}; the ranks meet at {address}"
    if torch.cuda.is_available() and process.local_world > torch.cuda.device_count():
        yield (
            f"error: {process.local_world} ranks on a host of {torch.cuda.device_count()} GPU(s) would share them; "
            f"start one a GPU (--ntasks-per-node, --num_gpus, --nproc_per_node)"
        )


def network_lines(process: Process) -> Lines:
    """Yield lines about the speed of collectives. All ranks must call this together; rank 0's lines are printed."""
    if process.world == 1:
        yield "one process: no collectives to measure"
        return
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    ranks.TIMEOUT = timedelta(seconds=SECONDS)
    device = call_within_limit(lambda: ranks.join_process_group(process))
    host_group = HostGroup()
    packages = f"{version('torch')} {version('deepspeed')} {platform.python_version()}"
    hosts = dict(call_within_limit(lambda: host_group.gather((platform.node(), packages))))
    yield f"{process.world} ranks on {len(hosts)} host(s), {dist.get_backend()}"
    if len(set(hosts.values())) > 1:
        yield f"error: hosts have different versions of torch, deepspeed or Python: {hosts}; use one environment"
    seconds = call_within_limit(lambda: seconds_of(lambda: host_group.sum([0]), 10))
    yield f"a control message of all ranks: {1e3 * seconds:.2f} ms"
    full = torch.zeros(PROBE_BYTES // 4, device=device)
    part = full[: len(full) // process.world]
    whole = torch.zeros(len(part) * process.world, device=device)
    for name, collective in {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
    }.items():
        seconds = call_within_limit(lambda collective=collective: seconds_of(collective, 3))  # type: ignore[misc]
        rate = cost.bytes_sent(name, whole.nbytes, process.world) / seconds
        yield f"{name} of {PROBE_BYTES >> 20} MB: {1e3 * seconds:,.1f} ms, {rate / 1e9:,.2f} GB/s out of each rank"


def seconds_of(call: Callable[[], Any], times: int) -> float:
    """Return the average seconds of a call, after a first call that is not measured."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    call()
    wait()
    started = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return (time.perf_counter() - started) / times


def slurm_lines() -> Lines:
    """Yield lines about SLURM, with warnings if SIGUSR2 comes too late for a run to save and be requeued."""
    job = os.environ.get("SLURM_JOB_ID")
    if not shutil.which("scontrol"):
        inside = f"in job {job}, but without scontrol, as in a container: MASTER_ADDR must be set"
        yield inside if job else "none: no scontrol here"
        return
    try:
        config = dict(re.findall(r"^(\w+) *= *(.*?) *$", scontrol("config"), re.MULTILINE))
        partitions = [slurm_fields(line) for line in scontrol("partition", "-o").splitlines()]
        own = slurm_fields(scontrol("job", job, "-o")) if job else {}
    except (OSError, subprocess.SubprocessError):
        yield "warning: scontrol does not answer; run the doctor on a host of the cluster"
        return
    if own.get("Requeue") == "0":
        yield "warning: this job cannot be requeued, so a signal would end it for good: use sbatch --requeue"
    if (wait := first_number(config.get("KillWait"))) < LEAD_SECONDS:
        yield f"warning: KillWait {wait} s is too short for a save; stop runs by `scancel --full --signal=USR2 JOB`"
    for partition in partitions:
        if not own or partition.get("PartitionName") == own.get("Partition"):
            yield from preemption_lines(config, partition)


def preemption_lines(config: dict[str, str], partition: dict[str, str]) -> Lines:
    name, grace = f"partition {partition.get('PartitionName')}", first_number(partition.get("GraceTime"))
    mode = partition.get("PreemptMode") or config.get("PreemptMode", "OFF")
    if config.get("PreemptType", "preempt/none") == "preempt/none" or mode.split(",")[-1] == "OFF":
        yield f"{name}: jobs are not preempted"
        return
    yield f"{name}: jobs are preempted, PreemptMode={mode}, GraceTime={grace}"
    if "SUSPEND" in mode or "GANG" in mode:
        yield (
            f"warning: {name} suspends processes, and train.stall_limit counts that time: set it to null, or to more "
            f"minutes than a suspension takes"
        )
    elif USER_SIGNAL not in config.get("SlurmctldParameters", ""):
        yield (
            f"warning: {name} preempts without the SIGUSR2 of --signal, since SlurmctldParameters has no {USER_SIGNAL};"
            f" ask for it, or let runs stop in time by themselves: train.time_limit"
        )
    elif grace < LEAD_SECONDS:
        yield (
            f"warning: {name} gives {grace} s between a preemption and the end: steps since the last checkpoint are "
            f"lost. Ask for a GraceTime of a step and two saves, or save often: checkpoint.every"
        )


def scontrol(*words: str) -> str:
    return subprocess.run(["scontrol", "show", *words], capture_output=True, text=True, check=True, timeout=5).stdout


def slurm_fields(line: str) -> dict[str, str]:
    """Return {NAME: VALUE} of the words NAME=VALUE in a line of `scontrol show ... -o`."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def first_number(text: str | None) -> int:
    return int(re.findall(r"\d+", f"{text} 0")[0])


# The run


def ds_config_lines(run_spec: RunSpec, module: StepModule, world: int, hardware: Hardware) -> Lines:
    """Yield lines that list the shipped ds_configs that can train this recipe here, and say why the others cannot."""
    good: list[str] = []
    refused: dict[str, list[str]] = {}
    for path in sorted(SHIPPED.glob("*.json")):
        try:
            found = load_ds_config(path, run_spec.recipe, world, hardware)
            check_module(module, found.stage)
            if cost.offloads(found.resolved) and not shutil.which("c++"):
                raise UserError("offload compiles DeepSpeed's Adam: install a C++ compiler (c++)")
            good.append(path.stem + (f" (in {found.precision})" if found.notes else ""))
        except UserError as error:
            refused.setdefault(str(error).splitlines()[-1].strip(), []).append(path.stem)
    yield f"run here: {', '.join(good) or 'none'}"
    yield from (f"not {', '.join(names)}: {why}" for why, names in refused.items())
    if not good:
        yield "error: no shipped ds_config runs with this recipe here; the lines above say why"


def checkpoint_room(run_spec: RunSpec, module: StepModule, out: Path) -> Lines:
    size, _ = cost.checkpoint_bytes(module, {"zero_optimization": {"stage": 2}}, "bf16", 1)
    keep = run_spec.recipe.checkpoint.keep
    yield f"{keep} checkpoints of {size / 1e9:,.2f} GB stay, beside one that is being written"
    yield from disk_warnings(size, keep, out)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser)
    args = parser.parse_args(argv)
    args.out = Path(args.out or Path("runs") / Path(args.recipe).stem)
    args.data = args.data or ([DEMO] if DEMO.exists() else None)
    return args


def start_checks(args: argparse.Namespace, found: list[tuple[RunSpec, StepModule]]) -> Lines:
    """Make the checks of a start that need the recipe and the data, and yield their lines. The run spec and its module
    are appended to `found`."""
    if args.data is None:
        yield "none: give --data to check shards, ds_configs and the disk space for checkpoints"
        return
    load_plugins(args.plugin)
    run_spec = call_within_limit(lambda: resolve_run(args.recipe, args.set, args.data))
    folder.check_out(args.out, run_spec.identity(), "auto")
    yield from data_lines(run_spec)
    found.append((run_spec, run_spec.module()))


def titled_checks(args: argparse.Namespace, process: Process) -> Iterator[tuple[str, Lines]]:
    """Yield (title, lines) of each check, in order. All ranks make the first check, and rank 0 also the others."""
    yield "network", network_lines(process)
    if not process.is_main:
        return
    hardware, found = Hardware.here(), list[tuple[RunSpec, StepModule]]()
    yield "machine", machine_lines(hardware)
    yield "launcher", rank_layout(process)
    yield "out", file_system_lines(args.out)
    yield "slurm", slurm_lines()
    yield "data", start_checks(args, found)
    for run_spec, module in found:
        yield "ds_configs", ds_config_lines(run_spec, module, process.world, hardware)
        yield "room", checkpoint_room(run_spec, module, args.out)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    problems = 0
    try:
        ranks.check_launch()
        process = ranks.read_launcher()
    except UserError as error:
        print(f"launcher    error: {error}")
        return 2
    for title, check in titled_checks(args, process):
        lines: list[str] = []
        try:
            for line in check:
                lines.append(line)
        except UserError as error:
            lines += f"error: {error}".splitlines()
        except (OSError, RuntimeError, dist.DistError) as error:
            lines.append(f"error: {str(error).splitlines()[0]}")
        problems += any(line.startswith("error:") for line in lines)
        if process.is_main:
            print(*(f"{'' if number else title:<11} {line}" for number, line in enumerate(lines)), sep="\n", flush=True)
    if process.is_main:
        print(
            f"{'':<11} {problems} error{'s' * (problems > 1)}: a run could not start"
            if problems
            else f"{'':<11} a run could start"
        )
    return 2 if problems else 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # warnings of libraries are not part of the report
    run_command(main)  # ends even if a check hangs in its thread
