"""Aligns words by hidden states: alignment error rate (Och & Ney 2003) against links made by hand, by layer.

    AER = 1 - (|A & S| + |A & P|) / (|A| + |S|);    precision = |A & P| / |A|;    recall = |A & S| / |S|

A: predicted links; S: sure links; P: sure and possible links. The counts are sums over the whole test set; F1 is the
harmonic mean of precision and recall.

Two words are linked if any of their tokens are. Tokens are linked by one of two methods:

    argmax   each of the two tokens is the other's nearest by cosine (SimAlign; Jalili Sabet et al. 2020)
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
from xscale.eval.model import ExportedModel, Scores
from xscale.eval.retrieval import ALL, layer_indices, layer_states, make_stream_batch

BATCH = 32
THRESHOLD = 1e-3
"""The least probability of a softmax link, as in awesome-align."""
Links = set[tuple[int, int]]
"""Pairs (index of a word of the first sentence, index of a word of the second sentence)."""
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

    def first(self, n: int) -> "HandLinks":
        return HandLinks(self.langs, self.words[:n], self.sure[:n], self.possible[:n])


def argmax_links(x_IH: Tensor, y_JH: Tensor) -> Tensor:
    """Return [I, J], True for linked pairs of tokens: those that are each other's nearest by cosine."""
    cosine = F.normalize(x_IH, dim=-1) @ F.normalize(y_JH, dim=-1).T
    there, back = F.one_hot(cosine.argmax(1), cosine.shape[1]), F.one_hot(cosine.argmax(0), cosine.shape[0])
    return (there * back.T).bool()


def softmax_links(x_IH: Tensor, y_JH: Tensor) -> Tensor:
    """Return [I, J], True for linked pairs of tokens: those whose softmaxes over I and over J exceed THRESHOLD."""
    product_IJ = x_IH @ y_JH.T
    return (product_IJ.softmax(1) > THRESHOLD) & (product_IJ.softmax(0) > THRESHOLD)


METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"argmax": argmax_links, "softmax": softmax_links}


@dataclass(frozen=True)
class EncodedSentence:
    states_LTH: Tensor
    words: list[int]
    """The index of each token's word [T]."""
    is_truncated: bool
    """True if tokens were left out, because the sentence has more than the model has positions."""


def evaluate(model: ExportedModel, gold: HandLinks, layers: Sequence[str | int] = (ALL,)) -> dict[str, Scores]:
    """Return {`METHOD layer N`: error rates, number of pairs, and number `cut` of pairs with a truncated sentence}."""
    indices = layer_indices(layers, model.num_layers)
    predicted: dict[tuple[str, int], list[Links]] = {key: [] for key in product(METHODS, indices)}
    language_ids, truncated = model.language_ids(gold.langs), 0
    for start in range(0, len(gold.words), BATCH):
        pairs = gold.words[start : start + BATCH]
        sides = [
            encode_words(model, [pair[side] for pair in pairs], language_ids[gold.langs[side]], indices)
            for side in (0, 1)
        ]
        for first, second in zip(*sides, strict=True):
            truncated += first.is_truncated or second.is_truncated
            for (method, layer), links in predicted.items():
                x, y = (side.states_LTH[indices.index(layer)] for side in (first, second))
                token_links = METHODS[method](x, y).nonzero().tolist() if len(x) and len(y) else []
                links.append({(first.words[i], second.words[j]) for i, j in token_links})
    return {
        f"{method} layer {model.num_layers + 1 + layer}": error_rates(links, gold)
        | {"sentences": len(links), "cut": truncated}
        for (method, layer), links in predicted.items()
    }


def encode_words(
    model: ExportedModel, sentences: list[list[str]], language_id: int, layers: Sequence[int]
) -> list[EncodedSentence]:
    """Return each sentence's words with the hidden states of their tokens. layers: indices from the end."""
    ids = iter(model.tokenizer.encode_inside([word for words in sentences for word in words]))
    tokens = [[(word, token) for word in range(len(words)) for token in next(ids)] for words in sentences]
    kept = [sentence[: model.max_length - 2] for sentence in tokens]
    batch = make_stream_batch(model, [[token for _, token in sentence] for sentence in kept], language_id, ["tokens"])
    states_LNH = torch.stack(layer_states(model, batch, layers)).cpu()
    return [
        EncodedSentence(states_LTH, [word for word, _ in sentence], len(sentence) < len(whole))
        for states_LTH, sentence, whole in zip(states_LNH.split(list(map(len, kept)), 1), kept, tokens, strict=True)
    ]


def error_rates(predicted: Sequence[Links], gold: HandLinks) -> Scores:
    """Return AER, precision, recall and F1. predicted: the links of each pair of sentences."""
    links_asp = zip(predicted, gold.sure, gold.possible, strict=True)
    counts = [(len(a), len(s), len(a & p), len(a & s)) for a, s, p in links_asp]

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
    """Read a file of lines `sentence<TAB>sentence<TAB>links` (XL-WA), or two files, with lines `sentence ||| sentence`
    and with their links (WPT, Pharaoh). The link `i-j` is a sure one, `ipj` a possible one. Words are counted from 1 if
    no link has a 0 and some link fits only that, else from 0. Raises UserError."""
    lines = list(read_lines(text))
    link_lines = lines if links is None else list(read_lines(links))
    if len(lines) != len(link_lines):
        raise UserError(
            f"{links} has {len(link_lines):,} lines, {text} has {len(lines):,}; line n must have the links of line n"
        )
    mark, columns = ("\t", 3) if links is None else ("|||", 2)
    words, rows = [], []
    for (number, line), (_, link_line) in zip(lines, link_lines, strict=True):
        cells = line.split(mark)
        if len(cells) != columns or not all(map(str.split, cells[:2])):
            form = "`sentence<TAB>sentence<TAB>links`" if links is None else "`sentence ||| sentence`"
            raise UserError(f"{text}: line {number}: {line[:60]!r} is not {form}; fix the line")
        first, second = ([word for word in cell.split(" ") if word] for cell in cells[:2])
        words.append((first, second))  # not split at other white space: U+3000 can be a word of Japanese text
        rows.append((number, cells[2] if links is None else link_line))
    return HandLinks(langs, words, *parse_links(rows, words, links or text))


def parse_links(
    rows: list[tuple[int, str]], words: list[tuple[list[str], list[str]]], path: Path
) -> tuple[list[Links], list[Links]]:
    """Return the sure links of each pair, and the possible ones. rows: (line number, links) of each pair."""
    parsed: list[list[tuple[int, str, int]]] = []
    for number, line in rows:
        matches = [(link, _LINK.fullmatch(link)) for link in line.split()]
        wrong = next((link for link, match in matches if not match), None)
        if wrong:
            raise UserError(f"{path}: line {number}: {wrong!r} is no link; write i-j, or ipj for a possible link")
        parsed.append([(int(m[1]), m[2], int(m[3])) for _, m in matches if m])
    if not any(parsed):
        raise UserError(f"{path} has no link; give a file with links such as 0-0")
    numbers = [(i, j) for links in parsed for i, _, j in links]
    sizes = [(len(first), len(second)) for links, (first, second) in zip(parsed, words, strict=True) for _ in links]
    has_zero = any(0 in link for link in numbers)
    has_last = any(i == n or j == m for (i, j), (n, m) in zip(numbers, sizes, strict=True))
    if not has_zero and not has_last:
        raise UserError(
            f"{path}: it is unclear whether words are counted from 0 or from 1, since no link has the number 0 or "
            f"the number of a sentence's words; add a pair of sentences whose first or last words are linked"
        )
    base = 0 if has_zero else 1
    for (number, _), links, (first, second) in zip(rows, parsed, words, strict=True):
        for i, mark, j in links:
            if not (i - base < len(first) and j - base < len(second)):
                raise UserError(
                    f"{path}: line {number}: link {i}{mark}{j} does not fit sentences of {len(first)} and "
                    f"{len(second)} words, counted from {base}; fix the line"
                )
    possible = [{(i - base, j - base) for i, _, j in links} for links in parsed]
    return [{(i - base, j - base) for i, mark, j in links if mark == "-"} for links in parsed], possible
