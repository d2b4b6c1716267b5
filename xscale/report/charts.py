"""Draws curves as SVG by matplotlib."""

import base64
import io
import warnings
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from xscale.metric_keys import better_direction

COLOURS = ("#0b5cad", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be185d", "#0f766e", "#57534e")
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
Lines = dict[str, pd.Series]
"""{label of a line: its number at each step}."""


def draw_chart_as_data_url(lines: Lines, title: str) -> str:
    """Return a chart of lines as a data URL of SVG. If there are more lines than colours, only those with the worst
    last numbers are shown. title: has the name of the metric, which says whether high or low numbers are worse."""
    legend = ""
    if len(lines) > len(COLOURS):
        ends = pd.Series({label: downsample_by_mean(curve).iloc[-1] for label, curve in lines.items()})
        shown = ends.sort_values(ascending=better_direction(title) > 0).index[: len(COLOURS)]
        lines = {label: lines[label] for label in shown}
        legend = f"the {len(lines)} worst of {len(ends)} curves"
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a browser has fonts for every script
        figure = Figure((3.4, 2.1 + 0.15 * len(lines)), layout="constrained")
        axes = figure.add_subplot(xlabel="step")
        for (label, curve), colour, marker in zip(lines.items(), COLOURS, "os^Dv<>P", strict=False):
            points = downsample_by_mean(curve)
            axes.plot(points.index, points, color=colour, marker=marker, markevery=len(points) // 8 + 1, label=label)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        if len(lines) > 1:
            figure.legend(loc="outside lower left", title=legend)
        file = io.BytesIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def downsample_by_mean(curve: pd.Series) -> pd.Series:
    """Return the means of at most MOST_POINTS equal parts of a curve, by the mean step of each part. Missing numbers
    are left out."""
    parts = np.arange(len(curve)) * MOST_POINTS // len(curve)
    return pd.Series(curve.groupby(parts).mean().to_numpy(), pd.Series(curve.index).groupby(parts).mean())
