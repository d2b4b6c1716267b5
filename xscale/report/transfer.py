"""Zero-shot transfer as Tang et al. 2022 report it: SUP, ZS and Delta (table 3); alignment against Delta (figure 3)."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from xscale.report.read import Run, Scores
from xscale.report.tables import Cell, Table, is_transfer

COLUMNS = {"sup": "SUP", "zs": "ZS", "tt": "translate-train", "delta": "Δ", "majority": "majority"}
ALWAYS = ("sup", "zs", "delta")
"""The others where some model has them."""
FEWEST = 3
"""Points below which a correlation says nothing."""


@dataclass(frozen=True)
class Transfer:
    """A model's scores on a task in a language: fine-tuned in it (SUP), in another one (ZS), and what is lost."""

    model: str
    language: str
    task: str
    numbers: dict[str, float]
    """By names of COLUMNS, each with NAME_std where there are several seeds."""


def transfers(scores: list[Scores]) -> list[Transfer]:
    """Of each row that says `zs`, `sup` or `tt`."""
    found = []
    for model in scores:
        for task, rows in model.results.items():
            for row, of_row in rows.items():
                if is_transfer(of_row):
                    both = {"delta": of_row["sup"] - of_row["zs"]} if {"zs", "sup"} <= of_row.keys() else {}
                    found.append(Transfer(model.name, row, task, both | of_row))
    return found


def transfer_table(found: list[Transfer]) -> Table:
    """Tang et al. 2022, table 3: a line for each model and language, and SUP, ZS and Delta of each task, in percent."""
    by_place = {(t.model, t.language, t.task): t.numbers for t in found}
    columns = {
        task: [name for name in COLUMNS if name in ALWAYS or any(name in t.numbers for t in found if t.task == task)]
        for task in dict.fromkeys(transfer.task for transfer in found)
    }
    rows: list[list[Cell]] = []
    for model, language in dict.fromkeys((t.model, t.language) for t in found):
        cells: list[Cell] = [model, language]
        for task, names in columns.items():
            numbers = by_place.get((model, language, task), {})
            cells += [percent(numbers.get(name), numbers.get(f"{name}_std")) for name in names]
        rows.append(cells)
    head = ["model", "language", *(COLUMNS[name] for names in columns.values() for name in names)]
    return Table(head, rows, [("", 2), *((task, len(names)) for task, names in columns.items())])


def percent(value: float | None, deviation: float | None = None) -> str | None:
    if value is None or not math.isfinite(value):
        return None
    return f"{100 * value:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}")


@dataclass(frozen=True)
class Aligned:
    """A point of Tang et al. 2022, figure 3."""

    transfer: Transfer
    alignment: float

    @property
    def point(self) -> tuple[float, float]:
        return 100 * self.alignment, 100 * self.transfer.numbers["delta"]


def aligned(found: list[Transfer], scores: list[Scores], runs: list[Run]) -> tuple[dict[str, list[Aligned]], str]:
    """By task, the models and languages that have both an alignment score and Delta; and the kind of words that the
    scores are of: withheld ones where all have such."""
    wanted = [transfer for transfer in found if math.isfinite(transfer.numbers.get("delta", math.nan))]
    kinds = {
        kind: [alignment(transfer.model, transfer.language, scores, runs, kind) for transfer in wanted]
        for kind in ("withheld", "trained")
    }
    kind = max(kinds, key=lambda name: sum(score is not None for score in kinds[name]))
    points: dict[str, list[Aligned]] = {}
    for transfer, score in zip(wanted, kinds[kind], strict=True):
        if score is not None:
            points.setdefault(transfer.task, []).append(Aligned(transfer, score))
    return points, kind


def alignment(model: str, language: str, scores: list[Scores], runs: list[Run], kind: str) -> float | None:
    """Mean of both directions, of the language with another: as task `alignment` measured the model, else as the run of
    the same name measured itself at its end."""
    (results,) = (of.results for of in scores if of.name == model)
    values = [
        value
        for row, numbers in results.get("alignment", {}).items()
        for metric, value in numbers.items()
        if "->" in metric and names_language(row, language) and metric.endswith(" trained") == (kind == "trained")
    ]
    own = {"withheld": "alignment", "trained": "alignment_trained"}[kind]
    for run in runs:
        for name, curve in run.metrics.items() if run.name == model and not values else ():
            if name.startswith(f"{own}/") and names_language(name, language) and len(curve.finite.values):
                values.append(float(curve.finite.values[-1]))
    return float(np.mean(values)) if values else None


def names_language(name: str, language: str) -> bool:
    """Whether `en-de ...` has the language of a row such as `de` or `de zero-shot`."""
    return language.split()[0] in re.split(r"[^\w]+|_", name)


@dataclass(frozen=True)
class Correlation:
    rho: float
    p: float
    points: int

    def __str__(self) -> str:
        if self.points < FEWEST:
            return f"{self.points} points: a correlation needs {FEWEST}"
        if not math.isfinite(self.rho):
            return f"{self.points} points, all of one value: no correlation"
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.3f}"
        return f"Spearman's ρ = {self.rho:.3f}, {p} (two-tailed), {self.points} points"


def spearman(points: Sequence[tuple[float, float]]) -> Correlation:
    """Of ranks, by scipy; p by the t distribution, as scipy has it."""
    if len(points) < FEWEST or any(len(set(side)) == 1 for side in zip(*points, strict=True)):
        return Correlation(math.nan, math.nan, len(points))
    found = stats.spearmanr(*zip(*points, strict=True))
    return Correlation(float(found.statistic), float(found.pvalue), len(points))
