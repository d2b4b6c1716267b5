"""Word orders that derive one language from another: inverted sentences, and French syntax.

An order is a list of the words' indices, in their new order.
"""

import re
from collections.abc import Collection, Sequence
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
    out: list[str] = []
    words: list[str] = []
    for word in line.split():
        end = _END.search(word)
        if end is None:
            words.append(word)
        elif end.start() == 0:
            out += [*reversed(words), word]
            words = []
        else:
            first, *rest = [word[: end.start()], *reversed(words)]
            out += [first, *rest[:-1], rest[-1] + end.group()] if rest else [word]
            words = []
    return " ".join([*out, *reversed(words)])


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
    dependents: list[list[int]] = [[] for _ in words]
    roots: list[int] = []
    for number, word in enumerate(words):
        (dependents[word.head] if word.head >= 0 else roots).append(number)
    if not _is_tree_without_crossings(dependents, roots):
        return None
    draw = rng.key(seed, "syn", *(word.form for word in words))
    chances = rng.uniform(draw, np.arange(len(words))).tolist()

    def is_before(head: int, number: int) -> bool:
        counts = _counts(words[head], words[number]) if len(dependents[head]) <= MOST_DEPENDENTS else None
        return number < head if counts is None else chances[number] < counts[0] / counts[1]

    def phrase(head: int) -> list[int]:
        before = [number for number in dependents[head] if is_before(head, number)]
        behind = [number for number in dependents[head] if not is_before(head, number)]
        # Among dependents that change sides, too, the nearest to the head stays the nearest.
        left = [n for n in before if n < head] + [n for n in before[::-1] if n > head]
        right = [n for n in behind[::-1] if n < head] + [n for n in behind if n > head]
        return [n for child in left for n in phrase(child)] + [head] + [n for child in right for n in phrase(child)]

    return [number for root in roots for number in phrase(root)]


def _counts(head: Parsed, dependent: Parsed) -> tuple[int, int] | None:
    relation = dependent.deprel.partition(":")[0]
    return FRENCH.get(head.upos, {}).get(f"{relation} PRON" if dependent.upos == "PRON" else relation)


def _is_tree_without_crossings(dependents: list[list[int]], roots: list[int]) -> bool:
    """Return True if every word descends from a root, and each word and its descendants are consecutive words."""
    spans: dict[int, tuple[int, int, int]] = {}
    todo = [(root, False) for root in roots]
    while todo:
        number, done = todo.pop()
        if done:
            below = [spans[child] for child in dependents[number]] + [(number, number, 1)]
            spans[number] = (min(s[0] for s in below), max(s[1] for s in below), sum(s[2] for s in below))
        else:
            todo += [(number, True), *((child, False) for child in dependents[number])]
    return len(spans) == len(dependents) and all(last - first + 1 == size for first, last, size in spans.values())
