"""Does all fine-tuning runs of a task: reads flags and files, and writes scores, predictions and models."""

import argparse
import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from xscale import files, ranks
from xscale.errors import UserError
from xscale.eval.bootstrap import format_score
from xscale.eval.card import CARD, finetuned_card
from xscale.eval.finetune import classification, qa, tags
from xscale.eval.finetune.task import Task, TaskData
from xscale.eval.finetune.training import Collator, FineTuner, FineTuneSettings
from xscale.eval.finetune.transfer import (
    Predictions,
    TrainingText,
    TransferTable,
    group_features,
    plan_training,
    write_predictions,
)
from xscale.eval.model import ExportedModel, check_output_file, write_results
from xscale.ranks import HostGroup, Process
from xscale.step.ds_config import read_ds_config

TASKS: dict[str, Task] = {
    "xnli": classification.XNLI,
    "pawsx": classification.PAWSX,
    "sib200": classification.SIB200,
    "massive": classification.MASSIVE,
    "multiatis": classification.MULTIATIS,
    "taxi1500": classification.TAXI1500,
    "pos": tags.POS,
    "ner": tags.NER,
    "xquad": qa.XQUAD,
    "mlqa": qa.MLQA,
}


def parse_arguments(argv: list[str] | None, description: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="xscale-finetune", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face directory, e.g. from xscale.export")
    add("--task", choices=TASKS, required=True)
    text: dict[str, Any] = {"nargs": "+", "metavar": "LANG=FILE", "default": []}
    add("--train", **text, help="training files: of the source language, and of others for supervised scores")
    add("--test", **text, required=True, help="test files")
    add("--translated", **text, help="translations of the source language's training file, for translate-train scores")
    add("--source", help="language to train on for the zero-shot scores (default: the first of --train)")
    add("--code_switch", action="store_true", help="for translate-train, translate only one side of each pair")
    add("--limit", type=int, metavar="N", help="read only the first N examples of each training file")
    add("--test_limit", type=int, metavar="N", help="read only the first N examples of each test file")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    add("--epochs", type=int, help="default: 2 for pairs and questions, 10 or 20 for others")
    add("--lr", type=float, help="peak learning rate (default: the task's, 1e-5 to 5e-5)")
    add("--batch", type=int, default=32, help="sequences of a step, over all ranks (default: 32)")
    add(
        "--warmup",
        type=float,
        default=0.1,
        help="steps; below 1, a share of all steps (default: 0.1; Pan et al.: 1000)",
    )
    add("--max_length", type=int, help="tokens of a sequence (default: 386 for questions, 164 for sib200, else 128)")
    add("--ds_config", type=Path, help="DeepSpeed JSON (default: torch's AdamW in fp32)")
    add("--out", type=Path, required=True, help="JSON file to write")
    add("--keep", type=Path, metavar="DIR", help="folder for the fine-tuned models, each as DIR/LANG.seed_N")
    add("--predictions", type=Path, metavar="DIR", help="folder for predictions, as XTREME's evaluate.py reads them")
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for wrong flags, missing packages and folders that cannot be written."""
    for name in ("limit", "test_limit", "epochs", "batch", "lr", "warmup", "max_length"):
        value = getattr(args, name)
        if value is not None and not (0 < value < float("inf") or (name == "warmup" and value == 0)):
            raise UserError(f"--{name} {value} must be positive")
    if args.max_length is not None and args.max_length < 16:
        raise UserError(f"--max_length {args.max_length} must be at least 16")
    if len(set(args.seeds)) < len(args.seeds) or min(args.seeds) < 0:
        raise UserError(f"--seeds {' '.join(map(str, args.seeds))}: give different numbers, each 0 or more")
    if not args.train and not args.translated:
        raise UserError("no training text: give --train LANG=FILE, or --translated LANG=FILE")
    for module in ("seqeval", "accelerate"):
        try:
            __import__(module)
        except ImportError:
            raise UserError(f"{module} is not installed; `pip install 'xscale[eval]'` brings it") from None
    check_output_file(args.out)
    for folder in filter(None, [args.predictions, args.keep]):
        files.check_writable(folder / "predictions.json")


def read_files(task: Task, values: list[str], flag: str, limit: int | None) -> dict[str, TaskData]:
    """Return {language: examples of its file}. values: texts LANG=FILE. limit: the most examples. Raises UserError."""
    data: dict[str, TaskData] = {}
    for value in values:
        language, equals, name = value.partition("=")
        if not equals or not language or not name or language in data:
            raise UserError(f"{flag} {value}: give LANG=FILE, each language once")
        path = Path(name)
        if not path.exists():
            raise UserError(f"{flag} {value}: {path} does not exist; give another file")
        split = "test" if flag == "--test" else "train"
        examples = [example for example in task.read(path, language) if example.split in (None, split)]
        if not examples:
            raise UserError(f"{flag} {value}: {path} has no example of the partition {split}; give another file")
        data[language] = TaskData(path, language, examples[:limit])
    return data


def measure_transfer(args: argparse.Namespace, process: Process | None = None) -> TransferTable:
    """Do all fine-tuning runs, write their scores and return them. All files are read and checked before training
    starts. process: this rank; None: there is one process only, and the caller prints the scores."""
    task = TASKS[args.task]
    train = read_files(task, args.train, "--train", args.limit)
    translated = read_files(task, args.translated, "--translated", args.limit)
    tests = read_files(task, args.test, "--test", args.test_limit)
    source = args.source or next(iter(train), "")
    if args.source and source not in train:
        raise UserError(f"--source {source} must be a language of --train, which has {', '.join(train) or 'none'}")
    if args.code_switch and not translated:
        raise UserError("--code_switch needs --translated LANG=FILE")
    hidden = [data for data in tests.values() if not data.is_labelled]
    if hidden and not args.predictions:
        raise UserError(f"{hidden[0].path} has examples without labels; to predict labels, give --predictions DIR")
    plan = plan_training(task, train, translated, tests, source, args.code_switch)
    if process is not None:
        ranks.join_process_group(process)  # before the model is loaded, since it sets the rank's device
    host_group = HostGroup()
    tuner = build_tuner(args, task, host_group.size, sorted({*train, *translated, *tests}))
    tokenizer, max_length = tuner.collator.model.tokenizer, tuner.settings.max_length
    unlabelled = {name: [e._replace(gold=None) for e in data.examples] for name, data in tests.items()}
    test_features = {name: task.encode(examples, tokenizer, max_length, []) for name, examples in unlabelled.items()}
    table = TransferTable(task, tests)
    for training in plan:
        labels = task.list_labels(training.data.examples)
        groups = group_features(task, training, tokenizer, max_length, labels)
        predictions: Predictions = {language: [] for language in training.tests}
        for seed in args.seeds:
            if host_group.is_main:
                print(f"{args.task} {training.name}, seed {seed}", flush=True)
            trainer = tuner.train(groups, labels, seed)
            for language, of_seeds in predictions.items():
                features = test_features[language]
                logits = tuner.predict_logits(trainer, features)
                of_seeds.append(task.predict(tests[language].examples, features, logits, labels))
            if args.keep:
                folder = args.keep / f"{training.name.replace(',', '').replace(' ', '_')}.seed_{seed}"
                tuner.save(trainer, folder)
                if host_group.is_main:
                    save_card(args, tuner, training, tests, predictions, folder)
        table.add(training, predictions)
        host_group.from_main(partial(write_outputs, args, tuner, table, training, predictions))
    if host_group.is_main and process is not None:
        print_table(args.task, table)
        for data in hidden:
            count = sum(example.gold is None for example in data.examples)
            print(f"{data.path}: not scored, {count:,} of {len(data.examples):,} examples have no label")
    host_group.barrier()
    return table


def save_card(
    args: argparse.Namespace,
    tuner: FineTuner,
    training: TrainingText,
    tests: dict[str, TaskData],
    predictions: Predictions,
    folder: Path,
) -> None:
    """Write into `folder` the card of the latest model, which has the last predictions of each language."""
    scores = {
        f"{language} {training.tests[language]}": tuner.task.score(tests[language].examples, of_seeds[-1], language)
        for language, of_seeds in predictions.items()
        if tests[language].is_labelled
    }
    card = finetuned_card(args.model, args.task, tuner.task.head_class, training.name, asdict(tuner.settings), scores)
    card.save(folder / CARD)


def build_tuner(args: argparse.Namespace, task: Task, world: int, languages: list[str]) -> FineTuner:
    # Else these libraries print in each run that the head is new, and the arguments.
    transformers.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    if args.batch % world:
        raise UserError(f"--batch {args.batch} must be a multiple of the number of ranks, {world}")
    model = ExportedModel(args.model)
    max_length = min(args.max_length or task.max_length, model.max_length)
    settings = FineTuneSettings(args.epochs or task.epochs, args.lr or task.lr, args.batch, max_length, args.warmup)
    ds_config = read_ds_config(args.ds_config) if args.ds_config else None
    collator = Collator(model, languages, task.head_labels)
    return FineTuner(task, settings, collator, args.out.parent, ds_config, world)


def write_outputs(
    args: argparse.Namespace, tuner: FineTuner, table: TransferTable, training: TrainingText, predictions: Predictions
) -> None:
    """Write all scores so far, and the predictions of the models that were fine-tuned on one training text."""
    if args.predictions:
        write_predictions(args.predictions, tuner.task, training, table.tests, predictions, args.seeds)
    flags = {name: vars(args)[name] for name in ("limit", "test_limit", "train", "test", "translated", "code_switch")}
    settings = {"seeds": args.seeds, **asdict(tuner.settings), "ranks": tuner.world, **flags}
    results = {args.task: table.rows | table.summary}
    write_results(args.out, args.model, results, {}, seeds={args.task: table.seeds}, settings=settings)


def print_table(task: str, table: TransferTable) -> None:
    for row, metrics in table.rows.items():
        print(f"{task} {row}: " + ", ".join(format_score(metric, value) for metric, value in metrics.items()))
    for language, summary in table.summary.items():
        if "delta" in summary:
            deviation = f" ± {summary['delta_std']:.2g}" if "delta_std" in summary else ""
            print(f"{task} {language}: supervised - {format_score('zero-shot', summary['delta'])}{deviation}")
