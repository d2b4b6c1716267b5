"""Plans the fine-tuning runs that measure transfer between languages, and tabulates their scores.

A run has one training text and one seed. A model that was trained on text in the source language is tested in all
languages, which is zero-shot in all but its own. A model that was trained on text in another language is tested in that
language: supervised if the text is original, translate-train if it was translated.
"""

import statistics
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from xscale import files
from xscale.data.scripts import spelling_key
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval import bootstrap
from xscale.eval.finetune.task import CLASSIFIER, Feature, LabelledExample, Task, TaskData

ZERO_SHOT, SUPERVISED, TRANSLATE_TRAIN = "zero-shot", "supervised", "translate-train"
SHORT_NAMES = {ZERO_SHOT: "zs", SUPERVISED: "sup", TRANSLATE_TRAIN: "tt"}
"""{setting: its name in a language's summary}."""

Predictions = dict[str, list[list[Any]]]
"""{language: for each seed, the predictions for the examples of the language's test}."""


class TrainingText(NamedTuple):
    """A text to train on, and the languages in which the models trained on it are tested."""

    name: str
    data: TaskData
    groups: list[list[LabelledExample]]
    """Each list has examples that must be in one batch."""
    tests: dict[str, str]
    """{language of a test: its setting, such as ZERO_SHOT}."""


def plan_training(
    task: Task,
    train: dict[str, TaskData],
    translated: dict[str, TaskData],
    tests: dict[str, TaskData],
    source: str,
    code_switch: bool,
) -> list[TrainingText]:
    """Return all training texts with their tests. source: the source language. code_switch: replace translated examples
    by code-switched ones. Raises UserError if a text has no test, or if labels do not match."""
    plan = []
    spelled = {spelling_key(language): language for language in tests}
    for language, data in (train | translated).items():
        other = spelled.get(spelling_key(language), language)
        if other != language:
            raise UserError(
                f"{language}={data.path} and --test {other} are spellings of one language; give it one spelling"
            )
    for language, data in train.items():
        tested = list(tests) if language == source else [language] if language in tests else []
        if not tested:
            raise UserError(
                f"--train {language}={data.path} has no test: give --test {language}=FILE, or leave the file out"
            )
        settings = {test: SUPERVISED if test == language else ZERO_SHOT for test in tested}
        plan.append(TrainingText(language, data, [[example] for example in data.examples], settings))
    for language, data in translated.items():
        if language not in tests or language == source:
            where = f"--translated {language}={data.path}"
            raise UserError(f"{where} needs --test {language}=FILE, of another language than {source}")
        groups, name = [[example] for example in data.examples], f"{language} {TRANSLATE_TRAIN}"
        if code_switch:
            groups, name = switch_codes(task, train.get(source), data), f"{name}, code-switched"
        plan.append(TrainingText(name, data, groups, {language: TRANSLATE_TRAIN}))
    for training in plan:
        check_training(task, training, tests)
    return plan


def check_training(task: Task, training: TrainingText, tests: dict[str, TaskData]) -> None:
    """Raise UserError if a training example has no label, if all have the same, or if a test has untrained labels."""
    data = training.data
    bare = next((example for example in data.examples if example.gold is None), None)
    if bare:
        raise UserError(f"{data.path}: line {bare.key} has no label; each line of training text needs one")
    if not task.predicts_labels:
        return
    used = {label for example in data.examples for label in example.gold or ()}
    if len(used) < 2:
        raise UserError(f"{data.path} has only the label {', '.join(used)}; give text with at least two labels")
    labels = task.list_labels(data.examples)
    for test in () if task.allows_new_labels else training.tests:
        for example in tests[test].examples:
            if absent := [label for label in example.gold or () if label not in labels]:
                raise UserError(
                    f"{tests[test].path}: line {example.key}: the label {absent[0]!r} is nowhere in {data.path}, which "
                    f"has {', '.join(labels)}; give both files the same labels"
                )


def switch_codes(task: Task, source: TaskData | None, translated: TaskData) -> list[list[LabelledExample]]:
    """Return groups of two code-switched examples (Pan et al. 2021, 2.3): a pair (a, b) and its translation (a', b')
    become (a', b) and (a, b'). A question has the answers in its new context. Raises UserError."""
    if source is None:
        raise UserError("--code_switch needs --train with the source-language file from which --translated was made")
    originals = {example.key: example for example in source.examples}
    if absent := originals.keys() - {example.key for example in translated.examples}:
        raise UserError(f"{translated.path} lacks line or question {min(absent)} of {source.path}; translate all of it")
    groups = []
    for example in translated.examples:
        if example.key not in originals:
            raise UserError(
                f"{translated.path}: line or question {example.key} is not in {source.path}; for --code_switch a "
                f"translation must have its original's line number or question id"
            )
        original = originals[example.key]
        if len(example.langs) < 2:
            raise UserError(
                f"--code_switch is for tasks of two texts, and {task.xtreme_folder} has one; leave the flag out"
            )
        if task.predicts_labels and example.gold != original.gold:
            raise UserError(
                f"{translated.path} is no translation of {source.path}: line {example.key} is labelled {example.gold} "
                f"instead of {original.gold}; fix it"
            )
        groups.append(
            [
                a._replace(langs=(b.langs[0], a.langs[1]), texts=(b.texts[0], a.texts[1]))
                for a, b in ((original, example), (example, original))
            ]
        )
    return groups


def group_features(
    task: Task, training: TrainingText, tokenizer: Tokenizer, max_length: int, labels: list[str]
) -> list[list[Feature]]:
    """Return lists of features that must be in one batch; without code-switching, each list has one feature."""
    flat = [example for group in training.groups for example in group]
    features = task.encode(flat, tokenizer, max_length, labels)
    if len(flat) == len(training.groups):
        return [[feature] for feature in features]
    group_of = [number for number, group in enumerate(training.groups) for _ in group]
    groups: list[list[Feature]] = [[] for _ in training.groups]
    for feature in features:
        groups[group_of[feature.example_index]].append(feature)
    return groups


def mean_and_deviation(name: str, values: list[float]) -> dict[str, float]:
    """Return {name: mean} and, if there are several values, {name_std: their sample standard deviation}."""
    scores: dict[str, float] = {name: bootstrap.mean(values)}
    return scores | {f"{name}_std": statistics.stdev(map(float, values))} if len(values) > 1 else scores


def predict_majority(task: Task, train: list[LabelledExample], test: list[LabelledExample]) -> list[Any]:
    """Return the training text's most frequent label for every test example, or for each of its words."""
    counts = Counter(label for example in train for label in example.gold or ())
    label = max(sorted(counts), key=lambda name: counts[name])
    return [label if task.head_class == CLASSIFIER else [label] * len(e.texts) for e in test]


class TransferTable:
    """The scores of all runs so far."""

    def __init__(self, task: Task, tests: dict[str, TaskData]):
        self.task, self.tests = task, tests
        self.rows: dict[str, dict[str, float]] = {}
        """{`LANGUAGE SETTING`: {metric: mean over seeds}}."""
        self.seeds: dict[str, dict[str, list[float]]] = {}
        """{`LANGUAGE SETTING`: {metric: score of each seed}}."""
        self.summary: dict[str, dict[str, float]] = {}
        """{language: main metric by setting, in SHORT_NAMES, and the difference `delta`}."""

    def add(self, training: TrainingText, predictions: Predictions) -> None:
        """Score the predictions of the models that were trained on one text."""
        for language, of_seeds in predictions.items():
            data, row = self.tests[language], f"{language} {training.tests[language]}"
            if data.is_labelled:
                scores = [self.task.score(data.examples, of_seed, language) for of_seed in of_seeds]
                self.seeds[row] = {metric: [score[metric] for score in scores] for metric in scores[0]}
                self.rows[row] = {}
                for metric, values in self.seeds[row].items():
                    self.rows[row] |= mean_and_deviation(metric, values)
                self.rows[row]["examples"] = len(data.examples)
                self._summarize(training, row, language)

    def _summarize(self, training: TrainingText, row: str, language: str) -> None:
        """Add the main metric to the language's summary, with delta = sup - zs for each seed (Tang et al. 2022)."""
        metric, summary = next(iter(self.seeds[row])), self.summary.setdefault(language, {})
        summary |= mean_and_deviation(SHORT_NAMES[training.tests[language]], self.seeds[row][metric])
        both = [self.seeds.get(f"{language} {setting}") for setting in (SUPERVISED, ZERO_SHOT)]
        if both[0] and both[1]:
            paired = zip(both[0][metric], both[1][metric], strict=True)
            summary |= mean_and_deviation("delta", [bootstrap.weighted_sum(scores, (1, -1)) for scores in paired])
        if self.task.predicts_labels and "majority" not in summary:
            examples = self.tests[language].examples
            constant = predict_majority(self.task, training.data.examples, examples)
            majority = self.rows[f"{language} majority"] = self.task.score(examples, constant, language)
            summary["majority"] = majority[metric]


def write_predictions(
    folder: Path,
    task: Task,
    training: TrainingText,
    tests: dict[str, TaskData],
    predicted: Predictions,
    seeds: list[int],
) -> None:
    """Write FOLDER/SETTING.seed_N/TASK/test-LANGUAGE.tsv (or .json) as XTREME's evaluate.py reads it. Predictions for
    the source language are written into the zero-shot folder too."""
    for language, of_seeds in predicted.items():
        settings = set(training.tests.values()) if language == training.name else {training.tests[language]}
        for setting in settings:
            for seed, of_seed in zip(seeds, of_seeds, strict=True):
                text = task.format_predictions(tests[language].examples, of_seed)
                path = folder / f"{setting}.seed_{seed}" / task.xtreme_folder / f"test-{language}{task.suffix}"
                files.write_text(path, text)
