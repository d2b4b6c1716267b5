"""From raw corpora to shards, tokenizer, dictionaries and held-out text, by one file that names them (corpus.py).

    python -m data_tools.prepare corpus.yaml --out DIR [--executor local|slurm|ray] [--workers N] [--dry_run]

DIR appears when it is complete: shards/NAME/, heldout/, tokenizer/, lexicon/, report.html and report.json. Until then
all is in DIR.incomplete; a run that was killed goes on from there when the same command is started again, and the bytes
are the same whatever the executor, the number of workers and the kills (but for eflomal's links, which differ from run
to run where they are made anew). With `--executor slurm` start it where `sbatch` is, and let SBATCH_PARTITION,
SBATCH_TIMELIMIT, SBATCH_MEM_PER_CPU, SBATCH_ACCOUNT say what your site wants.
"""

import argparse
import fcntl
import hashlib
import json
import os
import sys
from itertools import islice
from pathlib import Path

from xscale import files
from xscale.errors import MachineError, UserError, check_arguments, of_machine, run_command

from . import prepare_report, readers, steps
from .cleaning import identifier, of_lid
from .corpus import Corpus, load
from .engine import EXECUTORS, Executor, do_share
from .lexicon import oriented, write_entries

GLANCE = 2000
"""Units of a source that --dry_run reads."""
COMPRESSED = 3
"""A compressed file's text is taken for so many times as large."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="?", help="YAML file: sources, rules, tokenizer, heldout, ...")
    parser.add_argument("--out", type=Path, help="folder to make")
    parser.add_argument("--executor", choices=list(EXECUTORS), default="local")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="tasks at once (default: the cores)")
    parser.add_argument(
        "--dry_run", action="store_true", help="say what would be done, with counts and disk; do nothing"
    )
    parser.add_argument("--tasks", nargs=4, metavar=("FOLDER", "STEP", "JOB", "JOBS"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.tasks and (args.corpus is None or (args.out is None and not args.dry_run)):
        parser.error("give a corpus.yaml, and --out or --dry_run")
    return args


def resolve(corpus: Corpus) -> steps.Plan:
    """The corpus with its sources' languages. Raises UserError where a file or a dictionary cannot be read."""
    langs = [source.langs or readers.shard_langs(source) for source in corpus.sources]
    plan = steps.Plan(corpus, langs, corpus.names)
    asked = [of for number, of in enumerate(langs) if plan.rules(number).lid]
    unknown = {lang for of in asked for lang in of if of_lid(lang) not in identifier().labels}
    if unknown:
        raise UserError(
            f"rules.lid: py3langid does not know {', '.join(sorted(unknown))}; give its source rules: {{lid: false}}"
        )
    for number, source in enumerate(corpus.sources):
        for name in [*source.paths, *plan.rules(number).exclude]:
            if "://" not in name and not Path(name).exists() and not (source.datasets == name and "/" in name):
                raise UserError(f"{name} not found (source {plan.names[number]}); paths are relative to {Path.cwd()}")
    lexicon_entries(plan)
    return plan


def lexicon_entries(plan: steps.Plan) -> dict[str, list[tuple[str, str]]]:
    """Of each dictionary the entries, each once. Raises UserError."""
    from xscale.data.lexicon import pair_of

    known = {lang for langs in plan.langs for lang in langs}
    found = {}
    for name in plan.corpus.lexicons:
        path = Path(name)
        langs = pair_of(path, known)
        if not set(langs) <= known:
            raise UserError(
                f"{path} is of {' and '.join(langs)}, the corpus of {', '.join(sorted(known))}; name its pair"
            )
        found[f"{'-'.join(langs)}.txt"] = list(dict.fromkeys(oriented(path, langs)))
    return found


def input_files(plan: steps.Plan, number: int) -> list[Path]:
    """The files of a source that are on this machine."""
    source = plan.source(number)
    names = [Path(name) for name in [*source.paths, *plan.rules(number).exclude] if "://" not in name]
    return [file for path in names for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]


def fingerprint(plan: steps.Plan) -> str:
    """The corpus, and sizes and times of its files: what is in DIR.incomplete goes on only for the same."""
    seen = [
        [str(file), file.stat().st_size, file.stat().st_mtime_ns]
        for number in range(len(plan.langs))
        for file in input_files(plan, number)
    ]
    text = json.dumps([plan.corpus.model_dump(mode="json"), plan.langs, seen, steps.CHUNK_UNITS, steps.CHUNK_BYTES])
    return hashlib.sha256(text.encode()).hexdigest()


def start(plan: steps.Plan, out: Path) -> Path:
    """The folder to work in, locked by this process. Raises UserError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already; choose another --out, or remove it")
    folder = files.beside(out)
    files.check_writable(out)
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    os.set_inheritable(lock, False)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{folder} is being written by another process; wait for it, or stop it") from None
    except OSError:
        pass  # a file system without locks
    for of_another in (steps.plan_of, steps.chunks_of, steps.places_in):
        of_another.cache_clear()
    described = {
        "fingerprint": fingerprint(plan),
        "corpus": plan.corpus.model_dump(mode="json", exclude_unset=True),
        "langs": plan.langs,
        "names": plan.names,
    }
    if (folder / "plan.json").exists():
        if steps.read_json(folder / "plan.json")["fingerprint"] != described["fingerprint"]:
            raise UserError(
                f"{folder} is of another corpus.yaml, or its input has changed since; remove it to start anew"
            )
        print(f"going on in {folder}", file=sys.stderr)
    else:
        steps.write_json(folder / "plan.json", described)
    return folder


def finish(plan: steps.Plan, folder: Path, out: Path) -> None:
    """Dictionaries and report, and all that is no result goes."""
    (folder / "lexicon").mkdir(exist_ok=True)
    entries = lexicon_entries(plan)
    for name, of_pair in entries.items():
        write_entries(of_pair, folder / "lexicon" / name)
    if not entries:
        (folder / "lexicon").rmdir()
    report = prepare_report.collect(folder, plan, {name: len(of_pair) for name, of_pair in entries.items()})
    files.write_text(folder / "report.json", json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    files.write_text(folder / "report.html", prepare_report.page(report))
    for path in folder.iterdir():
        if path.name not in ("shards", "heldout", "tokenizer", "lexicon", "report.json", "report.html"):
            files.remove(path)
    files.move_in(folder, out)
    print(prepare_report.summary(out, report))


def forecast(plan: steps.Plan) -> str:
    """What would be done, by a look at the first units of every source."""
    lines, disk = [], 0
    for number, source in enumerate(plan.corpus.sources):
        seen = list(islice(readers.read(source), GLANCE))
        size = sum(len(readers.to_line(unit).encode()) for unit in seen)
        of_files = sum(f.stat().st_size * (COMPRESSED if f.suffix in (*files.COMPRESSED, ".zip", ".parquet") else 1)
                       for f in input_files(plan, number))  # fmt: skip
        exact = len(seen) < GLANCE
        count = len(seen) if exact else max(int(of_files / size * len(seen)), len(seen))
        count = min(count, source.first or count)
        disk += int(count * size / max(len(seen), 1))
        kind = "pairs" if len(plan.langs[number]) == 2 else "documents"
        about = "" if exact or count == source.first else "about "
        lines.append(f"{plan.names[number]}: {source.reader}, {'-'.join(plan.langs[number])}, {about}{count:,} {kind}, "
                     f"about {-(-count // steps.CHUNK_UNITS):,} tasks a step")  # fmt: skip
    asked = [name for name in ("align", "tokenizer", "lexicons") if getattr(plan.corpus, name)]
    return "\n".join([*lines, f"then: {', '.join(asked) or 'nothing else'}; heldout: {plan.corpus.heldout}",
                      f"disk: about {disk / 1e6:,.0f} MB of shards, and three times as much meanwhile"])  # fmt: skip


def run(args: argparse.Namespace) -> None:
    if args.tasks:
        folder, name = Path(args.tasks[0]), args.tasks[1]
        do_share(folder, name, steps.STEPS[name][0], steps.STEPS[name][1](folder), args.tasks[2:])
        return
    if args.workers < 1:
        raise UserError(f"--workers {args.workers} must be positive")
    plan = resolve(load(args.corpus))
    if args.dry_run:
        print(forecast(plan))
        return
    folder = start(plan, args.out)
    executor = Executor(args.executor, args.workers, folder)
    try:
        for name, (step, tasks) in steps.STEPS.items():
            done = executor.run(name, step, tasks(folder))
            print(f"{name}: {done:,} of {tasks(folder):,} tasks were to do", file=sys.stderr, flush=True)
    finally:
        executor.close()
    finish(plan, folder, args.out)


def main() -> int:
    try:
        check_arguments(sys.argv[1:])
        run(parse_arguments())
    except (UserError, MachineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 4
    except OSError as error:
        return of_machine(error)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    run_command(main)
