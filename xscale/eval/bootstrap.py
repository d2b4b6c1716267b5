"""Confidence intervals of scores over sentences, by scipy's bootstrap (Efron 1979).

A score is a function of sums over sentences: an accuracy uses two sums (right answers, sentences), an F1 uses three.
The sentences are drawn with replacement REPLICATES times, which makes as many resampled texts. The interval has 95 % of
their scores. Texts with the same number of sentences are resampled alike, so that two models' scores are paired.

Shape letters: S sentences, C sums, R replicates, K classes.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

REPLICATES = 1000
BOUNDS = (0.025, 0.975)
AT_ONCE = 2_000_000
"""The maximum number of sentences that are drawn in one call, because the drawn sums need memory."""
ScoresOf = Callable[[np.ndarray], dict[str, np.ndarray]]
"""A function from the sums of texts [..., C] to {name of a score: its value for each text [...]}."""
T = TypeVar("T")
ScoreTree = dict[str, dict[str, dict[str, T]]]
"""{task: {results row: {metric: value}}}."""


class ScoreName(NamedTuple):
    task: str
    row: str
    metric: str


class Score(float):
    """A score with its values in resampled texts. It cannot be copied or pickled; `float(score)` can."""

    resampled: np.ndarray
    """The score in each resampled text [R]."""

    def __new__(cls, value: float, resampled: np.ndarray) -> "Score":
        score = super().__new__(cls, value)
        score.resampled = resampled
        return score

    @property
    def interval(self) -> tuple[float, float]:
        """Return the bounds of the 95 % interval."""
        low, high = np.nanquantile(self.resampled, BOUNDS)
        return float(low), float(high)


def scores_with_intervals(sums_SC: np.ndarray, scores_from_sums: ScoresOf) -> dict[str, float]:
    """Return {name: Score} of a text, given the sums of each of its sentences."""
    from scipy import stats  # here, because its import takes .6 s and every start of training imports this module

    sums_SC = np.asarray(sums_SC, dtype=np.float64)
    sentences = len(sums_SC)

    def scores_of_texts(drawn: np.ndarray, axis: int = -1) -> np.ndarray:
        """Return the scores of texts [scores, texts]. drawn: the indices of the sentences of each text [texts, S]."""
        scores = scores_from_sums(sums_SC[drawn].sum(axis - 1))
        return np.stack(list(scores.values()))

    with np.errstate(divide="ignore", invalid="ignore"):
        whole = scores_from_sums(sums_SC.sum(0))
        if sentences < 2:  # there is nothing to resample
            return {name: Score(float(value), np.full(REPLICATES, value)) for name, value in whole.items()}
        result = stats.bootstrap(
            (np.arange(sentences),),
            scores_of_texts,
            n_resamples=REPLICATES,
            batch=max(1, AT_ONCE // sentences),
            vectorized=True,
            method="percentile",
            rng=np.random.default_rng(sentences),
        )
    scores: dict[str, float] = {}
    for (name, value), resampled in zip(whole.items(), result.bootstrap_distribution, strict=True):
        scores[name] = Score(float(value), resampled)
    return scores


def weighted_sum(scores: Sequence[float], weights: Sequence[float]) -> Score:
    """Return the weighted sum of scores, such as their mean or a difference, with its interval."""
    total = 0.0
    resampled = np.zeros(REPLICATES)
    for score, weight in zip(scores, weights, strict=True):
        total += score * weight
        resampled += weight * (score.resampled if isinstance(score, Score) else score)
    return Score(total, resampled)


def mean(scores: Sequence[float]) -> Score:
    return weighted_sum(scores, [1 / len(scores)] * len(scores))


def p_value(difference: Score) -> float:
    """Return the two-sided p value of a difference: twice the share of resampled texts with the other sign."""
    smaller = min((difference.resampled <= 0).mean(), (difference.resampled >= 0).mean())
    return float(np.clip(2 * smaller, 1 / REPLICATES, 1))


def named_values(tree: ScoreTree[T]) -> Iterator[tuple[ScoreName, T]]:
    """Yield each value of a tree with its name."""
    for task, rows in tree.items():
        for row, values in rows.items():
            for metric, value in values.items():
                yield ScoreName(task, row, metric), value


def map_scores_and_drop_other_numbers(
    results: ScoreTree[float], function: Callable[[Score], list[float]]
) -> ScoreTree[list[float]]:
    """Return the results with function(score) in place of each Score, and without other numbers."""
    mapped: ScoreTree[list[float]] = {}
    for name, score in named_values(results):
        if isinstance(score, Score):
            mapped.setdefault(name.task, {}).setdefault(name.row, {})[name.metric] = function(score)
    return mapped


def intervals_of_scores(results: ScoreTree[float]) -> ScoreTree[list[float]]:
    """Return the results with [low, high] in place of each Score, and without other numbers."""
    return map_scores_and_drop_other_numbers(results, lambda score: list(score.interval))


def resampled_values_of_scores(results: ScoreTree[float]) -> ScoreTree[list[float]]:
    """Return the results with a Score's values in resampled texts [R] in place of each Score, and without other
    numbers. The values are rounded to six digits."""
    return map_scores_and_drop_other_numbers(
        results, lambda score: [float(f"{value:.6g}") for value in score.resampled]
    )


def format_name_and_score(name: str, value: float) -> str:
    """Return text such as `accuracy 0.94 [0.92, 0.96]`. Only a Score has an interval."""
    if not isinstance(value, Score):
        return f"{name} {value:,.4g}"
    low, high = value.interval
    return f"{name} {value:,.4g} [{low:,.4g}, {high:,.4g}]"


def accuracy(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the share of right labels. gold, predicted: the one or more labels of each sentence."""
    counts = []
    for wanted, answers in zip(gold, predicted, strict=True):
        counts.append((sum(map(operator.eq, wanted, answers)), len(wanted)))

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        return {"accuracy": sums[..., 0] / sums[..., 1]}

    return scores_with_intervals(np.array(counts), scores_of)


def entity_scores(counts_S3: np.ndarray) -> dict[str, float]:
    """Return F1, precision and recall, each a Score with an interval. counts_S3: each sentence's numbers of right,
    predicted and gold entities."""

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        right, predicted, gold = np.moveaxis(sums, -1, 0)
        f1 = 2 * right / np.maximum(predicted + gold, 1)
        return {"f1": f1, "precision": right / np.maximum(predicted, 1), "recall": right / np.maximum(gold, 1)}

    return scores_with_intervals(counts_S3, scores_of)
