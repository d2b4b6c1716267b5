"""Intervals of scores over sentences: coverage in simulations, pairing, and sums that are those of a loop."""

import math

import numpy as np
import pytest

from xscale.eval import bootstrap
from xscale.eval.bootstrap import Score


def share(right: np.ndarray) -> Score:
    counts = np.stack([right, np.ones_like(right)], 1)
    (score,) = bootstrap.scores_with_intervals(counts, lambda sums: {"accuracy": sums[..., 0] / sums[..., 1]}).values()
    assert isinstance(score, Score)
    return score


def covered(true: float, scores: list[Score]) -> float:
    return sum(low <= true <= high for low, high in (score.interval for score in scores)) / len(scores)


@pytest.fixture
def few_replicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for bounds of 2.5 %: over hundreds of simulations their noise is small."""
    monkeypatch.setattr(bootstrap, "REPLICATES", 400)


def test_intervals_of_accuracy_and_f1_cover_the_truth(few_replicates: None) -> None:
    """95 % of simulated texts have the true score in their interval; the F1 is of words whose errors are correlated
    within a sentence, which an interval over words would miss."""
    draw = np.random.default_rng(0)
    accuracies = [share((draw.random(100) < 0.7).astype(float)) for _ in range(150)]
    assert 0.92 <= covered(0.7, accuracies) <= 0.98
    scores, words = list[Score](), 0
    for _ in range(150):
        hard = draw.beta(1, 2, 100)  # how many words of a sentence are wrong: a third, on average
        right = draw.binomial(10, 1 - hard)
        found = bootstrap.entity_scores(np.stack([right, np.full(100, 10), np.full(100, 10)], 1))["f1"]
        assert isinstance(found, Score)
        scores.append(found)
        low, high = found.interval
        words += high - low < 2 * 1.96 * math.sqrt(found * (1 - found) / 1000)
    assert 0.92 <= covered(2 / 3, scores) <= 0.98 and words == 0


def test_differences_are_paired(few_replicates: None) -> None:
    """Two models that differ in one sentence of ten have a narrow difference, and covered ones at that."""
    draw = np.random.default_rng(1)
    differences, widths = [], []
    for _ in range(150):
        first = draw.random(300) < 0.6
        second = np.where(draw.random(300) < 0.1, draw.random(300) < 0.9, first)
        a, b = share(first.astype(float)), share(second.astype(float))
        differences.append(bootstrap.weighted_sum([b, a], [1, -1]))
        widths.append([np.subtract(*score.interval[::-1]) for score in (a, differences[-1])])
    assert 0.92 <= covered(0.03, differences) <= 0.98
    assert np.mean(widths, 0)[1] < 0.6 * np.mean(widths, 0)[0]
    assert bootstrap.mean([a, b]) == pytest.approx((a + b) / 2) and bootstrap.mean([a, 0.5]).interval[0] < a


def test_the_scores_are_those_of_drawn_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sentences are drawn for every model, however many texts are drawn at once."""
    sums = np.random.default_rng(2).integers(1, 9, (7, 2)).astype(float)
    drawn = np.random.default_rng(7).integers(0, 7, (bootstrap.REPLICATES, 7))
    expected = sums[drawn].sum(1)
    for at_once in (70, 10**6):
        monkeypatch.setattr(bootstrap, "AT_ONCE", at_once)
        found = bootstrap.scores_with_intervals(
            sums, lambda sums: {"a": sums[..., 0], "b": sums[..., 0] / sums[..., 1]}
        )
        np.testing.assert_allclose(found["a"].resampled, expected[:, 0])  # type: ignore[attr-defined]
        np.testing.assert_allclose(found["b"].resampled, expected[:, 0] / expected[:, 1])  # type: ignore[attr-defined]
    one = bootstrap.scores_with_intervals(sums[:1], lambda sums: {"a": sums[..., 0]})["a"]
    assert isinstance(one, Score) and one.interval == (sums[0, 0], sums[0, 0])


def test_accuracy_is_over_words() -> None:
    draw = np.random.default_rng(3)
    gold, found = ([[str(label) for label in draw.integers(0, top, 4)] for _ in range(30)] for top in (4, 6))
    assert bootstrap.accuracy(gold, found)["accuracy"] == pytest.approx(np.mean(np.array(gold) == np.array(found)))


def test_what_is_written_and_printed() -> None:
    score = share(np.array([1.0] * 9 + [0.0]))
    low, high = score.interval
    assert low < 0.9 <= high <= 1
    assert bootstrap.intervals_of_scores({"task": {"en": {"accuracy": score, "n": 3}, "de": {"n": 1}}}) == {
        "task": {"en": {"accuracy": [low, high]}}
    }
    written = bootstrap.resampled_values_of_scores({"task": {"en": {"accuracy": score, "n": 3}}})["task"]["en"]
    assert written == {"accuracy": pytest.approx(score.resampled)} and len(written["accuracy"]) == bootstrap.REPLICATES
    assert bootstrap.format_name_and_score("accuracy", score) == f"accuracy 0.9 [{low:.4g}, {high:.4g}]"
    assert bootstrap.format_name_and_score("n", 3) == "n 3"
    assert math.isnan(share(np.zeros(0)))
