"""Extractive question answering: the answer is a span of the context (SQuAD, XQuAD, MLQA).

The model scores each token of `[CLS] question [SEP] context` as the answer's first and as its last. A long context is
split into several sequences that overlap; in a sequence without the answer, [CLS] is the gold first and last token.
Files are SQuAD's JSON, version 1.1, in which every question has an answer, or local data sets with SQuAD's columns.
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
from xscale.eval.finetune.tables import column, is_table, read_rows
from xscale.eval.finetune.task import Feature, LabelledExample, Task

QUESTION, STRIDE, ANSWER = 64, 128, 30
"""BERT's values: the most tokens of a question, the tokens between sequences' starts, the most tokens of an answer."""


def read(path: Path, language: str) -> list[LabelledExample]:
    found = _read_table(path, language) if is_table(path) else _read_squad(path, language)
    examples: dict[str, LabelledExample] = {}
    for where, example in found:
        if example.key in examples:
            raise UserError(f"{where}: the id occurs twice; ids must differ")
        _check_answers(where, example)
        examples[example.key] = example
    if not examples:
        raise UserError(f"{path} has no question")
    return list(examples.values())


def _check_answers(where: str, example: LabelledExample) -> None:
    context, gold = example.texts[1], example.gold or ()
    texts = [*example.texts, *(text for text, _ in gold)]
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(start, int) for _, start in gold):
        raise UserError(f"{where}: question, context and answers must be text, and answer_start a whole number")
    if not example.texts[0].strip() or not context.strip():
        raise UserError(f"{where}: question or context is empty; fix or remove it")
    for text, start in gold:
        if not text or context[start : start + len(text)] != text:
            there = context[max(start, 0) : start + max(len(text), 1)]
            raise UserError(
                f"{where}: the answer {text!r} is not at answer_start {start}, where {there!r} is; starts "
                f"count the characters of the context"
            )


def _read_squad(path: Path, language: str) -> Iterator[tuple[str, LabelledExample]]:
    place = "data"
    try:
        tree = json.loads("\n".join(line for _, line in read_lines(path)))
        for i, article in enumerate(tree["data"]):
            for j, paragraph in enumerate(article["paragraphs"]):
                place = f"data[{i}].paragraphs[{j}]"
                context = paragraph["context"]
                for k, question in enumerate(paragraph["qas"]):
                    place = f"data[{i}].paragraphs[{j}].qas[{k}]"
                    where = f"{path}: question {question['id']!r}"
                    yield where, _make_example(question, context, question.get("answers"), language, where)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        missing = f"has no {error}" if isinstance(error, KeyError) else "is not as SQuAD's"
        raise UserError(
            f"{path}: {place} {missing}; SQuAD 1.1's JSON has data, paragraphs, context, qas, id, ..."
        ) from None


def _make_example(question: dict[str, Any], context: str, answers: Any, language: str, where: str) -> LabelledExample:
    gold = None
    if answers is not None:
        gold = tuple((answer["text"], answer["answer_start"]) for answer in answers)
        if not gold:
            raise UserError(f"{where} has no answer; remove questions without answers, which SQuAD 1.1 does not have")
    return LabelledExample(str(question["id"]), (language, language), (question["question"], context), gold)


def _read_table(path: Path, language: str) -> Iterator[tuple[str, LabelledExample]]:
    """Read SQuAD's columns id, question, context and answers, which has lists `text` and `answer_start`."""
    for key, row in read_rows(path):
        where = f"{path}: line {key}"
        context, given = column(row, ("context",), where), row.get("answers")
        if isinstance(given, dict):
            both = zip(given.get("text", ()), given.get("answer_start", ()), strict=False)
            given = [{"text": text, "answer_start": start} for text, start in both]
        question = {name: column(row, (name,), where) for name in ("id", "question")}
        yield where, _make_example(question, context, given, language, where)


def labels(examples: list[LabelledExample]) -> list[str]:
    return ["first", "last"]


def encode(examples: list[LabelledExample], tokenizer: Tokenizer, longest: int, labels: list[str]) -> list[Feature]:
    template = tokenizer.pair
    contexts = list(dict.fromkeys(example.texts[1] for example in examples))
    encodings = tokenizer.backend.encode_batch(contexts, add_special_tokens=False)
    encoded = dict(zip(contexts, encodings, strict=True))
    questions = tokenizer.encode([example.texts[0] for example in examples])
    features = []
    for i, (example, question) in enumerate(zip(examples, questions, strict=True)):
        whole = longest - template.special
        question = question[: min(QUESTION, whole // 2)]
        found = encoded[example.texts[1]]
        ids, spans = np.array(found.ids, dtype=np.int32), np.array(found.offsets, dtype=np.int32).reshape(-1, 2)
        before = len(template.first) + len(question) + len(template.between)
        for start, end in stretches(len(ids), whole - len(question)):
            places = np.concatenate([[0], before + np.arange(end - start)])
            sides = np.array(question, dtype=np.int32), ids[start:end]
            answer = _answer(example, spans[start:end])
            features.append(Feature(i, example.langs, sides, places, answer, spans=spans[start:end]))
    return features


def stretches(tokens: int, room: int) -> Iterator[tuple[int, int]]:
    """Yield (first token, end) of each of the overlapping windows into which a context is cut."""
    step = min(STRIDE, max(room // 2, 1))
    start = 0
    while start + room < tokens:
        yield start, start + room
        start += step
    yield start, tokens


def _answer(example: LabelledExample, spans: np.ndarray) -> np.ndarray:
    """The numbers, among the feature's places, of the first and last token of the first gold answer; both are 0, the
    number of [CLS], if the answer is not wholly within the spans."""
    if not example.gold or not len(spans):
        return np.zeros(2, dtype=np.int64)
    text, start = example.gold[0]
    inside = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < start + len(text)))
    if not len(inside) or spans[0, 0] > start or spans[-1, 1] < start + len(text):
        return np.zeros(2, dtype=np.int64)
    return np.array([inside[0] + 1, inside[-1] + 1], dtype=np.int64)


def head_labels(features: list[Feature], length: int) -> dict[str, Tensor]:
    first, last = (torch.tensor([int(f.places[f.labels[side]]) for f in features]) for side in (0, 1))
    return {"start_positions": first, "end_positions": last}


def read_logits(outputs: tuple[np.ndarray, np.ndarray], number: int, feature: Feature) -> np.ndarray:
    return np.stack([side[number, feature.places] for side in outputs[:2]], axis=1)


def predict(
    examples: list[LabelledExample], features: list[Feature], logits: list[np.ndarray], labels: list[str]
) -> list[str]:
    """Each example's answer: the span with the greatest sum of first and last logit in all sequences of the context."""
    best = [(-np.inf, "")] * len(examples)
    for feature, of_places in zip(features, logits, strict=True):
        assert feature.spans is not None
        if len(feature.spans):
            total, first, last = best_span(of_places[1:])
            if total > best[feature.example][0]:
                start, end = feature.spans[first, 0], feature.spans[last, 1]
                best[feature.example] = total, examples[feature.example].texts[1][start:end].strip()
    return [text for _, text in best]


def best_span(logits_L2: np.ndarray, longest: int = ANSWER) -> tuple[float, int, int]:
    """The greatest first[i] + last[j] with i <= j < i + longest, and its i and j."""
    first, last = logits_L2[:, 0], logits_L2[:, 1]
    sums = np.full((min(longest, len(first)), len(first)), -np.inf)
    for by in range(len(sums)):
        sums[by, : len(first) - by] = first[: len(first) - by] + last[by:]
    more, start = divmod(int(sums.argmax()), len(first))
    return float(sums[more, start]), start, start + more


def score(
    examples: list[LabelledExample], predictions: list[str], language: str, mlqa: bool = False
) -> dict[str, float]:
    """Means over questions of the F1 of words and of exact match."""
    normalized = partial(squad.mlqa_normalized, language=language) if mlqa else squad.normalized
    counts = []
    for example, prediction in zip(examples, predictions, strict=True):
        said, gold = normalized(prediction), [normalized(text) for text, _ in example.gold or ()]
        counts.append((max(squad.f1(said, text) for text in gold), said in gold, 1))
    return bootstrap(np.array(counts), lambda s: {"f1": s[..., 0] / s[..., 2], "exact_match": s[..., 1] / s[..., 2]})


def write(examples: list[LabelledExample], predictions: list[str]) -> str:
    answers = {example.key: text for example, text in zip(examples, predictions, strict=True)}
    return json.dumps(answers, ensure_ascii=False, indent=1) + "\n"


_task = partial(
    Task,
    read=read,
    labels=labels,
    encode=encode,
    head="AutoModelForQuestionAnswering",
    head_labels=head_labels,
    read_logits=read_logits,
    predict=predict,
    write=write,
    suffix=".json",
    max_length=386,
    epochs=2,
    lr=3e-5,
    classes=False,
)
XQUAD = _task(score=score, xtreme="xquad")
MLQA = _task(score=partial(score, mlqa=True), xtreme="mlqa")
