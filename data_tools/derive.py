"""Derive a language from a text: in another script (trans), with inverted sentences (inv), with French syntax (syn).

    python -m data_tools.derive text --how inv --in en.txt --out xx.txt
    python -m data_tools.derive {text | conllu | ner | pairs} --how trans.inv --tokenizer T [--tokenizer_out T2] \\
        [--dictionary_out F] --in F ... --out F ...

text: plain lines; conllu: UD's sentences with their tags and parses; ner: lines `token<TAB>BIO tag`; pairs: lines
`a<TAB>b<TAB>label` with or without a header, of which both sentences change. The languages are those of Tang et al.
(2022) and can be combined: trans.inv inverts first.

inv: the words of each sentence in reverse order, except that a final . ! or ? stays last. In plain lines, a word that
ends with one of these ends a sentence; in tagged text, a word that consists of them and belongs to no entity does.
Inverting twice restores the text.
trans: each id of the WordPiece tokenizer T, except special tokens, becomes id + V, where T has V ids: the text is
written in letters that T does not have, and T2 has the tokens of both languages. The dictionary has a line
`id<TAB>id + V` for each token that has a copy. --overlap leaves a share of the ids as they are.
syn: the words of each parsed sentence in an order sampled by the counts of a French treebank (word_order.py). For files
other than CoNLL-U, --conllu gives the parses of their sentences in the same order; the new lines are made of the words
of the parses. Sentences whose arcs cross stay as they are.

Tags stay with their words; an entity whose words are separated becomes several entities. A sampled order depends only
on --seed and the sentence, so that text, tags and pairs of one sentence have the same order.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from xscale import files
from xscale.data.text import read_lines
from xscale.errors import UserError

from .command import run
from .conllu import Sentence, blocks_between_blank_lines, check_heads, read_sentences
from .script import Script
from .word_order import french_order, invert_text, inverted_order

HOW = ("inv", "trans", "syn", "trans.inv", "trans.syn")
"""The values of --how: changes of the word order (inv, syn), of the script (trans), or of both."""
_BATCH = 1000
_SENTENCES = ("sentence1", "premise", "sentence2", "hypothesis", "hypo")
"""The names that a header may give to the two sentences of a pair."""


class Derivation:
    """Derives one sentence after the other: changes its word order and its script, as --how says."""

    def __init__(self, args: argparse.Namespace):
        self.order: str = args.how.removeprefix("trans").strip(".")
        self.script = Script(args.tokenizer, args.overlap, args.seed) if args.how.startswith("trans") else None
        self.seed: int = args.seed
        self.parses = read_sentences(args.conllu) if args.conllu else None
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
        if self.order == "syn":
            parses = self.next_parses(line, where)
            return " ".join(parse.units()[n][0] for place, parse in parses for n in self.french_order(parse, place))
        return line

    def french_order(self, sentence: Sentence, where: str) -> list[int]:
        """Return the indices of a parse's units (words and multiword tokens) in French order. A multiword token goes
        where its first word goes."""
        check_heads(sentence, where)
        order = french_order(sentence.parsed_words(), self.seed)
        self.sentence_count += 1
        self.crossing_count += order is None
        unit_of = {number: unit for unit, (_, numbers) in enumerate(sentence.units()) for number in numbers}
        return [*dict.fromkeys(unit_of[number] for number in order or range(len(sentence.words)))]

    def next_parses(self, text: str, where: str) -> list[tuple[str, Sentence]]:
        """Return (place, parse) of the next parses of --conllu, as many as cover the text. Raises UserError if their
        characters differ from the text's."""
        assert self.parses is not None
        left, found = "".join(text.split()), []
        while left:
            place, parse = next(self.parses, ("its end", None))
            written = "".join("".join(form.split()) for form, _ in parse.units()) if parse else ""
            if parse is None or not left.startswith(written):
                raise UserError(
                    f"{where}: the sentence is {left[:40]!r}, but the parse at {place} of --conllu has the text "
                    f"{written[:40]!r}; give the parses of all sentences, in the same order"
                )
            found.append((place, parse))
            left = left[len(written) :]
        return found

    def french_order_of_words(self, words: list[str], where: str) -> list[int]:
        """Return the indices of a sentence's words in French order. If --conllu divides the sentence into other words,
        a word moves with its first character."""
        word_of = [number for number, word in enumerate(words) for _ in "".join(word.split())]
        order: dict[int, None] = {}
        at = 0
        for place, parse in self.next_parses("".join(words), where):
            starts = [at, *(at := at + len("".join(form.split())) for form, _ in parse.units())]
            for unit in self.french_order(parse, place):
                order |= dict.fromkeys(word_of[starts[unit] : starts[unit + 1]])
        return [*order]


def derive_text(path: Path, derivation: Derivation) -> Iterator[str]:
    lines = read_lines(path)
    while batch := [
        derivation.reordered_text(line, f"{path}: line {number}") for number, line in islice(lines, _BATCH)
    ]:
        yield from (line + "\n" for line in derivation.map_texts(batch))


def derive_pairs(path: Path, derivation: Derivation) -> Iterator[str]:
    columns: list[int] = []
    for number, line in read_lines(path):
        fields = line.split("\t")
        if not columns:
            columns = [n for n, name in enumerate(fields) if name in _SENTENCES]
            if columns:
                yield line + "\n"
                continue
            columns = [0, 1]
        where = f"{path}: line {number}"
        if len(fields) <= max(columns):
            raise UserError(f"{where} has {len(fields)} column(s); a pair is `sentence<TAB>sentence<TAB>label`")
        texts = derivation.map_texts([derivation.reordered_text(fields[column], where) for column in columns])
        for column, text in zip(columns, texts, strict=True):
            fields[column] = text
        yield "\t".join(fields) + "\n"


def derive_ner(path: Path, derivation: Derivation) -> Iterator[str]:
    for first, block in blocks_between_blank_lines(read_lines(path)):
        rows = [line.split("\t") for line in block]
        wrong = next((n for n, row in enumerate(rows) if len(row) != 2 or not all(part.strip() for part in row)), None)
        if wrong is not None:
            raise UserError(f"{path}: line {first + wrong}: {block[wrong]!r} is not `token<TAB>tag`")
        words, tags = [row[0] for row in rows], [row[1] for row in rows]
        spans = entity_starts(tags)
        order = [*range(len(words))]
        if derivation.order == "inv":
            order = inverted_order(words, {number for number, span in enumerate(spans) if span >= 0})
        elif derivation.order == "syn":
            order = derivation.french_order_of_words(words, f"{path}: line {first}")
        moved = derivation.map_words([words[number] for number in order])
        last = -1
        for word, number in zip(moved, order, strict=True):
            prefix = "I" if spans[number] == last else "B"
            last = spans[number]
            yield f"{word}\t{tags[number] if last < 0 else prefix + tags[number][1:]}\n"
        yield "\n"


def entity_starts(tags: list[str]) -> list[int]:
    """Return for each word the index of its entity's first word, or -1 outside entities. An I- tag that continues no
    entity begins a new one."""
    spans: list[int] = []
    for number, tag in enumerate(tags):
        goes_on = tag.startswith("I-") and number > 0 and tags[number - 1][1:] == tag[1:]
        inside = tag.startswith(("B-", "I-"))
        spans.append(spans[-1] if goes_on else number if inside else -1)
    return spans


def derive_conllu(path: Path, derivation: Derivation) -> Iterator[str]:
    for where, sentence in read_sentences(path):
        units = sentence.units()
        order = [*range(len(units))]
        if derivation.order == "inv":
            order = inverted_order([form for form, _ in units])
        elif derivation.order == "syn":
            order = derivation.french_order(sentence, where)
        yield sentence.reordered_lines(order, derivation.map_words)


KINDS: dict[str, Callable[[Path, Derivation], Iterator[str]]] = {
    "text": derive_text,
    "conllu": derive_conllu,
    "ner": derive_ner,
    "pairs": derive_pairs,
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
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
    return parser.parse_args(argv)


def check_options(args: argparse.Namespace) -> None:
    """Raise UserError if the options contradict each other or an output cannot be written."""
    if len(args.sources) != len(args.out):
        raise UserError(f"--in has {len(args.sources)} files and --out {len(args.out)}; give one --out for each --in")
    trans, syn = args.how.startswith("trans"), args.how.endswith("syn")
    if trans and not args.tokenizer:
        raise UserError(f"--how {args.how} shifts the ids of a WordPiece tokenizer; name its folder by --tokenizer DIR")
    for name in ("overlap", "tokenizer", "dictionary_out", "tokenizer_out"):
        if getattr(args, name) and not trans:
            raise UserError(f"--{name} works only with --how trans, but --how is {args.how}; leave out --{name}")
    if syn and args.kind != "conllu" and not args.conllu:
        raise UserError(
            f"--how {args.how} needs the parses of {args.sources[0]}; name their CoNLL-U file by --conllu F"
        )
    if args.conllu and (not syn or args.kind == "conllu"):
        raise UserError(
            f"--conllu is only for text, ner and pairs with --how syn or trans.syn; leave it out for {args.kind} "
            f"--how {args.how}"
        )
    outputs = [*args.out, *filter(None, [args.dictionary_out, args.tokenizer_out])]
    for path in outputs:
        if path.exists():
            raise UserError(f"{path} exists; choose another place or remove it")
        files.check_writable(path)
    if len(set(map(Path.absolute, outputs))) < len(outputs):
        raise UserError(f"{' '.join(map(str, outputs))}: two outputs are one file; choose different ones")


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    check_options(args)
    derivation = Derivation(args)
    for source, out in zip(args.sources, args.out, strict=True):
        with files.publish(out) as partial, partial.open("w", encoding="utf-8", newline="\n") as file:
            for line in KINDS[args.kind](source, derivation):
                file.write(line)
        print(f"{out}: {args.how} of {source}")
    if derivation.parses and (rest := next(derivation.parses, None)):
        raise UserError(f"{rest[0]}: --conllu has a parse beyond the end of --in; give only the parses of --in")
    if derivation.order == "syn":
        crossing = f"{derivation.crossing_count:,} of {derivation.sentence_count:,} sentences"
        print(f"{crossing} have crossing arcs and stay as they are")
    if script := derivation.script:
        if args.dictionary_out:
            files.write_text(args.dictionary_out, script.dictionary())
        if args.tokenizer_out:
            script.save_doubled(args.tokenizer_out)
        print(f"{len(script.shifted):,} of {script.size:,} ids are shifted by {script.size:,}")


if __name__ == "__main__":
    run(main)
