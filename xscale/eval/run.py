"""Evaluate an exported encoder.

python -m xscale.eval.run --model HF_DIR --task NAME ... --data DIR --out FILE.json
python -m xscale.eval.run --model HF_DIR --suite retrieval --texts DIR       all public test sets in DIR
python -m xscale.eval.run ... --parts DIR --part K/N       evaluate one share of the rows, as process K of N
python -m xscale.eval.run ... --parts DIR                  then gather the results of all N processes
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from xscale.data.shards import find_sources
from xscale.errors import UserError, check_arguments, report_error
from xscale.eval.bootstrap import intervals
from xscale.eval.card import CARD, add_scores
from xscale.eval.means import print_means
from xscale.eval.model import ExportedModel, check_output_file, write_results
from xscale.eval.parts import share_rows
from xscale.eval.suites import SUITES, comparison_table, evaluate_rows, markdown_table, plan_rows
from xscale.eval.tasks import TASKS, add_flags


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory, e.g. from xscale.export")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--task", nargs="+", choices=TASKS)
    what.add_argument("--suite", choices=SUITES, help="all public test sets of this kind in --texts")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--card", action="store_true", help="add the scores to the model's card, its README.md")
    parser.add_argument("--parts", type=Path, metavar="DIR", help="folder for each row's scores; rows whose scores "
                        "it has are not evaluated again")  # fmt: skip
    parser.add_argument("--part", metavar="K/N", help="evaluate only part K of N, from 0 to N - 1, of the rows, into "
                        "--parts")  # fmt: skip
    add_flags(parser)
    try:
        check_arguments(sys.argv[1:] if argv is None else argv)
        args = parser.parse_args(argv)
        if args.lexicon_heldout is not None and not 0 <= args.lexicon_heldout <= 1:
            raise UserError(f"--lexicon_heldout {args.lexicon_heldout:g} must lie between 0 and 1")
        if args.out:
            check_output_file(args.out)
        if args.card and not (args.model / CARD).is_file():
            raise UserError(f"--card: {args.model} has no {CARD}, which `python -m xscale.export` writes")
        sources = find_sources(args.data)
        rows = plan_rows(args, sources)
        model = ExportedModel(args.model)
        rows = share_rows(rows, args)
        out = None if args.part else args.out
        results, code = evaluate_rows(model, rows, partial(write_results, out, args.model))
        if args.card and not args.part:
            paths = {task: {name: row.path for name, row in of_task.items()} for task, of_task in rows.items()}
            add_scores(args.model, results, intervals(results), paths)
        if args.suite and not args.part:
            print(f"\n{markdown_table(comparison_table({args.model.resolve().name: results}, model.languages[1:]))}")
        elif not args.part:
            for task, rows_of_task in results.items():
                print_means(task, rows_of_task, model.languages[1:])
        return code
    except (UserError, OSError) as error:
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())
