"""What a machine and a job offer a run, on one screen, and what would keep it from starting:

    python -m xscale.doctor [--recipe xlm] [--data shards] [--out runs/xlm] [--set key.sub=value ...]
    srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 python -m xscale.doctor    # also the network between ranks

Exit codes: 0 a run could start, 2 it could not: lines with "error:" say why, and what to do.
"""

import argparse
import fcntl
import logging
import math
import os
import platform
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from xscale import files, ranks
from xscale.checkpoint.store import complete_steps
from xscale.errors import UserError, run_command
from xscale.plugins import load_plugins
from xscale.ranks import HostGroup, Process
from xscale.run import folder
from xscale.run.run_spec import RunSpec, resolve_run
from xscale.run.slurm import advice
from xscale.step import cost
from xscale.step.ds_config import SHIPPED, Hardware, load_ds_config
from xscale.step.engine import check_module
from xscale.step.module import StepModule

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "triton", "mpi4py")
SECONDS = 20.0
"""That any look may take: a file system or a network that hangs is reported, not waited for."""
DEMO = Path("data/demo")
PROBE_BYTES = 64 << 20
"""Written to --out's file system, and sent between ranks."""
WORLDS = (1, 8, 64, 512)
"""Numbers of ranks in the table of memory."""
OPEN_FILES, SHM_BYTES = 1 << 12, 1 << 30
"""Fewer open files than this, or a smaller /dev/shm on a host with GPUs, is told."""

Lines = Iterator[str]
"""Those that begin with "error:" keep a run from starting, those with "warning:" do not."""


def within(look: Callable[[], Any]) -> Any:
    """What it returns, or raises; UserError where it takes too long."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((look(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if not found:
        raise UserError(f"no answer within {SECONDS:.0f} seconds")
    value, error = found[0]
    if error:
        raise error
    return value


# The machine


def devices(hardware: Hardware) -> Lines:
    native = [name for name in ("fp16", "bf16") if getattr(hardware, name)]
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0))
    yield (
        f"host {platform.node()}: {cores} cores for this process, {memory.total / 1e9:,.0f} GB of memory, "
        f"{memory.available / 1e9:,.0f} free; OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'unset')}"
    )
    if hardware.device == "cuda":
        for number in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(number)
            yield f"GPU {number}: {of.name}, {of.total_memory / 1e9:,.0f} GB, compute capability {of.major}.{of.minor}"
    else:
        yield f"no GPU: {hardware.device}"
        if shutil.which("nvidia-smi"):
            yield (
                "error: there is a driver (nvidia-smi), but torch finds no GPU: its build is "
                f"{torch.version.cuda or 'without CUDA'}, CUDA_VISIBLE_DEVICES "
                f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')!r}; install torch with CUDA, or ask for GPUs "
                f"(--gpus-per-node)"
            )
    yield f"native precisions: {', '.join([*native, 'fp32'])}"


def versions() -> Lines:
    found = []
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    cuda = f", CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if _cuda() else ""
    yield f"python {platform.python_version()}, {', '.join(found)}{cuda}"
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        yield "error: xscale runs on Python 3.11 and 3.12; make its environment with one of these"


def _cuda() -> bool:
    return torch.cuda.is_available()


def limits() -> Lines:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / 1e6:,.0f} MB"
    group = _of_cgroup()
    shm = shutil.disk_usage("/dev/shm")
    yield (
        f"open files {soft:,}, which a run raises to {hard:,}, locked memory {told}, /dev/shm {shm.total / 1e9:,.2f} GB"
        + (f", memory of this job {group / 1e9:,.1f} GB" if group else "")
    )
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        yield f"warning: with {hard:,} open files shards are opened again and again; raise it: ulimit -Hn {OPEN_FILES}"
    if _cuda() and shm.total < SHM_BYTES:
        yield "warning: NCCL needs /dev/shm between ranks of a host; give the container more: --shm-size=8g"


def _of_cgroup() -> int | None:
    """Bytes that this job may have, where a control group says so."""
    with suppress(OSError, ValueError, IndexError):
        path = Path("/proc/self/cgroup").read_text().splitlines()[0].rpartition(":")[2].lstrip("/")
        for of in (Path("/sys/fs/cgroup") / path / "memory.max", Path("/sys/fs/cgroup/memory.max")):
            if of.exists() and (text := of.read_text().strip()) != "max":
                return int(text)
    return None


def file_system(out: Path) -> Lines:
    """Of --out, or of the nearest folder above it that is there."""
    place = files.nearest_folder(out)
    if not place.is_dir():
        yield f"error: --out {out}: {place} is a file, or leads nowhere; choose another"
        return
    try:
        speed, free, locks = within(lambda: probe(place))
    except OSError as error:
        yield f"error: --out {out}: {place} cannot be written ({error.strerror}); choose another place"
        return
    mounts = [m for m in psutil.disk_partitions(all=True) if place.is_relative_to(m.mountpoint)]
    kind = max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else "unknown"
    yield (
        f"{place} ({kind}): one process writes {speed / 1e6:,.0f} MB/s to disk, {free / 1e9:,.1f} GB free; "
        f"a rename replaces what was there"
    )
    if not locks:
        yield f"warning: {place} has no locks: nothing keeps a second run out of the same --out"


def probe(place: Path) -> tuple[float, int, bool]:
    """Bytes a second that get to disk, bytes free, and whether files can be locked. Raises OSError, also where a rename
    does not take the place of what was there."""
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as made:
        speed = files.write_speed(Path(made), PROBE_BYTES)
        old, new = Path(made) / "old", Path(made) / "new"
        for path in (old, new):
            path.mkdir()
            (path / "file").write_text(path.name)
        (new / "file").replace(old / "file")
        new.rename(Path(made) / "moved")
        if (old / "file").read_text() != "new" or new.exists():
            raise OSError(0, "a rename does not replace what was there; checkpoints need that")
        locks = True
        with (old / "file").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                locks = False
    return speed, shutil.disk_usage(place).free, locks


# The job


def launcher(process: Process) -> Lines:
    names = [n for n in sorted(os.environ) if n.startswith(("SLURM_STEP", "OMPI_COMM_WORLD_", "PMI_"))]
    names += ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    yield (
        f"rank {process.rank} of {process.world}, {process.local_rank} of {process.local_world} on this host; "
        + " ".join(f"{name}={os.environ[name]}" for name in names if len(os.environ.get(name, "")) in range(1, 40))
    )
    if _cuda() and process.local_world > torch.cuda.device_count():
        yield (
            f"error: {process.local_world} ranks on a host of {torch.cuda.device_count()} GPU(s) would share them; "
            f"start one a GPU (--ntasks-per-node, --num_gpus, --nproc_per_node)"
        )


def network(process: Process) -> Lines:
    """All ranks call it together; rank 0's lines count."""
    if process.world == 1:
        yield "one process: no collectives to measure"
        return
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    ranks.TIMEOUT = timedelta(seconds=SECONDS)
    device = within(lambda: ranks.start(process))
    host_group = HostGroup()
    told = f"{version('torch')} {version('deepspeed')} {platform.python_version()}"
    hosts = within(lambda: host_group.gather((platform.node(), str(device), told)))
    yield f"{process.world} ranks on {len({host for host, *_ in hosts})} host(s), {dist.get_backend()}"
    different = sorted({(of, host) for host, _, of in hosts})
    if len({of for of, _ in different}) > 1:
        yield f"error: hosts have other versions of torch, deepspeed or Python: {different}; take one environment"
    seconds = within(lambda: timed(lambda: host_group.sum([0]), 10))
    yield f"a control message of all ranks: {1e3 * seconds:.2f} ms"
    full = torch.zeros(PROBE_BYTES // 4, device=device)
    part = full[: len(full) // process.world]
    whole = torch.zeros(len(part) * process.world, device=device)
    collectives = {
        "all_reduce": lambda: dist.all_reduce(full),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
    }
    for name, collective in collectives.items():
        seconds = within(lambda collective=collective: timed(collective, 3))  # type: ignore[misc]
        rate = cost.sent(name, whole.nbytes, process.world) / seconds
        yield f"{name} of {PROBE_BYTES >> 20} MB: {1e3 * seconds:,.1f} ms, {rate / 1e9:,.2f} GB/s out of each rank"


def timed(call: Callable[[], Any], times: int) -> float:
    """Seconds of one call, after one that does not count."""
    call()
    started = 0.0
    for number in range(times + 1):
        if _cuda():
            torch.cuda.synchronize()
        if number == 0:
            started = time.perf_counter()
        if number < times:
            call()
    return (time.perf_counter() - started) / times


# The run


def data(job: RunSpec) -> Lines:
    for source in job.sources:
        yield (
            f"{source.pair} ({source.kind}): {source.records:,} records in {len(source.shards):,} shards, "
            f"{source.bytes / 1e6:,.0f} MB, fingerprint {source.fingerprint[:12]}, {source.directory}"
        )
    name, mark = job.tokenizer.hf.name_or_path, job.tokenizer.fingerprint
    yield f"tokenizer: {job.tokenizer.vocab_size:,} ids, fingerprint {mark[:12]}, {name}"


def ds_configs(job: RunSpec, module: StepModule, world: int, hardware: Hardware) -> Lines:
    """Which of them this recipe can be trained with here."""
    good: list[str] = []
    not_here: dict[str, list[str]] = {}
    """By reason."""
    for path in sorted(SHIPPED.glob("*.json")):
        try:
            found = load_ds_config(path, job.recipe, world, hardware)
            check_module(module, found.stage)
        except UserError as error:
            not_here.setdefault(str(error).splitlines()[-1].strip(), []).append(path.stem)
            continue
        if cost.offloads(found.resolved) and not shutil.which("c++"):
            not_here.setdefault("offload compiles DeepSpeed's Adam: no C++ compiler (c++)", []).append(path.stem)
            continue
        good.append(path.stem + (f" (in {found.precision})" if found.notes else ""))
    yield f"run here: {', '.join(good) or 'none'}"
    yield from (f"not {', '.join(names)}: {why}" for why, names in not_here.items())
    if not good:
        yield "error: no shipped ds_config runs with this recipe here; the lines above say why"


def memory(job: RunSpec, module: StepModule, hardware: Hardware) -> Lines:
    precision = next((name for name in ("bf16", "fp16") if getattr(hardware, name)), "fp32")
    if hardware.device == "cpu":
        precision = "fp32"
    row = job.max_tokens(hardware.device)
    parameters = sum(p.numel() for p in module.parameters())
    yield f"GB of a rank, {parameters:,} parameters in {precision}, rows of {row:,} tokens; of 1, 8, 64, 512 ranks:"
    for stage in (0, 1, 2, 3):
        if stage == 0 and precision != "fp32":
            continue
        config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 2e8, "overlap_comm": True}}
        sizes = [
            cost.most(*cost.memory(module, job.recipe, config, precision, world, hardware.device, row)) / 1e9
            for world in WORLDS
        ]
        yield f"  ZeRO {stage}: " + "".join(f"{size:8.2f}" for size in sizes)


def room(job: RunSpec, module: StepModule, out: Path) -> Lines:
    """Of --out, for the checkpoints that stay and the one that is being written."""
    whole, _ = cost.checkpoint_bytes(module, {"zero_optimization": {"stage": 2}}, "bf16", 1)
    place, keep = files.nearest_folder(out), job.recipe.checkpoint.keep
    needed = max(keep + 1 - len(complete_steps(out / "checkpoints")), 1) * whole
    yield f"{keep} checkpoints of {whole / 1e9:,.2f} GB stay, beside one that is being written"
    free = shutil.disk_usage(place).free if place.is_dir() else math.inf
    if needed > free:
        yield (
            f"{'error' if whole > free else 'warning'}: --out {out} has {free / 1e9:,.2f} GB free, and "
            f"{needed / 1e9:,.2f} GB of checkpoints are to come; make room, or choose another place"
        )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mixed", help="name of a shipped recipe, or a YAML file (default: mixed)")
    parser.add_argument(
        "--data", type=Path, nargs="+", help="shard directories (default: the demo corpus, if it is there)"
    )
    parser.add_argument("--out", type=Path, help="the run's directory (default: runs/<recipe>)")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY.SUB=VALUE", help="recipe fields")
    parser.add_argument("--plugin", nargs="+", action="extend", default=[], metavar="MODULE", help="see xscale.plugins")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.out = args.out or Path("runs") / Path(args.recipe).stem
    args.data = args.data or ([DEMO] if DEMO.exists() else None)
    return args


def examine(args: argparse.Namespace, process: Process) -> Iterator[tuple[str, Callable[[], Lines]]]:
    """Titles and looks, in the order of the screen. All ranks take the first, rank 0 alone the others."""
    yield "network", lambda: network(process)
    if not process.is_main:
        return
    hardware = Hardware.here()
    yield "machine", lambda: devices(hardware)
    yield "versions", versions
    yield "launcher", lambda: launcher(process)
    yield "limits", limits
    yield "out", lambda: file_system(args.out)
    yield "slurm", advice
    job: list[RunSpec] = []
    module: list[StepModule] = []

    def read() -> Lines:
        if args.data is None:
            yield "none: give --data to look at shards, memory and ds_configs"
            return
        load_plugins(args.plugin)
        job.append(within(lambda: resolve_run(args.recipe, args.set, args.data)))
        folder.claim_out(args.out, job[0].identity(), "auto")
        yield from data(job[0])
        module.append(job[0].module())

    yield "data", read
    if module:
        yield "ds_configs", lambda: ds_configs(job[0], module[0], process.world, hardware)
        yield "memory", lambda: memory(job[0], module[0], hardware)
        yield "room", lambda: room(job[0], module[0], args.out)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    problems = 0
    try:
        ranks.check_launch()
        process = ranks.find_process()
    except UserError as error:
        print(f"launcher    error: {error}")
        return 2
    for title, look in examine(args, process):
        lines: list[str] = []
        try:
            for line in look():
                lines.append(line)
        except UserError as error:
            lines += f"error: {error}".splitlines()
        except (OSError, RuntimeError, dist.DistError) as error:
            lines.append(f"error: {str(error).splitlines()[0]}")
        problems += any(line.startswith("error:") for line in lines)
        if process.is_main:
            print(*(f"{'' if number else title:<11} {line}" for number, line in enumerate(lines)), sep="\n", flush=True)
    if process.is_main:
        print(f"{'':<11} {problems} of these keep a run from starting" if problems else f"{'':<11} a run could start")
    return 2 if problems else 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of libraries: they are no finding
    run_command(main)  # also with a look that hangs in its thread
