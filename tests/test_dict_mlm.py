"""DICT-MLM: which tokens become what, by loops. Its loss is that of MLM: tests/test_reference.py."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plain import sequences_of
from tests.rows import one_thread  # noqa: F401
from xscale import rng
from xscale.data.lexicon import Lexicon
from xscale.data.sequences import Example
from xscale.data.stream_batch import CollateContext
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import TokenWords
from xscale.errors import UserError
from xscale.objectives import dict_mlm, mlm

LANGUAGES = {"de": 1, "en": 2, "fr": 3}
Word = tuple[int, ...]
Translations = dict[str, dict[Word, set[Word]]]
"""Language -> word -> its translations of as many tokens."""


def random_lexicons(tokenizer: Tokenizer, generator: np.random.Generator) -> tuple[Lexicon, ...]:
    """en-de and fr-en over a third of the vocabulary; a third of the sides has two tokens, of some entries a token
    stays in its place."""
    lexicons = []
    for langs in (("en", "de"), ("fr", "en")):
        ids = generator.choice(tokenizer.ordinary_ids[:900], (600, 4))
        ids[:30, 2:] = ids[:30, :2]
        ids[30:60, 3] = ids[30:60, 1]
        sizes = np.where(generator.random((600, 2)) < 0.35, 2, 1)
        sides = [[row[:n].tolist() for row, n in zip(ids[:, 2 * s :], sizes[:, s], strict=True)] for s in (0, 1)]
        lexicons.append(Lexicon(langs, [("a", "b")] * 600, (sides[0], sides[1]), "", Path("x")))
    return tuple(lexicons)


def translations(lexicons: tuple[Lexicon, ...]) -> Translations:
    found: Translations = {language: {} for language in LANGUAGES}
    for lexicon in lexicons:
        for a, b in zip(*map(lambda side: map(tuple, side), lexicon.ids), strict=True):
            if len(a) == len(b) and all(x != y for x, y in zip(a, b, strict=True)):
                found[lexicon.langs[0]].setdefault(a, set()).add(b)
                found[lexicon.langs[1]].setdefault(b, set()).add(a)
    return found


def sentence(language: str, words: list[Word], identity: int, follows: bool = False) -> Example:
    of_token = np.repeat(np.arange(len(words)), [len(word) for word in words])
    ids = [token for word in words for token in word]
    found = TokenWords(of_token, np.arange(len(ids)), of_token, np.ones(len(words), dtype=bool))
    return Example((language,), (ids,), (found,), np.uint64(identity), follows=follows)


def random_samples(context: CollateContext, count: int, seed: int) -> list[list[Example]]:
    """Samples of a few sentences each, of random words, lengths, languages and documents; half of the words are in a
    dictionary of their language."""
    generator = np.random.default_rng(seed)
    known = {language: sorted(words) for language, words in translations(context.lexicons).items()}
    ordinary = context.tokenizer.ordinary_ids

    def word(language: str) -> Word:
        if known[language] and generator.random() < 0.5:
            return known[language][generator.integers(len(known[language]))]
        return tuple(generator.choice(ordinary[900:1200], generator.integers(1, 3)).tolist())

    samples = []
    for _ in range(count):
        language = str(generator.choice(list(LANGUAGES)))
        samples.append(
            [
                sentence(
                    language,
                    [word(language) for _ in range(generator.integers(1, 12))],
                    generator.integers(2**63),
                    follows=number > 0 and generator.random() < 0.7,
                )
                for number in range(generator.integers(1, 6))
            ]
        )
    return samples


def laid_out(samples: list[list[Example]], context: CollateContext) -> list[tuple[Example, dict[int, Word]]]:
    """By loops: of each sequence its first sentence, which gives its identity and, here, its language, and its words by
    the place of their first token."""
    found: list[tuple[Example, dict[int, Word]]] = []
    for sample in samples:
        room = 0
        for example in sample:
            ids, numbers = example.ids[0], example.words[0].word_of_token.tolist()
            if len(ids) > room or not example.follows:
                found.append((example, {}))
                room = context.max_length - 2
            start = 1 + context.max_length - 2 - room
            for number in dict.fromkeys(numbers):
                at = numbers.index(number)
                found[-1][1][start + at] = tuple(ids[at : at + numbers.count(number)])
            room -= len(ids)
    return found


@pytest.fixture(scope="module")
def context(tokenizer: Tokenizer) -> CollateContext:
    lexicons = random_lexicons(tokenizer, np.random.default_rng(0))
    return CollateContext(tokenizer, 64, "drop", LANGUAGES, lexicons=lexicons, stream="dict_mlm")


def expected_sequences(
    samples: list[list[Example]], options: dict_mlm.DictMlmOptions, context: CollateContext
) -> tuple[list[list[int]], list[dict[int, int]], int]:
    """By loops: each sequence's inputs, its labels by place, and how many targets use a dictionary.

    MLM's own choices are taken from MLM, which tests/test_encode_masking.py covers.
    """
    table, tokenizer = translations(context.lexicons), context.tokenizer
    plain = mlm.MaskedOptions(options.mask_prob, whole_word=options.whole_word)
    inputs, labels = sequences_of(mlm.collate(samples, plain, context))
    used = 0
    for (first, words), shown, said in zip(laid_out(samples, context), inputs, labels, strict=True):
        known = table[first.langs[0]]
        chosen = {
            at: word for at, word in words.items() if word in known and all(at + i in said for i in range(len(word)))
        }
        for at, word in chosen.items():
            use = rng.uniform(first.random_key ^ rng.key("dict_mlm", "use"), np.uint64(at))
            if use >= options.dict_share:
                continue
            used += len(word)
            drawn = float(rng.uniform(first.random_key ^ rng.key("dict_mlm", "draw"), np.uint64(at)))
            translation = sorted(known[word])[int(drawn * len(known[word]))]
            for i, token in enumerate(translation):
                if options.synonym == "input":
                    shown[at + i] = token
                else:
                    shown[at + i], said[at + i] = tokenizer.mask_id, token
    return inputs, labels, used


CASES = [
    dict_mlm.DictMlmOptions(0.3, whole_word=whole_word, synonym=synonym, dict_share=share)
    for synonym in ("input", "label")
    for share, whole_word in ((0.3, True), (1, True), (0.5, False))
]


# 1. Inputs and labels


@pytest.mark.parametrize("options", CASES)
def test_sequences_by_loops(options: dict_mlm.DictMlmOptions, context: CollateContext, tokenizer: Tokenizer) -> None:
    samples = random_samples(context, 60, 1)
    inputs, labels, used = expected_sequences(samples, options, context)
    stream_batch = dict_mlm.collate(samples, options, context)
    assert sequences_of(stream_batch) == (inputs, labels) and used > 30
    assert stream_batch.target_counts == {"mlm": sum(map(len, labels)), "translated": used}
    assert dict_mlm.OBJECTIVE.ratios == {"dictionary_share": ("translated", "mlm")}
    assert not stream_batch.arrays and not stream_batch.types and stream_batch.auxiliary is None


def test_translations_are_equally_likely(context: CollateContext, tokenizer: Tokenizer) -> None:
    table = translations(context.lexicons)["en"]
    word = max(table, key=lambda word: len(table[word]))
    samples = [[sentence("en", [word] * 40, i * 7919)] for i in range(400)]
    stream_batch = dict_mlm.collate(samples, dict_mlm.DictMlmOptions(0.5, dict_share=1.0, synonym="label"), context)
    counts = Counter(tuple(row) for row in stream_batch.labels["mlm"].reshape(-1, len(word)).tolist())
    assert set(counts) == table[word] and len(table[word]) >= 3
    mean = counts.total() / len(table[word])
    assert all(abs(count - mean) < 5 * mean**0.5 for count in counts.values())


def test_a_shown_translation_has_its_own_language_s_number(context: CollateContext) -> None:
    samples = random_samples(context, 60, 2)
    types: dict[str, Any] = {"language_embeddings": True, "language_dropout": 0.0}
    plain = mlm.collate(samples, mlm.MaskedOptions(0.3, True, **types), context)
    for synonym in ("input", "label"):
        options = dict_mlm.DictMlmOptions(0.3, synonym=synonym, dict_share=1.0, **types)
        found = dict_mlm.collate(samples, options, context)
        moved = np.flatnonzero(found.sequences.languages != plain.sequences.languages)
        assert found.types and set(moved) <= set(plain.states["masked"].columns)
        translated = found.target_counts["translated"]
        assert len(moved) > 0.9 * translated > 0 if synonym == "input" else len(moved) == 0


# 2. Trouble


def test_a_dictionary_without_entries_of_as_many_tokens(context: CollateContext, tokenizer: Tokenizer) -> None:
    lexicon = Lexicon(("en", "de"), [("a", "b")], ([[50, 51]], [[60]]), "", Path("x"))
    poor = CollateContext(tokenizer, 64, "drop", LANGUAGES, lexicons=(lexicon,), stream="s")
    with pytest.raises(UserError, match=r"streams\.s: no dictionary entry .*larger dictionary"):
        dict_mlm.collate(random_samples(context, 2, 0), dict_mlm.DictMlmOptions(), poor)
