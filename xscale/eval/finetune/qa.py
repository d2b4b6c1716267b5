"""Answers questions by a span of the context (SQuAD, XQuAD, MLQA).

The model scores each token of `[CLS] question [SEP] context` as the answer's first and as its last token. A long
context is cut into several sequences that overlap; in a sequence without the answer, [CLS] is the gold first and last
token. Files are SQuAD's JSON, version 1.1, in which every question has an answer, or tables with SQuAD's columns.

Answers are compared by the rules of SQuAD 1.1 (Rajpurkar et al. 2016) or of MLQA (Lewis et al. 2020). Both lower-case
them and remove punctuation and articles, but only MLQA's rules depend on the language.
"""

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from xscale.data.scripts import short_code
from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.eval.bootstrap import bootstrap
from xscale.eval.finetune.examples import BLANK, LabelledExample, Row, is_table, read_table
from xscale.eval.finetune.training import Feature, Reads, SequenceMaker, Task

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
class QuestionAnswering(Task):
    mlqa: bool = False
    """Whether answers are compared by MLQA's rules instead of SQuAD's."""
    reads: ClassVar[Reads] = "span"

    def read(self, path: Path, language: str) -> list[LabelledExample]:
        examples: dict[str, LabelledExample] = {}
        for number, row in read_table(path) if is_table(path) else read_squad(path):
            where = f"{path}: question {row.get('id', number)!r}"
            example = make_example(row, language, where)
            if example.key in examples:
                raise UserError(f"{where} occurs twice; give each question an id of its own")
            examples[example.key] = example
        if not examples:
            raise UserError(f"{path} has no question; give another file")
        return list(examples.values())

    def list_labels(self, examples: list[LabelledExample]) -> list[str]:
        return []

    def encode(self, examples: list[LabelledExample], maker: SequenceMaker, labels: list[str] | None) -> list[Feature]:
        tokenizer = maker.tokenizer
        questions = tokenizer.encode([example.texts[0] for example in examples])
        contexts = tokenizer.backend.encode_batch([example.texts[1] for example in examples], add_special_tokens=False)
        features = []
        for number, (example, question, context) in enumerate(zip(examples, questions, contexts, strict=True)):
            question = question[: min(MAX_QUESTION, maker.room(2) // 2)]
            before = len(tokenizer.pair.first) + len(question) + len(tokenizer.pair.between)
            for start, end in context_windows(len(context.ids), maker.room(2) - len(question)):
                spans = context.offsets[start:end]
                span = None
                if labels is not None:
                    answer = answer_tokens(example, spans)
                    span = [before + answer[0], before + answer[-1]] if answer else [0, 0]
                inputs = maker.join([question, context.ids[start:end]], example.languages)
                positions = list(range(before, before + len(spans)))
                features.append(Feature(number, inputs, span, positions, spans))
        return features

    def predict(
        self, examples: list[LabelledExample], features: list[Feature], outputs: np.ndarray, labels: list[str]
    ) -> list[str]:
        """Return each example's answer: the span with the greatest sum of both logits over all its sequences."""
        answers = [""] * len(examples)
        best = [-np.inf] * len(examples)
        for feature, logits_L2 in zip(features, outputs, strict=True):
            if not feature.positions:
                continue
            span = best_span(logits_L2[feature.positions])
            if span.score > best[feature.example]:
                best[feature.example] = span.score
                start = feature.units[span.first][0]
                end = feature.units[span.last][1]
                answers[feature.example] = examples[feature.example].texts[1][start:end].strip()
        return answers

    def score(self, examples: list[LabelledExample], predictions: list[str], language: str) -> dict[str, float]:
        """Return the means over questions of the F1 of words and of exact match, by the best of several answers."""
        scores_S2 = []
        for example, prediction in zip(examples, predictions, strict=True):
            answer = self.normalize(prediction, language)
            gold = [self.normalize(text, language) for text, _ in example.gold]
            scores_S2.append((max(map(partial(f1, answer), gold)), answer in gold))

        def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
            means = sums / len(scores_S2)
            return {"f1": means[..., 0], "exact_match": means[..., 1]}

        return bootstrap(np.array(scores_S2, dtype=float), scores_of)

    def normalize(self, text: str, language: str) -> str:
        """Return the answer in lower case, without punctuation and articles: of SQuAD's rules ASCII's and English ones,
        of MLQA's all of Unicode's and the language's own; MLQA's rules set Chinese characters apart."""
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


def read_squad(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield (number, columns) of each question of SQuAD's JSON. Raises UserError."""
    text = "\n".join(map(itemgetter(1), read_lines(path)))
    number = 0
    try:
        for article in json.loads(text)["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    number += 1
                    yield str(number), {"context": paragraph["context"]} | question
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path} has another form than SQuAD 1.1 after question {number} ({type(error).__name__}: {error}); give "
            f"JSON with data, paragraphs, context and qas"
        ) from None


def make_example(row: Row, language: str, where: str) -> LabelledExample:
    """Return the example of a question. Raises UserError if a field is missing or wrong, or an answer stands elsewhere
    in the context."""
    try:
        texts = (row["question"], row["context"])
        answers = row["answers"]
        if isinstance(answers, dict):  # as `datasets` has it
            gold = list(zip(answers["text"], answers["answer_start"], strict=True))
        else:
            gold = list(map(itemgetter("text", "answer_start"), answers))
        misplaced = [answer for answer in gold if not texts[1].startswith(*answer)]
        is_blank = not texts[0].strip() or not texts[1].strip()
        key = str(row["id"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{where} has another form than in SQuAD 1.1 ({type(error).__name__}: {error}); it needs id, question, "
            f"context, and answers with text and answer_start"
        ) from None
    if not gold:
        raise UserError(f"{where} has no answer; remove questions without answers, which SQuAD 1.1 does not have")
    if misplaced:
        raise UserError(
            f"{where}: the answer {misplaced[0][0]!r} is not at answer_start {misplaced[0][1]}; give the number of "
            f"characters before the answer"
        )
    return LabelledExample(key, (language, language), texts, gold, BLANK if is_blank else "")


def context_windows(tokens: int, room: int) -> Iterator[tuple[int, int]]:
    """Yield (first token, end) of overlapping parts of up to `room` tokens that cover a context's tokens."""
    start = 0
    while start + room < tokens:
        yield start, start + room
        start += min(STRIDE, max(room // 2, 1))
    yield start, tokens


def answer_tokens(example: LabelledExample, spans: list[tuple[int, int]]) -> list[int]:
    """Return the indices of the tokens of the first gold answer; [] if the spans do not cover all of it. spans: the
    characters (first, end) of each token of a part of the context."""
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


def f1(prediction: str, gold: str) -> float:
    """Return the F1 of the words of two normalised answers; 0 if they share no word, even if both are empty."""
    predicted = prediction.split()
    wanted = gold.split()
    shared = (Counter(predicted) & Counter(wanted)).total()
    return 2 * shared / (len(predicted) + len(wanted)) if shared else 0.0


XQUAD = QuestionAnswering(epochs=2, lr=3e-5, max_length=386)
MLQA = QuestionAnswering(epochs=2, lr=3e-5, max_length=386, mlqa=True)
