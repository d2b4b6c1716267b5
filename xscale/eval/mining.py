"""Mining of parallel sentences (BUCC; Zweigenbaum et al. 2018): which pairs of two monolingual lists are translations?

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
from xscale.eval.model import Exported, Scores
from xscale.eval.neighbours import ratio_margins
from xscale.eval.retrieval import Variant, embed_sides

NEIGHBOURS = 4
OWN = "own threshold"


@dataclass(frozen=True)
class Bitext:
    """Two lists of sentences, and the pairs (number, number) that are translations."""

    langs: tuple[str, str]
    texts: tuple[list[str], list[str]]
    gold: set[tuple[int, int]]


@dataclass(frozen=True)
class Candidates:
    """Pairs of sentences that may be translations, best first."""

    pairs: np.ndarray
    """Number in the first list, number in the second [C, 2]."""
    scores: np.ndarray
    """Ratio margins [C]."""


def evaluate(model: Exported, bitext: Bitext, dev: Bitext | None, chosen: Sequence[Variant]) -> dict[str, Scores]:
    """Precision, recall and F1 of the mined pairs, for each variant. dev: the development set for the threshold."""
    sides = embed_sides(model, bitext.texts, bitext.langs, chosen)
    dev_sides = embed_sides(model, dev.texts, dev.langs, chosen) if dev else sides
    found = {}
    for variant in chosen:
        candidates = mine(sides[0][variant.vectors], sides[1][variant.vectors])
        dev_candidates = mine(dev_sides[0][variant.vectors], dev_sides[1][variant.vectors]) if dev else candidates
        threshold = best_threshold(dev_candidates, (dev or bitext).gold)
        name = variant.name if dev else f"{variant.name} {OWN}".strip()
        found[name] = rates(candidates, bitext.gold, threshold)
    return found


def mine(x_NH: Tensor, y_MH: Tensor, k: int = NEIGHBOURS) -> Candidates:
    """The candidate pairs of unit vectors x_i and y_j, one-to-one: each sentence is in at most one pair."""
    both = ratio_margins(x_NH, y_MH, k)
    (forward, there_rows), (backward, back_rows) = ([part.cpu().numpy() for part in found] for found in both)
    first, second = np.arange(len(forward)), np.arange(len(backward))
    best_there, best_back = forward.argmax(1), backward.argmax(1)
    pairs = np.concatenate(
        [np.stack([first, there_rows[first, best_there]], 1), np.stack([back_rows[second, best_back], second], 1)]
    )
    scores = np.concatenate([forward[first, best_there], backward[second, best_back]])
    taken: tuple[set[int], set[int]] = (set(), set())
    kept = []
    order = np.argsort(-scores, kind="stable")
    for place, (i, j) in zip(order.tolist(), pairs[order].tolist(), strict=True):
        if i not in taken[0] and j not in taken[1]:
            kept.append(place)
            taken[0].add(i)
            taken[1].add(j)
    return Candidates(pairs[kept], scores[kept])


def is_gold(candidates: Candidates, gold: set[tuple[int, int]]) -> np.ndarray:
    """True for each candidate that is a gold pair [C]."""
    return np.array([(i, j) in gold for i, j in candidates.pairs.tolist()], dtype=bool)


def best_threshold(candidates: Candidates, gold: set[tuple[int, int]]) -> float:
    """The threshold with the best F1, half way between the scores of the last mined candidate and the next one."""
    scores = candidates.scores
    ends = np.flatnonzero(np.diff(scores, append=-np.inf))  # equal scores are mined together, or not
    f1 = 2 * np.cumsum(is_gold(candidates, gold))[ends] / (ends + 1 + len(gold))
    best = int(ends[f1.argmax()])
    return float(scores[best : best + 2].mean())


def rates(candidates: Candidates, gold: set[tuple[int, int]], threshold: float) -> Scores:
    """Precision, recall and F1 of mining by the threshold. Their intervals are over the sentences of the first list."""
    mined = candidates.scores >= threshold
    first, right = candidates.pairs[mined, 0], is_gold(candidates, gold)[mined]
    wanted = np.array([i for i, _ in gold])
    sentences = 1 + max(candidates.pairs[:, 0].max(), wanted.max())
    counts = (np.bincount(numbers, minlength=sentences) for numbers in (first[right], first, wanted))
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
    """Read BUCC's files, plain, .gz or .xz. For the prefix de-en.test they are de-en.test.de and de-en.test.en with
    lines `ID<TAB>sentence`, and de-en.test.gold with lines `ID<TAB>ID`. Raises UserError."""
    langs = languages_of(prefix)
    lists = [read_ids(find_file(prefix, lang)) for lang in langs]
    places = [{name: place for place, name in enumerate(of_list)} for of_list in lists]
    path, gold = find_file(prefix, "gold"), set()
    for number, line in read_lines(path):
        names = line.split("\t")
        if len(names) != 2 or any(name not in known for name, known in zip(names, places, strict=True)):
            raise UserError(
                f"{path}: line {number}: {line!r} is not an ID of {prefix.name}.{langs[0]}, a tab and one of "
                f"{prefix.name}.{langs[1]}"
            )
        gold.add((places[0][names[0]], places[1][names[1]]))
    if not gold:
        raise UserError(f"{path} holds no pair")
    return Bitext(langs, (list(lists[0].values()), list(lists[1].values())), gold)


def read_ids(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, line in read_lines(path):
        name, tab, text = line.partition("\t")
        if not (name and tab and text.strip()) or name in found:
            what = f"{name!r} stands twice" if name in found else f"{line!r} is not `ID<TAB>sentence`"
            raise UserError(f"{path}: line {number}: {what}")
        found[name] = text
    if not found:
        raise UserError(f"{path} holds no sentence")
    return found


def languages_of(prefix: Path) -> tuple[str, str]:
    """The two languages of a prefix, such as ("de", "en") of .../de-en.training. Raises UserError."""
    parts = prefix.name.partition(".")[0].split("-")
    sides = ["-".join(side) for i in range(1, len(parts)) for side in (parts[:i], parts[i:])]
    names = cut_pair("-".join(parts), [side for side in sides if find_file(prefix, side).exists()])
    if names is None or names[0] == names[1]:
        raise UserError(
            f"--mining {prefix}: the name must start with the languages of two files, as de-en.training does for "
            f"de-en.training.de and .en"
        )
    return names


def find_file(prefix: Path, extension: str) -> Path:
    """The path of the file PREFIX.EXTENSION, or of its compressed form."""
    path = prefix.with_name(f"{prefix.name}.{extension}")
    packed = (path.with_name(path.name + suffix) for suffix in ("", ".xz", ".gz"))
    return next((found for found in packed if found.exists()), path)
