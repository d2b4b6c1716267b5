"""Runs the tasks of a step in processes of this machine, as an array of SLURM jobs, or on a Ray cluster.

A task is a pure function of the plan. It writes whole files (by `replacement_file`). Then an empty file marks the task
as done. A marked task is not run again, so a new start after a kill runs the other tasks, also with another executor.
The executors use concurrent.futures, `sbatch --wait --array` and Ray's tasks. (datatrove's local executor waits forever
for a worker that the kernel killed, its SLURM executor does not report whether tasks failed, and its Ray executor
starts only inside its own pipelines. submitit needs SLURM's accounting database.)
"""

import fcntl
import logging
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from xscale import files
from xscale.errors import MachineError, UserError


@dataclass(frozen=True)
class TaskList:
    """The tasks of a step that are not done."""

    folder: Path
    """The work folder."""
    name: str
    """The name of the step."""
    function: Callable[[Path, int], None]
    """A function (folder, n) that does task n of the step, according to the plan in the folder."""
    numbers: list[int]


def replacement_file(path: Path) -> AbstractContextManager[Path]:
    """Return a context with a new path to write to. The file that is written there then replaces `path`. Two processes
    may replace the same `path` at the same time."""
    return files.atomic_write(path, writer=uuid.uuid4().hex)


@contextmanager
def lock_folder_or_raise(folder: Path) -> Iterator[None]:
    """A context in which this process has the lock of a folder. Raises UserError if another process has it. After a
    kill, workers may have it for a moment."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is writing to {folder}. Wait until the other process has ended, or stop the other "
                "process"
            ) from None
        except OSError:
            pass  # the file system has no locks
        yield
    finally:
        os.close(fd)


def done_marker_path(folder: Path, step_name: str, number: int) -> Path:
    """Return the path of the empty file that marks a task as done."""
    return folder / "done" / step_name / f"{number:06d}"


def do_task_unless_done(folder: Path, step_name: str, function: Callable[[Path, int], None], number: int) -> None:
    """Do task `number` of a step, unless it is marked as done, and mark it."""
    done = done_marker_path(folder, step_name, number)
    if not done.exists():
        function(folder, number)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()  # the mark needs no sync: a task whose mark is lost is done again


def run_tasks(executor: str, workers: int, tasks: TaskList) -> None:
    """Do the tasks, at most `workers` at a time. executor: a key of EXECUTORS. On a terminal, a bar counts the finished
    tasks. Raises UserError and MachineError."""
    with tqdm(desc=tasks.name, total=len(tasks.numbers), unit="task", leave=False, disable=None) as bar:
        for _ in EXECUTORS[executor](tasks, workers):
            bar.update()


def run_local(tasks: TaskList, workers: int) -> Iterator[None]:
    """Do the tasks in this process if `workers` is 1, else in a pool. Yield after each task."""
    if workers == 1:
        for number in tasks.numbers:
            do_task_unless_done(tasks.folder, tasks.name, tasks.function, number)
            yield
        return
    remedy = "Start the command again with fewer --workers; finished tasks are not repeated"
    with worker_pool(workers, f"in the step `{tasks.name}`", remedy) as pool:
        futures = [pool.submit(do_task_unless_done, tasks.folder, tasks.name, tasks.function, n) for n in tasks.numbers]
        for future in as_completed(futures):
            yield future.result()


@contextmanager
def worker_pool(workers: int, place: str, remedy: str) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes. Raises MachineError, with the place and the remedy, if a process is killed."""
    # Forked workers hold the folder's lock, too: a new start waits until the workers of a killed one have ended.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(workers, context, ignore_ctrl_c_and_exit_with_parent, (os.getpid(),))
    try:
        yield pool
    except BrokenProcessPool:
        raise MachineError(
            f"a worker process was killed {place}, perhaps because the memory ran out (see `dmesg`). {remedy}"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def ignore_ctrl_c_and_exit_with_parent(parent_pid: int) -> None:
    """Make this process end soon after the process `parent_pid` ends, and ignore Ctrl-C, which that process handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_slurm_array_and_yield_once(tasks: TaskList, workers: int) -> Iterator[None]:
    """Do the tasks in an array of at most `workers` SLURM jobs, each of which does a share of them. Yield at the
    end."""
    logs = tasks.folder / "logs"
    logs.mkdir(exist_ok=True)
    jobs = min(workers, len(tasks.numbers))
    words = [sys.executable, "-m", f"{__package__}.prepare", "--tasks", str(tasks.folder), tasks.name]
    flags = [
        "--wait",
        "--parsable",
        "--requeue",
        "--ntasks=1",
        f"--array=0-{jobs - 1}",
        f"--job-name=prepare-{tasks.name}",
        f"--output={logs}/{tasks.name}-%A_%a.out",
        "--open-mode=append",
        f"--wrap=exec {shlex.join(words)} $SLURM_ARRAY_TASK_ID {jobs}",
    ]
    # If this process runs in an allocation, sbatch would take the allocation's variables for flags.
    environment = {name: text for name, text in os.environ.items() if name == "SLURM_CONF" or name[:6] != "SLURM_"}
    try:
        done = subprocess.run(["sbatch", *flags], env=environment, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(
            "--executor slurm needs the command `sbatch`, which is not on PATH. Start on a machine with SLURM, or "
            "choose --executor local"
        ) from None
    missing = [n for n in tasks.numbers if not done_marker_path(tasks.folder, tasks.name, n).exists()]
    if missing:
        job = done.stdout.strip().partition(";")[0]
        log = "".join(path.read_text(errors="replace") for path in sorted(logs.glob(f"{tasks.name}-{job}_*.out")))
        problem = (log or done.stderr).rpartition("error: ")[2].strip()[-2000:]
        raise (UserError if done.returncode == 2 else MachineError)(
            f"step {tasks.name}: {len(missing)} of {len(tasks.numbers)} tasks failed: {problem}. The logs are in "
            f"{logs}. Remove the cause of the error, then start the command again"
        )
    yield


def run_ray(tasks: TaskList, workers: int) -> Iterator[None]:
    """Run the tasks on the Ray cluster of RAY_ADDRESS, by default this machine. Yield after each task."""
    try:
        import ray
    except ImportError:
        raise UserError(
            "the package ray is not installed. Run `pip install 'xscale[ray]'`, or choose --executor local"
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise MachineError(
                f"the Ray cluster does not answer ({error}). Correct the environment variable RAY_ADDRESS, or start "
                "Ray at the address in RAY_ADDRESS"
            ) from None
    remote = ray.remote(do_task_unless_done)
    folder = tasks.folder.resolve()
    left = list(tasks.numbers)
    running = list[Any]()
    try:
        while left or running:
            while left and len(running) < workers:
                running.append(remote.remote(folder, tasks.name, tasks.function, left.pop(0)))
            done, running = ray.wait(running)
            yield ray.get(done[0])
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise MachineError(
            f"Ray lost a worker in the step `{tasks.name}` ({str(error)[:500]}). Start the command again; finished "
            "tasks are not repeated"
        ) from None


EXECUTORS: dict[str, Callable[[TaskList, int], Iterator[None]]] = {
    "local": run_local,
    "slurm": run_slurm_array_and_yield_once,
    "ray": run_ray,
}
"""{name of an executor: its function (tasks, workers)}. The function does the tasks, at most `workers` at a time, and
yields when some are finished."""
