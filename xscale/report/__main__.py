"""A report of runs, or of result files, on one HTML page.

xscale report RUN_DIR ... --out report.html        one run, or several side by side; runs may still train
xscale report A.json B.json ... --out table.html   results of evaluations and fine-tuning side by side

The table has a column for each file, and the difference of each later model from the model of the first file.
"""

import argparse
import sys
from pathlib import Path

from xscale import files
from xscale.errors import ExitCode, UserError, run_and_exit, run_command


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="xscale report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="RUN_DIR|FILE.json",
        help="folders of runs, or result files of `xscale eval` and `xscale finetune`",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.html", help="file for the page")
    return run_command(parser, argv, write_report)


def write_report(args: argparse.Namespace) -> ExitCode:
    """Write the page of runs (folders) and of result files. Return the exit code 0. Raises UserError."""
    files.check_output_file_and_make_parent(args.out)
    try:
        from xscale.report.page import render_page
        from xscale.report.read import read_results, read_run
    except ModuleNotFoundError as error:  # the extra `eval` is not installed
        raise UserError(
            f"a report needs the package {error.name}, which is not installed. Run `pip install 'xscale[eval]'`"
        ) from None
    runs = {}
    result_files = []
    for path in args.paths:
        if path.suffix == ".json" and not path.is_dir():
            result_files.append(path)
        else:
            runs[str(path)] = read_run(path)
            if not runs[str(path)].metrics:
                print(
                    f"warning: {path / 'metrics.jsonl'} is missing or has no readable line, so the page has no curves "
                    f"of {path}",
                    file=sys.stderr,
                )
    files.write_text(args.out, render_page(runs, read_results(result_files)))
    print(args.out)
    return 0


if __name__ == "__main__":
    run_and_exit(main)
