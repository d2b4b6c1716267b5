"""This module reads the files that runs and evaluations have written: a run's metrics.jsonl, evals.jsonl,
evals/step_N.json, config.yaml and status.json, and JSON files of scores.
"""

import json
import math
import os
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd
import yaml

from xscale.errors import UserError

LONGEST_LABEL = 16
"""A line's label in a chart has at most this many characters."""
EvalKey = tuple[str, str, str]
"""(task, results row, name of the number)."""


class Measured(float):
    """A number with its 95 % interval, (low, high)."""

    interval: tuple[float, ...]

    def __new__(cls, value: float, *interval: float) -> "Measured":
        made = super().__new__(cls, value)
        made.interval = interval
        return made


@dataclass(frozen=True)
class Run:
    name: str
    """The last parts of the run's path: as few as give all runs different names."""
    label: str
    """The run's name in charts, or its number if any run's name is longer than LONGEST_LABEL."""
    metrics: dict[str, pd.Series]
    """Metric -> its curve, which has a float for each step; null and infinite numbers of the file are NaN."""
    evals: dict[EvalKey, pd.Series]
    """The curve of each number. A curve's `attrs` are its 95 % intervals: step -> (low, high)."""
    failed: list[tuple[str, float, str, str]]
    """(run's label, step, task, reason) of each failed evaluation."""
    config: dict[str, Any]
    """The content of config.yaml; empty if there is none. `status` is the content of status.json in the same way."""
    status: dict[str, Any]
    parent: str = ""
    """The ancestors of a fork, such as `fork of RUN@STEP of RUN@STEP`, the nearest first; "" if the run is no fork."""


@dataclass
class Scores:
    """The evaluations of one exported model, from all files that name it."""

    name: str
    label: str
    results: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """Task -> results row -> name -> number."""
    failed: list[tuple[str, str, str]] = field(default_factory=list)
    """(model's name, task with its results row, reason) of each failed evaluation."""


class MetricsLog:
    """A metrics.jsonl that may still grow. Each `read` parses only new lines, or all if a resume has cut the file."""

    def __init__(self, path: Path):
        self.path = path
        self.begin()

    def begin(self) -> None:
        self.lines, self.end, self.last = 0, 0, b""
        """The number of lines read, the byte at which the last of them ends, and this line."""
        self.found: dict[str, tuple[array, array]] = defaultdict(lambda: (array("q"), array("d")))
        """Metric -> its steps and its values."""

    def read(self) -> dict[str, pd.Series]:
        """Return the curves; none before the first step. If a step has several values, the last one counts. Raises
        UserError."""
        if not self.path.exists():
            return {}
        with self.path.open("rb") as file:
            file.seek(self.end - len(self.last))
            if file.read(len(self.last)) != self.last:
                self.begin()
                file.seek(0)
            for line, entry in json_lines(file, self.path, self.lines):
                self.lines, self.end, self.last = self.lines + 1, self.end + len(line), line
                for name, value in entry.items():
                    if name != "step" and (value is None or isinstance(value, int | float)):
                        self.found[name][0].append(entry["step"])
                        self.found[name][1].append(finite(value))
        curves = {name: pd.Series(values, steps, dtype=float) for name, (steps, values) in self.found.items()}
        return {name: curve[~curve.index.duplicated(keep="last")].sort_index() for name, curve in curves.items()}


def read_runs(folders: list[Path], logs: dict[Path, MetricsLog] | None = None) -> list[Run]:
    """Return the runs in some folders, with short labels. logs: the metrics of each folder from earlier calls, to which
    new ones are added. Raises UserError."""
    folders = list(dict.fromkeys(Path(os.path.abspath(folder)) for folder in folders))
    logs, names = {} if logs is None else logs, short_names(folders)
    return [
        read_run(folder, name, label, logs.setdefault(folder, MetricsLog(folder / "metrics.jsonl")))
        for folder, name, label in zip(folders, names, labels(names), strict=True)
    ]


def read_run(folder: Path, name: str, label: str, log: MetricsLog) -> Run:
    config, status, own_evals = folder / "config.yaml", folder / "status.json", folder / "evals.jsonl"
    if not log.path.is_file() and not config.is_file():
        raise UserError(
            f"{folder} has no metrics.jsonl; give directories of runs, which are the values of --out at their starts"
        )
    evals = list(hook_scores(folder / "evals"))
    if own_evals.is_file():
        with own_evals.open("rb") as file:
            evals = [*(entry for _, entry in json_lines(file, own_evals)), *evals]
    numbers: dict[EvalKey, dict[int, float | None]] = defaultdict(dict)
    for entry in evals:
        for key, number in measured(entry):
            numbers[key][entry["step"]] = number
    return Run(
        name,
        label,
        log.read(),
        {key: eval_curve(of_steps) for key, of_steps in numbers.items()},
        [(label, e["step"], text(task), text(why)) for e in evals for task, why in mapping(e.get("failed")).items()],
        read_yaml(config) if config.is_file() else {},
        mapping(read_json(status)) if status.is_file() else {},
        ancestors(folder / "ancestry.json"),
    )


def eval_curve(numbers: dict[int, float | None]) -> pd.Series:
    """Return the curve of an evaluation's numbers by step, with their intervals in `attrs`."""
    curve = pd.Series(numbers, dtype=float).sort_index()
    curve.attrs = {step: number.interval for step, number in numbers.items() if isinstance(number, Measured)}
    return curve


def ancestors(path: Path) -> str:
    found = read_json(path) if path.is_file() else []
    runs = [mapping(run) for run in found] if isinstance(found, list) else []
    places = [f" of {Path(text(run.get('run'))).name}@{text(run.get('step'))}" for run in runs]
    return "fork" + "".join(places) if places else ""


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML ({str(error).splitlines()[0]}); fix it, or remove it") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} has no fields, so it is no recipe; fix it, or remove it")
    return found


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give files that evaluations wrote") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}); write it again, or leave it out") from None


def json_lines(file: BinaryIO, path: Path, before: int = 0) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each further line of a file and its object, which has a step. An unfinished last line is left out. before:
    the number of lines that were read before."""
    for number, line in enumerate(file, before + 1):
        if not line.endswith(b"\n"):
            return
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int) or entry["step"] >= 2**53:
            raise UserError(f"{path}, line {number}, is no JSON object with a step: {line[:60]!r}; remove the line")
        yield line, entry


def hook_scores(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of each file that checkpoint.hook has written, in the form of a line of evals.jsonl. A user's
    command writes them, so a file that cannot be read counts as a failed evaluation and does not end the report."""
    for path in sorted(folder.glob("step_*.json")):
        name = re.fullmatch(r"step_(\d{1,15})\.json", path.name)
        if name is None or not path.is_file():  # reading a pipe would wait for its writer
            continue
        try:
            found = mapping(read_json(path))
        except UserError as error:
            yield {"step": int(name[1]), "failed": {path.name: error}}
            continue
        yield found | {"step": int(name[1]), "failed": dict(flat_failures(found))}


def flat_failures(scores: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for task, rows in mapping(scores.get("failed")).items():
        yield from ((f"{text(task)} {text(row)}", text(why)) for row, why in mapping(rows).items())


def flat(results: Any) -> Iterator[tuple[EvalKey, Any]]:
    for task, rows in mapping(results).items():
        for row, numbers in mapping(rows).items():
            yield from (((text(task), text(row), text(name)), n) for name, n in mapping(numbers).items())


def measured(entry: dict[str, Any]) -> Iterator[tuple[EvalKey, float | None]]:
    """Yield the numbers of an evaluation's results, as Measured if they have an interval."""
    intervals = dict(flat(entry.get("intervals")))
    for key, value in flat(entry.get("results")):
        found = intervals.get(key)
        ends = [finite(end) for end in found if isinstance(end, int | float)] if isinstance(found, list) else []
        if isinstance(value, int | float):
            yield key, Measured(finite(value), *ends) if len(ends) == 2 and not np.isnan(ends).any() else finite(value)
        elif value is None:
            yield key, None


def read_scores(paths: list[Path]) -> list[Scores]:
    """Return the scores of each model, in the order of the files. Raises UserError."""
    found = {path: read_json(path) for path in paths}
    for path, scores in found.items():
        if not isinstance(scores, dict) or not isinstance(scores.get("results"), dict):
            raise UserError(f"{path} has no results; --scores takes what `python -m xscale.eval.run --out` writes")
    models = {path: Path(str(scores.get("model") or path.stem)) for path, scores in found.items()}
    distinct = list(dict.fromkeys(models.values()))
    names = short_names(distinct)
    of_model = {model: Scores(name, label) for model, name, label in zip(distinct, names, labels(names), strict=True)}
    for path, scores in found.items():
        own = of_model[models[path]]
        for (task, row, name), number in measured(scores):
            if number is not None:
                own.results.setdefault(task, {}).setdefault(row, {})[name] = number
        own.failed += ((own.name, *failure) for failure in flat_failures(scores))
    return list(of_model.values())


def text(value: Any) -> str:
    """Return the value as text without unpaired surrogates, which files and consoles refuse."""
    return str(value).encode("utf-8", "replace").decode()


def finite(value: float | None) -> float:
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.nan
    return number if math.isfinite(number) else math.nan


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def short_names(paths: list[Path]) -> list[str]:
    """Return the last parts of each path: as few as give all paths different names."""
    for parts in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def labels(names: list[str]) -> list[str]:
    numbers = [str(number) for number in range(1, len(names) + 1)]
    return names if max(map(len, names), default=0) <= LONGEST_LABEL else numbers
