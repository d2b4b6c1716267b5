"""Makes the tables of the page and the console: states of runs, last and best values, recipes, scores."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from xscale.metric_keys import ALL, MetricKey, direction
from xscale.report.curves import (
    NO_CURVE,
    SECTIONS,
    Chart,
    curves_of_runs,
    eval_title,
    interval_bounds,
    is_constant_count,
    is_empty,
    is_row_of_means,
    last_tenth,
    section_of,
    shared_name,
)
from xscale.report.read import NumberWithInterval, Run, Scores, as_mapping

Cell = str | float | None
SUMMARISED = re.compile(r"loss(/|$)|(\w+_)?accuracy/|alignment(_trained)?/|tokens_per_s$")
LAST_AND_BEST = ("last", "last tenth", "best", "at step")
"""The columns of a run: a metric's last value, the mean of its last tenth, its best value, and the step of that."""


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    groups: Sequence[tuple[str, int]] = ()
    """(heading, number of columns below it) of each group of columns."""
    title: str = ""


def format_cell(value: Cell) -> str:
    """Return the text of a cell; a number has four digits, and its interval if it has one."""
    if isinstance(value, NumberWithInterval):
        return "{} [{:,.4g}, {:,.4g}]".format(format_cell(float(value)), *value.interval)
    if value is None or isinstance(value, str):
        return value or "–"
    if not math.isfinite(value):
        return "NaN"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def is_numeric(values: Sequence[Cell]) -> bool:
    """Return True if all cells are numbers, also in text such as `✓ 0.5 ± 0.1` or `0.5 [0.4, 0.6]`, or empty."""
    return all(
        not isinstance(value, str) or re.fullmatch(r"(✓ )?-?[\d.,]+( ± [\d.e-]+| \[.*\])?", value) for value in values
    )


def run_table(runs: list[Run]) -> Table:
    """Return a table with a row for each run: what it trains, its state, and how far it has come."""
    rows: list[list[Cell]] = []
    for run in runs:
        model, totals = as_mapping(run.config.get("model")), {name: float(of.sum()) for name, of in run.metrics.items()}
        state = ": ".join(str(run.status[name]) for name in ("status", "why") if run.status.get(name))
        shown = run.name if run.label == run.name else f"{run.label} = {run.name}"
        begun = [model.get("init") or model.get("preset"), run.parent]
        trained = ", ".join(map(str, filter(None, [*streams_of(run), *begun])))
        hours = totals["step_s"] / 3600 if "step_s" in totals else None
        steps = float(max((curve.index[-1] for curve in run.metrics.values()), default=0))
        done = [steps, totals.get("tokens"), hours, totals.get("skipped")]
        rows.append([shown, trained or None, state or "no status.json", *done])
    return Table(["run", "streams and model", "state", "steps", "tokens", "hours", "skipped steps"], rows)


def streams_of(run: Run) -> dict[str, Any]:
    return as_mapping(run.config.get("streams"))


def headline_charts(runs: list[Run]) -> list[Chart]:
    """Return charts of the main metrics: training loss, the number of checkpoint.best, mean scores of evaluations, and
    tokens per second. At most four are returned, first those that most runs have."""
    charts = list[Chart]()

    def add(title: str, better: int, curves: list[list[pd.Series]]) -> None:
        means = [mean_curve(of_run) for of_run in curves]
        known = any(all(map(pd.Series.equals, means, of.curves)) for of in charts)  # such as the mean of a single pair
        if not is_empty(means) and not known:
            charts.append(Chart(title, {"all": means}, [run.label for run in runs], better))

    def metric(name: str) -> list[list[pd.Series]]:
        return [
            [curve for key, curve in run.metrics.items() if key == name or key.startswith(f"{name}/")] for run in runs
        ]

    def evaluated(task: str, number: str, row: str | None = None) -> list[list[pd.Series]]:
        keys = [[k for k in run.evals if k[0] == task and k[2] == number and row in (None, k[1])] for run in runs]
        keys = [[k for k in own if k[1] == ALL] or own for own in keys]
        return [
            [run.evals[key] for key in own if row or task != "heldout" or predicts(run, key[1])]
            for run, own in zip(runs, keys, strict=True)
        ]

    def predicts(run: Run, row: str) -> bool:
        """Return True for a row of an MLM or TLM stream, whose loss is a mean over masked tokens, in nats."""
        return as_mapping(streams_of(run).get(row)).get("objective", row) in ("mlm", "tlm")

    alike = len({tuple(streams_of(run)) for run in runs}) == 1
    less = -1 if alike else 0  # losses of different streams are different quantities
    add("Training loss, nats", less, [[run.metrics["loss"]] if "loss" in run.metrics else [] for run in runs])
    for best in dict.fromkeys(as_mapping(run.config.get("checkpoint")).get("best") for run in runs):
        if isinstance(best, str) and best.count("/") >= 2:
            task, row, name = best.split("/", 2)
            title = eval_title(task, shared_name(row, name), f" of {row}, by which the best checkpoint is chosen")
            add(title, direction(name), evaluated(task, name, row))
    add("Held-out loss of masked tokens, mean of the MLM and TLM streams, nats", less, evaluated("heldout", "loss"))
    add("Translations found by retrieval, mean of the pairs, share", 1, evaluated("retrieval", "accuracy"))
    aligned = zip(evaluated("alignment", "withheld"), metric("alignment"), strict=True)
    add("Withheld words aligned, mean of the pairs, share", 1, [measured or logged for measured, logged in aligned])
    add("Tokens per second", 1, metric("tokens_per_s"))
    return sorted(charts, key=lambda headline: sum(curve.empty for curve in headline.curves))[:4]


def mean_curve(curves: list[pd.Series]) -> pd.Series:
    """Return the mean curve. At a step where a curve has no number, its last one counts. If all curves have intervals,
    so has the mean: the mean of theirs, which is at least as wide as the mean's real interval."""
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return NO_CURVE
    together = pd.concat(curves, axis=1).sort_index()
    mean = together.ffill().mean(axis=1).where(together.notna().any(axis=1))
    if all(curve.attrs for curve in curves):
        sides = zip(*map(interval_bounds, curves), strict=True)
        ends = [pd.concat(side, axis=1).sort_index().ffill().mean(axis=1, skipna=False) for side in sides]
        mean.attrs = {step: of_step for step, *of_step in pd.concat(ends, axis=1).dropna().itertuples(name=None)}
    return mean


def compare_with_best(headline: Chart) -> tuple[list[pd.Series], int | None, list[bool]]:
    """Return the runs' last tenths, the index of the best run (None if runs cannot be compared), and whether each run
    is like the best: their intervals overlap, or their means differ by at most the sum of both standard deviations."""
    late = [last_tenth(curve) for curve in headline.curves]
    means = pd.Series([curve.mean() * headline.better for curve in late])
    if not headline.better or means.count() < 2:
        return late, None, [False] * len(late)
    best, deviations = int(means.idxmax()), [np.nan_to_num(curve.std()) for curve in late]
    ends = [[end.mean() for end in interval_bounds(curve)] for curve in late]
    overlap = [low <= ends[best][1] and ends[best][0] <= high for low, high in ends]
    near = [mean >= means[best] - of_run - deviations[best] for mean, of_run in zip(means, deviations, strict=True)]
    return late, best, [bool(one or other) for one, other in zip(overlap, near, strict=True)]


def headline_table(headlines: list[Chart]) -> Table:
    """Return a table of the main metrics: for one run its last, mean and best values; for several runs the means of the
    last tenth, with interval or standard deviation, and ✓ for the best run and those like it."""
    names = headlines[0].names
    if len(names) == 1:
        return Table(["", *LAST_AND_BEST], [[of.title, *last_and_best(of.curves[0], of.better)] for of in headlines])
    rows: list[list[Cell]] = []
    for headline in headlines:
        late, _, alike = compare_with_best(headline)
        rows.append([headline.title])
        for curve, same in zip(late, alike, strict=True):
            low, high = (end.mean() for end in interval_bounds(curve))
            spread = f" ± {curve.std():.2g}" if curve.count() > 2 and math.isnan(low) else ""
            mean = float(curve.mean()) if math.isnan(low) else NumberWithInterval(curve.mean(), low, high)
            rows[-1].append("✓ " * same + format_cell(mean) + spread if curve.notna().any() else None)
    return Table(["mean of the last tenth", *names], rows)


def last_and_best_table(runs: list[Run]) -> Table:
    """Return a table of each run's metrics in the columns LAST_AND_BEST, means before the languages or pairs they are
    over."""
    groups: dict[str, dict[tuple[str, str], list[pd.Series]]] = {"": {}}
    """{name without language: {(name, quantity): curve of each run}}. Metrics without languages are in the group ""."""
    means_of_runs: dict[str, list[pd.Series]] = {}
    names = list(dict.fromkeys(name for run in runs for name in run.metrics if SUMMARISED.match(name)))
    for name in sorted(names, key=lambda name: list(SECTIONS).index(section_of(MetricKey.parse(name)))):
        key = MetricKey.parse(name)
        groups.setdefault(name_without_language(key), {})[name, key.name] = [
            run.metrics.get(name, NO_CURVE) for run in runs
        ]
    for task, row, name in dict.fromkeys(key for run in runs for key in run.evals):
        label, found = name_without_row(task, row, name), curves_of_runs(runs, (task, row, name))
        if is_row_of_means(row):
            means_of_runs[label] = found
        elif not is_constant_count(found):
            groups.setdefault(label, {})[f"{task} {name}, {row}", name] = found
    ordered = groups.pop("")
    for label, members in groups.items():
        if len(members) > 1:
            means = [mean_curve(list(curves)) for curves in zip(*members.values(), strict=True)]
            own = means_of_runs.get(label, means)
            means = [mean if of_run.empty else of_run for mean, of_run in zip(means, own, strict=True)]
            ordered[f"{label}, mean over {len(members)} languages or pairs", next(iter(members))[1]] = means
    for members in groups.values():
        ordered |= members
    rows: list[list[Cell]] = [
        [shown, *(cell for curve in curves for cell in last_and_best(curve, direction(name)))]
        for (shown, name), curves in ordered.items()
        if not is_empty(curves)
    ]
    return Table(
        ["", *LAST_AND_BEST * len(runs)], rows, [("", 1), *((run.label, 4) for run in runs)], "Last and best values"
    )


def name_without_language(key: MetricKey) -> str:
    """Return the name of a metric without its language or pair; "" for a metric that has neither."""
    if key.language:
        return str(key._replace(language=""))
    return key.name if key.name in ("alignment", "alignment_trained") else ""


def name_without_row(task: str, row: str, name: str) -> str:
    """Return `TASK NAME` without the language of the results row; "" if the row has none. Rows of held-out losses are
    `STREAM` or `STREAM LANGUAGE`, rows of mteb have no language, others are `LANGUAGE` or `LANGUAGE VARIANT`."""
    first, _, rest = row.partition(" ")
    if task == "mteb" or (task == "heldout" and not rest):
        return ""
    return ", ".join(filter(None, [f"{task} {shared_name(row, name)}", first if task == "heldout" else rest]))


def last_and_best(curve: pd.Series, better: int) -> list[Cell]:
    """Return a curve's cells for LAST_AND_BEST; no best value if the curve is constant or has no better direction."""
    if not curve.notna().any():
        return [None] * 4
    interval, now = curve.attrs.get(curve.index[-1]), float(curve.iloc[-1])
    last: list[Cell] = [NumberWithInterval(now, *interval) if interval else now, float(last_tenth(curve).mean())]
    values = curve.dropna()
    if not better or (len(values) > 1 and values.nunique() == 1):
        return [*last, None, None]
    step = (values * better).idxmax()
    return [*last, float(values[step]), float(step)]


def differing_fields(runs: list[Run]) -> Table:
    """Return a table of the recipes' fields that differ between runs."""
    recipes = [dict(flat_fields(run.config)) for run in runs]
    names = dict.fromkeys(name for recipe in recipes for name in recipe)
    rows = [[name, *(recipe.get(name, "absent") for recipe in recipes)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return Table(["field", *(run.label for run in runs)], rows, title="Fields of the recipes that differ")


def flat_fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, such as `train.lr`, text) of each field that is not null; items of a list are named by their
    `name`."""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "name" in one for one in value):
        value = {one["name"]: one for one in value}
    if isinstance(value, dict):
        for inner, of_inner in value.items():
            yield from flat_fields(of_inner, f"{name}.{inner}" if name else str(inner))
    elif value is not None:
        yield name, str(value)


def score_tables(scores: list[Scores]) -> list[Table]:
    """Return a table for each task: a line per model and results row, a column per metric, without transfer's rows."""
    result = []
    for task in dict.fromkeys(task for model in scores for task in model.results):
        of_task = [
            (model.name, row, numbers)
            for model in scores
            for row, numbers in with_means(task, model.results.get(task, {})).items()
        ]
        names = list(dict.fromkeys(name for _, _, numbers in of_task for name in numbers))
        rows = [[model, row, *map(numbers.get, names)] for model, row, numbers in of_task]
        result.append(Table(["model", "", *names], rows, title=task))
    return result


def with_means(task: str, rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the results rows except those of transfer, and then rows of means over languages or pairs. A row is named
    `LANGUAGE` or `LANGUAGE VARIANT`; rows of mteb have no language, so no mean."""
    kept = {
        row: {shared_name(row, name): value for name, value in numbers.items()}
        for row, numbers in rows.items()
        if not is_transfer(numbers)
    }
    variants: dict[str, list[str]] = {}
    for row in kept if task != "mteb" else ():
        variants.setdefault(row.partition(" ")[2], []).append(row)
    for variant, of_variant in variants.items():
        if len(of_variant) > 1:
            means = pd.DataFrame([kept[row] for row in of_variant]).mean().items()
            label = ", ".join(filter(None, [f"mean over {len(of_variant)} languages or pairs", variant]))
            kept[label] = {str(name): float(mean) for name, mean in means if direction(str(name))}
    return kept


def is_transfer(numbers: Mapping[str, float]) -> bool:
    """Return True if a results row has a language's zero-shot, supervised or translate-train score."""
    return not numbers.keys().isdisjoint(("zs", "sup", "tt"))


def failed_evals_table(runs: list[Run]) -> Table:
    rows = [failure for run in runs for failure in run.failed]
    return Table(["run", "step", "failed", "why"], rows, title="Evaluations that failed")
