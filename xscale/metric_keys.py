"""This module parses the names of metrics, and says whether higher or lower values of a metric are better.

A key is written NAME, NAME/STREAM, NAME/STREAM.TERM, NAME/STREAM/LANGUAGE or NAME/STREAM.TERM/LANGUAGE, such as
`loss/alignlm.bi/de-en`.
"""

import re
from typing import NamedTuple

LESS = re.compile(r"loss(?!_scale)|perplexity|\bxsim|bits_per|\baer\b|delta", re.IGNORECASE)
NEITHER = re.compile(
    r"(^|_)targets|^(count|sentences|words|identical|dropped|too_long|queue_age|own_keys)|links|coverage|entropy|loss_scale"
)
"""Neither higher nor lower values of these metrics are better: they are sizes, or properties of the text."""
ALL = "all"
"""The results row, in an evaluation of a run, that has means over languages or pairs; `STREAM all` for losses."""


class MetricKey(NamedTuple):
    """The key of one number that a run logs."""

    name: str
    """The quantity, such as loss or accuracy."""
    stream: str = ""
    """The stream. For an alignment score, it is the pair of languages."""
    term: str = ""
    """The term of the stream's loss."""
    language: str = ""
    """A language or a pair of languages, if the number covers only targets of this language or pair."""

    def __str__(self) -> str:
        stream = f"{self.stream}.{self.term}" if self.term else self.stream
        return "/".join(filter(None, [self.name, stream, self.language]))

    @classmethod
    def parse(cls, text: str) -> "MetricKey":
        """Return the key that `str` writes as `text`."""
        name, stream, language = (*text.split("/", 2), "", "")[:3]
        return cls(name, *stream.partition(".")[::2], language)


def direction(name: str) -> int:
    """Return 1 if higher values are better, -1 if lower, else 0. name: of a metric or an evaluation's number."""
    return 0 if NEITHER.search(name) else -1 if LESS.search(name) else 1


def is_better(name: str, number: float, than: float | None) -> bool:
    """Whether `number` is better than an earlier one, or there is no earlier one."""
    return than is None or (number < than if direction(name) < 0 else number > than)
