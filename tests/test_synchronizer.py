"""Messages of ranks are sent so far ahead that no step waits for them, and all ranks send equally many."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from xscale.ranks import Process
from xscale.run import loop
from xscale.run.synchronizer import FEWEST, MOST, StepSynchronizer

STEPS, RANKS = 120, 2


@dataclass
class Network:
    """Where every message takes `steps` steps."""

    steps: float
    now: float = 0.0
    sent: list[list[list[int]]] = field(default_factory=lambda: [[] for _ in range(RANKS)])
    waits: list[float] = field(default_factory=list)
    """The steps that began before their message was there."""

    def begin_sum(self, rank: int, numbers: list[int]) -> Any:
        self.sent[rank].append(numbers)
        number, arrives = len(self.sent[rank]) - 1, self.now + self.steps

        def wait() -> list[int]:
            if self.now < arrives:
                self.waits.append(self.now)
            return [sum(of) for of in zip(*(of_rank[number] for of_rank in self.sent), strict=True)]

        return SimpleNamespace(is_complete=lambda: self.now >= arrives, wait=wait)


def batch(step: int) -> Any:
    """A rank's share of a step with a target more than the step before has."""
    empty: dict[str, int] = {}
    return SimpleNamespace(
        step=step,
        targets=lambda: {("tlm", "mlm"): step},
        cost=lambda: {"tokens": 0},
        too_long=lambda: empty,
        auxiliary_vector_counts=lambda: empty,
        samples=lambda: 1,
    )


def synchronizer(rank: int, network: Network, stop: list[str]) -> StepSynchronizer:
    host_group = SimpleNamespace(begin_sum=lambda numbers: network.begin_sum(rank, numbers))
    watch, process = SimpleNamespace(note=lambda doing: None), Process(rank, RANKS, rank, RANKS)
    engine = SimpleNamespace(module=SimpleNamespace(auxiliary_states={}))
    context: Any = SimpleNamespace(
        engine=engine, process=process, host_group=host_group, stop=stop, watch=watch, locks=[]
    )
    checkpoint_manager: Any = SimpleNamespace(is_written=False, under_way=None)
    return StepSynchronizer(context, checkpoint_manager, 0, STEPS)


def batches(failing: int) -> Any:
    for step in range(STEPS):
        if step == failing:
            raise ValueError("a damaged record")
        yield batch(step)


def run(network: Network, slower: dict[int, float] | None = None, stop: int = -1, fails: int = -1) -> dict[str, Any]:
    """The steps of a run. slower: by step, how long messages take from then on; stop: the step in which rank 1 is told
    to; fails: the step that it cannot read."""
    told: list[list[str]] = [[] for _ in range(RANKS)]
    ranks = [synchronizer(rank, network, told[rank]) for rank in range(RANKS)]
    data = [batches(-1), batches(fails)]
    ahead, done, end = [], 0, ""
    while True:
        coming = [rank.next(of) for rank, of in zip(ranks, data, strict=True)]
        if None in coming:
            break
        if any(one.failed() for one in coming) or any(one.stopped() for one in coming):
            end = "failed" if coming[0].failed() else "stopped"
            assert all((one.failed(), one.stopped()) == (coming[0].failed(), coming[0].stopped()) for one in coming)
            break
        counts = [one.counts() for one in coming]
        assert counts[0] == counts[1] and counts[0].targets == {("tlm", "mlm"): RANKS * done}
        for rank, of in zip(ranks, data, strict=True):
            rank.announce(of, counts[0].ahead)
        ahead.append(len(ranks[0].pending))
        assert len({len(of_rank) for of_rank in network.sent}) == 1
        if done == stop:
            told[1].append("a signal")
        network.steps = (slower or {}).get(done, network.steps)
        network.now, done = network.now + 1, done + 1
    return {"ahead": ahead, "done": done, "end": end}


@pytest.mark.parametrize("steps", [0.1, 0.9, 3.0, 7.5])
def test_no_step_waits_for_its_message(steps: float) -> None:
    network = Network(steps)
    told = run(network)
    settled = [at for at in network.waits if at > 60]
    assert told["done"] == STEPS and not settled, settled
    assert max(told["ahead"]) <= steps + 3 and min(told["ahead"][:-MOST]) >= FEWEST
    assert FEWEST == 2 or steps > 1


def test_it_follows_messages_that_become_slower_and_faster() -> None:
    network = Network(0.5)
    ahead = run(network, {40: 4.0, 80: 0.5})["ahead"]
    assert ahead[39] == FEWEST and ahead[79] >= 5 and ahead[105] == FEWEST
    assert not [at for at in network.waits if 65 < at < 80 or at > 85]


def test_messages_that_take_too_long_are_waited_for() -> None:
    """Nobody reads the data of hundreds of steps in advance."""
    assert 8 < max(run(Network(100.0))["ahead"]) <= MOST


@pytest.mark.parametrize(("steps", "later"), [(0.1, 2), (3.0, 6)])
def test_a_stop_comes_so_many_steps_later(steps: float, later: int) -> None:
    """A signal in step 51 ends the run behind step 53, or as many later as its message takes and two."""
    told = run(Network(steps), stop=50)
    assert told["end"] == "stopped" and 51 + FEWEST <= told["done"] <= 51 + later


def test_what_a_rank_cannot_read_ends_all_of_them_before_that_step() -> None:
    told = run(Network(3.0), fails=50)
    assert (told["done"], told["end"]) == (50, "failed")


def test_the_loop_does_what_ranks_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop of any rank ends the loop before the step, and the targets of all ranks divide the step's losses."""
    total, own = {("tlm", "mlm"): 12}, {("tlm", "mlm"): 5}
    counts = SimpleNamespace(targets=total, ahead=1, auxiliary={})
    pending = SimpleNamespace(
        failed=lambda: False, counts=lambda: counts, batch=SimpleNamespace(rows=[], targets=lambda: own), error=None
    )

    class Stepped(Exception):
        pass

    class NotAsked:
        late, has_stepped = False, True

        def __bool__(self) -> bool:
            return False

    def step(engine: Any, recipe: Any, rows: Any, totals: Any, **options: Any) -> None:
        raise Stepped(totals)

    monkeypatch.setattr(loop, "optimizer_step", step)
    monkeypatch.setattr(loop, "check_targets", lambda *arguments: None)
    monkeypatch.setattr(loop, "keeps_whole_weights", lambda engine: True)
    made: Any = object.__new__(loop.Trainer)
    recipe: Any = SimpleNamespace(at=lambda step: recipe)
    recipe.train = SimpleNamespace(skips=lambda step: False, measure_every=0)
    made.recipe, made.step, made.unreported = recipe, 3, []
    made.process, made.engine = Process(0, 2, 0, 2), SimpleNamespace(skipped_steps=0)
    made.watch, made.stop = SimpleNamespace(note=lambda doing: None), NotAsked()
    made.synchronizer = SimpleNamespace(next=lambda batches: pending, announce=lambda batches, ahead: None)
    made.stop_early = lambda: 75
    pending.stopped = lambda: True
    assert made.loop(iter([])) == 75
    pending.stopped = lambda: False
    with pytest.raises(Stepped) as raised:
        made.loop(iter([]))
    assert raised.value.args == (total,)
