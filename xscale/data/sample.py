"""Some of a language's text, spread evenly over all its sources: what is counted before step 1."""

from collections.abc import Iterator

import numpy as np

from xscale.data.shards import Source

SAMPLE, RUN = 100_000, 64
"""Records of a language that are read, at most; where there are more, runs of so many that follow one another."""
_CHUNK = 1024


def texts_of(
    language: str, sources: list[Source], most: int | None = None, part: int = 0, parts: int = 1
) -> Iterator[list[str]]:
    """In chunks. most: None: SAMPLE. part, parts: of equal parts the one to read."""
    having = [source for source in sources if language in source.langs]
    ends = np.cumsum([source.records for source in having])
    chosen = spread(int(ends[-1]) if having else 0, most)
    for source, end in zip(having, ends, strict=True):
        here = chosen[(chosen >= end - source.records) & (chosen < end)] - (end - source.records)
        without_readahead, side = source.without_readahead(), source.langs.index(language)
        starts = range(0, len(here), _CHUNK)
        for start in starts[part::parts]:
            yield [without_readahead.read(*place).texts[side] for place in source.places(here[start : start + _CHUNK])]


def spread(records: int, most: int | None = None) -> np.ndarray:
    """All of them, or `most` in runs, evenly."""
    most = SAMPLE if most is None else most
    if records <= most:
        return np.arange(records)
    runs = np.unique(np.linspace(0, records // RUN - 1, most // RUN).round().astype(np.int64))
    return (runs[:, None] * RUN + np.arange(RUN)).ravel()
