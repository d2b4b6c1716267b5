"""Word orders that derive one language from another: inverted sentences, and French syntax.

An order is a list of the words' indices, in their new order.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from xscale import rng

_END = re.compile(r"[.!?][.!?\"'”’»)\]]*$")
"""Matches punctuation that ends a sentence, as a word or at the end of the last word."""
_END_WORD = re.compile(r"[.!?]+")
MOST_DEPENDENTS = 6
"""If a head has more dependents than this, they keep their order (Wang and Eisner 2016)."""
FRENCH = {
    "NOUN": {"acl": (2, 321), "advmod": (64, 75), "amod": (422, 1359), "appos": (0, 217), "case": (2531, 2531),
             "cc": (217, 217), "conj": (0, 275), "cop": (91, 91), "det": (3501, 3501), "nmod": (17, 1747),
             "nsubj": (57, 57), "nsubj PRON": (26, 26), "nummod": (157, 159), "obl": (12, 25), "xcomp": (0, 44)},
    "PROPN": {"amod": (10, 31), "appos": (0, 44), "case": (533, 533), "cc": (51, 51), "conj": (0, 80),
              "det": (255, 255), "flat": (0, 240), "nmod": (2, 46)},
    "PRON": {"acl": (0, 33), "case": (76, 76), "nmod": (0, 23)},
    "VERB": {"advcl": (53, 177), "advmod": (331, 585), "aux": (789, 789), "cc": (203, 203), "ccomp": (4, 160),
             "conj": (0, 209), "discourse": (24, 24), "expl PRON": (91, 92), "iobj PRON": (40, 40),
             "mark": (554, 554), "nsubj": (863, 911), "nsubj PRON": (511, 520), "obj": (1, 862),
             "obj PRON": (206, 220), "obl": (220, 1304), "obl PRON": (49, 75), "parataxis": (33, 88),
             "xcomp": (1, 331)},
}  # fmt: skip
"""Counts in UD French-PUD: the head's part of speech -> the dependent's relation (with PRON if the dependent is a
pronoun) -> (number of dependents before their head, number of all dependents). Punctuation, and relations of fewer than
20 dependents, are left out."""


class Parsed(NamedTuple):
    """A word of a parsed sentence."""

    form: str
    upos: str
    head: int
    """The index of the head word, from 0; -1 for the root."""
    deprel: str


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


def french_order(words: Sequence[Parsed], seed: int) -> list[int] | None:
    """Return a sampled order in which the dependents of nouns, pronouns and verbs precede their heads as often as in
    French; None if the parse has crossing arcs. A dependent that changes sides goes next to its head."""
    every_word = range(len(words))
    if linearized(words, lambda head, number: number < head) != [*every_word]:
        return None
    chances = rng.uniform(rng.key(seed, "syn", *(word.form for word in words)), np.arange(len(words)))
    dependents = Counter(word.head for word in words)

    def is_before(head: int, number: int) -> bool:
        counts = _counts(words[head], words[number])
        if counts is None or dependents[head] > MOST_DEPENDENTS:
            return number < head
        before, both = counts
        return bool(chances[number] < before / both)

    return linearized(words, is_before)


def linearized(words: Sequence[Parsed], is_before: Callable[[int, int], bool]) -> list[int]:
    """Return the order of the words below the roots if `is_before(head, dependent)` says on which side of its head each
    dependent goes. Among the dependents that change sides, too, the nearest to the head stays the nearest."""
    dependents: dict[int, list[int]] = defaultdict(list)
    for number, word in enumerate(words):
        dependents[word.head].append(number)

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


def _counts(head: Parsed, dependent: Parsed) -> tuple[int, int] | None:
    relation = dependent.deprel.partition(":")[0]
    if dependent.upos == "PRON":
        relation += " PRON"
    return FRENCH.get(head.upos, {}).get(relation)
