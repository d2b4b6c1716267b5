"""The encoder of a run: a Hugging Face masked-LM model that reads packed rows, and whose head is called separately.

A flat forward pass reads the tokens of a packed row without padding. models/flat.py has flat passes for some model
types, and a pass that pads the sequences for the others.

The masked-LM head of a model consists of the layers of its `Head` and of the vocabulary head, the output layer over the
vocabulary.

Shape letters: N tokens of a row, P tokens whose states are read, H hidden width, E width of the embeddings, M selected
states, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from xscale.data.packed_row import Tokens
from xscale.errors import UserError
from xscale.models.flat import choose_forward_pass, last_states_by_padded_pass, layer_states_by_padded_pass
from xscale.ops.masked_ce import LossAndCorrect, masked_cross_entropy


class Head(NamedTuple):
    """The layers between a last hidden state [H] and the input of the vocabulary head [E]:
    norm(activation(dense(x)))."""

    dense: nn.Linear
    activation: Callable[[Tensor], Tensor]
    norm: nn.Module


def _bert_head(model: Any) -> Head:
    transform = model.cls.predictions.transform
    return Head(transform.dense, transform.transform_act_fn, transform.LayerNorm)


def _albert_head(model: Any) -> Head:
    predictions = model.predictions if hasattr(model, "predictions") else model.generator_predictions
    return Head(predictions.dense, predictions.activation, predictions.LayerNorm)


HEADS: dict[str, Callable[[Any], Head]] = {
    "bert": _bert_head,
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "mpnet"),
        lambda model: Head(model.lm_head.dense, F.gelu, model.lm_head.layer_norm),
    ),
    "deberta-v2": _bert_head,
    **dict.fromkeys(("albert", "electra"), _albert_head),
    "modernbert": lambda model: Head(model.head.dense, model.head.act, model.head.norm),
    "distilbert": lambda model: Head(model.vocab_transform, model.activation, model.vocab_layer_norm),
}
"""Model type -> function that returns the `Head` of a Hugging Face model."""


def _check_config(config: Any) -> None:
    """Raise UserError unless the model is an encoder of a supported type, with position embeddings that transformers
    applies."""
    kind = config.model_type
    name = config.name_or_path or "the model"
    positions = getattr(config, "position_embedding_type", "absolute")
    if kind not in HEADS:
        raise UserError(
            f"{name}: xscale cannot train models of type {kind!r}. Use a model of one of the types {', '.join(HEADS)}"
        )
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UserError(
            f"{name}: the config.json of this {kind} model sets is_decoder or add_cross_attention, so the model is a "
            "decoder. Use an encoder"
        )
    if positions not in ("absolute", "sans_pos"):  # mmBERT has sans_pos, for rotary positions
        raise UserError(
            f"{name}: config.json sets position_embedding_type {positions!r}, which transformers 5 ignores in a "
            f"{kind} model. Use a model with absolute position embeddings"
        )


class Encoder(nn.Module):
    """The trained model. `lm` is the Hugging Face model that export writes, with or without its masked-LM head."""

    def __init__(self, lm: PreTrainedModel, has_new_head: bool = False):
        """has_new_head: the masked-LM head has random weights."""
        super().__init__()
        _check_config(lm.config)
        self.lm = lm
        self.has_new_head = has_new_head
        self.dropout: float | None = None
        """The dropout probability of all layers, or None if the config's probabilities apply."""
        self._states_of_layers = choose_forward_pass(lm.config)
        """The forward pass. A flat pass yields the hidden states of each layer, the padded pass only those of the last
        layer. Of the last layer, both yield only the states at `places`, unless it is None."""

    @property
    def width(self) -> int:
        return self.lm.config.hidden_size

    @property
    def embeddings(self) -> Tensor:
        """Return the input word embeddings [V, E]. E = H in most models."""
        return self.lm.get_input_embeddings().weight  # type: ignore[return-value]

    @property
    def head(self) -> Head:
        return HEADS[self.lm.config.model_type](self.lm)

    def forward(self, tokens: Tokens, places: Tensor | None = None) -> Tensor:
        """Return the last hidden states [N, H], or with `places` those of the tokens at these places [P, H]. No place
        occurs twice. In training mode, the dropout masks depend on PyTorch's random generator."""
        seed = int(torch.randint(2**62, ())) if self.training else 0
        for states in self._states_of_layers(self.lm.base_model, tokens, seed, places):
            last_states = states  # and not a list of all layers' states, which would stay in memory
        return last_states

    def hidden_states(self, tokens: Tokens) -> list[Tensor]:
        """Return the states [N, H] of all layers: first the embeddings' output, last the output of `forward`. Call
        it in evaluation mode, without dropout."""
        if self._states_of_layers is last_states_by_padded_pass:
            return layer_states_by_padded_pass(self.lm.base_model, tokens, all_layers=True)
        return list(self._states_of_layers(self.lm.base_model, tokens, seed=0, places=None))

    def set_dropout_unless_none(self, p: float | None) -> None:
        """Set the dropout probability of states and attention in all layers, unless p is None. The config stays."""
        if p is None or p == self.dropout:
            return
        self.dropout = p
        module: Any
        for module in self.lm.base_model.modules():
            for name, child in module.named_children():
                # Transformers' module for dropout of probability 0.
                if isinstance(child, nn.Identity) and "drop" in name:
                    setattr(module, name, nn.Dropout(p).train(module.training))
            if isinstance(module, nn.Dropout):
                module.p = p
            elif isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = p

    def features(self, states_MH: Tensor) -> Tensor:
        """Return the output of the `Head` for last hidden states [M, E]. It is the input of the vocabulary head."""
        head = self.head
        return head.norm(head.activation(head.dense(states_MH)))

    def vocabulary_loss(self, features_ME: Tensor, labels_M: Tensor, **options: Any) -> LossAndCorrect:
        """Return masked_cross_entropy (ops/masked_ce.py) of the features with the weight and bias of the vocabulary
        head. options: the optional arguments of masked_cross_entropy."""
        out = self.lm.get_output_embeddings()
        return masked_cross_entropy(features_ME, out.weight, out.bias, labels_M, **options)
