"""A fine-tuning task: how its files are read, encoded, predicted, scored and written.

Shape letters: S hidden states read per sequence, C outputs of the head, B sequences, L tokens of the longest one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from xscale.data.tokenizer import Tokenizer

IGNORED = -100
"""The label of a position without a label."""
CLASSIFIER = "AutoModelForSequenceClassification"


class LabelledExample(NamedTuple):
    """One example of a file: a sentence, a sentence pair, a tagged sentence or a question."""

    key: str
    """A line's number or a question's id; an example's translation has the same key in its own file."""
    langs: tuple[str, ...]
    """The language of each text, or one language for all texts."""
    texts: tuple[str, ...]
    """One or two sentences, a question and its context, or the words of a sentence."""
    gold: tuple[Any, ...] | None
    """A label, a tag for each word, or the answers (text, start); None if the file has none."""
    part: str | None = None
    """The part of the data (train, dev, test), if a file has several."""


class TaskData(NamedTuple):
    """The examples of one file."""

    path: Path
    language: str
    examples: list[LabelledExample]

    @property
    def labelled(self) -> bool:
        return all(example.gold is not None for example in self.examples)


class Feature(NamedTuple):
    """A sequence of tokens that is made of an example, or of a part of one."""

    example: int
    """The example's number in its list."""
    langs: tuple[str, ...]
    ids: tuple[np.ndarray, ...]
    """The token ids of one text or of two, int32, without special tokens."""
    places: np.ndarray
    """The positions, including special tokens, of the tokens whose states are read [S]."""
    labels: np.ndarray
    """The label of each place; for a question, the numbers of the places of its answer's first and last token."""
    spans: np.ndarray | None = None
    """The characters (first, end) of the context at each place but the first, which is [CLS] [S - 1, 2]."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


@dataclass(frozen=True)
class Task:
    """A table of the functions that make up a task."""

    read: Callable[[Path, str], list[LabelledExample]]
    labels: Callable[[list[LabelledExample]], list[str]]
    """Lists the labels of the head's outputs for a training text."""
    encode: Callable[[list[LabelledExample], Tokenizer, int, list[str]], list[Feature]]
    """Makes features of examples. The integer is the most tokens of a sequence, including special tokens; the strings
    are the labels of the head's outputs."""
    head: str
    """The transformers class with the task's head, such as AutoModelForTokenClassification."""
    head_labels: Callable[[list[Feature], int], dict[str, Tensor]]
    """Makes the labels of B features padded to L tokens, named as arguments of the forward pass of `head`."""
    read_logits: Callable[[Any, int, Feature], np.ndarray]
    """Takes the logits [S, C] of a feature, by its number, from the model's outputs for all features."""
    predict: Callable[[list[LabelledExample], list[Feature], list[np.ndarray], list[str]], list[Any]]
    """Makes a prediction for each example from the logits [S, C] of each feature."""
    score: Callable[[list[LabelledExample], list[Any], str], dict[str, float]]
    """Scores predictions in a language; the first metric is the one of the summary."""
    xtreme: str
    """The task's folder in XTREME's predictions."""
    write: Callable[[list[LabelledExample], list[Any]], str]
    """Makes the text of predictions in the format of XTREME's files."""
    suffix: str = ".tsv"
    max_length: int = 128
    epochs: int = 10
    lr: float = 2e-5
    classes: bool = True
    """True if the task predicts labels, one of which is the most frequent; False for question answering."""
    new_labels: bool = False
    """True if the published tests have labels that the training text lacks; such examples count as wrong."""


def label_numbers(labels: list[str], gold: tuple[str, ...] | None, count: int) -> np.ndarray:
    """The number of each label; IGNORED `count` times if the example has no labels."""
    return np.array([labels.index(label) for label in gold] if gold else [IGNORED] * count, dtype=np.int64)
