"""The cleaning rules of a corpus. The texts that each rule removes are counted, and a few examples are kept."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xscale.data.scripts import short_code
from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError

from .corpus import Rules, SourceSpec
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
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f]")


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


class CleanUnit(NamedTuple):
    unit: Unit
    """The unit as its source gives it."""
    texts: list[str]
    """The clean sides of the pair, or the clean sentences of the document."""
    keys: list[str] | None
    """The key of each sentence, if the unit has keys."""


class Cleaner:
    """Applies the rules of one source to its units (pairs or documents). `removed` counts the units that rules removed,
    `changed` the units whose text `normalise` changed."""

    def __init__(self, source: SourceSpec, rules: Rules, tokenizer: Tokenizer | None = None):
        """tokenizer: for rules.length.tokens; None: that rule is applied later."""
        self.rules, self.langs, self.whole_lines = rules, source.langs, source.whole_lines
        self.removed, self.changed = RemovalCounts(), 0
        self.normalise = [NORMALISE[name] for name in NORMALISE if name in rules.normalise]
        self.tokens = TokenFilter(tokenizer, rules.length.tokens) if tokenizer and rules.length.tokens else None

    def clean(self, unit: Unit) -> CleanUnit | None:
        """Return a unit with its clean sides or sentences; None if a rule removes it. The rule `exclude` is applied
        later, by `without_excluded`."""
        if len(unit.texts) < len(self.langs):
            self.removed.add("language missing" if len(self.langs) == 2 else "empty", [])
            return None
        texts = [self.normalise_text(text) for text in unit.texts]
        self.changed += texts != [text.strip() for text in unit.texts]
        return self._clean_pair(unit, texts) if len(self.langs) == 2 else self._clean_document(unit, texts)

    def _clean_pair(self, unit: Unit, texts: list[str]) -> CleanUnit | None:
        reason = "empty" if any(map(is_blank, texts)) else self.sentence_problem(texts) or self.unit_problem(texts)
        if reason:
            self.removed.add(reason, texts)
            return None
        return CleanUnit(unit, texts, unit.keys)

    def _clean_document(self, unit: Unit, paragraphs: list[str]) -> CleanUnit | None:
        sentences, keys = list[str](), list[str]()
        of_line = Counter[str]()  # the sentences of each line
        for number, paragraph in enumerate(paragraphs):
            for sentence in [paragraph] if self.whole_lines else split_sentences(paragraph, self.langs[0]):
                if not is_blank(sentence):
                    sentences.append(sentence)
                    if unit.keys:
                        keys.append(f"{unit.keys[number]}.{of_line[unit.keys[number]]}")
                        of_line[unit.keys[number]] += 1
        reason = self.unit_problem(sentences) if sentences else "empty"
        if reason:
            self.removed.add(reason, sentences[:1])
            return None
        kept = list[int]()
        for number, sentence in enumerate(sentences):
            reason = self.sentence_problem([sentence])
            if reason:
                self.removed.add(f"{reason} (sentences)", [sentence])
            else:
                kept.append(number)
        if not kept:
            return None
        kept_keys = [keys[number] for number in kept] if keys else None
        return CleanUnit(unit, [sentences[number] for number in kept], kept_keys)

    def normalise_text(self, text: str) -> str:
        """Return a text without byte-order marks and carriage returns, and with the changes of `normalise`."""
        text = text.replace("\ufeff", "").replace("\r", " ")
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
        return self.tokens.problem(texts) if self.tokens else ""

    def unit_problem(self, texts: list[str]) -> str:
        """Return the name of the rule by which a whole pair or document is removed; "" if no rule removes it."""
        is_pair = len(self.langs) == 2
        if is_pair and not self.rules.identical and texts[0] == texts[1] and len(texts[0].split()) >= SAME_WORDS:
            return "identical sides"
        if not self.rules.lid:
            return ""
        sides = texts if is_pair else [" ".join(texts)[:1000]]
        for text, lang in zip(sides, self.langs, strict=True):
            if sum(map(str.isalpha, text)) >= LID_LETTERS:
                found, probability = language_identifier(self.rules.lid)(text)
                if found != language_code(lang) and probability >= LID_PROBABILITY:
                    return "lid"
        return ""

    def without_excluded(self, units: list[CleanUnit]) -> list[CleanUnit]:
        """Return the units without the pairs and sentences that the rule `exclude` removes."""
        if not self.rules.exclude:
            return units
        hits = load_exclusion(tuple(self.rules.exclude)).find([text for unit in units for text in unit.texts])
        kept = list[CleanUnit]()
        for unit in units:
            hits_of = [next(hits) for _ in unit.texts]
            is_kept = [hit is None for hit in hits_of]
            for text, hit in zip(unit.texts, hits_of, strict=True):
                if hit and len(self.langs) == 1:
                    self.removed.add(f"{hit.rule} (sentences)", [text, hit.location])
            if len(self.langs) == 2 and not all(is_kept):
                first = next(hit for hit in hits_of if hit)
                self.removed.add(first.rule, [*unit.texts, first.location])
                continue
            texts = [*compress(unit.texts, is_kept)]
            if texts:
                keys = [*compress(unit.keys, is_kept)] if unit.keys and len(self.langs) == 1 else unit.keys
                kept.append(CleanUnit(unit.unit, texts, keys))
        return kept


class TokenFilter:
    """Selects records by their numbers of tokens. Every side needs at least `least` tokens (Pan et al. 2021, 3.1), and
    the whole sequence with its special tokens may have at most `most`."""

    def __init__(self, tokenizer: Tokenizer, bounds: tuple[int, int]):
        self.tokenizer, (self.least, self.most) = tokenizer, bounds

    def problem(self, texts: Sequence[str]) -> str:
        """Return "too short", "too long", or "" if the numbers of tokens are allowed."""
        sizes = [len(ids) for ids in self.tokenizer.encode(list(texts))]
        if min(sizes) < self.least:
            return "too short"
        special = self.tokenizer.pair.special if len(texts) == 2 else 2
        return "too long" if sum(sizes) + special > self.most else ""


@cache
def load_tokenizer(name: str) -> Tokenizer:
    return Tokenizer(name)


def letters_hash(text: str) -> bytes:
    """Return an 8-byte hash of a text's letters, marks and digits, ignoring case; b"" if there are none. Without its
    marks, a word of Hindi or Arabic would be the same as others that differ from it in vowels."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    letters = "".join(filter(_is_letter, folded))
    return blake2b(letters.encode(), digest_size=8).digest() if letters else b""


@lru_cache(maxsize=1 << 16)
def _is_letter(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN"


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
