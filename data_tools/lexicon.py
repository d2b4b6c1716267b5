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
from itertools import compress
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


def read_oriented(path: Path, langs: tuple[str, str]) -> list[Entry]:
    """Return a file's entries in the order of `langs`. Raises UserError if the file has other languages."""
    order = pair_of(path, langs)
    if order == langs:
        return read_entries(path)
    if order[::-1] != langs:
        raise UserError(
            f"{path} names the languages {' and '.join(order)}, but --out names {' and '.join(langs)}; use one pair"
        )
    return [(b, a) for a, b in read_entries(path)]


def count_links(sources: list[Source], langs: tuple[str, str]) -> tuple[Counter, Counter, Counter]:
    """Return the counts, over all records with links, of linked word pairs, of the first language's words, and of the
    second language's words. Words are in lower case. Raises UserError if there are no links."""
    flips: dict[tuple[str, ...], int] = {langs: 1, langs[::-1]: -1}
    for source in sources:
        if source.langs not in flips:
            raise UserError(
                f"{source.directory} holds {'-'.join(source.langs)}, but --out is for {'-'.join(langs)}; remove this "
                f"directory from the command"
            )
    pairs, first, second = Counter[Entry](), Counter[str](), Counter[str]()
    for source, records in read_shards(sources):
        flip = flips[source.langs]
        for record in map(source.with_words, records):
            if record.links is None:
                continue
            (a, a_is_word), (b, b_is_word) = split([text.lower() for text in record.texts[::flip]])
            first.update(compress(a, a_is_word))
            second.update(compress(b, b_is_word))
            for link in record.links.split():
                i, j = (int(end) for end in link.split("-")[::flip])
                if a_is_word[i] and b_is_word[j]:
                    pairs[a[i], b[j]] += 1
    if not pairs:
        names = ", ".join(str(source.directory) for source in sources)
        raise UserError(f"{names}: no word links; write the shards with `--links F` or `--align`")
    return pairs, first, second


def read_shards(sources: list[Source]) -> Iterator[tuple[Source, list[Record]]]:
    """Yield (source, the records of a shard) for each shard of each source."""
    for source in sources:
        for number, shard in enumerate(source.shards):
            yield source, [source.read(number, record) for record in range(shard.records)]


def commonest_forms(sources: list[Source], langs: tuple[str, str]) -> dict[str, Forms]:
    """Return each language's commonest spelling of each word. Raises UserError if a language has no text."""
    absent = set(langs) - {lang for source in sources for lang in source.langs}
    if absent:
        raise UserError(f"--truecase has no text in {', '.join(sorted(absent))}; add shards that have some")
    counts: dict[str, Counter[str]] = {lang: Counter() for lang in langs}
    for source, records in read_shards(sources):
        for side, lang in enumerate(source.langs):
            if lang in counts:
                counts[lang] += count_words([[record.texts[side] for record in records]])
    return {lang: commonest(of_lang) for lang, of_lang in counts.items()}


def induce_entries(pairs: Counter, first: Counter, second: Counter, min_count: int, min_share: float) -> list[Entry]:
    """Return the word pairs that are linked at least `min_count` times, and in at least the share `min_share` of the
    occurrences of the pair's more frequent word. The most frequent pairs come first."""
    kept = [(a, b) for (a, b), n in pairs.items() if n >= min_count and n >= min_share * max(first[a], second[b])]
    return sorted(kept, key=lambda entry: (-pairs[entry], entry))


def sample_entries(entries: list[Entry], share: float, seed: int) -> list[Entry]:
    """Return, in their order, all entries of round(share * n) of the n words of the first language: those with the
    smallest hashes. Spellings that differ only in case are one word."""
    words = sorted({same_word(word) for word, _ in entries}, key=lambda word: int(rng.key(seed, "lexicon", word)))
    chosen = set(words[: round(share * len(words))])
    return [entry for entry in entries if same_word(entry[0]) in chosen]


def filter_entries(
    entries: list[Entry], args: argparse.Namespace, langs: tuple[str, str], forms: dict[str, Forms]
) -> tuple[list[Entry], list[str]]:
    """Return the entries that pass the options, without duplicates, and a line of the report about each option. forms:
    the spellings that --truecase applies."""
    report = [f"{len(entries):,} entries"]

    def keep(what: str, kept: list[Entry]) -> None:
        nonlocal entries
        report.append(f"{len(kept):,} {what}")
        entries = kept

    if args.lower:
        entries = [(a.lower(), b.lower()) for a, b in entries]
    entries, changed = truecased(entries, langs, forms)
    if forms:
        report.append(f"{changed:,} changed to their spelling in the text")
    keep("distinct", list(dict.fromkeys(entries)))
    if args.drop_identical:
        keep("of two different words", [(a, b) for a, b in entries if a != b])
    if args.min_length > 1:
        keep(f"of {args.min_length} characters or more", [e for e in entries if min(map(len, e)) >= args.min_length])
    if args.intersect:
        other = set(read_oriented(args.intersect, langs))
        if args.lower:
            other = {(a.lower(), b.lower()) for a, b in other}
        keep(f"in {args.intersect} too", [entry for entry in entries if entry in other])
    if args.share is not None:
        kept = sample_entries(entries, args.share, args.seed)
        words, all_words = (len({same_word(word) for word, _ in some}) for some in (kept, entries))
        keep(f"of {words:,} words sampled from {all_words:,} ({args.share:g}, seed {args.seed})", kept)
    if args.tokenizer:
        tokenizer = Tokenizer(args.tokenizer.absolute())
        sides = [tokenizer.encode_inside([entry[side] for entry in entries]) for side in (0, 1)]
        unknown = sum(tokenizer.unknown_share(list(ids)) > 0 for ids in zip(*sides, strict=True))
        report.append(f"{unknown:,} of them with unknown tokens, which training with {args.tokenizer} leaves out")
    return entries, report


def write_entries(entries: list[Entry], out: Path) -> None:
    """Write one entry per line, `source target`. If a side has several words, a tab separates the sides."""
    lines = [("\t" if any(len(side.split()) > 1 for side in entry) else " ").join(entry) + "\n" for entry in entries]
    files.write_text(out, "".join(lines))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    parser.add_argument("--lower", action="store_true", help="lower-case every entry")
    parser.add_argument(
        "--truecase", type=Path, nargs="+", metavar="DIR", help="spell words as the text of these shards mostly does"
    )
    parser.add_argument("--tokenizer", type=Path, metavar="T", help="a tokenizer, to count entries with unknown tokens")
    parser.add_argument("--drop_identical", action="store_true", help="leave out a word that is its own translation")
    parser.add_argument("--min_length", type=int, default=1, help="the fewest characters of each side")
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
        entries = induce_entries(*count_links(sources, langs), args.min_count, args.min_share)
    else:
        entries = [entry for path in args.dict for entry in read_oriented(path, langs)]
    forms = commonest_forms(find_sources(args.truecase), langs) if args.truecase else {}
    entries, report = filter_entries(entries, args, langs, forms)
    if not entries:
        raise UserError(f"nothing to write to {args.out}: {', '.join(report)}")
    write_entries(entries, args.out)
    print(f"{args.out}: {', '.join(report)}")


if __name__ == "__main__":
    run(main)
