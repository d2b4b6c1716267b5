"""Compares answers by the rules of SQuAD 1.1 (Rajpurkar et al. 2016), and by those of MLQA (Lewis et al. 2020).

Both lower-case the answers, remove punctuation and articles, and count the words that an answer shares with the gold
one. Only MLQA's rules depend on the language.
"""

import re
import string
import unicodedata
from collections import Counter
from functools import lru_cache

ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": "ال",
}
"""{language: pattern of its articles}; MLQA's other languages, hi and zh, have no articles."""
HAN = ("\u4e00", "\u9fa5")
"""The first and the last Chinese character that MLQA's rules take for a word."""


def normalize(text: str) -> str:
    """Return the answer by SQuAD's rules: no ASCII punctuation, no English articles, lower case."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(ARTICLES["en"], " ", kept).split())


def normalize_mlqa(text: str, language: str) -> str:
    """Return the answer by MLQA's rules: no Unicode punctuation, no articles, lower case, Chinese characters apart."""
    kept = "".join(letter for letter in text.lower() if not is_punctuation(letter))
    kept = re.sub(ARTICLES[language], " ", kept) if language in ARTICLES else kept
    if language == "zh":
        kept = "".join(f" {letter} " if HAN[0] <= letter <= HAN[1] else letter for letter in kept)
    return " ".join(kept.split())


@lru_cache(maxsize=1 << 16)
def is_punctuation(letter: str) -> bool:
    return letter in string.punctuation or unicodedata.category(letter).startswith("P")


def f1(prediction: str, gold: str) -> float:
    """Return the F1 of the words of two normalised answers; 0 if they share no word, even if both are empty."""
    predicted, wanted = prediction.split(), gold.split()
    shared = (Counter(predicted) & Counter(wanted)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)
