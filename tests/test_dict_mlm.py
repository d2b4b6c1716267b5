"""DICT-MLM: which tokens become what, by loops, and its loss and gradients against dense logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM, BertConfig

from tests.plain import sequences_of
from tests.rows import assert_same_gradients, gradients, one_thread, sums  # noqa: F401
from xscale import rng
from xscale.config import load_recipe
from xscale.data.lexicon import Lexicon
from xscale.data.piece import Context
from xscale.data.sequences import Example
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.models.encoder import Encoder
from xscale.objectives import OBJECTIVES, dict_mlm, mlm
from xscale.objectives.base import Parts

LANGUAGES = {"de": 0, "en": 1, "fr": 2}
Translations = dict[str, dict[int, set[int]]]
"""Language -> token -> its single-token translations."""


def random_lexicons(tokenizer: Tokenizer, generator: np.random.Generator) -> tuple[Lexicon, ...]:
    """en-de and fr-en over a third of the vocabulary; some entries have two tokens on a side, some are identical."""
    lexicons = []
    for langs in (("en", "de"), ("fr", "en")):
        ids = generator.choice(tokenizer.ordinary_ids[:900], (600, 2))
        ids[:30, 1] = ids[:30, 0]
        sides = [[[int(x)] if generator.random() < 0.8 else [int(x), 7] for x in column] for column in ids.T]
        lexicons.append(Lexicon(langs, [("a", "b")] * 600, (sides[0], sides[1]), "", Path("x")))
    return tuple(lexicons)


def translations(lexicons: tuple[Lexicon, ...]) -> Translations:
    found: Translations = {language: {} for language in LANGUAGES}
    for lexicon in lexicons:
        for a, b in zip(*lexicon.ids, strict=True):
            if len(a) == len(b) == 1 and a != b:
                found[lexicon.langs[0]].setdefault(a[0], set()).add(b[0])
                found[lexicon.langs[1]].setdefault(b[0], set()).add(a[0])
    return found


def random_samples(tokenizer: Tokenizer, count: int, seed: int) -> list[list[Example]]:
    """Samples of a few sentences each, of random ids, lengths, languages and documents."""
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        language = str(generator.choice(list(LANGUAGES)))
        samples.append(
            [
                Example(
                    (language,),
                    (generator.choice(tokenizer.ordinary_ids[:1200], generator.integers(1, 12)).tolist(),),
                    None,
                    np.uint64(generator.integers(2**63)),
                    follows=number > 0 and generator.random() < 0.7,
                )
                for number in range(generator.integers(1, 6))
            ]
        )
    return samples


@pytest.fixture(scope="module")
def context(tokenizer: Tokenizer) -> Context:
    lexicons = random_lexicons(tokenizer, np.random.default_rng(0))
    return Context(tokenizer, 64, "drop", LANGUAGES, lexicons=lexicons, stream="dict_mlm")


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(**shape, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_id)
    return AutoModelForMaskedLM.from_config(config).double().eval()


def expected_sequences(
    samples: list[list[Example]], options: dict_mlm.Options, context: Context
) -> tuple[list[list[int]], list[dict[int, int]], int]:
    """By loops: each sequence's inputs, its labels by place, and how many targets use a dictionary.

    MLM's own choices are taken from MLM, which tests/test_encode_masking.py covers.
    """
    table, tokenizer = translations(context.lexicons), context.tokenizer
    firsts, room = [], 0  # the first sentence of each sequence gives its identity and, here, its language
    for sample in samples:
        room = 0
        for example in sample:
            if len(example.ids[0]) > room or not example.follows:
                firsts.append(example)
                room = context.max_length - 2
            room -= len(example.ids[0])
    inputs, labels = sequences_of(mlm.collate(samples, mlm.MaskedOptions(options.mask_prob), context))
    used = 0
    for first, shown, said in zip(firsts, inputs, labels, strict=True):
        for place, label in said.items():
            known = sorted(table[first.langs[0]].get(label, ()))
            use = rng.uniform(first.identity ^ rng.key("dict_mlm", "use"), np.uint64(place)) < options.dict_share
            if not known or not use:
                continue
            used += 1
            drawn = float(rng.uniform(first.identity ^ rng.key("dict_mlm", "draw"), np.uint64(place)))
            translation = known[int(drawn * len(known))]
            if options.synonym == "input":
                shown[place] = translation
            else:
                shown[place], said[place] = tokenizer.mask_id, translation
    return inputs, labels, used


CASES = [
    dict_mlm.Options(0.3, synonym=synonym, dict_share=share) for synonym in ("input", "label") for share in (0.5, 1)
]


# 1. Inputs and labels


@pytest.mark.parametrize("options", CASES)
def test_sequences_by_loops(options: dict_mlm.Options, context: Context, tokenizer: Tokenizer) -> None:
    samples = random_samples(tokenizer, 60, 1)
    inputs, labels, used = expected_sequences(samples, options, context)
    piece = dict_mlm.collate(samples, options, context)
    assert sequences_of(piece) == (inputs, labels) and used > 30
    assert piece.targets == {"mlm": sum(map(len, labels)), "translated": used}
    assert not piece.arrays and not piece.types and piece.beside is None


@pytest.mark.parametrize("synonym", ["input", "label"])
def test_the_rules(synonym: str, context: Context, tokenizer: Tokenizer) -> None:
    """Half of the targets that have a translation use it; all others are as in MLM."""
    table = translations(context.lexicons)
    samples = random_samples(tokenizer, 1500, 2)
    plain = mlm.collate(samples, mlm.MaskedOptions(0.3, language_embeddings=True), context)
    piece = dict_mlm.collate(samples, dict_mlm.Options(0.3, language_embeddings=True, synonym=synonym), context)
    places = plain.reads["masked"].places
    assert piece.reads["masked"].places.tolist() == places.tolist() and piece.types and plain.types
    assert piece.sequences.languages.tolist() == plain.sequences.languages.tolist()
    untouched = np.ones(len(plain.sequences.ids), dtype=bool)
    untouched[places] = False
    assert (piece.sequences.ids[untouched] == plain.sequences.ids[untouched]).all()
    names = list(LANGUAGES)
    with_entry = used = masked = kept = without = 0
    for i, place in enumerate(places.tolist()):
        was, label = (int(p.labels["mlm"][i]) for p in (plain, piece))
        shown = int(piece.sequences.ids[place])
        known = table[names[plain.sequences.languages[place]]].get(was, set())
        with_entry += bool(known)
        shown_or_said, other = (shown, label) if synonym == "input" else (label, shown)
        if shown_or_said in known and other == (was if synonym == "input" else tokenizer.mask_id):
            used += 1
            continue
        assert label == was and shown == plain.sequences.ids[place], "not as in MLM"
        if not known:
            without += 1
            masked += shown == tokenizer.mask_id
            kept += shown == was
    # MLM's random token may be a translation by chance.
    assert piece.targets["translated"] <= used < piece.targets["translated"] + 0.01 * with_entry
    assert abs(used / with_entry - 0.5) < 0.03 and with_entry > 1500
    assert abs(masked / without - 0.8) < 0.03 and abs(kept / without - 0.1) < 0.03, "no entry: masked as in MLM"


def test_translations_are_equally_likely(context: Context, tokenizer: Tokenizer) -> None:
    table = translations(context.lexicons)["en"]
    token = max(table, key=lambda t: len(table[t]))
    samples = [[Example(("en",), ([token] * 40,), None, np.uint64(i * 7919))] for i in range(400)]
    labels = dict_mlm.collate(samples, dict_mlm.Options(0.5, dict_share=1.0, synonym="label"), context).labels["mlm"]
    counts = np.unique(labels, return_counts=True)
    assert counts[0].tolist() == sorted(table[token]) and len(table[token]) >= 3
    mean = len(labels) / len(table[token])
    assert (np.abs(counts[1] - mean) < 5 * mean**0.5).all()


def test_other_languages_words_are_not_translated(context: Context, tokenizer: Tokenizer) -> None:
    """A German word has no French translation here, though the same id is in fr-en."""
    table = translations(context.lexicons)
    token = next(t for t in table["fr"] if t not in table["de"])
    sample = [Example(("de",), ([token] * 60,), None, np.uint64(3))]
    targets = dict_mlm.collate([sample], dict_mlm.Options(0.5, dict_share=1.0), context).targets
    assert targets["mlm"] > 10 and targets["translated"] == 0


@pytest.mark.parametrize("options", CASES[::2])
def test_a_record_is_the_same_in_any_company(options: Any, context: Context, tokenizer: Tokenizer) -> None:
    samples = random_samples(tokenizer, 40, 3)
    inputs, labels = sequences_of(dict_mlm.collate(samples, options, context))
    alone = [sequences_of(dict_mlm.collate([sample], options, context)) for sample in reversed(samples)]
    assert [x for one in reversed(alone) for x in one[0]] == inputs
    assert [x for one in reversed(alone) for x in one[1]] == labels
    again = random_samples(tokenizer, 40, 3)
    moved = [[Example(e.langs, e.ids, None, e.identity + np.uint64(1)) for e in sample] for sample in again]
    assert sequences_of(dict_mlm.collate(moved, options, context)) != (inputs, labels)


def test_no_share_is_mlm(context: Context, tokenizer: Tokenizer) -> None:
    samples = random_samples(tokenizer, 20, 4)
    plain = mlm.collate(samples, mlm.MaskedOptions(), context)
    piece = dict_mlm.collate(samples, dict_mlm.Options(dict_share=0.0), context)
    assert sequences_of(piece) == sequences_of(plain)
    assert piece.targets == plain.targets | {"translated": 0} and piece.samples == plain.samples


# 2. Loss


def plain_loss(model: Any, inputs: list[list[int]], labels: list[dict[int, int]]) -> torch.Tensor:
    """Sequence by sequence, without padding, logits at every position."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, targets in zip(inputs, labels, strict=True):
        logits = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0]
        log_p = F.log_softmax(logits, dim=-1)
        for place, label in targets.items():
            total = total - log_p[place, label]
    return total


@pytest.mark.parametrize("options", CASES)
def test_loss_and_gradients(options: Any, context: Context, tokenizer: Tokenizer, model: Any) -> None:
    samples = random_samples(tokenizer, 8, 5)
    inputs, labels, used = expected_sequences(samples, options, context)
    expected = plain_loss(model, inputs, labels)
    piece = dict_mlm.collate(samples, options, context)
    found = sums("dict_mlm", Parts(Encoder(model)), piece, options)
    assert set(found.terms) == {"mlm"} and set(found.metrics) == {"accuracy"}
    torch.testing.assert_close(found.terms["mlm"], expected, rtol=1e-9, atol=0)
    assert_same_gradients(gradients(found.terms["mlm"], model), gradients(expected, model))
    assert (
        dict_mlm.OBJECTIVE.ratios == {"dictionary_share": ("translated", "mlm")} and piece.targets["translated"] == used
    )


def test_a_piece_of_nothing(context: Context, tokenizer: Tokenizer, model: Any) -> None:
    """No target, no loss, but the same fields and the same parameters as any other."""
    options, parts = dict_mlm.Options(), Parts(Encoder(model))
    busy = dict_mlm.collate(random_samples(tokenizer, 4, 6), options, context)
    idle = dict_mlm.collate([], options, context)
    for name in ("reads", "labels", "targets", "arrays"):
        assert getattr(idle, name).keys() == getattr(busy, name).keys()
    assert idle.targets == {"mlm": 0, "translated": 0} and (idle.samples, len(idle.sequences.ids)) == (0, 0)
    found = [sums("dict_mlm", parts, piece, options).terms["mlm"] for piece in (busy, idle)]
    touched = [gradients(loss, model) for loss in found]
    assert found[0] > 0 and found[1] == 0
    assert touched[0].keys() == touched[1].keys() == dict(model.named_parameters(prefix="0")).keys()
    assert not any(g.any() for g in touched[1].values())


# 3. Trouble


def test_a_dictionary_without_single_tokens(context: Context, tokenizer: Tokenizer) -> None:
    lexicon = Lexicon(("en", "de"), [("a", "b")], ([[50, 51]], [[60]]), "", Path("x"))
    poor = Context(tokenizer, 64, "drop", LANGUAGES, lexicons=(lexicon,), stream="s")
    with pytest.raises(UserError, match=r"streams\.s: data\.lexicons has no entry of a single token"):
        dict_mlm.collate(random_samples(tokenizer, 2, 0), dict_mlm.Options(), poor)


@pytest.fixture
def recipe() -> Callable[..., Any]:
    names = {name: objective.options for name, objective in OBJECTIVES.items()}
    return lambda *sets: load_recipe("dict_mlm", list(sets), names).streams["dict_mlm"].options


def test_options(recipe) -> None:
    assert recipe() == dict_mlm.Options(0.15, language_embeddings=True, synonym="input", dict_share=0.5)
    for wrong in ("dict_share=1.5", "dict_share=-0.1", "synonym=output", "mask_prob=0"):
        with pytest.raises(UserError, match=wrong.partition("=")[0]):
            recipe(f"streams.dict_mlm.{wrong}")
