"""Parses the names of metrics, and says whether higher or lower values of a metric are better.

A key is written NAME, NAME/STREAM, NAME/STREAM.TERM, NAME/STREAM/LANGUAGE or NAME/STREAM.TERM/LANGUAGE, such as
`loss/alignlm.bi/de-en`.
"""

import re
from typing import NamedTuple

LESS = re.compile(r"loss(?!_scale)|perplexity|\baer\b|delta", re.IGNORECASE)
"""Matches the names of metrics whose lower values are better."""
NEITHER = re.compile(
    r"(^|_)targets|^(count|sentences|words|identical|dropped|too_long|queue_age|own_keys)|links|coverage|entropy|loss_scale"
)
"""Matches the names of metrics that have no better direction, because they are sizes or properties of the text."""
ALL = "all"
"""The name of the results row with means over languages or pairs in a run's evaluation of retrieval."""


class MetricKey(NamedTuple):
    """The key of one number of a step: of a loss, a metric or a count, and of the sums from which they are computed."""

    name: str
    """The quantity, such as loss or accuracy."""
    stream: str = ""
    """The stream; for an alignment score, the pair of languages."""
    term: str = ""
    """The term of the stream's loss to which the number belongs; "" for all terms together."""
    language: str = ""
    """A language or a pair of languages, if the number covers only targets of this language or pair."""

    def __str__(self) -> str:
        stream = f"{self.stream}.{self.term}" if self.term else self.stream
        return "/".join(filter(None, [self.name, stream, self.language]))

    @classmethod
    def parse(cls, text: str) -> "MetricKey":
        """Return the key whose `str` is `text`."""
        name, _, rest = text.partition("/")
        stream_and_term, _, language = rest.partition("/")
        stream, _, term = stream_and_term.partition(".")
        return cls(name, stream, term, language)


Counts = dict[MetricKey, int]
"""The counts of a row or a step by key. Names of keys: "count" (the targets of a term, or another count of
StreamBatch.target_counts), "drawn" (sampled pairs), "too_long" (pairs over data.max_length)."""


def loss_key(stream: str, term: str) -> MetricKey:
    return MetricKey("loss", stream, term)


def count_key(stream: str, counted: str, language: str = "") -> MetricKey:
    """Return the key of a count. counted: a term, whose targets are counted, or another name in target_counts."""
    return MetricKey("count", stream, counted, language)


def better_direction(name: str) -> int:
    """Return 1 if higher values are better, -1 if lower values are better, else 0. name: the name of a metric or a
    score."""
    if NEITHER.search(name):
        return 0
    return -1 if LESS.search(name) else 1
