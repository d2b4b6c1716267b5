"""Fine-tune an exported encoder, and measure what transfers: zero-shot, supervised, translate-train.

python -m xscale.eval.finetune --model HF_DIR --task ner --train en=train-en.tsv de=train-de.tsv \\
    --test en=test-en.tsv de=test-de.tsv --seeds 0 1 2 --out ner.json

Also on several ranks: deepspeed --num_gpus N --module xscale.eval.finetune ..., torchrun --nproc_per_node N -m ... A
command that was killed repeats no run (a training text and a seed) that was done when it is started again.

Exit codes: 0 done, 2 user error, 3 a loss is not finite, 4 the machine (disk, file system), else a fault of ours.
"""

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from xscale import files, ranks
from xscale.errors import NotFinite, UserError, report_environment_error, run_command
from xscale.eval.finetune import pairs, qa, tags
from xscale.eval.finetune.runs import Runs, Scores, Training, trainings, write_predictions
from xscale.eval.finetune.task import Data, Encoding, Task
from xscale.eval.finetune.tuning import Padded, Settings, Tuner, quiet
from xscale.eval.model import Exported, write_json
from xscale.models.build import positions
from xscale.plugins import load_plugins
from xscale.ranks import HostGroup, Process
from xscale.step.ds_config import read_ds_config

TASKS: dict[str, Task] = {
    "xnli": pairs.task("xnli"),
    "pawsx": pairs.task("pawsx"),
    "pos": tags.POS,
    "ner": tags.NER,
    "xquad": qa.XQUAD,
    "mlqa": qa.MLQA,
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m xscale.eval.finetune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face directory, e.g. from xscale.export")
    add("--task", choices=TASKS, required=True)
    text: dict[str, Any] = {"nargs": "+", "metavar": "LANG=FILE", "default": []}
    add("--train", **text, help="text to train on: of the source language, and of others for their supervised scores")
    add("--test", **text, required=True, help="text to score")
    add("--translated", **text, help="the source language's training text, translated: for translate-train")
    add("--source", help="language that is trained on for the zero-shot scores (default: the first of --train)")
    add("--code_switch", action="store_true", help="translate-train by pairs of which one side is translated")
    add("--limit", type=int, metavar="N", help="of each training file only the first N examples")
    add("--test_limit", type=int, metavar="N", help="of each test file only the first N examples")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    add("--epochs", type=int, help="default: 2 for pairs and questions, 10 for tags")
    add("--lr", type=float, help="peak learning rate (default: 5e-5 for pairs, 3e-5 for questions, 2e-5 for tags)")
    add("--batch", type=int, default=32, help="sequences of a step, over all ranks (default: 32)")
    add("--warmup", type=float, default=0.1, help="steps; below 1, a share of them (default: 0.1; Pan et al.: 1000)")
    add("--max_length", type=int, help="tokens of a sequence (default: 386 for questions, else 128)")
    add("--ds_config", type=Path, help="DeepSpeed JSON (default: torch's AdamW in fp32)")
    add("--out", type=Path, required=True, help="JSON file to write")
    add("--work", type=Path, help="folder of finished runs (default: --out with .runs in place of .json)")
    add("--keep", type=Path, metavar="DIR", help="folder to write tuned models to, each as DIR/LANG.seed_N")
    add("--predictions", type=Path, metavar="DIR", help="folder to write predictions to, as XTREME's evaluate.py reads")
    add("--plugin", nargs="+", default=[], metavar="MODULE", help="see xscale.plugins")
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    process = Process(0, 1, 0, 1)  # until it is found
    try:
        ranks.check_launch()
        process = ranks.find_process()
        check(args)
        load_plugins(args.plugin)
        measure(args, process)
        return 0
    except (UserError, NotFinite) as error:
        if process.local_rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 3
    except OSError as error:
        return report_environment_error(error)


def check(args: argparse.Namespace) -> None:
    """Raises UserError."""
    for name in ("limit", "test_limit", "epochs", "batch", "lr", "warmup", "max_length"):
        value = getattr(args, name)
        if value is not None and not (0 < value < float("inf") or (name == "warmup" and value == 0)):
            raise UserError(f"--{name} {value} must be positive")
    if args.max_length is not None and args.max_length < 16:
        raise UserError(f"--max_length {args.max_length} must be at least 16")
    if len(set(args.seeds)) < len(args.seeds) or min(args.seeds) < 0:
        raise UserError(f"--seeds {' '.join(map(str, args.seeds))}: seeds are different numbers from 0 on")
    if not args.train and not args.translated:
        raise UserError("--train LANG=FILE is needed, or --translated")
    if args.out.is_dir():
        raise UserError(f"--out {args.out} is a directory; give a file, such as {args.out / 'scores.json'}")
    for module in ("sklearn", "seqeval", "accelerate"):
        try:
            __import__(module)
        except ImportError:
            raise UserError(f"{module} is not installed; `pip install 'xscale[eval]'` brings it") from None
    folders = [args.work or args.out.with_suffix(".runs"), *filter(None, [args.predictions, args.keep])]
    for path in (args.out, *(folder / "predictions.json" for folder in folders)):
        files.check_writable(path)


def read_all(task: Task, given: list[str], option: str, limit: int | None) -> dict[str, Data]:
    """Language -> its file's examples. Raises UserError."""
    found: dict[str, Data] = {}
    for one in given:
        language, equals, name = one.partition("=")
        if not equals or not language or not name or language in found:
            raise UserError(f"{option} {one}: needs the form LANG=FILE, each language once")
        path = Path(name)
        if not path.exists():
            raise UserError(f"{option} {one}: {path} does not exist")
        found[language] = Data(path, language, task.read(path, language)[:limit])
    return found


def measure(args: argparse.Namespace, process: Process) -> None:
    """Everything is read and checked before anything is trained."""
    task = TASKS[args.task]
    train = read_all(task, args.train, "--train", args.limit)
    translated = read_all(task, args.translated, "--translated", args.limit)
    tests = read_all(task, args.test, "--test", args.test_limit)
    source = args.source or next(iter(train), "")
    if args.source and source not in train:
        raise UserError(f"--source {source} is none of --train's languages: {', '.join(train) or 'there are none'}")
    if args.code_switch and not translated:
        raise UserError("--code_switch needs --translated LANG=FILE")
    hidden = [data for data in tests.values() if not data.labelled]
    if hidden and not args.predictions:
        raise UserError(f"{hidden[0].path} has examples without labels; --predictions DIR writes predictions of them")
    plan = trainings(task, train, translated, tests, source, args.code_switch)
    ranks.start(process)  # before the model: it says which device is a rank's
    control = HostGroup()
    model = Exported(args.model)
    tuner = make_tuner(args, model, task, control, sorted({*train, *translated, *tests}))
    locks: list[Any] = []
    control.from_main(lambda: locks.append(take_work(tuner.work)))
    runs = Runs(tuner, tests, Encoding(model.tokenizer, tuner.settings.max_length, []), args.keep)
    scores = Scores(task, tests)
    for training in plan:
        found = runs.predictions(training, args.seeds)
        scores.add(training, found)
        control.from_main(partial(publish, args, tuner, scores, training, tests, found))
    if control.is_main:
        for row, metrics in scores.rows.items():
            print(f"{args.task} {row}: " + ", ".join(f"{metric} {value:,.4g}" for metric, value in metrics.items()))
        for language, summary in scores.summary.items():
            if "delta" in summary:
                deviation = f" ± {summary['delta_std']:.2g}" if "delta_std" in summary else ""
                print(f"{args.task} {language}: supervised - zero-shot {summary['delta']:.4g}{deviation}")
        for data in hidden:
            count = sum(example.gold is None for example in data.examples)
            print(f"{data.path}: not scored, {count:,} of {len(data.examples):,} examples have no label")
    control.barrier()


def take_work(work: Path) -> files.Lock:
    """A lock on the folder, so that two commands do not make the same runs. Rank 0 only."""
    files.check_writable(work / files.LOCK)
    lock = files.Lock(work)
    if lock.problem:
        print(f"warning: {lock.problem}", file=sys.stderr)
    return lock


def make_tuner(
    args: argparse.Namespace, model: Exported, task: Task, control: HostGroup, languages: list[str]
) -> Tuner:
    quiet()
    if args.batch % control.size:
        raise UserError(f"--batch {args.batch} is not a multiple of the {control.size} ranks")
    longest = min(args.max_length or task.max_length, positions(model.encoder.lm.config))
    settings = Settings(args.epochs or task.epochs, args.lr or task.lr, args.batch, longest, args.warmup)
    batches = Padded(model, model.numbers_of(languages), task.answers)

    def tell(line: str) -> None:
        if control.is_main:
            print(line, flush=True)

    ds_config = read_ds_config(args.ds_config) if args.ds_config else None
    work = args.work or args.out.with_suffix(".runs")
    return Tuner(args.model, work, task, settings, ds_config, batches, control, tell)


def publish(
    args: argparse.Namespace,
    tuner: Tuner,
    scores: Scores,
    training: Training,
    tests: dict[str, Data],
    found: dict[str, list[list[Any]]],
) -> None:
    """What there is so far."""
    if args.predictions:
        write_predictions(args.predictions, tuner.task, training, tests, found, args.seeds)
    settings = {"seeds": args.seeds, **asdict(tuner.settings), "ranks": tuner.control.size}
    limits = {"limit": args.limit, "test_limit": args.test_limit, "train": args.train, "test": args.test}
    content = {
        "model": str(args.model),
        "results": {args.task: scores.rows | scores.summary},
        "failed": {},
        "seeds": {args.task: scores.seeds},
        "settings": settings | limits | {"translated": args.translated, "code_switch": args.code_switch},
    }
    write_json(args.out, content)


if __name__ == "__main__":
    run_command(main)
