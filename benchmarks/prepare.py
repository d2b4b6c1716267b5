"""Compare the whole preparation of pairs with a single-pass loop over `datasets` and `webdataset` that does the same.

    python benchmarks/prepare.py [--text en.xz de.xz] [--pairs 200000] [--workers 2]

Both normalise text, limit its characters and remove exact duplicates. The last rows of the table add near duplicates,
language identification and a tokenizer. The loop writes one sample for each pair, no index and no report, and cannot be
restarted. The CPU time, which is more reliable than wall time on a busy machine, is that of all processes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from common import print_table, text_pairs

from data_tools.cleaning import NORMALISE

LONGEST = 1000
RULES = "rules: {length: {characters: [1, 1000]%s}, dedup: %s, lid: %s}\n"
TOKENIZER = "tokenizer: {type: wordpiece, vocab_size: 8000}\n"
KINDS = {
    "prepare": RULES % ("", "exact", "false"),
    "prepare, near duplicates": RULES % ("", "near", "false"),
    "prepare, language identification": RULES % ("", "exact", "true"),
    "prepare, word pieces and a tokenizer": RULES % (", tokens: [1, 256]", "exact", "false") + TOKENIZER,
}


def loop(source: Path, out: Path) -> None:
    """The single-pass loop: write each pair of a file of JSON lines that passes the rules as a sample."""
    import datasets
    import webdataset

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


def commands_of(folder: Path, workers: int) -> dict[str, list[str]]:
    """Return the arguments of python for each row of the table."""
    commands = {"datasets + webdataset": [__file__, "--loop", str(folder / "pairs.jsonl"), str(folder / "loop")]}
    for number, (kind, rules) in enumerate(KINDS.items()):
        corpus = folder / f"{number}.yaml"
        corpus.write_text(f"sources: [{{pairs: [en, de], tsv: {folder / 'pairs.tsv'}, columns: [1, 2]}}]\n{rules}")
        out = ["--out", str(folder / str(number)), "--workers", str(workers)]
        commands[kind] = ["-m", "data_tools.prepare", str(corpus), *out]
    return commands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs=2, help="parallel text (default: the demo world's)")
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--loop", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.loop:
        loop(*args.loop)
        return
    table = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "loop").mkdir()
        with (folder / "pairs.jsonl").open("w") as rows, (folder / "pairs.tsv").open("w") as lines:
            for source, target, _ in islice(text_pairs(args.text), args.pairs):
                rows.write(json.dumps({"en": source, "de": target}) + "\n")
                lines.write(f"{source}\t{target}\n")
        for kind, words in commands_of(folder, args.workers).items():
            before = os.times()
            started = time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, capture_output=True)
            wall = time.perf_counter() - started
            after = os.times()
            cpu = after.children_user + after.children_system - before.children_user - before.children_system
            table.append([kind, f"{wall:.1f}", f"{args.pairs / wall:,.0f}", f"{args.pairs / cpu:,.0f}"])
    title = f"{args.pairs:,} pairs, {args.workers} workers, {os.cpu_count()} cores"
    print_table(title, ["kind", "seconds", "pairs/s", "pairs/s of CPU time"], table)


if __name__ == "__main__":
    main()
