"""The tasks of `xscale eval`. Each plan_TASK function checks the flags and returns the results rows to evaluate."""

import re
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from xscale.data.lexicon import find_lexicon_paths, split_pair_name
from xscale.data.scripts import short_code
from xscale.data.shards import Source, pair_name
from xscale.errors import UserError
from xscale.eval import aer, alignment_score, heldout, retrieval
from xscale.eval.model import ExportedModel, Scores, read_texts

RECORDS = 1000
"""The default of --limit, except for --texts."""
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


def add_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, nargs="+", default=[], help="shards of held-out text; for alignment, of any text")
    add("--texts", type=Path, nargs="+", default=[], metavar="DIR", help="folders of public test sets for retrieval "
        "(FLORES, NTREX, Tatoeba): one file per language; line n has the same sentence in all files")  # fmt: skip
    add(
        "--pairs",
        choices=("english", "all"),
        default="english",
        help="pairs of languages of --texts that are measured: those with English (default), or all",
    )
    add("--limit", type=int, help="the maximum to read: records of a source and pairs of --aer (default: 1000), "
        "lines of --texts (default: all)")  # fmt: skip
    add("--lexicons", type=Path, nargs="+", help="dictionaries for alignment (default: lexicon/*.txt)")
    add("--lexicon_heldout", type=float, metavar="SHARE", help="share of dictionary entries that training withheld; "
        "their scores are separate (default: the model's own, else 0.2; 1: no word was trained)")  # fmt: skip
    repeated: dict[str, Any] = {"nargs": "+", "action": "append", "default": [], "metavar": "X"}
    add("--aer", **repeated, help="word links made by hand: `en-es FILE.tsv`, or `en-fr TEXT LINKS`; repeatable")
    group = parser.add_argument_group("variants of sentence vectors", "Every combination of the values is evaluated.")
    add = group.add_argument
    add("--pooling", nargs="+", choices=retrieval.POOLINGS, help="for retrieval (default: the model's own)")
    add("--layer", nargs="+", type=layer_argument, metavar="N", help="0: embeddings, -1: last, or all; for retrieval "
        "(default: -1), aer (all)")  # fmt: skip
    add(
        "--margin",
        nargs="+",
        choices=retrieval.MARGINS,
        default=["cosine"],
        help="how retrieval compares: by cosine, or LASER's ratio",
    )


def layer_argument(text: str) -> str | int:
    return text if text == retrieval.ALL else int(text)


def plan_rows(args: Namespace, sources: list[Source]) -> list[ResultsRow]:
    """Return the rows of all tasks of the flags. Rows of one task with the same name get their paths as well. Raises
    UserError."""
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit {args.limit} must be 1 or more")
    if args.lexicon_heldout is not None and not 0 <= args.lexicon_heldout <= 1:
        raise UserError(f"--lexicon_heldout {args.lexicon_heldout:g} must lie between 0 and 1")
    all_rows: list[ResultsRow] = []
    for task in args.task:
        rows = TASKS[task](args, sources)
        times = Counter(row.name for row in rows)
        for row in rows:
            name = f"{row.name} ({row.path})" if times[row.name] > 1 else row.name
            all_rows.append(replace(row, name=name))
    return all_rows


def pair_sources(args: Namespace, sources: list[Source]) -> list[Source]:
    """Return the sources of sentence pairs. Raises UserError if there is none."""
    pairs = [source for source in sources if source.kind == "pair"]
    if not pairs:
        where = f"no sentence pairs in {', '.join(map(str, args.data))}" if args.data else "--data is missing"
        raise UserError(f"{where}; tasks alignment, heldout and retrieval need sentence pairs: give --data DIR")
    return pairs


def source_rows(
    task: str, sources: list[Source], evaluate: Callable[[Source, ExportedModel], dict[str, Scores]]
) -> list[ResultsRow]:
    return [ResultsRow(task, source.pair, source.directory, partial(evaluate, source)) for source in sources]


def plan_alignment(args: Namespace, sources: list[Source]) -> list[ResultsRow]:
    paths: list[Path] = list(args.lexicons or [])
    if not paths:
        for source in sources:
            paths += find_lexicon_paths(sources, source.directory)

    def evaluate(source: Source, model: ExportedModel) -> dict[str, Scores]:
        share = model.lexicon_heldout if args.lexicon_heldout is None else args.lexicon_heldout
        return {"": alignment_score.evaluate(model, source.langs, sources, list(dict.fromkeys(paths)), share)}

    first_of_pair: dict[str, Source] = {}
    for source in pair_sources(args, sources):
        first_of_pair.setdefault(source.pair, source)
    return source_rows("alignment", list(first_of_pair.values()), evaluate)


def plan_heldout(args: Namespace, sources: list[Source]) -> list[ResultsRow]:
    def evaluate(source: Source, model: ExportedModel) -> dict[str, Scores]:
        return {"": heldout.evaluate(model, source, args.limit or RECORDS)}

    return source_rows("heldout", pair_sources(args, sources), evaluate)


def plan_retrieval(args: Namespace, sources: list[Source]) -> list[ResultsRow]:
    def evaluate(source: Source, model: ExportedModel) -> dict[str, Scores]:
        texts = read_texts(source, args.limit or RECORDS)
        return retrieval.evaluate(model, texts, source.langs, variants_from_flags(args, model))

    rows: list[ResultsRow] = []
    for folder in args.texts:
        for name, files in find_parallel_files(folder).items():
            rows += parallel_rows(args, name, files)
    if args.texts and not rows and not args.data:
        raise UserError(
            f"--texts {' '.join(map(str, args.texts))}: no parallel text; give folders with files whose lines n are "
            f"the same sentence in two languages, such as eng_Latn.devtest and deu_Latn.devtest"
        )
    if args.data or not rows:
        rows += source_rows("retrieval", pair_sources(args, sources), evaluate)
    return rows


def variants_from_flags(args: Namespace, model: ExportedModel) -> list[retrieval.Variant]:
    return retrieval.make_variants(model, args.pooling, args.layer or [-1], args.margin)


def find_parallel_files(folder: Path) -> dict[str, dict[str, Path]]:
    """Find the parallel text in a folder and below it: files whose names differ only in the language, which stands
    between dots (`eng_Latn.devtest`, `tatoeba.deu-eng.deu.xz`). Return {path with * for the language: {language:
    path}}."""
    texts: dict[str, dict[str, Path]] = {}
    for path in sorted(filter(Path.is_file, folder.rglob("*"))):
        parts = re.sub(r"\.[gx]z$", "", path.name).split(".")
        places = [place for place, part in enumerate(parts) if LANGUAGE.fullmatch(part)]
        if places:
            language = parts[places[-1]]
            parts[places[-1]] = "*"
            name = re.sub(r"-(ref|src)\.", ".", ".".join(parts))  # NTREX's source is English
            texts.setdefault(str(path.with_name(name)), {})[language] = path
    return {name: files for name, files in texts.items() if len(files) > 1}


def parallel_rows(args: Namespace, name: str, files: dict[str, Path]) -> list[ResultsRow]:
    """Return a row for each pair of languages of a parallel text. With --pairs english, only pairs with English have
    rows, if there are any. Raises UserError if the files differ in the number of lines."""
    lines: dict[str, list[str]] = {}
    for language, path in files.items():
        lines[language] = aer.read_plain_lines(path)[: args.limit]
    shortest = min(files, key=lambda language: len(lines[language]))
    longest = max(files, key=lambda language: len(lines[language]))
    if not 0 < len(lines[shortest]) == len(lines[longest]):
        raise UserError(
            f"{files[shortest]} has {len(lines[shortest]):,} lines, {files[longest]} has {len(lines[longest]):,}; "
            f"lines n of all files must be translations of one another. Correct the wrong file, or move it elsewhere"
        )
    vectors: dict[tuple[ExportedModel, str], retrieval.Vectors] = {}  # each language is encoded once

    def evaluate(langs: tuple[str, str], model: ExportedModel) -> dict[str, Scores]:
        variants = variants_from_flags(args, model)
        language_ids = model.language_ids(langs)
        for language in langs:
            if (model, language) not in vectors:
                embedded = retrieval.embed_sentences(model, lines[language], language_ids[language], variants)
                vectors[model, language] = embedded
        return retrieval.compare_vectors(vectors[model, langs[0]], vectors[model, langs[1]], langs, variants)

    has_english = args.pairs == "english" and "en" in map(short_code, files)
    rows = []
    for pair in combinations(sorted(files), 2):
        if not has_english or "en" in map(short_code, pair):
            rows.append(ResultsRow("retrieval", pair_name(pair), Path(name), partial(evaluate, pair)))
    return rows


def plan_aer(args: Namespace, sources: list[Source]) -> list[ResultsRow]:
    if not args.aer:
        raise UserError("task aer needs --aer en-es FILE.tsv, or --aer en-fr TEXT LINKS")

    def evaluate(files: list[Path], langs: tuple[str, str], model: ExportedModel) -> dict[str, Scores]:
        pairs = aer.read_linked_pairs(*files)[: args.limit or RECORDS]
        return aer.evaluate(model, pairs, langs, args.layer or [retrieval.ALL])

    known = set(chain.from_iterable(source.langs for source in sources))
    rows = []
    for pair, *names in args.aer:
        langs = split_pair_name(pair, known)
        files = list(map(Path, names))
        if langs is None or not 1 <= len(files) <= 2:
            raise UserError(
                f"--aer {' '.join([pair, *names])}: give `en-es FILE.tsv`, or `en-fr TEXT LINKS`, with countries in "
                f"capitals: en-zh-CN"
            )
        rows.append(ResultsRow("aer", pair_name(langs), files[0], partial(evaluate, files, langs)))
    return rows


TASKS: dict[str, Callable[[Namespace, list[Source]], list[ResultsRow]]] = {
    "aer": plan_aer,
    "alignment": plan_alignment,
    "heldout": plan_heldout,
    "retrieval": plan_retrieval,
}
