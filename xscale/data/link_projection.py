"""Converts links between words of another tokenisation to links between words of data/words.py.

Two words of the two tokenisations correspond if they have a character in common.
"""

import difflib
import html
import re
import unicodedata
from itertools import product

import numpy as np

from xscale.data.words import segment_into_words_and_symbols

LINKS = re.compile(r"\s*([0-9]{1,9}-[0-9]{1,9}(\s+|$))*")
FIRST_WORD = re.compile("(?<![0-9])0(?![0-9])")
"""Matches the number of a first word in links whose words are counted from 0."""
FEWEST_TO_JUDGE = 1000
"""The fewest pairs with links that show whether words are counted from 0. Of so many pairs, some have a link of a first
word."""
_LINK_WORD = re.compile(r"[^ \t\n]+")

Link = tuple[int, int]
"""The number of a word in the first text, and of a word in the second text, from 0."""


def split_at_spaces_and_tabs(text: str) -> list[str]:
    """Return the parts of a text between spaces and tabs, which are the words that an aligner's links number.

    fast_align and Moses split a text only there. A no-break space (U+00A0, U+202F) or an ideographic space (U+3000) is
    part of a word for them, unlike for Python's str.split.
    """
    return _LINK_WORD.findall(text)


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
        f"the word link {wrong[0]!r} is wrong. The two sentences have {word_counts[0]} and {word_counts[1]} words, so "
        f"a link must be i-j, with i below {word_counts[0]} and j below {word_counts[1]}"
    )


def format_pharaoh(links: list[Link]) -> str:
    """Return links in Pharaoh form, such as "0-0 1-2"."""
    return " ".join(f"{i}-{j}" for i, j in links)


def project_links_and_count_dropped(
    links: str,
    texts: tuple[str, ...],
    tokenised: tuple[str, ...] | None = None,
    links_number_xscale_words: bool = False,
) -> tuple[str, int]:
    """Return links between words of data/words.py, and the number of links that were dropped, such as those between a
    word and a symbol. links: the links to convert, in Pharaoh form.

    tokenised: the texts whose words, divided by split_at_spaces_and_tabs, `links` numbers; None: the texts themselves.
    links_number_xscale_words: True if `links` numbers words of data/words.py already. Raises ValueError.
    """
    segmented = segment_into_words_and_symbols(list(texts))
    is_word = list[np.ndarray]()
    words = list[list[list[int]]]()
    """For each text and each of the words that `links` numbers: the words of the text that this word overlaps."""
    for side, text in enumerate(texts):
        first_word = segmented.words[side]
        is_word.append(segmented.is_word[first_word : segmented.words[side + 1]])
        if links_number_xscale_words:
            words.append([[number] for number in range(len(is_word[side]))])
        else:
            word_of_char = segmented.word_of[segmented.chars[side] : segmented.chars[side + 1]] - first_word
            words.append(overlapped_words(text, tokenised[side] if tokenised else text, word_of_char))
    kept = set[Link]()
    dropped = 0
    for i, j in parse_pharaoh(links, (len(words[0]), len(words[1]))):
        fitting = [(a, b) for a, b in product(words[0][i], words[1][j]) if is_word[0][a] == is_word[1][b]]
        kept.update(fitting)
        if not fitting:
            dropped += 1
    return format_pharaoh(sorted(kept)), dropped


def overlapped_words(text: str, tokenised: str, word_of_char: np.ndarray) -> list[list[int]]:
    """Return the numbers of the words of `text` that each word of `tokenised` overlaps. word_of_char: the number of the
    word to which each character of `text` belongs; negative if it belongs to none."""
    words = list[list[int]]()
    for characters in character_indices_of_words(text, tokenised):
        numbers = word_of_char[characters]
        words.append(np.unique(numbers[numbers >= 0]).tolist())
    return words


def character_indices_of_words(text: str, tokenised: str) -> list[list[int]]:
    """Return the indices in `text` of the characters of each word of `tokenised`. Raises ValueError if less than half
    of the characters match."""
    if tokenised is text:
        return [list(range(*match.span())) for match in _LINK_WORD.finditer(text)]
    visible = [place for place, character in enumerate(text) if not character.isspace()]
    text_characters = [_nfkc_casefolded(text[place]) for place in visible]
    tokens = split_at_spaces_and_tabs(tokenised)
    token_characters = _flat_folded_characters(tokens)
    if text_characters != token_characters:
        tokens = list(map(html.unescape, tokens))  # Moses escapes characters for HTML
        token_characters = _flat_folded_characters(tokens)
    place_of = dict(enumerate(visible))
    """Number of a character of `tokens`, without white space -> its index in `text`."""
    if text_characters != token_characters:
        place_of = {}
        for block in difflib.SequenceMatcher(None, text_characters, token_characters, False).get_matching_blocks():
            for k in range(block.size):
                place_of[block.b + k] = visible[block.a + k]
    if 2 * len(place_of) < len(token_characters):
        raise ValueError(
            f"less than half of the characters of the tokenised text {tokenised[:60]!r} are in the pair's text "
            f"{text[:60]!r}, so word links of the tokenised text do not fit the pair"
        )
    places_of_tokens = list[list[int]]()
    character_number = 0
    for token in tokens:
        places_of_token = list[int]()
        for character in token:
            if not character.isspace():
                if character_number in place_of:
                    places_of_token.append(place_of[character_number])
                character_number += 1
        places_of_tokens.append(places_of_token)
    return places_of_tokens


def _flat_folded_characters(tokens: list[str]) -> list[str]:
    """Return the folded form of each character of all tokens, except white space."""
    return [_nfkc_casefolded(character) for character in "".join(tokens) if not character.isspace()]


def _nfkc_casefolded(character: str) -> str:
    return unicodedata.normalize("NFKC", character).casefold()
