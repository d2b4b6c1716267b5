import os
import re
import subprocess
import sys
from functools import cache
from itertools import chain

import pytest

from data_tools.demo_world import NAMES, WRITTEN, World, to_yy_script
from xscale.data.words import split_words_and_symbols

PUNCTUATION = {".", ",", "?"}
NAMES_OF_BOTH = set(NAMES.split())

Pair = tuple[list[str], list[str], list[tuple[int, int]]]


@cache
def world() -> World:
    return World(0)


@cache
def pairs(seed: int = 0, count: int = 400) -> list[Pair]:
    world = World(seed)
    return read([world.pair(i) for i in range(count)])


def read(written: list[tuple[str, str, str]]) -> list[Pair]:
    """Words of both texts, without the capital of the first; links."""
    en, other = (words_of([pair[side] for pair in written]) for side in (0, 1))
    return [(*texts, ends_of(pair[2])) for *texts, pair in zip(en, other, written, strict=True)]


def ends_of(links: str) -> list[tuple[int, int]]:
    assert re.fullmatch(r"\d+-\d+( \d+-\d+)*", links)
    return [(int(i), int(j)) for i, j in (link.split("-") for link in links.split(" "))]


def words_of(texts: list[str]) -> list[list[str]]:
    found = []
    for (first, *rest), _ in split_words_and_symbols(texts):
        found.append([first if is_name(first) else first[0].lower() + first[1:], *rest])
    return found


def is_name(word: str) -> bool:
    return word.startswith(tuple(NAMES_OF_BOTH))


def vocabularies() -> tuple[set[str], set[str]]:
    en = {word for sentence, _, _ in pairs() for word in sentence}
    xx = {word for _, sentence, _ in pairs() for word in sentence}
    return en, xx


def test_hash_seed_does_not_matter() -> None:
    script = "from data_tools.demo_world import World; print(*World(3).pair(5, 'yy'), *World(3).document('xx', 5))"
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.stdout.split() == " ".join([*World(3).pair(5, "yy"), *World(3).document("xx", 5)]).split()


def test_seeds_differ() -> None:
    assert World(0).pair(0)[0] != World(1).pair(0)[0]
    shared = set(World(0).dictionary()) & set(World(1).dictionary())
    assert len([entry for entry in shared if not is_name(entry[0])]) < 20


def test_another_script() -> None:
    """yy is xx in characters that stand without spaces; its links are those of xx, spread over a word's characters."""
    texts = []
    for index, (_, xx, links) in enumerate(pairs()[:300]):
        en, text, pharaoh = world().pair(index, "yy")
        assert en == world().pair(index)[0] and " " not in text
        ends: list[int] = []
        for word in xx:
            ends.append((ends[-1] if ends else 0) + len(to_yy_script(word)))
        of_word = {c: w for w, end in enumerate(ends) for c in range(end - len(to_yy_script(xx[w])), end)}
        assert "".join(map(to_yy_script, xx)) == text and ends[-1] == len(text)
        assert {(i, of_word[j]) for i, j in ends_of(pharaoh)} == set(links)
        texts.append(text)
    assert [characters for characters, _ in split_words_and_symbols(texts)] == [list(text) for text in texts]


def test_languages_share_only_punctuation() -> None:
    en, xx = vocabularies()
    assert en & xx == PUNCTUATION | NAMES_OF_BOTH
    entries = [entry for entry in World(0).dictionary() if not is_name(entry[0])]
    forms_en, forms_xx = map(set, zip(*entries, strict=True))
    assert not forms_en & forms_xx
    assert not (forms_en - en) & xx


@pytest.mark.parametrize("seed", [0, 1])
def test_dictionary_agrees_with_links(seed: int) -> None:
    entries = World(seed).dictionary()
    assert len(entries) == len(set(entries))
    content_en, content_xx = map(set, zip(*entries, strict=True))
    known = set(entries)
    used = set()
    for en, xx, links in pairs(seed):
        for i, word in enumerate(en):
            if word in content_en:
                translations = [xx[j] for a, j in links if a == i]
                assert len(translations) == 1
                used.add((word, translations[0]))
        linked = {j for i, j in links if en[i] in content_en}
        assert all(j in linked for j, word in enumerate(xx) if word in content_xx)
    assert used <= known
    assert len(used) > 0.3 * len(known)


@pytest.mark.parametrize("language", WRITTEN)
def test_sentences_are_a_stream_of_their_own(language: str) -> None:
    side, other = (0, "xx") if language == "en" else (1, language)
    parallel = {world().pair(i, other)[side] for i in range(400)}
    alone = [sentence for i in range(80) for sentence in world().document(language, i)]
    assert len(parallel & set(alone)) < 20
    assert len(set(alone)) > 0.95 * len(alone) > 300
    words, of_parallel = (set(chain(*words_of(list(texts)))) for texts in (alone, parallel))
    assert len(words & of_parallel) > 0.75 * len(words)
