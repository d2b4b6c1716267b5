"""The cleaning rules of a corpus. The texts that each rule removes are counted, and a few examples are kept."""

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
"""The number of examples that are kept for each rule, and the number of characters that are kept of each example."""
LID_PROBABILITY, LID_LETTERS = 0.9, 20
"""A text is in another language if the identifier gives that language at least this probability, and the text has at
least this number of letters."""
PERMUTATIONS, BANDS, SHINGLE = 108, 9, 5
"""MinHash of character 5-grams, in 9 bands of 12 permutations. Two texts have at least one band in common with a
probability of 2 % if they share 60 % of their 5-grams, of 25 % for 75 %, and of 95 % for 90 %. (14 bands of 8
permutations removed one in six pairs of Tatoeba, most of which shared less than 75 % with another pair.)"""
SAME_WORDS = 4
"""A pair with the same text on both sides is removed if this text has at least this number of words."""
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
"""Each change of the rule `normalise` -> its function, in the order in which they are applied."""


class RemovalCounts:
    """The number of pairs, of documents, or of sentences of documents that each rule removed, with examples."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[list[str]]] = {}

    def add(self, rule: str, texts: list[str]) -> None:
        self.counts[rule] += 1
        examples = self.examples.setdefault(rule, [])
        if len(examples) < EXAMPLES:
            examples.append([text[:EXAMPLE_LENGTH] for text in texts])

    def join(self, other: dict[str, Any]) -> None:
        """Add counts and examples in the form of `to_json`."""
        self.counts.update(other["counts"])
        for rule, examples in other["examples"].items():
            known = self.examples.setdefault(rule, [])
            known += examples[: max(EXAMPLES - len(known), 0)]

    def to_json(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "examples": self.examples}


class Cleaner:
    """Applies the rules of one source to its units (pairs or documents). `removed` counts the units that rules removed,
    `changed` the units whose text `normalise` changed."""

    def __init__(self, rules: Rules, langs: tuple[str, ...]):
        self.rules, self.langs, self.removed, self.changed = rules, langs, RemovalCounts(), 0
        self.normalise = [NORMALISE[name] for name in NORMALISE if name in rules.normalise]

    def clean(self, unit: Unit) -> list[str]:
        """Return the clean sides of a pair, or the clean sentences of a document; [] if a rule removes the unit. The
        rules `exclude` and `boilerplate` are applied later, by `without_excluded` and `without_boilerplate`."""
        if len(unit.texts) < len(self.langs):
            self.removed.add("language missing" if len(self.langs) == 2 else "empty", [])
            return []
        if is_below(unit.score, self.rules.score):
            self.removed.add("score", unit.texts[: len(self.langs)])
            return []
        texts = [self.normalise_text(text) for text in unit.texts]
        self.changed += texts != [text.strip() for text in unit.texts]
        if len(self.langs) == 2:
            reason = "empty" if any(map(is_blank, texts)) else self.sentence_problem(texts) or self.unit_problem(texts)
            if reason:
                self.removed.add(reason, texts)
            return [] if reason else texts
        texts = [sentence for text in texts for sentence in split_sentences(text, self.langs[0])]
        texts = [text for text in texts if not is_blank(text)]
        if reason := self.unit_problem(texts) if texts else "empty":
            self.removed.add(reason, texts[:1])
            return []
        kept = []
        for text in texts:
            if reason := self.sentence_problem([text]):
                self.removed.add(f"{reason} (sentences)", [text])
            else:
                kept.append(text)
        return kept

    def normalise_text(self, text: str) -> str:
        for step in self.normalise:
            text = step(text)
        return text.strip()

    def sentence_problem(self, texts: list[str]) -> str:
        """Return the name of the rule by which a pair, or a single sentence, is removed; "" if no rule removes it."""
        sizes = [len(text) for text in texts]
        bounds = self.rules.length.characters
        if bounds and not (bounds[0] <= min(sizes) and max(sizes) <= bounds[1]):
            return "length"
        if self.rules.ratio and max(sizes) > self.rules.ratio * min(sizes):
            return "ratio"
        return ""

    def unit_problem(self, texts: list[str]) -> str:
        """Return the name of the rule by which a whole pair or document is removed; "" if no rule removes it."""
        if len(self.langs) == 2 and texts[0] == texts[1] and len(texts[0].split()) >= SAME_WORDS:
            return "identical sides"
        if not self.rules.lid:
            return ""
        sides = texts if len(self.langs) == 2 else [" ".join(texts)[:1000]]
        for text, lang in zip(sides, self.langs, strict=True):
            if sum(map(str.isalpha, text)) >= LID_LETTERS:
                found, probability = language_identifier(self.rules.lid)(text)
                if found != language_code(lang) and probability >= LID_PROBABILITY:
                    return "lid"
        return ""

    def without_excluded(self, units: list[tuple[Unit, list[str]]]) -> list[tuple[Unit, list[str]]]:
        """Return the (unit, clean texts) without the pairs and sentences that the rule `exclude` removes."""
        if not self.rules.exclude:
            return units
        hits = load_exclusion(tuple(self.rules.exclude)).find([text for _, texts in units for text in texts])
        kept = []
        for unit, texts in units:
            found = [next(hits) for _ in texts]
            if len(self.langs) == 2:
                if hit := next(filter(None, found), None):
                    self.removed.add(hit.rule, [*texts, hit.location])
                    texts = []
            else:
                for text, hit in zip(texts, found, strict=True):
                    if hit:
                        self.removed.add(f"{hit.rule} (sentences)", [text, hit.location])
                texts = [text for text, hit in zip(texts, found, strict=True) if not hit]
            if texts:
                kept.append((unit, texts))
        return kept

    def without_boilerplate(self, units: list[tuple[Unit, list[str]]]) -> list[tuple[Unit, list[str]]]:
        """Return (document, clean sentences) without sentences that the rule `boilerplate` removes; pairs unchanged."""
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


def is_below(score: float | None, minimum: float | None) -> bool:
    """Return True if there are a score and a bound, and the score is less than the bound or is NaN."""
    return score is not None and minimum is not None and not score >= minimum


def letters_hash(text: str) -> bytes:
    """Return an 8-byte hash of a text's letters and digits, ignoring case; b"" if there are none."""
    folded = _NO_LETTERS.sub("", unicodedata.normalize("NFKC", text).casefold())
    return blake2b(folded.encode(), digest_size=8).digest() if folded else b""


class Hit(NamedTuple):
    """The reason why the rule `exclude` removes a text: "exclude" or "exclude (near)", and the file and line of
    evaluation text that is the same or similar."""

    rule: str
    location: str


class Exclusion:
    """An index of the lines of evaluation files, in which texts are looked up."""

    def __init__(self, paths: tuple[str, ...]):
        """Read the files. Raises UserError if a file has no text."""
        self.places, lines = list[tuple[str, int]](), list[str]()
        self.exact = dict[bytes, int]()
        """The number of a line by its `letters_hash`."""
        for name in paths:
            before = len(lines)
            for number, line in read_lines(Path(name)):
                if key := letters_hash(line):
                    self.exact.setdefault(key, len(lines))
                    self.places.append((name, number))
                    lines.append(line)
            if len(lines) == before:
                raise UserError(f"rules.exclude: {name} has no text; give a file of evaluation text, or leave it out")
        bands = minhash_bands(lines)
        self.order = np.argsort(bands, axis=0, kind="stable")
        self.bands = np.take_along_axis(bands, self.order, axis=0)

    def find(self, texts: list[str]) -> Iterator[Hit | None]:
        """Yield for each text its hit, or None if no line of the evaluation files is the same or similar."""
        near = np.full(len(texts), -1)
        bands = minhash_bands(texts)
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
def load_exclusion(paths: tuple[str, ...]) -> Exclusion:
    return Exclusion(paths)


def minhash_bands(texts: list[str]) -> np.ndarray:
    """Return the uint64 hashes [len(texts), BANDS] of the texts' MinHash bands. 1,000 texts are hashed at a time,
    because the 5-grams of a text need much memory."""
    parts = [text_hashes([[text] for text in texts[n : n + 1000]], True)[:, 1:] for n in range(0, len(texts), 1000)]
    return np.concatenate(parts or [np.empty((0, BANDS), dtype=np.uint64)])


def language_code(label: str) -> str:
    """Return the short code of a language, such as "de", from a code or a label of fastText. Norwegian's two written
    forms (nb, nn) have the code "no", because identifiers disagree about them."""
    code = short_code(label.removeprefix("__label__"))
    return "no" if code in ("nb", "nn") else code


@cache
def language_identifier(lid: bool | str) -> Callable[[str], tuple[str, float]]:
    """Return a function (text) -> (language code, probability), by py3langid or by the fastText model at the path
    `lid`. The code is "" if the model knows no word of the text. Raises UserError."""

    def best(text: str) -> tuple[str, float]:
        if not isinstance(lid, str):
            label, probability = load_langid().classify(text)
            return language_code(label), probability
        labels, probabilities = load_fasttext(lid).predict(text.replace("\n", " "))
        return (language_code(labels[0]), probabilities[0]) if labels else ("", 0.0)

    return best


@cache
def identifiable_languages(lid: bool | str) -> set[str]:
    """Return the languages that an identifier can return; an empty set if it does not list them. Raises UserError."""
    labels = (
        load_fasttext(lid).predict("the", k=-1, threshold=-1.0)[0] if isinstance(lid, str) else load_langid().labels
    )
    return set(map(language_code, labels))


@cache
def load_fasttext(path: str) -> Any:
    import fasttext

    try:
        return fasttext.load_model(path)
    except ValueError as error:
        raise UserError(f"rules.lid: {path}: {error}; give a model of fastText") from None


@cache
def load_langid() -> Any:
    """Return py3langid's identifier, set to return probabilities."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def text_hashes(units: list[list[str]], with_bands: bool) -> np.ndarray:
    """Return uint64 hashes [len(units), 1] of each unit's whole text, or with `with_bands` [len(units), 1 + BANDS]:
    also of its MinHash bands."""
    whole = b"".join(blake2b("\n".join(texts).encode(), digest_size=8).digest() for texts in units)
    exact = np.frombuffer(whole, dtype="<u8").reshape(-1, 1)
    """letters_hash of a line -> the line's index in `places`."""
    if not with_bands or not units:
        return exact
    import rensa

    folded = [" ".join("\n".join(texts).casefold().split()) for texts in units]
    shingles = [[text[i : i + SHINGLE] for i in range(max(len(text) - SHINGLE + 1, 1))] for text in folded]
    rows = rensa.RMinHash.digest_matrix_from_token_sets(shingles, PERMUTATIONS, 42).to_rows()
    bands = np.array(rows, dtype=np.uint64).reshape(len(units), BANDS, -1)
    factors = np.random.RandomState(0).randint(1 << 62, size=bands.shape[-1], dtype=np.int64).astype(np.uint64)
    mixed = (bands * (factors | np.uint64(1))).sum(-1, dtype=np.uint64)
    return np.hstack([exact, mixed ^ (mixed >> np.uint64(29))])
