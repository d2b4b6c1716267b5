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
import hashlib
import json
import os
import shutil
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from xscale import files
from xscale.errors import MachineError, UserError, check_arguments, report_environment_error, run_command

from . import align, prepare_report, readers, steps
from .cleaning import identifiable_languages, language_code, load_tokenizer
from .corpus import Corpus, SourceSpec, TokenizerSpec, file_name, is_url, language_group, load_corpus
from .engine import EXECUTORS, Executor, do_tasks_of_job, lock_folder, mark_path, replacing

DRY_RUN_UNITS = 2000
"""The number of units of a source that --dry_run reads."""
COMPRESSION = 3
"""The size of a compressed file is multiplied by this number to estimate the size of its text."""
LONGEST_NAME = 200
"""The maximum number of bytes in the name of a file at a URL. File systems allow 255, and downloads add a suffix."""
SOURCE_STAMP = "source {} of corpus.yaml or a file of it"
"""The name, in inputs.json and in errors, of what a source depends on."""
RECORD_BYTES = 100
"""The approximate number of bytes of a record without its texts."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="xscale data prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path, nargs="?", help="YAML file: sources, rules, tokenizer, heldout, ...")
    parser.add_argument("--out", type=Path, help="folder to make")
    parser.add_argument(
        "--executor", choices=EXECUTORS, default="local", help="processes here, an array of SLURM jobs, or Ray's tasks"
    )
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), help="tasks at once (default: the cores)"
    )
    parser.add_argument("--dry_run", action="store_true", help="print what would be done, with counts and disk")
    parser.add_argument("--tasks", nargs=4, metavar=("FOLDER", "STEP", "JOB", "JOBS"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.tasks and (args.corpus is None or (args.out is None and not args.dry_run)):
        parser.error("give a corpus.yaml, and --out or --dry_run")
    return args


def check_corpus(corpus: Corpus) -> None:
    """Raise UserError if a file is missing, a URL, tokenizer or dictionary cannot be used, or the model that identifies
    languages does not know one of the corpus. Print a warning for each file that several sources read."""
    for source, name in zip(corpus.sources, corpus.names, strict=True):
        rules = corpus.rules_of(source)
        for path in [] if source.is_foreign else source.paths:
            if is_url(path):
                check_url(path, name)
            else:
                check_path(path, source, name)
        for path in rules.paths:
            check_path(path, source, name)
        known = identifiable_languages(rules.lid) if rules.lid else set[str]()
        for lang in source.langs:
            if known and language_code(lang) not in known:
                raise UserError(
                    f"rules.lid: {'py3langid' if rules.lid is True else rules.lid} does not know {lang}; give {name} "
                    f"`rules: {{lid: false}}`, or the path of a fastText model that does"
                )
    read = Counter((language_group(source), source.columns, tuple(source.paths)) for source in corpus.sources)
    for (_, _, paths), times in read.items():
        if times > 1:
            print(
                f"warning: {paths[0]} is read by {times} sources; without `dedup` its text counts twice",
                file=sys.stderr,
            )
    if isinstance(corpus.tokenizer, str):
        load_tokenizer(corpus.tokenizer)
    if corpus.lexicons:
        check_lexicons(corpus)
    if corpus.directions:
        align.find_aligner()


def check_path(path: str, source: SourceSpec, name: str) -> None:
    """Raise UserError unless the path is a file or folder, which a restart can read again. name: the source's."""
    if Path(path).is_file() or Path(path).is_dir():
        return
    if source.datasets == path and files.may_exist(path):
        return
    if path == "-" or Path(path).exists():
        raise UserError(f"{path} (source {name}) can be read only once; write its text to a file, and give that")
    raise UserError(f"{path} not found (source {name}); paths are relative to {Path.cwd()}")


def check_url(url: str, name: str) -> None:
    """Raise UserError if a URL does not end in a file's name, or if fsspec cannot read it. name: the source's."""
    import fsspec

    if not 0 < len(file_name(url).strip(".").encode()) <= LONGEST_NAME:
        raise UserError(f"{url} (source {name}) must end in the name of a file, of at most {LONGEST_NAME} bytes")
    for link in url.split("::"):
        try:
            fsspec.get_filesystem_class(link.partition("://")[0])
        except (ImportError, ValueError) as error:  # no such protocol, or its package is not installed
            raise UserError(
                f"{url} (source {name}) cannot be fetched: {error}; install the package, "
                f"or download the file and give its path"
            ) from None


def check_lexicons(corpus: Corpus) -> None:
    """Raise UserError unless training can read each dictionary and recognise its languages by its name."""
    from xscale.data.lexicon import pair_of, read_entries  # it takes seconds to import

    languages = {lang for source in corpus.sources for lang in source.langs}
    names = set[str]()
    for path in map(Path, corpus.lexicons):
        absent = set(pair_of(path, languages)) - languages
        if absent:
            raise UserError(
                f"lexicons: {path}: no source has text in {', '.join(absent)}; add one, or leave the dictionary out"
            )
        if path.suffix != ".txt":
            remedy = "decompress" if path.suffix in files.COMPRESSED else "rename"
            raise UserError(f"lexicons: {path} must be plain text and named *.txt, such as en-de.txt; {remedy} it")
        if path.name in names:
            raise UserError(f"lexicons: two dictionaries are named {path.name}; rename {path}")
        names.add(path.name)
        read_entries(path)


def fetch_sources(corpus: Corpus, folder: Path) -> Corpus:
    """Download the files of sources that are at URLs, unless an earlier start has. Return the corpus with the paths of
    the downloads in the place of the URLs. Raises UserError."""
    import fsspec

    places = dict[str, str]()
    for source in corpus.sources:
        for url in source.paths:
            if source.is_foreign or not is_url(url):
                continue
            path = folder / "fetched" / hashlib.sha256(url.encode()).hexdigest()[:16] / file_name(url)
            places[url] = str(path)
            if path.exists():
                continue
            print(f"fetching {url}", file=sys.stderr, flush=True)
            try:
                with fsspec.open(url, "rb") as remote, replacing(path) as partial, partial.open("wb") as local:
                    shutil.copyfileobj(remote, local, 1 << 20)
            except Exception as error:  # of many packages
                raise UserError(
                    f"{url} cannot be fetched: {error or type(error).__name__}; correct it, or start again"
                ) from None
    return corpus.model_copy(update={"sources": [source.with_local_paths(places) for source in corpus.sources]})


def files_below(paths: list[str]) -> list[Path]:
    """Return the files among the paths, and those below the folders."""
    below = list[Path]()
    for path in map(Path, paths):
        below += [file for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]
    return below


def input_stamps(plan: steps.Plan) -> dict[str, Any]:
    """Return what must not change between the starts of one run: corpus.yaml, the size and modification time of each
    input file, and the format of intermediate files."""
    corpus = plan.corpus
    fields = corpus.model_dump(mode="json")
    form: list[Any] = [steps.CHUNK_UNITS, steps.CHUNK_BYTES, plan.shard_lines, "JSON lines"]
    stamps: dict[str, Any] = {"the version of xscale": form, "corpus.yaml": fields | {"sources": len(corpus.sources)}}
    for number, source in enumerate(corpus.sources):
        paths = file_stamps([*source.paths, *corpus.rules_of(source).paths])
        stamps[SOURCE_STAMP.format(number + 1)] = [fields["sources"][number], paths]
    return stamps | file_stamps(corpus.lexicons)


def file_stamps(paths: list[str]) -> dict[str, Any]:
    """Return {path: [size, modification time]} of the files, and of the files below the folders."""
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files_below(paths)}


def lock_work_folder(folder: Path) -> int:
    """Lock the folder, after workers of a killed start have ended. Return the file descriptor. Raises UserError."""
    for _ in range(files.LOCK_SECONDS):
        try:
            return lock_folder(folder)
        except UserError:
            time.sleep(1)
    return lock_folder(folder)


def start_or_continue(plan: steps.Plan, folder: Path) -> None:
    """Write plan.json and inputs.json. Raise UserError if inputs have changed since work on them began. The step `cut`
    works on each source by itself; so until it ends, a source that is not cut may change."""
    path, now = folder / "inputs.json", input_stamps(plan)
    slurm = (folder / "logs").exists()  # its jobs may still work on the earlier inputs
    if (slurm or any((folder / "done").glob("*/*"))) and (folder / "plan.json").exists():
        before = steps.read_json(path) if path.exists() else {}
        changed = [name for name in now | before if now.get(name) != before.get(name)]
        if not slurm and not (folder / "done" / "clean").exists():
            for number in range(len(plan.corpus.sources)):
                stamp = SOURCE_STAMP.format(number + 1)
                if stamp in changed and not mark_path(folder, "cut", number).exists():
                    changed.remove(stamp)
        if changed:
            raise UserError(f"{changed[0]} changed after the work in {folder} began; to start anew, remove {folder}")
        print(f"continuing after the finished tasks in {folder}", file=sys.stderr)
    steps.write_json(path, now)
    steps.write_plan(folder, plan)


def do_steps(executor: Executor) -> None:
    """Do the tasks of all steps that are not done. Raises UserError and MachineError."""
    folder = executor.folder
    for name, (step, count) in steps.STEPS.items():
        tasks = count(folder)
        done = executor.run(name, step, tasks)
        if tasks:
            print(f"{name}: did {done:,} of {tasks:,} tasks", file=sys.stderr, flush=True)
        if name == "select":
            print_selection(folder)


def print_selection(folder: Path) -> None:
    """Print how many pairs or documents of each source the rules have left, before they are aligned."""
    corpus = steps.read_plan(folder).corpus
    read, left = Counter[str](), Counter[str]()
    for chunk in steps.all_chunks(folder):
        name = corpus.names[chunk.source]
        read[name] += steps.read_json(folder / f"clean/{chunk.number}.json")["counts"]["read"]
        states = steps.unit_states(folder, chunk)
        left[name] += int(((states == steps.KEPT) | (states == steps.HELD_OUT)).sum())
    for source, name in zip(corpus.sources, corpus.names, strict=True):
        kind = "pairs" if source.pairs else "documents"
        print(f"{name}: {left[name]:,} of {read[name]:,} {kind} are left", file=sys.stderr, flush=True)


def finish(corpus: Corpus, folder: Path, out: Path) -> None:
    """Write the report, move the result to `out`, and remove the work folder."""
    result = folder / "result"
    for path in result.glob(f"*{files.PARTIAL}"):  # of a task that was killed
        files.remove(path)
    for name in corpus.lexicons:
        (result / "lexicon").mkdir(exist_ok=True)
        shutil.copyfile(name, result / "lexicon" / Path(name).name)
    report = prepare_report.collect_report(folder, corpus)
    files.write_text(result / "report.json", json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    files.write_text(result / "report.html", prepare_report.page(report))
    files.rename_into_place(result, out)
    files.remove(folder)
    print(prepare_report.summary(out, report))


def dry_run_text(corpus: Corpus) -> str:
    """Return what the command would read and write, estimated from the first pairs or documents of each source."""
    lines, disk = [], 0
    for source, name in zip(corpus.sources, corpus.names, strict=True):
        about = f"{name}: {source.format}, {'-'.join(source.langs)}, "
        if source.is_foreign or any(map(is_url, source.paths)) or not files_below(source.paths):
            lines.append(about + "not counted, because the source is at a URL")
            continue
        units = list(islice((unit for unit in readers.read_units(source) if unit.texts), DRY_RUN_UNITS))
        size = 0
        for unit in units:
            size += sum(len(text.encode()) + (RECORD_BYTES if source.shards else 1) for text in unit.texts)
        text = 0
        for file in files_below(source.paths):
            is_packed = file.suffix in (*files.COMPRESSED, ".parquet")
            text += file.stat().st_size * (COMPRESSION if is_packed else 1)
        count = len(units)
        if count == DRY_RUN_UNITS:
            count = min(text * count // max(size, 1), source.first or sys.maxsize)
            about += "" if count == source.first else "about "
        disk += count * (size // max(len(units), 1) + RECORD_BYTES)
        lines.append(f"{about}{count:,} {'pairs' if source.pairs else 'documents'}")
    if isinstance(corpus.tokenizer, TokenizerSpec):
        lines.append(f"a tokenizer of {corpus.tokenizer.vocab_size:,} tokens")
    else:
        lines.append(f"the tokenizer {corpus.tokenizer}" if corpus.tokenizer else "no tokenizer")
    lines.append(
        f"held out: {corpus.heldout.pairs:,} pairs a language pair, {corpus.heldout.mono:,} sentences a language"
    )
    return "\n".join([*lines, f"disk: about {disk / 1e6:,.1f} MB, and three times as much meanwhile"])


def run(args: argparse.Namespace) -> None:
    if args.tasks:
        folder, name, job, jobs = args.tasks
        step, count = steps.STEPS[name]
        do_tasks_of_job(Path(folder), name, step, count(Path(folder)), int(job), int(jobs))
        return
    if args.workers < 1:
        raise UserError(f"--workers {args.workers} must be at least 1")
    corpus = load_corpus(args.corpus)
    check_corpus(corpus)
    if args.dry_run:
        print(dry_run_text(corpus))
    else:
        prepare(corpus, args.out, args.executor, args.workers)


def prepare(corpus: Corpus, out: Path, executor_kind: str, workers: int) -> None:
    """Make the folder `out` of a corpus. Raises UserError, MachineError and OSError."""
    files.check_writable(out)
    folder = files.partial_path(out)
    folder.mkdir(exist_ok=True)
    lock, executor = lock_work_folder(folder), Executor(executor_kind, workers, folder)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists; choose another --out, or remove it")
        plan = steps.Plan(fetch_sources(corpus, folder), "data_tools.prepare", None, steps.SYMMETRIZE)
        start_or_continue(plan, folder)
        do_steps(executor)
        finish(plan.corpus, folder, out)
    finally:
        executor.close()
        os.close(lock)


def main() -> int:
    args = argparse.Namespace(out=None)
    try:
        check_arguments(sys.argv[1:])
        args = parse_arguments()
        run(args)
    except (UserError, MachineError) as error:
        fetched = f"{args.out}.incomplete/fetched" if args.out else ""
        again = ""
        if fetched and fetched in str(error):
            again = "; this file was downloaded: remove it, and the next start downloads it again"
        print(f"error: {error}{again}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 4
    except OSError as error:
        error.filename = error.filename or args.out  # a full disk names no file
        return report_environment_error(error)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    run_command(main)
