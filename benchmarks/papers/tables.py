"""The table of a grid's cells, and the tests of its comparisons."""

import math
import statistics
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from xscale import files

Done = dict[str, Any]
"""A finished cell: its world, arm and seed, scores by name, and cost."""


class Name(NamedTuple):
    world: str
    arm: str


class Point(NamedTuple):
    aligned: float
    delta: float
    world: str
    arm: str


def write_tables(out: Path, grid: dict[str, Any], scale: dict[str, Any], done: list[Done]) -> None:
    """Write table.md, which depends only on the cells' scores, and cells.md with their costs on this machine."""
    tables = [*map_worlds(done), *comparisons(grid, done), *correlations(done)]
    files.write_text(out / "table.md", "\n\n".join(tables) + "\n")
    files.write_text(out / "cells.md", costs(scale, done))


def folder_name(name: str) -> str:
    return name.replace(" ", "_").replace("%", "percent")


def converged(one: Done) -> bool:
    """Return whether the loss fell; of a model that predicts tokens, also whether the TLM loss is below the entropy."""
    scores = one["scores"]
    says_more = not one.get("predicts", True) or scores.get("TLM loss", math.inf) < scores.get("unigram entropy", 0)
    return not one["problem"] and one["loss fell"] and says_more


def measures(done: list[Done]) -> list[str]:
    return list(dict.fromkeys(name for one in done for name in one["scores"]))


def values_of(done: list[Done], world: str, arm: str, name: str) -> dict[int, float]:
    """Seed -> score, of the cells that converged."""
    values = {}
    for one in filter(converged, done):
        value = one["scores"].get(name, math.nan)
        if one["cell"]["world"] == world and one["cell"]["arm"] == arm and math.isfinite(value):
            values[one["cell"]["seed"]] = value
    return values


def shown_p(p: float) -> str:
    return "-" if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def map_worlds(done: list[Done]) -> list[str]:
    """Return a table for each world, with means and sample standard deviations over seeds."""
    tables = []
    for world in dict.fromkeys(one["cell"]["world"] for one in done):
        of_world = [one for one in done if one["cell"]["world"] == world]
        names = measures(of_world)
        rows = []
        for arm in dict.fromkeys(one["cell"]["arm"] for one in of_world):
            means = [spread([*values_of(done, world, arm, name).values()], name) for name in names]
            cells = [one for one in of_world if one["cell"]["arm"] == arm]
            failed = [one for one in cells if not converged(one)]
            rows.append([arm, str(len(cells) - len(failed)), *means])
            for one in failed:  # its values are shown, and no part of a mean
                values = [spread([one["scores"][name]] if name in one["scores"] else [], name) for name in names]
                rows.append([f"{arm}, seed {one['cell']['seed']}: did not converge", "", *values])
        tables.append(f"## {world}\n\n" + markdown(["arm", "seeds", *names], rows))
    return tables


def spread(values: list[float], name: str) -> str:
    digits = 2 if name in ("TLM loss", "unigram entropy") else 1
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def compared_cells(grid: dict[str, Any], done: list[Done]) -> list[tuple[Name, Name]]:
    """Return the cells that `compare` names: two arms in each world, or two cells."""
    pairs: list[tuple[Name, Name]] = []
    for first, second in grid.get("compare", []):
        if "/" in first:
            pairs.append((Name(*first.split("/", 1)), Name(*second.split("/", 1))))
            continue
        for world in dict.fromkeys(one["cell"]["world"] for one in done):
            pairs.append((Name(world, first), Name(world, second)))
    return pairs


MIN_SEEDS = 3
"""The fewest seeds whose differences are tested."""


class Comparison(NamedTuple):
    """A measure's differences between two arms, one for each seed that both have."""

    sides: str
    measure: str
    differences: list[float]

    @property
    def p(self) -> float:
        """Return the p of a two-sided paired t-test over seeds. It is NaN for few seeds, and if all are equal."""
        if len(self.differences) < MIN_SEEDS or not np.ptp(self.differences):
            return math.nan
        return float(stats.ttest_1samp(self.differences, 0.0).pvalue)


def comparisons(grid: dict[str, Any], done: list[Done]) -> list[str]:
    """Return a table of the differences that `compare` names, with paired t-tests over seeds."""
    found = list[Comparison]()
    names = [name for name in measures(done) if name != "unigram entropy" and not name.endswith("majority")]
    for (first, second), name in product(compared_cells(grid, done), names):
        ours = values_of(done, first.world, first.arm, name)
        theirs = values_of(done, second.world, second.arm, name)
        differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
        if differences:
            found.append(Comparison(f"{first.world}/{first.arm} - {second.world}/{second.arm}", name, differences))
    if not found:
        return ["No comparison has a seed with which both sides converged."] if grid.get("compare") else []
    corrected = holm([one.p for one in found])
    rows = []
    for one, p in zip(found, corrected, strict=True):
        seeds = str(len(one.differences))
        rows.append([one.sides, one.measure, spread(one.differences, one.measure), seeds, shown_p(one.p), shown_p(p)])
    table = markdown(["cells", "measure", "difference", "seeds", "p", "p after Holm"], rows)
    tests = sum(not math.isnan(p) for p in corrected)
    note = (
        f"Paired t-tests over seeds, two-sided; fewer than {MIN_SEEDS} seeds have no p. The last column is corrected "
        f"for all {tests} tests of this table (Holm)."
    )
    return [f"## Comparisons\n\n{note}\n\n{table}"]


def holm(values: list[float]) -> list[float]:
    """Return p values corrected for their number by Holm's method. NaN stands for no test."""
    tested = [i for i, p in enumerate(values) if not math.isnan(p)]
    corrected = [math.nan] * len(values)
    largest = 0.0
    for rank, i in enumerate(sorted(tested, key=lambda i: values[i])):
        largest = max(largest, min(1.0, (len(tested) - rank) * values[i]))
        corrected[i] = largest
    return corrected


def correlations(done: list[Done]) -> list[str]:
    """Spearman's rho of alignment and Delta over the means of arms (Tang et al. 2022, appendix E). The seeds of an arm
    are no points of their own. The p is exact by permutation, but for more than 7 arms by 9,999 random permutations."""
    lines = []
    for name in measures(done):
        of_arms: dict[Name, list[Point]] = {}
        for point in points_of(done, name):
            of_arms.setdefault(Name(point.world, point.arm), []).append(point)
        if not name.endswith("Δ") or len(of_arms) < 3:
            continue
        aligned = [statistics.mean(point.aligned for point in points) for points in of_arms.values()]
        deltas = [statistics.mean(point.delta for point in points) for points in of_arms.values()]
        rho = stats.spearmanr(aligned, deltas).statistic
        test = stats.permutation_test(
            (aligned,), lambda x, deltas=deltas: stats.spearmanr(x, deltas).statistic, permutation_type="pairings",
            vectorized=False, rng=0,
        )  # fmt: skip
        how = f"rho {rho:.3f} (Spearman), p {shown_p(test.pvalue)}, {len(of_arms)} means of arms"
        lines.append(f"Alignment (all words) and {name}: {how}.")
    return lines


def points_of(done: list[Done], name: str) -> list[Point]:
    """Return the cells that converged and have both an alignment score and this Delta."""
    points = []
    for one in filter(converged, done):
        aligned = one["scores"].get("aligned all", math.nan)
        delta = one["scores"].get(name, math.nan)
        if math.isfinite(aligned) and math.isfinite(delta):
            points.append(Point(aligned, delta, one["cell"]["world"], one["cell"]["arm"]))
    return points


def costs(scale: dict[str, Any], done: list[Done]) -> str:
    names = ["steps", "tokens", "training minutes", "minutes", "commit"]
    rows = []
    for one in done:
        cost = one.get("cost", {})
        rows.append([*map(str, one["cell"].values()), *(str(cost.get(name, "-")) for name in names)])
    settings = ", ".join(f"{name} {value}" for name, value in scale.items())
    return markdown(["world", "arm", "seed", *names], rows) + f"\nScale: {settings}.\n"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = []
    for line in [head, ["---"] * len(head), *rows]:
        cells = [cell.replace("|", "\\|") for cell in line]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)
