"""Makes the report page: one HTML file that needs no other file."""

from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from xscale.metric_keys import MetricKey, direction
from xscale.report import tables
from xscale.report.charts import Chart, Curves, draw_chart, draw_charts, metric_curves
from xscale.report.read import Results, Run, ScoreName
from xscale.report.tables import Table


@dataclass
class Section:
    title: str
    note: str = ""
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def render_page(runs: dict[str, Run], models: dict[str, Results]) -> str:
    """Return the page's HTML. runs: {name: run}; models: {name: results}."""
    sections = []
    if runs:
        sections = [summary_section(runs), losses_section(runs), languages_section(runs), scores_section(runs)]
    if models:
        note = tables.PAIRED if len(models) > 1 else ""
        sections.append(Section("Results", note, tables=tables.comparison_tables(models)))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = tables.format_cell
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    page = template.render(title=", ".join([*runs, *models]), sections=sections)
    return page.encode("utf-8", "replace").decode()  # names of files may have lone surrogates


def summary_section(runs: dict[str, Run]) -> Section:
    section = Section("Summary", tables=[tables.run_table(runs), tables.summary_table(runs)])
    if not metric_keys(runs):
        section.note = "No step has been written yet."
    return section


def losses_section(runs: dict[str, Run]) -> Section:
    """Return the curves of the training loss, and of the loss of each stream and of each of its terms."""
    section = Section("Losses")
    if "loss" in metric_keys(runs):
        section.charts.append(draw_chart("Training loss, nats", metric_curves(runs, {"": "loss"})[""]))
    terms_of_stream: dict[str, dict[str, str]] = {}
    for metric, key in metric_keys(runs).items():
        if key.name == "loss" and key.stream and not key.language:
            terms_of_stream.setdefault(key.stream, {})[key.term or "sum"] = metric
    for stream, metric_of_term in terms_of_stream.items():
        section.charts += draw_charts(f"Loss of {stream}, nats", metric_curves(runs, metric_of_term))
    return section


def languages_section(runs: dict[str, Run]) -> Section:
    """Return the curves and the last means of each stream's loss by language or pair of languages."""
    languages_of_stream: dict[str, dict[str, str]] = {}
    for metric, key in metric_keys(runs).items():
        if key.name == "loss" and key.language:
            languages_of_stream.setdefault(f"{key.stream} {key.term}".strip(), {})[key.language] = metric
    section = Section("Languages")
    table = Table("Means of the last tenth of steps", ["loss, nats", "language", *runs])
    for stream, metric_of_language in languages_of_stream.items():
        section.charts += draw_charts(f"Loss of {stream}, nats", metric_curves(runs, metric_of_language))
        for language, metric in metric_of_language.items():
            table.rows.append([stream, language, *tables.last_tenth_cells(runs, metric)])
    section.tables.append(table)
    return section


def scores_section(runs: dict[str, Run]) -> Section:
    """Return the scores of the runs' evaluations, and the alignment scores of their logs."""
    section = Section("Scores", tables=tables.last_evaluation_tables(runs))
    alignment: dict[str, str] = {}
    for metric, key in metric_keys(runs).items():
        if key.name == "alignment":
            alignment[key.stream] = metric
    title = "Share of dictionary words whose nearest neighbour is a translation"
    section.charts += draw_charts(title, metric_curves(runs, alignment), worst=-1)
    curves_of_metric: dict[ScoreName, Curves] = {}
    for run_name, run in runs.items():
        for name, curve in run.scores.items():
            if direction(name.metric):
                rows = curves_of_metric.setdefault(name._replace(row=""), {})
                rows.setdefault(name.row, {})[run_name] = curve
    for name, rows in curves_of_metric.items():
        section.charts += draw_charts(f"{name.task}: {name.metric}", rows, worst=-direction(name.metric))
    return section


def metric_keys(runs: dict[str, Run]) -> dict[str, MetricKey]:
    """Return {name of a metric: its parts} for the metrics that any run has."""
    keys: dict[str, MetricKey] = {}
    for run in runs.values():
        keys |= {metric: MetricKey.parse(metric) for metric in run.metrics}
    return keys
