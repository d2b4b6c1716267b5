"""Fine-tune an exported encoder, and measure transfer between languages: zero-shot, supervised, translate-train.

xscale finetune --model HF_DIR --task ner --train en=train-en.tsv de=train-de.tsv \\
    --test en=test-en.tsv de=test-de.tsv --seeds 0 1 2 --out ner.json

On several GPUs: torchrun --nproc_per_node N -m xscale.eval.finetune ...

Exit codes: 0 done, 2 user error, 3 the model's outputs are not finite, 4 the machine failed (disk, file system); any
other code is a bug in xscale.
"""

import argparse
import logging
import operator
import sys
from functools import cache
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

import transformers

from xscale import files
from xscale.errors import (
    NotFinite,
    UserError,
    check_arguments,
    env_number,
    flush_output,
    print_error_or_reraise,
    run_and_exit,
)
from xscale.eval.bootstrap import format_name_and_score
from xscale.eval.finetune.examples import LabelledExample, print_on_rank_0
from xscale.eval.finetune.tasks import MAX_QUESTION, TASKS, AnyTask, read_examples
from xscale.eval.finetune.training import Feature, FineTunedModel, SequenceMaker, fine_tune, predict_finite_logits
from xscale.eval.finetune.transfer import (
    MAJORITY,
    SeedScores,
    Texts,
    TrainingText,
    below_majority_warnings,
    plan_training,
    predict_majority,
    summarize_by_language,
)
from xscale.eval.model import ExportedModel, text_checksum, write_results

NUMBERS: dict[str, tuple[type, float | None, float, str]] = {
    "limit": (int, None, 1, "read only the first N examples of each training file"),
    "test_limit": (int, None, 1, "read only the first N examples of each test file"),
    "epochs": (int, None, 1, "epochs of training (default: 2 for tasks with two texts, 10 for other tasks)"),
    "lr": (float, None, 1e-12, "peak learning rate (default with --frozen: 1e-3; default without --frozen: 2e-5 to "
        "5e-5, depending on the task, and multiplied by 768 / width for encoders with a width below 768)"),
    "batch": (int, 32, 1, "sequences per optimizer step over all ranks (default: 32)"),
    "warmup": (float, 0.1, 0, "warm-up steps of the learning rate; a number below 1 is a share of all steps "
        "(default: 0.1)"),
    "max_length": (int, None, 16, "maximum number of tokens of a sequence (default: 386 for xquad and mlqa, 128 for "
        "other tasks)"),
}  # fmt: skip
"""{flag: type, default, minimum, help}."""
TWO_TEXTS = ("xnli", "pawsx", "xquad", "mlqa")
"""The tasks with two texts, which may be in two languages."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="xscale finetune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face directory of the encoder, as `xscale export` writes it")
    add("--task", choices=TASKS, required=True, help="task for which the encoder is fine-tuned")
    texts: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "LANG=FILE", "default": []}
    add("--train", **texts, help="training files, one for each language. A model is fine-tuned on each file, and "
        "gets supervised scores in the language of the file. The model of the first file also gets zero-shot scores in "
        "all other languages")  # fmt: skip
    add("--test", **texts, required=True, help="test files, one for each language")
    add("--translated", **texts, help="translations of the first file of --train, for translate-train scores")
    add("--code_switch", action="store_true", help="in tasks with two texts per example, replace each translated "
        "training example by two: one with only the first text translated, one with only the second")  # fmt: skip
    add("--seeds", type=int, nargs="+", action="extend", metavar="N", help="seeds of the fine-tuning runs, one "
        "run per seed and training file (default: 0 1 2)")  # fmt: skip
    add("--frozen", action="store_true", help="keep the encoder's weights, and train only the linear layer on its "
        "hidden states")  # fmt: skip
    add("--out", required=True, help="JSON file for the scores")
    for name, (kind, default, _, text) in NUMBERS.items():
        add(f"--{name}", type=kind, default=default, metavar="N", help=text)
    args = parser.parse_args(argv)
    args.seeds = args.seeds or [0, 1, 2]
    return args


def check_flags_and_packages(args: argparse.Namespace) -> None:
    """Raise UserError for wrong flags, missing packages and a file that cannot be written."""
    for name, (_, _, smallest, _) in NUMBERS.items():
        value = getattr(args, name)
        if value is not None and not smallest <= value < float("inf"):
            raise UserError(f"--{name} {value}: the value must be a finite number, {smallest} or more")
    if len(set(args.seeds)) < len(args.seeds) or min(args.seeds) < 0:
        raise UserError(
            f"--seeds {' '.join(map(str, args.seeds))}: the seeds must be different whole numbers, 0 or more"
        )
    if not args.train and not args.translated:
        raise UserError("there is no training text. Write --train LANG=FILE or --translated LANG=FILE")
    if args.code_switch and not (args.train and args.translated and args.task in TWO_TEXTS):
        raise UserError(
            f"--code_switch needs --train LANG=FILE, translations of this file by --translated LANG=FILE, and one of "
            f"the tasks {', '.join(TWO_TEXTS)}. Add what is missing, or remove --code_switch"
        )
    for module in ("seqeval", "accelerate"):
        if not find_spec(module):
            raise UserError(f"the package {module} is not installed. Run `pip install 'xscale[eval]'`")
    files.check_output_file_and_make_parent(Path(args.out))


def read_language_files(task: AnyTask, values: list[str], flag: str, limit: int | None) -> Texts:
    """Return the examples of each language. values: those of the flag, LANG=FILE. limit: the maximum number of examples
    of a file. Raises UserError."""
    texts: Texts = {}
    for value in values:
        language, _, name = value.partition("=")
        if not language or not name or language in texts:
            raise UserError(
                f"{flag} {value}: the form must be LANG=FILE, such as de=train.tsv, with each language only once"
            )
        texts[language] = read_examples(task, Path(name), language, limit)
    return texts


def measure_transfer(args: argparse.Namespace) -> None:
    """Do all fine-tuning runs, write their scores and print them. All files are read and checked before training
    starts."""
    task = TASKS[args.task]
    train = read_language_files(task, args.train, "--train", args.limit)
    translated = read_language_files(task, args.translated, "--translated", args.limit)
    tests = read_language_files(task, args.test, "--test", args.test_limit)
    plan = plan_training(task, train, translated, tests, args.code_switch)
    encoder = ExportedModel(Path(args.model))
    if args.max_length and args.max_length > encoder.max_length:
        raise UserError(
            f"--max_length {args.max_length}: sequences of the model {args.model} have at most {encoder.max_length} "
            f"tokens. Write {encoder.max_length} or less"
        )
    maker = SequenceMaker(encoder, [*train, *translated, *tests], args.max_length or task.max_length)
    default_lr = 1e-3  # of a head alone
    if not args.frozen:  # the papers' encoders have a width of 768; a smaller encoder gets a larger rate
        default_lr = task.lr * max(1.0, 768 / encoder.encoder.width)
    settings = vars(args) | {
        "lr": args.lr or default_lr,
        "epochs": args.epochs or task.epochs,
        "max_length": maker.max_length,
    }
    print_on_rank_0(
        f"fine-tuning with the seeds {args.seeds} and the learning rate {settings['lr']:g} (models per seed: "
        f"{len(plan)})"
    )
    scores: dict[str, SeedScores] = {}
    majority: dict[str, SeedScores] = {}
    for text in plan:
        groups = encode_groups_for_batches(task, text, maker)
        for seed in args.seeds:
            listed = ", ".join(f"{test} ({setting})" for test, setting in text.settings.items())
            print_on_rank_0(f"{args.task}: fine-tuning a model with seed {seed}, to be tested in {listed}")
            transformers.set_seed(seed)  # for the new head's weights
            model = FineTunedModel(maker, len(text.labels) or 2, task.reads, args.frozen)
            trainer = fine_tune(model, maker.collate, groups, settings | {"seed": seed})
            for test, setting in text.settings.items():
                predictions = predict_test(task, trainer, maker, tests[test], text.labels)
                append_seed_scores(scores, f"{test} {setting}", task.score(tests[test], predictions, test))
        for test in text.settings:
            row = f"{test} {MAJORITY}"
            if text.labels and row not in majority:
                predictions = predict_majority(text.examples, tests[test])
                append_seed_scores(majority, row, task.score(tests[test], predictions, test))
        results = summarize_by_language(scores | majority, tests)
        checksums = {}
        for row in results:
            examples = tests[row.split(" ")[0]]
            checksums[row] = text_checksum([(example.texts, example.labels) for example in examples])
        if env_number("RANK", 0) == 0:
            write_results(
                Path(args.out),
                encoder.path,
                {args.task: results},
                {args.task: checksums},
                seeds={args.task: scores},
                settings=settings,
            )
    for row, averages in results.items():
        print_on_rank_0(f"{args.task} {row}: {', '.join(map(format_name_and_score, averages, averages.values()))}")
    for line in below_majority_warnings(results):
        print_on_rank_0(line)


def append_seed_scores(scores_of_rows: dict[str, SeedScores], row: str, scores: dict[str, float]) -> None:
    """Add the scores of a seed to those of other seeds."""
    for metric, value in scores.items():
        scores_of_rows.setdefault(row, {}).setdefault(metric, []).append(value)


def print_count_of_cut_examples(path: Path, features: list[list[Feature]], max_length: int) -> None:
    """Print how many examples of a file lose tokens. features: the sequences of each example."""
    cut = sum(parts[0].is_cut for parts in features)
    if cut:
        print_once(
            f"{path}: {cut:,} of {len(features):,} examples are cut. A sequence has at most {max_length} tokens "
            f"(--max_length), and a question of xquad or mlqa at most {MAX_QUESTION} tokens"
        )


print_once = cache(print_on_rank_0)
"""Prints a line that other seeds and models would repeat."""


def encode_groups_for_batches(task: AnyTask, text: TrainingText, maker: SequenceMaker) -> list[list[Feature]]:
    """Return the sequences of a training text, in lists whose sequences must be in one batch."""
    features = [task.encode(example, maker, text.labels) for example in text.examples]
    print_count_of_cut_examples(text.examples[0].path, features, maker.max_length)
    if text.is_switched:
        return list(map(operator.add, features[::2], features[1::2]))
    return [[feature] for feature in chain.from_iterable(features)]


def predict_test(
    task: AnyTask, trainer: transformers.Trainer, maker: SequenceMaker, examples: list[LabelledExample],
    labels: list[str],
) -> list[list[str]]:  # fmt: skip
    """Return the predicted labels, or the answer, of each example. labels: the outputs of the model."""
    features = [task.encode(example, maker, labels) for example in examples]
    print_count_of_cut_examples(examples[0].path, features, maker.max_length)
    logits = iter(predict_finite_logits(trainer, list(chain.from_iterable(features))))
    predictions = []
    for example, parts in zip(examples, features, strict=True):
        predictions.append(task.predict(example, parts, list(islice(logits, len(parts))), labels))
    return predictions


def main(argv: list[str] | None = None) -> int:
    try:
        check_arguments(sys.argv[1:] if argv is None else argv)
        args = parse_arguments(argv)
        check_flags_and_packages(args)
        # By default, these libraries print in each run that the head is new, and the arguments.
        transformers.logging.set_verbosity_error()
        logging.getLogger("accelerate").setLevel(logging.ERROR)
        measure_transfer(args)
        flush_output()
        return 0
    except (UserError, NotFinite) as error:
        if env_number("LOCAL_RANK", 0) == 0:
            print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, NotFinite) else 2
    except OSError as error:
        return print_error_or_reraise(error)


if __name__ == "__main__":
    run_and_exit(main)
