"""The ranks agree on each step: each rank sends one small message, and the messages are summed while earlier steps run.

A rank's message has the counts, the cost, the samples and the auxiliary vectors of its part of the step. It also says
if the rank could not read its records or was asked to stop, and rank 0's message says if metrics are due. Messages are
sent over gloo, between the hosts' CPUs: gloo notices at once that a rank is gone, and the host reads the sum without
waiting for the device.

A sum goes twice around a ring of all ranks, so its time grows with the number of ranks, and may exceed the time of a
step. Messages are therefore sent `steps_announced_ahead` steps ahead. The content of a step does not depend on this
number, but a request to stop takes effect that many steps later.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, NoReturn

from torch.utils._pytree import tree_flatten, tree_unflatten

from xscale.data.loader import StepBatch
from xscale.errors import DirectoryTaken, MachineError, UserError
from xscale.metric_keys import Counts
from xscale.ranks import CpuGroup
from xscale.recipe import Recipe
from xscale.run.metrics import RunMetrics
from xscale.run.run_status import MACHINE, USER_ERROR, exit_code_and_message
from xscale.run.watch import RunContext

RANKS_OF_A_STEP = 128
"""With this many more ranks, messages take about one step longer."""


def steps_announced_ahead(world: int) -> int:
    """Return how many steps ahead `world` ranks send their messages: 2 for few ranks, 10 for 1,024."""
    return 2 + world // RANKS_OF_A_STEP


class AgreedStep(NamedTuple):
    """A step that all ranks begin. All numbers but those of `batch` are summed over ranks."""

    batch: StepBatch
    """This rank's part of the step."""
    counts: Counts
    """The step's counts without a language in their key, see Row.counts."""
    cost: dict[str, int]
    """Row.cost of the step's rows."""
    samples: int
    report_metrics: int
    """1 if rank 0 asks all ranks to report metrics after this step, otherwise 0."""
    vector_counts_of_ranks: Mapping[str, list[int]]
    """Stream -> the number of vectors that each rank computes for the auxiliary state."""

    def too_long_pair_count(self) -> int:
        """Return the number of pairs longer than data.max_length."""
        return sum(count for key, count in self.counts.items() if key.name == "too_long")


class StepSynchronizer:
    """Reads the records of this rank's part of each step, and announces the steps to the other ranks."""

    def __init__(self, context: RunContext, metrics: RunMetrics, done: int, steps: int):
        """Begin after `done` steps. steps: the run's last step."""
        self.context = context
        self.metrics = metrics
        self.announced = done
        """The number of the last step that is announced, counted from 1."""
        self.steps = steps
        self.ahead = steps_announced_ahead(context.process.world)
        self.read_s = 0.0
        """The seconds for which the last call of `next_step` waited for records."""
        self.length = 0
        """The number of numbers of a message; 0 before the first one."""
        self.pending: deque[Callable[[], AgreedStep | None]] = deque()
        """For each step that is announced and has not begun, the function that `_announce` has returned."""
        self.error: Exception | None = None
        """The error after which this rank reads no more records."""

    def next_step(self, batches: Iterator[StepBatch]) -> AgreedStep | None:
        """Announce the steps that are due, and return the one that begins now; None: a rank was asked to stop. If a
        rank cannot read its part of the step, all ranks raise an error; if it cannot read its part of the first step
        since the start, it raises the error alone. batches: this rank's parts of the steps. They are an argument
        instead of an attribute, because in a reference cycle the garbage collector would wait for their worker
        processes."""
        self.read_s = 0.0
        while len(self.pending) <= self.ahead and self.announced < self.steps:
            self.announced += 1
            self.pending.append(self._announce(self._read_or_store_error(batches)))
        wait_for_agreement = self.pending.popleft()
        self.context.watch.note_progress(
            f"waiting for the other ranks to begin step {self.announced - len(self.pending)}"
        )
        return wait_for_agreement()

    def _read_or_store_error(self, batches: Iterator[StepBatch]) -> StepBatch | None:
        """Return this rank's part of step `self.announced`; None if this part or an earlier one could not be read.
        `self.error` has the error. Before this rank's first message, the error is raised."""
        self.context.watch.note_progress(f"reading the records of step {self.announced}")
        started = time.monotonic()
        try:
            if self.error:
                return None
            batch = next(batches)
            for lock in self.context.locks:
                lock.check_not_taken_over()
        except Exception as error:
            if not self.length:  # the length of messages is not known; the other ranks end because this rank ends
                raise
            self.error = error
            return None
        self.read_s += time.monotonic() - started
        return batch

    def _announce(self, batch: StepBatch | None) -> Callable[[], AgreedStep | None]:
        """Send this rank's message about a step. Return a function that waits for the messages of all ranks and returns
        the result of `next_step`. batch: this rank's part of the step; None: it could not be read."""
        structure = None
        # A message begins with two flags: this rank could not read the step, and it was asked to stop. All messages
        # have the same length.
        if batch is None:
            message = [1, *[0] * (self.length - 1)]
        else:
            vector_counts_of_ranks = dict[str, list[int]]()
            for stream, count in batch.auxiliary_vector_counts().items():
                vector_counts_of_ranks[stream] = [0] * self.context.process.world
                vector_counts_of_ranks[stream][self.context.process.rank] = count
            numbers, structure = tree_flatten(
                {
                    "counts": batch.counts_without_languages(),
                    "cost": batch.cost(),
                    "samples": batch.sample_count(),
                    "report_metrics": int(self.context.process.is_main and self.metrics.restart_report_timer_if_due()),
                    "vector_counts_of_ranks": vector_counts_of_ranks,
                }
            )
            message = [0, int(bool(self.context.stop)), *numbers]
            self.length = len(message)
        wait_for_sums = self.context.cpu_group.begin_sum(message)

        def wait_for_agreement() -> AgreedStep | None:
            failed, stopped, *sums = wait_for_sums()
            if failed:
                report_steps_and_raise(self.error, self.context.cpu_group, self.metrics)
            if stopped:
                return None
            assert batch and structure
            return AgreedStep(batch, **tree_unflatten(sums, structure))

        return wait_for_agreement


def check_step_has_targets(agreed: AgreedStep, step: int, recipe: Recipe) -> None:
    """Raise UserError on all ranks if a step has no targets. step: its number, counted from 1."""
    if any(count for key, count in agreed.counts.items() if key.name == "count"):
        return
    raise UserError(
        f"step {step} has no tokens to predict. The number of its pairs that are longer than data.max_length "
        f"({recipe.data.max_length} tokens) is {agreed.too_long_pair_count():,}. Set more samples per step "
        "(streams.NAME.samples). If data.overlong is drop, the run leaves out long pairs: set a larger data.max_length "
        "or data.overlong=truncate"
    )


def report_steps_and_raise(error: Exception | None, cpu_group: CpuGroup, metrics: RunMetrics) -> NoReturn:
    """Raise on all ranks, after some could not read their records. A rank raises its own error; a rank without an error
    raises another rank's. Before, the ranks report the steps that they have done, unless another run has taken the
    directory. error: this rank's error; None: it has none. All ranks call it together."""
    problem = error
    if error and not isinstance(error, DirectoryTaken):
        code, text = exit_code_and_message(error)
        kinds = {USER_ERROR: UserError, MACHINE: MachineError}
        problem = kinds.get(code, RuntimeError)(f"rank {cpu_group.rank}: {text}")
    problems = [other for other in cpu_group.all_gather(problem) if other]
    first = min(problems, key=lambda other: not isinstance(other, DirectoryTaken))
    if not isinstance(first, DirectoryTaken):
        metrics.reduce_and_report_steps()
    raise error or first
