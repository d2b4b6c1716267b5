"""Measure how the definition of a word changes word alignment, by links that were made by hand.

    python benchmarks/words.py --gold enfr.src-tgt enfr.gold --text en-fr.en en-fr.fr [--runs 3] [--pairs 100000]

The script aligns the gold sentences together with `--pairs` other pairs, once for each kind of words: the gold's own
tokens, those of data/words.py, and white-space words of the text with their punctuation. It converts the links to links
of the gold's tokens by characters, and prints the alignment error rate (Och & Ney 2003) and F1, as means over runs,
because eflomal is random.
--gold: a file of `src ||| tgt` lines and one of `i-j` (sure) and `ipj` (possible) links, from 1; or a .tsv of XL-WA.
"""

import argparse
import re
import statistics
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from common import print_table

from data_tools import align
from xscale.data.link_projection import parse, places
from xscale.data.text import read_lines
from xscale.data.words import split

Links = set[tuple[int, int]]
Gold = tuple[str, str, Links, Links]
"""A gold pair: its two tokenised texts, its sure links, and all its links, possible ones included."""
GLUED = re.compile(r" (?=[.,;:!?)\]%»'’])|(?<=[(\[«'’]) ")


def read_gold(paths: list[Path]) -> Iterator[Gold]:
    if len(paths) == 1:
        for _, line in read_lines(paths[0]):
            src, tgt, links = line.split("\t")
            sure = set(parse(links, (1000, 1000)))
            yield src, tgt, sure, sure
        return
    for (_, texts), (_, links) in zip(*map(read_lines, paths), strict=True):
        src, tgt = texts.split("|||")
        found = [(kind, (int(i) - 1, int(j) - 1)) for i, kind, j in re.findall(r"(\d+)([-p])(\d+)", links)]
        sure = {link for kind, link in found if kind == "-"}
        yield src.strip(), tgt.strip(), sure, {link for _, link in found}


def glued(text: str) -> str:
    """A tokenised text as people write it, without spaces beside punctuation."""
    return GLUED.sub("", text)


WORDS = {
    "the gold's tokens": lambda text: text.split(),
    "data/words.py": lambda text: split([glued(text)])[0][0],
    "white space": lambda text: glued(text).split(),
}


def aligned(gold: list[Gold], around: list[tuple[str, str]], kind: str) -> list[Links]:
    """Align words of this kind. Returns the links between the tokens of each gold pair."""
    cut = WORDS[kind]
    texts = [(src, tgt) for src, tgt, _, _ in gold] + around
    words = [tuple(" ".join(cut(text)) for text in pair) for pair in texts]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "links"
        align.align_words(iter(words), out, "grow-diag-final-and")
        lines = [line for _, line in islice(read_lines(out), len(gold))]
    found = []
    for (src, tgt, _, _), (a, b), line in zip(gold, words, lines, strict=False):
        of = [tokens_of(text, word_text) for text, word_text in ((src, a), (tgt, b))]
        links = parse(line, (len(of[0]), len(of[1])))
        found.append({(x, y) for i, j in links for x in of[0][i] for y in of[1][j]})
    return found


def tokens_of(tokenised: str, words: str) -> list[set[int]]:
    """For each word of `words`, the numbers of the tokens of `tokenised` with which it shares characters."""
    of_char = {c: number for number, chars in enumerate(places(tokenised, tokenised)) for c in chars}
    return [{of_char[c] for c in chars} for chars in places(tokenised, words)]


def scores(found: list[Links], gold: list[Gold]) -> tuple[float, float]:
    """Alignment error rate, and F1 on sure links, in per cent."""
    a = sum(map(len, found))
    s = sum(len(sure) for _, _, sure, _ in gold)
    a_s = sum(len(links & sure) for links, (_, _, sure, _) in zip(found, gold, strict=True))
    a_p = sum(len(links & (sure | possible)) for links, (_, _, sure, possible) in zip(found, gold, strict=True))
    return 100 * (1 - (a_s + a_p) / (a + s)), 100 * 2 * a_s / (a + s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gold", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, nargs=2, help="parallel text to align with it")
    parser.add_argument("--pairs", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    gold = list(read_gold(args.gold))
    around: list[tuple[str, str]] = []
    if args.text:
        src, tgt = ((line for _, line in read_lines(path)) for path in args.text)
        around = list(islice(zip(src, tgt, strict=True), args.pairs))
    rows = []
    for kind in WORDS:
        runs = [scores(aligned(gold, around, kind), gold) for _ in range(args.runs)]
        columns = [[run[n] for run in runs] for n in (0, 1)]
        rows.append([kind, *(f"{statistics.mean(c):.1f} ({min(c):.1f}-{max(c):.1f})" for c in columns)])
    title = f"{len(gold):,} gold pairs, {len(around):,} around them; mean (least-most) of {args.runs} runs"
    print_table(title, ["words", "AER", "F1"], rows)


if __name__ == "__main__":
    main()
