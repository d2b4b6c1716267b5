"""What ranks agree on before a step, in one small message that travels while the step before it is made."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from xscale.config import Recipe
from xscale.data.loader import StepBatch
from xscale.data.row import Work
from xscale.errors import UserError
from xscale.ranks import Control, Process
from xscale.run.keeper import Keeper
from xscale.run.stop import StopRequest
from xscale.run.watch import Watch

FLUSH_SECONDS = 1.0
"""Metrics are read from the device this often at most, since reading waits for it."""


class Agreed(NamedTuple):
    """A step's numbers, summed over ranks."""

    targets: dict[tuple[str, str], int]
    work: Work
    too_long: Counter[str]
    """By stream."""
    samples: int
    flush: int
    """How many ranks want metrics to be read."""
    written: int = 0
    """How many ranks have written their part of the checkpoint under way."""
    beside: Mapping[str, list[int]] = {}
    """By stream whose companion gathers, how many states it reads on each rank."""


class Coming(NamedTuple):
    """A step whose numbers are on their way."""

    batch: Any
    """StepBatch."""
    error: Exception | None
    """Why this rank could not read its records."""
    sums: Callable[[], list[int]]
    """Waits for them."""
    agreed: Callable[[], Agreed]
    """Waits for them. Of a step that has not failed."""
    saving: int | None
    """The checkpoint under way when they were sent."""

    def failed(self) -> bool:
        """Whether some rank could not read its records."""
        return self.sums()[0] > 0

    def stopped(self) -> bool:
        """Whether some rank is told to stop."""
        return self.sums()[1] > 0


class Announcer:
    """Reads the records of steps, and sends their numbers."""

    def __init__(
        self,
        done: int,
        steps: int,
        gathering: frozenset[str],
        process: Process,
        control: Control,
        stop: StopRequest,
        watch: Watch,
        keeper: Keeper,
    ):
        """done: steps before the first; steps: the last; gathering: streams whose companion gathers."""
        self.announced, self.steps, self.gathering = done, steps, gathering
        self.process, self.control, self.stop, self.watch, self.keeper = process, control, stop, watch, keeper
        self.waited = 0.0
        """Seconds that the step under way has waited for records."""
        self.last_flush = time.monotonic()
        """When metrics were read last."""
        self.length = 0
        """Numbers of a message."""

    def next(self, batches: Iterator[StepBatch]) -> Coming | None:
        """The next step that has not been announced; None after the last. The iterator is its caller's alone: within a
        cycle its workers would be waited for at some collection of garbage."""
        if self.announced == self.steps:
            return None
        self.announced += 1
        self.watch.note(f"reading the records of step {self.announced}")
        started = time.monotonic()
        try:
            batch = next(batches)
        except Exception as error:
            if not self.length:  # of the first step: nobody waits for anything else
                raise
            return self._failed(error)
        assert batch.step == self.announced - 1, (batch.step, self.announced)
        self.waited += time.monotonic() - started
        return self._send(batch)

    def _failed(self, error: Exception) -> Coming:
        finish = cache(self.control.begin_sum([1, *[0] * (self.length - 1)]))

        def agreed() -> Agreed:
            raise error

        return Coming(None, error, finish, agreed, None)

    def _send(self, batch: StepBatch) -> Coming:
        targets, work, long = batch.targets(), batch.work(), batch.too_long()
        flush = self.process.is_main and time.monotonic() - self.last_flush >= FLUSH_SECONDS
        asked = [int(flush), int(self.keeper.saver.written)]
        rank, world = self.process.rank, self.process.world
        own = {stream: n for stream, n in batch.beside().items() if stream in self.gathering}
        of_ranks = [n * int(of == rank) for n in own.values() for of in range(world)]
        first = [0, int(bool(self.stop))]
        numbers = [*first, *targets.values(), *work, *long.values(), batch.samples(), *asked, *of_ranks]
        finish, self.length = cache(self.control.begin_sum(numbers)), len(numbers)

        def agreed() -> Agreed:
            sums = iter(finish()[len(first) :])
            return Agreed(
                targets={key: next(sums) for key in targets},
                work=Work(*islice(sums, len(work))),
                too_long=Counter({stream: next(sums) for stream in long}),
                samples=next(sums),
                flush=next(sums),
                written=next(sums),
                beside={stream: [*islice(sums, world)] for stream in own},
            )

        return Coming(batch, None, finish, agreed, self.keeper.under_way)


def check_targets(agreed: Agreed, step: int, recipe: Recipe) -> None:
    """Raises UserError, on all ranks, where a step has nothing to learn from."""
    if any(agreed.targets.values()):
        return
    data = recipe.data
    raise UserError(
        f"step {step} has no targets: of its pairs {agreed.too_long.total():,} were longer than data.max_length "
        f"{data.max_length} (data.overlong: {data.overlong}). Take a larger max_length, data.overlong=truncate, or "
        f"more samples a step"
    )
