"""Applies the rules of a corpus. Counts the texts that each rule removes, and keeps a few of them as examples."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from xscale.data.lexicon import normalise_word
from xscale.data.scripts import short_code
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError

from .corpus import Rules, SourceSpec
from .readers import Unit, read_checked_lines
from .sentences import is_blank, split_sentences

EXAMPLES = 3
"""The number of examples that are kept for each rule."""
EXAMPLE_LENGTH = 200
"""The number of characters that are kept of each text of an example."""
LID_PROBABILITY = 0.9
"""The minimum probability with which the identifier must find another language."""
LID_LETTERS = 20
"""The minimum number of letters of a text whose language is identified."""
LID_CHARACTERS = 1000
"""The language of a document is identified by this many characters from its beginning."""
SHINGLE = 5
PERMUTATIONS = 108
BANDS = 9
"""MinHash of character 5-grams has 9 bands of 12 permutations. Texts that share 60 % of their 5-grams have a band in
common with a probability of 2 %; for 75 % it is 25 %, for 90 % it is 95 %. (14 bands of 8 permutations removed one in
six pairs of Tatoeba. Most of these shared less than 75 % with another pair.)"""
HASHED_AT_ONCE = 1000
"""The number of texts whose bands are computed in one call. The 5-grams of more texts would need much memory."""
SAME_WORDS = 4
"""A pair with the same text on both sides is removed if this text has at least this number of words."""
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f]")


NORMALISE: dict[str, Callable[[str], str]] = {
    "nfc": lambda text: unicodedata.normalize("NFC", text),
    "controls": lambda text: _CONTROLS.sub(" ", text),
    "spaces": lambda text: " ".join(text.split()),
}
"""{change of the rule `normalise`: its function}, in the order in which the changes are made."""
cached_tokenizer = cache(Tokenizer)
"""Loads a tokenizer (path or hub name) once in a process."""


class RemovalCounts:
    """The number of pairs, documents, or sentences of documents that each rule removed, with examples."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[list[str]]] = {}

    def add(self, rule: str, example: Sequence[str]) -> None:
        """Count a pair, a document or a sentence that the rule removed. example: its texts."""
        self.counts[rule] += 1
        examples = self.examples.setdefault(rule, [])
        if len(examples) < EXAMPLES:
            examples.append([text[:EXAMPLE_LENGTH] for text in example])

    def merge(self, other: dict[str, Any]) -> None:
        """Add the counts and examples of `other`, which has the form of `to_json`."""
        self.counts.update(other["counts"])
        for rule, examples in other["examples"].items():
            known = self.examples.setdefault(rule, [])
            known += examples[: EXAMPLES - len(known)]

    def to_json(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "examples": self.examples}


class Cleaner:
    """Applies the rules of one source to its units, and counts in `removed` which units and sentences they remove."""

    def __init__(self, source: SourceSpec, rules: Rules, tokenizer: Tokenizer | None = None):
        """tokenizer: the tokenizer of the rule length.tokens; None: the rule is not applied."""
        self.source = source
        self.rules = rules
        self.tokenizer = tokenizer
        self.removed = RemovalCounts()
        self.changes = [change for name, change in NORMALISE.items() if name in rules.normalise]

    def clean_and_split(self, unit: Unit) -> Unit | None:
        """Return a unit with clean sides or sentences; None if a rule removes the unit. Its field `linked` has the
        texts that its links belong to."""
        if not unit.texts:
            self.removed.add("language missing" if self.source.pairs else "empty", [])
            return None
        texts = list(map(self.normalise_text, unit.texts))
        if not self.source.pairs:
            texts = self.split_into_sentences(texts)
        reason = self.violated_unit_rule(texts)
        if reason:
            self.removed.add(reason, texts if self.source.pairs else texts[:1])
            return None
        if not self.source.pairs:
            texts = self.drop_sentences_by_rules(texts)
        if not texts:
            return None
        return unit._replace(texts=texts, linked=unit.linked or unit.texts)

    def normalise_text(self, text: str) -> str:
        """Return a text without byte-order marks and carriage returns, and with the changes of `normalise`."""
        text = text.replace("\ufeff", "").replace("\r", " ")
        for change in self.changes:
            text = change(text)
        return text.strip()

    def split_into_sentences(self, paragraphs: list[str]) -> list[str]:
        """Return the sentences of a document, or with `whole_lines` its paragraphs."""
        sentences = paragraphs
        if not self.source.whole_lines:
            sentences = []
            for paragraph in paragraphs:
                sentences += split_sentences(paragraph, self.source.langs[0])
        return [sentence for sentence in sentences if not is_blank(sentence)]

    def drop_sentences_by_rules(self, sentences: list[str]) -> list[str]:
        """Return the sentences of a document that no rule removes."""
        kept = list[str]()
        for sentence in sentences:
            reason = self.violated_length_or_ratio_rule([sentence])
            if not reason and self.occurs_in_excluded_files(sentence):
                reason = "exclude"
            if reason:
                self.removed.add(f"{reason} (sentences)", [sentence])
            else:
                kept.append(sentence)
        return kept

    def violated_unit_rule(self, texts: list[str]) -> str:
        """Return the name of the rule that removes a whole pair or document; "" if no rule does."""
        if not texts or (self.source.pairs and any(map(is_blank, texts))):
            return "empty"
        sides = texts
        if self.source.pairs:
            reason = self.violated_length_or_ratio_rule(texts)
            if reason:
                return reason
            if not self.rules.identical and texts[0] == texts[1] and len(texts[0].split()) >= SAME_WORDS:
                return "identical sides"
            if any(map(self.occurs_in_excluded_files, texts)):
                return "exclude"
        else:
            sides = [" ".join(texts)[:LID_CHARACTERS]]
        if self.rules.lid:
            for text, lang in zip(sides, self.source.langs, strict=True):
                if is_in_other_language(text, lang, self.rules.lid):
                    return "lid"
        return ""

    def occurs_in_excluded_files(self, text: str) -> bool:
        """Return whether a file of the rule `exclude` has a line with the letters, marks and digits of the text, in
        any case."""
        excluded = read_folded_excluded_lines(tuple(self.rules.exclude))
        return bool(excluded) and fold_to_letters_and_digits(text) in excluded

    def violated_length_or_ratio_rule(self, texts: list[str]) -> str:
        """Return the name of the length rule that removes a pair or a single sentence; "" if no rule does."""
        sizes = list(map(len, texts))
        length = self.rules.length
        if length.characters and not (length.characters[0] <= min(sizes) and max(sizes) <= length.characters[1]):
            return "length"
        if self.rules.ratio and max(sizes) > self.rules.ratio * min(sizes):
            return "ratio"
        if self.tokenizer and length.tokens:
            return violated_token_count_rule(self.tokenizer, texts, length.tokens)
        return ""


def violated_token_count_rule(tokenizer: Tokenizer, texts: Sequence[str], min_each_max_total: tuple[int, int]) -> str:
    """Return "too short", "too long", or "" for a sentence or a pair with allowed numbers of tokens.
    min_each_max_total: the minimum of each side (Pan et al. 2021, 3.1), and the maximum of the whole sequence with its
    special tokens."""
    sizes = list(map(len, tokenizer.encode(list(texts))))
    special = tokenizer.pair.special_count if len(texts) == 2 else 2
    if min(sizes) < min_each_max_total[0]:
        return "too short"
    if sum(sizes) + special > min_each_max_total[1]:
        return "too long"
    return ""


def fold_to_letters_and_digits(text: str) -> str:
    """Return a text's letters, marks and digits in folded case. The marks tell words of Hindi or Arabic apart that
    differ in vowels. A variation selector, as in an emoji, is none of these marks."""
    return "".join(filter(_is_letter_or_digit, normalise_word(unicodedata.normalize("NFKC", text))))


@lru_cache(maxsize=1 << 16)
def _is_letter_or_digit(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN" and "VARIATION SELECTOR" not in unicodedata.name(character, "")


@cache
def read_folded_excluded_lines(paths: tuple[str, ...]) -> set[str]:
    """Return the folded letters of each line of evaluation files. Raises UserError."""
    excluded = set[str]()
    for path in paths:
        excluded.update(fold_to_letters_and_digits(line) for _, line in read_checked_lines(Path(path)))
    return excluded - {""}


def check_excluded_file_has_text(path: str) -> None:
    """Raise UserError if a file of the rule `exclude` has no text, or is a table or JSON. Reads only the file's first
    lines, unless they are blank."""
    try:
        has_text = any(fold_to_letters_and_digits(line) for _, line in read_checked_lines(Path(path)))
    except UserError as error:
        raise UserError(f"rules.exclude: {error}") from None
    if not has_text:
        raise UserError(
            f"rules.exclude: {path} has no text. Use a file of evaluation text, or remove the file from the rule"
        )


def hash_text_lists(text_lists: list[list[str]]) -> np.ndarray:
    """Return uint64 [len(text_lists)]: one hash of all texts of each list."""
    hashes = [blake2b("\n".join(texts).encode(), digest_size=8).digest() for texts in text_lists]
    return np.frombuffer(b"".join(hashes), dtype="<u8")


def minhash_bands_of_each_text(texts: list[str]) -> np.ndarray:
    """Return the uint64 hashes [len(texts), BANDS] of the texts' MinHash bands. Case and white space do not count."""
    import rensa

    parts = [np.empty((0, BANDS), dtype=np.uint64)]
    for start in range(0, len(texts), HASHED_AT_ONCE):
        shingles = list(map(folded_character_5grams, texts[start : start + HASHED_AT_ONCE]))
        rows = rensa.RMinHash.digest_matrix_from_token_sets(shingles, PERMUTATIONS, 42).to_rows()
        bands = np.array(rows, dtype=np.uint64).reshape(len(shingles), BANDS, -1)
        factors = np.random.RandomState(0).randint(1 << 62, size=bands.shape[-1], dtype=np.int64).astype(np.uint64)
        mixed = (bands * (factors | np.uint64(1))).sum(-1, dtype=np.uint64)
        parts.append(mixed ^ (mixed >> np.uint64(29)))
    return np.concatenate(parts)


def folded_character_5grams(text: str) -> list[str]:
    folded = " ".join(text.casefold().split())
    return [folded[start : start + SHINGLE] for start in range(max(len(folded) - SHINGLE + 1, 1))]


def short_language_code(code_or_fasttext_label: str) -> str:
    """Return the short code of a language, such as "de", for a code or a label of fastText. The two written forms of
    Norwegian (nb, nn) have the code "no", because identifiers often confuse them."""
    code = short_code(code_or_fasttext_label.removeprefix("__label__"))
    return "no" if code in ("nb", "nn") else code


def is_in_other_language(text: str, lang: str, lid: bool | str) -> bool:
    """Return whether the text is very probably in another language than `lang`. lid: the rule's value."""
    if sum(map(str.isalpha, text)) < LID_LETTERS:
        return False
    code, probability = identify_language(text, lid)
    return code != short_language_code(lang) and probability >= LID_PROBABILITY


def identify_language(text: str, lid: bool | str) -> tuple[str, float]:
    """Return (language code, probability) of a text, by py3langid or by the fastText model at the path `lid`. The code
    is "" if the model knows no word of the text. Raises UserError."""
    if not isinstance(lid, str):
        label, probability = load_langid().classify(text)
        return short_language_code(label), probability
    labels, probabilities = load_fasttext(lid).predict(text.replace("\n", " "))
    return (short_language_code(labels[0]), probabilities[0]) if labels else ("", 0.0)


@cache
def identifiable_languages(lid: bool | str) -> set[str]:
    """Return the languages that an identifier can return; an empty set if it does not list them. Raises UserError."""
    if isinstance(lid, str):
        labels, _ = load_fasttext(lid).predict("the", k=-1, threshold=-1.0)
    else:
        labels = load_langid().labels
    return set(map(short_language_code, labels))


@cache
def load_fasttext(path: str) -> Any:
    import fasttext

    try:
        return fasttext.load_model(path)
    except ValueError as error:
        raise UserError(
            f"rules.lid: {path} cannot be loaded ({error}). Set lid to the path of a fastText model"
        ) from None


@cache
def load_langid() -> Any:
    """Return py3langid's identifier, set to return probabilities."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
