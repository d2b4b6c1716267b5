"""Writes a trained encoder as a Hugging Face directory, and checks that transformers reads the same model from it."""

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
from xscale.eval.sentence_files import save_pooling, write_json
from xscale.models.build import longest_sequence, run_fields
from xscale.models.encoder import Encoder
from xscale.models.heads import SavedHeads, load_heads, save_heads

CHECKED_TOKENS = 16
"""The number of tokens of the sequence whose logits are compared."""
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
    pooling: str,
    source: str,
    card: ModelCard | None = None,
    layers: int | None = None,
) -> None:
    """Write a model, its heads, its tokenizer, its card and the files of sentence-transformers.

    source: the model's name in errors. layers: write only this number of first layers, without heads; None: write all.
    Raises UserError if the model lacks such layers, and RuntimeError if transformers reads another model than was
    written.
    """
    written: Any = lm if layers is None else first_layers(lm, layers).base_model
    tokenizer = transformers_tokenizer(tokenizer_path)
    tokenizer.model_max_length = longest_sequence(lm.config)
    # The tokenizer returns token types if training used them for a pair's two sentences, not for languages.
    types = ["token_type_ids"] if run_fields(lm.config, source).get("segments") else []
    tokenizer.model_input_names = ["input_ids", *types, "attention_mask"]
    with files.publish(out) as partial:
        written.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_names_of_transformers_4(partial)
        save_heads(heads if layers is None else {}, partial)
        save_pooling(partial, pooling, lm.config, longest_sequence(lm.config))
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
    config, last = copy.deepcopy(lm.config), lm.config.num_hidden_layers
    if not 1 <= layers <= last:
        raise UserError(f"--layers {layers}: the model has layers 1 to {last}; choose one of these numbers")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    first = AutoModelForMaskedLM.from_config(config, trust_remote_code=False)
    missing, _ = first.load_state_dict(lm.state_dict(), strict=False)
    assert not [name for name in missing if not name.endswith("position_ids")], missing
    return first


@torch.inference_mode()
def check_states(lm: PreTrainedModel, layers: int, folder: Path) -> None:
    """Raise UserError if the output of the exported first layers differs from the whole model's states after them."""
    ids, types = _probe_sequence(lm)
    written = AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
    inputs = {"input_ids": ids[None]} | ({} if types is None else {"token_type_ids": types[None]})
    states = written(**inputs).last_hidden_state[0]
    expected = Encoder(lm).eval().hidden_states(_packed_tokens(ids, types))[layers]
    if not torch.allclose(states, expected, rtol=0, atol=CLOSE * max(1.0, float(expected.abs().max()))):
        raise UserError(
            f"--layers {layers}: a model of type {lm.config.model_type} changes the states after its last layer, so "
            f"its first layers alone give other states; export all layers, and evaluate with --layer {layers}"
        )


def export_problem(lm: PreTrainedModel, heads: dict[str, SavedHeads], folder: Path) -> str | None:
    """Return in words how transformers' logits of the exported model differ from xscale's; None if they do not."""
    kept = load_heads(folder)
    for name, trained in heads.items():
        if name not in kept or _differing_names(trained.weights, kept[name].weights):
            return f"the heads of stream {name} are not those that were trained"
    written = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=False).eval()
    ids, types = _probe_sequence(lm)
    inputs = {"input_ids": ids[None]} | ({} if types is None else {"token_type_ids": types[None]})
    with torch.inference_mode():
        logits, expected = written(**inputs).logits[0], _logits(Encoder(lm).eval(), ids, types)
    furthest, largest = (logits - expected).abs().max(), expected.abs().max()
    if torch.allclose(logits, expected, rtol=0, atol=CLOSE * max(1.0, float(largest)), equal_nan=True):
        return None
    names = _differing_names(lm.state_dict(), written.state_dict())
    return (
        f"transformers' logits are up to {float(furthest):.2g} away from those of the trained model (the largest is "
        f"{float(largest):.2g}); " + (f"weights that differ: {', '.join(names[:5])}" if names else "no weight differs")
    )


def _differing_names(trained: dict[str, Tensor], written: dict[str, Tensor]) -> list[str]:
    """Return the names of trained weights that are not written, or are written with other values."""
    return [name for name, w in trained.items() if name not in written or not torch.equal(w, written[name])]


def _probe_sequence(lm: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Return token ids [N] from all of the vocabulary, and language ids [N], or None without language embeddings."""
    ids = torch.linspace(0, lm.config.vocab_size - 1, min(CHECKED_TOKENS, longest_sequence(lm.config))).long()
    ids = ids[ids != lm.config.pad_token_id]
    trained = getattr(lm.config, "xscale", None) or {}
    return ids, torch.arange(len(ids)) % len(trained["languages"]) if trained.get("language_embeddings") else None


def _logits(encoder: Encoder, ids: Tensor, types: Tensor | None) -> Tensor:
    out = encoder.lm.get_output_embeddings()
    return F.linear(encoder.features(encoder(_packed_tokens(ids, types))), out.weight, out.bias)


def _packed_tokens(ids: Tensor, types: Tensor | None) -> Tokens:
    n = len(ids)
    return Tokens(ids, torch.arange(n), types, torch.tensor([0, n]).int(), torch.tensor([n]).int(), n)
