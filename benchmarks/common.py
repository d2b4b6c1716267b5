"""What the benchmarks share: corpora made on the fly, tables, the allocator's settings."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from data_tools import tokenizer as tokenizers
from data_tools.demo_world import LANGUAGES, World
from data_tools.ranks import Ranks
from data_tools.write_shards import SHARD_LINES, Line, write_shards
from xscale.data.index import Source
from xscale.data.text import read_lines
from xscale.sample import Record

STEADY_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
"""glibc keeps freed memory. Its defaults return large tensors to the system and pay page faults for each new one."""

Pair = tuple[str, str]


def use_allocator(name: str) -> None:
    """Start this program again with the allocator's settings `name` ("steady" or "default"), unless it has them."""
    wanted = STEADY_ALLOCATOR if name == "steady" else {}
    env = {key: value for key, value in os.environ.items() if key not in STEADY_ALLOCATOR} | wanted
    if env != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env)


def text_pairs(files: Sequence[Path] | None) -> tuple[tuple[str, str], Iterator[Pair]]:
    """Languages, and the sentence pairs of two parallel files (plain, .gz, .xz) or of the endless demo world."""
    if files:
        src, tgt = ((line for _, line in read_lines(path)) for path in files)
        return ("en", "xx"), zip(src, tgt, strict=True)
    world = World(0)
    return LANGUAGES, (world.pair(i)[:2] for i in range(sys.maxsize))


def with_words(pairs: Iterable[Pair], words: int) -> Iterator[Pair]:
    """Pairs of `words` words a side: neighbours are joined until both sides have as many, then trimmed."""
    sides: tuple[list[str], list[str]] = ([], [])
    for pair in pairs:
        for side, text in zip(sides, pair, strict=True):
            side += text.split()
        if min(len(side) for side in sides) >= words:
            yield " ".join(sides[0][:words]), " ".join(sides[1][:words])
            sides = ([], [])


def write_pairs(pairs: Sequence[Pair], langs: tuple[str, str], out: Path, records: int) -> Source:
    """`records` records of `pairs`, repeated as often as it takes."""

    def lines() -> Iterator[Line]:
        for number, pair in enumerate(islice(cycle(pairs), records), start=1):
            yield number, "", [Record(f"bench-{number:09d}", langs, pair)]

    out.parent.mkdir(parents=True, exist_ok=True)
    write_shards(lines(), out, "pairs", SHARD_LINES, Ranks(), {"tool": "benchmarks"})
    return Source(out)


def write_tokenizer(pairs: Iterable[Pair], vocab_size: int, out: Path) -> Path:
    texts = (text for pair in pairs for text in pair)
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
