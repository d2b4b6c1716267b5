"""The segmentation of text into words. It depends on the text alone, not on the tokenizer.

A run of letters, marks and digits is a word. Each character of a script that is written without spaces (Han, kana,
Thai, Lao, Khmer, Burmese) is a word, with its marks. Every other visible character is a symbol by itself, with its
marks; an emoji sequence is one symbol. Words and symbols of a text are numbered together: `l'homme` has three, namely
`l`, `'` and `homme`. Links between words, whole-word masks and word states all use these words.

words.txt has the class of every code point: a line is the first code point of a range, and the class of the range.
tests/word_table.py has written it. Its hash is the version of the segmentation.

Shape letters: C characters of all texts, W words of one text, T tokens of words, N tokens of one text.
"""

import hashlib
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xscale.data.ragged import concatenated_ranges

TABLE = Path(__file__).with_name("words.txt")


class Class(IntEnum):
    """The classes of characters."""

    BREAK = 0
    """White space, controls, and U+200B."""
    LETTER = 1
    MARK = 2
    FORMAT = 3
    """A character without width, which belongs to the character before it."""
    JOINER = 4
    """U+200D, which joins the symbols beside it into one."""
    OWN = 5
    """A character of a script that is written without spaces."""
    OWN_MARK = 6
    OWN_PUNCTUATION = 7
    SYMBOL = 8
    TONE = 9
    """The class of skin tones of emojis."""


@lru_cache(maxsize=1)
def character_classes() -> np.ndarray:
    """Return the class of each Unicode code point, uint8 [0x110000]."""
    firsts = list[int]()
    classes = list[int]()
    for line in TABLE.read_text(encoding="ascii").splitlines():
        first, name = line.split()
        firsts.append(int(first, 16))
        classes.append(Class[name.upper()])
    return np.repeat(np.array(classes, dtype=np.uint8), np.diff(firsts, append=0x110000))


VERSION = hashlib.sha256(TABLE.read_bytes()).hexdigest()[:16]
"""The version of the segmentation. Links are numbers of words, so they are valid for one version only."""


class Segmented(NamedTuple):
    """The words and symbols of some texts. Words and characters are numbered consecutively over all texts."""

    chars: np.ndarray
    """The offset of each text's first character, and the end of the last text [texts + 1]."""
    words: np.ndarray
    """The number of each text's first word, and the end of the last text [texts + 1]."""
    word_of: np.ndarray
    """Number of each character's word, -1 for a character that belongs to no word [C]."""
    is_word: np.ndarray
    """True for each word, False for each symbol, over all texts."""


def segment_into_words_and_symbols(texts: list[str]) -> Segmented:
    """Return the words and symbols of all texts."""
    chars = np.cumsum([0, *map(len, texts)])
    codes = np.frombuffer("\n".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    c = character_classes()[codes]
    place = np.arange(len(c))

    def latest(which: np.ndarray) -> np.ndarray:
        """Return for each index i the last index j <= i at which `which` is True; -1 if there is none."""
        return np.maximum.accumulate(np.where(which, place, -1))

    # A mark or a format character belongs to the last character before it that is neither.
    base = latest((c != Class.MARK) & (c != Class.FORMAT) & (c != Class.JOINER) & (c != Class.OWN_MARK))
    base_class = np.where(base >= 0, c[base], np.uint8(Class.BREAK))
    symbol = (base_class == Class.SYMBOL) | (base_class == Class.TONE)
    own = (base_class == Class.OWN) | (base_class == Class.OWN_PUNCTUATION)
    own |= ~symbol & (latest(c == Class.OWN_MARK) > base)
    run = ~symbol & ~own & ((base_class == Class.LETTER) | (latest(c == Class.MARK) > base))
    inside = run | own | symbol
    before_run = _shift_right(run)
    before_symbol = _shift_right(symbol)
    before_inside = _shift_right(inside)
    starts_of = {
        Class.LETTER: ~before_run,
        Class.MARK: ~before_inside,
        Class.OWN_MARK: before_run | ~before_inside,
        Class.SYMBOL: ~(_shift_right(c == Class.JOINER) & before_symbol),
        Class.TONE: ~before_symbol,
    }
    """For each class, True at each place where a character of the class would begin a word or symbol."""
    always = (c == Class.OWN) | (c == Class.OWN_PUNCTUATION)
    starts = np.select([c == kind for kind in starts_of], list(starts_of.values()), always)
    word_of = np.where(inside, np.cumsum(starts) - 1, -1)
    at = np.flatnonzero(starts)
    is_word = ~np.isin(c[at], (Class.SYMBOL, Class.TONE, Class.OWN_PUNCTUATION))
    # Remove the line breaks between the texts.
    breaks = chars[1:-1] + np.arange(len(chars) - 2)
    texts_of_words = np.searchsorted(at, chars + np.arange(len(chars)))
    return Segmented(chars, texts_of_words, np.delete(word_of, breaks), is_word)


def _shift_right(which: np.ndarray) -> np.ndarray:
    """Return `which` moved by one place to the right, with False at the beginning."""
    return np.concatenate([[False], which[:-1]])


class TokenWords(NamedTuple):
    """The words and symbols of one text, and the tokens that overlap them. Words and symbols are numbered together, and
    the fields call both of them words."""

    word_of_token: np.ndarray
    """Number of the first word that each token overlaps; -1 for a token that overlaps no word, such as white space
    alone [N]."""
    tokens: np.ndarray
    """Indices of the tokens that belong to words, in ascending order. A token that several words share occurs once for
    each word [T]."""
    words: np.ndarray
    """For each of `tokens`, the number of its word [T]."""
    is_word: np.ndarray
    """True for each word, False for each symbol of the text [W]."""

    def select_tokens(self, start: int, end: int) -> "TokenWords":
        """Return the words with only the tokens `start` to `end` - 1, which are numbered from 0 then. All words stay,
        also those without tokens."""
        kept = (start <= self.tokens) & (self.tokens < end)
        return self._replace(
            word_of_token=self.word_of_token[start:end], tokens=self.tokens[kept] - start, words=self.words[kept]
        )

    def tokens_to_cut_before(self) -> list[int]:
        """Return the indices of the tokens before which the text can be cut without dividing a word, except 0."""
        tokens = len(self.word_of_token)
        words = len(self.is_word)
        first = np.full(words, tokens)
        last = np.full(words, -1)
        np.minimum.at(first, self.words, self.tokens)
        np.maximum.at(last, self.words, self.tokens)
        has_tokens = last >= 0
        opened = np.bincount(first[has_tokens] + 1, minlength=tokens + 1)
        closed = np.bincount(last[has_tokens] + 1, minlength=tokens + 1)
        inside = np.cumsum(opened - closed)
        return (np.flatnonzero(inside[1:tokens] == 0) + 1).tolist()


def join_words(parts: list[TokenWords]) -> TokenWords:
    """Return the words of the text that several texts form, one after the other. parts: the words of each text."""
    word_of_token = list[np.ndarray]()
    tokens = list[np.ndarray]()
    words = list[np.ndarray]()
    first_token = 0
    first_word = 0
    for part in parts:
        word_of_token.append(np.where(part.word_of_token < 0, -1, part.word_of_token + first_word))
        tokens.append(part.tokens + first_token)
        words.append(part.words + first_word)
        first_token += len(part.word_of_token)
        first_word += len(part.is_word)
    is_word = np.concatenate([part.is_word for part in parts])
    return TokenWords(np.concatenate(word_of_token), np.concatenate(tokens), np.concatenate(words), is_word)


def token_words(texts: list[str], token_counts: np.ndarray, spans: np.ndarray) -> list[TokenWords]:
    """Return the words and symbols of each text, and the tokens that overlap them.

    token_counts: number of tokens of each text. spans: first character and end of every token in its text [tokens, 2].
    A token belongs to every word and symbol of which it has a character; but if it has a character of a word, it does
    not belong to symbols (Unigram tokenizers have tokens such as `en.`).
    """
    segmented = segment_into_words_and_symbols([*texts, "."])  # so that there is at least one symbol
    text_of = np.repeat(np.arange(len(token_counts)), token_counts)
    tokens, words = _pairs_of_token_and_word(segmented, spans + segmented.chars[text_of, None])
    words -= segmented.words[text_of[tokens]]
    word_of_token = np.full(len(spans), -1)
    word_of_token[tokens[::-1]] = words[::-1]
    token_borders = np.concatenate([[0], np.cumsum(token_counts)])
    overlap_borders = np.searchsorted(tokens, token_borders)
    tokens -= token_borders[text_of[tokens]]
    words_of_tokens = np.split(word_of_token, token_borders[1:-1].tolist())
    overlapping = np.split(tokens, overlap_borders[1:-1].tolist())
    overlapped = np.split(words, overlap_borders[1:-1].tolist())
    is_word = np.split(segmented.is_word, segmented.words[1:-1].tolist())[: len(token_counts)]
    return list(map(TokenWords, words_of_tokens, overlapping, overlapped, is_word))


def _pairs_of_token_and_word(segmented: Segmented, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of a token and a word to which the token belongs, in ascending order, as two arrays: the index
    of the token, and the number of the word. spans: first character and end of every token, over all texts [tokens,
    2]."""
    start, end = spans.T
    place = np.arange(len(segmented.word_of))
    outside = segmented.word_of < 0
    next_inside = np.minimum.accumulate(np.where(outside, len(place), place)[::-1])[::-1]
    last_inside = np.maximum.accumulate(np.where(outside, -1, place))
    has_word = next_inside[start] < end
    first = np.where(has_word, segmented.word_of[next_inside[start]], 0)
    last = np.where(has_word, segmented.word_of[last_inside[end - 1]], -1)
    counts = last - first + 1
    tokens = np.repeat(np.arange(len(spans)), counts)
    words = np.repeat(first, counts) + concatenated_ranges(counts)
    # A token that belongs to a word does not belong to symbols.
    words_before = np.concatenate([[0], np.cumsum(segmented.is_word)])
    has_real_word = words_before[last + 1] > words_before[first]
    kept = segmented.is_word[words] | ~has_real_word[tokens]
    return tokens[kept], words[kept]


def begins_with_unspaced_script(text: str) -> bool:
    """Return True if the text begins with a character of a script that is written without spaces."""
    return bool(text) and character_class(text[0]) in (Class.OWN, Class.OWN_PUNCTUATION)


@lru_cache(maxsize=1 << 12)
def character_class(character: str) -> int:
    return int(character_classes()[ord(character)])


def split_words_and_symbols(texts: list[str]) -> list[tuple[list[str], np.ndarray]]:
    """Return for each text its words and symbols in order, and an array that is True for each word and False for each
    symbol."""
    segmented = segment_into_words_and_symbols(texts)
    inside = np.flatnonzero(segmented.word_of >= 0)
    word_of = segmented.word_of[inside]
    starts = inside[np.flatnonzero(np.diff(word_of, prepend=-1))].tolist()
    ends = (inside[np.flatnonzero(np.diff(word_of, append=-1))] + 1).tolist()
    first_chars = segmented.chars.tolist()
    result = list[tuple[list[str], np.ndarray]]()
    for text, char, (first, end) in zip(texts, first_chars, pairwise(segmented.words.tolist()), strict=False):
        pieces = list[str]()
        for word in range(first, end):
            pieces.append(text[starts[word] - char : ends[word] - char])
        result.append((pieces, segmented.is_word[first:end]))
    return result
