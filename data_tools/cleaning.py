"""The cleaning rules of a corpus. The texts that each rule removes are counted, with a few examples."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xscale.data.scripts import short_code
from xscale.data.text import read_lines
from xscale.errors import UserError

from .corpus import Rules
from .readers import Unit
from .sentences import is_blank, split_sentences

EXAMPLES, EXAMPLE_LENGTH = 3, 200
"""The number of examples that are kept for a rule, and of characters that are kept of each of their texts."""
LID_PROBABILITY, LID_LETTERS = 0.9, 20
"""A text counts as in another language from this probability on, if it has at least this number of letters."""
PERMUTATIONS, BANDS, SHINGLE = 108, 9, 5
"""MinHash of character 5-grams, in 9 bands of 12 permutations. Two texts share a band with a probability of 2 % if
60 % of their 5-grams are common, of 25 % for 75 %, and of 95 % for 90 %. (14 bands of 8 permutations removed one in
six pairs of Tatoeba; most of these had less than 75 % in common with another pair.)"""
SAME_WORDS = 4
"""A pair with the same text on both sides is removed if the text has at least this number of words."""
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\ufeff]")
_NO_LETTERS = re.compile(r"[\W_]+")


def _ftfy(text: str) -> str:
    import ftfy

    return ftfy.fix_text(text)


NORMALISE: dict[str, Callable[[str], str]] = {
    "ftfy": _ftfy,
    "nfc": lambda text: unicodedata.normalize("NFC", text),
    "controls": lambda text: _CONTROLS.sub(" ", text),
    "spaces": lambda text: " ".join(text.split()),
}


class Removed:
    """Counts how many pairs, documents, or sentences of documents each rule removed, and keeps examples."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[list[str]]] = {}

    def add(self, rule: str, texts: list[str]) -> None:
        self.counts[rule] += 1
        examples = self.examples.setdefault(rule, [])
        if len(examples) < EXAMPLES:
            examples.append([text[:EXAMPLE_LENGTH] for text in texts])

    def join(self, other: dict[str, Any]) -> None:
        """Add the counts and examples that another instance's `to_json` returned."""
        self.counts.update(other["counts"])
        for rule, examples in other["examples"].items():
            known = self.examples.setdefault(rule, [])
            known += examples[: max(EXAMPLES - len(known), 0)]

    def to_json(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "examples": self.examples}


class Cleaner:
    """Applies the rules of a source to its units."""

    def __init__(self, rules: Rules, langs: tuple[str, ...]):
        self.rules, self.langs, self.removed, self.changed = rules, langs, Removed(), 0
        self.normalise = [NORMALISE[name] for name in NORMALISE if name in rules.normalise]

    def clean(self, unit: Unit) -> list[str]:
        """The clean sides of a pair or sentences of a document; an empty list if a rule removes the unit. The rules
        `exclude` and `boilerplate` are in `without_excluded` and `without_boilerplate`."""
        if len(unit.texts) < len(self.langs):
            self.removed.add("language missing" if len(self.langs) == 2 else "empty", [])
            return []
        if below(unit.score, self.rules.score):
            self.removed.add("score", unit.texts[: len(self.langs)])
            return []
        texts = [self.normalised(text) for text in unit.texts]
        self.changed += texts != [text.strip() for text in unit.texts]
        if len(self.langs) == 2:
            reason = "empty" if any(map(is_blank, texts)) else self.sentence_reason(texts) or self.unit_reason(texts)
            if reason:
                self.removed.add(reason, texts)
            return [] if reason else texts
        texts = [sentence for text in texts for sentence in split_sentences(text, self.langs[0])]
        texts = [text for text in texts if not is_blank(text)]
        if reason := self.unit_reason(texts) if texts else "empty":
            self.removed.add(reason, texts[:1])
            return []
        kept = []
        for text in texts:
            if reason := self.sentence_reason([text]):
                self.removed.add(f"{reason} (sentences)", [text])
            else:
                kept.append(text)
        return kept

    def normalised(self, text: str) -> str:
        for step in self.normalise:
            text = step(text)
        return text.strip()

    def sentence_reason(self, texts: list[str]) -> str:
        """The name of the rule that removes a pair or a single sentence, or "" if none does."""
        sizes = [len(text) for text in texts]
        bounds = self.rules.length.characters
        if bounds and not (bounds[0] <= min(sizes) and max(sizes) <= bounds[1]):
            return "length"
        if self.rules.ratio and max(sizes) > self.rules.ratio * min(sizes):
            return "ratio"
        return ""

    def unit_reason(self, texts: list[str]) -> str:
        """The name of the rule that removes a whole pair or document, or "" if none does."""
        if len(self.langs) == 2 and texts[0] == texts[1] and len(texts[0].split()) >= SAME_WORDS:
            return "identical sides"
        if not self.rules.lid:
            return ""
        sides = texts if len(self.langs) == 2 else [" ".join(texts)[:1000]]
        for text, lang in zip(sides, self.langs, strict=True):
            if sum(map(str.isalpha, text)) >= LID_LETTERS:
                found, probability = identifier(self.rules.lid)(text)
                if found != language_code(lang) and probability >= LID_PROBABILITY:
                    return "lid"
        return ""

    def without_excluded(self, units: list[tuple[Unit, list[str]]]) -> list[tuple[Unit, list[str]]]:
        """The units, each with its clean texts, without the pairs and sentences that the rule `exclude` removes."""
        if not self.rules.exclude:
            return units
        hits = exclusion(tuple(self.rules.exclude)).find([text for _, texts in units for text in texts])
        kept = []
        for unit, texts in units:
            found = [next(hits) for _ in texts]
            if len(self.langs) == 2:
                if hit := next(filter(None, found), None):
                    self.removed.add(hit.rule, [*texts, hit.place])
                    texts = []
            else:
                for text, hit in zip(texts, found, strict=True):
                    if hit:
                        self.removed.add(f"{hit.rule} (sentences)", [text, hit.place])
                texts = [text for text, hit in zip(texts, found, strict=True) if not hit]
            if texts:
                kept.append((unit, texts))
        return kept

    def without_boilerplate(self, units: list[tuple[Unit, list[str]]]) -> list[tuple[Unit, list[str]]]:
        """The documents of a chunk without the sentences that the rule `boilerplate` removes; pairs are left alone."""
        most = self.rules.boilerplate
        if most is None or len(self.langs) == 2:
            return units
        documents_with, kept = Counter(text for _, texts in units for text in set(texts)), []
        for unit, texts in units:
            for text in texts:
                if documents_with[text] > most:
                    self.removed.add("boilerplate (sentences)", [text])
            if left := [text for text in texts if documents_with[text] <= most]:
                kept.append((unit, left))
        return kept


def below(score: float | None, least: float | None) -> bool:
    return score is not None and least is not None and not score >= least  # also if the score is not a number


def letters_hash(text: str) -> bytes:
    """A hash of the letters and digits of a text, ignoring their case; b"" for a text without any."""
    folded = _NO_LETTERS.sub("", unicodedata.normalize("NFKC", text).casefold())
    return blake2b(folded.encode(), digest_size=8).digest() if folded else b""


class Hit(NamedTuple):
    """The rule that excludes a text, and the file and line of the evaluation text that it is too like."""

    rule: str
    place: str


class Exclusion:
    """The lines of evaluation files, in which texts are searched. Raises UserError."""

    def __init__(self, names: tuple[str, ...]):
        self.places, lines = list[tuple[str, int]](), list[str]()
        self.exact = dict[bytes, int]()
        """The number of a line by its `letters_hash`."""
        for name in names:
            before = len(lines)
            for number, line in read_lines(Path(name)):
                if key := letters_hash(line):
                    self.exact.setdefault(key, len(lines))
                    self.places.append((name, number))
                    lines.append(line)
            if len(lines) == before:
                raise UserError(f"rules.exclude: {name} has no text; give a file of evaluation text, or leave it out")
        bands = band_hashes(lines)
        self.order = np.argsort(bands, axis=0, kind="stable")
        self.bands = np.take_along_axis(bands, self.order, axis=0)

    def find(self, texts: list[str]) -> Iterator[Hit | None]:
        """Yield the hit of each text, or None."""
        near = np.full(len(texts), -1)
        bands = band_hashes(texts)
        for band in range(BANDS):
            at = np.searchsorted(self.bands[:, band], bands[:, band]).clip(max=len(self.bands) - 1)
            same = (self.bands[at, band] == bands[:, band]) & (near < 0)
            near[same] = self.order[at[same], band]
        for text, line in zip(texts, near.tolist(), strict=True):
            exact = self.exact.get(letters_hash(text), -1)
            number = exact if exact >= 0 else line
            rule = "exclude" if exact >= 0 else "exclude (near)"
            yield Hit(rule, "{}: line {}".format(*self.places[number])) if number >= 0 else None


@cache
def exclusion(names: tuple[str, ...]) -> Exclusion:
    return Exclusion(names)


def band_hashes(texts: list[str]) -> np.ndarray:
    """The MinHash bands of `text_hashes`, made of a thousand texts at a time, since their 5-grams need much memory."""
    parts = [text_hashes([[text] for text in texts[n : n + 1000]], True)[:, 1:] for n in range(0, len(texts), 1000)]
    return np.concatenate(parts or [np.empty((0, BANDS), dtype=np.uint64)])


def language_code(label: str) -> str:
    """The short code of a language, from its code or from a label of fastText. Both written forms of Norwegian are one
    language, since models differ in their codes for it."""
    code = short_code(label.removeprefix("__label__"))
    return "no" if code in ("nb", "nn") else code


@cache
def identifier(lid: bool | str) -> Callable[[str], tuple[str, float]]:
    """Return a function that gives a text's language and its probability, by py3langid or by the fastText model that
    `lid` names. The language is "" if the model knows no word of the text. Raises UserError."""

    def best(text: str) -> tuple[str, float]:
        if not isinstance(lid, str):
            label, probability = langid().classify(text)
            return language_code(label), probability
        labels, probabilities = fasttext_model(lid).predict(text.replace("\n", " "))
        return (language_code(labels[0]), probabilities[0]) if labels else ("", 0.0)

    return best


@cache
def identified_languages(lid: bool | str) -> set[str]:
    """The codes of the languages that an identifier can find; an empty set if its model does not tell. Raises
    UserError."""
    labels = fasttext_model(lid).predict("the", k=-1, threshold=-1.0)[0] if isinstance(lid, str) else langid().labels
    return set(map(language_code, labels))


@cache
def fasttext_model(path: str) -> Any:
    import fasttext

    try:
        return fasttext.load_model(path)
    except ValueError as error:
        raise UserError(f"rules.lid: {path}: {error}; give a model of fastText") from None


@cache
def langid() -> Any:
    """py3langid's identifier, which is set to return probabilities."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def text_hashes(units: list[list[str]], near: bool) -> np.ndarray:
    """uint64 hashes [n_units, 1 or 1 + BANDS]: of each unit's whole text and, if `near`, of its MinHash bands."""
    whole = b"".join(blake2b("\n".join(texts).encode(), digest_size=8).digest() for texts in units)
    exact = np.frombuffer(whole, dtype="<u8").reshape(-1, 1)
    if not near or not units:
        return exact
    import rensa

    folded = [" ".join("\n".join(texts).casefold().split()) for texts in units]
    shingles = [[text[i : i + SHINGLE] for i in range(max(len(text) - SHINGLE + 1, 1))] for text in folded]
    rows = rensa.RMinHash.digest_matrix_from_token_sets(shingles, PERMUTATIONS, 42).to_rows()
    bands = np.array(rows, dtype=np.uint64).reshape(len(units), BANDS, -1)
    factors = np.random.RandomState(0).randint(1 << 62, size=bands.shape[-1], dtype=np.int64).astype(np.uint64)
    mixed = (bands * (factors | np.uint64(1))).sum(-1, dtype=np.uint64)
    return np.hstack([exact, mixed ^ (mixed >> np.uint64(29))])
