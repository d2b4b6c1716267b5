"""Make shards, a tokenizer and held-out text from raw corpora, which corpus.yaml names (data_tools/corpus.py).

    python -m data_tools.prepare corpus.yaml --out DIR [--executor local|slurm|ray] [--workers N] [--dry_run]

DIR appears when it is complete, with shards/NAME/, heldout/, tokenizer/, lexicon/, report.html and report.json. Until
then the work is in DIR.incomplete. If the command is killed, start it again: it continues, and repeats no finished
task. Except for the links of `align: true`, the output does not depend on the executor, the workers or kills.

For `--executor slurm`, start the command where `sbatch` is, with --out on a shared file system. SBATCH_PARTITION,
SBATCH_TIMELIMIT, SBATCH_MEM_PER_CPU and SBATCH_ACCOUNT in the environment set what your site needs. Jobs continue if
the command is killed: cancel them (`scancel`) before you remove DIR.incomplete.
"""

import argparse
import json
import os
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from xscale import files
from xscale.data.lexicon import pair_of, read_entries
from xscale.errors import UserError

from . import align, prepare_report, steps
from .cleaning import identifiable_languages, language_code, load_tokenizer
from .command import run
from .corpus import Corpus, SourceSpec, TokenizerSpec, is_url, load_corpus
from .engine import EXECUTORS, TaskList, do_task, lock_folder, mark_path, run_tasks
from .readers import read_units

DRY_RUN_UNITS = 2000
"""The number of units of a source that --dry_run reads."""
COMPRESSION = 3
"""The size of a compressed file is multiplied by this number to estimate the size of its text."""
RECORD_BYTES = 100
"""The approximate number of bytes of a record of shards without its texts."""


def check_corpus(corpus: Corpus) -> None:
    """Raise UserError if a file is missing, a tokenizer or dictionary cannot be used, or the model that identifies
    languages does not know one of the corpus."""
    for source, name in zip(corpus.sources, corpus.names, strict=True):
        rules = corpus.rules_of(source)
        for path in rules.paths if source.is_foreign else [*source.paths, *rules.paths]:
            check_path(path, source, name)
        known = identifiable_languages(rules.lid) if rules.lid else set[str]()
        for lang in source.langs:
            if known and language_code(lang) not in known:
                raise UserError(
                    f"rules.lid: {'py3langid' if rules.lid is True else rules.lid} does not know {lang}; give {name} "
                    f"`rules: {{lid: false}}`, or the path of a fastText model that does"
                )
    if isinstance(corpus.tokenizer, str):
        load_tokenizer(corpus.tokenizer)
    if corpus.lexicons:
        check_lexicons(corpus)
    if corpus.directions:
        align.find_aligner()


def check_path(path: str, source: SourceSpec, name: str) -> None:
    """Raise UserError unless the path is a file or folder, which a restart can read again. name: the source's."""
    if Path(path).is_file() or Path(path).is_dir() or (source.datasets == path and files.may_exist(path)):
        return
    if is_url(path):
        raise UserError(f"{path} (source {name}) is a URL; download the file, as by `curl -LO`, and give its path")
    raise UserError(f"{path} not found (source {name}); paths are relative to {Path.cwd()}")


def check_lexicons(corpus: Corpus) -> None:
    """Raise UserError unless training can read each dictionary and recognise its languages by its name."""
    names = Counter(Path(name).name for name in corpus.lexicons)
    for path in map(Path, corpus.lexicons):
        for lang in pair_of(path, corpus.languages):
            if lang not in corpus.languages:
                raise UserError(f"lexicons: {path}: no source has text in {lang}; add one, or leave the dictionary out")
        if path.suffix != ".txt" or names[path.name] > 1:
            raise UserError(f"lexicons: {path} needs a name of its own, which ends in .txt, as en-de.txt; rename it")
        read_entries(path)


def start_or_continue(plan: steps.CorpusPlan, folder: Path) -> None:
    """Write plan.json. Raise UserError if corpus.yaml or an input file has changed since work on it began. A changed
    source is cut again if all work is in the step `cut`, and no SLURM job may still read the earlier one."""
    changed = list[str]()
    if any((folder / "done").glob("*/*")):
        print(f"continuing after the finished tasks in {folder}", file=sys.stderr)
        if fields_beside_sources(steps.read_plan(folder).corpus) != fields_beside_sources(plan.corpus):
            changed.append("corpus.yaml")
    is_cutting = not (folder / "done" / "clean").exists() and not (folder / "logs").exists()
    for number, name in enumerate(plan.corpus.names):
        mark = mark_path(folder, "cut", number)
        if mark.exists() and not steps.is_cut(folder, plan.corpus, number):
            if is_cutting:
                mark.unlink()
            else:
                changed.append(f"the source {name}")
    if changed:
        raise UserError(f"{changed[0]} changed after the work in {folder} began; to start anew, remove {folder}")
    steps.write_plan(folder, plan)


def fields_beside_sources(corpus: Corpus) -> dict[str, Any]:
    return corpus.model_dump(mode="json") | {"sources": len(corpus.sources)}


def do_steps(folder: Path, executor: str, workers: int) -> None:
    """Do the tasks of all steps that are not done. Raises UserError and MachineError."""
    for name, step in steps.STEPS.items():
        count = step.count(folder)
        left = [number for number in range(count) if not mark_path(folder, name, number).exists()]
        if left:
            run_tasks(executor, workers, TaskList(folder, name, step.function, left))
        if count:
            print(f"{name}: did {len(left):,} of {count:,} tasks", file=sys.stderr, flush=True)
        if name == "select":
            print_selection(folder)


def print_selection(folder: Path) -> None:
    """Print how many pairs or documents of each source the rules have left, before they are aligned."""
    corpus = steps.read_plan(folder).corpus
    for number, source in enumerate(corpus.sources):
        read = 0
        left = 0
        for chunk in steps.source_chunks(folder, number):
            read += steps.read_json(folder / f"clean/{chunk.number}.json")["counts"]["read"]
            states = steps.unit_states(folder, chunk)
            left += int(((states == steps.KEPT) | (states == steps.HELD_OUT)).sum())
        print(f"{corpus.names[number]}: {left:,} of {read:,} {source.kind} are left", file=sys.stderr, flush=True)


def finish(corpus: Corpus, folder: Path, out: Path) -> None:
    """Write the report, move the result to `out`, and remove the work folder."""
    result = folder / "result"
    for path in list(result.rglob(f"*{files.PARTIAL}")):  # of a task that was killed
        files.remove(path)
    report = prepare_report.collect_report(folder, corpus)
    files.write_text(result / "report.json", json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    files.write_text(result / "report.html", prepare_report.page(report))
    files.rename_into_place(result, out)
    files.remove(folder)
    print(prepare_report.summary(out, report))


def dry_run_text(corpus: Corpus) -> str:
    """Return what the command would read and write, estimated from the first pairs or documents of each source."""
    lines = list[str]()
    for source, name in zip(corpus.sources, corpus.names, strict=True):
        count = estimated_count(source)
        lines.append(f"{name}: {source.format}, {'-'.join(source.langs)}, {count} {source.kind}")
    tokenizer: Any = corpus.tokenizer or "none"
    if isinstance(tokenizer, TokenizerSpec):
        tokenizer = f"{tokenizer.type} of {tokenizer.vocab_size:,} tokens"
    lines.append(f"tokenizer: {tokenizer}")
    held_out = corpus.heldout
    lines.append(f"held out: {held_out.pairs:,} pairs a language pair, {held_out.mono:,} sentences a language")
    return "\n".join(lines)


def estimated_count(source: SourceSpec) -> str:
    """Return the number of a source's pairs or documents, such as "about 20,000"."""
    paths = [] if source.is_foreign else steps.files_below(source.paths)
    if not paths:
        return "uncounted, because remote,"
    units = [unit for unit in islice(read_units(source), DRY_RUN_UNITS) if unit.texts]
    if len(units) < DRY_RUN_UNITS:
        return f"{len(units):,}"
    file_bytes = 0
    for path in paths:
        is_packed = path.suffix in (*files.COMPRESSED, ".parquet")
        file_bytes += path.stat().st_size * (COMPRESSION if is_packed else 1)
    unit_bytes = len("".join("\n".join(unit.texts) for unit in units).encode()) / len(units) + 1
    if source.shards:
        unit_bytes += RECORD_BYTES
    return f"about {min(int(file_bytes / unit_bytes), source.first or sys.maxsize):,}"


def prepare(corpus: Corpus, out: Path, executor: str, workers: int) -> None:
    """Make the folder `out` of a corpus. Raises UserError, MachineError and OSError."""
    files.check_writable(out)
    folder = files.partial_path(out)
    folder.mkdir(exist_ok=True)
    lock = lock_folder(folder)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists; choose another --out, or remove it")
        start_or_continue(steps.CorpusPlan(corpus), folder)
        do_steps(folder, executor, workers)
        finish(corpus, folder, out)
    finally:
        os.close(lock)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="xscale data prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, nargs="?", help="YAML file: sources, rules, tokenizer, heldout, ...")
    parser.add_argument("--out", type=Path, help="folder to make")
    parser.add_argument(
        "--executor", choices=EXECUTORS, default="local", help="processes here, an array of SLURM jobs, or Ray's tasks"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="maximum number of tasks at the same time (default: the number of cores)",
    )
    parser.add_argument("--dry_run", action="store_true", help="print what would be done, with estimated counts")
    parser.add_argument("--tasks", nargs=4, metavar=("FOLDER", "STEP", "JOB", "JOBS"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.tasks:
        do_tasks_of_job(Path(args.tasks[0]), args.tasks[1], int(args.tasks[2]), int(args.tasks[3]))
        return
    if args.corpus is None or (args.out is None and not args.dry_run):
        parser.error("give a corpus.yaml, and --out or --dry_run")
    if args.workers < 1:
        raise UserError(f"--workers {args.workers} must be at least 1")
    corpus = load_corpus(args.corpus)
    check_corpus(corpus)
    if args.dry_run:
        print(dry_run_text(corpus))
    else:
        prepare(corpus, args.out, args.executor, args.workers)


def do_tasks_of_job(folder: Path, name: str, job: int, jobs: int) -> None:
    """Do every `jobs`-th task of a step, from task `job` on, as a job of a SLURM array."""
    step = steps.STEPS[name]
    for number in range(job, step.count(folder), jobs):
        do_task(folder, name, step.function, number)


if __name__ == "__main__":
    run(main)
