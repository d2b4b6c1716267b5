"""Word links of sentence pairs, converted to links between tokens.

The words of a stream batch (data/words.py) are numbered consecutively: first those of the first pair's first text, then
those of its second text, of the next pair's first text, and so on. Text 2p + s is side s of pair p. A place is a
token's index in the stream batch.

Shape letters: P pairs, W words, T tokens that belong to a word, K links of words, Z links of tokens, N tokens,
M masked tokens, R masked tokens with a link.
"""

import re
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NoReturn

import numpy as np

from xscale.data.ragged import indices_within
from xscale.data.sequences import Example, Sequences
from xscale.data.stream_batch import Gather
from xscale.errors import UserError

Layout = list[list[int]]
"""The numbers of each sequence's texts. Text 2p + s is side s of pair p."""

_LINK = r"\d{1,9}-\d{1,9}"
_PHARAOH = re.compile(rf"\s*({_LINK}(\s+|$))*")


@dataclass(frozen=True)
class WordLinks:
    first: np.ndarray
    """Number of each text's first word, and W at the end [2 P + 1]."""
    links: np.ndarray
    """The number of each link's word in a pair's first text, and of its word in the second; no link twice [K, 2]."""
    is_word: np.ndarray
    """True for each word, False for a symbol, such as a punctuation mark [W]."""


@dataclass(frozen=True)
class WordTokens:
    places: np.ndarray
    """The places of all words' tokens, word by word, in the order of the text [T]."""
    starts: np.ndarray
    """The index in `places` at which each word begins [W + 1]."""

    def runs(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of these words' tokens, word by word, and the number of tokens of each word."""
        counts = self.starts[words + 1] - self.starts[words]
        return self.places[np.repeat(self.starts[words], counts) + indices_within(counts)], counts


def parse_links(pairs: list[Example], across: bool = False) -> WordLinks:
    """Return the word links of the pairs, without links between a word and a symbol. across: with them.

    Raises UserError for a link that is malformed or outside its sentences.
    """
    numbers: list[int] = []
    counts: list[int] = []
    for pair in pairs:
        if pair.links is None or not _PHARAOH.fullmatch(pair.links):
            _refuse(pair)
        ends = pair.links.replace("-", " ").split()
        numbers += map(int, ends)
        counts.append(len(ends) // 2)
    texts = [text for pair in pairs for text in pair.words or ()]
    sizes = np.array([len(text.is_word) for text in texts], dtype=np.int64).reshape(-1, 2)
    links = np.array(numbers, dtype=np.int64).reshape(-1, 2)
    pair_of = np.repeat(np.arange(len(pairs)), np.array(counts, dtype=np.int64))
    outside = (links >= sizes[pair_of]).any(axis=1)
    if outside.any():
        _refuse(pairs[pair_of[outside.argmax()]])
    first = np.concatenate([[0], np.cumsum(sizes)])
    links += first[:-1].reshape(-1, 2)[pair_of]
    is_word = np.concatenate([_NOTHING, *(text.is_word for text in texts)])
    if not across:
        ends_are_words = is_word[links].reshape(-1, 2)
        links = links[ends_are_words[:, 0] == ends_are_words[:, 1]]
    return WordLinks(first, _distinct(links, first[-1]), is_word)


def _distinct(links: np.ndarray, width: int) -> np.ndarray:
    """Return each row once, in order, like np.unique(links, axis=0), but ten times as fast. width: a number above all
    second columns."""
    cells = np.unique(links[:, 0] * width + links[:, 1])
    return np.stack(np.divmod(cells, max(width, 1)), axis=1)


_NOTHING = np.empty(0, dtype=bool)


def _refuse(pair: Example) -> NoReturn:
    remedy = "Write the shards again with `python -m data_tools.write_shards pairs ... --links F` or `--align`"
    if pair.links is None:
        raise UserError(f'record {pair.key!r} has no word links (links "" would mean that no word is linked). {remedy}')
    n, m = (len(text.is_word) for text in pair.words or ())
    wrong = next(
        link
        for link in pair.links.split()
        if not re.fullmatch(_LINK, link) or int(link.split("-")[0]) >= n or int(link.split("-")[1]) >= m
    )
    raise UserError(
        f"record {pair.key!r}: link {wrong!r} does not fit texts of {n} and {m} words; links are 0-based "
        f"`first-second` numbers of the words that xscale/data/words.py defines. {remedy}"
    )


def segments(pairs: list[Example], layout: Layout) -> list[list[tuple[Example, int]]]:
    """Return the (pair, side) of each sequence's texts, as `join_segments` reads them."""
    return [[(pairs[text // 2], text % 2) for text in sequence] for sequence in layout]


def word_tokens(
    pairs: list[Example], layout: Layout, sequences: Sequences, first: np.ndarray, keep: Literal["all", "first", "last"]
) -> WordTokens:
    """Return the places of each word's tokens; a word that was cut off has none. keep: which tokens of a word to
    return. first: the number of each text's first word, as in WordLinks."""
    texts = list(chain.from_iterable(layout))
    if not texts:
        return WordTokens(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    of_texts = [(pairs[text // 2].words or ())[text % 2] for text in texts]
    counts = [len(text.words) for text in of_texts]
    words = np.concatenate([text.words for text in of_texts]) + np.repeat(first[texts], counts)
    places = np.concatenate([text.tokens for text in of_texts]) + np.repeat(sequences.segment_starts, counts)
    order = np.lexsort((places, words))
    words, places = words[order], places[order]
    if keep != "all":
        side = {"prepend": -1} if keep == "first" else {"append": -1}
        at = np.flatnonzero(np.diff(words, **side))
        words, places = words[at], places[at]
    return WordTokens(places, np.searchsorted(words, np.arange(first[-1] + 1)))


def token_links(links: np.ndarray, tokens: WordTokens) -> np.ndarray:
    """Return all pairs of a token of a link's first word and a token of its second word; no pair twice [Z, 2]."""
    ours, n_ours = tokens.runs(links[:, 0])
    partner = np.repeat(links[:, 1], n_ours)
    theirs, n_theirs = tokens.runs(partner)
    # Two tokens may overlap several pairs of linked words, as in Chinese; they are one link.
    pairs = np.stack([np.repeat(ours, n_theirs), theirs], axis=1)
    return _distinct(pairs, int(pairs.max(initial=0)) + 1)


def linked_states(links: np.ndarray, masked: np.ndarray, tokens: int) -> tuple[np.ndarray, Gather]:
    """Return which of the `masked` tokens [M] have a link [R], and for each the sum of the states that it links to.

    The sums are rows of A^T H: H are the hidden states, and A[i, j] = 1 if (i, j) or (j, i) is a link. tokens: N.
    """
    row_of = np.full(tokens, -1, dtype=np.int64)
    row_of[masked] = np.arange(len(masked))
    i, j = np.concatenate([links, links[:, ::-1]]).T
    cells = np.sort((row_of[i] * tokens + j)[row_of[i] >= 0])
    counts = np.bincount(cells // max(tokens, 1), minlength=len(masked))
    linked = np.flatnonzero(counts)
    return linked, Gather.sums(cells % max(tokens, 1), counts[linked])
