"""Makes the page of `data_tools.inspect --html`: shares of sources before and after sampling, and text statistics."""

from collections.abc import Iterator
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from xscale.data.lexicon import find_lexicon_paths, pair_of, read_entries, same_word
from xscale.data.mixture import source_weights
from xscale.data.shards import Source
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import split
from xscale.record import Record

from .prepare_report import html_page, html_table

ALPHAS = (1.0, 0.7, 0.5, 0.3)
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
"""The smallest number of words of a text in each column of the histogram of lengths."""
_BARS = " ▁▂▃▄▅▆▇█"


def text_statistics(
    sources: list[Source], source: Source, records: list[Record], data: Path, tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """Return, for each language of `source`, statistics of the texts of `records`. data: the folder whose dictionaries
    training would read for all `sources`."""
    found = []
    languages = {lang for one in sources for lang in one.langs}
    for side, lang in enumerate(source.langs):
        texts = [record.texts[side] for record in records]
        words = split(texts)
        sizes = [len(of_text) for of_text, _ in words]
        columns = np.searchsorted(LENGTHS, sizes, side="right") - 1
        entry = {"language": lang, "lengths": np.bincount(columns.clip(0), minlength=len(LENGTHS)).tolist()}
        spelled = [same_word(word) for of_text, is_word in words for word in compress(of_text, is_word)]
        entry["dictionaries"] = {
            name: sum(word in known for word in spelled) / max(len(spelled), 1)
            for name, known in dictionary_words(find_lexicon_paths(sources, data), lang, languages)
        }
        if tokenizer:
            ids = tokenizer.encode(texts)
            entry["tokens_per_word"] = sum(map(len, ids)) / max(sum(sizes), 1)
            entry["unknown"] = tokenizer.unknown_share(ids)
        found.append(entry)
    return found


def dictionary_words(paths: list[Path], lang: str, languages: set[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield (file name, the dictionary's words of the language `lang`) for each dictionary of this language. languages:
    the languages of all sources, by which a file name is divided into two languages."""
    for path in paths:
        pair = pair_of(path, languages)
        if lang in pair:
            yield path.name, _column(path, pair.index(lang))


@cache
def _column(path: Path, side: int) -> frozenset[str]:
    return frozenset(same_word(entry[side]) for entry in read_entries(path))


def page(sources: list[Source], entries: list[dict[str, Any]]) -> str:
    """Return the HTML page. entries: the results of `inspect`, with those of `text_statistics` as "languages"."""
    shares, texts = [], []
    for kind in ("mono", "pair"):
        of_kind = [source for source in sources if source.kind == kind]
        weights = [source_weights(of_kind, alpha) for alpha in ALPHAS] if of_kind else []
        for number, source in enumerate(of_kind):
            of_alphas = [weight[number] for weight in weights]
            row = [str(source.directory), source.pair, source.records, round(source.bytes / 1e6, 1)]
            shares.append([*row, *(f"{share:.2%}" for share in of_alphas), f"{of_alphas[1] / of_alphas[0]:.2f}"])
    for source, entry in zip(sources, entries, strict=True):
        for side, of in enumerate(entry["languages"]):
            most = max(of["lengths"])
            bars = "".join(_BARS[-(-8 * count // most)] for count in of["lengths"])
            known = "; ".join(f"{share:.0%} in {name}" for name, share in of["dictionaries"].items())
            fit = [f"{of['tokens_per_word']:.2f}", f"{of['unknown']:.2%}"] if "unknown" in of else ["", ""]
            linked = f"{entry['links']['linked_share'][side]:.0%}" if entry["links"] else "none"
            texts.append([str(source.directory), of["language"], bars, *fit, linked, known or "none"])
    warned = [[entry["directory"], line] for entry in entries for line in entry["text"]["warnings"]]
    columns = " ".join(map(str, LENGTHS))
    head = ["source", "languages", "records", "MB", *(f"share at alpha {alpha:g}" for alpha in ALPHAS)]
    return html_page("Shards", [
        "<h2>Shares of monolingual and of parallel sources</h2>",
        html_table([*head, f"how often at {ALPHAS[1]:g}, compared with 1"], shares),
        "<p>`xscale/train.py --dry_run` prints the shares and epochs of a recipe.</p><h2>Texts</h2>",
        html_table(["source", "language", f"texts by words, from {columns}", "tokens a word", "unknown tokens",
               "linked words", "words in dictionaries"], texts),
        "<h2>Warnings</h2>" + html_table(["source", "warning"], warned),
    ])  # fmt: skip
