"""Word links of sentence pairs, converted to links between tokens.

The words of a stream batch (data/words.py) are numbered consecutively: those of the first pair's first text, of its
second text, of the second pair's first text, and so on. Text s of pair p has the number 2p + s. Tokens are indices in
the stream batch.

Shape letters: P pairs, W words, T tokens that belong to a word, K links of words, Z links of tokens, N tokens,
M masked tokens, R masked tokens with a link.
"""

from itertools import chain
from typing import Literal

import numpy as np

from xscale.data.link_projection import Link, parse_pharaoh
from xscale.data.ragged import NO_NUMBERS, Ragged, distinct_pairs
from xscale.data.sequences import Example, Segment, Sequences
from xscale.data.stream_batch import Gather
from xscale.errors import UserError


def links_and_is_word_of_each_end(pairs: list[Example]) -> tuple[np.ndarray, np.ndarray]:
    """Return the two words of each link, one of a pair's first text and one of its second text [K, 2], and for each of
    the two False if it is a symbol, such as a punctuation mark, otherwise True [K, 2]. No link occurs twice.

    Raises UserError for a pair without links, and for a link that is malformed or outside of its sentences.
    """
    links = list[Link]()
    is_word_of_texts = [np.empty(0, dtype=bool)]
    start = 0
    for pair in pairs:
        assert pair.words is not None, "word links need words: set `words=lambda options: True` in Objective(...)"
        first, second = pair.words
        second_start = start + len(first.is_word)
        for i, j in parse_pair_links(pair, (len(first.is_word), len(second.is_word))):
            links.append((start + i, second_start + j))
        start = second_start + len(second.is_word)
        is_word_of_texts += [first.is_word, second.is_word]
    links_K2 = np.array(links, dtype=np.int64).reshape(-1, 2)
    links_K2 = distinct_pairs(links_K2[:, 0], links_K2[:, 1])
    return links_K2, np.concatenate(is_word_of_texts)[links_K2]


def parse_pair_links(pair: Example, word_counts: tuple[int, int]) -> list[Link]:
    """Return the links of a pair. word_counts: the numbers of words of its texts. Raises UserError."""
    remedy = "Write the shards again by `xscale data write_shards pairs ... --align` (or `--links FILE`)"
    if pair.links is None:
        raise UserError(
            f"record {pair.key!r}: the field `links` is missing; a pair without linked words needs an empty field. "
            f"{remedy}"
        )
    try:
        return parse_pharaoh(pair.links, word_counts)
    except ValueError as error:
        raise UserError(
            f"record {pair.key!r}: {error}. A link `i-j` joins word i of the first sentence and word j of the second, "
            f"counted from 0 (xscale/data/words.py divides text into words). {remedy}"
        ) from None


def segments_of_texts(pairs: list[Example], text_numbers_of_sequences: list[list[int]]) -> list[list[Segment]]:
    """Return the segments of each sequence, for join_segments. text_numbers_of_sequences: those of its texts."""
    sequences = []
    for texts in text_numbers_of_sequences:
        sequences.append([(pairs[text // 2], text % 2) for text in texts])
    return sequences


def word_tokens(
    pairs: list[Example],
    text_numbers_of_sequences: list[list[int]],
    sequences: Sequences,
    keep: Literal["all", "first", "last"],
) -> Ragged:
    """Return the tokens of each word. A word that was cut off has none. sequences: made from the result of
    segments_of_texts, where each text of the pairs occurs once. keep: return all tokens of a word, only the first or
    only the last one."""
    texts = list(chain.from_iterable(text_numbers_of_sequences))
    words_of_texts = [NO_NUMBERS]
    tokens_of_texts = [NO_NUMBERS]
    counts = np.zeros(len(texts), dtype=np.int64)
    word_counts = np.zeros(len(texts), dtype=np.int64)
    for i, text in enumerate(texts):
        pair_words = pairs[text // 2].words
        assert pair_words is not None, "word links need words: set `words=lambda options: True` in Objective(...)"
        text_words = pair_words[text % 2]
        words_of_texts.append(text_words.words)
        tokens_of_texts.append(text_words.tokens)
        counts[i] = len(text_words.words)
        word_counts[text] = len(text_words.is_word)
    first_words = np.cumsum(word_counts) - word_counts
    words = np.concatenate(words_of_texts) + np.repeat(first_words[np.array(texts, dtype=np.int64)], counts)
    tokens = np.concatenate(tokens_of_texts) + np.repeat(sequences.text_starts, counts)

    in_order = np.lexsort((tokens, words))
    words = words[in_order]
    tokens = tokens[in_order]
    if keep != "all":
        # `words` is sorted. With -1 before it, a difference to the number before is not 0 at the first token of each
        # word; with -1 behind it, a difference to the next number is not 0 at the last token of each word.
        before_or_after = {"prepend": -1} if keep == "first" else {"append": -1}
        kept = np.flatnonzero(np.diff(words, **before_or_after))
        words = words[kept]
        tokens = tokens[kept]
    return Ragged(tokens, np.bincount(words, minlength=int(word_counts.sum())))


def token_links(word_links: np.ndarray, tokens_of_words: Ragged) -> np.ndarray:
    """Return each pair of a token of a link's first word and a token of its second word. No pair occurs twice [Z, 2].
    word_links: see links_and_is_word_of_each_end."""
    first = tokens_of_words.select_lists(word_links[:, 0])
    second = tokens_of_words.select_lists(np.repeat(word_links[:, 1], first.lengths))
    # A token may belong to several words, as in Chinese. So several links of words may give the same pair of tokens.
    return distinct_pairs(np.repeat(first.values, second.lengths), second.values)


def gather_of_tokens_linked_to_masked(
    links_Z2: np.ndarray, masked: np.ndarray, token_count: int
) -> tuple[np.ndarray, Gather]:
    """Return the masked tokens that have a link, as indices in `masked` [R], and for each of them the sum of the states
    of the tokens to which it is linked.

    The sums are rows of A^T H: H has the hidden states, and A[i, j] = 1 if (i, j) or (j, i) is a link. links_Z2: the
    links of tokens [Z, 2]. masked: the masked tokens [M]. token_count: N.
    """
    row_of_token = np.full(token_count, -1, dtype=np.int64)
    row_of_token[masked] = np.arange(len(masked))
    i = np.concatenate([links_Z2[:, 0], links_Z2[:, 1]])
    j = np.concatenate([links_Z2[:, 1], links_Z2[:, 0]])
    is_masked = row_of_token[i] >= 0
    ones = distinct_pairs(row_of_token[i[is_masked]], j[is_masked])
    counts = np.bincount(ones[:, 0], minlength=len(masked))
    linked = np.flatnonzero(counts)
    return linked, Gather.sums(ones[:, 1], counts[linked])
