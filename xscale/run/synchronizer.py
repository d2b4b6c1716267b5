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

from xscale.checkpoint.manager import CheckpointManager
from xscale.config import Recipe
from xscale.data.loader import StepBatch
from xscale.data.packed_row import RowCost
from xscale.errors import UserError
from xscale.files import Lock
from xscale.ranks import HostGroup, Process
from xscale.run.stop import StopRequest
from xscale.run.watch import Watch

FLUSH_SECONDS = 1.0
"""Metrics are read from the device this often at most, since reading waits for it."""
FEWEST, MOST = 2, 16
"""Steps that a message is sent ahead: one more than it takes."""
SEEN = 7
"""Of so many messages the median says how many steps they take."""


class GlobalCounts(NamedTuple):
    """A step's numbers, summed over ranks."""

    targets: dict[tuple[str, str], int]
    work: RowCost
    too_long: Counter[str]
    """By stream."""
    samples: int
    flush: int
    """How many ranks want metrics to be read."""
    written: int = 0
    """How many ranks have written their part of the checkpoint under way."""
    ahead: int = FEWEST
    """How many steps are announced before this one is made."""
    auxiliary: Mapping[str, list[int]] = {}
    """By stream whose companion gathers, how many states it reads on each rank."""


class PendingStep(NamedTuple):
    """A step whose numbers are on their way."""

    batch: Any
    """StepBatch."""
    error: Exception | None
    """Why this rank could not read its records, or may not go on."""
    sums: Callable[[], list[int]]
    """Waits for them."""
    counts: Callable[[], GlobalCounts]
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


class StepSynchronizer:
    """Reads the records of steps, and sends their numbers."""

    def __init__(
        self,
        done: int,
        steps: int,
        gathering: frozenset[str],
        process: Process,
        host_group: HostGroup,
        stop: StopRequest,
        watch: Watch,
        checkpoint_manager: CheckpointManager,
        locks: list[Lock],
    ):
        """done: steps before the first; steps: the last; gathering: streams whose companion gathers; locks: on the
        run's directory, of rank 0."""
        self.announced, self.steps, self.gathering = done, steps, gathering
        self.process, self.host_group, self.stop, self.watch, self.checkpoint_manager = (
            process,
            host_group,
            stop,
            watch,
            checkpoint_manager,
        )
        self.locks = locks
        self.waited = 0.0
        """Seconds that the step under way has waited for records."""
        self.last_flush = time.monotonic()
        """When metrics were read last, or rank 0 asked for it."""
        self.length = 0
        """Numbers of a message."""
        self.pending: deque[PendingStep] = deque()
        """Steps that are announced and not begun."""
        self.flying: deque[PendingStep] = deque()
        """Those whose sums were not there when a step began."""
        self.begun, self.took = 0, deque([1], maxlen=SEEN)
        """Steps; how many of them messages took, or more."""
        self.error: Exception | None = None
        """Why this rank can read no more records."""

    def next(self, batches: Iterator[StepBatch]) -> PendingStep | None:
        """The step that begins; None after the last. The iterator is its caller's alone: within a cycle its workers
        would be waited for at some collection of garbage."""
        self.begun += 1
        while self.flying and self.flying[0].arrived():
            self.took.append(self.begun - self.flying.popleft().sent)
        if not self.pending:
            self.announce(batches, 1)
        pending = self.pending.popleft() if self.pending else None
        if self.flying and self.flying[0] is pending:
            self.took.append(self.begun - self.flying.popleft().sent + 1)
        return pending

    def announce(self, batches: Iterator[StepBatch], ahead: int) -> None:
        """Steps that have not been announced, until so many are that have not begun. What a rank cannot read is told:
        the others send on until they come to it."""
        while len(self.pending) < ahead and self.announced < self.steps:
            self.announced += 1
            self.pending.append(self._failed(self.error) if self.error else self._read(batches))
            self.flying.append(self.pending[-1])

    def _read(self, batches: Iterator[StepBatch]) -> PendingStep:
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
        return bool(self.pending) and self.pending[0].stopped()

    def _failed(self, error: Exception) -> PendingStep:
        self.error = error
        message = self.host_group.begin_sum([1, *[0] * (self.length - 1)])

        def counts() -> GlobalCounts:
            raise error

        return PendingStep(None, error, cache(message.wait), counts, message.arrived, self.begun, None)

    def _send(self, batch: StepBatch) -> PendingStep:
        targets, work, long = batch.targets(), batch.work(), batch.too_long()
        flush = self.process.is_main and time.monotonic() - self.last_flush >= FLUSH_SECONDS
        if flush:
            self.last_flush = time.monotonic()
        ahead = min(max(FEWEST, median_low(self.took) + 1), MOST) if self.process.is_main else 0
        asked = [int(flush), int(self.checkpoint_manager.saver.written), ahead]
        rank, world = self.process.rank, self.process.world
        own = {stream: n for stream, n in batch.auxiliary().items() if stream in self.gathering}
        of_ranks = [n * int(of == rank) for n in own.values() for of in range(world)]
        first = [0, int(bool(self.stop))]
        numbers = [*first, *targets.values(), *work, *long.values(), batch.samples(), *asked, *of_ranks]
        message, self.length = self.host_group.begin_sum(numbers), len(numbers)
        finish = cache(message.wait)

        def counts() -> GlobalCounts:
            sums = iter(finish()[len(first) :])
            return GlobalCounts(
                targets={key: next(sums) for key in targets},
                work=RowCost(*islice(sums, len(work))),
                too_long=Counter({stream: next(sums) for stream in long}),
                samples=next(sums),
                flush=next(sums),
                written=next(sums),
                ahead=next(sums),
                auxiliary={stream: [*islice(sums, world)] for stream in own},
            )

        return PendingStep(batch, None, finish, counts, message.arrived, self.begun, self.checkpoint_manager.under_way)


def check_targets(counts: GlobalCounts, step: int, recipe: Recipe) -> None:
    """Raises UserError, on all ranks, where a step has nothing to learn from."""
    if any(counts.targets.values()):
        return
    data = recipe.data
    raise UserError(
        f"step {step} has no targets: of its pairs {counts.too_long.total():,} were longer than data.max_length "
        f"{data.max_length} (data.overlong: {data.overlong}). Take a larger max_length, data.overlong=truncate, or "
        f"more samples a step"
    )
