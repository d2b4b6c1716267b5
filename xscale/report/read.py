"""Reads the files of runs (metrics.jsonl, evals.jsonl, evals/step_N.json, config.yaml, status.json) and of scores."""

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
"""The most characters of a label in a chart."""
EvalKey = tuple[str, str, str]
"""(task, results row, metric)."""


class NumberWithInterval(float):
    """A number with its 95 % interval (low, high)."""

    interval: tuple[float, ...]

    def __new__(cls, value: float, *interval: float) -> "NumberWithInterval":
        number = super().__new__(cls, value)
        number.interval = interval
        return number


@dataclass(frozen=True)
class Run:
    name: str
    """The end of the run's path, as short as all runs' names can be while they differ."""
    label: str
    """The run's name in charts; its number, from 1, if the name of some run exceeds LONGEST_LABEL."""
    metrics: dict[str, pd.Series]
    """{metric: its float at each logged step}; null and infinite numbers of the file are NaN."""
    evals: dict[EvalKey, pd.Series]
    """{key: its float at each evaluated step}. A curve's `attrs` are its 95 % intervals: {step: (low, high)}."""
    failed: list[tuple[str, float, str, str]]
    """(run's label, step, task, reason) of each failed evaluation."""
    config: dict[str, Any]
    """The content of config.yaml; {} without the file."""
    status: dict[str, Any]
    """The content of status.json; {} without the file."""
    parent: str = ""
    """The runs from which the run was forked, nearest first: `fork of RUN@STEP of RUN@STEP`; "" if it is no fork."""


@dataclass
class Scores:
    """The evaluations of one exported model, from all files that name it."""

    name: str
    label: str
    results: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """{task: {results row: {metric: number}}}."""
    failed: list[tuple[str, str, str]] = field(default_factory=list)
    """(model's name, task with its results row, reason) of each failed evaluation."""


class MetricsLog:
    """A metrics.jsonl that may grow. `read` parses only new lines, or all lines if a resume has truncated the file."""

    def __init__(self, path: Path):
        self.path = path
        self.reset()

    def reset(self) -> None:
        self.lines, self.end, self.last = 0, 0, b""
        """The number of lines read, the byte at which the last line ends, and that line."""
        self.columns: dict[str, tuple[array, array]] = defaultdict(lambda: (array("q"), array("d")))
        """{metric: (steps, values)}."""

    def read(self) -> dict[str, pd.Series]:
        """Return {metric: curve}; {} before the first step. A step's last value counts. Raises UserError."""
        if not self.path.exists():
            return {}
        with self.path.open("rb") as file:
            file.seek(self.end - len(self.last))
            if file.read(len(self.last)) != self.last:
                self.reset()
                file.seek(0)
            for line, entry in json_lines(file, self.path, self.lines):
                self.lines, self.end, self.last = self.lines + 1, self.end + len(line), line
                for name, value in entry.items():
                    if name != "step" and (value is None or isinstance(value, int | float)):
                        self.columns[name][0].append(entry["step"])
                        self.columns[name][1].append(finite_or_nan(value))
        curves = {name: pd.Series(values, steps, dtype=float) for name, (steps, values) in self.columns.items()}
        return {name: curve[~curve.index.duplicated(keep="last")].sort_index() for name, curve in curves.items()}


def read_runs(folders: list[Path], logs: dict[Path, MetricsLog] | None = None) -> list[Run]:
    """Return the runs in these folders. logs: {folder: metrics read so far}, which is updated. Raises UserError."""
    folders = list(dict.fromkeys(Path(os.path.abspath(folder)) for folder in folders))
    logs, names = {} if logs is None else logs, short_names(folders)
    return [
        read_run(folder, name, label, logs.setdefault(folder, MetricsLog(folder / "metrics.jsonl")))
        for folder, name, label in zip(folders, names, chart_labels(names), strict=True)
    ]


def read_run(folder: Path, name: str, label: str, log: MetricsLog) -> Run:
    config, status, own_evals = folder / "config.yaml", folder / "status.json", folder / "evals.jsonl"
    if not log.path.is_file() and not config.is_file():
        raise UserError(
            f"{folder} has no metrics.jsonl; give folders of runs, which are the values of --out in training"
        )
    evals = list(read_hook_evals(folder / "evals"))
    if own_evals.is_file():
        with own_evals.open("rb") as file:
            evals = [*(entry for _, entry in json_lines(file, own_evals)), *evals]
    numbers: dict[EvalKey, dict[int, float | None]] = defaultdict(dict)
    for entry in evals:
        for key, number in eval_numbers(entry):
            numbers[key][entry["step"]] = number
    return Run(
        name,
        label,
        log.read(),
        {key: eval_curve(of_steps) for key, of_steps in numbers.items()},
        [(label, e["step"], as_text(k), as_text(why)) for e in evals for k, why in as_mapping(e.get("failed")).items()],
        read_yaml(config) if config.is_file() else {},
        as_mapping(read_json(status)) if status.is_file() else {},
        describe_ancestors(folder / "ancestry.json"),
    )


def eval_curve(numbers: dict[int, float | None]) -> pd.Series:
    """Return a curve with its intervals in `attrs`. numbers: {step: number}."""
    curve = pd.Series(numbers, dtype=float).sort_index()
    curve.attrs = {step: number.interval for step, number in numbers.items() if isinstance(number, NumberWithInterval)}
    return curve


def describe_ancestors(path: Path) -> str:
    """Return Run.parent from ancestry.json."""
    entries = read_json(path) if path.is_file() else []
    runs = [as_mapping(run) for run in entries] if isinstance(entries, list) else []
    origins = [f" of {Path(as_text(run.get('run'))).name}@{as_text(run.get('step'))}" for run in runs]
    return "fork" + "".join(origins) if origins else ""


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML ({str(error).splitlines()[0]}); fix it, or remove it") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} has no fields, so it is no recipe; fix it, or remove it")
    return config


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give files that evaluations wrote") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}); write it again, or leave it out") from None


def json_lines(file: BinaryIO, path: Path, before: int = 0) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (line, its JSON object) for the rest of a file, without an unfinished last line. before: the number of
    lines that were read before. Raises UserError for a line that is no object with a step."""
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


def read_hook_evals(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of each file that checkpoint.hook has written, in the form of a line of evals.jsonl. A file
    that cannot be read counts as a failed evaluation, since the user's own command writes the files."""
    for path in sorted(folder.glob("step_*.json")):
        name = re.fullmatch(r"step_(\d{1,15})\.json", path.name)
        if name is None or not path.is_file():  # reading a pipe would wait for its writer
            continue
        try:
            scores = as_mapping(read_json(path))
        except UserError as error:
            yield {"step": int(name[1]), "failed": {path.name: error}}
            continue
        yield scores | {"step": int(name[1]), "failed": dict(flat_failures(scores))}


def flat_failures(scores: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (`TASK ROW`, reason) for each failed row of a score file."""
    for task, rows in as_mapping(scores.get("failed")).items():
        yield from ((f"{as_text(task)} {as_text(row)}", as_text(why)) for row, why in as_mapping(rows).items())


def flatten_results(results: Any) -> Iterator[tuple[EvalKey, Any]]:
    for task, rows in as_mapping(results).items():
        for row, numbers in as_mapping(rows).items():
            for name, number in as_mapping(numbers).items():
                yield (as_text(task), as_text(row), as_text(name)), number


def eval_numbers(entry: dict[str, Any]) -> Iterator[tuple[EvalKey, float | None]]:
    """Yield the numbers of an evaluation's results, with their intervals if there are any; None for null."""
    intervals = dict(flatten_results(entry.get("intervals")))
    for key, value in flatten_results(entry.get("results")):
        bounds = intervals[key] if isinstance(intervals.get(key), list) else []
        ends = [finite_or_nan(end) for end in bounds if isinstance(end, int | float)]
        if isinstance(value, int | float):
            has_interval = len(ends) == 2 and not np.isnan(ends).any()
            yield key, NumberWithInterval(finite_or_nan(value), *ends) if has_interval else finite_or_nan(value)
        elif value is None:
            yield key, None


def read_scores(paths: list[Path]) -> list[Scores]:
    """Return the scores of each model, in the order of the files. Raises UserError."""
    contents = {path: read_json(path) for path in paths}
    for path, scores in contents.items():
        if not isinstance(scores, dict) or not isinstance(scores.get("results"), dict):
            raise UserError(f"{path} has no results; give --scores files that `python -m xscale.eval.run --out` wrote")
    models = {path: Path(str(scores.get("model") or path.stem)) for path, scores in contents.items()}
    distinct = list(dict.fromkeys(models.values()))
    names = short_names(distinct)
    labelled = zip(distinct, names, chart_labels(names), strict=True)
    of_model = {model: Scores(name, label) for model, name, label in labelled}
    for path, scores in contents.items():
        own = of_model[models[path]]
        for (task, row, name), number in eval_numbers(scores):
            if number is not None:
                own.results.setdefault(task, {}).setdefault(row, {})[name] = number
        own.failed += ((own.name, *failure) for failure in flat_failures(scores))
    return list(of_model.values())


def as_text(value: Any) -> str:
    """Return the value as text without unpaired surrogates, which UTF-8 cannot encode."""
    return str(value).encode("utf-8", "replace").decode()


def finite_or_nan(value: float | None) -> float:
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.nan
    return number if math.isfinite(number) else math.nan


def as_mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def short_names(paths: list[Path]) -> list[str]:
    """Return the ends of the paths, as short as they can be while they differ."""
    for parts in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def chart_labels(names: list[str]) -> list[str]:
    """Return the names, or numbers from 1 if a name exceeds LONGEST_LABEL."""
    numbers = [str(number) for number in range(1, len(names) + 1)]
    return names if max(map(len, names), default=0) <= LONGEST_LABEL else numbers
