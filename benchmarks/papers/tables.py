"""The table of a grid's cells, and the tests of its comparisons.

A table of scores has a row for each cell, which is indexed by world, arm and seed, and a column for each measure.
"""

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from xscale import files

Done = dict[str, Any]
"""A finished cell, as scores/CELL.json has it: "cell" (its world, arm and seed), "scores" by name, "problem" (empty if
it has none), "loss fell", "predicts" and "cost"."""
MIN_SEEDS = 3
"""The fewest seeds whose differences are tested."""
ALIGNED = "aligned all"
ARM = ["world", "arm"]
LOSSES = ("TLM loss", "unigram entropy")


def write_tables(out: Path, grid: dict[str, Any], scale: dict[str, Any], done: list[Done]) -> None:
    """Write table.md, which depends only on the cells' scores, and cells.md with their costs on this machine."""
    good = converged_scores(done)
    tables = [*world_tables(all_scores(done), good), *comparisons(grid.get("compare", []), good), *correlations(good)]
    files.write_text(out / "table.md", "\n\n".join(tables) + "\n")
    files.write_text(out / "cells.md", costs(scale, done))


def all_scores(done: list[Done]) -> pd.DataFrame:
    """Return the table of scores of all cells. Scores that a cell does not have are NaN."""
    cells = pd.MultiIndex.from_tuples([tuple(cell["cell"].values()) for cell in done], names=[*ARM, "seed"])
    return pd.DataFrame([cell["scores"] for cell in done], index=cells)


def converged_scores(done: list[Done]) -> pd.DataFrame:
    return all_scores(done)[[converged(cell) for cell in done]]


def converged(cell: Done) -> bool:
    """Return whether the loss fell; of a model that predicts tokens, also whether the TLM loss is below the entropy."""
    scores = cell["scores"]
    predicts_badly = scores.get("TLM loss", math.inf) >= scores.get("unigram entropy", 0)
    return not cell["problem"] and cell["loss fell"] and not (cell.get("predicts", True) and predicts_badly)


def world_tables(scores: pd.DataFrame, good: pd.DataFrame) -> list[str]:
    """Return a table for each world, with means and sample standard deviations over seeds. Cells that did not converge
    have lines of their own. good: the scores of the cells that converged."""
    tables = []
    for world, in_world in scores.groupby(level="world", sort=False):
        names = [*in_world.dropna(axis="columns", how="all")]
        rows = []
        for (_, arm), cells in in_world.groupby(level=ARM, sort=False):
            kept = cells[cells.index.isin(good.index)]
            rows.append([arm, str(len(kept)), *(mean_text(kept[name]) for name in names)])
            for (_, _, seed), failed in cells.drop(kept.index).groupby(level=cells.index.names):
                label = f"{arm}, seed {seed}: did not converge"
                rows.append([label, "", *(mean_text(failed[name]) for name in names)])
        tables.append(f"## {world}\n\n" + markdown(["arm", "seeds", *names], rows))
    return tables


def mean_text(values: pd.Series) -> str:
    """Return the mean and the deviation of a measure, or its only value."""
    known = values.dropna()
    digits = 2 if values.name in LOSSES else 1
    if known.empty:
        return "-"
    text = f"{known.mean():.{digits}f}"
    return text if len(known) == 1 else f"{text} ± {known.std():.{digits}f}"


def comparisons(compare: list[list[str]], good: pd.DataFrame) -> list[str]:
    """Return a table of the differences that `compare` names, two arms in each world or two cells, with paired t-tests
    over seeds."""
    pairs = []
    for first, second in compare:
        if "/" in first:
            pairs.append((first, second))
        else:
            pairs += [(f"{world}/{first}", f"{world}/{second}") for world in good.index.unique("world")]
    by_arm = {f"{world}/{arm}": cells.droplevel(ARM) for (world, arm), cells in good.groupby(level=ARM)}
    names = [name for name in good if name != "unigram entropy" and not name.endswith("majority")]
    rows = []
    p_values = []
    for (first, second), name in product(pairs, names):
        if first in by_arm and second in by_arm:
            differences = (by_arm[first][name] - by_arm[second][name]).dropna()  # of equal seeds
            if len(differences):
                p_values.append(paired_p(differences))
                rows.append([f"{first} - {second}", name, mean_text(differences), str(len(differences))])
    if not rows:
        return ["No comparison has a seed with which both sides converged."] if compare else []
    for row, p, corrected in zip(rows, p_values, holm(p_values), strict=True):
        row += [p_text(p), p_text(corrected)]
    tests = sum(not math.isnan(p) for p in p_values)
    note = (
        f"Paired t-tests over seeds, two-sided; fewer than {MIN_SEEDS} seeds have no p. The last column is corrected "
        f"for all {tests} tests of this table (Holm)."
    )
    table = markdown(["cells", "measure", "difference", "seeds", "p", "p after Holm"], rows)
    return [f"## Comparisons\n\n{note}\n\n{table}"]


def paired_p(differences: pd.Series) -> float:
    """Return the p of a two-sided t-test of differences. It is NaN for few of them, and if all are equal."""
    if len(differences) < MIN_SEEDS or not np.ptp(differences):
        return math.nan
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(values: list[float]) -> list[float]:
    """Return p values corrected for their number by Holm's method. NaN stands for no test."""
    tested = [i for i, p in enumerate(values) if not math.isnan(p)]
    corrected = [math.nan] * len(values)
    largest = 0.0
    for rank, i in enumerate(sorted(tested, key=lambda i: values[i])):
        largest = max(largest, min(1.0, (len(tested) - rank) * values[i]))
        corrected[i] = largest
    return corrected


def p_text(p: float) -> str:
    if math.isnan(p):
        return "-"
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def correlations(good: pd.DataFrame) -> list[str]:
    """Spearman's rho of alignment and Delta over the means of arms (Tang et al. 2022, appendix E). The seeds of an arm
    are no points of their own. The p is exact by permutation, but for more than 7 arms by 9,999 random permutations."""
    lines = []
    for name in delta_names(good):
        points = aligned_and_delta(good, name).groupby(level=ARM).mean()
        if len(points) < 3:
            continue

        def rho(aligned: np.ndarray, deltas: np.ndarray = points[name].to_numpy()) -> float:  # noqa: B008
            return stats.spearmanr(aligned, deltas).statistic

        aligned = (points[ALIGNED].to_numpy(),)
        test = stats.permutation_test(aligned, rho, permutation_type="pairings", vectorized=False, rng=0)
        found = f"rho {test.statistic:.3f} (Spearman), p {p_text(test.pvalue)}, {len(points)} means of arms"
        lines.append(f"Alignment (all words) and {name}: {found}.")
    return lines


def delta_names(scores: pd.DataFrame) -> list[str]:
    return [name for name in scores if name.endswith("Δ")]


def aligned_and_delta(scores: pd.DataFrame, delta: str) -> pd.DataFrame:
    """Return the scores of alignment and transfer of the cells that have both."""
    return scores.reindex(columns=[ALIGNED, delta]).dropna()


def costs(scale: dict[str, Any], done: list[Done]) -> str:
    names = ["steps", "tokens", "training minutes"]
    rows = []
    for cell in done:
        rows.append([*map(str, cell["cell"].values()), *(str(cell["cost"][name]) for name in names)])
    settings = ", ".join(f"{name} {value}" for name, value in scale.items())
    return markdown([*ARM, "seed", *names], rows) + f"\nScale: {settings}.\n"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = []
    for line in [head, ["---"] * len(head), *rows]:
        cells = [cell.replace("|", "\\|") for cell in line]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)
