"""The corpus of a run: its sources, tokenizer, dictionaries and streams. They are checked before the model is built."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from xscale.data.lexicon import Lexicon, find_lexicon_paths, load_lexicon, without_withheld
from xscale.data.shards import Shard, Source, drop_later_records_per_language, find_sources, languages_of
from xscale.data.stream import (
    Stream,
    check_languages_have_text,
    covers_every_language,
    languages_meant,
    select_source_indices,
    unify_language_names,
)
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.files import exists_or_is_hub_name, map_in_threads
from xscale.ranks import CpuGroup
from xscale.recipe import ObjectivesByName, Recipe, Schedule, TrainConfig, parse_section

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "*.model")
"""The files of tokenizers. A directory with a tokenizer has at least one of these files."""


@dataclass(frozen=True)
class Corpus:
    """The data that a run reads, opened and checked."""

    sources: list[Source]
    tokenizer: Tokenizer
    streams: Schedule[Sequence[Stream]]
    """The streams of each step. A stream has the same list of sources in all phases. The sources that
    a stream does not read in a phase are idle in this phase."""
    languages: list[str]
    """The languages of the sources, in alphabetical order."""
    lexicons: tuple[Lexicon, ...]
    """The dictionaries that objectives read, with all their words."""
    measured: tuple[Lexicon, ...]
    """The dictionaries that only alignment scores read."""
    lexicon_heldout: float
    """The share of the dictionaries' entries that is withheld from all objectives of this run."""
    unseen: float
    """The share of the dictionaries' entries that is withheld from this run and from the run of model.init."""
    withheld_before: float
    """The share of the dictionaries' entries that was withheld from the run of model.init; 1 if it read none."""
    has_two_token_types: bool
    """True if the first sentence of a pair has token type 0, and the second one 1."""

    @property
    def language_ids(self) -> dict[str, int]:
        """The number of each language, from 1 on."""
        return dict(zip(self.languages, range(1, len(self.languages) + 1), strict=True))

    def identity(self) -> dict[str, Any]:
        """Return the values that must be the same when a run resumes."""
        sources = list[dict[str, Any]]()
        for source in self.sources:
            sources.append({"source": source.langs_name, "fingerprint": source.fingerprint})
        lexicons = list[dict[str, Any]]()
        for lexicon in self.lexicons:
            lexicons.append(
                {"lexicon": lexicon.name, "fingerprint": lexicon.fingerprint, "heldout": self.lexicon_heldout}
            )
        return {
            "data": sources,
            "tokenizer": self.tokenizer.fingerprint,
            "special_tokens": self.tokenizer.special,
            "lexicons": lexicons,
        }


def run_identity(recipe: Recipe, corpus: Corpus) -> dict[str, Any]:
    """Return the values of a run that must be the same when it resumes."""
    return {"recipe": recipe.identity()} | corpus.identity()


def open_corpus(
    recipe: Recipe,
    objectives: ObjectivesByName,
    data: Sequence[Path | str],
    cpu_group: CpuGroup | None = None,
    *,
    init: Path | str | None,
    model_has_two_token_types: bool,
    withheld_before: float,
) -> Corpus:
    """Open and check the data that a recipe reads. Raises UserError.

    data: the value of --data. The ranks of `cpu_group` divide the checks of files among themselves. init: the Hugging
    Face directory or the hub name of model.init; None: random weights. model_has_two_token_types: whether the model has
    a token type for each of the two sentences of a pair. withheld_before: the share of the dictionaries' entries that
    was withheld from the training of model.init.
    """
    cpu_group = cpu_group or CpuGroup(alone=True)
    all_sources = find_sources(data, recipe.data.cache)
    unify_language_names(all_sources)
    sources = drop_later_records_per_language(all_sources, recipe.data.first)
    check_file_sizes_against_index(sources, cpu_group)
    near = next((path for path in data if isinstance(path, Path)), None)
    tokenizer = Tokenizer(find_tokenizer(recipe, init, near))
    check_tokenizer_of_init(recipe, init, tokenizer)
    lexicons = load_lexicons(recipe, tokenizer, sources, near)
    without_idle = recipe.schedule.map(lambda phase: build_streams(phase, objectives, sources, lexicons, cpu_group))
    streams = with_sources_of_all_phases(without_idle, sources)
    trained_paths = set[Path]()
    for stream in chain(*streams.values):
        trained_paths.update(lexicon.path for lexicon in stream.lexicons)
    trained = [lexicon for lexicon in lexicons if lexicon.path in trained_paths]
    measured = [lexicon for lexicon in lexicons if lexicon.path not in trained_paths]
    return Corpus(
        sources,
        tokenizer,
        streams,
        sorted(languages_of(sources)),
        lexicons=tuple(trained),
        measured=tuple(measured),
        lexicon_heldout=recipe.data.lexicon_heldout,
        unseen=min(withheld_before, recipe.data.lexicon_heldout),
        withheld_before=withheld_before,
        has_two_token_types=recipe.data.segments
        and not recipe.any_stream_sets("language_embeddings")
        and tokenizer.pair.has_two_token_types
        and model_has_two_token_types,
    )


# Files


def check_file_sizes_against_index(sources: list[Source], cpu_group: CpuGroup) -> None:
    """Raise UserError if a file of the sources has a wrong size. Each file is checked by one rank."""
    # Two lists instead of a list of pairs: the garbage collector would visit each of up to 10^5 pairs.
    owners = list[Source]()
    shards = list[Shard]()
    for source in sources:
        owners += [source] * len(source.shards)
        shards += source.shards

    def check(number: int) -> None:
        map_in_threads(Source.check_local_file, owners[number :: cpu_group.size], shards[number :: cpu_group.size])

    cpu_group.divide_work_and_gather([partial(check, number) for number in range(cpu_group.size)])


# Streams


def build_streams(
    recipe: Recipe,
    objectives: ObjectivesByName,
    sources: list[Source],
    lexicons: tuple[Lexicon, ...],
    cpu_group: CpuGroup,
) -> list[Stream]:
    """Return the streams of a recipe. Raises UserError."""
    streams = list[Stream]()
    check_languages_have_text(recipe.data.languages, sources)
    for name, stream in recipe.streams.items():
        objective = objectives[stream.objective]
        chosen = select_source_indices(name, objective.record_kind, stream.languages, sources, recipe.data.languages)
        if objective.needs == "links":
            # One rank does it, because it reads a record of each source whose index.json has no `linked`.
            chosen = cpu_group.value_from_main(partial(select_sources_with_word_links, name, chosen, sources))
        problem = objective.check(stream.options, stream.samples)
        if problem:
            raise UserError(f"streams.{name}.{problem}")
        stream_lexicons: tuple[Lexicon, ...] = ()
        if objective.needs == "lexicon":
            stream_lexicons = select_stream_lexicons_without_withheld(name, recipe, lexicons)
        streams.append(
            Stream(
                name,
                objective,
                stream.options,
                chosen,
                stream.samples,
                lexicons=stream_lexicons,
                objective_name=stream.objective,
            )
        )
    return streams


def with_sources_of_all_phases(streams: Schedule[list[Stream]], sources: list[Source]) -> Schedule[Sequence[Stream]]:
    """Return the streams of each phase. Each stream gets the sources that it reads in any phase; those that it does not
    read in this phase are idle."""
    read: dict[str, set[int]] = {}
    for stream in chain(*streams.values):
        read.setdefault(stream.name, set()).update(stream.sources)

    def completed(phase_streams: list[Stream]) -> Sequence[Stream]:
        return [stream.with_sources_of_all_phases(sources, read[stream.name]) for stream in phase_streams]

    return streams.map(completed)


def convert_epochs_to_steps(recipe: Recipe, corpus: Corpus) -> Recipe:
    """Return the recipe with train.epochs converted to train.steps. train.epochs counts the pairs of the first stream
    that reads pairs. Raises UserError."""
    if recipe.train.epochs is None:
        return recipe
    stream = next((stream for stream in corpus.streams.last if not stream.reads_running_text), None)
    if stream is None:
        raise UserError(
            "train.epochs needs a stream of sentence pairs, and the recipe has no such stream. Set train.steps instead"
        )
    steps = math.ceil(round(recipe.train.epochs * stream.active_record_count(corpus.sources) / stream.samples, 6))
    steps = max(steps, 1)
    problems = list[str]()
    train = parse_section(TrainConfig, asdict(recipe.train) | {"steps": steps}, "train", problems)
    if problems:
        raise UserError(
            f"With train.epochs={recipe.train.epochs:g}, the run has {steps:,} steps. " + "\n".join(problems)
        )
    return replace(recipe, train=train)


# Word links


def select_sources_with_word_links(stream: str, chosen: tuple[int, ...], sources: list[Source]) -> tuple[int, ...]:
    """Return those of the `chosen` sources of a stream that have word links. Raises UserError if none has, or if some
    pairs of a source have none."""
    with_links = tuple(number for number in chosen if sources[number].linked_pair_count)
    for number in with_links or chosen[:1]:
        source = sources[number]
        pairs = source.index["records"]
        if source.linked_pair_count < pairs:
            raise UserError(
                f"streams.{stream} needs word alignments, but {pairs - source.linked_pair_count:,} of the {pairs:,} "
                f"pairs in {source.directory} have none. Write these shards again by `xscale data write_shards pairs "
                "... --align` (or `--links FILE`). Or run `xscale data prepare` on a corpus.yaml with `align: true` "
                f"and the source `shards: {source.directory}`"
            )
        source.check_link_segmentation()
    return with_links


# Dictionaries


def load_lexicons(
    recipe: Recipe, tokenizer: Tokenizer, sources: list[Source], data_folder: Path | None
) -> tuple[Lexicon, ...]:
    """Return the dictionaries of a run, sorted by name: data.lexicons, or those beside the shards. data_folder: the
    first directory of --data. Raises UserError."""
    paths = list(map(Path, recipe.data.lexicons))
    if not paths and data_folder:
        paths = find_lexicon_paths(sources, data_folder)
    languages = languages_of(sources)
    loaded = list[Lexicon]()
    for path in paths:
        lexicon = load_lexicon(path, tokenizer, languages)
        absent = set(lexicon.langs) - languages
        if absent:
            raise UserError(
                f"{path}: the dictionary has words in {', '.join(absent)}, but --data has no text in "
                f"{', '.join(absent)}. Add shards in {', '.join(absent)} to --data, or remove the dictionary from "
                "data.lexicons"
            )
        loaded.append(lexicon)
    return tuple(sorted(loaded, key=lambda lexicon: (lexicon.name, lexicon.fingerprint)))


def select_stream_lexicons_without_withheld(
    stream: str, recipe: Recipe, lexicons: tuple[Lexicon, ...]
) -> tuple[Lexicon, ...]:
    """Return the dictionaries that a stream reads, without withheld entries: those of which it lists both languages. A
    stream of a single language reads all dictionaries of that language. recipe: that of the stream's phase. Raises
    UserError if the dictionaries have no entry."""
    languages = recipe.streams[stream].languages or recipe.data.languages
    selected = list[Lexicon]()
    for lexicon in lexicons:
        if (
            languages is None
            or covers_every_language(languages, lexicon.langs)
            or (len(languages) == 1 and languages_meant(languages[0], lexicon.langs))
        ):
            selected.append(without_withheld(lexicon, recipe.data.lexicon_heldout))
    if not any(lexicon.words for lexicon in selected):
        available = ", ".join(str(lexicon.path) for lexicon in lexicons) or "none"
        raise UserError(
            f"streams.{stream} needs a dictionary of the stream's languages ({', '.join(languages or ['all'])}), "
            f"but the dictionaries of the run ({available}) have no entries in these languages. Set "
            "data.lexicons=[PATH/en-de.txt], or put a dictionary into the folder lexicon/ beside the shards"
        )
    return tuple(selected)


# The tokenizer


def find_tokenizer(recipe: Recipe, init_directory: Path | str | None, data_folder: Path | None) -> str:
    """Return the directory or hub name of the tokenizer: model.tokenizer, or else that of model.init, or else the one
    beside the shards. init_directory: see `init` of open_corpus. data_folder: the first directory of --data. Raises
    UserError if there is no tokenizer."""
    if recipe.model.tokenizer:
        return recipe.model.tokenizer
    init = recipe.model.init
    if has_tokenizer(init_directory):
        return str(init_directory)
    if init and not Path(init).exists():
        if not exists_or_is_hub_name(init):
            raise UserError(
                f"model.init {init} does not exist. Set model.init to a run, a checkpoint, the folder of a Hugging "
                f"Face model, or the name of a model on the Hugging Face Hub. If you resume a run, and {init} was "
                "removed after the start of the run, export the run's newest checkpoint to this path: `xscale export "
                f"RUN {init}`"
            )
        return init  # a hub name
    if data_folder is None:
        raise UserError(
            "the run has no tokenizer. xscale looks for a tokenizer beside local shards, but every --data is a URL. "
            "Set model.tokenizer=DIR"
        )
    for folder in (data_folder, data_folder.resolve().parent):
        if (folder / "tokenizer").is_dir():
            return str(folder / "tokenizer")
    raise UserError(
        f"there is no {f'tokenizer in model.init {init}, and no folder' if init else 'folder'} tokenizer/ in "
        f"{data_folder} or its parent folder. Train a tokenizer: `xscale data tokenizer --data {data_folder} --out "
        f"{data_folder / 'tokenizer'}`, or set model.tokenizer=DIR"
    )


def has_tokenizer(directory: str | Path | None) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    return directory is not None and any(list(Path(directory).glob(name)) for name in TOKENIZERS)


def check_tokenizer_of_init(recipe: Recipe, init_directory: Path | str | None, tokenizer: Tokenizer) -> None:
    """Raise UserError if model.init has a tokenizer and model.tokenizer, the run's tokenizer, differs from it.
    init_directory: see `init` of open_corpus."""
    if recipe.model.tokenizer is None or init_directory is None or not has_tokenizer(init_directory):
        return  # without model.tokenizer, the run has the tokenizer of model.init
    trained = Tokenizer(init_directory)
    if (trained.fingerprint, trained.special) != (tokenizer.fingerprint, tokenizer.special):
        raise UserError(
            f"model.init {recipe.model.init} was trained with the tokenizer in {init_directory}, but this run has "
            f"another tokenizer, {tokenizer.hf.name_or_path}. Set model.tokenizer={init_directory}. To train with more "
            "tokens, first enlarge the model and its tokenizer (docs/how-to/add-language.md)"
        )
