"""Messages of ranks are sent so far ahead that no step waits for them; a stop and a failure end all ranks together."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from xscale.metric_keys import count_key
from xscale.ranks import Process
from xscale.run.synchronizer import StepSynchronizer, steps_announced_ahead

STEPS, RANKS, AHEAD = 40, 2, 2
TLM = count_key("tlm", "mlm")


@dataclass
class Network:
    """Where every message takes `steps` steps."""

    steps: float
    now: int = 0
    sent: list[list[list[int]]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    waits: list[int] = field(default_factory=list)
    """The steps that began before their message was there."""

    def begin_sum(self, rank: int, numbers: list[int]) -> Any:
        self.sent[rank].append(numbers)
        number = len(self.sent[rank]) - 1
        arrives = self.now + self.steps

        def wait() -> list[int]:
            if self.now < arrives:
                self.waits.append(self.now)
            while any(len(of_rank) <= number for of_rank in self.sent):
                time.sleep(0.001)
            return [sum(of) for of in zip(*(of_rank[number] for of_rank in self.sent), strict=True)]

        return wait


def batch(step: int) -> Any:
    """A rank's share of a step with a target more than the step before has."""
    return SimpleNamespace(
        step=step,
        counts_without_languages=lambda: {TLM: step},
        cost=dict,
        auxiliary_vector_counts=dict,
        sample_count=lambda: 1,
    )


def batches(failing: int) -> Any:
    for step in range(STEPS):
        if step == failing:
            raise ValueError("a damaged record")
        yield batch(step)


class Failed(Exception):
    """Return the error that report_steps_and_raise raises."""


def raise_without_report(*_: Any) -> None:
    raise Failed


def synchronizer(rank: int, network: Network, stop: list[str]) -> StepSynchronizer:
    cpu_group = SimpleNamespace(begin_sum=lambda numbers: network.begin_sum(rank, numbers))
    context: Any = SimpleNamespace(process=Process(rank, RANKS, rank, RANKS), cpu_group=cpu_group)
    context.stop = stop
    context.watch = SimpleNamespace(note_progress=lambda doing: None)
    context.locks = []
    metrics: Any = SimpleNamespace(restart_report_timer_if_due=lambda: False)
    return StepSynchronizer(context, metrics, 0, STEPS)


def run(network: Network, stop: int = -1, fails: int = -1) -> tuple[int, str]:
    """Return the number of steps done, and how the run ended. stop: the step in which rank 1 is told to stop; fails:
    the step that it cannot read, before which all ranks raise."""
    told: list[list[str]] = [[] for _ in range(RANKS)]
    ranks = [synchronizer(rank, network, told[rank]) for rank in range(RANKS)]
    data = [batches(-1), batches(fails)]
    for done in range(STEPS):
        with ThreadPoolExecutor(RANKS) as pool:
            agreed = [pool.submit(rank.next_step, of_rank) for rank, of_rank in zip(ranks, data, strict=True)]
        if agreed[0].exception():
            assert all(isinstance(step.exception(), Failed) for step in agreed)
            return done, "failed"
        steps: list[Any] = [step.result() for step in agreed]
        if None in steps:
            assert steps == [None, None]
            return done, "stopped"
        assert steps[0]._replace(batch=None) == steps[1]._replace(batch=None)
        assert steps[0].counts == {TLM: RANKS * done}
        if done == stop:
            told[1].append("a signal")
        network.now += 1
    return STEPS, "done"


def test_messages_are_sent_further_ahead_by_more_ranks() -> None:
    assert [steps_announced_ahead(world) for world in (1, 2, 64, 128, 1024)] == [2, 2, 2, 3, 10]


@pytest.mark.parametrize("steps", [0.1, 0.9, AHEAD])
def test_no_step_waits_for_its_message(steps: float) -> None:
    network = Network(steps)
    assert run(network) == (STEPS, "done")
    assert max(network.waits, default=0) < AHEAD, "only the first steps wait"


def test_a_message_that_takes_too_long_is_waited_for() -> None:
    network = Network(5.0)
    assert run(network) == (STEPS, "done") and network.waits


def test_a_stop_comes_as_many_steps_later() -> None:
    """A signal in step 11 is in the message of step 14, before which the run ends."""
    assert run(Network(0.1), stop=10) == (10 + 1 + AHEAD, "stopped")


def test_what_a_rank_cannot_read_ends_all_of_them_before_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xscale.run.synchronizer.report_steps_and_raise", raise_without_report)
    assert run(Network(2.0), fails=30) == (30, "failed")
