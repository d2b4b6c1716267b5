"""Write WebDataset shards of sentence pairs or of monolingual sentences.

    xscale data write_shards pairs --src FILE --tgt FILE --langs en de --out DIR [--links FILE | --align]
    xscale data write_shards mono  --text FILE... --lang en --out DIR

The tool does the same as `xscale data prepare` for one source, whose only rule is the number of tokens (--min_tokens,
--max_tokens). Input is UTF-8 text, plain, .gz, .xz, .bz2 or .zst. `-` is standard input, which must be plain. The
directory DIR appears only when it is complete.
"""

import argparse
import sys
from pathlib import Path

from xscale import files
from xscale.data.shards import read_index
from xscale.errors import UserError

from . import index, steps, word_aligner
from .command import check_new_folder, run_tool_and_exit
from .corpus import check_folder_is_outside_sources, parse_corpus
from .engine import lock_folder_or_raise
from .prepare import do_steps


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="xscale data write_shards", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="kind", required=True)
    pairs = commands.add_parser("pairs", help="write pairs: line n of --tgt is the translation of line n of --src")
    pairs.add_argument(
        "--src", type=path_or_stdin, required=True, help="file with one sentence per line, or - for standard input"
    )
    pairs.add_argument(
        "--tgt", type=path_or_stdin, required=True, help="file with the translation of each line of --src"
    )
    pairs.add_argument(
        "--langs", nargs=2, required=True, metavar=("SRC", "TGT"), help="languages of --src and --tgt, such as en de"
    )
    links = pairs.add_mutually_exclusive_group()
    links.add_argument(
        "--links", type=path_or_stdin, help="file of word alignments in Pharaoh form such as 0-0 1-2, one line per pair"
    )
    links.add_argument("--align", action="store_true", help="make word alignments with the aligner eflomal")
    for side in ("src", "tgt"):
        pairs.add_argument(
            f"--links_{side}",
            type=path_or_stdin,
            help=f"with --links: the file that your aligner read in place of --{side}, such as tokenised text",
        )
    mono = commands.add_parser(
        "mono", help="write monolingual text; the files have plain text or the output of WikiExtractor"
    )
    mono.add_argument(
        "--text",
        type=path_or_stdin,
        nargs="+",
        action="extend",
        required=True,
        help="files or folders of text, or - for standard input",
    )
    mono.add_argument("--lang", required=True, help="language of the text, such as en")
    mono.add_argument("--documents", choices=["auto", "doc", "blank", "lines"], default="auto",
                      help=(
                          "what counts as a document: the lines from <doc> to </doc> (doc), the lines between "
                          "blank lines (blank), or each line (lines). With auto (default), the first lines of "
                          "each file decide which of the three applies"
                      ))  # fmt: skip
    mono.add_argument(
        "--whole_lines",
        action="store_true",
        help="write each line as one record (without this flag, each sentence is one record)",
    )
    for command in (pairs, mono):
        command.add_argument("--out", type=Path, required=True, help="new folder for the shards")
        command.add_argument("--name", help="name of the shards, NAME-%%06d.tar (default: pairs or mono)")
        command.add_argument(
            "--shard_lines",
            type=int,
            default=steps.CHUNK_UNITS,
            help="maximum number of pairs or documents per shard (default: 8192)",
        )
        command.add_argument("--tokenizer", help="tokenizer that counts the tokens for --min_tokens and --max_tokens")
        command.add_argument(
            "--min_tokens",
            type=int,
            help="leave out sentences with fewer tokens than this number, and pairs with such a sentence",
        )
        command.add_argument(
            "--max_tokens",
            type=int,
            help="leave out sentences with more tokens than this number, and pairs whose two sentences together have "
            "more; special tokens count",
        )
    return parser.parse_args(argv)


def path_or_stdin(name: str) -> str:
    return "/dev/stdin" if name == "-" else name


def write_source_shards(plan: steps.CorpusPlan, out: Path) -> None:
    """Write the shards of a corpus of one source to `out`. Raises UserError."""
    check_folder_is_outside_sources(out, plan.corpus.sources)
    check_new_folder(out)
    folder = files.checked_partial_path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder_or_raise(folder):
        try:
            for path in folder.iterdir():  # left by a killed command
                files.remove(path)
            steps.write_plan_and_clear_caches(folder, plan)
            do_steps(folder, "local", 1)
            files.rename_into_place(folder / "result/shards" / plan.corpus.source_names[0], out)
        finally:
            files.remove(folder)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.shard_lines < 1:
        raise UserError(f"--shard_lines {args.shard_lines} is too small; the minimum is 1")
    if args.kind == "mono":
        source = {"mono": args.lang, "text": args.text, "documents": args.documents, "whole_lines": args.whole_lines}
    else:
        source = {"pairs": args.langs, "text": [args.src, args.tgt], "links": args.links}
        if args.links_src or args.links_tgt:
            source["linked"] = [args.links_src, args.links_tgt]
            if not (args.links and args.links_src and args.links_tgt):
                raise UserError(
                    "--links_src and --links_tgt need each other and --links. Write all three flags, or --links alone"
                )
    bounds = None
    if args.min_tokens is not None or args.max_tokens is not None:
        if args.tokenizer is None:
            raise UserError("--min_tokens and --max_tokens need a tokenizer. Write --tokenizer DIR")
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
    run_tool_and_exit(main)
