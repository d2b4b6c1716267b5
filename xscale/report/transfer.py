"""Reports zero-shot transfer as Tang et al. 2022 do: SUP, ZS and Δ (table 3), and alignment against Δ (figure 3)."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from xscale.report.read import Run, Scores
from xscale.report.tables import Cell, Table, is_transfer

COLUMNS = {"sup": "SUP", "zs": "ZS", "tt": "translate-train", "delta": "Δ", "majority": "majority"}
ALWAYS = ("sup", "zs", "delta")
"""These columns are always shown; the others only if some model has them."""
FEWEST = 3
"""A correlation is computed for at least this many points."""


class Transfer(NamedTuple):
    """A model's scores on a task in a language: fine-tuned in it (SUP), in another one (ZS), and the difference Δ."""

    model: str
    language: str
    task: str
    numbers: dict[str, float]
    """Name in COLUMNS -> number, and NAME_std -> its standard deviation over seeds."""
    alignment: float = math.nan


def transfers(scores: list[Scores]) -> list[Transfer]:
    found = []
    for model in scores:
        for task, rows in model.results.items():
            for row, numbers in rows.items():
                if numbers.keys() >= {"zs", "sup"}:
                    numbers = {"delta": numbers["sup"] - numbers["zs"]} | numbers
                if is_transfer(numbers):
                    found.append(Transfer(model.name, row, task, numbers))
    return found


def transfer_table(found: list[Transfer]) -> Table:
    """Return table 3 of Tang et al. 2022: SUP, ZS and Δ of each task in percent, a row per model and language. After
    several languages of a model comes a row of means, each over the languages that have the number."""
    columns = {
        task: [name for name in COLUMNS if name in ALWAYS or any(name in t.numbers for t in found if t.task == task)]
        for task in dict.fromkeys(transfer.task for transfer in found)
    }
    rows: list[list[Cell]] = []
    for model in dict.fromkeys(t.model for t in found):
        languages: dict[str, dict[str, dict[str, float]]] = {}
        for transfer in found:
            if transfer.model == model:
                languages.setdefault(transfer.language, {})[transfer.task] = transfer.numbers
        of_tasks = {task: [tasks[task] for tasks in languages.values() if task in tasks] for task in columns}
        means = {task: pd.DataFrame(of, columns=[*COLUMNS]).mean() for task, of in of_tasks.items() if len(of) > 1}
        if means:
            languages["mean over languages"] = {task: mean.to_dict() for task, mean in means.items()}
        for language, tasks in languages.items():
            pairs = [(tasks.get(task, {}), name) for task, names in columns.items() for name in names]
            rows.append([model, language, *(percent(of.get(name), of.get(f"{name}_std")) for of, name in pairs)])
    head = ["model", "language", *(COLUMNS[name] for names in columns.values() for name in names)]
    return Table(head, rows, [("", 2), *((task, len(names)) for task, names in columns.items())])


def percent(value: float | None, deviation: float | None = None) -> str | None:
    if value is None or not math.isfinite(value):
        return None
    return f"{100 * value:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")


def aligned(found: list[Transfer], scores: list[Scores], runs: list[Run]) -> tuple[dict[str, list[Transfer]], str]:
    """Return task -> transfers that have both an alignment score and Δ, and the kind of words whose alignment scores
    are used: withheld or trained ones, whichever has more scores; withheld ones on a tie."""
    points: dict[str, dict[str, list[Transfer]]] = {"withheld": {}, "trained": {}}
    for kind, tasks in points.items():
        for transfer in found:
            score = alignment(transfer.model, transfer.language, scores, runs, kind)
            if math.isfinite(score) and math.isfinite(transfer.numbers.get("delta", math.nan)):
                tasks.setdefault(transfer.task, []).append(transfer._replace(alignment=score))
    kind = max(points, key=lambda kind: sum(map(len, points[kind].values())))
    return points[kind], kind


def alignment(model: str, language: str, scores: list[Scores], runs: list[Run], kind: str) -> float:
    """Return the mean alignment score of a language with others, in both directions: from the task `alignment` of the
    model's scores, or from the end of the run of the same name. NaN if there is none."""
    (results,) = (own.results for own in scores if own.name == model)
    values = [
        value
        for row, numbers in results.get("alignment", {}).items()
        for name, value in numbers.items()
        if "->" in name and names_language(row, language) and name.endswith(" trained") == (kind == "trained")
    ]
    own = {"withheld": "alignment", "trained": "alignment_trained"}[kind]
    for run in runs:
        for name, curve in run.metrics.items() if run.name == model and not values else ():
            if name.startswith(f"{own}/") and names_language(name, language) and curve.notna().any():
                values.append(float(curve.dropna().iloc[-1]))
    return float(np.mean(values)) if values else math.nan


def names_language(name: str, language: str) -> bool:
    """Return True if a name such as `en-de ...` has the language of a results row such as `de` or `de zero-shot`."""
    return language.split()[0] in re.split(r"[^\w]+|_", name)


def points_of(transfers: list[Transfer]) -> list[tuple[float, float]]:
    return [(100 * transfer.alignment, 100 * transfer.numbers["delta"]) for transfer in transfers]


def correlation(points: Sequence[tuple[float, float]]) -> str:
    """Return a sentence with Spearman's rank correlation of the points."""
    if len(points) < FEWEST:
        return f"{len(points)} points: a correlation needs {FEWEST}"
    if any(len(set(side)) == 1 for side in zip(*points, strict=True)):
        return f"{len(points)} points, all of one value: no correlation"
    from scipy import stats

    found = stats.spearmanr(*zip(*points, strict=True))
    p = "p < 0.001" if found.pvalue < 0.001 else f"p = {found.pvalue:.3f}"
    return f"Spearman's ρ = {found.statistic:.3f}, {p} (two-tailed), {len(points)} points"
