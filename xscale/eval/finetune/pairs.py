"""Sentence pairs by fine-tuning: natural language inference (XNLI) and paraphrases (PAWS-X).

A label of `[CLS] a [SEP] b [SEP]`. Files: a line `a<TAB>b<TAB>label` (XTREME's; without labels two columns), or with a
header whose names say the columns (MultiNLI's, XNLI's own, PAWS-X's); local data sets.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xscale.data import sequences
from xscale.data.sequences import fit_pairs
from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.eval.finetune.tables import column, is_table, read_rows
from xscale.eval.finetune.task import Encoding, Example, Feature, Task, numbers

FIRST, SECOND = ("premise", "sentence1"), ("hypothesis", "sentence2", "hypo")
LABEL, LANGUAGE = ("label", "gold_label"), ("language",)
SAME = {"contradictory": "contradiction"}
"""What XNLI's translated training text calls a label."""
AT_ONCE = 8192
"""Pairs of one call of the tokenizer, whose answers take a hundred times their text's memory."""
CLS = np.zeros(1, dtype=np.int64)
"""Where the state is that says the label."""
NO_GOLD = "-"
"""MultiNLI's label of a pair that its annotators did not agree on; such pairs are left out."""
NO_LABEL = None, "", -1, "-1"
"""-1 is what `datasets` has in the place of a label that is absent."""


def read(path: Path, language: str) -> list[Example]:
    examples = []
    for key, first, second, label in _rows(path, language):
        where = f"{path}: line {key}"
        if not (isinstance(first, str) and isinstance(second, str) and first.strip() and second.strip()):
            raise UserError(f"{where}: a sentence is empty; mend or remove the line")
        if label == NO_GOLD:
            continue
        gold = None if label in NO_LABEL else (SAME.get(str(label), str(label)),)
        examples.append(Example(key, (language, language), (first, second), gold))
    if not examples:
        raise UserError(f"{path} has no pair in {language}")
    return examples


def _rows(path: Path, language: str) -> Iterator[tuple[str, Any, Any, Any]]:
    """(key, first, second, label) of each pair of the language."""
    if is_table(path):
        for key, row in read_rows(path):
            where = f"{path}: line {key}"
            if row.get(LANGUAGE[0], language) == language:
                yield key, column(row, FIRST, where), column(row, SECOND, where), _label_of(row)
        return
    header: list[str] | None = None
    columns = 0
    for number, line in read_lines(path):
        if not line.strip():
            continue
        fields = line.split("\t")
        if number == 1 and _is_header([field.lower() for field in fields]):
            header = [field.lower() for field in fields]
        columns = columns or len(fields)
        if len(fields) != columns or (not header and columns not in (2, 3)):
            wanted = f"{columns}, as line 1 has" if number > 1 else "3: `sentence<TAB>sentence<TAB>label`"
            raise UserError(f"{path}: line {number} has {len(fields)} columns instead of {wanted}; mend the line")
        if header and number > 1:
            row = dict(zip(header, fields, strict=True))
            if row.get(LANGUAGE[0], language) == language:
                yield str(number), column(row, FIRST, str(path)), column(row, SECOND, str(path)), _label_of(row)
        elif not header:
            yield str(number), fields[0], fields[1], fields[2].strip() if columns == 3 else None


def _is_header(fields: list[str]) -> bool:
    return any(name in fields for name in FIRST) and any(name in fields for name in SECOND)


def _label_of(row: dict[str, Any]) -> Any:
    return next((row[name] for name in LABEL if name in row), None)


def labels(examples: list[Example]) -> list[str]:
    return sorted({label for example in examples for label in example.gold or ()})


def encode(examples: list[Example], encoding: Encoding) -> list[Feature]:
    """A pair that is too long is cut, both sides in proportion."""
    return [
        feature
        for start in range(0, len(examples), AT_ONCE)
        for feature in _encode(examples[start : start + AT_ONCE], start, encoding)
    ]


def _encode(examples: list[Example], first: int, encoding: Encoding) -> Iterator[Feature]:
    """first: the number of the first of the examples."""
    tokenizer = encoding.tokenizer
    ids = tokenizer.encode([text for example in examples for text in example.texts])
    whole = [
        sequences.Example(e.langs, (ids[2 * i], ids[2 * i + 1]), None, np.uint64(0)) for i, e in enumerate(examples)
    ]
    fitted, _ = fit_pairs(whole, encoding.longest, "truncate", tokenizer.pair.special)
    for number, (example, pair) in enumerate(zip(examples, fitted, strict=True), start=first):
        sides = tuple(np.array(side, dtype=np.int32) for side in pair.ids)
        yield Feature(number, example.langs, sides, CLS, numbers(encoding.labels, example.gold, 1))


def answers(features: list[Feature], length: int) -> dict[str, Tensor]:
    return {"labels": torch.tensor([int(feature.labels[0]) for feature in features])}


def read_logits(outputs: np.ndarray, number: int, feature: Feature) -> np.ndarray:
    return outputs[number][None]


def predict(examples: list[Example], features: list[Feature], logits: list[np.ndarray], labels: list[str]) -> list[str]:
    return [labels[int(of_pair.argmax())] for of_pair in logits]


def score(examples: list[Example], predictions: list[str], language: str) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, f1_score

    gold = [example.gold[0] for example in examples if example.gold]
    return {
        "accuracy": float(accuracy_score(gold, predictions)),
        "macro_f1": float(f1_score(gold, predictions, average="macro", zero_division=0)),
    }


def switch(example: Example, translation: Example) -> list[Example]:
    """Sentence-level code-switching (Pan et al. 2021, 2.3): (a', b) and (a, b'). Raises UserError."""
    if example.gold != translation.gold:
        raise UserError(f"line {example.key}: its label is {example.gold}, its translation's {translation.gold}")
    (source, _), (target, _) = example.langs, translation.langs
    (a, b), (a_, b_) = example.texts, translation.texts
    return [
        Example(example.key, (target, source), (a_, b), example.gold),
        Example(example.key, (source, target), (a, b_), example.gold),
    ]


def write(examples: list[Example], predictions: list[str]) -> str:
    return "".join(label + "\n" for label in predictions)


def task(xtreme: str) -> Task:
    head = "AutoModelForSequenceClassification"
    return Task(
        read,
        labels,
        encode,
        head,
        answers,
        read_logits,
        predict,
        score,
        xtreme,
        write,
        epochs=2,
        lr=5e-5,
        switch=switch,
    )
