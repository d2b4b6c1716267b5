"""Small demo corpora for tests and benchmarks, in the layout of data_tools.demo_corpus, written without `prepare`: they
have the world's own word links, a thousand held-out pairs at any size, and as many records as a test asks for."""

from collections.abc import Iterator
from pathlib import Path

from data_tools import tokenizer as tokenizers
from data_tools import write_shards as writer
from data_tools.demo_world import FIRST_YY, WRITTEN, World
from xscale.data.shards import find_sources
from xscale.record import Record

HELDOUT = 1000


def build(out: Path, pairs: int, mono: int) -> None:
    """Write the whole corpus; en-yy and yy have a fifth as many pairs and sentences."""
    world, made_by = World(0), {"tool": "tests.demo_shards"}

    def pair_lines(first: int, count: int, other: str = "xx") -> Iterator[writer.InputLine]:
        for number in range(1, count + 1):
            *texts, links = world.pair(first + number - 1, other)
            key = f"demo.en-{other}-{first + number:09d}"
            yield writer.InputLine(number, "", [Record(key, ("en", other), tuple(texts), links)])

    def mono_lines(language: str) -> Iterator[writer.InputLine]:
        written = documents = 0
        while written < (wanted := mono // 5 if language == "yy" else mono):
            sentences = world.document(language, documents := documents + 1)[: wanted - written]
            first = written + 1
            written += len(sentences)
            for number, text in enumerate(sentences, start=first):
                yield writer.InputLine(
                    first, "", [Record(f"demo.{language}-{number:09d}", (language,), (text,), doc=documents)]
                )

    lines = writer.SHARD_LINES // 4
    writer.write_shards(pair_lines(0, pairs), out / "pairs", "pairs", lines, made_by)
    writer.write_shards(pair_lines(pairs, HELDOUT), out / "heldout" / "pairs", "pairs", lines, made_by)
    writer.write_shards(pair_lines(FIRST_YY, pairs // 5, "yy"), out / "pairs_yy", "pairs", lines, made_by)
    for language in WRITTEN:
        writer.write_shards(mono_lines(language), out / f"mono_{language}", "mono", lines, made_by)
    texts = tokenizers.shard_texts(find_sources([out]), 20_000)
    tokenizers.train(texts, "wordpiece", 4000, lowercase=False).save_pretrained(out / "tokenizer")
    (out / "lexicon").mkdir()
    for name, flip in (("en-xx", 1), ("xx-en", -1)):
        entries = sorted(" ".join(entry[::flip]) + "\n" for entry in world.dictionary())
        (out / "lexicon" / f"{name}.txt").write_text("".join(entries), encoding="utf-8")
