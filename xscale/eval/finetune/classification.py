"""Classifies sentences, and pairs of sentences: natural language inference (XNLI) and paraphrases (PAWS-X).

    logits = W dropout(x) + b        x: state of [CLS], or mean state of the tokens that are not special

x is the vector that the encoder was trained to pool: the file 1_Pooling/config.json of sentence-transformers says
which. Without this file, it is the state of [CLS].

Shape letters: B sequences, L tokens of the longest one, H hidden width, C labels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from xscale.data.scripts import short_code
from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.eval.bootstrap import class_scores
from xscale.eval.finetune.examples import BLANK, LabelledExample, Row, column_value, count_labels, is_table, read_table
from xscale.eval.finetune.training import Feature, SequenceMaker

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


class PooledClassifier(nn.Module):
    """An encoder, and a linear layer on its pooled state."""

    special_ids: Tensor

    def __init__(self, base_model: Any, labels: int, pooling: str, special_ids: list[int]):
        """pooling: "cls" or "mean". special_ids: the tokens that the mean leaves out."""
        super().__init__()
        self.base_model = base_model
        self.config = base_model.config
        self.pooling = pooling
        self.register_buffer("special_ids", torch.tensor(special_ids), persistent=False)
        self.dropout = nn.Dropout(getattr(self.config, "hidden_dropout_prob", 0.0))
        self.classifier = nn.Linear(self.config.hidden_size, labels)
        nn.init.normal_(self.classifier.weight, std=getattr(self.config, "initializer_range", 0.02))
        nn.init.zeros_(self.classifier.bias)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **types: Tensor
    ) -> dict[str, Tensor]:
        """Return the logits [B, C], and with labels [B] the mean cross-entropy."""
        states_BLH = self.base_model(input_ids=input_ids, attention_mask=attention_mask, **types).last_hidden_state
        pooled_BH = states_BLH[:, 0]
        if self.pooling == "mean":
            ordinary_BL1 = (attention_mask.bool() & ~torch.isin(input_ids, self.special_ids)).unsqueeze(-1)
            pooled_BH = (states_BLH * ordinary_BL1).sum(1) / ordinary_BL1.sum(1).clamp(min=1)
        logits_BC = self.classifier(self.dropout(pooled_BH))
        if labels is None:
            return {"logits": logits_BC}
        return {"loss": F.cross_entropy(logits_BC, labels), "logits": logits_BC}


@dataclass(frozen=True)
class Classification:
    epochs: int
    lr: float
    columns: tuple[tuple[str, ...], ...]
    most_labels: int | None = None
    """The number of labels that the data set has; None: any number."""
    max_length: int = 128

    def read(self, path: Path, language: str) -> list[LabelledExample]:
        """Return the examples of a file, without rows in another language. Raises UserError."""
        examples = []
        for number, row in read_table(path) if is_table(path) else _read_tabs(path, self.columns):
            if short_code(row.get("language", language)) == short_code(language):
                examples.append(self._example(number, row, language, f"{path}: line {number}"))
        if not examples:
            raise UserError(f"{path} has no example in {language}; give another file")
        labels = self.list_labels([example for example in examples if not example.left_out])
        if self.most_labels and len(labels) > self.most_labels:
            raise UserError(
                f"{path} has the labels {', '.join(labels)}, but the task has {self.most_labels}; give a file of the "
                f"task, or another --task"
            )
        return examples

    def _example(self, number: str, row: Row, language: str, where: str) -> LabelledExample:
        texts = []
        for names in self.columns:
            texts.append(_text_in_language(column_value(row, names, where), language, where))
        left_out = "" if all(text.strip() for text in texts) else BLANK
        label = column_value(row, LABEL, where)
        if label == NO_AGREEMENT:
            left_out = "its annotators did not agree on a label"
        elif label in NO_LABEL and not left_out:
            raise UserError(f"{where} has no label; give a file with a label in each line")
        label = SYNONYMS.get(str(label), str(label))
        return LabelledExample(number, (language,) * len(texts), tuple(texts), label, left_out)

    def list_labels(self, examples: list[LabelledExample]) -> list[str]:
        return sorted(count_labels(examples))

    def encode(self, examples: list[LabelledExample], maker: SequenceMaker, labels: list[str] | None) -> list[Feature]:
        sides = []
        for side in range(len(self.columns)):
            sides.append(maker.tokenizer.encode([example.texts[side] for example in examples]))
        features = []
        for number, ids in enumerate(zip(*sides, strict=True)):
            targets = {"labels": labels.index(examples[number].gold)} if labels else {}
            features.append(Feature(number, maker.join(ids, examples[number].languages), targets))
        return features

    def load_head(self, path: Path, maker: SequenceMaker, labels: list[str]) -> nn.Module:
        lm = transformers.AutoModelForMaskedLM.from_pretrained(path, dtype=torch.float32)
        pooling = maker.model.pooling if (path / "1_Pooling").is_dir() else "cls"
        return PooledClassifier(lm.base_model, len(labels), pooling, [maker.tokenizer.cls_id, maker.tokenizer.sep_id])

    def predict(
        self, examples: list[LabelledExample], features: list[Feature], outputs: np.ndarray, labels: list[str]
    ) -> list[str]:
        predictions = [""] * len(examples)
        for feature, logits_C in zip(features, outputs, strict=True):
            predictions[feature.example] = labels[logits_C.argmax()]
        return predictions

    def score(self, examples: list[LabelledExample], predictions: list[str], language: str) -> dict[str, float]:
        gold = [example.labels for example in examples]
        labels = sorted({*predictions, *self.list_labels(examples)})
        return class_scores(gold, [[label] for label in predictions], labels)


def _read_tabs(path: Path, columns: tuple[tuple[str, ...], ...]) -> Iterator[tuple[str, Row]]:
    """Yield (line number, columns) of each line. If the first line is no header, the columns are texts and a label."""
    names: list[str] = []
    for number, line in read_lines(path):
        fields = [field.strip() for field in line.split("\t")]
        if fields == [""]:
            continue
        if not names:
            header = [field.lower() for field in fields]
            if all(set(alternatives) & set(header) for alternatives in columns):
                names = header
                continue
            names = [*(alternatives[0] for alternatives in columns), LABEL[0]]
        if len(fields) != len(names):
            form = "<TAB>".join(names)
            raise UserError(f"{path}: line {number} has {len(fields)} columns instead of {form}; fix the line")
        yield str(number), dict(zip(names, fields, strict=True))


def _text_in_language(value: Any, language: str, where: str) -> str:
    """Return the text, or the one in `language` of XNLI's configuration `all_languages`: {"en": text, ...}, or
    {"language": ["en", ...], "translation": [text, ...]}. Raises UserError."""
    if isinstance(value, dict):
        if "translation" in value:
            value = dict(zip(value["language"], value["translation"], strict=True))
        codes = [code for code in value if short_code(code) == short_code(language)]
        if not codes:
            raise UserError(f"{where} has no text in {language}, only in {', '.join(value)}; name one of these")
        value = value[codes[0]]
    if not isinstance(value, str):
        raise UserError(f"{where}: {value!r} is no sentence; give text in this column")
    return value


XNLI = Classification(epochs=2, lr=5e-5, columns=PAIR, most_labels=3)
PAWSX = Classification(epochs=2, lr=5e-5, columns=PAIR, most_labels=2)
SENTENCES = Classification(epochs=10, lr=2e-5, columns=SENTENCE)
