"""Which fine-tuning runs a command needs, and what they say together.

A run is one training text and one seed. It is tested in every language that its text serves: the source language's in
all (zero-shot in the others), another language's in its own (supervised), a translated one in that (translate-train).
"""

import hashlib
import json
import statistics
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from xscale import files
from xscale.errors import UserError
from xscale.eval.finetune.task import Data, Encoding, Example, Feature, Task, check_labels, most_frequent
from xscale.eval.finetune.tuning import Tuner

ZERO_SHOT, SUPERVISED, TRANSLATE_TRAIN = "zero-shot", "supervised", "translate-train"
SHORT = {ZERO_SHOT: "zs", SUPERVISED: "sup", TRANSLATE_TRAIN: "tt"}
"""Of a language's summary."""


def complete(kept: Path, encoding: Encoding) -> None:
    """Makes of what the Trainer saved a folder to publish: with the tokenizer, without its pickled arguments."""
    encoding.tokenizer.hf.save_pretrained(kept)
    (kept / "training_args.bin").unlink(missing_ok=True)
    files.apply_umask(kept)


class Training(NamedTuple):
    """A training text."""

    name: str
    data: Data
    groups: list[list[Example]]
    """Of examples that belong into one batch."""
    tests: dict[str, str]
    """Language -> mode."""


def trainings(
    task: Task,
    train: dict[str, Data],
    translated: dict[str, Data],
    tests: dict[str, Data],
    source: str,
    code_switch: bool,
) -> list[Training]:
    """All that the texts allow. Raises UserError where they allow nothing, or do not fit each other."""
    found = []
    for language, data in train.items():
        served = list(tests) if language == source else [language] if language in tests else []
        modes = {test: SUPERVISED if test == language else ZERO_SHOT for test in served}
        if not modes:
            raise UserError(
                f"--train {language}={data.path} serves no test: give --test {language}=FILE, or leave it out"
            )
        found.append(Training(language, data, [[example] for example in data.examples], modes))
    for language, data in translated.items():
        if language not in tests or language == source:
            raise UserError(
                f"--translated {language}={data.path} needs --test {language}=FILE, of another language than {source}"
            )
        groups = [[example] for example in data.examples]
        name = f"{language} {TRANSLATE_TRAIN}"
        if code_switch:
            groups, name = switched(task, train.get(source), data), f"{name}, code-switched"
        found.append(Training(name, data, groups, {language: TRANSLATE_TRAIN}))
    for training in found:
        check_training(task, training, tests)
    return found


def check_training(task: Task, training: Training, tests: dict[str, Data]) -> None:
    """Raises UserError."""
    data = training.data
    for example in () if data.labelled else data.examples:
        if example.gold is None:
            raise UserError(f"{data.path}: line {example.key} has no label; training text needs one everywhere")
    labels, there = task.labels(data.examples), {label for example in data.examples for label in example.gold or ()}
    if task.classes and len(there) < 2:
        raise UserError(f"{data.path} has one label alone, {', '.join(there)}; there is nothing to learn from it")
    for test in training.tests if task.classes else ():
        check_labels(labels, tests[test], data.path)


def switched(task: Task, source: Data | None, translated: Data) -> list[list[Example]]:
    """Both halves of each code-switched example. Raises UserError."""
    if task.switch is None:
        raise UserError(f"--code_switch is for tasks of two texts; {task.xtreme} has one")
    if source is None:
        raise UserError("--code_switch needs --train of the source language, which the translations are of")
    originals = {example.key: example for example in source.examples}
    groups = []
    for example in translated.examples:
        if example.key not in originals:
            raise UserError(
                f"{translated.path}: line or question {example.key} is not in {source.path}; for --code_switch a "
                f"translation stands on its original's line, or has its question's id"
            )
        try:
            groups.append(task.switch(originals[example.key], example))
        except UserError as error:
            raise UserError(f"{translated.path} does not translate {source.path}: {error}") from None
    return groups


def units_of(task: Task, training: Training, encoding: Encoding) -> list[list[Feature]]:
    """Features of what belongs into one batch; without code-switching each its own."""
    flat = [example for group in training.groups for example in group]
    group_of = [number for number, group in enumerate(training.groups) for _ in group]
    features = task.encode(flat, encoding)
    if len(flat) == len(training.groups):
        return [[feature] for feature in features]
    units: list[list[Feature]] = [[] for _ in training.groups]
    for feature in features:
        units[group_of[feature.example]].append(feature)
    return units


Found = dict[str, list[list[Any]]]
"""Language -> for each seed what is predicted of its test's examples."""


class Runs:
    """What every run predicts: made now, or found in the tuner's `work` where it was made before."""

    def __init__(self, tuner: Tuner, tests: dict[str, Data], encoding: Encoding, keep: Path | None):
        """encoding: without labels. keep: a folder for tuned models. Tests are tokenised here, once for all runs."""
        self.tuner, self.tests, self.encoding, self.keep = tuner, tests, encoding, keep
        self.features = {
            language: tuner.task.encode([example._replace(gold=None) for example in data.examples], encoding)
            for language, data in tests.items()
        }
        weights = [files.sha256_file(path) for path in sorted(tuner.path.iterdir()) if path.is_file()]
        self.identity = [weights, tuner.task.xtreme, asdict(tuner.settings), tuner.ds_config, tuner.control.size]

    def predictions(self, training: Training, seeds: list[int]) -> Found:
        tuner, control = self.tuner, self.tuner.control
        encoding = self.encoding._replace(labels=tuner.task.labels(training.data.examples))
        units: list[list[Feature]] = []
        found: Found = {language: [] for language in training.tests}
        for seed in seeds:
            name = f"{training.name.replace(',', '').replace(' ', '_')}.seed_{seed}"
            path = tuner.work / f"{tuner.task.xtreme}.{name}.{self.digest(training, seed)}.json"
            kept = self.keep / name if self.keep else None
            text = control.from_main(partial(read_sealed, path)) if kept is None or kept.is_dir() else ""
            if text:
                tuner.tell(f"{training.name}, seed {seed}: is done, {path} has it")
            else:
                units = units or units_of(tuner.task, training, encoding)
                trainer = tuner.fit(units, encoding.labels, seed, f"{training.name}, seed {seed}")
                text = json.dumps({language: self.predict(trainer, language, encoding) for language in training.tests})
                if kept:
                    trainer.save_model(str(kept))
                    control.from_main(partial(complete, kept, encoding))
                control.from_main(partial(write_sealed, path, text))
            for language, of_seed in json.loads(text).items():
                found[language].append(of_seed)
        return found

    def predict(self, trainer: Any, language: str, encoding: Encoding) -> list[Any]:
        features = self.features[language]
        logits = self.tuner.predict(trainer, features)
        return self.tuner.task.predict(self.tests[language].examples, features, logits, encoding.labels)

    def digest(self, training: Training, seed: int) -> str:
        """A hash of all that decides what a run predicts."""
        digest = hashlib.sha256(repr([*self.identity, seed]).encode())
        for example in [e for group in training.groups for e in group]:
            digest.update(repr(example).encode())
        for language in training.tests:
            digest.update(repr([example.texts for example in self.tests[language].examples]).encode())
        return digest.hexdigest()[:12]


def read_sealed(path: Path) -> str:
    """The text that `write_sealed` wrote; "" where there is none, or another."""
    if not path.exists():
        return ""
    digest, _, text = path.read_text(encoding="utf-8", errors="replace").partition("\n")
    return text if digest == hashlib.sha256(text.encode()).hexdigest() else ""


def write_sealed(path: Path, text: str) -> None:
    files.write_text(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Mean and sample deviation, which one value has not."""
    mean = {name: statistics.fmean(values)}
    return mean | {f"{name}_std": statistics.stdev(values)} if len(values) > 1 else mean


class Scores:
    """What a table is made of: rows of metrics, a summary of each language, the values of each seed."""

    def __init__(self, task: Task, tests: dict[str, Data]):
        self.task, self.tests = task, tests
        self.rows: dict[str, dict[str, float]] = {}
        self.seeds: dict[str, dict[str, list[float]]] = {}
        self.summary: dict[str, dict[str, float]] = {}

    def add(self, training: Training, found: Found) -> None:
        for language, of_seeds in found.items():
            data, mode = self.tests[language], training.tests[language]
            if not data.labelled:
                continue
            scores = [self.task.score(data.examples, predictions, language) for predictions in of_seeds]
            row = f"{language} {mode}"
            self.seeds[row] = {metric: [score[metric] for score in scores] for metric in scores[0]}
            self.rows[row] = {}
            for metric, values in self.seeds[row].items():
                self.rows[row] |= spread(metric, values)
            self.rows[row]["examples"] = len(data.examples)
            self.summarize(training, row, language)

    def summarize(self, training: Training, row: str, language: str) -> None:
        """By the task's first metric; delta = sup - zs (Tang et al. 2022)."""
        metric, short = next(iter(self.seeds[row])), SHORT[training.tests[language]]
        summary = self.summary.setdefault(language, {})
        summary |= spread(short, self.seeds[row][metric])
        both = [self.seeds.get(f"{language} {mode}") for mode in (SUPERVISED, ZERO_SHOT)]
        if both[0] and both[1]:
            paired = zip(both[0][metric], both[1][metric], strict=True)
            summary |= spread("delta", [supervised - zero_shot for supervised, zero_shot in paired])
        if self.task.classes and "majority" not in summary:
            examples = self.tests[language].examples
            constant = most_frequent(training.data.examples, examples)
            self.rows[f"{language} majority"] = self.task.score(examples, constant, language)
            summary["majority"] = self.rows[f"{language} majority"][metric]


def write_predictions(
    folder: Path, task: Task, training: Training, tests: dict[str, Data], found: Found, seeds: list[int]
) -> None:
    """As XTREME's evaluate.py reads them: FOLDER/MODE.seed_N/TASK/test-LANGUAGE.tsv, or .json. The source language's
    stand among the zero-shot ones too."""
    for language, of_seeds in found.items():
        modes = set(training.tests.values()) if language == training.name else {training.tests[language]}
        for mode in modes:
            for seed, predictions in zip(seeds, of_seeds, strict=True):
                text = task.write(tests[language].examples, predictions)
                files.write_text(folder / f"{mode}.seed_{seed}" / task.xtreme / f"test-{language}{task.suffix}", text)
