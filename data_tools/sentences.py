"""Splits paragraphs into sentences by sentencex, and by rules of our own for scripts that it does not know."""

import re

_KHMER_ENDS = re.compile(r"(?<=[\u17d4\u17d5])\s*")
_SPACES = re.compile(r"(?<=[\u0E00-\u0EFF])\s+(?=[\u0E00-\u0EFF])")
"""A space between two letters of Thai or Lao, which marks the end of a sentence or a clause."""
_LONG = 60
"""A Thai or Lao sentence is split at a space only if it has at least this number of characters by then."""


def split_sentences(text: str, language: str) -> list[str]:
    """The sentences of a paragraph in order, with all of its visible characters."""
    import sentencex

    pieces = (piece.strip() for piece in sentencex.segment(language.partition("-")[0].lower(), text))
    return [sentence for piece in pieces if piece for sentence in _split_unspaced(piece)]


def _split_unspaced(piece: str) -> list[str]:
    """The sentences of a piece: Khmer is split at full stops, long Thai or Lao at spaces; other text is not split."""
    if len(piece) > _LONG and _SPACES.search(piece):
        sentences = [""]
        for part in _SPACES.split(piece):
            if len(sentences[-1]) >= _LONG:
                sentences.append(part)
            else:
                sentences[-1] = f"{sentences[-1]} {part}".strip()
        return sentences
    return [part for part in _KHMER_ENDS.split(piece) if part]
