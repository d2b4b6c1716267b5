"""Aligns words by the hidden states of each layer. Links made by hand show how good the alignment is: the measure is
the alignment error rate (Och & Ney 2003).

    AER = 1 - (|A & S| + |A & P|) / (|A| + |S|);    precision = |A & P| / |A|;    recall = |A & S| / |S|

A: predicted links; S: sure links; P: sure and possible links. The counts are sums over the whole test set; F1 is the
harmonic mean of precision and recall.

Two words are linked if any of their tokens are. Two tokens are linked if each of them is the other's nearest by cosine
(the method argmax of SimAlign; Jalili Sabet et al. 2020).

Words are separated by spaces and tabs alone, because aligners and files of links number words in this way. The two
sentences go through the encoder separately.

Shape letters: I tokens of the first sentence, J of the second, T of either, L layers, H width.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.data.link_projection import FIRST_WORD
from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.eval.bootstrap import scores_with_intervals
from xscale.eval.model import ExportedModel, Scores
from xscale.eval.retrieval import check_layers_and_expand_all, encode_and_pool_at_layers, make_stream_batch

LINK = re.compile(r"([0-9]{1,6})([-p])([0-9]{1,6})")
Links = set[tuple[int, int]]
"""Pairs (index of a word of the first sentence, index of a word of the second sentence)."""


@dataclass(frozen=True)
class LinkedPair:
    """A pair of sentences with word links made by hand."""

    words: tuple[list[str], list[str]]
    """The words of both sentences."""
    sure: Links
    possible: Links
    """The possible links, which include the sure links."""


def mutual_nearest_tokens_mask(x_IH: Tensor, y_JH: Tensor) -> Tensor:
    """Return [I, J]: True where each of the two tokens is the other's nearest by cosine."""
    cosine = F.normalize(x_IH, dim=-1) @ F.normalize(y_JH, dim=-1).T
    there = F.one_hot(cosine.argmax(1), cosine.shape[1])
    back = F.one_hot(cosine.argmax(0), cosine.shape[0])
    return (there * back.T).bool()


def evaluate(
    model: ExportedModel, gold_paths: Sequence[Path], langs: Sequence[str], layers: Sequence[str | int], limit: int
) -> dict[str, Scores]:
    """Return {`argmax layer N`: scores}. The scores are the error rates, the number of pairs, and the number `cut` of
    pairs with a truncated sentence. gold_paths: those of read_linked_pairs. limit: the maximum number of pairs. Raises
    UserError."""
    gold = read_linked_pairs(*gold_paths)[:limit]
    numbers = check_layers_and_expand_all(layers, model)
    predicted = defaultdict[int, list[Links]](list)
    truncated = 0
    for pair in gold:
        x = encode_tokens_of_words(model, pair.words[0], langs[0], numbers)
        y = encode_tokens_of_words(model, pair.words[1], langs[1], numbers)
        truncated += x.is_truncated or y.is_truncated
        for layer, x_IH, y_JH in zip(numbers, x.states_LTH, y.states_LTH, strict=True):
            links: Links = set()
            if x.words and y.words:
                links = {(x.words[i], y.words[j]) for i, j in mutual_nearest_tokens_mask(x_IH, y_JH).nonzero().tolist()}
            predicted[layer].append(links)
    results = {}
    for layer in numbers:
        scores = aer_precision_recall_f1(predicted[layer], gold)
        results[f"argmax layer {layer}"] = scores | {"sentences": len(gold), "cut": truncated}
    return results


@dataclass(frozen=True)
class EncodedSentence:
    states_LTH: Tensor
    words: list[int]
    """The index of each token's word [T]."""
    is_truncated: bool
    """True if the sentence has more tokens than the model has positions, so that its last tokens are left out."""


def encode_tokens_of_words(
    model: ExportedModel, words: list[str], language: str, layers: Sequence[int]
) -> EncodedSentence:
    """Return the hidden states of the tokens of a sentence, given its words."""
    ids_T: list[int] = []
    word_T: list[int] = []
    for word, tokens in enumerate(model.tokenizer.encode_inside_sentence(words)):
        ids_T += tokens
        word_T += [word] * len(tokens)
    longest = model.max_length - 2
    batch = make_stream_batch(model, [ids_T[:longest]], language, ["tokens"])
    states_LTH = torch.stack(encode_and_pool_at_layers(model, batch, layers)).cpu()
    return EncodedSentence(states_LTH, word_T[:longest], len(ids_T) > longest)


def aer_precision_recall_f1(predicted: Sequence[Links], gold: Sequence[LinkedPair]) -> Scores:
    """Return AER, precision, recall and F1. predicted: the links of each pair of sentences."""
    counts = []
    for links, pair in zip(predicted, gold, strict=True):
        counts.append((len(links), len(pair.sure), len(links & pair.possible), len(links & pair.sure)))

    def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
        links, sure, right, right_sure = np.moveaxis(sums, -1, 0)
        precision = right / np.maximum(links, 1)
        recall = right_sure / np.maximum(sure, 1)
        f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
        error_rate = 1 - (right_sure + right) / np.maximum(links + sure, 1)
        return {"AER": error_rate, "precision": precision, "recall": recall, "F1": f1}

    return scores_with_intervals(np.array(counts), scores_of)


def read_linked_pairs(text: Path, links: Path | None = None) -> list[LinkedPair]:
    """Read a file of lines `sentence<TAB>sentence<TAB>links` (XL-WA), or a file of lines `sentence ||| sentence` and a
    file of their links (WPT, Pharaoh). `i-j` is a sure link, `ipj` a possible link. Words are counted from 0 if any
    link has a 0, else from 1. Raises UserError."""
    lines = read_all_lines(text)
    text_lines = lines
    separator = "\t"
    form = "`sentence<TAB>sentence<TAB>links` (links: word alignments such as 0-0 1-2)"
    if links is not None:
        separator = "|||"
        form = "`sentence ||| sentence`"
        link_lines = read_all_lines(links)
        if len(lines) != len(link_lines):
            raise UserError(
                f"the number of lines is {len(link_lines):,} in {links} and {len(lines):,} in {text}. Write one line "
                "of word alignments for each line of sentences"
            )
        lines = list(map("|||".join, zip(lines, link_lines, strict=True)))
    rows: list[list[list[str]]] = []
    first = 1
    for number, line in enumerate(lines, start=1):
        row = [re.findall("[^ \t]+", cell) for cell in line.split(separator)]  # U+3000 can be a word of Japanese text
        if len(row) != 3 or not row[0] or not row[1]:
            quoted = text_lines[number - 1][:60]
            raise UserError(f"{text}: line {number}: {quoted!r} does not have the form {form}. Correct the line")
        rows.append(row)
        if FIRST_WORD.search(" ".join(row[2])):
            first = 0
    pairs = []
    for number, row in enumerate(rows, start=1):
        pairs.append(parse_linked_pair(row, first, f"{links or text}: line {number}"))
    if not any(pair.sure for pair in pairs):
        raise UserError(
            f"{links or text} has no sure link, but the alignment error rate needs sure links. "
            "Write sure links as i-j, such as 0-0"
        )
    return pairs


def read_all_lines(path: Path) -> list[str]:
    """Return the lines of a text file that may be compressed, without their line ends. Raises UserError."""
    return [line for _, line in read_lines(path)]


def parse_linked_pair(row: list[list[str]], first_word_number: int, place: str) -> LinkedPair:
    """Return a pair with its links. row: the words of the first sentence, the words of the second, and links such as
    0-0 and 1p2. first_word_number: the number by which links name a first word, 0 or 1. place: the links' file and
    line, for errors. Raises UserError."""
    pair = LinkedPair((row[0], row[1]), set(), set())
    for link in row[2]:
        match = LINK.fullmatch(link)
        if not match:
            raise UserError(
                f"{place}: {link!r} is not a word link. Write i-j for a sure link, or ipj for a possible link"
            )
        i = int(match[1]) - first_word_number
        j = int(match[3]) - first_word_number
        if not (0 <= i < len(row[0]) and 0 <= j < len(row[1])):
            raise UserError(
                f"{place}: the link {link} names a word that does not exist. The number of words of the first sentence "
                f"is {len(row[0])}, that of the second {len(row[1])}, and words are counted from {first_word_number}. "
                "Correct the line"
            )
        pair.possible.add((i, j))
        if match[2] == "-":
            pair.sure.add((i, j))
    return pair
