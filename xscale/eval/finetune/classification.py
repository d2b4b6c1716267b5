"""Classifies sentences, and pairs of sentences: natural language inference (XNLI) and paraphrases (PAWS-X)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from xscale.data.scripts import short_code
from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.eval.bootstrap import class_scores
from xscale.eval.finetune.examples import (
    BLANK,
    LabelledExample,
    LabelledFile,
    Row,
    column_value,
    count_labels,
    is_table,
    read_table,
)
from xscale.eval.finetune.training import Feature, Reads, SequenceMaker, Task

SENTENCE = (("text", "sentence"),)
PAIR = (("premise", "sentence1"), ("hypothesis", "sentence2"))
"""For each text of an example, the names that its column may have."""
LABEL = ("label", "gold_label", "category")
SYNONYMS = {"contradictory": "contradiction"}
"""{label in XNLI's translated training text: the same label elsewhere}."""
NO_AGREEMENT = "-"
"""MultiNLI's label for pairs on which its annotators did not agree."""
NO_LABEL = (None, "", -1, "-1")
"""The values that stand for an absent label; `datasets` uses -1."""


@dataclass(frozen=True)
class Classification(Task):
    columns: tuple[tuple[str, ...], ...] = PAIR
    most_labels: int | None = None
    """The number of labels that the data set has; None: any number."""
    reads: ClassVar[Reads] = "sequence"

    def read(self, path: Path, language: str) -> list[LabelledExample]:
        """Return the examples of a file, without rows in another language. Raises UserError."""
        examples = []
        for number, row in read_table(path) if is_table(path) else read_tabs(path, self.columns):
            if short_code(row.get("language", language)) == short_code(language):
                examples.append(self.make_example(number, row, language, f"{path}: line {number}"))
        if not examples:
            raise UserError(f"{path} has no example in {language}; give another file")
        labels = self.list_labels(LabelledFile(path, examples).examples)
        if self.most_labels and len(labels) > self.most_labels:
            raise UserError(
                f"{path} has the labels {', '.join(labels)}, but the task has {self.most_labels}; give another file"
            )
        return examples

    def make_example(self, number: str, row: Row, language: str, where: str) -> LabelledExample:
        """Return the example of a row. where: the row's place, for errors. Raises UserError."""
        texts = tuple(column_value(row, names, where) for names in self.columns)
        for text in texts:
            if not isinstance(text, str):
                raise UserError(f"{where}: {text!r} is no sentence; give text in this column")
        label = column_value(row, LABEL, where)
        left_out = ""
        if label == NO_AGREEMENT:
            left_out = "its annotators did not agree on a label"
        elif not all(text.strip() for text in texts):
            left_out = BLANK
        elif label in NO_LABEL:
            raise UserError(f"{where} has no label; give a file with a label in each line")
        label = SYNONYMS.get(str(label), str(label))
        return LabelledExample(number, (language,) * len(texts), texts, label, left_out)

    def list_labels(self, examples: list[LabelledExample]) -> list[str]:
        return sorted(count_labels(examples))

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
        """Return the accuracy, and the mean F1 of the labels."""
        gold: list[list[str]] = []
        predicted: list[list[str]] = []
        for example, label in zip(examples, predictions, strict=True):
            gold.append([example.gold])
            predicted.append([label])
        return class_scores(gold, predicted, sorted({*predictions, *self.list_labels(examples)}))


def read_tabs(path: Path, columns: tuple[tuple[str, ...], ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line number, columns) of each line. If the first line is no header, the columns are texts and a label."""
    names: list[str] = []
    for number, line in read_lines(path):
        fields = list(map(str.strip, line.split("\t")))
        if fields == [""]:
            continue
        if not names:
            header = list(map(str.lower, fields))
            if all(set(alternatives) & set(header) for alternatives in columns):
                names = header
                continue
            names = [alternatives[0] for alternatives in columns] + [LABEL[0]]
        if len(fields) != len(names):
            form = "<TAB>".join(names)
            raise UserError(f"{path}: line {number} has {len(fields)} columns instead of {form}; fix the line")
        yield str(number), dict(zip(names, fields, strict=True))


XNLI = Classification(epochs=2, lr=5e-5, columns=PAIR, most_labels=3)
PAWSX = Classification(epochs=2, lr=5e-5, columns=PAIR, most_labels=2)
SENTENCES = Classification(epochs=10, lr=2e-5, columns=SENTENCE)
