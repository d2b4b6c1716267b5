"""Reads evenly spaced records of one language from all its sources, to count words or tokens."""

from collections.abc import Iterator

import numpy as np

from xscale.data.ragged import evenly_spaced
from xscale.data.shards import Source

SAMPLE = 100_000
"""The maximum number of records that are read of a language."""
RUN = 64
"""If a language has more than SAMPLE records, runs of this many consecutive records are read."""
_CHUNK = 1024


def sample_texts(language: str, sources: list[Source], most: int | None = None) -> Iterator[list[str]]:
    """Yield lists of texts in a language, from at most `most` records; None: SAMPLE."""
    with_language = [source for source in sources if language in source.langs]
    records = sum(source.records for source in with_language)
    chosen = sample_records(records, SAMPLE if most is None else most)
    first = 0
    for source in with_language:
        end = first + source.records
        numbers = chosen[(chosen >= first) & (chosen < end)] - first
        first = end
        side = source.langs.index(language)
        for start in range(0, len(numbers), _CHUNK):
            places = source.locate_records(numbers[start : start + _CHUNK])
            yield [source.read(*place).texts[side] for place in places]
        source.close()  # the run opens its files again, with readahead


def sample_records(records: int, most: int) -> np.ndarray:
    """Return the numbers of at most `most` of the records: all of them, or evenly spaced runs of RUN."""
    if records <= most:
        return np.arange(records)
    return (evenly_spaced(records // RUN, most // RUN)[:, None] * RUN + np.arange(RUN)).ravel()
