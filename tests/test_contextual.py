"""Contextual alignment against the paper's sums, written out sentence by sentence, in fp64."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_alignlm import (
    EMPTY,
    Pair,
    assert_same_gradients,
    context,
    examples_of,
    gradients,
    noise,
    random_pairs,
    tensors,
    tiny,
)
from xscale.data.encode import TextEncoder, fit_pairs
from xscale.errors import UserError
from xscale.models.encoder import Encoder, build_encoder
from xscale.objectives import contextual
from xscale.objectives.base import Parts


@pytest.fixture(scope="module")
def parts(text_encoder: TextEncoder) -> Parts:
    """A trained encoder that has moved away from its frozen beginning."""
    torch.manual_seed(2)
    encoder = tiny(text_encoder)
    noise(encoder)
    encoder.float().double()  # as fp32 masters would hold it
    companion = contextual.Frozen(encoder)
    noise(encoder)
    return Parts(encoder, companion=companion)


@pytest.fixture(scope="module")
def initial(parts: Parts) -> Encoder:
    return copy.deepcopy(parts.companion.initial).double()


def paper(
    f: Encoder, f0: Encoder, pairs: list[Pair], kept: list[tuple[int, int]], text: TextEncoder, english: int
) -> dict[str, Any]:
    """L and R, and their numbers of terms. kept: how many tokens of each text are left."""

    def states(encoder: Encoder, sentence: str, length: int) -> tuple[Tensor, dict[int, int]]:
        """States of a sentence's tokens without special ones, and the last token of each word."""
        pieces = [(token, w) for w, word in enumerate(sentence.split()) for token in text.encode([word])[0]][:length]
        ids = [text.cls_id, *(token for token, _ in pieces), text.sep_id]
        hidden = encoder.lm.bert(input_ids=torch.tensor([ids])).last_hidden_state[0]
        last = {}
        for i, (_, w) in enumerate(pieces):
            last[w] = i
        return hidden[1:-1], last

    zero = torch.zeros((), dtype=torch.float64)
    found: dict[str, Any] = {"align": zero, "anchor": zero, "links": 0, "tokens": 0}
    for (*sentences, links), lengths in zip(pairs, kept, strict=True):
        (s, last_s), (t, last_t) = (states(f, *side) for side in zip(sentences, lengths, strict=True))
        for i, j in {tuple(map(int, link.split("-"))) for link in links.split()}:
            if i in last_s and j in last_t:
                found["align"] = found["align"] + ((s[last_s[i]] - t[last_t[j]]) ** 2).sum()
                found["links"] += 1
        with torch.no_grad():
            beginning, _ = states(f0, sentences[english], lengths[english])
        for now, then in zip((s, t)[english], beginning, strict=True):
            found["anchor"] = found["anchor"] + ((now - then) ** 2).sum()
            found["tokens"] += 1
    return found


@pytest.mark.parametrize(("anchor", "max_length"), [("en", 128), ("xx", 128), ("xx", 20), ("en", 14)])
def test_loss_and_gradients_are_the_papers(
    text_encoder: TextEncoder, parts: Parts, initial: Encoder, anchor: str, max_length: int
) -> None:
    options = contextual.Options(anchor=anchor, anchor_weight=0.7)
    pairs = random_pairs(10, seed=max_length)
    samples = examples_of(text_encoder, pairs)
    batch = contextual.collate(samples, options, context(text_encoder, max_length))
    kept = [tuple(map(len, e.ids)) for e in fit_pairs([s[0] for s in samples], max_length, "truncate")[0]]
    expected = paper(parts.encoder, initial, pairs, kept, text_encoder, ("en", "xx").index(anchor))
    assert batch.targets == {"align": expected["links"], "anchor": expected["tokens"]}
    assert batch.sequences == 10 and batch.tokens == sum(map(sum, kept)) + 40
    assert bool(batch.too_long) == (max_length < 128) and expected["links"] > 10
    sums = contextual.loss(parts, tensors(batch), options)
    assert list(sums.terms) == list(batch.targets)
    for term, value in sums.terms.items():
        torch.testing.assert_close(value, expected[term], rtol=1e-6, atol=0)
    factors = contextual.OBJECTIVE.terms(options)
    assert factors == {"align": 1.0, "anchor": 0.7}

    def whole(terms: dict[str, Tensor]) -> Tensor:
        return sum(factors[term] * terms[term] / n for term, n in batch.targets.items())

    assert_same_gradients(gradients(whole(sums.terms), parts.encoder), gradients(whole(expected), parts.encoder))


def test_pairs_may_have_either_order_of_languages(text_encoder: TextEncoder, parts: Parts) -> None:
    """(en, xx) and the same pair as (xx, en), links turned round, are one thing."""
    pairs = random_pairs(4, seed=1)
    turned = [(b, a, " ".join("-".join(link.split("-")[::-1]) for link in links.split())) for a, b, links in pairs]
    values = []
    for langs, made in ((("en", "xx"), pairs), (("xx", "en"), turned)):
        samples = examples_of(text_encoder, made, langs)
        batch = contextual.collate(samples, contextual.Options(), context(text_encoder))
        sums = contextual.loss(parts, tensors(batch), contextual.Options())
        values.append({term: value.item() / batch.targets[term] for term, value in sums.terms.items()})
    assert values[0] == pytest.approx(values[1], rel=1e-9)


def test_a_pair_without_the_anchor_language(text_encoder: TextEncoder) -> None:
    samples = examples_of(text_encoder, random_pairs(1), ("de", "xx"))
    with pytest.raises(UserError, match=r"'r0' is in de and xx, not in the anchor language 'en'"):
        contextual.collate(samples, contextual.Options(), context(text_encoder))


@pytest.mark.parametrize(("links", "word"), [("0-9", "'0-9'"), (None, "no word links"), ("zero", "'zero'")])
def test_links_that_do_not_fit_name_the_record(text_encoder: TextEncoder, links: Any, word: str) -> None:
    samples = examples_of(text_encoder, [("david will", "naz vij", links)])
    with pytest.raises(UserError, match=f"record 'r0'.*{word}|{word}.*record 'r0'"):
        contextual.collate(samples, contextual.Options(), context(text_encoder))


def test_an_idle_rank_touches_the_same_parameters(text_encoder: TextEncoder, parts: Parts) -> None:
    touched = {}
    for name, pairs in EMPTY.items():
        options = contextual.Options()
        batch = contextual.collate(examples_of(text_encoder, pairs), options, context(text_encoder, 16, "drop"))
        sums = contextual.loss(parts, tensors(batch), options)
        found = gradients(sum(sums.terms.values()), parts.encoder)
        touched[name] = {p for p, g in found.items() if g is not None}
        assert list(batch.targets) == ["align", "anchor"]
        if name in ("no sample", "all dropped"):
            assert batch.targets == {"align": 0, "anchor": 0} and (batch.tokens, batch.sequences) == (0, 0)
            assert batch.too_long == len(pairs)
            assert not any(v.item() for v in sums.terms.values())
            assert not any(g.any() for g in found.values() if g is not None)
        else:
            assert batch.targets["anchor"] > 0 and bool(batch.targets["align"]) == (name == "links")
    assert all(names == touched["links"] for names in touched.values())


# The frozen copy


def fresh(text: TextEncoder, dropout: float) -> Encoder:
    return build_encoder(
        init=None, preset="tiny", dropout=dropout, max_length=32, vocab_size=text.vocab_size, pad_id=text.pad_id,
        languages=["en", "xx"], language_embeddings=False, reset_positions=False, seed=0,
    )  # fmt: skip


def test_before_the_first_step_nothing_has_moved(text_encoder: TextEncoder) -> None:
    """R = 0 at the start; training the encoder, or updating, leaves the copy where it was."""
    encoder = fresh(text_encoder, 0.0)
    companion = contextual.OBJECTIVE.companion(encoder, None, contextual.Options())
    batch = contextual.collate(examples_of(text_encoder, random_pairs(3)), contextual.Options(), context(text_encoder))

    def anchor() -> float:
        return (
            contextual.loss(Parts(encoder, None, companion), tensors(batch), contextual.Options())
            .terms["anchor"]
            .item()
        )

    assert anchor() == 0
    noise(encoder)
    moved = anchor()
    assert moved > 0
    companion.update(applied=True)
    assert anchor() == moved


def test_the_copy_has_no_dropout_no_gradients_and_no_place_among_modules(text_encoder: TextEncoder) -> None:
    encoder = fresh(text_encoder, 0.5).train()
    companion = contextual.Frozen(encoder)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    state = torch.get_rng_state()
    first, again = (companion.hidden(encoder, batch) for _ in range(2))
    assert torch.equal(first, again) and torch.equal(state, torch.get_rng_state())
    assert not first.requires_grad and not any(p.requires_grad for p in companion.initial.parameters())
    assert not isinstance(companion, torch.nn.Module), "DeepSpeed would cast it"


def test_the_copy_computes_in_the_encoders_type_and_stays_fp32(text_encoder: TextEncoder) -> None:
    encoder = fresh(text_encoder, 0.0)
    companion = contextual.Frozen(encoder)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    exact = companion.hidden(encoder, batch)
    encoder.bfloat16()
    rounded = companion.hidden(encoder, batch)
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, encoder.hidden(batch))
    assert torch.equal(companion.hidden(encoder.float(), batch), exact), "the fp32 weights were rounded"
    assert {w.dtype for w in companion.state_dict().values() if w.is_floating_point()} == {torch.float32}


def test_the_copy_survives_a_checkpoint(text_encoder: TextEncoder) -> None:
    encoder = fresh(text_encoder, 0.0)
    saved = contextual.Frozen(encoder)
    file = io.BytesIO()
    torch.save({"contextual": saved.state_dict()}, file)
    noise(encoder)
    file.seek(0)
    resumed = contextual.Frozen(encoder)
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    resumed.hidden(encoder.bfloat16(), batch)
    resumed.load_state_dict(torch.load(file, weights_only=True)["contextual"])
    encoder.float()
    assert torch.equal(resumed.hidden(encoder, batch), saved.hidden(encoder, batch))


def test_options_are_checked() -> None:
    with pytest.raises(UserError, match="anchor_weight"):
        contextual.Options(anchor_weight=-0.1)
