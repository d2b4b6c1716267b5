"""Writes a trained encoder as a Hugging Face directory, and checks that transformers reads the same model from it.

Shape letters: N tokens, V words of the vocabulary.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel

from xscale import files
from xscale.data.packed_row import Tokens
from xscale.data.tokenizer import transformers_tokenizer
from xscale.errors import UserError
from xscale.eval.card import CARD
from xscale.eval.sentence_files import SentenceVectors, write_json, write_vector_files
from xscale.models.build import longest_sequence, xscale_field
from xscale.models.encoder import Encoder
from xscale.models.heads import SavedHeads, load_heads, save_heads

CHECKED_TOKENS = 16
"""The number of tokens of the sequence whose logits or states are compared."""
CLOSE = 1e-3
"""The largest difference that counts as rounding in fp32, as a share of the larger of 1 and the maximum."""


def check_new_directory(out: Path) -> None:
    """Raise UserError unless `out` can be written and is absent or an empty directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty directory; choose another, or remove it")
    files.check_writable(out)


def write_directory(
    out: Path,
    lm: PreTrainedModel,
    heads: dict[str, SavedHeads],
    tokenizer_path: str | Path,
    vectors: SentenceVectors,
    source: str,
    card: ModelCard | None = None,
    layers: int | None = None,
) -> None:
    """Write a model, its heads, its tokenizer, its card and the files of sentence-transformers.

    source: the model's name in errors. layers: write only this number of first layers, without heads; None: write all.
    Raises UserError if the model lacks such layers, and RuntimeError if transformers reads another model than was
    written.
    """
    written: Any = lm
    if layers is not None:
        written = first_layers(lm, layers).base_model
        heads = {}
    longest = longest_sequence(lm.config)
    tokenizer = transformers_tokenizer(tokenizer_path)
    tokenizer.model_max_length = longest
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    if xscale_field(lm.config, source).get("segments"):  # token types are a pair's two sentences, not languages
        tokenizer.model_input_names.insert(1, "token_type_ids")
    with files.publish(out) as partial:
        written.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_names_of_transformers_4(partial)
        save_heads(heads, partial)
        write_vector_files(partial, vectors, lm.config, longest)
        if card:
            card.save(partial / CARD)
        files.apply_umask(partial)
        if layers is not None:
            check_states(lm, layers, partial)
        elif problem := export_problem(lm, heads, partial):
            raise RuntimeError(f"{source} was not exported: {problem}. This is a bug in xscale, not a fault of the run")


def write_names_of_transformers_4(folder: Path) -> None:
    """Add what transformers 4 reads in place of what transformers 5 writes: the tokenizer's class, and the base of
    ModernBERT's rotary embeddings. Transformers 5 reads the same values."""
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    if tokenizer.get("tokenizer_class") == "TokenizersBackend":
        write_json(path, tokenizer | {"tokenizer_class": "PreTrainedTokenizerFast"})
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    ropes = config.get("rope_parameters") or {}
    if {"full_attention", "sliding_attention"} <= ropes.keys():
        config["global_rope_theta"] = ropes["full_attention"]["rope_theta"]
        config["local_rope_theta"] = ropes["sliding_attention"]["rope_theta"]
        write_json(path, config)


def first_layers(lm: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a copy with only the first layers, whose masked-LM head is meaningless. Raises UserError."""
    config = copy.deepcopy(lm.config)
    last = config.num_hidden_layers
    if not 1 <= layers <= last:
        raise UserError(f"--layers {layers}: the model has layers 1 to {last}; choose one of these numbers")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    first = AutoModelForMaskedLM.from_config(config, trust_remote_code=False)
    missing, _ = first.load_state_dict(lm.state_dict(), strict=False)
    assert not [name for name in missing if not name.endswith("position_ids")], missing
    return first


def probe_tokens(lm: PreTrainedModel) -> Tokens:
    """Return a sequence of tokens from all of the model's vocabulary, and of its languages, for our encoder."""
    ids_N = torch.linspace(0, lm.config.vocab_size - 1, min(CHECKED_TOKENS, longest_sequence(lm.config))).long()
    ids_N = ids_N[ids_N != lm.config.pad_token_id]
    n = len(ids_N)
    types_N = None
    fields = xscale_field(lm.config, "the model")
    if fields.get("language_embeddings"):
        types_N = torch.arange(n) % len(fields["languages"])
    return Tokens(ids_N, torch.arange(n), types_N, torch.tensor([0, n]).int(), torch.tensor([n]).int(), n)


def read_by_transformers(model: PreTrainedModel, tokens: Tokens) -> Any:
    """Return what transformers' model makes of the sequence."""
    inputs = {"input_ids": tokens.input_ids[None]}
    if tokens.types is not None:
        inputs["token_type_ids"] = tokens.types[None]
    return model.eval()(**inputs)


def mlm_logits(encoder: Encoder, tokens: Tokens) -> Tensor:
    """Return the logits [N, V] by our encoder."""
    out = encoder.lm.get_output_embeddings()
    return F.linear(encoder.features(encoder(tokens)), out.weight, out.bias)


def tolerance(expected: Tensor) -> float:
    return CLOSE * max(1.0, float(expected.abs().max()))


@torch.inference_mode()
def check_states(lm: PreTrainedModel, layers: int, folder: Path) -> None:
    """Raise UserError if the output of the exported first layers differs from the whole model's states after them."""
    tokens = probe_tokens(lm)
    written = AutoModel.from_pretrained(folder, trust_remote_code=False)
    states = read_by_transformers(written, tokens).last_hidden_state[0]
    expected = Encoder(lm).eval().hidden_states(tokens)[layers]
    if not torch.allclose(states, expected, rtol=0, atol=tolerance(expected)):
        raise UserError(
            f"--layers {layers}: a model of type {lm.config.model_type} changes the states after its last layer, so "
            f"its first layers alone give other states; export all layers, and evaluate with --layer {layers}"
        )


@torch.inference_mode()
def export_problem(lm: PreTrainedModel, heads: dict[str, SavedHeads], folder: Path) -> str | None:
    """Return in words how transformers' logits of the exported model differ from xscale's; None if they do not."""
    saved = load_heads(folder)
    for name, trained in heads.items():
        if name not in saved or differing_names(trained.weights, saved[name].weights):
            return f"the heads of stream {name} are not those that were trained"
    tokens = probe_tokens(lm)
    written = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=False)
    logits = read_by_transformers(written, tokens).logits[0]
    expected = mlm_logits(Encoder(lm).eval(), tokens)
    if torch.allclose(logits, expected, rtol=0, atol=tolerance(expected), equal_nan=True):
        return None
    names = differing_names(lm.state_dict(), written.state_dict())
    weights = f"weights that differ: {', '.join(names[:5])}" if names else "no weight differs"
    furthest = float((logits - expected).abs().max())
    return (
        f"transformers' logits are up to {furthest:.2g} away from those of the trained model (the largest is "
        f"{float(expected.abs().max()):.2g}); {weights}"
    )


def differing_names(trained: dict[str, Tensor], written: dict[str, Tensor]) -> list[str]:
    """Return the names of trained weights that are not written, or are written with other values."""
    return [name for name, w in trained.items() if name not in written or not torch.equal(w, written[name])]
