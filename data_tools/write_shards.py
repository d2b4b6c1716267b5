"""Write WebDataset shards of sentence pairs or of monolingual sentences.

    xscale data write_shards pairs --src F --tgt F --langs en de --out DIR [--links F | --align]
    xscale data write_shards mono  --text F... --lang en --out DIR

It does the same as `xscale data prepare` for one source without rules. Input is UTF-8 text, plain, .gz, .xz, .bz2 or
.zst. `-` is standard input, which must be plain. The directory appears only when it is complete.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from xscale import files
from xscale.data.shards import read_index
from xscale.errors import UserError

from . import index, steps, word_aligner
from .command import check_new_folder, run
from .corpus import parse_corpus
from .engine import lock_folder
from .prepare import do_steps


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="xscale data write_shards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="kind", required=True)
    pairs = commands.add_parser("pairs", help="line n of --src and line n of --tgt are translations")
    pairs.add_argument("--src", type=text_path, required=True, help="a file; - is standard input")
    pairs.add_argument("--tgt", type=text_path, required=True)
    pairs.add_argument("--langs", nargs=2, required=True, metavar=("SRC", "TGT"))
    links = pairs.add_mutually_exclusive_group()
    links.add_argument("--links", type=text_path, help="word links in Pharaoh form, one line a pair")
    links.add_argument("--align", action="store_true", help="make word links with eflomal (data_tools/word_aligner.py)")
    for side in ("src", "tgt"):
        pairs.add_argument(
            f"--links_{side}",
            type=text_path,
            help=f"the file that the aligner read in place of --{side}, such as a tokenised one",
        )
    mono = commands.add_parser("mono", help="plain text or WikiExtractor output; files or directories")
    mono.add_argument("--text", type=text_path, nargs="+", required=True, help="- is standard input")
    mono.add_argument("--lang", required=True)
    mono.add_argument("--documents", choices=["auto", "doc", "blank", "lines"], default="auto",
                      help="a document is from <doc> to </doc>, the lines between blank ones, or a line; auto: as the "
                      "first lines of each file show")  # fmt: skip
    mono.add_argument("--whole_lines", action="store_true", help="make each line a record, instead of each sentence")
    for command in (pairs, mono):
        command.add_argument("--out", type=Path, required=True, help="directory to make")
        command.add_argument("--name", help="shards are NAME-%%06d.tar")
        command.add_argument("--shard_lines", type=int, default=steps.CHUNK_UNITS, help="pairs or documents of a shard")
        command.add_argument("--tokenizer", help="needed by --min_tokens and --max_tokens")
        command.add_argument("--min_tokens", type=int, help="minimum number of tokens of each side")
        command.add_argument("--max_tokens", type=int, help="maximum number of tokens of a sequence")
    return parser.parse_args(argv)


def text_path(name: str) -> str:
    return "/dev/stdin" if name == "-" else name


def write_source_shards(plan: steps.CorpusPlan, out: Path) -> None:
    """Write the shards of a corpus of one source to `out`. Raises UserError."""
    check_new_folder(out)
    folder = files.partial_path(out)
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(folder)
    try:
        for path in folder.iterdir():  # left by a killed command
            files.remove(path)
        steps.write_plan(folder, plan)
        do_steps(folder, "local", 1)
        files.rename_into_place(folder / "result/shards" / plan.corpus.names[0], out)
    finally:
        files.remove(folder)
        os.close(lock)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.shard_lines < 1:
        raise UserError(f"--shard_lines {args.shard_lines} must be 1 or more")
    source: dict[str, Any]
    if args.kind == "mono":
        source = {"mono": args.lang, "text": args.text, "documents": args.documents, "whole_lines": args.whole_lines}
    else:
        source = {"pairs": args.langs, "text": [args.src, args.tgt], "links": args.links}
        if args.links_src or args.links_tgt:
            source["linked"] = [args.links_src, args.links_tgt]
            if not (args.links and args.links_src and args.links_tgt):
                raise UserError("--links_src and --links_tgt need --links: give all three flags, or --links alone")
    bounds = None
    if args.min_tokens is not None or args.max_tokens is not None:
        if args.tokenizer is None:
            raise UserError("--min_tokens and --max_tokens count tokens; give --tokenizer DIR")
        bounds = [args.min_tokens or 0, sys.maxsize if args.max_tokens is None else args.max_tokens]
    rules = {"normalise": [], "identical": True, "length": {"tokens": bounds}}
    tree = {"sources": [source | {"name": args.name}], "rules": rules, "align": args.kind == "pairs" and args.align}
    if bounds:
        tree["tokenizer"] = args.tokenizer
    corpus = parse_corpus(tree, f"write_shards {args.kind}")
    if corpus.align:
        word_aligner.find_aligner()
    plan = steps.CorpusPlan(corpus, f"data_tools.write_shards {args.kind}", args.shard_lines, args.name or args.kind)
    write_source_shards(plan, args.out)
    print(index.summary_line(args.out, read_index(args.out)[0]))


if __name__ == "__main__":
    run(main)
