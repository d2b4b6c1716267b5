"""The table of a grid's cells, and the tests of its comparisons."""

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from xscale import files

Done = dict[str, Any]
"""A finished cell: its world, arm and seed, scores by name, and cost."""


def write_tables(out: Path, grid: dict[str, Any], scale: dict[str, Any], done: list[Done]) -> None:
    """Write table.md, which depends only on the cells' scores, and cells.md with their costs on this machine."""
    tables = [*map_worlds(done), *comparisons(grid, done), *correlations(done)]
    files.write_text(out / "table.md", "\n\n".join(tables) + "\n")
    files.write_text(out / "cells.md", costs(scale, done))


def folder_name(name: str) -> str:
    return name.replace(" ", "_").replace("%", "percent")


def converged(one: Done) -> bool:
    """True if the loss fell and, for a model that predicts tokens, the TLM loss is below the unigram entropy."""
    scores = one["scores"]
    says_more = not one.get("predicts", True) or scores.get("TLM loss", math.inf) < scores.get("unigram entropy", 0)
    return not one["problem"] and one["loss fell"] and says_more


def measures(done: list[Done]) -> list[str]:
    return list(dict.fromkeys(name for one in done for name in one["scores"]))


def values_of(done: list[Done], world: str, arm: str, name: str) -> dict[int, float]:
    """Seed -> score, of the cells that converged."""
    cells = [one for one in done if (one["cell"]["world"], one["cell"]["arm"]) == (world, arm) and converged(one)]
    found = {one["cell"]["seed"]: one["scores"].get(name, math.nan) for one in cells}
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def shown_p(p: float) -> str:
    return "-" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def map_worlds(done: list[Done]) -> list[str]:
    """A table for each world, with means and sample standard deviations over seeds."""
    tables = []
    for world in dict.fromkeys(one["cell"]["world"] for one in done):
        of_world = [one for one in done if one["cell"]["world"] == world]
        names = measures(of_world)
        rows = []
        for arm in dict.fromkeys(one["cell"]["arm"] for one in of_world):
            cells = [one for one in of_world if one["cell"]["arm"] == arm]
            spreads = [spread([*values_of(done, world, arm, name).values()], name) for name in names]
            rows.append([arm, str(sum(map(converged, cells))), *spreads])
            for one in cells:
                if not converged(one):  # its values are shown, and no part of a mean
                    values = [spread([one["scores"][name]] if name in one["scores"] else [], name) for name in names]
                    rows.append([f"{arm}, seed {one['cell']['seed']}: did not converge", "", *values])
        tables.append(f"## {world}\n\n" + markdown(["arm", "seeds", *names], rows))
    return tables


def spread(values: list[float], name: str) -> str:
    digits = 2 if name in ("TLM loss", "unigram entropy") else 1
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def comparisons(grid: dict[str, Any], done: list[Done]) -> list[str]:
    """Two-sided paired t-tests over the seeds that both sides have: two arms in each world, or two cells."""
    rows = []
    worlds = dict.fromkeys(one["cell"]["world"] for one in done)
    for pair in grid.get("compare", []):
        cells = [tuple(one.split("/", 1)) for one in pair]
        for first, second in [cells] if "/" in pair[0] else [[(world, arm) for arm in pair] for world in worlds]:
            for name in measures(done):
                a, b = (values_of(done, *cell, name) for cell in (first, second))
                differences = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
                if not differences or name == "unigram entropy" or name.endswith("majority"):
                    continue
                p = stats.ttest_1samp(differences, 0.0).pvalue if np.ptp(differences) else math.nan
                sides = f"{'/'.join(first)} - {'/'.join(second)}"
                rows.append([sides, name, spread(differences, name), str(len(differences)), shown_p(p)])
    if not rows:
        return ["No comparison has a seed with which both sides converged."] if grid.get("compare") else []
    head = ["cells", "measure", "difference", "seeds", "p"]
    return ["## Comparisons\n\nPaired t-tests over seeds, two-sided, without a correction for their number; a "
            "single seed has no p.\n\n" + markdown(head, rows)]  # fmt: skip


def correlations(done: list[Done]) -> list[str]:
    """Spearman's rho of alignment and Delta over all cells that converged (Tang et al. 2022, appendix E)."""
    lines = []
    for name in measures(done):
        points = points_of(done, name)
        if name.endswith("Δ") and len(points) >= 3:
            found = stats.spearmanr([p[0] for p in points], [p[1] for p in points])
            rho, p = found.statistic, found.pvalue
            how = f"rho {rho:.3f} (Spearman), p {shown_p(p)}, {len(points)} cells"
            lines.append(f"Alignment (all words) and {name}: {how}.")
    return lines


def points_of(done: list[Done], name: str) -> list[tuple[float, float, str, str]]:
    found = [(one["scores"].get("aligned all", math.nan), one["scores"].get(name, math.nan), one["cell"]["world"],
              one["cell"]["arm"]) for one in done if converged(one)]  # fmt: skip
    return [point for point in found if math.isfinite(point[0]) and math.isfinite(point[1])]


def costs(scale: dict[str, Any], done: list[Done]) -> str:
    names = ["steps", "tokens", "training minutes", "minutes", "commit"]
    rows = [
        [*map(str, one["cell"].values()), *(str(one.get("cost", {}).get(name, "-")) for name in names)] for one in done
    ]
    told = ", ".join(f"{name} {value}" for name, value in scale.items())
    return markdown(["world", "arm", "seed", *names], rows) + f"\nScale: {told}.\n"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
