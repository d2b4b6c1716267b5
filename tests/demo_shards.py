"""Small demo corpora for tests and benchmarks, in the layout of data_tools.demo_corpus, written without `prepare`: they
have the world's own word links, a thousand held-out pairs at any size, and as many records as a test asks for."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from data_tools import index
from data_tools import tokenizer as tokenizers
from data_tools.demo_world import FIRST_YY, WRITTEN, World
from data_tools.steps import CHUNK_UNITS, write_shard
from xscale.data.shards import find_sources
from xscale.record import Record

HELDOUT = 1000


def write_records(documents: Iterable[list[Record]], out: Path, name: str, shard_records: int, made_by: Any) -> None:
    """Write a source of shards. documents: the records of each pair or document, which no shard divides."""
    out.mkdir(parents=True)
    written = 0

    def shard_of(document: list[Record]) -> int:
        nonlocal written
        shard = written // shard_records
        written += len(document)
        return shard

    for number, (_, group) in enumerate(groupby(documents, shard_of)):
        write_shard(out / f"{name}-{number:06d}.tar", [record for document in group for record in document])
    index.build_index(out, None, made_by)


def build(out: Path, pairs: int, mono: int) -> None:
    """Write the whole corpus; en-yy and yy have a fifth as many pairs and sentences."""
    world, made_by = World(0), {"tool": "tests.demo_shards"}

    def pair_records(first: int, count: int, other: str = "xx") -> Iterator[list[Record]]:
        for number in range(1, count + 1):
            *texts, links = world.pair(first + number - 1, other)
            yield [Record(f"demo.en-{other}-{first + number:09d}", ("en", other), tuple(texts), links)]

    def mono_records(language: str) -> Iterator[list[Record]]:
        written = documents = 0
        while written < (wanted := mono // 5 if language == "yy" else mono):
            documents += 1
            sentences = world.document(language, documents)[: wanted - written]
            numbered = enumerate(sentences, start=written + 1)
            yield [Record(f"demo.{language}-{n:09d}", (language,), (text,), doc=documents) for n, text in numbered]
            written += len(sentences)

    size = CHUNK_UNITS // 4
    write_records(pair_records(0, pairs), out / "pairs", "pairs", size, made_by)
    write_records(pair_records(pairs, HELDOUT), out / "heldout" / "pairs", "pairs", size, made_by)
    write_records(pair_records(FIRST_YY, pairs // 5, "yy"), out / "pairs_yy", "pairs", size, made_by)
    for language in WRITTEN:
        write_records(mono_records(language), out / f"mono_{language}", "mono", size, made_by)
    texts = tokenizers.read_shard_texts(find_sources([out]), 20_000)
    tokenizers.train(texts, "wordpiece", 4000, lowercase=False).save_pretrained(out / "tokenizer")
    (out / "lexicon").mkdir()
    for name, flip in (("en-xx", 1), ("xx-en", -1)):
        entries = sorted(" ".join(entry[::flip]) + "\n" for entry in world.dictionary())
        (out / "lexicon" / f"{name}.txt").write_text("".join(entries), encoding="utf-8")
