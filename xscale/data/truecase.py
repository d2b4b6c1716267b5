"""Respells dictionary words as the text spells them: dictionaries are lower-case, a cased tokenizer's tokens are not.

Of the spellings of a word (data/words.py) that differ only in case, the one that is most frequent in the text is used:
`hund` becomes `Hund` if `Hund` is more frequent. At most SAMPLE records of a language are counted
(data/sample.py), so that the time of a start is bounded for any corpus, and the result is a function of the data alone.
For 330,000 sentences of Wikipedia, the counted ones contain 94 % of the dictionary entries that all of them do.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from xscale.data.sample import texts_of
from xscale.data.shards import Source
from xscale.data.words import split
from xscale.errors import UserError
from xscale.ranks import HostGroup

COUNTING = 16
"""The maximum number of ranks that count words. Each sends its counts to all ranks."""

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


def forms_of(languages: Iterable[str], sources: list[Source], host_group: HostGroup) -> dict[str, Forms]:
    """Return the commonest spellings of each language's words, the same on all ranks. All ranks raise a UserError."""
    found: dict[str, Counter[str]] = {}
    parts, problem = min(host_group.size, COUNTING), ""
    if host_group.rank < parts:
        try:
            for language in sorted(languages):
                found[language] = count_words(texts_of(language, sources, part=host_group.rank, parts=parts))
        except UserError as error:
            problem = str(error)
    totals: dict[str, Counter[str]] = {language: Counter() for language in languages}
    for rank in range(parts):
        counts, wrong = host_group.broadcast((found, problem), rank)
        if wrong:
            raise UserError(wrong)
        for language in counts:
            totals[language].update(counts[language])
    return {language: commonest(counts) for language, counts in totals.items()}


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
