"""What samples will have in tokens, known before they are read."""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import launch
from tests.launch import open_run
from xscale.checkpoint.store import Checkpoint
from xscale.data.calibrate import (
    choose_groups_to_tokenise,
    correction_from_groups,
    fit_slope_and_intercept,
    fit_tokens_to_bytes,
)
from xscale.data.calibration import Calibration, Correction
from xscale.data.loader import Loader
from xscale.data.mixture import Mixture, initial_state
from xscale.metric_keys import MetricKey
from xscale.ranks import Process
from xscale.run.resume import restore_or_measure_calibration

MAX_LENGTH = 128
RECIPES = ["mixed", "tlm", "mlm", "ppa", "contextual"]


@pytest.fixture(scope="module")
def loader(demo: Path):
    """job(recipe, "key=value", ...): a calibrated job on the demo corpus. Each is measured once."""

    @cache
    def make(recipe: str, *sets: str) -> Loader:
        return open_run(recipe, ["data.workers=0", *sets], [demo])

    return make


def place(rank: int = 0, world: int = 1) -> Process:
    return Process(rank, world, rank, world)


def mixture_of(loader: Loader) -> Mixture:
    return loader.mixture(place(), "cpu", initial_state(loader.last_streams))


# 1. Records


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50), st.integers(1, 20), st.integers(-100, 100))
def test_a_line_goes_through_its_points(lengths: list[int], tenths: int, base: int) -> None:
    """Where tokens are a line of the bytes it is found; always are they right on average."""
    x = np.array(lengths, dtype=float)
    for y in (tenths / 10 * x + base + 200, np.random.default_rng(len(lengths)).uniform(1, 50, len(x))):
        a, b = fit_slope_and_intercept(x, y)
        assert a >= 0 and (a * x + b).mean() == pytest.approx(y.mean(), abs=0.01)
    if len(set(lengths)) > 1:
        assert fit_slope_and_intercept(x, tenths / 10 * x + base + 200) == pytest.approx(
            (tenths / 10, base + 200), abs=0.02
        )


def test_records_of_one_length_and_records_of_no_sense() -> None:
    assert fit_slope_and_intercept(np.full(9, 50.0), np.full(9, 10.0)) == (0.2, 0.0)
    assert fit_slope_and_intercept(np.array([10.0, 20.0]), np.array([9.0, 3.0])) == (0.4, 0.0), (
        "a shorter record has not more tokens"
    )
    found = Calibration([(0.5, -30.0)], {})
    assert found.estimated_tokens(0, np.array([10.0, 100.0])).tolist() == [1.0, 20.0], "nor less than one"


def test_records_of_all_shards_tell_a_source_s_line(tokenizer) -> None:
    """A source that begins otherwise than it goes on; and of each record some bytes hold no text."""

    class Source:
        counts = np.array([50, 3, 500])

        def read(self, shard: int, record: int) -> Any:
            return SimpleNamespace(texts=("a " * self.words(shard, record), "b"))

        def words(self, shard: int, record: int) -> int:
            return 3 if shard == 0 else 5 + record % 40

        def byte_lengths(self, shard: int, records: np.ndarray) -> np.ndarray:
            return np.array([60 + 2 * self.words(shard, record) for record in records.tolist()])

    source: Any = Source()
    assert fit_tokens_to_bytes(source, tokenizer) == pytest.approx((0.5, 0.5 * -60 + 3), abs=0.01)


# 2. Streams


def read(estimated_tokens: np.ndarray, true: np.ndarray, max_length: int = MAX_LENGTH) -> Correction:
    """What `calibrate` makes of samples that have `true` tokens, in one sequence each unless they have none."""
    groups = choose_groups_to_tokenise(estimated_tokens, max_length)
    tokens = np.array([true[group].sum() for group in groups])
    return correction_from_groups(estimated_tokens, groups, tokens, max_length)


def test_streams_of_which_nothing_or_all_is_over_the_length() -> None:
    estimated_tokens = np.linspace(5, 100, 2048)
    correction = read(estimated_tokens, estimated_tokens)
    assert correction.beyond is None
    assert correction.tokens_in_packed_rows(np.array([300.0]), MAX_LENGTH).tolist() == [300]
    dropped = read(estimated_tokens + 200, np.zeros(2048))
    assert (dropped.ratio, dropped.beyond) == (1.0, 0.0)
    cut = read(estimated_tokens + 200, np.full(2048, 128.0))
    assert (cut.ratio, cut.beyond) == (1.0, 128.0)


def test_without_measured_statistics_estimates_are_not_corrected() -> None:
    assert Correction().tokens_in_packed_rows(np.array([10.0, 999.0]), 50).tolist() == [10, 999]


def test_it_is_kept_as_json(loader) -> None:
    made = loader("mixed", "train.max_tokens=1500")
    found = made.calibration
    kept = json.loads(json.dumps(asdict(found)))
    assert Calibration.from_dict(kept) == found
    of_version_2 = json.loads(json.dumps(kept))
    for statistics in of_version_2["streams"].values():
        statistics |= {"tokens": 26.0, "sequences": 1.0, "noise": 0.1, "counted": 100, "counts": {"mlm": 7}}
    assert Calibration.from_dict(of_version_2) == found
    # At a resume it is not measured again: other dropped pairs in the same data would cut other rows.
    nobody: Any = None
    checkpoint = Checkpoint(Path(), 1, 1, launch.identity(made), {}, kept, {}, {})
    assert restore_or_measure_calibration(made.recipe, made.corpus, checkpoint, nobody) == found


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_have_as_many_tokens_as_estimated(loader, recipe: str) -> None:
    """Over some steps within 1.5 %."""
    made = loader(recipe, "train.max_tokens=1500")
    mixture, dataset = mixture_of(made), made.dataset()
    tokens, estimated = 0, 0.0
    for _ in range(8):
        start = mixture.state
        estimated += mixture.next_plan().row_tokens.sum()
        mixture.state = start
        tokens += sum(row.cost["tokens"] for row in dataset[mixture.next_plan_of_rank()].rows)
    assert tokens == pytest.approx(estimated, rel=0.015)


def test_long_pairs_are_estimated_as_what_becomes_of_them(loader) -> None:
    """Where a third is over the length: dropped or cut, the sum is right."""
    for overlong in ("drop", "truncate"):
        made = loader("tlm", "data.max_length=28", f"data.overlong={overlong}")
        mixture, dataset = mixture_of(made), made.dataset()
        beyond = made.calibration.streams["tlm"].beyond
        assert beyond is not None and (beyond < 5 if overlong == "drop" else 25 < beyond <= 28)
        found = []
        for _ in range(4):
            start = mixture.state
            estimated = mixture.next_plan().row_tokens.sum()
            mixture.state = start
            batch = dataset[mixture.next_plan_of_rank()]
            found.append([batch.counts()[MetricKey("too_long", "tlm")] / 128, batch.cost()["tokens"] / estimated])
        too_long, ratio = np.mean(found, axis=0)
        assert 0.1 < too_long < 0.6 and ratio == pytest.approx(1, abs=0.05)
