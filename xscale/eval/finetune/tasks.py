"""The tasks of fine-tuning: sentences and pairs of sentences, tags of words, questions about a context.

A word's tag is predicted from the word's first token. A long sentence is cut between words, and a long context into
parts that overlap, so that every word and every answer is in some sequence. A question's answer is a span of the
context: the model scores each token as the first and as the last token of the span. In training, a part of a context
without the answer has [CLS] as the first and the last token.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import ClassVar

import numpy as np

from xscale.data.scripts import may_name_same_language, short_code
from xscale.errors import UserError
from xscale.eval.bootstrap import accuracy, entity_scores, scores_with_intervals
from xscale.eval.finetune.examples import (
    Columns,
    LabelledExample,
    LeftOut,
    Place,
    check_not_wikiann_or_germeval,
    column_value,
    print_on_rank_0,
    read_jsonl_or_parquet,
    read_squad,
    read_tab_separated,
    read_tagged_sentences,
    with_canonical_columns,
)
from xscale.eval.finetune.training import IGNORED, Feature, Reads, SequenceMaker
from xscale.eval.model import Scores

SYNONYMS = {"contradictory": "contradiction"}
"""{label in XNLI's translated training text: the same label in XNLI's other files}."""
NO_LABELS_OF_PAIRS = (-1, "-1", "-")
"""The values of a missing label of a pair of sentences: MultiNLI and SNLI have them for pairs on which their annotators
did not agree. For a single sentence, they are classes."""
UPOS = "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X".split()  # noqa: SIM905
"""Universal parts of speech (UD v2)."""
MAX_QUESTION = 64
"""BERT's maximum number of tokens of a question."""
STRIDE = 128
"""BERT's number of tokens from the start of one part of a context to the start of the next."""
MAX_ANSWER = 30
"""BERT's maximum number of tokens of an answer."""
MLQA_RULES = {
    "en": (r"\b(a|an|the)\b", " "),
    "es": (r"\b(un|una|unos|unas|el|la|los|las)\b", " "),
    "vi": (r"\b(của|là|cái|chiếc|những)\b", " "),
    "de": (r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b", " "),
    "ar": ("ال", " "),
    "zh": ("([\u4e00-\u9fa5])", r" \1 "),
}
"""{two-letter code: pattern, replacement}: articles are removed, and each Chinese character becomes a word."""


@dataclass(frozen=True)
class Task:
    """The base class of the tasks. `epochs`, `lr` and `max_length` are the papers' values for encoders of base size.

    Each task also has three methods. `read_rows_of_text_file` reads a file that is not a table. `make_example` returns
    the example of a row, and raises LeftOut, or UserError without the row's place. `encode` returns the sequences of an
    example; its `labels` are the outputs of the head.
    """

    epochs: int
    lr: float
    max_length: int = 128
    reads: ClassVar[Reads]

    def output_labels(self, examples: list[LabelledExample]) -> list[str]:
        """Return the labels that a head predicts after training on these examples; [] for questions."""
        return sorted(set(chain.from_iterable(example.labels for example in examples)))

    def predict(
        self, example: LabelledExample, features: list[Feature], logits: list[np.ndarray], labels: list[str]
    ) -> list[str]:
        """Return an example's label, its tags or its answer. logits: those of each of its sequences. Here the label of
        a sequence [C], or of each word's first token [L, C], is the one with the greatest logit."""
        predictions = []
        for feature, logits_LC in zip(features, map(np.atleast_2d, logits), strict=True):
            for index in logits_LC[feature.positions].argmax(1):
                predictions.append(labels[index])
        return predictions

    def score(self, examples: list[LabelledExample], predictions: list[list[str]], language: str) -> Scores:
        """Return the scores in a language, the main score first. Here it is the accuracy of labels."""
        return accuracy([example.labels for example in examples], predictions)


@dataclass(frozen=True)
class Classification(Task):
    columns: tuple[str, ...] = ("premise", "hypothesis")
    """The columns with text."""
    reads: ClassVar[Reads] = "sequence"

    def read_rows_of_text_file(self, path: Path) -> Iterator[tuple[Place, Columns]]:
        return read_tab_separated(path, (*self.columns, "label"))

    def make_example(self, row: Columns) -> LabelledExample:
        texts = tuple(column_value(row, name, str) for name in self.columns)
        label = column_value(row, "label", object)
        if not all(map(str.strip, texts)):
            raise LeftOut("a text is blank")  # such as a failed translation in PAWS-X's training text
        if label in (None, "") or (len(texts) == 2 and label in NO_LABELS_OF_PAIRS):
            raise LeftOut("the label is missing, or the annotators did not agree on a label")
        return LabelledExample(texts, (SYNONYMS.get(str(label), str(label)),))

    def encode(self, example: LabelledExample, maker: SequenceMaker, labels: list[str]) -> list[Feature]:
        ids = maker.tokenizer.encode(list(example.texts))
        inputs = maker.make_inputs(ids, example.languages)
        inputs["labels"] = [labels.index(example.labels[0])]
        is_cut = sum(map(len, ids)) > maker.max_ordinary_tokens(len(ids))
        return [Feature(inputs, [0], is_cut=is_cut)]


class Tagging(Task):
    reads: ClassVar[Reads] = "tokens"
    form: ClassVar[str]
    """The pattern of all tags."""
    read_rows_of_text_file = staticmethod(read_tagged_sentences)

    def make_example(self, row: Columns) -> LabelledExample:
        words = tuple(column_value(row, "tokens", list))
        tags = tuple(map(str, column_value(row, "tags", list)))
        if len(words) != len(tags):
            raise UserError(
                f"the number of words is {len(words)}, and that of tags {len(tags)}. Write one tag for each word"
            )
        for word, tag in zip(words, tags, strict=True):
            if not re.fullmatch(self.form, tag):
                raise UserError(
                    f"the tag {tag!r} of the word {word!r} does not match the pattern {self.form}. Correct the tag"
                )
        if set(words) == {"_"}:  # as in UD's treebanks of text from LDC and Twitter
            raise LeftOut(
                "every word of these sentences is `_`, as in a treebank that is distributed without text. Get the "
                "text from the authors of the treebank"
            )
        return LabelledExample(words, tags)

    def encode(self, example: LabelledExample, maker: SequenceMaker, labels: list[str]) -> list[Feature]:
        features = []
        tags = iter(example.labels)
        for words in cut_into_sequences(example.texts, maker):
            first_tokens = list(accumulate(map(len, words), initial=1))[:-1]
            inputs = maker.make_inputs([list(chain.from_iterable(words))], example.languages)
            inputs["labels"] = [IGNORED] * len(inputs["input_ids"])
            for position in first_tokens:
                inputs["labels"][position] = labels.index(next(tags))
            features.append(Feature(inputs, first_tokens))
        return features


class PartsOfSpeech(Tagging):
    form: ClassVar[str] = "|".join(UPOS)

    def output_labels(self, examples: list[LabelledExample]) -> list[str]:
        return UPOS


class Entities(Tagging):
    form: ClassVar[str] = r"O|[BI]-.+"

    def output_labels(self, examples: list[LabelledExample]) -> list[str]:
        """Return O, and B-TYPE and I-TYPE of each type of entity in the examples."""
        labels = ["O"]
        for name in sorted({tag[2:] for tag in super().output_labels(examples)} - {""}):
            labels += [f"B-{name}", f"I-{name}"]
        return labels

    def score(self, examples: list[LabelledExample], predictions: list[list[str]], language: str) -> Scores:
        """Return F1, precision and recall of whole entities by the rules of seqeval and conlleval."""
        from seqeval.metrics.sequence_labeling import get_entities

        counts_S3 = []
        for example, tags in zip(examples, predictions, strict=True):
            gold = set(get_entities(list(example.labels)))
            predicted = set(get_entities(tags))
            counts_S3.append((len(gold & predicted), len(predicted), len(gold)))
        return entity_scores(np.array(counts_S3))


def cut_into_sequences(words: tuple[str, ...], maker: SequenceMaker) -> list[list[list[int]]]:
    """Return successive parts of a sentence, each with as many words as fit into a sequence, as the token ids of each
    word. A word that the tokenizer drops becomes the unknown token or, without one, [MASK]."""
    unknown = maker.tokenizer.hf.unk_token_id
    if unknown is None:
        unknown = maker.tokenizer.mask_id
    room = maker.max_ordinary_tokens(1)
    parts: list[list[list[int]]] = [[]]
    for word_ids in maker.tokenizer.encode_inside_sentence(list(words)):
        ids = word_ids[:room] or [unknown]
        if sum(map(len, parts[-1])) + len(ids) > room:
            parts.append([])
        parts[-1].append(ids)
    return parts


@dataclass(frozen=True)
class QuestionAnswering(Task):
    mlqa: bool = False
    """True: answers are compared by the rules of MLQA (Lewis et al. 2020); False: by those of SQuAD 1.1 (Rajpurkar et
    al. 2016). Both put answers in lower case and remove punctuation and articles. MLQA's rules depend on the
    language."""
    reads: ClassVar[Reads] = "span"
    read_rows_of_text_file = staticmethod(read_squad)

    def make_example(self, row: Columns) -> LabelledExample:
        question = column_value(row, "question", str)
        context = column_value(row, "context", str)
        gold = column_value(row, "answers", dict)
        texts = column_value(gold, "text", list)
        starts = column_value(gold, "answer_start", list)
        if len(texts) != len(starts):
            raise UserError(
                f"the number of answers is {len(texts)}, and that of values of answer_start {len(starts)}. Write one "
                "answer_start for each answer"
            )
        answers = tuple(zip(texts, starts, strict=True))
        if not answers or not question.strip() or not context.strip():
            raise LeftOut("a text is blank, or the question has no answer")
        for text, first in answers:
            if text not in context:
                raise UserError(f"the context does not have the answer {text!r}. Correct the answer or the context")
            if not context.startswith(text, first):
                raise UserError(
                    f"the context does not have the answer {text!r} at answer_start {first}. Set answer_start to "
                    "the number of characters before the answer"
                )
        return LabelledExample((question, context), answers=answers)

    def encode(self, example: LabelledExample, maker: SequenceMaker, labels: list[str]) -> list[Feature]:
        features = []
        (whole_question,) = maker.tokenizer.encode([example.texts[0]])
        question = whole_question[: min(MAX_QUESTION, maker.max_ordinary_tokens(2) // 2)]
        is_cut = len(question) < len(whole_question)
        context = maker.tokenizer.backend.encode(example.texts[1], add_special_tokens=False)
        before = len(maker.templates[2].first) + len(question) + len(maker.templates[2].between)
        room = maker.max_ordinary_tokens(2) - len(question)
        stride = min(STRIDE, max(room // 2, 1))
        text, first = example.answers[0]
        answer = [
            index for index, span in enumerate(context.offsets) if span[0] < first + len(text) and span[1] > first
        ]
        for start in range(0, max(1, len(context.ids) - room + stride), stride):
            spans = context.offsets[start : start + room]
            inputs = maker.make_inputs([question, context.ids[start : start + room]], example.languages)
            inputs["labels"] = [0, 0]
            if answer and start <= answer[0] and answer[-1] < start + room:
                inputs["labels"] = [before + answer[0] - start, before + answer[-1] - start]
            features.append(Feature(inputs, list(range(before, before + len(spans))), spans, is_cut))
        return features

    def predict(
        self, example: LabelledExample, features: list[Feature], logits: list[np.ndarray], labels: list[str]
    ) -> list[str]:
        """Return the answer: the span with the greatest sum of both logits in all sequences of the example."""
        answer = ""
        best = -np.inf
        for feature, logits_L2 in zip(features, logits, strict=True):
            scores_LL = span_scores(logits_L2[feature.positions])
            if scores_LL.max(initial=-np.inf) > best:
                best = scores_LL.max()
                first, last = np.unravel_index(scores_LL.argmax(), scores_LL.shape)
                answer = example.texts[1][feature.spans[first][0] : feature.spans[last][1]].strip()
        return [answer]

    def score(self, examples: list[LabelledExample], predictions: list[list[str]], language: str) -> Scores:
        """Return the means over questions of the F1 of words and of exact match. A prediction is compared with each
        gold answer, and the best result counts."""
        scores_S2 = []
        for example, (prediction,) in zip(examples, predictions, strict=True):
            answer = self.normalize_answer(prediction, language)
            gold = [self.normalize_answer(text, language) for text, _ in example.answers]
            scores_S2.append((max(map(partial(word_f1, answer), gold)), answer in gold))
        return scores_with_intervals(
            np.array(scores_S2),
            lambda sums: {"f1": sums[..., 0] / len(scores_S2), "exact_match": sums[..., 1] / len(scores_S2)},
        )

    def normalize_answer(self, text: str, language: str) -> str:
        """Return the answer in lower case, without punctuation and articles. SQuAD's rules remove ASCII punctuation and
        English articles. MLQA's rules remove all punctuation of Unicode and the language's own articles, and make each
        Chinese character a word."""
        code = short_code(language) if self.mlqa else "en"
        kept = "".join(
            letter
            for letter in text.lower()
            if letter not in string.punctuation and not (self.mlqa and unicodedata.category(letter).startswith("P"))
        )
        if code in MLQA_RULES:
            kept = re.sub(*MLQA_RULES[code], kept)
        return " ".join(kept.split())


def span_scores(logits_L2: np.ndarray, longest: int = MAX_ANSWER) -> np.ndarray:
    """Return [L, L]: at [first, last] the score of a span, logits_L2[first, 0] + logits_L2[last, 1]. It is -inf unless
    first <= last < first + longest."""
    sums_LL = logits_L2[:, :1] + logits_L2[:, 1]
    is_span_LL = np.triu(np.tril(np.ones_like(sums_LL), longest - 1))
    return np.where(is_span_LL, sums_LL, -np.inf)


def word_f1(normalized_prediction: str, normalized_gold: str) -> float:
    """Return the F1 of the words of two normalised answers; 0 if they share no word, even if both are empty."""
    predicted = normalized_prediction.split()
    wanted = normalized_gold.split()
    shared = (Counter(predicted) & Counter(wanted)).total()
    return 2 * shared / max(len(predicted) + len(wanted), 1)


AnyTask = Classification | Tagging | QuestionAnswering
TASKS: dict[str, AnyTask] = {
    "xnli": Classification(epochs=2, lr=5e-5),
    "pawsx": Classification(epochs=2, lr=5e-5),
    "sentences": Classification(epochs=10, lr=2e-5, columns=("text",)),
    "pos": PartsOfSpeech(epochs=10, lr=2e-5),
    "ner": Entities(epochs=10, lr=2e-5),
    "xquad": QuestionAnswering(epochs=2, lr=3e-5, max_length=386),
    "mlqa": QuestionAnswering(epochs=2, lr=3e-5, max_length=386, mlqa=True),
}


def read_examples(task: AnyTask, path: Path, language: str, limit: int | None) -> list[LabelledExample]:
    """Return the examples of a file. Rows in another language are skipped. The number of rows that are left out is
    printed. limit: the maximum number of rows in the language. Raises UserError."""
    rows = task.read_rows_of_text_file(path)
    if path.is_dir() or {".jsonl", ".parquet"} & set(path.suffixes):
        rows = read_jsonl_or_parquet(path)
    examples: list[LabelledExample] = []
    reasons: Counter[str] = Counter()
    for place, columns in rows:
        try:
            row_language = column_value({"language": language} | columns, "language", str)
            if not may_name_same_language(row_language, language):
                continue
            example = task.make_example(with_canonical_columns(columns))
            examples.append(replace(example, languages=(language, language), path=path, place=place))
        except LeftOut as left_out:
            reasons[str(left_out)] += 1
        except UserError as error:
            raise UserError(f"{path}: {place}: {error}") from None
        if len(examples) + reasons.total() == limit:
            break
    for reason, count in reasons.items():
        print_on_rank_0(
            f"{path}: {count:,} of {len(examples) + reasons.total():,} examples are left out, because {reason}"
        )
    if not examples:
        raise UserError(
            f"{path} has no usable example in {language} (left-out examples: {reasons.total():,}). Use another file"
        )
    labels = [example.labels for example in examples]
    if isinstance(task, Classification) and examples[0].place == "line 1" and labels.count(labels[0]) == 1:
        print_on_rank_0(
            f"{path}: line 1 is an example with the label {labels[0][0]!r}, which no other line has. If line 1 is "
            f"a header with the names of the columns, replace line 1 by {'<TAB>'.join((*task.columns, 'label'))}"
        )
    if isinstance(task, Tagging):
        check_not_wikiann_or_germeval(path, [example.texts for example in examples])
    return examples
