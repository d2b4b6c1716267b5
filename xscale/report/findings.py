"""This module answers in sentences what a reader asks first: which run is best, by how much, and is that more than
noise; did a run diverge; which language is worst."""

import math
import re

import pandas as pd

from xscale.report.curves import EVALUATIONS, LANGUAGES, Chart, eval_charts, last_tenth, late, metric_sections, thin
from xscale.report.read import Run
from xscale.report.tables import number, rank

RANGES = 10
"""A loss is compared between this many equal ranges of its steps."""
LEAST_RISE = 0.01
"""A loss rises if it ends above its lowest by more than this share of it, and by more than two deviations."""
STREAM_RISE = 0.25
"""The loss of a stream must also rise by more than this share of its largest fall."""
MOST_METRICS = 2
"""The worst language is named by at most this many metrics."""


def findings(runs: list[Run], headlines: list[Chart]) -> list[str]:
    verdicts = [verdict(headline) for headline in headlines] if len(runs) > 1 else []
    return [*filter(None, verdicts), *stability(runs), *worst_languages(runs)]


def verdict(headline: Chart) -> str:
    """Return which run is best by a headline, and its distance from the second; "" if the runs are not compared."""
    (late, best, alike), labels = rank(headline), headline.names
    if best is None:
        return ""
    distances = {n: abs(curve.mean() - late[best].mean()) for n, curve in enumerate(late) if n != best}
    second = min((n for n in distances if late[n].notna().any()), key=distances.__getitem__)
    if distances[second] == 0:
        return f"{headline.title}: {labels[best]} and {labels[second]} are equal."
    spread = any(curve.attrs or curve.count() > 1 for curve in (late[best], late[second]))
    noise = "may be" if alike[second] else "is more than"
    how = f"which {noise} noise" if spread else "from one number each, so noise is not known"
    by = number(float(distances[second]))
    return f"{headline.title}: {labels[best]} is best, by {by} over {labels[second]}, {how}."


def stability(runs: list[Run]) -> list[str]:
    """Return a sentence for each run whose loss rises, or has no number, at its end; one sentence if there is none."""
    trained = [run for run in runs if len(run.metrics.get("loss", ()))]
    one = "The run has not diverged: its training loss ends near its lowest."
    fine = [one if len(trained) == 1 else "No run diverged: each training loss ends near its lowest."]
    wrong = []
    for run in trained:
        losses = {"the training loss": (run.metrics["loss"], 0.0)}
        streams = {name: curve for name, curve in run.metrics.items() if re.fullmatch(r"loss/[^/.]+", name)}
        if len(streams) > 1:
            losses |= {f"the loss of {name[5:]}": (curve, STREAM_RISE) for name, curve in streams.items()}
        wrong += [
            f"{run.label}: {of} {found}." for of, (curve, least) in losses.items() if (found := rise(curve, least))
        ]
    return wrong or (fine if trained else [])


def rise(curve: pd.Series, least: float) -> str:
    """Return what is wrong with the end of a loss; "" if it ends near its lowest. least: a rise by less than this share
    of the loss's largest fall is not reported."""
    known, end = curve.dropna(), last_tenth(curve).dropna()
    if not len(end):
        last = known.index[-1] if len(known) else 0
        return f"is not finite after step {last:,}"
    means = thin(known, RANGES)["mean"]
    above = float(end.mean() - means.min())
    fall = float((means.cummax() - means).max())
    if above <= max(LEAST_RISE * abs(means.min()), 2 * float(end.std(ddof=0)), least * fall):
        return ""
    return f"rose: it ends {number(above)} above its lowest, near step {means.idxmin():,.0f}"


def worst_languages(runs: list[Run]) -> list[str]:
    """Return the worst language of each run by a few metrics, first by evaluations, of these first by retrieval."""
    evaluated = eval_charts(runs)
    charts = [chart for chart in evaluated if chart.title.startswith(EVALUATIONS["retrieval accuracy"])]
    charts += [chart for chart in evaluated if "by language" in chart.title]
    charts += metric_sections(runs).get(LANGUAGES, [])
    found = [worst_language(chart) for chart in charts if chart.better and len(chart.lines) > 1]
    return [sentence for sentence in found if sentence][:MOST_METRICS]


def worst_language(chart: Chart) -> str:
    """Return a sentence such as `Worst language by loss of mlm: xx 5.4 nats.`; "" if no run has a number."""
    title, _, unit = chart.title.partition(", ")
    metric, unit = title[0].lower() + title[1:].removesuffix(" by language"), f" {unit}" * (unit != "share")
    worst = []
    for n, name in enumerate(chart.names):
        ends = {label: end for label, of in chart.lines.items() if not math.isnan(end := late(of[n]))}
        if ends:
            label = min(ends, key=lambda label: chart.better * ends[label])
            worst.append(f"{f'{name}: ' * (len(chart.names) > 1)}{label} {number(ends[label])}{unit.rstrip()}")
    return f"Worst language by {metric}: {'; '.join(worst)}." if worst else ""
