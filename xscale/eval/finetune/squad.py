"""Comparison of answers by the rules of SQuAD 1.1 (Rajpurkar et al. 2016) and, by language, MLQA (Lewis et al. 2020).

Both lower-case an answer, remove punctuation and articles, and count the words that it shares with the gold answer.
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
"""Articles by language, as patterns; MLQA's other languages, hi and zh, have none."""
HAN = ("\u4e00", "\u9fa5")


def normalized(text: str) -> str:
    """SQuAD's rules remove ASCII punctuation and English articles, whatever the language."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(ARTICLES["en"], " ", kept).split())


def mlqa_normalized(text: str, language: str) -> str:
    """MLQA's rules remove Unicode's punctuation and the language's articles; each Chinese character is a word."""
    kept = "".join(letter for letter in text.lower() if not is_punctuation(letter))
    kept = re.sub(ARTICLES[language], " ", kept) if language in ARTICLES else kept
    if language == "zh":
        kept = "".join(f" {letter} " if HAN[0] <= letter <= HAN[1] else letter for letter in kept)
    return " ".join(kept.split())


@lru_cache(maxsize=1 << 16)
def is_punctuation(letter: str) -> bool:
    return letter in string.punctuation or unicodedata.category(letter).startswith("P")


def f1(prediction: str, gold: str) -> float:
    """F1 of the words of two normalised answers; 0 if they share no word, even if both are empty."""
    predicted, wanted = prediction.split(), gold.split()
    shared = (Counter(predicted) & Counter(wanted)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)
