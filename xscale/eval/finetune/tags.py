"""A tag for each word: parts of speech (UD's, from .conllu) and named entities (PAN-X's), `token<TAB>tag` a line.

A word's tag is predicted from its first token. A sentence that is longer than a sequence goes through several, cut
between words, so that every word has a prediction. Also local data sets with columns `tokens` and tags.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval.finetune.tables import column, is_table, read_rows
from xscale.eval.finetune.task import IGNORED, Encoding, Example, Feature, Task, numbers

UPOS = [
    "ADJ",
    "ADP",
    "ADV",
    "AUX",
    "CCONJ",
    "DET",
    "INTJ",
    "NOUN",
    "NUM",
    "PART",
    "PRON",
    "PROPN",
    "PUNCT",
    "SCONJ",
    "SYM",
    "VERB",
    "X",
]
"""Universal parts of speech (UD v2)."""
WORDS, POS_TAGS, NER_TAGS = ("tokens", "words"), ("upos", "pos_tags", "tags"), ("ner_tags", "tags")
PREFIX = re.compile(r"[a-z][\w-]+:")

Sentence = tuple[str, list[str], list[str | None]]
"""Number of its first line, words, tags."""


def read_pos(path: Path, language: str) -> list[Example]:
    """XTREME's folders have columns in the place of CoNLL-U."""
    kinds = f"one of UD's: {' '.join(UPOS)}"
    columns = partial(_of_columns, is_tag=UPOS.__contains__, kinds=kinds)
    found = _of_table(path, POS_TAGS) if is_table(path) else _of_conllu(path) if is_conllu(path) else columns(path)
    return _examples(path, language, found, UPOS.__contains__, kinds)


def read_ner(path: Path, language: str) -> list[Example]:
    kinds = "O, B-TYPE or I-TYPE"
    found = _of_table(path, NER_TAGS) if is_table(path) else _without_prefix(_of_columns(path, is_bio, kinds))
    return _examples(path, language, found, is_bio, kinds)


def is_conllu(path: Path) -> bool:
    """By its name; else by the first line of a word, which has 10 columns."""
    words = (line for _, line in read_lines(path) if line.strip() and not line.startswith("#"))
    return ".conllu" in path.suffixes or len(next(words, "\t" * 9).split("\t")) == 10


def is_bio(tag: str) -> bool:
    return tag == "O" or (tag[:2] in ("B-", "I-") and len(tag) > 2)


def _examples(
    path: Path, language: str, found: Iterable[Sentence], is_tag: Callable[[str], bool], kinds: str
) -> list[Example]:
    """Of all sentences; raises UserError for a tag that is none."""
    examples = []
    for key, words, tags in found:
        for tag in tags:
            if tag is not None and not is_tag(tag):
                raise UserError(f"{path}: the sentence from line {key} has the tag {tag!r}, which is not {kinds}")
        if len(words) != len(tags) or (None in tags and any(tags)):
            raise UserError(f"{path}: the sentence from line {key} has words with a tag and words without; mend it")
        gold = None if None in tags else tuple(tags)
        examples.append(Example(key, (language,), tuple(words), gold))
    if not examples:
        raise UserError(f"{path} has no sentence")
    return examples


def _of_table(path: Path, tags: tuple[str, ...]) -> Iterator[Sentence]:
    for key, row in read_rows(path):
        where = f"{path}: line {key}"
        words, of_words = column(row, WORDS, where), column(row, tags, where)
        if not all(isinstance(one, str) for one in (*words, *of_words)):
            raise UserError(f"{where}: words and tags have to be text; a data set's features say the tags' names")
        yield key, words, of_words


def _of_conllu(path: Path) -> Iterator[Sentence]:
    """Words alone: neither the ranges of multiword tokens nor empty nodes. Column 2 is the word, 4 its tag."""
    first, words, tags = 0, list[str](), list[str | None]()
    for number, line in read_lines(path):
        if not line.strip():
            if words:
                yield str(first), words, tags
            words, tags = [], []
            continue
        if line.startswith("#"):
            continue
        fields = line.split("\t")
        if len(fields) != 10:
            raise UserError(f"{path}: line {number} has {len(fields)} columns; CoNLL-U has 10, with tabs between them")
        if "-" in fields[0] or "." in fields[0]:
            continue
        if fields[0] != str(len(words) + 1) or not fields[1].strip():
            raise UserError(
                f"{path}: line {number}: {fields[0]!r} {fields[1]!r} is not word {len(words) + 1} of its sentence; "
                f"words are numbered from 1, and a blank line ends a sentence"
            )
        if fields[3] not in UPOS:
            raise UserError(
                f"{path}: line {number}: {fields[3]!r} in column 4 is no part of speech of UD: {' '.join(UPOS)}"
            )
        first = first if words else number
        words.append(fields[1])
        tags.append(fields[3])
    if words:
        yield str(first), words, tags


def _of_columns(path: Path, is_tag: Callable[[str], bool], kinds: str) -> Iterator[Sentence]:
    """Word and tag, the first and the last column; one column alone has no tags. A blank line ends a sentence."""
    first, words, tags = 0, list[str](), list[str | None]()
    for number, line in read_lines(path):
        if not line.strip() or line.startswith("-DOCSTART-"):
            if words:
                yield str(first), words, tags
            words, tags = [], []
            continue
        fields = line.split("\t") if "\t" in line else line.split(" ")
        tag = fields[-1].strip() if len(fields) > 1 else None
        if not fields[0].strip():
            raise UserError(f"{path}: line {number} begins with no word; a line is `word<TAB>tag`")
        if tag is not None and not is_tag(tag):
            raise UserError(f"{path}: line {number}: the tag {tag!r} is not {kinds}; a line is `word<TAB>tag`")
        first = first if words else number
        words.append(fields[0])
        tags.append(tag)
    if words:
        yield str(first), words, tags


def _without_prefix(given: Iterator[Sentence]) -> list[Sentence]:
    """WikiANN's own files say a language before each word, `en:house`, whatever the language is called here."""
    sentences = list(given)
    found = (PREFIX.match(word) for _, words, _ in sentences for word in words)
    prefixes = {match[0] if match else "" for match in found}
    (prefix,) = prefixes if len(prefixes) == 1 else [""]
    return [(key, [word.removeprefix(prefix) or word for word in words], tags) for key, words, tags in sentences]


def upos_labels(examples: list[Example]) -> list[str]:
    return UPOS


def bio_labels(examples: list[Example]) -> list[str]:
    """O, and the beginning and the inside of every type."""
    types = sorted({tag[2:] for example in examples for tag in example.gold or () if tag != "O"})
    return ["O", *(f"{place}-{kind}" for kind in types for place in "BI")]


def encode(examples: list[Example], encoding: Encoding) -> list[Feature]:
    pieces = word_pieces(encoding.tokenizer, {word for example in examples for word in example.texts})
    room = encoding.longest - 2
    features = []
    for i, example in enumerate(examples):
        labels = numbers(encoding.labels, example.gold, len(example.texts))
        of_words = [pieces[word][:room] for word in example.texts]
        for start, end in windows([len(tokens) for tokens in of_words], room):
            lengths = [len(tokens) for tokens in of_words[start:end]]
            places = 1 + np.cumsum(lengths) - lengths
            ids = np.array([token for tokens in of_words[start:end] for token in tokens], dtype=np.int32)
            features.append(Feature(i, example.langs, (ids,), places, labels[start:end]))
    return features


def word_pieces(tokenizer: Tokenizer, words: set[str]) -> dict[str, list[int]]:
    """Tokens of each word as it has them inside a sentence; of one that the tokenizer drops, its unknown token."""
    listed = sorted(words)
    unknown = tokenizer.hf.unk_token_id
    instead = [tokenizer.mask_id if unknown is None else unknown]
    return {word: ids or instead for word, ids in zip(listed, tokenizer.encode_inside(listed), strict=True)}


def windows(lengths: list[int], room: int) -> Iterator[tuple[int, int]]:
    """First word and end of stretches of at most `room` tokens, each as long as it can be."""
    start = size = 0
    for word, length in enumerate(lengths):
        if size + length > room:
            yield start, word
            start, size = word, 0
        size += length
    yield start, len(lengths)


def answers(features: list[Feature], length: int) -> dict[str, Tensor]:
    """A word's label stands at its first token."""
    labels_BL = torch.full((len(features), length), IGNORED)
    for row, feature in zip(labels_BL, features, strict=True):
        row[torch.from_numpy(feature.places)] = torch.from_numpy(feature.labels)
    return {"labels": labels_BL}


def read_logits(outputs: np.ndarray, number: int, feature: Feature) -> np.ndarray:
    return outputs[number, feature.places]


def predict(
    examples: list[Example], features: list[Feature], logits: list[np.ndarray], labels: list[str]
) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in examples]
    for feature, of_words in zip(features, logits, strict=True):
        found[feature.example] += [labels[number] for number in of_words.argmax(1)]
    return found


def score_pos(examples: list[Example], predictions: list[list[str]], language: str) -> dict[str, float]:
    """Accuracy of words, which equals the F1 of all words together; F1 averaged over the tags that occur; and seqeval's
    F1 as XTREME's evaluate.py reports it, where words of one tag that follow one another count as one."""
    import seqeval.metrics
    from sklearn.metrics import accuracy_score, f1_score

    gold = [tag for example in examples for tag in example.gold or ()]
    predicted = [tag for tags in predictions for tag in tags]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a part of speech is no entity's tag
        sentences = [list(example.gold or ()) for example in examples]
        entities = seqeval.metrics.f1_score(sentences, predictions, zero_division=0)
    return {
        "accuracy": float(accuracy_score(gold, predicted)),
        "macro_f1": float(f1_score(gold, predicted, labels=sorted(set(gold)), average="macro", zero_division=0)),
        "xtreme_f1": float(entities),
    }


def score_ner(examples: list[Example], predictions: list[list[str]], language: str) -> dict[str, float]:
    """Of whole entities, by seqeval's rules, which are conlleval's."""
    from seqeval.metrics import f1_score, precision_score, recall_score

    gold = [list(example.gold or ()) for example in examples]
    metrics = {"f1": f1_score, "precision": precision_score, "recall": recall_score}
    return {name: float(metric(gold, predictions, zero_division=0)) for name, metric in metrics.items()}


def write(examples: list[Example], predictions: list[list[str]]) -> str:
    return "".join("".join(tag + "\n" for tag in tags) + "\n" for tags in predictions)


_task = partial(
    Task,
    encode=encode,
    head="AutoModelForTokenClassification",
    answers=answers,
    read_logits=read_logits,
    predict=predict,
    write=write,
)
POS = _task(read=read_pos, labels=upos_labels, score=score_pos, xtreme="udpos")
NER = _task(read=read_ner, labels=bio_labels, score=score_ner, xtreme="panx")
