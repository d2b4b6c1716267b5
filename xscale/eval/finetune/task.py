"""What a task is to fine-tuning: examples of its files, sequences, a model's head, predictions, scores.

Shape letters: S states that are read of a sequence, C outputs of the head, B sequences, L tokens of the longest one.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError

IGNORED = -100
"""Label of what has none."""


class Example(NamedTuple):
    """One of a file."""

    key: str
    """What stands in a translated file under the same key is its translation: a line's number, a question's id."""
    langs: tuple[str, ...]
    """Of each text; of all where there is one."""
    texts: tuple[str, ...]
    """Two sentences; a question and its context; words."""
    gold: tuple[Any, ...] | None
    """A label; a tag for each word; answers; None: the file has none."""


@dataclass(frozen=True)
class Data:
    """A file's examples."""

    path: Path
    language: str
    examples: list[Example]

    @property
    def labelled(self) -> bool:
        return all(example.gold is not None for example in self.examples)


class Feature(NamedTuple):
    """A sequence made of an example, or of a part of one."""

    example: int
    """Its number."""
    langs: tuple[str, ...]
    ids: tuple[np.ndarray, ...]
    """int32 token ids of one text, or of two."""
    places: np.ndarray
    """The tokens whose states are read, in the sequence with its special tokens [S]."""
    labels: np.ndarray
    """The right answers: a label of each place, or the numbers of the places where an answer begins and ends."""
    spans: np.ndarray | None = None
    """First character and end of what each place but the first stands for in the context [S - 1, 2]."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


class Encoding(NamedTuple):
    """How examples become features."""

    tokenizer: Tokenizer
    longest: int
    """Tokens of a sequence, special ones included."""
    labels: list[str]


@dataclass(frozen=True)
class Task:
    read: Callable[[Path, str], list[Example]]
    """Of a file in a language. Raises UserError."""
    labels: Callable[[list[Example]], list[str]]
    """What the head has an output for, of training text."""
    encode: Callable[[list[Example], Encoding], list[Feature]]
    """In the order of the examples."""
    head: str
    """The transformers class that has the task's head, such as AutoModelForTokenClassification."""
    answers: Callable[[list[Feature], int], dict[str, Tensor]]
    """The labels of B sequences padded to L tokens, under the names that the class's forward pass takes."""
    read_logits: Callable[[Any, int, Feature], np.ndarray]
    """What the head says of a feature [S, C], from the class's outputs and the feature's number in them."""
    predict: Callable[[list[Example], list[Feature], list[np.ndarray], list[str]], list[Any]]
    """Of each example, from what the head says of each feature [S, C]."""
    score: Callable[[list[Example], list[Any], str], dict[str, float]]
    """Of predictions in a language; the first metric is the one that a table shows."""
    xtreme: str
    """The task's folder in XTREME's predictions."""
    write: Callable[[list[Example], list[Any]], str]
    """Predictions as XTREME's files have them."""
    suffix: str = ".tsv"
    max_length: int = 128
    epochs: int = 10
    lr: float = 2e-5
    switch: Callable[[Example, Example], list[Example]] | None = None
    """Of an example and its translation, both with one side in the other language."""
    classes: bool = True
    """Whether an answer is one of a few labels, so that there is a most frequent one."""


def most_frequent(train: list[Example], test: list[Example]) -> list[Any]:
    """What somebody would predict who knows no more than the labels of the training text: one and the same."""
    counts = Counter(label for example in train for label in example.gold or ())
    label = max(sorted(counts), key=lambda name: counts[name])
    return [label if len(e.langs) == 2 else [label] * len(e.texts) for e in test]


def numbers(labels: list[str], gold: Sequence[str] | None, count: int) -> np.ndarray:
    """int64, of each label its number; IGNORED where there are none."""
    return np.array([labels.index(label) for label in gold] if gold else [IGNORED] * count, dtype=np.int64)


def check_labels(labels: list[str], data: Data, train: Path) -> None:
    """Raises UserError for a label that no training could have taught."""
    for example in data.examples:
        for label in example.gold or ():
            if label not in labels:
                raise UserError(
                    f"{data.path}: line {example.key}: the label {label!r} is nowhere in {train}, which has "
                    f"{', '.join(labels)}; give both files the same labels"
                )
