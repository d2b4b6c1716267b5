"""Train a tokenizer on shards or text and save it as a Hugging Face tokenizer directory.

xscale data tokenizer --data DIR... --out DIR [--type wordpiece|unigram|bpe] [--vocab_size 32000]

A WordPiece or Unigram vocabulary has the characters that make up 99.95 % of each language's text. In WordPiece, a word
with another character becomes [UNK]. Unigram and byte-level BPE write such a character as bytes.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from xscale import files
from xscale.data.shards import Source, find_sources
from xscale.data.text import read_lines
from xscale.errors import UserError

from .command import check_new_folder, run_tool_and_exit
from .readers import input_files
from .sentences import is_blank

WORDPIECE_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA_SPECIAL = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
_SYMBOLS = r" ?[^\s\p{L}\p{M}\p{N}]+"
"""Matches a run of symbols. Symbols are split from words, so that a token is a part of a word or has only symbols."""
_BYTE_LEVEL_WORD = rf" ?[\p{{L}}\p{{M}}]+| ?\p{{N}}+|{_SYMBOLS}|\s+(?!\S)|\s+"
"""Matches a word, as GPT-2 does. But a combining mark belongs to its letter, and `'s` is not a special case."""
COVERAGE = 0.9995
"""The share of each language's text that the characters of the vocabulary make up."""
_ALPHABET = 1000
"""The number of the most frequent characters of all text that the vocabulary has, as far as they fit."""
_ROOM = 0.75
"""The maximum share of the vocabulary that single characters may take."""
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
"""The byte tokens by which Unigram writes a character that is not in its vocabulary."""

Texts = Iterable[tuple[str, str]]
"""Pairs (language, text)."""


def train(texts: Texts, model_type: str, vocab_size: int, lowercase: bool) -> PreTrainedTokenizerFast:
    """Return a trained tokenizer: WordPiece in BERT's style, Unigram in XLM-R's, or byte-level BPE in RoBERTa's. It has
    mask, pad, cls and sep tokens, and joins the two sentences of a pair as that model does. Raises UserError."""
    train_model = {"wordpiece": _train_wordpiece, "unigram": _train_unigram, "bpe": _train_bpe}[model_type]
    tokenizer = train_model(texts, vocab_size, lowercase)
    if tokenizer.get_vocab_size() < vocab_size:
        print(
            f"the tokenizer has only {tokenizer.get_vocab_size():,} of the {vocab_size:,} tokens of vocab_size, "
            "because the text has too few different words for more",
            file=sys.stderr,
        )
    is_wordpiece = model_type == "wordpiece"
    special = WORDPIECE_SPECIAL if is_wordpiece else ROBERTA_SPECIAL
    cls = special["cls"]
    sep = special["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1" if is_wordpiece else f"{cls} $A {sep} {sep} $B {sep}",
        special_tokens=[(cls, tokenizer.token_to_id(cls)), (sep, tokenizer.token_to_id(sep))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        pad_token=special["pad"],
        unk_token=special["unk"],
        cls_token=cls,
        sep_token=sep,
        mask_token=special["mask"],
    )


def _train_wordpiece(texts: Texts, vocab_size: int, lowercase: bool) -> Tokenizer:
    """Train WordPiece so that every run gives the same vocabulary. WordPieceTrainer numbers the characters inside words
    in the order of a hash table, and breaks ties by these numbers. So the trainer gets these characters as its first
    tokens, in a fixed order."""
    normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.BertNormalizer(lowercase=lowercase, strip_accents=False)]
    )
    special = list(WORDPIECE_SPECIAL.values())

    def is_inside(char: str) -> bool:
        """Return whether the character can stand inside a word. The normalizer puts spaces around Chinese
        characters."""
        return " " not in normalizer.normalize_str("a" + char)

    trained = Tokenizer(models.WordPiece())
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    with _normalised_lines_and_character_counts(texts, normalizer) as (lines, characters):
        alphabet = _choose_alphabet(characters, vocab_size - len(special), lambda char: 1 + is_inside(char))
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            special_tokens=special + sorted("##" + char for char in alphabet if is_inside(char)),
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        trained.train_from_iterator(lines, trainer)
    tokenizer = Tokenizer(models.WordPiece(trained.get_vocab(), unk_token=WORDPIECE_SPECIAL["unk"]))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _train_bpe(texts: Texts, vocab_size: int, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    if lowercase:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    words = pre_tokenizers.Split(Regex(_BYTE_LEVEL_WORD), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(ROBERTA_SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in texts), trainer)
    return tokenizer


def _train_unigram(texts: Texts, vocab_size: int, lowercase: bool) -> Tokenizer:
    special = list(ROBERTA_SPECIAL.values())
    tokenizer = Tokenizer(models.Unigram())
    steps: list[Any] = [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    if lowercase:
        steps.append(normalizers.Lowercase())
    tokenizer.normalizer = normalizers.Sequence(steps)
    symbols = pre_tokenizers.Split(Regex(_SYMBOLS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([symbols, pre_tokenizers.Metaspace(prepend_scheme="first")])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    trainer = trainers.UnigramTrainer(
        vocab_size=max(vocab_size - len(_BYTES), len(special) + 1),
        special_tokens=special,
        unk_token=ROBERTA_SPECIAL["unk"],
        show_progress=False,
    )
    with _normalised_lines_and_character_counts(texts, tokenizer.normalizer) as (lines, characters):
        rare = set().union(*characters.values())
        rare.difference_update(_choose_alphabet(characters, vocab_size - len(_BYTES), lambda char: 1))
        to_spaces = str.maketrans(dict.fromkeys(rare, " "))
        tokenizer.train_from_iterator((line.translate(to_spaces) for line in lines), trainer)
    tokenizer.model = _stable_unigram_with_bytes(tokenizer, len(special))
    return tokenizer


def _stable_unigram_with_bytes(tokenizer: Tokenizer, special_count: int) -> models.Unigram:
    """Return the trained Unigram model without the differences between runs, and with tokens for bytes. UnigramTrainer
    iterates over hash tables. So the last digits of its scores vary from run to run, and rare characters get the lowest
    scores (the lowest, the lowest + 0.0001, ...) in a varying order. special_count: the number of special tokens."""
    model = json.loads(tokenizer.to_str())["model"]
    lowest = min(score for _, score in model["vocab"][special_count:])
    pieces = list[tuple[str, float]]()
    for piece, score in model["vocab"][special_count:]:
        steps = (score - lowest) / 1e-4
        if len(piece) == 1 and abs(steps - round(steps)) < 1e-6:
            score = lowest
        pieces.append((piece, round(score, 6)))
    pieces.sort(key=lambda entry: (-entry[1], entry[0]))
    pieces += [(byte, round(lowest - 10, 6)) for byte in _BYTES]
    first = list(map(tuple, model["vocab"][:special_count]))
    return models.Unigram(first + pieces, model["unk_id"], byte_fallback=True)


@contextmanager
def _normalised_lines_and_character_counts(
    texts: Texts, normalizer: Any
) -> Iterator[tuple[Iterator[str], dict[str, Counter[str]]]]:
    """Yield the normalised texts, one a line, and each language's counts of characters other than spaces. The texts are
    read once and kept in a file, because they may not fit into memory."""
    characters = defaultdict[str, Counter[str]](Counter)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as spool:
        for language, text in texts:
            line = " ".join(normalizer.normalize_str(text).split())
            characters[language].update(line.replace(" ", ""))
            spool.write(line + "\n")
        spool.seek(0)
        yield spool, characters


def _choose_alphabet(
    character_counts: dict[str, Counter[str]], token_limit: int, tokens_of_character: Callable[[str], int]
) -> list[str]:
    """Return the characters of a vocabulary, as far as they fit: the most frequent characters of each language, which
    make up the share COVERAGE of the language's text, and the _ALPHABET most frequent characters of all text.

    character_counts: the counts by language. token_limit: the number of tokens of the whole vocabulary.
    tokens_of_character: a function that returns the number of tokens that a character takes. Raises UserError if no
    character fits."""
    total = Counter[str]()
    share_before = dict[str, float]()
    """For each character, the share of a language's text that more frequent characters make up. If several languages
    have the character, their minimum."""
    for counts in character_counts.values():
        passed = 0
        for char, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])):
            share_before[char] = min(share_before.get(char, 1.0), passed / counts.total())
            passed += count
        total += counts
    by_count = sorted(total, key=lambda char: (-total[char], char))
    frequent = set(by_count[:_ALPHABET])
    wanted = [char for char in by_count if char in frequent or share_before[char] < COVERAGE]
    wanted.sort(key=lambda char: share_before[char])
    kept = list[str]()
    tokens = 0
    for char in wanted:
        tokens += tokens_of_character(char)
        if tokens > _ROOM * token_limit:
            break
        kept.append(char)
    if wanted and not kept:
        raise UserError(
            f"the vocabulary is too small, because only {max(token_limit, 0)} tokens are left for the characters of "
            "the text. Set a larger vocab_size"
        )
    if len(kept) < len(wanted):
        print(
            f"warning: to cover {COVERAGE:.2%} of each language's text, the vocabulary should have {len(wanted):,} "
            f"characters, but has room for only {len(kept):,}. Set a larger vocab_size",
            file=sys.stderr,
        )
    return kept


def read_shard_texts(sources: list[Source], max_records_per_source: int) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of at most `max_records_per_source` records of each source, in shard order."""
    for source in sources:
        for place in source.locate_records(np.arange(min(source.records, max_records_per_source))):
            yield from zip(source.langs, source.read(*place).texts, strict=True)


def parse_and_check_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="xscale data tokenizer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, nargs="+", action="extend", default=[], help="folders of shards to train the tokenizer on"
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        help="files or folders of text to train on, plain or compressed as .gz, .xz, .bz2 or .zst",
    )
    parser.add_argument("--out", type=Path, required=True, help="new folder for the tokenizer")
    parser.add_argument(
        "--type",
        choices=("wordpiece", "unigram", "bpe"),
        default="wordpiece",
        help="WordPiece, Unigram or byte-level BPE (default: wordpiece)",
    )
    parser.add_argument(
        "--vocab_size", type=int, default=32000, help="number of tokens in the vocabulary (default: 32,000)"
    )
    parser.add_argument("--lowercase", action="store_true", help="make a tokenizer that converts text to lower case")
    parser.add_argument(
        "--max_records",
        type=int,
        default=1_000_000,
        help="maximum number of records that are read from each folder of shards (default: 1,000,000)",
    )
    args = parser.parse_args(argv)
    if not args.data and not args.text:
        raise UserError("there is no text to train on. Pass folders of shards by --data, or files of text by --text")
    check_new_folder(args.out)
    files.check_writable_and_make_parent(args.out)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_and_check_arguments(argv)

    def all_texts() -> Iterator[tuple[str, str]]:
        yield from read_shard_texts(find_sources(args.data), args.max_records)
        if args.text:
            for path in input_files(args.text):
                for _, line in read_lines(path):
                    yield "text", line

    texts = (entry for entry in all_texts() if not is_blank(entry[1]))
    first = next(texts, None)
    if first is None:
        raise UserError(
            f"{', '.join(map(str, args.data + args.text))}: the files have no text to train on. Use other files"
        )
    trained = train(chain([first], texts), args.type, args.vocab_size, args.lowercase)
    with files.atomic_write(args.out) as partial:
        trained.save_pretrained(partial)
    print(f"{args.out}: {args.type} tokenizer of {len(trained):,} tokens")


if __name__ == "__main__":
    run_tool_and_exit(main)
