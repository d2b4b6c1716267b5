"""Describe a shard directory, or each shard directory one level below.

    python -m data_tools.inspect DIR ... [--show N] [--verify] [--tokenizer T] [--json F]

Words, and the word numbers of word links, follow xscale/data/words.py: runs of letters and digits, and single symbols.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from xscale import files
from xscale.data import links as word_links
from xscale.data.link_projection import parse
from xscale.data.sequences import Example, join_segments
from xscale.data.shards import Source, directories_below, read_index
from xscale.data.tokenizer import Tokenizer, unknown_lines
from xscale.data.words import split
from xscale.errors import UserError
from xscale.record import Record

from .command import run
from .index import summary_line
from .scan import scan_shard
from .survey import warning_lines

_SAMPLE = 10_000


def sample_records(source: Source) -> list[Record]:
    """Return up to _SAMPLE records, evenly spread over the source."""
    numbers = np.linspace(0, source.records - 1, min(source.records, _SAMPLE)).astype(np.int64)
    shards = np.searchsorted(np.cumsum(source.counts), numbers, side="right")
    places = zip(shards.tolist(), (numbers - source.starts[shards]).tolist(), strict=True)
    return [source.with_words(source.read(shard, record)) for shard, record in places]


def print_lengths(source: Source, records: list[Record]) -> None:
    """Print the shards of a source, and the lengths of the texts and documents."""
    for shard in source.shards[:20]:
        print(f"  {shard.name}  {shard.records:,} records  {shard.bytes:,} bytes  sha256 {shard.sha256[:16]}")
    if len(source.shards) > 20:
        print(f"  ... and {len(source.shards) - 20} more")
    for side, lang in enumerate(source.langs):
        sizes = np.array([len(words) for words, _ in split([record.texts[side] for record in records])])
        low, middle, high = np.percentile(sizes, [5, 50, 95])
        print(f"  {lang}: words a sentence {sizes.mean():.1f} on average, 5 % {low:.0f}, 50 % {middle:.0f}, 95 % "
              f"{high:.0f}, longest {sizes.max()} (of {len(records):,} records)")  # fmt: skip
    if len(source.langs) == 1:
        print(f"  sentences a document {source.records / source.index.get('documents', source.records):.1f} on average")


def link_statistics(records: list[Record], tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """Return statistics of the word links of records, which --json writes as "links"; None if no record has links."""
    records = [record for record in records if record.links is not None]
    if not records:
        return None
    words, linked = np.zeros(2, dtype=np.int64), np.zeros(2, dtype=np.int64)
    links = symbols = 0
    for record in records:
        of_text = [is_word for _, is_word in split(list(record.texts))]
        sizes = (len(of_text[0]), len(of_text[1]))
        pairs = parse(record.links or "", sizes)
        words += sizes
        linked += [len({pair[side] for pair in pairs}) for side in (0, 1)]
        links += len(pairs)
        symbols += sum(not of_text[0][first] for first, _ in pairs)
    statistics: dict[str, Any] = {
        "words": (words / len(records)).tolist(),
        "linked_share": (linked / np.maximum(words, 1)).tolist(),
        "links_per_linked_word": 2 * links / max(int(linked.sum()), 1),
        "punctuation_share": symbols / max(links, 1),
    }
    if tokenizer:
        statistics["tokens_per_target"] = target_tokens(records, tokenizer)
    return statistics


def target_tokens(records: list[Record], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the median and the 95th percentile of the number of linked tokens that AlignLM sums for a target."""
    ids, words = tokenizer.encode_words([text for record in records for text in record.texts])
    pairs = []
    for number, record in enumerate(records):
        sides = slice(2 * number, 2 * number + 2)
        example = Example(record.langs, tuple(ids[sides]), tuple(words[sides]), np.uint64(0), number, record.key,
                          record.links)  # fmt: skip
        pairs.append(example)
    links = word_links.parse_links(pairs)
    layout = [[text] for text in range(len(ids))]
    segments = word_links.segments(pairs, layout)
    sequences = join_segments(tokenizer, segments, dict.fromkeys(records[0].langs, 0))
    tokens = word_links.word_tokens(pairs, layout, sequences, links.first, "all")
    summed = np.bincount(word_links.token_links(links.links, tokens).flatten())
    median, p95 = np.percentile(summed[summed > 0], [50, 95]) if len(summed) else (0.0, 0.0)
    return {"median": float(median), "p95": float(p95)}


def damage_line(source: Source, number: int) -> str:
    """Return a line about shard `number` if it differs from the index, with its first damaged record; else ""."""
    shard = source.shards[number]
    path = source.directory / shard.name
    if not path.exists():
        return f"{path} is missing"
    if files.sha256_file(path) == shard.sha256:
        idx = path.with_suffix(".idx")
        if idx.exists() and idx.read_bytes() == scan_shard(path, source.langs).idx.tobytes():
            return ""
        return f"{idx} does not fit its shard; run `python -m data_tools.index {source.directory}`"
    try:
        for record in range(shard.records):
            source.read(number, record)
        scan_shard(path, source.langs)
    except (UserError, ValueError, OSError) as error:
        return str(error)
    return f"{path}: bytes outside its records differ from the index"


def inspect(source: Source, args: argparse.Namespace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Print a description of a source, and return its entry for --json. Raises UserError if it is damaged."""
    directory = source.directory
    if args.verify:
        problems = [line for line in (damage_line(source, number) for number in range(len(source.shards))) if line]
        if problems:
            raise UserError("\n  ".join([f"{len(problems)} damaged shards:", *sorted(problems)]))
        print(f"{directory}: {len(source.shards)} shards verified")
    files.parallel_map(source.check_size, source.shards)
    source.check_links()
    records = sample_records(source)
    print(summary_line(directory, read_index(directory)[0]))
    print_lengths(source, records)
    linked = sum(record.links is not None for record in records)
    print(f"  with word links: {100 * linked / len(records):.0f} %")
    links = link_statistics(records, tokenizer)
    for name, value in (links or {}).items():
        print(f"  links: {name} {value}")
    for line in warning_lines(source.langs, [record.texts for record in records]):
        print(f"warning: {directory}: {line}")
    entry = {"directory": str(directory), "name": source.name, "kind": source.kind, "records": source.records,
             "links": links}  # fmt: skip
    if tokenizer:
        unknown = dict[str, float]()
        for side, lang in enumerate(source.langs):
            unknown[lang] = tokenizer.unknown_share(tokenizer.encode([record.texts[side] for record in records]))
        print(*(f"  {line}" for line in unknown_lines(unknown, tokenizer.hf.name_or_path)), sep="\n")
        entry["unknown"] = unknown
    for place in np.linspace(0, len(records) - 1, min(args.show, len(records))).astype(np.int64):
        print("  " + records[place].to_json())
    return entry


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="xscale data inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, nargs="+")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N records, spread over the source")
    parser.add_argument("--verify", action="store_true", help="compare every byte with the index")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer, to count unknown tokens and tokens of targets")
    parser.add_argument("--json", type=Path, metavar="F", help="also write the counts and the statistics to this file")
    args = parser.parse_args(argv)
    tokenizer = Tokenizer(args.tokenizer.absolute()) if args.tokenizer else None
    if args.show < 0:
        raise UserError(f"--show {args.show}: a number of records is 0 or more")
    if args.json:
        files.check_writable(args.json)
    entries = []
    for place in args.directory:
        below = [] if (place / "index.json").exists() else directories_below(place)
        for directory in below or [place]:
            entries.append(inspect(Source(directory), args, tokenizer))
    if args.json:
        files.write_text(args.json, json.dumps({"sources": entries}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    run(main)
