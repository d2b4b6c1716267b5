"""DICT-MLM: which tokens become what, by loops, and its loss and gradients against dense logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM, BertConfig

from xscale import rng
from xscale.config import load_recipe
from xscale.data.collate import Context, MicroBatch
from xscale.data.encode import Example, TextEncoder
from xscale.data.lexicon import Lexicon
from xscale.errors import UserError
from xscale.models.encoder import Encoder
from xscale.objectives import OBJECTIVES, dict_mlm, mlm
from xscale.objectives.base import Parts

LANGUAGES = {"de": 0, "en": 1, "fr": 2}
Translations = dict[str, dict[int, set[int]]]
"""Language -> token -> its single-token translations."""


def random_lexicons(encoder: TextEncoder, generator: np.random.Generator) -> tuple[Lexicon, ...]:
    """en-de and fr-en over a third of the vocabulary; some entries have two tokens on a side, some are identical."""
    lexicons = []
    for langs in (("en", "de"), ("fr", "en")):
        ids = generator.choice(encoder.ordinary_ids[:900], (600, 2))
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


def random_samples(encoder: TextEncoder, count: int, seed: int) -> list[list[Example]]:
    """Samples of a few sentences each, of random ids, lengths and languages."""
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        language = str(generator.choice(list(LANGUAGES)))
        samples.append(
            [
                Example(
                    (language,),
                    (generator.choice(encoder.ordinary_ids[:1200], generator.integers(1, 12)).tolist(),),
                    None,
                    np.uint64(generator.integers(2**63)),
                )
                for _ in range(generator.integers(1, 6))
            ]
        )
    return samples


@pytest.fixture(scope="module")
def context(text_encoder: TextEncoder) -> Context:
    lexicons = random_lexicons(text_encoder, np.random.default_rng(0))
    return Context(text_encoder, 64, "drop", LANGUAGES, lexicons=lexicons, stream="dict_mlm")


@pytest.fixture(scope="module")
def model(text_encoder: TextEncoder) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = BertConfig(**shape, vocab_size=text_encoder.vocab_size, pad_token_id=text_encoder.pad_id)
    return AutoModelForMaskedLM.from_config(config).double().eval()


def expected_arrays(
    samples: list[list[Example]], options: dict_mlm.Options, context: Context
) -> tuple[list[list[int]], list[dict[int, int]], int, int]:
    """By loops: each sequence's inputs, its labels by place, and how many targets there are and use a dictionary.

    MLM's own choices are taken from MLM, which tests/test_encode_masking.py covers.
    """
    table, encoder = translations(context.lexicons), context.encoder
    batch = mlm.collate(samples, mlm.MaskedOptions(options.mask_prob), context)
    width = batch.arrays["input_ids"].shape[1]
    firsts, room = [], 0  # the first sentence of each sequence gives its identity and, here, its language
    for sample in samples:
        room = 0
        for example in sample:
            if len(example.ids[0]) + 1 > room:
                firsts.append(example)
                room = context.max_length - 1
            room -= len(example.ids[0]) + 1
    lengths = batch.arrays["attention_mask"].sum(1).tolist()
    inputs = [row[:n].tolist() for row, n in zip(batch.arrays["input_ids"], lengths, strict=True)]
    labels: list[dict[int, int]] = [{} for _ in inputs]
    used = 0
    for row, label in zip(batch.arrays["rows"].tolist(), batch.arrays["labels"].tolist(), strict=True):
        sequence, place = divmod(row, width)
        first = firsts[sequence]
        known = sorted(table[first.langs[0]].get(label, ()))
        labels[sequence][place] = label
        if known and rng.uniform(first.identity ^ rng.key("dict_mlm", "use"), np.uint64(place)) < options.dict_share:
            used += 1
            drawn = float(rng.uniform(first.identity ^ rng.key("dict_mlm", "draw"), np.uint64(place)))
            translation = known[int(drawn * len(known))]
            if options.synonym == "input":
                inputs[sequence][place] = translation
            else:
                inputs[sequence][place], labels[sequence][place] = encoder.mask_id, translation
    return inputs, labels, len(batch.arrays["rows"]), used


def sequences_of(batch: MicroBatch) -> tuple[list[list[int]], list[dict[int, int]]]:
    width = batch.arrays["input_ids"].shape[1]
    lengths = batch.arrays["attention_mask"].sum(1).tolist()
    inputs = [row[:n].tolist() for row, n in zip(batch.arrays["input_ids"], lengths, strict=True)]
    labels: list[dict[int, int]] = [{} for _ in inputs]
    for row, label in zip(batch.arrays["rows"].tolist(), batch.arrays["labels"].tolist(), strict=True):
        labels[row // width][row % width] = label
    return inputs, labels


CASES = [
    dict_mlm.Options(0.3, synonym=synonym, dict_share=share) for synonym in ("input", "label") for share in (0.5, 1)
]


# 1. Inputs and labels


@pytest.mark.parametrize("options", CASES)
def test_arrays_by_loops(options: dict_mlm.Options, context: Context, text_encoder: TextEncoder) -> None:
    samples = random_samples(text_encoder, 60, 1)
    inputs, labels, targets, used = expected_arrays(samples, options, context)
    batch = dict_mlm.collate(samples, options, context)
    assert sequences_of(batch) == (inputs, labels)
    assert batch.targets == {"mlm": targets} and int(batch.arrays["translated"].sum()) == used > 30
    assert set(batch.arrays) == {"input_ids", "attention_mask", "rows", "labels", "translated"}


@pytest.mark.parametrize("synonym", ["input", "label"])
def test_the_rules(synonym: str, context: Context, text_encoder: TextEncoder) -> None:
    """Half of the targets that have a translation use it; all others are as in MLM."""
    table = translations(context.lexicons)
    samples = random_samples(text_encoder, 1500, 2)
    plain = mlm.collate(samples, mlm.MaskedOptions(0.3, language_embeddings=True), context).arrays
    batch = dict_mlm.collate(samples, dict_mlm.Options(0.3, language_embeddings=True, synonym=synonym), context).arrays
    assert batch["rows"].tolist() == plain["rows"].tolist()
    untouched = np.ones(plain["input_ids"].size, dtype=bool)
    untouched[plain["rows"]] = False
    assert (batch["input_ids"].flat[untouched] == plain["input_ids"].flat[untouched]).all()
    names = list(LANGUAGES)
    with_entry = used = masked = kept = without = 0
    for i, row in enumerate(plain["rows"].tolist()):
        was, shown, label = int(plain["labels"][i]), int(batch["input_ids"].flat[row]), int(batch["labels"][i])
        known = table[names[plain["token_type_ids"].flat[row]]].get(was, set())
        with_entry += bool(known)
        if batch["translated"][i]:
            used += 1
            shown_or_said, other = (shown, label) if synonym == "input" else (label, shown)
            assert shown_or_said in known and other == (was if synonym == "input" else text_encoder.mask_id)
            continue
        assert label == was and shown == plain["input_ids"].flat[row], "not as in MLM"
        if not known:
            without += 1
            masked += shown == text_encoder.mask_id
            kept += shown == was
    assert abs(used / with_entry - 0.5) < 0.03 and with_entry > 1500
    assert abs(masked / without - 0.8) < 0.03 and abs(kept / without - 0.1) < 0.03, "no entry: masked as in MLM"


def test_translations_are_equally_likely(context: Context, text_encoder: TextEncoder) -> None:
    table = translations(context.lexicons)["en"]
    token = max(table, key=lambda t: len(table[t]))
    samples = [[Example(("en",), ([token] * 40,), None, np.uint64(i * 7919))] for i in range(400)]
    batch = dict_mlm.collate(samples, dict_mlm.Options(0.5, dict_share=1.0, synonym="label"), context)
    counts = np.unique(batch.arrays["labels"], return_counts=True)
    assert counts[0].tolist() == sorted(table[token]) and len(table[token]) >= 3
    mean = len(batch.arrays["labels"]) / len(table[token])
    assert (np.abs(counts[1] - mean) < 5 * mean**0.5).all()


def test_other_languages_words_are_not_translated(context: Context, text_encoder: TextEncoder) -> None:
    """A German word has no French translation here, though the same id is in fr-en."""
    table = translations(context.lexicons)
    token = next(t for t in table["fr"] if t not in table["de"])
    sample = [Example(("de",), ([token] * 60,), None, np.uint64(3))]
    batch = dict_mlm.collate([sample], dict_mlm.Options(0.5, dict_share=1.0), context)
    assert len(batch.arrays["rows"]) > 10 and not batch.arrays["translated"].any()


@pytest.mark.parametrize("options", CASES[::2])
def test_a_record_is_the_same_in_any_company(options: Any, context: Context, text_encoder: TextEncoder) -> None:
    samples = random_samples(text_encoder, 40, 3)
    inputs, labels = sequences_of(dict_mlm.collate(samples, options, context))
    alone = [sequences_of(dict_mlm.collate([sample], options, context)) for sample in reversed(samples)]
    assert [x for one in reversed(alone) for x in one[0]] == inputs
    assert [x for one in reversed(alone) for x in one[1]] == labels
    again = random_samples(text_encoder, 40, 3)
    moved = [[Example(e.langs, e.ids, None, e.identity + np.uint64(1)) for e in sample] for sample in again]
    assert sequences_of(dict_mlm.collate(moved, options, context)) != (inputs, labels)


def test_no_share_is_mlm(context: Context, text_encoder: TextEncoder) -> None:
    samples = random_samples(text_encoder, 20, 4)
    plain = mlm.collate(samples, mlm.MaskedOptions(), context).arrays
    batch = dict_mlm.collate(samples, dict_mlm.Options(dict_share=0.0), context).arrays
    assert all((batch[name] == array).all() for name, array in plain.items()) and not batch["translated"].any()


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


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tensors(batch: MicroBatch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.arrays.items()}


@pytest.mark.parametrize("options", CASES)
def test_loss_and_gradients(options: Any, context: Context, text_encoder: TextEncoder, model: Any) -> None:
    samples = random_samples(text_encoder, 8, 5)
    inputs, labels, _, used = expected_arrays(samples, options, context)
    expected = plain_loss(model, inputs, labels)
    expected_gradients = gradients(model, expected)
    sums = dict_mlm.loss(Parts(Encoder(model)), tensors(dict_mlm.collate(samples, options, context)), options)
    torch.testing.assert_close(sums.terms["mlm"], expected, rtol=1e-6, atol=0)
    found = gradients(model, sums.terms["mlm"])
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-12)
    assert sums.metrics["dictionary_share"][0] == used > 0 and sums.metrics["dictionary_share"][1] == "mlm"
    assert set(sums.metrics) == {"accuracy", "dictionary_share"} and set(sums.terms) == {"mlm"}


def test_idle_micro_batch(context: Context, text_encoder: TextEncoder, model: Any) -> None:
    """No target, no loss, but the same arrays and the same parameters as any other."""
    options = dict_mlm.Options()
    busy = dict_mlm.collate(random_samples(text_encoder, 4, 6), options, context)
    idle = dict_mlm.collate([], options, context)
    assert set(idle.arrays) == set(busy.arrays) and idle.targets == {"mlm": 0} and idle.tokens == 0
    touched = []
    for batch in (busy, idle):
        sums = dict_mlm.loss(Parts(Encoder(model)), tensors(batch), options)
        touched.append(gradients(model, sums.terms["mlm"]))
    assert sums.terms["mlm"] == 0 and sums.metrics["dictionary_share"][0] == 0
    assert touched[0].keys() == touched[1].keys() and not any(g.any() for g in touched[1].values())


# 3. Trouble


def test_a_dictionary_without_single_tokens(context: Context, text_encoder: TextEncoder) -> None:
    lexicon = Lexicon(("en", "de"), [("a", "b")], ([[50, 51]], [[60]]), "", Path("x"))
    poor = Context(text_encoder, 64, "drop", LANGUAGES, lexicons=(lexicon,), stream="s")
    with pytest.raises(UserError, match=r"streams\.s: data\.lexicons has no entry of a single token"):
        dict_mlm.collate(random_samples(text_encoder, 2, 0), dict_mlm.Options(), poor)


@pytest.fixture
def recipe() -> Callable[..., Any]:
    names = {name: objective.options for name, objective in OBJECTIVES.items()}
    return lambda *sets: load_recipe("dict_mlm", list(sets), names).streams["dict_mlm"].options


def test_options(recipe) -> None:
    assert recipe() == dict_mlm.Options(0.15, language_embeddings=True, synonym="input", dict_share=0.5)
    for wrong in ("dict_share=1.5", "dict_share=-0.1", "synonym=output", "mask_prob=0"):
        with pytest.raises(UserError, match=wrong.partition("=")[0]):
            recipe(f"streams.dict_mlm.{wrong}")
