"""A Hugging Face masked-LM encoder whose heads are computed on selected rows only.

Shape letters: B sequences, L tokens of the longest, H hidden width, M selected rows, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from transformers import AutoConfig, AutoModelForMaskedLM, BertConfig, PreTrainedModel, XLMRobertaConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from xscale import rng
from xscale.errors import UserError
from xscale.models import varlen
from xscale.ops.masked_ce import masked_cross_entropy

transformers_logging.disable_progress_bar()

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
    "mini": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "xlmr-base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
}


class Head(NamedTuple):
    """norm(activation(dense(x))): what lies between a last hidden state and the vocabulary projection."""

    dense: nn.Linear
    activation: Callable[[Tensor], Tensor]
    norm: nn.Module


def _bert_head(model: Any) -> Head:
    transform = model.cls.predictions.transform
    return Head(transform.dense, transform.transform_act_fn, transform.LayerNorm)


def _roberta_head(model: Any) -> Head:
    return Head(model.lm_head.dense, F.gelu, model.lm_head.layer_norm)


HEADS: dict[str, Callable[[Any], Head]] = {
    "bert": _bert_head,
    "roberta": _roberta_head,
    "xlm-roberta": _roberta_head,
    "camembert": _roberta_head,
    "distilbert": lambda model: Head(model.vocab_transform, model.activation, model.vocab_layer_norm),
    "modernbert": lambda model: Head(model.head.dense, model.head.act, model.head.norm),
}
"""Where each model type keeps its masked-LM head."""

FIRST_POSITION = {"roberta": 1, "xlm-roberta": 1, "camembert": 1}
"""Model types whose position 0 is `pad_token_id + 1`."""


class Encoder(nn.Module):
    """The model of a run. `lm` is the Hugging Face model that export writes."""

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        kind = lm.config.model_type
        if kind not in HEADS:
            raise UserError(f"model type {kind!r} is not supported; supported are {', '.join(HEADS)}")
        self.lm = lm
        self.label_smoothing, self.z_loss = 0.0, 0.0
        """Of vocabulary_loss; in training the recipe's."""
        self._first_position = lm.config.pad_token_id + 1 if kind in FIRST_POSITION else 0
        self._varlen = kind in varlen.MODEL_TYPES
        if self._varlen:
            lm.set_attn_implementation(varlen.NAME)

    @property
    def width(self) -> int:
        return self.lm.config.hidden_size

    @property
    def embeddings(self) -> Tensor:
        """Input word embeddings [V, H]."""
        return self.lm.get_input_embeddings().weight  # type: ignore[return-value]

    @property
    def head(self) -> Head:
        return HEADS[self.lm.config.model_type](self.lm)

    def hidden(self, batch: dict[str, Tensor], prefix: str = "") -> Tensor:
        """Last hidden states [B, L, H]. batch: input_ids, attention_mask and, where used, position_ids counted from
        0, token_type_ids [B, L], all with `prefix` before their names.

        With `places` (data/collate.py) padding is not computed where the model type allows it, and its states are 0.
        """
        names = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
        inputs = {name: batch[prefix + name] for name in names if prefix + name in batch}
        if "position_ids" in inputs:
            inputs["position_ids"] = inputs["position_ids"] + self._first_position
        if self._varlen and prefix + "places" in batch:
            return varlen.last_hidden_state(self.lm.base_model, inputs, batch[prefix + "places"], self._first_position)
        return self.lm.base_model(**inputs).last_hidden_state

    def checkpoint_activations(self) -> None:
        """Keep the inputs of the layers for the backward pass, and compute all else again."""
        # transformers 5.23 renamed it
        enable = getattr(self.lm, "activation_checkpointing_enable", None) or self.lm.gradient_checkpointing_enable
        enable()

    def compile_layers(self, backend: str = "inductor") -> None:
        """torch.compile of each layer by itself: parameters keep their names, one program serves all layers."""
        functorch_config.donated_buffer = False  # a stream's gradient norm takes a backward pass before the engine's
        for layer in self.lm.base_model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.compile(dynamic=True, backend=backend)

    def masked_lm(self, rows_MH: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the cross-entropy of predicting labels from rows (fp32), and the number predicted right."""
        head = self.head
        return self.vocabulary_loss(head.norm(head.activation(head.dense(rows_MH))), labels_M)

    def vocabulary_loss(self, features_MH: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        """The same from what the head made of the rows: the tied projection and its bias alone."""
        out = self.lm.get_output_embeddings()
        return masked_cross_entropy(features_MH, out.weight, out.bias, labels_M, self.label_smoothing, self.z_loss)


def load_pretrained(init: str | Path, dropout: float) -> PreTrainedModel:
    """Weights of a Hugging Face directory or hub name, fp32. Raises UserError."""
    if Path(init).is_absolute() and not Path(init).exists():
        raise UserError(f"model.init {init} does not exist")
    try:
        config = AutoConfig.from_pretrained(init)
        config.update(dropout_fields(config.model_type, dropout))
        return AutoModelForMaskedLM.from_pretrained(init, config=config, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.init {init} cannot be loaded ({str(error).splitlines()[0]}). Give a Hugging Face directory "
            f"with weights, a run of xscale, or a hub name on a machine that reaches the hub"
        ) from None


def build_encoder(
    *,
    init: str | None,
    preset: str,
    dropout: float,
    max_length: int,
    vocab_size: int,
    pad_id: int,
    languages: list[str],
    language_embeddings: bool,
    reset_positions: bool,
    seed: int,
    load: Callable[[str | Path, float], PreTrainedModel] = load_pretrained,
) -> Encoder:
    """The run's encoder: pre-trained weights of `init`, or random weights of `preset`. Raises UserError.

    languages: names in the order of their numbers. With `language_embeddings` the token-type table has a row for each.
    These and `reset_positions` are kept in the model's config as `xscale`, for whoever feeds it later.
    """
    trained = {"languages": languages, "language_embeddings": language_embeddings, "reset_positions": reset_positions}
    torch.manual_seed(rng.torch_seed(seed, "model"))
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if init is None:
        config = preset_config(preset, vocab_size, pad_id, max_length, drop)
        if language_embeddings:
            config.type_vocab_size = max(config.type_vocab_size, len(languages))
        config.xscale = trained
        return Encoder(AutoModelForMaskedLM.from_config(config))
    lm = load(init, dropout)
    rows = lm.config.vocab_size
    if vocab_size > rows:
        raise UserError(
            f"the tokenizer has {vocab_size:,} ids, model.init {init} has embeddings for {rows:,}; set "
            f"model.tokenizer to the tokenizer that the model was trained with"
        )
    limit = positions(lm.config)
    if max_length > limit:
        raise UserError(f"data.max_length {max_length} exceeds the {limit} positions of model.init {init}")
    if language_embeddings:
        _widen_token_types(lm, len(languages))
    lm.config.xscale = trained
    return Encoder(lm)


def positions(config: Any) -> int:
    """Tokens of the longest sequence that the model takes."""
    return config.max_position_embeddings - (config.pad_token_id + 1 if config.model_type in FIRST_POSITION else 0)


def preset_config(preset: str, vocab_size: int, pad_id: int, max_length: int, drop: dict[str, float]) -> Any:
    shape = PRESETS[preset] | drop | {"vocab_size": vocab_size, "pad_token_id": pad_id}
    if preset == "xlmr-base":
        positions = max(512, max_length) + pad_id + 1
        return XLMRobertaConfig(**shape, max_position_embeddings=positions, type_vocab_size=1, layer_norm_eps=1e-5)
    return BertConfig(**shape, max_position_embeddings=max(512, max_length))


def dropout_fields(model_type: str, dropout: float) -> dict[str, float]:
    if model_type == "distilbert":
        return {"dropout": dropout, "attention_dropout": dropout}
    if model_type == "modernbert":
        return {"embedding_dropout": dropout, "attention_dropout": dropout, "mlp_dropout": dropout}
    return {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}


def _widen_token_types(lm: PreTrainedModel, languages: int) -> None:
    """Give the token-type table at least `languages` rows; new rows start as copies of row 0."""
    embeddings: Any = getattr(lm.base_model, "embeddings", None)
    old = getattr(embeddings, "token_type_embeddings", None)
    if old is None:
        raise UserError(
            f"language_embeddings: a {lm.config.model_type} model has no token types to hold them; set it to false"
        )
    if old.num_embeddings >= languages:
        return
    new = nn.Embedding(languages, old.embedding_dim)
    with torch.no_grad():
        new.weight.copy_(old.weight[:1].expand(languages, -1))
        new.weight[: old.num_embeddings].copy_(old.weight)
    embeddings.token_type_embeddings = new
    lm.config.type_vocab_size = languages


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters with and without weight decay: none on biases, norms and other vectors."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def is_model_directory(path: str | Path) -> bool:
    return (Path(path) / "config.json").exists()
