"""Makes the report page: one HTML file that needs no other file."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import jinja2

from xscale.eval.bootstrap import Score, p_value, weighted_sum
from xscale.metric_keys import MetricKey, better_direction
from xscale.report.charts import Lines, draw_chart_as_data_url
from xscale.report.read import CHECKSUM, Results, Run, ScoreName

Cell = str | float | None
SUMS = {"tokens": "tokens in the logged steps", "step_s": "seconds in the logged steps", "skipped": "skipped steps"}
"""{metric: name of the summary's row with its sum over the logged steps, of which a fork has only its own}."""
PAIRED = (
    "The 95 % confidence interval of a score stands in brackets after the score. A column `− first` has the score of a "
    "model minus the score of the first model, with the confidence interval and the p value of a paired bootstrap "
    "(which draws the same sentences for all models). `not in file` means that the model was evaluated with another "
    "--task, --data, --pooling or --layer than the other models, or has no such layer. `no interval` means that the "
    "score, such as `alignment`, is not a mean over sentences. A dash means that one of the two models has no such "
    "score, or that the metric does not measure quality (for example, a number of sentences). `other text` means that "
    "the two models were tested on different sentences."
)


@dataclass
class Table:
    title: str
    head: list[str]
    rows: list[list[Cell]] = field(default_factory=list)


@dataclass
class Section:
    title: str
    note: str = ""
    charts: dict[str, Lines] = field(default_factory=lambda: defaultdict(dict))
    """{title: lines}. The title has the name of a metric."""
    tables: list[Table] = field(default_factory=list)


def render_page(runs: dict[str, Run], models: dict[str, Results]) -> str:
    """Return the page's HTML. runs: {name: run}; models: {name: results}."""
    sections = sections_of_runs(runs) if runs else []
    if models:
        sections.append(Section("Scores of the result files"))
        if len(models) > 1:
            sections[-1].note = PAIRED
        add_score_tables(sections[-1], models, "not in file")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"cell": cell_text, "picture": draw_chart_as_data_url}
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    page = template.render(title=", ".join([*runs, *models]), sections=sections)
    return page.encode("utf-8", "replace").decode()  # names of files may have lone surrogates


def cell_text(cell: Cell) -> str:
    """Return the text of a cell; a number has four digits, an empty cell a dash."""
    if cell is None or isinstance(cell, str):
        return cell or "–"
    if abs(cell) >= 1000 or float(cell).is_integer():
        return f"{cell:,.0f}"
    return f"{cell:.4g}"


# Runs


def sections_of_runs(runs: dict[str, Run]) -> list[Section]:
    """Return the sections of the page about runs. A line of a chart is a stream's term, a language or a row of scores;
    with several runs, each run has its own lines. A line without a number is left out."""
    summary = Section("Summary of the runs")
    losses = Section("Training losses")
    language_losses = Section("Training losses by language")
    evaluations = Section("Scores of the evaluations in the runs")
    summaries: list[list[Cell]] = [
        ["streams", "model.init or model.preset", "state", "reason for the state", "logged steps", *SUMS.values()]
    ]
    last_scores: dict[str, Results] = {}
    for run_name, run in runs.items():
        summaries.append(summary_cells(run))
        last_scores[run_name] = run.last
        suffix = f", {run_name}" if len(runs) > 1 else ""
        for metric, curve in run.metrics.items():
            key = MetricKey.parse(metric)
            if curve.isna().all():
                continue
            if key.name == "alignment":
                title = "Share of dictionary words whose nearest neighbour among the embeddings is a translation"
                evaluations.charts[title][key.stream + suffix] = curve
            elif key.name == "loss":
                section = language_losses if key.language else losses
                label = f"{key.term} {key.language}".strip() or "sum"
                stream = f"the stream {key.stream}" if key.stream else "all streams"
                section.charts[f"Loss of {stream}, in nats"][label + suffix] = curve
        for name, curve in run.scores.items():
            if better_direction(name.metric) and curve.notna().any():
                evaluations.charts[f"{name.task}: {name.metric}"][name.row + suffix] = curve
    summary.tables = [Table("", ["", *runs], list(map(list, zip(*summaries, strict=True))))]
    add_score_tables(evaluations, last_scores, None)
    return [summary, losses, language_losses, evaluations]


def summary_cells(run: Run) -> list[Cell]:
    """Return what the run trains, its state and its sizes, in the order of the summary's rows."""
    model = run.recipe.get("model", {})
    cells: list[Cell] = [
        ", ".join(run.recipe.get("streams", {})),
        model.get("init") or model.get("preset"),
        run.status.get("status", "no status.json"),
        run.status.get("why"),
        float(max(map(len, run.metrics.values()), default=0)),
    ]
    for metric in SUMS:
        cells.append(float(run.metrics[metric].sum()) if metric in run.metrics else None)
    return cells


# Scores side by side


def add_score_tables(section: Section, models: dict[str, Results], absent: Cell) -> None:
    """Add a table for each task to the section. It has a row for each results row and metric, with the scores of all
    models, and the differences of the others from the first. absent: the cell of a model without the score."""
    first, *others = models.values()
    head = ["results row", "metric", *models]
    for other_name in list(models)[1:]:
        head.append(f"{other_name} − first")
    tables: dict[str, Table] = {}
    for name in dict.fromkeys(chain.from_iterable(models.values())):
        if name.metric == CHECKSUM:
            continue
        row: list[Cell] = [name.row, name.metric]
        for scores in models.values():
            row.append(format_score_and_interval(scores[name]) if name in scores else absent)
        row += [other_minus_first_cell(name, first, other) for other in others]
        tables.setdefault(name.task, Table(name.task, head)).rows.append(row)
    section.tables.extend(tables.values())


def format_score_and_interval(score: float | Score) -> Cell:
    """Return a cell such as `0.94 [0.92, 0.96]`."""
    text = cell_text(score)
    if isinstance(score, Score):
        text += " [{:.4g}, {:.4g}]".format(*score.interval)
    return text


def other_minus_first_cell(name: ScoreName, first_scores: Results, other_scores: Results) -> Cell:
    """Return the difference of another model's score from the first model's. It is None if one of the two lacks the
    score, or if the metric has no better direction, and `other text` if the two models had different tests."""
    first = first_scores.get(name)
    other = other_scores.get(name)
    if first is None or other is None or not better_direction(name.metric):
        return None
    for metric in (CHECKSUM, "sentences", "examples"):
        first_test = first_scores.get(name._replace(metric=metric))
        other_test = other_scores.get(name._replace(metric=metric))
        if first_test is not None and other_test is not None and first_test != other_test:
            return "other text"
    difference = weighted_sum([other, first], [1, -1])
    if not isinstance(first, Score) or not isinstance(other, Score):
        return f"{difference:+.4g}, no interval"
    low, high = difference.interval
    return f"{difference:+.4g} [{low:+.4g}, {high:+.4g}], p {p_value(difference):.2g}"
