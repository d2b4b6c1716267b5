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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from xscale.data.scripts import short_code
from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.eval.bootstrap import bootstrap
from xscale.eval.finetune.examples import BLANK, LabelledExample, Row, is_table, read_table
from xscale.eval.finetune.training import Feature, SequenceMaker

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
class QuestionAnswering:
    mlqa: bool
    """Whether answers are compared by MLQA's rules instead of SQuAD's."""
    epochs: int = 2
    lr: float = 3e-5
    max_length: int = 386

    def read(self, path: Path, language: str) -> list[LabelledExample]:
        examples: dict[str, LabelledExample] = {}
        for number, row in read_table(path) if is_table(path) else _read_squad(path):
            where = f"{path}: question {row.get('id', number)!r}"
            example = _make_example(row, language, where)
            if example.key in examples:
                raise UserError(f"{where} occurs twice; give each question an id of its own")
            examples[example.key] = example
        if not examples:
            raise UserError(f"{path} has no question; give another file")
        return list(examples.values())

    def list_labels(self, examples: list[LabelledExample]) -> list[str]:
        return []

    def encode(self, examples: list[LabelledExample], maker: SequenceMaker, labels: list[str] | None) -> list[Feature]:
        pair = maker.tokenizer.pair
        contexts = maker.tokenizer.backend.encode_batch([e.texts[1] for e in examples], add_special_tokens=False)
        questions = maker.tokenizer.encode([example.texts[0] for example in examples])
        features = []
        for number, example in enumerate(examples):
            question = questions[number][: min(MAX_QUESTION, maker.room(2) // 2)]
            before = len(pair.first) + len(question) + len(pair.between)
            context = contexts[number]
            for start, end in context_windows(len(context.ids), maker.room(2) - len(question)):
                inputs = maker.join([question, context.ids[start:end]], example.languages)
                spans = context.offsets[start:end]
                targets = {}
                if labels is not None:
                    answer = answer_tokens(example, spans)
                    targets["start_positions"] = before + answer[0] if answer else 0
                    targets["end_positions"] = before + answer[-1] if answer else 0
                positions = list(range(before, before + len(spans)))
                features.append(Feature(number, inputs, targets, positions, spans))
        return features

    def load_head(self, path: Path, maker: SequenceMaker, labels: list[str]) -> nn.Module:
        return transformers.AutoModelForQuestionAnswering.from_pretrained(path, num_labels=2, dtype=torch.float32)

    def predict(
        self, examples: list[LabelledExample], features: list[Feature], outputs: Any, labels: list[str]
    ) -> list[str]:
        """Return each example's answer: the span with the greatest sum of both logits over all its sequences."""
        answers = [""] * len(examples)
        best = [-np.inf] * len(examples)
        for feature, first_L, last_L in zip(features, outputs[0], outputs[1], strict=True):
            if feature.positions:
                total, first, last = best_span(first_L[feature.positions], last_L[feature.positions])
                if total > best[feature.example]:
                    best[feature.example] = total
                    start = feature.units[first][0]
                    end = feature.units[last][1]
                    answers[feature.example] = examples[feature.example].texts[1][start:end].strip()
        return answers

    def score(self, examples: list[LabelledExample], predictions: list[str], language: str) -> dict[str, float]:
        """Return the means over questions of the F1 of words and of exact match, by the best of several answers."""
        counts = []
        for example, prediction in zip(examples, predictions, strict=True):
            answer = self.normalize(prediction, language)
            gold = [self.normalize(text, language) for text, _ in example.gold]
            counts.append((max(f1(answer, text) for text in gold), answer in gold))

        def scores_of(sums: np.ndarray) -> dict[str, np.ndarray]:
            return {"f1": sums[..., 0] / len(counts), "exact_match": sums[..., 1] / len(counts)}

        return bootstrap(np.array(counts, dtype=float), scores_of)

    def normalize(self, text: str, language: str) -> str:
        """Return the answer in lower case, without punctuation and articles: of SQuAD's rules ASCII's and English ones,
        of MLQA's all of Unicode's and the language's own; MLQA's rules set Chinese characters apart."""
        code = short_code(language) if self.mlqa else "en"
        letters = []
        for letter in text.lower():
            if letter not in string.punctuation and not (self.mlqa and unicodedata.category(letter)[0] == "P"):
                letters.append(letter)
        kept = "".join(letters)
        if code in ARTICLES:
            kept = re.sub(ARTICLES[code], " ", kept)
        if code == "zh":
            kept = HAN.sub(r" \1 ", kept)
        return " ".join(kept.split())


def _read_squad(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield (number, columns) of each question of SQuAD's JSON. Raises UserError."""
    text = "\n".join(line for _, line in read_lines(path))
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


def _make_example(row: Row, language: str, where: str) -> LabelledExample:
    """Return the example of a question. Raises UserError if a field is missing or wrong, or an answer stands elsewhere
    in the context."""
    try:
        texts = (row["question"], row["context"])
        answers = row["answers"]
        if isinstance(answers, dict):  # as `datasets` has it
            gold = list(zip(answers["text"], answers["answer_start"], strict=True))
        else:
            gold = [(answer["text"], answer["answer_start"]) for answer in answers]
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


def best_span(first_L: np.ndarray, last_L: np.ndarray, longest: int = MAX_ANSWER) -> tuple[float, int, int]:
    """Return the greatest first_L[i] + last_L[j] with i <= j < i + longest, and its i and j."""
    sums_LL = first_L[:, None] + last_L
    ones_LL = np.ones_like(sums_LL)
    sums_LL[np.triu(ones_LL) == np.triu(ones_LL, longest)] = -np.inf
    first, last = divmod(int(sums_LL.argmax()), len(first_L))
    return float(sums_LL[first, last]), first, last


def f1(prediction: str, gold: str) -> float:
    """Return the F1 of the words of two normalised answers; 0 if they share no word, even if both are empty."""
    predicted = prediction.split()
    wanted = gold.split()
    shared = (Counter(predicted) & Counter(wanted)).total()
    return 2 * shared / (len(predicted) + len(wanted)) if shared else 0.0


XQUAD = QuestionAnswering(mlqa=False)
MLQA = QuestionAnswering(mlqa=True)
