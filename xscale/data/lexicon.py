"""Bilingual dictionaries in MUSE form (`source target`, one entry a line, several per word), as id tables.

Shape letters: N entries, T tokens that look for a synonym.

A file's name says the pair and the order of the columns: en-de.txt.

A share of the entries is withheld from every objective, so that a score can ask for words that none has seen: those of
which either word is, by a hash of the word alone. So files, directions, runs and dictionaries that share a language
agree. (Were one language's words hashed alone, a word of the other would be withheld only if all its translations are:
3.7 % of MUSE's English words with German, 1.2 % once there is a Chinese dictionary too.)
"""

import hashlib
import re
import unicodedata
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from xscale import rng
from xscale.data.ragged import offsets
from xscale.data.shards import Source
from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import split
from xscale.errors import UserError

_NAME = re.compile(r"^([A-Za-z]{2,8})-([A-Za-z]{2,8})$")
_ORDER_SAMPLE = 3000
"""Records of each language whose words decide whether the columns are swapped."""


@dataclass(frozen=True, eq=False)  # hashed by identity: tables are made of it once a process
class Lexicon:
    langs: tuple[str, str]
    words: list[tuple[str, str]]
    """Entries in the file's order, without repeats."""
    ids: tuple[list[list[int]], list[list[int]]]
    """Token ids of each entry's source and target word, one or more."""
    fingerprint: str
    path: Path

    @property
    def name(self) -> str:
        return "-".join(self.langs)

    def kept(self, heldout: float) -> "Lexicon":
        """Without the entries of which either word is withheld from the objectives: about this share of them."""
        of_words = 1 - (1 - heldout) ** 0.5
        entries = [i for i, entry in enumerate(self.words) if not any(withheld(word, of_words) for word in entry)]
        first, second = ([ids[i] for i in entries] for ids in self.ids)
        return replace(self, words=[self.words[i] for i in entries], ids=(first, second))

    def summary(self) -> str:
        return (
            f"dictionary: {self.path}, {len(self.words):,} entries, {len(self.single()):,} of one token on either "
            f"side; {self.identical:,} have the same tokens on both and say nothing"
        )

    @property
    def identical(self) -> int:
        """Entries whose sides are the same tokens: cosine 1, and no gradient."""
        return sum(a == b for a, b in zip(*self.ids, strict=True))

    def single(self) -> np.ndarray:
        """[n, 2] ids of the entries that are one token on either side."""
        pairs = [(a[0], b[0]) for a, b in zip(*self.ids, strict=True) if len(a) == len(b) == 1]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def same_word(word: str) -> str:
    """One spelling of those that differ in case or in how accents are encoded alone."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", word).casefold())


def withheld(word: str, heldout: float) -> bool:
    """Whether no objective sees the entries of this word; `heldout` of all words are so."""
    return int(rng.key("lexicon_heldout", same_word(word))) < heldout * 2**64


class SynonymTable:
    """Tokens of one language -> their translations, one token each, by every dictionary that has the language."""

    def __init__(self, lexicons: tuple[Lexicon, ...], language: str):
        columns = [np.empty((0, 2), dtype=np.int64)]
        for lexicon in lexicons:
            columns += [
                lexicon.single()[:, ::flip] for side, flip in ((0, 1), (1, -1)) if lexicon.langs[side] == language
            ]
        pairs = np.unique(np.concatenate(columns), axis=0)
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]  # a word that is its own synonym would show itself
        self.tokens, self.synonyms = pairs.T

    def draw(self, tokens_T: np.ndarray, chance_T: np.ndarray) -> np.ndarray:
        """For each token one of its synonyms, all equally likely; -1 where it has none. chance: in [0, 1)."""
        first, end = (np.searchsorted(self.tokens, tokens_T, side=side) for side in ("left", "right"))
        picked = first + (chance_T * (end - first)).astype(np.int64)
        return np.where(end > first, np.append(self.synonyms, -1)[picked], -1)


@lru_cache(maxsize=256)
def synonyms(lexicons: tuple[Lexicon, ...], language: str) -> SynonymTable:
    return SynonymTable(lexicons, language)


class Ragged:
    """Lists of token ids, end to end."""

    def __init__(self, lists: list[list[int]]):
        self.lengths = np.array([len(ids) for ids in lists], dtype=np.int64)
        self.values = np.array([token for ids in lists for token in ids], dtype=np.int64)

    def take(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The chosen lists end to end, and where each starts."""
        lengths = self.lengths[which]
        first = np.cumsum(self.lengths)[which] - lengths
        return self.values[np.repeat(first, lengths) + offsets(lengths)], np.cumsum(lengths) - lengths


@lru_cache(maxsize=16)
def entries(lexicons: tuple[Lexicon, ...], single: bool) -> tuple[Ragged, Ragged]:
    """Token ids of both sides of every entry whose sides differ [N]; `single`: only of entries that are one token on
    either side."""
    pairs = [(a, b) for lexicon in lexicons for a, b in zip(*lexicon.ids, strict=True) if a != b]
    if single:
        pairs = [(a, b) for a, b in pairs if len(a) == len(b) == 1]
    return Ragged([a for a, _ in pairs]), Ragged([b for _, b in pairs])


def load_lexicon(path: Path, tokenizer: Tokenizer) -> Lexicon:
    """Raises UserError naming file and line."""
    langs = pair_of(path)
    words = read_entries(path)
    unknown = tokenizer.hf.unk_token_id
    ids = [tokenizer.encode_inside([entry[side] for entry in words]) for side in (0, 1)]
    kept = [i for i, (a, b) in enumerate(zip(*ids, strict=True)) if a and b and unknown not in (*a, *b)]
    if not kept:
        raise UserError(f"{path}: the tokenizer knows no entry of it; is it the dictionary of another language?")
    content = "\n".join(f"{a}\t{b}" for a, b in words).encode()
    return Lexicon(
        langs,
        [words[i] for i in kept],
        ([ids[0][i] for i in kept], [ids[1][i] for i in kept]),
        hashlib.sha256(content).hexdigest()[:16],
        path,
    )


def pair_of(path: Path) -> tuple[str, str]:
    """("en", "de") of .../en-de.txt."""
    match = _NAME.match(path.name.partition(".")[0])
    if not match:
        raise UserError(
            f"{path}: a dictionary's file name says its languages in the order of its columns, as en-de.txt"
        )
    return match[1], match[2]


def read_entries(path: Path) -> list[tuple[str, str]]:
    """Distinct entries in the order of the file, plain, .gz or .xz. Raises UserError."""
    entries: dict[tuple[str, str], None] = {}
    for number, line in read_lines(path):
        if not line.strip():
            continue
        columns = line.split("\t") if "\t" in line else line.split()
        if len(columns) != 2 or not all(column.strip() for column in columns):
            raise UserError(f"{path}: line {number}: {line!r} is not an entry; needs `source target`")
        entries[columns[0].strip(), columns[1].strip()] = None
    if not entries:
        raise UserError(f"{path} holds no entry")
    return list(entries)


def check_order(lexicon: Lexicon, path: Path, sources: list[Source]) -> None:
    """Raises UserError where the columns are in the order opposite to the file's name, going by the training text."""
    seen = {language: _words_of(language, sources) for language in lexicon.langs}
    absent = [language for language, found in seen.items() if not found]
    if absent:
        raise UserError(f"{path}: --data has no text in {', '.join(absent)}; its dictionary can't be used")
    first, second = (seen[language] for language in lexicon.langs)
    straight = sum((a in first) + (b in second) for a, b in lexicon.words)
    swapped = sum((a in second) + (b in first) for a, b in lexicon.words)
    if swapped > straight:
        a, b = lexicon.langs
        raise UserError(
            f"{path}: its columns look like {b} {a}, its name says {a} {b} ({swapped:,} words fit the text the other "
            f"way round, {straight:,} as named). Rename it to {b}-{a}.txt or swap the columns"
        )


def _words_of(language: str, sources: list[Source]) -> set[str]:
    found: set[str] = set()
    for source in sources:
        if language in source.langs:
            side = source.langs.index(language)
            n = min(_ORDER_SAMPLE, int(source.counts[0]))
            texts = [source.read(0, record).texts[side].lower() for record in range(n)]
            found.update(word for words, _ in split(texts) for word in words)
    return found


def find_lexicons(sources: list[Source], data: Path) -> list[Path]:
    """Dictionaries in `lexicon/` in `data` or its parent whose pair --data has; one of en-de and de-en, the first."""
    languages = {language for source in sources for language in source.langs}
    for folder in (data, data.resolve().parent):
        found: dict[frozenset[str], Path] = {}
        for path in sorted((folder / "lexicon").glob("*.txt")):
            with suppress(UserError):  # a name that says no pair
                pair = frozenset(pair_of(path))
                if pair <= languages:
                    found.setdefault(pair, path)
        if found:
            return list(found.values())
    return []
