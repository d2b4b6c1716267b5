"""Bilingual dictionaries in MUSE form (`source target`, one entry a line, several per word), as id tables.

Shape letters: N entries, T tokens that look for a synonym.

A file's name says the pair and the order of the columns: en-de.txt, en-zh-CN.txt.

A share of the entries is withheld from every objective, so that a score can ask for words that none has seen: those of
which either word is, by a hash of the word alone. So files, directions, runs and dictionaries that share a language
agree. (Were one language's words hashed alone, a word of the other would be withheld only if all its translations are:
3.7 % of MUSE's English words with German, 1.2 % once there is a Chinese dictionary too.)
"""

import hashlib
import re
import unicodedata
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import eq
from pathlib import Path

import numpy as np

from xscale import rng
from xscale.data.ragged import offsets
from xscale.data.shards import Source
from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer
from xscale.data.truecase import Forms, respelled
from xscale.data.words import split
from xscale.errors import UserError

_ONE, _WITH_PARTS = r"[A-Za-z]{2,8}(_\w+)?", r"[a-z]{2,3}(_\w+|-[A-Z][a-z]{3}|-[A-Z]{2}|-\d{3})*"
"""Patterns of a language in the name of a pair. _ONE: "-" stands only between the two. _WITH_PARTS: languages have it
too, as in zh-CN, zh-Hans and es-419."""
_ORDER_SAMPLE = 3000
"""Records of each language whose words decide whether the columns are swapped."""
_BATCH = 10_000


@dataclass(frozen=True, eq=False)  # hashed by identity: tables are made of it once a process
class Lexicon:
    langs: tuple[str, str]
    words: list[tuple[str, str]]
    """Entries in the file's order, without repeats."""
    ids: tuple[list[list[int]], list[list[int]]]
    """Token ids of each entry's source and target word, one or more."""
    fingerprint: str
    path: Path
    unknown: int = 0
    """Further entries of the file, which have unknown tokens."""
    changed: int = 0
    """Entries of the file whose spelling was changed to that of the text."""

    @property
    def name(self) -> str:
        return "-".join(self.langs)

    def kept(self, heldout: float) -> "Lexicon":
        """The dictionary without the entries withheld from the objectives. heldout: about their share."""
        return _kept(self, heldout)

    def summary(self) -> str:
        return (
            f"dictionary: {self.path}, {len(self.words):,} entries, {len(self.single()):,} of one token on either "
            f"side; {self.identical:,} have the same tokens on both and say nothing"
            + (f"; {self.unknown:,} others have unknown tokens and are left out" if self.unknown else "")
            + (
                f"; {self.changed:,} were spelled otherwise than mostly in the text, and are now so"
                * bool(self.changed)
            )
        )

    @property
    def identical(self) -> int:
        """Entries whose sides are the same tokens: cosine 1, and no gradient."""
        return sum(a == b for a, b in zip(*self.ids, strict=True))

    def single(self) -> np.ndarray:
        """[n, 2] ids of the entries that are one token on either side."""
        pairs = [(a[0], b[0]) for a, b in zip(*self.ids, strict=True) if len(a) == len(b) == 1]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)


@lru_cache(maxsize=64)
def _kept(lexicon: Lexicon, heldout: float) -> Lexicon:
    of_words = 1 - (1 - heldout) ** 0.5
    out = {word for word in set(chain.from_iterable(lexicon.words)) if withheld(word, of_words)}
    entries = [i for i, (a, b) in enumerate(lexicon.words) if a not in out and b not in out]
    first, second = ([ids[i] for i in entries] for ids in lexicon.ids)
    return replace(lexicon, words=[lexicon.words[i] for i in entries], ids=(first, second))


def same_word(word: str) -> str:
    """One spelling of those that differ in case or in how accents are encoded alone."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", word).casefold())


def withheld(word: str, heldout: float) -> bool:
    """True if no objective sees the entries of this word. heldout: the share of such words."""
    return int(rng.key("lexicon_heldout", same_word(word))) < heldout * 2**64


Word = tuple[int, ...]
"""The token ids of a word."""


@lru_cache(maxsize=256)
def synonyms(lexicons: tuple[Lexicon, ...], language: str) -> dict[Word, list[Word]]:
    """Words of one language -> their translations of as many tokens, by every dictionary that has the language, in
    order."""
    found: dict[Word, set[Word]] = {}
    for lexicon in lexicons:
        for side in (side for side in (0, 1) if lexicon.langs[side] == language):
            for own, other in zip(lexicon.ids[side], lexicon.ids[1 - side], strict=True):
                # A token in the place of itself would show what is to be predicted.
                if len(own) == len(other) and not any(map(eq, own, other)):
                    found.setdefault(tuple(own), set()).add(tuple(other))
    return {word: sorted(translations) for word, translations in found.items()}


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


def load_lexicon(
    path: Path, tokenizer: Tokenizer, languages: Collection[str] = (), forms: Mapping[str, Forms] | None = None
) -> Lexicon:
    """Reads a dictionary. languages: see pair_of. forms: the spellings of each language whose words are respelled
    (data/truecase.py). Raises UserError naming file and line."""
    langs = pair_of(path, languages)
    given = read_entries(path)
    words, changed = truecased(given, langs, forms or {})
    unknown = tokenizer.hf.unk_token_id
    ids = [_encoded([entry[side] for entry in words], tokenizer) for side in (0, 1)]
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
        len(words) - len(kept),
        changed,
    )


def truecased(
    entries: list[tuple[str, str]], langs: tuple[str, str], forms: Mapping[str, Forms]
) -> tuple[list[tuple[str, str]], int]:
    """The entries as the text spells them, without repeats, and how many were changed."""
    sides = [
        respelled([entry[side] for entry in entries], forms[lang]) if lang in forms else [e[side] for e in entries]
        for side, lang in enumerate(langs)
    ]
    spelled = list(zip(*sides, strict=True))
    return list(dict.fromkeys(spelled)), sum(a != b for a, b in zip(entries, spelled, strict=True))


def _encoded(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each word. Each spelling is encoded once, a batch at a time: encodings take memory."""
    distinct = list(dict.fromkeys(words))
    ids: dict[str, list[int]] = {}
    for start in range(0, len(distinct), _BATCH):
        batch = distinct[start : start + _BATCH]
        ids |= zip(batch, tokenizer.encode_inside(batch), strict=True)
    return [ids[word] for word in words]


def pair_of(path: Path, languages: Collection[str] = ()) -> tuple[str, str]:
    """("en", "de") of .../en-de.txt. languages: those that there are, where a name may be cut in several ways."""
    found = cut_pair(path.name.partition(".")[0], languages)
    if found is None:
        raise UserError(
            f"{path}: a dictionary's file name says its languages in the order of its columns, as en-de.txt, or "
            f"en-zh-CN.txt with the country in capitals"
        )
    return found


def cut_pair(name: str, languages: Collection[str] = ()) -> tuple[str, str] | None:
    """The two languages in a name, such as ("en", "zh-CN") in "en-zh-CN". Both are among `languages`, or else look like
    languages. None: the name has no such cut, or several."""
    parts = name.split("-")
    cuts = [("-".join(parts[:i]), "-".join(parts[i:])) for i in range(1, len(parts))]
    form = re.compile(_ONE if len(cuts) == 1 else _WITH_PARTS)
    known = [cut for cut in cuts if set(cut) <= set(languages)]
    found = known or [cut for cut in cuts if all(map(form.fullmatch, cut))]
    return found[0] if len(found) == 1 else None


def read_entries(path: Path) -> list[tuple[str, str]]:
    """Distinct entries in the order of the file, plain, .gz or .xz. Raises UserError."""
    entries: dict[tuple[str, str], None] = {}
    for number, line in read_lines(path):
        columns = [column.strip() for column in line.split("\t")] if "\t" in line else line.split()
        if not any(columns):
            continue
        if len(columns) != 2 or not all(columns):
            raise UserError(f"{path}: line {number}: {line!r} is not an entry; needs `source target`")
        entries[columns[0], columns[1]] = None
    if not entries:
        raise UserError(f"{path} holds no entry")
    return list(entries)


def check_order(lexicon: Lexicon, path: Path, sources: list[Source]) -> None:
    """Raises UserError where the columns are in the order opposite to the file's name, going by the training text."""
    seen = {language: _words_of(language, sources) for language in lexicon.langs}
    absent = [language for language, found in seen.items() if not found]
    if absent:
        raise UserError(f"{path}: --data has no text in {', '.join(absent)}; add shards, or leave the dictionary out")
    first, second = (seen[language] for language in lexicon.langs)
    words = [(a.lower(), b.lower()) for a, b in lexicon.words]
    straight = sum((a in first) + (b in second) for a, b in words)
    swapped = sum((a in second) + (b in first) for a, b in words)
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
                pair = frozenset(pair_of(path, languages))
                if pair <= languages:
                    found.setdefault(pair, path)
        if found:
            return list(found.values())
    return []
