"""What a page shows of models themselves: linked words among their embeddings, and examples of what they predict."""

from pathlib import Path

from xscale.data.shards import Source, find_sources
from xscale.errors import UserError
from xscale.eval.model import Exported
from xscale.report import words
from xscale.report.contents import Shown, WordPairs
from xscale.report.examples import examples
from xscale.report.read import short_names

FEWEST = 3
"""Pairs of words below which there is nothing to see."""


def model_parts(paths: list[Path], pairs: list[Path]) -> tuple[list[WordPairs], dict[str, list[Shown]]]:
    """Of all models the linked words, of the last one examples; for each source of pairs. Raises UserError."""
    sources = [source for source in find_sources(pairs) if source.kind == "pair"]
    if not sources:
        raise UserError(f"--pairs: no sentence pairs in {', '.join(map(str, pairs))}; give shards with word links")
    paths = list(dict.fromkeys(paths))
    models = dict(zip(short_names(paths), map(Exported, paths), strict=True))
    last, model = list(models.items())[-1]
    return (
        [placed for source in sources if (placed := linked_words(models, source))],
        {f"{last}, {source.name}": examples(model, source) for source in sources if not model.headless},
    )


def linked_words(models: dict[str, Exported], source: Source) -> WordPairs | None:
    found = words.frequent_pairs(source)
    if len(found) < FEWEST:
        return None
    return WordPairs(source.name, found, {name: words.place(model, found) for name, model in models.items()})
