"""A report of runs and their models, on one HTML page or in the console.

python -m xscale.report RUN_DIR ... --out report.html     a page of one run, or of several side by side
python -m xscale.report RUN_DIR RUN_DIR                   without --out: compared in the console

    --scores FILE.json ...     score files of evaluations: tables of all scores; for fine-tuning, supervised (SUP) and
                               zero-shot (ZS) scores and their difference (Delta), beside alignment scores
    --models HF_DIR ...        with --pairs: linked words in the embeddings of each model, such as before and after
                               training; what the last model predicts for masked words
    --png DIR                  also write each chart to a PNG file
    --watch                    repeat the report every few seconds, until the runs have ended
"""

import argparse
import importlib.util
import os
import sys
import time
from itertools import islice
from pathlib import Path

from xscale import files
from xscale.errors import UserError, check_arguments, escape_unprintable, report_error
from xscale.report import tables
from xscale.report.read import MetricsLog, Run, read_runs, read_scores
from xscale.report.tables import Table

WATCH_S = 5
CLEAR = "\x1b[2J\x1b[H"
SIDE_BY_SIDE = 3
"""The most runs side by side in a table of the console."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN_DIR", help="the folder --out of a training run")
    parser.add_argument("--out", type=Path, metavar="FILE.html")
    parser.add_argument("--png", type=Path, metavar="DIR")
    parser.add_argument("--scores", type=Path, nargs="+", default=[], metavar="FILE.json")
    parser.add_argument("--models", type=Path, nargs="+", default=[], metavar="HF_DIR")
    parser.add_argument("--pairs", type=Path, nargs="+", default=[], metavar="DIR", help="shards with word links")
    parser.add_argument("--watch", action="store_true", help="refresh the page or the screen while the runs train")
    escape_unprintable()
    try:
        check_arguments(sys.argv[1:] if argv is None else argv)
        args = parser.parse_args(argv)
        logs: dict[Path, MetricsLog] = {}
        started = time.monotonic()
        while report(args, logs) and args.watch:
            time.sleep(max(WATCH_S, 9 * (time.monotonic() - started)))  # so that it takes at most a tenth of a core
            started = time.monotonic()
        if args.out:
            print(args.out)
        sys.stdout.flush()
    except KeyboardInterrupt:  # how a user ends --watch
        return 0
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, OSError) as error:
        return report_error(error)
    return 0


def report(args: argparse.Namespace, logs: dict[Path, MetricsLog]) -> bool:
    """Write the report as a page, or print it. Return True if a run is training. logs: the lines that earlier calls
    read."""
    check_flags(args)
    runs, scores = read_runs(args.runs, logs), read_scores(args.scores)
    going_on = any(run.status.get("status") == "running" for run in runs)
    if args.out is None:
        print(CLEAR if args.watch else "", end="")
        print_runs(runs)
        return going_on
    from xscale.report.draw import Pictures  # imports matplotlib, which the console does not need
    from xscale.report.page import model_sections, render_page

    pictures, of_models = Pictures(args.png), []
    if args.models:
        of_models = model_sections(args.models, args.pairs, pictures)
    files.write_text(
        args.out, render_page(runs, scores, pictures, of_models, WATCH_S if args.watch and going_on else None)
    )
    return going_on


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for flags that do not go together, and files that cannot be written."""
    if not (args.runs or args.scores or args.models):
        raise UserError("nothing to report: give the directories of runs, --scores FILE.json, or --models HF_DIR")
    if bool(args.models) != bool(args.pairs):
        raise UserError("--models and --pairs go together: give models, and shards of sentence pairs with word links")
    if args.out is None:
        if args.scores or args.models or args.png or not args.runs:
            raise UserError("--scores, --models, --pairs and --png are for a page: give --out FILE.html too")
        return
    if args.png and args.png.exists() and not args.png.is_dir():
        raise UserError(f"--png {args.png} is a file; give a folder for the pictures")
    if args.out.is_dir():
        raise UserError(f"--out {args.out} is a directory; give a file, such as {args.out / 'report.html'}")
    files.check_writable(args.out)
    absent = [name for name in ("jinja2", "matplotlib", "scipy", "sklearn") if importlib.util.find_spec(name) is None]
    if absent:
        raise UserError(f"a page needs {', '.join(absent)}; install by `pip install 'xscale[eval]'`")


def print_runs(runs: list[Run]) -> None:
    groups = [runs[start : start + SIDE_BY_SIDE] for start in range(0, len(runs), SIDE_BY_SIDE)]
    summaries = map(tables.last_and_best_table, groups)
    for table in (tables.run_table(runs), tables.differing_fields(runs), *summaries, tables.failed_evals_table(runs)):
        if table.rows:
            print(f"\n{table.title}\n" if table.title else "", end="")
            print_table(table)


def print_table(table: Table) -> None:
    """Print a table in aligned columns, with the name of a group of columns above its first column."""
    cells = [table.head, *([tables.format_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if table.groups:
        rest, names = iter(widths), ""
        for name, span in table.groups:
            names += name.ljust(sum(width + 2 for width in islice(rest, span)))
        print(names.rstrip())
    numeric = [tables.is_numeric(column) for column in zip(*table.rows, strict=True)]
    for row in cells:
        columns = zip(row, widths, numeric, strict=True)
        print("  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns).rstrip())


if __name__ == "__main__":
    sys.exit(main())
