"""Fine-tune an exported encoder, and measure transfer between languages: zero-shot, supervised, translate-train.

xscale finetune --model HF_DIR --task ner --train en=train-en.tsv de=train-de.tsv \\
    --test en=test-en.tsv de=test-de.tsv --seeds 0 1 2 --out ner.json

On several ranks: torchrun --nproc_per_node N -m xscale.eval.finetune ...

Exit codes: 0 done, 2 user error, 3 logits not finite, 4 an error of the machine (disk, file system), any other: a bug
in xscale.
"""

import argparse
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

from xscale.errors import NotFinite, UserError, check_arguments, env_number, report_error, run_command
from xscale.eval.bootstrap import format_score
from xscale.eval.finetune.examples import LabelledExample
from xscale.eval.finetune.tasks import TASKS, AnyTask
from xscale.eval.finetune.training import Feature, FineTuneSettings, SequenceMaker, fine_tune, predict_outputs
from xscale.eval.finetune.transfer import Files, TrainingText, TransferTable, check_labels, plan_training
from xscale.eval.model import ExportedModel, check_output_file, write_results

SEEDS = [0, 1, 2]
FROZEN_LR = 1e-3
"""The default learning rate of a head alone."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="xscale finetune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    add("--seeds", type=int, nargs="+", metavar="N", help="default: 0 1 2, that is three runs of each training text")
    add("--epochs", type=int, help="default: 2 for pairs and questions, 10 for others")
    add("--lr", type=float, help="peak learning rate (default: 2e-5 to 5e-5 by task, times 768 / width for encoders of "
        "smaller width; with --frozen 1e-3)")  # fmt: skip
    add("--frozen", action="store_true", help="train the linear layer alone, on the states of the encoder as it is")
    add("--batch", type=int, default=32, help="sequences of a step, over all ranks (default: 32)")
    add("--warmup", type=float, default=0.1, help="steps; below 1, a share of all steps (default: 0.1; papers: 1000)")
    add("--max_length", type=int, help="tokens of a sequence (default: 386 for questions, else 128)")
    add("--out", type=Path, required=True, help="JSON file to write")
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for wrong flags, missing packages and a file that cannot be written."""
    least = {"limit": 1, "test_limit": 1, "epochs": 1, "batch": 1, "lr": 1e-12, "warmup": 0, "max_length": 16}
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and not smallest <= value < float("inf"):
            raise UserError(f"--{name} {value} must be a number of at least {smallest}")
    if args.seeds and (len(set(args.seeds)) < len(args.seeds) or min(args.seeds) < 0):
        raise UserError(f"--seeds {' '.join(map(str, args.seeds))}: give different numbers, each 0 or more")
    if not args.train and not args.translated:
        raise UserError("no training text: give --train LANG=FILE, or --translated LANG=FILE")
    if args.code_switch and not args.translated:
        raise UserError("--code_switch needs --translated LANG=FILE")
    for module in ("seqeval", "accelerate"):
        try:
            __import__(module)
        except ImportError:
            raise UserError(f"{module} is not installed; `pip install 'xscale[eval]'` brings it") from None
    check_output_file(args.out)


def read_files(task: AnyTask, values: list[str], flag: str, limit: int | None) -> Files:
    """Return the file of each language. values: texts LANG=FILE. limit: the most rows. Raises UserError."""
    read: Files = {}
    for value in values:
        language, _, name = value.partition("=")
        path = Path(name)
        if not language or not name or language in read:
            raise UserError(f"{flag} {value}: give LANG=FILE, each language once")
        if not path.exists():
            raise UserError(f"{flag} {value}: {path} does not exist; give another file")
        read[language] = task.read(path, language, limit)
    return read


def measure_transfer(args: argparse.Namespace) -> TransferTable:
    """Do all fine-tuning runs, write their scores and return them. All files are read and checked before training
    starts."""
    task = TASKS[args.task]
    train = read_files(task, args.train, "--train", args.limit)
    translated = read_files(task, args.translated, "--translated", args.limit)
    tests = read_files(task, args.test, "--test", args.test_limit)
    source = args.source or next(iter(train), "")
    if args.source and source not in train:
        raise UserError(f"--source {source} must be a language of --train, which has {', '.join(train) or 'none'}")
    plan = plan_training(train, translated, tests, source, args.code_switch)
    for training in plan:
        check_labels(task, training, tests)
    languages = [*train, *translated, *tests]
    model = ExportedModel(args.model)
    maker = SequenceMaker(model, languages, args.max_length or task.max_length)
    settings = make_settings(args, task, maker)
    seeds = args.seeds or SEEDS
    is_main = env_number("RANK", 0) == 0
    if is_main:
        for file in (*train.values(), *translated.values(), *tests.values()):
            for line in file.left_out():
                print(line)
        listed = " ".join(map(str, seeds))
        print(f"{len(plan)} training texts with the seeds {listed}, learning rate {settings.lr:g}", flush=True)
    test_features: dict[str, list[Feature]] = {}
    for language, file in tests.items():
        test_features[language] = longest_first(task.encode(file.examples, maker, None))
    table = TransferTable(task, tests)
    for training in plan:
        labels = task.list_labels(training.file.examples)
        groups = encode_groups(task, training, maker, labels)
        predictions: dict[str, list[list[Any]]] = {}
        for seed in seeds:
            if is_main:
                print(f"{args.task} {training.name}, seed {seed}", flush=True)
            trainer = fine_tune(maker, groups, len(labels) or 2, task.reads, settings, seed, args.out.parent)
            for language in training.settings:
                features = test_features[language]
                outputs = predict_outputs(trainer, features)
                answers = task.predict(tests[language].examples, features, outputs, labels)
                predictions.setdefault(language, []).append(answers)
        table.add(training, predictions)
        if is_main:
            write_table(args, table, settings, seeds)
    return table


def make_settings(args: argparse.Namespace, task: AnyTask, maker: SequenceMaker) -> FineTuneSettings:
    """Return the settings of all runs: the flags', or the task's defaults."""
    default_lr = FROZEN_LR if args.frozen else task.default_lr(maker.model.encoder.width)
    epochs = args.epochs or task.epochs
    return FineTuneSettings(epochs, args.lr or default_lr, args.batch, args.warmup, args.frozen, maker.max_length)


def longest_first(features: list[Feature]) -> list[Feature]:
    return sorted(features, key=lambda feature: -len(feature.inputs["input_ids"]))


def encode_groups(
    task: AnyTask, training: TrainingText, maker: SequenceMaker, labels: list[str]
) -> list[list[Feature]]:
    """Return lists of features that must be in one batch: without code-switching, each feature alone."""
    examples: list[LabelledExample] = []
    group_of_example: list[int] = []
    for number, group in enumerate(training.groups):
        examples += group
        group_of_example += [number] * len(group)
    is_switched = len(examples) > len(training.groups)
    groups: dict[int, list[Feature]] = {}
    for number, feature in enumerate(task.encode(examples, maker, labels)):
        place = group_of_example[feature.example] if is_switched else number
        groups.setdefault(place, []).append(feature)
    return list(groups.values())


def write_table(args: argparse.Namespace, table: TransferTable, settings: FineTuneSettings, seeds: list[int]) -> None:
    """Write the scores of all runs so far, and the settings, to --out."""
    said: dict[str, Any] = {"seeds": seeds, **asdict(settings)}
    for name in ("limit", "test_limit", "train", "test", "translated", "code_switch"):
        said[name] = vars(args)[name]
    results = {args.task: table.rows | table.summary}
    write_results(args.out, args.model, results, {}, seeds={args.task: table.seeds}, settings=said)


def print_table(task: str, table: TransferTable) -> None:
    for row, metrics in table.rows.items():
        print(f"{task} {row}: " + ", ".join(format_score(metric, value) for metric, value in metrics.items()))
    for line in table.below_majority_warnings():
        print(line)


def main(argv: list[str] | None = None) -> int:
    try:
        check_arguments(sys.argv[1:] if argv is None else argv)
        args = parse_arguments(argv)
        check_flags(args)
        # Else these libraries print in each run that the head is new, and the arguments.
        transformers.logging.set_verbosity_error()
        logging.getLogger("accelerate").setLevel(logging.ERROR)
        table = measure_transfer(args)
        if env_number("RANK", 0) == 0:
            print_table(args.task, table)
        return 0
    except (UserError, NotFinite) as error:
        if env_number("LOCAL_RANK", 0) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 3
    except OSError as error:
        return report_error(error)


if __name__ == "__main__":
    run_command(main)
