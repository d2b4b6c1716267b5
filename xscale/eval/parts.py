"""An evaluation that several processes share: each evaluates a part of the rows, and saves scores in a common folder.

The same command without --part then reads all rows, and evaluates those that are missing. Its results equal those of a
single process, because the scores in resampled texts are saved too.
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
from xscale.eval.model import Exported, Scores
from xscale.eval.tasks import TaskRow


def share_rows(rows: dict[str, dict[str, TaskRow]], args: Namespace) -> dict[str, dict[str, TaskRow]]:
    """The rows of --part, or without --part all rows; evaluating one saves its scores in --parts. Raises UserError."""
    if not args.parts and not args.part:
        return rows
    match = re.fullmatch(r"(\d+)/(\d+)", args.part or "0/1")
    if not args.parts or not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--part {args.part}: give --parts DIR too, and a part of N, such as 0/4 to 3/4")
    files.check_writable(args.parts / "0.json")
    flags = {
        f"--{name}": str(value) for name, value in vars(args).items() if name not in ("out", "card", "part", "parts")
    }
    flags["--model"] += f", written {(args.model / 'config.json').stat().st_mtime}"
    numbered = enumerate((task, name, row) for task, of_task in rows.items() for name, row in of_task.items())
    found: dict[str, dict[str, TaskRow]] = {}
    for number, (task, name, row) in numbered:
        if number % int(match[2]) == int(match[1]):
            saved = partial(evaluate_once, args.parts / f"{number}.json", flags | {"row": f"{task} {name}"}, row)
            found.setdefault(task, {})[name] = row._replace(evaluate=saved)
    return found


def evaluate_once(path: Path, flags: dict[str, str], row: TaskRow, model: Exported) -> Mapping[str, Scores]:
    """The scores in a file, which is written if it does not exist. Raises UserError if other flags wrote it."""
    if not path.exists():
        scores = {
            variant: {
                name: [score, *(score.resampled() if isinstance(score, Score) else ())] for name, score in of.items()
            }
            for variant, of in row.evaluate(model).items()
        }
        files.write_text(path, json.dumps({"flags": flags, "scores": scores}))
    found = json.loads(path.read_text())
    if changed := [f"{flag} {value}" for flag, value in found["flags"].items() if flags.get(flag) != value]:
        raise UserError(f"{path} has scores of an evaluation with {', '.join(changed)}; give --parts another folder")
    return {
        variant: {
            name: Score(score, partial(np.array, values)) if values else score for name, (score, *values) in of.items()
        }
        for variant, of in found["scores"].items()
    }
