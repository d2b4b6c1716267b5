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
"""The columns that are shown even if no model has them."""
FEWEST = 3
"""The fewest points for which a correlation is computed."""


class TransferScores(NamedTuple):
    """A model's scores on a task in a language: fine-tuned in it (SUP), in another language (ZS), and Δ = SUP - ZS."""

    model: str
    language: str
    task: str
    numbers: dict[str, float]
    """{NAME in COLUMNS: score, NAME_std: its standard deviation over seeds}."""
    alignment: float = math.nan
    """The alignment score of the model in the language; NaN if unknown."""


def transfer_scores(scores: list[Scores]) -> list[TransferScores]:
    """Return the fine-tuning scores of each model, task and language."""
    transfers = []
    for model in scores:
        for task, rows in model.results.items():
            for row, numbers in rows.items():
                if numbers.keys() >= {"zs", "sup"}:
                    numbers = {"delta": numbers["sup"] - numbers["zs"]} | numbers
                if is_transfer(numbers):
                    transfers.append(TransferScores(model.name, row, task, numbers))
    return transfers


def transfer_table(transfers: list[TransferScores]) -> Table:
    """Return table 3 of Tang et al. 2022: SUP, ZS and Δ of each task in percent, a row per model and language. A model
    with several languages has a row of means, each over the languages that have the number, if these are at least 2."""
    columns = {
        task: [
            name for name in COLUMNS if name in ALWAYS or any(name in t.numbers for t in transfers if t.task == task)
        ]
        for task in dict.fromkeys(transfer.task for transfer in transfers)
    }
    rows: list[list[Cell]] = []
    for model in dict.fromkeys(t.model for t in transfers):
        languages: dict[str, dict[str, dict[str, float]]] = {}
        for transfer in transfers:
            if transfer.model == model:
                languages.setdefault(transfer.language, {})[transfer.task] = transfer.numbers
        of_tasks = {task: [tasks[task] for tasks in languages.values() if task in tasks] for task in columns}
        frames = {task: pd.DataFrame(of, columns=[*COLUMNS]) for task, of in of_tasks.items() if len(of) > 1}
        means = {task: frame.mean().where(frame.count() > 1) for task, frame in frames.items()}
        means = {task: mean for task, mean in means.items() if mean.notna().any()}
        if means:
            languages["mean over languages"] = {task: mean.to_dict() for task, mean in means.items()}
        for language, tasks in languages.items():
            pairs = [(tasks.get(task, {}), name) for task, names in columns.items() for name in names]
            rows.append([model, language, *(format_percent(of.get(name), of.get(f"{name}_std")) for of, name in pairs)])
    head = ["model", "language", *(COLUMNS[name] for names in columns.values() for name in names)]
    return Table(head, rows, [("", 2), *((task, len(names)) for task, names in columns.items())])


def format_percent(value: float | None, deviation: float | None = None) -> str | None:
    """Return a share in percent, such as `71.3 ± 0.4`; None without a finite value."""
    if value is None or not math.isfinite(value):
        return None
    return f"{100 * value:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")


def with_alignment(
    transfers: list[TransferScores], scores: list[Scores], runs: list[Run]
) -> tuple[dict[str, list[TransferScores]], str]:
    """Return {task: transfers that have both an alignment score and Δ}, and the words whose alignment scores are used:
    "withheld" or "trained", whichever has more scores; "withheld" on a tie."""
    points: dict[str, dict[str, list[TransferScores]]] = {"withheld": {}, "trained": {}}
    for subset, tasks in points.items():
        for transfer in transfers:
            score = alignment_score(transfer.model, transfer.language, scores, runs, subset)
            if math.isfinite(score) and math.isfinite(transfer.numbers.get("delta", math.nan)):
                tasks.setdefault(transfer.task, []).append(transfer._replace(alignment=score))
    subset = max(points, key=lambda subset: sum(map(len, points[subset].values())))
    return points[subset], subset


def alignment_score(model: str, language: str, scores: list[Scores], runs: list[Run], subset: str) -> float:
    """Return a language's alignment score, the mean of both directions, from the model's score files, or else the last
    one of the run with the model's name; NaN if both lack it. subset: the scored words, "withheld" or "trained"."""
    (results,) = (own.results for own in scores if own.name == model)
    values = [
        value
        for row, numbers in results.get("alignment", {}).items()
        for name, value in numbers.items()
        if "->" in name and names_language(row, language) and name.endswith(" trained") == (subset == "trained")
    ]
    metric = {"withheld": "alignment", "trained": "alignment_trained"}[subset]
    for run in runs:
        for name, curve in run.metrics.items() if run.name == model and not values else ():
            if name.startswith(f"{metric}/") and names_language(name, language) and curve.notna().any():
                values.append(float(curve.dropna().iloc[-1]))
    return float(np.mean(values)) if values else math.nan


def names_language(name: str, language: str) -> bool:
    """Return True if a name such as `en-de ...` has the language of a results row such as `de` or `de zero-shot`."""
    return language.split()[0] in re.split(r"[^\w]+|_", name)


def scatter_points(transfers: list[TransferScores]) -> list[tuple[float, float]]:
    """Return (alignment score, Δ) of each transfer, in percent."""
    return [(100 * transfer.alignment, 100 * transfer.numbers["delta"]) for transfer in transfers]


def correlation(points: Sequence[tuple[float, float]]) -> str:
    """Return a sentence with Spearman's rank correlation of the points."""
    if len(points) < FEWEST:
        return f"{len(points)} points; a correlation needs {FEWEST}"
    if any(len(set(side)) == 1 for side in zip(*points, strict=True)):
        return f"{len(points)} points with one value only, so there is no correlation"
    from scipy import stats

    result = stats.spearmanr(*zip(*points, strict=True))
    p = "p < 0.001" if result.pvalue < 0.001 else f"p = {result.pvalue:.3f}"
    return f"Spearman's ρ = {result.statistic:.3f}, {p} (two-tailed), {len(points)} points"
