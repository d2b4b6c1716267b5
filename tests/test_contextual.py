"""Contextual alignment: pairs, links and the frozen copy, in fp64. tests/test_reference.py has the paper's sums."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rows import CPU, FILLER, LONGEST, assert_same_gradients, gradients, one_thread, sums  # noqa: F401
from tests.test_alignlm import context, examples_of, noise, random_pairs, tiny
from xscale.data.packed_row import Row, pack_row
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.models.build import build_encoder
from xscale.models.encoder import Encoder
from xscale.objectives import contextual
from xscale.objectives.base import Parts


@pytest.fixture(scope="module")
def parts(tokenizer: Tokenizer) -> Parts:
    """A trained encoder that has moved away from its frozen beginning."""
    torch.manual_seed(2)
    encoder = tiny(tokenizer)
    noise(encoder)
    encoder.float().double()  # as fp32 masters would hold it
    auxiliary_state = contextual.FrozenInitialEncoder(encoder)
    noise(encoder)
    return Parts(encoder, auxiliary_state=auxiliary_state)


def test_pairs_may_have_either_order_of_languages(tokenizer: Tokenizer, parts: Parts) -> None:
    """(en, xx) and the same pair as (xx, en), links turned round, are one thing."""
    pairs = random_pairs(4, seed=1)
    turned = [(b, a, " ".join("-".join(link.split("-")[::-1]) for link in links.split())) for a, b, links in pairs]
    values = []
    for langs, made in ((("en", "xx"), pairs), (("xx", "en"), turned)):
        samples = examples_of(tokenizer, made, langs)
        stream_batch = contextual.collate(samples, contextual.ContextualOptions(), context(tokenizer))
        terms = sums("contextual", parts, stream_batch, contextual.ContextualOptions()).terms
        values.append({term: value.item() / stream_batch.target_counts[term] for term, value in terms.items()})
    assert values[0] == pytest.approx(values[1], rel=1e-9)


def test_a_pair_without_the_anchor_language(tokenizer: Tokenizer) -> None:
    samples = examples_of(tokenizer, random_pairs(1), ("de", "xx"))
    with pytest.raises(UserError, match=r"'r0' has the languages de and xx, but .* with its anchor language 'en'"):
        contextual.collate(samples, contextual.ContextualOptions(), context(tokenizer))


@pytest.mark.parametrize(("links", "word"), [("0-9", "'0-9'"), (None, "`links` is missing"), ("zero", "'zero'")])
def test_links_that_do_not_fit_name_the_record(tokenizer: Tokenizer, links: Any, word: str) -> None:
    samples = examples_of(tokenizer, [("Peter will", "doj koh", links)])
    with pytest.raises(UserError, match=f"record 'r0'.*{word}|{word}.*record 'r0'"):
        contextual.collate(samples, contextual.ContextualOptions(), context(tokenizer))


# The frozen copy


def fresh(tokenizer: Tokenizer, dropout: float) -> Encoder:
    return build_encoder(
        init=None, preset="tiny", dropout=dropout, max_length=32, vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id, languages=["en", "xx"], language_embeddings=False, reset_positions=False, seed=0,
    )  # fmt: skip


def auxiliary(tokenizer: Tokenizer) -> tuple[Row, list[dict[str, Tensor]]]:
    """What the copy encodes of three pairs."""
    stream_batch = contextual.collate(
        examples_of(tokenizer, random_pairs(3)), contextual.ContextualOptions(), context(tokenizer)
    )
    row = pack_row({"s": stream_batch}, FILLER)
    return row.auxiliary["s"].to(CPU), [row.to(CPU).arrays["s"]]


def test_before_the_first_step_nothing_has_moved(tokenizer: Tokenizer) -> None:
    """R = 0 at the start; training the encoder, or updating, leaves the copy where it was."""
    encoder = fresh(tokenizer, 0.0)
    auxiliary_state = contextual.OBJECTIVE.auxiliary_state(encoder, None, contextual.ContextualOptions())
    stream_batch = contextual.collate(
        examples_of(tokenizer, random_pairs(3)), contextual.ContextualOptions(), context(tokenizer)
    )

    def anchor() -> float:
        return (
            sums("contextual", Parts(encoder, None, auxiliary_state), stream_batch, contextual.ContextualOptions())
            .terms["anchor"]
            .item()
        )

    # The sentences stand in rows of other lengths, where a kernel may round otherwise.
    assert anchor() == pytest.approx(0, abs=1e-8)
    noise(encoder)
    moved = anchor()
    assert moved > 0
    auxiliary_state.update(True)
    assert anchor() == moved


def test_the_copy_has_no_dropout_no_gradients_and_no_place_among_modules(tokenizer: Tokenizer) -> None:
    encoder = fresh(tokenizer, 0.5).train()
    auxiliary_state = contextual.FrozenInitialEncoder(encoder)
    given = auxiliary(tokenizer)
    state = torch.get_rng_state()
    first, again = (auxiliary_state.encode(encoder, *given) for _ in range(2))
    assert torch.equal(first, again) and torch.equal(state, torch.get_rng_state())
    assert not first.requires_grad and not any(p.requires_grad for p in auxiliary_state.initial.parameters())
    assert not isinstance(auxiliary_state, torch.nn.Module), "DeepSpeed would cast it"


def test_the_copy_computes_in_the_encoders_type_and_stays_fp32(tokenizer: Tokenizer) -> None:
    encoder = fresh(tokenizer, 0.0)
    auxiliary_state = contextual.FrozenInitialEncoder(encoder)
    given = auxiliary(tokenizer)
    row = given[0]
    exact = auxiliary_state.encode(encoder, *given)
    encoder.bfloat16()
    rounded = auxiliary_state.encode(encoder, *given)
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, encoder(row.tokens, row.places)[row.gather.columns])
    assert torch.equal(auxiliary_state.encode(encoder.float(), *given), exact), "the fp32 weights were rounded"
    assert {w.dtype for w in auxiliary_state.state_dict().values() if w.is_floating_point()} == {torch.float32}


def test_the_copy_survives_a_checkpoint(tokenizer: Tokenizer) -> None:
    encoder = fresh(tokenizer, 0.0)
    saved = contextual.FrozenInitialEncoder(encoder)
    file = io.BytesIO()
    torch.save({"contextual": saved.state_dict()}, file)
    noise(encoder)
    file.seek(0)
    resumed = contextual.FrozenInitialEncoder(encoder)
    given = auxiliary(tokenizer)
    resumed.encode(encoder.bfloat16(), *given)
    resumed.load_state_dict(torch.load(file, weights_only=True)["contextual"])
    encoder.float()
    assert torch.equal(resumed.encode(encoder, *given), saved.encode(encoder, *given))
