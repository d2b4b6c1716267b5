"""The losses and metrics of a step, of streams and of languages: sums over targets, divided by counts."""

from xscale.metric_keys import Counts, MetricKey, count_key
from xscale.objectives import OBJECTIVES
from xscale.recipe import Recipe
from xscale.step.step import divisor_of_term


def stream_metrics(sums: dict[MetricKey, float], counts: Counts, recipe: Recipe) -> dict[str, float]:
    """Return the losses and metrics of whole streams by name. A loss is its sum divided by `divisor_of_term`; a metric
    is its sum divided by the count of its term. sums, counts: over all ranks."""
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
    data.max_length (too_long/tlm/de-en). A loss of a language is the mean over its targets, even if `divisor_of_term`
    is another count: loss/alignlm.bi/de-en cannot be compared with loss/alignlm.bi. sums, counts: over all ranks."""
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
