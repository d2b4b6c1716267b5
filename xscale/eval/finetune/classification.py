"""Classification of sentences by topic (SIB-200, Taxi1500) or intent (MASSIVE, MultiATIS++), and of sentence pairs:
natural language inference (XNLI) and paraphrases (PAWS-X).

The model labels `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`. A line of a file is `a<TAB>label` or `a<TAB>b<TAB>label`
as in XTREME (without labels, it has one column less), or `id<TAB>label<TAB>a` (Taxi1500), or a header names the columns
(as in SIB-200, MultiATIS++, MultiNLI, XNLI's own files and PAWS-X). Local data sets are read too.
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
from xscale.eval.finetune.tables import Columns, column, is_table, read_rows
from xscale.eval.finetune.task import CLASSIFIER, Feature, LabelledExample, Task, label_numbers

PAIR = ("premise", "sentence1"), ("hypothesis", "sentence2", "hypo")
SENTENCE = (("text", "utt", "verse", "utterance"),)
"""The possible names of each text's column."""
LABEL, LANGUAGE, PARTITION = ("label", "gold_label", "category", "intent"), "language", "partition"
SAME = {"contradictory": "contradiction"}
"""A label in XNLI's translated training text -> the label that it means."""
AT_ONCE = 8192
"""The examples in one call of the tokenizer; their encodings take a hundred times the memory of their text."""
CLS = np.zeros(1, dtype=np.int64)
"""The position of the state that is classified."""
NO_GOLD = "-"
"""MultiNLI's label of a pair that its annotators did not agree on; such pairs are left out."""
NO_LABEL = None, "", -1, "-1"
"""The values that mean an absent label; `datasets` uses -1."""


def read(
    path: Path, language: str, columns: tuple[tuple[str, ...], ...] = PAIR, numbered: bool = False
) -> list[LabelledExample]:
    """The examples of a file in a language. columns: the possible names of each text's column. numbered: whether three
    columns without a header are `id<TAB>label<TAB>a`. Raises UserError."""
    examples = []
    for key, row in read_rows(path) if is_table(path) else _read_lines(path, columns, numbered):
        where = f"{path}: line {key}"
        if row.get(LANGUAGE, language) != language:
            continue
        texts = tuple(column(row, names, where) for names in columns)
        label = next((row[name] for name in LABEL if name in row), None)
        if not all(isinstance(text, str) and text.strip() for text in texts):
            raise UserError(f"{where}: a sentence is empty; fix or remove the line")
        if label != NO_GOLD:
            gold = None if label in NO_LABEL else (SAME.get(str(label), str(label)),)
            examples.append(LabelledExample(key, (language,) * len(texts), texts, gold, row.get(PARTITION)))
    if not examples:
        raise UserError(f"{path} has no example in {language}")
    return examples


def _read_lines(path: Path, columns: tuple[tuple[str, ...], ...], numbered: bool) -> Iterator[tuple[str, Columns]]:
    """(line number, columns by name) for each line of a file with tabs between columns."""
    names: list[str] = []
    for number, line in read_lines(path):
        fields = line.split("\t")
        if not line.strip():
            continue
        if not names:
            header = [field.lower() for field in fields]
            has_header = number == 1 and all(set(names) & set(header) for names in columns)
            bare = [*(of[0] for of in columns), LABEL[0]][: max(len(fields), len(columns))]
            if numbered and len(fields) == 3:
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


def labels(examples: list[LabelledExample]) -> list[str]:
    return sorted({label for example in examples for label in example.gold or ()})


def encode(examples: list[LabelledExample], tokenizer: Tokenizer, longest: int, labels: list[str]) -> list[Feature]:
    """Make features. A sentence that is too long is truncated; in a pair, both sides in proportion."""
    features: list[Feature] = []
    for start in range(0, len(examples), AT_ONCE):
        some = examples[start : start + AT_ONCE]
        ids = iter(tokenizer.encode([text for example in some for text in example.texts]))
        whole = [sequences.Example(e.langs, tuple(next(ids) for _ in e.texts), None, np.uint64(0)) for e in some]
        if len(some[0].texts) == 2:
            whole, _ = fit_pairs(whole, longest, "truncate", tokenizer.pair.special)
        for example, fitted in zip(some, whole, strict=True):
            sides = tuple(np.array(text[: longest - 2], dtype=np.int32) for text in fitted.ids)
            label = label_numbers(labels, example.gold, 1)
            features.append(Feature(len(features), example.langs, sides, CLS, label))
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


_task = partial(
    Task,
    labels=labels,
    encode=encode,
    head=CLASSIFIER,
    head_labels=head_labels,
    read_logits=read_logits,
    predict=predict,
    score=score,
    write=write,
)
_pairs = partial(_task, read=read, epochs=2, lr=5e-5)
_sentences = partial(_task, read=partial(read, columns=SENTENCE))
XNLI, PAWSX = _pairs(xtreme="xnli"), _pairs(xtreme="pawsx")
SIB200 = _sentences(xtreme="sib200", epochs=20, lr=1e-5, max_length=164)
MASSIVE = _sentences(xtreme="massive")
TAXI1500 = _sentences(xtreme="taxi1500", epochs=20, read=partial(read, columns=SENTENCE, numbered=True))
MULTIATIS = _sentences(xtreme="multiatis", new_labels=True)
