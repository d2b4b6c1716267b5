"""The rules that a corpus's text passes: what each changes or removes of a unit, counted, with examples."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np

from xscale.data.text import read_lines
from xscale.data.words import is_blank
from xscale.errors import UserError

from .corpus import Rules
from .readers import Unit, place
from .sentences import split_sentences

EXAMPLES, EXAMPLE_LENGTH = 3, 200
"""So many examples of what a rule removes are kept of a chunk, of so many characters a text."""
SURE, LETTERS = 0.9, 20
"""Another language is believed from this probability on, of a text with so many letters."""
PERMUTATIONS, BANDS, SHINGLE = 112, 14, 5
"""MinHash of near duplicates: texts of which 75 % of the runs of 5 characters are common share one of 14 bands of 8
permutations with a probability of 77 %, of which 50 % are common with 5 %, of which 85 % with 99 %."""
WORDS_SAME = 4
"""A pair with the same text on both sides is no translation where it has so many words."""
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\ufeff]")
_NO_LETTERS = re.compile(r"[\W_]+")

NORMALISE: dict[str, Callable[[str], str]] = {
    "nfc": lambda text: unicodedata.normalize("NFC", text),
    "controls": lambda text: _CONTROLS.sub(" ", text),
    "spaces": lambda text: " ".join(text.split()),
}


class Removed:
    """How many units, or sentences of documents, each rule removed, with examples."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[list[str]]] = {}

    def add(self, rule: str, texts: list[str]) -> None:
        self.counts[rule] += 1
        examples = self.examples.setdefault(rule, [])
        if len(examples) < EXAMPLES:
            examples.append([text[:EXAMPLE_LENGTH] for text in texts])

    def join(self, other: dict[str, Any]) -> None:
        """Take in what `to_json` has of another."""
        self.counts.update(other["counts"])
        for rule, examples in other["examples"].items():
            mine = self.examples.setdefault(rule, [])
            mine += examples[: max(EXAMPLES - len(mine), 0)]

    def to_json(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "examples": self.examples}


class Cleaner:
    """Applies the rules of a source to its units."""

    def __init__(self, rules: Rules, langs: tuple[str, ...], whole: bool):
        """whole: paragraphs are sentences already."""
        self.rules, self.langs, self.whole, self.removed = rules, langs, whole, Removed()
        self.normalise = [NORMALISE[name] for name in NORMALISE if name in rules.normalise]
        self.excluded = excluded(tuple(rules.exclude))
        self.changed = 0

    def clean(self, unit: Unit) -> list[str]:
        """Both sides of a pair, or a document's sentences; nothing where a rule removes the unit."""
        texts = [self.normalised(text) for text in unit.texts]
        self.changed += texts != [text.strip() for text in unit.texts]
        if len(self.langs) == 2:
            reason = "empty" if any(map(is_blank, texts)) else self.reason_of_sentence(texts) or self.reason(texts)
            if reason:
                self.removed.add(reason, texts)
            return [] if reason else texts
        if not self.whole:
            texts = [sentence for text in texts for sentence in split_sentences(text, self.langs[0])]
        texts = [text for text in texts if not is_blank(text)]
        if not texts:
            self.removed.add("empty", [])
            return []
        if reason := self.reason(texts):
            self.removed.add(reason, texts[:1])
            return []
        kept = []
        for text in texts:
            if reason := self.reason_of_sentence([text]):
                self.removed.add(f"{reason} (sentences)", [text])
            else:
                kept.append(text)
        return kept

    def normalised(self, text: str) -> str:
        for step in self.normalise:
            text = step(text)
        return text.strip()

    def reason_of_sentence(self, texts: list[str]) -> str:
        """Why a pair, or a sentence of a document, is not kept, or ""."""
        sizes = [len(text) for text in texts]
        bounds = self.rules.length.characters
        if bounds and not (bounds[0] <= min(sizes) and max(sizes) <= bounds[1]):
            return "length"
        if self.rules.ratio and max(sizes) > self.rules.ratio * min(sizes):
            return "ratio"
        if self.excluded and any(letters(text) in self.excluded for text in texts):
            return "exclude"
        return ""

    def reason(self, texts: list[str]) -> str:
        """Why a pair or a document is not kept, or ""."""
        if len(self.langs) == 2 and texts[0] == texts[1] and len(texts[0].split()) >= WORDS_SAME:
            return "identical sides"
        if not self.rules.lid:
            return ""
        sides = texts if len(self.langs) == 2 else [" ".join(texts)[:1000]]
        for text, lang in zip(sides, self.langs, strict=True):
            if sum(map(str.isalpha, text)) >= LETTERS:
                found, probability = identifier().classify(text)
                if found != of_lid(lang) and probability >= SURE:
                    return "lid"
        return ""


def letters(text: str) -> bytes:
    """What tells a sentence from another whatever its case, spaces and punctuation: the hash of its letters, digits."""
    folded = _NO_LETTERS.sub("", unicodedata.normalize("NFKC", text).casefold())
    return blake2b(folded.encode(), digest_size=8).digest() if folded else b""


@cache
def excluded(files: tuple[str, ...]) -> frozenset[bytes]:
    """`letters` of every line of the files."""
    return frozenset(letters(line) for name in files for _, line in read_lines(place(name))) - {b""}


@cache
def identifier() -> Any:
    """py3langid's, with probabilities. Raises UserError."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UserError("rules.lid needs py3langid: `pip install 'xscale[prepare]'`, or write lid: false") from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def of_lid(language: str) -> str:
    """py3langid's name of a language: two letters."""
    return language.partition("-")[0].lower()


def fingerprints(units: list[list[str]], near: bool) -> np.ndarray:
    """uint64 hashes of texts [n_units, 1 or 1 + BANDS]: of all of it, and of bands that texts alike have in common."""
    whole = b"".join(blake2b("\n".join(texts).encode(), digest_size=8).digest() for texts in units)
    exact = np.frombuffer(whole, dtype="<u8").reshape(-1, 1)
    if not near or not units:
        return exact
    import rensa

    folded = [" ".join("\n".join(texts).casefold().split()) for texts in units]
    shingles = [[text[i : i + SHINGLE] for i in range(max(len(text) - SHINGLE + 1, 1))] for text in folded]
    rows = rensa.RMinHash.digest_matrix_from_token_sets(shingles, PERMUTATIONS, 42).to_rows()
    bands = np.array(rows, dtype=np.uint64).reshape(len(units), BANDS, -1)
    odd = np.random.RandomState(0).randint(1 << 62, size=bands.shape[-1], dtype=np.int64).astype(np.uint64) | np.uint64(
        1
    )
    mixed = (bands * odd).sum(-1, dtype=np.uint64)
    return np.hstack([exact, mixed ^ (mixed >> np.uint64(29))])
