"""The tables of a page and of the console: states of runs, last and best values, recipes that differ, scores."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from xscale.metric_keys import MetricKey, direction
from xscale.report.curves import LANGUAGES, LOSSES, SECTIONS, is_empty, is_size, section_of
from xscale.report.read import Run, Scores, mapping

Cell = str | float | None
SUMMARISED = re.compile(r"loss(/|$)|(\w+_)?accuracy/|alignment(_trained)?/|tokens_per_s$")
TENTH = 10
"""The last tenth of a run's numbers is averaged."""


class Table(NamedTuple):
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    groups: Sequence[tuple[str, int]] = ()
    """Names above several columns each, where there are any."""
    title: str = ""


class Headline(NamedTuple):
    """One of the few metrics that tell how a run goes, over its steps."""

    title: str
    better: int
    curves: list[pd.Series | None]
    """A curve for each run."""


def number(value: Cell) -> str:
    """Four digits."""
    if value is None or isinstance(value, str):
        return value or "–"
    if not math.isfinite(value):
        return "NaN"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def is_numeric(values: Sequence[Cell]) -> bool:
    return all(not isinstance(value, str) or re.fullmatch(r"-?[\d.]+( ± [\d.]+)?", value) for value in values)


def run_table(runs: list[Run]) -> Table:
    """What each run trained, and how far it came."""
    rows: list[list[Cell]] = []
    for run in runs:
        tokens, seconds, skipped = (total(run.metrics.get(name)) for name in ("tokens", "step_s", "skipped"))
        state = ": ".join(str(run.status[name]) for name in ("status", "why") if run.status.get(name))
        shown = run.name if run.label == run.name else f"{run.label} = {run.name}"
        model = mapping(run.config.get("model"))
        trained = ", ".join(
            map(str, filter(None, [*mapping(run.config.get("streams")), model.get("init") or model.get("preset")]))
        )
        hours = None if seconds is None else seconds / 3600
        rows.append([shown, trained or None, state or "no status.json", float(run.steps), tokens, hours, skipped])
    return Table(["run", "streams and model", "state", "steps", "tokens", "hours", "skipped steps"], rows)


def total(curve: pd.Series | None) -> float | None:
    return None if curve is None else float(curve.sum())


def headlines(runs: list[Run]) -> list[Headline]:
    """The loss, then checkpoint.best, means over streams or pairs of evaluations, and throughput: the first four of
    these that some run has."""
    found: list[Headline] = []

    def add(title: str, name: str, curves: list[list[pd.Series]]) -> None:
        means = [pd.concat(of_run, axis=1).mean(axis=1) if of_run else None for of_run in curves]
        if not is_empty(means):
            found.append(Headline(title, direction(name), means))

    def metric(name: str) -> list[list[pd.Series]]:
        return [
            [curve for key, curve in run.metrics.items() if key == name or key.startswith(f"{name}/")] for run in runs
        ]

    def evaluated(task: str, number: str, row: str | None = None) -> list[list[pd.Series]]:
        keys = [[k for k in run.evals if k[0] == task and k[2] == number and row in (None, k[1])] for run in runs]
        return [
            [run.evals[key] for key in own if row or task != "heldout" or " " not in key[1]]
            for run, own in zip(runs, keys, strict=True)
        ]

    add("Training loss", "loss", [[run.metrics["loss"]] if "loss" in run.metrics else [] for run in runs])
    for best in dict.fromkeys((run.config.get("checkpoint") or {}).get("best") for run in runs):
        if isinstance(best, str) and best.count("/") >= 2:
            task, row, name = best.split("/", 2)
            add(f"{task} {name} of {row}, which says the best checkpoint", name, evaluated(task, name, row))
    add("Held-out loss, mean of the streams", "loss", evaluated("heldout", "loss"))
    add("Translations found by retrieval, share", "accuracy", evaluated("retrieval", "accuracy"))
    add("Withheld words aligned, share", "alignment", metric("alignment"))
    add("Tokens per second", "tokens_per_s", metric("tokens_per_s"))
    return found[:4]


def headline_table(runs: list[Run]) -> Table:
    """Each headline's mean of its last tenth with the standard deviation there; ✓ marks the best run's."""
    rows: list[list[Cell]] = []
    for headline in headlines(runs):
        late = [None if curve is None else curve.iloc[-math.ceil(len(curve) / TENTH) :] for curve in headline.curves]
        means = [math.nan if curve is None else float(curve.mean()) for curve in late]
        known = [mean * headline.better for mean in means if math.isfinite(mean)]
        row: list[Cell] = [headline.title]
        for mean, curve in zip(means, late, strict=True):
            deviation = f" ± {number(float(curve.std()))}" if curve is not None and curve.count() > 1 else ""
            best = headline.better and len(known) > 1 and mean * headline.better == max(known)
            row.append(f"{'✓ ' if best else ''}{number(mean)}{deviation}" if math.isfinite(mean) else None)
        rows.append(row)
    return Table(["mean of the last tenth", *(run.label for run in runs)], rows)


def summary(runs: list[Run]) -> Table:
    """The last value, the mean of the last tenth, and the best value with its step, of each run."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics if SUMMARISED.match(name)))
    order = [LOSSES, *(title for title in SECTIONS if title not in (LOSSES, LANGUAGES)), LANGUAGES]
    names.sort(key=lambda name: order.index(section_of(MetricKey.parse(name))))
    measured = {(name, name.partition("/")[0]): [run.metrics.get(name) for run in runs] for name in names}
    for task, row, name in dict.fromkeys(key for run in runs for key in run.evals):
        found = [run.evals.get((task, row, name)) for run in runs]
        if not is_size(found):
            measured[f"{task} {name}, {row}", name] = found
    rows: list[list[Cell]] = [
        [shown, *(cell for curve in curves for cell in last_and_best(curve, name))]
        for (shown, name), curves in measured.items()
        if not is_empty(curves)
    ]
    head = ["", *("last", "last tenth", "best", "at step") * len(runs)]
    return Table(head, rows, [("", 1), *((run.label, 4) for run in runs)], "Last and best values")


def last_and_best(curve: pd.Series | None, name: str) -> list[Cell]:
    """A run that ends without a number has none as its last; what never changes has no best value."""
    if curve is None or not curve.notna().any():
        return [None] * 4
    last: list[Cell] = [float(curve.iloc[-1]), float(curve.iloc[-math.ceil(len(curve) / TENTH) :].mean())]
    better, values = direction(name), curve.dropna()
    if not better or (len(values) > 1 and values.nunique() == 1):
        return [*last, None, None]
    step = (values * better).idxmax()
    return [*last, float(values[step]), float(step)]


def differing(runs: list[Run]) -> Table:
    """The recipes' fields that are not the same in all runs."""
    recipes = [pd.json_normalize(by_name(run.config)).T.get(0, pd.Series(dtype=object)) for run in runs]
    values = pd.concat(recipes, axis=1, sort=False).astype(object)
    rows = [
        [name, *map(str, row)] for name, *row in values.fillna("absent").itertuples() if len(set(map(str, row))) > 1
    ]
    return Table(["field", *(run.label for run in runs)], rows, title="Fields of the recipes that differ")


def by_name(value: Any) -> Any:
    """The value with each list of sections as a mapping of their names to them."""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "name" in one for one in value):
        value = {one["name"]: one for one in value}
    return {name: by_name(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def score_tables(scores: list[Scores]) -> list[Table]:
    """For each task a line for each model and row, and a column for each number; without rows of transfer."""
    found = []
    for task in dict.fromkeys(task for model in scores for task in model.results):
        of_task = [
            (model.name, row, {column(row, name): value for name, value in numbers.items()})
            for model in scores
            for row, numbers in model.results.get(task, {}).items()
            if not is_transfer(numbers)
        ]
        names = list(dict.fromkeys(name for _, _, numbers in of_task for name in numbers))
        rows = [[model, row, *map(numbers.get, names)] for model, row, numbers in of_task]
        found += [Table(["model", "", *names], rows, title=task)] if rows else []
    return found


def column(row: str, name: str) -> str:
    """Directions as arrows, one column for all pairs of languages: `en->de` of the row `en-de` is →, `de->en` is ←."""
    pair, *rest = name.split(" ", 1)
    first, arrow, second = pair.partition("->")
    arrows = {f"{first}-{second}": "→", f"{second}-{first}": "←"} if arrow else {}
    return " ".join([arrows.get(row.split(" ")[0], pair), *rest])


def is_transfer(numbers: Mapping[str, float]) -> bool:
    """Whether a row has a language's zero-shot, supervised or translate-train scores (transfer.py)."""
    return not numbers.keys().isdisjoint(("zs", "sup", "tt"))


def failed_evals(runs: list[Run]) -> Table:
    rows = [failure for run in runs for failure in run.failed]
    return Table(["run", "step", "failed", "why"], rows, title="Evaluations that failed")


def failed_scores(scores: list[Scores]) -> Table:
    return Table(["model", "failed", "why"], [failure for model in scores for failure in model.failed], title="Failed")
