"""Truecasing: gives the words of dictionaries, which are lower-case, the spelling of the text.

If spellings of a word (data/words.py) differ only in case, the most frequent one in the text is used: `hund` becomes
`Hund` if `Hund` is more frequent.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from xscale.data.words import split_words_and_symbols

Forms = Mapping[str, str]
"""A word in lower case -> its most frequent spelling."""


def count_words(texts: Iterable[list[str]]) -> Counter[str]:
    """Return the number of times that each word and symbol occurs. texts: lists of texts."""
    counts = Counter[str]()
    for batch in texts:
        for words, _ in split_words_and_symbols(batch):
            counts.update(words)
    return counts


def commonest_spellings(counts: Mapping[str, int]) -> Forms:
    """Return the most frequent spelling of each word. Of equally frequent spellings, it is the last by code points,
    which is usually in lower case."""
    best: dict[str, tuple[int, str]] = {}
    for word, times in counts.items():
        key = word.lower()
        best[key] = max(best.get(key, (0, "")), (times, word))
    return {key: word for key, (_, word) in best.items()}


def respell(words: list[str], forms: Forms) -> list[str]:
    """Return each word in its most frequent spelling. Words that `forms` does not have, such as entries of several
    words, stay as they are."""
    return [forms.get(word.lower(), word) for word in words]
