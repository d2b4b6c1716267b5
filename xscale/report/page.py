"""This module makes the page, one self-contained HTML file for light and dark mode, and for wide and narrow screens."""

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
    "After Tang et al. 2022, figure 3: each point is a model and a language; numbers are those of the table below. "
    "Δ = SUP − ZS, so that good transfer is low, and ρ is negative where better aligned models transfer better."
)
TSNE = (
    "After Yang et al. 2021, figure 2: t-SNE of the input embeddings of the words most often linked, each with "
    "its translation (circle, triangle). t-SNE keeps neighbourhoods, not distances: the numbers are of the embeddings."
)
COMPARED = (
    "✓ marks the best run and each run that differs from it by less than both standard deviations (±) in the last "
    "tenth of the run, or whose 95 % interval [from, to] overlaps that of the best run. Runs of other streams have "
    "other losses, which are not compared. Noise is that of the run and of the test's sentences, not of the seed."
)
THINNED = (
    "In a run of many steps, a point of a line is the mean of a range of steps, and the band around a line goes from "
    "the least to the largest number there. The bar at the end of a line of scores, and the band around it, are the "
    "95 % interval of the score. Each axis spans at least 5 % of its numbers, so that noise "
    "does not look like a trend."
)
MOST_ROWS = 40
"""Tables of scores are folded if they have more rows than this together, or if the page also shows runs."""


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
    """Each example has a title, (token, whether it is masked) for all its tokens, and a table of guesses."""

    @property
    def has_content(self) -> bool:
        return bool(self.pictures or self.examples or any(table.rows for table in self.tables))


def page(
    runs: list[Run],
    scores: list[Scores],
    pictures: Pictures,
    model_sections: Sequence[Section] = (),
    refresh: int | None = None,
) -> str:
    """Return the page's HTML. refresh: the seconds after which a browser loads it again; None: never."""
    named = [*(run.name for run in runs), *(model.name for model in scores)]
    names = list(dict.fromkeys(named)) or [text for section in model_sections for text, *_ in section.examples]
    title = " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"
    sections = [*(run_sections(runs, pictures) if runs else []), *score_sections(runs, scores, pictures)]
    sections = [*sorted(sections, key=lambda section: section.folded), *model_sections]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": tables.number, "numeric": tables.is_numeric}
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title, sections=[section for section in sections if section.has_content], refresh=refresh
    )


def run_sections(runs: list[Run], pictures: Pictures) -> list[Section]:
    """Return the page's sections about runs. Only the summary, the losses and the languages are open at first."""
    charts = {curves.LOSSES: [], curves.LANGUAGES: [], "Evaluations": curves.eval_charts(runs)}
    charts |= curves.metric_sections(runs)
    sections = [summary(runs, pictures)]
    for title, of_section in charts.items():
        folded, note = title not in (curves.LOSSES, curves.LANGUAGES), THINNED if title == curves.LOSSES else ""
        sections.append(Section(title, note, folded, pictures=drawn(of_section, pictures)))
    listed = (tables.summary(runs), tables.differing(runs), tables.failed_evals(runs))
    return [*sections, *(Section(table.title, folded=True, tables=[table]) for table in listed)]


def summary(runs: list[Run], pictures: Pictures) -> Section:
    """Return the section that says what was trained and how far, with charts of the most important metrics."""
    section = Section("Summary")
    headlines = tables.headlines(runs)
    section.tables = [tables.run_table(runs), *([tables.headline_table(headlines)] if headlines else [])]
    section.findings = findings(runs, headlines)
    if not headlines:
        section.note = "No step has been written yet."
    elif len(runs) > 1:
        section.note = COMPARED
    section.pictures = drawn(headlines, pictures)
    return section


def score_sections(runs: list[Run], scores: list[Scores], pictures: Pictures) -> list[Section]:
    found = transfer.transfers(scores)
    note = "In percent: fine-tuned in the language (SUP), in another (ZS), and Δ = SUP − ZS; ± over seeds."
    points, kind = transfer.aligned(found, scores, runs)
    plots = [scatter(task, of_task, kind, pictures) for task, of_task in points.items()]
    layers = drawn(curves.layer_charts(scores), pictures)
    failed = [failure for model in scores for failure in model.failed]
    listed = [*tables.score_tables(scores), Table(["model", "failed", "why"], failed, title="Failed")]
    long = bool(runs) or sum(len(table.rows) for table in listed) > MOST_ROWS
    return [
        Section("Transfer", note, tables=[transfer.transfer_table(found)]),
        Section("Alignment and transfer", SPEARMAN, pictures=plots),
        Section("By layer", "Layer 0 is what the embeddings give.", pictures=layers),
        Section("Scores", folded=long, tables=listed),
    ]


def scatter(task: str, of_task: list[transfer.Transfer], kind: str, pictures: Pictures) -> Picture:
    points, names = transfer.points_of(of_task), list(dict.fromkeys(t.model for t in of_task))
    looks = [names.index(t.model) for t in of_task]
    words = f"alignment of {kind} words, %"
    svg = pictures.scatter(points, looks, f"alignment and Δ, {task}", words, f"Δ of {task}, points")
    rows: list[list[tables.Cell]] = [
        [str(n), f"{GLYPHS[look % len(GLYPHS)]} {t.model}", t.language, *point]
        for n, (t, look, point) in enumerate(zip(of_task, looks, points, strict=True), 1)
    ]
    table = Table(["", "model", "language", "alignment", "Δ"], rows)
    return Picture(task, svg, transfer.correlation(points), table)


def model_sections(paths: list[Path], pairs: list[Path], pictures: Pictures) -> list[Section]:
    """Return linked words of all models and examples of the last model, for each source of pairs. Raises UserError."""
    loaded, sources = models.load(paths, pairs)
    words, shown = Section("Linked words", TSNE), Section("Examples")
    for source in sources:
        found = models.frequent_pairs(source)
        for name, model in loaded.items():
            title = f"{name}, {source.name}"
            if len(found) >= models.FEWEST_WORDS:
                places, cosine, nearest = models.place_words(model, found)
                note = f"Mean cosine of a pair {cosine:.3f}; {nearest} of {len(found)} words nearest to their partner."
                picture = pictures.word_pairs(places, found, f"words of {title}")
                words.pictures.append(Picture(title, picture, note))
        for tokens, masked in models.examples(model, source) if not model.headless else ():
            marked = {token.place for token in masked}
            text = [(token, place in marked) for place, token in enumerate(tokens)]
            shown.examples.append((title, text, guess_table(masked)))
    return [words, shown]


def guess_table(masked: list[models.Masked]) -> Table:
    """Return a table of masked tokens and their guesses, such as `✓ house 0.71, home 0.12`."""

    def shown(guesses: models.Guesses, token: str) -> str | None:
        return ", ".join(f"{'✓ ' * (guess == token)}{guess} {p:.2f}" for guess, p in guesses) or None

    rows = [
        [str(n), m.token, " ".join(m.linked) or None, shown(m.mono, m.token), shown(m.bi, m.token)]
        for n, m in enumerate(masked, 1)
    ]
    return Table(["", "masked", "linked with", "from its own state", "from its links"], rows)


def drawn(charts: list[Chart], pictures: Pictures) -> list[Picture]:
    return [Picture(title, svg) for svg, title in map(pictures.chart, charts)]
