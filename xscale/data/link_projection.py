"""Converts links between words of another tokenisation to links between words of data/words.py, by characters."""

import difflib
import html
import re
import unicodedata
from collections.abc import Sequence
from itertools import product

from xscale.data.words import segment

LINK = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_WORD = re.compile(r"\S+")


def parse(links: str, sizes: tuple[int, int]) -> list[tuple[int, int]]:
    """Return links in Pharaoh form, such as "0-0 1-2", as pairs of numbers. sizes: the number of words of both
    sentences. Raises ValueError naming the link that is malformed or outside of the sentences."""
    found = []
    for link in links.split():
        match = LINK.fullmatch(link)
        if not match or int(match[1]) >= sizes[0] or int(match[2]) >= sizes[1]:
            raise ValueError(f"link {link!r} does not fit a pair of {sizes[0]} and {sizes[1]} words")
        found.append((int(match[1]), int(match[2])))
    return found


def pharaoh(links: list[tuple[int, int]]) -> str:
    return " ".join(f"{i}-{j}" for i, j in links)


def project_links(
    links: str, texts: tuple[str, ...], tokenised: tuple[str, ...] | None = None, by_words: bool = False
) -> tuple[str, int]:
    """Return the links between words of data/words.py, and the number of `links` dropped, such as word to symbol.

    tokenised: the texts whose white-space words `links` counts; None: the texts themselves. by_words: `links` counts
    words of data/words.py already. Raises ValueError.
    """
    found = segment(list(texts))
    numbers = [found.word_of[a:b] - w for a, b, w in zip(found.chars, found.chars[1:], found.words, strict=False)]
    is_word = [found.is_word[a:b] for a, b in zip(found.words, found.words[1:], strict=False)]
    if by_words:
        words = [[[k] for k in range(len(side))] for side in is_word]
    else:
        words = [
            [sorted({int(n) for n in of_text[chars] if n >= 0}) for chars in places(text, given)]
            for text, of_text, given in zip(texts, numbers, tokenised or texts, strict=True)
        ]
    kept: set[tuple[int, int]] = set()
    dropped = 0
    for i, j in parse(links, (len(words[0]), len(words[1]))):
        fitting = {(a, b) for a, b in product(words[0][i], words[1][j]) if is_word[0][a] == is_word[1][b]}
        dropped += not fitting
        kept |= fitting
    return pharaoh(sorted(kept)), dropped


def places(text: str, tokenised: str) -> list[list[int]]:
    """Return the indices in `text` of the characters of each white-space word of `tokenised`. Raises ValueError if less
    than half of the characters match."""
    if tokenised is text:
        return [list(range(*match.span())) for match in _WORD.finditer(text)]
    tokens = tokenised.split()
    visible = [place for place, character in enumerate(text) if not character.isspace()]
    ours = [_folded(text[place]) for place in visible]
    theirs = [_folded(character) for token in tokens for character in token]
    if ours != theirs:
        tokens = [html.unescape(token) for token in tokens]  # Moses escapes characters for HTML
        theirs = [_folded(character) for token in tokens for character in token]
    blocks: Sequence[tuple[int, int, int]] = [(0, 0, len(ours))]
    if ours != theirs:
        blocks = difflib.SequenceMatcher(None, ours, theirs, False).get_matching_blocks()
        if 2 * sum(size for _, _, size in blocks) < len(theirs):
            raise ValueError(f"the tokenised text {tokenised[:60]!r} does not match the text {text[:60]!r}")
    place_of = {b + k: visible[a + k] for a, b, size in blocks for k in range(size)}
    found, at = [], 0
    for token in tokens:
        found.append([place_of[k] for k in range(at, at + len(token)) if k in place_of])
        at += len(token)
    return found


def _folded(character: str) -> str:
    return unicodedata.normalize("NFKC", character).casefold()
