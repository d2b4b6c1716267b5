"""Reads local data sets: a folder of `datasets.save_to_disk`, a .parquet file or a folder of them, a .jsonl file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xscale.data.text import read_lines
from xscale.errors import UserError

Columns = dict[str, Any]
"""{name of a column: value in one row}."""


def is_table(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".parquet" or ".jsonl" in path.suffixes


def read_rows(path: Path) -> Iterator[tuple[str, Columns]]:
    """Yield (number of the row or line, columns) of each row, with labels by name, not by index. Raises UserError."""
    if path.is_dir() or path.suffix == ".parquet":
        dataset = _load(path)
        for number, row in enumerate(dataset, start=1):
            yield str(number), {name: _with_label_names(value, dataset.features[name]) for name, value in row.items()}
        return
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}: line {number} is not JSON ({error}); fix or remove the line") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is not a JSON object; fix or remove the line")
        yield str(number), row


def _load(path: Path) -> Any:
    """Return a datasets.Dataset. Nothing is written into the cache of `datasets`. Raises UserError."""
    import datasets
    import pyarrow
    from datasets.table import InMemoryTable
    from pyarrow import parquet

    if (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(folder.name for folder in path.iterdir() if folder.is_dir()))
        raise UserError(f"{path} has several splits; give one of them: {path}/NAME, where NAME is one of {splits}")
    try:
        if (path / "dataset_info.json").exists():
            return datasets.load_from_disk(str(path))
        return datasets.Dataset(InMemoryTable(parquet.read_table(path)))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give another file or folder") from None
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{path} cannot be read as a data set ({str(error).splitlines()[0]}); give a folder of "
            f"datasets.save_to_disk, or .parquet files"
        ) from None


def _with_label_names(value: Any, feature: Any) -> Any:
    """Return the value with label indices, also in lists, replaced by names. feature: the column's datasets feature."""
    if names := getattr(feature, "names", None):
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else None
    inner = getattr(feature, "feature", None)
    return [_with_label_names(one, inner) for one in value] if inner is not None and isinstance(value, list) else value


def column_value(row: Columns, names: tuple[str, ...], where: str) -> Any:
    """Return the value of the first of these columns that the row has. Raises UserError, which begins with `where`."""
    for name in names:
        if name in row:
            return row[name]
    raise UserError(f"{where} has no column {' or '.join(names)}, only {', '.join(row)}; rename the columns")
