"""Generate the demo corpus: a small world of three languages (demo_world.py), as shards, with tokenizer and dictionary.

    python -m data_tools.demo_corpus [--out data/demo] [--pairs 20000] [--mono 20000] [--seed 0]

Writes pairs/ (en-xx with gold word links), pairs_yy/ (en-yy, a fifth as many), mono_en/, mono_xx/, mono_yy/ (a fifth as
many sentences, in documents), heldout/pairs/, tokenizer/, lexicon/{en-xx,xx-en}.txt.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from xscale import files
from xscale.data.shards import find_sources
from xscale.errors import UserError
from xscale.record import Record

from . import tokenizer as tokenizers
from . import write_shards as writer
from .demo_world import LANGUAGES, WRITTEN, World
from .ranks import Ranks, run

HELDOUT = 1000
OF_YY = 1_000_000
"""The number of the first en-yy pair. It is so high that en-yy and en-xx have different sentences."""
VOCAB_SIZE = 4000


def build(out: Path, pairs: int = 20_000, mono: int = 20_000, seed: int = 0, ranks: Ranks | None = None) -> None:
    """Write the whole corpus. The directory `out` appears only when it is complete."""
    ranks = ranks or Ranks()
    world = World(seed)
    partial = files.beside(out)

    def start() -> None:
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out} is not empty; choose another --out or remove it")
        if ranks.is_main:
            files.remove(partial)
            partial.mkdir(parents=True)

    ranks.together(start)
    made_by = {"tool": "data_tools.demo_corpus", "seed": seed}

    def pair_lines(first: int, count: int, other: str = "xx") -> Iterator[writer.Line]:
        for number in range(1, count + 1):
            *texts, links = world.pair(first + number - 1, other)
            key = f"demo.en-{other}-{first + number:09d}"
            yield writer.Line(number, "", [Record(key, ("en", other), tuple(texts), links)])

    def mono_lines(language: str) -> Iterator[writer.Line]:
        written = documents = 0
        while written < (wanted := mono // 5 if language == "yy" else mono):
            sentences = world.document(language, documents := documents + 1)[: wanted - written]
            first = written + 1
            written += len(sentences)
            for number, text in enumerate(sentences, start=first):
                yield writer.Line(
                    first, "", [Record(f"demo.{language}-{number:09d}", (language,), (text,), doc=documents)]
                )

    def finish() -> None:
        if not ranks.is_main:
            return
        texts = tokenizers.shard_texts(find_sources([partial]), 20_000)
        tokenizers.train(texts, "wordpiece", VOCAB_SIZE, lowercase=False).save_pretrained(partial / "tokenizer")
        (partial / "lexicon").mkdir()
        entries = world.dictionary()
        for name, flip in (("en-xx", 1), ("xx-en", -1)):
            lines = sorted(" ".join(entry[::flip]) + "\n" for entry in entries)
            (partial / "lexicon" / f"{name}.txt").write_text("".join(lines), encoding="utf-8")
        files.move_in(partial, out)

    try:
        lines = writer.SHARD_LINES // 4
        writer.write_shards(pair_lines(0, pairs), partial / "pairs", "pairs", lines, ranks, made_by)
        writer.write_shards(pair_lines(pairs, HELDOUT), partial / "heldout" / "pairs", "pairs", lines, ranks, made_by)
        if pairs >= 5:
            writer.write_shards(
                pair_lines(OF_YY, pairs // 5, "yy"), partial / "pairs_yy", "pairs", lines, ranks, made_by
            )
        for language in WRITTEN if mono >= 5 else LANGUAGES:
            writer.write_shards(mono_lines(language), partial / f"mono_{language}", "mono", lines, ranks, made_by)
        ranks.together(finish)
    except BaseException:
        if ranks.is_main:
            files.remove(partial)
        raise


def main(ranks: Ranks, argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/demo"))
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--mono", type=int, default=20_000, help="sentences of each language")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    build(args.out, args.pairs, args.mono, args.seed, ranks)
    if ranks.is_main:
        print(f"{args.out}: {args.pairs:,} pairs, {args.mono:,} sentences of each language, tokenizer, dictionary")


if __name__ == "__main__":
    run(main)
