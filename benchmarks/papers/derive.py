"""Derive a language from a text: in another script (trans), with inverted sentences (inv), with French syntax (syn).

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
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from conllu import Column, Row, Sentence, blocks_between_blank_lines, read_sentences
from script import Script

from data_tools.command import run_tool_and_exit
from xscale import files, rng
from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.strict_yaml import parse_yaml

SENTENCES = ("sentence1", "premise", "sentence2", "hypothesis", "hypo")
"""The names that a header may give to the two sentences of a pair."""
END = re.compile(r"[.!?][.!?\"'”’»)\]]*$")
"""Matches punctuation that ends a sentence, as a word or at the end of the last word."""
END_WORD = re.compile(r"[.!?]+")
MOST_DEPENDENTS = 6
"""If a head has more dependents than this, they keep their order (Wang and Eisner 2016)."""
FRENCH: dict[str, dict[str, list[int]]] = parse_yaml(
    Path(__file__).with_name("french.yaml").read_text(encoding="utf-8")
)
"""Counts in a French treebank: the head's part of speech -> the dependent's relation, with PRON if the dependent is a
pronoun -> [number of dependents before their head, number of all dependents]."""


# Word orders. An order is a list of the words' indices, in their new order.


def invert_text(line: str) -> str:
    """Return the line with the words of each sentence in reverse order. Final punctuation stays at the end."""
    inverted: list[str] = []
    sentence: list[str] = []
    for word in line.split():
        end = END.search(word)
        start = word[: end.start()] if end else word
        if start:
            sentence.insert(0, start)
        if end:
            if start:
                sentence[-1] += end.group()
            else:
                sentence.append(end.group())
            inverted += sentence
            sentence = []
    return " ".join(inverted + sentence)


def inverted_order(words: Sequence[str], entity_words: Collection[int] = ()) -> list[int]:
    """Return the order that reverses each sentence. A word that consists of . ! or ? ends a sentence and stays last,
    unless its index is in `entity_words`, the words of named entities."""
    order: list[int] = []
    sentence: list[int] = []
    for number, word in enumerate(words):
        if END_WORD.fullmatch(word) and number not in entity_words:
            order += [*sentence, number]
            sentence = []
        else:
            sentence.insert(0, number)
    return order + sentence


def french_order(words: Sequence[Row], seed: int) -> list[int]:
    """Return a sampled order in which the dependents of nouns, pronouns and verbs precede their heads as often as in
    French. A dependent that changes sides goes next to its head. A sentence whose arcs cross keeps its order. words:
    the columns of the words of a sentence."""
    heads = [int(word[Column.HEAD]) - 1 for word in words]
    order = [*range(len(words))]
    if linearized(heads, lambda head, number: number < head) != order:
        return order
    chances = rng.uniform(rng.key(seed, "syn", *(word[Column.FORM] for word in words)), np.array(order))
    dependents = Counter(heads)

    def is_before(head: int, number: int) -> bool:
        relation = words[number][Column.DEPREL].partition(":")[0]
        if words[number][Column.UPOS] == "PRON":
            relation += " PRON"
        counts = FRENCH.get(words[head][Column.UPOS], {}).get(relation)
        if counts is None or dependents[head] > MOST_DEPENDENTS:
            return number < head
        before, both = counts
        return bool(chances[number] < before / both)

    return linearized(heads, is_before)


def linearized(heads: Sequence[int], is_before: Callable[[int, int], bool]) -> list[int]:
    """Return the order of the words below the roots if `is_before(head, dependent)` says on which side of its head each
    dependent goes. Among the dependents that change sides, too, the nearest to the head stays the nearest. heads: the
    index of each word's head; -1 for a root."""
    dependents: dict[int, list[int]] = defaultdict(list)
    for number, head in enumerate(heads):
        dependents[head].append(number)

    def phrase(head: int) -> list[int]:
        before: list[int] = []
        behind: list[int] = []
        for number in dependents[head]:
            (before if is_before(head, number) else behind).append(number)
        before.sort(key=lambda number: (number > head, -abs(number - head)))
        behind.sort(key=lambda number: (number > head, abs(number - head)))
        return [*phrases(before), head, *phrases(behind)]

    def phrases(numbers: list[int]) -> list[int]:
        words = []
        for number in numbers:
            words += phrase(number)
        return words

    return phrases(dependents[-1])


class Derivation:
    """Derives one sentence after the other: changes its word order and its script."""

    def __init__(self, how: str, script: Script | None, parses: Path | None, seed: int):
        self.order = how.removeprefix("trans").removeprefix(".")
        self.script = script
        self.parses = read_sentences(parses) if parses else iter(())
        self.seed = seed

    def text(self, line: str, where: str) -> str:
        """Return a line of text in the derived language. where: the line's file and number, for errors."""
        if self.order == "inv":
            line = invert_text(line)
        elif self.order == "syn":
            words, order = self.parsed(line, where)
            line = " ".join(words[number] for number in order)
        return self.script.map_text(line) if self.script else line

    def word(self, word: str) -> str:
        return self.script.map_word(word) if self.script else word

    def french_order(self, sentence: Sentence) -> list[int]:
        """Return the numbers of a parse's units in French order. A multiword token goes where its first word goes."""
        words = sentence.words()
        for _, row in words:
            head = row[Column.HEAD]
            if not head.isdecimal() or int(head) > len(words):
                raise UserError(f"{sentence.place}: the head of {row[Column.FORM]!r} is {head!r}, not a word's number")
        order = french_order([row for _, row in words], self.seed)
        return [*dict.fromkeys(words[number][0] for number in order)]

    def parsed(self, text: str, where: str) -> tuple[list[str], list[int]]:
        """Return the words of a text, as the next parses of --conllu divide it, and their French order. Raises
        UserError if the characters of the parses differ from the text's."""
        words: list[str] = []
        order: list[int] = []
        rest = without_spaces(text)
        while rest:
            parse = next(self.parses, Sentence("its end", [], [], []))
            written = without_spaces("".join(parse.forms))
            if not written or not rest.startswith(written):
                raise UserError(
                    f"{where}: the sentence is {rest[:40]!r}, but the parse at {parse.place} of --conllu has the text "
                    f"{written[:40]!r}; give the parses of all sentences, in the same order"
                )
            order += [len(words) + number for number in self.french_order(parse)]
            words += parse.forms
            rest = rest.removeprefix(written)
        return words, order


def without_spaces(text: str) -> str:
    return "".join(text.split())


def derive_text(path: Path, derivation: Derivation) -> Iterator[str]:
    for number, line in read_lines(path):
        yield derivation.text(line, f"{path}: line {number}") + "\n"


def derive_pairs(path: Path, derivation: Derivation) -> Iterator[str]:
    columns: list[int] = []
    for number, line in read_lines(path):
        fields = line.split("\t")
        if not columns:
            columns = [column for column, name in enumerate(fields) if name in SENTENCES]
            if columns:
                yield line + "\n"
                continue
            columns = [0, 1]
        where = f"{path}: line {number}"
        if len(fields) <= max(columns):
            raise UserError(f"{where} has {len(fields)} column(s); a pair is `sentence<TAB>sentence<TAB>label`")
        for column in columns:
            fields[column] = derivation.text(fields[column], where)
        yield "\t".join(fields) + "\n"


def derive_ner(path: Path, derivation: Derivation) -> Iterator[str]:
    for lines in blocks_between_blank_lines(path):
        where = f"{path}: line {lines[0][0]}"
        words: list[str] = []
        tags: list[str] = []
        for number, line in lines:
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
            parsed_words, order = derivation.parsed("".join(words), where)
            if parsed_words != words:
                raise UserError(f"{where}: --conllu divides the sentence into other words than the tags")
        last_entity = -1
        for number in order:
            tag = tags[number]
            if entities[number] >= 0:
                tag = ("I" if entities[number] == last_entity else "B") + tag[1:]
            last_entity = entities[number]
            yield f"{derivation.word(words[number])}\t{tag}\n"
        yield "\n"


def entity_starts(tags: list[str]) -> list[int]:
    """Return for each word the number of its entity's first word, or -1 outside entities. An I- tag that continues no
    entity begins a new one."""
    starts: list[int] = []
    for number, tag in enumerate(tags):
        if tag.startswith("I-") and number > 0 and tags[number - 1][1:] == tag[1:]:
            starts.append(starts[-1])
        else:
            starts.append(number if tag.startswith(("B-", "I-")) else -1)
    return starts


def derive_conllu(path: Path, derivation: Derivation) -> Iterator[str]:
    for sentence in read_sentences(path):
        order = [*range(len(sentence.units))]
        if derivation.order == "inv":
            order = inverted_order(sentence.forms)
        elif derivation.order == "syn":
            order = derivation.french_order(sentence)
        yield sentence.reordered(order, derivation.word)


KINDS: dict[str, Callable[[Path, Derivation], Iterator[str]]] = {
    "text": derive_text,
    "conllu": derive_conllu,
    "ner": derive_ner,
    "pairs": derive_pairs,
}


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """Raises UserError if an option is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("kind", choices=KINDS, help="what the files hold")
    how = ("inv", "trans", "syn", "trans.inv", "trans.syn")
    add("--how", choices=how, required=True, help="the language; trans.inv and trans.syn change the word order first")
    add("--overlap", type=float, default=0.0, metavar="SHARE", help="trans: share of unshifted ids (default: 0)")
    add("--tokenizer", type=Path, metavar="DIR", help="trans: the WordPiece tokenizer whose ids are shifted")
    add("--seed", type=int, default=0, help="the seed of --overlap and syn")
    add("--conllu", type=Path, metavar="F", help="syn: CoNLL-U with the parses of all sentences of --in")
    add("--dictionary_out", type=Path, metavar="F", help="trans: file to write lines `id<TAB>id` to")
    add("--tokenizer_out", type=Path, metavar="DIR", help="trans: where to write the tokenizer of both languages")
    add(
        "--in",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        dest="sources",
        metavar="F",
        help="files, plain, .gz or .xz",
    )
    add(
        "--out",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        metavar="F",
        help="a file to write for each of --in",
    )
    args = parser.parse_args(words)
    if len(args.sources) != len(args.out):
        raise UserError(f"--in has {len(args.sources)} files and --out {len(args.out)}; give one --out for each --in")
    if args.how.startswith("trans") and not args.tokenizer:
        raise UserError(f"--how {args.how} shifts the ids of a WordPiece tokenizer; name its folder by --tokenizer DIR")
    if args.how.endswith("syn") and args.kind != "conllu" and not args.conllu:
        raise UserError(f"--how {args.how} needs the parses of {args.sources[0]}; name their file by --conllu F")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    script = Script(args.tokenizer, args.overlap, args.seed) if args.how.startswith("trans") else None
    derivation = Derivation(args.how, script, args.conllu, args.seed)
    for source, out in zip(args.sources, args.out, strict=True):
        with files.atomic_write(out) as partial, partial.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(KINDS[args.kind](source, derivation))
        print(f"{out}: {args.how} of {source}")
    if script:
        if args.dictionary_out:
            files.write_text(args.dictionary_out, script.dictionary())
        if args.tokenizer_out:
            script.save_doubled(args.tokenizer_out)
        print(f"{len(script.shifted):,} of {script.size:,} ids are shifted by {script.size:,}")


if __name__ == "__main__":
    run_tool_and_exit(main)
