"""Describe a shard directory, or each shard directory one level below.

    python -m data_tools.inspect DIR ... [--show N] [--verify] [--tokenizer T] [--json F]

Words, and the word numbers of word links, follow xscale/data/words.py: runs of letters and digits, and single symbols.
"""

import argparse
import json
from collections import Counter
from itertools import compress, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from xscale import files
from xscale.data import links as word_links
from xscale.data.sequences import Example, join_segments
from xscale.data.shards import Source, directories_below, read_index
from xscale.data.tokenizer import Tokenizer, unknown_lines
from xscale.data.words import TokenWords, segment, split
from xscale.errors import UserError
from xscale.files import sha256_file
from xscale.record import Record

from .command import run
from .index import summary_line
from .inspect_page import page, text_statistics
from .scan import scan_shard
from .survey import Survey, warning_lines

_LENGTH_SAMPLE = 10_000
_FREQUENT = 8


def description_lines(
    source: Source, records: list[Record], text: dict[str, Any], links: dict[str, Any] | None, show: int
) -> list[str]:
    """Return the lines that describe a source: its shards, lengths, scripts and links, and `show` records. records: a
    sample of the source's records; text: `corpus_statistics`; links: `link_statistics`."""
    lines = [summary_line(source.directory, read_index(source.directory)[0])]
    for shard in source.shards[:20]:
        lines.append(f"  {shard.name}  {shard.records:,} records  {shard.bytes:,} bytes  sha256 {shard.sha256[:16]}")
    if len(source.shards) > 20:
        lines.append(f"  ... and {len(source.shards) - 20} more")
    for side, lang in enumerate(source.langs):
        words = np.diff(segment([record.texts[side] for record in records]).words)
        low, middle, high = np.percentile(words, [5, 50, 95])
        lines.append(
            f"  {lang}: words a sentence {words.mean():.1f} on average, 5 % {low:.0f}, 50 % {middle:.0f}, "
            f"95 % {high:.0f}, longest {words.max()} (of {len(records):,} records)"
        )
        scripts = ", ".join(f"{share:.1%} {script}" for script, share in text["scripts"][side].items())
        lines.append(
            f"  {lang}: {text['duplicates'][side]:.1%} of the texts are repeats; letters: {scripts or 'none'}; most "
            f"frequent words: {frequent_words([record.texts[side] for record in records])}"
        )
    if source.kind == "mono":
        lines.append("  " + document_line(source))
    else:
        ratio = text["length_ratio"]
        lines.append(
            f"  characters of {source.langs[1]} by those of {source.langs[0]}: 5 % {ratio['p5']:g}, 50 % "
            f"{ratio['median']:g}, 95 % {ratio['p95']:g}, correlation of lengths {text['length_correlation']}; the "
            f"same text on both sides: {text['same_text']:.1%} of the pairs"
        )
    linked = sum(record.links is not None for record in records)
    lines.append(f"  with word links: {100 * linked / len(records):.0f} %")
    if links:
        (a, b), (share_a, share_b) = links["words"], links["linked_share"]
        lines.append(
            f"  links: of {a:.1f} and {b:.1f} words a sentence {100 * share_a:.1f} % and {100 * share_b:.1f} % are "
            f"linked, with {links['links_per_linked_word']:.2f} words each; {100 * links['punctuation_share']:.1f} % "
            f"of the links are of punctuation"
        )
        if "tokens_per_target" in links:
            of_target = links["tokens_per_target"]
            lines.append(
                f"  linked tokens of a target, which AlignLM sums: 50 % {of_target['median']:g}, "
                f"95 % {of_target['p95']:g}"
            )
    for at in np.linspace(0, len(records) - 1, min(show, len(records))).astype(np.int64):
        lines.append("  " + records[at].to_json())
    return lines


def frequent_words(texts: list[str]) -> str:
    """Return the most frequent words, by which a reader can tell languages of one script apart."""
    counts: Counter[str] = Counter()
    for words, is_word in split([text.lower() for text in texts[:: max(len(texts) // 1000, 1)]]):
        counts.update(compress(words, is_word))
    return " ".join(word for word, _ in counts.most_common(_FREQUENT))


def corpus_statistics(source: Source, records: list[Record]) -> dict[str, Any]:
    """Return statistics of all texts of a source from its index, or of `records` if an older index has none."""
    if "text" in source.index:
        return source.index["text"]
    survey = Survey(len(source.langs))
    for record in records:
        survey.add(record.texts)
    return survey.statistics()


def sample_records(source: Source) -> list[Record]:
    """Return up to _LENGTH_SAMPLE records, evenly spread over the source."""
    ordinals = np.linspace(0, source.records - 1, min(source.records, _LENGTH_SAMPLE)).astype(np.int64)
    ends = np.cumsum(source.counts)
    shards = np.searchsorted(ends, ordinals, side="right")
    places = zip(shards.tolist(), (ordinals - ends[shards] + source.counts[shards]).tolist(), strict=True)
    return [source.with_words(source.read(shard, record)) for shard, record in places]


def link_statistics(records: list[Record], tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """Return statistics of the word links of records, which --json writes as "links"; None if no record has links."""
    records = [record for record in records if record.links is not None]
    if not records:
        return None
    texts = [text for record in records for text in record.texts]
    if tokenizer:
        ids, words = tokenizer.encode_words(texts)
    else:
        found = segment(texts)
        ids = [[] for _ in texts]
        nothing = np.empty(0, dtype=np.int64)
        words = [TokenWords(nothing, nothing, nothing, found.is_word[a:b]) for a, b in pairwise(found.words.tolist())]
    pairs = [
        Example(
            r.langs, tuple(ids[2 * i : 2 * i + 2]), tuple(words[2 * i : 2 * i + 2]), np.uint64(0), i, r.key, r.links
        )
        for i, r in enumerate(records)
    ]
    links = word_links.parse_links(pairs)
    linked = [len(np.unique(links.links[:, side])) for side in (0, 1)]
    counts = [sum(len(pair.words[side].is_word) for pair in pairs if pair.words) for side in (0, 1)]
    symbols = ~np.concatenate([text.is_word for text in words])[links.links[:, 0]]
    statistics = {
        "words": [count / len(pairs) for count in counts],
        "linked_share": [n / max(count, 1) for n, count in zip(linked, counts, strict=True)],
        "links_per_linked_word": 2 * len(links.links) / max(sum(linked), 1),
        "punctuation_share": float(symbols.mean()) if len(symbols) else 0.0,
    }
    if tokenizer:
        layout = [[text] for text in range(len(texts))]
        sequences = join_segments(tokenizer, word_links.segments(pairs, layout), dict.fromkeys(records[0].langs, 0))
        tokens = word_links.word_tokens(pairs, layout, sequences, links.first, "all")
        places = word_links.token_links(links.links, tokens)
        summed = np.bincount(places.flatten())
        median, p95 = np.percentile(summed[summed > 0], [50, 95]) if len(summed) else (0.0, 0.0)
        statistics["tokens_per_target"] = {"median": float(median), "p95": float(p95)}
    return statistics


def document_line(source: Source) -> str:
    """Return a line about how many sentences the documents of a source have."""
    starts = np.concatenate([~source.lengths_and_follows(shard, slice(None))[1] for shard in range(len(source.shards))])
    sizes = np.diff(np.flatnonzero(starts), append=len(starts))
    low, middle, high = np.percentile(sizes, [5, 50, 95])
    return (
        f"documents: {len(sizes):,}, sentences a document {sizes.mean():.1f} on average, 5 % {low:.0f}, 50 % "
        f"{middle:.0f}, 95 % {high:.0f}, most {sizes.max():,}"
    )


def damage_lines(source: Source) -> list[str]:
    """Return a line for each shard that is missing or differs from the index, with the first damaged record if it is
    found."""
    problems = []
    for number, shard in enumerate(source.shards):
        path = source.directory / shard.name
        if not path.exists():
            problems.append(f"{path} is missing")
        elif sha256_file(path) != shard.sha256:
            problems.append(_first_damage(source, number))
        elif not _idx_fits(path, source.langs):
            problems.append(
                f"{path.with_suffix('.idx')} does not fit its shard; run `python -m data_tools.index "
                f"{source.directory}`"
            )
    return sorted(problems)


def _idx_fits(path: Path, langs: tuple[str, ...]) -> bool:
    idx = path.with_suffix(".idx")
    return idx.exists() and idx.read_bytes() == scan_shard(path, langs).idx.tobytes()


def _first_damage(source: Source, number: int) -> str:
    path = source.directory / source.shards[number].name
    for record in range(source.shards[number].records):
        try:
            source.read(number, record)
        except (UserError, ValueError, OSError) as error:
            return str(error)
    try:
        scan_shard(path)
    except UserError as error:
        return str(error)
    return f"{path}: bytes outside its records differ from the index"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="+")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N records, spread over the source")
    parser.add_argument("--verify", action="store_true", help="compare every byte with the index")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="a tokenizer, to count unknown tokens, and the tokens that a bilingual target sums",
    )
    parser.add_argument("--json", type=Path, metavar="F", help="also write the counts and the statistics to this file")
    parser.add_argument("--html", type=Path, metavar="F", help="write a page: shares, lengths, links, dictionaries")
    args = parser.parse_args(argv)
    tokenizer = Tokenizer(args.tokenizer.absolute()) if args.tokenizer else None
    if args.show < 0:
        raise UserError(f"--show {args.show}: a number of records is 0 or more")
    for path in (args.json, args.html):
        if path:
            files.check_writable(path)
    found, sources = [], list[Source]()
    for given in args.directory:
        alone = (given / "index.json").exists()
        below = [Source(directory) for directory in (not alone and directories_below(given)) or [given]]
        for source in below:
            found.append(inspect(source, args.show, args.verify, tokenizer))
            if args.html:
                found[-1]["languages"] = text_statistics(below, source, sample_records(source), given, tokenizer)
        sources += below
    if args.html:
        files.write_text(args.html, page(sources, found))
    if args.json:
        files.write_text(args.json, json.dumps({"sources": found}, indent=1, ensure_ascii=False) + "\n")


def inspect(source: Source, show: int, verify: bool, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Print a description of a source, and return its entry for --json. Raises UserError if it is damaged."""
    directory = source.directory
    if verify:
        problems = damage_lines(source)
        if problems:
            raise UserError(f"{len(problems)} damaged shards:\n" + "\n".join(f"  {problem}" for problem in problems))
        print(f"{directory}: {len(source.shards)} shards verified")
    files.parallel_map(source.check_size, source.shards)
    source.check_links()
    records = sample_records(source)
    links = link_statistics(records, tokenizer)
    text = corpus_statistics(source, records)
    text["warnings"] = warning_lines(text, source.langs, source.records)
    print("\n".join(description_lines(source, records, text, links, show)))
    for line in text["warnings"]:
        print(f"warning: {directory}: {line}")
    entry = {"directory": str(directory), "name": source.name, "kind": source.kind, "records": source.records}
    entry |= {"links": links, "text": text}
    if tokenizer:
        sides = zip(source.langs, zip(*(record.texts for record in records), strict=True), strict=True)
        unknown = {lang: tokenizer.unknown_share(tokenizer.encode(list(texts))) for lang, texts in sides}
        print(*(f"  {line}" for line in unknown_lines(unknown, tokenizer.hf.name_or_path)), sep="\n")
        entry["unknown"] = unknown
    return entry


if __name__ == "__main__":
    run(main)
