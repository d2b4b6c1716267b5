"""Train a tokenizer on shards or text and save it as a Hugging Face tokenizer directory.

python -m data_tools.tokenizer --data DIR... --out DIR [--type wordpiece|unigram|bpe] [--vocab_size 32000]
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data_tools.ranks import Ranks, run
from xscale import files
from xscale.data.shards import Source, find_sources
from xscale.data.text import files_of, read_lines
from xscale.errors import UserError

WORDPIECE_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA_SPECIAL = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
_SYMBOLS = r" ?[^\s\p{L}\p{M}\p{N}]+"
"""Never in one token with a word: `en.` would be neither."""
_BYTE_LEVEL_WORD = rf" ?[\p{{L}}\p{{M}}]+| ?\p{{N}}+|{_SYMBOLS}|\s+(?!\S)|\s+"
"""GPT-2's, but that a mark belongs to its letter and `'s` is no token."""
_ALPHABET = 1000
"""Most frequent characters that a WordPiece vocabulary holds, so that Chinese leaves room for pieces."""


def train(texts: Iterator[str], kind: str, vocab_size: int, lowercase: bool) -> PreTrainedTokenizerFast:
    """A BERT-style WordPiece, an XLM-R-style Unigram or a RoBERTa-style byte-level BPE tokenizer with mask, pad, cls
    and sep tokens, and with its model's template of pairs."""
    special = WORDPIECE_SPECIAL if kind == "wordpiece" else ROBERTA_SPECIAL
    tokens = list(special.values())
    if kind == "wordpiece":
        normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        vocabulary = _wordpieces(texts, normalizer, vocab_size, tokens)
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=special["unk"]))
        tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.add_special_tokens(tokens)
    elif kind == "bpe":
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
        tokenizer.train_from_iterator(texts, pairs)
    else:
        tokenizer = Tokenizer(models.Unigram())
        steps = [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        tokenizer.normalizer = normalizers.Sequence(steps + ([normalizers.Lowercase()] if lowercase else []))
        symbols = pre_tokenizers.Split(Regex(_SYMBOLS), "isolated")
        space = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([symbols, space])
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer = trainers.UnigramTrainer(
            vocab_size=vocab_size, special_tokens=tokens, unk_token=special["unk"], show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.model = _settled(tokenizer, len(tokens))
    ids = {name: tokenizer.token_to_id(token) for name, token in special.items()}
    cls, sep = special["cls"], special["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1" if kind == "wordpiece" else f"{cls} $A {sep} {sep} $B {sep}",
        special_tokens=[(cls, ids["cls"]), (sep, ids["sep"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in special.items()},
    )


def _wordpieces(texts: Iterator[str], normalizer: Any, vocab_size: int, special: list[str]) -> dict[str, int]:
    """A WordPiece vocabulary, the same in every run: WordPieceTrainer numbers the characters inside words in the order
    of a hash table and breaks ties by number, so those characters are given to it in order, as first tokens."""
    seen: Counter[str] = Counter()
    tokenizer = Tokenizer(models.WordPiece())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as spool:
        for text in texts:
            seen.update(normalizer.normalize_str(text))
            spool.write(" ".join(text.split()) + "\n")
        spool.seek(0)
        frequent = sorted(seen, key=lambda c: (-seen[c], c))[:_ALPHABET]
        inside = sorted("##" + c for c in frequent if not c.isspace())
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size, special_tokens=special + inside, limit_alphabet=_ALPHABET, show_progress=False
        )
        tokenizer.train_from_iterator(spool, trainer)
    return tokenizer.get_vocab()


def _settled(tokenizer: Tokenizer, special: int) -> models.Unigram:
    """The Unigram model, the same in every run. UnigramTrainer goes through hash tables: the last digits of its scores
    differ, and so does which rare character gets the lowest score, which the lowest + 0.0001, + 0.0002, ..."""
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
    return models.Unigram(fixed + pieces, model["unk_id"], model["byte_fallback"])


def shard_texts(sources: list[Source], limit: int) -> Iterator[str]:
    """Texts of at most `limit` records of each source, in shard order."""
    for source in sources:
        left = limit
        for number, count in enumerate(source.counts):
            for record in range(min(int(count), left)):
                yield from source.read(number, record).texts
            left -= min(int(count), left)


def main(ranks: Ranks, argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="shard directories")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="text files, plain, .gz or .xz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--type", choices=("wordpiece", "unigram", "bpe"), default="wordpiece")
    parser.add_argument("--vocab_size", type=int, default=32000)
    parser.add_argument("--lowercase", action="store_true")
    parser.add_argument("--max_records", type=int, default=1_000_000, help="records of each source, at most")
    args = parser.parse_args(argv)

    def work() -> str:
        """Training is one process's work; the other ranks of mpirun wait."""
        if not ranks.is_main:
            return ""
        if not args.data and not args.text:
            raise UserError("give --data or --text to train on")
        if args.out.exists() and any(args.out.iterdir()):
            raise UserError(f"{args.out} is not empty; choose another --out or remove it")
        sources = find_sources(args.data) if args.data else []

        def texts() -> Iterator[str]:
            yield from shard_texts(sources, args.max_records)
            for path in files_of(args.text) if args.text else []:
                yield from (line for _, line in read_lines(path))

        tokenizer = train(texts(), args.type, args.vocab_size, args.lowercase)
        with files.publish(args.out) as partial:
            tokenizer.save_pretrained(partial)
        sample = [source.read(0, i) for source in sources for i in range(min(200, int(source.counts[0])))]
        words = sum(len(text.split()) for record in sample for text in record.texts)
        pieces = sum(len(tokenizer.tokenize(text)) for record in sample for text in record.texts)
        fertility = f", {pieces / words:.2f} tokens a word" if words else ""
        return f"{args.out}: {args.type}, {len(tokenizer):,} tokens{fertility}"

    message = ranks.together(work)[0]
    if ranks.is_main:
        print(message)


if __name__ == "__main__":
    run(main)
