"""The pictures of a grid: alignment against the loss in transfer, and translated words by t-SNE."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from safetensors import safe_open
from sklearn.manifold import TSNE
from tables import Done, folder_name, measures, points_of

MARKERS = "osD^vPX*"
WORDS = 40
FEWEST_WORDS = 5
"""The most and the fewest word pairs in the picture of words."""


def draw_pictures(out: Path, grid: dict[str, Any], done: list[Done]) -> None:
    """Write alignment.png if cells have a Δ, and words.png if cells have an export."""
    for name in measures(done):
        if name.endswith("Δ") and points_of(done, name):
            draw_alignment(out / "alignment.png", done, name)
            break
    draw_words(out, grid, done)


def draw_alignment(path: Path, done: list[Done], name: str) -> None:
    """Draw figure 3 of Tang et al. 2022: a point for each cell, a colour for each arm, a marker for each world."""
    figure, axes = plt.subplots(figsize=(5, 4))
    colours: dict[str, str] = {}
    markers: dict[str, str] = {}
    for point in points_of(done, name):
        colour = colours.setdefault(point.arm, f"C{len(colours)}")
        marker = markers.setdefault(point.world, MARKERS[len(markers) % len(MARKERS)])
        axes.scatter(point.aligned, point.delta, color=colour, marker=marker)
    for arm, colour in colours.items():
        axes.scatter([], [], color=colour, label=arm)
    for world, marker in markers.items():
        axes.scatter([], [], color="grey", marker=marker, label=world)
    axes.set_xlabel("alignment of all words, %")
    axes.set_ylabel(f"{name}, points")
    axes.legend(fontsize=7)
    save(figure, path)


def draw_words(out: Path, grid: dict[str, Any], done: list[Done]) -> None:
    """Draw figure 2 of Yang et al. 2021 for two arms of the first world: mlm and align_mlm, or else the first two."""
    world = done[0]["cell"]["world"]
    cells: dict[str, dict[str, Any]] = {}
    for finished in done:
        cell = finished["cell"]
        if cell["world"] == world and not finished["problem"] and grid["arms"][cell["arm"]]:
            cells.setdefault(cell["arm"], cell)
    names = [arm for arm in grid["arms"] if arm in cells]
    shown = [arm for arm in ("mlm", "align_mlm") if arm in names] or names[:2]
    if not shown:
        return
    figure, all_axes = plt.subplots(1, len(shown), figsize=(5 * len(shown), 4.5), squeeze=False)
    for axes, arm in zip(all_axes[0], shown, strict=True):
        hf = out / "hf" / folder_name(f"{world}/{arm}.{cells[arm]['seed']}")
        pairs, table_VH = frequent_pairs(out / "worlds" / folder_name(world), hf)
        if len(pairs) >= FEWEST_WORDS:
            draw_projection(axes, np.array(pairs), table_VH)
            axes.set_title(f"{arm}, {world}", fontsize=9)
    all_axes[0][0].legend(fontsize=7)
    save(figure, out / "words.png")


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
    axes.set_xticks([])
    axes.set_yticks([])


def frequent_pairs(world: Path, hf: Path) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Return the token ids of the first pairs in the dictionary of withheld words that are one token on each side, and
    the model's input embeddings. (The first words of a dictionary are frequent ones.)"""
    vocabulary = json.loads((world / "tokenizer/tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    (dictionary,) = (world / "withheld").iterdir()
    pairs: list[tuple[int, int]] = []
    for line in dictionary.read_text(encoding="utf-8").splitlines():
        word, translation = line.split()
        if len(word) > 2 and word in vocabulary and translation in vocabulary and len(pairs) < WORDS:
            pairs.append((vocabulary[word], vocabulary[translation]))
    with safe_open(hf / "model.safetensors", "np") as weights:
        for name in weights.keys():  # noqa: SIM118
            if name.endswith(("word_embeddings.weight", "tok_embeddings.weight")):
                return pairs, weights.get_tensor(name)
    raise ValueError(f"{hf} has no input embeddings")


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
