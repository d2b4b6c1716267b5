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
    return [
        Transfer(model.name, row, task, numbers | ({"delta": numbers["sup"] - numbers["zs"]} if both else {}))
        for model in scores
        for task, rows in model.results.items()
        for row, numbers in rows.items()
        if is_transfer(numbers)
        for both in [numbers.keys() >= {"zs", "sup"} and "delta" not in numbers]
    ]


def transfer_table(found: list[Transfer]) -> Table:
    """Return table 3 of Tang et al. 2022: SUP, ZS and Δ of each task in percent, a row per model and language. After
    several languages of a model comes a row of means, each over the languages that have the number."""
    found = [*found, *means(found)]
    by_place = {(t.model, t.language, t.task): t.numbers for t in found}
    columns = {
        task: [name for name in COLUMNS if name in ALWAYS or any(name in t.numbers for t in found if t.task == task)]
        for task in dict.fromkeys(transfer.task for transfer in found)
    }
    rows: list[list[Cell]] = []
    models = list(dict.fromkeys(t.model for t in found))
    places = sorted(dict.fromkeys((t.model, t.language) for t in found), key=lambda place: models.index(place[0]))
    for model, language in places:
        cells: list[Cell] = [model, language]
        for task, names in columns.items():
            numbers = by_place.get((model, language, task), {})
            cells += [percent(numbers.get(name), numbers.get(f"{name}_std")) for name in names]
        rows.append(cells)
    head = ["model", "language", *(COLUMNS[name] for names in columns.values() for name in names)]
    return Table(head, rows, [("", 2), *((task, len(names)) for task, names in columns.items())])


def means(found: list[Transfer]) -> list[Transfer]:
    """Return the means over languages of each model's numbers on each task on which it has several languages."""
    groups: dict[tuple[str, str], list[dict[str, float]]] = {}
    for transfer in found:
        groups.setdefault((transfer.model, transfer.task), []).append(transfer.numbers)
    return [
        Transfer(model, "mean over languages", task, pd.DataFrame(of_languages)[known].mean().to_dict())
        for (model, task), of_languages in groups.items()
        if len(of_languages) > 1
        for known in [[name for name in COLUMNS if any(name in numbers for numbers in of_languages)]]
    ]


def percent(value: float | None, deviation: float | None = None) -> str | None:
    if value is None or not math.isfinite(value):
        return None
    return f"{100 * value:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")


def aligned(found: list[Transfer], scores: list[Scores], runs: list[Run]) -> tuple[dict[str, list[Transfer]], str]:
    """Return task -> transfers that have both an alignment score and Δ, and the kind of words whose alignment scores
    are used: withheld or trained ones, whichever has more scores; withheld ones on a tie."""
    wanted = [transfer for transfer in found if math.isfinite(transfer.numbers.get("delta", math.nan))]
    kinds = {
        kind: [t._replace(alignment=alignment(t.model, t.language, scores, runs, kind)) for t in wanted]
        for kind in ("withheld", "trained")
    }
    kind = max(kinds, key=lambda name: sum(math.isfinite(t.alignment) for t in kinds[name]))
    points: dict[str, list[Transfer]] = {}
    for transfer in kinds[kind]:
        if math.isfinite(transfer.alignment):
            points.setdefault(transfer.task, []).append(transfer)
    return points, kind


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
