"""The tools under `mpirun -n N`: what each rank does, and how all of them stop on one rank's error."""

import os
import sys
from collections.abc import Callable
from typing import Any

from xscale.errors import UserError


class Ranks:
    """This process among those that mpirun or srun started; a single one where none did."""

    def __init__(self) -> None:
        self.rank, self.size, self._comm = 0, 1, None
        world = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or "1"
        if int(world) > 1:
            try:
                from mpi4py import MPI
            except ImportError:
                raise UserError(
                    "mpirun needs mpi4py: `pip install 'xscale[mpi]'`, or run the tool without mpirun"
                ) from None
            self._comm = MPI.COMM_WORLD
            self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, on every rank."""
        return self._comm.allgather(value) if self._comm else [value]

    def together(self, work: Callable[[], Any]) -> list[Any]:
        """Every rank's `work()`, on every rank. A UserError of any rank is raised on all."""
        error, result = None, None
        try:
            result = work()
        except UserError as problem:
            error = str(problem)
        errors = [problem for problem in self.gather(error) if problem]
        if errors:
            raise UserError(errors[0])
        return self.gather(result)

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def run(main: Callable[[Ranks], None]) -> None:
    """Run a tool; a UserError is printed once and ends with exit code 2."""
    ranks = Ranks()
    try:
        main(ranks)
    except UserError as error:
        if ranks.is_main:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
