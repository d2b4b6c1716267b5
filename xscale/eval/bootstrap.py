"""Confidence intervals of scores over sentences, by the bootstrap (Efron 1979).

A score is a function of sums over sentences: an accuracy uses two counts (right answers, sentences), an F1 three. The
sentences are resampled with replacement REPLICATES times; the interval has 95 % of the resampled scores. Texts with the
same number of sentences are resampled in the same way, so that the scores of two models on one text are paired.

Shape letters: S sentences, C sums, R replicates.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

REPLICATES = 1000
BOUNDS = (0.025, 0.975)
AT_ONCE = 5_000_000
"""The most sentences that are drawn in one array, which holds several resampled texts."""


class Score(float):
    """A score that knows its values in resampled texts. Pickling or copying turns it into a plain float."""

    resampled: Callable[[], np.ndarray]
    """A function that returns the score in each resampled text [R]."""

    def __new__(cls, value: float, resampled: Callable[[], np.ndarray]) -> "Score":
        score = super().__new__(cls, value)
        score.resampled = resampled
        return score

    def __reduce__(self) -> Any:
        return float, (float(self),)

    @property
    def interval(self) -> tuple[float, float]:
        low, high = np.nanquantile(self.resampled(), BOUNDS)
        return float(low), float(high)


def bootstrap(sums_SC: np.ndarray, scores_of: Callable[[np.ndarray], dict[str, np.ndarray]]) -> dict[str, float]:
    """Return {name: Score}. scores_of: maps the sums of texts [..., C] to {name: scores of these texts [...]}."""

    def compute(sums: np.ndarray) -> dict[str, np.ndarray]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return scores_of(sums)

    replicates = functools.cache(lambda: compute(resample(sums_SC)))
    whole = compute(sums_SC.sum(0, dtype=np.float64))
    return {name: Score(float(value), lambda name=name: replicates()[name]) for name, value in whole.items()}  # type: ignore[misc]


def resample(sums_SC: np.ndarray) -> np.ndarray:
    """Return the sums of each resampled text [R, C]."""
    sentences, resampled = len(sums_SC), []
    draw = np.random.default_rng(sentences)
    at_once = max(1, AT_ONCE // max(sentences, 1))
    for start in range(0, REPLICATES if sentences else 0, at_once):
        shape = min(at_once, REPLICATES - start), sentences
        drawn = draw.integers(0, sentences, shape) + sentences * np.arange(shape[0])[:, None]
        times_RS = np.bincount(drawn.ravel(), minlength=shape[0] * sentences).reshape(shape)
        resampled.append(times_RS @ sums_SC.astype(np.float64))
    return np.concatenate(resampled) if resampled else np.zeros((REPLICATES, sums_SC.shape[1]))


def weighted_sum(scores: Sequence[float], weights: Sequence[float]) -> Score:
    """Return the weighted sum of scores, such as their mean or a difference, with its interval."""

    def resampled() -> np.ndarray:
        scores_R = [s.resampled() if isinstance(s, Score) else np.full(REPLICATES, s) for s in scores]
        return np.asarray(weights) @ np.stack(scores_R)

    return Score(sum(s * w for s, w in zip(scores, weights, strict=True)), functools.cache(resampled))


def mean(scores: Sequence[float]) -> Score:
    return weighted_sum(scores, [1 / len(scores)] * len(scores))


def p_value(difference: Score) -> float:
    """Return the two-sided p value of a difference: twice the share of resampled texts with the other sign."""
    values = difference.resampled()
    return float(np.clip(2 * min((values <= 0).mean(), (values >= 0).mean()), 1 / REPLICATES, 1))


def intervals(results: Any) -> Any:
    """Return the nested mappings with [low, high] in place of each Score, without numbers that are no Score."""
    if isinstance(results, Mapping):
        inner = {name: intervals(value) for name, value in results.items()}
        return {name: bounds for name, bounds in inner.items() if bounds}
    return list(results.interval) if isinstance(results, Score) else None


def format_score(name: str, value: float) -> str:
    """Return text such as `accuracy 0.94 [0.92, 0.96]`; a value that is no Score has no interval."""
    bounds = " [{:,.4g}, {:,.4g}]".format(*value.interval) if isinstance(value, Score) else ""
    return f"{name} {value:,.4g}{bounds}"


def class_scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], labels: Sequence[str]
) -> dict[str, float]:
    """Return accuracy, and F1 averaged over `labels`. gold, predicted: the one or more labels of each sentence."""
    classes = sorted({label for side in (gold, predicted) for of_sentence in side for label in of_sentence})
    index = {label: k for k, label in enumerate(classes)}
    sums_S3K = np.zeros((len(gold), 3, len(classes)))  # K classes: right, gold, predicted
    for row, *sides in zip(sums_S3K, gold, predicted, strict=True):
        for a, b in zip(*sides, strict=True):
            row[0, index[a]] += a == b
            row[1, index[a]] += 1
            row[2, index[b]] += 1
    averaged = [index[label] for label in labels]

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        right, in_gold, in_predicted = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, len(classes)), -2, 0)
        f1 = 2 * right / np.maximum(in_gold + in_predicted, 1)
        return {"accuracy": right.sum(-1) / in_gold.sum(-1), "macro_f1": f1[..., averaged].mean(-1)}

    return bootstrap(sums_S3K.reshape(len(gold), -1), scores_of)


def entity_scores(counts_S3: np.ndarray) -> dict[str, float]:
    """Return F1, precision and recall. counts_S3: each sentence's numbers of right, predicted and gold entities."""

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        right, predicted, gold = np.moveaxis(sums, -1, 0)
        f1, precision = 2 * right / np.maximum(predicted + gold, 1), right / np.maximum(predicted, 1)
        return {"f1": f1, "precision": precision, "recall": right / np.maximum(gold, 1)}

    return bootstrap(counts_S3, scores_of)
