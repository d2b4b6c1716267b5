"""Reports what `xscale data prepare` has made of each source: as JSON, HTML and lines of text."""

from pathlib import Path
from typing import Any

from jinja2 import Environment

from .corpus import Corpus
from .steps import read_json, source_counts

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Corpus</title>
<style>
body { font-family: sans-serif; margin: 2em }
td, th { padding: .2em .8em; text-align: left; vertical-align: top }
</style>
<h1>Corpus</h1>
<table>
<tr><th>source<th>languages<th>licence<th>read<th>removed<th>held out<th>records<th>linked<th>MB
{% for source in sources %}
<tr><td>{{ source.name }}<td>{{ source.languages | join("-") }}<td>{{ source.licence or "not said" }}
  <td>{{ "{:,}".format(source.counts.read) }}
  <td>{{ "{:,}".format(source.removed.values() | sum) }}<td>{{ "{:,}".format(source.counts.held) }}
  <td>{{ "{:,}".format(source.counts.records) }}<td>{{ "{:,}".format(source.counts.linked) }}
  <td>{{ "%.1f" | format(source.bytes / 1e6) }}
{% endfor %}
</table>
{% if lexicons %}
<h2>Dictionaries</h2>
<table>
<tr><th>dictionary<th>entries<th>can be used<th>of one token on either side<th>same tokens on both<th>unknown tokens
{% for lexicon in lexicons %}
<tr><td>{{ lexicon.name }}<td>{{ "{:,}".format(lexicon.entries) }}<td>{{ "{:,}".format(lexicon.usable) }}
  <td>{{ "{:,}".format(lexicon.one_token) }}<td>{{ "{:,}".format(lexicon.same_tokens) }}
  <td>{{ "{:,}".format(lexicon.unknown) }}
{% endfor %}
</table>
{% endif %}
<h2>Held out</h2>
<table>
<tr><th>languages<th>records
{% for langs, records in heldout.items() %}<tr><td>{{ langs }}<td>{{ "{:,}".format(records) }}
{% endfor %}
</table>
<h2>What the rules removed</h2>
{% for source in sources if source.removed %}
<h3>{{ source.name }}</h3>
<table>
<tr><th>rule<th>removed<th>examples
{% for rule, count in source.removed.items() %}
<tr><td>{{ rule }}<td>{{ "{:,}".format(count) }}
{% for texts in source.examples[rule] %}<td>{{ texts | join(" | ") }}
{% endfor %}{% endfor %}
</table>
{% endfor %}
</html>
"""


def collect_report(folder: Path, corpus: Corpus) -> dict[str, Any]:
    """Return the content of report.json."""
    sources = list[dict[str, Any]]()
    for number, (name, source) in enumerate(zip(corpus.names, corpus.sources, strict=True)):
        index = folder / "result/shards" / name / "index.json"
        sources.append({
            "name": name,
            "languages": list(source.langs),
            "licence": source.licence,
            "rules": corpus.rules_of(source).model_dump(mode="json"),
            **source_counts(folder, number),
            "bytes": read_json(index)["bytes"] if index.exists() else 0,
        })  # fmt: skip
    heldout = dict[str, int]()
    for path in sorted(folder.glob("result/heldout/*/index.json")):
        heldout[path.parent.name] = read_json(path)["records"]
    lexicons = list[dict[str, Any]]()
    if corpus.tokenizer:
        lexicons = [read_json(folder / f"lexicons/{number}.json") for number in range(len(corpus.lexicons))]
    return {"sources": sources, "heldout": heldout, "lexicons": lexicons}


def summary_lines(out: Path, report: dict[str, Any]) -> str:
    """Return a line for each source, each held-out part and each dictionary. out: the folder that was made."""
    lines = list[str]()
    for source in report["sources"]:
        place = f"{out}/shards/{source['name']}"
        counts = source["counts"]
        kind = "pairs" if len(source["languages"]) == 2 else "documents"
        removed = ", ".join(f"{count:,} {rule}" for rule, count in source["removed"].items())
        lines.append(
            f"{place}: {counts['records']:,} records of {counts['read']:,} {kind} ({'-'.join(source['languages'])}); "
            f"removed: {removed or 'nothing'}; held out: {counts['held']:,} records"
        )
    for name, count in report["heldout"].items():
        lines.append(f"{out}/heldout/{name}: {count:,} records")
    for lexicon in report["lexicons"]:
        lines.append(
            f"{out}/lexicon/{lexicon['name']}: {lexicon['usable']:,} of {lexicon['entries']:,} entries can be used, "
            f"{lexicon['one_token']:,} of them of one token on either side; {lexicon['same_tokens']:,} have the same "
            f"tokens on both sides, {lexicon['unknown']:,} unknown ones"
        )
    lines.append(f"{out}/report.html has the removed text of each rule, with examples")
    return "\n".join(lines)


def render_page(report: dict[str, Any]) -> str:
    """Return report.html."""
    return Environment(autoescape=True, trim_blocks=True).from_string(PAGE).render(report)
