"""Classifies sentences by topic (SIB-200, Taxi1500) or intent (MASSIVE, MultiATIS++), and sentence pairs: natural
language inference (XNLI) and paraphrases (PAWS-X).

The model labels `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`. A line of a file is `a<TAB>label` or `a<TAB>b<TAB>label`
as in XTREME (files without labels lack the last column), or `id<TAB>label<TAB>a` (Taxi1500), or the first line names
the columns (SIB-200, MultiATIS++, MultiNLI, XNLI's own files, PAWS-X). Local data sets (tables.py) are read too.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xscale.data import sequences
from xscale.data.sequences import fit_pairs
from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval.bootstrap import class_scores
from xscale.eval.finetune.tables import Columns, column_value, is_table, read_rows
from xscale.eval.finetune.task import CLASSIFIER, Feature, LabelledExample, Task, label_indices

PAIR = ("premise", "sentence1"), ("hypothesis", "sentence2", "hypo")
SENTENCE = (("text", "utt", "verse", "utterance"),)
"""For each text of an example, the names that its column may have."""
LABEL, LANGUAGE, PARTITION = ("label", "gold_label", "category", "intent"), "language", "partition"
SYNONYMS = {"contradictory": "contradiction"}
"""{label in XNLI's translated training text: the same label elsewhere}."""
TOKENIZER_BATCH = 8192
"""The examples per call of the tokenizer, whose results take a hundred times the memory of the text."""
CLS = np.zeros(1, dtype=np.int64)
"""The position of the hidden state that is classified [1]."""
NO_GOLD = "-"
"""MultiNLI's label for pairs on which its annotators did not agree; they are left out."""
NO_LABEL = None, "", -1, "-1"
"""The values that stand for an absent label; `datasets` uses -1."""


def read(
    path: Path, language: str, columns: tuple[tuple[str, ...], ...] = PAIR, has_ids: bool = False
) -> list[LabelledExample]:
    """Return the examples of a file, without rows in another language. columns: PAIR or SENTENCE. has_ids: True if
    three columns without a header are `id<TAB>label<TAB>sentence`. Raises UserError."""
    examples = []
    for key, row in read_rows(path) if is_table(path) else _read_lines(path, columns, has_ids):
        where = f"{path}: line {key}"
        if row.get(LANGUAGE, language) != language:
            continue
        texts = tuple(column_value(row, names, where) for names in columns)
        label = next((row[name] for name in LABEL if name in row), None)
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise UserError(f"{where}: a sentence is empty; fix or remove the line")
        if label != NO_GOLD:
            gold = None if label in NO_LABEL else (SYNONYMS.get(str(label), str(label)),)
            examples.append(LabelledExample(key, (language,) * len(texts), texts, gold, row.get(PARTITION)))
    if not examples:
        raise UserError(f"{path} has no example in {language}")
    return examples


def _read_lines(path: Path, columns: tuple[tuple[str, ...], ...], has_ids: bool) -> Iterator[tuple[str, Columns]]:
    """Yield (line number, {name of a column: text}) for each line of a file with tabs between columns."""
    names: list[str] = []
    for number, line in read_lines(path):
        fields = line.split("\t")
        if not line.strip():
            continue
        if not names:
            header = [field.lower() for field in fields]
            has_header = number == 1 and all(set(names) & set(header) for names in columns)
            bare = [*(of[0] for of in columns), LABEL[0]][: max(len(fields), len(columns))]
            if has_ids and len(fields) == 3:
                bare = ["id", LABEL[0], columns[0][0]]
            names = header if has_header else bare
            if has_header:
                continue
        if len(fields) != len(names):
            form = "<TAB>".join(["sentence"] * len(columns))
            wanted = f"{len(names)}, as the first line has" if number > 1 else f"{len(names)}: `{form}<TAB>label`"
            raise UserError(f"{path}: line {number} has {len(fields)} columns instead of {wanted}; fix the line")
        row = dict(zip(names, fields, strict=True))
        yield str(number), row | {name: row[name].strip() for name in LABEL if name in row}


def list_labels(examples: list[LabelledExample]) -> list[str]:
    return sorted({label for example in examples for label in example.gold or ()})


def encode(examples: list[LabelledExample], tokenizer: Tokenizer, max_length: int, labels: list[str]) -> list[Feature]:
    """Return one feature for each example. Long sentences are truncated, both sides of a pair in proportion."""
    features: list[Feature] = []
    for start in range(0, len(examples), TOKENIZER_BATCH):
        some = examples[start : start + TOKENIZER_BATCH]
        ids = iter(tokenizer.encode([text for example in some for text in example.texts]))
        whole = [sequences.Example(e.langs, tuple(next(ids) for _ in e.texts), None, np.uint64(0)) for e in some]
        if len(some[0].texts) == 2:
            whole, _ = fit_pairs(whole, max_length, "truncate", tokenizer.pair.special)
        for example, fitted in zip(some, whole, strict=True):
            sides = tuple(np.array(text[: max_length - 2], dtype=np.int32) for text in fitted.ids)
            label = label_indices(labels, example.gold, 1)
            features.append(Feature(len(features), example.langs, sides, CLS, label))
    return features


def head_labels(features: list[Feature], length: int) -> dict[str, Tensor]:
    return {"labels": torch.tensor([int(feature.labels[0]) for feature in features])}


def sequence_logits(outputs: np.ndarray, row: int, feature: Feature) -> np.ndarray:
    """Return the logits [1, C] of a feature. outputs: [features, C]."""
    return outputs[row][None]


def predict(
    examples: list[LabelledExample], features: list[Feature], logits: list[np.ndarray], labels: list[str]
) -> list[str]:
    return [labels[int(logits_1C.argmax())] for logits_1C in logits]


def score(examples: list[LabelledExample], predictions: list[str], language: str) -> dict[str, float]:
    gold = [example.gold for example in examples if example.gold]
    predicted = [(label,) for label in predictions]
    return class_scores(gold, predicted, sorted({label for side in (gold, predicted) for (label,) in side}))


def format_predictions(examples: list[LabelledExample], predictions: list[Any]) -> str:
    return "".join(label + "\n" for label in predictions)


_task = partial(
    Task,
    list_labels=list_labels,
    encode=encode,
    head_class=CLASSIFIER,
    head_labels=head_labels,
    select_logits=sequence_logits,
    predict=predict,
    score=score,
    format_predictions=format_predictions,
)
_pairs = partial(_task, read=read, epochs=2, lr=5e-5)
_sentences = partial(_task, read=partial(read, columns=SENTENCE))
XNLI, PAWSX = _pairs(xtreme_folder="xnli"), _pairs(xtreme_folder="pawsx")
SIB200 = _sentences(xtreme_folder="sib200", epochs=20, lr=1e-5, max_length=164)
MASSIVE = _sentences(xtreme_folder="massive")
TAXI1500 = _sentences(xtreme_folder="taxi1500", epochs=20, read=partial(read, columns=SENTENCE, has_ids=True))
MULTIATIS = _sentences(xtreme_folder="multiatis", allows_new_labels=True)
