"""Functions that the benchmarks share: they generate corpora, make runs of recipes and print tables."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

if torch.cuda.is_available():
    import triton.testing

from data_tools import tokenizer as tokenizers
from data_tools.demo_world import LANGUAGES, World
from xscale.data.calibrate import calibrate
from xscale.data.loader import Loader
from xscale.data.text import read_lines
from xscale.data.words import split_words_and_symbols
from xscale.ranks import Process
from xscale.run.resolve import resolve_run

ROOT = Path(__file__).resolve().parent.parent
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
ALONE = Process(0, 1, 0, 1)
STEADY_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
"""glibc's malloc keeps freed memory. By default it returns large tensors to the system; new ones cost page faults."""
SENTENCES = (3.4, 1.0)
"""The mean and the standard deviation of the logarithm of a document's number of sentences. With the demo world's
sentences of 12 tokens, a document has a median of 360 tokens and a mean of 590."""

Pair = tuple[str, str, str | None]
"""Two texts, and their word links in Pharaoh form; None if the links are not known."""


# Corpora


def text_pairs(files: Sequence[Path] | None) -> Iterator[Pair]:
    """Yield the sentence pairs of two parallel files (plain, .gz, .xz) or, without files, of the endless demo world,
    which has links."""
    if not files:
        world = World(0)
        for number in count():
            source, target, links = world.pair(number)
            yield spaced(source), spaced(target), links
        return
    sources, targets = map(read_lines, files)
    for (_, source), (_, target) in zip(sources, targets, strict=True):
        yield source, target, None


def spaced(text: str) -> str:
    """Return the text with spaces between all words that the demo world's links count."""
    return " ".join(split_words_and_symbols([text])[0][0])


def with_words(pairs: Iterable[Pair], words: int) -> Iterator[Pair]:
    """Yield pairs with `words` words on each side: successive pairs are joined until both sides have enough, then
    cut."""
    first: list[str] = []
    second: list[str] = []
    links: list[str] = []
    for source, target, pharaoh in pairs:
        for link in (pharaoh or "").split():
            i, j = map(int, link.split("-"))
            if len(first) + i < words and len(second) + j < words:
                links.append(f"{len(first) + i}-{len(second) + j}")
        first += spaced(source).split()
        second += spaced(target).split()
        if min(len(first), len(second)) >= words:
            yield " ".join(first[:words]), " ".join(second[:words]), None if pharaoh is None else " ".join(links)
            first = []
            second = []
            links = []


def write_pairs(pairs: Iterable[Pair], out: Path) -> None:
    """Write shards of pairs to the directory `out`, and text files beside it."""
    sources, targets, links = zip(*pairs, strict=True)
    texts = {"--src": sources, "--tgt": targets}
    if links[0] is not None:
        texts["--links"] = links
    words: list[str | Path] = []
    for flag, lines in texts.items():
        words += [flag, write_lines(out.with_name(f"{out.name}{flag}.txt"), lines)]
    write_shards("pairs", *words, "--langs", *LANGUAGES, "--out", out)


def write_mono(texts: Iterable[str], language: str, out: Path, documents: bool) -> None:
    """Write shards of texts. documents: join texts to documents as long as web pages (SENTENCES)."""
    random = Random(0)
    rest = iter(texts)
    lines: list[str] = []
    while document := [*islice(rest, max(1, round(random.lognormvariate(*SENTENCES))))]:
        lines += document
        if documents:
            lines.append("")
    file = write_lines(out.with_name(f"{out.name}.txt"), lines)
    form = "blank" if documents else "lines"
    write_shards("mono", "--text", file, "--lang", language, "--documents", form, "--whole_lines", "--out", out)


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_shards(*words: str | Path) -> None:
    command = [sys.executable, "-m", "data_tools.write_shards", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)


def write_world(
    pairs: Sequence[Pair], vocab_size: int, out: Path, documents: bool = False, pad_to: int = 0
) -> list[Path]:
    """Write the data of every recipe from pairs of the demo world: shards of the pairs with links, shards of each
    side's text, tokenizer/ and lexicon/. Returns the directories for --data. documents: see write_mono. pad_to: see
    write_tokenizer."""
    write_tokenizer(pairs, vocab_size, out / "tokenizer", pad_to)
    entries = [f"{first} {second}" for first, second in World(0).dictionary()]
    write_lines(out / "lexicon" / f"{'-'.join(LANGUAGES)}.txt", entries)
    write_pairs(pairs, out / "pairs")
    directories = [out / "pairs"]
    for side, language in enumerate(LANGUAGES):
        directories.append(out / f"mono_{language}")
        write_mono([str(pair[side]) for pair in pairs], language, directories[-1], documents)
    return directories


def write_tokenizer(pairs: Iterable[Pair], vocab_size: int, out: Path, pad_to: int = 0) -> None:
    """Train a WordPiece tokenizer. pad_to: the number of ids that it is to have, with [unusedN] for the last ones."""
    texts: list[tuple[str, str]] = []
    for source, target, _ in pairs:
        texts += [(LANGUAGES[0], source), (LANGUAGES[1], target)]
    tokenizers.train(texts, "wordpiece", vocab_size, lowercase=False).save_pretrained(out)
    path = out / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    for number in range(len(vocabulary), pad_to):
        vocabulary[f"[unused{number}]"] = number
    path.write_text(json.dumps(content), encoding="utf-8")


def make_run(recipe: str, fields: Mapping[str, object], data: Sequence[Path], vocab_size: int = 0) -> Loader:
    """Return the loader of a recipe with these fields. vocab_size: the model's; 0: the tokenizer's."""
    resolved, corpus = resolve_run(recipe, [f"{name}={value}" for name, value in fields.items()], [*data])
    corpus.tokenizer.vocab_size = vocab_size or corpus.tokenizer.vocab_size
    return Loader(resolved, corpus, calibrate(resolved, corpus))


# The process


def use_allocator(name: str) -> None:
    """Start this program again with the allocator's settings `name` ("steady" or "default"), unless it has them."""
    environment = {key: value for key, value in os.environ.items() if key not in STEADY_ALLOCATOR}
    if name == "steady":
        environment |= STEADY_ALLOCATOR
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# Times and tables


def now() -> float:
    """Wait for the device, and return the time in seconds."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(work: Callable[[], Any]) -> float:
    started = now()
    work()
    return now() - started


def in_turns(works: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each work in each round. In a round, all take turns in random order. On a GPU the
    L2 cache is cold, and the time that the host needs for the launch is hidden."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for name in works:
        works[name]()
    turns = Random(0)
    for _ in range(rounds):
        for name in turns.sample(list(works), len(works)):
            if CUDA:
                seconds[name].append(triton.testing.do_bench(works[name], return_mode="median") / 1e3)
            else:
                seconds[name].append(seconds_of(works[name]))
    return seconds


def spread(ratios: Iterable[float]) -> str:
    """Return the range of the ratios in the middle 80 % of the rounds."""
    ordered = sorted(ratios)
    few = len(ordered) // 10
    return f"{ordered[few]:.2f}-{ordered[-1 - few]:.2f}"


def compare(
    title: str, header: Sequence[str], times: Mapping[str, list[float]], cells: Mapping[str, list[str]]
) -> None:
    """Print the ms of each work, and how many times those of the first one, beside `cells` of its own. times: the
    seconds of each round."""
    first = next(iter(times.values()))
    rows = []
    for name, seconds in times.items():
        ratios = [theirs / ours for theirs, ours in zip(seconds, first, strict=True)]
        rows.append([name, f"{1e3 * median(seconds):,.3f}", f"{median(ratios):.2f}", spread(ratios), *cells[name]])
    print_table(title, header, rows)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with its first column aligned left, and the others aligned right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    print(f"\n{title}")
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        print("  " + "  ".join(cells).rstrip(), flush=True)
