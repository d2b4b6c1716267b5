"""Print statistics of a folder of shards, or of each folder of shards directly below it.

    xscale data inspect DIR ... [--show N] [--verify] [--tokenizer T] [--json FILE]

A word is a run of letters and digits, or a single symbol (xscale/data/words.py). The command prints these statistics of
word alignments, which consist of links of two words. The first two statistics have one
number for each of the two languages:

    words                  mean number of words of a sentence
    linked_share           share of the words that have a link
    links_per_linked_word  mean number of links of a word that has a link
    punctuation_share      share of the links whose first word is a symbol
    tokens_per_target      with --tokenizer: median and 95th percentile of the number of tokens linked to one token
"""

import argparse
import json
from collections import Counter
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np

from xscale import files
from xscale.data.link_projection import parse_pharaoh
from xscale.data.ragged import evenly_spaced_indices
from xscale.data.shards import Source, read_index, source_folders_at_or_below
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import split_words_and_symbols
from xscale.errors import UserError
from xscale.record import Record

from .command import run_tool_and_exit
from .index import scan_tar, summary_line

SAMPLE = 10_000
"""The maximum number of a source's records in which words, links and tokens are counted."""
SHARDS_SHOWN = 20
UNKNOWN = 0.002
"""A warning is printed if more than this share of the tokens of a language's text is unknown."""


def print_words_per_sentence(lang: str, texts: list[str]) -> None:
    """Print how many words a sentence has: the mean, percentiles and the maximum."""
    counts = [len(words) for words, _ in split_words_and_symbols(texts)]
    low, median, high = np.percentile(counts, [5, 50, 95])
    print(
        f"  {lang}: words per sentence: mean {np.mean(counts):.1f}, 5th percentile {low:.0f}, median {median:.0f}, "
        f"95th percentile {high:.0f}, maximum {max(counts)} (in {len(texts):,} records)"
    )  # fmt: skip


def link_statistics(records: list[Record]) -> dict[str, Any]:
    """Return the statistics of word links for the field "links" of --json. records: pairs with links."""
    words = np.zeros(2)
    linked_words = np.zeros(2)
    links = symbols = 0
    for record in records:
        (first, first_is_word), (second, _) = split_words_and_symbols(list(record.texts))
        links_K2 = word_link_indices(record, len(first), len(second))
        words += len(first), len(second)
        linked_words += len(np.unique(links_K2[:, 0])), len(np.unique(links_K2[:, 1]))
        links += len(links_K2)
        symbols += int(np.count_nonzero(~first_is_word[links_K2[:, 0]]))
    return {
        "words": (words / len(records)).round(4).tolist(),
        "linked_share": (linked_words / np.maximum(words, 1)).round(4).tolist(),
        "links_per_linked_word": round(2 * links / max(linked_words.sum(), 1), 4),
        "punctuation_share": round(symbols / max(links, 1), 4),
    }


def percentiles_of_links_per_token(records: list[Record], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the median and the 95th percentile of the number of linked tokens of a token, over which AlignLM sums.
    records: pairs with links."""
    _, words = tokenizer.encode_words(list(chain.from_iterable(record.texts for record in records)))
    sums = list[int]()
    for record, first, second in zip(records, words[::2], words[1::2], strict=True):
        links_K2 = word_link_indices(record, len(first.is_word), len(second.is_word))
        of_one_kind = first.is_word[links_K2[:, 0]] == second.is_word[links_K2[:, 1]]
        token_links = set[tuple[int, int]]()
        for i, j in links_K2[of_one_kind]:
            first_tokens = first.tokens[first.words == i].tolist()
            token_links.update(product(first_tokens, second.tokens[second.words == j].tolist()))
        for tokens in zip(*token_links, strict=True):
            sums += Counter(tokens).values()
    median, p95 = np.percentile(sums or [0], [50, 95])
    return {"median": float(median), "p95": float(p95)}


def word_link_indices(record: Record, first_word_count: int, second_word_count: int) -> np.ndarray:
    """Return the word links of a pair [K, 2]. The counts are those of the words of its two texts."""
    links = parse_pharaoh(record.links or "", (first_word_count, second_word_count))
    return np.array(links, dtype=np.int64).reshape(-1, 2)


def describe_damage(source: Source, shard_number: int) -> str:
    """Return a line about the damage of a shard and its first damaged record; "" if the shard is undamaged."""
    about = source.shards[shard_number]
    path = source.directory / about.name
    idx = path.with_suffix(".idx")
    try:
        tar, entries = scan_tar(path, source.langs)
        if tar.shard == about and idx.read_bytes() == entries.tobytes() == source.index_entries(shard_number).tobytes():
            return ""
        for record in range(about.records):
            source.read(shard_number, record)
    except (UserError, ValueError, OSError) as error:
        return str(error)
    return (
        f"{path} or {idx.name} does not match index.json. Copy both files again. If you have changed the tar on "
        f"purpose, run `xscale data index {source.directory}` instead"
    )


def verify(source: Source) -> None:
    """Compare every byte of a source with its index. Raises UserError, which lists all damaged shards."""
    problems = [describe_damage(source, number) for number in range(len(source.shards))]
    lines = list(filter(None, problems))
    if lines:
        head = f"{source.directory} has damaged shards ({len(lines)}). Copy these shards again:"
        raise UserError("\n  ".join([head, *sorted(set(lines))]))
    print(f"{source.directory}: all shards are undamaged (number: {len(source.shards)})")


def print_and_summarize_source(source: Source, tokenizer: Tokenizer | None, shown: int) -> dict[str, Any]:
    """Print a description of a source with `shown` of its records, and return its entry for --json."""
    files.map_in_threads(source.check_local_file, source.shards)
    source.check_link_segmentation()
    records = list[Record]()
    for shard, record in source.locate_records(evenly_spaced_indices(source.records, SAMPLE)):
        records.append(source.renumber_links_by_xscale_words(source.read(shard, record)))
    print(summary_line(source.directory, read_index(source.directory)[0]))
    for about in source.shards[:SHARDS_SHOWN]:
        print(f"  {about.name}  records {about.records:,}  bytes {about.bytes:,}  sha256 {about.sha256[:16]}")
    for side, lang in enumerate(source.langs):
        texts = [record.texts[side] for record in records]
        print_words_per_sentence(lang, texts)
        if tokenizer:
            tokens = np.concatenate(tokenizer.encode(texts))
            share = (tokens == tokenizer.hf.unk_token_id).mean()
            print(f"  {lang}: {share:.2%} of the tokens are unknown tokens")
            if share > UNKNOWN:
                print(
                    f"warning: {share:.1%} of the tokens in {lang} are unknown tokens, because tokenizer "
                    f"{tokenizer.hf.name_or_path} lacks some characters of the text. A model cannot learn from unknown "
                    f"tokens. Train a tokenizer with a larger vocabulary on text in {lang} by `xscale data tokenizer "
                    "--vocab_size N`"
                )
    if "documents" in source.index:
        print(f"  sentences per document: mean {source.records / source.index['documents']:.1f}")
    linked = [record for record in records if record.links is not None]
    print(f"  records with word alignments: {len(linked) / len(records):.0%}")
    links = None
    if linked:
        links = link_statistics(linked)
        if tokenizer:
            links["tokens_per_target"] = percentiles_of_links_per_token(linked, tokenizer)
        for name, value in links.items():
            print(f"  word alignments: {name} {value}")
    for number in evenly_spaced_indices(len(records), shown):
        print("  " + records[number].to_json())
    return {"directory": str(source.directory), "name": source.langs_name, "kind": source.kind,
            "records": source.records, "links": links}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="xscale data inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="+", help="folders of shards, or their parent folders")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N records, evenly spaced in the shards")
    parser.add_argument("--verify", action="store_true", help="compare the checksums of all files with index.json")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder of a tokenizer; the command then also prints the share of unknown tokens, and how many tokens the "
        "word alignments link to one token",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="JSON file to write, with the number of records and the statistics of word alignments",
    )
    args = parser.parse_args(argv)
    if args.show < 0:
        raise UserError(f"--show {args.show} is negative. Write 0 or more")
    if args.json:
        files.check_writable_and_make_parent(args.json)
    tokenizer = Tokenizer(args.tokenizer.absolute()) if args.tokenizer else None
    sources = list[dict[str, Any]]()
    for place in args.directory:
        for directory in source_folders_at_or_below(place) or [place]:
            source = Source(directory)
            if args.verify:
                verify(source)
            sources.append(print_and_summarize_source(source, tokenizer, args.show))
    if args.json:
        files.write_text(args.json, json.dumps({"sources": sources}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run_tool_and_exit(main)
