"""Plans the fine-tuning runs that measure transfer between languages, and tabulates their scores.

A model that was trained in the source language is tested in all languages. In all but its own language, this test is
zero-shot. A model that was trained in another language is tested in that language. This test is supervised if the text
is original, and translate-train if the text was translated.

    delta = supervised - zero-shot        of each seed (Tang et al. 2022); smaller is better

Two names of one language, such as de and deu_Latn, are one language; zh-Hans and zh-Hant are two.
"""

import statistics
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain, combinations

from xscale.data.scripts import may_name_same_language, normalised_code_and_tags
from xscale.errors import UserError
from xscale.eval import bootstrap
from xscale.eval.finetune.examples import LabelledExample, print_on_rank_0
from xscale.eval.finetune.tasks import AnyTask
from xscale.eval.model import Scores

ZERO_SHOT = "zero-shot"
SUPERVISED = "supervised"
TRANSLATE_TRAIN = "translate-train"
MAJORITY = "majority"
SHORT_NAMES = {ZERO_SHOT: "zs", SUPERVISED: "sup", TRANSLATE_TRAIN: "tt", MAJORITY: "majority"}
"""{setting: its name in a language's summary}."""

Texts = dict[str, list[LabelledExample]]
"""{language as the user writes it: the examples of its file}."""
SeedScores = dict[str, list[float]]
"""{metric: its value for each seed}."""


@dataclass(frozen=True)
class TrainingText:
    """A text to train on, and the tests of the models that are trained on it."""

    examples: list[LabelledExample]
    settings: dict[str, str]
    """{language of a test: its setting, such as "zero-shot"}."""
    labels: list[str]
    """The outputs of a model that is trained on this text."""
    is_switched: bool
    """True if examples 2n and 2n + 1 are the code-switched variants of one example, which must be in one batch."""


def plan_training(
    task: AnyTask, train: Texts, translated: Texts, tests: Texts, code_switch: bool
) -> list[TrainingText]:
    """Return all training texts with the settings of their tests. The first language of `train` is the source language.
    code_switch: replace translated examples by code-switched ones. Raises UserError if a text has no test, if two texts
    with one setting or two tests are in one language, if a question is in a test twice, or if a test has a label that
    the text lacks."""
    check_languages_and_places_differ(tests)
    plan: list[TrainingText] = []
    source = next(iter(train), "")
    for setting, texts in ((SUPERVISED, train), (TRANSLATE_TRAIN, translated)):
        if any(may_name_same_language(first, second) for first, second in combinations(texts, 2)):
            raise UserError(
                f"the training files for {setting} scores have the languages {', '.join(texts)}, but two of these "
                "names mean the same language. Remove one of the two files of this language from the command"
            )
        for language, examples in texts.items():
            path = examples[0].path
            settings = {test: setting for test in tests if may_name_same_language(test, language)}
            if setting == SUPERVISED and language == source:
                settings = dict.fromkeys(tests, ZERO_SHOT) | settings
            if not settings:
                raise UserError(
                    f"{path} is training text in {language}, but no test file is in this language. Write --test "
                    f"{language}=FILE, or remove {path} from the command"
                )
            labels = task.output_labels(examples)
            if len(labels) == 1:
                raise UserError(
                    f"{path}: all {len(examples):,} examples have the label {labels[0]!r}, but training needs two "
                    "labels or more. Use a file with several labels, or a larger --limit"
                )
            for example in chain(*map(tests.__getitem__, settings)):
                absent = set(example.labels).difference(labels)
                if absent:
                    raise UserError(
                        f"{example.path}: {example.place} has the label {min(absent)!r}, but the training file {path} "
                        f"has only the labels {', '.join(labels)}. Use the same labels in both files"
                    )
            is_switched = code_switch and setting == TRANSLATE_TRAIN
            if is_switched:
                examples = make_code_switched_examples(train[source], examples)
            plan.append(TrainingText(examples, settings, labels, is_switched))
    return plan


def check_languages_and_places_differ(tests: Texts) -> None:
    """Raise UserError if two tests are in one language, or if two questions of a test have the same id."""
    for first, second in combinations(tests, 2):
        if normalised_code_and_tags(first) == normalised_code_and_tags(second):
            raise UserError(
                f"--test: {first} and {second} are names of the same language. Remove one of the two files from the "
                "command"
            )
    for examples in tests.values():
        check_places_differ(examples)


def check_places_differ(examples: list[LabelledExample]) -> None:
    """Raise UserError if two questions of a file have the same id."""
    for place, times in Counter(example.place for example in examples).items():
        if times > 1:
            raise UserError(f"{examples[0].path}: {place} occurs {times} times. Write a different id for each question")


def make_code_switched_examples(
    source: list[LabelledExample], translated: list[LabelledExample]
) -> list[LabelledExample]:
    """Return two code-switched examples for each example that has a translation (Pan et al. 2021, 2.3): a pair (a, b)
    and its translation (a', b') become (a', b) and (a, b'). A question gets the answers in its new context. Raises
    UserError."""
    translations = {example.place: example for example in translated}
    check_places_differ(translated)
    switched: list[LabelledExample] = []
    for original in source:
        translation = translations.get(original.place)
        if translation is None:  # one of them is left out
            continue
        if translation.labels != original.labels:
            raise UserError(
                f"{translation.path}: {translation.place} has the label {translation.labels[0]}, but the original in "
                f"{original.path} has the label {original.labels[0]}, so the two texts cannot be translations. "
                "Correct the label in one of the two files"
            )
        for first, second in ((translation, original), (original, translation)):
            languages = (first.languages[0], second.languages[1])
            switched.append(replace(second, languages=languages, texts=(first.texts[0], second.texts[1])))
    if not switched:
        raise UserError(
            f"--code_switch: no example of {source[0].path} has a translation in {translated[0].path}. Line n of the "
            "file of --translated must be the translation of line n of the file of --train. In the tasks xquad and "
            "mlqa, a translated question must have the id of the original question"
        )
    print_on_rank_0(
        f"{translated[0].path} has translations of {len(switched) // 2:,} of the {len(source):,} examples in "
        f"{source[0].path}"
    )
    return switched


def predict_majority(training: list[LabelledExample], test: list[LabelledExample]) -> list[list[str]]:
    """Return, for each example of a test, the most frequent label of the training text."""
    label = statistics.mode(chain.from_iterable(example.labels for example in training))
    return [[label] * len(example.labels) for example in test]


def mean_and_std_over_seeds(scores: SeedScores) -> Scores:
    """Return {metric: mean} and, of several seeds, {metric_std: sample standard deviation}."""
    averaged: Scores = {}
    for metric, values in scores.items():
        averaged[metric] = bootstrap.mean(values)
        if len(values) > 1:
            averaged[f"{metric}_std"] = statistics.stdev(map(float, values))
    return averaged


def summarize_by_language(scores: dict[str, SeedScores], tests: Texts) -> dict[str, Scores]:
    """Return {`LANGUAGE SETTING`: averaged scores} and {LANGUAGE: summary}. The summary has the main metric of each
    setting by its short name and, as `delta`, supervised minus zero-shot. scores: {`LANGUAGE SETTING`: scores}, the
    main metric first."""
    rows: dict[str, Scores] = {}
    summary: dict[str, SeedScores] = {}
    for row, metrics in scores.items():
        language, setting = row.rsplit(" ", 1)
        rows[row] = mean_and_std_over_seeds(metrics) | {"examples": len(tests[language])}
        summary.setdefault(language, {})[SHORT_NAMES[setting]] = next(iter(metrics.values()))
    for language, values in summary.items():
        if "sup" in values and "zs" in values:
            seeds = zip(values["sup"], values["zs"], strict=True)
            values["delta"] = [bootstrap.weighted_sum(seed, (1, -1)) for seed in seeds]
        rows[language] = mean_and_std_over_seeds(values)
    return rows


def below_majority_warnings(results: dict[str, Scores]) -> list[str]:
    """Return a line for each score below that of always predicting the most frequent label. results: those of
    summarize_by_language."""
    lines = []
    for language, scores in results.items():
        for setting, name in SHORT_NAMES.items():
            if scores.get(name, 1.0) < scores.get(MAJORITY, 0.0):
                lines.append(
                    f"warning: {language} {setting}: the score {scores[name]:.3f} is below {scores[MAJORITY]:.3f}, "
                    "the score of predicting the most frequent label for every example. Use more --epochs, a "
                    "higher --lr or more training text"
                )
    return lines
