"""The report of `data_tools.prepare` on each source, language and rule: as JSON, HTML and lines of text."""

from html import escape
from pathlib import Path
from typing import Any

from .cleaning import LID_PROBABILITY, identifiable_languages, language_code, language_identifier
from .corpus import Corpus
from .steps import all_chunks, read_json, read_plan, read_units_of, source_counts
from .survey import warning_lines

IDENTIFIED = 200
"""The maximum number of first pairs or documents of a source whose language is identified."""


def collect_report(folder: Path, corpus: Corpus) -> dict[str, Any]:
    """Return the content of report.json."""
    sources = []
    for number, (name, source) in enumerate(zip(corpus.names, corpus.sources, strict=True)):
        index = folder / "result/shards" / name / "index.json"
        sources.append({
            "name": name,
            "languages": list(source.langs),
            "licence": source.licence,
            "rules": corpus.rules_of(source).model_dump(mode="json"),
            **source_counts(folder, number),
            "bytes": read_json(index)["bytes"] if index.exists() else 0,
            "warnings": source_warnings(folder, number),
        })  # fmt: skip
    heldout = {
        path.parent.name: read_json(path)["records"] for path in sorted(folder.glob("result/heldout/*/index.json"))
    }
    tokenizer = read_json(folder / "tokenizer.json") if corpus.tokenizer else None
    return {"sources": sources, "heldout": heldout, "tokenizer": tokenizer}


def source_warnings(folder: Path, number: int) -> list[str]:
    """Return a line for each suspicious property of the texts of source `number`."""
    source = read_plan(folder).corpus.sources[number]
    chunk = next(chunk for chunk in all_chunks(folder) if chunk.source == number)
    units = list(read_units_of(folder / f"clean/{chunk.number}.jsonl"))
    if not units:
        return []
    records = list[list[str]]()
    for unit in units:
        records += [unit.texts] if source.pairs else [[text] for text in unit.texts]
    lines = warning_lines(source.langs, records)
    summed = source_counts(folder, number)
    moved = summed["counts"].get("moved_links", 0)
    if moved:
        lines.append(
            f"words of links are divided at spaces and tabs, as aligners do; at other white space, such as no-break "
            f"spaces, too, links of {moved:,} pairs would move, first on line {summed['first_moved']}"
        )
    for side, lang in enumerate(source.langs):
        texts = [unit.texts[side] if source.pairs else " ".join(unit.texts)[:500] for unit in units[:IDENTIFIED]]
        found, probability = language_identifier(True)(" ".join(texts))
        code = language_code(lang)
        if code in identifiable_languages(True) and found != code and probability >= LID_PROBABILITY:
            lines.append(f"{lang}: py3langid takes its text for {found}; correct the language if that is right")
    return lines


def summary(out: Path, report: dict[str, Any]) -> str:
    lines = []
    for source in report["sources"]:
        removed = ", ".join(f"{n:,} {rule}" for rule, n in source["removed"].items()) or "nothing"
        counts, langs = source["counts"], source["languages"]
        lines.append(
            f"{out}/shards/{source['name']}: {counts['records']:,} records of {counts['read']:,} "
            f"{'pairs' if len(langs) == 2 else 'documents'} ({'-'.join(langs)}); removed: {removed}; "
            f"held out: {counts['held']:,} records"
        )
        lines += [f"warning: {out}/shards/{source['name']}: {line}" for line in source["warnings"]]
    for lang, found in (report["tokenizer"] or {"languages": {}})["languages"].items():
        lines.append(
            f"{out}/tokenizer: {lang}: {found['tokens_per_word']} tokens a word, {found['unknown']:.3%} unknown"
        )
    lines += [f"{out}/heldout/{name}: {count:,} records" for name, count in report["heldout"].items()]
    return "\n".join([*lines, f"{out}/report.html says what each rule removed, with examples"])


def page(report: dict[str, Any]) -> str:
    parts = ["<h2>Sources</h2>"]
    head = ["source", "languages", "licence", "read", "changed", "removed", "held out", "records", "linked", "MB"]
    rows = []
    for source in report["sources"]:
        counts = source["counts"]
        rows.append([source["name"], "-".join(source["languages"]), source["licence"] or "not said", counts["read"],
                     counts["changed"], sum(source["removed"].values()), counts["held"], counts["records"],
                     counts["linked"], round(source["bytes"] / 1e6, 1)])  # fmt: skip
    parts.append(html_table(head, rows))
    for source in report["sources"]:
        parts += [f"<p>Warning: {escape(source['name'])}: {escape(line)}</p>" for line in source["warnings"]]
    if report["tokenizer"]:
        parts.append(f"<h2>Tokenizer: {report['tokenizer']['tokens']:,} tokens</h2>")
        columns = ["sentences", "tokens_per_word", "characters_per_token", "unknown"]
        rows = [[lang, *(of[c] for c in columns)] for lang, of in report["tokenizer"]["languages"].items()]
        parts.append(
            html_table(["language", "sentences", "tokens a word", "characters a token", "share unknown"], rows)
        )
    parts.append(
        "<h2>Held out</h2>" + html_table(["languages", "records"], [list(row) for row in report["heldout"].items()])
    )
    parts.append("<h2>What the rules removed</h2>")
    for source in report["sources"]:
        rows = [[rule, n, *[" | ".join(texts) for texts in source["examples"].get(rule, [])]]
                for rule, n in source["removed"].items()]  # fmt: skip
        if rows:
            parts.append(f"<h3>{escape(source['name'])}</h3>" + html_table(["rule", "removed", "examples"], rows))
    return html_page("Corpus", parts)


def html_page(title: str, parts: list[str]) -> str:
    """Return a page of HTML. parts: its HTML after the title."""
    style = "body{font-family:sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left;vertical-align:top}"
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
            f"<body><h1>{title}</h1>{''.join(parts)}</body></html>\n")  # fmt: skip


def html_table(head: list[str], rows: list[list[Any]]) -> str:
    if not rows:
        return "<p>none</p>"

    def cell(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) else escape(str(value))

    top = "".join(f"<th>{escape(name)}" for name in head)
    return f"<table><tr>{top}" + "".join("<tr>" + "".join(f"<td>{cell(v)}" for v in row) for row in rows) + "</table>"
