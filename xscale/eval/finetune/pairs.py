"""Classification of sentence pairs: natural language inference (XNLI) and paraphrases (PAWS-X).

The model labels `[CLS] a [SEP] b [SEP]`. A line of a file is `a<TAB>b<TAB>label` (XTREME's; two columns have no
labels), or a header names the columns (MultiNLI's, XNLI's own, PAWS-X's). Local data sets are read too.
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
from xscale.eval.bootstrap import class_scores
from xscale.eval.finetune.tables import Columns, column, is_table, read_rows
from xscale.eval.finetune.task import Encoding, Feature, LabelledExample, Task, label_numbers

FIRST, SECOND = ("premise", "sentence1"), ("hypothesis", "sentence2", "hypo")
LABEL, LANGUAGE = ("label", "gold_label"), "language"
SAME = {"contradictory": "contradiction"}
"""XNLI's translated training text has another word for this label."""
AT_ONCE = 8192
"""Pairs of one call of the tokenizer, whose encodings take a hundred times the memory of their text."""
CLS = np.zeros(1, dtype=np.int64)
"""The place of the state that is classified."""
NO_GOLD = "-"
"""MultiNLI's label of a pair that its annotators did not agree on; such pairs are left out."""
NO_LABEL = None, "", -1, "-1"
"""The marks of an absent label; `datasets` has -1."""


def read(path: Path, language: str) -> list[LabelledExample]:
    examples = []
    for key, row in read_rows(path) if is_table(path) else _read_lines(path):
        where = f"{path}: line {key}"
        if row.get(LANGUAGE, language) != language:
            continue
        first, second = column(row, FIRST, where), column(row, SECOND, where)
        label = next((row[name] for name in LABEL if name in row), None)
        if not (isinstance(first, str) and isinstance(second, str) and first.strip() and second.strip()):
            raise UserError(f"{where}: a sentence is empty; mend or remove the line")
        if label != NO_GOLD:
            gold = None if label in NO_LABEL else (SAME.get(str(label), str(label)),)
            examples.append(LabelledExample(key, (language, language), (first, second), gold))
    if not examples:
        raise UserError(f"{path} has no pair in {language}")
    return examples


def _read_lines(path: Path) -> Iterator[tuple[str, Columns]]:
    """The line's number and the columns of each line with tabs."""
    names: list[str] = []
    for number, line in read_lines(path):
        fields = line.split("\t")
        if not line.strip():
            continue
        if not names:
            header = [field.lower() for field in fields]
            has_header = number == 1 and any(n in header for n in FIRST) and any(n in header for n in SECOND)
            names = header if has_header else [FIRST[0], SECOND[0], LABEL[0]][: max(len(fields), 2)]
            if has_header:
                continue
        if len(fields) != len(names):
            wanted = f"{len(names)}, as the first line has" if number > 1 else "3: `sentence<TAB>sentence<TAB>label`"
            raise UserError(f"{path}: line {number} has {len(fields)} columns instead of {wanted}; mend the line")
        row = dict(zip(names, fields, strict=True))
        yield str(number), row | {name: row[name].strip() for name in LABEL if name in row}


def labels(examples: list[LabelledExample]) -> list[str]:
    return sorted({label for example in examples for label in example.gold or ()})


def encode(examples: list[LabelledExample], encoding: Encoding) -> list[Feature]:
    """A pair that is too long is cut, both sides in proportion."""
    tokenizer, features = encoding.tokenizer, list[Feature]()
    for start in range(0, len(examples), AT_ONCE):
        some = examples[start : start + AT_ONCE]
        ids = tokenizer.encode([text for example in some for text in example.texts])
        whole = [
            sequences.Example(e.langs, (ids[2 * i], ids[2 * i + 1]), None, np.uint64(0)) for i, e in enumerate(some)
        ]
        fitted, _ = fit_pairs(whole, encoding.longest, "truncate", tokenizer.pair.special)
        for number, (example, pair) in enumerate(zip(some, fitted, strict=True), start=start):
            sides = tuple(np.array(side, dtype=np.int32) for side in pair.ids)
            label = label_numbers(encoding.labels, example.gold, 1)
            features.append(Feature(number, example.langs, sides, CLS, label))
    return features


def head_labels(features: list[Feature], length: int) -> dict[str, Tensor]:
    return {"labels": torch.tensor([int(feature.labels[0]) for feature in features])}


def read_logits(outputs: np.ndarray, number: int, feature: Feature) -> np.ndarray:
    return outputs[number][None]


def predict(
    examples: list[LabelledExample], features: list[Feature], logits: list[np.ndarray], labels: list[str]
) -> list[str]:
    return [labels[int(of_pair.argmax())] for of_pair in logits]


def score(examples: list[LabelledExample], predictions: list[str], language: str) -> dict[str, float]:
    gold = [example.gold for example in examples if example.gold]
    found = [(label,) for label in predictions]
    return class_scores(gold, found, sorted({label for side in (gold, found) for (label,) in side}))


def write(examples: list[LabelledExample], predictions: list[Any]) -> str:
    return "".join(label + "\n" for label in predictions)


def pair_task(xtreme: str) -> Task:
    return Task(
        read=read,
        labels=labels,
        encode=encode,
        head="AutoModelForSequenceClassification",
        head_labels=head_labels,
        read_logits=read_logits,
        predict=predict,
        score=score,
        xtreme=xtreme,
        write=write,
        epochs=2,
        lr=5e-5,
    )


XNLI, PAWSX = pair_task("xnli"), pair_task("pawsx")
