"""The page: one HTML file that loads nothing, light and dark, on wide and narrow screens."""

from html import escape

from xscale.report import curves, tables, transfer
from xscale.report.contents import Contents, Guesses, Shown, WordPairs
from xscale.report.curves import Chart
from xscale.report.draw import COLOURS, GLYPHS, IN_THE_DARK, Pictures
from xscale.report.read import Run
from xscale.report.tables import Cell, Table

NAMES = "Names are those of <code>metrics.jsonl</code> (docs/training.md, “Metrics”)."
THINNED = (
    "Where a run has many steps, a point of a line is the mean of a range of steps, and the band around it goes from "
    "the least to the largest of them."
)
SPEARMAN = (
    "After Tang et al. 2022, figure 3: each point is a model and a language; numbers are those of the table below. "
    "Δ = SUP − ZS, so that good transfer is low, and ρ is negative where better aligned models transfer better."
)
TSNE = (
    "After Yang et al. 2021, figure 2: t-SNE of the input embeddings of the words most often linked, each with "
    "its translation (circle, triangle). t-SNE keeps neighbourhoods, not distances: the numbers are of the embeddings."
)


def page(contents: Contents, pictures: Pictures) -> str:
    parts = {
        **(run_parts(contents.runs, pictures) if contents.runs else {}),
        **score_parts(contents, pictures),
        **word_parts(contents.words, pictures),
        **(
            {"Examples": "".join(map(examples, *zip(*contents.examples.items(), strict=True)))}
            if contents.examples
            else {}
        ),
    }
    named = [*(run.name for run in contents.runs), *(model.name for model in contents.scores)]
    names = list(dict.fromkeys(named)) or list(contents.examples)
    title = escape(" and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more")
    links = " · ".join(f'<a href="#{anchor(name)}">{escape(name)}</a>' for name in parts)
    body = "".join(
        f'<section id="{anchor(name)}"><h2>{escape(name)}</h2>{html}</section>' for name, html in parts.items()
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" '
        f'content="width=device-width, initial-scale=1">\n<title>xscale: {title}</title>\n<style>{style()}</style>\n'
        f"</head>\n<body>\n<h1>{title}</h1>\n<nav>{links}</nav>\n{body}\n</body>\n</html>\n"
    )


def anchor(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def run_parts(runs: list[Run], pictures: Pictures) -> dict[str, str]:
    overview = table(tables.run_table(runs))
    if len(runs) > 1:
        different = tables.differing(runs)
        overview += "<h3>Fields of the recipes that differ</h3>"
        overview += table(different) if different.rows else "<p>None.</p>"
    parts = {"Runs" if len(runs) > 1 else "Run": overview}
    summary = tables.summary(runs)
    if summary.rows:
        parts["Last and best values"] = table(summary)
    else:
        parts["Run"] = overview + "<p>No step has been written yet.</p>"
    for title, charts in (*curves.metric_sections(runs).items(), (curves.EVALS, curves.eval_charts(runs))):
        if charts:
            parts[title] = (f"<p>{NAMES} {THINNED}</p>" if title == "Loss" else "") + drawn(charts, pictures)
    failed = tables.failed_evals(runs)
    if failed.rows:
        parts[curves.EVALS] = parts.get(curves.EVALS, "") + table(failed)
    return parts


def score_parts(contents: Contents, pictures: Pictures) -> dict[str, str]:
    scores = contents.scores
    parts = {}
    found = transfer.transfers(scores)
    if found:
        note = "<p>In percent: fine-tuned in the language (SUP), in another (ZS), and Δ = SUP − ZS; ± over seeds.</p>"
        parts["Transfer"] = note + table(transfer.transfer_table(found))
    points, kind = transfer.aligned(found, scores, contents.runs)
    if points:
        html = [scatter(task, of_task, kind, pictures) for task, of_task in points.items()]
        parts["Alignment and transfer"] = f"<p>{SPEARMAN}</p>{grid(html)}"
    layers = curves.layer_charts(scores)
    if layers:
        parts["By layer"] = "<p>Layer 0 is what the embeddings give.</p>" + drawn(layers, pictures)
    listed = tables.score_tables(scores)
    failed = tables.failures(scores)
    if failed.rows:
        listed["failed"] = failed
    if listed:
        parts["Scores"] = "".join(f"<h3>{escape(task)}</h3>{table(made)}" for task, made in listed.items())
    return parts


def scatter(task: str, of_task: list[transfer.Aligned], kind: str, pictures: Pictures) -> str:
    points, models = [of.point for of in of_task], [of.transfer.model for of in of_task]
    looks = [list(dict.fromkeys(models)).index(model) for model in models]
    words = f"alignment of {kind} words, %"
    picture = pictures.scatter(points, looks, f"alignment and Δ, {task}", words, f"Δ of {task}, points")
    rows: list[list[Cell]] = [
        [str(n), f"{GLYPHS[look % len(GLYPHS)]} {of.transfer.model}", of.transfer.language, *of.point]
        for n, (of, look) in enumerate(zip(of_task, looks, strict=True), 1)
    ]
    listed = table(Table(["", "model", "language", "alignment", "Δ"], rows))
    return f"<div>{figure(picture, task, str(transfer.spearman(points)))}{listed}</div>"


def word_parts(found: list[WordPairs], pictures: Pictures) -> dict[str, str]:
    html = []
    for pairs in found:
        for model, placed in pairs.places.items():
            title = f"{model}, {pairs.source}"
            picture = pictures.word_pairs(placed.places, pairs.words, f"words of {title}")
            near = f"{placed.nearest} of {len(pairs.words)} words have their partner as nearest"
            html.append(figure(picture, title, f"Mean cosine of a pair {placed.cosine:.3f}; {near}."))
    return {"Linked words": f"<p>{TSNE}</p>{grid(html)}"} if html else {}


def examples(title: str, shown: list[Shown]) -> str:
    return f"<h3>{escape(title)}</h3>" + "".join(map(example, shown))


def example(shown: Shown) -> str:
    numbers = {masked.place: n for n, masked in enumerate(shown.masked, 1)}
    text = " ".join(
        f"<mark>{escape(token)}<sub>{numbers[place]}</sub></mark>" if place in numbers else escape(token)
        for place, token in enumerate(shown.tokens)
    )
    rows: list[list[Cell]] = [
        [
            str(n),
            masked.token,
            " ".join(masked.linked) or None,
            *(guessed(g, masked.token) for g in (masked.mono, masked.bi)),
        ]
        for n, masked in enumerate(shown.masked, 1)
    ]
    head = ["", "masked", "linked with", "from its own state", "from its links"]
    return f'<p class="text">{text}</p>{table(Table(head, rows))}'


def guessed(guesses: Guesses, token: str) -> str | None:
    """Such as `✓ house 0.71, home 0.12`."""
    return ", ".join(f"{'✓ ' if guess == token else ''}{guess} {p:.2f}" for guess, p in guesses) or None


# HTML


def drawn(charts: list[Chart], pictures: Pictures) -> str:
    return grid([figure(pictures.chart(chart), chart.title) for chart in charts])


def grid(figures: list[str]) -> str:
    return f'<div class="grid">{"".join(figures)}</div>'


def figure(svg: str, title: str, note: str = "") -> str:
    below = f"<p>{escape(note)}</p>" if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}{below}</figure>"


def table(made: Table) -> str:
    """Numbers whole in `data-value`, and short where they are seen."""
    numeric = [all(tables.is_number(row[n]) for row in made.rows) for n in range(len(made.head))]
    groups = "".join(f'<th colspan="{span}">{escape(name)}</th>' for name, span in made.groups)
    groups = f'<tr class="groups">{groups}</tr>' if groups else ""
    head = "".join(f"<th{' class=n' * n}>{escape(name)}</th>" for name, n in zip(made.head, numeric, strict=True))
    rows = "".join(f"<tr>{''.join(map(cell, row, numeric))}</tr>\n" for row in made.rows)
    return f'<div class="wide"><table><thead>{groups}<tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def cell(value: Cell, numeric: bool) -> str:
    whole = "" if value is None or isinstance(value, str) else f' data-value="{value!r}"'
    return f"<td{' class=n' * numeric}{whole}>{escape(tables.number(value))}</td>"


def style() -> str:
    light, dark = (
        " ".join(f"--c{n}: {colour};" for n, colour in enumerate(colours)) for colours in (COLOURS, IN_THE_DARK)
    )
    return CSS.replace("LIGHT", light).replace("DARK", dark)


CSS = """
:root { color-scheme: light dark; --ink: #1b2430; --paper: #ffffff; --faint: #d5dbe3; --soft: #5b6675; LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --paper: #14181f; --faint: #343c48; --soft: #a0abba; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 12px; max-width: 1320px; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; } p { max-width: 75ch; margin: .4rem 0; }
nav, figure p, section > p { color: var(--soft); } a { color: inherit; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 370px), 1fr)); gap: 14px; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; font-size: .9rem; }
figure p { font-size: .85rem; }
.grid > div { min-width: 0; }
svg { display: block; width: 100%; height: auto; max-width: 460px; } svg * { stroke-linejoin: round; }
svg text { font-family: system-ui, sans-serif; }
.wide { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .85rem; width: max-content; }
th, td { padding: 2px 10px 2px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--faint); }
td { overflow-wrap: break-word; max-width: min(45ch, 80vw); } th { white-space: nowrap; }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--paper); }
.groups th { border-bottom: 0; padding-top: 4px; }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.text { margin-top: 1rem; } section > p.text { color: inherit; }
mark { background: none; color: inherit; border: 1px solid; border-radius: 3px; padding: 0 2px; }
"""
