"""Tables of a page and of the console: where runs stand, last and best values, recipes that differ, scores."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xscale.report.curves import BY_LANGUAGE, SECTIONS, is_size, section
from xscale.report.read import Curve, Run, Scores, fields

Cell = str | float | None
SUMMARISED = re.compile(r"loss(/|$)|(\w+_)?accuracy/|alignment(_trained)?/|tokens_per_s$")
LESS = re.compile(r"loss|perplexity|\baer\b|delta", re.IGNORECASE)
"""Metrics of which less is better."""
NEITHER = re.compile(
    r"^(count|targets|sentences|words|identical|dropped|too_long|queue_age|own_keys)|links|coverage|entropy"
)
"""Metrics that are not better or worse: sizes, and what belongs to the text."""
LATE = 10
"""The last tenth of what a run measured."""


@dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    groups: list[tuple[str, int]] = field(default_factory=list)
    """Names above several columns each, where there are any."""


def number(value: Cell) -> str:
    """Four digits."""
    if value is None or isinstance(value, str):
        return value or "–"
    if not math.isfinite(value):
        return "NaN"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def is_number(value: Cell) -> bool:
    """Or nothing, or a number as text."""
    return not isinstance(value, str) or bool(re.fullmatch(r"-?[\d.]+( ± [\d.]+)?", value))


def run_table(runs: list[Run]) -> Table:
    """How each run stands."""
    rows: list[list[Cell]] = []
    for run in runs:
        totals = [total(run.metrics.get(name)) for name in ("tokens", "step_s", "skipped")]
        tokens, seconds, skipped = totals
        hours = None if seconds is None else seconds / 3600
        state = ": ".join(str(run.status[name]) for name in ("status", "why") if run.status.get(name))
        shown = run.name if run.label == run.name else f"{run.label} = {run.name}"
        rows.append([shown, state or "no status.json", float(run.steps), tokens, hours, skipped])
    return Table(["run", "state", "steps", "tokens", "hours", "skipped steps"], rows)


def total(curve: Curve | None) -> float | None:
    return None if curve is None else float(np.nansum(curve.values))


def summary(runs: list[Run]) -> Table:
    """Of each run the last value, the mean of the last tenth, and the best with its step."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics if SUMMARISED.match(name)))
    order = [*SECTIONS, BY_LANGUAGE]
    names.sort(key=lambda name: order.index(section(name)))
    measured = {(name, name.partition("/")[0]): [run.metrics.get(name) for run in runs] for name in names}
    for task, row, metric in dict.fromkeys(key for run in runs for key in run.evals):
        found = [run.evals.get((task, row, metric)) for run in runs]
        if not is_size([curve for curve in found if curve is not None]):
            measured[f"{task} {metric}, {row}", metric] = found
    rows: list[list[Cell]] = [
        [name, *(cell for curve in found for cell in last_late_best(curve, metric))]
        for (name, metric), found in measured.items()
        if any(curve is not None and len(curve.finite.steps) for curve in found)
    ]
    return Table(
        ["", *("last", "last tenth", "best", "at step") * len(runs)],
        rows,
        [("", 1), *((run.label, 4) for run in runs)],
    )


def last_late_best(curve: Curve | None, metric: str) -> list[Cell]:
    """The last is none where the run has ended without a number; what never changes has no best value."""
    if curve is None or not len(curve.finite.steps):
        return [None] * 4
    late = curve.values[-math.ceil(len(curve.values) / LATE) :]
    last = [float(curve.values[-1]), float(late[np.isfinite(late)].mean()) if np.isfinite(late).any() else math.nan]
    steps, values = curve.finite.steps, curve.finite.values
    if NEITHER.search(metric) or (len(values) > 1 and values.min() == values.max()):
        return [*last, None, None]
    best = int(values.argmin() if LESS.search(metric) else values.argmax())
    return [*last, float(values[best]), float(steps[best])]


def differing(runs: list[Run]) -> Table:
    """Fields of the recipes that are not the same in all runs; of a stream that not all have, its objective and samples
    say enough, of an evaluation its name."""
    recipes = [fields(run.config) for run in runs]
    rows: list[list[Cell]] = []
    for name in dict.fromkeys(name for recipe in recipes for name in recipe):
        section, part, own = (*name.split(".", 2), "", "")[:3]
        told = section != "streams" or own in ("objective", "samples")
        whole = name.rpartition(".")[0] if told else f"streams.{part}.objective"
        having = [recipe for recipe in recipes if whole in recipe]
        compared = having if having or not told else recipes
        if len({shown(recipe, name) for recipe in compared}) > 1:
            rows.append([name, *(shown(recipe, name) for recipe in recipes)])
    return Table(["field", *(run.label for run in runs)], rows)


def shown(recipe: Mapping[str, Any], name: str) -> str:
    value = recipe.get(name, "absent")
    return ", ".join(map(str, value)) if isinstance(value, list) else "null" if value is None else str(value)


def score_tables(scores: list[Scores]) -> dict[str, Table]:
    """By task: a line for each model and row, a column for each metric; without rows of transfer."""
    found: dict[str, Table] = {}
    for task in dict.fromkeys(task for model in scores for task in model.results):
        of_models = [(model.name, *of_row) for model in scores for of_row in model.results.get(task, {}).items()]
        of_task = [
            (model, row, {column(row, metric): value for metric, value in numbers.items()})
            for model, row, numbers in of_models
            if not is_transfer(numbers)
        ]
        metrics = list(dict.fromkeys(metric for _, _, numbers in of_task for metric in numbers))
        rows: list[list[Cell]] = [[model, row, *map(numbers.get, metrics)] for model, row, numbers in of_task]
        found |= {task: Table(["model", "", *metrics], rows)} if rows else {}
    return found


def column(row: str, metric: str) -> str:
    """Directions as arrows, one column for all pairs of languages: `en->de` of the row `en-de` is →, `de->en` is ←."""
    direction, *rest = metric.split(" ", 1)
    first, arrow, second = direction.partition("->")
    arrows = {f"{first}-{second}": "→", f"{second}-{first}": "←"} if arrow else {}
    return " ".join([arrows.get(row.split(" ")[0], direction), *rest])


def failed_evals(runs: list[Run]) -> Table:
    rows: list[list[Cell]] = [[run.label, float(step), task, why] for run in runs for step, task, why in run.failed]
    return Table(["run", "step", "failed", "why"], rows)


def is_transfer(numbers: Mapping[str, float]) -> bool:
    """Whether a row tells of a language's zero-shot, supervised and translate-train scores (transfer.py)."""
    return not numbers.keys().isdisjoint(("zs", "sup", "tt"))


def failures(scores: list[Scores]) -> Table:
    rows: list[list[Cell]] = [
        [model.name, f"{task} {row}", why]
        for model in scores
        for task, of_task in model.failed.items()
        for row, why in of_task.items()
    ]
    return Table(["model", "failed", "why"], rows)
