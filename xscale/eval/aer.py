"""Word alignment from hidden states: alignment error rate (Och & Ney 2003) against links made by hand, by layer.

    AER = 1 - (|A & S| + |A & P|) / (|A| + |S|);    precision = |A & P| / |A|;    recall = |A & S| / |S|

A: found links; S: sure links; P: sure and possible links. The counts are sums over the whole test set; F1 combines
precision and recall.

Two words are linked if any of their tokens are. Tokens are linked by one of two methods:

    argmax   each token is the most similar to the other by cosine (SimAlign; Jalili Sabet et al. 2020)
    softmax  the softmaxes of dot products over both sentences exceed 0.001 (awesome-align; Dou & Neubig 2021)

Words are separated by spaces, as in the links' files. The two sentences go through the encoder separately.

Shape letters: I tokens of the first sentence, J of the second, T of either, L layers, H width.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.eval.bootstrap import bootstrap
from xscale.eval.model import Exported, Scores
from xscale.eval.retrieval import ALL, layer_numbers, layer_states, stream_batch_of

BATCH = 32
THRESHOLD = 1e-3
"""The least probability of a softmax link, as in awesome-align."""
Links = set[tuple[int, int]]
"""Pairs (number of a word of the first sentence, number of a word of the second sentence), from 0."""
_LINK = re.compile(r"([0-9]{1,6})([-p])([0-9]{1,6})")


@dataclass(frozen=True)
class HandLinks:
    """Pairs of sentences with word links made by hand."""

    langs: tuple[str, str]
    words: list[tuple[list[str], list[str]]]
    """The words of each pair of sentences."""
    sure: list[Links]
    possible: list[Links]
    """The possible links of each pair, which include its sure links."""

    def first(self, limit: int) -> "HandLinks":
        return HandLinks(self.langs, self.words[:limit], self.sure[:limit], self.possible[:limit])


def argmax(x_IH: Tensor, y_JH: Tensor) -> Tensor:
    """True for each pair of tokens that are each other's nearest by cosine, and so are linked [I, J]."""
    cosine = F.normalize(x_IH, dim=-1) @ F.normalize(y_JH, dim=-1).T
    there, back = F.one_hot(cosine.argmax(1), cosine.shape[1]), F.one_hot(cosine.argmax(0), cosine.shape[0])
    return (there * back.T).bool()


def softmax(x_IH: Tensor, y_JH: Tensor) -> Tensor:
    """True for each pair of tokens whose two softmax probabilities exceed THRESHOLD, and so are linked [I, J]."""
    product_IJ = x_IH @ y_JH.T
    return (product_IJ.softmax(1) > THRESHOLD) & (product_IJ.softmax(0) > THRESHOLD)


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"argmax": argmax, "softmax": softmax}


@dataclass(frozen=True)
class EncodedSentence:
    states_LTH: Tensor
    words: list[int]
    """The number of each token's word [T]."""
    cut: bool
    """True if the sentence has tokens beyond the model's positions, which are left out."""


def evaluate(model: Exported, gold: HandLinks, layers: Sequence[str | int] = (ALL,)) -> dict[str, Scores]:
    """The error rates of both methods at each layer, and the number of pairs that were cut at the model's positions."""
    numbers = layer_numbers(layers, model.num_layers)
    found: dict[tuple[str, int], list[Links]] = {key: [] for key in product(METHODS, numbers)}
    language, cut = model.language_ids(gold.langs), 0
    for start in range(0, len(gold.words), BATCH):
        pairs = gold.words[start : start + BATCH]
        sides = [
            word_states(model, [pair[side] for pair in pairs], language[gold.langs[side]], numbers) for side in (0, 1)
        ]
        for first, second in zip(*sides, strict=True):
            cut += first.cut or second.cut
            for (method, layer), links in found.items():
                x, y = (side.states_LTH[numbers.index(layer)] for side in (first, second))
                pairs_of = METHODS[method](x, y).nonzero().tolist() if len(x) and len(y) else []
                links.append({(first.words[i], second.words[j]) for i, j in pairs_of})
    return {
        f"{method} layer {model.num_layers + 1 + layer}": error_rates(links, gold)
        | {"sentences": len(links), "cut": cut}
        for (method, layer), links in found.items()
    }


def word_states(
    model: Exported, sentences: list[list[str]], language: int, layers: Sequence[int]
) -> list[EncodedSentence]:
    """The states of the tokens of each sentence. layers: numbers counted from the end."""
    ids = iter(model.tokenizer.encode_inside([word for words in sentences for word in words]))
    tokens = [[(number, token) for number in range(len(words)) for token in next(ids)] for words in sentences]
    kept = [of_sentence[: model.longest - 2] for of_sentence in tokens]
    stream_batch = stream_batch_of(
        model, [[token for _, token in of_sentence] for of_sentence in kept], language, ["tokens"]
    )
    states_LNH = torch.stack(layer_states(model, stream_batch, layers)).cpu()
    parts = states_LNH.split([len(of_sentence) for of_sentence in kept], 1)
    return [
        EncodedSentence(states, [number for number, _ in of_sentence], len(of_sentence) < len(whole))
        for states, of_sentence, whole in zip(parts, kept, tokens, strict=True)
    ]


def error_rates(found: Sequence[Links], gold: HandLinks) -> Scores:
    counts = [(len(a), len(s), len(a & p), len(a & s)) for a, s, p in zip(found, gold.sure, gold.possible, strict=True)]

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        links, sure, right, right_sure = np.moveaxis(sums, -1, 0)
        precision, recall = right / np.maximum(links, 1), right_sure / np.maximum(sure, 1)
        return {
            "AER": 1 - (right_sure + right) / np.maximum(links + sure, 1),
            "precision": precision,
            "recall": recall,
            "F1": 2 * precision * recall / np.maximum(precision + recall, 1e-12),
        }

    return bootstrap(np.array(counts), scores_of)


def load_hand_links(langs: tuple[str, str], text: Path, links: Path | None = None) -> HandLinks:
    """Read a table `sentence<TAB>sentence<TAB>links` (XL-WA), or lines `sentence ||| sentence` and a file of their
    links (WPT, Pharaoh). `i-j` is a sure link, `ipj` a possible one. Words are counted from 0; or from 1 if no link has
    a 0 and some link has the number of a last word counted from 1. Raises UserError."""
    lines = list(read_lines(text))
    of_links = lines if links is None else list(read_lines(links))
    if len(lines) != len(of_links):
        raise UserError(f"{links} has {len(of_links):,} lines, {text} has {len(lines):,}; lines n must be one pair")
    mark, columns = ("\t", 3) if links is None else ("|||", 2)
    words, rows = [], []
    for (number, line), (_, given) in zip(lines, of_links, strict=True):
        cells = line.split(mark)
        if len(cells) != columns or not all(map(str.split, cells[:2])):
            form = "`sentence<TAB>sentence<TAB>links`" if links is None else "`sentence ||| sentence`"
            raise UserError(f"{text}: line {number}: {line[:60]!r} is not {form}")
        first, second = ([word for word in cell.split(" ") if word] for cell in cells[:2])
        words.append((first, second))  # not at other spaces: a word may be one, such as U+3000 in Japanese
        rows.append((number, cells[2] if links is None else given))
    return HandLinks(langs, words, *parse_links(rows, words, links or text))


def parse_links(
    rows: list[tuple[int, str]], words: list[tuple[list[str], list[str]]], path: Path
) -> tuple[list[Links], list[Links]]:
    """The sure links of each pair, then the possible ones. rows: (line number, links) of each pair."""
    found: list[list[tuple[int, str, int]]] = []
    for number, line in rows:
        matches = [(link, _LINK.fullmatch(link)) for link in line.split()]
        wrong = next((link for link, match in matches if not match), None)
        if wrong:
            raise UserError(f"{path}: line {number}: {wrong!r} is no link; needs i-j, or ipj for a possible one")
        found.append([(int(m[1]), m[2], int(m[3])) for _, m in matches if m])
    if not any(found):
        raise UserError(f"{path} holds no link")
    numbers = [(i, j) for links in found for i, _, j in links]
    sizes = [(len(first), len(second)) for links, (first, second) in zip(found, words, strict=True) for _ in links]
    has_zero = any(0 in link for link in numbers)
    has_last = any(i == n or j == m for (i, j), (n, m) in zip(numbers, sizes, strict=True))
    if not has_zero and not has_last:
        raise UserError(
            f"{path}: it is unclear whether words are counted from 0 or from 1, since no link has word 0 and none has "
            f"the number of words of its sentence; add a pair whose first or last words are linked"
        )
    base = 0 if has_zero else 1
    for (number, _), links, (first, second) in zip(rows, found, words, strict=True):
        for i, kind, j in links:
            if not (i - base < len(first) and j - base < len(second)):
                raise UserError(
                    f"{path}: line {number}: link {i}{kind}{j} does not fit sentences of {len(first)} and "
                    f"{len(second)} words, counted from {base}"
                )
    possible = [{(i - base, j - base) for i, _, j in links} for links in found]
    return [{(i - base, j - base) for i, kind, j in links if kind == "-"} for links in found], possible
