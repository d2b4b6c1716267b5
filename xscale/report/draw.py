"""This module draws charts as SVG for the page, and as PNG files. Lines differ by colour, dashes and markers."""

import io
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from xscale import files
from xscale.report.curves import Chart, interval_ends, late, thin
from xscale.report.read import LONGEST_LABEL

WIDTH, HEIGHT = 3.3, 2.0
"""The size of a chart in inches; a page shows 96 pixels per inch."""
COLUMNS = 60
"""A line has at most this many points: more would only show noise."""
MOST_LINES, MOST_PANELS = 8, 24
COLOURS = ("#0b5cad", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be185d", "#0f766e", "#57534e")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
MARKERS, GLYPHS = "os^Dv<>P", "●■▲◆▼◀▶✚"
FEW = 12
"""Each point of a line with at most this many points has a marker."""
MOST_BANDS = 4
"""A chart with at most this many lines has a band for each line's 95 % intervals; others have only bars at the end."""
STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#d5dbe3",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
}


class Pictures:
    """Draws the page's charts and numbers them in their order; if `folder` is given, writes PNG files too."""

    def __init__(self, folder: Path | None = None):
        self.folder, self.number = folder, 0

    @matplotlib.rc_context(STYLE)
    def chart(self, chart: Chart) -> tuple[str, str]:
        """Return the chart's SVG and title. A chart of several runs and labels, or of one run and more than MOST_LINES
        labels, has a panel for each label."""
        if len(chart.lines) == 1 or (len(chart.names) == 1 and len(chart.lines) <= MOST_LINES):
            return self.finish(single(chart), chart.heading), chart.heading
        shown, title = worst_first(chart), chart.heading
        if len(shown) > MOST_PANELS:
            title += f", the {MOST_PANELS} {'worst' if chart.better else 'first'} of {len(shown)}"
        return self.finish(panels(chart, shown[:MOST_PANELS]), title), title

    @matplotlib.rc_context(STYLE)
    def scatter(self, points: Sequence[tuple[float, float]], looks: Sequence[int], title: str, x: str, y: str) -> str:
        """Return the SVG of points, which are numbered from 1. looks: the number of each point's look (look_of)."""
        figure = Figure((WIDTH, 3), layout="constrained")
        axes = figure.add_subplot(xlabel=x, ylabel=y)
        for number, (point, look) in enumerate(zip(points, looks, strict=True), 1):
            mark(axes, point, look, f"{number}", (3, 1))
        axes.margins(0.08)
        return self.finish(figure, title)

    @matplotlib.rc_context(STYLE)
    def word_pairs(self, places: np.ndarray, words: Sequence[tuple[str, str]], title: str) -> str:
        """Return the SVG of word pairs in the plane. places: the position of each word [pairs, 2 words, (x, y)]."""
        figure = Figure((WIDTH, 3.6), layout="constrained")
        axes = figure.add_subplot(xticks=[], yticks=[])
        axes.spines[["left", "bottom"]].set_visible(False)
        for pair, (first, second) in zip(places, words, strict=True):
            axes.plot(*pair.T, ":", color="black", linewidth=0.7)
            mark(axes, pair[0], 0, first, (3, 2))
            mark(axes, pair[1], 2, second, (-3, -7), ha="right")
        axes.margins(0.12)
        return self.finish(figure, title)

    def finish(self, figure: Figure, title: str) -> str:
        """Return the figure's SVG for a page, without unused ids and invisible decimals. Writes the PNG too."""
        self.number += 1
        text = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": str(self.number)}):
            figure.savefig(text, format="svg", transparent=True)
        if self.folder is not None:
            figure.suptitle(textwrap.fill(title, 55), fontsize=8)
            self.folder.mkdir(parents=True, exist_ok=True)
            slug = re.sub(r"[^\w.-]+", "-", title).strip("-")
            with files.publish(self.folder / f"{self.number:03d}-{slug}.png") as path:
                figure.savefig(path, format="png", dpi=192, facecolor="white")
        svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text.getvalue(), flags=re.DOTALL)
        svg = re.sub(r' id="[\w.]+_\d+"| xmlns(:\w+)?="[^"]*"', "", svg[svg.index("<svg") :])
        svg = re.sub(r' (d|x|y|transform)="([^"]*)"', lambda m: f' {m[1]}="{rounded(m[2])}"', svg)
        return re.sub(r"\n\s*", "\n", svg.replace("xlink:href", "href"))


def mark(axes: Axes, at: Any, look: int, label: str, away: tuple[int, int], **options: Any) -> None:
    """Draw a point with a label, which is `away` points of type from it."""
    axes.plot(*at, **look_of(look))
    axes.annotate(label, at, away, textcoords="offset points", fontsize=7, **options)


def rounded(numbers: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), numbers)


def single(chart: Chart) -> Figure:
    figure = Figure((WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot(xlabel=chart.x)
    if len(chart.names) == 1:
        lines = {label: curve for label, (curve,) in chart.lines.items()}
    else:
        lines = dict(zip(chart.names, chart.curves, strict=True))
    draw(axes, lines, chart.logarithmic)
    if len(axes.lines) > 1:  # the highest line comes first
        order = sorted(axes.lines, key=lambda line: -late(pd.Series(line.get_ydata())))
        axes.legend(order, [str(line.get_label()) for line in order], loc="upper left", bbox_to_anchor=(1, 1.05))
    return figure


def panels(chart: Chart, labels: list[str]) -> Figure:
    """Draw a panel for each label, all with the same axes."""
    columns = 4 if len(labels) > 9 else 3
    rows = -(-len(labels) // columns)
    figure = Figure((WIDTH, max(0.55 * rows + 0.4, HEIGHT)), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(labels) :]:
        axes.remove()
    for axes, label in zip(grid.flat, labels, strict=False):
        draw(axes, dict(zip(chart.names, chart.lines[label], strict=True)), chart.logarithmic, small=True)
        axes.set_title(cut(label), fontsize=7, pad=1)
        axes.tick_params(labelsize=6.5, length=2)
    if len(chart.names) > 1:
        looks = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
        figure.legend(looks.values(), looks, loc="outside lower center", ncols=3)
    return figure


def worst_first(chart: Chart) -> list[str]:
    """Return the chart's labels: those without any number, then the others, worst mean over all runs first."""
    means = {label: pd.Series([late(curve) for curve in curves]) for label, curves in chart.lines.items()}
    ends = pd.Series({label: chart.better * mean.mean() for label, mean in means.items()}, dtype=float)
    return [str(label) for label in ends.sort_values(kind="stable", na_position="first").index]


def draw(axes: Axes, lines: dict[str, pd.Series], logarithmic: bool, small: bool = False) -> None:
    """Draw lines. A line's look depends only on its position in `lines`, even if earlier lines have no numbers."""
    for number, (label, curve) in enumerate(lines.items()):
        if not curve.notna().any():
            continue
        columns = COLUMNS // 2 if small else COLUMNS
        points = thin(curve, columns)
        known = np.flatnonzero(points["mean"].notna())
        marked = known if len(known) <= FEW else known[:: len(known) // 6]
        if curve.attrs:
            low, high = (thin(end, columns)["mean"].dropna() for end in interval_ends(curve))
            draw_intervals(axes, low, high, number, len(lines))
        elif len(curve) > COLUMNS and len(lines) <= 3 and not small:
            axes.fill_between(points.index, points["min"], points["max"], color=COLOURS[number % 8], alpha=0.15, lw=0)
        look = look_of(number) | ({} if len(lines) > 1 or len(known) <= FEW else {"marker": ""})
        axes.plot(points.index, points["mean"], label=cut(label), markevery=marked.tolist(), **look)
    ticks = 2 if small else 4
    one = axes.dataLim.xmin == axes.dataLim.xmax
    axes.xaxis.set_major_locator(FixedLocator([axes.dataLim.xmin]) if one else MaxNLocator(ticks, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    if logarithmic and 0 < 10 * axes.dataLim.ymin < axes.dataLim.ymax:
        axes.set_yscale("log")
        return
    low, high = axes.get_ylim()
    room = 0.05 * max(abs(low), abs(high)) - (high - low)
    if room > 0:  # a range of at least 5 % of the numbers, so that noise does not look like a trend
        axes.set_ylim(low - room / 2, high + room / 2)
    axes.yaxis.set_major_locator(MaxNLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(short))


def draw_intervals(axes: Axes, low: pd.Series, high: pd.Series, number: int, lines: int) -> None:
    """Draw the 95 % intervals of line `number` of several: a bar at the last point, and a band if the lines are few.
    The bars of several lines are side by side, 2 points (1/36 inch) apart."""
    if lines <= MOST_BANDS:
        axes.fill_between(low.index, low, high, color=COLOURS[number % 8], alpha=0.15, lw=0)
    place = axes.transData + ScaledTranslation((number - (lines - 1) / 2) / 36, 0, axes.figure.dpi_scale_trans)
    bar = low.index[-1], low.iloc[-1], high.iloc[-1]
    axes.vlines(*bar, color=COLOURS[number % 8], lw=1, transform=place, clip_on=False)


def look_of(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % 8], "linestyle": DASHES[number % 4], "marker": MARKERS[number % 8]}


def short(value: float, _: int = 0) -> str:
    """Return a tick's label, such as 0.02, 150 or 12k."""
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:.6g}"


def cut(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"
