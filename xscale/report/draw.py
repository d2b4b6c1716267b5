"""Draws charts as SVG for the report page, and as PNG files. Lines differ by colour, dashes and markers."""

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
from xscale.report.curves import Chart, downsample, interval_bounds, late_mean
from xscale.report.read import LONGEST_LABEL

WIDTH, HEIGHT = 3.3, 2.0
"""The size of a chart in inches; a page shows 96 pixels per inch."""
COLUMNS = 60
"""The most points of a line: more would only show noise."""
MOST_LINES, MOST_PANELS = 8, 24
COLOURS = ("#0b5cad", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be185d", "#0f766e", "#57534e")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
MARKERS, GLYPHS = "os^Dv<>P", "●■▲◆▼◀▶✚"
FEW = 12
"""The most points of a line that has a marker at each point."""
MOST_BANDS = 4
"""The most lines of a chart that shows 95 % intervals as bands. Other charts show only each line's last interval."""
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
    """Draws the page's charts, and writes them as numbered PNG files if `folder` is given."""

    def __init__(self, folder: Path | None = None):
        self.folder, self.count = folder, 0

    @matplotlib.rc_context(STYLE)
    def chart(self, chart: Chart) -> tuple[str, str]:
        """Return the chart's SVG and title. A chart of several labels and runs, or too many labels, has a panel per
        label."""
        if len(chart.lines) == 1 or (len(chart.names) == 1 and len(chart.lines) <= MOST_LINES):
            return self.save(draw_single(chart), chart.heading), chart.heading
        shown, title = worst_first(chart), chart.heading
        if len(shown) > MOST_PANELS:
            title += f", the {MOST_PANELS} {'worst' if chart.better else 'first'} of {len(shown)}"
        return self.save(draw_panels(chart, shown[:MOST_PANELS]), title), title

    @matplotlib.rc_context(STYLE)
    def scatter(self, points: Sequence[tuple[float, float]], styles: Sequence[int], title: str, x: str, y: str) -> str:
        """Return an SVG of points with the labels 1, 2 and so on. styles: each point's style, for line_style."""
        figure = Figure((WIDTH, 3), layout="constrained")
        axes = figure.add_subplot(xlabel=x, ylabel=y)
        for number, (point, style) in enumerate(zip(points, styles, strict=True), 1):
            draw_point(axes, point, style, f"{number}", (3, 1))
        axes.margins(0.08)
        return self.save(figure, title)

    @matplotlib.rc_context(STYLE)
    def word_pairs(self, positions: np.ndarray, words: Sequence[tuple[str, str]], title: str) -> str:
        """Return the SVG of word pairs in the plane. positions: [pairs, 2 words, (x, y)]."""
        figure = Figure((WIDTH, 3.6), layout="constrained")
        axes = figure.add_subplot(xticks=[], yticks=[])
        axes.spines[["left", "bottom"]].set_visible(False)
        for pair, (first, second) in zip(positions, words, strict=True):
            axes.plot(*pair.T, ":", color="black", linewidth=0.7)
            draw_point(axes, pair[0], 0, first, (3, 2))
            draw_point(axes, pair[1], 2, second, (-3, -7), ha="right")
        axes.margins(0.12)
        return self.save(figure, title)

    def save(self, figure: Figure, title: str) -> str:
        """Return the figure's SVG, without unused ids and invisible decimals, and write its PNG file if asked to."""
        self.count += 1
        text = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": str(self.count)}):
            figure.savefig(text, format="svg", transparent=True)
        if self.folder is not None:
            figure.suptitle(textwrap.fill(title, 55), fontsize=8)
            self.folder.mkdir(parents=True, exist_ok=True)
            slug = re.sub(r"[^\w.-]+", "-", title).strip("-")
            with files.publish(self.folder / f"{self.count:03d}-{slug}.png") as path:
                figure.savefig(path, format="png", dpi=192, facecolor="white")
        svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text.getvalue(), flags=re.DOTALL)
        svg = re.sub(r' id="[\w.]+_\d+"| xmlns(:\w+)?="[^"]*"', "", svg[svg.index("<svg") :])
        svg = re.sub(r' (d|x|y|transform)="([^"]*)"', lambda m: f' {m[1]}="{round_decimals(m[2])}"', svg)
        return re.sub(r"\n\s*", "\n", svg.replace("xlink:href", "href"))


def draw_point(axes: Axes, at: Any, style: int, label: str, offset: tuple[int, int], **options: Any) -> None:
    """Draw a point, and its label at this offset in points of 1/72 inch. options: of matplotlib's annotate."""
    axes.plot(*at, **line_style(style))
    axes.annotate(label, at, offset, textcoords="offset points", fontsize=7, **options)


def round_decimals(numbers: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), numbers)


def draw_single(chart: Chart) -> Figure:
    figure = Figure((WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot(xlabel=chart.x)
    if len(chart.names) == 1:
        lines = {label: curve for label, (curve,) in chart.lines.items()}
    else:
        lines = dict(zip(chart.names, chart.curves, strict=True))
    draw(axes, lines, chart.logarithmic)
    if len(axes.lines) > 1:  # the highest line comes first
        order = sorted(axes.lines, key=lambda line: -late_mean(pd.Series(line.get_ydata())))
        axes.legend(order, [str(line.get_label()) for line in order], loc="upper left", bbox_to_anchor=(1, 1.05))
    return figure


def draw_panels(chart: Chart, labels: list[str]) -> Figure:
    """Return a figure with a panel for each label, all with the same axes."""
    columns = 4 if len(labels) > 9 else 3
    rows = -(-len(labels) // columns)
    figure = Figure((WIDTH, max(0.55 * rows + 0.4, HEIGHT)), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(labels) :]:
        axes.remove()
    for axes, label in zip(grid.flat, labels, strict=False):
        draw(axes, dict(zip(chart.names, chart.lines[label], strict=True)), chart.logarithmic, small=True)
        axes.set_title(shorten_label(label), fontsize=7, pad=1)
        axes.tick_params(labelsize=6.5, length=2)
    if len(chart.names) > 1:
        looks = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
        figure.legend(looks.values(), looks, loc="outside lower center", ncols=3)
    return figure


def worst_first(chart: Chart) -> list[str]:
    """Return the chart's labels: first those without numbers, then those with the worst late mean over all runs."""
    means = {label: pd.Series([late_mean(curve) for curve in curves]) for label, curves in chart.lines.items()}
    ends = pd.Series({label: chart.better * mean.mean() for label, mean in means.items()}, dtype=float)
    return [str(label) for label in ends.sort_values(kind="stable", na_position="first").index]


def draw(axes: Axes, lines: dict[str, pd.Series], logarithmic: bool, small: bool = False) -> None:
    """Draw lines. A line's style depends only on its index, even if earlier lines are empty. small: for a panel."""
    for index, (label, curve) in enumerate(lines.items()):
        if not curve.notna().any():
            continue
        columns = COLUMNS // 2 if small else COLUMNS
        points = downsample(curve, columns)
        known = np.flatnonzero(points["mean"].notna())
        marked = known if len(known) <= FEW else known[:: len(known) // 6]
        if curve.attrs:
            low, high = (downsample(end, columns)["mean"].dropna() for end in interval_bounds(curve))
            draw_intervals(axes, low, high, index, len(lines))
        elif len(curve) > COLUMNS and len(lines) <= 3 and not small:
            axes.fill_between(points.index, points["min"], points["max"], color=COLOURS[index % 8], alpha=0.15, lw=0)
        style = line_style(index) | ({} if len(lines) > 1 or len(known) <= FEW else {"marker": ""})
        axes.plot(points.index, points["mean"], label=shorten_label(label), markevery=marked.tolist(), **style)
    ticks = 2 if small else 4
    one = axes.dataLim.xmin == axes.dataLim.xmax
    axes.xaxis.set_major_locator(FixedLocator([axes.dataLim.xmin]) if one else MaxNLocator(ticks, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(tick_label))
    if logarithmic and 0 < 10 * axes.dataLim.ymin < axes.dataLim.ymax:
        axes.set_yscale("log")
        return
    low, high = axes.get_ylim()
    room = 0.05 * max(abs(low), abs(high)) - (high - low)
    if room > 0:  # the axis spans at least 5 % of the numbers, so that noise does not look like a trend
        axes.set_ylim(low - room / 2, high + room / 2)
    axes.yaxis.set_major_locator(MaxNLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(tick_label))


def draw_intervals(axes: Axes, low: pd.Series, high: pd.Series, index: int, lines: int) -> None:
    """Draw the 95 % intervals of one of several lines: a bar at the last point, and a band if the lines are few. The
    bars of several lines are 2 points (1/36 inch) apart. lines: the number of lines."""
    if lines <= MOST_BANDS:
        axes.fill_between(low.index, low, high, color=COLOURS[index % 8], alpha=0.15, lw=0)
    place = axes.transData + ScaledTranslation((index - (lines - 1) / 2) / 36, 0, axes.figure.dpi_scale_trans)
    bar = low.index[-1], low.iloc[-1], high.iloc[-1]
    axes.vlines(*bar, color=COLOURS[index % 8], lw=1, transform=place, clip_on=False)


def line_style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % 8], "linestyle": DASHES[index % 4], "marker": MARKERS[index % 8]}


def tick_label(value: float, _: int = 0) -> str:
    """Return the label of an axis tick, such as 0.02, 150 or 12k."""
    return EngFormatter(sep="")(value) if abs(value) >= 1000 else f"{value:.6g}"


def shorten_label(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"
