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
"""The number of sentences that are sampled at once."""


class Score(float):
    """A score, with its values in resampled texts. Pickling or copying makes a plain number of it."""

    resampled: Callable[[], np.ndarray]
    """Returns the score in each resampled text [R]."""

    def __new__(cls, value: float, resampled: Callable[[], np.ndarray]) -> "Score":
        made = super().__new__(cls, value)
        made.resampled = resampled
        return made

    def __reduce__(self) -> Any:
        return float, (float(self),)

    @property
    def interval(self) -> tuple[float, float]:
        low, high = np.nanquantile(self.resampled(), BOUNDS)
        return float(low), float(high)


def bootstrap(sums_SC: np.ndarray, scores_of: Callable[[np.ndarray], dict[str, np.ndarray]]) -> dict[str, float]:
    """The scores by name, with their intervals. scores_of: maps sums [..., C] to a score [...] for each name."""

    def compute(sums: np.ndarray) -> dict[str, np.ndarray]:
        with np.errstate(divide="ignore", invalid="ignore"):
            return scores_of(sums)

    replicates = functools.cache(lambda: compute(resample(sums_SC)))
    found = compute(sums_SC.sum(0, dtype=np.float64))
    return {name: Score(float(value), lambda name=name: replicates()[name]) for name, value in found.items()}  # type: ignore[misc]


def resample(sums_SC: np.ndarray) -> np.ndarray:
    """The sums of each resampled text [R, C]."""
    sentences, found = len(sums_SC), []
    draw = np.random.default_rng(sentences)
    at_once = max(1, AT_ONCE // max(sentences, 1))
    for start in range(0, REPLICATES if sentences else 0, at_once):
        shape = min(at_once, REPLICATES - start), sentences
        drawn = draw.integers(0, sentences, shape) + sentences * np.arange(shape[0])[:, None]
        times_RS = np.bincount(drawn.ravel(), minlength=shape[0] * sentences).reshape(shape)
        found.append(times_RS @ sums_SC.astype(np.float64))
    return np.concatenate(found) if found else np.zeros((REPLICATES, sums_SC.shape[1]))


def combine(scores: Sequence[float], weights: Sequence[float]) -> Score:
    """The weighted sum of scores, such as their mean or a difference, with its interval."""

    def resampled() -> np.ndarray:
        parts = [s.resampled() if isinstance(s, Score) else np.full(REPLICATES, s) for s in scores]
        return np.asarray(weights) @ np.stack(parts)

    return Score(sum(s * w for s, w in zip(scores, weights, strict=True)), functools.cache(resampled))


def mean(scores: Sequence[float]) -> Score:
    return combine(scores, [1 / len(scores)] * len(scores))


def p_value(difference: Score) -> float:
    """The two-sided p value of a difference: twice the share of resampled texts in which its sign is the other one."""
    values = difference.resampled()
    return float(np.clip(2 * min((values <= 0).mean(), (values >= 0).mean()), 1 / REPLICATES, 1))


def intervals(results: Any) -> Any:
    """The interval of every score in nested mappings, without numbers that have no interval."""
    if isinstance(results, Mapping):
        found = {name: intervals(of) for name, of in results.items()}
        return {name: bounds for name, bounds in found.items() if bounds}
    return list(results.interval) if isinstance(results, Score) else None


def describe(name: str, value: float) -> str:
    """A number as it is printed, such as `accuracy 0.94 [0.92, 0.96]`."""
    bounds = " [{:,.4g}, {:,.4g}]".format(*value.interval) if isinstance(value, Score) else ""
    return f"{name} {value:,.4g}{bounds}"


def class_scores(
    gold: Sequence[Sequence[str]], found: Sequence[Sequence[str]], labels: Sequence[str]
) -> dict[str, float]:
    """Accuracy, and F1 averaged over `labels`. gold, found: each sentence's label, or the labels of its words."""
    number = {
        label: n for n, label in enumerate(sorted({label for side in (gold, found) for of in side for label in of}))
    }
    sums_S3K = np.zeros((len(gold), 3, len(number)))
    for row, *sides in zip(sums_S3K, gold, found, strict=True):
        for a, b in zip(*sides, strict=True):
            row[0, number[a]] += a == b
            row[1, number[a]] += 1
            row[2, number[b]] += 1
    chosen = [number[label] for label in labels]

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        right, of_gold, of_found = np.moveaxis(sums.reshape(*sums.shape[:-1], 3, len(number)), -2, 0)
        f1 = 2 * right / np.maximum(of_gold + of_found, 1)
        return {"accuracy": right.sum(-1) / of_gold.sum(-1), "macro_f1": f1[..., chosen].mean(-1)}

    return bootstrap(sums_S3K.reshape(len(gold), -1), scores_of)


def entity_scores(counts_S3: np.ndarray) -> dict[str, float]:
    """F1, precision and recall. counts_S3: each sentence's numbers of right, of found and of gold entities."""

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        right, found, gold = np.moveaxis(sums, -1, 0)
        shares = right / np.maximum(found, 1), right / np.maximum(gold, 1)
        return dict(zip(("f1", "precision", "recall"), (2 * right / np.maximum(found + gold, 1), *shares), strict=True))

    return bootstrap(counts_S3, scores_of)
