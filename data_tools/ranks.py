"""Runs tools under `mpirun -n N` or `srun -n N`: finds each process's rank, and stops all ranks on one rank's error."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from xscale.errors import ENVIRONMENT_ERRNOS, UserError, check_arguments, number_of, print_anything

TIMEOUT = timedelta(days=7)
"""How long ranks wait while one of them works alone."""


class Ranks:
    """This process's rank among the processes that mpirun or srun started; rank 0 of 1 without mpirun and srun."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self._gather: Callable[[Any], list[Any]] = lambda value: [value]
        if self._started_by("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
            self._join_mpi()
        elif self._started_by("SLURM_STEP_NUM_TASKS", "SLURM_PROCID") and "MPI_LOCALRANKID" not in os.environ:
            self._join_slurm()
        elif self._started_by("PMI_SIZE", "PMI_RANK"):
            self._join_mpi()

    @staticmethod
    def _started_by(size: str, rank: str) -> bool:
        return rank in os.environ and number_of(size, 1) > 1

    def _join_mpi(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError:
            raise UserError(
                "mpirun needs mpi4py: `pip install 'xscale[mpi]'`, or run the tool without mpirun"
            ) from None
        self.rank, self.size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        self._gather = MPI.COMM_WORLD.allgather

    def _join_slurm(self) -> None:
        """Connect the ranks by torch's sockets, as in training: srun need not support the installed MPI library."""
        import torch.distributed as dist

        from xscale.ranks import find_process

        process = find_process()
        dist.init_process_group("gloo", timeout=TIMEOUT)
        self.rank, self.size = process.rank, process.world
        self._gather = _gather_objects

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, returned on every rank."""
        return self._gather(value)

    def close(self) -> None:
        """Close the process group, whose threads would otherwise abort the interpreter at its exit."""
        if self._gather is _gather_objects:
            import torch.distributed as dist

            dist.destroy_process_group()

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work` on every rank. Returns all results on every rank. Any UserError or OSError is raised on all."""
        error: Exception | None = None
        result = None
        try:
            result = work()
        except UserError as problem:
            error = UserError(str(problem))
        except OSError as problem:
            error = OSError(problem.errno, problem.strerror or str(problem), problem.filename)
        errors = [problem for problem in self.gather(error) if problem]
        if errors:
            raise errors[0]
        return self.gather(result)

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def _gather_objects(value: Any) -> list[Any]:
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run(main: Callable[[Ranks], None]) -> None:
    """Run a tool and exit. A UserError is printed once, with exit code 2; an error of disk or network exits with 4."""
    print_anything()
    ranks, code = None, 0
    try:
        check_arguments(sys.argv[1:])
        ranks = Ranks()
        main(ranks)
    except (UserError, OSError) as error:
        code = 4 if isinstance(error, OSError) and error.errno in ENVIRONMENT_ERRNOS else 2
        if isinstance(error, OSError):
            error = UserError(f"{error.filename or 'a file'}: {error.strerror or error}")
        if ranks is None or ranks.is_main:
            print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    if ranks:
        ranks.close()
    sys.exit(code)
