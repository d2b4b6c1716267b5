"""Gives dictionary words the spelling of the text, because dictionaries are lower-case and the text is not.

If several spellings of a word (data/words.py) differ only in case, the most frequent one in the text is used: `hund`
becomes `Hund` if `Hund` is more frequent.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from xscale.data.words import split

Forms = Mapping[str, str]
"""A word in lower case -> its commonest spelling."""


def count_words(texts: Iterable[list[str]]) -> Counter[str]:
    counts = Counter[str]()
    for batch in texts:
        for words, _ in split(batch):
            counts.update(words)
    return counts


def commonest(counts: Mapping[str, int]) -> Forms:
    """Return the commonest spelling of each word. In a tie, it is the last by code points, which is mostly the
    lower-case one."""
    best: dict[str, tuple[int, str]] = {}
    for word, times in counts.items():
        key = word.lower()
        best[key] = max(best.get(key, (0, "")), (times, word))
    return {key: word for key, (_, word) in best.items()}


def respelled(words: list[str], forms: Forms) -> list[str]:
    """Return each word in its commonest spelling. What `forms` lacks, such as an entry of several words, stays."""
    return [forms.get(word.lower(), word) for word in words]
