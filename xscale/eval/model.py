"""Loads an exported encoder for evaluation, and writes the JSON file of its scores."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xscale import files
from xscale.checkpoint.store import is_run_or_checkpoint
from xscale.data.scripts import find_exact_name_or_spellings
from xscale.data.shards import Source
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval.bootstrap import intervals_of_scores, resampled_values_of_scores
from xscale.eval.sentence_files import read_pooling
from xscale.models.build import max_sequence_tokens, read_model_and_has_trained_head, read_xscale_field
from xscale.models.encoder import Encoder

Scores = dict[str, float]
"""{name of a metric: its value}."""


class ExportedModel:
    """The model and tokenizer of a Hugging Face directory, in eval mode, on a GPU if there is one."""

    def __init__(self, path: Path):
        if is_run_or_checkpoint(path):
            raise UserError(
                f"--model {path} is a run of xscale. Export a checkpoint of the run first by `xscale export {path} "
                "HF_DIR`"
            )
        if not path.exists():
            raise UserError(
                f"--model {path} does not exist. Correct --model, or write the directory by `xscale export RUN_DIR "
                f"{path}`"
            )
        lm, has_head = read_model_and_has_trained_head(path, field="--model")
        self.path = path
        self.pooling = read_pooling(path) or "mean"
        """How sentence vectors are pooled: "cls" or "mean"."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self.encoder = Encoder(lm).eval().to(self.device)
        except UserError as error:
            raise UserError(f"--model {path}: {error}") from None
        self.tokenizer = Tokenizer(path)
        if not len(self.tokenizer.ordinary_ids):  # without files, transformers makes a tokenizer without words
            raise UserError(
                f"--model {path} has no tokenizer. Save the tokenizer of the model by "
                f"`tokenizer.save_pretrained({str(path)!r})`"
            )
        if self.tokenizer.vocab_size > lm.config.vocab_size:
            raise UserError(
                f"--model {path}: the tokenizer has {self.tokenizer.vocab_size:,} tokens, but the model has only "
                f"{lm.config.vocab_size:,} embeddings. Save in {path} the tokenizer that the model was trained with"
            )
        self.headless = not has_head
        """True if the directory has no masked-LM head, so that the head is random."""
        trained = read_xscale_field(lm.config, f"--model {path}")
        self.languages: list[str] = trained.get("languages", [])
        """The language of each language id. Id 0 is the neutral language embedding."""
        self.language_embeddings: bool = trained.get("language_embeddings", False)
        self.has_two_token_types: bool = trained.get("segments", False)
        self.reset_positions: bool = trained.get("reset_positions", False)
        """These three options have the values that they had in the model's training."""
        self.lexicon_heldout: float = trained.get("lexicon_heldout", 1.0)
        """The share of a dictionary's entries that training withheld: all, if no objective read a dictionary."""

    @property
    def max_length(self) -> int:
        """Return the maximum number of tokens of a sequence, special tokens included."""
        return max_sequence_tokens(self.encoder.lm.config)

    def language_ids_or_neutral(self, languages: Sequence[str]) -> dict[str, int]:
        """Return the id of each language. The model may know it by another spelling (`deu_Latn` for `de`). A language
        that the model does not know has the id 0, the neutral embedding."""
        ids = dict.fromkeys(languages, 0)
        for language in languages:
            for name in find_exact_name_or_spellings(language, self.languages[1:])[:1]:
                ids[language] = self.languages.index(name)
        return ids


def read_texts(source: Source, limit: int) -> list[tuple[str, ...]]:
    """Return the texts of the first `limit` records: two texts for each pair of sentences."""
    places = source.locate_records(np.arange(min(limit, source.records)))
    return [source.read(*place).texts for place in places]


def text_checksum(sentences: Sequence[Any]) -> int:
    """Return a checksum of the sentences of a test, which shows whether two models were tested on the same text."""
    return zlib.crc32(json.dumps(list(sentences)).encode())


def write_results(
    out: Path,
    model: Path,
    results: dict[str, dict[str, Scores]],
    checksums: dict[str, dict[str, int]],
    **further_fields: Any,
) -> None:
    """Write the JSON file of a model's scores, with their intervals and their values in resampled texts. All models are
    resampled with the same sentences, so values of two models can be subtracted. results: {task: {results row:
    scores}}. checksums: {task: {results row: text_checksum of its test}}."""
    content = {"model": str(model), "results": results, "intervals": intervals_of_scores(results), **further_fields}
    content |= {"resampled": resampled_values_of_scores(results), "checksums": checksums}
    files.write_text(out, json.dumps(content) + "\n")
