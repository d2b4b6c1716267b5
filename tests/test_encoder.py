"""Heads on selected rows against the Hugging Face model's own logits."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    DistilBertConfig,
    ModernBertConfig,
    PreTrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from xscale.errors import UserError
from xscale.models.encoder import Encoder, build_encoder, decay_groups
from xscale.ops.masked_ce import masked_cross_entropy

SHAPE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
CONFIGS = {
    "bert": BertConfig(**SHAPE),
    "xlm-roberta": XLMRobertaConfig(**SHAPE, pad_token_id=1, max_position_embeddings=64),
    "roberta": RobertaConfig(**SHAPE, pad_token_id=1, max_position_embeddings=64),
    "distilbert": DistilBertConfig(vocab_size=97, dim=32, n_layers=2, n_heads=2, hidden_dim=48),
    "modernbert": ModernBertConfig(
        **SHAPE, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    ),
}


def batch(lengths: list[int], pad_id: int) -> dict[str, torch.Tensor]:
    ids = torch.full((len(lengths), max(lengths)), pad_id)
    for row, n in enumerate(lengths):
        ids[row, :n] = torch.randint(5, 97, (n,))
    return {"input_ids": ids, "attention_mask": (ids != pad_id).long()}


@pytest.mark.parametrize("kind", CONFIGS)
def test_selected_rows_equal_dense_logits(kind: str) -> None:
    """Loss and every gradient equal those of logits at all positions with labels -100, for each model type."""
    torch.manual_seed(0)
    config: PreTrainedConfig = CONFIGS[kind]
    model = AutoModelForMaskedLM.from_config(config).double().eval()
    arrays = batch([9, 4, 7], config.pad_token_id)
    rows = torch.tensor([1, 3, 8, 10, 12, 20])
    labels = torch.randint(5, 97, (len(rows),))
    dense_labels = torch.full((3 * 9,), -100)
    dense_labels[rows] = labels
    logits = model(**arrays).logits
    expected = F.cross_entropy(logits.flatten(0, 1), dense_labels, reduction="sum")
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    right = (logits.flatten(0, 1)[rows].argmax(-1) == labels).sum()
    model.zero_grad()

    encoder = Encoder(model)
    loss, correct = encoder.masked_lm(encoder.hidden(arrays).flatten(0, 1)[rows], labels)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert correct == right
    for name, p in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_positions_counted_from_zero_are_the_models_own(kind: str) -> None:
    """position_ids 0, 1, 2 ... give what the model gives by itself, also where its first position is not 0."""
    config = CONFIGS[kind]
    encoder = Encoder(AutoModelForMaskedLM.from_config(config).eval())
    arrays = batch([8, 8], config.pad_token_id)
    own = encoder.hidden(arrays)
    given = encoder.hidden(arrays | {"position_ids": torch.arange(8).expand(2, 8)})
    torch.testing.assert_close(own, given)


def test_unknown_model_type_is_refused() -> None:
    from transformers import ElectraConfig

    with pytest.raises(UserError, match="electra"):
        Encoder(AutoModelForMaskedLM.from_config(ElectraConfig(**SHAPE, embedding_size=32)))


def build(**changes: object) -> Encoder:
    defaults: dict = {
        "init": None, "preset": "tiny", "dropout": 0.0, "max_length": 64, "vocab_size": 97, "pad_id": 0,
        "languages": ["de", "en", "fr"], "language_embeddings": False, "reset_positions": False, "seed": 1,
    }  # fmt: skip
    return build_encoder(**(defaults | changes))


def test_language_embeddings_are_token_types(tmp_path: object) -> None:
    """Three languages have three rows, in a fresh model and in a loaded one, whose old rows stay."""
    fresh = build(language_embeddings=True)
    assert fresh.lm.config.type_vocab_size == 3
    old = AutoModelForMaskedLM.from_config(CONFIGS["bert"])
    old.save_pretrained(tmp_path)
    loaded = build(init=str(tmp_path), language_embeddings=True)
    table = loaded.lm.bert.embeddings.token_type_embeddings.weight
    before = old.bert.embeddings.token_type_embeddings.weight
    assert torch.equal(table[:2], before) and torch.equal(table[2], before[0])
    assert loaded.lm.config.type_vocab_size == 3


def test_init_checks_tokenizer_and_length(tmp_path: object) -> None:
    AutoModelForMaskedLM.from_config(CONFIGS["xlm-roberta"]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"98 ids.*embeddings for 97"):
        build(init=str(tmp_path), vocab_size=98)
    with pytest.raises(UserError, match="max_length 63 exceeds the 62 positions"):
        build(init=str(tmp_path), max_length=63)
    with pytest.raises(UserError, match="nowhere/at/all does not exist"):
        build(init="/nowhere/at/all")


def test_weights_are_a_function_of_the_seed() -> None:
    first, again, other = (build(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_every_parameter_is_in_one_decay_group() -> None:
    encoder = build()
    decayed, others = decay_groups(encoder, 0.1)
    assert sorted(map(id, decayed["params"] + others["params"])) == sorted(map(id, encoder.parameters()))
    names = {id(p): name for name, p in encoder.named_parameters()}
    assert not [names[id(p)] for p in decayed["params"] if "bias" in names[id(p)] or "Norm" in names[id(p)]]


def test_no_target_gives_zero_loss_and_zero_gradients() -> None:
    rows = torch.empty(0, 8, requires_grad=True)
    weight = torch.randn(5, 8, requires_grad=True)
    loss, correct = masked_cross_entropy(rows, weight, None, torch.empty(0, dtype=torch.long))
    loss.backward()
    assert loss == 0 and correct == 0 and torch.equal(weight.grad, torch.zeros_like(weight))


def test_loss_is_fp32_of_half_precision_rows() -> None:
    rows, weight = torch.randn(7, 16).bfloat16(), torch.randn(50, 16).bfloat16()
    labels = torch.randint(50, (7,))
    loss, _ = masked_cross_entropy(rows, weight, None, labels)
    logits = (rows @ weight.T).float()
    expected = (torch.logsumexp(logits, -1) - logits[torch.arange(7), labels]).sum()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
