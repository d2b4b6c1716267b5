"""Compare the whole preparation of pairs with a single-pass loop over `datasets` and `webdataset` that does the same.

    python benchmarks/prepare.py [--text en.xz de.xz] [--pairs 200000] [--workers 2]

Both normalise text, limit its characters and remove exact duplicates. The last rows of the table add near duplicates,
language identification and a tokenizer. With --workers 1 the table also has the CPU time, which is more reliable than
wall time on a busy machine. The loop writes one sample for each pair, no index and no report, and cannot be restarted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from common import print_table, text_pairs

from data_tools.cleaning import NORMALISE

LONGEST = 1000
RULES = f"rules: {{length: {{characters: [1, {LONGEST}]%s}}, dedup: %s, lid: %s}}\n%s"
TOKENIZER = "tokenizer: {type: wordpiece, vocab_size: 8000}\n"
KINDS = {
    "prepare": RULES % ("", "exact", "false", ""),
    "prepare, near duplicates": RULES % ("", "near", "false", ""),
    "prepare, language identification": RULES % ("", "exact", "true", ""),
    "prepare, word pieces and a tokenizer": RULES % (", tokens: [1, 256]", "exact", "false", TOKENIZER),
}


def loop(source: Path, out: Path) -> None:
    """The single-pass loop: write each pair of a file of JSON lines that passes the rules as a sample."""
    import datasets
    import webdataset

    rows = datasets.load_dataset("json", data_files=str(source), split="train", streaming=True)
    seen = set[tuple[str, str]]()
    with webdataset.ShardWriter(f"{out}/%06d.tar", maxcount=8192, verbose=0) as writer:
        for number, row in enumerate(rows):
            texts = [row["en"], row["de"]]
            for step in NORMALISE.values():
                texts = [step(text) for text in texts]
            pair = (texts[0], texts[1])
            if all(1 <= len(text) <= LONGEST for text in pair) and pair not in seen:
                seen.add(pair)
                writer.write({"__key__": f"{number:09d}", "json": {"langs": ["en", "de"], "texts": texts}})


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """The wall-clock seconds of `work`, and the CPU seconds of the processes that it starts and waits for."""
    before, start = os.times(), time.perf_counter()
    work()
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, cpu


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
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = [pair[:2] for pair in islice(text_pairs(args.text)[1], args.pairs)]
        (folder / "pairs.jsonl").write_text("".join(json.dumps({"en": a, "de": b}) + "\n" for a, b in pairs))
        (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
        (folder / "loop").mkdir()
        commands = {"datasets + webdataset": [__file__, "--loop", folder / "pairs.jsonl", folder / "loop"]}
        for number, (kind, rules) in enumerate(KINDS.items()):
            corpus = folder / f"{number}.yaml"
            corpus.write_text(f"sources: [{{pairs: [en, de], tsv: {folder / 'pairs.tsv'}, columns: [1, 2]}}]\n{rules}")
            out = ["--out", folder / str(number), "--workers", args.workers]
            commands[kind] = ["-m", "data_tools.prepare", corpus, *out]
        for kind, words in commands.items():
            command = [sys.executable, *map(str, words)]
            wall, cpu = measured(lambda: subprocess.run(command, check=True, capture_output=True))  # noqa: B023
            rows.append([kind, f"{wall:.1f}", f"{len(pairs) / wall:,.0f}"])
            rows[-1].append(f"{len(pairs) / cpu:,.0f}" if args.workers == 1 or "--loop" in words else "-")
    title = f"{len(pairs):,} pairs, {args.workers} workers, {os.cpu_count()} cores"
    print_table(title, ["kind", "seconds", "pairs/s", "pairs/s of CPU time"], rows)


if __name__ == "__main__":
    main()
