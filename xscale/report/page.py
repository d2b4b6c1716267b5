"""Makes the report page: one self-contained HTML file for light and dark mode, and for wide and narrow screens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jinja2

from xscale.report import curves, models, tables, transfer
from xscale.report.curves import Chart
from xscale.report.draw import GLYPHS, Pictures
from xscale.report.findings import findings
from xscale.report.read import Run, Scores
from xscale.report.tables import Table

SPEARMAN = (
    "After Tang et al. 2022, figure 3: each point is a model in a language, numbered as in the table below. "
    "Δ = SUP − ZS, so Δ is low for good transfer, and ρ is negative if better aligned models transfer better."
)
TSNE = (
    "After Yang et al. 2021, figure 2: t-SNE of the input embeddings of the words most often linked (circles) and of "
    "their translations (triangles). t-SNE keeps neighbourhoods, not distances; the numbers are of the embeddings."
)
COMPARED = (
    "✓ marks the best run and the runs like it: their means over the last tenth differ by at most the sum of both "
    "standard deviations (±), or their 95 % intervals [from, to] overlap. Losses are not compared between runs with "
    "different streams. Noise means that of the steps and of the test's sentences, not that of the seed."
)
THINNED = (
    "In a run of many steps, a point of a line is the mean of a range of steps, and the band around the line goes "
    "from the lowest to the highest number there. For scores, the band and the bar at the end are the 95 % interval. "
    "Each axis spans at least 5 % of its numbers, so that noise does not look like a trend."
)
MOST_ROWS = 40
"""The most rows, of all tables of scores together, that are open at first on a page without runs."""


class Picture(NamedTuple):
    title: str
    svg: str
    note: str = ""
    table: Table | None = None


@dataclass
class Section:
    title: str
    note: str = ""
    folded: bool = False
    findings: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    examples: list[tuple[str, list[tuple[str, bool]], Table]] = field(default_factory=list)
    """Sentence pairs: title, (token, whether it is masked) for all tokens, and a table of guesses."""

    @property
    def has_content(self) -> bool:
        return bool(self.pictures or self.examples or any(table.rows for table in self.tables))


def render_page(
    runs: list[Run],
    scores: list[Scores],
    pictures: Pictures,
    model_sections: Sequence[Section] = (),
    refresh: int | None = None,
) -> str:
    """Return the page's HTML. refresh: the seconds after which a browser reloads the page; None: never."""
    given = [*(run.name for run in runs), *(model.name for model in scores)]
    names = list(dict.fromkeys(given)) or [text for section in model_sections for text, *_ in section.examples]
    title = " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"
    sections = [*(sections_of_all_runs(runs, pictures) if runs else []), *score_sections(runs, scores, pictures)]
    sections = [*sorted(sections, key=lambda section: section.folded), *model_sections]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": tables.format_cell, "numeric": tables.is_numeric}
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title, sections=[section for section in sections if section.has_content], refresh=refresh
    )


def sections_of_all_runs(runs: list[Run], pictures: Pictures) -> list[Section]:
    """Return the page's sections about runs. Only those of summary, losses and languages are open at first."""
    charts = {curves.LOSSES: [], curves.LANGUAGES: [], "Evaluations": curves.eval_charts(runs)}
    charts |= curves.metric_sections(runs)
    sections = [summary_section(runs, pictures)]
    for title, of_section in charts.items():
        folded, note = title not in (curves.LOSSES, curves.LANGUAGES), THINNED if title == curves.LOSSES else ""
        sections.append(Section(title, note, folded, pictures=draw_charts(of_section, pictures)))
    listed = (tables.last_and_best_table(runs), tables.differing_fields(runs), tables.failed_evals_table(runs))
    return [*sections, *(Section(table.title, folded=True, tables=[table]) for table in listed)]


def summary_section(runs: list[Run], pictures: Pictures) -> Section:
    """Return the section that says what was trained and how far, with charts of the main metrics."""
    headlines = tables.headline_charts(runs)
    note = "No step has been written yet." if not headlines else COMPARED if len(runs) > 1 else ""
    listed = [tables.run_table(runs), *([tables.headline_table(headlines)] if headlines else [])]
    shown, sentences = draw_charts(headlines, pictures), findings(runs, headlines)
    return Section("Summary", note, findings=sentences, pictures=shown, tables=listed)


def score_sections(runs: list[Run], scores: list[Scores], pictures: Pictures) -> list[Section]:
    transfers = transfer.transfer_scores(scores)
    note = "Scores in percent, fine-tuned in the language (SUP) or in another (ZS); Δ = SUP − ZS; ± over seeds."
    points, subset = transfer.with_alignment(transfers, scores, runs)
    plots = [scatter_picture(task, of_task, subset, pictures) for task, of_task in points.items()]
    layers = draw_charts(curves.layer_charts(scores), pictures)
    failed = [failure for model in scores for failure in model.failed]
    listed = [*tables.score_tables(scores), Table(["model", "failed", "why"], failed, title="Failed")]
    long = bool(runs) or sum(len(table.rows) for table in listed) > MOST_ROWS
    return [
        Section("Transfer", note, tables=[transfer.transfer_table(transfers)]),
        Section("Alignment and transfer", SPEARMAN, pictures=plots),
        Section("By layer", "Layer 0 is the output of the embeddings.", pictures=layers),
        Section("Scores", folded=long, tables=listed),
    ]


def scatter_picture(task: str, of_task: list[transfer.TransferScores], subset: str, pictures: Pictures) -> Picture:
    """Return alignment against Δ of a task. subset: the words of the alignment scores, withheld or trained."""
    points, names = transfer.scatter_points(of_task), list(dict.fromkeys(t.model for t in of_task))
    styles = [names.index(t.model) for t in of_task]
    words = f"alignment of {subset} words, %"
    svg = pictures.scatter(points, styles, f"alignment and Δ, {task}", words, f"Δ of {task}, points")
    rows: list[list[tables.Cell]] = [
        [str(n), f"{GLYPHS[style % len(GLYPHS)]} {t.model}", t.language, *point]
        for n, (t, style, point) in enumerate(zip(of_task, styles, points, strict=True), 1)
    ]
    table = Table(["", "model", "language", "alignment", "Δ"], rows)
    return Picture(task, svg, transfer.correlation(points), table)


def model_sections(paths: list[Path], pairs: list[Path], pictures: Pictures) -> list[Section]:
    """Return sections with linked words of all models and predictions of the last model. Raises UserError."""
    loaded, sources = models.load_models_and_sources(paths, pairs)
    words, examples = Section("Linked words", TSNE), Section("Examples")
    for source in sources:
        word_pairs = models.frequent_word_pairs(source)
        for name, model in loaded.items():
            title = f"{name}, {source.name}"
            if len(word_pairs) >= models.FEWEST_WORDS:
                positions, cosine, nearest = models.project_words(model, word_pairs)
                near = f"{nearest} of {len(word_pairs)} words"
                note = f"Mean cosine of a pair: {cosine:.3f}. {near} are nearest to their partner."
                picture = pictures.word_pairs(positions, word_pairs, f"words of {title}")
                words.pictures.append(Picture(title, picture, note))
        for tokens, masked in models.predict_examples(model, source) if not model.headless else ():
            marked = {token.position for token in masked}
            text = [(token, i in marked) for i, token in enumerate(tokens)]
            examples.examples.append((title, text, guess_table(masked)))
    return [words, examples]


def guess_table(masked: list[models.MaskedToken]) -> Table:
    """Return a table of masked tokens and their guesses with probabilities, such as `✓ house 0.71, home 0.12`."""

    def listed(guesses: models.Guesses, token: str) -> str | None:
        return ", ".join(f"{'✓ ' * (guess == token)}{guess} {p:.2f}" for guess, p in guesses) or None

    rows = [
        [str(n), m.token, " ".join(m.linked) or None, listed(m.mono, m.token), listed(m.bi, m.token)]
        for n, m in enumerate(masked, 1)
    ]
    return Table(["", "masked", "linked with", "from its own state", "from its links"], rows)


def draw_charts(charts: list[Chart], pictures: Pictures) -> list[Picture]:
    return [Picture(title, svg) for svg, title in map(pictures.chart, charts)]
