"""Make a bilingual dictionary: join, filter or sample existing dictionaries, or make one from word alignments.

    xscale data lexicon --dict en-de.txt ... --out out/en-de.txt [--share 0.25] [--drop_identical]
    xscale data lexicon --from_links DIR ... --out out/en-de.txt [--min_count 3] [--min_share 0.2]
    xscale data lexicon --dict en-de.txt --out out/en-de.txt --truecase DIR ...

The name of a file, such as en-de.txt, gives the languages of its columns. --out must name the languages in the same
order. Entries keep the order of the input; entries from word alignments begin with the most frequent. --share samples
the vocabulary, as Tang et al. (2022) do: it chooses words of the first column by a hash of the word, and keeps all
entries of each chosen word. With the same --seed, a sample of 10 % is a part of the
sample of 20 %.
"""

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import compress
from operator import ne
from pathlib import Path

from xscale import files, rng
from xscale.data.lexicon import languages_in_file_name, normalise_word, read_entries
from xscale.data.link_projection import parse_pharaoh
from xscale.data.shards import Source, find_sources, languages_of, sample_texts
from xscale.data.words import split_words_and_symbols
from xscale.errors import UserError
from xscale.record import Record

from .command import run_tool_and_exit

Entry = tuple[str, str]


@dataclass
class LinkCounts:
    """Counts of words and of word links, over all records with links. Words are in lower case."""

    links: Counter[Entry] = field(default_factory=Counter)
    """Links by the two words that they connect, in the order of the dictionary's columns."""
    words: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Occurrences by language and word."""


def count_words_and_links(sources: list[Source], langs: tuple[str, str]) -> LinkCounts:
    """Return the counts over all records with links. langs: the languages of the dictionary's columns. Raises UserError
    for a source in other languages, and if there are no links."""
    counts = LinkCounts()
    for source in sources:
        if source.langs not in (langs, langs[::-1]):
            raise UserError(
                f"{source.directory} has text in {'-'.join(source.langs)}, but the name of --out says "
                f"{'-'.join(langs)}. Give --from_links only folders with text in {'-'.join(langs)}"
            )
        for shard, about in enumerate(source.shards):
            for number in range(about.records):
                record = source.renumber_links_by_xscale_words(source.read(shard, number))
                if record.links is not None:
                    add_words_and_links(counts, record, is_reversed=source.langs != langs)
    if not counts.links:
        names = ", ".join(str(source.directory) for source in sources)
        raise UserError(
            f"{names}: the shards have no word alignments. Write the shards again by `xscale data write_shards pairs "
            "... --align` (or `--links FILE`)"
        )
    return counts


def add_words_and_links(counts: LinkCounts, record: Record, is_reversed: bool) -> None:
    """Add the words of a pair, and its links between words, to the counts. is_reversed: True if the pair's second text
    is in the language of the first column."""
    sides = split_words_and_symbols([text.lower() for text in record.texts])
    for lang, (words, is_word) in zip(record.langs, sides, strict=True):
        for word in compress(words, is_word):
            counts.words[lang, word] += 1
    (first, first_is_word), (second, second_is_word) = sides
    for i, j in parse_pharaoh(record.links or "", (len(first), len(second))):
        if first_is_word[i] and second_is_word[j]:
            entry = (second[j], first[i]) if is_reversed else (first[i], second[j])
            counts.links[entry] += 1


def entries_from_link_counts(
    counts: LinkCounts, langs: tuple[str, str], min_count: int, min_share: float
) -> list[Entry]:
    """Return the pairs of words that are linked at least `min_count` times, and at least `min_share` times as often as
    the more frequent of the two words occurs. The most frequent pairs come first."""
    kept = []
    for entry, links in counts.links.items():
        occurrences = max(counts.words[langs[0], entry[0]], counts.words[langs[1], entry[1]])
        if links >= min_count and links >= min_share * occurrences:
            kept.append(entry)
    return sorted(kept, key=lambda entry: (-counts.links[entry], entry))


def commonest_spellings(sources: list[Source], language: str) -> dict[str, str]:
    """Return {word in lower case: its most frequent spelling in the text}: `hund` has the spelling `Hund` if `Hund` is
    more frequent. Of equally frequent spellings, it is the last by code points, which is usually in lower case. Raises
    UserError if the language has no text."""
    counts = Counter[str]()
    for texts in sample_texts(language, sources, max_records=sys.maxsize):
        for words, _ in split_words_and_symbols(texts):
            counts.update(words)
    if not counts:
        raise UserError(f"--truecase: the shards have no text in {language}. Add shards with text in {language}")
    best = dict[str, str]()
    for word in sorted(counts, key=lambda word: (counts[word], word)):
        best[word.lower()] = word
    return best


def truecase_entries(entries: list[Entry], langs: tuple[str, str], sources: list[Source]) -> list[Entry]:
    """Return the entries with each word in its most frequent spelling in the text. Words that the text does not have,
    such as entries of several words, stay as they are."""
    source_spellings = commonest_spellings(sources, langs[0])
    target_spellings = commonest_spellings(sources, langs[1])
    spelled = list[Entry]()
    for first, second in entries:
        source_word = source_spellings.get(first.lower(), first)
        spelled.append((source_word, target_spellings.get(second.lower(), second)))
    return spelled


def sample_entries_by_first_word(entries: list[Entry], word_share: float, seed: int) -> list[Entry]:
    """Return the entries of a share of the words of the first language, in their order. Of n words, the
    round(word_share * n) with the smallest hashes are chosen. Spellings that differ only in case are one word."""
    distinct = {normalise_word(word) for word, _ in entries}
    by_hash = sorted(distinct, key=lambda word: int(rng.key(seed, "lexicon", word)))
    chosen = set(by_hash[: round(word_share * len(by_hash))])
    return [entry for entry in entries if normalise_word(entry[0]) in chosen]


def write_entries(entries: list[Entry], out: Path) -> None:
    """Write one entry per line, `source target`. If a side has several words, a tab separates the sides."""
    lines = []
    for entry in entries:
        separator = " " if len(" ".join(entry).split()) == 2 else "\t"
        lines.append(separator.join(entry) + "\n")
    files.write_text(out, "".join(lines))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="xscale data lexicon", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument(
        "--dict",
        type=Path,
        nargs="+",
        action="extend",
        metavar="FILE",
        help="dictionary files; the new dictionary has the entries of the first file, then of the next, and so on",
    )
    inputs.add_argument(
        "--from_links",
        type=Path,
        nargs="+",
        action="extend",
        metavar="DIR",
        help="make the dictionary from the word alignments in these shards",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="file for the new dictionary; its name, such as en-de.txt, gives the languages of its two columns",
    )
    parser.add_argument(
        "--min_count",
        type=int,
        default=2,
        help="with --from_links, keep only entries whose two words are aligned at least this often (default: 2)",
    )
    parser.add_argument(
        "--min_share",
        type=float,
        default=0.1,
        help=(
            "with --from_links, keep only entries in which the more frequent word is aligned with the other word in at "
            "least this share of its occurrences (default: 0.1)"
        ),
    )
    parser.add_argument(
        "--truecase",
        type=Path,
        nargs="+",
        action="extend",
        metavar="DIR",
        help="write each word in the upper and lower case that it most often has in the text of these shards",
    )
    parser.add_argument("--drop_identical", action="store_true", help="leave out entries whose two words are the same")
    parser.add_argument(
        "--share", type=float, help="choose this share of the words of the first language, and keep only their entries"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice of --share (default: 0)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    sources = find_sources(args.from_links) if args.from_links else []
    langs = languages_in_file_name(args.out, languages_of(sources))
    if args.out.exists():
        raise UserError(f"--out {args.out} exists. Choose another --out, or remove the file")
    files.check_writable_and_make_parent(args.out)
    if args.share is not None and not 0 < args.share <= 1:
        raise UserError(f"--share {args.share} must be greater than 0 and at most 1")

    if sources:
        entries = entries_from_link_counts(count_words_and_links(sources, langs), langs, args.min_count, args.min_share)
    else:
        entries = []
        for path in args.dict:
            if languages_in_file_name(path, langs) != langs:
                raise UserError(
                    f"{path}: the file name must give the languages in the order of --out, as in "
                    f"{'-'.join(langs)}.txt. If the two columns of the file have this order, rename the file. "
                    f"Otherwise swap the columns by `awk -F'\\t' '{{print $2 FS $1}}' {path} > "
                    f"OTHER_FOLDER/{'-'.join(langs)}.txt` (without -F'\\t' if a space separates the columns)"
                )
            entries += read_entries(path)
    report = [f"{len(entries):,} entries read"]
    if args.truecase:
        spelled = truecase_entries(entries, langs, find_sources(args.truecase))
        report.append(f"{sum(map(ne, entries, spelled)):,} entries changed to the upper and lower case of the text")
        entries = spelled
    entries = list(dict.fromkeys(entries))
    report.append(f"{len(entries):,} different entries")
    if args.drop_identical:
        entries = [(first, second) for first, second in entries if first != second]
        report.append(f"{len(entries):,} entries after --drop_identical (without entries whose two words are the same)")
    if args.share is not None:
        entries = sample_entries_by_first_word(entries, args.share, args.seed)
        report.append(f"{len(entries):,} entries chosen by --share {args.share:g} --seed {args.seed}")
    if not entries:
        raise UserError(
            f"no entry is left for {args.out} ({', '.join(report)}). Change the flags, or use other shards or "
            "dictionaries"
        )
    write_entries(entries, args.out)
    print(f"{args.out}: {', '.join(report)}")


if __name__ == "__main__":
    run_tool_and_exit(main)
