"""Reads the files of a run (metrics.jsonl, evals.jsonl, config.yaml, status.json) and result files of evaluations."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import pandas as pd
import yaml
from pydantic import BaseModel, Field, ValidationError

from xscale.errors import UserError
from xscale.eval.bootstrap import REPLICATES, Score, ScoreName, ScoreTree, named_values
from xscale.files import read_ends_and_entries_backwards
from xscale.metric_keys import MetricKey

SHOWN_METRICS = ("loss", "alignment", "tokens", "step_s", "skipped")
"""The metrics of metrics.jsonl that a page shows. TensorBoard shows all metrics."""
CHECKSUM = "checksum of the text"
"""The name of the metric in Results that has a checksum of a row's test sentences."""
T = TypeVar("T")
Results = dict[ScoreName, float]
"""A model's scores: those of result files, or of a run's last evaluation. A score is a Score if its values in resampled
texts are known, and NaN for null."""


class Evaluation(BaseModel):
    """A result file, or a line of evals.jsonl. A number that is not finite is null."""

    model: str = ""
    results: ScoreTree[float | None]
    resampled: ScoreTree[Annotated[list[float | None], Field(min_length=REPLICATES, max_length=REPLICATES)]] = {}
    checksums: dict[str, dict[str, int]] = {}
    """{task: {results row: checksum of the test's text}}."""

    def to_results(self) -> Results:
        results: Results = {}
        for name, number in named_values(self.results):
            results[name] = float("nan" if number is None else number)
        for name, values in named_values(self.resampled):
            results[name] = Score(results.get(name, math.nan), np.array(values, dtype=float))
        for task, checksums in self.checksums.items():
            for row, checksum in checksums.items():
                results[ScoreName(task, row, CHECKSUM)] = checksum
        return results


@dataclass(frozen=True)
class Run:
    metrics: dict[str, pd.Series]
    """{metric: its number at each logged step}; null is NaN."""
    scores: dict[ScoreName, pd.Series]
    """{name: its number at each evaluated step}."""
    last: Results
    """The last evaluation."""
    recipe: dict[str, Any]
    status: dict[str, Any]


def read_run(folder: Path) -> Run:
    """Return the content of a run's folder. Raises UserError for a folder without a run, and for a damaged file."""
    if not (folder / "metrics.jsonl").is_file() and not (folder / "config.yaml").is_file():
        raise UserError(
            f"{folder} is neither the folder of a run, which has a metrics.jsonl, nor a result file, which ends in "
            ".json. Use folders of runs (`--out` of `xscale train`), or result files (`--out` of `xscale eval` or "
            "`xscale finetune`)"
        )
    metrics: dict[str, dict[int, float]] = {}
    for line in read_intact_json_lines(folder / "metrics.jsonl"):
        for metric, value in line.items():
            if MetricKey.parse(metric).name in SHOWN_METRICS:
                is_float = isinstance(value, int | float) and abs(value) < 1e300
                metrics.setdefault(metric, {})[line["step"]] = float(value) if is_float else math.nan
    scores: dict[ScoreName, dict[int, float]] = {}
    last: Results = {}
    for line in read_intact_json_lines(folder / "evals.jsonl"):
        last = parse_evaluation(line, folder / "evals.jsonl").to_results()
        for name, score in last.items():
            scores.setdefault(name, {})[line["step"]] = score
    return Run(
        to_curves(metrics),
        to_curves(scores),
        last,
        read_json_or_yaml(folder / "config.yaml", yaml.safe_load, {}),
        read_json_or_yaml(folder / "status.json", json.loads, {}),
    )


def to_curves(numbers_by_step: dict[T, dict[int, float]]) -> dict[T, pd.Series]:
    """Return {name: its numbers by step}, given {name: {step: number}}."""
    return {name: pd.Series(numbers, dtype=float) for name, numbers in numbers_by_step.items()}


def read_intact_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file of lines, in order. Broken lines are left out. Without the file, return []."""
    if not path.is_file():
        return []
    return [entry for _, entry in read_ends_and_entries_backwards(path)][::-1]


def read_results(paths: list[Path]) -> dict[str, Results]:
    """Return {name of a model: its results}, in the order of the files, which name their models. Files of one model are
    joined. If two of them have a score in common, the later file is another entry, with the file's name. Raises
    UserError for a file that is not a result file."""
    models: dict[str, Results] = {}
    for path in paths:
        evaluation = parse_evaluation(read_json_or_yaml(path, json.loads), path)
        results = evaluation.to_results()
        name = evaluation.model or path.stem
        if results.keys() & models.get(name, {}).keys():
            name = f"{name} ({path})"
        models[name] = models.get(name, {}) | results
    return models


def parse_evaluation(content: Any, path: Path) -> Evaluation:
    """Return the evaluation that a file has. Raises UserError."""
    try:
        return Evaluation.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"{path} is not a result file (at {place}: {first['msg']}). Use files that `xscale eval --out` or "
            "`xscale finetune --out` has written"
        ) from None


def read_json_or_yaml(path: Path, parse: Callable[[str], Any], default: Any = None) -> Any:
    """Return the content of a JSON or YAML file. If there is a default, it is returned if there is no file, or if the
    content is of another type. Raises UserError."""
    try:
        if path.is_fifo():
            raise ValueError("it is a named pipe instead of a file")
        content = parse(path.read_text(encoding="utf-8"))
        if default is not None and not isinstance(content, type(default)):
            return default
        return content
    except OSError as error:
        if default is not None and not path.exists():
            return default
        raise UserError(
            f"{path} cannot be read ({error.strerror}). Use folders of runs, or files that `xscale eval --out` or "
            "`xscale finetune --out` has written"
        ) from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        line = str(error).splitlines()[0]
        raise UserError(
            f"{path} is not valid {path.suffix[1:].upper()} ({line}). Write {path} again, or remove {path} from "
            "the command"
        ) from None
