"""This module makes the tables of a page and of the console: states of runs, last and best values, recipes, scores."""

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
    column,
    eval_title,
    interval_ends,
    is_empty,
    is_mean,
    is_size,
    last_tenth,
    of_runs,
    section_of,
)
from xscale.report.read import Measured, Run, Scores, mapping

Cell = str | float | None
SUMMARISED = re.compile(r"loss(/|$)|(\w+_)?accuracy/|alignment(_trained)?/|tokens_per_s$")
LATE = ("last", "last tenth", "best", "at step")
"""The columns of a run: a metric's last number, the mean of its last tenth, its best number, and the step of that."""


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    groups: Sequence[tuple[str, int]] = ()
    """(name, number of columns) of each heading that is above several columns."""
    title: str = ""


def number(value: Cell) -> str:
    """Return the text of a cell: a number with four digits, and with its interval if it has one."""
    if isinstance(value, Measured):
        return "{} [{:,.4g}, {:,.4g}]".format(number(float(value)), *value.interval)
    if value is None or isinstance(value, str):
        return value or "–"
    if not math.isfinite(value):
        return "NaN"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def is_numeric(values: Sequence[Cell]) -> bool:
    return all(
        not isinstance(value, str) or re.fullmatch(r"(✓ )?-?[\d.,]+( ± [\d.e-]+| \[.*\])?", value) for value in values
    )


def run_table(runs: list[Run]) -> Table:
    """Return a table with a row for each run: what it trained, and how far it came."""
    rows: list[list[Cell]] = []
    for run in runs:
        model, totals = mapping(run.config.get("model")), {name: float(of.sum()) for name, of in run.metrics.items()}
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
    return mapping(run.config.get("streams"))


def headlines(runs: list[Run]) -> list[Chart]:
    """Return charts of the loss, the number that checkpoint.best names, means of evaluations over streams or pairs, and
    throughput: at most four of these, those that most runs have first."""
    found = list[Chart]()

    def add(title: str, better: int, curves: list[list[pd.Series]]) -> None:
        means = [mean_curve(of_run) for of_run in curves]
        known = any(all(map(pd.Series.equals, means, of.curves)) for of in found)  # such as the mean of a single pair
        if not is_empty(means) and not known:
            found.append(Chart(title, {"all": means}, [run.label for run in runs], better))

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
        """Return True for a row of a stream whose loss is a mean over masked tokens, in nats."""
        return mapping(streams_of(run).get(row)).get("objective", row) in ("mlm", "tlm")

    alike = len({tuple(streams_of(run)) for run in runs}) == 1
    less = -1 if alike else 0  # the losses of other streams are other quantities
    add("Training loss, nats", less, [[run.metrics["loss"]] if "loss" in run.metrics else [] for run in runs])
    for best in dict.fromkeys(mapping(run.config.get("checkpoint")).get("best") for run in runs):
        if isinstance(best, str) and best.count("/") >= 2:
            task, row, name = best.split("/", 2)
            title = eval_title(task, column(row, name), f" of {row}, by which the best checkpoint is chosen")
            add(title, direction(name), evaluated(task, name, row))
    add("Held-out loss of masked tokens, mean of the MLM and TLM streams, nats", less, evaluated("heldout", "loss"))
    add("Translations found by retrieval, mean of the pairs, share", 1, evaluated("retrieval", "accuracy"))
    aligned = zip(evaluated("alignment", "withheld"), metric("alignment"), strict=True)
    add("Withheld words aligned, mean of the pairs, share", 1, [measured or logged for measured, logged in aligned])
    add("Tokens per second", 1, metric("tokens_per_s"))
    return sorted(found, key=lambda headline: sum(curve.empty for curve in headline.curves))[:4]


def mean_curve(curves: list[pd.Series]) -> pd.Series:
    """Return the mean of the curves of streams, languages or pairs. A curve without a number at a step counts with its
    last one. If all curves have intervals, the mean has the mean interval, which is at least as wide as its own."""
    curves = [curve for curve in curves if len(curve)]
    if not curves:
        return NO_CURVE
    together = pd.concat(curves, axis=1).sort_index()
    mean = together.ffill().mean(axis=1).where(together.notna().any(axis=1))
    if all(curve.attrs for curve in curves):
        sides = zip(*map(interval_ends, curves), strict=True)
        ends = [pd.concat(side, axis=1).sort_index().ffill().mean(axis=1, skipna=False) for side in sides]
        mean.attrs = {step: of_step for step, *of_step in pd.concat(ends, axis=1).dropna().itertuples(name=None)}
    return mean


def rank(headline: Chart) -> tuple[list[pd.Series], int | None, list[bool]]:
    """Return the runs' last tenths, the number of the best run (None if nothing is compared), and for each run whether
    it is like the best: their intervals overlap, or their means differ by at most the sum of both deviations."""
    late = [last_tenth(curve) for curve in headline.curves]
    means = pd.Series([curve.mean() * headline.better for curve in late])
    if not headline.better or means.count() < 2:
        return late, None, [False] * len(late)
    best, deviations = int(means.idxmax()), [np.nan_to_num(curve.std()) for curve in late]
    ends = [[end.mean() for end in interval_ends(curve)] for curve in late]
    overlap = [low <= ends[best][1] and ends[best][0] <= high for low, high in ends]
    near = [mean >= means[best] - of_run - deviations[best] for mean, of_run in zip(means, deviations, strict=True)]
    return late, best, [bool(one or other) for one, other in zip(overlap, near, strict=True)]


def headline_table(headlines: list[Chart]) -> Table:
    """Return the last, mean and best numbers of one run; of several runs the means of the last tenth, with interval or
    standard deviation. ✓ marks the best run and those alike."""
    names = headlines[0].names
    if len(names) == 1:
        return Table(["", *LATE], [[of.title, *last_and_best(of.curves[0], of.better)] for of in headlines])
    rows: list[list[Cell]] = []
    for headline in headlines:
        late, _, alike = rank(headline)
        rows.append([headline.title])
        for curve, same in zip(late, alike, strict=True):
            low, high = (end.mean() for end in interval_ends(curve))
            spread = f" ± {curve.std():.2g}" if curve.count() > 2 and math.isnan(low) else ""
            mean = float(curve.mean()) if math.isnan(low) else Measured(curve.mean(), low, high)
            rows[-1].append("✓ " * same + number(mean) + spread if curve.notna().any() else None)
    return Table(["mean of the last tenth", *names], rows)


def summary(runs: list[Run]) -> Table:
    """Return a table with each run's last value, mean over the last tenth, and best value with its step. Metrics by
    language or pair come last, after rows with their means over the languages or pairs."""
    groups: dict[str, dict[tuple[str, str], list[pd.Series]]] = {"": {}}
    """Name without language -> {(name, name of the quantity): curves}. Metrics without languages are the group ""."""
    means_of_runs: dict[str, list[pd.Series]] = {}
    names = list(dict.fromkeys(name for run in runs for name in run.metrics if SUMMARISED.match(name)))
    for name in sorted(names, key=lambda name: list(SECTIONS).index(section_of(MetricKey.parse(name)))):
        key = MetricKey.parse(name)
        groups.setdefault(without_language(key), {})[name, key.name] = [run.metrics.get(name, NO_CURVE) for run in runs]
    for task, row, name in dict.fromkeys(key for run in runs for key in run.evals):
        label, found = without_row(task, row, name), of_runs(runs, (task, row, name))
        if is_mean(row):
            means_of_runs[label] = found
        elif not is_size(found):
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
    return Table(["", *LATE * len(runs)], rows, [("", 1), *((run.label, 4) for run in runs)], "Last and best values")


def without_language(key: MetricKey) -> str:
    """Return the name of a metric without its language or pair; "" for a metric that has neither."""
    if key.language:
        return str(key._replace(language=""))
    return key.name if key.name in ("alignment", "alignment_trained") else ""


def without_row(task: str, row: str, name: str) -> str:
    """Return a number's name without its results row's language; "" if it has none. Rows of a run's held-out text are
    `STREAM` and `STREAM LANGUAGE`, rows of mteb have no language, others are `LANGUAGE` or `LANGUAGE VARIANT`."""
    first, _, rest = row.partition(" ")
    if task == "mteb" or (task == "heldout" and not rest):
        return ""
    return ", ".join(filter(None, [f"{task} {column(row, name)}", first if task == "heldout" else rest]))


def last_and_best(curve: pd.Series, better: int) -> list[Cell]:
    """Return a curve's cells for the columns LATE. The last value has its interval; it is NaN if it is missing. A
    constant curve has no best value, and neither has a metric for which neither high nor low is better."""
    if not curve.notna().any():
        return [None] * 4
    interval, now = curve.attrs.get(curve.index[-1]), float(curve.iloc[-1])
    last: list[Cell] = [Measured(now, *interval) if interval else now, float(last_tenth(curve).mean())]
    values = curve.dropna()
    if not better or (len(values) > 1 and values.nunique() == 1):
        return [*last, None, None]
    step = (values * better).idxmax()
    return [*last, float(values[step]), float(step)]


def differing(runs: list[Run]) -> Table:
    """Return a table of the recipes' fields that are not the same in all runs."""
    recipes = [dict(fields(run.config)) for run in runs]
    names = dict.fromkeys(name for recipe in recipes for name in recipe)
    rows = [[name, *(recipe.get(name, "absent") for recipe in recipes)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return Table(["field", *(run.label for run in runs)], rows, title="Fields of the recipes that differ")


def fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name, such as `train.lr`, and the text of each field that is not null. A section of a list of sections
    is named by its field `name`."""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "name" in one for one in value):
        value = {one["name"]: one for one in value}
    if isinstance(value, dict):
        for inner, of_inner in value.items():
            yield from fields(of_inner, f"{name}.{inner}" if name else str(inner))
    elif value is not None:
        yield name, str(value)


def score_tables(scores: list[Scores]) -> list[Table]:
    """Return a table for each task: a line for each model and results row, a column for each number. Rows of transfer
    scores are left out."""
    found = []
    for task in dict.fromkeys(task for model in scores for task in model.results):
        of_task = [
            (model.name, row, numbers)
            for model in scores
            for row, numbers in with_means(task, model.results.get(task, {})).items()
        ]
        names = list(dict.fromkeys(name for _, _, numbers in of_task for name in numbers))
        rows = [[model, row, *map(numbers.get, names)] for model, row, numbers in of_task]
        found.append(Table(["model", "", *names], rows, title=task))
    return found


def with_means(task: str, rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the results rows except those of transfer, and rows of means over languages or pairs of the numbers that
    have a better direction. A row is named `LANGUAGE` or `LANGUAGE VARIANT`; rows of mteb have no language."""
    found = {
        row: {column(row, name): value for name, value in numbers.items()}
        for row, numbers in rows.items()
        if not is_transfer(numbers)
    }
    variants: dict[str, list[str]] = {}
    for row in found if task != "mteb" else ():
        variants.setdefault(row.partition(" ")[2], []).append(row)
    for variant, of_variant in variants.items():
        if len(of_variant) > 1:
            means = pd.DataFrame([found[row] for row in of_variant]).mean().items()
            label = ", ".join(filter(None, [f"mean over {len(of_variant)} languages or pairs", variant]))
            found[label] = {str(name): float(mean) for name, mean in means if direction(str(name))}
    return found


def is_transfer(numbers: Mapping[str, float]) -> bool:
    """Return True if a results row has a language's zero-shot, supervised or translate-train scores (transfer.py)."""
    return not numbers.keys().isdisjoint(("zs", "sup", "tt"))


def failed_evals(runs: list[Run]) -> Table:
    rows = [failure for run in runs for failure in run.failed]
    return Table(["run", "step", "failed", "why"], rows, title="Evaluations that failed")
