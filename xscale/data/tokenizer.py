"""Text to token ids, and token ids to flat sequences with their special tokens.

Shape letters: B sequences, N tokens of all of them behind one another, M masked tokens.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from xscale.errors import UserError

Words = Literal["whitespace", "tokenizer"]
"""Whose words: the text's, as word links count them, or the tokenizer's, which splits punctuation and Chinese."""


class Tokenizer:
    """A Hugging Face fast tokenizer, reduced to what the data path needs."""

    def __init__(self, path: str | Path):
        if Path(path).is_absolute() and not Path(path).exists():
            raise UserError(
                f"tokenizer {path} does not exist; set model.tokenizer to a Hugging Face tokenizer directory"
            )
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers are the parallelism
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path))
        except Exception as error:
            raise UserError(
                f"tokenizer {path} cannot be loaded ({str(error).splitlines()[0]}). Set model.tokenizer to a Hugging "
                f"Face tokenizer directory, or train one: `python -m data_tools.tokenizer --help`"
            ) from None
        if not tokenizer.is_fast:
            raise UserError(f"tokenizer {path} has no fast (tokenizers) implementation; convert it to tokenizer.json")
        self.hf = tokenizer
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_padding()
        self.backend.no_truncation()
        special = {"mask": tokenizer.mask_token_id, "pad": tokenizer.pad_token_id}
        special["cls"] = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
        special["sep"] = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
        missing = [name for name, token in special.items() if token is None]
        if missing:
            raise UserError(
                f"tokenizer {path} has no {', '.join(missing)} token; masked language models need one. "
                f"Train one with `python -m data_tools.tokenizer`, or add it to the tokenizer's special tokens"
            )
        self.mask_id, self.pad_id = special["mask"], special["pad"]
        self.cls_id, self.sep_id = special["cls"], special["sep"]
        self.vocab_size = len(tokenizer)
        self.is_special = np.zeros(self.vocab_size, dtype=bool)
        self.is_special[tokenizer.all_special_ids] = True
        self.ordinary_ids = np.flatnonzero(~self.is_special)
        self.fingerprint = hashlib.sha256(self.backend.to_str().encode()).hexdigest()[:16]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text without special tokens; one call of the tokenizer."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_words(self, texts: list[str], words: Words = "tokenizer") -> tuple[list[list[int]], list[list[int]]]:
        """Token ids, and for each token the number of its word in the text; -1 where it has none."""
        split = words == "whitespace"
        inputs: list[Any] = [text.split() for text in texts] if split else texts
        encodings = self.backend.encode_batch(inputs, is_pretokenized=split, add_special_tokens=False)
        return [e.ids for e in encodings], [[-1 if w is None else w for w in e.word_ids] for e in encodings]

    def tokens_per_byte(self, texts: list[str], bytes_read: int) -> float:
        """Tokens per stored byte, from a sample of a source; estimates lengths without reading text."""
        tokens = sum(len(ids) + 1 for ids in self.encode(texts))
        return round(tokens / max(bytes_read, 1), 4)
