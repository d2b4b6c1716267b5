"""Fine-tune an exported encoder, and measure transfer between languages: zero-shot, supervised, translate-train.

xscale finetune --model HF_DIR --task ner --train en=train-en.tsv de=train-de.tsv \\
    --test en=test-en.tsv de=test-de.tsv --seeds 0 1 2 --out ner.json

On several GPUs: torchrun --nproc_per_node N -m xscale.eval.finetune ...

Exit codes: 0 done, 2 user error, 3 the model's outputs are not finite, 4 the machine failed (disk, file system); any
other code is a bug in xscale.
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
    add("--model", type=Path, required=True, help="Hugging Face directory, such as `xscale export` writes")
    add("--task", choices=TASKS, required=True)
    text: dict[str, Any] = {"nargs": "+", "metavar": "LANG=FILE", "default": []}
    add("--train", **text, help="training files: first of the language for zero-shot scores, then of others for "
        "supervised scores")  # fmt: skip
    add("--test", **text, required=True, help="test files")
    add("--translated", **text, help="translations of the first training file, for translate-train scores")
    add("--code_switch", action="store_true", help="translate-train: mix the languages of each pair")
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
    """Return the file of each language. values: those of the flag, LANG=FILE. limit: the maximum number of examples of
    a file. Raises UserError."""
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
    plan = plan_training(train, translated, tests, args.code_switch)
    for training in plan:
        check_labels(task, training, tests)
    languages = [*train, *translated, *tests]
    model = ExportedModel(args.model)
    maker = SequenceMaker(model, languages, args.max_length or task.max_length)
    default_lr = FROZEN_LR if args.frozen else task.default_lr(model.encoder.width)
    settings = FineTuneSettings(
        args.epochs or task.epochs, args.lr or default_lr, args.batch, args.warmup, args.frozen, maker.max_length
    )
    seeds = args.seeds or SEEDS
    is_main = env_number("RANK", 0) == 0
    if is_main:
        for file in (*train.values(), *translated.values(), *tests.values()):
            for line in file.left_out_lines():
                print(line)
        listed = " ".join(map(str, seeds))
        print(f"{len(plan)} training texts with the seeds {listed}, learning rate {settings.lr:g}", flush=True)
    test_features: dict[str, list[Feature]] = {}
    for language, file in tests.items():
        features = task.encode(file.examples, maker, None)
        test_features[language] = sorted(features, key=lambda feature: -len(feature.inputs["input_ids"]))
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
        table.add_scores(training, predictions)
        if is_main:
            write_table(args, table, settings, seeds)
    return table


def encode_groups(
    task: AnyTask, training: TrainingText, maker: SequenceMaker, labels: list[str]
) -> list[list[Feature]]:
    """Return the features of a training text, in lists whose features must be in one batch. Without code-switching,
    each list has one feature."""
    features = task.encode(training.examples, maker, labels)
    if training.group_size == 1:
        return [[feature] for feature in features]
    groups: dict[int, list[Feature]] = {}
    for feature in features:
        groups.setdefault(feature.example // training.group_size, []).append(feature)
    return list(groups.values())


def write_table(args: argparse.Namespace, table: TransferTable, settings: FineTuneSettings, seeds: list[int]) -> None:
    """Write the scores of all runs so far, and the settings, to --out."""
    used: dict[str, Any] = {"seeds": seeds, **asdict(settings)}
    for flag in ("limit", "test_limit", "train", "test", "translated", "code_switch"):
        used[flag] = vars(args)[flag]
    results = {args.task: table.rows | table.summary}
    write_results(args.out, args.model, results, seeds={args.task: table.seeds}, settings=used)


def print_table(task: str, table: TransferTable) -> None:
    for row, metrics in table.rows.items():
        listed = ", ".join(format_score(metric, value) for metric, value in metrics.items())
        print(f"{task} {row}: {listed}")
    for line in table.below_majority_warnings():
        print(line)


def main(argv: list[str] | None = None) -> int:
    try:
        check_arguments(sys.argv[1:] if argv is None else argv)
        args = parse_arguments(argv)
        check_flags(args)
        # By default, these libraries print in each run that the head is new, and the arguments.
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
