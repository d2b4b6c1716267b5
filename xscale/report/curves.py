"""Makes the charts of a report page from metrics and scores: sections, titles, and the curves that share a chart."""

import math
import re
from typing import NamedTuple

import pandas as pd

from xscale.metric_keys import ALL, MetricKey, direction
from xscale.report.read import EvalKey, Run, Scores

LOSSES, LANGUAGES, OTHER = "Losses", "Languages", "Other metrics"
SECTIONS = {
    LOSSES: {"loss": "Loss, nats"},
    LANGUAGES: {},
    "Alignment score": dict.fromkeys(
        ("alignment", "alignment_trained"), "Words whose nearest neighbour is a translation, share"
    ),
    "Predictions": {
        "accuracy": "Right predictions, share",
        "bilingual_accuracy": "Right predictions from linked tokens, share",
        "contrastive_accuracy": "Translations found among all keys, share",
        "contrastive_accuracy_step": "Translations found among the step's keys, share",
        "dictionary_cosine": "Cosine of dictionary entries",
        "dictionary_share": "Selected tokens replaced by a translation, share",
        "bilingual_coverage": "Targets with linked tokens, share",
    },
    "Queue of keys": {
        "queue_age": "Mean age of the queue's keys, steps",
        "own_keys": "Keys in the queue from the query's own sentence, per query",
        "sentence_cosine": "Mean cosine of different sentences",
    },
    "Optimizer": {
        "lr": "Learning rate",
        "grad_norm": "Gradient norm",
        "loss_scale": "Loss scale",
        "skipped": "Skipped steps so far",
    },
    "Throughput": {
        "tokens_per_s": "Tokens per second",
        "samples_per_s": "Samples per second",
        "step_s": "Duration of a step, s",
        "data_wait_s": "Waiting for data in a step, s",
        "mfu": "Share of the GPU's peak FLOPs",
        "mem_gb": "Peak memory, GB",
        "slowest_ratio": "Slowest rank's time over the median rank's",
        "slowest_rank": "Slowest rank, number",
        "save_blocked_s": "Training waits for a save, s",
        "save_write_s": "Writing a save, s",
    },
    "Data": {
        "count": "Predictions in a step",
        "tokens": "Tokens in a step",
        "samples": "Samples in a step",
        "too_long": "Pairs that are too long, share",
        "bilingual_links": "Links of a linked target, mean",
    },
    OTHER: {},
}
"""{section: {metric: title of its chart}}, in the order of the page. Other metrics are in the last section."""
HAVE_DIRECTION = (LOSSES, LANGUAGES, "Alignment score", "Predictions")
"""The sections whose charts say whether higher or lower values are better."""
EVALUATIONS = {
    "heldout loss": "Held-out loss, nats",
    "heldout accuracy": "Right predictions on held-out text, share",
    "retrieval accuracy": "Translations found by retrieval, share",
    "retrieval →": "Translations found by retrieval from the first language to the second, share",
    "retrieval ←": "Translations found by retrieval from the second language to the first, share",
    "alignment →": "Words aligned from the first language to the second, share",
    "alignment ←": "Words aligned from the second language to the first, share",
    "aer aer": "Alignment error rate, share",
}
"""{task and metric of an evaluation: title of its chart}. Other charts have the title `TASK: METRIC`."""
RARE = ("skipped", "too_long")
"""Metrics whose charts are left out if they are 0 at all steps."""
LOGARITHMIC = ("grad_norm", "loss_scale")
BY_LAYER = ("accuracy", "aer", "AER", "f1", "F1", "P@1")
"""The metrics of which charts by layer are made."""
NO_CURVE = pd.Series(dtype=float)
"""The curve of a run that lacks a metric."""


class Chart(NamedTuple):
    title: str
    lines: dict[str, list[pd.Series]]
    """{label, such as a language: a curve for each of `names`, or NO_CURVE}."""
    names: list[str]
    """The labels of the runs, or of the models."""
    better: int = 0
    """1 if higher numbers are better, -1 if lower ones are, 0 if neither."""
    x: str = "step"
    logarithmic: bool = False

    @property
    def heading(self) -> str:
        return self.title + {0: "", 1: " (higher is better)", -1: " (lower is better)"}[self.better]

    @property
    def curves(self) -> list[pd.Series]:
        """Return the curves of the only label. Raises ValueError if there are several labels."""
        (curves,) = self.lines.values()
        return curves


def metric_sections(runs: list[Run]) -> dict[str, list[Chart]]:
    """Return the charts of metrics.jsonl by section, in the order of the page."""
    sections: dict[str, dict[str, Chart]] = {title: {} for title in SECTIONS}
    for text in dict.fromkeys(name for run in runs for name in run.metrics):
        key, curves = MetricKey.parse(text), [run.metrics.get(text, NO_CURVE) for run in runs]
        rare = key.name in RARE and not any((curve > 0).any() for curve in curves)
        if rare or text == "loss" or is_empty(curves):  # the summary has the loss
            continue
        if key.name == "skipped":
            curves = [curve.cumsum() for curve in curves]
        section, title, label = section_title_and_label(key)
        better = direction(key.name) if section in HAVE_DIRECTION else 0
        new = Chart(title, {}, [run.label for run in runs], better, "step", key.name in LOGARITHMIC)
        sections[section].setdefault(title, new).lines[label] = curves
    return {section: list(charts.values()) for section, charts in sections.items() if charts}


def section_of(key: MetricKey) -> str:
    """Return the page's section for a metric: a title in SECTIONS."""
    return LANGUAGES if key.language else next((title for title in SECTIONS if key.name in SECTIONS[title]), OTHER)


def section_title_and_label(key: MetricKey) -> tuple[str, str, str]:
    """Return a metric's section, the title of its chart, and its label in the chart."""
    words, _, unit = (SECTIONS[section_of(key._replace(language=""))].get(key.name) or key.name).partition(", ")
    stream, unit = f"{key.stream}.{key.term}" if key.term else key.stream, f", {unit}" if unit else ""
    if key.language:
        section = LANGUAGES if direction(key.name) else section_of(key._replace(language=""))
        return section, f"{words} of {stream} by language{unit}", key.language
    if key.name == "loss" and key.stream:
        return LOSSES, f"{words} of {key.stream}{unit}", key.term or "sum"
    if key.name == "alignment_trained":
        stream += " trained"
    return section_of(key), f"{words}{unit}", stream or "all"


def eval_charts(runs: list[Run]) -> list[Chart]:
    """Return a chart for each metric of each task, with a line for each results row; no counts, and no rows of
    means."""
    groups: dict[str, Chart] = {}
    for task, row, name in dict.fromkeys(key for run in runs for key in run.evals if not is_row_of_means(key[1])):
        stream, _, language = row.partition(" ") if task == "heldout" else ("", "", "")
        title = eval_title(task, shared_name(row, name), f" of {stream} by language" if language else "")
        new = Chart(title, {}, [run.label for run in runs], direction(name))
        groups.setdefault(title, new).lines[language or row] = curves_of_runs(runs, (task, row, name))
    return [
        chart
        for chart in groups.values()
        if not is_constant_count([c for curves in chart.lines.values() for c in curves])
    ]


def eval_title(task: str, metric: str, subject: str = "") -> str:
    """Return the title of a chart of an evaluation, such as `Held-out loss of mlm, nats` for the subject ` of mlm`."""
    words, comma, unit = EVALUATIONS.get(f"{task} {metric}", f"{task}: {metric}").partition(", ")
    return f"{words}{subject}{comma}{unit}"


def is_row_of_means(row: str) -> bool:
    """Return True if a results row has means over languages or pairs: `all` or `STREAM all`."""
    return row.split(" ")[-1] == ALL


def shared_name(row: str, name: str) -> str:
    """Return a metric's name without the row's languages: in row `en-de`, `en->de` becomes → and `de->en` becomes ←."""
    pair, *rest = name.split(" ", 1)
    first, arrow, second = pair.partition("->")
    arrows = {f"{first}-{second}": "→", f"{second}-{first}": "←"} if arrow else {}
    return " ".join([arrows.get(row.split(" ")[0], pair), *rest])


def curves_of_runs(runs: list[Run], key: EvalKey) -> list[pd.Series]:
    return [run.evals.get(key, NO_CURVE) for run in runs]


def is_empty(curves: list[pd.Series]) -> bool:
    return not any(curve.notna().any() for curve in curves)


def is_constant_count(curves: list[pd.Series]) -> bool:
    """Return True if every curve is one whole number above 1 at all steps, such as a number of sentences."""
    known = [curve.dropna().unique() for curve in curves]
    return all(len(values) == 1 and values[0] == round(values[0]) and values[0] > 1 for values in known if len(values))


def layer_charts(scores: list[Scores]) -> list[Chart]:
    """Return a chart over the layers N for each task and metric that has results rows `NAME layer N`."""
    names = [model.label for model in scores]
    charts: dict[str, Chart] = {}
    for index, model in enumerate(scores):
        for task, rows in model.results.items():
            for row, numbers in rows.items():
                layer = re.fullmatch(r"(.*?) ?layer (\d+) ?(.*)", row)
                for name in BY_LAYER:
                    if layer and name in numbers:
                        title, label = f"{task}: {name} by layer", f"{layer[1]} {layer[3]}".strip()
                        lines = charts.setdefault(title, Chart(title, {}, names, x="layer")).lines
                        curves = lines.setdefault(label, [pd.Series(dtype=float) for _ in scores])
                        curves[index][int(layer[2])] = numbers[name]
    for lines in (chart.lines for chart in charts.values()):
        lines.update({label: [curve.sort_index() for curve in curves] for label, curves in lines.items()})
    return list(charts.values())


def last_tenth(curve: pd.Series) -> pd.Series:
    return curve.iloc[-math.ceil(len(curve) / 10) :]


def late_mean(curve: pd.Series) -> float:
    """Return the mean of the last tenth of a curve, without missing values."""
    return float(last_tenth(curve.dropna()).mean())


def interval_bounds(curve: pd.Series) -> list[pd.Series]:
    """Return the curves of the low and the high bounds of a curve's intervals; NaN at steps without an interval."""
    none = math.nan, math.nan
    return [pd.Series([curve.attrs.get(step, none)[i] for step in curve.index], curve.index, float) for i in (0, 1)]


def downsample(curve: pd.Series, ranges: int) -> pd.DataFrame:
    """Return the mean, min and max of a curve in each of equal ranges of its steps, indexed by the range's mean step. A
    curve of at most `ranges` steps keeps its steps. Missing values are ignored."""
    if len(curve) <= ranges:
        return pd.DataFrame({"mean": curve, "min": curve, "max": curve})
    steps = curve.index - curve.index[0]
    groups = pd.DataFrame({"step": curve.index, "value": curve.to_numpy()}).groupby(steps * ranges // (steps[-1] + 1))
    return groups["value"].agg(["mean", "min", "max"]).set_index(pd.Index(groups["step"].mean()))
