"""Evaluate an exported encoder: `xscale eval --model HF_DIR --task NAME ... --data DIR --out FILE.json`."""

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from xscale.data.shards import find_sources
from xscale.errors import UserError, check_arguments, report_error
from xscale.eval.bootstrap import format_score
from xscale.eval.model import ExportedModel, Scores, check_output_file, write_results
from xscale.eval.tasks import TASKS, ResultsRow, add_flags, plan_rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="xscale eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="Hugging Face directory, such as `xscale export` writes"
    )
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


def evaluate_rows(model: ExportedModel, rows: list[ResultsRow], out: Path | None) -> int:
    """Evaluate and print every row, and write the scores so far to `out` after each row. Return the exit code: 2 if a
    row cannot be evaluated, else 0."""
    results: dict[str, dict[str, Scores]] = {}
    code = 0
    for row in tqdm(rows, unit="row", disable=None):
        try:
            for variant, scores in row.evaluate(model).items():
                full_name = f"{row.name} {variant}".strip()
                results.setdefault(row.task, {})[full_name] = scores
                listed = ", ".join(format_score(metric, value) for metric, value in scores.items())
                tqdm.write(f"{row.task} {full_name}: {listed}", file=sys.stdout)
        except UserError as error:
            code = 2
            print(f"error: task {row.task} on {row.name}: {error}", file=sys.stderr)
        if out:
            write_results(out, model.path, results)
    return code


if __name__ == "__main__":
    sys.exit(main())
