"""The table of a grid's cells, the tests of its comparisons, and its pictures."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from safetensors import safe_open
from scipy import stats
from sklearn.manifold import TSNE

from xscale import files

Done = dict[str, Any]
"""A finished cell: its world, arm and seed, scores by name, and cost."""
WORDS = 40
"""The number of word pairs in the t-SNE picture."""


def write_tables(out: Path, grid: dict[str, Any], scale: dict[str, Any], done: list[Done]) -> None:
    """Write table.md, which depends only on the cells' scores, and cells.md with their costs on this machine."""
    tables = [*map_worlds(done), *comparisons(grid, done), *correlations(done)]
    files.write_text(out / "table.md", "\n\n".join(tables) + "\n")
    files.write_text(out / "cells.md", costs(scale, done))


def draw_pictures(out: Path, grid: dict[str, Any], done: list[Done]) -> None:
    for name in measures(done):
        if name.endswith("Δ") and points_of(done, name):
            draw_alignment(out / "alignment.png", done, name)
            break
    draw_words(out, grid, done)


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


def draw_alignment(path: Path, done: list[Done], name: str) -> None:
    """Draw figure 3 of Tang et al. 2022: a point for each cell, a colour for each arm, a marker for each world."""
    points = points_of(done, name)
    worlds, arms = (list(dict.fromkeys(point[n] for point in points)) for n in (2, 3))
    figure, axes = plt.subplots(figsize=(5, 4))
    for aligned, delta, world, arm in points:
        axes.scatter(aligned, delta, color=f"C{arms.index(arm)}", marker="osD^vPX*"[worlds.index(world) % 8])
    for n, arm in enumerate(arms):
        axes.scatter([], [], color=f"C{n}", label=arm)
    for n, world in enumerate(worlds):
        axes.scatter([], [], color="grey", marker="osD^vPX*"[n % 8], label=world)
    axes.set_xlabel("alignment of all words, %")
    axes.set_ylabel(f"{name}, points")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def draw_words(out: Path, grid: dict[str, Any], done: list[Done]) -> None:
    """Draw figure 2 of Yang et al. 2021, for two arms of the first world: t-SNE of the input embeddings of words and
    their translations, joined by lines. The arms are mlm and align_mlm, or else the first two."""
    first = done[0]["cell"]
    same = [one["cell"] for one in done if one["cell"]["world"] == first["world"] and not one["problem"]]
    arms = {cell["arm"]: cell for cell in reversed(same) if grid["arms"][cell["arm"]]}
    names = [arm for arm in grid["arms"] if arm in arms]
    shown = [name for name in ("mlm", "align_mlm") if name in names] or names[:2]
    if not shown:
        return
    world = out / "worlds" / folder_name(first["world"])
    figure, all_axes = plt.subplots(1, len(shown), figsize=(5 * len(shown), 4.5), squeeze=False)
    for axes, arm in zip(all_axes[0], shown, strict=True):
        cell = arms[arm]
        hf = out / "hf" / folder_name(f"{cell['world']}/{arm}.{cell['seed']}")
        pairs, table = frequent_pairs(world, hf)
        if len(pairs) < 5:
            continue
        rows = np.concatenate([table[[pair[side] for pair in pairs]] for side in (0, 1)]).astype(np.float64)
        places = TSNE(perplexity=min(15.0, (len(rows) - 1) / 3), metric="cosine", init="pca", random_state=0)
        flat = places.fit_transform(rows)
        a, b = flat[: len(pairs)], flat[len(pairs) :]
        for one, other in zip(a, b, strict=True):
            axes.plot([one[0], other[0]], [one[1], other[1]], color="lightgrey", zorder=0)
        axes.scatter(a[:, 0], a[:, 1], marker="o", label="word")
        axes.scatter(b[:, 0], b[:, 1], marker="^", label="translation")
        axes.set_title(f"{arm}, {cell['world']}", fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    all_axes[0][0].legend(fontsize=7)
    figure.savefig(out / "words.png", dpi=150, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def frequent_pairs(world: Path, hf: Path) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The token ids of the first word pairs in the dictionary of withheld words that are one token on each side, and
    the model's input embeddings. (The first words of a dictionary are frequent ones.)"""
    vocabulary = json.loads((world / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    (dictionary,) = (world / "withheld").iterdir()
    entries = (line.split() for line in dictionary.read_text(encoding="utf-8").splitlines())
    pairs: list[tuple[int, int]] = []
    for one, other in entries:
        if len(one) > 2 and one in vocabulary and other in vocabulary and len(pairs) < WORDS:
            pairs.append((vocabulary[one], vocabulary[other]))
    with safe_open(hf / "model.safetensors", "np") as file:
        name = next(key for key in file.keys() if key.endswith(("word_embeddings.weight", "tok_embeddings.weight")))  # noqa: SIM118
        return pairs, file.get_tensor(name)
