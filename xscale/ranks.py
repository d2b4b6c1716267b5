"""Finds the rank of this process, whichever launcher started it, and exchanges small values between ranks."""

import ctypes
import logging
import os
import resource
import socket
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from xscale.deepspeed_private import disable_shared_memory_op
from xscale.errors import UserError, env_number

TIMEOUT = timedelta(minutes=30)
"""The time limit of a collective. It is long, since one rank may hash a large checkpoint while others wait."""
LOOPBACK = "lo"
"""The network interface of a run on one host."""
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
"""Numbers of parameters of malloc, from malloc.h of glibc."""
PORTS = range(20000, 32768)
"""The ports at which the ranks of a SLURM job connect. They are below those of outgoing connections."""
DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Process:
    """The place of this process among the processes of a run, the ranks. Rank 0 is the main rank: it writes the run's
    files and decides for all."""

    rank: int
    world: int
    """The number of ranks."""
    local_rank: int
    """The number of this process among the ranks of its host."""
    local_world: int
    """The number of ranks of its host."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_launcher_and_set_environment(allow_missing_launcher: bool = False) -> Process:
    """Return the rank that the launcher (deepspeed, torchrun, mpirun, srun) has given this process in its environment,
    and set torch's environment variables accordingly. allow_missing_launcher: do not call check_launcher_not_needed.
    Raises UserError."""
    env = os.environ
    if env.get("RANK") and env.get("WORLD_SIZE"):
        local_world = env_number("LOCAL_WORLD_SIZE", env_number("LOCAL_SIZE", 1))  # deepspeed sets LOCAL_SIZE
        process = Process(env_number("RANK", 0), env_number("WORLD_SIZE", 1), env_number("LOCAL_RANK", 0), local_world)
    elif env.get("OMPI_COMM_WORLD_SIZE") or env.get("MPI_LOCALNRANKS"):  # Open MPI's or MPICH's mpirun
        process = find_mpi_process_and_set_master()
    elif env.get("SLURM_PROCID") and env.get("SLURM_STEP_NUM_TASKS"):
        world = env_number("SLURM_STEP_NUM_TASKS", 1)  # a variable of job steps: a batch script is not a rank
        process = Process(env_number("SLURM_PROCID", 0), world, env_number("SLURM_LOCALID", 0), slurm_local_world())
    else:
        process = Process(0, 1, 0, 1)
        if not allow_missing_launcher:
            check_launcher_not_needed()
    if process.rank >= process.world:
        raise UserError(
            f"the launcher started a process as rank {process.rank}, but says that the number of ranks is only "
            f"{process.world} (ranks 0 to {process.world - 1}). Correct the launcher's number of processes, or the "
            "environment variables RANK and WORLD_SIZE if you set these variables yourself"
        )
    env.update(RANK=str(process.rank), WORLD_SIZE=str(process.world), LOCAL_RANK=str(process.local_rank))
    env["LOCAL_SIZE"] = env["LOCAL_WORLD_SIZE"] = str(process.local_world)
    if process.world == process.local_world and not launcher_has_store():
        env["MASTER_ADDR"] = "127.0.0.1"
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = slurm_first_host()
    if not env_number("MASTER_PORT", 0):
        env["MASTER_PORT"] = str(rendezvous_port())
    return process


def find_mpi_process_and_set_master() -> Process:
    """Return this process's rank by mpi4py, and set MASTER_ADDR and MASTER_PORT unless they are set. All ranks call it
    together. Raises UserError."""
    env = os.environ
    expected = env_number("OMPI_COMM_WORLD_SIZE", env_number("PMI_SIZE", 1))
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"mpirun has started this process, but the package mpi4py cannot be imported ({error}). Run `pip "
            "install 'xscale[mpi]'`"
        ) from None
    communicator = MPI.COMM_WORLD
    if communicator.Get_size() != expected:
        raise UserError(
            f"mpirun has started {expected} processes, but mpi4py finds only {communicator.Get_size()}, because "
            "mpi4py was built for another MPI. Build mpi4py for the MPI of this mpirun by `pip install --no-binary "
            "mpi4py mpi4py`"
        )
    of_host = communicator.Split_type(MPI.COMM_TYPE_SHARED)
    process = Process(communicator.Get_rank(), expected, of_host.Get_rank(), of_host.Get_size())
    addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout
    env.setdefault("MASTER_ADDR", communicator.bcast(addresses).split()[0])
    env.setdefault("MASTER_PORT", str(DEFAULT_PORT))
    MPI.Finalize()  # ranks talk by NCCL or gloo, and without MPI, mpirun notices a rank that fails
    return process


def check_launcher_not_needed() -> None:
    """Raise UserError if a process without a launcher is in a SLURM job of several tasks, or if only one of RANK and
    WORLD_SIZE is set."""
    if os.environ.get("RANK") or os.environ.get("WORLD_SIZE"):
        raise UserError(
            f"only one of the environment variables RANK ({os.environ.get('RANK') or 'not set'}) and WORLD_SIZE "
            f"({os.environ.get('WORLD_SIZE') or 'not set'}) is set. Set both RANK and WORLD_SIZE, or unset both"
        )
    tasks = env_number("SLURM_NTASKS", env_number("SLURM_NNODES", 1))
    if tasks > 1:
        raise UserError(
            f"this SLURM job has {tasks} tasks, but this process was started without srun. Start the command with "
            "srun, so that every task is a rank, or with `srun --ntasks=1` for a single rank"
        )


def rendezvous_port() -> int:
    """Return the port at which the ranks connect. Outside SLURM, it is DEFAULT_PORT. In SLURM, it is
    computed from the numbers of the job and its step, so that jobs, and the steps of a job, have different ports."""
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        return DEFAULT_PORT
    step = env_number("SLURM_STEP_ID", 0)
    return PORTS[(int(job) + 1009 * step) % len(PORTS)]  # jobs have consecutive numbers, and so have steps


def slurm_local_world() -> int:
    """Return the number of ranks on this node. SLURM lists those of all nodes: "2(x3),1" means 2, 2, 2, 1. Raises
    UserError."""
    node = env_number("SLURM_NODEID", 0)
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = list[int]()
    try:
        for part in tasks.split(","):
            count, _, nodes = part.rstrip(")").partition("(x")
            counts += [int(count)] * int(nodes or 1)
        return counts[node]
    except (ValueError, IndexError):
        raise UserError(
            f"the environment variable SLURM_STEP_TASKS_PER_NODE has the value {tasks!r}, which is not the number of "
            f"tasks of each node up to node {node} (SLURM_NODEID), such as 2(x3),1. srun sets both variables: leave "
            "them unchanged, and start each rank with srun"
        ) from None


def slurm_first_host() -> str:
    """Return the name of the SLURM job's first host, or its address if the network does not know the name."""

    def scontrol(*words: str) -> str:
        return subprocess.run(["scontrol", "show", *words], capture_output=True, text=True, check=True).stdout

    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or ""
    try:
        host = scontrol("hostnames", nodes).split()[0]
        try:
            socket.getaddrinfo(host, None)
            return host
        except OSError:
            return scontrol("node", host).split("NodeAddr=")[1].split()[0]
    except (OSError, LookupError, subprocess.CalledProcessError):
        raise UserError(
            "the environment variable MASTER_ADDR is not set, and the launcher does not say which host has "
            "rank 0. Set MASTER_ADDR to the name or address of the host of rank 0"
        ) from None


def launcher_has_store() -> bool:
    """Return whether the launcher has opened a store at which the ranks meet, as torchrun's agent does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_local_store(process: Process) -> dist.Store | None:
    """Return the store at which the ranks of one host meet, which other hosts cannot reach; torch's own would listen on
    every interface. Return None if there are several hosts, or if the launcher has opened a store. Raises
    DistNetworkError if the port is in use."""
    if process.world == 1:
        return dist.HashStore()
    if process.world > process.local_world or launcher_has_store():
        return None
    port = int(os.environ["MASTER_PORT"])
    listener = None
    if process.is_main:
        try:
            listener = socket.create_server(("127.0.0.1", port)).detach()
        except (OSError, OverflowError) as error:
            raise dist.DistNetworkError(f"port {port} of 127.0.0.1: {error}") from None
    return dist.TCPStore(
        "127.0.0.1",
        port,
        process.world,
        process.is_main,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for later tensors. By default, malloc returns each large tensor to the
    system, and page faults of the next tensors take up to a third of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries than glibc have no mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def join_process_group(process: Process) -> None:
    """Join the process group, over nccl on CUDA and gloo on a CPU. Raises UserError or DistNetworkError."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        # CUDA reads this at its first allocation. Rows differ in size, which would fragment fixed segments.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # The limit of open files is usually 1,024, and a rank keeps thousands of shards open.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # With this setting, gloo connects a rank only with its neighbours in the ring, the ranks that it talks to.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    disable_shared_memory_op()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use `torch.distributed", category=FutureWarning)
    if process.world == 1:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK)
    if process.world == process.local_world:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    if process.world > 1 and process.local_rank == 0:
        address = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
        print(f"rank {process.rank} of {process.world} connects to the other ranks at {address}", flush=True)
    backend = "gloo"
    device: torch.device | None = None
    if get_accelerator().device_name() == "cuda":
        backend = "nccl"
        device = torch.device("cuda", process.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
        # oneDNN keeps compiled code for each shape of a tensor, about 1 MB each. By default it keeps 1,024 of them, and
        # each packed row has another shape.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    store = open_local_store(process)
    if store is not None:
        dist.init_process_group(
            backend,
            store=store,
            rank=process.rank,
            world_size=process.world,
            timeout=TIMEOUT,
            device_id=device if process.world > 1 else None,  # as DeepSpeed does for other groups
        )
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, timeout=TIMEOUT, verbose=False)


def set_deterministic(wanted: bool) -> None:
    """If `wanted`, let torch use only deterministic algorithms, and raise an error for operators that have none."""
    torch.use_deterministic_algorithms(wanted)
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without this, torch refuses cuBLAS
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class CpuGroup:
    """The group in which all ranks exchange small values over gloo, between the hosts' CPUs, without waiting for a GPU.

    In a process that has not called `join_process_group`, the group is this process alone.
    """

    def __init__(self, alone: bool = False) -> None:
        """alone: the group is this process only. Otherwise all ranks must make the group together."""
        together = dist.is_initialized() and not alone
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT) if together else None
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1
        self.is_main = self.rank == 0

    def begin_sum(self, numbers: list[int]) -> Callable[[], list[int]]:
        """Begin a sum of the numbers over all ranks. Returns a function that waits for the sums and returns them."""
        sums = torch.tensor(numbers, dtype=torch.int64)
        work = self.group and dist.all_reduce(sums, group=self.group, async_op=True)

        def wait_for_sums() -> list[int]:
            if work:
                work.wait()
            return sums.tolist()

        return wait_for_sums

    def all_gather(self, value: Any) -> list[Any]:
        """Return on every rank the `value` of each rank, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def value_from_main(self, make: Callable[[], Any]) -> Any:
        """Return on every rank what `make` returns on rank 0. A UserError of rank 0 is raised on all ranks."""
        values = [result_or_caught_user_error(make) if self.is_main else None]
        if self.group is not None:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return unwrap_or_raise_user_error(values[0])

    def divide_work_and_gather(self, works: list[Callable[[], Any]]) -> list[Any]:
        """Return the values of all functions on every rank. Each function is called on one rank; its UserError is
        raised on all ranks."""
        values = result_or_caught_user_error(lambda: [work() for work in works[self.rank :: self.size]])
        values_of_ranks = list(map(unwrap_or_raise_user_error, self.all_gather(values)))
        return [values_of_ranks[i % self.size][i // self.size] for i in range(len(works))]

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self.begin_sum([0])()


def result_or_caught_user_error(make: Callable[[], Any]) -> Any:
    """Return what `make` returns, or the UserError that it raises."""
    try:
        return make()
    except UserError as error:
        return error


def unwrap_or_raise_user_error(value: Any) -> Any:
    """Return a result of `result_or_caught_user_error` (perhaps another rank's), or raise the UserError that it is."""
    if isinstance(value, UserError):
        raise value
    return value
