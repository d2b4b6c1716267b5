"""Labelled examples, and the rows of tables: JSON lines, parquet, and folders that `datasets` saved."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale.errors import UserError
from xscale.files import pointer_problem

Row = dict[str, Any]
"""{name of a column: its value in one row}."""
BLANK = "a sentence is blank"
"""Why a row without text is left out, such as the failed translations in PAWS-X's training text."""


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
    """Why the example is neither trained on nor scored; "" if it is."""

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

    def left_out(self) -> list[str]:
        """Return a line about the examples that are left out, for each reason."""
        counts = Counter(example.left_out for example in self.rows if example.left_out)
        lines = []
        for reason, count in counts.items():
            lines.append(f"{self.path}: {count:,} of {len(self.rows):,} examples are left out, since {reason}")
        return lines


def count_labels(examples: list[LabelledExample]) -> Counter[str]:
    """Return how often each label occurs. The examples are no questions."""
    counts: Counter[str] = Counter()
    for example in examples:
        counts.update(example.labels)
    return counts


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
            f"{path} cannot be read as a data set: {reason}; write it by `datasets`' save_to_disk"
        ) from None
    if isinstance(dataset, datasets.DatasetDict):
        raise UserError(f"{path} has the splits {', '.join(dataset)}; give the folder of one of them: {path}/NAME")
    for number, row in enumerate(dataset, start=1):
        for name, feature in dataset.features.items():
            labels = getattr(feature, "feature", feature)  # the type of a list's elements
            if isinstance(labels, datasets.ClassLabel) and row[name] not in (None, -1):
                row[name] = labels.int2str(row[name])
        yield str(number), row


def column_value(row: Row, names: tuple[str, ...], where: str) -> Any:
    """Return the value of the first of these columns that the row has. Raises UserError, which begins with `where`."""
    for name in names:
        if name in row:
            return row[name]
    raise UserError(f"{where} has no column {' or '.join(names)}, only {', '.join(row)}; rename the columns")
