"""Evaluate an exported encoder.

python -m xscale.eval.run --model HF_DIR --task NAME ... --data DIR --out FILE.json
"""

import argparse
import sys
import traceback
from collections import Counter
from pathlib import Path

from xscale.data.shards import find_sources
from xscale.errors import UserError, check_arguments, report_environment_error
from xscale.eval.bootstrap import describe, intervals
from xscale.eval.card import CARD, add_scores
from xscale.eval.model import Exported, Scores, check_out, write_json
from xscale.eval.tasks import TASKS, TaskRow, add_flags
from xscale.plugins import load_plugins


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory, e.g. from xscale.export")
    parser.add_argument("--task", nargs="+", choices=TASKS, required=True)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--card", action="store_true", help="add the scores to the model's card, its README.md")
    parser.add_argument("--plugin", nargs="+", default=[], metavar="MODULE", help="see xscale.plugins")
    add_flags(parser)
    args = parser.parse_args(argv)
    try:
        if args.lexicon_heldout is not None and not 0 <= args.lexicon_heldout <= 1:
            raise UserError(f"--lexicon_heldout {args.lexicon_heldout:g} must lie between 0 and 1")
        check_arguments(sys.argv[1:] if argv is None else argv)
        if args.limit is not None and args.limit < 1:
            raise UserError(f"--limit {args.limit} must be 1 or more")
        args.texts_limit, args.limit = args.limit, args.limit or 1000
        load_plugins(args.plugin)
        if args.out:
            check_out(args.out)
        if args.card and not (args.model / CARD).is_file():
            raise UserError(f"--card: {args.model} has no {CARD}, which `python -m xscale.export` writes")
        sources = find_sources(args.data)
        rows = {task: name_rows(TASKS[task](args, sources)) for task in dict.fromkeys(args.task)}
        model = Exported(args.model)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return evaluate_rows(model, rows, args)
    except OSError as error:  # of --out
        return report_environment_error(error)


def name_rows(rows: list[TaskRow]) -> dict[str, TaskRow]:
    """Rows by languages, and by path too where several have the same."""
    times = Counter(row.name for row in rows)
    return {f"{row.name} ({row.path})" if times[row.name] > 1 else row.name: row for row in rows}


def evaluate_rows(model: Exported, rows: dict[str, dict[str, TaskRow]], args: argparse.Namespace) -> int:
    """Evaluates every row, and prints and writes it at once; a row that fails does not stop the others. Returns the
    exit code: 2 after a user's error, 1 after one of ours."""
    results: dict[str, dict[str, Scores]] = {}
    failed: dict[str, dict[str, str]] = {}
    code = 0
    for task, name, row in ((task, name, row) for task, rows_of in rows.items() for name, row in rows_of.items()):
        try:
            for variant, scores in row.evaluate(model).items():
                full_name = f"{name} {variant}".strip()
                results.setdefault(task, {})[full_name] = scores
                print(f"{task} {full_name}: " + ", ".join(describe(score, value) for score, value in scores.items()))
        except Exception as error:
            ours = not isinstance(error, UserError)
            text = f"{type(error).__name__}: {error}" if ours else str(error)
            failed.setdefault(task, {})[name] = text
            print(f"error: task {task} on {name}: {text}", file=sys.stderr)
            if ours:
                traceback.print_exc()
            code = 1 if ours else code or 2
        if args.out:
            found = {"model": str(args.model), "results": results, "intervals": intervals(results), "failed": failed}
            write_json(args.out, found)
    if args.card:
        add_scores(args.model, results, intervals(results))
    return code


if __name__ == "__main__":
    sys.exit(main())
