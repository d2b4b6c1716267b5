"""What ranks agree on before a step, in one small message that travels while steps before it are made.

Of many ranks a message may take longer than a step. It is sent so many steps ahead that it has arrived when its step
begins; rank 0 sees how long they take, and says in each how far ahead the ranks send from its step on. What a step
trains does not depend on that, but a stop does: it comes as many steps later.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from statistics import median_low
from typing import Any, NamedTuple

from xscale.config import Recipe
from xscale.data.loader import StepBatch
from xscale.data.row import Work
from xscale.errors import UserError
from xscale.files import Lock
from xscale.ranks import Control, Process
from xscale.run.keeper import Keeper
from xscale.run.stop import StopRequest
from xscale.run.watch import Watch

FLUSH_SECONDS = 1.0
"""Metrics are read from the device this often at most, since reading waits for it."""
FEWEST, MOST = 2, 16
"""Steps that a message is sent ahead: one more than it takes."""
SEEN = 7
"""Of so many messages the median says how many steps they take."""


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
    ahead: int = FEWEST
    """How many steps are announced before this one is made."""
    beside: Mapping[str, list[int]] = {}
    """By stream whose companion gathers, how many states it reads on each rank."""


class Coming(NamedTuple):
    """A step whose numbers are on their way."""

    batch: Any
    """StepBatch."""
    error: Exception | None
    """Why this rank could not read its records, or may not go on."""
    sums: Callable[[], list[int]]
    """Waits for them."""
    agreed: Callable[[], Agreed]
    """Waits for them. Of a step that has not failed."""
    arrived: Callable[[], bool]
    """Whether nobody has to wait."""
    sent: int
    """Behind so many steps."""
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
        locks: list[Lock],
    ):
        """done: steps before the first; steps: the last; gathering: streams whose companion gathers; locks: on the
        run's directory, of rank 0."""
        self.announced, self.steps, self.gathering = done, steps, gathering
        self.process, self.control, self.stop, self.watch, self.keeper = process, control, stop, watch, keeper
        self.locks = locks
        self.waited = 0.0
        """Seconds that the step under way has waited for records."""
        self.last_flush = time.monotonic()
        """When metrics were read last, or rank 0 asked for it."""
        self.length = 0
        """Numbers of a message."""
        self.coming: deque[Coming] = deque()
        """Steps that are announced and not begun."""
        self.flying: deque[Coming] = deque()
        """Those whose sums were not there when a step began."""
        self.begun, self.took = 0, deque([1], maxlen=SEEN)
        """Steps; how many of them messages took, or more."""
        self.error: Exception | None = None
        """Why this rank can read no more records."""

    def next(self, batches: Iterator[StepBatch]) -> Coming | None:
        """The step that begins; None after the last. The iterator is its caller's alone: within a cycle its workers
        would be waited for at some collection of garbage."""
        self.begun += 1
        while self.flying and self.flying[0].arrived():
            self.took.append(self.begun - self.flying.popleft().sent)
        if not self.coming:
            self.announce(batches, 1)
        coming = self.coming.popleft() if self.coming else None
        if self.flying and self.flying[0] is coming:
            self.took.append(self.begun - self.flying.popleft().sent + 1)
        return coming

    def announce(self, batches: Iterator[StepBatch], ahead: int) -> None:
        """Steps that have not been announced, until so many are that have not begun. What a rank cannot read is told:
        the others send on until they come to it."""
        while len(self.coming) < ahead and self.announced < self.steps:
            self.announced += 1
            self.coming.append(self._failed(self.error) if self.error else self._read(batches))
            self.flying.append(self.coming[-1])

    def _read(self, batches: Iterator[StepBatch]) -> Coming:
        self.watch.note(f"reading the records of step {self.announced}")
        started = time.monotonic()
        try:
            batch = next(batches)
            for lock in self.locks:
                lock.check()
        except Exception as error:
            if not self.length:  # of the first step: nobody waits for anything else
                raise
            return self._failed(error)
        assert batch.step == self.announced - 1, (batch.step, self.announced)
        self.waited += time.monotonic() - started
        return self._send(batch)

    def stops_next(self) -> bool:
        """Whether some rank was told to stop before the step that begins next."""
        return bool(self.coming) and self.coming[0].stopped()

    def _failed(self, error: Exception) -> Coming:
        self.error = error
        message = self.control.begin_sum([1, *[0] * (self.length - 1)])

        def agreed() -> Agreed:
            raise error

        return Coming(None, error, cache(message.wait), agreed, message.arrived, self.begun, None)

    def _send(self, batch: StepBatch) -> Coming:
        targets, work, long = batch.targets(), batch.work(), batch.too_long()
        flush = self.process.is_main and time.monotonic() - self.last_flush >= FLUSH_SECONDS
        if flush:
            self.last_flush = time.monotonic()
        ahead = min(max(FEWEST, median_low(self.took) + 1), MOST) if self.process.is_main else 0
        asked = [int(flush), int(self.keeper.saver.written), ahead]
        rank, world = self.process.rank, self.process.world
        own = {stream: n for stream, n in batch.beside().items() if stream in self.gathering}
        of_ranks = [n * int(of == rank) for n in own.values() for of in range(world)]
        first = [0, int(bool(self.stop))]
        numbers = [*first, *targets.values(), *work, *long.values(), batch.samples(), *asked, *of_ranks]
        message, self.length = self.control.begin_sum(numbers), len(numbers)
        finish = cache(message.wait)

        def agreed() -> Agreed:
            sums = iter(finish()[len(first) :])
            return Agreed(
                targets={key: next(sums) for key in targets},
                work=Work(*islice(sums, len(work))),
                too_long=Counter({stream: next(sums) for stream in long}),
                samples=next(sums),
                flush=next(sums),
                written=next(sums),
                ahead=next(sums),
                beside={stream: [*islice(sums, world)] for stream in own},
            )

        return Coming(batch, None, finish, agreed, message.arrived, self.begun, self.keeper.under_way)


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
