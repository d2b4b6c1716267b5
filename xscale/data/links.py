"""Word links of sentence pairs, as links between places of tokens.

The words of a piece are numbered through: those of the first pair's first text, of its second, of the next pair's
first, and so on, as `links` counts them (whitespace words). Text 2p + s is side s of pair p. A place is a token's index
among the piece's.

Shape letters: P pairs, W words, T tokens that belong to a word, K links of words, Z links of tokens, N tokens,
M masked tokens, R masked tokens with a link.
"""

import re
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NoReturn

import numpy as np

from xscale.data.piece import Reads
from xscale.data.sequences import Example, Sequences, offsets
from xscale.errors import UserError

Layout = list[list[int]]
"""The texts of each sequence, by number."""

_LINK = r"\d{1,9}-\d{1,9}"
_PHARAOH = re.compile(rf"\s*({_LINK}(\s+|$))*")


@dataclass(frozen=True)
class WordLinks:
    first: np.ndarray
    """Number of each text's first word [2 P], and W."""
    links: np.ndarray
    """Linked words, of a first text and of its second; each link once [K, 2]."""


@dataclass(frozen=True)
class WordTokens:
    places: np.ndarray
    """Word by word, in the order of the text [T]."""
    starts: np.ndarray
    """Where in `places` each word begins [W + 1]."""

    def runs(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All places of each of some words, one word after the other, and how many each has."""
        counts = self.starts[words + 1] - self.starts[words]
        return self.places[np.repeat(self.starts[words], counts) + offsets(counts)], counts


def read_links(pairs: list[Example]) -> WordLinks:
    """Raises UserError for a link that is malformed or outside its sentences."""
    numbers: list[int] = []
    links_of = []
    for pair in pairs:
        if pair.links is None or not _PHARAOH.fullmatch(pair.links):
            _refuse(pair)
        found = list(map(int, pair.links.replace("-", " ").split()))
        numbers += found
        links_of.append(len(found) // 2)
    sizes = np.array([pair.word_counts for pair in pairs], dtype=np.int64).reshape(-1, 2)
    links = np.array(numbers, dtype=np.int64).reshape(-1, 2)
    pair_of = np.repeat(np.arange(len(pairs)), np.array(links_of, dtype=np.int64))
    outside = (links >= sizes[pair_of]).any(axis=1)
    if outside.any():
        _refuse(pairs[pair_of[outside.argmax()]])
    first = np.concatenate([[0], np.cumsum(sizes)])
    return WordLinks(first, np.unique(links + first[:-1].reshape(-1, 2)[pair_of], axis=0))


def _refuse(pair: Example) -> NoReturn:
    remedy = "Write the shards again with `python -m data_tools.write_shards pairs ... --links F` or `--align`"
    if pair.links is None:
        raise UserError(f'record {pair.key!r} has no word links ("" would say that no word has one). {remedy}')
    assert pair.word_counts is not None
    n, m = pair.word_counts
    wrong = next(
        link
        for link in pair.links.split()
        if not re.fullmatch(_LINK, link) or int(link.split("-")[0]) >= n or int(link.split("-")[1]) >= m
    )
    raise UserError(
        f"record {pair.key!r}: link {wrong!r} does not fit texts of {n} and {m} whitespace words; links are 0-based "
        f"`first-second` word numbers of the texts as they stand, not of another tokenisation. {remedy}"
    )


def segments(pairs: list[Example], layout: Layout) -> list[list[tuple[Example, int]]]:
    """The layout as `join_segments` wants it."""
    return [[(pairs[text // 2], text % 2) for text in sequence] for sequence in layout]


def word_tokens(
    pairs: list[Example],
    layout: Layout,
    sequences: Sequences,
    first: np.ndarray,
    keep: Literal["all", "first", "last"],
) -> WordTokens:
    """Places of every token of each word, or only of its first or last one. A word that was cut off has none."""
    if not pairs:
        return WordTokens(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    texts = list(chain.from_iterable(layout))
    numbers = [(pairs[text // 2].words or ())[text % 2] for text in texts]
    flat = np.array(list(chain.from_iterable(numbers)), dtype=np.int64)
    words = (np.repeat(first[texts], [len(n) for n in numbers]) + flat)[flat >= 0]
    assert sequences.words is not None
    places = np.flatnonzero(sequences.words >= 0)
    order = np.argsort(words, kind="stable")
    words, places = words[order], places[order]
    if keep != "all":
        side = {"prepend": -1} if keep == "first" else {"append": -1}
        at = np.flatnonzero(np.diff(words, **side))
        words, places = words[at], places[at]
    return WordTokens(places, np.searchsorted(words, np.arange(first[-1] + 1)))


def token_links(links: np.ndarray, tokens: WordTokens) -> np.ndarray:
    """Every pair of a token of one word and a token of the other, for each linked pair of words [Z, 2]."""
    ours, n_ours = tokens.runs(links[:, 0])
    partner = np.repeat(links[:, 1], n_ours)
    theirs, n_theirs = tokens.runs(partner)
    return np.stack([np.repeat(ours, n_theirs), theirs], axis=1)


def linked_states(links: np.ndarray, masked: np.ndarray, tokens: int) -> tuple[np.ndarray, Reads]:
    """Which of the masked tokens [M] have a link [R], and the sum of the states that each is linked with: A^T H there.

    A[i, j] = 1 where (i, j) or (j, i) is a link [tokens, tokens]; a state's places are in ascending order.
    """
    row_of = np.full(tokens, -1, dtype=np.int64)
    row_of[masked] = np.arange(len(masked))
    i, j = np.concatenate([links, links[:, ::-1]]).T
    cells = np.sort((row_of[i] * tokens + j)[row_of[i] >= 0])
    counts = np.bincount(cells // max(tokens, 1), minlength=len(masked))
    linked = np.flatnonzero(counts)
    return linked, Reads(cells % max(tokens, 1), counts[linked])
