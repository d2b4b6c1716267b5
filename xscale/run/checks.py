"""Tokenizer, dictionaries and word links of a recipe: found, and checked before any weight exists."""

import importlib.util
from contextlib import suppress
from pathlib import Path

import numpy as np

from xscale.checkpoint import store as checkpoints
from xscale.config import Recipe
from xscale.data.lexicon import Lexicon, check_order, find_lexicons, load_lexicon, pair_of
from xscale.data.mixture import StreamSpec
from xscale.data.shards import Source
from xscale.data.streams import matches_languages
from xscale.data.tokenizer import Tokenizer
from xscale.data.truecase import Forms, forms_of
from xscale.errors import UserError
from xscale.files import may_be_there
from xscale.objectives import OBJECTIVES
from xscale.ranks import HostGroup

LINKED_SAMPLE = 16
"""Records of a source that are looked at for word links."""


def load_lexicons(
    recipe: Recipe, tokenizer: Tokenizer, sources: list[Source], data: Path, host_group: HostGroup | None = None
) -> tuple[tuple[Lexicon, ...], tuple[str, ...]]:
    """In the order of their names; and lines about those that are left out. Raises UserError where one that an
    objective reads, or the recipe names, is missing, malformed or the wrong way round."""
    paths = [Path(path) for path in recipe.data.lexicons] or find_lexicons(sources, data)
    must = bool(recipe.data.lexicons) or any(
        OBJECTIVES[s.objective].needs == "lexicon" for s in recipe.streams.values()
    )
    lexicons, left_out, languages = [], [], {language for source in sources for language in source.langs}
    forms: dict[str, Forms] = {}
    if recipe.data.truecase and not tokenizer.lowercases:
        spoken: set[str] = set()
        for path in paths:
            with suppress(UserError):  # it is said below
                spoken |= {*pair_of(path, languages)}
        forms = forms_of(spoken, sources, host_group or HostGroup(alone=True))
    for path in paths:
        try:
            lexicon = load_lexicon(path, tokenizer, languages, forms)
            check_order(lexicon, path, sources)
            lexicons.append(lexicon)
        except UserError as error:
            if must:
                raise
            left_out.append(f"warning: no alignment score by {path}: {error}")
    return tuple(sorted(lexicons, key=lambda lexicon: (lexicon.name, lexicon.fingerprint))), tuple(left_out)


def stream_lexicons(recipe: Recipe, lexicons: tuple[Lexicon, ...]) -> dict[str, tuple[Lexicon, ...]]:
    """What each stream whose objective reads dictionaries has of them, without the words that are withheld. Raises
    UserError where that is nothing."""
    found: dict[str, tuple[Lexicon, ...]] = {}
    kept: dict[Lexicon, Lexicon] = {}  # one of each: tables are made of it once a process
    for name, stream in recipe.streams.items():
        if OBJECTIVES[stream.objective].needs != "lexicon":
            continue
        own = [lexicon for lexicon in lexicons if of_languages(stream.languages, lexicon)]
        kept |= {lexicon: lexicon.kept(recipe.data.lexicon_heldout) for lexicon in own if lexicon not in kept}
        found[name] = tuple(kept[lexicon] for lexicon in own)
        if not any(lexicon.words for lexicon in found[name]):
            there = ", ".join(str(lexicon.path) for lexicon in lexicons) or "none"
            of = f" of its languages, {', '.join(stream.languages)} (there are: {there})" if stream.languages else ""
            raise UserError(
                f"streams.{name} needs a dictionary{of}: set data.lexicons=[PATH/en-de.txt], or put it into "
                f"lexicon/ beside the shards"
            )
    return found


def of_languages(languages: list[str] | None, lexicon: Lexicon) -> bool:
    """Whether it is of a pair of the stream's languages; of a stream of one language, whether it has that."""
    if languages is None:
        return True
    return matches_languages(languages, lexicon.langs) or (len(languages) == 1 and languages[0] in lexicon.langs)


def check_needs(recipe: Recipe, tokenizer: Tokenizer, specs: list[StreamSpec], sources: list[Source]) -> None:
    """Raises UserError where an objective lacks its word links, or its options or the tokenizer do not fit the
    stream."""
    for spec in specs:
        stream = recipe.streams[spec.name]
        objective = OBJECTIVES[stream.objective]
        if objective.needs == "links":
            for source in spec.sources:
                sources[source].check_links()
                check_links(spec.name, sources[source])


def check_links(stream: str, source: Source) -> None:
    """Raises UserError where one of some records has no word links: the first, the last, and others between them."""
    some = np.unique(np.linspace(0, source.records - 1, LINKED_SAMPLE).round().astype(np.int64))
    without_readahead = source.without_readahead()
    for shard, record in source.places(some):
        found = without_readahead.read(shard, record)
        if found.links is None:
            raise UserError(
                f"streams.{stream} needs word links; {source.directory / source.shards[shard].name}, record "
                f"{found.key!r}, has none. Write {source.name} again with `python -m data_tools.write_shards pairs ... "
                f"--links F` or `--align`, or name the pairs that have links: streams.{stream}.languages=[...]"
            )


TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model")
"""Files of which a directory with a tokenizer has one or more."""


def find_tokenizer(recipe: Recipe, data: Path) -> str:
    """model.tokenizer; else that of model.init; else the one beside the shards. Raises UserError without any."""
    if recipe.model.tokenizer:
        return recipe.model.tokenizer
    init = recipe.model.init
    own = own_tokenizer(init) if init else None
    if own:
        return str(own)
    if init and not Path(init).exists():
        if not may_be_there(init):
            raise UserError(f"model.init {init} does not exist; give a run, or a Hugging Face directory or name")
        return init  # a hub name
    for folder in (data, data.resolve().parent):
        if (folder / "tokenizer").is_dir():
            return str(folder / "tokenizer")
    raise UserError(
        f"no tokenizer{f' in model.init {init}, and none' if init else '/'} in {data} or its parent. Train one with "
        f"`python -m data_tools.tokenizer --data {data} --out {data / 'tokenizer'}`, or set model.tokenizer"
    )


def check_tracker(name: str | None) -> None:
    """Raises UserError."""
    if name and importlib.util.find_spec(name) is None:
        raise UserError(f"train.tracker: {name} is not installed; pip install {name}, or leave it out")


def own_tokenizer(init: str) -> Path | None:
    """The tokenizer directory of a local `model.init`, where it has one."""
    path = checkpoints.find(Path(init)) / checkpoints.HF if checkpoints.is_run(Path(init)) else Path(init)
    return path if any(next(path.glob(name), None) for name in TOKENIZERS) else None


def check_tokenizer(init: str | None, tokenizer: Tokenizer) -> None:
    """Raises UserError where pre-trained weights would meet another tokenizer than their own."""
    own = own_tokenizer(init) if init else None
    if own and ((its := Tokenizer(own)).fingerprint, its.special) != (tokenizer.fingerprint, tokenizer.special):
        raise UserError(
            f"model.init {init} was trained with the tokenizer {own}, not this one; set model.tokenizer={own}"
        )
