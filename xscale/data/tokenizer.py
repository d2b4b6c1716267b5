"""The tokenizer of a run: turns text into token ids, and has the special tokens of sequences."""

import hashlib
import json
import os
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xscale.data.words import TokenWords, begins_with_unspaced_script, token_words
from xscale.errors import UserError
from xscale.files import describe_empty_or_placeholder, exists_or_is_hub_name


class PairTemplate(NamedTuple):
    """The ids of the special tokens of a pair of sentences A and B, encoded as `first A between B last`."""

    first: list[int]
    between: list[int]
    last: list[int]
    has_two_token_types: bool
    """True if the tokens of A have type 0 and the tokens of B have type 1."""

    @property
    def special_count(self) -> int:
        return len(self.first) + len(self.between) + len(self.last)


def special_ids(tokenizer: Any) -> dict[str, Any]:
    """Return the id of each special token, by its role: "mask", "pad", "cls", "sep" or "unk". The id is None if the
    tokenizer has no such token."""
    return {
        "mask": tokenizer.mask_token_id,
        "pad": tokenizer.pad_token_id,
        "cls": tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id,
        "sep": tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id,
        "unk": tokenizer.unk_token_id,
    }


def check_special_tokens(path: str | Path, special: dict[str, Any], mask: str) -> None:
    """Raise UserError if a masked language model cannot be trained with these special ids. mask: the mask token."""
    missing = list[str]()
    same = list[str]()
    for name, token in special.items():
        if token is None and name != "unk":
            missing.append(name)
        if token == special["mask"]:
            same.append(name)
    if missing:
        raise UserError(
            f"tokenizer {path} has no {', '.join(missing)} token, which a masked language model needs. Add a "
            f"{', '.join(missing)} token to the special tokens of the tokenizer, or train a tokenizer by `xscale "
            "data tokenizer`"
        )
    if len(same) > 1:
        raise UserError(
            f"tokenizer {path} uses the same token {mask!r} for {' and '.join(same)}. A masked language model "
            "needs a separate mask token: add a mask token to the special tokens of the tokenizer"
        )


MOST_GAPS = 4
"""A tokenizer is refused if its largest id is more than this many times its number of tokens."""


def require_sentencepiece_package(folder: Path) -> None:
    """Raise UserError if a folder has only a model of sentencepiece, and the package sentencepiece is not installed.
    transformers would ask for the package tiktoken, which cannot read such a model."""
    models = sorted(folder.glob("*.model"))
    if models and not (folder / "tokenizer.json").exists() and find_spec("sentencepiece") is None:
        raise UserError(
            f"tokenizer {folder} cannot be loaded: {models[0].name} is a SentencePiece model, and the package "
            "sentencepiece is not installed. Run `pip install sentencepiece`"
        )


def load_transformers_tokenizer(path: str | Path) -> Any:
    """Return transformers' tokenizer of a folder or hub name, with the parts of its tokenizer.json.

    For some classes, transformers 5 builds these parts itself and ignores those of tokenizer.json. So
    XLMRobertaTokenizer has no normaliser, and full-width punctuation becomes unknown. Such a tokenizer is replaced by
    one of the general class, which all versions of transformers load without changes.
    """
    from tokenizers import Tokenizer as Backend
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    try:
        file = cached_file(str(path), "tokenizer.json")
    except OSError:
        return tokenizer
    if not tokenizer.is_fast or file is None:
        return tokenizer
    backend = Backend.from_file(file)
    if text_processing_parts(backend) == text_processing_parts(tokenizer.backend_tokenizer):
        return tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        name_or_path=tokenizer.name_or_path,
        model_max_length=tokenizer.model_max_length,
        model_input_names=tokenizer.model_input_names,
        padding_side=tokenizer.padding_side,
        **tokenizer.special_tokens_map,
    )


def text_processing_parts(backend: Any) -> list[Any]:
    """Return the parts that turn text into ids. backend: a tokenizer of the package tokenizers."""
    fields = json.loads(backend.to_str())
    return [fields[part] for part in ("normalizer", "pre_tokenizer", "model", "post_processor")]


class Tokenizer:
    """A fast tokenizer of Hugging Face, with the ids and the encodings that the data needs."""

    def __init__(self, path: str | Path):
        if not exists_or_is_hub_name(path):
            raise UserError(
                f"tokenizer {path} does not exist. Set model.tokenizer (or the flag --tokenizer) to the folder of "
                "a Hugging Face tokenizer"
            )
        # Forked workers would hang if they inherited the tokenizer's threads.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        pointer = describe_empty_or_placeholder(Path(path), "*.json", "vocab.*", "merges.txt", "*.model")
        if pointer:  # transformers may read the three lines of a Git LFS pointer as a vocabulary
            raise UserError(f"tokenizer {path} cannot be loaded: {pointer}")
        try:
            tokenizer = load_transformers_tokenizer(path)
            special = special_ids(tokenizer)
            ids = [*tokenizer.get_vocab().values()]
        except Exception as error:
            require_sentencepiece_package(Path(path))
            raise UserError(
                f"tokenizer {path} cannot be loaded from {Path.cwd() / path} or from the Hugging Face Hub "
                f"({str(error).splitlines()[0]}). Set model.tokenizer (or the flag --tokenizer) to the folder of a "
                "Hugging Face tokenizer, or train a tokenizer by `xscale data tokenizer`"
            ) from None
        if not tokenizer.is_fast:
            raise UserError(
                f"tokenizer {path} is a slow tokenizer of transformers, and xscale needs a fast tokenizer. Convert "
                "the tokenizer to a tokenizer.json"
            )
        self.hf = tokenizer
        check_special_tokens(path, special, tokenizer.mask_token)
        self.mask_id = special["mask"]
        self.pad_id = special["pad"]
        self.cls_id = special["cls"]
        self.sep_id = special["sep"]
        self.vocab_size = max(ids) + 1
        """The largest token id plus 1. There may be smaller ids without a token."""
        if self.vocab_size > MOST_GAPS * len(ids):
            raise UserError(
                f"tokenizer {path} has {len(ids):,} tokens, but its ids go up to {max(ids):,}. Number the tokens "
                "from 0 on without large gaps"
            )
        self.is_special = np.ones(self.vocab_size, dtype=bool)
        self.is_special[ids] = False
        self.is_special[tokenizer.all_special_ids] = True
        self.ordinary_ids = np.flatnonzero(~self.is_special)
        try:
            self.encode(["\U00010400"])  # a letter that few vocabularies have
            self.pair = self._pair_template()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the Rust code may panic, which is no Exception
            raise UserError(
                f"tokenizer {path} cannot encode a rare letter or a pair of sentences ({error}). Correct unk_token "
                "(for letters) or post_processor (for pairs) in tokenizer.json"
            ) from None
        self.keeps_space = self.encode(["a"])[0][-1:] != self.encode_inside_sentence(["a"])[0][-1:]
        """True if a word at the beginning of a text has other tokens than inside it, as in byte-level BPE."""
        self._space: int | None = self.backend.token_to_id("▁")
        self.special: dict[str, int | None] = special
        """Role of a special token -> its id (special_ids). tokenizer.json does not have these roles."""
        self.fingerprint = hashlib.sha256(self.backend.to_str().encode()).hexdigest()[:16]

    @property
    def backend(self) -> Any:
        """The tokenizer of the package tokenizers. It does not pad or truncate, and it reads "</s>" or "[MASK]" in a
        text as ordinary text. Calls of `hf` change these settings, so they are set at each use."""
        backend = self.hf.backend_tokenizer
        backend.encode_special_tokens = True
        backend.no_padding()
        backend.no_truncation()
        return backend

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_inside_sentence(self, words: list[str]) -> list[list[int]]:
        """Return the token ids that each word has inside a sentence. Byte-level BPE and Unigram mark the space before a
        word. So the word is encoded behind ", ", or behind "，" if its script has no spaces, and the tokens of the
        comma are left out."""
        commas = list[str]()
        texts = list[str]()
        for word in words:
            comma = "，" if begins_with_unspaced_script(word) else ", "
            commas.append(comma)
            texts.append(comma + word)
        word_ids = list[list[int]]()
        for comma, encoding in zip(commas, self.backend.encode_batch(texts, add_special_tokens=False), strict=True):
            tokens = zip(encoding.ids, encoding.offsets, strict=True)
            word_ids.append([token for token, (_, end) in tokens if end > len(comma)])
        return word_ids

    def encode_words(self, texts: list[str]) -> tuple[list[list[int]], list[TokenWords]]:
        """Return the token ids of each text, and its words (data/words.py) with the tokens that overlap them."""
        encodings = self.backend.encode_batch(texts, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        counts = np.array(list(map(len, ids)), dtype=np.int64)
        numbers = chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in encodings))
        spans = np.fromiter(numbers, dtype=np.int64, count=2 * int(counts.sum())).reshape(-1, 2)
        if self._space is not None:
            flat = np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=len(spans))
            # The tokenizer gives a space before a text's first word the span of the word's first character.
            spans[flat == self._space] = 0
        return ids, token_words(texts, counts, spans)

    def _pair_template(self) -> PairTemplate:
        """Return the special tokens of a pair, from an encoded example. They are [CLS] A [SEP] B [SEP] if the tokenizer
        has no template for pairs."""
        example = self.backend.encode("a", "b")
        ordinary = ~np.array(example.special_tokens_mask, dtype=bool)
        side = np.array(example.sequence_ids)
        first = np.flatnonzero(ordinary & (side == 0.0))
        second = np.flatnonzero(ordinary & (side == 1.0))
        if not len(first) or not len(second) or (~ordinary).sum() < 3:
            return PairTemplate([self.cls_id], [self.sep_id], [self.sep_id], False)
        return PairTemplate(
            example.ids[: first[0]],
            example.ids[first[-1] + 1 : second[0]],
            example.ids[second[-1] + 1 :],
            example.type_ids[first[0]] == 0 and example.type_ids[second[0]] == 1,
        )
