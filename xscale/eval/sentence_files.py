"""Writes the files by which sentence-transformers computes the same sentence vectors as retrieval.py."""

import json
from pathlib import Path
from typing import Any

from xscale.data.tokenizer import Tokenizer

POOLING = "1_Pooling"


def trained_pooling(streams: dict[str, dict[str, Any]]) -> str:
    """The pooling of a run's contrastive PPA stream; "mean" without one. streams: the streams of the run's recipe."""
    contrasts = [s for s in streams.values() if s["objective"] == "ppa" and s.get("moco_weight", 1.0)]
    return contrasts[0].get("pooling", "cls") if contrasts else "mean"


def saved_pooling(folder: Path) -> str:
    """The pooling that `save_pooling` wrote into a folder; "mean" if there is no such file."""
    path = folder / POOLING / "config.json"
    return "cls" if path.exists() and json.loads(path.read_text()).get("pooling_mode_cls_token") else "mean"


def save_pooling(folder: Path, pooling: str, config: Any, longest: int) -> None:
    """Write the files of sentence-transformers into a folder that has the tokenizer.

    pooling: "cls", or "mean" over a sentence's tokens except [CLS] and [SEP], whose weights are 0. config: the model's
    config. longest: the most tokens of a sentence.
    """
    parts: dict[str, tuple[str, dict[str, Any] | None]] = {"": ("Transformer", None)}
    if pooling == "mean":
        tokenizer = Tokenizer(folder)
        of_id = {number: token for token, number in tokenizer.hf.get_vocab().items()}
        weights = {of_id[number]: 0.0 for number in (tokenizer.cls_id, tokenizer.sep_id)}
        vocab = [of_id.get(number, "") for number in range(config.vocab_size)]  # a weight for each id of the embeddings
        words = {"vocab": vocab, "word_weights": weights, "unknown_word_weight": 1.0}
        parts["0_WordWeights"] = ("WordWeights", words)
    modes = {f"pooling_mode_{name}": pooling in name for name in ("cls_token", "mean_tokens")}
    parts[POOLING] = ("Pooling", {"word_embedding_dimension": config.hidden_size} | modes)
    parts["2_Normalize"] = ("Normalize", {})
    modules = []
    for number, (path, (kind, fields)) in enumerate(parts.items()):
        kind = f"sentence_transformers.models.{kind}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": kind})
        if fields is not None:
            (folder / path).mkdir()
            _write(folder / path / "config.json", fields)
    _write(folder / "modules.json", modules)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
