"""Splits paragraphs into sentences by sentencex, and by rules of our own for scripts that it does not know."""

import re

from xscale.data.words import Class, class_of

_ENDS = re.compile(r"(?<=[\u17d4\u17d5])\s*|(?<=[。！？])(?=\d)")
"""Khmer's full stops, and Chinese and Japanese ones before a number."""
_SPACES = re.compile(r"(?<=[\u0E00-\u0EFF])\s+(?=[\u0E00-\u0EFF])")
"""A space between two letters of Thai or Lao, which marks the end of a sentence or a clause."""
_INITIAL = re.compile(r"(?:^|[\s(.])[A-ZÀ-ÞΑ-ΩА-Я]\.\s*$|[A-Za-z]\.$")
"""A sentence goes on after an initial, and after a full stop without a space."""
_ORDINAL = re.compile(r"(?:^|[\s(])\d{1,3}\.\s*$")
_WITH_ORDINALS = re.compile("bs|cs|da|de|et|fi|fo|hr|hu|is|lb|lv|nb|nn|no|pl|sk|sl|sr|tr")
"""The languages in which 3. is an ordinal number."""
_END = 8
"""The number of last characters of a piece in which _INITIAL and _ORDINAL are searched."""
_LONG = 60
"""A Thai or Lao sentence is split at a space only if it has at least this number of characters by then."""


def split_sentences(text: str, language: str) -> list[str]:
    """The sentences of a paragraph in order, with all of its visible characters."""
    import sentencex

    code, pieces = language.partition("-")[0].lower(), [""]
    for piece in sentencex.segment(code, text):
        end = pieces[-1][-_END:]
        if _INITIAL.search(end) or (_WITH_ORDINALS.fullmatch(code) and _ORDINAL.search(end)):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return [sentence for piece in pieces if piece.strip() for sentence in _split_unspaced(piece.strip())]


def _split_unspaced(piece: str) -> list[str]:
    """Split long Thai or Lao at its spaces, and other text at the _ENDS that sentencex does not know."""
    if len(piece) > _LONG and _SPACES.search(piece):
        sentences = [""]
        for part in _SPACES.split(piece):
            if len(sentences[-1]) >= _LONG:
                sentences.append(part)
            else:
                sentences[-1] = f"{sentences[-1]} {part}".strip()
        return sentences
    return [part for part in _ENDS.split(piece) if part]


def is_blank(text: str) -> bool:
    """True if the text has no visible character; a no-break space and a U+200B are invisible."""
    return all(class_of(character) in (Class.BREAK, Class.FORMAT, Class.JOINER) for character in text)
