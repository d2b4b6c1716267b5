"""The table of a grid's cells, the tests of its comparisons, and its pictures.

A table of scores has a row for each cell, which is indexed by world, arm and seed, and a column for each measure.
"""

import json
import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from scipy import stats
from sklearn.manifold import TSNE
from transformers import AutoModel

from xscale import files

matplotlib.use("Agg")

Done = dict[str, Any]
"""A finished cell, as scores/CELL.json has it: "cell" (its world, arm and seed), "scores" by name, "problem" (empty if
it has none), "loss fell", "predicts" and "cost"."""
MIN_SEEDS = 3
"""The fewest seeds whose differences are tested."""
ALIGNED = "aligned all"
ARM = ["world", "arm"]
LOSSES = ("TLM loss", "unigram entropy")
SAVED: dict[str, Any] = {"dpi": 150, "bbox_inches": "tight", "metadata": {"Software": None}}
WORDS = 40
FEWEST_WORDS = 5
"""The most and the fewest word pairs in the picture of words."""


def write_tables(out: Path, grid: dict[str, Any], scale: dict[str, Any], done: list[Done]) -> None:
    """Write table.md, which depends only on the cells' scores, and cells.md with their costs on this machine."""
    good = converged_scores(done)
    tables = [*world_tables(all_scores(done), good), *comparisons(grid.get("compare", []), good), *correlations(good)]
    files.write_text(out / "table.md", "\n\n".join(tables) + "\n")
    names = ["steps", "tokens", "training minutes"]
    costs = []
    for cell in done:
        costs.append([*map(str, cell["cell"].values()), *(str(cell["cost"][name]) for name in names)])
    settings = ", ".join(f"{name} {value}" for name, value in scale.items())
    table = markdown([*ARM, "seed", *names], costs)
    files.write_text(out / "cells.md", f"{table}\nScale: {settings}.\n")


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
        return []
    for row, p, corrected in zip(rows, p_values, holm(p_values), strict=True):
        row += [p_text(p), p_text(corrected)]
    note = (
        f"Paired t-tests over seeds, two-sided; fewer than {MIN_SEEDS} seeds have no p. The last column is corrected "
        f"for all {np.isfinite(p_values).sum()} tests of this table (Holm)."
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
    p_values = pd.Series(values).sort_values()
    factors = np.arange(p_values.count(), p_values.count() - len(p_values), -1)
    return [*(factors * p_values).cummax().clip(upper=1).sort_index()]


def p_text(p: float) -> str:
    if math.isnan(p):
        return "-"
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def correlations(good: pd.DataFrame) -> list[str]:
    """Spearman's rho of alignment and Delta over the means of arms (Tang et al. 2022, appendix E). The seeds of an arm
    are no points of their own. The p is exact by permutation, but for more than 7 arms by 9,999 random permutations."""
    lines = []
    for delta, points in transfer_points(good).items():
        arms = points.groupby(level=ARM).mean()
        if len(arms) >= 3:
            test = stats.permutation_test(
                (arms[ALIGNED].to_numpy(),),
                partial(rho, deltas=arms[delta].to_numpy()),
                permutation_type="pairings",
                vectorized=False,
                rng=0,
            )
            found = f"rho {test.statistic:.3f} (Spearman), p {p_text(test.pvalue)}, {len(arms)} means of arms"
            lines.append(f"Alignment (all words) and {delta}: {found}.")
    return lines


def rho(aligned: np.ndarray, deltas: np.ndarray) -> float:
    return stats.spearmanr(aligned, deltas).statistic


def transfer_points(scores: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return {measure of the loss in transfer: alignment and this loss of the cells that have both}."""
    points = {}
    for name in scores:
        if name.endswith("Δ") and ALIGNED in scores:
            points[name] = scores[[ALIGNED, name]].dropna()
    return points


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = []
    for cells in [head, ["---"] * len(head), *rows]:
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def draw_alignment(path: Path, scores: pd.DataFrame) -> None:
    """Draw figure 3 of Tang et al. 2022, if cells have a Δ: a point for each cell, a colour for each arm of a world.
    scores: those of the cells that converged."""
    for delta, points in [*transfer_points(scores).items()][:1]:
        figure, axes = plt.subplots(figsize=(5, 4))
        for (world, arm), cells in points.groupby(level=ARM, sort=False):
            axes.scatter(cells[ALIGNED], cells[delta], label=f"{world}, {arm}")
        axes.set_xlabel("alignment of all words, %")
        axes.set_ylabel(f"{delta}, points")
        axes.legend(fontsize=7)
        figure.savefig(path, **SAVED)


def draw_words(path: Path, world: Path, exports: dict[str, Path]) -> None:
    """Draw figure 2 of Yang et al. 2021: words and translations of a world for each export. exports: {title: folder}"""
    pairs_W2 = np.array(frequent_pairs(world))
    if len(pairs_W2) < FEWEST_WORDS:
        return
    figure, all_axes = plt.subplots(1, len(exports), figsize=(5 * len(exports), 4.5), squeeze=False)
    for axes, (title, export) in zip(all_axes[0], exports.items(), strict=True):
        embeddings = AutoModel.from_pretrained(export).get_input_embeddings().weight
        draw_projection(axes, pairs_W2, embeddings.detach().numpy())
        axes.set_title(title, fontsize=9)
    all_axes[0][0].legend(fontsize=7)
    figure.savefig(path, **SAVED)


def draw_projection(axes: Axes, pairs_W2: np.ndarray, table_VH: np.ndarray) -> None:
    """Draw the embeddings of words and of their translations by t-SNE, each pair joined by a line. pairs_W2: token ids
    of W pairs. table_VH: the input embeddings."""
    vectors = table_VH[pairs_W2.T.ravel()].astype(np.float64)
    tsne = TSNE(perplexity=min(15.0, (len(vectors) - 1) / 3), metric="cosine", init="pca", random_state=0)
    words_W2, translations_W2 = tsne.fit_transform(vectors).reshape(2, len(pairs_W2), 2)
    for word, translation in zip(words_W2, translations_W2, strict=True):
        axes.plot([word[0], translation[0]], [word[1], translation[1]], color="lightgrey", zorder=0)
    axes.scatter(words_W2[:, 0], words_W2[:, 1], marker="o", label="word")
    axes.scatter(translations_W2[:, 0], translations_W2[:, 1], marker="^", label="translation")


def frequent_pairs(world: Path) -> list[tuple[int, int]]:
    """Return the token ids of the first pairs in the dictionary of withheld words that are one token on each side. (The
    first words of a dictionary are frequent ones.)"""
    vocabulary = json.loads((world / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    (dictionary,) = (world / "withheld").iterdir()
    pairs: list[tuple[int, int]] = []
    for line in dictionary.read_text(encoding="utf-8").splitlines():
        word, translation = line.split()
        if len(word) > 2 and word in vocabulary and translation in vocabulary:
            pairs.append((vocabulary[word], vocabulary[translation]))
    return pairs[:WORDS]
