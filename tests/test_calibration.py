"""What samples will have in tokens, known before they are read; and the shape of rows that are filled up by it."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xscale.checkpoint.store import Checkpoint
from xscale.data import mixture as mixing
from xscale.data.calibrate import bytes_to_tokens, estimate, fit_line, similar_samples
from xscale.data.calibration import Calibration, Estimate
from xscale.data.mixture import Mixture, StreamSpec, expected_bins, fit_row_shape, initial_state
from xscale.errors import UserError
from xscale.ranks import Process
from xscale.run.going_on import resume_calibration
from xscale.run_spec import RunSpec, resolve_run

MAX_LENGTH = 128
RECIPES = ["mixed", "tlm", "mlm", "alignlm", "ppa", "xlm", "contextual"]


@pytest.fixture(scope="module")
def run_spec(demo: Path):
    """job(recipe, "key=value", ...): a calibrated job on the demo corpus. Each is measured once."""

    @cache
    def make(recipe: str, *sets: str) -> RunSpec:
        return resolve_run(recipe, ["data.workers=0", *sets], [demo]).calibrated()

    return make


def place(rank: int = 0, world: int = 1) -> Process:
    return Process(rank, world, rank, world)


def mixture_of(run_spec: RunSpec, rank: int = 0, world: int = 1, rows: int = 1) -> Mixture:
    return run_spec.mixture(place(rank, world), "cpu", run_spec.specs, initial_state(run_spec.specs), rows)


# 1. Records


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50), st.integers(1, 20), st.integers(-100, 100))
def test_a_line_goes_through_its_points(lengths: list[int], tenths: int, base: int) -> None:
    """Where tokens are a line of the bytes it is found; always are they right on average."""
    x = np.array(lengths, dtype=float)
    for y in (tenths / 10 * x + base + 200, np.random.default_rng(len(lengths)).uniform(1, 50, len(x))):
        a, b = fit_line(x, y)
        assert a >= 0 and (a * x + b).mean() == pytest.approx(y.mean(), abs=0.01)
    if len(set(lengths)) > 1:
        assert fit_line(x, tenths / 10 * x + base + 200) == pytest.approx((tenths / 10, base + 200), abs=0.02)


def test_records_of_one_length_and_records_of_no_sense() -> None:
    assert fit_line(np.full(9, 50.0), np.full(9, 10.0)) == (0.2, 0.0)
    assert fit_line(np.array([10.0, 20.0]), np.array([9.0, 3.0])) == (0.4, 0.0), "a shorter record has not more tokens"
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

        def lengths(self, shard: int, records: np.ndarray) -> np.ndarray:
            return np.array([60 + 2 * self.words(shard, record) for record in records.tolist()])

    source: Any = Source()
    assert bytes_to_tokens(source, tokenizer) == pytest.approx((0.5, 0.5 * -60 + 3), abs=0.01)


# 2. Streams


def read(estimated_tokens: np.ndarray, true: np.ndarray, max_length: int = MAX_LENGTH) -> Estimate:
    """What `calibrate` makes of samples that have `true` tokens, in one sequence each unless they have none."""
    groups = similar_samples(estimated_tokens, max_length)
    lengths = [true[group][true[group] > 0] for group in groups]
    return estimate(estimated_tokens, groups, lengths, max_length)


def test_an_estimate_of_known_samples() -> None:
    rng = np.random.default_rng(0)
    estimated_tokens = rng.lognormal(3.5, 0.6, 2048)
    over = estimated_tokens > MAX_LENGTH
    for factor, noise, beyond in ((1.0, 0.1, 0.0), (1.5, 1.0, 190.0), (0.9, 0.0, 128.0)):
        true = np.where(
            over, beyond, estimated_tokens * factor + rng.normal(0, np.sqrt(noise * factor * estimated_tokens))
        )
        found = read(estimated_tokens, true)
        assert found.ratio == pytest.approx(factor, rel=0.02)
        assert found.beyond == pytest.approx(beyond, abs=0.1)
        assert found.noise == pytest.approx(noise, rel=0.4, abs=0.01)
        assert found.tokens == pytest.approx(true.mean(), rel=0.02)
        estimated = found.row_tokens(estimated_tokens, MAX_LENGTH)
        assert estimated.dtype == np.int64 and estimated.sum() == pytest.approx(true.sum(), rel=0.02)
        assert (np.abs(estimated[over] - beyond) <= 0.5).all()
        # The variance of rows is that of their samples, and of the ratio, which is the same error in all of them.
        rows = np.arange(2048) % 16
        errors = np.bincount(rows, weights=true - estimated)
        promise = float(np.sqrt(found.variance(np.bincount(rows, weights=estimated)).mean()))
        assert errors.std() <= 2 * promise + 10 and (noise == 0 or errors.std() >= promise / 3)
    assert Estimate().variance(np.array([500.0])) == 0
    assert Estimate(noise=2.0, counted=1000).variance(np.array([0, 10, 500, 1000])).tolist() == [0, 20.2, 1500, 4000]


def test_streams_of_which_nothing_or_all_is_over_the_length() -> None:
    estimated_tokens = np.linspace(5, 100, 2048)
    assert read(estimated_tokens, estimated_tokens).beyond is None
    assert read(estimated_tokens, estimated_tokens).row_tokens(np.array([300.0]), MAX_LENGTH).tolist() == [300]
    dropped = read(estimated_tokens + 200, np.zeros(2048))
    assert (dropped.ratio, dropped.beyond, dropped.tokens, dropped.noise) == (1.0, 0.0, 0.0, 0.0)
    cut = read(estimated_tokens + 200, np.full(2048, 128.0))
    assert (cut.ratio, cut.beyond, cut.tokens) == (1.0, 128.0, 128.0)


def test_streams_without_an_estimate_of_their_own() -> None:
    found = Calibration([(0.2, 0.0)], {"ppa": Estimate(1.5)})
    assert found.estimate_for("ppa") == Estimate(1.5)
    assert found.estimate_for("tlm") == Estimate() and found.estimate_for("tlm").row_tokens(
        np.array([10.0, 999.0]), 50
    ).tolist() == [10, 999]


def test_it_is_kept_as_json(run_spec) -> None:
    found = run_spec("mixed").calibration
    kept = json.loads(json.dumps(found.to_dict()))
    made = run_spec("mixed")
    assert Calibration.from_dict(kept, len(made.sources), list(made.recipe.streams)) == found
    # At a resume it is not measured again: other dropped pairs in the same data would cut other rows.
    nobody: Any = None
    assert (
        resume_calibration(made, Checkpoint(Path(), {"calibration": kept, "identity": made.identity()}), nobody)
        == found
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_have_as_many_tokens_as_estimated(run_spec, recipe: str) -> None:
    """Over some steps within 1.5 %, and each row as closely as its variance says."""
    made = run_spec(recipe, "train.max_tokens=1500")
    mixture, dataset = mixture_of(made), made.dataset(made.specs)
    errors, totals, sequences = [], np.zeros(2), np.zeros(2)
    for _ in range(8):
        start = mixture.state
        tokens, variance, counts = expected_bins(mixture, mixture.next_batch(), rows=1)
        mixture.state = start
        rows = dataset[mixture.next_step()].rows
        found = np.array([row.work.tokens for row in rows])
        errors += list((found - tokens) / np.sqrt(variance))
        totals += found.sum(), tokens.sum()
        sequences += sum(int((row.inputs.tokens.lengths > 0).sum()) for row in rows), counts.sum()
    assert totals[0] == pytest.approx(totals[1], rel=0.015)
    assert sequences[0] == pytest.approx(sequences[1], rel=0.02)
    assert 0.3 < np.sqrt(np.mean(np.square(errors))) < 2


def test_long_pairs_are_estimated_as_what_becomes_of_them(run_spec) -> None:
    """Where a third is over the length: dropped or cut, the sum is right."""
    for overlong in ("drop", "truncate"):
        made = run_spec("tlm", "data.max_length=28", f"data.overlong={overlong}")
        mixture, dataset = mixture_of(made), made.dataset(made.specs)
        beyond = made.calibration.estimate_for("tlm").beyond
        assert beyond is not None and (beyond < 5 if overlong == "drop" else 25 < beyond <= 28)
        found = []
        for _ in range(4):
            start = mixture.state
            estimated = sum(int(tokens.sum()) for tokens in mixture.next_batch().tokens.values())
            mixture.state = start
            batch = dataset[mixture.next_step()]
            found.append([batch.too_long()["tlm"] / 128, batch.work().tokens / estimated])
        too_long, ratio = np.mean(found, axis=0)
        assert 0.1 < too_long < 0.6 and ratio == pytest.approx(1, abs=0.05)


def test_the_same_everywhere(run_spec, demo: Path) -> None:
    """On each rank, at each resume, with other rows and another number of samples a step."""
    found = run_spec("ppa").calibration
    assert resolve_run("ppa", ["data.workers=0"], [demo]).calibrated().calibration == found
    assert run_spec("ppa", "train.max_tokens=512", "train.steps=9", "streams.ppa.samples=7").calibration == found
    assert run_spec("ppa", "train.seed=1").calibration != found


def test_tokens_instead_of_samples(run_spec) -> None:
    """As many samples as have so many tokens, within 5 %: of texts read twice fewer."""
    for recipe, stream, tokens in (("tlm", "tlm", 5000), ("ppa", "ppa", 5000), ("mlm", "mlm", 3000)):
        made = run_spec(recipe, f"streams.{stream}.samples=null", f"streams.{stream}.tokens={tokens}")
        mixture, dataset = mixture_of(made), made.dataset(made.specs)
        found = [dataset[mixture.next_step()].work().tokens for _ in range(6)]
        assert np.mean(found) == pytest.approx(tokens, rel=0.05)
        few = run_spec("tlm", "streams.tlm.samples=null", "streams.tlm.tokens=1")
    assert few.specs[0].samples == 1


def test_tokens_meet_the_checks_of_samples(run_spec) -> None:
    sets = ["streams.ppa.samples=null", "streams.ppa.tokens=50_000", "streams.ppa.queue_size=100"]
    with pytest.raises(UserError, match=r"streams\.ppa\.queue_size: 100 .*raise queue_size to 1,?\d+"):
        run_spec("ppa", *sets)


# 3. The shape of rows


def test_the_fit_is_a_pure_function(run_spec) -> None:
    """Of data, recipe, seed, world and max_tokens: the same on every rank, whatever was drawn before."""
    made = run_spec("mixed", "train.max_tokens=1024")
    mixture = mixture_of(made, rank=0, world=3)
    first, start = fit_row_shape(mixture, MAX_LENGTH), json.dumps(mixture.state)
    assert json.dumps(mixture.state) == start == json.dumps(initial_state(made.specs)) and mixture.rows == 1
    assert fit_row_shape(mixture_of(made, rank=2, world=3), MAX_LENGTH) == first == made.fit(place(1, 3), "cpu")
    assert made.fit(place(1, 2), "cpu") != first


MORE = {"mixed": 4, "tlm": 4, "mlm": 2, "alignlm": 16, "ppa": 4, "xlm": 2, "contextual": 32}
"""Times the shipped samples, so that a step has about 15,000 tokens: few make steps that differ by more than 8 %."""


@pytest.mark.parametrize(
    ("recipe", "world", "max_tokens"), [(r, *[(2, 4096), (1, 16384)][n % 2]) for n, r in enumerate(RECIPES)]
)
def test_rows_are_nearly_full(run_spec, demo: Path, recipe: str, world: int, max_tokens: int) -> None:
    """Compiled rows hold 92 % real tokens, and nearly all of them fit; by counted tokens."""
    measured = run_spec(recipe)
    samples = {name: MORE[recipe] * stream.samples for name, stream in measured.recipe.streams.items()}
    sets = [
        "data.workers=0",
        f"train.max_tokens={max_tokens}",
        *(f"streams.{n}.samples={k}" for n, k in samples.items()),
    ]
    made = resolve_run(recipe, sets, [demo]).calibrated(measured.calibration)
    rows, shape = made.fit(place(0, world), "cpu")
    assert shape.tokens <= max_tokens
    dataset, ranks = made.dataset(made.specs, shape), [mixture_of(made, rank, world, rows) for rank in range(world)]
    found = [row for _ in range(3) for rank in ranks for row in dataset[rank.next_step()].rows]
    filled = [(len(row.inputs.tokens.input_ids), len(row.inputs.tokens.lengths)) == tuple(shape) for row in found]
    assert sum(row.work.tokens for row in found) >= 0.92 * shape.tokens * len(found)
    assert sum(filled) >= len(found) - 1
    assert len(found) == 3 * world * rows


def fake(sizes: np.ndarray, noise: float, samples: int, world: int, max_tokens: int) -> Mixture:
    """Samples of one source, each a record of one of these sizes."""

    class Source:
        name, pair, fingerprint, records = "en-de", "de-en", "x", len(sizes)
        counts = np.array([len(sizes)])

        def lengths_and_follows(self, shard: int, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return sizes[records], np.zeros(len(sizes[records]), dtype=bool)

    source: Any = Source()
    found = Calibration([(1.0, 0.0)], {"s": Estimate(1.0, noise=noise, counted=10**9)})
    specs = [StreamSpec("s", (0,), samples, packed=False)]
    return Mixture(
        specs, [source], found, seed=0, alpha=0.7, max_length=MAX_LENGTH, max_tokens=max_tokens, rank=0, world=world
    )


def about_50(spread: float) -> np.ndarray:
    return np.random.default_rng(0).normal(50, 50 * spread, 100_000).clip(5, 120)


@pytest.mark.parametrize(("spread", "noise"), [(0.0, 0.0), (0.0, 1.0), (0.5, 0.0), (0.5, 1.0)])
def test_room_is_left_for_what_differs(spread: float, noise: float) -> None:
    """Steps by the spread of lengths, rows by the noise of estimates; 2.6 standard deviations over the mean."""
    mixture = fake(about_50(spread), noise, samples=256, world=4, max_tokens=1 << 20)
    rows, shape = fit_row_shape(mixture, MAX_LENGTH)
    mean = 64 * 50
    sigma = np.sqrt((64 * 50 * spread) ** 2 / 256 + noise * mean)
    assert rows == 1 and mean + 1.8 * sigma - 20 <= shape.tokens <= mean + 3.5 * sigma + 30
    rng, fits = np.random.default_rng(1), []
    for _ in range(200):
        tokens, _, sequences = expected_bins(mixture, mixture.next_batch(), rows)
        true = tokens + rng.normal(0, 1, len(tokens)) * np.sqrt(noise * tokens)
        fits += list(true <= shape.tokens)
        fillers = np.ceil((shape.tokens - true) / MAX_LENGTH)
        assert (sequences + fillers <= shape.sequences).all()
    assert np.mean(fits) >= 0.985


def test_there_is_room_for_the_row_with_the_most_sequences() -> None:
    """A row that has no long sample has twice as many short ones."""
    mixture = fake(np.where(np.arange(100_000) % 121 == 0, 400, 10), 0.1, samples=16 * 61, world=16, max_tokens=1 << 20)
    rows, shape = fit_row_shape(mixture, MAX_LENGTH)
    found = np.hstack([expected_bins(mixture, mixture.next_batch(), rows)[2] for _ in range(20)])
    assert found.mean() + 16 < found.max() <= shape.sequences


def test_a_shape_is_within_the_budget() -> None:
    """Rows are cut to have room for their noise too: one more row where there is none."""
    mixture = fake(about_50(0.3), 20.0, samples=256, world=1, max_tokens=4600)
    assert mixture.next_batch().rows == 3
    mixture.state = initial_state(mixture.streams)
    rows, shape = fit_row_shape(mixture, MAX_LENGTH)
    assert rows == 4 and shape.tokens <= 4600
    alone = fake(about_50(0.0), 0.0, samples=4, world=1, max_tokens=40)
    rows, shape = fit_row_shape(alone, MAX_LENGTH)
    assert rows == 4 and shape.tokens >= 50, "one sample is over the budget"


def test_large_steps_are_fitted_by_few() -> None:
    """Planning a step of a thousand ranks takes tens of milliseconds."""
    for samples, steps in ((8, mixing.MAX_STEPS), (2048, 16), (65_536, mixing.MIN_STEPS)):
        mixture = fake(about_50(0.3), 0.1, samples, world=1, max_tokens=1 << 30)
        drawn, next_batch = [], mixture.next_batch
        mixture.next_batch = lambda: drawn.append(1) or next_batch()  # type: ignore[method-assign]  # noqa: B023
        fit_row_shape(mixture, MAX_LENGTH)
        assert len(drawn) == steps


def test_rows_that_are_not_compiled_are_not_filled(run_spec) -> None:
    made = run_spec("mixed", "train.max_tokens=700")
    for batch in made.batches(place(), "cpu", initial_state(made.specs), 2):
        assert len(batch.rows) > 3
        for row in batch.rows:
            assert len(row.inputs.tokens.input_ids) == row.work.tokens and (row.inputs.tokens.lengths > 0).all()


def test_a_row_over_the_shape_is_left_as_it_is(run_spec) -> None:
    made = run_spec("tlm")
    rows, shape = made.fit(place(), "cpu")
    tight = replace(made, fitted=(rows, shape._replace(tokens=1000)))
    for batch in tight.batches(place(), "cpu", initial_state(made.specs), 2):
        assert [len(row.inputs.tokens.input_ids) for row in batch.rows] == [row.work.tokens for row in batch.rows]
    for batch in replace(made, fitted=(rows, shape)).batches(place(), "cpu", initial_state(made.specs), 2):
        assert {len(row.inputs.tokens.input_ids) for row in batch.rows} == {shape.tokens}
