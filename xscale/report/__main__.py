"""A report of runs, or of result files, on one HTML page.

xscale report RUN_DIR ... --out report.html        one run, or several side by side; runs may still train
xscale report A.json B.json ... --out table.html   results of evaluations and fine-tuning side by side

The table has a column for each file, and the difference of each later model from the model of the first file.
"""

import argparse
import sys
from pathlib import Path

from xscale import files
from xscale.errors import UserError, check_arguments, flush_output, print_error_or_reraise, run_and_exit


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
    try:
        check_arguments(sys.argv[1:] if argv is None else argv)
        args = parser.parse_args(argv)
        write_report(args.paths, args.out)
        print(args.out)
        flush_output()
    except (UserError, OSError) as error:
        return print_error_or_reraise(error)
    return 0


def write_report(runs_and_results: list[Path], out: Path) -> None:
    """Write the page of runs (folders) and of result files. Raises UserError."""
    files.check_output_file(out)
    try:
        from xscale.report.page import render_page
        from xscale.report.read import read_results, read_run
    except ModuleNotFoundError as error:  # the extra `eval` is not installed
        raise UserError(
            f"a report needs the package {error.name}, which is not installed. Run `pip install 'xscale[eval]'`"
        ) from None
    runs = {}
    result_files = []
    for path in runs_and_results:
        if path.suffix == ".json" and not path.is_dir():
            result_files.append(path)
        else:
            runs[str(path)] = read_run(path)
    files.write_text(out, render_page(runs, read_results(result_files)))


if __name__ == "__main__":
    run_and_exit(main)
