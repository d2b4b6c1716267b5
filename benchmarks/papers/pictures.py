"""The pictures of a grid: alignment against the loss in transfer, and translated words by t-SNE."""

import json
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from safetensors import safe_open
from sklearn.manifold import TSNE
from tables import ALIGNED, ARM, aligned_and_delta, delta_names

TABLES = ("word_embeddings.weight", "tok_embeddings.weight")
MARKERS = "osD^vPX*"
WORDS = 40
FEWEST_WORDS = 5
"""The most and the fewest word pairs in the picture of words."""


def draw_alignment(path: Path, scores: pd.DataFrame) -> None:
    """Draw figure 3 of Tang et al. 2022, if cells have a Δ: a point for each cell, a colour for each arm, a marker for
    each world. scores: those of the cells that converged (tables.py)."""
    deltas = [name for name in delta_names(scores) if len(aligned_and_delta(scores, name))]
    if not deltas:
        return
    points = aligned_and_delta(scores, deltas[0])
    figure, axes = plt.subplots(figsize=(5, 4))
    colours = {arm: f"C{number}" for number, arm in enumerate(points.index.unique("arm"))}
    markers = dict(zip(points.index.unique("world"), cycle(MARKERS), strict=False))
    for (world, arm), cells in points.groupby(level=ARM, sort=False):
        axes.scatter(cells[ALIGNED], cells[deltas[0]], color=colours[arm], marker=markers[world])
    for name, colour in colours.items():
        axes.scatter([], [], color=colour, label=name)
    for name, marker in markers.items():
        axes.scatter([], [], color="grey", marker=marker, label=name)
    axes.set_xlabel("alignment of all words, %")
    axes.set_ylabel(f"{deltas[0]}, points")
    axes.legend(fontsize=7)
    save(figure, path)


def draw_words(path: Path, world: Path, exports: dict[str, Path]) -> None:
    """Draw figure 2 of Yang et al. 2021: words and translations of a world for each export. exports: {title: folder}"""
    figure, all_axes = plt.subplots(1, len(exports), figsize=(5 * len(exports), 4.5), squeeze=False)
    for axes, (title, export) in zip(all_axes[0], exports.items(), strict=True):
        pairs_W2 = np.array(frequent_pairs(world))
        if len(pairs_W2) >= FEWEST_WORDS:
            draw_projection(axes, pairs_W2, embeddings(export))
            axes.set_title(title, fontsize=9)
    all_axes[0][0].legend(fontsize=7)
    save(figure, path)


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


def embeddings(export: Path) -> np.ndarray:
    """Return the input embeddings of an export, V x H."""
    with safe_open(export / "model.safetensors", "np") as weights:
        names = [name for name in weights.keys() if name.endswith(TABLES)]  # noqa: SIM118
        return weights.get_tensor(names[0])


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
