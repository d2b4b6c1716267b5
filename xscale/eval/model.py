"""An exported encoder, ready to be measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from xscale import files
from xscale.config import DataConfig
from xscale.data.shards import Source
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.models.build import read_pretrained, run_fields
from xscale.models.encoder import Encoder
from xscale.models.heads import load_heads


class HasLanguages(Protocol):
    """What is in some languages: a source, a dictionary, a test set."""

    @property
    def langs(self) -> tuple[str, ...]: ...


class Exported:
    """Model and tokenizer of a Hugging Face directory, in eval mode on the best device there is."""

    def __init__(self, path: Path):
        if (path / "checkpoints").is_dir() or (path / "manifest.json").exists():
            raise UserError(f"--model {path} is a run; export it first: `python -m xscale.export {path} HF_DIR`")
        if not path.exists():
            raise UserError(f"--model {path} does not exist; `python -m xscale.export RUN_DIR {path}` makes it")
        lm, has_head = read_pretrained("--model", path)
        self.path = path
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self.encoder = Encoder(lm).eval().to(self.device)
        except UserError as error:
            raise UserError(f"--model {path}: {error}") from None
        self.tokenizer = tokenizer_of(path, lm.config.vocab_size)
        self.headless = not has_head
        """Whether its masked-LM head was not in the directory, and is random."""
        self.heads = load_heads(path)
        """Of the run's objectives, by stream."""
        trained = run_fields(lm.config, f"--model {path}")
        self.languages: list[str] = trained.get("languages", [])
        """By number; number 0 is neutral."""
        self.language_embeddings: bool = trained.get("language_embeddings", False)
        self.segments: bool = trained.get("segments", False)
        self.reset_positions: bool = trained.get("reset_positions", False)
        self.lexicon_heldout: float = trained.get("lexicon_heldout", DataConfig.lexicon_heldout)
        """Share of a dictionary's words that training withheld."""

    def language_ids(self, source: HasLanguages) -> dict[str, int]:
        return self.numbers_of(source.langs)

    def numbers_of(self, languages: Sequence[str]) -> dict[str, int]:
        """Numbers of the languages that the model was trained with; 0, the neutral one, of others."""
        return dict.fromkeys(languages, 0) | {name: number for number, name in enumerate(self.languages) if number}


def tokenizer_of(path: Path, rows: int) -> Tokenizer:
    """Raises UserError for one that is not the model's, of so many embeddings: where there is no file, transformers
    makes one that knows no word."""
    tokenizer = Tokenizer(path)
    if not len(tokenizer.ordinary_ids):
        raise UserError(
            f"--model {path} has no tokenizer; save the model's own there: `tokenizer.save_pretrained(DIR)`"
        )
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"--model {path}: its tokenizer has {tokenizer.vocab_size:,} ids, its embeddings are of {rows:,}; save the "
            f"tokenizer there that the model was trained with"
        )
    return tokenizer


def check_head(model: Exported, task: str) -> None:
    """Raises UserError for a model whose masked-LM head would be random."""
    if model.headless:
        raise UserError(
            f"the model has no masked-LM head, which task {task} measures; give a directory that was saved from "
            f"AutoModelForMaskedLM"
        )


def read_all(source: Source, limit: int) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """(key, langs, texts) of the first `limit` records."""
    records: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = []
    for shard, count in enumerate(source.counts):
        for record in range(min(int(count), limit - len(records))):
            found = source.read(shard, record)
            records.append((found.key, found.langs, found.texts))
    return records


def write_json(path: Path, results: dict) -> None:
    files.write_text(path, json.dumps(results, indent=1) + "\n")
