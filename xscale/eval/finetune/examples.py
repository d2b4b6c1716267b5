"""Labelled examples, and readers of the files that have them. A reader yields rows, which are mappings of columns.

The columns of JSON lines, parquet and folders that `datasets` saved keep their names. The columns of other files get
the names that `datasets` uses: premise, hypothesis, label; tokens, tags; question, context, answers.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale.data.text import read_lines
from xscale.errors import UserError
from xscale.files import pointer_problem

Row = dict[str, Any]
"""{name of a column: its value in one row}."""


@dataclass(frozen=True)
class LabelledExample:
    """A sentence, a pair of sentences, a sentence with tags, or a question with its context."""

    key: str
    """The number of the line, or the id of the question. A translation has the key of its original."""
    languages: tuple[str, ...]
    """The language of each text; one for all words of a sentence."""
    texts: tuple[str, ...]
    """One or two sentences, the words of a sentence, or a question and its context."""
    gold: Any
    """A label, a tag for each word, or the answers (text, first character)."""
    left_out: str = ""
    """The reason why the example is neither trained on nor scored; "" for an example that is used."""

    @property
    def labels(self) -> list[str]:
        """Return the label, or the tags. A question has none."""
        return [self.gold] if isinstance(self.gold, str) else list(self.gold)


@dataclass(frozen=True)
class LabelledFile:
    path: Path
    rows: list[LabelledExample]

    @property
    def examples(self) -> list[LabelledExample]:
        """Return the examples that are trained on or scored."""
        return [example for example in self.rows if not example.left_out]

    def left_out_lines(self) -> list[str]:
        """Return a line for each reason why examples are left out, with their number."""
        lines = []
        for reason, count in Counter(example.left_out for example in self.rows).items():
            if reason:
                lines.append(f"{self.path}: {count:,} of {len(self.rows):,} examples are left out, since {reason}")
        return lines


def count_labels(examples: list[LabelledExample]) -> Counter[str]:
    """Return how often each label occurs. The examples must not be questions."""
    counts: Counter[str] = Counter()
    for example in examples:
        counts.update(example.labels)
    return counts


def column_value(row: Row, names: tuple[str, ...], where: str) -> Any:
    """Return the value of the first of these columns that the row has. where: the row's place, for errors. Raises
    UserError."""
    for name in names:
        if name in row:
            return row[name]
    raise UserError(f"{where} has no column {' or '.join(names)}, only {', '.join(row)}; rename the columns")


def is_table(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".parquet" or ".jsonl" in path.suffixes


def read_table(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield (number of the row, its columns), with labels by name instead of by index. Raises UserError."""
    import datasets

    problem = pointer_problem(path, "*.json", "*.arrow") if path.is_dir() else pointer_problem(path)
    if problem:
        raise UserError(problem)
    try:
        if path.is_dir():
            dataset = datasets.load_from_disk(str(path))
        else:
            builder = "parquet" if path.suffix == ".parquet" else "json"
            dataset = datasets.load_dataset(builder, data_files=str(path), split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise UserError(
            f"{path} cannot be read as a data set: {reason}; give a folder of save_to_disk, Parquet or JSON Lines"
        ) from None
    if isinstance(dataset, datasets.DatasetDict):
        raise UserError(f"{path} has the splits {', '.join(dataset)}; give the folder of one of them: {path}/NAME")
    for number, row in enumerate(dataset, start=1):
        for name, feature in dataset.features.items():
            labels = getattr(feature, "feature", feature)  # of a list, the type of its elements
            if isinstance(labels, datasets.ClassLabel) and row[name] not in (None, -1):
                row[name] = labels.int2str(row[name])
        yield str(number), row


def read_tab_separated(path: Path, columns: tuple[tuple[str, ...], ...]) -> Iterator[tuple[str, Row]]:
    """Yield (line number, columns) of each line. If the first line is not a header, each column gets the first of the
    names that it may have. columns: the possible names of each column; the label is the last column."""
    names: list[str] = []
    for number, line in read_lines(path):
        fields = list(map(str.strip, line.split("\t")))
        if fields == [""]:
            continue
        if not names:
            header = list(map(str.lower, fields))
            if all(set(alternatives) & set(header) for alternatives in columns[:-1]):
                names = header
                continue
            names = [alternatives[0] for alternatives in columns]
        if len(fields) != len(names):
            form = "<TAB>".join(names)
            raise UserError(f"{path}: line {number} has {len(fields)} columns instead of {form}; fix the line")
        yield str(number), dict(zip(names, fields, strict=True))


def read_tagged_sentences(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield (number of the first word's line, words and tags) of each sentence of a .conllu file, or of a file of lines
    `word<TAB>tag`. A blank line ends a sentence. Raises UserError."""
    is_conllu = ".conllu" in path.suffixes
    row: Row = {"tokens": [], "tags": []}
    first = 0
    for number, line in read_lines(path):
        fields = line.split("\t" if "\t" in line else " ")
        if not line.strip():
            if row["tokens"]:
                yield str(first), row
            row = {"tokens": [], "tags": []}
            continue
        if line.startswith("#" if is_conllu else "-DOCSTART-"):
            continue
        if is_conllu and len(fields) != 10:
            raise UserError(
                f"{path}: line {number} has {len(fields)} columns; fix the line: CoNLL-U has 10, with tabs between them"
            )
        if is_conllu and fields[0] == "1" and row["tokens"]:
            raise UserError(f"{path}: line {number} begins a sentence; put a blank line before it")
        if is_conllu and not fields[0].isdigit():  # a range of words as in 1-2, or an empty node as in 1.1
            continue
        word, tag = (fields[1], fields[3]) if is_conllu else (fields[0].strip(), fields[-1].strip())
        if not word or len(fields) < 2:
            raise UserError(f"{path}: line {number} has no word or no tag; write `word<TAB>tag`")
        if not row["tokens"]:
            first = number
        row["tokens"].append(word)
        row["tags"].append(tag)
    if row["tokens"]:
        yield str(first), row


def read_squad(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield (id, columns) of each question of SQuAD's JSON. Raises UserError."""
    key = ""
    try:
        for article in json.loads("\n".join(line for _, line in read_lines(path)))["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    key = question["id"]
                    answers: dict[str, list[Any]] = {"text": [], "answer_start": []}
                    for answer in question["answers"]:
                        answers["text"].append(answer["text"])
                        answers["answer_start"].append(answer["answer_start"])
                    yield key, {"context": paragraph["context"]} | question | {"answers": answers}
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}; give JSON of SQuAD 1.1, or download the file again") from None
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path} has another form than SQuAD 1.1 after question {key!r} ({type(error).__name__}: {error}); give "
            f"JSON with data, paragraphs, context and qas"
        ) from None
