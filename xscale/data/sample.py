"""An even sample of a language's text from all its sources, for counts that are made before step 1."""

from collections.abc import Iterator

import numpy as np

from xscale.data.ragged import evenly_spaced
from xscale.data.shards import Source

SAMPLE, RUN = 100_000, 64
"""SAMPLE: maximum number of records of a language. RUN: consecutive records that are read, if there are more."""
_CHUNK = 1024


def texts_of(
    language: str, sources: list[Source], most: int | None = None, part: int = 0, parts: int = 1
) -> Iterator[list[str]]:
    """Yield chunks of texts of at most `most` records (default: SAMPLE): those of part number `part` of `parts`."""
    having = [source for source in sources if language in source.langs]
    ends = np.cumsum([source.records for source in having])
    chosen = sample_records(int(ends[-1]) if having else 0, SAMPLE if most is None else most)
    for source, end in zip(having, ends, strict=True):
        here = chosen[(chosen >= end - source.records) & (chosen < end)] - (end - source.records)
        quiet, side = source.without_readahead(), source.langs.index(language)
        for start in range(0, len(here), _CHUNK)[part::parts]:
            yield [quiet.read(*place).texts[side] for place in source.places(here[start : start + _CHUNK])]


def sample_records(records: int, most: int) -> np.ndarray:
    """The numbers of all records, or of at most `most` records in evenly spaced runs."""
    if records <= most:
        return np.arange(records)
    return (evenly_spaced(records // RUN, most // RUN)[:, None] * RUN + np.arange(RUN)).ravel()
