"""Shares an evaluation among several processes: each evaluates some of the rows, and saves scores in a common folder.

The same command without --part then reads the scores of all rows, and evaluates rows that are missing. Its results
equal those of a single process, because the scores in resampled texts are saved too.
"""

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from xscale import files
from xscale.errors import UserError
from xscale.eval.bootstrap import Score
from xscale.eval.model import ExportedModel, Scores
from xscale.eval.tasks import TaskRow


def share_rows(rows: dict[str, dict[str, TaskRow]], args: Namespace) -> dict[str, dict[str, TaskRow]]:
    """Return the rows of --part, or else all rows. Evaluating a row saves its scores in --parts, or reads them
    there."""
    if not args.parts and not args.part:
        return rows
    match = re.fullmatch(r"(\d+)/(\d+)", args.part or "0/1")
    if not args.parts or not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--part {args.part}: give --parts DIR too, and K/N with K from 0 to N - 1")
    files.check_writable(args.parts / "0.json")
    flags = {
        f"--{name}": str(value) for name, value in vars(args).items() if name not in ("out", "card", "part", "parts")
    }
    flags["--model"] += f", written {(args.model / 'config.json').stat().st_mtime}"
    flat = [(task, name, row) for task, rows_of_task in rows.items() for name, row in rows_of_task.items()]
    shared: dict[str, dict[str, TaskRow]] = {}
    for i in range(int(match[1]), len(flat), int(match[2])):
        task, name, row = flat[i]
        evaluate = partial(evaluate_once, args.parts / f"{i}.json", flags | {"row": f"{task} {name}"}, row)
        shared.setdefault(task, {})[name] = row._replace(evaluate=evaluate)
    return shared


def evaluate_once(path: Path, flags: dict[str, str], row: TaskRow, model: ExportedModel) -> Mapping[str, Scores]:
    """Return the scores in the file `path`; if it is absent, evaluate the row and write the file. Raises UserError if
    the file was written with other flags."""
    if not path.exists():
        scores = {
            variant: {
                name: [score, *(score.resampled() if isinstance(score, Score) else ())]
                for name, score in scores_of_variant.items()
            }
            for variant, scores_of_variant in row.evaluate(model).items()
        }
        files.write_text(path, json.dumps({"flags": flags, "scores": scores}))
    saved = json.loads(path.read_text())
    if changed := [f"{flag} {value}" for flag, value in saved["flags"].items() if flags.get(flag) != value]:
        raise UserError(f"{path} has scores of an evaluation with {', '.join(changed)}; give another folder by --parts")
    return {
        variant: {
            name: Score(score, partial(np.array, resampled)) if resampled else score
            for name, (score, *resampled) in scores_of_variant.items()
        }
        for variant, scores_of_variant in saved["scores"].items()
    }
