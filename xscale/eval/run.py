"""Evaluate an exported encoder: `xscale eval --model HF_DIR --task NAME ... --data DIR --out FILE.json`."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from tqdm import tqdm

from xscale import files
from xscale.data.lexicon import find_lexicon_paths, split_pair_name
from xscale.data.scripts import short_code
from xscale.data.shards import Source, find_sources, languages_of, sorted_pair_name
from xscale.errors import LOG, ExitCode, UserError, run_and_exit, run_command
from xscale.eval import aer, alignment_score, heldout, retrieval
from xscale.eval.bootstrap import format_name_and_score
from xscale.eval.model import ExportedModel, Scores, read_texts, text_checksum, write_results

RECORDS = 1000
"""The default of --limit, except for --texts."""
SHOWN = 10
"""The maximum number of files that a warning lists."""
LANGUAGE = re.compile(r"(?!(bin|csv|dev|idx|log|md|pdf|py|sh|tar|tsv|txt|zip)$)[a-z]{2,3}([-_]\w+)*")
"""Matches the language in the name of a file of parallel text. Usual suffixes of files do not match."""


@dataclass(frozen=True)
class ResultsRow:
    """A row of a task's results, before it is evaluated."""

    task: str
    name: str
    """A pair of languages in alphabetical order."""
    path: Path
    """The path of the row's data, which distinguishes rows with the same name."""
    evaluate: Callable[[ExportedModel], dict[str, Scores]]
    """Returns {variant: scores}. A task without variants has the single variant ""."""
    read: Callable[[], Sequence[Any]] = tuple
    """Returns the test sentences."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="xscale eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face directory of the encoder, as `xscale export` writes it")
    add(
        "--task",
        nargs="+",
        action="extend",
        choices=TASKS,
        required=True,
        help="what is measured (docs/how-to/evaluate.md)",
    )
    add("--out", type=Path, help="JSON file for the scores")
    add(
        "--data",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        help="folders of shards with held-out text; with --task alignment, folders of training text are allowed, too",
    )
    add(
        "--texts",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR",
        help="folders of public test sets for retrieval (FLORES, NTREX, Tatoeba). Each language has one file, and line "
        "n of all files is the same sentence. If there is an English file, all pairs with English are measured, else "
        "all pairs of languages",
    )
    add("--limit", type=int, help="maximum number of pairs to read from each folder of --data and each file of --aer "
        "(default: 1000), and maximum number of lines to read from each file of --texts (default: all)")  # fmt: skip
    add(
        "--lexicons",
        type=Path,
        nargs="+",
        action="extend",
        help="dictionaries for task alignment (default: lexicon/*.txt beside the shards)",
    )
    add("--aer", nargs="+", action="append", default=[], metavar="X", help="word alignments made by hand, for task "
        "aer: `en-es FILE.tsv`, or `en-fr TEXT LINKS`; may be repeated")  # fmt: skip
    variants = "--pooling, --layer and --margin may have several values; every combination of the values is evaluated."
    add = parser.add_argument_group("variants", variants).add_argument
    add(
        "--pooling",
        nargs="+",
        action="extend",
        choices=retrieval.POOLINGS,
        help="pooling of sentence vectors for retrieval (default: that of the model)",
    )
    add(
        "--layer",
        nargs="+",
        action="extend",
        metavar="N",
        help="layers whose hidden states are compared: a number, 0 for the embeddings, -1 for the last layer, or `all` "
        "for every layer (default: -1 for retrieval, all for aer)",
    )
    add(
        "--margin",
        nargs="+",
        action="extend",
        choices=retrieval.MARGINS,
        help="similarity of two sentences, for retrieval: cosine (default), or ratio (LASER's margin, "
        "docs/reference/results.md)",
    )
    return run_command(parser, argv, evaluate)


def evaluate(args: argparse.Namespace) -> ExitCode:
    """Evaluate the model by all tasks of the flags, and return the exit code. Raises UserError."""
    if args.out:
        files.check_output_file_and_make_parent(args.out)
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit {args.limit} is too small; the minimum is 1")
    sources = find_sources(args.data)
    rows: list[ResultsRow] = []
    for task in args.task:
        rows += TASKS[task](args, sources)
    return evaluate_rows(ExportedModel(args.model), rows, args.out)


def evaluate_rows(model: ExportedModel, rows: list[ResultsRow], out: Path | None) -> ExitCode:
    """Evaluate and print every row, and write the scores so far to `out` after each row. Without scores, an existing
    file stays. Return the exit code: 2 if a row cannot be evaluated, else 0."""
    times = Counter((row.task, row.name) for row in rows)
    results: dict[str, dict[str, Scores]] = {}
    checksums: dict[str, dict[str, int]] = {}
    code = 0
    for row in tqdm(rows, unit="row", disable=None):
        name = row.name if times[row.task, row.name] == 1 else f"{row.name} ({row.path})"
        try:
            checksum = text_checksum(row.read())
            for variant, scores in row.evaluate(model).items():
                full_name = f"{name} {variant}".strip()
                results.setdefault(row.task, {})[full_name] = scores
                checksums.setdefault(row.task, {})[full_name] = checksum
                listed = ", ".join(map(format_name_and_score, scores, scores.values()))
                tqdm.write(f"{row.task} {full_name}: {listed}", file=sys.stdout)
        except UserError as error:
            code = 2
            print(f"error: task {row.task} on {name}: {error}", file=sys.stderr)
        if out and results:
            write_results(out, model.path, results, checksums)
    return code


# The tasks


def require_pair_sources(args: argparse.Namespace, sources: list[Source]) -> list[Source]:
    """Return the sources of sentence pairs. Raises UserError if there is none."""
    pairs = [source for source in sources if source.kind == "pair"]
    if not pairs:
        raise UserError(
            "the tasks alignment, heldout and retrieval need sentence pairs, but --data "
            f"({', '.join(map(str, args.data)) or 'not given'}) has none. Write --data DIR with a folder of shards of "
            "pairs. The task retrieval also takes --texts DIR instead of --data DIR"
        )
    return pairs


def plan_alignment(args: argparse.Namespace, sources: list[Source]) -> list[ResultsRow]:
    paths: list[Path] = list(args.lexicons or [])
    if not paths:
        for source in sources:
            paths += find_lexicon_paths(sources, source.directory)

    rows: dict[str, ResultsRow] = {}
    for source in require_pair_sources(args, sources):
        evaluate = partial(
            alignment_score.evaluate,
            langs=source.langs,
            sources=sources,
            lexicon_paths=list(dict.fromkeys(paths)),
        )
        rows.setdefault(
            source.sorted_langs_name, ResultsRow("alignment", source.sorted_langs_name, source.directory, evaluate)
        )
    return list(rows.values())


def plan_heldout(args: argparse.Namespace, sources: list[Source]) -> list[ResultsRow]:
    rows = []
    for source in require_pair_sources(args, sources):
        evaluate = partial(heldout.evaluate, source=source, limit=args.limit or RECORDS)
        read = partial(read_texts, source, args.limit or RECORDS)
        rows.append(ResultsRow("heldout", source.sorted_langs_name, source.directory, evaluate, read))
    return rows


def plan_retrieval(args: argparse.Namespace, sources: list[Source]) -> list[ResultsRow]:
    def evaluate(
        langs: tuple[str, ...], read: Callable[[], list[tuple[str, ...]]], model: ExportedModel
    ) -> dict[str, Scores]:
        return retrieval.evaluate(model, read(), langs, args.pooling, args.layer or [-1], args.margin or ["cosine"])

    rows: list[ResultsRow] = []
    for folder in args.texts:
        parallel = find_parallel_files(folder)
        warn_of_unread_files(folder, parallel)
        for name, paths in parallel.items():
            has_english = "en" in map(short_code, paths)
            for langs in combinations(sorted(paths), 2):
                if not has_english or "en" in map(short_code, langs):
                    read = partial(read_parallel_lines, paths[langs[0]], paths[langs[1]], args.limit)
                    retrieve = partial(evaluate, langs, read)
                    rows.append(ResultsRow("retrieval", sorted_pair_name(langs), Path(name), retrieve, read))
    if args.texts and not rows and not args.data:
        raise UserError(
            f"--texts {' '.join(map(str, args.texts))}: there is no parallel text. Use folders with one file per "
            "language, such as eng_Latn.devtest and deu_Latn.devtest; line n of each file must be the same sentence"
        )
    if args.data or not rows:
        for source in require_pair_sources(args, sources):
            read = partial(read_texts, source, args.limit or RECORDS)
            retrieve = partial(evaluate, source.langs, read)
            rows.append(ResultsRow("retrieval", source.sorted_langs_name, source.directory, retrieve, read))
    return rows


def find_parallel_files(folder: Path) -> dict[str, dict[str, Path]]:
    """Find the parallel text in a folder and below it: files whose names differ only in the language, which stands
    between dots (`eng_Latn.devtest`, `tatoeba.deu-eng.deu.xz`). Return {path with * for the language: {language:
    path}}. Raises UserError if there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"--texts {folder}: this is not a folder. Write the path of a folder")
    texts: dict[str, dict[str, Path]] = {}
    for path in files.list_visible_files_recursively(folder):
        parts = re.sub(r"\.[gx]z$", "", path.name).split(".")
        places = [place for place, part in enumerate(parts) if LANGUAGE.fullmatch(part)]
        if places:
            language = parts[places[-1]]
            parts[places[-1]] = "*"
            name = re.sub(r"-(ref|src)\.", ".", ".".join(parts))  # NTREX's source is English
            texts.setdefault(str(path.with_name(name)), {})[language] = path
    return {name: paths for name, paths in texts.items() if len(paths) > 1}


def warn_of_unread_files(folder: Path, parallel: dict[str, dict[str, Path]]) -> None:
    """Warn of the files in a folder that are not read. parallel: the result of find_parallel_files."""
    read = {path for paths in parallel.values() for path in paths.values()}
    others = [
        str(path.relative_to(folder)) for path in files.list_visible_files_recursively(folder) if path not in read
    ]
    if parallel and others:
        more = f" and {len(others) - SHOWN:,} more" if len(others) > SHOWN else ""
        LOG.warning(
            f"--texts {folder}: these files are not read: {', '.join(others[:SHOWN])}{more}. A file is read if its "
            "name has a language, and another file has the same name with another language"
        )


def read_parallel_lines(first: Path, second: Path, limit: int | None) -> list[tuple[str, ...]]:
    """Return the pairs of lines of two files, from at most `limit` lines. Pairs with a blank line are left out. Raises
    UserError if one file has more lines, or if there is no pair."""
    first_lines = aer.read_all_lines(first)[:limit]
    second_lines = aer.read_all_lines(second)[:limit]
    if not 0 < len(first_lines) == len(second_lines):
        raise UserError(
            f"the number of lines is {len(first_lines):,} in {first} and {len(second_lines):,} in {second}; line n of "
            "one file must be the translation of line n of the other. Correct one of the two files, or move the wrong "
            "file to another folder"
        )
    pairs = list[tuple[str, ...]]()
    for sentence, translation in zip(first_lines, second_lines, strict=True):
        if sentence.strip() and translation.strip():
            pairs.append((sentence, translation))
    if not pairs:
        raise UserError(f"no line has text both in {first} and in {second}. Correct one of the two files")
    return pairs


def plan_aer(args: argparse.Namespace, sources: list[Source]) -> list[ResultsRow]:
    if not args.aer:
        raise UserError(
            "task aer needs word alignments made by hand. Write --aer en-es FILE.tsv, or --aer en-fr TEXT LINKS"
        )
    rows = []
    different = dict.fromkeys(map(tuple, args.aer))  # in the order of the command line
    for pair, *names in different:
        langs = split_pair_name(pair, languages_of(sources))
        paths = list(map(Path, names))
        if langs is None or not 1 <= len(paths) <= 2:
            raise UserError(
                f"--aer {' '.join([pair, *names])}: the form is wrong. Write `en-es FILE.tsv` or `en-fr TEXT "
                "LINKS`, with countries in capitals, such as en-zh-CN"
            )
        evaluate = partial(
            aer.evaluate,
            gold_paths=paths,
            langs=langs,
            layers=args.layer or [retrieval.ALL],
            limit=args.limit or RECORDS,
        )
        read = partial(aer.read_all_lines, paths[0])
        rows.append(ResultsRow("aer", sorted_pair_name(langs), paths[0], evaluate, read))
    return rows


TASKS: dict[str, Callable[[argparse.Namespace, list[Source]], list[ResultsRow]]] = {
    "aer": plan_aer,
    "alignment": plan_alignment,
    "heldout": plan_heldout,
    "retrieval": plan_retrieval,
}


if __name__ == "__main__":
    run_and_exit(main)
