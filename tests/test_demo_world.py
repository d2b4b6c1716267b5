import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from data_tools.demo_world import LANGUAGES, World

PUNCTUATION = {".", ",", "?"}

Pair = tuple[list[str], list[str], list[tuple[int, int]]]


@cache
def world() -> World:
    return World(0)


@cache
def pairs(seed: int = 0, count: int = 2000) -> list[Pair]:
    result = []
    for en, xx, links in map(World(seed).pair, range(count)):
        assert re.fullmatch(r"\d+-\d+( \d+-\d+)*", links)
        ends = [link.split("-") for link in links.split(" ")]
        result.append((en.split(" "), xx.split(" "), [(int(i), int(j)) for i, j in ends]))
    return result


def vocabularies(seed: int = 0) -> tuple[Counter[str], Counter[str]]:
    en = Counter(word for sentence, _, _ in pairs(seed) for word in sentence)
    xx = Counter(word for _, sentence, _ in pairs(seed) for word in sentence)
    return en, xx


def test_random_access() -> None:
    first, second = World(3), World(3)
    forwards = [first.pair(i) for i in range(50)]
    assert [second.pair(i) for i in reversed(range(50))] == forwards[::-1]
    assert first.sentence("xx", 7) == second.sentence("xx", 7)
    assert first.dictionary() == second.dictionary()


def test_hash_seed_does_not_matter() -> None:
    script = "from data_tools.demo_world import World; print(*World(3).pair(5), World(3).sentence('xx', 5))"
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run.stdout.split() == " ".join([*World(3).pair(5), World(3).sentence("xx", 5)]).split()


def test_seeds_differ() -> None:
    assert World(0).pair(0)[0] != World(1).pair(0)[0]
    assert len(set(World(0).dictionary()) & set(World(1).dictionary())) < 20


def test_unknown_language() -> None:
    with pytest.raises(ValueError, match="fr"):
        world().sentence("fr", 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_links_are_in_range(seed: int) -> None:
    for en, xx, links in pairs(seed):
        assert links == sorted(set(links))
        assert all(0 <= i < len(en) and 0 <= j < len(xx) for i, j in links)
        assert all(en) and all(xx) and xx
        assert 5 <= len(en) <= 22
        assert (len(en) - 1, len(xx) - 1) in links and en[-1] == xx[-1]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_languages_share_only_punctuation(seed: int) -> None:
    en, xx = vocabularies(seed)
    assert set(en) & set(xx) == PUNCTUATION
    forms_en, forms_xx = map(set, zip(*World(seed).dictionary(), strict=True))
    assert not forms_en & forms_xx
    assert not (forms_en - set(en)) & set(xx)


def test_word_order_differs() -> None:
    def crossing(links: list[tuple[int, int]]) -> bool:
        return any(a < c and b > d for a, b in links for c, d in links)

    assert sum(crossing(links) for _, _, links in pairs()) > 0.8 * len(pairs())


def test_links_are_neither_total_nor_one_to_one() -> None:
    unlinked_en, unlinked_xx, joined, split = 0, 0, 0, 0
    for en, xx, links in pairs():
        of_en, of_xx = Counter(i for i, _ in links), Counter(j for _, j in links)
        unlinked_en += len(en) - len(of_en)
        unlinked_xx += len(xx) - len(of_xx)
        joined += any(n > 1 for n in of_xx.values())
        split += any(n > 1 for n in of_en.values())
    words_en, words_xx = (total.total() for total in vocabularies())
    assert 0.05 * words_en < unlinked_en < 0.3 * words_en
    assert 0.02 * words_xx < unlinked_xx < 0.3 * words_xx
    assert joined > 0.3 * len(pairs())
    assert split > 0.1 * len(pairs())


@pytest.mark.parametrize("seed", [0, 1, 2])
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
    assert len(used) > 0.4 * len(known)


def test_entries_of_a_form_belong_to_one_word() -> None:
    """No xx form translates two unrelated English words."""
    english: dict[str, set[str]] = {}
    for en, xx in world().dictionary():
        english.setdefault(xx, set()).add(en)
    assert max(map(len, english.values())) == 2  # "ate", and "eat" after "did"


def test_vocabulary_sizes() -> None:
    en, xx = vocabularies()
    assert 350 < len(en) < 700
    assert 600 < len(xx) < 2500
    frequent = [count for word, count in en.most_common() if word not in PUNCTUATION]
    assert frequent[0] > 10 * frequent[99] > 20 * frequent[399]


def test_average_lengths() -> None:
    words_en, words_xx = (total.total() for total in vocabularies())
    assert 8 <= words_en / len(pairs()) <= 14
    assert 8 <= words_xx / len(pairs()) <= 14


@pytest.mark.parametrize("language", LANGUAGES)
def test_sentences_are_a_stream_of_their_own(language: str) -> None:
    side = LANGUAGES.index(language)
    parallel = {world().pair(i)[side] for i in range(2000)}
    alone = {world().sentence(language, i) for i in range(2000)}
    assert len(alone & parallel) < 40
    assert len(alone) > 1900
    words = {word for sentence in alone for word in sentence.split()}
    assert len(words & set(vocabularies()[side])) > 0.75 * len(words)
