"""Sentences of a paragraph: sentencex's, and a rule of our own for scripts that it does not know."""

import re

import sentencex

_ENDS = re.compile(r"(?<=[។៕។])\s*")
"""After a Khmer full stop; sentencex does not know it."""
_SPACES = re.compile(r"(?<=[\u0E00-\u0EFF])\s+(?=[\u0E00-\u0EFF])")
"""Between two letters of Thai or Lao, whose writers put a space where a sentence or a clause ends."""
_LONG = 60
"""A Thai or Lao sentence goes on over a space until it has so many characters."""


def split_sentences(text: str, language: str) -> list[str]:
    """The sentences of a paragraph in order; all its visible characters are in them."""
    pieces = (piece.strip() for piece in sentencex.segment(language.partition("-")[0].lower(), text))
    return [sentence for piece in pieces if piece for sentence in _unspaced(piece)]


def _unspaced(piece: str) -> list[str]:
    """A piece of Khmer by its full stops, one of Thai or Lao by its spaces, any other as it is."""
    if len(piece) > _LONG and _SPACES.search(piece):
        sentences = [""]
        for part in _SPACES.split(piece):
            if len(sentences[-1]) >= _LONG:
                sentences.append(part)
            else:
                sentences[-1] = f"{sentences[-1]} {part}".strip()
        return sentences
    return [part for part in _ENDS.split(piece) if part] if "\u17d4" in piece or "\u17d5" in piece else [piece]
