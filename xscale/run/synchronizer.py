"""What ranks agree on before a step: one small message of each, whose sum travels while earlier steps are made.

With many ranks a message may take longer than a step, so it is sent enough steps ahead to arrive before its step
begins. Rank 0 measures how many steps messages take, and each message says how far ahead the ranks send from its step
on. What a step trains does not depend on that, but a stop comes as many steps later.
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
from xscale.run.watch import StopRequest, Watch

FLUSH_SECONDS = 1.0
"""Metrics are read from the device at most this often, since reading waits for the device."""
FEWEST, MOST = 2, 16
"""How many steps ahead a message is sent: one more than it takes."""
SEEN = 7
"""The median of so many messages says how many steps they take."""


class GlobalCounts(NamedTuple):
    """A step's numbers, summed over ranks."""

    targets: dict[tuple[str, str], int]
    work: RowCost
    too_long: Counter[str]
    """The pairs over data.max_length by stream."""
    samples: int
    flush: int
    """The number of ranks that want metrics to be read."""
    written: int = 0
    """The number of ranks that have written their part of the checkpoint under way."""
    ahead: int = FEWEST
    """The number of steps that are announced before this one is made."""
    auxiliary: Mapping[str, list[int]] = {}
    """How many states the auxiliary state of each stream that gathers reads on each rank."""


class PendingStep(NamedTuple):
    """An announced step, whose numbers are on their way."""

    batch: Any
    """The StepBatch."""
    error: Exception | None
    """Why this rank could not read its records, or may not go on."""
    sums: Callable[[], list[int]]
    """Waits for the sums over ranks and returns them."""
    counts: Callable[[], GlobalCounts]
    """Waits for the sums of a step that has not failed."""
    arrived: Callable[[], bool]
    """Whether the sums are there."""
    sent: int
    """The number of steps that had begun when the message was sent."""
    saving: int | None
    """The checkpoint that was under way then."""

    def failed(self) -> bool:
        """Whether some rank could not read its records."""
        return self.sums()[0] > 0

    def stopped(self) -> bool:
        """Whether some rank is told to stop."""
        return self.sums()[1] > 0


class StepSynchronizer:
    """Reads the records of steps, and announces them to the other ranks."""

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
        """done: the steps before the first. steps: the last step. gathering: the streams whose auxiliary state gathers.
        locks: on the run's directory, on rank 0."""
        self.announced, self.steps, self.gathering, self.locks = done, steps, gathering, locks
        self.process, self.host_group, self.stop, self.watch = process, host_group, stop, watch
        self.checkpoint_manager = checkpoint_manager
        self.waited = 0.0
        """The seconds of waiting for records since `take_wait`."""
        self.last_flush = time.monotonic()
        """When metrics were last read, or rank 0 asked for it."""
        self.length = 0
        """The number of numbers in a message."""
        self.pending: deque[PendingStep] = deque()
        """The steps that are announced and have not begun."""
        self.flying: deque[PendingStep] = deque()
        """The steps whose sums had not arrived when a step began."""
        self.begun, self.took = 0, deque([1], maxlen=SEEN)
        """The number of steps begun, and how many of them the last messages took at least."""
        self.error: Exception | None = None
        """Why this rank can read no more records."""

    def next(self, batches: Iterator[StepBatch]) -> PendingStep | None:
        """The step that begins, or None after the last. The caller keeps the iterator: in a reference cycle, a garbage
        collection would wait for its workers."""
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
        """Announce steps until `ahead` of them wait. A rank that cannot read says so, and all end at that step."""
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
            if not self.length:  # the first step: the other ranks wait for nothing else
                raise
            return self._failed(error)
        assert batch.step == self.announced - 1, (batch.step, self.announced)
        self.waited += time.monotonic() - started
        return self._send(batch)

    def take_wait(self) -> float:
        """The seconds of waiting for records since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited

    def note_flush(self) -> None:
        """Metrics are read now."""
        self.last_flush = time.monotonic()

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
            self.note_flush()
        ahead = min(max(FEWEST, median_low(self.took) + 1), MOST) if self.process.is_main else 0
        asked = [int(flush), int(self.checkpoint_manager.written), ahead]
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
