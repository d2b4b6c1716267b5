"""Tags words: with parts of speech (UD's .conllu files) and named entities (PAN-X's lines `word<TAB>tag`).

A word's tag is predicted from its first token. A long sentence is split between words into several sequences, so that
every word has a prediction. Local data sets (tables.py) with a column of words and one of tags are read too.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xscale.data.text import read_lines
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval.bootstrap import class_scores, entity_scores
from xscale.eval.finetune.tables import column_value, is_table, read_rows
from xscale.eval.finetune.task import IGNORED, Feature, LabelledExample, Task, label_indices

UPOS = "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X".split()  # noqa: SIM905
"""Universal parts of speech (UD v2)."""
WORDS, POS_TAGS, NER_TAGS = ("tokens", "words"), ("upos", "pos_tags", "tags"), ("ner_tags", "tags")
"""The names that a data set's column of words, of parts of speech and of entity tags may have."""
PREFIX = re.compile(r"[a-z][\w-]+:")

TaggedWord = tuple[str, str, str | None]
"""(line number, word, tag or None)."""


def read_pos(path: Path, language: str) -> list[LabelledExample]:
    """Return the examples of a CoNLL-U file, a local data set, or a file of lines `word<TAB>tag`. Raises UserError."""
    if is_table(path):
        sentences = _read_table(path, POS_TAGS)
    else:
        sentences = _read_sentences(path, _conllu_word if is_conllu(path) else _column_word)
    return _checked_examples(path, language, sentences, UPOS.__contains__, f"one of UD's: {' '.join(UPOS)}")


def read_ner(path: Path, language: str) -> list[LabelledExample]:
    """Return the examples of a local data set, or a file of lines `word<TAB>tag`. Raises UserError."""
    sentences = _read_table(path, NER_TAGS) if is_table(path) else _read_sentences(path, _column_word)
    examples = _checked_examples(path, language, sentences, is_bio, "O, B-TYPE or I-TYPE")
    return examples if is_table(path) else _without_prefix(examples)


def is_conllu(path: Path) -> bool:
    """Return True if the file's name has .conllu, or its first line that is no comment has 10 columns."""
    words = (line for _, line in read_lines(path) if line.strip() and not line.startswith("#"))
    return ".conllu" in path.suffixes or len(next(words, "\t" * 9).split("\t")) == 10


def is_bio(tag: str) -> bool:
    return tag == "O" or (tag[:2] in ("B-", "I-") and len(tag) > 2)


def _checked_examples(
    path: Path, language: str, sentences: Iterable[list[TaggedWord]], is_tag: Callable[[str], bool], tag_set: str
) -> list[LabelledExample]:
    """Return the sentences as examples. Raises UserError for missing or wrong tags. tag_set: in words, for the
    error."""
    examples = []
    for sentence in sentences:
        for line, _, tag in sentence:
            if tag is not None and not is_tag(tag):
                raise UserError(f"{path}: line {line}: the tag {tag!r} is not {tag_set}; fix it")
        lines, words, tags = zip(*sentence, strict=True)
        if None in tags and any(tags):
            raise UserError(
                f"{path}: the sentence from line {lines[0]} has words with a tag and words without; fix the sentence"
            )
        examples.append(LabelledExample(lines[0], (language,), words, None if None in tags else tags))
    if not examples:
        raise UserError(f"{path} has no sentence; give another file")
    return examples


def _read_table(path: Path, tag_columns: tuple[str, ...]) -> Iterator[list[TaggedWord]]:
    """Yield the sentences of a local data set. tag_columns: the names that the column of tags may have."""
    for key, row in read_rows(path):
        where = f"{path}: line {key}"
        words, tags = column_value(row, WORDS, where), column_value(row, tag_columns, where)
        if not all(isinstance(one, str) for one in (*words, *tags)):
            raise UserError(
                f"{where}: words and tags must be text; replace numbers by the names in the data set's `features`"
            )
        if len(words) != len(tags):
            raise UserError(f"{where} has {len(words)} words and {len(tags)} tags; fix it")
        yield [(key, word, tag) for word, tag in zip(words, tags, strict=True)]


def _read_sentences(
    path: Path, read_word: Callable[[str, str, int], tuple[str, str | None] | None]
) -> Iterator[list[TaggedWord]]:
    """Yield sentences; a blank line ends one. read_word maps a line, "FILE: line N" for errors, and the number of words
    before in the sentence to (word, tag), or to None for a line that is no word."""
    sentence: list[TaggedWord] = []
    for number, line in (*read_lines(path), (0, "")):
        if not line.strip():
            if sentence:
                yield sentence
            sentence = []
        elif tagged := read_word(line, f"{path}: line {number}", len(sentence)):
            sentence.append((str(number), *tagged))


def _conllu_word(line: str, where: str, before: int) -> tuple[str, str] | None:
    """Return the word and tag in columns 2 and 4; None for comments, ranges of multiword tokens and empty nodes."""
    if line.startswith("#"):
        return None
    fields = line.split("\t")
    if len(fields) != 10:
        raise UserError(f"{where} has {len(fields)} columns; CoNLL-U has 10, with tabs between them. Fix the line")
    if "-" in fields[0] or "." in fields[0]:
        return None
    if fields[0] != str(before + 1) or not fields[1].strip():
        raise UserError(
            f"{where}: the number {fields[0]!r} of the word {fields[1]!r} must be {before + 1}; number words from 1, "
            f"and end a sentence by a blank line"
        )
    return fields[1], fields[3]


def _column_word(line: str, where: str, before: int) -> tuple[str, str | None] | None:
    """Return the word and tag (or None) in the first and last column; None for CoNLL's marks of documents."""
    if line.startswith("-DOCSTART-"):
        return None
    fields = line.split("\t") if "\t" in line else line.split(" ")
    if not fields[0].strip():
        raise UserError(f"{where} does not begin with a word; write it as `word<TAB>tag`")
    return fields[0], fields[-1].strip() if len(fields) > 1 else None


def _without_prefix(examples: list[LabelledExample]) -> list[LabelledExample]:
    """Return the examples without the language that WikiANN's own files have before each word, as in `en:house`."""
    matches = (PREFIX.match(word) for example in examples for word in example.texts)
    prefixes = {match[0] if match else "" for match in matches}
    (prefix,) = prefixes if len(prefixes) == 1 else [""]
    return [e._replace(texts=tuple(word.removeprefix(prefix) or word for word in e.texts)) for e in examples]


def bio_labels(examples: list[LabelledExample]) -> list[str]:
    """Return the tag O, and the tags B-TYPE and I-TYPE of each type of entity in the examples."""
    types = sorted({tag[2:] for example in examples for tag in example.gold or () if tag != "O"})
    return ["O", *(f"{prefix}-{name}" for name in types for prefix in "BI")]


def encode(examples: list[LabelledExample], tokenizer: Tokenizer, max_length: int, labels: list[str]) -> list[Feature]:
    """Return one feature for each example, or several for an example of more than `max_length` tokens."""
    pieces = word_pieces(tokenizer, {word for example in examples for word in example.texts})
    room = max_length - 2
    features = []
    for i, example in enumerate(examples):
        indices = label_indices(labels, example.gold, len(example.texts))
        of_words = [pieces[word][:room] for word in example.texts]
        for start, end in word_windows([len(tokens) for tokens in of_words], room):
            lengths = [len(tokens) for tokens in of_words[start:end]]
            positions = 1 + np.cumsum(lengths) - lengths
            ids = np.array([token for tokens in of_words[start:end] for token in tokens], dtype=np.int32)
            features.append(Feature(i, example.langs, (ids,), positions, indices[start:end]))
    return features


def word_pieces(tokenizer: Tokenizer, words: set[str]) -> dict[str, list[int]]:
    """Return {word: its token ids inside a sentence}; the unknown token (or [MASK]) if the tokenizer drops the word."""
    listed = sorted(words)
    unknown = tokenizer.hf.unk_token_id
    dropped = [tokenizer.mask_id if unknown is None else unknown]
    return {word: ids or dropped for word, ids in zip(listed, tokenizer.encode_inside(listed), strict=True)}


def word_windows(lengths: list[int], room: int) -> Iterator[tuple[int, int]]:
    """Yield (first word, end) of consecutive windows, each as long as `room` tokens allow. lengths: tokens of each
    word."""
    start = size = 0
    for word, length in enumerate(lengths):
        if size + length > room:
            yield start, word
            start, size = word, 0
        size += length
    yield start, len(lengths)


def head_labels(features: list[Feature], length: int) -> dict[str, Tensor]:
    """Return {"labels": [B, L]}: each word's label at the position of its first token, IGNORED at other positions."""
    labels_BL = torch.full((len(features), length), IGNORED)
    for row, feature in zip(labels_BL, features, strict=True):
        row[torch.from_numpy(feature.positions)] = torch.from_numpy(feature.labels)
    return {"labels": labels_BL}


def word_logits(outputs: np.ndarray, row: int, feature: Feature) -> np.ndarray:
    """Return the logits [S, C] at the first token of each word. outputs: [features, L, C]."""
    return outputs[row, feature.positions]


def predict(
    examples: list[LabelledExample], features: list[Feature], logits: list[np.ndarray], labels: list[str]
) -> list[list[str]]:
    tags: list[list[str]] = [[] for _ in examples]
    for feature, logits_SC in zip(features, logits, strict=True):
        tags[feature.example_index] += [labels[index] for index in logits_SC.argmax(1)]
    return tags


def score_pos(examples: list[LabelledExample], predictions: list[list[str]], language: str) -> dict[str, float]:
    """Return the accuracy of words, F1 averaged over the gold tags, and the F1 that XTREME's evaluate.py reports, in
    which neighbouring words with the same tag count as one entity."""
    gold = [example.gold or () for example in examples]
    scores = class_scores(gold, predictions, sorted({tag for tags in gold for tag in tags}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval warns that parts of speech are not tags of entities
        return scores | {"xtreme_f1": score_ner(examples, predictions, language)["f1"]}


def score_ner(examples: list[LabelledExample], predictions: list[list[str]], language: str) -> dict[str, float]:
    """Return F1, precision and recall of whole entities by the rules of seqeval and conlleval."""
    from seqeval.metrics.sequence_labeling import get_entities

    sides = zip(examples, predictions, strict=True)
    sets = [(set(get_entities(list(example.gold or ()))), set(get_entities(tags))) for example, tags in sides]
    return entity_scores(np.array([(len(gold & predicted), len(predicted), len(gold)) for gold, predicted in sets]))


def format_predictions(examples: list[LabelledExample], predictions: list[Any]) -> str:
    return "".join("".join(tag + "\n" for tag in tags) + "\n" for tags in predictions)


_task = partial(
    Task,
    encode=encode,
    head_class="AutoModelForTokenClassification",
    head_labels=head_labels,
    select_logits=word_logits,
    predict=predict,
    format_predictions=format_predictions,
)
POS = _task(read=read_pos, list_labels=lambda examples: UPOS, score=score_pos, xtreme_folder="udpos")
NER = _task(read=read_ner, list_labels=bio_labels, score=score_ner, xtreme_folder="panx")
