"""Writes the summary's sentences: the best run, by how much, if that is noise; divergence; the worst language."""

import math
import re

import pandas as pd

from xscale.report import curves
from xscale.report.curves import Chart, late_mean
from xscale.report.read import Run
from xscale.report.tables import compare_with_best, format_cell

RANGES = 10
"""The number of equal ranges of steps whose mean losses are compared."""
LEAST_RISE = 0.01
"""A loss has risen if it ends above its lowest by more than this share, and by more than two standard deviations."""
STREAM_RISE = 0.25
"""A stream's loss has risen only if it also rose by more than this share of its largest fall."""
MOST_METRICS = 2
"""The most metrics for which the worst language is named."""


def findings(runs: list[Run], headlines: list[Chart]) -> list[str]:
    """Return the sentences of the summary. headlines: the charts of the most important metrics."""
    best = [best_run_sentence(headline) for headline in headlines] if len(runs) > 1 else []
    return [*filter(None, best), *divergence(runs), *worst_languages(runs)]


def best_run_sentence(headline: Chart) -> str:
    """Return a sentence that says which run is best and how far the second is; "" if runs cannot be compared."""
    (late, best, alike), labels = compare_with_best(headline), headline.names
    if best is None:
        return ""
    distances = {n: abs(curve.mean() - late[best].mean()) for n, curve in enumerate(late) if n != best}
    second = min((n for n in distances if late[n].notna().any()), key=distances.__getitem__)
    if distances[second] == 0:
        return f"{headline.title}: {labels[best]} and {labels[second]} are equal."
    noise_is_known = any(curve.attrs or curve.count() > 1 for curve in (late[best], late[second]))
    noise = "may be" if alike[second] else "is more than"
    how = f"which {noise} noise" if noise_is_known else "but each has one number only, so noise is unknown"
    by = format_cell(float(distances[second]))
    return f"{headline.title}: {labels[best]} is best, by {by} over {labels[second]}, {how}."


def divergence(runs: list[Run]) -> list[str]:
    """Return a sentence for each loss that has risen, or is not finite, at a run's end; without any, one that says
    so."""
    trained = [run for run in runs if len(run.metrics.get("loss", ()))]
    one = "The run has not diverged: its training loss ends near its lowest."
    fine = [one if len(trained) == 1 else "No run has diverged: each training loss ends near its lowest."]
    problems = []
    for run in trained:
        losses = {"the training loss": (run.metrics["loss"], 0.0)}
        streams = {name: curve for name, curve in run.metrics.items() if re.fullmatch(r"loss/[^/.]+", name)}
        if len(streams) > 1:
            losses |= {f"the loss of {name[5:]}": (curve, STREAM_RISE) for name, curve in streams.items()}
        checked = ((loss, rise_problem(curve, least)) for loss, (curve, least) in losses.items())
        problems += [f"{run.label}: {loss} {problem}." for loss, problem in checked if problem]
    return problems or (fine if trained else [])


def rise_problem(curve: pd.Series, least: float) -> str:
    """Return the rest of a sentence that says how a loss has risen, or since when it is not finite; "" if it ends near
    its lowest. least: the rise, as a share of the largest fall, up to which a loss has not risen."""
    known, end = curve.dropna(), curves.last_tenth(curve).dropna()
    if not len(end):
        last = known.index[-1] if len(known) else 0
        return f"is not finite after step {last:,}"
    means = curves.downsample(known, RANGES)["mean"]
    risen = float(end.mean() - means.min())
    fall = float((means.cummax() - means).max())
    if risen <= max(LEAST_RISE * abs(means.min()), 2 * float(end.std(ddof=0)), least * fall):
        return ""
    return f"rose: it ends {format_cell(risen)} above its lowest, near step {means.idxmin():,.0f}"


def worst_languages(runs: list[Run]) -> list[str]:
    """Return sentences about the worst language of each run: by retrieval, by other evaluations, then by metrics."""
    evaluated = curves.eval_charts(runs)
    charts = [chart for chart in evaluated if chart.title.startswith(curves.EVALUATIONS["retrieval accuracy"])]
    charts += [chart for chart in evaluated if "by language" in chart.title]
    charts += curves.metric_sections(runs).get(curves.LANGUAGES, [])
    sentences = [worst_language(chart) for chart in charts if chart.better and len(chart.lines) > 1]
    return [*filter(None, sentences)][:MOST_METRICS]


def worst_language(chart: Chart) -> str:
    """Return a sentence such as `Worst language by loss of mlm: xx 5.4 nats.`; "" if no run has a number."""
    title, _, unit = chart.title.partition(", ")
    metric, unit = title[0].lower() + title[1:].removesuffix(" by language"), f" {unit}" * (unit != "share")
    worst = []
    for n, name in enumerate(chart.names):
        ends = {label: end for label, of in chart.lines.items() if not math.isnan(end := late_mean(of[n]))}
        if ends:
            label = min(ends, key=lambda label: chart.better * ends[label])
            worst.append(f"{f'{name}: ' * (len(chart.names) > 1)}{label} {format_cell(ends[label])}{unit.rstrip()}")
    return f"Worst language by {metric}: {'; '.join(worst)}." if worst else ""
