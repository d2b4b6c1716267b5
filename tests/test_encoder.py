"""Flat forward passes and heads against transformers' own padded forward pass."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AlbertConfig,
    AutoModelForMaskedLM,
    BertConfig,
    CamembertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    FunnelConfig,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)
from transformers.models.modernbert import modeling_modernbert

from xscale.data.packed_row import Tokens
from xscale.errors import UserError
from xscale.models.build import PRESETS, build_encoder, dropout_fields, max_sequence_tokens, parameter_groups_by_decay
from xscale.models.encoder import HEADS, Encoder
from xscale.models.flat import FLAT, first_position_id
from xscale.models.momentum import MomentumEncoder

SHAPE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
ROBERTA = SHAPE | {"pad_token_id": 1, "max_position_embeddings": 64}
MODERN = SHAPE | dict.fromkeys(("bos_token_id", "cls_token_id"), 1) | dict.fromkeys(("eos_token_id", "sep_token_id"), 2)
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
CONFIGS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**SHAPE),
    "xlm-roberta": XLMRobertaConfig(**ROBERTA),
    "roberta": RobertaConfig(**ROBERTA),
    "camembert": CamembertConfig(**ROBERTA),
    "modernbert": ModernBertConfig(**MODERN | {"num_hidden_layers": 4}, pad_token_id=0, local_attention=8),
    "distilbert": DistilBertConfig(vocab_size=97, dim=32, n_layers=2, n_heads=2, hidden_dim=48),
    "electra": ElectraConfig(**SHAPE, embedding_size=32),
    "deberta-v2": DebertaV2Config(**SHAPE, **RELATIVE),
    "mpnet": MPNetConfig(**ROBERTA),
    "albert": AlbertConfig(**SHAPE, embedding_size=32),
}
LENGTHS = [[23, 23, 9, 7, 4, 0, 1, 0], [1], [6, 6, 6], [30, 17, 2]]


@pytest.fixture(autouse=True)
def exact_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers rounds what it rotates to fp32, also in fp64."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return tuple(x * cos + modeling_modernbert.rotate_half(x) * sin for x in (q, k))

    monkeypatch.setattr(modeling_modernbert, "apply_rotary_pos_emb", rotate)


def make(kind: str, dtype: torch.dtype = torch.float64, dropout: float = 0.0, **fields: Any) -> Encoder:
    """No weight stays at a special value."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[kind])
    config.update(dropout_fields(kind, dropout) | fields)
    encoder = Encoder(AutoModelForMaskedLM.from_config(config)).to(dtype).train(dropout > 0)
    with torch.no_grad():
        for p in encoder.parameters():
            p += 0.1 * torch.randn_like(p)
    return encoder


def row_of(lengths: list[int], own: bool = False, longest: int = 31) -> Tokens:
    """own: token types, and positions that are counted from 0 again."""
    r, N = torch.Generator().manual_seed(sum(lengths)), sum(lengths)
    lengths_B = torch.tensor(lengths, dtype=torch.int32)
    types = torch.randint(2, (N,), generator=r) if own else None
    counted = torch.cat([torch.arange(n) % (5 if own else n) for n in lengths if n])
    starts = F.pad(lengths_B.cumsum(0), (1, 0)).int()
    return Tokens(torch.randint(5, 97, (N,), generator=r), counted, types, starts, lengths_B, longest)


def padded_inputs(encoder: Encoder, row: Tokens) -> dict[str, Tensor]:
    """What transformers takes for the sequences that are not empty [B, L]."""
    lengths, config = [n for n in row.lengths.tolist() if n], encoder.lm.config
    first = first_position_id(config)

    def pad(values_N: Tensor, fill: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(values_N.split(lengths), batch_first=True, padding_value=fill)

    inputs = {"input_ids": pad(row.input_ids, config.pad_token_id or 0)}
    inputs["attention_mask"] = pad(torch.ones_like(row.input_ids), 0)
    inputs["position_ids"] = pad(row.positions + first, first)
    return inputs if row.types is None else inputs | {"token_type_ids": pad(row.types, 0)}


def same_states_and_gradients(encoder: Encoder, row: Tokens) -> None:
    inputs, model = padded_inputs(encoder, row), encoder.lm.base_model
    expected = model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
    found = encoder(row)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    weights, parameters = torch.randn_like(expected), dict(model.named_parameters())
    ours, theirs = (
        torch.autograd.grad((x * weights).sum(), list(parameters.values()), allow_unused=True)
        for x in (found, expected)
    )
    for name, g, other in zip(parameters, ours, theirs, strict=True):
        assert (g is None) == (other is None), name
        if other is not None:
            assert (g - other).abs().max() <= 1e-9 * max(1, float(other.abs().max())), name


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [*((kind, LENGTHS[0]) for kind in CONFIGS), *product(("bert", "modernbert", "deberta-v2"), LENGTHS[1:])],
)
def test_states_and_gradients_are_those_of_transformers(kind: str, lengths: list[int]) -> None:
    """ModernBERT's sequences are longer than its window."""
    same_states_and_gradients(make(kind), row_of(lengths))


@pytest.mark.parametrize("kind", CONFIGS)
def test_states_at_chosen_places_are_those_of_the_whole_row(kind: str) -> None:
    """With their gradients: the tokens that no loss reads have none behind the last layer's attention."""
    encoder, row = make(kind), row_of(LENGTHS[0])
    places = torch.tensor([0, 3, 4, len(row.input_ids) - 1])
    parameters = list(encoder.lm.base_model.parameters())
    whole = encoder(row)[places]
    chosen = encoder(row, places)
    torch.testing.assert_close(chosen, whole, rtol=0, atol=1e-12)
    weights = torch.randn_like(whole)
    expected = torch.autograd.grad((whole * weights).sum(), parameters, allow_unused=True)
    found = torch.autograd.grad((chosen * weights).sum(), parameters, allow_unused=True)
    for gradient, other in zip(found, expected, strict=True):
        assert (gradient is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kind", "before"), [*((kind, 0.0) for kind in CONFIGS), ("bert", 0.1), ("modernbert", 0.1)])
def test_dropout_can_be_changed(kind: str, before: float) -> None:
    """The states are those of a model that is built with the probability, and the momentum encoder follows."""
    other, built = make(kind, torch.float32, before).train(), make(kind, torch.float32, 0.4)
    other.load_state_dict(built.state_dict())
    momentum, states = MomentumEncoder(other, torch.nn.Identity()), []
    other.set_dropout_unless_none(0.4)
    for encoder in (built, other, momentum.prepare_key_modules(with_dropout=True)[0]):
        torch.manual_seed(1)
        states.append(encoder(row_of([9, 7, 4])))
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])
    other.set_dropout_unless_none(0.0)
    exact = built.eval()(row_of([9, 7, 4]))
    torch.testing.assert_close(other(row_of([9, 7, 4])), exact)
    assert not torch.allclose(states[0], exact)
    evaluated = make(kind, torch.float32, before).eval()
    expected = evaluated(row_of([9, 7, 4]))
    evaluated.set_dropout_unless_none(0.4)
    assert torch.equal(evaluated(row_of([9, 7, 4])), expected), "a new dropout is off in evaluation"


@pytest.mark.parametrize("kind", CONFIGS)
def test_states_of_all_layers_are_those_of_transformers(kind: str) -> None:
    """In their order: first what the embeddings give, last the last hidden states. Each sequence alone, unpadded."""
    encoder, row = make(kind), row_of([23, 9, 7, 4])
    found = encoder.hidden_states(row)
    sentences = row.input_ids.split(row.lengths.tolist())
    expected = [encoder.lm.base_model(s[None], output_hidden_states=True).hidden_states for s in sentences]
    assert len(found) == encoder.lm.config.num_hidden_layers + 1
    for layer, states in enumerate(found):
        alone = torch.cat([of_sentence[layer][0] for of_sentence in expected])
        torch.testing.assert_close(states, alone, rtol=0, atol=1e-10)
    assert torch.equal(found[-1], encoder(row))


@pytest.mark.parametrize("kind", sorted(FLAT))
def test_own_positions_and_types_are_the_models(kind: str) -> None:
    row = row_of(LENGTHS[0], own=True)
    if kind == "modernbert":
        row = row._replace(types=None)
    same_states_and_gradients(make(kind, **{"type_vocab_size": 2} if row.types is not None else {}), row)


def test_rotations_are_exact_in_a_model_of_16_bits() -> None:
    """Its own frequencies were rounded."""
    exact, narrow = make("modernbert", torch.float32), make("modernbert", torch.float32).bfloat16()
    row = row_of([300], longest=300)
    states = exact(row)
    assert (narrow(row) - states).abs().mean() < 0.02 * states.abs().mean()


def test_other_ropes_are_padded() -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    both = {"full_attention": rope, "sliding_attention": dict(rope)}
    same_states_and_gradients(make("modernbert", rope_parameters=both), row_of(LENGTHS[0]))


# Heads


@pytest.mark.parametrize("kind", CONFIGS)
def test_selected_rows_equal_dense_logits(kind: str) -> None:
    """Loss and every gradient equal those of logits at all positions with labels -100, for each model type."""
    encoder, row = make(kind), row_of([9, 7, 4])
    places, labels = torch.tensor([1, 3, 8, 10, 12, 19]), torch.randint(5, 97, (6,))
    inputs = padded_inputs(encoder, row)
    logits = encoder.lm(**inputs).logits[inputs["attention_mask"].bool()][places]
    losses = F.cross_entropy(logits, labels, reduction="none")
    losses.sum().backward()
    gradients = {name: p.grad.clone() for name, p in encoder.named_parameters() if p.grad is not None}
    encoder.zero_grad()

    loss, losses_M, right_M = encoder.vocabulary_loss(encoder.features(encoder(row)[places]), labels)
    loss.backward()
    torch.testing.assert_close(loss, losses.sum(), rtol=1e-9, atol=0)
    torch.testing.assert_close(losses_M, losses.detach(), rtol=1e-9, atol=0)
    assert torch.equal(right_M, logits.argmax(-1) == labels)
    for name, p in encoder.named_parameters():
        if name in gradients:
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-8, atol=1e-11)


def test_unknown_models_are_refused() -> None:
    assert CONFIGS.keys() == HEADS.keys()
    funnel = FunnelConfig(vocab_size=97, block_sizes=[1], d_model=32, n_head=2, d_head=16, d_inner=48)
    with pytest.raises(UserError, match=r"'funnel'.*one of the types bert, roberta"):
        Encoder(AutoModelForMaskedLM.from_config(funnel))
    with pytest.raises(UserError, match="bert model sets is_decoder"):
        Encoder(AutoModelForMaskedLM.from_config(BertConfig(**SHAPE, is_decoder=True)))
    relative = BertConfig(**SHAPE, position_embedding_type="relative_key")
    with pytest.raises(UserError, match="position_embedding_type 'relative_key'"):
        Encoder(AutoModelForMaskedLM.from_config(relative))


# Activation checkpointing


# Building


def build(**changes: object) -> Encoder:
    defaults: dict = {
        "init": None, "preset": "tiny", "dropout": 0.0, "max_length": 64, "vocab_size": 97, "pad_id": 0,
        "languages": ["de", "en", "fr"], "language_embeddings": False, "reset_positions": False, "seed": 1,
    }  # fmt: skip
    return build_encoder(**(defaults | changes))


def test_init_checks_tokenizer_and_length(tmp_path: object) -> None:
    AutoModelForMaskedLM.from_config(CONFIGS["xlm-roberta"]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"98 tokens.*only 97 embeddings"):
        build(init=str(tmp_path), vocab_size=98)
    with pytest.raises(UserError, match=r"max_length 63 is too large: .* at most 62 tokens"):
        build(init=str(tmp_path), max_length=63)
    with pytest.raises(UserError, match="nowhere/at/all does not exist"):
        build(init="/nowhere/at/all")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_their_shape(preset: str) -> None:
    """On the meta device: nothing is drawn."""
    with torch.device("meta"):
        encoder = build(preset=preset, max_length=600, dropout=0.2, pad_id=3)
    config = encoder.lm.config
    assert {name: getattr(config, name) for name in PRESETS[preset]} == PRESETS[preset]
    assert max_sequence_tokens(config) >= 600 and config.pad_token_id == 3 and config.vocab_size == 97
    assert {getattr(config, name) for name in dropout_fields(config.model_type, 0.2)} == {0.2}


@pytest.mark.parametrize("preset", ["tiny", "modern-small"])
def test_a_gain_of_attention_tells_sentences_apart(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' own pass: mean cosine of [CLS] over sentences. Values and outputs have the deviation asked for,
    all other weights are those without a gain."""

    monkeypatch.setitem(PRESETS, preset, PRESETS[preset] | SHAPE | {"num_hidden_layers": 4, "hidden_size": 128})

    def cosine(model: Any) -> float:
        torch.manual_seed(0)
        sentences = [torch.cat([torch.tensor([2]), torch.randint(5, 97, (1, n))[0]]) for n in range(5, 35)]
        with torch.no_grad():
            cls = torch.stack([model(ids[None]).last_hidden_state[0, 0] for ids in sentences])
        return F.cosine_similarity(cls[:, None], cls, dim=-1).fill_diagonal_(0).sum().item() / (30 * 29)

    plain, wide = (build(preset=preset, dropout=0.0, attention_gain=gain).eval().lm.base_model for gain in (None, 1.0))
    assert cosine(wide) < 0.98 and 1 - cosine(plain) < (1 - cosine(wide)) / 5
    H, drawn = plain.config.hidden_size, 0
    for (name, before), (_, after) in zip(plain.named_parameters(), wide.named_parameters(), strict=True):
        first = 0 if name.endswith((".value.weight", "attention.output.dense.weight", "attn.Wo.weight")) else None
        first = 2 * H if name.endswith("Wqkv.weight") else first
        assert torch.equal(before[:first], after[:first]), name
        if first is not None:
            drawn += 1
            assert after[first:].std().item() == pytest.approx(H**-0.5, rel=0.03)
    assert drawn == 2 * plain.config.num_hidden_layers


def test_models_without_token_types_have_no_language_embeddings() -> None:
    with pytest.raises(UserError, match="a modernbert model has none"):
        build(preset="modern-small", language_embeddings=True)


def test_every_parameter_is_in_one_decay_group() -> None:
    encoder = build()
    decayed, others = parameter_groups_by_decay(encoder, 0.1)
    assert sorted(map(id, decayed["params"] + others["params"])) == sorted(map(id, encoder.parameters()))
    names = {id(p): name for name, p in encoder.named_parameters()}
    assert not [names[id(p)] for p in decayed["params"] if "bias" in names[id(p)] or "Norm" in names[id(p)]]
