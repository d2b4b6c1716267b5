"""Defines what a fine-tuning task consists of: functions that read, encode, predict, score and format its examples.

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
    """A line number or a question's id. An example has the same key in the files of all languages."""
    langs: tuple[str, ...]
    """The language of each text, or one language for all texts."""
    texts: tuple[str, ...]
    """One or two sentences, a question and its context, or the words of a sentence."""
    gold: tuple[Any, ...] | None
    """One label, a tag for each word, or the answers (text, start); None if the file has no labels."""
    split: str | None = None
    """train, dev or test, if the file has several splits."""


class TaskData(NamedTuple):
    """The examples of one file."""

    path: Path
    language: str
    examples: list[LabelledExample]

    @property
    def is_labelled(self) -> bool:
        """Return True if all examples have labels."""
        return all(example.gold is not None for example in self.examples)


class Feature(NamedTuple):
    """A sequence of tokens that is made from an example, or from a piece of a long example."""

    example_index: int
    """The index of the example in the list that was encoded."""
    langs: tuple[str, ...]
    ids: tuple[np.ndarray, ...]
    """The token ids (int32) of the one or two texts, without special tokens."""
    positions: np.ndarray
    """The positions in the sequence, which has special tokens, of the hidden states that the head reads [S]."""
    labels: np.ndarray
    """The label index of each position [S]; for a question, the indices in `positions` of its answer's ends [2]."""
    spans: np.ndarray | None = None
    """The context's characters (first, end) at each position, without position 0, which is [CLS] [S - 1, 2]."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens without special tokens."""
        return sum(map(len, self.ids))


@dataclass(frozen=True)
class Task:
    """A table of the functions that make up a task."""

    read: Callable[[Path, str], list[LabelledExample]]
    list_labels: Callable[[list[LabelledExample]], list[str]]
    """Lists the labels that a head predicts after training on these examples, in the order of its outputs."""
    encode: Callable[[list[LabelledExample], Tokenizer, int, list[str]], list[Feature]]
    """Makes features of at most so many tokens, special ones included. The strings are the labels that the head
    predicts."""
    head_class: str
    """The name of the transformers class with the task's head, such as AutoModelForTokenClassification."""
    head_labels: Callable[[list[Feature], int], dict[str, Tensor]]
    """Makes the labels of B features padded to L tokens, by the names of the arguments of the head's forward pass."""
    select_logits: Callable[[Any, int, Feature], np.ndarray]
    """Selects a feature's logits [S, C] from the outputs for all features, in which the integer is its row."""
    predict: Callable[[list[LabelledExample], list[Feature], list[np.ndarray], list[str]], list[Any]]
    """Makes a prediction for each example from the logits [S, C] of each feature."""
    score: Callable[[list[LabelledExample], list[Any], str], dict[str, float]]
    """Scores predictions in a language; the first metric is the main one, which summaries show."""
    xtreme_folder: str
    """The name of the task's folder in the predictions that XTREME's evaluate.py reads."""
    format_predictions: Callable[[list[LabelledExample], list[Any]], str]
    """Makes the content of XTREME's file of predictions, whose name ends in `suffix`."""
    suffix: str = ".tsv"
    max_length: int = 128
    epochs: int = 10
    lr: float = 2e-5
    predicts_labels: bool = True
    """True if a task predicts labels from a fixed list; False for question answering."""
    allows_new_labels: bool = False
    """True if the tests may have labels that the training text lacks; examples with such labels count as wrong."""


def label_indices(labels: list[str], gold: tuple[str, ...] | None, count: int) -> np.ndarray:
    """Return the index in `labels` of each gold label; without gold labels, `count` times IGNORED."""
    return np.array([labels.index(label) for label in gold] if gold else [IGNORED] * count, dtype=np.int64)
