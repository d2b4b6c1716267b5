"""The numbers of a step: sums of losses and metrics over targets, and the metrics that follow from sums and counts.

Shape letters: K sums.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from xscale.metric_keys import Counts, MetricKey, count_key
from xscale.objectives import OBJECTIVES
from xscale.recipe import Recipe


@dataclass(frozen=True)
class Sums:
    """Sums of losses and metrics over targets, on the device until metrics are read."""

    keys: list[MetricKey]
    """The key of each sum. The sum is divided by the number of targets of the key's term."""
    values_K: Tensor

    @staticmethod
    def concatenate_as_fp64(parts: list["Sums"], like: Tensor) -> "Sums":
        """Return the sums of all parts as one vector in fp64, on the device of `like`, whose type holds each part."""
        keys = list[MetricKey]()
        values = [like.new_zeros(0)]
        for part in parts:
            keys += part.keys
            values.append(part.values_K.to(like.dtype))
        return Sums(keys, torch.cat(values).double())

    @staticmethod
    def add_rows(rows: list["Sums"]) -> "Sums":
        """Return the sums over several rows, which have the same keys."""
        total_K = rows[0].values_K
        for row in rows[1:]:
            assert row.keys == rows[0].keys, (
                f"an objective returned different terms or metrics for two rows: {rows[0].keys} and {row.keys}"
            )
            total_K = total_K + row.values_K
        return Sums(rows[0].keys, total_K)

    def by_key(self) -> dict[MetricKey, float]:
        """Return the sums by key. On CUDA, this waits for the device."""
        return dict(zip(self.keys, self.values_K.tolist(), strict=True))


def divisor_of_term(counts: Counts, key: MetricKey, recipe: Recipe) -> int:
    """Return the count over the whole step by which a term's sum is divided, at least 1. key: the term's `loss_key`."""
    objective = recipe.streams[key.stream].objective
    counted = OBJECTIVES[objective].divisors.get(key.term, key.term)
    count = counts.get(count_key(key.stream, counted))
    assert count is not None, (
        f"streams.{key.stream}: the function collate of the objective {objective}: the returned target_counts do not "
        f"have {counted}"
    )
    return max(count, 1)


def stream_metrics(sums: dict[MetricKey, float], counts: Counts, recipe: Recipe) -> dict[str, float]:
    """Return the losses and metrics of whole streams by name, each divided by its number of targets. sums, counts:
    summed over all ranks."""
    metrics = dict[str, float]()
    for key, value in sums.items():
        stream = recipe.streams[key.stream]
        if key.language or stream.samples == 0:
            continue
        if key.name != "loss":
            metrics[f"{key.name}/{key.stream}"] = value / max(counts[count_key(key.stream, key.term)], 1)
            continue
        factors = OBJECTIVES[stream.objective].terms(stream.options)
        mean = value / divisor_of_term(counts, key, recipe)
        name = f"loss/{key.stream}"
        metrics[name] = metrics.get(name, 0.0) + factors[key.term] * mean
        if len(factors) > 1:
            metrics[str(key)] = mean
    for name, stream in recipe.streams.items():
        if stream.samples == 0:
            continue
        for metric, (part, whole) in OBJECTIVES[stream.objective].ratios.items():
            metrics[f"{metric}/{name}"] = counts[count_key(name, part)] / max(counts[count_key(name, whole)], 1)
    return metrics


def language_metrics(sums: dict[MetricKey, float], counts: Counts, recipe: Recipe) -> dict[str, float]:
    """Return the metrics of the languages and pairs in the step by name: losses and their counts (loss/mlm/en,
    count/mlm/en), metrics with a number for each target (accuracy/ppa/de-en), and the shares of pairs over
    data.max_length (too_long/tlm/de-en). sums, counts: of all ranks."""
    metrics = dict[str, float]()
    for key, value in sums.items():
        count = counts.get(key._replace(name="count"), 0)
        if not key.language or not count:
            continue
        stream = recipe.streams[key.stream]
        shown = key
        if key.name != "loss" or len(OBJECTIVES[stream.objective].terms(stream.options)) == 1:
            shown = key._replace(term="")
        metrics[str(shown)] = value / count
        if key.name == "loss":
            metrics[str(shown._replace(name="count"))] = count
    for key, count in counts.items():
        if key.name == "too_long" and key.language and count:
            metrics[str(key)] = count / counts[key._replace(name="drawn")]
    return metrics
