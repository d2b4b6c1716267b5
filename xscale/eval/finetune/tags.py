"""Tags words: with parts of speech (UD's .conllu files) and named entities (PAN-X's lines `word<TAB>tag`).

A word's tag is predicted from its first token. A long sentence is cut between words into several sequences, so that
every word has a prediction.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.eval.bootstrap import class_scores, entity_scores
from xscale.eval.finetune.examples import LabelledExample, column_value, count_labels, is_table, read_table
from xscale.eval.finetune.training import IGNORED, Feature, Reads, SequenceMaker, Task

UPOS = "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X".split()  # noqa: SIM905
"""Universal parts of speech (UD v2)."""
BIO = r"O|[BI]-.+"
"""The form of entities' tags."""
WORDS = ("tokens", "words")
TAGS = ("upos", "ner_tags", "pos_tags", "tags")
"""The names that a table's columns of words and of tags may have."""
WITHHELD = "its words are withheld (each is `_`); get the text from the treebank's makers"
"""Why a sentence is left out that has no words, as in UD's treebanks of LDC's and Twitter's text."""


class TaggedWord(NamedTuple):
    line: str
    word: str
    tag: str


@dataclass(frozen=True)
class Tagging(Task):
    form: str = BIO
    """The pattern of all tags."""
    reads: ClassVar[Reads] = "tokens"

    def read(self, path: Path, language: str) -> list[LabelledExample]:
        examples = []
        for sentence in read_rows(path) if is_table(path) else read_sentences(path):
            for line, word, tag in sentence:
                if not re.fullmatch(self.form, tag):
                    raise UserError(f"{path}: line {line}: the tag {tag!r} of {word!r} is none of {self.form}; fix it")
            lines, words, tags = zip(*sentence, strict=True)
            left_out = WITHHELD if set(words) == {"_"} else ""
            examples.append(LabelledExample(lines[0], (language,), words, tags, left_out))
        if not examples:
            raise UserError(f"{path} has no sentence; give another file")
        return examples

    def list_labels(self, examples: list[LabelledExample]) -> list[str]:
        """Return O, and B-TYPE and I-TYPE of each type of entity in the examples."""
        types = {tag[2:] for tag in count_labels(examples) if tag != "O"}
        labels = ["O"]
        for name in sorted(types):
            labels += [f"B-{name}", f"I-{name}"]
        return labels

    def encode(self, examples: list[LabelledExample], maker: SequenceMaker, labels: list[str] | None) -> list[Feature]:
        pieces = word_pieces(maker, examples)
        features = []
        for number, example in enumerate(examples):
            for start, end in word_windows([len(pieces[word]) for word in example.texts], maker.room(1)):
                ids: list[int] = []
                positions = []
                for word in example.texts[start:end]:
                    positions.append(1 + len(ids))
                    ids += pieces[word]
                label_of_token = None
                if labels:
                    label_of_token = [IGNORED] * (len(ids) + 2)
                    for position, tag in zip(positions, example.gold[start:end], strict=True):
                        label_of_token[position] = labels.index(tag)
                inputs = maker.join([ids], example.languages)
                features.append(Feature(number, inputs, label_of_token, positions, list(range(start, end))))
        return features

    def predict(
        self, examples: list[LabelledExample], features: list[Feature], outputs: np.ndarray, labels: list[str]
    ) -> list[list[str]]:
        predictions = [[""] * len(example.texts) for example in examples]
        for feature, logits_LC in zip(features, outputs, strict=True):
            indices = logits_LC[feature.positions].argmax(1)
            for word, index in zip(feature.units, indices, strict=True):
                predictions[feature.example][word] = labels[index]
        return predictions

    def score(self, examples: list[LabelledExample], predictions: list[list[str]], language: str) -> dict[str, float]:
        """Return F1, precision and recall of whole entities by the rules of seqeval and conlleval."""
        from seqeval.metrics.sequence_labeling import get_entities

        counts = []
        for example, tags in zip(examples, predictions, strict=True):
            gold = set(get_entities(example.labels))
            predicted = set(get_entities(tags))
            counts.append((len(gold & predicted), len(predicted), len(gold)))
        return entity_scores(np.array(counts))


class PartsOfSpeech(Tagging):
    def list_labels(self, examples: list[LabelledExample]) -> list[str]:
        return UPOS

    def score(self, examples: list[LabelledExample], predictions: list[list[str]], language: str) -> dict[str, float]:
        """Return the accuracy of words, which is F1 over all tags, and the mean of the gold tags' F1."""
        labels = sorted(count_labels(examples))
        return class_scores([example.labels for example in examples], predictions, labels)


def read_rows(path: Path) -> Iterator[list[TaggedWord]]:
    """Yield the sentences of a table. Raises UserError."""
    for key, row in read_table(path):
        where = f"{path}: line {key}"
        words = column_value(row, WORDS, where)
        tags = column_value(row, TAGS, where)
        if len(words) != len(tags):
            raise UserError(f"{where} has {len(words)} words and {len(tags)} tags; fix it")
        if words:
            yield [TaggedWord(key, word, str(tag)) for word, tag in zip(words, tags, strict=True)]


def read_sentences(path: Path) -> Iterator[list[TaggedWord]]:
    """Yield the sentences of a .conllu file, or of a file of lines `word<TAB>tag`. A blank line ends a sentence."""
    is_conllu = ".conllu" in path.suffixes
    sentence: list[TaggedWord] = []
    for number, line in read_lines(path):
        fields = line.split("\t" if "\t" in line else " ")
        if not line.strip():
            if sentence:
                yield sentence
            sentence = []
        elif is_conllu and not line.startswith("#"):
            if len(fields) != 10:
                raise UserError(f"{path}: line {number} has {len(fields)} columns; CoNLL-U has 10, with tabs between")
            if fields[0] == "1" and sentence:
                raise UserError(f"{path}: line {number} begins a sentence; put a blank line before it")
            if fields[0].isdigit():  # not a range of words as in 1-2, or an empty node as in 1.1
                sentence.append(TaggedWord(str(number), fields[1], fields[3]))
        elif not is_conllu and not line.startswith("-DOCSTART-"):
            if len(fields) < 2 or not fields[0].strip():
                raise UserError(f"{path}: line {number} has no word or no tag; write `word<TAB>tag`")
            sentence.append(TaggedWord(str(number), fields[0], fields[-1].strip()))
    if sentence:
        yield sentence


def word_pieces(maker: SequenceMaker, examples: list[LabelledExample]) -> dict[str, list[int]]:
    """Return {word: its token ids inside a sentence, cut off at the length of a sequence}. A word that the tokenizer
    drops is unknown (or [MASK])."""
    tokenizer = maker.tokenizer
    dropped = tokenizer.hf.unk_token_id
    if dropped is None:
        dropped = tokenizer.mask_id
    distinct: set[str] = set()
    for example in examples:
        distinct.update(example.texts)
    words = sorted(distinct)
    pieces = {}
    for word, ids in zip(words, tokenizer.encode_inside(words), strict=True):
        pieces[word] = ids[: maker.room(1)] or [dropped]
    return pieces


def word_windows(lengths: list[int], room: int) -> Iterator[tuple[int, int]]:
    """Yield (first word, end) of windows, each as long as `room` tokens allow. lengths: the tokens of each word."""
    start = 0
    size = 0
    for word, length in enumerate(lengths):
        if size + length > room:
            yield start, word
            start = word
            size = 0
        size += length
    yield start, len(lengths)


POS = PartsOfSpeech(epochs=10, lr=2e-5, form="|".join(UPOS))
NER = Tagging(epochs=10, lr=2e-5)
