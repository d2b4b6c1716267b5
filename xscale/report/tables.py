"""Makes the tables of a report: each run's streams, model, state and last metrics, and scores side by side."""

import math
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from xscale.eval.bootstrap import Score, p_value, weighted_sum
from xscale.metric_keys import direction
from xscale.report.read import Results, Run, ScoreName

Cell = str | float | None
SUMMARY = "Means of the last tenth of steps. A dash: the run has no such number."
PAIRED = (
    "Brackets are 95 % intervals. A difference from the first model (`− first`) has the interval and the p value of a "
    "paired bootstrap: all models are resampled with the same sentences. `not in file`: evaluate the model with the "
    "same --task, --data, --pooling and --layer; a smaller model may lack the layer. `no interval`: the score is not "
    "over sentences, such as `alignment`, or an older xscale wrote the file. A dash: one of the two models lacks the "
    "score, or the number has no better direction."
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


def mean_of_last_tenth(curve: pd.Series) -> float:
    """Return the mean of a curve's last tenth of steps; NaN if it has no number there."""
    return float(curve.iloc[-math.ceil(len(curve) / 10) :].mean())


def last_tenth_cells(runs: dict[str, Run], metric: str) -> list[Cell]:
    """Return the mean of the last tenth of a metric's steps for each run; None for a run without the metric."""
    cells: list[Cell] = []
    for run in runs.values():
        cells.append(mean_of_last_tenth(run.metrics[metric]) if metric in run.metrics else None)
    return cells


def run_table(runs: dict[str, Run]) -> Table:
    """Return a table with a row for each run: what it trains, its state, and its last step."""
    table = Table("", ["run", "streams and model", "state", "steps", "tokens", "hours", "skipped steps"])
    for name, run in runs.items():
        model = run.recipe.get("model", {})
        trained = join_words([*run.recipe.get("streams", {}), model.get("init") or model.get("preset")], ", ")
        state = join_words([run.status.get("status", "no status.json"), run.status.get("why")], ": ")
        steps = max((curve.index[-1] for curve in run.metrics.values()), default=0)
        row: list[Cell] = [name, trained, state, float(steps)]
        for metric, unit in (("tokens", 1), ("step_s", 3600), ("skipped", 1)):
            row.append(float(run.metrics[metric].sum()) / unit if metric in run.metrics else None)
        table.rows.append(row)
    return table


def join_words(words: list[Any], separator: str) -> str:
    """Return the words that are not empty, with the separator between them."""
    return separator.join(map(str, filter(None, words)))


def summary_table(runs: dict[str, Run]) -> Table:
    """Return the runs' last losses and speed."""
    table = Table("", ["", *runs], note=SUMMARY)
    for metric, title in (("loss", "training loss, nats"), ("tokens_per_s", "tokens per second")):
        if any(metric in run.metrics for run in runs.values()):
            table.rows.append([title, *last_tenth_cells(runs, metric)])
    return table


def last_evaluation_tables(runs: dict[str, Run]) -> list[Table]:
    """Return a table for each task of the runs' last evaluations, with a row for each results row and metric."""
    results = [run.last for run in runs.values()]
    tables: dict[str, Table] = {}
    for name in score_names(results):
        table = tables.setdefault(name.task, Table(name.task, ["row", "number", *runs]))
        table.rows.append([name.row, name.metric, *score_cells(results, name, None)])
    return list(tables.values())


def comparison_tables(models: dict[str, Results]) -> list[Table]:
    """Return a table for each task of result files. It has a row for each results row and metric, with the scores of
    all models and the differences of the others from the first."""
    head = ["row", "number", *models]
    for other in list(models)[1:]:
        head.append(f"{other} − first")
    results = list(models.values())
    tables: dict[str, Table] = {}
    for name in score_names(results):
        table = tables.setdefault(name.task, Table(name.task, head))
        cells = score_cells(results, name, "not in file") + difference_cells(results, name)
        table.rows.append([name.row, name.metric, *cells])
    return list(tables.values())


def score_names(results: list[Results]) -> list[ScoreName]:
    """Return the names of the scores that any model has."""
    names: dict[ScoreName, None] = {}
    for scores in results:
        names |= dict.fromkeys(scores)
    return list(names)


def score_cells(results: list[Results], name: ScoreName, absent: Cell) -> list[Cell]:
    """Return the cell of one score for each model, such as `0.94 [0.92, 0.96] ± 0.01 over seeds`. absent: the cell of a
    model without the score."""
    cells: list[Cell] = []
    for scores in results:
        if name not in scores:
            cells.append(absent)
            continue
        score = scores[name]
        text = format_cell(score.value)
        if score.interval:
            text += " [{:.4g}, {:.4g}]".format(*score.interval)
        if score.deviation is not None:
            text += f" ± {score.deviation:.2g} over seeds"
        cells.append(text)
    return cells


def difference_cells(results: list[Results], name: ScoreName) -> list[Cell]:
    """Return the difference of each further model's score from the first model's. It is None if one of the two lacks
    the score, or if the metric has no better direction."""
    cells: list[Cell] = []
    for other in results[1:]:
        if name not in results[0] or name not in other or not direction(name.metric):
            cells.append(None)
            continue
        pair = [other[name].value, results[0][name].value]
        difference = weighted_sum(pair, [1, -1])
        if isinstance(pair[0], Score) and isinstance(pair[1], Score):
            low, high = difference.interval
            cells.append(f"{difference:+.4g} [{low:+.4g}, {high:+.4g}], p {p_value(difference):.2g}")
        else:
            cells.append(f"{difference:+.4g}, no interval")
    return cells
