"""Functions that the benchmarks share: they generate corpora, print tables and set the allocator."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, cycle, islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from data_tools import tokenizer as tokenizers
from data_tools.demo_world import LANGUAGES, World
from data_tools.ranks import Ranks
from data_tools.write_shards import SHARD_LINES, Line, write_shards
from xscale.data.shards import Source
from xscale.data.text import read_lines
from xscale.data.words import split
from xscale.record import Record

STEADY_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
"""glibc keeps freed memory. Its defaults return large tensors to the system and pay page faults for each new one."""

SENTENCES = (3.4, 1.0)
"""Of a document: mean and deviation of their logarithm. Of the demo world's of 13 tokens that is a median of 390 tokens
and a mean of 640."""

Pair = tuple[str, str, str | None]
"""Two texts and their word links in Pharaoh form, where known."""


def use_allocator(name: str) -> None:
    """Start this program again with the allocator's settings `name` ("steady" or "default"), unless it has them."""
    wanted = STEADY_ALLOCATOR if name == "steady" else {}
    env = {key: value for key, value in os.environ.items() if key not in STEADY_ALLOCATOR} | wanted
    if env != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)


def text_pairs(files: Sequence[Path] | None) -> tuple[tuple[str, str], Iterator[Pair]]:
    """Languages, and the sentence pairs of two parallel files (plain, .gz, .xz) or of the endless demo world, which has
    links."""
    if files:
        src, tgt = ((line for _, line in read_lines(path)) for path in files)
        return ("en", "xx"), ((s, t, None) for s, t in zip(src, tgt, strict=True))
    world = World(0)
    return LANGUAGES, map(world.pair, count())


def with_words(pairs: Iterable[Pair], words: int) -> Iterator[Pair]:
    """Pairs of `words` words a side: neighbours are joined until both sides have as many, then trimmed."""
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
    """`records` records of `pairs`, repeated as often as it takes."""

    numbered = enumerate(islice(cycle(pairs), records), start=1)
    return _write(([Record(f"bench-{n:09d}", langs, pair[:2], pair[2])] for n, pair in numbered), out)


def write_mono(texts: Iterable[str], language: str, out: Path, documents: bool = False) -> Source:
    """documents: of as many sentences as web pages have (SENTENCES); else each sentence is one."""
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


def _write(records: Iterable[list[Record]], out: Path) -> Source:
    """records: of a document each."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = (Line(number, "", of_document) for number, of_document in enumerate(records, start=1))
    write_shards(lines, out, out.name, SHARD_LINES, Ranks(), {"tool": "benchmarks"})
    return Source(out)


def write_world(pairs: Sequence[Pair], vocab_size: int, out: Path, documents: bool = False) -> list[Path]:
    """What every recipe needs, of pairs of the demo world: shards of pairs with links and of either side alone; beside
    them tokenizer/ and lexicon/. Returns the directories for --data. documents: see write_mono."""
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
    """The first column is flush left, the others flush right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  " + "  ".join(cells).rstrip(), flush=True)
