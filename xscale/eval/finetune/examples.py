"""Labelled examples, and readers of the files that have them.

A reader yields the place of each row in the file, such as "line 3", and the columns of the row. The tasks need the
columns text or premise, hypothesis, label; tokens, tags; question, context, answers.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from xscale.data.text import read_lines
from xscale.errors import UserError, env_number
from xscale.files import describe_empty_or_placeholder

Place = str
"""The place of a row in its file, such as "line 3"."""
Columns = dict[str, Any]
"""{name of a column: its value in one row}."""
COLUMN_NAMES = {
    "sentence": "text",
    "text": "text",
    "sentence1": "premise",
    "premise": "premise",
    "sentence2": "hypothesis",
    "hypothesis": "hypothesis",
    "category": "label",
    "gold_label": "label",
    "label": "label",
    "words": "tokens",
    "tokens": "tokens",
    "tags": "tags",
    "pos_tags": "tags",
    "ner_tags": "tags",
    "upos": "tags",
}
"""{name of a column in data sets: its name here}. If a row has several names of one column, the last of them counts."""


@dataclass(frozen=True)
class LabelledExample:
    """A sentence, a pair of sentences, a sentence with tags, or a question with its context."""

    texts: tuple[str, ...]
    """One or two sentences, the words of a sentence, or a question and its context."""
    labels: tuple[str, ...] = ()
    """One label, or a tag for each word. A question has none."""
    answers: tuple[tuple[str, int], ...] = ()
    """The right answers to a question, as (text, first character in the context)."""
    languages: tuple[str, str] = ("", "")
    """The languages of the first and the second text."""
    path: Path = Path()
    place: Place = ""
    """The example's line or question in its file. A translation has the place of its original."""


class LeftOut(Exception):
    """An example is neither trained on nor scored. The message is the reason."""


def print_on_rank_0(text: str) -> None:
    """Print a line on the first rank only."""
    if env_number("RANK", 0) == 0:
        print(text, flush=True)


def with_canonical_columns(row: Columns) -> Columns:
    """Return the columns of a row, also with the names that they have here."""
    renamed = dict(row)
    for name_in_row, name in COLUMN_NAMES.items():
        if name_in_row in row:
            renamed[name] = row[name_in_row]
    return renamed


def read_jsonl_or_parquet(path: Path) -> Iterator[tuple[Place, Columns]]:
    """Yield the rows of a .jsonl or .parquet file, with the names of labels instead of their numbers. Raises
    UserError."""
    import datasets

    problem = describe_empty_or_placeholder(path)
    if path.is_dir():
        problem = f"{path} is a folder. Use a .jsonl file, or a .parquet file from `Dataset.to_parquet`"
    if problem:
        raise UserError(problem)
    builder = "parquet" if path.suffix == ".parquet" else "json"
    try:
        table = datasets.load_dataset(builder, data_files=str(path), split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise UserError(f"{path} cannot be read as a table ({reason}). Use a file of JSON Lines or Parquet") from None
    for number, row in enumerate(table, start=1):
        for name, feature in table.features.items():
            labels = getattr(feature, "feature", feature)  # of a list, the type of its elements
            if isinstance(labels, datasets.ClassLabel) and row[name] == -1:
                row[name] = None
            elif isinstance(labels, datasets.ClassLabel) and row[name] is not None:
                row[name] = labels.int2str(row[name])
        place = f"row {number}"
        if "question" in row and row.get("id") is not None:
            place = f"question {row['id']}"
        yield place, row


def read_tab_separated(path: Path, columns_without_header: tuple[str, ...]) -> Iterator[tuple[Place, Columns]]:
    """Yield the rows of a file of lines with tabs between the columns. columns_without_header: their names, unless the
    first line with text is a header. The last column is the label. Raises UserError."""
    names: list[str] = []
    for number, line in read_lines(path):
        fields = list(map(str.strip, line.split("\t")))
        if fields == [""]:
            continue
        if not names:
            names = list(map(str.lower, fields))
            if set(columns_without_header[:-1]) <= with_canonical_columns(dict.fromkeys(names)).keys():
                continue
            names = list(columns_without_header)
        if len(fields) != len(names):
            form = "<TAB>".join(names)
            raise UserError(
                f"{path}: line {number}: the number of columns is {len(fields)} instead of {len(names)} ({form}). "
                "Correct the line"
            )
        yield f"line {number}", dict(zip(names, fields, strict=True))


def read_tagged_sentences(path: Path) -> Iterator[tuple[Place, Columns]]:
    """Yield the words and tags of each sentence of a .conllu file, or of a file of lines `word<TAB>tag`. A blank line
    ends a sentence. Raises UserError."""
    is_conllu = ".conllu" in path.suffixes
    for is_blank, lines in groupby(read_lines(path), lambda line: not line[1].strip()):
        row: Columns = {"tokens": [], "tags": []}
        for number, line in lines:
            if is_blank or line.startswith("#" if is_conllu else "-DOCSTART-"):
                continue
            fields = line.split("\t" if "\t" in line else " ")
            if is_conllu and (len(fields) != 10 or (fields[0] == "1" and row["tokens"])):
                raise UserError(
                    f"{path}: line {number} is not CoNLL-U: {line[:60]!r}. Write ten columns with tabs between "
                    "them, and a blank line after each sentence"
                )
            if is_conllu and not fields[0].isdigit():  # a range of words as in 1-2, or an empty node as in 1.1
                continue
            if is_conllu:
                fields = [fields[1], fields[3]]
            if len(fields) < 2 or not fields[0].strip():
                raise UserError(f"{path}: line {number} lacks the word or the tag. Write `word<TAB>tag`")
            row["tokens"].append(fields[0].strip())
            row["tags"].append(fields[-1].strip())
        if row["tokens"]:
            yield f"the sentence that ends at line {number}", row


def check_not_wikiann_or_germeval(path: Path, sentences: list[tuple[str, ...]]) -> None:
    """Raise UserError if the words of all sentences start with a language (WikiANN), or are numbers (GermEval)."""
    prefix = " ".join(sentences[0]).partition(":")[0] + ":"
    if re.match("[a-z-]+:$", prefix) and all(word.startswith(prefix) for word in chain.from_iterable(sentences)):
        raise UserError(
            f"{path}: every word starts with {prefix!r}, as in the files of WikiANN. Remove this prefix by "
            f"`sed 's/^{prefix}//' {path} > NEW_FILE`"
        )
    if all(words == tuple(map(str, range(1, len(words) + 1))) for words in sentences):
        raise UserError(
            f"{path}: the first column has numbers instead of words, as in the files of GermEval. Keep the columns of "
            f"the words and tags by `grep -v '^#' {path} | cut -f 2,3 > NEW_FILE`"
        )


def read_squad(path: Path) -> Iterator[tuple[Place, Columns]]:
    """Yield the questions of SQuAD's JSON. Raises UserError."""
    text = "\n".join(line for _, line in read_lines(path))
    place = "the start of the file"
    try:
        for article in json.loads(text)["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    place = f"question {question['id']}"
                    answers: dict[str, list[Any]] = {"text": [], "answer_start": []}
                    for answer in question["answers"]:
                        answers["text"].append(answer["text"])
                        answers["answer_start"].append(answer["answer_start"])
                    yield place, {"context": paragraph["context"]} | question | {"answers": answers}
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}). Download the file again") from None
    except (KeyError, TypeError) as error:
        reason = "a value has the wrong type"
        if isinstance(error, KeyError):
            reason = f"the field {error} is missing"
        raise UserError(
            f"{path} is not JSON of SQuAD 1.1: {reason}, at or after {place}. Write the fields as in the files of "
            "SQuAD 1.1: data, paragraphs, context, qas, id, question, answers, text and answer_start"
        ) from None


def column_value(row: Columns, name: str, kind: type) -> Any:
    """Return the value of a column. kind: the type that it must have. Raises UserError without the row's place."""
    value = row.get(name)
    if name not in row or not isinstance(value, kind):
        raise UserError(
            f"each example needs a column `{name}` of type {kind.__name__}. Here the columns are {', '.join(row)}, and "
            f"the value of `{name}` is {value!r}. Rename or correct the columns"
        )
    return value
