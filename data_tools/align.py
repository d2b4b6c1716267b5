"""Align the words of sentence pairs: run eflomal in both directions, then symmetrise its links.

    python -m data_tools.align --src F --tgt F --out links.txt [--symmetrize intersection]

`write_shards pairs --align` does the same while it writes shards. The numbers in links.txt refer to the words of
links.src.txt and links.tgt.txt, which this tool writes too. eflomal (Östling & Tiedemann 2016, GPL-3) is called as a
program: `pip install 'xscale[align]'`. It is not deterministic, so the links of two runs differ a little. To get the
same shards in every run, align once with this tool and give its files to `write_shards pairs --links links.txt
--links_src links.src.txt --links_tgt links.tgt.txt`.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import parent_process
from pathlib import Path

from tqdm import tqdm

from xscale import files
from xscale.data import words
from xscale.data.text import read_lines
from xscale.errors import UserError

from .command import run
from .readers import zip_lines

Links = set[tuple[int, int]]
"""Word links: pairs of a word's index in the first text and a word's index in the second, from 0."""

PROGRAM, MODELS = "eflomal-align", 3
"""The aligner's command, and the number of models that it trains in each direction."""
NEIGHBOURS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))
"""The steps (in the first text, in the second) from a link to its eight neighbouring links."""


def grow_diag_final_and(forward: Links, reverse: Links) -> Links:
    """Return symmetrised links (Koehn et al. 2003): the intersection; then the neighbours of these links in the union
    that link a word without a link so far; then the links of either direction between two words without any link so
    far."""
    union, links = forward | reverse, forward & reverse
    linked: tuple[set[int], set[int]] = {i for i, _ in links}, {j for _, j in links}

    def add(link: tuple[int, int]) -> None:
        links.add(link)
        linked[0].add(link[0])
        linked[1].add(link[1])

    in_order, before = sorted(union), -1
    while len(links) > before:
        before = len(links)
        for i, j in in_order:
            if (i, j) in links:
                for di, dj in NEIGHBOURS:
                    new = (i + di, j + dj)
                    if new in union and (new[0] not in linked[0] or new[1] not in linked[1]):
                        add(new)
    for direction in (forward, reverse):
        for i, j in sorted(direction):
            if i not in linked[0] and j not in linked[1]:
                add((i, j))
    return links


SYMMETRIZE: dict[str, Callable[[Links, Links], Links]] = {
    "grow-diag-final-and": grow_diag_final_and,
    "intersection": lambda forward, reverse: forward & reverse,
}


def parse_links(text: str) -> Links:
    """Return the links that a line of the Pharaoh form, such as "0-0 1-2", contains."""
    return {(int(i), int(j)) for i, _, j in (link.partition("-") for link in text.split())}


def align(pairs: Iterable[Sequence[str]], out: Path, symmetrize: str, priors: Path | None = None) -> str:
    """Write the links between the words (data/words.py) of each pair to the file `out`, one line per pair. Return a
    line for the log. priors: a file that `write_priors` has written. Raises UserError."""
    return align_words(space_words(pairs), out, symmetrize, priors)


def space_words(pairs: Iterable[Sequence[str]]) -> Iterator[Iterator[str]]:
    """Yield, for each pair, its two texts with a space between each two words."""
    return ((" ".join(words.split([text])[0][0]) for text in pair) for pair in pairs)


def find_aligner() -> str:
    """Return the path of eflomal's program. Raises UserError if it is not installed."""
    program = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=str(Path(sys.executable).parent))
    if not program:
        raise UserError(
            f"{PROGRAM} is not installed; `pip install 'xscale[align]'` (it is built with a C compiler), or align with "
            f"another program and give its links to --links"
        )
    return program


def align_words(pairs: Iterable[Iterable[str]], out: Path, symmetrize: str, priors: Path | None = None) -> str:
    """Like `align`, for texts whose words are already separated by spaces."""
    with tempfile.TemporaryDirectory(prefix="links.", dir=out.parent) as folder:
        aligned = unlinked = total = 0
        given, flags = _align_both_directions(pairs, Path(folder), priors)
        with out.open("w", encoding="utf-8") as file:
            for both in zip(_lines(flags["-f"]), _lines(flags["-r"]), strict=True):
                links = sorted(SYMMETRIZE[symmetrize](*map(parse_links, both)))
                file.write(" ".join(f"{i}-{j}" for i, j in links) + "\n")
                aligned, unlinked, total = aligned + 1, unlinked + (not links), total + len(links)
    if aligned != given:
        raise UserError(
            f"{PROGRAM} gave links for {aligned:,} of {given:,} pairs; give another program's links to --links"
        )
    return f"{given:,} pairs aligned, {total / max(given, 1):.1f} links a pair, {unlinked:,} pairs without a link"


def write_priors(pairs: Iterable[Iterable[str]], out: Path) -> None:
    """Write the file `out` of counts: how often eflomal links two words in both directions. `align_words` of other
    texts can read this file. Raises UserError.

    eflomal-makepriors counts the links of each direction alone, and also fertilities and jumps. With its priors, the
    links of a text that was aligned in several portions were worse (benchmarks/RESULTS.md).
    """
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="priors.", dir=out.parent) as folder:
        _, flags = _align_both_directions(pairs, Path(folder), None)
        with ExitStack() as stack:
            files_of = [stack.enter_context(path.open(encoding="utf-8", newline="\n")) for path in flags.values()]
            for src, tgt, forward, reverse in zip(*files_of, strict=True):
                both, of_src, of_tgt = parse_links(forward) & parse_links(reverse), src.split(), tgt.split()
                counts.update((of_src[i], of_tgt[j]) for i, j in both)
    with out.open("w", encoding="utf-8") as file:
        file.writelines(f"LEX\t{src}\t{tgt}\t{count}\n" for (src, tgt), count in sorted(counts.items()))


def _align_both_directions(
    pairs: Iterable[Iterable[str]], folder: Path, priors: Path | None
) -> tuple[int, dict[str, Path]]:
    """Write lower-case texts, and eflomal's links of both directions, to files in the folder. Return the number of
    pairs, and the path of each file by the program's flag (-s, -t: texts; -f, -r: forward and reverse links)."""
    names = {"-s": "src", "-t": "tgt", "-f": "forward", "-r": "reverse"}
    flags, given = {flag: folder / name for flag, name in names.items()}, 0
    with flags["-s"].open("w", encoding="utf-8") as src, flags["-t"].open("w", encoding="utf-8") as tgt:
        for texts in pairs:
            given += 1
            for text, file in zip(texts, (src, tgt), strict=True):
                file.write(text.lower() + "\n")
    options = flags | ({"-p": priors} if priors else {})
    command = [find_aligner(), *(str(word) for option in options.items() for word in option), "--verbose"]
    hidden = True if parent_process() else None  # None: only a terminal shows the bar
    told = ""
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process,
        tqdm(desc=f"aligning {given:,} pairs", total=2 * MODELS, unit="model", leave=False, disable=hidden) as bar,
    ):
        for line in process.stderr or ():
            told = told[-500:] + line
            bar.update(line.startswith("Done"))
    if process.returncode or not flags["-r"].exists():
        raise UserError(f"{PROGRAM} failed ({process.returncode}): {told.strip()[-500:] or 'without an error message'}")
    return given, flags


def _lines(path: Path) -> Iterator[str]:
    return (line for _, line in read_lines(path))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="xscale data align", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--src", type=Path, required=True)
    parser.add_argument("--tgt", type=Path, required=True, help="its line n is the translation of line n of --src")
    parser.add_argument(
        "--out", type=Path, required=True, help="file to make: links in Pharaoh form, one line per pair"
    )
    parser.add_argument("--symmetrize", choices=list(SYMMETRIZE), default="grow-diag-final-and")
    args = parser.parse_args(argv)

    def pairs() -> Iterator[list[str]]:
        return zip_lines([args.src, args.tgt], [read_lines(args.src), read_lines(args.tgt)])

    sides = [args.out.with_name(f"{args.out.stem}.{side}.txt") for side in ("src", "tgt")]
    for path in (args.out, *sides):
        if path.exists():
            raise UserError(f"{path} exists; choose another --out or remove it")
        files.check_writable(path)
    with files.publish(args.out) as partial:
        report = align(pairs(), partial, args.symmetrize)
    for number, path in enumerate(sides):
        with files.publish(path) as partial, partial.open("w", encoding="utf-8") as file:
            file.writelines(" ".join(words.split([pair[number]])[0][0]) + "\n" for pair in pairs())
    print(f"{args.out}: {report}; the links number the words of {sides[0]} and {sides[1]}")


if __name__ == "__main__":
    run(main)
