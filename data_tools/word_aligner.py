"""Aligns the words of sentence pairs: runs eflomal in both directions, then joins the links of both.

eflomal (Östling & Tiedemann 2016, GPL-3) is called as a program: `pip install 'xscale[align]'`. It is not
deterministic, so the links of two runs differ a little.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from xscale.data.link_projection import format_pharaoh, parse_pharaoh
from xscale.data.words import split_words_and_symbols
from xscale.errors import UserError

Links = set[tuple[int, int]]
"""Word links: pairs of a word's index in the first text and a word's index in the second, from 0."""

ANY_SIZES = (sys.maxsize, sys.maxsize)
"""The numbers of words of a pair whose links are not checked against its words."""
PROGRAM = "eflomal-align"
NEIGHBOURS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))
"""The steps (in the first text, in the second) from a link to its eight neighbouring links."""


def grow_diag_final_and(forward: Links, reverse: Links) -> Links:
    """Return symmetrised links (Koehn et al. 2003): the intersection; then links of the union that are neighbours of
    these links, if one of their words has no link yet; then links of either direction, if both of their words have no
    link yet."""
    union = sorted(forward | reverse)
    links = forward & reverse
    first_linked = {i for i, _ in links}
    second_linked = {j for _, j in links}

    def add(i: int, j: int) -> None:
        links.add((i, j))
        first_linked.add(i)
        second_linked.add(j)

    count = -1
    while len(links) > count:
        count = len(links)
        for i, j in union:
            if (i, j) not in links:
                continue
            for step_i, step_j in NEIGHBOURS:
                new_i = i + step_i
                new_j = j + step_j
                is_free = new_i not in first_linked or new_j not in second_linked
                if is_free and ((new_i, new_j) in forward or (new_i, new_j) in reverse):
                    add(new_i, new_j)
    for direction in (forward, reverse):
        for i, j in sorted(direction):
            if i not in first_linked and j not in second_linked:
                add(i, j)
    return links


def find_aligner() -> str:
    """Return the path of eflomal's program. Raises UserError if it is not installed."""
    program = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=str(Path(sys.executable).parent))
    if not program:
        raise UserError(
            f"the aligner {PROGRAM} is not installed. Install a C compiler, then run `pip install 'xscale[align]'`. "
            "Or use another aligner, and pass the file of word alignments by --links (in corpus.yaml, by `links:`)"
        )
    return program


def write_word_alignments(pairs: Iterable[Sequence[str]], out: Path) -> None:
    """Write the links between the words (data/words.py) of each pair to the file `out`, one line per pair. Raises
    UserError."""
    with tempfile.TemporaryDirectory(prefix="links.", dir=out.parent) as name:
        folder = Path(name)
        pair_count = 0
        with (folder / "src").open("w", encoding="utf-8") as src, (folder / "tgt").open("w", encoding="utf-8") as tgt:
            for first, second in pairs:
                (first_words, _), (second_words, _) = split_words_and_symbols([first, second])
                src.write(" ".join(first_words).lower() + "\n")
                tgt.write(" ".join(second_words).lower() + "\n")
                pair_count += 1
        run_aligner(folder)
        line_count = 0
        with (folder / "forward").open() as forward, (folder / "reverse").open() as reverse, out.open("w") as file:
            for forward_line, reverse_line in zip(forward, reverse, strict=True):
                forward_links = set(parse_pharaoh(forward_line, ANY_SIZES))
                reverse_links = set(parse_pharaoh(reverse_line, ANY_SIZES))
                file.write(format_pharaoh(sorted(grow_diag_final_and(forward_links, reverse_links))) + "\n")
                line_count += 1
    if line_count != pair_count:
        raise UserError(
            f"the aligner {PROGRAM} wrote word alignments for only {line_count:,} of {pair_count:,} pairs. Use another "
            "aligner, and pass the file of word alignments by --links (in corpus.yaml, by `links:`)"
        )


def run_aligner(folder: Path) -> None:
    """Write eflomal's links of the files src and tgt to the files forward and reverse. Raises UserError."""
    command = [find_aligner()]
    for flag, name in (("-s", "src"), ("-t", "tgt"), ("-f", "forward"), ("-r", "reverse")):
        command += [flag, str(folder / name)]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode or not (folder / "reverse").exists():
        raise UserError(
            f"the aligner {PROGRAM} failed with exit code {ended.returncode}: "
            f"{ended.stderr.strip()[-500:] or 'no message'}. Use another aligner, and pass the file of word alignments "
            "by --links (in corpus.yaml, by `links:`)"
        )
