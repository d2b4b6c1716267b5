"""Compare the word alignment of a text in parts with that of the whole text, by hand-made links.

    python benchmarks/align_parts.py --gold enfr.src-tgt enfr.gold [--text en-fr.en en-fr.fr] [--pairs 100000]
                                     [--part 25000] [--runs 3]

The script puts the gold pairs (see benchmarks/words.py) into the middle of --text. It aligns the whole text at once,
and then in parts of --part pairs: with priors from an evenly spread sample of the size of two parts, and without
priors. MB are the peak memory of the largest aligner process.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

from common import print_table
from words import Gold, glued, read_gold, scores, tokens_of

from data_tools import align
from data_tools.steps import SAMPLE_PARTS
from xscale.data.link_projection import parse
from xscale.data.text import read_lines
from xscale.data.words import split

Pairs = list[tuple[str, str]]


def links_of(pairs: Pairs, part: int, with_priors: bool, folder: Path) -> list[str]:
    """Align texts with spaces between words in parts of `part` pairs. Returns a line of links for each pair."""
    priors, found, out = None, list[str](), folder / "links"
    if with_priors:
        priors = folder / "priors"
        align.write_priors(pairs[:: max(1, len(pairs) // part // SAMPLE_PARTS)], priors)
    for start in range(0, len(pairs), part):
        align.align_words(pairs[start : start + part], out, "grow-diag-final-and", priors)
        found += [line for _, line in read_lines(out)]
    return found


def measured(gold: list[Gold], pairs: Pairs, first: int, part: int, with_priors: bool) -> tuple[float, ...]:
    """Align in a new process. Returns AER and F1 in per cent, the seconds, and the MB of the largest aligner."""
    reader, writer = os.pipe()
    if not os.fork():
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            lines = links_of(pairs, part, with_priors, Path(name))
        seconds, found = time.perf_counter() - started, []
        for (src, tgt, _, _), (a, b), line in zip(gold, pairs[first:], lines[first:], strict=False):
            of = [tokens_of(text, words) for text, words in ((src, a), (tgt, b))]
            links = parse(line, (len(of[0]), len(of[1])))
            found.append({(x, y) for i, j in links for x in of[0][i] for y in of[1][j]})
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
        os.write(writer, repr((*scores(found, gold), seconds, memory)).encode())
        os._exit(0)
    os.wait()
    return tuple(map(float, os.read(reader, 1000).decode().strip("()").split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gold", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, nargs=2, help="parallel text to align with it")
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--part", type=int, default=25_000)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    gold, around = list(read_gold(args.gold)), list[tuple[str, str]]()
    if args.text:
        src, tgt = ((line for _, line in read_lines(path)) for path in args.text)
        around = list(islice(zip(src, tgt, strict=True), args.pairs))
    first = len(around) // 2
    texts = [*around[:first], *((glued(src), glued(tgt)) for src, tgt, _, _ in gold), *around[first:]]
    pairs = [(" ".join(split([a])[0][0]), " ".join(split([b])[0][0])) for a, b in texts]
    kinds = {"whole": (len(pairs), False), "parts with priors": (args.part, True), "parts alone": (args.part, False)}
    rows = []
    for kind, (part, with_priors) in kinds.items():
        columns = list(zip(*(measured(gold, pairs, first, part, with_priors) for _ in range(args.runs)), strict=True))
        cells = [f"{statistics.mean(c):.1f} ({min(c):.1f}-{max(c):.1f})" for c in columns[:2]]
        rows.append([kind, *cells, f"{len(pairs) / statistics.mean(columns[2]):,.0f}", f"{max(columns[3]):,.0f}"])
    title = (
        f"{len(pairs):,} pairs, {len(gold):,} of them gold, parts of {args.part:,}; mean (range) of {args.runs} runs"
    )
    print_table(title, ["", "AER", "F1", "pairs/s", "MB"], rows)


if __name__ == "__main__":
    main()
