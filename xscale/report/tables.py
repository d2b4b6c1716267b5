"""Makes the tables of a page: what runs trained and reached, and scores side by side."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from xscale.eval.bootstrap import Score, mean, p_value, weighted_sum
from xscale.metric_keys import ALL, direction
from xscale.report.read import Results, Run, ScoreName, mapping

Cell = str | float | None
SUMMARY = "Losses and speed are means of the last tenth of steps, scores are those of the last evaluation."
COMPARED = (
    " ✓ marks the best score; where 95 % intervals [low, high] overlap, the difference may be noise. Losses of "
    "different recipes are different quantities, so none is called better. A dash: the run has no such number, since "
    "its recipe has no such stream or evaluation."
)
PAIRED = (
    "Brackets are 95 % intervals. Differences from the first model have the interval and the p value of a paired "
    "bootstrap: all models are resampled with the same sentences. `not in file`: evaluate the model with the same "
    "--task, --data, --pooling and --layer. `no interval`: the score is not over sentences (as `alignment`), or a file "
    "is by an older xscale."
)


@dataclass
class Table:
    title: str
    head: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""
    text_columns: int = 1
    """The number of first columns that have text; the others have numbers."""


def format_cell(cell: Cell) -> str:
    """Return the text of a cell; a number has four digits, an empty cell a dash."""
    if cell is None or isinstance(cell, str):
        return cell or "–"
    if not math.isfinite(cell):
        return "not finite"
    return f"{cell:,.0f}" if abs(cell) >= 1000 or cell == int(cell) else f"{cell:.4g}"


def late_mean(curve: pd.Series | None) -> float | None:
    """Return the mean of a curve's last tenth of steps; NaN if it has no number there, None for no curve."""
    return None if curve is None else float(curve.iloc[-math.ceil(len(curve) / 10) :].mean())


def run_table(runs: dict[str, Run]) -> Table:
    """Return a table with a row for each run: what it trains, its state, and how far it has come."""
    table = Table(
        "", ["run", "streams and model", "state", "steps", "tokens", "hours", "skipped steps"], text_columns=3
    )
    for name, run in runs.items():
        model = mapping(run.recipe.get("model"))
        trained = [*mapping(run.recipe.get("streams")), model.get("init") or model.get("preset"), run.origin]
        state = [run.status.get("status", "no status.json"), run.status.get("why")]
        last_step = max((curve.index[-1] for curve in run.metrics.values()), default=0)
        totals = {metric: float(curve.sum()) for metric, curve in run.metrics.items()}
        hours = totals["step_s"] / 3600 if "step_s" in totals else None
        texts: list[Cell] = [name, join(trained, ", "), join(state, ": ")]
        table.rows.append([*texts, float(last_step), totals.get("tokens"), hours, totals.get("skipped")])
    return table


def join(parts: list[Any], separator: str) -> str:
    return separator.join(str(part) for part in parts if part)


def summary_table(runs: dict[str, Run]) -> Table:
    """Return the runs' last losses, speed and main scores. ✓ marks the best of several runs' scores, never a loss."""
    table = Table("", ["", *runs], [], SUMMARY + COMPARED * (len(runs) > 1))
    for metric, title in (("loss", "training loss, nats"), ("tokens_per_s", "tokens per second")):
        table.rows.append([title, *(late_mean(run.metrics.get(metric)) for run in runs.values())])
    for name in main_scores(runs):
        last = [run.last.scores.get(name, math.nan) for run in runs.values()]
        known = [direction(name.metric) * score for score in last if math.isfinite(score)]
        row: list[Cell] = [f"{name.task} {name.row}: {name.metric}"]
        for run, score in zip(runs.values(), last, strict=True):
            is_best = len(known) > 1 and not is_loss(name) and direction(name.metric) * score == max(known)
            row.append("✓ " * is_best + format_score(run.last, name) if name in run.last.scores else None)
        table.rows.append(row)
    table.rows = [row for row in table.rows if any(cell is not None for cell in row[1:])]
    return table


def main_scores(runs: dict[str, Run]) -> list[ScoreName]:
    """Return the first score of each task's row of means, or of its only row; for held-out losses, of each stream."""
    names: dict[ScoreName, None] = {}
    for run in runs.values():
        by_task: dict[str, dict[str, ScoreName]] = {}
        for name in run.last.scores:
            if direction(name.metric):
                by_task.setdefault(name.task, {}).setdefault(name.row, name)
        for task, rows in by_task.items():
            for row, name in rows.items():
                if row == ALL or len(rows) == 1 or (task == "heldout" and " " not in row):
                    names[name] = None
    return list(names)


def is_loss(name: ScoreName) -> bool:
    return "loss" in name.metric


def format_score(results: Results, name: ScoreName) -> str:
    """Return text such as `0.94 [0.92, 0.96]`, and the deviation over seeds if there is one."""
    text = format_cell(results.scores[name])
    if name in results.intervals:
        text += " [{:.4g}, {:.4g}]".format(*results.intervals[name])
    deviation = results.scores.get(name._replace(metric=f"{name.metric}_std"))
    return text if deviation is None else f"{text} ± {deviation:.2g} over seeds"


def differing_fields(runs: dict[str, Run]) -> Table:
    """Return a table of the recipes' fields that differ between runs, without those of streams that a run lacks."""
    common = set.intersection(*(set(mapping(run.recipe.get("streams"))) for run in runs.values()))
    recipes = []
    for run in runs.values():
        streams = {name: stream for name, stream in mapping(run.recipe.get("streams")).items() if name in common}
        recipes.append(dict(flat_fields(run.recipe | {"streams": streams})))
    table = Table("Fields of the recipes that differ", ["field", *runs], text_columns=1 + len(runs))
    names: dict[str, None] = {}
    for recipe in recipes:
        names |= dict.fromkeys(recipe)
    for name in names:
        values: list[Cell] = [recipe.get(name, "absent") for recipe in recipes]
        if len(set(values)) > 1:
            table.rows.append([name, *values])
    return table


def flat_fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, such as `train.lr`, text) of each field that is not null."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat_fields(inner, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, str(value)


def score_tables(models: dict[str, Results], compare: bool) -> list[Table]:
    """Return a table for each task, with a row for each results row and metric, and a column for each model. compare:
    also give the means over rows, and the differences of the other models from the first."""
    first, *others = models
    differences = [f"{other} − {first}" for other in others] if compare else []
    tables: dict[str, Table] = {}
    names: dict[ScoreName, None] = {}
    for results in models.values():
        names |= dict.fromkeys(results.scores)
    for name in names:
        if name.task not in tables:
            head = ["row", "number", *models, *differences]
            tables[name.task] = Table(name.task, head, text_columns=2)
            if compare:
                tables[name.task].rows += mean_rows(models, name.task)
        if not name.metric.endswith("_std"):
            absent = "not in file" if compare else None
            row: list[Cell] = [
                name.row,
                name.metric,
                *(score_cell(results, name, absent) for results in models.values()),
            ]
            tables[name.task].rows.append(row + difference_cells(models, name) * bool(differences))
    failures = Table("Evaluations that failed", ["of", "evaluation", "why"], text_columns=3)
    for model, results in models.items():
        failures.rows += [[model, what, why] for what, why in results.failed.items()]
    return [*tables.values(), failures]


def score_cell(results: Results, name: ScoreName, absent: Cell) -> Cell:
    if name in results.scores:
        return format_score(results, name)
    return "failed" if f"{name.task} {name.row}" in results.failed else absent


def difference_cells(models: dict[str, Results], name: ScoreName) -> list[Cell]:
    """Return the difference of each other model's score from the first one's, or why there is none."""
    first, *others = (results.scores.get(name) for results in models.values())
    cells: list[Cell] = []
    for other in others:
        if first is None or other is None or not direction(name.metric):
            cells.append(None)
        elif isinstance(first, Score) and isinstance(other, Score):
            difference = weighted_sum([other, first], [1, -1])
            low, high = difference.interval
            cells.append(f"{difference:+.4g} [{low:+.4g}, {high:+.4g}], p {p_value(difference):.2g}")
        else:
            cells.append(f"{other - first:+.4g}, no interval")
    return cells


def mean_rows(models: dict[str, Results], task: str) -> list[list[Cell]]:
    """Return rows of means over the languages that all models have. A results row is `LANGUAGE` or `LANGUAGE VARIANT`;
    each variant has its own means."""
    common = set.intersection(*(set(results.scores) for results in models.values()))
    groups: dict[ScoreName, list[ScoreName]] = {}
    """{name of the mean: names of the scores}."""
    for name in next(iter(models.values())).scores:
        is_mean = direction(name.metric) and "->" not in name.metric and not name.metric.endswith("_std")
        if name.task == task and name in common and is_mean:
            variant = name.row.partition(" ")[2]
            groups.setdefault(ScoreName(task, f"mean over languages {variant}".strip(), name.metric), []).append(name)
    rows: list[list[Cell]] = []
    for name, members in groups.items():
        if len(members) > 1:
            means = {model: mean_of(results, name, members) for model, results in models.items()}
            cells = [format_score(results, name) for results in means.values()]
            rows.append([f"{name.row} ({len(members)})", name.metric, *cells, *difference_cells(means, name)])
    return rows


def mean_of(results: Results, name: ScoreName, members: list[ScoreName]) -> Results:
    """Return results with one score, the mean of the members, and with its interval if all are Scores."""
    scores = [results.scores[member] for member in members]
    average = mean(scores)
    if all(isinstance(score, Score) for score in scores):
        return Results({name: average}, {name: average.interval})
    return Results({name: float(average)})
