"""Converts links between words of another tokenisation to links between words of data/words.py.

Two words of the two tokenisations correspond if they have a character in common.
"""

import re
from collections.abc import Sequence
from itertools import product

import numpy as np

from xscale.data.words import segment_into_words_and_symbols

LINKS = re.compile(r"\s*([0-9]{1,9}-[0-9]{1,9}(\s+|$))*")
LINK_WORD = re.compile(r"[^ \t\n]+")
"""Matches a word that an aligner's links number. fast_align and Moses split a text only at spaces and tabs. A no-break
space (U+00A0, U+202F) or an ideographic space (U+3000) is part of a word for them, unlike for Python's str.split."""

Link = tuple[int, int]
"""The number of a word in the first text, and of a word in the second text, from 0."""


def parse_pharaoh(links: str, word_counts: tuple[int, int]) -> list[Link]:
    """Return links in Pharaoh form, such as "0-0 1-2", as pairs of numbers. word_counts: the numbers of words of the
    two texts. Raises ValueError for a link that is malformed or outside of the texts."""
    if LINKS.fullmatch(links):
        numbers = list(map(int, links.replace("-", " ").split()))
        parsed = list(zip(numbers[::2], numbers[1::2], strict=True))
        wrong = [f"{i}-{j}" for i, j in parsed if i >= word_counts[0] or j >= word_counts[1]]
        if not wrong:
            return parsed
    else:
        wrong = [link for link in links.split() if not LINKS.fullmatch(link)]
    raise ValueError(
        f"the word link {wrong[0]!r} must be i-j, with i below {word_counts[0]} and j below {word_counts[1]}, the "
        "numbers of words of the two sentences"
    )


def format_pharaoh(links: list[Link]) -> str:
    """Return links in Pharaoh form, such as "0-0 1-2"."""
    return " ".join(f"{i}-{j}" for i, j in links)


def project_links(
    links: str, texts: tuple[str, ...], characters_of_words: Sequence[list[list[int]]] | None = None
) -> tuple[str, int]:
    """Return links between words of data/words.py, and the number of links that were dropped, such as those between a
    word and a symbol. links: the links to convert, in Pharaoh form.

    characters_of_words: for each text, the indices of the characters of each word that `links` numbers; None: `links`
    numbers the words between spaces. Raises ValueError.
    """
    characters_of_words = characters_of_words or list(map(characters_between_spaces, texts))
    segmented = segment_into_words_and_symbols(list(texts))
    is_word = list[np.ndarray]()
    words = list[list[list[int]]]()
    """For each text and each of the words that `links` numbers: the words of the text that this word overlaps."""
    for side, characters in enumerate(characters_of_words):
        first_word = segmented.words[side]
        is_word.append(segmented.is_word[first_word : segmented.words[side + 1]])
        word_of_char = segmented.word_of[segmented.chars[side] : segmented.chars[side + 1]] - first_word
        words.append(overlapped_words(characters, word_of_char))
    kept = set[Link]()
    dropped = 0
    for i, j in parse_pharaoh(links, (len(words[0]), len(words[1]))):
        fits = False
        for a, b in product(words[0][i], words[1][j]):
            if is_word[0][a] == is_word[1][b]:
                kept.add((a, b))
                fits = True
        dropped += not fits
    return format_pharaoh(sorted(kept)), dropped


def characters_between_spaces(text: str) -> list[list[int]]:
    """Return the indices of the characters of each word of a text that has been divided at spaces and tabs."""
    return [list(range(*match.span())) for match in LINK_WORD.finditer(text)]


def overlapped_words(characters_of_words: list[list[int]], word_of_char: np.ndarray) -> list[list[int]]:
    """Return the numbers of the words of a text that each of other words overlaps. characters_of_words: the indices of
    the characters of each of the other words. word_of_char: the number of the word to which each character of the text
    belongs; negative if it belongs to none."""
    words = list[list[int]]()
    for characters in characters_of_words:
        numbers = word_of_char[characters]
        words.append(np.unique(numbers[numbers >= 0]).tolist())
    return words
