"""Plans the fine-tuning runs that measure transfer between languages, and tabulates their scores.

A model that was trained in the source language is tested in all languages. In all but its own language, this test is
zero-shot. A model that was trained in another language is tested in that language. This test is supervised if the text
is original, and translate-train if the text was translated.

    delta = supervised - zero-shot        of each seed (Tang et al. 2022); smaller is better

Two codes of one language, such as de and deu_Latn, are one language.
"""

import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from xscale.data.scripts import short_code
from xscale.errors import UserError
from xscale.eval import bootstrap
from xscale.eval.finetune.examples import LabelledExample, LabelledFile, count_labels
from xscale.eval.finetune.tasks import AnyTask

ZERO_SHOT = "zero-shot"
SUPERVISED = "supervised"
TRANSLATE_TRAIN = "translate-train"
MAJORITY = "majority"
SHORT_NAMES = {ZERO_SHOT: "zs", SUPERVISED: "sup", TRANSLATE_TRAIN: "tt"}
"""{setting: its name in a language's summary}."""

Files = dict[str, LabelledFile]
"""{language as the user writes it: its file}."""


@dataclass(frozen=True)
class TrainingText:
    """A text to train on, and the tests of the models that are trained on it."""

    name: str
    file: LabelledFile
    examples: list[LabelledExample]
    group_size: int
    """Each group of this many successive examples must be in one batch."""
    settings: dict[str, str]
    """{language of a test: its setting, such as "zero-shot"}."""


def plan_training(train: Files, translated: Files, tests: Files, code_switch: bool) -> list[TrainingText]:
    """Return all training texts with the settings of their tests. The first language of `train` is the source language.
    code_switch: replace translated examples by code-switched ones. Raises UserError if a text has no test."""
    source = next(iter(train), "")
    plan = []
    for language, file in train.items():
        settings = {}
        for test in tests:
            if short_code(test) == short_code(language):
                settings[test] = SUPERVISED
            elif language == source:
                settings[test] = ZERO_SHOT
        plan.append(TrainingText(language, file, file.examples, 1, settings))
    for language, file in translated.items():
        name = f"{language} {TRANSLATE_TRAIN}"
        examples = file.examples
        if code_switch:
            name += ", code-switched"
            examples = code_switched_examples(train.get(source), file)
        settings = {test: TRANSLATE_TRAIN for test in tests if short_code(test) == short_code(language)}
        plan.append(TrainingText(name, file, examples, 2 if code_switch else 1, settings))
    for training in plan:
        if not training.settings:
            language = training.name.split()[0]
            raise UserError(f"{training.file.path} has no test: give --test {language}=FILE, or leave the file out")
    return plan


def check_labels(task: AnyTask, training: TrainingText, tests: Files) -> None:
    """Raise UserError if a test has a label that the training text lacks. Questions have no labels."""
    labels = task.list_labels(training.file.examples)
    if not labels:
        return
    path = training.file.path
    for test in training.settings:
        for example in tests[test].examples:
            absent = sorted(set(example.labels) - set(labels))
            if absent:
                raise UserError(
                    f"{tests[test].path}: line {example.key}: the label {absent[0]!r} is nowhere in {path}, which has "
                    f"{', '.join(labels)}; give both files the same labels"
                )


def code_switched_examples(source: LabelledFile | None, translated: LabelledFile) -> list[LabelledExample]:
    """Return two code-switched examples for each example (Pan et al. 2021, 2.3): a pair (a, b) and its translation (a',
    b') become (a', b) and (a, b'). A question gets the answers in its new context. If an example is left out, its
    translation is left out, too. Raises UserError."""
    if source is None:
        raise UserError("--code_switch needs --train with the source-language file from which --translated was made")
    originals = {example.key: example for example in source.rows}
    translations = {example.key: example for example in translated.rows}
    unpaired = originals.keys() ^ translations.keys()
    if unpaired:
        key = min(unpaired)
        present = source if key in originals else translated
        absent = translated if key in originals else source
        raise UserError(
            f"line or question {key} is in {present.path}, but not in {absent.path}; for "
            f"--code_switch, a translation must have its original's line number or question id"
        )
    switched: list[LabelledExample] = []
    for key, original in originals.items():
        example = translations[key]
        if len(example.languages) < 2:
            raise UserError("--code_switch is for tasks with two texts, such as xnli and xquad; leave the flag out")
        if example.left_out or original.left_out:
            continue
        if isinstance(example.gold, str) and example.gold != original.gold:
            raise UserError(
                f"{translated.path} is no translation of {source.path}: line {key} is labelled {example.gold} instead "
                f"of {original.gold}; fix it"
            )
        switched += [join_halves(example, original), join_halves(original, example)]
    return switched


def join_halves(first: LabelledExample, second: LabelledExample) -> LabelledExample:
    """Return the example with the first text of `first`, and the rest of `second`."""
    languages = (first.languages[0], second.languages[1])
    return replace(second, languages=languages, texts=(first.texts[0], second.texts[1]))


def mean_and_deviation(name: str, values: list[float]) -> dict[str, float]:
    """Return {name: mean} and, if there are several values, {name_std: their sample standard deviation}."""
    scores: dict[str, float] = {name: bootstrap.mean(values)}
    if len(values) > 1:
        scores[f"{name}_std"] = statistics.stdev(map(float, values))
    return scores


@dataclass
class TransferTable:
    """The scores of all runs so far."""

    task: AnyTask
    tests: Files
    rows: dict[str, dict[str, float]] = field(default_factory=dict)
    """{`LANGUAGE SETTING`: {metric: mean over seeds}}."""
    seeds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """{`LANGUAGE SETTING`: {metric: score of each seed}}."""
    summary: dict[str, dict[str, float]] = field(default_factory=dict)
    """{language: {key: score by the main metric}}. The keys are the settings' short names, `delta` (supervised minus
    zero-shot) and `majority`; with several seeds also KEY_std."""

    def add_scores(self, training: TrainingText, predictions: dict[str, list[list[Any]]]) -> None:
        """Score the models that were trained on one text. predictions: {language of a test: the predictions of each
        seed}."""
        for language, predictions_of_seeds in predictions.items():
            setting = training.settings[language]
            metric = self.add_row(f"{language} {setting}", language, predictions_of_seeds)
            summary = self.summary.setdefault(language, {})
            summary |= mean_and_deviation(SHORT_NAMES[setting], self.seeds[f"{language} {setting}"][metric])
            summary |= self.delta_scores(language, metric)
            if self.task.list_labels(training.file.examples) and MAJORITY not in summary:
                majority = self.score_majority(training, language)
                self.rows[f"{language} {MAJORITY}"] = majority
                summary[MAJORITY] = majority[metric]

    def below_majority_warnings(self) -> list[str]:
        """Return a line for each score below that of always predicting the most frequent label."""
        lines = []
        for language, scores in self.summary.items():
            for setting, name in SHORT_NAMES.items():
                if name in scores and scores[name] < scores.get(MAJORITY, 0.0):
                    lines.append(
                        f"warning: {language} {setting}: {scores[name]:.3f} is below {scores[MAJORITY]:.3f}, the score "
                        f"of always predicting the most frequent label; give more --epochs, a higher --lr or more text"
                    )
        return lines

    def add_row(self, row: str, language: str, predictions_of_seeds: list[list[Any]]) -> str:
        """Add a row of scores in a language. Return the name of the main metric, which is the task's first."""
        examples = self.tests[language].examples
        scores: dict[str, list[float]] = {}
        for predictions in predictions_of_seeds:
            for metric, value in self.task.score(examples, predictions, language).items():
                scores.setdefault(metric, []).append(value)
        self.seeds[row] = scores
        self.rows[row] = {"examples": len(examples)}
        for metric, values in scores.items():
            self.rows[row] |= mean_and_deviation(metric, values)
        return next(iter(scores))

    def delta_scores(self, language: str, metric: str) -> dict[str, float]:
        """Return the mean and the deviation over seeds of supervised - zero-shot; {} while one of them is unknown."""
        supervised = self.seeds.get(f"{language} {SUPERVISED}")
        zero_shot = self.seeds.get(f"{language} {ZERO_SHOT}")
        if not supervised or not zero_shot:
            return {}
        differences: list[float] = []
        for both in zip(supervised[metric], zero_shot[metric], strict=True):
            differences.append(bootstrap.weighted_sum(both, (1, -1)))
        return mean_and_deviation("delta", differences)

    def score_majority(self, training: TrainingText, language: str) -> dict[str, float]:
        """Return the scores of always predicting the training text's most frequent label."""
        ((label, _),) = count_labels(training.file.examples).most_common(1)
        predictions: list[Any] = []
        for example in self.tests[language].examples:
            predictions.append(label if isinstance(example.gold, str) else [label] * len(example.gold))
        return self.task.score(self.tests[language].examples, predictions, language)
