"""Draws curves as SVG by matplotlib."""

import base64
import io
import warnings
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from xscale.report.read import Run
from xscale.report.tables import mean_of_last_tenth

COLOURS = ("#0b5cad", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be185d", "#0f766e", "#57534e")
MARKERS = "os^Dv<>P"
MOST_LINES = len(COLOURS)
MOST_POINTS = 100
"""The maximum number of points of a line. More points would only show noise."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "xscale",
    "text.parse_math": False,
    "font.size": 8,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d5dbe3",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
}
Curves = dict[str, dict[str, pd.Series]]
"""{label, such as a language: {run's name: numbers by step}}."""


@dataclass(frozen=True)
class Chart:
    title: str
    picture: str
    """SVG as a data URL."""


def metric_curves(runs: dict[str, Run], metrics: dict[str, str]) -> Curves:
    """Return the curves of metrics for each run. metrics: {label in the charts: name of a metric}."""
    curves: Curves = {}
    for label, metric in metrics.items():
        curves[label] = {name: run.metrics.get(metric, pd.Series(dtype=float)) for name, run in runs.items()}
    return curves


def draw_charts(title: str, curves: Curves, worst: int = 1) -> list[Chart]:
    """Return the charts of some curves. A single run has one chart, with a line for each label. Several runs have a
    chart for each label, with a line for each run. If there are more than MOST_LINES labels, only those with the worst
    last numbers are shown. worst: 1 if high numbers are worse, -1 if low ones are."""
    ends: dict[str, float] = {}
    for label, runs in curves.items():
        if any(curve.notna().any() for curve in runs.values()):
            ends[label] = pd.Series(list(map(mean_of_last_tenth, runs.values()))).mean()
    shown = list(ends)
    if len(ends) > MOST_LINES:
        shown = sorted(ends, key=lambda label: -worst * ends[label])[:MOST_LINES]
        kind = "highest" if worst > 0 else "lowest"
        title += f", the {kind} {MOST_LINES} of {len(ends)}"
    if not shown:
        return []
    if len(curves[shown[0]]) > 1:
        return [draw_chart(f"{title}, {label}".removesuffix(", "), curves[label]) for label in shown]
    lines = {}
    for label in shown:
        (lines[label],) = curves[label].values()
    return [draw_chart(title, lines)]


def draw_chart(title: str, lines: dict[str, pd.Series]) -> Chart:
    """Return a chart of lines, {label: numbers by step}. Lines after the first MOST_LINES are left out."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a browser has fonts for every script
        figure = Figure((3.4, 2.1 + 0.15 * len(lines)), layout="constrained")
        axes = figure.add_subplot(xlabel="step")
        for (label, curve), colour, marker in zip(lines.items(), COLOURS, MARKERS, strict=False):
            points = thin_out(curve)
            every = len(points) // 8 + 1
            axes.plot(points.index, points, color=colour, marker=marker, markevery=every, label=label)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        if len(lines) > 1:
            figure.legend(loc="outside lower left")
        file = io.BytesIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return Chart(title, "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode())


def thin_out(curve: pd.Series) -> pd.Series:
    """Return the means of MOST_POINTS equal parts of a curve, by the mean step of each part. A curve of at most
    MOST_POINTS steps is returned unchanged. Missing numbers are ignored."""
    if len(curve) <= MOST_POINTS:
        return curve
    parts = np.arange(len(curve)) * MOST_POINTS // len(curve)
    means = curve.rename("value").rename_axis("step").reset_index().groupby(parts).mean()
    return means.set_index("step")["value"]
