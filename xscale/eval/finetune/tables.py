"""Rows of local data sets: folders of `datasets.save_to_disk`, .parquet files, .jsonl files, plain or compressed."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xscale.data.text import files_of, read_lines
from xscale.errors import UserError

Row = dict[str, Any]


def is_table(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".parquet" or _is_jsonl(path)


def _is_jsonl(path: Path) -> bool:
    return ".jsonl" in path.suffixes


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(key, row) of a file or a directory; names in place of the numbers of labels. Raises UserError."""
    if not path.is_dir():
        yield from _read_file(path)
    elif (path / "dataset_info.json").exists():
        yield from _numbered(_of_dataset(_load(path)))
    elif (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(folder.name for folder in path.iterdir() if folder.is_dir()))
        raise UserError(f"{path} has several splits; give one of them: {path}/NAME, NAME of {splits}")
    else:
        tables = [file for file in files_of([path]) if is_table(file)]
        if not tables:
            raise UserError(
                f"{path} is no data set: neither of datasets.save_to_disk, nor with .parquet or .jsonl files"
            )
        yield from _numbered(row for file in tables for _, row in _read_file(file))


def _numbered(rows: Iterable[Row]) -> Iterator[tuple[str, Row]]:
    return ((str(number), row) for number, row in enumerate(rows, start=1))


def _read_file(path: Path) -> Iterator[tuple[str, Row]]:
    if not _is_jsonl(path):
        yield from _numbered(_of_dataset(_load(path)))
        return
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}: line {number} is not JSON ({error}); mend or remove the line") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is no JSON object; each line has to be one")
        yield str(number), row


def _load(path: Path) -> Any:
    """A datasets.Dataset. Nothing is written into the cache of `datasets`."""
    import datasets
    import pyarrow
    from datasets.table import InMemoryTable
    from pyarrow import parquet

    try:
        if path.is_dir():
            return datasets.load_from_disk(str(path))
        return datasets.Dataset(InMemoryTable(parquet.read_table(path)))
    except FileNotFoundError:
        raise UserError(f"{path} not found") from None
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}); write the data set anew") from None


def _of_dataset(dataset: Any) -> Iterator[Row]:
    for row in dataset:
        yield {name: _named(value, dataset.features[name]) for name, value in row.items()}


def _named(value: Any, feature: Any) -> Any:
    if names := getattr(feature, "names", None):
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else None
    inner = getattr(feature, "feature", None)
    return [_named(one, inner) for one in value] if inner is not None and isinstance(value, list) else value


def column(row: Row, names: tuple[str, ...], where: str) -> Any:
    """The first of the names that the row has. Raises UserError."""
    for name in names:
        if name in row:
            return row[name]
    raise UserError(f"{where}: has no column {' or '.join(names)}, only {', '.join(row)}; rename the columns")
