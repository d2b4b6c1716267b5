"""Train a tokenizer on shards or text and save it as a Hugging Face tokenizer directory.

python -m data_tools.tokenizer --data DIR... --out DIR [--type wordpiece|unigram|bpe] [--vocab_size 32000]

A WordPiece or Unigram vocabulary holds the characters that make up `--coverage` of each language's text. A word with
another character is [UNK] in WordPiece; Unigram and byte-level BPE write it in bytes.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from xscale import files
from xscale.data.shards import Source, find_sources
from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer as Loaded
from xscale.data.tokenizer import unknown_lines
from xscale.errors import UserError

from .command import run
from .readers import input_files
from .sentences import is_blank

WORDPIECE_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA_SPECIAL = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
_SYMBOLS = r" ?[^\s\p{L}\p{M}\p{N}]+"
"""Matches a run of symbols. A token never has both symbols and a word: `en.` would be neither word nor symbol."""
_BYTE_LEVEL_WORD = rf" ?[\p{{L}}\p{{M}}]+| ?\p{{N}}+|{_SYMBOLS}|\s+(?!\S)|\s+"
"""GPT-2's pattern of words, except that a combining mark belongs to its letter and `'s` is not a special case."""
COVERAGE = 0.9995
"""The default share of each language's text whose characters the vocabulary contains."""
_ALPHABET = 1000
"""The vocabulary contains this number of the most frequent characters, as far as they fit, whatever the coverage is."""
_ROOM = 0.75
"""The maximum share of the vocabulary that single characters may take."""
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
"""The byte tokens by which Unigram writes a character that is not in its vocabulary."""
_SAMPLE = 2000
"""The trained tokenizer's statistics are computed over at least this number of texts of a language, if there are so
many, and at most twice this number."""

Texts = Iterable[tuple[str, str]]
"""Pairs (language, text)."""


def train(
    texts: Texts, model_type: str, vocab_size: int, lowercase: bool, coverage: float = COVERAGE
) -> PreTrainedTokenizerFast:
    """Return a trained tokenizer: WordPiece in BERT's style, Unigram in XLM-R's, or byte-level BPE in RoBERTa's. It has
    mask, pad, cls and sep tokens, and joins the two sentences of a pair as that model does."""
    special = WORDPIECE_SPECIAL if model_type == "wordpiece" else ROBERTA_SPECIAL
    tokens = list(special.values())
    if model_type == "wordpiece":
        normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        vocabulary = _train_wordpiece(texts, normalizer, vocab_size, tokens, coverage)
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=special["unk"]))
        tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.add_special_tokens(tokens)
    elif model_type == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.Lowercase() if lowercase else None
        words = pre_tokenizers.Split(Regex(_BYTE_LEVEL_WORD), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, level])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        pairs = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator((text for _, text in texts), pairs)
    else:
        tokenizer = Tokenizer(models.Unigram())
        steps = [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        tokenizer.normalizer = normalizers.Sequence(steps + ([normalizers.Lowercase()] if lowercase else []))
        symbols = pre_tokenizers.Split(Regex(_SYMBOLS), "isolated")
        space = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([symbols, space])
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
        trainer = trainers.UnigramTrainer(
            vocab_size=max(vocab_size - len(_BYTES), len(tokens) + 1),
            special_tokens=tokens,
            unk_token=special["unk"],
            show_progress=False,
        )
        with _normalised_lines(texts, tokenizer.normalizer) as (lines, seen):
            kept = _alphabet(seen, coverage, vocab_size - len(_BYTES), lambda char: 1)
            rare = dict.fromkeys((ord(char) for char in set().union(*seen.values()) - {*kept}), " ")
            tokenizer.train_from_iterator((line.translate(rare) for line in lines), trainer)
        tokenizer.model = _reproducible_unigram(tokenizer, len(tokens))
    ids = {name: tokenizer.token_to_id(token) for name, token in special.items()}
    cls, sep = special["cls"], special["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1" if model_type == "wordpiece" else f"{cls} $A {sep} {sep} $B {sep}",
        special_tokens=[(cls, ids["cls"]), (sep, ids["sep"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in special.items()},
    )


def _train_wordpiece(
    texts: Texts, normalizer: Any, vocab_size: int, special: list[str], coverage: float
) -> dict[str, int]:
    """Return {token: id} of a trained WordPiece, the same in every run. WordPieceTrainer numbers the characters inside
    words in the order of a hash table and breaks ties by number; here they are its first tokens, in a fixed order."""
    tokenizer = Tokenizer(models.WordPiece())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()

    def is_inside(char: str) -> bool:
        """Return whether a word can contain the character: not if the normalizer puts spaces around it (Chinese)."""
        return " " not in normalizer.normalize_str("a" + char)

    with _normalised_lines(texts, normalizer) as (lines, seen):
        kept = _alphabet(seen, coverage, vocab_size - len(special), lambda char: 1 + is_inside(char))
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            special_tokens=special + sorted("##" + char for char in kept if is_inside(char)),
            initial_alphabet=kept,
            limit_alphabet=len(kept),
            show_progress=False,
        )
        tokenizer.train_from_iterator(lines, trainer)
    return tokenizer.get_vocab()


@contextmanager
def _normalised_lines(texts: Texts, normalizer: Any) -> Iterator[tuple[Iterator[str], dict[str, Counter[str]]]]:
    """Yield the normalised texts as a file with one per line, and each language's counts of characters but spaces."""
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as spool:
        for language, text in texts:
            line = " ".join(normalizer.normalize_str(text).split())
            seen[language].update(line.replace(" ", ""))
            spool.write(line + "\n")
        spool.seek(0)
        yield spool, seen


def _alphabet(seen: dict[str, Counter[str]], coverage: float, room: int, tokens_of: Callable[[str], int]) -> list[str]:
    """Return the characters of a vocabulary, as far as they fit: the most frequent ones of each language, which make up
    the share `coverage` of the language's text, and the _ALPHABET most frequent ones of all text. room: the number of
    tokens of the whole vocabulary. tokens_of: a function that returns the number of tokens that a character takes."""
    total: Counter[str] = sum(seen.values(), Counter())
    before = dict.fromkeys(total, 1.0)
    """Share of a language's text in more frequent characters, the least of all languages."""
    for counts in seen.values():
        passed = 0
        for char, times in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])):
            before[char] = min(before[char], passed / counts.total())
            passed += times
    frequent = set(sorted(total, key=lambda char: (-total[char], char))[:_ALPHABET])
    asked = [char for char in total if char in frequent or before[char] < coverage]
    asked.sort(key=lambda char: (before[char], -total[char], char))
    ends = accumulate(map(tokens_of, asked))
    kept = [char for char, end in zip(asked, ends, strict=True) if end <= _ROOM * room]
    if asked and not kept:
        raise UserError("no character fits into so small a vocabulary; choose a larger --vocab_size")
    if len(kept) < len(asked):
        print(
            f"warning: --coverage {coverage:g} needs {len(asked):,} characters, of which {len(kept):,} fit; choose a "
            f"larger --vocab_size",
            file=sys.stderr,
        )
    return kept


def _reproducible_unigram(tokenizer: Tokenizer, special: int) -> models.Unigram:
    """Return the trained Unigram model, made the same in every run. UnigramTrainer iterates over hash tables, so that
    the last digits of its scores vary, and so does the order in which rare characters get the lowest scores (the
    lowest, the lowest + 0.0001, ...)."""
    model = json.loads(tokenizer.to_str())["model"]
    trained = model["vocab"][special:]
    low = min(score for _, score in trained)

    def settle(piece: str, score: float) -> float:
        steps = (score - low) / 1e-4
        return round(low if len(piece) == 1 and abs(steps - round(steps)) < 1e-6 else score, 6)

    pieces = sorted(
        ((piece, settle(piece, score)) for piece, score in trained), key=lambda entry: (-entry[1], entry[0])
    )
    fixed = [(piece, score) for piece, score in model["vocab"][:special]]
    last = [(byte, round(low - 10, 6)) for byte in _BYTES]
    return models.Unigram(fixed + pieces + last, model["unk_id"], byte_fallback=True)


def shard_texts(sources: list[Source], limit: int) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of at most `limit` records of each source, in shard order."""
    for source in sources:
        left = limit
        for number, count in enumerate(source.counts):
            for record in range(min(int(count), left)):
                yield from zip(source.langs, source.read(number, record).texts, strict=True)
            left -= min(int(count), left)


class Sample:
    """A sample of each language's texts, evenly spread over them, by language in `texts`."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = defaultdict(list)
        self._every: dict[str, int] = defaultdict(lambda: 1)
        self._passed: Counter[str] = Counter()

    def collect(self, texts: Texts) -> Iterator[tuple[str, str]]:
        """Yield (language, text) unchanged, and keep a sample of the texts that pass."""
        for language, text in texts:
            if self._passed[language] % self._every[language] == 0:
                self.texts[language].append(text)
                if len(self.texts[language]) == 2 * _SAMPLE:
                    self.texts[language] = self.texts[language][::2]
                    self._every[language] *= 2
            self._passed[language] += 1
            yield language, text


def try_to_train(texts: Texts, args: argparse.Namespace) -> PreTrainedTokenizerFast:
    """Return a tokenizer of the type and size in `args`. Raises UserError if it cannot be trained."""
    try:
        return train(texts, args.type, args.vocab_size, args.lowercase, args.coverage)
    except UserError as error:
        raise UserError(f"--vocab_size {args.vocab_size}: {error}") from None
    except BaseException as error:  # a panic of Rust is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | OSError):
            raise
        raise UserError(
            f"--type {args.type} --vocab_size {args.vocab_size}: cannot be trained on this text ({error}); choose "
            f"another size, or give more text"
        ) from None


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="xscale data tokenizer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="shard directories")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="text files, plain, .gz or .xz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--type", choices=("wordpiece", "unigram", "bpe"), default="wordpiece")
    parser.add_argument("--vocab_size", type=int, default=32000)
    parser.add_argument(
        "--coverage",
        type=float,
        default=COVERAGE,
        help="share of each language's text whose characters the vocabulary has",
    )
    parser.add_argument("--lowercase", action="store_true")
    parser.add_argument(
        "--max_records", type=int, default=1_000_000, help="the maximum number of records of each source"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)

    if not args.data and not args.text:
        raise UserError("give --data or --text to train on")
    files.check_writable(args.out)
    if args.out.exists() and any(args.out.iterdir()):
        raise UserError(f"{args.out} is not empty; choose another --out or remove it")
    if not 0 < args.coverage <= 1:
        raise UserError(f"--coverage {args.coverage:g} is a share of the text's characters: more than 0, at most 1")
    sources = find_sources(args.data) if args.data else []
    sample = Sample()

    def texts() -> Iterator[tuple[str, str]]:
        yield from shard_texts(sources, args.max_records)
        for path in input_files(args.text) if args.text else []:
            yield from (("text", line) for _, line in read_lines(path))

    there = ((language, text) for language, text in texts() if not is_blank(text))
    first = next(there, None)
    if first is None:
        raise UserError(
            f"{', '.join(map(str, args.data + args.text))}: no text to train on; give other shards or files"
        )
    tokenizer = try_to_train(sample.collect(chain([first], there)), args)
    with files.publish(args.out) as partial:
        tokenizer.save_pretrained(partial)
    loaded = Loaded(args.out.absolute())
    ids = {language: loaded.encode(some) for language, some in sample.texts.items()}
    words = sum(len(text.split()) for some in sample.texts.values() for text in some)
    pieces = sum(len(tokens) for some in ids.values() for tokens in some)
    fertility = f", {pieces / words:.2f} tokens a word" if words else ""
    unknown = {language: loaded.unknown_share(some) for language, some in ids.items()}
    print(f"{args.out}: {args.type}, {len(loaded.hf):,} tokens{fertility}")
    print(*unknown_lines(unknown, args.out), sep="\n")


if __name__ == "__main__":
    run(main)
