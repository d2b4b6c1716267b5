"""Word orders that derive one language from another: inverted sentences, and French syntax.

An order is a list of the words' indices, in their new order.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
from conllu import Column, Row

from xscale import rng
from xscale.strict_yaml import read_yaml

_END = re.compile(r"[.!?][.!?\"'”’»)\]]*$")
"""Matches punctuation that ends a sentence, as a word or at the end of the last word."""
_END_WORD = re.compile(r"[.!?]+")
MOST_DEPENDENTS = 6
"""If a head has more dependents than this, they keep their order (Wang and Eisner 2016)."""
FRENCH: dict[str, dict[str, list[int]]] = read_yaml(Path(__file__).with_name("french.yaml").read_text(encoding="utf-8"))
"""Counts in a French treebank: the head's part of speech -> the dependent's relation, with PRON if the dependent is a
pronoun -> [number of dependents before their head, number of all dependents]."""


def invert_text(line: str) -> str:
    """Return the line with the words of each sentence in reverse order. Final punctuation stays at the end."""
    inverted: list[str] = []
    sentence: list[str] = []
    for word in line.split():
        end = _END.search(word)
        if end is None:
            sentence.append(word)
            continue
        punctuation = end.group()
        if end.start() == 0:
            inverted += [*reversed(sentence), punctuation]
        else:
            sentence.append(word.removesuffix(punctuation))
            sentence.reverse()
            sentence[-1] += punctuation
            inverted += sentence
        sentence = []
    return " ".join([*inverted, *reversed(sentence)])


def inverted_order(words: Sequence[str], entity_words: Collection[int] = ()) -> list[int]:
    """Return the order that reverses each sentence. A word that consists of . ! or ? ends a sentence and stays last,
    unless its index is in `entity_words`, the words of named entities."""
    order: list[int] = []
    start = 0
    for number, word in enumerate(words):
        if _END_WORD.fullmatch(word) and number not in entity_words:
            order += [*range(number - 1, start - 1, -1), number]
            start = number + 1
    return [*order, *range(len(words) - 1, start - 1, -1)]


def french_order(words: Sequence[Row], seed: int) -> list[int] | None:
    """Return a sampled order in which the dependents of nouns, pronouns and verbs precede their heads as often as in
    French; None if the parse has crossing arcs. A dependent that changes sides goes next to its head. words: the
    columns of the words of a sentence."""
    heads = [int(word[Column.HEAD]) - 1 for word in words]
    if linearized(heads, lambda head, number: number < head) != [*range(len(words))]:
        return None
    chances = rng.uniform(rng.key(seed, "syn", *(word[Column.FORM] for word in words)), np.arange(len(words)))
    dependents = Counter(heads)

    def is_before(head: int, number: int) -> bool:
        relation = words[number][Column.DEPREL].partition(":")[0]
        if words[number][Column.UPOS] == "PRON":
            relation += " PRON"
        counts = FRENCH.get(words[head][Column.UPOS], {}).get(relation)
        if counts is None or dependents[head] > MOST_DEPENDENTS:
            return number < head
        before, both = counts
        return bool(chances[number] < before / both)

    return linearized(heads, is_before)


def linearized(heads: Sequence[int], is_before: Callable[[int, int], bool]) -> list[int]:
    """Return the order of the words below the roots if `is_before(head, dependent)` says on which side of its head each
    dependent goes. Among the dependents that change sides, too, the nearest to the head stays the nearest. heads: the
    index of each word's head; -1 for a root."""
    dependents: dict[int, list[int]] = defaultdict(list)
    for number, head in enumerate(heads):
        dependents[head].append(number)

    def phrase(head: int) -> list[int]:
        before = [number for number in dependents[head] if is_before(head, number)]
        behind = [number for number in dependents[head] if number not in before]
        left = sorted(before, key=lambda number: (number > head, number if number < head else -number))
        right = sorted(behind, key=lambda number: (number > head, number if number > head else -number))
        order = []
        for number in [*left, head, *right]:
            order += [head] if number == head else phrase(number)
        return order

    order = []
    for root in dependents[-1]:
        order += phrase(root)
    return order
