"""Tags of words: parts of speech (UD's .conllu files) and named entities (PAN-X's lines `token<TAB>tag`).

A word's tag is predicted from its first token. A sentence that is longer than a sequence is split between words into
several, so that every word has a prediction. Local data sets with columns `tokens` and tags are read too.
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
from xscale.eval.finetune.tables import column, is_table, read_rows
from xscale.eval.finetune.task import IGNORED, Feature, LabelledExample, Task, label_numbers

UPOS = "ADJ ADP ADV AUX CCONJ DET INTJ NOUN NUM PART PRON PROPN PUNCT SCONJ SYM VERB X".split()  # noqa: SIM905
"""Universal parts of speech (UD v2)."""
WORDS, POS_TAGS, NER_TAGS = ("tokens", "words"), ("upos", "pos_tags", "tags"), ("ner_tags", "tags")
PREFIX = re.compile(r"[a-z][\w-]+:")

TaggedWord = tuple[str, str, str | None]
"""(number of its line, word, tag)."""


def read_pos(path: Path, language: str) -> list[LabelledExample]:
    """Read CoNLL-U, a local data set, or lines `word<TAB>tag` as in XTREME's folders."""
    if is_table(path):
        sentences = _read_table(path, POS_TAGS)
    else:
        sentences = _read_sentences(path, _conllu_word if is_conllu(path) else _column_word)
    return _checked_examples(path, language, sentences, UPOS.__contains__, f"one of UD's: {' '.join(UPOS)}")


def read_ner(path: Path, language: str) -> list[LabelledExample]:
    sentences = _read_table(path, NER_TAGS) if is_table(path) else _read_sentences(path, _column_word)
    examples = _checked_examples(path, language, sentences, is_bio, "O, B-TYPE or I-TYPE")
    return examples if is_table(path) else _without_prefix(examples)


def is_conllu(path: Path) -> bool:
    """True if the name has .conllu, or the first line of a word has 10 columns."""
    words = (line for _, line in read_lines(path) if line.strip() and not line.startswith("#"))
    return ".conllu" in path.suffixes or len(next(words, "\t" * 9).split("\t")) == 10


def is_bio(tag: str) -> bool:
    return tag == "O" or (tag[:2] in ("B-", "I-") and len(tag) > 2)


def _checked_examples(
    path: Path, language: str, sentences: Iterable[list[TaggedWord]], is_tag: Callable[[str], bool], kinds: str
) -> list[LabelledExample]:
    """The sentences as examples. Raises UserError for a tag that is not one of `kinds`."""
    examples = []
    for sentence in sentences:
        for line, _, tag in sentence:
            if tag is not None and not is_tag(tag):
                raise UserError(f"{path}: line {line}: the tag {tag!r} is not {kinds}; fix it")
        lines, words, tags = zip(*sentence, strict=True)
        if None in tags and any(tags):
            raise UserError(f"{path}: the sentence from line {lines[0]} has words with a tag and words without; fix it")
        examples.append(LabelledExample(lines[0], (language,), words, None if None in tags else tags))
    if not examples:
        raise UserError(f"{path} has no sentence")
    return examples


def _read_table(path: Path, names: tuple[str, ...]) -> Iterator[list[TaggedWord]]:
    for key, row in read_rows(path):
        where = f"{path}: line {key}"
        words, tags = column(row, WORDS, where), column(row, names, where)
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
    """The sentences of a file; a blank line ends one. read_word is called with a line, its place ("FILE: line N") and
    the number of words before it in the sentence. It returns word and tag, or None if the line is not a word."""
    sentence: list[TaggedWord] = []
    for number, line in (*read_lines(path), (0, "")):
        if not line.strip():
            if sentence:
                yield sentence
            sentence = []
        elif found := read_word(line, f"{path}: line {number}", len(sentence)):
            sentence.append((str(number), *found))


def _conllu_word(line: str, where: str, before: int) -> tuple[str, str] | None:
    """The word and tag in columns 2 and 4. Comments, ranges of multiword tokens and empty nodes are not words."""
    if line.startswith("#"):
        return None
    fields = line.split("\t")
    if len(fields) != 10:
        raise UserError(f"{where} has {len(fields)} columns; CoNLL-U has 10, with tabs between them")
    if "-" in fields[0] or "." in fields[0]:
        return None
    if fields[0] != str(before + 1) or not fields[1].strip():
        raise UserError(
            f"{where}: the number {fields[0]!r} of {fields[1]!r} must be {before + 1}; words are numbered from "
            f"1, and a blank line ends a sentence"
        )
    return fields[1], fields[3]


def _column_word(line: str, where: str, before: int) -> tuple[str, str | None] | None:
    """The word and tag in the first and last column; the tag is None if there is only one column. CoNLL's marks of
    documents (-DOCSTART-) are not words."""
    if line.startswith("-DOCSTART-"):
        return None
    fields = line.split("\t") if "\t" in line else line.split(" ")
    if not fields[0].strip():
        raise UserError(f"{where} begins with no word; a line is `word<TAB>tag`")
    return fields[0], fields[-1].strip() if len(fields) > 1 else None


def _without_prefix(examples: list[LabelledExample]) -> list[LabelledExample]:
    """The examples without the language that WikiANN's own files have before each word, as in `en:house`."""
    found = (PREFIX.match(word) for example in examples for word in example.texts)
    prefixes = {match[0] if match else "" for match in found}
    (prefix,) = prefixes if len(prefixes) == 1 else [""]
    return [e._replace(texts=tuple(word.removeprefix(prefix) or word for word in e.texts)) for e in examples]


def bio_labels(examples: list[LabelledExample]) -> list[str]:
    """The tag O, and the tags B- and I- of every type of entity."""
    types = sorted({tag[2:] for example in examples for tag in example.gold or () if tag != "O"})
    return ["O", *(f"{place}-{kind}" for kind in types for place in "BI")]


def encode(examples: list[LabelledExample], tokenizer: Tokenizer, longest: int, labels: list[str]) -> list[Feature]:
    pieces = word_pieces(tokenizer, {word for example in examples for word in example.texts})
    room = longest - 2
    features = []
    for i, example in enumerate(examples):
        numbers = label_numbers(labels, example.gold, len(example.texts))
        of_words = [pieces[word][:room] for word in example.texts]
        for start, end in windows([len(tokens) for tokens in of_words], room):
            lengths = [len(tokens) for tokens in of_words[start:end]]
            places = 1 + np.cumsum(lengths) - lengths
            ids = np.array([token for tokens in of_words[start:end] for token in tokens], dtype=np.int32)
            features.append(Feature(i, example.langs, (ids,), places, numbers[start:end]))
    return features


def word_pieces(tokenizer: Tokenizer, words: set[str]) -> dict[str, list[int]]:
    """The tokens that each word has inside a sentence; the unknown token for a word that the tokenizer drops."""
    listed = sorted(words)
    unknown = tokenizer.hf.unk_token_id
    instead = [tokenizer.mask_id if unknown is None else unknown]
    return {word: ids or instead for word, ids in zip(listed, tokenizer.encode_inside(listed), strict=True)}


def windows(lengths: list[int], room: int) -> Iterator[tuple[int, int]]:
    """(first word, end) of consecutive spans of at most `room` tokens, each as long as possible."""
    start = size = 0
    for word, length in enumerate(lengths):
        if size + length > room:
            yield start, word
            start, size = word, 0
        size += length
    yield start, len(lengths)


def head_labels(features: list[Feature], length: int) -> dict[str, Tensor]:
    """Labels [B, L]: each word's label at the position of its first token, IGNORED at other positions."""
    labels_BL = torch.full((len(features), length), IGNORED)
    for row, feature in zip(labels_BL, features, strict=True):
        row[torch.from_numpy(feature.places)] = torch.from_numpy(feature.labels)
    return {"labels": labels_BL}


def read_logits(outputs: np.ndarray, number: int, feature: Feature) -> np.ndarray:
    return outputs[number, feature.places]


def predict(
    examples: list[LabelledExample], features: list[Feature], logits: list[np.ndarray], labels: list[str]
) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in examples]
    for feature, of_words in zip(features, logits, strict=True):
        found[feature.example] += [labels[number] for number in of_words.argmax(1)]
    return found


def score_pos(examples: list[LabelledExample], predictions: list[list[str]], language: str) -> dict[str, float]:
    """Accuracy of words; F1 averaged over the tags that occur; and seqeval's F1 as XTREME's evaluate.py reports it,
    in which neighbouring words with the same tag count as one entity."""
    gold = [example.gold or () for example in examples]
    found = class_scores(gold, predictions, sorted({tag for tags in gold for tag in tags}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval's: parts of speech are not tags of entities
        return found | {"xtreme_f1": score_ner(examples, predictions, language)["f1"]}


def score_ner(examples: list[LabelledExample], predictions: list[list[str]], language: str) -> dict[str, float]:
    """F1, precision and recall of whole entities by the rules of seqeval and conlleval."""
    from seqeval.metrics.sequence_labeling import get_entities

    sides = zip(examples, predictions, strict=True)
    sets = [(set(get_entities(list(example.gold or ()))), set(get_entities(found))) for example, found in sides]
    return entity_scores(np.array([(len(gold & found), len(found), len(gold)) for gold, found in sets]))


def write(examples: list[LabelledExample], predictions: list[Any]) -> str:
    return "".join("".join(tag + "\n" for tag in tags) + "\n" for tags in predictions)


_task = partial(
    Task,
    encode=encode,
    head="AutoModelForTokenClassification",
    head_labels=head_labels,
    read_logits=read_logits,
    predict=predict,
    write=write,
)
POS = _task(read=read_pos, labels=lambda examples: UPOS, score=score_pos, xtreme="udpos")
NER = _task(read=read_ner, labels=bio_labels, score=score_ner, xtreme="panx")
