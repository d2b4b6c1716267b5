"""The segmentation of text into words. It is a function of the text alone and does not depend on the tokenizer.

A run of letters, marks and digits is a word. Each character of a script that is written without spaces (Han, kana,
Thai, Lao, Khmer, Burmese) is a word, with its marks. Every other visible character is a symbol by itself, with its
marks; an emoji sequence is one symbol. Words and symbols of a text are numbered together: `l'homme` has three, namely
`l`, `'` and `homme`. Links between words, whole-word masks and word states all use these words.

words.txt has the class of every code point, with a line for each range of one class (tests/word_table.py wrote it
once); its hash is the version of the segmentation.

Shape letters: C characters of all texts, W words of one text, T tokens of words, N tokens of one text.
"""

import hashlib
from enum import IntEnum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xscale.data.ragged import indices_within

TABLE = Path(__file__).with_name("words.txt")


class Class(IntEnum):
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
def table() -> np.ndarray:
    """Return the class (letter, mark, digit, ...) of every Unicode code point, by its index, uint8."""
    firsts, names = zip(*(line.split() for line in TABLE.read_text(encoding="ascii").splitlines()), strict=True)
    classes = np.array([Class[name.upper()] for name in names], dtype=np.uint8)
    return np.repeat(classes, np.diff([int(first, 16) for first in firsts], append=0x110000))


VERSION = hashlib.sha256(TABLE.read_bytes()).hexdigest()[:16]
"""The version of the segmentation. Links count words, so links of another version mean other words."""


class Segmented(NamedTuple):
    """The words of some texts. Words and characters are numbered consecutively over all texts."""

    chars: np.ndarray
    """The offset of each text's first character, and the end of the last text [texts + 1]."""
    words: np.ndarray
    """The number of each text's first word, and the end of the last text [texts + 1]."""
    word_of: np.ndarray
    """Number of each character's word, -1 for a character that belongs to no word [C]."""
    is_word: np.ndarray
    """True for each word, False for each symbol, over all texts."""


def segment(texts: list[str]) -> Segmented:
    """Return the words of all texts, found by a few passes of numpy over their characters."""
    chars = np.cumsum([0, *map(len, texts)])
    codes = np.frombuffer("\n".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    c = table()[codes]
    place = np.arange(len(c))

    def latest(which: np.ndarray) -> np.ndarray:
        """Return for each place the last place at or before it where `which` is True; -1 if there is none."""
        return np.maximum.accumulate(np.where(which, place, -1))

    # A mark or a format character belongs to the last character that is neither.
    base = latest((c != Class.MARK) & (c != Class.FORMAT) & (c != Class.JOINER) & (c != Class.OWN_MARK))
    of_base = np.where(base >= 0, c[base], np.uint8(Class.BREAK))
    symbol = (of_base == Class.SYMBOL) | (of_base == Class.TONE)
    own = (of_base == Class.OWN) | (of_base == Class.OWN_PUNCTUATION)
    own |= ~symbol & (latest(c == Class.OWN_MARK) > base)
    run = ~symbol & ~own & ((of_base == Class.LETTER) | (latest(c == Class.MARK) > base))
    before_run, before_symbol = (np.concatenate([[False], kind[:-1]]) for kind in (run, symbol))
    inside = run | own | symbol
    before_inside = np.concatenate([[False], inside[:-1]])
    joined = np.concatenate([[False], c[:-1] == Class.JOINER]) & before_symbol
    starts = np.select(
        [c == Class.LETTER, c == Class.MARK, c == Class.OWN_MARK, c == Class.SYMBOL, c == Class.TONE],
        [~before_run, ~before_inside, before_run | ~before_inside, ~joined, ~before_symbol],
        (c == Class.OWN) | (c == Class.OWN_PUNCTUATION),
    )
    word_of = np.where(inside, np.cumsum(starts) - 1, -1)
    at = np.flatnonzero(starts)
    is_word = ~np.isin(c[at], (Class.SYMBOL, Class.TONE, Class.OWN_PUNCTUATION))
    # Remove the line breaks that were put between the texts.
    breaks = chars[1:-1] + np.arange(len(chars) - 2)
    texts_of_words = np.searchsorted(at, chars + np.arange(len(chars)))
    return Segmented(chars, texts_of_words, np.delete(word_of, breaks), is_word)


class TokenWords(NamedTuple):
    """The words of one text, and the tokens that overlap them."""

    of_token: np.ndarray
    """Number of each token's first word; -1 for a token that overlaps no word, such as lone white space [N]."""
    tokens: np.ndarray
    """Indices of the words' tokens, ascending; a token that several words share occurs once for each word [T]."""
    words: np.ndarray
    """For each of `tokens`, the number of its word [T]."""
    is_word: np.ndarray
    """True for each word, False for each symbol of the text [W]."""

    def cut(self, end: int, start: int = 0) -> "TokenWords":
        """Return the words with only the tokens from `start` to `end` - 1, numbered from 0. No word is removed."""
        kept = (start <= self.tokens) & (self.tokens < end)
        return self._replace(
            of_token=self.of_token[start:end], tokens=self.tokens[kept] - start, words=self.words[kept]
        )

    def borders(self) -> list[int]:
        """Return the tokens, except the first, before which the text can be cut without cutting a word."""
        tokens, words = len(self.of_token), len(self.is_word)
        first, last = np.full(words, tokens), np.full(words, -1)
        np.minimum.at(first, self.words, self.tokens)
        np.maximum.at(last, self.words, self.tokens)
        has_tokens = last >= 0
        opened = np.bincount(first[has_tokens] + 1, minlength=tokens + 1)
        closed = np.bincount(last[has_tokens] + 1, minlength=tokens + 1)
        inside = np.cumsum(opened - closed)
        return (np.flatnonzero(inside[1:tokens] == 0) + 1).tolist()


def join_words(parts: list[TokenWords]) -> TokenWords:
    """Return the words of one text that consists of several texts laid end to end."""
    tokens = np.cumsum([0, *(len(part.of_token) for part in parts)])
    words = np.cumsum([0, *(len(part.is_word) for part in parts)])
    columns = zip(parts, tokens.tolist(), words.tolist(), strict=False)
    moved = [
        (np.where(p.of_token < 0, -1, p.of_token + w), p.tokens + t, p.words + w, p.is_word) for p, t, w in columns
    ]
    return TokenWords(*map(np.concatenate, zip(*moved, strict=True)))


def token_words(texts: list[str], counts: np.ndarray, spans: np.ndarray) -> list[TokenWords]:
    """Return the words of each text, and the tokens that overlap them.

    counts: number of tokens of each text. spans: first character and end of every token in its text [tokens, 2]. A
    token belongs to every word and symbol of which it has a character; but if it has a character of a word, it does not
    belong to symbols (Unigram tokenizers have tokens such as `en.`).
    """
    found = segment([*texts, "."])  # so that there is at least one word
    word_of, is_word = found.word_of, found.is_word
    counts = np.append(counts, 0)
    place, none = np.arange(len(word_of)), word_of < 0
    here = np.minimum.accumulate(np.where(none, len(word_of), place)[::-1])[::-1]
    before = np.maximum.accumulate(np.where(none, -1, place))
    text_of = np.repeat(np.arange(len(counts)), counts)
    start, end = (spans + found.chars[text_of, None]).T
    inside = here[start] < end
    first = np.where(inside, word_of[here[start]], 0)
    last = np.where(inside, word_of[before[end - 1]], -1)
    tokens = np.repeat(np.arange(len(spans)), last - first + 1)
    words = np.repeat(first, last - first + 1) + indices_within(last - first + 1)
    up_to = np.concatenate([[0], np.cumsum(is_word)])
    some_word = up_to[last + 1] > up_to[first]
    kept = is_word[words] | ~some_word[tokens]
    tokens, words = tokens[kept], words[kept]
    words -= found.words[text_of[tokens]]
    of_token = np.full(len(spans), -1)
    of_token[tokens[::-1]] = words[::-1]
    ends = np.cumsum(counts)
    borders = np.searchsorted(tokens, np.concatenate([[0], ends]))
    tokens -= (ends - counts)[text_of[tokens]]
    return [
        TokenWords(of_token[end - n : end], tokens[a:b], words[a:b], is_word[first_word:next_text])
        for n, end, (a, b), (first_word, next_text) in zip(
            counts.tolist(), ends.tolist(), pairwise(borders.tolist()), pairwise(found.words.tolist()), strict=True
        )
    ][:-1]


def stands_alone(text: str) -> bool:
    """Return True if the text begins with a character of a script that is written without spaces."""
    return bool(text) and class_of(text[0]) in (Class.OWN, Class.OWN_PUNCTUATION)


@lru_cache(maxsize=1 << 12)
def class_of(character: str) -> int:
    return int(table()[ord(character)])


def split(texts: list[str]) -> list[tuple[list[str], np.ndarray]]:
    """Return the words and symbols of each text in order, and for each of them True for a word, False for a symbol."""
    found = segment(texts)
    inside = np.flatnonzero(found.word_of >= 0)
    starts = inside[np.flatnonzero(np.diff(found.word_of[inside], prepend=-1))]
    ends = inside[np.flatnonzero(np.diff(found.word_of[inside], append=-1))] + 1
    made = []
    for text, at, (first, end) in zip(texts, found.chars.tolist(), pairwise(found.words.tolist()), strict=False):
        spans = zip((starts[first:end] - at).tolist(), (ends[first:end] - at).tolist(), strict=True)
        made.append(([text[a:b] for a, b in spans], found.is_word[first:end]))
    return made
