"""The words of texts, as the tools need them: their strings, and links that number the words of a tokenised text."""

import difflib
import html
import unicodedata
from itertools import pairwise

import numpy as np

from xscale.data.link_projection import (
    LINK_WORD,
    Link,
    characters_between_spaces,
    format_pharaoh,
    parse_pharaoh,
    project_links,
)
from xscale.data.words import segment_into_words_and_symbols


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


def drop_links_of_words_and_symbols(links: str, texts: tuple[str, ...]) -> str:
    """Return the links of a pair without those between a word and a symbol. links: links between words of
    xscale/data/words.py, in Pharaoh form. Raises ValueError."""
    (_, first_is_word), (_, second_is_word) = split_words_and_symbols(list(texts))
    kept = set[Link]()
    for i, j in parse_pharaoh(links, (len(first_is_word), len(second_is_word))):
        if first_is_word[i] == second_is_word[j]:
            kept.add((i, j))
    return format_pharaoh(sorted(kept))


def project_tokenised_links(links: str, texts: tuple[str, ...], tokenised: tuple[str, ...]) -> tuple[str, int]:
    """Return the result of project_links for links that number the words of tokenised texts, which are divided at
    spaces and tabs. Raises ValueError."""
    return project_links(links, texts, list(map(character_indices_of_words, texts, tokenised)))


def character_indices_of_words(text: str, tokenised: str) -> list[list[int]]:
    """Return the indices in `text` of the characters of each word of `tokenised`. Raises ValueError if less than half
    of the characters match."""
    if tokenised == text:
        return characters_between_spaces(text)
    visible = [place for place, character in enumerate(text) if not character.isspace()]
    text_characters = [_folded(text[place]) for place in visible]
    tokens = LINK_WORD.findall(tokenised)
    token_characters = _folded_characters_of_all(tokens)
    if text_characters != token_characters:
        tokens = list(map(html.unescape, tokens))  # Moses escapes characters for HTML
        token_characters = _folded_characters_of_all(tokens)
    place_of = dict(enumerate(visible))
    """Number of a character of `tokens`, without white space -> its index in `text`."""
    if text_characters != token_characters:
        place_of = {}
        for block in difflib.SequenceMatcher(None, text_characters, token_characters, False).get_matching_blocks():
            for k in range(block.size):
                place_of[block.b + k] = visible[block.a + k]
    if 2 * len(place_of) < len(token_characters):
        raise ValueError(
            f"the word links count the words of the tokenised text {tokenised[:60]!r}, but less than half of the "
            f"characters of this text are in the text {text[:60]!r} of the pair"
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


def _folded_characters_of_all(tokens: list[str]) -> list[str]:
    """Return the folded form of each character of all tokens, except white space."""
    return [_folded(character) for character in "".join(tokens) if not character.isspace()]


def _folded(character: str) -> str:
    return unicodedata.normalize("NFKC", character).casefold()
