"""Bilingual dictionaries in MUSE form (one entry `source target` a line; a word may have several), as tables of token
ids.

Shape letters: N entries.

A side may give token ids in the place of words: in `id:17 id:4017`, token 4017 is the translation of token 17.
Lines of both kinds may be mixed (OBJECTIVES.md, "Derived languages").

A file is named after the pair, in the order of its columns: en-de.txt, en-zh-CN.txt.

A share of the entries is withheld from all objectives, so that alignment can be measured on words that no objective has
seen. A hash of a word decides whether the word is withheld, and an entry is withheld if either of its words is. So all
runs and all dictionaries of a language withhold the same words, in both directions. (If only one language's words were
hashed, a word of the other would be withheld only if all its translations are: 3.7 % of MUSE's English words with
German, 1.2 % once there is a Chinese dictionary too.)
"""

import hashlib
import re
import unicodedata
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain
from operator import eq, ne
from pathlib import Path
from typing import NamedTuple

import numpy as np

from xscale import rng
from xscale.data.ragged import indices_within
from xscale.data.scripts import names_of
from xscale.data.shards import Source
from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer
from xscale.data.truecase import Forms, respelled
from xscale.errors import UserError

_LANGUAGE = re.compile(r"[A-Za-z]{2,8}(_\w+)?")
"""Matches a language in the name of a pair that has a single "-", between the languages."""
_LANGUAGE_WITH_PARTS = re.compile(r"[a-z]{2,3}(_\w+|-[A-Z][a-z]{3}|-[A-Z]{2}|-\d{3})*")
"""Matches a language in the name of a pair with more "-", as in zh-CN, zh-Hans and es-419."""
_BATCH = 10_000
_IDS = re.compile(r"id:\d{1,9}( id:\d{1,9})*")
"""Matches a side of an entry that gives token ids."""


@dataclass(frozen=True, eq=False)  # hashed by identity: a process builds the tables of a dictionary once
class Lexicon:
    langs: tuple[str, str]
    words: list[tuple[str, str]]
    """Entries in the file's order, without repeats."""
    ids: tuple[list[list[int]], list[list[int]]]
    """Token ids of each entry's source and target word, one or more."""
    fingerprint: str
    path: Path
    entries: tuple[tuple[str, str], ...] = ()
    """All entries of the file, also those that are left out of `words` because of unknown tokens."""

    @property
    def name(self) -> str:
        return "-".join(self.langs)

    def without_withheld(self, heldout: float) -> "Lexicon":
        """Return the dictionary without the entries that are withheld from objectives. heldout: the share of withheld
        words."""
        return _without_withheld(self, heldout)

    def summary(self) -> str:
        unknown = len(self.entries) - len(self.words)
        summary = (
            f"dictionary: {self.path}, {len(self.words):,} entries, {len(self.single()):,} of one token on either "
            f"side; {self.identical:,} have the same tokens on both and no gradient"
        )
        return summary + (f"; {unknown:,} others have unknown tokens and are left out" if unknown else "")

    @property
    def identical(self) -> int:
        """Number of entries with the same tokens on both sides; their cosine is 1, and they have no gradient."""
        return sum(map(eq, *self.ids))

    def single(self) -> np.ndarray:
        """Return the token ids of the entries that have one token on each side [n, 2]."""
        pairs = list[tuple[int, int]]()
        for source, target in zip(*self.ids, strict=True):
            if len(source) == len(target) == 1:
                pairs.append((source[0], target[0]))
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)


@cache  # one object for all streams
def _without_withheld(lexicon: Lexicon, heldout: float) -> Lexicon:
    word_share = 1 - (1 - heldout) ** 0.5
    distinct = set(chain.from_iterable(lexicon.words))
    withheld = {word for word in distinct if is_withheld(word, word_share)}
    words = list[tuple[str, str]]()
    source_ids = list[list[int]]()
    target_ids = list[list[int]]()
    for entry, source, target in zip(lexicon.words, *lexicon.ids, strict=True):
        if withheld.isdisjoint(entry):
            words.append(entry)
            source_ids.append(source)
            target_ids.append(target)
    return replace(lexicon, words=words, ids=(source_ids, target_ids))


def same_word(word: str) -> str:
    """Return a normal form that is equal for spellings that differ only in case or in the encoding of accents."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", word).casefold())


def is_withheld(word: str, heldout: float) -> bool:
    """Return True if the dictionary entries of this word are withheld from all objectives. heldout: the share of
    withheld words."""
    return int(rng.key("lexicon_heldout", same_word(word))) < heldout * 2**64


Word = tuple[int, ...]


class Synonym(NamedTuple):
    """A translation of a word."""

    tokens: Word
    language: str


@lru_cache(maxsize=256)
def synonyms(lexicons: tuple[Lexicon, ...], language: str) -> dict[Word, list[Synonym]]:
    """Return the translations of each word of a language, from all of its dictionaries, sorted by token ids. A
    translation has as many tokens as the word, and differs from it at every token."""
    synonyms_of: dict[Word, set[Synonym]] = {}
    for lexicon in lexicons:
        for side in (0, 1):
            if lexicon.langs[side] != language:
                continue
            other_language = lexicon.langs[1 - side]
            for word, translation in zip(lexicon.ids[side], lexicon.ids[1 - side], strict=True):
                # A token that replaces itself would reveal the token that is to be predicted.
                if len(word) == len(translation) and not any(map(eq, word, translation)):
                    synonyms_of.setdefault(tuple(word), set()).add(Synonym(tuple(translation), other_language))
    return {word: sorted(translations) for word, translations in synonyms_of.items()}


class Ragged:
    """Lists of token ids in one array, one list after the other."""

    def __init__(self, lists: list[list[int]]):
        self.lengths = np.array([len(ids) for ids in lists], dtype=np.int64)
        self.values = np.array(list(chain.from_iterable(lists)), dtype=np.int64)

    def take(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lists at the indices `which`, concatenated, and the index at which each list starts."""
        lengths = self.lengths[which]
        first = np.cumsum(self.lengths)[which] - lengths
        return self.values[np.repeat(first, lengths) + indices_within(lengths)], np.cumsum(lengths) - lengths


@lru_cache(maxsize=16)
def differing_entries(lexicons: tuple[Lexicon, ...], single: bool) -> tuple[Ragged, Ragged]:
    """Return the source sides and the target sides of the entries whose sides have different token ids, as two Ragged
    of N lists. single: only entries that have one token on each side."""
    sources = list[list[int]]()
    targets = list[list[int]]()
    for lexicon in lexicons:
        for source, target in zip(*lexicon.ids, strict=True):
            if source != target and (not single or len(source) == len(target) == 1):
                sources.append(source)
                targets.append(target)
    return Ragged(sources), Ragged(targets)


def load_lexicon(path: Path, tokenizer: Tokenizer, languages: Collection[str] = ()) -> Lexicon:
    """Read a dictionary. languages: see pair_of. Raises UserError naming file and line."""
    langs = pair_of(path, languages)
    file_entries = read_entries(path)
    unknown = tokenizer.hf.unk_token_id
    source_words, target_words = zip(*file_entries, strict=True)
    sources = _encoded(list(source_words), tokenizer, path)
    targets = _encoded(list(target_words), tokenizer, path)
    words = list[tuple[str, str]]()
    source_ids = list[list[int]]()
    target_ids = list[list[int]]()
    for entry, source, target in zip(file_entries, sources, targets, strict=True):
        if source and target and unknown not in (*source, *target):
            words.append((_spelled(entry[0], source, tokenizer), _spelled(entry[1], target, tokenizer)))
            source_ids.append(source)
            target_ids.append(target)
    if not words:
        raise UserError(
            f"{path}: the tokenizer knows no entry of the dictionary; check that both are for the same "
            f"languages, or move the file to another folder"
        )
    content = "\n".join("\t".join(entry) for entry in file_entries).encode()
    fingerprint = hashlib.sha256(content).hexdigest()[:16]
    return Lexicon(langs, words, (source_ids, target_ids), fingerprint, path, tuple(file_entries))


def _spelled(word: str, ids: list[int], tokenizer: Tokenizer) -> str:
    """Return the word, or the text of the tokens if the dictionary gives token ids, so that one hash decides for both
    forms whether the entry is withheld."""
    if not _IDS.fullmatch(word):
        return word
    text = tokenizer.hf.decode(ids)
    assert isinstance(text, str)
    return text.strip()


def truecased(
    entries: list[tuple[str, str]], langs: tuple[str, str], forms: Mapping[str, Forms]
) -> tuple[list[tuple[str, str]], int]:
    """Return the entries in the spelling of the training text, without repeats, and the number of entries that this
    changed."""
    columns = list[list[str]]()
    for side in (0, 1):
        words = [entry[side] for entry in entries]
        columns.append(respelled(words, forms[langs[side]]) if langs[side] in forms else words)
    spelled = list(zip(*columns, strict=True))
    return list(dict.fromkeys(spelled)), sum(map(ne, entries, spelled))


def _encoded(words: list[str], tokenizer: Tokenizer, path: Path) -> list[list[int]]:
    """Return the token ids of each word. Each distinct word is encoded once, and in batches, because encodings take
    memory. Raises UserError for an id that the tokenizer does not have."""
    ids: dict[str, list[int]] = {}
    texts = list[str]()
    for word in dict.fromkeys(words):
        if _IDS.fullmatch(word):
            ids[word] = [int(part.removeprefix("id:")) for part in word.split()]
            if max(ids[word]) >= len(tokenizer.hf):
                raise UserError(
                    f"{path}: {word!r} is not in the tokenizer, whose ids are below {len(tokenizer.hf):,}; give "
                    f"the dictionary of this tokenizer"
                )
        else:
            texts.append(word)
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        ids |= zip(batch, tokenizer.encode_inside(batch), strict=True)
    return [ids[word] for word in words]


def pair_of(path: Path, languages: Collection[str] = ()) -> tuple[str, str]:
    """Return the languages in a dictionary's file name, ("en", "de") for en-de.txt. languages: see cut_pair; their
    spelling is used, so that eng-deu.txt is for en and de. Raises UserError."""
    pair = cut_pair(path.name.partition(".")[0], languages)
    if pair is None:
        raise UserError(
            f"{path}: a dictionary's file name says its languages in the order of its columns, such as en-de.txt or, "
            f"with the country in capitals, en-zh-CN.txt"
        )
    first, second = _spelled_as(pair[0], languages), _spelled_as(pair[1], languages)
    return pair if first == second else (first, second)


def _spelled_as(language: str, languages: Collection[str]) -> str:
    """Return the one of `languages` that means the language. If none or several do, return the language itself."""
    names = names_of(language, languages)
    return names[0] if len(names) == 1 else language


def cut_pair(name: str, languages: Collection[str] = ()) -> tuple[str, str] | None:
    """Return the two languages in a name: ("en", "zh-CN") for "en-zh-CN". Return None if the name cannot be split into
    two languages, or in several ways. A split into two of `languages` is preferred to splits whose halves only look
    like languages."""
    parts = name.split("-")
    pattern = _LANGUAGE if len(parts) == 2 else _LANGUAGE_WITH_PARTS
    listed = list[tuple[str, str]]()
    formed = list[tuple[str, str]]()
    spelled = list[tuple[str, str]]()
    for number in range(1, len(parts)):
        first = "-".join(parts[:number])
        second = "-".join(parts[number:])
        if first in languages and second in languages:
            listed.append((first, second))
        if pattern.fullmatch(first) and pattern.fullmatch(second):
            formed.append((first, second))
        if names_of(first, languages) and names_of(second, languages):
            spelled.append((first, second))
    fitting = listed or (formed if len(formed) == 1 else spelled)
    return fitting[0] if len(fitting) == 1 else None


def read_entries(path: Path) -> list[tuple[str, str]]:
    """Return the distinct entries in the order of the file, which is plain, .gz, .xz or .zst. Raises UserError."""
    entries: dict[tuple[str, str], None] = {}
    for number, line in read_lines(path):
        columns = line.split("\t") if "\t" in line else line.split()
        columns = [column.strip() for column in columns]
        if not any(columns):
            continue
        if len(columns) != 2 or not all(columns):
            raise UserError(f"{path}: line {number}: {line!r} is not an entry; needs `source target`")
        entries[columns[0], columns[1]] = None
    if not entries:
        raise UserError(f"{path} holds no entry")
    return list(entries)


def find_lexicon_paths(sources: list[Source], data: Path) -> list[Path]:
    """Return the paths of the dictionaries in the folder `lexicon` of `data`, or else of its parent, whose languages
    the sources have. If a pair has two files, such as de-en and en-de, only the first by name is returned."""
    languages = set(chain.from_iterable(source.langs for source in sources))
    for folder in (data, data.resolve().parent):
        path_of_pair: dict[frozenset[str], Path] = {}
        for path in sorted((folder / "lexicon").glob("*.txt")):
            with suppress(UserError):  # the name is not that of a pair
                pair = frozenset(pair_of(path, languages))
                if pair <= languages:
                    path_of_pair.setdefault(pair, path)
        if path_of_pair:
            return list(path_of_pair.values())
    return []
