"""Writes a trained encoder as a Hugging Face directory."""

import copy
import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import AutoModelForMaskedLM, PreTrainedModel

from xscale import files
from xscale.data.tokenizer import transformers_tokenizer
from xscale.errors import UserError
from xscale.eval.card import CARD
from xscale.eval.sentence_files import SentenceVectors, write_json, write_vector_files
from xscale.models.build import longest_sequence, xscale_field
from xscale.models.heads import SavedHeads, save_heads


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

    source: the model's name in errors. layers: the number of first layers to write, without heads; None: write the
    whole model. Raises UserError if the model lacks such layers.
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
        add_fields_for_transformers_4(partial)
        save_heads(heads, partial)
        write_vector_files(partial, vectors, lm.config, longest)
        if card:
            card.save(partial / CARD)
        files.apply_umask(partial)


def add_fields_for_transformers_4(folder: Path) -> None:
    """Write the tokenizer's class, and the base of ModernBERT's rotary embeddings, under the names that transformers 4
    reads. Transformers 5 reads them, too."""
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
    """Return a copy of the first layers of a model. The copy's masked-LM head is meaningless. Raises UserError."""
    config = copy.deepcopy(lm.config)
    last = config.num_hidden_layers
    if not 1 <= layers <= last:
        raise UserError(f"--layers {layers}: the model has layers 1 to {last}; choose one of these numbers")
    if hasattr(lm.base_model, "final_norm"):
        raise UserError(
            f"--layers {layers}: a model of type {config.model_type} changes the states after its last layer, so its "
            f"first layers alone give other states; export all layers, and evaluate with --layer {layers}"
        )
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    first = AutoModelForMaskedLM.from_config(config, trust_remote_code=False)
    missing, _ = first.load_state_dict(lm.state_dict(), strict=False)
    assert not [name for name in missing if not name.endswith("position_ids")], missing
    return first
