"""Mines parallel sentences (BUCC; Zweigenbaum et al. 2018): which pairs of two monolingual lists are translations?

Pairs are scored by the ratio margin (eval/neighbours.py) with k = 4 nearest neighbours. Each sentence of both lists
gives one candidate, with the best of its k neighbours; of candidates that share a sentence, the one with the highest
score is kept (the "max. score" of Artetxe & Schwenk 2019). Candidates with a score of at least a threshold are mined.
The threshold has the best F1 on a development set, or without such a set on the test set (row `own threshold`).

Shape letters: N sentences of the first list, M of the second, C candidates, H width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from xscale.data.lexicon import cut_pair
from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.eval.bootstrap import entity_scores
from xscale.eval.model import ExportedModel, Scores
from xscale.eval.neighbours import ratio_margins
from xscale.eval.retrieval import Variant, embed_sides

NEIGHBOURS = 4
OWN = "own threshold"
"""Marks a results row whose threshold was not set on a development set."""


@dataclass(frozen=True)
class Bitext:
    """Two lists of sentences, and the pairs (index in the first, index in the second) that are translations."""

    langs: tuple[str, str]
    texts: tuple[list[str], list[str]]
    gold: set[tuple[int, int]]


@dataclass(frozen=True)
class Candidates:
    """Pairs of sentences that may be translations, best first."""

    pairs: np.ndarray
    """Index in the first list, index in the second [C, 2]."""
    scores: np.ndarray
    """Ratio margins [C]."""


def evaluate(
    model: ExportedModel, bitext: Bitext, dev: Bitext | None, variants: Sequence[Variant]
) -> dict[str, Scores]:
    """Return {results row: precision, recall and F1}. dev: the development set for the threshold, or None."""
    sides = embed_sides(model, bitext.texts, bitext.langs, variants)
    dev_sides = embed_sides(model, dev.texts, dev.langs, variants) if dev else sides
    results = {}
    for variant in variants:
        candidates = mine(sides[0][variant.vectors], sides[1][variant.vectors])
        dev_candidates = mine(dev_sides[0][variant.vectors], dev_sides[1][variant.vectors]) if dev else candidates
        threshold = best_threshold(dev_candidates, (dev or bitext).gold)
        name = variant.name if dev else f"{variant.name} {OWN}".strip()
        results[name] = mining_scores(candidates, bitext.gold, threshold)
    return results


def mine(x_NH: Tensor, y_MH: Tensor, k: int = NEIGHBOURS) -> Candidates:
    """Return the candidates of two lists of sentences, given as unit vectors. Each sentence is in at most one pair."""
    both = ratio_margins(x_NH, y_MH, k)
    (forward, there_rows), (backward, back_rows) = (
        [tensor.cpu().numpy() for tensor in direction] for direction in both
    )
    first, second = np.arange(len(forward)), np.arange(len(backward))
    best_there, best_back = forward.argmax(1), backward.argmax(1)
    pairs = np.concatenate(
        [np.stack([first, there_rows[first, best_there]], 1), np.stack([back_rows[second, best_back], second], 1)]
    )
    scores = np.concatenate([forward[first, best_there], backward[second, best_back]])
    taken: tuple[set[int], set[int]] = (set(), set())
    kept = []
    order = np.argsort(-scores, kind="stable")
    for candidate, (i, j) in zip(order.tolist(), pairs[order].tolist(), strict=True):
        if i not in taken[0] and j not in taken[1]:
            kept.append(candidate)
            taken[0].add(i)
            taken[1].add(j)
    return Candidates(pairs[kept], scores[kept])


def is_gold(candidates: Candidates, gold: set[tuple[int, int]]) -> np.ndarray:
    """Return an array [C] that is True for candidates that are gold pairs."""
    return np.array([(i, j) in gold for i, j in candidates.pairs.tolist()], dtype=bool)


def best_threshold(candidates: Candidates, gold: set[tuple[int, int]]) -> float:
    """Return the threshold with the best F1, half way between the scores of the last mined and the next candidate."""
    scores = candidates.scores
    ends = np.flatnonzero(np.diff(scores, append=-np.inf))  # equal scores are mined together, or not
    f1 = 2 * np.cumsum(is_gold(candidates, gold))[ends] / (ends + 1 + len(gold))
    best = int(ends[f1.argmax()])
    return float(scores[best : best + 2].mean())


def mining_scores(candidates: Candidates, gold: set[tuple[int, int]], threshold: float) -> Scores:
    """Return precision, recall and F1 of the candidates from the threshold up, with intervals over the first list."""
    mined = candidates.scores >= threshold
    first, right = candidates.pairs[mined, 0], is_gold(candidates, gold)[mined]
    wanted = np.array([i for i, _ in gold])
    sentences = 1 + max(candidates.pairs[:, 0].max(), wanted.max())
    counts = (np.bincount(rows, minlength=sentences) for rows in (first[right], first, wanted))
    scores = entity_scores(np.stack(list(counts), 1))
    return {
        "precision": scores["precision"],
        "recall": scores["recall"],
        "F1": scores["f1"],
        "threshold": threshold,
        "mined": int(mined.sum()),
        "gold": len(gold),
    }


def load_bitext(prefix: Path) -> Bitext:
    """Read BUCC's files (plain, .gz or .xz): lines `ID<TAB>sentence` of PREFIX.de and PREFIX.en, and gold pairs
    `ID<TAB>ID` of PREFIX.gold, for a prefix such as de-en.test. Raises UserError."""
    langs = prefix_languages(prefix)
    lists = [read_sentences(bucc_path(prefix, lang)) for lang in langs]
    indices = [{name: i for i, name in enumerate(sentences)} for sentences in lists]
    path, gold = bucc_path(prefix, "gold"), set()
    for number, line in read_lines(path):
        names = line.split("\t")
        if len(names) != 2 or any(name not in known for name, known in zip(names, indices, strict=True)):
            raise UserError(
                f"{path}: line {number}: {line!r} must be `ID<TAB>ID`, with an ID from {prefix.name}.{langs[0]} and "
                f"one from {prefix.name}.{langs[1]}; fix the line"
            )
        gold.add((indices[0][names[0]], indices[1][names[1]]))
    if not gold:
        raise UserError(f"{path} has no pair; give BUCC's file of gold pairs")
    return Bitext(langs, (list(lists[0].values()), list(lists[1].values())), gold)


def read_sentences(path: Path) -> dict[str, str]:
    """Read lines `ID<TAB>sentence` as {ID: sentence}. Raises UserError."""
    sentences: dict[str, str] = {}
    for number, line in read_lines(path):
        name, tab, text = line.partition("\t")
        if not (name and tab and text.strip()) or name in sentences:
            problem = f"{name!r} occurs twice as an ID" if name in sentences else f"{line!r} is not `ID<TAB>sentence`"
            raise UserError(f"{path}: line {number}: {problem}; fix the line")
        sentences[name] = text
    if not sentences:
        raise UserError(f"{path} has no sentence; give BUCC's files with lines `ID<TAB>sentence`")
    return sentences


def prefix_languages(prefix: Path) -> tuple[str, str]:
    """Return the two languages of a prefix of BUCC's files: ("de", "en") for .../de-en.training. Raises UserError."""
    pair = prefix.name.partition(".")[0]
    words = pair.split("-")
    sides = ["-".join(side) for i in range(1, len(words)) for side in (words[:i], words[i:])]
    names = cut_pair(pair, [side for side in sides if bucc_path(prefix, side).exists()])
    if names is None or names[0] == names[1]:
        raise UserError(
            f"--mining {prefix}: the name must start with the languages of two files beside it, as de-en.training "
            f"does for the files de-en.training.de and de-en.training.en"
        )
    return names


def bucc_path(prefix: Path, extension: str) -> Path:
    """Return the path PREFIX.EXTENSION, or with .xz or .gz if only that file exists."""
    path = prefix.with_name(f"{prefix.name}.{extension}")
    candidates = (path.with_name(path.name + suffix) for suffix in ("", ".xz", ".gz"))
    return next((candidate for candidate in candidates if candidate.exists()), path)
