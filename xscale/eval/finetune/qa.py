"""Answers questions by a span of the context (SQuAD, XQuAD, MLQA).

The model scores each token of `[CLS] question [SEP] context` as the answer's first and as its last token. A long
context is split into several sequences that overlap; in a sequence without the answer, [CLS] is the gold first and last
token. Files are SQuAD's JSON, version 1.1, in which every question has an answer, or local data sets with SQuAD's
columns.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval.bootstrap import bootstrap
from xscale.eval.finetune import squad
from xscale.eval.finetune.tables import column_value, is_table, read_rows
from xscale.eval.finetune.task import Feature, LabelledExample, Task

MAX_QUESTION, STRIDE, MAX_ANSWER = 64, 128, 30
"""BERT's values: the most tokens of a question, the tokens from window to window, the most tokens of an answer."""


def read(path: Path, language: str) -> list[LabelledExample]:
    examples: dict[str, LabelledExample] = {}
    for where, example in _read_table(path, language) if is_table(path) else _read_squad(path, language):
        if example.key in examples:
            raise UserError(f"{where}: the id occurs twice; give each question an id of its own")
        _check_answers(where, example)
        examples[example.key] = example
    if not examples:
        raise UserError(f"{path} has no question; give another file")
    return list(examples.values())


def _check_answers(where: str, example: LabelledExample) -> None:
    """Raise UserError if a field is empty or has a wrong type, or if an answer is not at its answer_start."""
    context, gold = example.texts[1], example.gold or ()
    texts = [*example.texts, *(text for text, _ in gold)]
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(start, int) for _, start in gold):
        raise UserError(
            f"{where}: question, context and answers must be text, and answer_start a whole number; fix them"
        )
    if not example.texts[0].strip() or not context.strip():
        raise UserError(f"{where}: question or context is empty; fix or remove it")
    for text, start in gold:
        if not text or context[start : start + len(text)] != text:
            actual = context[max(start, 0) : start + max(len(text), 1)]
            raise UserError(
                f"{where}: the answer {text!r} is not at answer_start {start}, where {actual!r} is; give "
                f"the number of characters before the answer"
            )


def _read_squad(path: Path, language: str) -> Iterator[tuple[str, LabelledExample]]:
    """Yield ("FILE: question ID" for errors, example) for each question of SQuAD's JSON."""
    json_path = "data"
    try:
        tree = json.loads("\n".join(line for _, line in read_lines(path)))
        for i, article in enumerate(tree["data"]):
            for j, paragraph in enumerate(article["paragraphs"]):
                json_path = f"data[{i}].paragraphs[{j}]"
                context = paragraph["context"]
                for k, question in enumerate(paragraph["qas"]):
                    json_path = f"data[{i}].paragraphs[{j}].qas[{k}]"
                    where = f"{path}: question {question['id']!r}"
                    yield where, _make_example(question, context, question.get("answers"), language, where)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        missing = f"has no {error}" if isinstance(error, KeyError) else "has another form than in SQuAD"
        raise UserError(
            f"{path}: {json_path} {missing}; give JSON of SQuAD 1.1, with data, paragraphs, context, qas, id, ..."
        ) from None


def _make_example(question: dict[str, Any], context: str, answers: Any, language: str, where: str) -> LabelledExample:
    gold = None
    if answers is not None:
        gold = tuple((answer["text"], answer["answer_start"]) for answer in answers)
        if not gold:
            raise UserError(f"{where} has no answer; remove questions without answers, which SQuAD 1.1 does not have")
    return LabelledExample(str(question["id"]), (language, language), (question["question"], context), gold)


def _read_table(path: Path, language: str) -> Iterator[tuple[str, LabelledExample]]:
    """Yield ("FILE: line N" for errors, example) for each row of a data set with SQuAD's columns."""
    for key, row in read_rows(path):
        where = f"{path}: line {key}"
        context, answers = column_value(row, ("context",), where), row.get("answers")
        if isinstance(answers, dict):
            both = zip(answers.get("text", ()), answers.get("answer_start", ()), strict=False)
            answers = [{"text": text, "answer_start": start} for text, start in both]
        question = {name: column_value(row, (name,), where) for name in ("id", "question")}
        yield where, _make_example(question, context, answers, language, where)


def encode(examples: list[LabelledExample], tokenizer: Tokenizer, max_length: int, labels: list[str]) -> list[Feature]:
    template = tokenizer.pair
    contexts = list(dict.fromkeys(example.texts[1] for example in examples))
    encodings = tokenizer.backend.encode_batch(contexts, add_special_tokens=False)
    encoded = dict(zip(contexts, encodings, strict=True))
    questions = tokenizer.encode([example.texts[0] for example in examples])
    features = []
    for i, (example, question) in enumerate(zip(examples, questions, strict=True)):
        whole = max_length - template.special
        question = question[: min(MAX_QUESTION, whole // 2)]
        context = encoded[example.texts[1]]
        ids, spans = np.array(context.ids, dtype=np.int32), np.array(context.offsets, dtype=np.int32).reshape(-1, 2)
        before = len(template.first) + len(question) + len(template.between)
        for start, end in context_windows(len(ids), whole - len(question)):
            positions = np.concatenate([[0], before + np.arange(end - start)])
            sides = np.array(question, dtype=np.int32), ids[start:end]
            answer = _answer_indices(example, spans[start:end])
            features.append(Feature(i, example.langs, sides, positions, answer, spans=spans[start:end]))
    return features


def context_windows(tokens: int, room: int) -> Iterator[tuple[int, int]]:
    """Yield (first token, end) of overlapping windows of up to `room` tokens that cover a context's tokens."""
    step = min(STRIDE, max(room // 2, 1))
    start = 0
    while start + room < tokens:
        yield start, start + room
        start += step
    yield start, tokens


def _answer_indices(example: LabelledExample, spans: np.ndarray) -> np.ndarray:
    """Return the indices in Feature.positions of the first and last token of the first gold answer; both are 0, which
    is [CLS], if the spans do not cover the whole answer. spans: the characters (first, end) of a window's tokens."""
    if not example.gold or not len(spans):
        return np.zeros(2, dtype=np.int64)
    text, start = example.gold[0]
    inside = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < start + len(text)))
    if not len(inside) or spans[0, 0] > start or spans[-1, 1] < start + len(text):
        return np.zeros(2, dtype=np.int64)
    return np.array([inside[0] + 1, inside[-1] + 1], dtype=np.int64)


def head_labels(features: list[Feature], length: int) -> dict[str, Tensor]:
    """Return the positions [B] of the answers' first and last tokens."""
    first, last = (torch.tensor([int(f.positions[f.labels[side]]) for f in features]) for side in (0, 1))
    return {"start_positions": first, "end_positions": last}


def token_logits(outputs: tuple[np.ndarray, np.ndarray], row: int, feature: Feature) -> np.ndarray:
    """Return the logits [S, 2] of each position as first and as last token. outputs: two arrays [features, L]."""
    return np.stack([logits[row, feature.positions] for logits in outputs[:2]], axis=1)


def predict(
    examples: list[LabelledExample], features: list[Feature], logits: list[np.ndarray], labels: list[str]
) -> list[str]:
    """Return each example's answer: the span with the greatest sum of first and last logit over all its features."""
    best = [(-np.inf, "")] * len(examples)
    for feature, logits_S2 in zip(features, logits, strict=True):
        assert feature.spans is not None
        if len(feature.spans):
            total, first, last = best_span(logits_S2[1:])
            if total > best[feature.example_index][0]:
                start, end = feature.spans[first, 0], feature.spans[last, 1]
                best[feature.example_index] = total, examples[feature.example_index].texts[1][start:end].strip()
    return [text for _, text in best]


def best_span(logits_L2: np.ndarray, max_length: int = MAX_ANSWER) -> tuple[float, int, int]:
    """Return the greatest first[i] + last[j] (columns of logits_L2) with i <= j < i + max_length, and its i and j."""
    first, last = logits_L2[:, 0], logits_L2[:, 1]
    sums = np.full((min(max_length, len(first)), len(first)), -np.inf)
    for by in range(len(sums)):
        sums[by, : len(first) - by] = first[: len(first) - by] + last[by:]
    more, start = divmod(int(sums.argmax()), len(first))
    return float(sums[more, start]), start, start + more


def score(
    examples: list[LabelledExample], predictions: list[str], language: str, mlqa: bool = False
) -> dict[str, float]:
    """Return the means over questions of the F1 of words and of exact match. mlqa: use MLQA's rules, not SQuAD's."""
    normalize = partial(squad.normalize_mlqa, language=language) if mlqa else squad.normalize
    counts = []
    for example, prediction in zip(examples, predictions, strict=True):
        answer, gold = normalize(prediction), [normalize(text) for text, _ in example.gold or ()]
        counts.append((max(squad.f1(answer, text) for text in gold), answer in gold, 1))
    return bootstrap(np.array(counts), lambda s: {"f1": s[..., 0] / s[..., 2], "exact_match": s[..., 1] / s[..., 2]})


def format_predictions(examples: list[LabelledExample], predictions: list[str]) -> str:
    answers = {example.key: text for example, text in zip(examples, predictions, strict=True)}
    return json.dumps(answers, ensure_ascii=False, indent=1) + "\n"


_task = partial(
    Task,
    read=read,
    list_labels=lambda examples: ["first", "last"],
    encode=encode,
    head_class="AutoModelForQuestionAnswering",
    head_labels=head_labels,
    select_logits=token_logits,
    predict=predict,
    format_predictions=format_predictions,
    suffix=".json",
    max_length=386,
    epochs=2,
    lr=3e-5,
    predicts_labels=False,
)
XQUAD = _task(score=score, xtreme_folder="xquad")
MLQA = _task(score=partial(score, mlqa=True), xtreme_folder="mlqa")
