"""Evenly spaced records of one language from all its sources, for counts of words or tokens before step 1."""

from collections.abc import Iterator

import numpy as np

from xscale.data.ragged import evenly_spaced
from xscale.data.shards import Source

SAMPLE, RUN = 100_000, 64
"""SAMPLE: maximum number of records read of a language. RUN: if there are more, runs of this many are read."""
_CHUNK = 1024


def texts_of(
    language: str, sources: list[Source], most: int | None = None, part: int = 0, parts: int = 1
) -> Iterator[list[str]]:
    """Yield lists of the language's texts, from at most `most` (default: SAMPLE) records. parts: number of callers that
    share the work; part: number of this caller, from 0, which gets every `parts`-th list of each source."""
    having = [source for source in sources if language in source.langs]
    ends = np.cumsum([source.records for source in having])
    chosen = sample_records(int(ends[-1]) if having else 0, SAMPLE if most is None else most)
    for source, end in zip(having, ends, strict=True):
        here = chosen[(chosen >= end - source.records) & (chosen < end)] - (end - source.records)
        quiet, side = source.without_readahead(), source.langs.index(language)
        for start in range(0, len(here), _CHUNK)[part::parts]:
            yield [quiet.read(*place).texts[side] for place in source.places(here[start : start + _CHUNK])]


def sample_records(records: int, most: int) -> np.ndarray:
    """Return the indices of all records, or of at most `most` in evenly spaced runs of RUN if there are more."""
    if records <= most:
        return np.arange(records)
    return (evenly_spaced(records // RUN, most // RUN)[:, None] * RUN + np.arange(RUN)).ravel()
