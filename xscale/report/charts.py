"""Draws curves as SVG by matplotlib. The page has the titles and legends, so no text of a user enters a picture."""

import base64
import io
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from xscale.report.read import Run
from xscale.report.tables import late_mean

COLOURS = ("#0b5cad", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be185d", "#0f766e", "#57534e")
MARKERS, GLYPHS = "os^Dv<>P", "●■▲◆▼◀▶✚"
MOST_LINES = len(COLOURS)
MOST_POINTS = 100
"""The most points of a line: more would only show noise."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "xscale",
    "font.size": 8,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d5dbe3",
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
}
Curves = dict[str, dict[str, pd.Series]]
"""{label, such as a language: {run's name: numbers by step}}."""


class Chart(NamedTuple):
    title: str
    picture: str
    """SVG as a data URL."""
    legend: list[tuple[str, str, str]]
    """(glyph, colour, label) of each line; [] for a single line."""


def metric_curves(runs: dict[str, Run], metrics: dict[str, str]) -> Curves:
    """metrics: {label: name of a metric}."""
    curves: Curves = {}
    for label, metric in metrics.items():
        curves[label] = {name: run.metrics.get(metric, pd.Series(dtype=float)) for name, run in runs.items()}
    return curves


def draw_charts(title: str, curves: Curves, worst: int = 1) -> list[Chart]:
    """Return charts of the labels: one with a line for each label of a single run, or one for each label with a line
    for each of several runs. Of more than MOST_LINES labels, the worst are shown. worst: 1 if these are those that end
    highest, -1 if these are those that end lowest."""
    curves = {label: runs for label, runs in curves.items() if any(curve.notna().any() for curve in runs.values())}
    shown = list(curves)
    if len(curves) > MOST_LINES:
        ends = {label: pd.Series(map(late_mean, runs.values())).mean() for label, runs in curves.items()}
        shown = sorted(curves, key=lambda label: -worst * ends[label])[:MOST_LINES]
        title += f", the {'highest' if worst > 0 else 'lowest'} {MOST_LINES} of {len(curves)}"
    if not shown:
        return []
    if len(curves[shown[0]]) > 1:
        return [draw_chart(f"{title}, {label}" if label else title, curves[label]) for label in shown]
    lines = {}
    for label in shown:
        (lines[label],) = curves[label].values()
    return [draw_chart(title, lines)]


def draw_chart(title: str, lines: dict[str, pd.Series]) -> Chart:
    """Return a chart of lines, {label: numbers by step}. Lines after the first MOST_LINES are left out."""
    labels = list(lines)[:MOST_LINES]
    legend = []
    for glyph, colour, label in zip(GLYPHS, COLOURS, labels, strict=False):
        legend.append((glyph, colour, label if lines[label].notna().any() else f"{label} (no numbers)"))
    with matplotlib.rc_context(STYLE):
        figure = Figure((3.4, 2.1), layout="constrained")
        axes = figure.add_subplot(xlabel="step")
        for label, colour, marker in zip(labels, COLOURS, MARKERS, strict=False):
            points = thin(lines[label])
            axes.plot(points.index, points, color=colour, marker=marker, markevery=len(points) // 8 + 1)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(tick_label)
        file = io.BytesIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    picture = base64.b64encode(file.getvalue()).decode()
    return Chart(title, f"data:image/svg+xml;base64,{picture}", legend if len(lines) > 1 else [])


def tick_label(value: float, _: float = 0) -> str:
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:.6g}"


def thin(curve: pd.Series) -> pd.Series:
    """Return the mean of a curve in each of MOST_POINTS equal ranges of steps, by the range's mean step. A curve of at
    most MOST_POINTS steps keeps them. Missing numbers are ignored."""
    if len(curve) <= MOST_POINTS:
        return curve
    steps = curve.index.to_numpy()
    ranges = (steps - steps[0]) * MOST_POINTS // (steps[-1] - steps[0] + 1)
    means = pd.DataFrame({"step": steps, "value": curve.to_numpy()}).groupby(ranges).mean()
    return pd.Series(means["value"].to_numpy(), means["step"].to_numpy())
