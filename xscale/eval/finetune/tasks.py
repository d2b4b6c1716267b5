"""The tasks of fine-tuning: sentences and pairs of sentences, tags of words, questions about a context.

A word's tag is predicted from the word's first token. A long sentence is cut between words, and a long context into
parts that overlap, so that every word and every answer is in some sequence. A question's answer is a span of the
context: the model scores each token as the first and as the last token of the span. In training, a part of a context
without the answer has [CLS] as the first and the last token.
"""

import re
import string
import unicodedata
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from xscale.data.scripts import short_code
from xscale.errors import UserError
from xscale.eval.bootstrap import accuracy, bootstrap, entity_scores
from xscale.eval.finetune.examples import (
    LabelledExample,
    LabelledFile,
    Row,
    column_value,
    count_labels,
    is_table,
    read_squad,
    read_tab_separated,
    read_table,
    read_tagged_sentences,
)
from xscale.eval.finetune.training import IGNORED, Feature, Reads, SequenceMaker

PAPERS_WIDTH = 768
"""The hidden width of the encoders for which the papers chose their learning rates."""
SENTENCE = (("text", "sentence"),)
PAIR = (("premise", "sentence1"), ("hypothesis", "sentence2"))
"""The names that the column of each text may have."""
LABEL = ("label", "gold_label", "category")
SYNONYMS = {"contradictory": "contradiction"}
"""{label in XNLI's translated training text: the same label in XNLI's other files}."""
NO_AGREEMENT = "-"
"""MultiNLI's label for pairs on which its annotators did not agree."""
NO_LABEL = (None, "", -1, "-1")
"""The values that stand for a missing label; `datasets` uses -1."""
BLANK = "a sentence is blank"
"""The reason to leave out a row without text, such as a failed translation in PAWS-X's training text."""
WITHHELD = "its words are withheld (each is `_`); get the text from the treebank's makers"
"""The reason to leave out a sentence without words, as in UD's treebanks of text from LDC and Twitter."""
UPOS = "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X".split()  # noqa: SIM905
"""Universal parts of speech (UD v2)."""
BIO = r"O|[BI]-.+"
"""The pattern of the tags of entities."""
WORDS = ("tokens", "words")
TAGS = ("upos", "ner_tags", "pos_tags", "tags")
"""The names that a table's columns of words and of tags may have."""
MAX_QUESTION = 64
"""BERT's maximum number of tokens of a question."""
STRIDE = 128
"""BERT's number of tokens from the start of one part of a context to the start of the next."""
MAX_ANSWER = 30
"""BERT's maximum number of tokens of an answer."""
ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": "ال",
}
"""{two-letter code: pattern of the language's articles}; MLQA's other languages, hi and zh, have no articles."""
HAN = re.compile("([\u4e00-\u9fa5])")
"""The Chinese characters that MLQA's rules take for words."""


@dataclass(frozen=True)
class Task(ABC):
    """The base class of the tasks. `epochs`, `lr` and `max_length` are the papers' values for encoders of base size.

    Each task also has three methods. `encode` returns the sequences of examples; its `labels` are the outputs of the
    head, or None for prediction. `predict` returns the label, the tags or the answer of each example, given the logits
    of each sequence. `score` returns the scores in a language, the main score first.
    """

    epochs: int
    lr: float
    max_length: int = 128
    reads: ClassVar[Reads]
    unit: ClassVar[str] = "line"

    def default_lr(self, width: int) -> float:
        """Return the learning rate for an encoder of a hidden width. A smaller encoder gets a larger rate."""
        return self.lr * max(1.0, PAPERS_WIDTH / width)

    def read(self, path: Path, language: str, limit: int | None = None) -> LabelledFile:
        """Return the examples of a file. Rows in another language are skipped. limit: the maximum number of examples.
        Raises UserError."""
        examples: dict[str, LabelledExample] = {}
        for key, row in read_table(path) if is_table(path) else self.read_rows(path):
            if short_code(row.get("language", language)) == short_code(language):
                where = f"{path}: {self.unit} {key}"
                example = self.make_example(key, row, language, where)
                if example.key in examples:
                    raise UserError(f"{where} occurs twice; give each {self.unit} an id of its own")
                examples[example.key] = example
        file = LabelledFile(path, list(examples.values())[:limit])
        if not file.examples:
            reasons = " ".join(file.left_out_lines())
            raise UserError(f"{path} has no example in {language}; give another file. {reasons}".rstrip())
        return file

    @abstractmethod
    def read_rows(self, path: Path) -> Iterator[tuple[str, Row]]:
        """Yield (key, columns) of each row of a file that is not a table. Raises UserError."""

    @abstractmethod
    def make_example(self, key: str, row: Row, language: str, where: str) -> LabelledExample:
        """Return the example of a row. where: the row's place, for errors. Raises UserError."""

    def list_labels(self, examples: list[LabelledExample]) -> list[str]:
        """Return the labels that a head predicts after training on these examples; [] for questions."""
        return sorted(count_labels(examples))


@dataclass(frozen=True)
class Classification(Task):
    columns: tuple[tuple[str, ...], ...] = PAIR
    reads: ClassVar[Reads] = "sequence"

    def read_rows(self, path: Path) -> Iterator[tuple[str, Row]]:
        return read_tab_separated(path, (*self.columns, LABEL))

    def make_example(self, key: str, row: Row, language: str, where: str) -> LabelledExample:
        texts = tuple(column_value(row, names, where) for names in self.columns)
        for text in texts:
            if not isinstance(text, str):
                raise UserError(f"{where}: a column of sentences has {text!r} instead of text; correct or remove it")
        label = column_value(row, LABEL, where)
        left_out = ""
        if label == NO_AGREEMENT:
            left_out = "its annotators did not agree on a label"
        elif not all(map(str.strip, texts)):
            left_out = BLANK
        elif label in NO_LABEL:
            raise UserError(f"{where} has no label; give a file with a label in each line")
        label = SYNONYMS.get(str(label), str(label))
        return LabelledExample(key, (language,) * len(texts), texts, label, left_out)

    def encode(self, examples: list[LabelledExample], maker: SequenceMaker, labels: list[str] | None) -> list[Feature]:
        features = []
        for number, example in enumerate(examples):
            inputs = maker.join(maker.tokenizer.encode(list(example.texts)), example.languages)
            features.append(Feature(number, inputs, labels.index(example.gold) if labels else None))
        return features

    def predict(
        self, examples: list[LabelledExample], features: list[Feature], outputs: np.ndarray, labels: list[str]
    ) -> list[str]:
        predictions = [""] * len(examples)
        for feature, logits_C in zip(features, outputs, strict=True):
            predictions[feature.example] = labels[logits_C.argmax()]
        return predictions

    def score(self, examples: list[LabelledExample], predictions: list[str], language: str) -> dict[str, float]:
        """Return the accuracy."""
        gold = [example.labels for example in examples]
        return accuracy(gold, [[label] for label in predictions])


@dataclass(frozen=True)
class Tagging(Task):
    form: str = BIO
    """The pattern of all tags."""
    reads: ClassVar[Reads] = "tokens"

    def read_rows(self, path: Path) -> Iterator[tuple[str, Row]]:
        return read_tagged_sentences(path)

    def make_example(self, key: str, row: Row, language: str, where: str) -> LabelledExample:
        words = tuple(column_value(row, WORDS, where))
        tags = tuple(map(str, column_value(row, TAGS, where)))
        if len(words) != len(tags):
            raise UserError(f"{where} has {len(words)} words and {len(tags)} tags; give a tag for each word")
        for word, tag in zip(words, tags, strict=True):
            if not re.fullmatch(self.form, tag):
                raise UserError(f"{where}: the tag {tag!r} of {word!r} must match {self.form}; correct it")
        return LabelledExample(key, (language,), words, tags, WITHHELD if set(words) == {"_"} else "")

    def list_labels(self, examples: list[LabelledExample]) -> list[str]:
        """Return O, and B-TYPE and I-TYPE of each type of entity in the examples."""
        types = {tag[2:] for tag in count_labels(examples) if tag != "O"}
        labels = ["O"]
        for name in sorted(types):
            labels += [f"B-{name}", f"I-{name}"]
        return labels

    def encode(self, examples: list[LabelledExample], maker: SequenceMaker, labels: list[str] | None) -> list[Feature]:
        features = []
        for number, example in enumerate(examples):
            ids_of_words = word_token_ids(maker, example.texts)
            for start, end in word_windows(list(map(len, ids_of_words)), maker.room_inside(1)):
                ids: list[int] = []
                positions = []
                for word_ids in ids_of_words[start:end]:
                    positions.append(1 + len(ids))
                    ids += word_ids
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
        """Return the accuracy of words, which is F1 over all tags."""
        return accuracy([example.labels for example in examples], predictions)


def word_token_ids(maker: SequenceMaker, words: tuple[str, ...]) -> list[list[int]]:
    """Return the token ids of each word of a sentence, at most as many as a sequence has room for. A word that the
    tokenizer drops becomes the unknown token or, without one, [MASK]."""
    tokenizer = maker.tokenizer
    unknown = tokenizer.hf.unk_token_id
    if unknown is None:
        unknown = tokenizer.mask_id
    return [ids[: maker.room_inside(1)] or [unknown] for ids in tokenizer.encode_inside(list(words))]


def word_windows(token_counts: list[int], room: int) -> Iterator[tuple[int, int]]:
    """Yield (first word, end) of successive parts of a sentence, each with as many words as fit into `room` tokens.
    token_counts: the number of tokens of each word."""
    start = 0
    size = 0
    for word, count in enumerate(token_counts):
        if size + count > room:
            yield start, word
            start = word
            size = 0
        size += count
    yield start, len(token_counts)


@dataclass(frozen=True)
class QuestionAnswering(Task):
    mlqa: bool = False
    """True: answers are compared by the rules of MLQA (Lewis et al. 2020); False: by those of SQuAD 1.1 (Rajpurkar et
    al. 2016). Both put answers in lower case and remove punctuation and articles. MLQA's rules depend on the
    language."""
    reads: ClassVar[Reads] = "span"
    unit: ClassVar[str] = "question"

    def read_rows(self, path: Path) -> Iterator[tuple[str, Row]]:
        return read_squad(path)

    def make_example(self, key: str, row: Row, language: str, where: str) -> LabelledExample:
        texts = (column_value(row, ("question",), where), column_value(row, ("context",), where))
        answers = column_value(row, ("answers",), where)
        if not isinstance(answers, dict) or not {"text", "answer_start"} <= answers.keys():
            raise UserError(f"{where}: answers must have the lists text and answer_start, as in `datasets`' SQuAD")
        gold = list(zip(answers["text"], answers["answer_start"], strict=True))
        if not gold:
            raise UserError(f"{where} has no answer; remove questions without answers, which are not in SQuAD 1.1")
        for text, first in gold:
            if not texts[1].startswith(text, first):
                raise UserError(
                    f"{where}: the answer {text!r} is not at answer_start {first}; give the number of characters "
                    f"before the answer"
                )
        left_out = "" if all(map(str.strip, texts)) else BLANK
        return LabelledExample(str(row.get("id", key)), (language, language), texts, gold, left_out)

    def list_labels(self, examples: list[LabelledExample]) -> list[str]:
        return []

    def encode(self, examples: list[LabelledExample], maker: SequenceMaker, labels: list[str] | None) -> list[Feature]:
        tokenizer = maker.tokenizer
        features = []
        for number, example in enumerate(examples):
            (question,) = tokenizer.encode([example.texts[0]])
            question = question[: min(MAX_QUESTION, maker.room_inside(2) // 2)]
            context = tokenizer.backend.encode(example.texts[1], add_special_tokens=False)
            before = len(tokenizer.pair.first) + len(question) + len(tokenizer.pair.between)
            for start, end in context_windows(len(context.ids), maker.room_inside(2) - len(question)):
                spans = context.offsets[start:end]
                span = None
                if labels is not None:
                    answer = answer_tokens(example, spans)
                    span = [before + answer[0], before + answer[-1]] if answer else [0, 0]
                inputs = maker.join([question, context.ids[start:end]], example.languages)
                features.append(Feature(number, inputs, span, list(range(before, before + len(spans))), spans))
        return features

    def predict(
        self, examples: list[LabelledExample], features: list[Feature], outputs: np.ndarray, labels: list[str]
    ) -> list[str]:
        """Return each example's answer. It is the span with the greatest sum of both logits in all sequences of the
        example."""
        answers = [""] * len(examples)
        best = [-np.inf] * len(examples)
        for feature, logits_L2 in zip(features, outputs, strict=True):
            if feature.positions:
                span = best_span(logits_L2[feature.positions])
                if span.score > best[feature.example]:
                    best[feature.example] = span.score
                    start = feature.units[span.first][0]
                    end = feature.units[span.last][1]
                    answers[feature.example] = examples[feature.example].texts[1][start:end].strip()
        return answers

    def score(self, examples: list[LabelledExample], predictions: list[str], language: str) -> dict[str, float]:
        """Return the means over questions of the F1 of words and of exact match. A prediction is compared with each
        gold answer, and the best result counts."""
        scores_S2 = []
        for example, prediction in zip(examples, predictions, strict=True):
            answer = self.normalize_answer(prediction, language)
            gold = [self.normalize_answer(text, language) for text, _ in example.gold]
            scores_S2.append((max(map(partial(word_f1, answer), gold)), answer in gold))

        def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
            means = sums / len(scores_S2)
            return {"f1": means[..., 0], "exact_match": means[..., 1]}

        return bootstrap(np.array(scores_S2, dtype=float), scores_of)

    def normalize_answer(self, text: str, language: str) -> str:
        """Return the answer in lower case, without punctuation and articles. SQuAD's rules remove ASCII punctuation and
        English articles. MLQA's rules remove all punctuation of Unicode and the language's own articles, and make each
        Chinese character a word."""
        code = short_code(language) if self.mlqa else "en"
        letters = []
        for letter in text.lower():
            is_mark = letter in string.punctuation or (self.mlqa and unicodedata.category(letter).startswith("P"))
            if not is_mark:
                letters.append(letter)
        kept = "".join(letters)
        if code in ARTICLES:
            kept = re.sub(ARTICLES[code], " ", kept)
        if code == "zh":
            kept = HAN.sub(r" \1 ", kept)
        return " ".join(kept.split())


def context_windows(tokens: int, room: int) -> Iterator[tuple[int, int]]:
    """Yield (first token, end) of overlapping parts of a context. Each part has at most `room` tokens. tokens: the
    number of tokens of the context."""
    start = 0
    while start + room < tokens:
        yield start, start + room
        start += min(STRIDE, max(room // 2, 1))
    yield start, tokens


def answer_tokens(example: LabelledExample, spans: list[tuple[int, int]]) -> list[int]:
    """Return the indices of the tokens of the first gold answer; [] if a part of the context lacks some of the answer.
    spans: the characters (first, end) of each token of the part."""
    text, first = example.gold[0]
    end = first + len(text)
    if not spans or spans[0][0] > first or spans[-1][1] < end:
        return []
    return [index for index, span in enumerate(spans) if span[0] < end and span[1] > first]


class Span(NamedTuple):
    score: float
    first: int
    last: int


def best_span(logits_L2: np.ndarray, longest: int = MAX_ANSWER) -> Span:
    """Return the span with the greatest logits_L2[first, 0] + logits_L2[last, 1], where first <= last < first +
    longest."""
    sums_LL = logits_L2[:, :1] + logits_L2[:, 1]
    lengths_LL = np.arange(len(sums_LL)) - np.arange(len(sums_LL))[:, None]
    sums_LL[(lengths_LL < 0) | (lengths_LL >= longest)] = -np.inf
    first, last = np.unravel_index(sums_LL.argmax(), sums_LL.shape)
    return Span(float(sums_LL[first, last]), int(first), int(last))


def word_f1(prediction: str, gold: str) -> float:
    """Return the F1 of the words of two normalised answers; 0 if they share no word, even if both are empty."""
    predicted = prediction.split()
    wanted = gold.split()
    shared = (Counter(predicted) & Counter(wanted)).total()
    return 2 * shared / (len(predicted) + len(wanted)) if shared else 0.0


AnyTask = Classification | Tagging | QuestionAnswering
TASKS: dict[str, AnyTask] = {
    "xnli": Classification(epochs=2, lr=5e-5, columns=PAIR),
    "pawsx": Classification(epochs=2, lr=5e-5, columns=PAIR),
    "sentences": Classification(epochs=10, lr=2e-5, columns=SENTENCE),
    "pos": PartsOfSpeech(epochs=10, lr=2e-5, form="|".join(UPOS)),
    "ner": Tagging(epochs=10, lr=2e-5),
    "xquad": QuestionAnswering(epochs=2, lr=3e-5, max_length=386),
    "mlqa": QuestionAnswering(epochs=2, lr=3e-5, max_length=386, mlqa=True),
}
