"""Suites of public test sets: finds their files in a folder, evaluates their rows, and tabulates the scores.

The test sets lie in the folder as they are published, at any depth. A suite evaluates all of its test sets there:

    retrieval   plain parallel text (eval/parallel.py) by cosine and by xSIM; BUCC's `de-en.test.gold` and its lists;
                word links made by hand: `enfr.src-tgt` with `enfr.gold`, and XL-WA's `data/es/test.tsv`
    transfer    fine-tuning in English, tested in all languages: SIB-200's `annotated/LANG/train.tsv` and `test.tsv`,
                MASSIVE's `1.1/data/en-US.jsonl`, MultiATIS++'s `train_EN.tsv` and `test_DE.tsv`, Taxi1500's
                `eng_train.tsv` and `deu_test.tsv`, `train-LANG.tsv` and `test-LANG.tsv` in a folder xnli, pawsx, udpos
                (pos), panx (ner) or taxi1500, and UD's `en_ewt-ud-train.conllu` and `de_pud-ud-test.conllu`
    all         both, and the bits per character of each language of plain parallel text
"""

import os
import re
import shlex
import sys
import tempfile
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from xscale.data.shards import Source
from xscale.errors import UserError
from xscale.eval import heldout
from xscale.eval.bootstrap import Score, format_score, p_value, weighted_sum
from xscale.eval.finetune.measure import TASKS as FINETUNED
from xscale.eval.finetune.measure import check_flags, measure_transfer, parse_arguments
from xscale.eval.means import with_means
from xscale.eval.model import ExportedModel, Scores
from xscale.eval.parallel import ENGLISH, ParallelText, find_parallel_texts
from xscale.eval.retrieval import MARGINS, XSIM
from xscale.eval.tasks import TASKS, TaskRow, parallel_rows

SUITES = ("retrieval", "transfer", "all")
FOLDER_TASKS = {name: name for name in ("xnli", "pawsx", "pos", "ner", "taxi1500")} | {"udpos": "pos", "panx": "ner"}
FILES = (
    (re.compile(r"annotated/(?P<language>[^/]+)/(?P<split>train|dev|test)\.tsv"), "sib200"),
    (re.compile(r"(?P<folder>[^/]+)/(?P<split>train|dev|test)-(?P<language>[^/.]+)\.(tsv|conllu|jsonl)"), None),
    (re.compile(r"(?P<language>[a-z]+)_[a-z]+-ud-(?P<split>train|dev|test)\.conllu"), "pos"),
    (re.compile(r"(?:1\.\d/data|(?i:[^/]*massive[^/]*))/(?P<language>[a-z]{2}-[A-Z]{2})\.jsonl(?P<split>)"), "massive"),
    (re.compile(r"(?P<split>train|dev|test)_(?P<language>[A-Z]{2})\.tsv"), "multiatis"),
    (re.compile(r"(?P<language>[a-z]{3}(_[A-Z][a-z]{3})?)_(?P<split>train|dev|test)\.tsv"), "taxi1500"),
)
"""(pattern of the end of a path, task; None: see FOLDER_TASKS). A file with an empty group `split` has all splits."""
MAIN_SCORES = ("accuracy", "xsim", "AER", "F1", "f1", "bits_per_character", "tlm_loss")
"""The table shows one score of each results row: the first of these that it has, or else its own first."""
Results = dict[str, dict[str, Scores]]
"""{task: {results row: scores}}."""


def plan_rows(args: Namespace, sources: list[Source]) -> dict[str, dict[str, TaskRow]]:
    """Return {task: {name of a row: row}} for all rows that --task or --suite asks for. Raises UserError."""
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit {args.limit} must be 1 or more")
    args.texts_limit, args.limit = args.limit, args.limit or 1000
    if not args.suite:
        return {task: rows_by_name(TASKS[task](args, sources)) for task in dict.fromkeys(args.task)}
    rows: dict[str, list[TaskRow]] = {}
    if args.suite != "transfer":
        margins = args.margin if args.margin != [MARGINS[0]] else [MARGINS[0], XSIM]
        settings = Namespace(**vars(args) | {"margin": margins, "data": [], "layer": args.layer or [-1]})
        parallel = [text for folder in args.texts for text in find_parallel_texts(folder)]
        if parallel:
            rows["retrieval"] = parallel_rows(settings, parallel)
        if parallel and args.suite == "all":
            rows["perplexity"] = [
                TaskRow(language, path, partial(measure_perplexity, text, language, args.limit))
                for text in parallel
                for language, path in text.files.items()
            ]
        golds = [path for folder in args.texts for path in sorted(folder.rglob("*.test.gold*"))]
        if golds:
            settings.mining = [path.with_name(path.name.partition(".gold")[0]) for path in golds]
            rows["mining"] = TASKS["mining"](settings, sources)
        if values := find_aer_values(args.texts):
            settings.aer = values
            rows["aer"] = TASKS["aer"](settings, sources)
    if args.suite != "retrieval":
        for task, paths in find_transfer_files(args.texts).items():
            evaluate = partial(fine_tune, task, paths, args.finetune)
            rows[task] = [TaskRow("", Path(os.path.commonpath(paths["test"].values())), evaluate)]
    if not args.texts:
        raise UserError(f"--suite {args.suite} needs --texts, the folders with its test sets")
    if not rows:
        raise UserError(
            f"--suite {args.suite}: --texts {' '.join(map(str, args.texts))} has no test set of the suite; "
            f"docs/evaluation.md lists the files of test sets"
        )
    return {task: rows_by_name(of_task) for task, of_task in rows.items()}


def measure_perplexity(text: ParallelText, language: str, limit: int, model: ExportedModel) -> dict[str, Scores]:
    """Return perplexity and bits per character of a language's text; {} for a model without masked-LM head."""
    if model.headless:
        return {}
    return {"": heldout.evaluate_perplexity(model, text.texts[language][:limit], language, text.files[language])}


def rows_by_name(rows: list[TaskRow]) -> dict[str, TaskRow]:
    """Return {name: row}. The name of rows that share one is followed by their path: `de-en (flores/*.dev)`."""
    times = Counter(row.name for row in rows)
    return {f"{row.name} ({row.path})" if times[row.name] > 1 else row.name: row for row in rows}


def list_files(folders: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return (path, absolute path as text without the ending .gz or .xz) of each file in the folders."""
    paths = [path for folder in folders for path in sorted(folder.absolute().rglob("*")) if path.is_file()]
    return [(path, re.sub(r"\.[gx]z$", "", path.as_posix())) for path in paths]


def find_aer_values(folders: Sequence[Path]) -> list[list[str]]:
    """Return the values of --aer for the test sets of word links in the folders, such as `XL-WA/data/es/test.tsv` (or
    `xlwa-en-es.test.tsv`), whose first language is English, and `enfr.src-tgt` with `enfr.gold`."""
    values, files = [], {text: path for path, text in list_files(folders)}
    for text, path in files.items():
        gold = files.get(text.removesuffix(".src-tgt") + ".gold")
        if match := re.search(r"(?i:/xl-?wa)(?:[^/]*/data/|-en-)([a-z]{2})[/.]test\.tsv$", text):
            values.append([f"en-{match[1]}", str(path)])
        elif gold and (match := re.search(r"/([a-z]{2})([a-z]{2})\.src-tgt$", text)):
            values.append([f"{match[1]}-{match[2]}", str(path), str(gold)])
    return values


def find_transfer_files(folders: Sequence[Path]) -> dict[str, dict[str, dict[str, Path]]]:
    """Return {task: {split: {language: file}}} for each task that has an English training text and tests. Among several
    files of one language, the first by name is used, or UD's PUD, which has the same sentences in all languages."""
    tasks: dict[str, dict[str, dict[str, Path]]] = {}
    for path, text in sorted(list_files(folders), key=lambda file: "_pud-" not in file[0].name):
        for pattern, name in FILES:
            match = re.search(rf"/{pattern.pattern}$", text)
            task = match and (name or FOLDER_TASKS.get(match["folder"].lower()))
            if match and task:
                paths = tasks.setdefault(task, {"train": {}, "dev": {}, "test": {}})
                language = match["language"].lower() if match["language"].isupper() else match["language"]
                for split in [match["split"]] if match["split"] else ("train", "test"):
                    paths[split].setdefault(language, path)
                break
    for paths in tasks.values():
        paths["train"] = {language: path for language, path in paths["train"].items() if ENGLISH.match(language)}
    return {task: paths for task, paths in tasks.items() if paths["train"] and paths["test"]}


def fine_tune(task: str, paths: dict[str, dict[str, Path]], flags: str, model: ExportedModel) -> Mapping[str, Scores]:
    """Fine-tune the model, and return {results row: scores}. paths: {split: {language: file}}. A test without labels,
    as in XTREME, is replaced by the dev set."""
    tests = paths["test"] | {
        language: paths["dev"][language]
        for language, path in paths["test"].items()
        if language in paths["dev"] and any(e.gold is None for e in FINETUNED[task].read(path, language))
    }
    for language, path in tests.items() - paths["test"].items():
        print(f"{task} {language}: {paths['test'][language]} has no labels, so the model is tested on {path}")
    texts = {"train": paths["train"], "test": tests}
    given = {split: [f"{language}={path}" for language, path in files.items()] for split, files in texts.items()}
    words = ["--model", model.path, "--task", task, "--train", *given["train"], "--test", *given["test"]]
    with tempfile.TemporaryDirectory() as folder:
        args = parse_arguments([*map(str, words), "--out", f"{folder}/scores.json", *shlex.split(flags)])
        check_flags(args)
        return measure_transfer(args).rows


def evaluate_rows(
    model: ExportedModel,
    rows: dict[str, dict[str, TaskRow]],
    publish: Callable[[Results, dict[str, dict[str, str]]], None],
) -> tuple[Results, int]:
    """Evaluate and print every row, and return results and exit code: 1 after a bug, else 2 after a user's error, else
    0. publish: called after each row with the results so far and with {task: {row: error}}."""
    results: Results = {}
    failed: dict[str, dict[str, str]] = {}
    code = 0
    flat = [(task, name, row) for task, rows_of in rows.items() for name, row in rows_of.items()]
    for task, name, row in tqdm(flat, unit="row", disable=None):
        try:
            for variant, scores in row.evaluate(model).items():
                full_name = f"{name} {variant}".strip()
                results.setdefault(task, {})[full_name] = scores
                shown = ", ".join(format_score(metric, value) for metric, value in scores.items())
                tqdm.write(f"{task} {full_name}: {shown}", file=sys.stdout)
        except Exception as error:
            is_bug = not isinstance(error, UserError)
            text = f"{type(error).__name__}: {error}" if is_bug else str(error)
            failed.setdefault(task, {})[name] = text
            print(f"error: task {' on '.join(filter(None, [task, name]))}: {text}", file=sys.stderr)
            if is_bug:
                traceback.print_exc()
            code = 1 if is_bug else code or 2
        publish(results, failed)
    return results, code


def comparison_table(results: Mapping[str, Results], trained: Collection[str]) -> list[list[str]]:
    """Return the lines of a table: the names of the columns, then for each results row the task, the row, the main
    score's name, the score of each model, and the difference of each further model from the first with its p value.
    results: {model: results}. trained: the languages that the models were trained on."""
    first, *others = results
    lines = [["task", "row", "number", *results, *(f"{name} - {first}" for name in others)]]
    for task in dict.fromkeys(task for of_model in results.values() for task in of_model):
        columns = {model: with_means(of_model.get(task, {}), trained) for model, of_model in results.items()}
        for row in dict.fromkeys(row for rows in columns.values() for row in rows):
            known = next(rows[row] for rows in columns.values() if row in rows)
            name = next((name for name in MAIN_SCORES if name in known), next(iter(known)))
            numbers = {model: rows.get(row, {}).get(name) for model, rows in columns.items()}
            cells = ["" if number is None else format_score("", number).strip() for number in numbers.values()]
            for other in others:
                a, b = numbers[first], numbers[other]
                cells.append(format_difference(a, b) if isinstance(a, Score) and isinstance(b, Score) else "")
            lines.append([task, row, name, *cells])
    return lines


def format_difference(first: Score, second: Score) -> str:
    """Return second - first as text, with its interval and p value."""
    difference = weighted_sum([second, first], [1, -1])
    return f"{format_score('', difference).strip()}, p {p_value(difference):.2g}"


def markdown_table(lines: list[list[str]]) -> str:
    head, *rows = lines
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))
