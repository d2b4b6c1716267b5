"""Respells dictionary words as the text spells them: dictionaries are lower-case, a cased tokenizer's tokens are not.

Of the spellings of a word (data/words.py) that differ only in case, the one that is most frequent in the text is used:
`hund` becomes `Hund` if `Hund` is more frequent.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from xscale.data.words import split

Forms = Mapping[str, str]
"""A word in lower case -> its commonest spelling."""


def count_words(texts: Iterable[list[str]]) -> Counter[str]:
    return Counter(word for some in texts for words, _ in split(some) for word in words)


def commonest(counts: Mapping[str, int]) -> Forms:
    """Return the commonest spelling of each word; in a tie, the last by code points, mostly the lower-case one."""
    best: dict[str, tuple[int, str]] = {}
    for word, times in counts.items():
        key = word.lower()
        best[key] = max(best.get(key, (0, "")), (times, word))
    return {key: word for key, (_, word) in best.items()}


def respelled(texts: list[str], forms: Forms) -> list[str]:
    """Return the texts with each word in its commonest spelling. Words that `forms` lacks stay as they are."""
    spelled = [forms.get(text.lower(), "") for text in texts]  # of texts that are one word
    others = [i for i, word in enumerate(spelled) if not word]
    for i, (words, _) in zip(others, split([texts[i] for i in others]), strict=True):
        spelled[i] = _replaced(texts[i], words, [forms.get(word.lower(), word) for word in words])
    return spelled


def _replaced(text: str, words: list[str], by: list[str]) -> str:
    parts, end = [], 0
    for word, new in zip(words, by, strict=True):
        start = text.index(word, end)
        parts += [text[end:start], new]
        end = start + len(word)
    return "".join([*parts, text[end:]])
