"""Tokenizer, dictionaries and word links of a recipe: found, and checked before any weight exists."""

from pathlib import Path

from xscale.config import Recipe
from xscale.data.lexicon import Lexicon, check_order, find_lexicons, load_lexicon
from xscale.data.mixture import StreamSpec
from xscale.data.shards import Source
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.objectives import OBJECTIVES
from xscale.run import checkpoint as checkpoints


def load_lexicons(recipe: Recipe, tokenizer: Tokenizer, sources: list[Source], data: Path) -> tuple[Lexicon, ...]:
    """In the order of their names. Raises UserError where one is missing, malformed or the wrong way round."""
    needed = any(OBJECTIVES[stream.objective].needs == "lexicon" for stream in recipe.streams.values())
    paths = [Path(path) for path in recipe.data.lexicons] or (find_lexicons(sources, data) if needed else [])
    lexicons = []
    for path in paths:
        lexicon = load_lexicon(path, tokenizer)
        check_order(lexicon, path, sources)
        lexicons.append(lexicon)
    return tuple(sorted(lexicons, key=lambda lexicon: (lexicon.name, lexicon.fingerprint)))


def check_needs(
    recipe: Recipe, tokenizer: Tokenizer, specs: list[StreamSpec], sources: list[Source], lexicons: tuple[Lexicon, ...]
) -> None:
    """Raises UserError where an objective lacks its dictionary or word links, or its options or the tokenizer do not
    fit the stream."""
    for spec in specs:
        stream = recipe.streams[spec.name]
        objective = OBJECTIVES[stream.objective]
        needs = objective.needs
        if needs == "lexicon" and not lexicons:
            raise UserError(
                f"streams.{spec.name} needs a dictionary: set data.lexicons=[PATH/en-de.txt], or put it into "
                f"lexicon/ beside the shards"
            )
        for source in (sources[s] for s in spec.sources):
            if needs == "links":
                source.check_links()
            if needs == "links" and source.read(0, 0).links is None:
                raise UserError(
                    f"streams.{spec.name} needs word links; {source.directory} has none. Write it again with "
                    f"`python -m data_tools.write_shards pairs ... --links F` or `--align`"
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
        if Path(init).is_absolute():
            raise UserError(f"model.init {init} does not exist")
        return init  # a hub name
    for folder in (data, data.resolve().parent):
        if (folder / "tokenizer").is_dir():
            return str(folder / "tokenizer")
    raise UserError(
        f"no tokenizer{f' in model.init {init}, and none' if init else '/'} in {data} or its parent. Train one with "
        f"`python -m data_tools.tokenizer --data {data} --out {data / 'tokenizer'}`, or set model.tokenizer"
    )


def own_tokenizer(init: str) -> Path | None:
    """The tokenizer directory of a local `model.init`, where it has one."""
    path = checkpoints.find(Path(init)) / checkpoints.HF if checkpoints.is_run(Path(init)) else Path(init)
    return path if any(next(path.glob(name), None) for name in TOKENIZERS) else None


def check_tokenizer(init: str | None, tokenizer: Tokenizer) -> None:
    """Raises UserError where pre-trained weights would meet another tokenizer than their own."""
    own = own_tokenizer(init) if init else None
    if own and Tokenizer(own).fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"model.init {init} was trained with the tokenizer {own}, not this one; set model.tokenizer={own}"
        )
