"""Derive a language from a text: in another script (trans), with inverted sentences (inv), with French syntax (syn).

    python benchmarks/papers/derive.py text --how inv --in en.txt --out xx.txt
    python benchmarks/papers/derive.py {text | conllu | ner | pairs} --how trans.inv --tokenizer T \\
        [--tokenizer_out T2] [--dictionary_out F] --in F ... --out F ...

text: plain lines; conllu: UD's sentences; ner: lines `token<TAB>BIO tag`; pairs: lines `a<TAB>b<TAB>label` with or
without a header, of which both sentences change. The languages are those of Tang et al. (2022). trans.inv inverts
first.

inv: the words of each sentence in reverse order, except that a final . ! or ? stays last. Inverting twice restores the
text.
trans: each id of the WordPiece tokenizer T, except special tokens, becomes id + V, where T has V ids. T2 has the tokens
of both languages. The dictionary has a line `id<TAB>id + V` for each shifted id.
syn: the words of each parsed sentence in an order sampled by the counts of a French treebank. For files other than
CoNLL-U, --conllu gives the parses of their sentences in the same order. Sentences whose arcs cross stay as they are.

Tags stay with their words; an entity whose words are separated becomes several entities. A sampled order depends only
on --seed and the sentence, so that text, tags and pairs of one sentence have the same order.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from conllu import Column, Sentence, blocks_between_blank_lines, read_sentences
from script import Script
from word_order import french_order, invert_text, inverted_order

from data_tools.command import run
from xscale import files
from xscale.data.text import read_lines
from xscale.errors import UserError

HOW = ("inv", "trans", "syn", "trans.inv", "trans.syn")
_BATCH = 1000
_SENTENCES = ("sentence1", "premise", "sentence2", "hypothesis", "hypo")
"""The names that a header may give to the two sentences of a pair."""


class Derivation:
    """Derives one sentence after the other: changes its word order and its script."""

    def __init__(self, how: str, script: Script | None, parses: Path | None, seed: int):
        self.order = how.removeprefix("trans").removeprefix(".")
        self.script = script
        self.parses = read_sentences(parses) if parses else None
        self.seed = seed
        self.sentence_count = 0
        self.crossing_count = 0
        """The number of sentences that stay as they are, because arcs of their parses cross."""

    def map_texts(self, texts: list[str]) -> list[str]:
        """Return the texts in the script of the derived language."""
        return self.script.map_texts(texts) if self.script else texts

    def map_words(self, words: list[str]) -> list[str]:
        """Return the words in the script of the derived language, each mapped by itself."""
        return self.script.map_words(words) if self.script else words

    def reordered_text(self, line: str, where: str) -> str:
        """Return a line of text with its words in the new order. where: the line's file and number, for errors."""
        if self.order == "inv":
            return invert_text(line)
        if self.order != "syn":
            return line
        words: list[str] = []
        for place, parse in self.parses_of(line, where):
            words += [parse.units[number].form for number in self.french_order(parse, place)]
        return " ".join(words)

    def french_order(self, sentence: Sentence, where: str) -> list[int]:
        """Return the numbers of a parse's units in French order. A multiword token goes where its first word goes."""
        unit_of_word: list[int] = []
        for number, unit in enumerate(sentence.units):
            unit_of_word += [number] * len(unit.words)
        for row in sentence.words:
            head = row[Column.HEAD]
            if not head.isdigit() or int(head) > len(unit_of_word):
                raise UserError(f"{where}: the head of {row[Column.FORM]!r} is {head!r}; --how syn needs a number")
        self.sentence_count += 1
        order = french_order(sentence.words, self.seed)
        if order is None:
            self.crossing_count += 1
            return [*range(len(sentence.units))]
        return [*dict.fromkeys(unit_of_word[word] for word in order)]

    def parses_of(self, text: str, where: str) -> list[tuple[str, Sentence]]:
        """Return (place, parse) of the next parses of --conllu, as many as cover the text. Raises UserError if their
        characters differ from the text's."""
        assert self.parses is not None
        rest = without_spaces(text)
        parses = []
        while rest:
            place, parse = next(self.parses, ("its end", Sentence([], [], [])))
            written = without_spaces("".join(unit.form for unit in parse.units))
            if not written or not rest.startswith(written):
                raise UserError(
                    f"{where}: the sentence is {rest[:40]!r}, but the parse at {place} of --conllu has the text "
                    f"{written[:40]!r}; give the parses of all sentences, in the same order"
                )
            parses.append((place, parse))
            rest = rest.removeprefix(written)
        return parses

    def french_order_of_words(self, words: list[str], where: str) -> list[int]:
        """Return the numbers of a sentence's words in French order. If --conllu divides the sentence into other words,
        a word moves with its first character."""
        word_of_character: list[int] = []
        for number, word in enumerate(words):
            word_of_character += [number] * len(without_spaces(word))
        order: list[int] = []
        start = 0
        for place, parse in self.parses_of("".join(words), where):
            words_of_unit = []
            for unit in parse.units:
                end = start + len(without_spaces(unit.form))
                words_of_unit.append(word_of_character[start:end])
                start = end
            for unit_number in self.french_order(parse, place):
                order += words_of_unit[unit_number]
        return [*dict.fromkeys(order)]


def without_spaces(text: str) -> str:
    return "".join(text.split())


def derive_text(path: Path, derivation: Derivation) -> Iterator[str]:
    lines = read_lines(path)
    while batch := [*islice(lines, _BATCH)]:
        reordered = [derivation.reordered_text(line, f"{path}: line {number}") for number, line in batch]
        yield "".join(f"{line}\n" for line in derivation.map_texts(reordered))


def derive_pairs(path: Path, derivation: Derivation) -> Iterator[str]:
    columns: list[int] = []
    for number, line in read_lines(path):
        fields = line.split("\t")
        if not columns:
            columns = [column for column, name in enumerate(fields) if name in _SENTENCES]
            if columns:
                yield line + "\n"
                continue
            columns = [0, 1]
        where = f"{path}: line {number}"
        if len(fields) <= max(columns):
            raise UserError(f"{where} has {len(fields)} column(s); a pair is `sentence<TAB>sentence<TAB>label`")
        for column in columns:
            (fields[column],) = derivation.map_texts([derivation.reordered_text(fields[column], where)])
        yield "\t".join(fields) + "\n"


def derive_ner(path: Path, derivation: Derivation) -> Iterator[str]:
    for first, block in blocks_between_blank_lines(read_lines(path)):
        words: list[str] = []
        tags: list[str] = []
        for number, line in enumerate(block, start=first):
            word, _, tag = line.partition("\t")
            if not word.strip() or not tag.strip() or "\t" in tag:
                raise UserError(f"{path}: line {number}: {line!r} is not `token<TAB>tag`")
            words.append(word)
            tags.append(tag)
        entities = entity_starts(tags)
        order = [*range(len(words))]
        if derivation.order == "inv":
            order = inverted_order(words, {number for number, entity in enumerate(entities) if entity >= 0})
        elif derivation.order == "syn":
            order = derivation.french_order_of_words(words, f"{path}: line {first}")
        last_entity = -1
        for word, number in zip(derivation.map_words([words[number] for number in order]), order, strict=True):
            tag = tags[number]
            if entities[number] >= 0:
                tag = ("I" if entities[number] == last_entity else "B") + tag[1:]
            last_entity = entities[number]
            yield f"{word}\t{tag}\n"
        yield "\n"


def entity_starts(tags: list[str]) -> list[int]:
    """Return for each word the number of its entity's first word, or -1 outside entities. An I- tag that continues no
    entity begins a new one."""
    starts: list[int] = []
    for number, tag in enumerate(tags):
        if tag.startswith("I-") and number > 0 and tags[number - 1][1:] == tag[1:]:
            starts.append(starts[-1])
        elif tag.startswith(("B-", "I-")):
            starts.append(number)
        else:
            starts.append(-1)
    return starts


def derive_conllu(path: Path, derivation: Derivation) -> Iterator[str]:
    for where, sentence in read_sentences(path):
        order = [*range(len(sentence.units))]
        if derivation.order == "inv":
            order = inverted_order([unit.form for unit in sentence.units])
        elif derivation.order == "syn":
            order = derivation.french_order(sentence, where)
        yield sentence.reordered(order, derivation.map_words)


KINDS: dict[str, Callable[[Path, Derivation], Iterator[str]]] = {
    "text": derive_text,
    "conllu": derive_conllu,
    "ner": derive_ner,
    "pairs": derive_pairs,
}


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("kind", choices=KINDS, help="what the files hold")
    add("--how", choices=HOW, required=True, help="the language; trans.inv and trans.syn change the word order first")
    add("--overlap", type=float, default=0.0, metavar="SHARE", help="trans: share of the ids left as they are (0)")
    add("--tokenizer", type=Path, metavar="DIR", help="trans: the WordPiece tokenizer whose ids are doubled")
    add("--seed", type=int, default=0, help="the seed of --overlap and syn")
    add("--conllu", type=Path, metavar="F", help="syn: CoNLL-U with the parses of all sentences of --in")
    add("--dictionary_out", type=Path, metavar="F", help="trans: file to write `id<TAB>id` to")
    add("--tokenizer_out", type=Path, metavar="DIR", help="trans: where to write the tokenizer of both languages")
    add("--in", type=Path, nargs="+", required=True, dest="sources", metavar="F", help="files, plain, .gz or .xz")
    add("--out", type=Path, nargs="+", required=True, metavar="F", help="a file to write for each of --in")
    return parser.parse_args(words)


def check_options(args: argparse.Namespace) -> None:
    """Raise UserError if an option is missing or an output cannot be written."""
    if len(args.sources) != len(args.out):
        raise UserError(f"--in has {len(args.sources)} files and --out {len(args.out)}; give one --out for each --in")
    trans = args.how.startswith("trans")
    if trans and not args.tokenizer:
        raise UserError(f"--how {args.how} shifts the ids of a WordPiece tokenizer; name its folder by --tokenizer DIR")
    needs_parses = args.how.endswith("syn") and args.kind != "conllu"
    if needs_parses and not args.conllu:
        raise UserError(f"--how {args.how} needs the parses of {args.sources[0]}; name their file by --conllu F")
    for path in [*args.out, *filter(None, [args.dictionary_out, args.tokenizer_out])]:
        if path.exists():
            raise UserError(f"{path} exists; choose another place or remove it")
        files.check_writable(path)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    check_options(args)
    script = Script(args.tokenizer, args.overlap, args.seed) if args.how.startswith("trans") else None
    derivation = Derivation(args.how, script, args.conllu, args.seed)
    for source, out in zip(args.sources, args.out, strict=True):
        with files.publish(out) as partial, partial.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(KINDS[args.kind](source, derivation))
        print(f"{out}: {args.how} of {source}")
    if derivation.parses:
        for place, _ in derivation.parses:
            raise UserError(f"{place}: --conllu has a parse beyond the end of --in; give only the parses of --in")
    if derivation.order == "syn":
        crossing = f"{derivation.crossing_count:,} of {derivation.sentence_count:,} sentences"
        print(f"{crossing} have crossing arcs and stay as they are")
    if script:
        if args.dictionary_out:
            files.write_text(args.dictionary_out, script.dictionary())
        if args.tokenizer_out:
            script.save_doubled(args.tokenizer_out)
        print(f"{len(script.shifted):,} of {script.size:,} ids are shifted by {script.size:,}")


if __name__ == "__main__":
    run(main)
