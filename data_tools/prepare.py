"""Make shards, a tokenizer and held-out text from the files that corpus.yaml lists (docs/reference/corpus.md).

    xscale data prepare corpus.yaml --out DIR [--executor local|slurm|ray] [--workers N] [--dry_run]

DIR appears when it is complete, with shards/NAME/, heldout/, tokenizer/, lexicon/, report.html and report.json. Until
then the work is in DIR.incomplete. If the command is killed, start the command again; finished tasks are not
repeated. Except for the word alignments of `align: true`, the output does not depend on the executor, the number of
workers or kills.

For `--executor slurm`, start the command where `sbatch` is, with --out on a shared file system. The variables
SBATCH_PARTITION, SBATCH_TIMELIMIT, SBATCH_MEM_PER_CPU and SBATCH_ACCOUNT set the options of the jobs. If the command is
killed, the jobs continue: cancel the jobs (`scancel`) before you remove DIR.incomplete.
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from jinja2 import Environment

from xscale import __version__, files
from xscale.data.lexicon import languages_in_file_name, read_entries
from xscale.errors import UserError

from . import steps, word_aligner
from .cleaning import cached_tokenizer, check_excluded_file_has_text, identifiable_languages, short_language_code
from .command import check_new_folder, run_tool_and_exit
from .corpus import Corpus, check_folder_is_outside_sources, load_corpus
from .engine import EXECUTORS, TaskList, do_task_unless_done, done_marker_path, lock_folder_or_raise, run_tasks

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Corpus made by xscale data prepare</title>
<style>
body { font-family: sans-serif; margin: 2em }
td, th { padding: .2em .8em; text-align: left; vertical-align: top }
</style>
<h1>Corpus made by xscale data prepare</h1>
<table>
<tr><th>source<th>languages<th>licence<th>pairs or documents read<th>removed by the rules<th>held-out records
(pairs or sentences)<th>records for training<th>records with word alignments<th>size of the shards in MB
{% for source in sources %}
<tr><td>{{ source.name }}<td>{{ source.languages | join("-") }}<td>{{ source.licence or "not stated" }}
  <td>{{ "{:,}".format(source.counts.read) }}
  <td>{{ "{:,}".format(source.removed.values() | sum) }}<td>{{ "{:,}".format(source.counts.held) }}
  <td>{{ "{:,}".format(source.counts.records) }}<td>{{ "{:,}".format(source.counts.linked) }}
  <td>{{ "%.1f" | format(source.bytes / 1e6) }}
{% endfor %}
</table>
<h2>Held-out text for evaluation</h2>
<table>
<tr><th>languages<th>held-out records
{% for langs, records in heldout.items() %}<tr><td>{{ langs }}<td>{{ "{:,}".format(records) }}
{% endfor %}
</table>
<h2>Text that the rules removed, by source</h2>
{% for source in sources if source.removed %}
<h3>{{ source.name }}</h3>
<table>
<tr><th>rule<th>number of removed texts<th>examples of removed text
{% for rule, count in source.removed.items() %}
<tr><td>{{ rule }}<td>{{ "{:,}".format(count) }}
{% for texts in source.examples[rule] %}<td>{{ texts | join(" | ") }}
{% endfor %}{% endfor %}
</table>
{% endfor %}
</html>
"""


def check_corpus(corpus: Corpus) -> None:
    """Raise UserError if a file or eflomal is missing, if a tokenizer, a dictionary or a file of evaluation text cannot
    be used, or if the model that identifies languages does not know a language of the corpus."""
    for source, name in zip(corpus.sources, corpus.source_names, strict=True):
        rules = corpus.rules_for(source)
        for path in rules.needed_files if source.is_webdataset else [*source.all_paths, *rules.needed_files]:
            if not Path(path).exists() and not (source.datasets == path and files.exists_or_is_hub_name(path)):
                raise UserError(
                    f"source {name}: {path} not found. Correct the path, which is absolute or relative to "
                    f"{Path.cwd()}. If the path is a URL, download the file first"
                )
        for path in rules.exclude:
            check_excluded_file_has_text(path)
        known = identifiable_languages(rules.lid) if rules.lid else set[str]()
        for lang in source.langs:
            if known and short_language_code(lang) not in known:
                raise UserError(
                    f"rules.lid: {'py3langid' if rules.lid is True else rules.lid} cannot identify the language "
                    f"{lang} of the source {name}. Write `rules: {{lid: false}}` in this source, or set lid to the "
                    f"path of a fastText model that knows {lang}"
                )
    if isinstance(corpus.tokenizer, str):
        cached_tokenizer(corpus.tokenizer)
    if corpus.lexicons:
        check_lexicons(corpus)
    if corpus.language_pairs_to_word_align:
        word_aligner.find_aligner()


def check_lexicons(corpus: Corpus) -> None:
    """Raise UserError if training could not read a dictionary, or not tell its languages from its name."""
    names = Counter(Path(name).name for name in corpus.lexicons)
    for path in map(Path, corpus.lexicons):
        for lang in languages_in_file_name(path, corpus.languages):
            if lang not in corpus.languages:
                raise UserError(
                    f"lexicons: {path} has words in {lang}, but no source has text in {lang}. Add a source, or "
                    "remove the dictionary"
                )
        if path.suffix != ".txt" or names[path.name] > 1:
            raise UserError(
                f"lexicons: rename the file {path}. The name must end in .txt, and no other dictionary may have the "
                "same file name"
            )
        read_entries(path)


def check_and_write_input_stamp(plan: steps.CorpusPlan, folder: Path) -> None:
    """Write a stamp to the work folder: xscale's version, because another version may write other files; corpus.yaml;
    and each input file's size and modification time. Raise UserError if they have changed since the first task was
    done."""
    stamp: list[Any] = [__version__, plan.corpus.model_dump(mode="json", exclude_unset=True)]
    paths = list(plan.corpus.lexicons)
    if isinstance(plan.corpus.tokenizer, str):
        paths.append(plan.corpus.tokenizer)
    for source in plan.corpus.sources:
        paths += [*source.all_paths, *plan.corpus.rules_for(source).needed_files]
    for path in map(Path, paths):
        for file in files.list_visible_files_recursively(path) if path.is_dir() else filter(Path.is_file, [path]):
            stamp.append([str(file), file.stat().st_size, file.stat().st_mtime_ns])
    path = folder / "stamp.json"
    if any((folder / "done").glob("*/*")) or (folder / "logs").exists():  # logs: jobs of SLURM may still run
        if steps.read_json(path) != stamp:
            raise UserError(
                f"{folder} has the work of an earlier command. Since then, corpus.yaml, a file that corpus.yaml lists, "
                f"or the version of xscale has changed. Remove {folder} to begin from the start"
            )
        print(f"{folder} has finished tasks of an earlier command. These tasks are not repeated", file=sys.stderr)
    steps.write_json(path, stamp)


def do_steps(folder: Path, executor: str, workers: int) -> None:
    """Do the tasks of all steps that are not done. Raises UserError and MachineError."""
    for name, step in steps.STEPS.items():
        count = step.count(folder)
        left = [number for number in range(count) if not done_marker_path(folder, name, number).exists()]
        if left:
            run_tasks(executor, workers, TaskList(folder, name, step.function, left))
        if count:
            print(
                f"step {name}: {count:,} of {count:,} tasks are done, {len(left):,} of them by this command",
                file=sys.stderr,
                flush=True,
            )
        if name == "select":
            print_kept_counts(folder)


def print_kept_counts(folder: Path) -> None:
    """Print how many pairs or documents of each source the rules keep, before these are aligned."""
    corpus = steps.read_plan(folder).corpus
    for number, source in enumerate(corpus.sources):
        read = 0
        left = 0
        for chunk in steps.source_chunks(folder, number):
            read += steps.read_json(folder / f"clean/{chunk.number}.json")["counts"]["read"]
            states = steps.read_selection_states(folder, chunk)
            left += int(((states == steps.KEPT) | (states == steps.HELD_OUT)).sum())
        print(
            f"source {corpus.source_names[number]}: the rules leave {left:,} of {read:,} {source.kind}",
            file=sys.stderr,
            flush=True,
        )


def collect_report(folder: Path, corpus: Corpus) -> dict[str, Any]:
    """Return the content of report.json."""
    sources = list[dict[str, Any]]()
    for number, (name, source) in enumerate(zip(corpus.source_names, corpus.sources, strict=True)):
        index = folder / "result/shards" / name / "index.json"
        sources.append({
            "name": name,
            "languages": list(source.langs),
            "licence": source.licence,
            "rules": corpus.rules_for(source).model_dump(mode="json"),
            **steps.counts_and_removals_of_source(folder, number),
            "bytes": steps.read_json(index)["bytes"] if index.exists() else 0,
        })  # fmt: skip
    heldout = dict[str, int]()
    for path in sorted(folder.glob("result/heldout/*/index.json")):
        heldout[path.parent.name] = steps.read_json(path)["records"]
    return {"sources": sources, "heldout": heldout}


def summary_text(corpus: Corpus, out: Path, report: dict[str, Any]) -> str:
    """Return a line for each source, each held-out part and each dictionary that is left out. out: the folder that was
    made."""
    lines = list[str]()
    for source in report["sources"]:
        counts = source["counts"]
        kind = "pairs" if len(source["languages"]) == 2 else "documents"
        removed = ", ".join(f"{rule} {count:,}" for rule, count in source["removed"].items())
        lines.append(
            f"{out}/shards/{source['name']}: {counts['records']:,} records of {counts['read']:,} {kind} "
            f"({'-'.join(source['languages'])}); removed by rule: {removed or 'nothing'}; "
            f"held out: {counts['held']:,} records"
        )
    for name, count in report["heldout"].items():
        lines.append(f"{out}/heldout/{name}: {count:,} records")
    for group in corpus.language_groups:
        lines += missing_heldout_warnings(corpus, group, report["heldout"])
    for path in map(Path, corpus.lexicons):
        if not (out / "lexicon" / path.name).exists():
            lines.append(
                f"dictionary {path} is left out, because every entry has tokens that the tokenizer does not know. Use "
                "a tokenizer for the languages of the dictionary"
            )
    lines.append(f"{out}/report.html shows how much text each rule removed, with examples")
    return "\n".join(lines)


def missing_heldout_warnings(corpus: Corpus, group: tuple[str, ...], found: dict[str, int]) -> list[str]:
    """Return a line that says why less text of a group is held out than corpus.yaml asks for; [] if nothing is missing.
    found: {folder below heldout/: number of its records}."""
    folders = {"-".join(source.langs) for source in corpus.sources if source.sorted_langs == group}
    count = sum(found.get(name, 0) for name in folders)
    wanted = corpus.heldout.wanted_pair_or_sentence_count(group)
    if count >= wanted:
        return []
    kind, rule = {
        1: ("sentences", "only whole documents that occur once"),
        2: ("pairs", "only pairs whose two sentences occur in no other pair"),
    }[len(group)]
    return [
        f"{'-'.join(group)}: only {count:,} {kind} are held out, but `heldout` in corpus.yaml asks for {wanted:,}. "
        f"prepare holds out at most a tenth of the text, and {rule}. If the rule length.tokens is set, this rule may "
        "also have removed held-out text"
    ]


def prepare(corpus: Corpus, out: Path, executor: str, workers: int) -> None:
    """Make the folder `out` of a corpus, and print a summary. Raises UserError, MachineError and OSError."""
    check_folder_is_outside_sources(out, corpus.sources)
    files.check_writable_and_make_parent(out)
    folder = files.checked_partial_path(out)
    folder.mkdir(exist_ok=True)
    with lock_folder_or_raise(folder):
        check_new_folder(out)
        plan = steps.CorpusPlan(corpus)
        check_and_write_input_stamp(plan, folder)
        steps.write_plan_and_clear_caches(folder, plan)
        do_steps(folder, executor, workers)
        result = folder / "result"
        for path in list(result.rglob(f"*{files.PARTIAL}")):  # left by a killed task
            files.remove(path)
        report = collect_report(folder, corpus)
        files.write_text(result / "report.json", json.dumps(report, ensure_ascii=False, indent=1) + "\n")
        page = Environment(autoescape=True, trim_blocks=True).from_string(PAGE)
        files.write_text(result / "report.html", page.render(report))
        files.rename_into_place(result, out)
        files.remove(folder)
        print(summary_text(corpus, out, report))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="xscale data prepare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "corpus",
        type=Path,
        nargs="?",
        help="YAML file that lists the sources, rules and other settings (docs/reference/corpus.md)",
    )
    parser.add_argument("--out", type=Path, help="folder for the shards, the tokenizer and the held-out text")
    parser.add_argument(
        "--executor",
        choices=EXECUTORS,
        default="local",
        help="where the tasks run: in processes on this machine, in an array of SLURM jobs, or on a Ray cluster "
        "(default: local)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="maximum number of tasks that run at the same time (default: the number of cores)",
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="check corpus.yaml, print its sources, and write nothing"
    )
    parser.add_argument("--tasks", nargs=4, metavar=("FOLDER", "STEP", "JOB", "JOBS"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.tasks:
        do_tasks_of_job(Path(args.tasks[0]), args.tasks[1], int(args.tasks[2]), int(args.tasks[3]))
        return
    if args.corpus is None or (args.out is None and not args.dry_run):
        parser.error("the command needs a corpus.yaml, and either --out or --dry_run")
    if args.workers < 1:
        raise UserError(f"--workers {args.workers} is too small; the minimum is 1")
    corpus = load_corpus(args.corpus)
    check_corpus(corpus)
    if args.dry_run:
        for source, name in zip(corpus.sources, corpus.source_names, strict=True):
            print(f"{name}: {source.format}, {'-'.join(source.langs)}, {source.kind}")
    else:
        prepare(corpus, args.out, args.executor, args.workers)


def do_tasks_of_job(folder: Path, step_name: str, job: int, job_count: int) -> None:
    """Do every `job_count`-th task of a step, from task `job` on, as a job of a SLURM array."""
    step = steps.STEPS[step_name]
    for number in range(job, step.count(folder), job_count):
        do_task_unless_done(folder, step_name, step.function, number)


if __name__ == "__main__":
    run_tool_and_exit(main)
