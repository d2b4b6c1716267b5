"""Bilingual dictionaries in MUSE form, as tables of token ids.

Shape letters: N entries.

A line is an entry `source target`. A word may have several entries. A side may have token ids in the place of words: in
`id:17 id:4017`, token 4017 is the translation of token 17, as in derived languages (benchmarks/papers/derive.py).
A file is named after its two languages, in the order of its columns: en-de.txt, en-zh-CN.txt.

A share of the entries is withheld from all objectives, so that alignment can be measured on words that no objective has
read. A hash of a word decides whether the word is withheld, and an entry is withheld if one of its words is. So all
runs and all dictionaries of a language withhold the same words, in both directions. (If the words of only one language
were hashed, few words of the other language would lose all their translations: 3.7 % of MUSE's English words with the
German dictionary, and 1.2 % with the German and the Chinese one.)
"""

import hashlib
import re
import unicodedata
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain, compress
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xscale import rng
from xscale.data.ragged import Ragged
from xscale.data.scripts import find_exact_name_or_spellings
from xscale.data.shards import Source, languages_of, sample_texts
from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer
from xscale.errors import LOG, UserError

_LANGUAGE = re.compile(r"[A-Za-z]{2,8}(_\w+)?")
"""Matches either language of a pair whose name has only one "-", as in en-de."""
_LANGUAGE_OF_COUNTRY = re.compile(r"[a-z]{2,3}-[A-Z]{2}")
"""Matches one language with a country, such as zh-CN, which is no pair."""
_LANGUAGE_WITH_PARTS = re.compile(r"[a-z]{2,3}(_\w+|-[A-Z][a-z]{3}|-[A-Z]{2}|-\d{3})*")
"""Matches either language, such as zh-CN, zh-Hans and es-419, of a pair whose name has several "-"."""
_BATCH = 10_000
"""The number of words that are encoded by one call of the tokenizer, because encodings take memory."""
_IDS = re.compile(r"id:\d{1,9}( id:\d{1,9})*")
"""Matches one side of an entry if token ids stand there, as in `id:17 id:42`."""


@dataclass(frozen=True, eq=False)  # its hash is that of the object, so that functions can cache tables of a dictionary
class Lexicon:
    """A bilingual dictionary."""

    langs: tuple[str, str]
    words: list[tuple[str, str]]
    """The entries without unknown tokens, in the order of the file, each once."""
    ids: tuple[list[list[int]], list[list[int]]]
    """The token ids of the source words and of the target words, for each of `words`."""
    fingerprint: str
    """A hash of the file's entries."""
    path: Path
    unknown: int = 0
    """The number of further entries of the file, which have unknown tokens."""

    @property
    def name(self) -> str:
        return "-".join(self.langs)

    def summary(self) -> str:
        """Return a line for the log: the path, and the numbers of entries of each kind."""
        return (
            f"dictionary {self.path} has {len(self.words):,} entries. In {len(self.single_token_pairs()):,} of the "
            f"entries, both words are single tokens. {self.unknown:,} further entries are left out, because they have "
            "tokens that the tokenizer does not know"
        )

    def single_token_pairs(self) -> np.ndarray:
        """Return the token ids of the entries that have one token on each side [n, 2]."""
        pairs = [
            (*source, *target) for source, target in zip(*self.ids, strict=True) if len(source) == len(target) == 1
        ]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)


@cache
def without_withheld(lexicon: Lexicon, share_of_entries: float) -> Lexicon:
    """Return the dictionary without the entries that are withheld from objectives, as one object for all streams.
    share_of_entries: the share of withheld entries."""
    word_share = 1 - (1 - share_of_entries) ** 0.5
    distinct = set(chain.from_iterable(lexicon.words))
    withheld = {word for word in distinct if is_withheld(word, word_share)}
    kept = [withheld.isdisjoint(entry) for entry in lexicon.words]
    sources, targets = lexicon.ids
    ids = (list(compress(sources, kept)), list(compress(targets, kept)))
    return replace(lexicon, words=list(compress(lexicon.words, kept)), ids=ids)


def normalise_word(word: str) -> str:
    """Return a form of the word that is the same for all spellings that differ in case or in the encoding of
    accents."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", word).casefold())


def is_withheld(word: str, share_of_words: float) -> bool:
    """Return True if the entries of this word are withheld from all objectives. share_of_words: the share of withheld
    words."""
    return int(rng.key("lexicon_heldout", normalise_word(word))) < share_of_words * 2**64


Word = tuple[int, ...]
"""The token ids of a word."""


class Synonym(NamedTuple):
    """A translation of a word."""

    tokens: Word
    language: str


@lru_cache(maxsize=256)
def translations_with_as_many_tokens(lexicons: tuple[Lexicon, ...], language: str) -> dict[Word, list[Synonym]]:
    """Return the translations of each word of a language in all its dictionaries, sorted by token ids. A
    translation is returned only if it has as many tokens as the word, and every token differs."""
    synonyms_of: dict[Word, set[Synonym]] = {}
    for lexicon in lexicons:
        for side in (0, 1):
            if lexicon.langs[side] != language:
                continue
            other_language = lexicon.langs[1 - side]
            for word, translation in zip(lexicon.ids[side], lexicon.ids[1 - side], strict=True):
                # A token that is replaced by itself would tell the model the token to predict.
                if len(word) == len(translation) and not any(map(eq, word, translation)):
                    synonyms_of.setdefault(tuple(word), set()).add(Synonym(tuple(translation), other_language))
    return {word: sorted(translations) for word, translations in synonyms_of.items()}


@lru_cache(maxsize=16)
def ids_of_differing_entries(lexicons: tuple[Lexicon, ...], single_tokens_only: bool) -> tuple[Ragged, Ragged]:
    """Return the token ids of the source sides, and those of the target sides, of all entries whose sides differ: N
    lists each. single_tokens_only: only entries that have one token on each side."""
    sources = list[list[int]]()
    targets = list[list[int]]()
    for lexicon in lexicons:
        for source, target in zip(*lexicon.ids, strict=True):
            if source != target and (not single_tokens_only or len(source) == len(target) == 1):
                sources.append(source)
                targets.append(target)
    return Ragged.from_lists(sources), Ragged.from_lists(targets)


def load_lexicon(path: Path, tokenizer: Tokenizer, languages: Collection[str] = ()) -> Lexicon:
    """Read a dictionary. languages: see languages_in_file_name. Raises UserError."""
    langs = languages_in_file_name(path, languages)
    file_entries = read_entries(path)
    unknown = tokenizer.hf.unk_token_id
    source_words, target_words = zip(*file_entries, strict=True)
    sources = _token_ids_of_words(list(source_words), tokenizer, path)
    targets = _token_ids_of_words(list(target_words), tokenizer, path)
    words = list[tuple[str, str]]()
    source_ids = list[list[int]]()
    target_ids = list[list[int]]()
    for entry, source, target in zip(file_entries, sources, targets, strict=True):
        if source and target and unknown not in (*source, *target):
            words.append(
                (
                    _decode_if_written_as_ids(entry[0], source, tokenizer),
                    _decode_if_written_as_ids(entry[1], target, tokenizer),
                )
            )
            source_ids.append(source)
            target_ids.append(target)
    if not words:
        raise UserError(
            f"{path}: every entry of the dictionary has tokens that the tokenizer does not know. Use a tokenizer "
            "for the languages of the dictionary, or remove the dictionary from data.lexicons or the folder lexicon/"
        )
    content = "\n".join(map("\t".join, file_entries))
    fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Lexicon(langs, words, (source_ids, target_ids), fingerprint, path, len(file_entries) - len(words))


def _decode_if_written_as_ids(word: str, ids: list[int], tokenizer: Tokenizer) -> str:
    """Return the word, or the text of the tokens if the dictionary has token ids in its place. So both forms have the
    same hash, and are withheld together."""
    if not _IDS.fullmatch(word):
        return word
    return str(tokenizer.hf.decode(ids)).strip()


def _token_ids_of_words(words: list[str], tokenizer: Tokenizer, path: Path) -> list[list[int]]:
    """Return the token ids of each word. Each distinct word is encoded once. Raises UserError for an id that the
    tokenizer does not have."""
    ids: dict[str, list[int]] = {}
    texts = list[str]()
    for word in dict.fromkeys(words):
        if _IDS.fullmatch(word):
            ids[word] = [int(part.removeprefix("id:")) for part in word.split()]
            if max(ids[word]) >= len(tokenizer.hf):
                raise UserError(
                    f"{path}: the token id {word!r} is too large for the tokenizer, which has "
                    f"{len(tokenizer.hf):,} tokens. Use a dictionary with words, or with ids of this tokenizer"
                )
        else:
            texts.append(word)
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        ids |= zip(batch, tokenizer.encode_inside_sentence(batch), strict=True)
    return [ids[word] for word in words]


def languages_in_file_name(path: Path, languages: Collection[str]) -> tuple[str, str]:
    """Return the languages in a dictionary's file name, ("en", "de") for en-de.txt. If `languages` has another spelling
    of a language, return that spelling: en and de for eng-deu.txt. Raises UserError."""
    pair = split_pair_name(path.name.partition(".")[0], languages)
    if pair is None:
        raise UserError(
            f"{path}: the file name does not name the two languages of the dictionary. Name the file after "
            "the languages of its two columns, such as en-de.txt or en-zh-CN.txt (country in capitals)"
        )
    spelled = list[str]()
    for language in pair:
        names = find_exact_name_or_spellings(language, languages)
        if len(names) > 1:
            raise UserError(
                f"{path}: {language} in the file name can mean {' or '.join(sorted(names))}. In the file name, replace "
                f"{language} by one of them"
            )
        spelled.append(names[0] if names else language)
    return (spelled[0], spelled[1]) if spelled[0] != spelled[1] else pair


def split_pair_name(name: str, languages: Collection[str]) -> tuple[str, str] | None:
    """Return the two languages in a name, ("en", "zh-CN") for "en-zh-CN", or None if they are unclear. Two of
    `languages` are preferred to names that only look like languages."""
    parts = name.split("-")
    pattern = _LANGUAGE_WITH_PARTS
    if len(parts) == 2 and not _LANGUAGE_OF_COUNTRY.fullmatch(name):
        pattern = _LANGUAGE
    pairs = list[tuple[str, str]]()
    for number in range(1, len(parts)):
        pairs.append(("-".join(parts[:number]), "-".join(parts[number:])))
    is_language: tuple[Callable[[str], Any], ...] = (
        lambda part: part in languages,
        pattern.fullmatch,
        lambda part: find_exact_name_or_spellings(part, languages),
    )
    for test in is_language:
        fitting = [(first, second) for first, second in pairs if test(first) and test(second)]
        if len(fitting) == 1:
            return fitting[0]
    return None


def read_entries(path: Path) -> list[tuple[str, str]]:
    """Return the entries of a file in their order, each once, and composed (NFC) as the text that `xscale data prepare`
    writes. Raises UserError."""
    entries: dict[tuple[str, str], None] = {}
    for number, line in read_lines(path):
        line = unicodedata.normalize("NFC", line)
        columns = line.split("\t") if "\t" in line else line.split()
        columns = list(map(str.strip, columns))
        if not any(columns):
            continue
        if len(columns) != 2 or not all(columns):
            raise UserError(
                f"{path}: line {number}: {line!r} is not a dictionary entry. Write a word and its translation with "
                "a space or tab between the two words. If a word has spaces, write a tab"
            )
        entries[columns[0], columns[1]] = None
    if not entries:
        raise UserError(
            f"{path} has no dictionary entry. Write one entry per line: a word and its translation, with a space "
            "or tab between the two words"
        )
    return list(entries)


def distinct_token_ids_in_sample(
    language: str, sources: list[Source], tokenizer: Tokenizer, show_progress: Callable[[], None] = lambda: None
) -> np.ndarray:
    """Return the ids of the tokens in a sample (data/shards.py) of a language's text, without special tokens. Without
    text under the name `language`, text under the language's other names is read. show_progress: a function that is
    called before each batch."""
    occurs = np.zeros(tokenizer.vocab_size, dtype=bool)
    for name in find_exact_name_or_spellings(language, sorted(languages_of(sources))):
        for texts in sample_texts(name, sources):
            show_progress()
            for ids in tokenizer.encode(texts):
                occurs[ids] = True
    return np.flatnonzero(occurs & ~tokenizer.is_special)


def warn_if_columns_are_swapped(
    lexicons: list[Lexicon], pairs_P2: np.ndarray, tokens_of_second_language: np.ndarray
) -> None:
    """Warn if the text of the second language has more words of the first column than of the second. lexicons: those of
    one name. pairs_P2: their one-token entries. tokens_of_second_language: the ids of the tokens of its text."""
    first, second = lexicons[0].langs
    first_count, second_count = np.isin(pairs_P2, tokens_of_second_language).sum(axis=0)
    if first_count > second_count:
        paths = ", ".join(str(lexicon.path) for lexicon in lexicons)
        LOG.warning(
            f"dictionary {paths}: the first column is probably in {second}, although the file name says {first}. "
            f"Of {len(pairs_P2):,} entries, the text in {second} contains the word of the first column for "
            f"{first_count:,}, and the word of the second column for only {second_count:,}. If the first column is in "
            f"{second}, rename the file to {second}-{first}.txt"
        )


def find_lexicon_paths(sources: list[Source], data_folder: Path) -> list[Path]:
    """Return the dictionaries for the languages of the sources in the folder `lexicon` of `data_folder`, or if it has
    none, in that of its parent. Of two files of a pair, such as de-en and en-de, return only the first by name."""
    languages = languages_of(sources)
    for folder in (data_folder, data_folder.resolve().parent):
        path_of_pair: dict[frozenset[str], Path] = {}
        for path in sorted((folder / "lexicon").glob("*.txt")):
            with suppress(UserError):  # the name is not that of a pair
                pair = frozenset(languages_in_file_name(path, languages))
                if pair <= languages:
                    path_of_pair.setdefault(pair, path)
        if path_of_pair:
            return list(path_of_pair.values())
    return []
