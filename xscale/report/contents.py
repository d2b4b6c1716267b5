"""All that a page shows."""

from dataclasses import dataclass, field

import numpy as np

from xscale.report.read import Run, Scores

Guesses = list[tuple[str, float]]
"""Tokens and their probabilities, the likeliest first."""


@dataclass(frozen=True)
class Placed:
    """Two words of each pair in the plane, and how near they are in the model's own space."""

    places: np.ndarray
    """[pairs, 2, 2]"""
    cosine: float
    """Mean of the pairs'."""
    nearest: int
    """First words whose nearest among the second ones is their own."""


@dataclass(frozen=True)
class WordPairs:
    """Linked words of a source, as each model places them."""

    source: str
    words: list[tuple[str, str]]
    places: dict[str, Placed]
    """By model."""


@dataclass(frozen=True)
class Masked:
    token: str
    place: int
    """In its pair's `tokens`."""
    linked: list[str]
    mono: Guesses
    bi: Guesses
    """None of a token without links, or of a model without such a head."""


@dataclass(frozen=True)
class Shown:
    """A pair with masked tokens."""

    tokens: list[str]
    """Of both texts and the special tokens around them, unmasked."""
    masked: list[Masked]


@dataclass(frozen=True)
class Contents:
    runs: list[Run] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    words: list[WordPairs] = field(default_factory=list)
    examples: dict[str, list[Shown]] = field(default_factory=dict)
    """By model and source."""
