"""Functions that the benchmarks share: they generate corpora, print tables and set the allocator."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, cycle, islice, takewhile
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from data_tools import index
from data_tools import tokenizer as tokenizers
from data_tools.demo_world import LANGUAGES, World
from data_tools.steps import CHUNK_UNITS, write_shard
from xscale.data.shards import Source
from xscale.data.text import read_lines
from xscale.data.words import split
from xscale.record import Record

STEADY_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
"""glibc's malloc keeps freed memory. By default it returns large tensors to the system; new ones cost page faults."""

SENTENCES = (3.4, 1.0)
"""The mean and the standard deviation of the logarithm of a document's number of sentences. With the demo world's
sentences of 13 tokens, a document has a median of 390 tokens and a mean of 640."""

Pair = tuple[str, str, str | None]
"""Two texts, and their word links in Pharaoh form; None if the links are not known."""


def use_allocator(name: str) -> None:
    """Start this program again with the allocator's settings `name` ("steady" or "default"), unless it has them."""
    wanted = STEADY_ALLOCATOR if name == "steady" else {}
    env = {key: value for key, value in os.environ.items() if key not in STEADY_ALLOCATOR} | wanted
    if env != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)


def text_pairs(files: Sequence[Path] | None) -> tuple[tuple[str, str], Iterator[Pair]]:
    """The two languages, and the sentence pairs of two parallel files (plain, .gz, .xz) or, without files, of the
    endless demo world, which has links."""
    if files:
        src, tgt = ((line for _, line in read_lines(path)) for path in files)
        return ("en", "xx"), ((s, t, None) for s, t in zip(src, tgt, strict=True))
    world = World(0)
    return LANGUAGES, map(world.pair, count())


def with_words(pairs: Iterable[Pair], words: int) -> Iterator[Pair]:
    """Pairs with `words` words on each side: successive pairs are joined until both sides have enough, then cut."""
    first: list[str] = []
    second: list[str] = []
    links: list[tuple[int, int]] = []
    for one, other, pharaoh in pairs:
        found = (map(int, link.split("-")) for link in (pharaoh or "").split())
        links += [(len(first) + i, len(second) + j) for i, j in found]
        first += split([one])[0][0]
        second += split([other])[0][0]
        if min(len(first), len(second)) >= words:
            kept = " ".join(f"{i}-{j}" for i, j in links if max(i, j) < words)
            yield " ".join(first[:words]), " ".join(second[:words]), None if pharaoh is None else kept
            first, second, links = [], [], []


def write_pairs(pairs: Sequence[Pair], langs: tuple[str, str], out: Path, records: int) -> Source:
    """Write shards of `records` records, for which `pairs` are repeated as often as needed."""

    numbered = enumerate(islice(cycle(pairs), records), start=1)
    return _write(([Record(f"bench-{n:09d}", langs, pair[:2], pair[2])] for n, pair in numbered), out)


def write_mono(texts: Iterable[str], language: str, out: Path, documents: bool = False) -> Source:
    """Write shards of texts. documents: join texts to documents as long as web pages (SENTENCES); else each is one."""
    random, left = Random(0), iter(texts)

    def document(first: int) -> Iterator[list[Record]]:
        while True:
            n = max(1, round(random.lognormvariate(*SENTENCES))) if documents else 1
            doc = first if documents else None
            numbered = enumerate(islice(left, n), start=first)
            records = [Record(f"bench.{language}-{m:09d}", (language,), (text,), doc=doc) for m, text in numbered]
            if not records:
                return
            yield records
            first += len(records)

    return _write(document(1), out)


def _write(documents: Iterable[list[Record]], out: Path) -> Source:
    """Write shards. documents: the records of each pair or document."""
    documents = iter(documents)
    write_shards((list(chain.from_iterable(islice(documents, CHUNK_UNITS))) for _ in count()), out, out.name)
    return Source(out)


def write_shards(shards: Iterable[list[Record]], out: Path, name: str) -> None:
    """Write a source. shards: the records of each shard; the first empty one ends them."""
    out.mkdir(parents=True, exist_ok=True)
    for number, records in enumerate(takewhile(bool, shards)):
        write_shard(out / f"{name}-{number:06d}.tar", records)
    index.build_index(out, None, {"tool": "benchmarks"}, links_count="unicode")


def write_world(pairs: Sequence[Pair], vocab_size: int, out: Path, documents: bool = False) -> list[Path]:
    """Write the data of every recipe from pairs of the demo world: shards of the pairs with links, shards of each
    side's text, tokenizer/ and lexicon/. Returns the directories for --data. documents: see write_mono."""
    write_tokenizer(pairs, vocab_size, out / "tokenizer")
    (out / "lexicon").mkdir()
    entries = "".join(f"{first} {second}\n" for first, second in World(0).dictionary())
    (out / "lexicon" / "{}-{}.txt".format(*LANGUAGES)).write_text(entries, encoding="utf-8")
    sources = [write_pairs(pairs, LANGUAGES, out / "pairs", len(pairs))]
    for side, language in enumerate(LANGUAGES):
        texts = (str(pair[side]) for pair in pairs)
        sources.append(write_mono(texts, language, out / f"mono_{language}", documents))
    return [source.directory for source in sources]


def write_tokenizer(pairs: Iterable[Pair], vocab_size: int, out: Path) -> Path:
    texts = (side for pair in pairs for side in zip(LANGUAGES, pair[:2], strict=True))
    tokenizers.train(texts, "wordpiece", vocab_size, lowercase=False).save_pretrained(out)
    return out


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def median_time(work: Callable[[], Any], repeats: int) -> float:
    return median(timed(work)[0] for _ in range(repeats))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with its first column aligned left, and the others aligned right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "  ".join(cells).rstrip(), flush=True)
