"""The ranks agree on each step: each rank sends one small message, and the messages are summed while earlier steps run.

With many ranks a sum may take longer than a step, so each message is sent enough steps ahead for its sum to arrive
before its step begins. Rank 0 measures how many steps a message takes. Each message says how many steps ahead the ranks
send once its step begins. The content of a step does not depend on this number, but a request to stop takes effect that
many steps later.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from xscale.checkpoint.manager import CheckpointManager
from xscale.data.loader import StepBatch
from xscale.errors import UserError
from xscale.files import Lock
from xscale.metric_keys import Counts
from xscale.objectives import HasQueue
from xscale.ranks import HostGroup, PendingSum, Process
from xscale.recipe import Recipe
from xscale.run.folder import Status
from xscale.run.watch import StopRequest, Watch
from xscale.step.ds_config import EngineConfig

FLUSH_SECONDS = 1.0
"""The least time between two readings of metrics from the device, since each reading waits for the device."""
FEWEST, MOST = 2, 16
"""The least and the greatest number of steps ahead that a message is sent. Between these limits, it is one more than
the number of steps that a message takes."""
SEEN = 7
"""The number of recent messages over which the median of the steps that a message takes is computed."""


class TrainerContext(NamedTuple):
    """The objects that a trainer works with."""

    config: EngineConfig
    engine: Any
    out: Path
    process: Process
    host_group: HostGroup
    status: Status
    stop: StopRequest
    watch: Watch
    locks: list[Lock]
    """The lock on `out` on rank 0; empty on the other ranks."""


class GlobalCounts(NamedTuple):
    """The numbers of a step: those of one rank in its message, later their sums over ranks."""

    targets: Counts
    """The counts of the step that are not of a single language, see Row.counts."""
    cost: dict[str, int]
    """Row.cost of the step's rows."""
    samples: int
    flush: int
    """1 if rank 0 asks to read metrics after this step, otherwise 0."""
    written: int = 0
    """The number of ranks that have written their part of the checkpoint under way."""
    ahead: int = FEWEST
    """The number of steps after this one that the ranks announce before they make this one."""
    auxiliary: Mapping[str, list[int]] = {}
    """Stream -> the number of vectors that each rank computes for the auxiliary state, if ranks exchange them."""

    def too_long(self) -> int:
        """Return the number of pairs longer than data.max_length."""
        return sum(count for key, count in self.targets.items() if key.name == "too_long")


@dataclass
class PendingStep:
    """An announced step, whose sums over ranks may not have arrived yet."""

    batch: Any
    """The StepBatch, or None if this rank has an error."""
    error: Exception | None
    """The error that kept this rank from reading its records, or that forbids it to go on."""
    message: PendingSum
    """The message says if a rank has failed and if one was asked to stop, and has the leaves of GlobalCounts."""
    form: TreeSpec | None
    sent: int
    """The number of steps that had begun when the message was sent."""
    saving: int | None
    """The step of the checkpoint that was under way when the message was sent, or None."""

    @cached_property
    def sums(self) -> list[int]:
        """The sums of the message over ranks, for which the first call waits."""
        return self.message.wait()

    def failed(self) -> bool:
        """Return whether any rank could not read its records."""
        return self.sums[0] > 0

    def stopped(self) -> bool:
        """Return whether any rank was asked to stop."""
        return self.sums[1] > 0

    def counts(self) -> GlobalCounts:
        assert self.form
        return tree_unflatten(self.sums[2:], self.form)


class StepSynchronizer:
    """Reads the records of this rank's part of each step, and announces the steps to the other ranks."""

    def __init__(self, context: TrainerContext, checkpoint_manager: CheckpointManager, done: int, steps: int):
        """Begin after `done` steps. steps: the run's last step."""
        self.announced, self.steps, self.checkpoint_manager = done, steps, checkpoint_manager
        auxiliary_states = context.engine.module.auxiliary_states.items()
        self.gathering = {stream for stream, state in auxiliary_states if isinstance(state, HasQueue)}
        """The streams whose auxiliary state exchanges its vectors between all ranks once a step."""
        self.process, self.host_group, self.locks = context.process, context.host_group, context.locks
        self.stop, self.watch = context.stop, context.watch
        self.waited = 0.0
        self.last_flush = time.monotonic()
        """The time when metrics were last read, or when rank 0 asked for that."""
        self.length = 0
        """The length of a message; 0 before the first one."""
        self.pending: deque[PendingStep] = deque()
        """The steps that are announced and have not begun."""
        self.flying: deque[PendingStep] = deque()
        """The announced steps whose sums had not arrived when the last step began."""
        self.begun, self.took = 0, deque([1], maxlen=SEEN)
        """The number of steps begun, and for each recent message the number of steps begun while it was under way."""
        self.error: Exception | None = None
        """The error after which this rank reads no more records."""

    def next(self, batches: Iterator[StepBatch]) -> PendingStep | None:
        """Return the step that begins now, or None after the last one. `batches` is an argument and no attribute: in a
        reference cycle, a garbage collection would wait for its worker processes."""
        self.begun += 1
        while self.flying and self.flying[0].message.is_complete():
            self.took.append(self.begun - self.flying.popleft().sent)
        if not self.pending:
            self.announce(batches, 1)
        pending = self.pending.popleft() if self.pending else None
        if self.flying and self.flying[0] is pending:
            self.took.append(self.begun - self.flying.popleft().sent + 1)
        return pending

    def announce(self, batches: Iterator[StepBatch], ahead: int) -> None:
        """Announce steps until `ahead` are pending. If a rank cannot read a step, all ranks end at that step."""
        while len(self.pending) < ahead and self.announced < self.steps:
            self.announced += 1
            self.pending.append(self._failed(self.error) if self.error else self._read(batches))
            self.flying.append(self.pending[-1])

    def _read(self, batches: Iterator[StepBatch]) -> PendingStep:
        """Read the records of the next step and send this rank's message about it."""
        self.watch.note(f"reading the records of step {self.announced}")
        started = time.monotonic()
        try:
            batch = next(batches)
            for lock in self.locks:
                lock.check()
        except Exception as error:
            if not self.length:  # at the first step there is no message yet: the others end because this rank does
                raise
            return self._failed(error)
        assert batch.step == self.announced - 1, (batch.step, self.announced)
        self.waited += time.monotonic() - started
        manager = self.checkpoint_manager
        flush = self.process.is_main and time.monotonic() - self.last_flush >= FLUSH_SECONDS
        if flush:
            self.last_flush = time.monotonic()
        own = GlobalCounts(
            targets=batch.targets(),
            cost=batch.cost(),
            samples=batch.samples(),
            flush=int(flush),
            written=int(manager.is_written),
            ahead=self.steps_ahead() if self.process.is_main else 0,
            auxiliary=self.own_vector_counts(batch),
        )
        numbers, form = tree_flatten(own)
        message = self.host_group.begin_sum([0, int(bool(self.stop)), *numbers])
        self.length = 2 + len(numbers)
        return PendingStep(batch, None, message, form, self.begun, manager.under_way)

    def steps_ahead(self) -> int:
        """Return how many steps ahead messages are sent, by the time that recent messages took."""
        return min(max(FEWEST, median_low(self.took) + 1), MOST)

    def own_vector_counts(self, batch: StepBatch) -> dict[str, list[int]]:
        """Return GlobalCounts.auxiliary of a message: this rank's numbers of vectors, and 0 for the other ranks."""
        counts = dict[str, list[int]]()
        for stream, vectors in batch.auxiliary_vector_counts().items():
            if stream in self.gathering:
                counts[stream] = [0] * self.process.world
                counts[stream][self.process.rank] = vectors
        return counts

    def take_wait(self) -> float:
        """Return the seconds of waiting for records since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited

    def stops_next(self) -> bool:
        """Return whether any rank was asked to stop before the step that begins next."""
        return bool(self.pending) and self.pending[0].stopped()

    def _failed(self, error: Exception) -> PendingStep:
        self.error = error
        message = self.host_group.begin_sum([1, *[0] * (self.length - 1)])
        return PendingStep(None, error, message, None, self.begun, None)


def check_targets(counts: GlobalCounts, step: int, recipe: Recipe) -> None:
    """Raise UserError on all ranks if a step has no targets."""
    if any(count for key, count in counts.targets.items() if key.name == "count"):
        return
    data = recipe.data
    raise UserError(
        f"step {step} has no targets: of its pairs {counts.too_long():,} were longer than data.max_length "
        f"{data.max_length} (data.overlong: {data.overlong}). Take a larger max_length, data.overlong=truncate, or "
        f"more samples per step"
    )
