"""Compare models on a suite of test sets: one table of their scores, and of each difference from the first model.

python -m xscale.eval.compare MODEL ... --suite retrieval --texts DIR --out DIR

A model is any Hugging Face directory, from xscale.export or elsewhere. Differences have 95 % intervals and p values of
a paired bootstrap over sentences: all models are resampled with the same sentences.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from xscale import files
from xscale.errors import UserError, check_arguments, report_error
from xscale.eval.model import ExportedModel, write_results
from xscale.eval.suites import SUITES, Results, comparison_table, evaluate_rows, markdown_table, plan_rows
from xscale.eval.tasks import add_flags


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="Hugging Face directory")
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for table.md and MODEL.json")
    add_flags(parser)
    args = parser.parse_args(argv)
    try:
        check_arguments(sys.argv[1:] if argv is None else argv)
        return compare(args)
    except (UserError, OSError) as error:
        return report_error(error)


def compare(args: argparse.Namespace) -> int:
    """Evaluate all models, write and print the table, and return the exit code."""
    names = [path.resolve().name for path in args.models]
    if len(set(names)) < len(names):
        names = [str(path).strip("/").replace("/", "_") for path in args.models]
    if len(set(names)) < len(names):
        raise UserError(f"{max(names, key=names.count)} is given twice; give each model once")
    for path in args.models:
        if not (path / "config.json").is_file():
            raise UserError(f"{path} has no config.json; give directories that transformers or xscale.export has saved")
    files.check_writable(args.out / "table.md")
    rows = plan_rows(args, [])
    for path in args.models:
        ExportedModel(path)  # so that a damaged model is reported before the work
    results: dict[str, Results] = {}
    trained: set[tuple[str, ...]] = set()
    code = 0
    for name, path in zip(names, args.models, strict=True):
        print(f"\n{name}", flush=True)
        publish = partial(write_results, args.out / f"{name}.json", path)
        model = ExportedModel(path)
        results[name], failed = evaluate_rows(model, rows, publish)
        code = code or failed
        trained |= {tuple(sorted(model.languages[1:]))} - {()}
        text = markdown_table(comparison_table(results, min(trained) if len(trained) == 1 else ()))
        files.write_text(args.out / "table.md", text)
    print(f"\n{text}")
    return code


if __name__ == "__main__":
    sys.exit(main())
