"""Suites of public test sets: which files of a folder are read by which task, the evaluation of rows, and one table.

The folder has the test sets as they are published, in folders of any depth:

    retrieval   plain parallel text (eval/parallel.py) by cosine and by xSIM; BUCC's `de-en.test.gold` and its lists;
                word links made by hand: `enfr.src-tgt` with `enfr.gold`, and XL-WA's `data/es/test.tsv`
    transfer    fine-tuning in English, tested in all languages: SIB-200's `annotated/LANG/train.tsv` and `test.tsv`,
                MASSIVE's `1.1/data/en-US.jsonl`, MultiATIS++'s `train_EN.tsv` and `test_DE.tsv`, Taxi1500's
                `eng_train.tsv` and `deu_test.tsv`, `train-LANG.tsv` and `test-LANG.tsv` in a folder xnli, pawsx, udpos
                (pos), panx (ner) or taxi1500, and UD's `en_ewt-ud-train.conllu` and `de_pud-ud-test.conllu`
    all         both, and the bits per character of each language of plain parallel text
"""

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
from xscale.eval.bootstrap import Score, combine, describe, p_value
from xscale.eval.finetune.measure import TASKS as FINETUNED
from xscale.eval.finetune.measure import check_flags, measure_transfer, parse_arguments
from xscale.eval.means import with_means
from xscale.eval.model import Exported, Scores
from xscale.eval.parallel import ENGLISH, ParallelText, find_parallel
from xscale.eval.retrieval import MARGINS, XSIM
from xscale.eval.tasks import TASKS, TaskRow, parallel_rows

SUITES = ("retrieval", "transfer", "all")
FOLDERS = {name: name for name in ("xnli", "pawsx", "pos", "ner", "taxi1500")} | {"udpos": "pos", "panx": "ner"}
FILES = (
    (re.compile(r"annotated/(?P<language>[^/]+)/(?P<part>train|dev|test)\.tsv"), "sib200"),
    (re.compile(r"(?P<folder>[^/]+)/(?P<part>train|dev|test)-(?P<language>[^/.]+)\.(tsv|conllu|jsonl)"), None),
    (re.compile(r"(?P<language>[a-z]+)_[a-z]+-ud-(?P<part>train|dev|test)\.conllu"), "pos"),
    (re.compile(r"(?:1\.\d/data|(?i:[^/]*massive[^/]*))/(?P<language>[a-z]{2}-[A-Z]{2})\.jsonl(?P<part>)"), "massive"),
    (re.compile(r"(?P<part>train|dev|test)_(?P<language>[A-Z]{2})\.tsv"), "multiatis"),
    (re.compile(r"(?P<language>[a-z]{3}(_[A-Z][a-z]{3})?)_(?P<part>train|dev|test)\.tsv"), "taxi1500"),
)
"""The pattern of the end of a file's path, and the file's task; None: the folder's name gives the task (FOLDERS). A
file without a part has all parts."""
MAIN = ("accuracy", "xsim", "AER", "F1", "f1", "bits_per_character", "tlm_loss")
"""The table shows the first of these numbers that a results row has, or if it has none, its first number."""
Results = dict[str, dict[str, Scores]]


def plan_rows(args: Namespace, sources: list[Source]) -> dict[str, dict[str, TaskRow]]:
    """Task -> name -> row, for all rows of --task or --suite. Raises UserError."""
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit {args.limit} must be 1 or more")
    args.texts_limit, args.limit = args.limit, args.limit or 1000
    if not args.suite:
        return {task: name_rows(TASKS[task](args, sources)) for task in dict.fromkeys(args.task)}
    rows: dict[str, list[TaskRow]] = {}
    if args.suite != "transfer":
        chosen = args.margin if args.margin != [MARGINS[0]] else [MARGINS[0], XSIM]
        settings = Namespace(**vars(args) | {"margin": chosen, "data": [], "layer": args.layer or [-1]})
        parallel = [text for folder in args.texts for text in find_parallel(folder)]
        if parallel:
            rows["retrieval"] = parallel_rows(settings, parallel)
        if parallel and args.suite == "all":
            rows["perplexity"] = [
                TaskRow(language, path, partial(perplexity, text, language, args.limit))
                for text in parallel
                for language, path in text.files.items()
            ]
        golds = [path for folder in args.texts for path in sorted(folder.rglob("*.test.gold*"))]
        if golds:
            settings.mining = [path.with_name(path.name.partition(".gold")[0]) for path in golds]
            rows["mining"] = TASKS["mining"](settings, sources)
        if links := find_hand_links(args.texts):
            settings.aer = links
            rows["aer"] = TASKS["aer"](settings, sources)
    if args.suite != "retrieval":
        for task, parts in find_transfer(args.texts).items():
            rows[task] = [TaskRow("", parts["test"][min(parts["test"])], partial(transfer, task, parts, args.finetune))]
    if not args.texts:
        raise UserError(f"--suite {args.suite} needs --texts, the folders with its test sets")
    if not rows:
        raise UserError(
            f"--suite {args.suite}: --texts {' '.join(map(str, args.texts))} has no test set of the suite; "
            f"docs/evaluation.md lists the files of test sets"
        )
    return {task: name_rows(of_task) for task, of_task in rows.items()}


def perplexity(text: ParallelText, language: str, limit: int, model: Exported) -> dict[str, Scores]:
    """The perplexity and the bits per character of a language's text; nothing for a model without masked-LM head."""
    if model.headless:
        return {}
    return {"": heldout.evaluate_perplexity(model, text.texts[language][:limit], language, text.files[language])}


def name_rows(rows: list[TaskRow]) -> dict[str, TaskRow]:
    """Name -> row. If rows share a name, the path of each is added to its name."""
    times = Counter(row.name for row in rows)
    return {f"{row.name} ({row.path})" if times[row.name] > 1 else row.name: row for row in rows}


def find_files(folders: Sequence[Path]) -> list[tuple[Path, str]]:
    """The files in folders, each with its whole path without the ending .gz or .xz."""
    paths = [path for folder in folders for path in sorted(folder.absolute().rglob("*")) if path.is_file()]
    return [(path, re.sub(r"\.[gx]z$", "", path.as_posix())) for path in paths]


def find_hand_links(folders: Sequence[Path]) -> list[list[str]]:
    """The values of --aer for the word links made by hand: `XL-WA/data/es/test.tsv` (or `xlwa-en-es.test.tsv`), whose
    first language is English, and `enfr.src-tgt` with `enfr.gold`."""
    found, files = [], {text: path for path, text in find_files(folders)}
    for text, path in files.items():
        gold = files.get(text.removesuffix(".src-tgt") + ".gold")
        if match := re.search(r"(?i:/xl-?wa)(?:[^/]*/data/|-en-)([a-z]{2})[/.]test\.tsv$", text):
            found.append([f"en-{match[1]}", str(path)])
        elif gold and (match := re.search(r"/([a-z]{2})([a-z]{2})\.src-tgt$", text)):
            found.append([f"{match[1]}-{match[2]}", str(path), str(gold)])
    return found


def find_transfer(folders: Sequence[Path]) -> dict[str, dict[str, dict[str, Path]]]:
    """The files of each task that has an English training text and tests: part -> language -> file. Of several files of
    a language the first by name is taken, or UD's PUD, which has the same sentences in all languages."""
    found: dict[str, dict[str, dict[str, Path]]] = {}
    for path, text in sorted(find_files(folders), key=lambda file: "_pud-" not in file[0].name):
        for pattern, name in FILES:
            match = re.search(rf"/{pattern.pattern}$", text)
            task = match and (name or FOLDERS.get(match["folder"].lower()))
            if match and task:
                parts = found.setdefault(task, {"train": {}, "dev": {}, "test": {}})
                language = match["language"].lower() if match["language"].isupper() else match["language"]
                for part in [match["part"]] if match["part"] else ("train", "test"):
                    parts[part].setdefault(language, path)
                break
    for parts in found.values():
        parts["train"] = {language: path for language, path in parts["train"].items() if ENGLISH.match(language)}
    return {task: parts for task, parts in found.items() if parts["train"] and parts["test"]}


def transfer(task: str, parts: dict[str, dict[str, Path]], flags: str, model: Exported) -> Mapping[str, Scores]:
    """Fine-tune the model, and return the results rows of its scores. If a language's test has no labels, as in XTREME,
    its dev set is the test."""
    tests = parts["test"] | {
        language: parts["dev"][language]
        for language, path in parts["test"].items()
        if language in parts["dev"] and any(one.gold is None for one in FINETUNED[task].read(path, language))
    }
    for language, path in tests.items() - parts["test"].items():
        print(f"{task} {language}: {parts['test'][language]} has no labels; the test is {path}")
    sides = {"train": parts["train"], "test": tests}
    given = {part: [f"{language}={path}" for language, path in files.items()] for part, files in sides.items()}
    words = ["--model", model.path, "--task", task, "--train", *given["train"], "--test", *given["test"]]
    with tempfile.TemporaryDirectory() as folder:
        args = parse_arguments([*map(str, words), "--out", f"{folder}/scores.json", *shlex.split(flags)])
        check_flags(args)
        return measure_transfer(args).rows


def evaluate_rows(
    model: Exported, rows: dict[str, dict[str, TaskRow]], publish: Callable[[Results, dict[str, dict[str, str]]], None]
) -> tuple[Results, int]:
    """Evaluate every row, print it, and publish the results so far; a row that fails does not stop the others. Returns
    the results, and the exit code: 2 after a user's error, 1 after a fault of xscale."""
    results: Results = {}
    failed: dict[str, dict[str, str]] = {}
    code = 0
    flat = [(task, name, row) for task, rows_of in rows.items() for name, row in rows_of.items()]
    for task, name, row in tqdm(flat, unit="row", disable=None):
        try:
            for variant, scores in row.evaluate(model).items():
                full_name = f"{name} {variant}".strip()
                results.setdefault(task, {})[full_name] = scores
                told = ", ".join(describe(score, value) for score, value in scores.items())
                tqdm.write(f"{task} {full_name}: {told}", file=sys.stdout)
        except Exception as error:
            ours = not isinstance(error, UserError)
            text = f"{type(error).__name__}: {error}" if ours else str(error)
            failed.setdefault(task, {})[name] = text
            print(f"error: task {' on '.join(filter(None, [task, name]))}: {text}", file=sys.stderr)
            if ours:
                traceback.print_exc()
            code = 1 if ours else code or 2
        publish(results, failed)
    return results, code


def table(of_models: Mapping[str, Results], trained: Collection[str]) -> list[list[str]]:
    """A line for each results row: the task, the row, the number's name, each model's number, and for each model but
    the first the difference from the first with its p. The first line names the columns. trained: see with_means."""
    first, *others = of_models
    lines = [["task", "row", "number", *of_models, *(f"{name} - {first}" for name in others)]]
    for task in dict.fromkeys(task for results in of_models.values() for task in results):
        columns = {model: with_means(results.get(task, {}), trained) for model, results in of_models.items()}
        for row in dict.fromkeys(row for rows in columns.values() for row in rows):
            known = next(rows[row] for rows in columns.values() if row in rows)
            name = next((name for name in MAIN if name in known), next(iter(known)))
            numbers = {model: rows.get(row, {}).get(name) for model, rows in columns.items()}
            cells = ["" if number is None else describe("", number).strip() for number in numbers.values()]
            for other in others:
                a, b = numbers[first], numbers[other]
                known_both = isinstance(a, Score) and isinstance(b, Score)
                cells.append(difference(a, b) if known_both and a is not None and b is not None else "")
            lines.append([task, row, name, *cells])
    return lines


def difference(first: float, second: float) -> str:
    less = combine([second, first], [1, -1])
    return f"{describe('', less).strip()}, p {p_value(less):.2g}"


def markdown(lines: list[list[str]]) -> str:
    head, *rows = lines
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))
