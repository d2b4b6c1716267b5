"""Makes the tables of a page: what runs trained and reached, and scores side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from xscale.eval.bootstrap import Score, mean, p_value, weighted_sum
from xscale.metric_keys import direction
from xscale.report.read import Measured, Results, Run, ScoreName

Cell = str | float | None
SUMMARY = "Means of the last tenth of steps. A dash: the run has no such number."
PAIRED = (
    "Brackets are 95 % intervals. Differences from the first model (`− first`) have the interval and the p value of a "
    "paired bootstrap: all models are resampled with the same sentences. `not in file`: evaluate the model with the "
    "same --task, --data, --pooling and --layer; a smaller model may lack the layer. `no interval`: it is not over "
    "sentences (as `alignment`), or a file is by an older xscale. A dash: there is no difference, or none is better."
)


@dataclass
class Table:
    title: str
    head: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""


def format_cell(cell: Cell) -> str:
    """Return the text of a cell; a number has four digits, an empty cell a dash."""
    if cell is None or isinstance(cell, str):
        return cell or "–"
    if not math.isfinite(cell):
        return "not finite"
    if abs(cell) >= 1000 or cell == int(cell):
        return f"{cell:,.0f}"
    return f"{cell:.4g}"


def late_mean(curve: pd.Series) -> float:
    """Return the mean of a curve's last tenth of steps; NaN if it has no number there."""
    return float(curve.iloc[-math.ceil(len(curve) / 10) :].mean())


def late_means(runs: dict[str, Run], metric: str) -> list[Cell]:
    cells: list[Cell] = []
    for run in runs.values():
        cells.append(late_mean(run.metrics[metric]) if metric in run.metrics else None)
    return cells


def run_table(runs: dict[str, Run]) -> Table:
    """Return a table with a row for each run: what it trains, its state, and its last step."""
    table = Table("", ["run", "streams and model", "state", "steps", "tokens", "hours", "skipped steps"])
    for name, run in runs.items():
        model = run.recipe.get("model", {})
        trained = [*run.recipe.get("streams", {}), model.get("init") or model.get("preset")]
        state = [run.status.get("status", "no status.json"), run.status.get("why")]
        steps = 0
        for curve in run.metrics.values():
            steps = max(steps, curve.index[-1])
        numbers = [total(run, "tokens"), total(run, "step_s", 3600), total(run, "skipped")]
        table.rows.append([name, join(trained, ", "), join(state, ": "), float(steps), *numbers])
    return table


def total(run: Run, metric: str, divisor: float = 1) -> float | None:
    """Return the sum of a metric over steps; None if the run lacks it."""
    return float(run.metrics[metric].sum()) / divisor if metric in run.metrics else None


def join(parts: list[Any], separator: str) -> str:
    return separator.join(map(str, filter(None, parts)))


def summary_table(runs: dict[str, Run]) -> Table:
    """Return the runs' last losses and speed."""
    table = Table("", ["", *runs], note=SUMMARY)
    for metric, title in (("loss", "training loss, nats"), ("tokens_per_s", "tokens per second")):
        if any(metric in run.metrics for run in runs.values()):
            table.rows.append([title, *late_means(runs, metric)])
    return table


def run_score_tables(runs: dict[str, Run]) -> list[Table]:
    """Return a table for each task of the runs' last evaluations, with a row for each results row and metric."""
    results = [run.last for run in runs.values()]
    tables: dict[str, Table] = {}
    for name in score_names(results):
        table = tables.setdefault(name.task, Table(name.task, ["row", "number", *runs]))
        table.rows.append([name.row, name.metric, *score_cells(results, name, None)])
    return list(tables.values())


def compared_tables(models: dict[str, Results]) -> list[Table]:
    """Return a table for each task of result files: means over languages, each results row and metric, and the
    differences of the other models from the first."""
    head = ["row", "number", *models]
    for other in list(models)[1:]:
        head.append(f"{other} − first")
    results = list(models.values())
    tables: dict[str, Table] = {}
    for name in score_names(results):
        if name.task not in tables:
            tables[name.task] = Table(name.task, head, mean_rows(results, name.task))
        cells = score_cells(results, name, "not in file") + difference_cells(results, name)
        tables[name.task].rows.append([name.row, name.metric, *cells])
    return list(tables.values())


def score_names(results: Sequence[Results]) -> list[ScoreName]:
    names: dict[ScoreName, None] = {}
    for one in results:
        names |= dict.fromkeys(one)
    return list(names)


def score_cells(results: Sequence[Results], name: ScoreName, absent: Cell) -> list[Cell]:
    """Return the score of each of the results, such as `0.94 [0.92, 0.96] ± 0.01 over seeds`, or `absent`."""
    cells: list[Cell] = []
    for one in results:
        if name not in one:
            cells.append(absent)
            continue
        score = one[name]
        text = format_cell(score.value)
        if score.interval:
            text += " [{:.4g}, {:.4g}]".format(*score.interval)
        if score.deviation is not None:
            text += f" ± {score.deviation:.2g} over seeds"
        cells.append(text)
    return cells


def difference_cells(results: Sequence[Results], name: ScoreName) -> list[Cell]:
    """Return the difference of each further score from the first one. It is None if one of the two is absent, or if the
    metric has no better direction."""
    cells: list[Cell] = []
    for other in results[1:]:
        if name not in results[0] or name not in other or not direction(name.metric):
            cells.append(None)
            continue
        pair = [other[name].value, results[0][name].value]
        difference = weighted_sum(pair, [1, -1])
        if are_scores(pair):
            low, high = difference.interval
            cells.append(f"{difference:+.4g} [{low:+.4g}, {high:+.4g}], p {p_value(difference):.2g}")
        else:
            cells.append(f"{difference:+.4g}, no interval")
    return cells


def are_scores(values: list[float]) -> bool:
    return all(isinstance(value, Score) for value in values)


def mean_rows(results: Sequence[Results], task: str) -> list[list[Cell]]:
    """Return rows of means over the languages that all models have. A results row is `LANGUAGE` or `LANGUAGE VARIANT`;
    each variant has its own means."""
    members: dict[ScoreName, list[ScoreName]] = {}
    for name in results[0]:
        is_common = all(name in one for one in results)
        if name.task == task and is_common and direction(name.metric) and "->" not in name.metric:
            row = f"mean over languages {name.row.partition(' ')[2]}".strip()
            members.setdefault(name._replace(row=row), []).append(name)
    rows: list[list[Cell]] = []
    for name, names in members.items():
        if len(names) > 1:
            means = [mean_of(one, name, names) for one in results]
            cells = score_cells(means, name, None) + difference_cells(means, name)
            rows.append([f"{name.row} ({len(names)})", name.metric, *cells])
    return rows


def mean_of(results: Results, name: ScoreName, members: list[ScoreName]) -> Results:
    """Return results with a single score, the mean of the members. It has an interval if all members are Scores."""
    scores = [results[member].value for member in members]
    average = mean(scores)
    if are_scores(scores):
        return {name: Measured(average, average.interval)}
    return {name: Measured(float(average))}
