"""Charts as SVG that takes its colours and fonts from the page, and as PNG.

Lines differ by dashes and markers too, and are named at their ends. All are drawn as wide as a narrow screen.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from xscale import files
from xscale.report.curves import Chart, Line, thin
from xscale.report.read import LONGEST_LABEL

WIDTH, HEIGHT = 285.0, 172.0
"""Points, 4/3 of a pixel each."""
COLUMNS = 60
"""Points of a line, at most: more would show its noise."""
INK, FAINT = "#1b2430", "#d5dbe3"
COLOURS = ("#0b5cad", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be185d", "#0f766e", "#57534e")
IN_THE_DARK = ("#7ab8ff", "#ff9d66", "#6fdc8c", "#cf9fff", "#e6c229", "#ff8fc2", "#4fd6c8", "#c9c4bd")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
MARKERS, GLYPHS = "os^Dv<>P", "●■▲◆▼◀▶✚"
FEW = 12
"""Points that each have a marker."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "xscale",
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.5,
    "path.simplify": True,
}


class Pictures:
    """The page's charts, numbered in their order; also PNGs in `folder`, where one is given."""

    def __init__(self, folder: Path | None = None):
        self.folder, self.number = folder, 0

    def chart(self, chart: Chart) -> str:
        with drawing(right=label_width(chart.lines)) as (figure, axes):
            draw_lines(axes, chart)
            return self.finish(figure, axes, chart.title)

    def scatter(self, points: Sequence[tuple[float, float]], looks: Sequence[int], title: str, x: str, y: str) -> str:
        """Points by their numbers, from 1."""
        with drawing(left=44, bottom=32, height=220) as (figure, axes):
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            for number, ((a, b), look) in enumerate(zip(points, looks, strict=True), 1):
                axes.plot([a], [b], **look_of(look))
                axes.annotate(f"{number}", (a, b), (3, 1), textcoords="offset points", fontsize=7)
            axes.margins(0.08)
            return self.finish(figure, axes, title)

    def word_pairs(self, places: np.ndarray, words: Sequence[tuple[str, str]], title: str) -> str:
        """places: of each pair's two words [pairs, 2, 2]."""
        with drawing(left=6, right=6, bottom=6, height=260) as (figure, axes):
            axes.set(xticks=[], yticks=[])
            axes.spines[["left", "bottom"]].set_visible(False)
            for (first, second), (a, b) in zip(places.tolist(), words, strict=True):
                axes.plot([first[0], second[0]], [first[1], second[1]], ":", color=INK, linewidth=0.7)
                for at, word, side, look in ((first, a, "left", look_of(0)), (second, b, "right", look_of(2))):
                    axes.plot(*([x] for x in at), **look)
                    away = (3, 2) if side == "left" else (-3, -7)
                    axes.annotate(word, at, away, textcoords="offset points", fontsize=7, ha=side)
            axes.margins(0.12)
            return self.finish(figure, axes, title)

    def finish(self, figure: Figure, axes: Axes, title: str) -> str:
        """The picture as a figure of the page."""
        self.number += 1
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True)
        if self.folder is not None:
            axes.set_title(title, fontsize=9, loc="left")
            self.folder.mkdir(parents=True, exist_ok=True)
            slug = re.sub(r"[^\w.-]+", "-", title).strip("-")
            with files.publish(self.folder / f"{self.number:03d}-{slug}.png") as path:
                figure.savefig(path, format="png", dpi=192, facecolor="white", bbox_inches="tight")
        return inline(text.getvalue(), self.number, title)


@contextmanager
def drawing(
    left: float = 36, right: float = 8, bottom: float = 24, top: float = 6, height: float = HEIGHT
) -> Iterator[tuple[Figure, Axes]]:
    """A figure with these margins, in points."""
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure((WIDTH / 72, height / 72))
        box = (left / WIDTH, bottom / height, 1 - (left + right) / WIDTH, 1 - (bottom + top) / height)
        yield figure, figure.add_axes(box)


def label_width(lines: list[Line]) -> float:
    """Points that the labels behind the lines' ends take."""
    longest = max(len(cut(line.label)) for line in lines)
    return 26 + 5 * longest if longest else 8


def cut(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"


def draw_lines(axes: Axes, chart: Chart) -> None:
    if chart.logarithmic and all((line.curve.finite.values > 0).all() for line in chart.lines):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(short))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(short))
    axes.set_xlabel(chart.x, labelpad=1)
    ends = []
    for line in chart.lines:
        look = look_of(line.look)
        thinned = thin(line.curve, COLUMNS)
        steps, values = (line.curve.steps, line.curve.values) if thinned is None else (thinned.steps, thinned.means)
        if thinned is not None and len(chart.lines) <= 4:
            colour = look["color"]
            axes.fill_between(steps, thinned.least, thinned.largest, color=colour, alpha=0.15, linewidth=0)
        points = np.flatnonzero(np.isfinite(values))
        marked = points if len(points) <= FEW else points[:: len(points) // 6] if line.label else points[:0]
        axes.plot(steps, values, markevery=marked.tolist(), **look)
        ends.append(float(values[points[-1]]))
    if np.isfinite(chart.bottom) and chart.top > chart.bottom:
        room = (chart.top - chart.bottom) / 20
        axes.set_ylim(chart.bottom - room, chart.top + room)
    if any(line.label for line in chart.lines):
        label_ends(axes, ends, chart.lines)


def look_of(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % 8], "linestyle": DASHES[number % 4], "marker": MARKERS[number % 8]}


def label_ends(axes: Axes, ends: list[float], lines: list[Line]) -> None:
    """A sample of each line and its name, behind its end, as near to its height as the others leave room."""
    axes.get_ylim()  # now it is what the lines need
    box = axes.get_window_extent()
    heights = (axes.transData.transform([(0, end) for end in ends])[:, 1] - box.y0) / box.height
    point = axes.figure.dpi / 72
    width, gap = box.width / point, 10.5 * point / box.height
    for number, height in zip(np.argsort(heights), spread(np.sort(heights), gap), strict=True):
        look, sample = look_of(lines[number].look), [1 + points / width for points in (4, 11, 18)]
        axes.plot(sample, [height] * 3, transform=axes.transAxes, clip_on=False, markevery=[1], **look)
        axes.text(1 + 21 / width, height, cut(lines[number].label), transform=axes.transAxes, va="center")


def spread(heights: np.ndarray, gap: float) -> np.ndarray:
    """Ascending numbers between 0 and 1, moved apart by at least `gap` where there is room."""
    gap = min(gap, 1 / max(len(heights) - 1, 1))
    room = np.arange(len(heights)) * gap
    moved = np.maximum.accumulate(np.clip(heights, 0, 1) - room)
    return np.minimum(moved, 1 - room[-1]) + room


def short(value: float, _: int = 0) -> str:
    """A tick's label."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            size = 1e3 if letter == "k" else size
            return f"{value / size:g}{letter}"
    return f"{value:.6g}"


def inline(svg: str, number: int, title: str) -> str:
    """A file of matplotlib's as a part of a page: without addresses, names that nothing refers to, and decimals that
    nobody sees; its colours are the page's variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| (width|height)="[\d.]+pt"| version="[\d.]+"', "", svg, count=6)
    svg = svg.replace("xlink:href", "href")
    used = set(re.findall(r'(?:url\(|href=")#([\w-]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="c{number}{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#c{number}", svg)
    svg = re.sub(r' (d|x|y|transform)="([^"]*)"', lambda m: f' {m[1]}="{rounded(m[2])}"', svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for colour, variable in COLOUR_NAMES.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r"\n\s*", "\n", svg).strip()
    return svg.replace("<svg", f'<svg role="img" aria-label="{escaped(title)}"', 1)


COLOUR_NAMES = {INK: "currentColor", FAINT: "var(--faint)"} | {c: f"var(--c{n})" for n, c in enumerate(COLOURS)}


def rounded(numbers: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), " ".join(numbers.split()))


def escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
