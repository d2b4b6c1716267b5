"""Writes the files that make sentence-transformers compute the same sentence vectors as eval/retrieval.py."""

import json
from pathlib import Path
from typing import Any

from xscale.data.tokenizer import Tokenizer

POOLING = "1_Pooling"


def trained_pooling(streams: dict[str, dict[str, Any]]) -> str:
    """Return the pooling, "cls" or "mean", with which a recipe's streams train sentence vectors; "mean" without any."""
    for stream in streams.values():
        if stream["objective"] == "ppa" and stream.get("moco_weight", 1.0):
            return stream.get("pooling", "cls")
        if stream["objective"] == "translation_ranking":
            return stream.get("pooling", "mean")
    return "mean"


def read_pooling(folder: Path) -> str:
    """Return the pooling, "cls" or "mean", that save_pooling wrote into a folder; "mean" without its file."""
    path = folder / POOLING / "config.json"
    return "cls" if path.exists() and json.loads(path.read_text()).get("pooling_mode_cls_token") else "mean"


def save_pooling(folder: Path, pooling: str, config: Any, max_length: int) -> None:
    """Write the files of sentence-transformers into a folder that has the tokenizer. pooling: "cls", or "mean" over a
    sentence's tokens without [CLS] and [SEP]. max_length: the most tokens of a sentence."""
    modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
    modules: dict[str, dict[str, Any]] = {
        POOLING: {"word_embedding_dimension": config.hidden_size} | modes,
        "2_Normalize": {},
    }
    if pooling == "mean":
        modules = {"0_WordWeights": word_weights(Tokenizer(folder), config.vocab_size)} | modules
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (path, fields) in enumerate(modules.items(), start=1):
        module_type = f"sentence_transformers.models.{path.partition('_')[2]}"
        listed.append({"idx": number, "name": str(number), "path": path, "type": module_type})
        (folder / path).mkdir()
        write_json(folder / path / "config.json", fields)
    write_json(folder / "modules.json", listed)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})


def word_weights(tokenizer: Tokenizer, embeddings: int) -> dict[str, Any]:
    """Return the fields of a WordWeights module that leaves [CLS] and [SEP] out of means. embeddings: the number of
    rows of the embedding table, each of which needs a weight."""
    token_of = {token_id: token for token, token_id in tokenizer.hf.get_vocab().items()}
    weights = {token_of[tokenizer.cls_id]: 0.0, token_of[tokenizer.sep_id]: 0.0}
    vocabulary = [token_of.get(token_id, "") for token_id in range(embeddings)]
    return {"vocab": vocabulary, "word_weights": weights, "unknown_word_weight": 1.0}


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
