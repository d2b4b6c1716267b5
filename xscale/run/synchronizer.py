"""The ranks agree on each step: each rank sends one small message, and the messages are summed while earlier steps run.

A rank's message has the numbers of targets, tokens and samples of its part of the step. It also says if the rank could
not read its records, was asked to stop, or asks to read metrics. Messages are sent over gloo, between the hosts' CPUs:
gloo notices at once that a rank is gone, and the host reads the sum without waiting for the device.

A sum goes twice around a ring of all ranks, so its time grows with the number of ranks, and may exceed the time of a
step. Messages are therefore sent `steps_ahead` steps ahead. The content of a step does not depend on this number, but a
request to stop takes effect that many steps later.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from xscale.data.loader import StepBatch
from xscale.errors import DirectoryTaken, MachineError, UserError
from xscale.metric_keys import Counts
from xscale.objectives import HasQueue
from xscale.ranks import HostGroup, PendingSum
from xscale.recipe import Recipe
from xscale.run.folder import MACHINE, USER_ERROR, exit_code_and_message
from xscale.run.reporting import RunMetrics
from xscale.run.state import RunContext

RANKS_OF_A_STEP = 128
"""With this many more ranks, messages take about one step longer."""


def steps_ahead(world: int) -> int:
    """Return how many steps ahead `world` ranks send their messages: 2 for few ranks, 10 for 1,024."""
    return 2 + world // RANKS_OF_A_STEP


class GlobalCounts(NamedTuple):
    """The numbers of a step. A rank's message has the numbers of this rank; later they are summed over ranks."""

    targets: Counts
    """The step's counts without a language in their key, see Row.counts."""
    cost: dict[str, int]
    """Row.cost of the step's rows."""
    samples: int
    flush: int
    """1 if rank 0 asks to read metrics after this step, otherwise 0."""
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
    """The error because of which this rank could not read its records, or may not continue."""
    message: PendingSum
    """The message says whether a rank has failed and whether a rank was asked to stop, and has the numbers of
    GlobalCounts."""
    form: TreeSpec | None

    @cached_property
    def sums(self) -> list[int]:
        """The sums of the message over ranks. The first call waits for them."""
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

    def __init__(
        self, context: RunContext, metrics: RunMetrics, auxiliary_states: Mapping[str, Any], done: int, steps: int
    ):
        """Begin after `done` steps. auxiliary_states: by stream, those of the run's module. steps: the run's last
        step."""
        self.context = context
        self.metrics = metrics
        self.announced = done
        self.steps = steps
        self.ahead = steps_ahead(context.process.world)
        self.gathering = set[str]()
        """The streams whose auxiliary state exchanges its vectors between all ranks once a step."""
        for stream, state in auxiliary_states.items():
            if isinstance(state, HasQueue):
                self.gathering.add(stream)
        self.waited = 0.0
        self.length = 0
        """The length of a message; 0 before the first one."""
        self.pending: deque[PendingStep] = deque()
        """The steps that are announced and have not begun."""
        self.error: Exception | None = None
        """The error after which this rank reads no more records."""

    def next(self, batches: Iterator[StepBatch]) -> PendingStep:
        """Announce the steps that are due, and return the one that begins now. If a rank cannot read a step, all ranks
        end at that step. `batches` is an argument instead of an attribute, because in a reference cycle the garbage
        collector would wait for its worker processes."""
        while len(self.pending) <= self.ahead and self.announced < self.steps:
            self.announced += 1
            self.pending.append(self._announce_error(self.error) if self.error else self._read_step(batches))
        return self.pending.popleft()

    def _read_step(self, batches: Iterator[StepBatch]) -> PendingStep:
        """Read the records of the next step and send this rank's message about it."""
        self.context.watch.note(f"reading the records of step {self.announced}")
        started = time.monotonic()
        try:
            batch = next(batches)
            for lock in self.context.locks:
                lock.check()
        except Exception as error:
            if not self.length:  # before the first message, the other ranks end because this rank ends
                raise
            return self._announce_error(error)
        assert batch.step == self.announced - 1, (batch.step, self.announced)
        self.waited += time.monotonic() - started
        counts = GlobalCounts(
            targets=batch.targets(),
            cost=batch.cost(),
            samples=batch.samples(),
            flush=int(self.context.process.is_main and self.metrics.wants_flush()),
            auxiliary=self.own_vector_counts(batch),
        )
        numbers, form = tree_flatten(counts)
        self.length = 2 + len(numbers)
        message = self.context.host_group.begin_sum([0, int(bool(self.context.stop)), *numbers])
        return PendingStep(batch, None, message, form)

    def _announce_error(self, error: Exception) -> PendingStep:
        self.error = error
        message = self.context.host_group.begin_sum([1, *[0] * (self.length - 1)])
        return PendingStep(None, error, message, None)

    def own_vector_counts(self, batch: StepBatch) -> dict[str, list[int]]:
        """Return GlobalCounts.auxiliary of a message: this rank's numbers of vectors, and 0 for the other ranks."""
        counts = dict[str, list[int]]()
        for stream, vectors in batch.auxiliary_vector_counts().items():
            if stream in self.gathering:
                counts[stream] = [0] * self.context.process.world
                counts[stream][self.context.process.rank] = vectors
        return counts

    def take_wait(self) -> float:
        """Return the seconds of waiting for records since the last call."""
        waited = self.waited
        self.waited = 0.0
        return waited

    def stops_next(self) -> bool:
        """Return whether any rank was asked to stop before the step that begins next."""
        return bool(self.pending) and self.pending[0].stopped()


def check_targets(counts: GlobalCounts, step: int, recipe: Recipe) -> None:
    """Raise UserError on all ranks if a step has no targets."""
    if any(count for key, count in counts.targets.items() if key.name == "count"):
        return
    data = recipe.data
    raise UserError(
        f"step {step} has nothing to predict: {counts.too_long():,} of its pairs exceed data.max_length "
        f"{data.max_length} (data.overlong: {data.overlong}). Set a larger data.max_length, data.overlong=truncate, or "
        f"more samples per step"
    )


def end_all_ranks(error: Exception | None, host_group: HostGroup, metrics: RunMetrics) -> NoReturn:
    """Raise on all ranks, after some could not read their records. A rank raises its own error; a rank without an error
    raises the first error of another rank. All ranks write their metrics before, unless another run has taken the
    directory. error: this rank's error. All ranks call it together."""
    problem: Exception | None = None
    if error:
        code, text = exit_code_and_message(error)
        kinds = {USER_ERROR: UserError, MACHINE: MachineError}
        problem = kinds.get(code, RuntimeError)(f"rank {host_group.rank}: {text}")
        if isinstance(error, DirectoryTaken):
            problem = error
    problems = [other for other in host_group.gather(problem) if other]
    problems.sort(key=lambda other: not isinstance(other, DirectoryTaken))
    if not isinstance(problems[0], DirectoryTaken):
        metrics.flush()
    raise error or problems[0]
