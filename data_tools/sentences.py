"""Splits paragraphs into sentences by sentencex, with further rules for scripts and languages that it splits
wrongly."""

import re

from xscale.data.scripts import short_code
from xscale.data.words import Class, character_class

_ENDS = re.compile(r"(?<=[\u17d4\u17d5])\s*|(?<=[。！？])(?=\d)")
"""Matches the end of a sentence after a full stop of Khmer, and after one of Chinese or Japanese before a number."""
_SPACES = re.compile(r"(?<=[\u0E00-\u0EFF])\s+(?=[\u0E00-\u0EFF])")
"""Matches a space between two letters of Thai or Lao, which ends a sentence or a clause."""
_INITIAL = re.compile(r"(?:^|[\s(.])[A-ZÀ-ÞΑ-ΩА-Я]\.\s*$|[A-Za-z]\.$")
"""Matches an initial (J.), or a full stop after a letter, at the end of a piece. There the sentence continues."""
_ORDINAL = re.compile(r"(?:^|[\s(])\d{1,3}\.\s*$")
_WITH_ORDINALS = re.compile("bs|cs|da|de|et|fi|fo|hr|hu|is|lb|lv|nb|nn|no|pl|sk|sl|sr|tr")
"""The languages in which 3. is an ordinal number, so that a sentence may continue after it."""
_END = 8
"""_INITIAL and _ORDINAL are looked for in this many characters at the end of a piece."""
_LONG = 60
"""A Thai or Lao sentence ends at a space only after at least this number of characters."""


def split_sentences(text: str, language: str) -> list[str]:
    """Return the sentences of a paragraph, in order. They contain all of its visible characters."""
    import sentencex

    code = short_code(language)
    pieces = [""]
    for piece in sentencex.segment(code, text):
        end = pieces[-1][-_END:]
        if _INITIAL.search(end) or (_WITH_ORDINALS.fullmatch(code) and _ORDINAL.search(end)):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    sentences = list[str]()
    for piece in pieces:
        sentences += _split_missed_ends(piece.strip())
    return sentences


def _split_missed_ends(piece: str) -> list[str]:
    """Return the sentences of a piece. A long piece of Thai or Lao is split at spaces, another piece at the _ENDS."""
    if len(piece) <= _LONG or not _SPACES.search(piece):
        return list(filter(None, _ENDS.split(piece)))
    sentences = [""]
    for part in _SPACES.split(piece):
        if len(sentences[-1]) >= _LONG:
            sentences.append(part)
        else:
            sentences[-1] = f"{sentences[-1]} {part}".strip()
    return sentences


def is_blank(text: str) -> bool:
    """Return whether the text has no visible character. No-break spaces and U+200B are invisible."""
    return all(character_class(character) in (Class.BREAK, Class.FORMAT, Class.JOINER) for character in text)
