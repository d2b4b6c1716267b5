"""Reads the files of runs (metrics.jsonl, evals.jsonl, config.yaml, status.json) and result files of evaluations."""

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from xscale.errors import UserError
from xscale.eval.bootstrap import REPLICATES, Score
from xscale.metric_keys import MetricKey

SHOWN_METRICS = ("loss", "alignment", "tokens", "tokens_per_s", "step_s", "skipped")
"""The metrics of metrics.jsonl that a page shows. TensorBoard has all."""


class ScoreName(NamedTuple):
    task: str
    row: str
    metric: str


@dataclass
class Results:
    """A model's scores: those of result files, or of a run's last evaluation."""

    scores: dict[ScoreName, float] = field(default_factory=dict)
    """{name: score}; a Score if its values in resampled texts are known."""
    intervals: dict[ScoreName, tuple[float, float]] = field(default_factory=dict)
    """The 95 % intervals."""
    failed: dict[str, str] = field(default_factory=dict)
    """{`TASK ROW`: why it failed}."""


@dataclass(frozen=True)
class Run:
    metrics: dict[str, pd.Series]
    """{metric: its number at each logged step}; null and infinite numbers are NaN."""
    scores: dict[ScoreName, pd.Series]
    """{name: its number at each evaluated step}."""
    last: Results
    """The last evaluation, with the failures of all."""
    recipe: dict[str, Any]
    status: dict[str, Any]
    origin: str
    """The runs from which the run was forked, nearest first: `fork of RUN@STEP of RUN@STEP`; "" if it is no fork."""


def read_runs(folders: list[Path]) -> dict[str, Run]:
    """Return {name: run}. Raises UserError for a folder without a run, and for a damaged file."""
    folders = list(dict.fromkeys(folder.absolute() for folder in folders))
    return dict(zip(short_names(folders), map(read_run, folders), strict=True))


def read_run(folder: Path) -> Run:
    if not (folder / "metrics.jsonl").is_file() and not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} has no metrics.jsonl; give folders of runs (`--out` of a training), or result files")
    numbers: dict[ScoreName, dict[int, float]] = defaultdict(dict)
    last = Results()
    failed = {}
    for entry in json_lines(folder / "evals.jsonl"):
        last = Results(numbers_of(entry.get("results")), intervals_of(entry))
        for name, value in last.scores.items():
            numbers[name][entry["step"]] = value
        for what, why in mapping(entry.get("failed")).items():
            failed[f"{what}, step {entry['step']}"] = str(why)
    last.failed.update(failed)
    scores = {name: pd.Series(by_step, dtype=float).sort_index() for name, by_step in numbers.items()}
    recipe = folder / "config.yaml"
    status = folder / "status.json"
    return Run(
        read_metrics(folder / "metrics.jsonl"),
        scores,
        last,
        mapping(read_file(recipe, yaml.safe_load)) if recipe.is_file() else {},
        mapping(read_file(status, json.loads)) if status.is_file() else {},
        describe_origin(folder / "ancestry.json"),
    )


def describe_origin(path: Path) -> str:
    """Return Run.origin from ancestry.json."""
    origin = ""
    for ancestor in read_file(path, json.loads) if path.is_file() else []:
        origin += f" of {Path(str(ancestor.get('run'))).name}@{ancestor.get('step')}"
    return origin and f"fork{origin}"


def read_metrics(path: Path) -> dict[str, pd.Series]:
    """Return {metric: its number by step} of SHOWN_METRICS; {} without the file. The last number of a step counts."""
    steps: dict[str, array] = defaultdict(lambda: array("q"))
    values: dict[str, array] = defaultdict(lambda: array("d"))
    for entry in json_lines(path):
        for metric, value in entry.items():
            if is_number_or_null(value) and MetricKey.parse(metric).name in SHOWN_METRICS:
                steps[metric].append(entry["step"])
                values[metric].append(finite_or_nan(value))
    curves = {}
    for metric in steps:
        curve = pd.Series(values[metric], steps[metric], dtype=float)
        curves[metric] = curve[~curve.index.duplicated(keep="last")].sort_index()
    return curves


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of lines; nothing without the file. A broken last line is left out: a run is writing
    it, or its machine failed. Raises UserError for another line that is no object with a step."""
    if not path.is_file():
        return
    broken = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if broken:
                raise UserError(f"{path}, line {broken}, is no JSON object with a step; remove the line")
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            if isinstance(entry, dict) and isinstance(entry.get("step"), int) and abs(entry["step"]) < 2**53:
                yield entry
            else:
                broken = number


def read_results(paths: list[Path]) -> dict[str, Results]:
    """Return {name: results} of each model, in the order of the files. Files that name the same model are put together
    unless they have a score in common. A model's name is the end of its path, or of its file's path if a model has
    several results. Raises UserError for a file that is no result file."""
    models: list[Path] = []
    files: list[Path] = []
    results: list[Results] = []
    for path in dict.fromkeys(path.absolute() for path in paths):
        content = read_file(path, json.loads)
        if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
            raise UserError(f"{path} has no results; give files that `xscale.eval.run --out` or fine-tuning wrote")
        model = Path(str(content.get("model") or path.stem))
        added = Results(scores_of(content), intervals_of(content), failures_of(content))
        for other, known in zip(models, results, strict=True):
            if other == model and not known.scores.keys() & added.scores.keys():
                known.scores.update(added.scores)
                known.intervals.update(added.intervals)
                known.failed.update(added.failed)
                break
        else:
            models.append(model)
            files.append(path)
            results.append(added)
    several = len(set(models)) < len(models)
    return dict(zip(short_names(files if several else models), results, strict=True))


def scores_of(content: dict[str, Any]) -> dict[ScoreName, float]:
    """Return Results.scores of a result file."""
    resampled = dict(leaves(content.get("resampled")))
    scores = numbers_of(content.get("results"))
    for name, value in scores.items():
        values = resampled.get(name)
        if isinstance(values, list) and len(values) == REPLICATES and all(map(is_number_or_null, values)):
            scores[name] = Score(value, np.array(values, dtype=float))
    return scores


def intervals_of(content: dict[str, Any]) -> dict[ScoreName, tuple[float, float]]:
    """Return Results.intervals of a result file, or of a line of evals.jsonl."""
    intervals = {}
    for name, ends in leaves(content.get("intervals")):
        if isinstance(ends, list) and len(ends) == 2 and all(map(is_number_or_null, ends)):
            low, high = map(finite_or_nan, ends)
            if low <= high:
                intervals[name] = (low, high)
    return intervals


def failures_of(content: dict[str, Any]) -> dict[str, str]:
    """Return Results.failed of a result file."""
    failed = {}
    for task, rows in mapping(content.get("failed")).items():
        for row, why in mapping(rows).items():
            failed[f"{task} {row}".strip()] = str(why)
    return failed


def numbers_of(results: Any) -> dict[ScoreName, float]:
    """Return the numbers of {task: {row: {metric: number}}}; null is NaN."""
    return {name: finite_or_nan(value) for name, value in leaves(results) if is_number_or_null(value)}


def leaves(tree: Any) -> Iterator[tuple[ScoreName, Any]]:
    """Yield the values of {task: {row: {metric: value}}}."""
    for task, rows in mapping(tree).items():
        for row, values in mapping(rows).items():
            for metric, value in mapping(values).items():
                yield ScoreName(task, row, metric), value


def read_file(path: Path, parse: Callable[[str], Any]) -> Any:
    """Return a JSON or YAML file's content. Raises UserError."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give files that evaluations wrote") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        line = str(error).splitlines()[0]
        raise UserError(f"{path} is no {path.suffix[1:].upper()} ({line}); write it again, or leave it out") from None


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def is_number_or_null(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def finite_or_nan(value: float | None) -> float:
    with suppress(OverflowError):  # a whole number of hundreds of digits
        if value is not None and math.isfinite(value):
            return float(value)
    return math.nan


def short_names(paths: list[Path]) -> list[str]:
    """Return the ends of the paths, as short as they can be while they differ."""
    longest = max((len(path.parts) for path in paths), default=0)
    for length in range(1, longest + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]
