"""Runs the tasks of a step: in processes of this machine, as an array of SLURM jobs, or by Ray.

A task is a pure function of the plan that writes whole files (`put`) and last its mark; tasks that have their mark are
not run again, so a run that was killed goes on where it was, whatever ran it. All three executors are others' engines:
concurrent.futures, `sbatch --wait --array` and Ray's own tasks. (datatrove's executors were tried: a worker that the
kernel kills lets its local executor wait for ever, its SLURM executor does not tell whether tasks failed, and it brings
21 MB and seven packages. submitit asks `sacct`, which needs SLURM's accounting data base.)
"""

import multiprocessing
import os
import shlex
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from xscale import files
from xscale.errors import MachineError, UserError

TELL_SECONDS = 10
Step = Callable[[Path, int], None]
"""Does task number n of the plan in a folder."""


@contextmanager
def put(path: Path) -> Iterator[Path]:
    """A path to write a file to, which then takes the place of `path`. Two processes may do so at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{files.PARTIAL}")
    try:
        yield partial
        files.sync(partial)
        os.replace(partial, path)
    except BaseException:
        files.remove(partial)
        raise


def mark(folder: Path, step: str, number: int) -> Path:
    """The file that says that a task is done."""
    return folder / "done" / step / f"{number:06d}"


class Executor:
    """Runs steps with so many workers."""

    def __init__(self, kind: str, workers: int, folder: Path):
        self.kind, self.workers, self.folder = kind, workers, folder
        self._pool: ProcessPoolExecutor | None = None

    def run(self, name: str, step: Step, tasks: int) -> int:
        """Do all tasks of a step that are not done. Returns how many these were. Raises UserError, MachineError."""
        marks = {path.name for path in mark(self.folder, name, 0).parent.glob("*")}
        left = [number for number in range(tasks) if f"{number:06d}" not in marks]
        if left:
            EXECUTORS[self.kind](self, name, step, left)
        return len(left)

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def _local(self, name: str, step: Step, left: list[int]) -> None:
        begun = time.monotonic()
        if self.workers == 1:
            for n, number in enumerate(left, start=1):
                do(self.folder, name, step, number)
                begun = told(begun, name, n, len(left))
            return
        if not self._pool:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["data_tools.steps"])
            self._pool = ProcessPoolExecutor(self.workers, context, _end_with_parent)
        waiting = {self._pool.submit(do, self.folder, name, step, number) for number in left}
        try:
            while waiting:
                done, waiting = wait(waiting, TELL_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                begun = told(begun, name, len(left) - len(waiting), len(left))
        except BrokenProcessPool:
            raise MachineError(
                f"a worker was ended from outside during `{name}`, perhaps because memory ran out (`dmesg` "
                f"tells); start again with fewer --workers: what is done stays done"
            ) from None
        finally:
            for future in waiting:
                future.cancel()

    def _slurm(self, name: str, step: Step, left: list[int]) -> None:
        """An array of jobs, of which job i does every so-manieth task. SBATCH_* say partition, time and memory."""
        jobs, logs = min(self.workers, len(left)), self.folder / "logs"
        logs.mkdir(exist_ok=True)
        words = [sys.executable, "-m", "data_tools.prepare", "--tasks", str(self.folder), name]
        command = f"exec {shlex.join(words)} $SLURM_ARRAY_TASK_ID {jobs}"
        flags = [
            f"--array=0-{jobs - 1}",
            f"--output={logs}/{name}-%A_%a.out",
            f"--job-name=prepare-{name}",
            "--ntasks=1",
        ]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
        try:
            done = subprocess.run(
                ["sbatch", "--wait", "--parsable", "--requeue", "--open-mode=append", *flags, f"--wrap={command}"],
                env=environment, capture_output=True, text=True,
            )  # fmt: skip
        except FileNotFoundError:
            raise UserError(
                "--executor slurm needs SLURM's sbatch; it is not on PATH: choose --executor local"
            ) from None
        missing = [number for number in left if not mark(self.folder, name, number).exists()]
        if missing:
            tails = [p.read_text(errors="replace")[-2000:] for p in sorted(logs.glob(f"{name}-*.out"))]
            told_by = next((tail for tail in tails if "error:" in tail), tails[0] if tails else done.stderr)
            problem = told_by.partition("error: ")[2].strip() or told_by.strip()
            raise (UserError if "error: " in told_by else MachineError)(f"{name}, by SLURM: {problem}; logs: {logs}")

    def _ray(self, name: str, step: Step, left: list[int]) -> None:
        try:
            import ray
        except ImportError:
            raise UserError("--executor ray needs Ray: `pip install ray`, or choose --executor local") from None
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        work, waiting = ray.remote(max_retries=3)(do), list[object]()
        try:
            for n, number in enumerate(left, start=1):
                waiting.append(work.remote(self.folder, name, step, number))
                if len(waiting) >= self.workers or n == len(left):
                    done, waiting = ray.wait(waiting, num_returns=len(waiting) if n == len(left) else 1)
                    ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None


EXECUTORS: dict[str, Callable[[Executor, str, Step, list[int]], None]] = {
    "local": Executor._local,
    "slurm": Executor._slurm,
    "ray": Executor._ray,
}


def do(folder: Path, name: str, step: Step, number: int) -> None:
    """A task, and its mark."""
    if not mark(folder, name, number).exists():
        step(folder, number)
        with put(mark(folder, name, number)) as partial:
            partial.touch()


def do_share(folder: Path, name: str, step: Step, tasks: int, words: Sequence[str]) -> None:
    """What job i of n does of a step."""
    job, jobs = map(int, words)
    for number in range(job, tasks, jobs):
        do(folder, name, step, number)


def told(begun: float, name: str, done: int, tasks: int) -> float:
    """Tells now and then how many tasks are done."""
    if time.monotonic() - begun < TELL_SECONDS:
        return begun
    print(f"{name}: {done:,} of {tasks:,} tasks", file=sys.stderr, flush=True)
    return time.monotonic()


def _end_with_parent() -> None:
    """Of a worker: it ends when the process that started it is gone, killed perhaps."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
