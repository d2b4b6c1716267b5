"""Compare the whole preparation of pairs with a single-pass loop over `datasets` and `webdataset` that does the same.

    python benchmarks/prepare.py --text en.xz de.xz

Both normalise the text, leave out pairs that are too short or too long, and remove exact duplicates. In the last rows
of the table, prepare also removes near duplicates, identifies languages or trains a tokenizer. prepare has two workers.
The CPU time is that of all processes. On a busy machine, it is more reliable than wall time.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import print_table

from data_tools.cleaning import NORMALISE
from xscale.data.text import read_lines

LONGEST = 1000
WORKERS = 2
RULES = "rules: {length: {characters: [1, 1000]%s}, dedup: %s, lid: %s}\n"
TOKENIZER = "tokenizer: {type: wordpiece, vocab_size: 8000}\n"
CORPORA = {
    "prepare": RULES % ("", "exact", "false"),
    "prepare, near duplicates": RULES % ("", "near", "false"),
    "prepare, language identification": RULES % ("", "exact", "true"),
    "prepare, word pieces and a tokenizer": RULES % (", tokens: [1, 256]", "exact", "false") + TOKENIZER,
}
"""Name of a row of the table -> the keys of its corpus.yaml besides the source."""


def write_in_one_pass(source: Path, out: Path) -> None:
    """The single-pass loop: write each pair of a file of JSON lines that passes the rules as a sample."""
    import datasets
    import webdataset

    out.mkdir()
    rows = datasets.load_dataset("json", data_files=str(source), split="train", streaming=True)
    seen: set[tuple[str, str]] = set()
    with webdataset.ShardWriter(f"{out}/%06d.tar", maxcount=8192, verbose=0) as writer:
        for number, row in enumerate(rows):
            texts = [row["en"], row["de"]]
            for step in NORMALISE.values():
                texts = [step(text) for text in texts]
            pair = (texts[0], texts[1])
            if all(1 <= len(text) <= LONGEST for text in pair) and pair not in seen:
                seen.add(pair)
                writer.write({"__key__": f"{number:09d}", "json": {"langs": ["en", "de"], "texts": texts}})


def prepare(keys: str, pairs: Path, out: Path) -> None:
    corpus = out.with_suffix(".yaml")
    corpus.write_text(f"sources: [{{pairs: [en, de], tsv: {pairs}, columns: [1, 2]}}]\n{keys}")
    command = [sys.executable, "-m", "data_tools.prepare", corpus, "--out", out, "--workers", str(WORKERS)]
    subprocess.run(command, check=True, capture_output=True)


def measured_row(name: str, pairs: int, work: Callable[[], Any]) -> list[str]:
    """Do the work in a process of its own. Returns the row of the table."""
    process = multiprocessing.get_context("fork").Process(target=work)
    before = os.times()
    process.start()
    process.join()
    after = os.times()
    assert process.exitcode == 0, f"{name} failed"
    wall = after.elapsed - before.elapsed
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return [name, f"{wall:.1f}", f"{pairs / wall:,.0f}", f"{pairs / cpu:,.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text",
        type=Path,
        nargs=2,
        required=True,
        help="two parallel text files, the first in English and the second in German",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = 0
        with (folder / "pairs.jsonl").open("w") as rows, (folder / "pairs.tsv").open("w") as lines:
            for (_, source), (_, target) in zip(*map(read_lines, args.text), strict=True):
                rows.write(json.dumps({"en": source, "de": target}) + "\n")
                lines.write(f"{source}\t{target}\n")
                pairs += 1
        works = {"datasets + webdataset": partial(write_in_one_pass, folder / "pairs.jsonl", folder / "loop")}
        for row, keys in CORPORA.items():
            works[row] = partial(prepare, keys, folder / "pairs.tsv", folder / str(len(works)))
        table = [measured_row(row, pairs, work) for row, work in works.items()]
    title = f"{pairs:,} pairs, {WORKERS} workers, {os.cpu_count()} cores"
    print_table(title, ["", "seconds", "pairs/s", "pairs/s of CPU time"], table)


if __name__ == "__main__":
    main()
