"""Writes the files that make sentence-transformers compute the same sentence vectors as eval/retrieval.py."""

import json
from pathlib import Path
from typing import Any

from xscale.data.tokenizer import Tokenizer

POOLING = "1_Pooling"


def trained_pooling(streams: dict[str, dict[str, Any]]) -> str:
    """Return the pooling, "cls" or "mean", with which a recipe's streams train sentence vectors; "mean" without any."""
    contrasts = [s for s in streams.values() if s["objective"] == "ppa" and s.get("moco_weight", 1.0)]
    return contrasts[0].get("pooling", "cls") if contrasts else "mean"


def read_pooling(folder: Path) -> str:
    """Return the pooling, "cls" or "mean", that save_pooling wrote into a folder; "mean" without its file."""
    path = folder / POOLING / "config.json"
    return "cls" if path.exists() and json.loads(path.read_text()).get("pooling_mode_cls_token") else "mean"


def save_pooling(folder: Path, pooling: str, config: Any, max_length: int) -> None:
    """Write the files of sentence-transformers into a folder that has the tokenizer. pooling: "cls", or "mean" over a
    sentence's tokens without [CLS] and [SEP]. max_length: the most tokens of a sentence."""
    modules: dict[str, tuple[str, dict[str, Any] | None]] = {"": ("Transformer", None)}
    if pooling == "mean":
        tokenizer = Tokenizer(folder)
        token_of = {token_id: token for token, token_id in tokenizer.hf.get_vocab().items()}
        weights = {token_of[token_id]: 0.0 for token_id in (tokenizer.cls_id, tokenizer.sep_id)}
        vocab = [
            token_of.get(token_id, "") for token_id in range(config.vocab_size)
        ]  # a weight for each id of the embeddings
        words = {"vocab": vocab, "word_weights": weights, "unknown_word_weight": 1.0}
        modules["0_WordWeights"] = ("WordWeights", words)
    modes = {f"pooling_mode_{name}": pooling in name for name in ("cls_token", "mean_tokens")}
    modules[POOLING] = ("Pooling", {"word_embedding_dimension": config.hidden_size} | modes)
    modules["2_Normalize"] = ("Normalize", {})
    listed = []
    for i, (path, (class_name, fields)) in enumerate(modules.items()):
        module_type = f"sentence_transformers.models.{class_name}"
        listed.append({"idx": i, "name": str(i), "path": path, "type": module_type})
        if fields is not None:
            (folder / path).mkdir()
            _write(folder / path / "config.json", fields)
    _write(folder / "modules.json", listed)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
