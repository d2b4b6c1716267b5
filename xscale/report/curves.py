"""Which curves a page shows, and which of them share a chart.

A metric is QUANTITY, QUANTITY/STREAM, QUANTITY/STREAM.TERM or QUANTITY/STREAM/LANGUAGE. Of one run, what is comparable
shares a chart: a stream's terms, its languages, the streams' accuracies. Of several runs, each metric is a chart, and
each run a line.
"""

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from xscale.report.read import Curve, Run, Scores

MOST_LINES = 8
"""In a chart; where there are more, several charts with the same range share them."""
SECTIONS = {
    "Loss": ("loss",),
    "Alignment score": ("alignment", "alignment_trained"),
    "Predictions": (
        "accuracy",
        "bilingual_accuracy",
        "contrastive_accuracy",
        "contrastive_accuracy_step",
        "dictionary_cosine",
        "bilingual_coverage",
    ),
    "Queue of keys": ("queue_age", "own_keys", "sentence_cosine"),
    "Optimizer, scale and skipped steps": ("lr", "grad_norm", "loss_scale", "skipped"),
    "Throughput": (
        *("tokens_per_s", "samples_per_s", "step_s", "data_wait_s", "mfu", "mem_gb"),
        *("slowest_ratio", "slowest_rank", "save_blocked_s", "save_write_s"),
    ),
    "Data": ("count", "tokens", "samples", "too_long", "bilingual_links"),
}
"""Quantities of metrics.jsonl; what is by language has a section of its own, and what is named nowhere here too."""
BY_LANGUAGE, OTHER, EVALS = "By language", "Other metrics", "Evaluations while training"
RARE = ("skipped", "too_long")
"""Left out where they are 0 throughout."""
LOGARITHMIC = ("grad_norm", "loss_scale")
WHOLE = ("sum", "all")
"""Labels of what is a stream's, or the step's, as a whole."""
TOGETHER = {"alignment_trained": "alignment"}
SHOWN_BY_LAYER = ("accuracy", "aer", "AER", "f1", "F1", "P@1")


@dataclass(frozen=True)
class Line:
    label: str
    curve: Curve
    look: int
    """Number of its colour, dashes and marker."""


@dataclass(frozen=True)
class Chart:
    title: str
    lines: list[Line]
    logarithmic: bool = False
    x: str = "step"
    bottom: float = math.nan
    top: float = math.nan
    """Range that it shares with others; NaN: its own."""


def metric_sections(runs: list[Run]) -> dict[str, list[Chart]]:
    """By title, in the order of the page."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    found: dict[str, list[Chart]] = {title: [] for title in ("Loss", BY_LANGUAGE, *SECTIONS, OTHER)}
    groups: dict[tuple[str, str], list[Line]] = {}
    for name in names:
        if name.split("/")[0] in RARE and not any(
            np.nansum(run.metrics[name].values) for run in runs if name in run.metrics
        ):
            continue
        for look, run in enumerate(runs):
            if name in run.metrics:
                title, own = (name, run.label) if len(runs) > 1 else place(name)
                curve = run.metrics[name]
                if name == "skipped":
                    title, curve = "skipped steps, counted", Curve(curve.steps, np.nancumsum(curve.values))
                of_chart = groups.setdefault((section(name), title), [])
                of_chart.append(Line(own, curve, look if len(runs) > 1 else len(of_chart)))
    for (where, title), lines in groups.items():
        if len(lines) == 1 and lines[0].label in WHOLE:
            lines = [replace(lines[0], label="")]
        found[where] += charts(title, lines, title.split("/")[0] in LOGARITHMIC)
    return {title: of_section for title, of_section in found.items() if of_section}


def section(name: str) -> str:
    if name.count("/") == 2:
        return BY_LANGUAGE
    quantity = name.split("/")[0]
    return next((title for title, quantities in SECTIONS.items() if quantity in quantities), OTHER)


def place(name: str) -> tuple[str, str]:
    """The chart of a single run's metric, and the line's label there."""
    quantity, stream, language = (*name.split("/", 2), "", "")[:3]
    if language:
        return f"{quantity}/{stream} by language", language
    if quantity == "loss" and stream:
        stream, _, term = stream.partition(".")
        return f"loss/{stream}", term or WHOLE[0]
    if quantity in TOGETHER:
        return TOGETHER[quantity], f"{stream} trained"
    return quantity, stream or WHOLE[1]


def charts(title: str, lines: list[Line], logarithmic: bool = False, x: str = "step") -> list[Chart]:
    """The lines that have a number, MOST_LINES in a chart."""
    lines = [line for line in lines if len(line.curve.finite.steps)]
    if len(lines) <= MOST_LINES:
        return [Chart(title, lines, logarithmic, x)] if lines else []
    values = np.concatenate([line.curve.finite.values for line in lines])
    limits, parts = (float(values.min()), float(values.max())), math.ceil(len(lines) / MOST_LINES)
    return [
        Chart(f"{title} ({n + 1} of {parts})", lines[n * MOST_LINES : (n + 1) * MOST_LINES], logarithmic, x, *limits)
        for n in range(parts)
    ]


def eval_charts(runs: list[Run]) -> list[Chart]:
    """Of one run a chart for each task's metric, its rows as lines; of several for each row too. Sizes of the data,
    whole numbers that never change, are left out."""
    groups: dict[str, list[Line]] = {}
    for look, run in enumerate(runs):
        for (task, row, metric), curve in run.evals.items():
            title, own = (f"{task} {metric}", row) if len(runs) == 1 else (f"{task} {metric}, {row}", run.label)
            of_chart = groups.setdefault(title, [])
            of_chart.append(Line(own, curve, look if len(runs) > 1 else len(of_chart)))
    return [
        chart
        for title, lines in groups.items()
        if not is_size([line.curve for line in lines])
        for chart in charts(title, lines)
    ]


def is_size(curves: list[Curve]) -> bool:
    """Whether the numbers tell how large the data are, which are the same each time."""
    values = [np.unique(curve.finite.values) for curve in curves]
    return all(len(own) == 1 and own[0] == round(own[0]) and own[0] > 1 for own in values if len(own))


def layer_charts(scores: list[Scores]) -> list[Chart]:
    """Of each task that was measured by layer: rows `NAME layer N`."""
    groups: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for model in scores:
        for task, rows in model.results.items():
            for row, numbers in rows.items():
                found = re.fullmatch(r"(.*?) ?layer (\d+) ?(.*)", row)
                for metric in SHOWN_BY_LAYER if found else ():
                    if metric in numbers:
                        name = f"{found[1]} {found[3]}".strip() if found else ""
                        title = f"{task} {metric} by layer" + (f", {name}" if len(scores) > 1 else "")
                        line = groups.setdefault(title, {}).setdefault(model.label if len(scores) > 1 else name, [])
                        line.append((int(found[2]) if found else 0, numbers[metric]))
    return [
        chart
        for title, lines in groups.items()
        for chart in charts(title, [Line(label, layers(lines[label]), n) for n, label in enumerate(lines)], x="layer")
    ]


def layers(points: list[tuple[int, float]]) -> Curve:
    points = sorted(points)
    return Curve(np.array([n for n, _ in points]), np.array([value for _, value in points], dtype=float))


@dataclass(frozen=True)
class Thinned:
    """At most one point for each column of a chart: the mean of a range of steps, and the least and largest of it."""

    steps: np.ndarray
    means: np.ndarray
    least: np.ndarray
    largest: np.ndarray


def thin(curve: Curve, columns: int) -> Thinned | None:
    """None where there are so few steps that each has its own point. Steps without a number count for none; a column
    of nothing else has NaN."""
    if len(curve.steps) <= columns:
        return None
    first, last = curve.steps[0], curve.steps[-1]
    column = ((curve.steps - first) * columns // max(last - first + 1, 1)).astype(np.int64)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    counts = np.diff(starts, append=len(column))
    known = np.isfinite(curve.values)
    sums = np.add.reduceat(np.where(known, curve.values, 0.0), starts)
    numbers = np.add.reduceat(known.astype(float), starts)
    numbers[numbers == 0] = np.nan
    return Thinned(
        np.add.reduceat(curve.steps.astype(float), starts) / counts,
        sums / numbers,
        np.fmin.reduceat(np.where(known, curve.values, np.nan), starts),
        np.fmax.reduceat(np.where(known, curve.values, np.nan), starts),
    )
