"""The names of metrics, and which direction of each is better.

A key is written NAME, NAME/STREAM, NAME/STREAM.TERM, NAME/STREAM/LANGUAGE or NAME/STREAM.TERM/LANGUAGE, such as
`loss/alignlm.bi/de-en`.
"""

import re
from typing import NamedTuple

LESS = re.compile(r"loss(?!_scale)|perplexity|\bxsim|bits_per|\baer\b|delta", re.IGNORECASE)
NEITHER = re.compile(
    r"^(count|targets|sentences|words|identical|dropped|too_long|queue_age|own_keys)|links|coverage|entropy|loss_scale"
)
"""These metrics have no better direction: they are sizes, or properties of the text."""


class MetricKey(NamedTuple):
    """The key of one number that a run logs."""

    name: str
    """The quantity, such as loss or accuracy."""
    stream: str = ""
    """The stream. For an alignment score, it is the pair of languages."""
    term: str = ""
    """The term of the stream's loss."""
    language: str = ""
    """A language or a pair, if the number is about its targets alone."""

    def __str__(self) -> str:
        stream = f"{self.stream}.{self.term}" if self.term else self.stream
        return "/".join(filter(None, [self.name, stream, self.language]))

    @classmethod
    def parse(cls, text: str) -> "MetricKey":
        """The inverse of `str`."""
        name, stream, language = (*text.split("/", 2), "", "")[:3]
        return cls(name, *stream.partition(".")[::2], language)


def direction(name: str) -> int:
    """1: more is better; -1: less is better; 0: neither. name: a metric's, or an evaluation's number."""
    return 0 if NEITHER.search(name) else -1 if LESS.search(name) else 1


def is_better(name: str, number: float, than: float | None) -> bool:
    """True if a number is better than an earlier one, or if there is no earlier one."""
    return than is None or (number < than if direction(name) < 0 else number > than)
