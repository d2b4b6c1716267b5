"""Evaluate an exported encoder.

python -m xscale.eval.run --model HF_DIR --task NAME ... --data DIR --out FILE.json
"""

import argparse
import sys
from itertools import product
from pathlib import Path

from tqdm import tqdm

from xscale.data.shards import find_sources
from xscale.errors import UserError, check_arguments, report_error
from xscale.eval.bootstrap import format_score
from xscale.eval.model import ExportedModel, Scores, check_output_file, write_results
from xscale.eval.tasks import TASKS, TaskRow, add_flags, plan_rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="xscale eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory, e.g. from xscale.export")
    parser.add_argument("--task", nargs="+", choices=TASKS, required=True)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    add_flags(parser)
    try:
        check_arguments(sys.argv[1:] if argv is None else argv)
        args = parser.parse_args(argv)
        if args.out:
            check_output_file(args.out)
        rows = plan_rows(args, find_sources(args.data))
        model = ExportedModel(args.model)
        return evaluate_rows(model, rows, args.out)
    except (UserError, OSError) as error:
        return report_error(error)


def evaluate_rows(model: ExportedModel, rows: dict[str, dict[str, TaskRow]], out: Path | None) -> int:
    """Evaluate and print every row, write the scores so far to `out` after each, and return the exit code: 2 after a
    user's error, else 0."""
    results: dict[str, dict[str, Scores]] = {}
    failed: dict[str, dict[str, str]] = {}
    places: list[tuple[str, str]] = []
    for task in rows:
        places += product([task], rows[task])
    for task, name in tqdm(places, unit="row", disable=None):
        try:
            for variant, scores in rows[task][name].evaluate(model).items():
                full_name = f"{name} {variant}".strip()
                results.setdefault(task, {})[full_name] = scores
                shown = ", ".join(format_score(metric, value) for metric, value in scores.items())
                tqdm.write(f"{task} {full_name}: {shown}", file=sys.stdout)
        except UserError as error:
            failed.setdefault(task, {})[name] = str(error)
            print(f"error: task {task} on {name}: {error}", file=sys.stderr)
        write_results(out, model.path, results, failed)
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
