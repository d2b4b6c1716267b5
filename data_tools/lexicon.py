"""Make a bilingual dictionary: filter, intersect or sample existing ones, or induce one from word links.

    python -m data_tools.lexicon --dict en-de.txt ... --out out/en-de.txt [--intersect de-en.txt] [--share 0.25] ...
    python -m data_tools.lexicon --from_links DIR ... --out out/en-de.txt [--min_count 3] [--min_share 0.2]
    python -m data_tools.lexicon --dict en-de.txt --out out/en-de.txt --truecase DIR ... [--tokenizer T]

A file's name, such as en-de.txt, gives the order of its columns, and --out that of the output. Entries keep the order
of the input; induced ones begin with the most frequent. --share samples the vocabulary, as Tang et al. (2022) do: it
selects words of the first column by a hash of the word, and keeps all entries of each. A sample of 10 % is a part of
the sample of 20 %.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from xscale import files, rng
from xscale.data.lexicon import pair_of, read_entries, same_word, truecased
from xscale.data.shards import Source, find_sources
from xscale.data.tokenizer import Tokenizer
from xscale.data.truecase import Forms, commonest, count_words
from xscale.data.words import split
from xscale.errors import UserError
from xscale.record import Record

from .command import run

Entry = tuple[str, str]
COUNTED_AT_ONCE = 10_000
"""The number of a language's texts whose words are counted in one call."""


@dataclass
class LinkCounts:
    """Counts over all records with word links. Words are in lower case."""

    pairs: Counter[Entry] = field(default_factory=Counter)
    """Links by the two words that they connect."""
    first: Counter[str] = field(default_factory=Counter)
    """Occurrences of the first language's words."""
    second: Counter[str] = field(default_factory=Counter)
    """Occurrences of the second language's words."""

    def add(self, texts: list[str], links: list[tuple[int, int]]) -> None:
        """Count the words of a pair's two texts, and its links between words."""
        first, second = split([text.lower() for text in texts])
        first_words, first_is_word = first
        second_words, second_is_word = second
        for word, is_word in zip(first_words, first_is_word, strict=True):
            if is_word:
                self.first[word] += 1
        for word, is_word in zip(second_words, second_is_word, strict=True):
            if is_word:
                self.second[word] += 1
        for i, j in links:
            if first_is_word[i] and second_is_word[j]:
                self.pairs[first_words[i], second_words[j]] += 1


def read_oriented(path: Path, langs: tuple[str, str]) -> list[Entry]:
    """Return a file's entries in the order of `langs`. Raises UserError if the file has other languages."""
    order = pair_of(path, langs)
    entries = read_entries(path)
    if order == langs:
        return entries
    if order[::-1] != langs:
        raise UserError(
            f"{path} names the languages {' and '.join(order)}, but --out names {' and '.join(langs)}; use one pair"
        )
    return [(second, first) for first, second in entries]


def count_links(sources: list[Source], langs: tuple[str, str]) -> LinkCounts:
    """Return the counts over all records with links. langs: the order of the sides in the result. Raises UserError for
    a source in other languages, and if there are no links."""
    for source in sources:
        if source.langs not in (langs, langs[::-1]):
            raise UserError(
                f"{source.directory} holds {'-'.join(source.langs)}, but --out is for {'-'.join(langs)}; remove this "
                f"directory from the command"
            )
    counts = LinkCounts()
    for source in sources:
        is_reversed = source.langs != langs
        for record in records_of(source):
            converted = source.with_words(record)
            if converted.links is None:
                continue
            texts = list(converted.texts)
            links = []
            for link in converted.links.split():
                first, _, second = link.partition("-")
                links.append((int(first), int(second)))
            if is_reversed:
                texts = texts[::-1]
                links = [(second, first) for first, second in links]
            counts.add(texts, links)
    if not counts.pairs:
        names = ", ".join(str(source.directory) for source in sources)
        raise UserError(f"{names}: no word links; write the shards with `--links F` or `--align`")
    return counts


def records_of(source: Source) -> Iterator[Record]:
    """Yield the records of a source, shard by shard."""
    for number, shard in enumerate(source.shards):
        for record in range(shard.records):
            yield source.read(number, record)


def commonest_forms(sources: list[Source], langs: tuple[str, str]) -> dict[str, Forms]:
    """Return each language's commonest spelling of each word. Raises UserError if a language has no text."""
    texts_of: dict[str, list[str]] = {language: [] for language in langs}
    counts: dict[str, Counter[str]] = {language: Counter() for language in langs}
    for source in sources:
        for record in records_of(source):
            for language, text in zip(source.langs, record.texts, strict=True):
                if language in texts_of:
                    texts_of[language].append(text)
                    if len(texts_of[language]) == COUNTED_AT_ONCE:
                        counts[language] += count_words([texts_of[language]])
                        texts_of[language] = []
    forms = {}
    for language in langs:
        counts[language] += count_words([texts_of[language]])
        if not counts[language]:
            raise UserError(f"--truecase has no text in {language}; add shards that have some")
        forms[language] = commonest(counts[language])
    return forms


def induce_entries(counts: LinkCounts, min_count: int, min_share: float) -> list[Entry]:
    """Return the word pairs that are linked at least `min_count` times, and in at least the share `min_share` of the
    occurrences of the pair's more frequent word. The most frequent pairs come first."""
    kept = []
    for entry, links in counts.pairs.items():
        occurrences = max(counts.first[entry[0]], counts.second[entry[1]])
        if links >= min_count and links >= min_share * occurrences:
            kept.append(entry)
    return sorted(kept, key=lambda entry: (-counts.pairs[entry], entry))


def sample_entries(entries: list[Entry], share: float, seed: int) -> list[Entry]:
    """Return, in their order, all entries of round(share * n) of the n words of the first language: those with the
    smallest hashes. Spellings that differ only in case are one word."""
    distinct = {same_word(word) for word, _ in entries}
    by_hash = sorted(distinct, key=lambda word: int(rng.key(seed, "lexicon", word)))
    chosen = set(by_hash[: round(share * len(by_hash))])
    return [entry for entry in entries if same_word(entry[0]) in chosen]


def count_unknown(entries: list[Entry], tokenizer_directory: Path) -> int:
    """Return the number of entries that have a token which the tokenizer does not know."""
    tokenizer = Tokenizer(tokenizer_directory.absolute())
    first = tokenizer.encode_inside([entry[0] for entry in entries])
    second = tokenizer.encode_inside([entry[1] for entry in entries])
    unknown = 0
    for sides in zip(first, second, strict=True):
        if tokenizer.unknown_share(list(sides)) > 0:
            unknown += 1
    return unknown


def write_entries(entries: list[Entry], out: Path) -> None:
    """Write one entry per line, `source target`. If a side has several words, a tab separates the sides."""
    lines = []
    for first, second in entries:
        has_phrase = len(first.split()) > 1 or len(second.split()) > 1
        separator = "\t" if has_phrase else " "
        lines.append(f"{first}{separator}{second}\n")
    files.write_text(out, "".join(lines))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="xscale data lexicon", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--dict", type=Path, nargs="+", metavar="F", help="dictionaries, joined in this order")
    inputs.add_argument("--from_links", type=Path, nargs="+", metavar="DIR", help="shards of pairs with word links")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="F", help="file to make; its name gives the two languages"
    )
    parser.add_argument("--min_count", type=int, default=2, help="the fewest links of an induced entry")
    parser.add_argument(
        "--min_share",
        type=float,
        default=0.1,
        help="an induced entry's lowest ratio of links to occurrences of its more frequent word",
    )
    parser.add_argument(
        "--truecase", type=Path, nargs="+", metavar="DIR", help="spell words as the text of these shards mostly does"
    )
    parser.add_argument("--tokenizer", type=Path, metavar="T", help="a tokenizer, to count entries with unknown tokens")
    parser.add_argument("--drop_identical", action="store_true", help="leave out a word that is its own translation")
    parser.add_argument(
        "--intersect", type=Path, metavar="F", help="keep only entries that F also has, in either direction"
    )
    parser.add_argument(
        "--share", type=float, help="keep this share of the first language's words, with all their entries"
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of --share")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    sources = find_sources(args.from_links) if args.from_links else []
    langs = pair_of(args.out, {language for source in sources for language in source.langs})
    if args.out.exists():
        raise UserError(f"{args.out} exists; choose another --out or remove it")
    files.check_writable(args.out)
    if args.share is not None and not 0 < args.share <= 1:
        raise UserError(f"--share {args.share} must be above 0 and at most 1")

    if sources:
        entries = induce_entries(count_links(sources, langs), args.min_count, args.min_share)
    else:
        entries = []
        for path in args.dict:
            entries += read_oriented(path, langs)
    report = [f"{len(entries):,} entries"]
    if args.truecase:
        entries, changed = truecased(entries, langs, commonest_forms(find_sources(args.truecase), langs))
        report.append(f"{changed:,} changed to their spelling in the text")
    entries = list(dict.fromkeys(entries))
    report.append(f"{len(entries):,} distinct")
    if args.drop_identical:
        entries = [(first, second) for first, second in entries if first != second]
        report.append(f"{len(entries):,} of two different words")
    if args.intersect:
        others = set(read_oriented(args.intersect, langs))
        entries = [entry for entry in entries if entry in others]
        report.append(f"{len(entries):,} in {args.intersect} too")
    if args.share is not None:
        entries = sample_entries(entries, args.share, args.seed)
        report.append(f"{len(entries):,} of a share {args.share:g} of the words (seed {args.seed})")
    if args.tokenizer:
        unknown = count_unknown(entries, args.tokenizer)
        report.append(f"{unknown:,} of them with unknown tokens, which training with {args.tokenizer} leaves out")
    if not entries:
        raise UserError(f"nothing to write to {args.out}: {', '.join(report)}")
    write_entries(entries, args.out)
    print(f"{args.out}: {', '.join(report)}")


if __name__ == "__main__":
    run(main)
