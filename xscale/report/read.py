"""What runs and evaluations left behind: a run's metrics.jsonl, evals.jsonl, evals/step_N.json, config.yaml and
status.json; JSON files of scores."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from xscale.errors import UserError

LONGEST_LABEL = 16
"""Characters."""
Results = dict[str, dict[str, dict[str, float]]]
"""Task -> row -> metric -> number."""


@dataclass(frozen=True)
class Curve:
    """A number over the steps at which it was measured."""

    steps: np.ndarray
    """In ascending order, for a run; layers, for a model."""
    values: np.ndarray
    """NaN where the file has null, or what is not finite."""

    @property
    def finite(self) -> "Curve":
        kept = np.isfinite(self.values)
        return Curve(self.steps[kept], self.values[kept])


@dataclass(frozen=True)
class Run:
    name: str
    """As many last parts of its path as tell the runs apart."""
    label: str
    """The same, or its number where names are long."""
    folder: Path
    metrics: dict[str, Curve]
    evals: dict[tuple[str, str, str], Curve]
    """By task, row and metric."""
    failed: list[tuple[int, str, str]]
    """Step, task and why, of evaluations that have no result."""
    config: dict[str, Any]
    """The resolved recipe; empty where there is none."""
    status: dict[str, Any]
    """As xscale/run/folder.py writes it; empty where there is none."""

    @property
    def steps(self) -> int:
        return max((int(curve.steps[-1]) for curve in self.metrics.values()), default=0)


@dataclass
class Scores:
    """What was measured of one exported model, in all files that name it."""

    name: str
    label: str
    """As a run's."""
    results: Results = field(default_factory=dict)
    failed: dict[str, dict[str, str]] = field(default_factory=dict)


def read_runs(folders: list[Path]) -> list[Run]:
    """Raises UserError."""
    folders = list(dict.fromkeys(Path(os.path.abspath(folder)) for folder in folders))
    names = short_names(folders)
    return [read_run(*of_run) for of_run in zip(folders, names, labels(names), strict=True)]


def read_run(folder: Path, name: str, label: str) -> Run:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{folder} has no metrics.jsonl; give the directories that runs were started with as --out")
    config, status = folder / "config.yaml", folder / "status.json"
    evals = [*json_lines(folder / "evals.jsonl"), *hook_scores(folder / "evals")]
    return Run(
        name,
        label,
        folder,
        curves((entry["step"], entry.items()) for entry in json_lines(path)),
        curves((entry["step"], flat(entry.get("results"))) for entry in evals),
        [
            (entry["step"], text(task), text(why))
            for entry in evals
            for task, why in mapping(entry.get("failed")).items()
        ],
        read_yaml(config) if config.is_file() else {},
        mapping(read_json(status)) if status.is_file() else {},
    )


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML ({str(error).splitlines()[0]}); mend it, or remove it") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} has no fields; it is no recipe: mend it, or remove it")
    return found


def hook_scores(folder: Path) -> Iterator[dict[str, Any]]:
    """What checkpoint.hook has written of each step, in the shape of a line of evals.jsonl; of a file that cannot be
    read, why. Nobody vouches for these files: none ends a report."""
    for path in sorted(folder.glob("step_*.json")):
        name = re.fullmatch(r"step_(\d{1,15})\.json", path.name)
        if name is None or not path.is_file():  # a pipe would be waited for
            continue
        entry: dict[str, Any] = {"step": int(name[1])}
        try:
            found = mapping(read_json(path))
        except UserError as error:
            yield entry | {"failed": {path.name: str(error)}}
            continue
        failed = {
            f"{task} {row}": why
            for task, rows in mapping(found.get("failed")).items()
            for row, why in mapping(rows).items()
        }
        yield entry | {"results": found.get("results"), "failed": failed}


def text(value: Any) -> str:
    """What every file and console can show: a lone surrogate is no character."""
    return str(value).encode("utf-8", "replace").decode()


def number(value: Any) -> float | None:
    """As a float, None being null; a whole number of hundreds of digits is infinite."""
    try:
        return None if value is None else float(value)
    except OverflowError:
        return float("inf")


def mapping(value: Any) -> dict[str, Any]:
    """What stands there by name; nothing where it is something else."""
    return value if isinstance(value, dict) else {}


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects with a step; nothing where there is no file. The end of a line that a run is writing is left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
                raise UserError(f"{path}, line {number}, is no JSON object with a step: {line[:60]!r}; remove the line")
            yield entry


def curves(entries: Iterable[tuple[int, Iterable[tuple[Any, Any]]]]) -> dict[Any, Curve]:
    """Of each name. entries: step, and names with what was measured; all but numbers and null is left out."""
    steps, values = defaultdict(list), defaultdict(list)
    for step, numbers in entries:
        for name, value in numbers:
            if value is None or isinstance(value, int | float):
                steps[name].append(step)
                values[name].append(number(value))
    return {name: curve(steps[name], of_name) for name, of_name in values.items() if name != "step"}


def curve(steps: list[int], values: list[Any]) -> Curve:
    """Hooks may measure steps again, or in another order: steps are put in order."""
    order = np.argsort(steps, kind="stable")
    numbers = np.array(values, dtype=float)[order]
    return Curve(np.array(steps)[order], np.where(np.isfinite(numbers), numbers, np.nan))


def flat(results: Any) -> Iterator[tuple[tuple[str, str, str], Any]]:
    """((task, row, metric), number) of an evaluation's results."""
    for task, rows in mapping(results).items():
        for row, scores in mapping(rows).items():
            yield from (((text(task), text(row), text(metric)), n) for metric, n in mapping(scores).items())


def read_scores(paths: list[Path]) -> list[Scores]:
    """One for each model, in the order of the files. Raises UserError."""
    found = {path: read_json(path) for path in paths}
    for path, scores in found.items():
        if not isinstance(scores, dict) or not isinstance(scores.get("results"), dict):
            raise UserError(f"{path} has no results; --scores takes what `python -m xscale.eval.run --out` writes")
    models = {path: Path(str(scores.get("model") or path.stem)) for path, scores in found.items()}
    distinct = list(dict.fromkeys(models.values()))
    names = short_names(distinct)
    by_model = {
        model: Scores(*named) for model, named in zip(distinct, zip(names, labels(names), strict=True), strict=True)
    }
    for path, scores in found.items():
        of_model = by_model[models[path]]
        for (task, row, metric), value in flat(scores["results"]):
            if isinstance(value, int | float):
                of_model.results.setdefault(task, {}).setdefault(row, {})[metric] = number(value) or 0.0
        for task, rows in mapping(scores.get("failed")).items():
            of_model.failed.setdefault(text(task), {}).update(
                {text(row): text(why) for row, why in mapping(rows).items()}
            )
    return list(by_model.values())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give files that evaluations wrote") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}); write it again, or leave it out") from None


def short_names(paths: list[Path]) -> list[str]:
    """The last parts of each path, as many as tell them apart."""
    for parts in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def labels(names: list[str]) -> list[str]:
    """Of lines in charts: names, or their numbers where one is long."""
    numbers = [str(number) for number in range(1, len(names) + 1)]
    return names if max(map(len, names), default=0) <= LONGEST_LABEL else numbers


def fields(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A recipe's values by names such as `train.lr`; a list's sections by their own names; empty lists are left out."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= fields(value, f"{before}{name}.")
        elif isinstance(value, list) and all(isinstance(one, dict) and "name" in one for one in value):
            for one in value:
                own = f"{before}{name}.{one['name']}"
                found |= {own: "there"} | fields({field: of for field, of in one.items() if field != "name"}, f"{own}.")
        else:
            found[f"{before}{name}"] = value
    return found
