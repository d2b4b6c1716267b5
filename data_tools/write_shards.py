"""Write WebDataset shards of sentence pairs or of monolingual sentences.

    python -m data_tools.write_shards pairs --src F --tgt F --langs en de --out DIR [--links F | --align]
    python -m data_tools.write_shards mono  --text F... --lang en --out DIR

It does what `data_tools.prepare` does for one source without rules. Input is UTF-8 text, plain, .gz, .xz, .bz2 or .zst;
- is standard input, which must be plain. A shard covers a fixed range of input lines (monolingual text: the documents
that start in this range). The directory appears only when it is complete.
"""

import argparse
import os
import sys
from pathlib import Path

from xscale import files
from xscale.data.shards import read_index
from xscale.errors import UserError

from . import align, index, steps
from .command import run
from .corpus import Corpus, parse_corpus
from .documents import FORMS
from .engine import Executor, lock_folder
from .prepare import do_steps
from .prepare_report import source_warnings

STANDARD_INPUT = "/dev/stdin"


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
    links.add_argument("--align", action="store_true", help="make word links with eflomal (data_tools/align.py)")
    for side in ("src", "tgt"):
        pairs.add_argument(f"--links_{side}", type=text_path, help=f"--{side} as the aligner saw it, if not as given")
    pairs.add_argument("--symmetrize", choices=list(align.SYMMETRIZE), default=steps.SYMMETRIZE,
                       help="how --align joins the links of both directions")  # fmt: skip
    mono = commands.add_parser("mono", help="plain text or WikiExtractor output; files or directories")
    mono.add_argument("--text", type=text_path, nargs="+", required=True, help="- is standard input")
    mono.add_argument("--lang", required=True)
    mono.add_argument("--documents", choices=["auto", *FORMS], default="auto",
                      help="a document is from <doc> to </doc>, the lines between blank ones, or a line; auto: as the "
                      "first lines of each file show")  # fmt: skip
    mono.add_argument("--whole_lines", action="store_true", help="a record is a line, not a sentence")
    for command in (pairs, mono):
        command.add_argument("--out", type=Path, required=True, help="directory to make")
        command.add_argument("--name", help="shards are NAME-%%06d.tar")
        command.add_argument("--shard_lines", type=int, default=steps.CHUNK_UNITS, help="input lines of a shard")
        command.add_argument("--tokenizer", help="needed by --min_tokens and --max_tokens")
        command.add_argument("--min_tokens", type=int, help="the fewest tokens of each side")
        command.add_argument("--max_tokens", type=int, help="the most tokens of a sequence")
    return parser.parse_args(argv)


def text_path(name: str) -> str:
    return STANDARD_INPUT if name == "-" else name


def corpus_of(args: argparse.Namespace) -> dict:
    """Return the corpus.yaml of one source that the flags describe. Raises UserError."""
    if args.shard_lines < 1:
        raise UserError(f"--shard_lines {args.shard_lines} must be positive")
    if args.kind == "pairs":
        source = {"pairs": args.langs, "text": [args.src, args.tgt], "links": args.links}
        if args.links_src or args.links_tgt:
            if not (args.links and args.links_src and args.links_tgt):
                raise UserError("--links_src and --links_tgt go with --links: give all three flags, or --links alone")
            source["linked"] = [args.links_src, args.links_tgt]
    else:
        source = {"mono": args.lang, "text": args.text, "documents": args.documents, "whole_lines": args.whole_lines}
    tokens = None
    if args.min_tokens is not None or args.max_tokens is not None:
        if not args.tokenizer:
            raise UserError("--min_tokens and --max_tokens count tokens: also give --tokenizer")
        tokens = [args.min_tokens or 0, sys.maxsize if args.max_tokens is None else args.max_tokens]
    source |= {"name": args.name or args.kind, "line_keys": True}
    rules = {"normalise": [], "identical": True, "length": {"tokens": tokens}}
    tokenizer = args.tokenizer if tokens else None
    return {"sources": [source], "rules": rules, "tokenizer": tokenizer, "align": args.kind == "pairs" and args.align}


def check_pipes(corpus: Corpus) -> None:
    """Raise UserError if a pipe would have to be read twice."""
    paths = corpus.sources[0].paths
    for path in paths:
        is_pipe = path == STANDARD_INPUT or (Path(path).exists() and not Path(path).is_file())
        if is_pipe and paths.count(path) > 1:
            raise UserError(f"{path} is given {paths.count(path)} times, but can be read only once; give files")


def write(corpus: Corpus, plan: steps.Plan, out: Path) -> list[str]:
    """Write the shards of a corpus of one source to `out`. Return the warnings about it. Raises UserError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; choose another --out or remove it")
    folder = files.partial_path(out)
    if folder.is_dir():
        os.close(lock_folder(folder))  # another process may be writing it
    files.remove(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(folder)
    try:
        steps.write_plan(folder, plan)
        do_steps(Executor("local", 1, folder))
        warnings = source_warnings(folder, 0)
        files.rename_into_place(folder / "result/shards" / corpus.names[0], out)
        return warnings
    finally:
        files.remove(folder)
        os.close(lock)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    corpus = parse_corpus(corpus_of(args), f"write_shards {args.kind}")
    check_pipes(corpus)
    if corpus.align:
        align.find_aligner()
    symmetrize = args.symmetrize if corpus.align else steps.SYMMETRIZE
    plan = steps.Plan(corpus, f"data_tools.write_shards {args.kind}", args.shard_lines, symmetrize)
    warnings = write(corpus, plan, args.out)
    print(index.summary_line(args.out, read_index(args.out)[0]))
    for line in warnings:
        print(f"warning: {args.out}: {line}")


if __name__ == "__main__":
    run(main)
