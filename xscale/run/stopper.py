"""Ends a run before its last step, if it was asked to stop or if a rank cannot continue."""

from typing import NamedTuple, NoReturn

from xscale.errors import DirectoryTaken, MachineError, UserError
from xscale.run.folder import MACHINE, USER_ERROR, explain
from xscale.run.reporting import RunMetrics
from xscale.run.state import RunContext, TrainState
from xscale.run.synchronizer import StepSynchronizer


class RankFailure(NamedTuple):
    """The reason why a rank cannot continue, which is sent to the other ranks."""

    code: int
    """The exit code."""
    text: str
    directory_taken: bool


class Stopper:
    """Ends a run early, on all ranks together."""

    def __init__(
        self,
        context: RunContext,
        synchronizer: StepSynchronizer,
        metrics: RunMetrics,
        state: TrainState,
    ):
        """Begin with the run in this state."""
        self.context = context
        self.synchronizer = synchronizer
        self.metrics = metrics
        context.status.note_step(state.step)

    def after_step(self, state: TrainState) -> None:
        self.context.stop.note_step()
        self.context.status.note_step(state.step)

    def stops_next(self) -> bool:
        """Return whether any rank was asked to stop before the step that begins next."""
        return self.synchronizer.stops_next()

    def end_failed(self, error: Exception | None) -> NoReturn:
        """End all ranks after one could not read its records. That rank raises its error, and the others an error with
        the same message. First write the metrics, unless another run has taken the directory."""
        failure = None
        if error:
            code, text = explain(error)
            failure = RankFailure(code, text, isinstance(error, DirectoryTaken))
        failures = dict[int, RankFailure]()
        for rank, failure_of_rank in enumerate(self.context.host_group.gather(failure)):
            if failure_of_rank:
                failures[rank] = failure_of_rank
        replaced = any(failure_of_rank.directory_taken for failure_of_rank in failures.values())
        if not replaced:
            self.metrics.flush()
        if error:
            raise error
        rank, first = next(iter(failures.items()))
        if replaced:
            raise DirectoryTaken(first.text)
        kinds = {USER_ERROR: UserError, MACHINE: MachineError}
        raise kinds.get(first.code, RuntimeError)(f"rank {rank}: {first.text}")
