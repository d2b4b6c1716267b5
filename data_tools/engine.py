"""Runs the tasks of a step in processes of this machine, as an array of SLURM jobs, or on a Ray cluster.

A task is a pure function of the plan. It writes whole files (by `replacing`), and then an empty file that marks it as
done. A task that is marked is not run again, so a killed run continues with the other tasks, also with another
executor. The executors use concurrent.futures, `sbatch --wait --array` and Ray's tasks. (datatrove's local executor
waits forever for a worker that the kernel killed, its SLURM executor does not report whether tasks failed, and its Ray
executor starts only inside its own pipelines. submitit needs SLURM's accounting database.)
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from xscale import files
from xscale.errors import MachineError, UserError

PROGRESS_SECONDS = 10
"""The seconds between two reports of progress in a log."""
EXECUTORS = ("local", "slurm", "ray")
Step = Callable[[Path, int], None]
"""A function (folder, n) that does task n of a step, according to the plan in the folder."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new path to write to. The file that is written there then replaces `path`. Two processes may do so for
    one `path` at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{files.PARTIAL}")
    try:
        yield partial
        files.sync(partial)
        os.replace(partial, path)
    except BaseException:
        files.remove(partial)
        raise


def lock_folder(folder: Path) -> int:
    """Lock a folder until the returned file descriptor is closed. Raises UserError if another process has the lock."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UserError(f"{folder} is being written by another process; wait for it, or stop it") from None
    except OSError:
        pass  # a file system without locks
    return fd


def mark_path(folder: Path, step: str, number: int) -> Path:
    """Return the path of the empty file that marks a task as done."""
    return folder / "done" / step / f"{number:06d}"


def do_task(folder: Path, name: str, step: Step, number: int) -> None:
    """Do task `number` of the step called `name`, unless it is marked as done, and mark it."""
    done = mark_path(folder, name, number)
    if not done.exists():
        step(folder, number)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()  # it needs no sync: a task whose mark is lost is done again


class Executor:
    """Runs the tasks of a step: in this process, in a pool of processes, as a SLURM job array, or on Ray."""

    def __init__(self, kind: str, workers: int, folder: Path):
        self.kind, self.workers, self.folder = kind, workers, folder
        self._pool: ProcessPoolExecutor | None = None

    def run(self, name: str, step: Step, tasks: int) -> int:
        """Do the tasks of a step that are not done. Return their number. Raises UserError and MachineError."""
        left = [number for number in range(tasks) if not mark_path(self.folder, name, number).exists()]
        if left and self.kind == "slurm":
            self._run_array(name, left)
        elif left and self.kind == "ray":
            self._run_ray(name, step, left)
        elif left and self.workers == 1:
            with progress_bar(name, len(left)) as bar:
                for number in left:
                    do_task(self.folder, name, step, number)
                    bar.update()
        elif left:
            self._run_pool(name, step, left)
        return len(left)

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        if self.kind == "ray" and "ray" in sys.modules:
            sys.modules["ray"].shutdown()

    def _run_pool(self, name: str, step: Step, left: list[int]) -> None:
        if not self._pool:
            # Forked workers hold the folder's lock too, so a new start cannot write while those of a killed start live.
            self._pool = ProcessPoolExecutor(
                self.workers, multiprocessing.get_context("fork"), start_worker, (os.getpid(),)
            )
        tasks = [self._pool.submit(do_task, self.folder, name, step, n) for n in left]
        try:
            with progress_bar(name, len(left)) as bar:
                for future in as_completed(tasks):
                    future.result()
                    bar.update()
        except BrokenProcessPool:
            raise MachineError(
                f"a worker was killed during `{name}`, perhaps because memory ran out (see `dmesg`); start again "
                f"with fewer --workers: finished tasks are not done again"
            ) from None
        finally:
            for future in tasks:
                future.cancel()

    def _run_array(self, name: str, left: list[int]) -> None:
        """Run a SLURM array of at most `workers` jobs, each of which does a share of the tasks."""
        jobs, logs = min(self.workers, len(left)), self.folder / "logs"
        logs.mkdir(exist_ok=True)
        words = [sys.executable, "-m", f"{__package__}.prepare", "--tasks", str(self.folder), name]
        flags = ["--wait", "--parsable", "--requeue", "--ntasks=1", f"--array=0-{jobs - 1}"]
        flags += [f"--job-name=prepare-{name}", f"--output={logs}/{name}-%A_%a.out", "--open-mode=append"]
        command = f"exec {shlex.join(words)} $SLURM_ARRAY_TASK_ID {jobs}"
        # If this process runs in an allocation, sbatch would take the allocation's variables for flags.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
        try:
            done = subprocess.run(
                ["sbatch", *flags, f"--wrap={command}"], env=environment, capture_output=True, text=True
            )
        except FileNotFoundError:
            raise UserError("--executor slurm needs `sbatch` on PATH; or choose --executor local") from None
        missing = [number for number in left if not mark_path(self.folder, name, number).exists()]
        if missing:
            job = done.stdout.strip().partition(";")[0]
            texts = [path.read_text(errors="replace") for path in sorted(logs.glob(f"{name}-{job}_*.out"))]
            text = next((text for text in texts if "error: " in text), "\n".join(texts)) or done.stderr
            problem = text.rpartition("error: ")[2].strip()[-2000:]
            raise (UserError if done.returncode == 2 else MachineError)(
                f"step {name}: {len(missing)} of {len(left)} tasks failed: {problem}; see {logs}"
            )

    def _run_ray(self, name: str, step: Step, left: list[int]) -> None:
        """Run the tasks on the Ray cluster of RAY_ADDRESS, by default this machine, at most `workers` at a time."""
        try:
            import ray
        except ImportError:
            raise UserError("--executor ray needs `pip install ray`; or choose --executor local") from None
        if not ray.is_initialized():
            try:
                ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            except ConnectionError as error:
                raise MachineError(f"Ray cannot be reached: {error}; see RAY_ADDRESS") from None
        do, waiting = ray.remote(do_task), list[Any]()
        try:
            with progress_bar(name, len(left)) as bar:
                for n, number in enumerate(left, start=1):
                    task = do.options(name=f"{name} {number}")
                    waiting.append(task.remote(self.folder.resolve(), name, step, number))
                    while waiting and (len(waiting) == self.workers or n == len(left)):
                        done, waiting = ray.wait(waiting)
                        ray.get(done)
                        bar.update()
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise MachineError(
                f"Ray lost a worker during `{name}`: {str(error)[:500]}; start again: finished tasks are not done again"
            ) from None


def do_tasks_of_job(folder: Path, name: str, step: Step, tasks: int, job: int, jobs: int) -> None:
    """Do every `jobs`-th task of a step, from task `job` on."""
    for number in range(job, tasks, jobs):
        do_task(folder, name, step, number)


def progress_bar(name: str, tasks: int) -> tqdm:
    """Return a bar that counts the finished tasks of a step. In a log it prints a line every PROGRESS_SECONDS."""
    seconds = 0.1 if sys.stderr.isatty() else PROGRESS_SECONDS
    return tqdm(desc=name, total=tasks, unit="task", mininterval=seconds, delay=seconds, leave=False)


def start_worker(parent: int) -> None:
    """Make this process end soon after the process `parent`, and ignore Ctrl-C, which `parent` handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
