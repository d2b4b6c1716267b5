"""Makes the lines that the log and the dry run print about a run before its first step."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from xscale.data.corpus import Corpus
from xscale.data.lexicon import Lexicon, languages_in_file_name, read_entries, split_pair_name
from xscale.data.loader import Loader
from xscale.data.mixture import SAMPLE_FILL, probabilities_of_stream_sources, source_sizes
from xscale.data.scripts import find_exact_name_or_spellings
from xscale.data.shards import Source
from xscale.data.stream import Stream, select_source_indices
from xscale.errors import UserError, redact
from xscale.models.build import xscale_field_of_init
from xscale.recipe import Recipe
from xscale.run.resolve import resolve_init_to_hugging_face

DROPPED = 0.03
"""A run warns if more than this share of a stream's pairs is longer than data.max_length."""
HOT = 2e-4
"""A run that starts from a public encoder warns if its peak learning rate is higher than this."""


def notes_before_first_step(recipe: Recipe, corpus: Corpus) -> list[str]:
    """Return the lines to print before the first step."""
    weights = resolve_init_to_hugging_face(recipe.model.init) or "random"  # of a run, the checkpoint that is read
    lines = [f"peak learning rate {recipe.train.lr:g}, dropout {recipe.model.dropout:g}, initial weights: {weights}"]
    if recipe.train.epochs:
        lines.append(
            f"train.epochs is {recipe.train.epochs:g}, so the run has {recipe.train.steps:,} steps. "
            "train.steps is ignored"
        )
    if recipe.train.head_lr:
        lines.append(f"peak learning rate of new heads, if there are any: {recipe.train.head_lr:g}")
    lines += learning_rate_warnings(recipe)
    for lexicon in corpus.lexicons:
        lines.append(
            f"{lexicon.summary()}. {recipe.data.lexicon_heldout:.0%} of the entries are not used for training "
            "(data.lexicon_heldout)"
        )
        if not recipe.data.lexicons:
            lines += unread_entries_beside_lexicon_warnings(lexicon)
    if not recipe.data.lexicons:
        lines += ambiguous_dictionary_name_warnings(corpus)
    for stream in corpus.streams.last:
        lines += advice_and_unlinked_source_notes(recipe, corpus, stream)
    return lines


def unread_entries_beside_lexicon_warnings(lexicon: Lexicon) -> list[str]:
    """Return a warning for each file beside a dictionary that has further entries in the same two languages."""
    lines = list[str]()
    known = set(read_entries(lexicon.path))
    known |= {(target, source) for source, target in known}
    for path in sorted(lexicon.path.parent.glob("*.txt")):
        further = set[tuple[str, str]]()
        with suppress(UserError):  # the file is not a dictionary
            if set(languages_in_file_name(path, lexicon.langs)) == set(lexicon.langs):
                further = set(read_entries(path)) - known
        if further:
            lines.append(
                f"warning: {path} has entries ({len(further):,}) that {lexicon.path} lacks, but the run does not read "
                f"{path}. Without data.lexicons, a run reads only one dictionary for each pair of languages. To read "
                f"both dictionaries, set data.lexicons=[{lexicon.path},{path}]"
            )
    return lines


def ambiguous_dictionary_name_warnings(corpus: Corpus) -> list[str]:
    """Return a warning for each dictionary near the shards whose file name can mean several languages of the shards,
    such as en-zh.txt for zh-Hans and zh-Hant. The run does not read these dictionaries."""
    folders = set[Path]()
    for source in corpus.sources:
        folders.update(source.directory.resolve().parents[:2])
    lines = list[str]()
    for folder in sorted(folders):
        for path in sorted((folder / "lexicon").glob("*.txt")):
            pair = split_pair_name(path.name.partition(".")[0], corpus.languages)
            if pair and all(find_exact_name_or_spellings(language, corpus.languages) for language in pair):
                try:
                    languages_in_file_name(path, corpus.languages)
                except UserError as error:
                    lines.append(f"warning: the run does not read a dictionary. {error}")
    return lines


def learning_rate_warnings(recipe: Recipe) -> list[str]:
    """Return a warning if a public encoder would be trained at a rate for random weights."""
    init = recipe.model.init
    if init is None or recipe.train.lr <= HOT or xscale_field_of_init(resolve_init_to_hugging_face(init)):
        return []
    return [
        f"warning: train.lr {recipe.train.lr:g} suits a model that starts from random weights, and would "
        f"harm the pre-trained model.init {init}. Set train.lr=5e-5. Also set model.dropout=null, which keeps the "
        "dropout of model.init"
    ]


def advice_and_unlinked_source_notes(recipe: Recipe, corpus: Corpus, stream: Stream) -> list[str]:
    """Return the objective's advice about a stream, and a line about the sources that the stream leaves out."""
    advice = stream.objective.advise(stream.options, stream.active_record_count(corpus.sources), recipe.train.steps)
    lines = [f"streams.{stream.name}.{line}" for line in advice]
    languages = recipe.streams[stream.name].languages
    kind = stream.objective.record_kind
    unlinked = list[str]()
    for number in select_source_indices(stream.name, kind, languages, corpus.sources, recipe.data.languages):
        if number not in stream.sources:
            unlinked.append(folder_or_url_of_source(corpus.sources[number]))
    if unlinked:
        lines.append(
            f"streams.{stream.name} does not read the folders {', '.join(sorted(unlinked))}, because their shards "
            "have no word alignments"
        )
    return lines


def folder_or_url_of_source(source: Source) -> str:
    """Return the folder of a source, or its URL."""
    return redact(source.remote.url) if source.remote else str(source.directory)


def dropped_pairs_warnings(loader: Loader) -> list[str]:
    """Return a warning for each stream that drops more than the share DROPPED of its pairs. Warnings about phases come
    first."""
    recipes = loader.recipe.schedule
    corrections = loader.calibration.corrections_of_streams(recipes.ends)
    lines = list[str]()
    phases = zip(recipes.values, loader.corpus.streams.values, corrections.values, strict=True)
    for recipe, streams, corrections_of_phase in phases:
        length = recipe.data.max_length
        where = "" if recipe is loader.recipe else " in a phase of the run"
        for stream in streams:
            share = corrections_of_phase[stream.name].too_long
            if recipe.data.overlong == "drop" and not stream.reads_running_text and share > DROPPED:
                lines.append(
                    f"warning: streams.{stream.name} drops {share:.1%} of its pairs{where}, because these pairs are "
                    f"longer than data.max_length ({length} tokens). Set a larger data.max_length or "
                    "data.overlong=truncate, or write shards without these pairs (`xscale data write_shards pairs "
                    f"... --max_tokens {length}`)"
                )
    return lines


def unlisted_shards_warnings(corpus: Corpus) -> list[str]:
    """Return a warning for each folder with tars that its index.json does not list, such as tars that were added to the
    folder later. Sources that are cut by data.first are not looked at."""
    lines = list[str]()
    for source in corpus.sources:
        if source.remote or source.records < source.index["records"]:
            continue
        listed = {shard.name for shard in source.shards}
        unlisted = sorted(path.name for path in source.directory.glob("*.tar") if path.name not in listed)
        if unlisted:
            lines.append(
                f"warning: the run does not read {len(unlisted):,} tar file(s) in {source.directory}, such as "
                f"{unlisted[0]}, because index.json does not list these files. `xscale data index {source.directory}` "
                "adds the files to index.json. After that, this run cannot continue. Start a new run, or fork this run "
                "by --fork RUN@STEP"
            )
    return lines


def language_share_lines(loader: Loader) -> Iterator[str]:
    """Yield a line for each stream: the share of each source in its samples, and the epochs of the source if the whole
    run has these shares. Phases may have others. The lines read the lengths of many records."""
    data = loader.recipe.data
    sizes = {by: source_sizes(loader.corpus.sources, loader.calibration, by) for by in ("records", "tokens", "bytes")}
    unless = ", unless a phase changes the stream" if loader.recipe.phases else ""
    for stream in loader.last_streams:
        texts = list[str]()
        names = [loader.corpus.sources[number].sorted_langs_name for number in stream.sources]
        weights = probabilities_of_stream_sources(stream, loader.corpus.sources, data.alpha, sizes[data.alpha_by])
        for number, name, weight in zip(stream.sources, names, weights.tolist(), strict=True):
            in_epoch = sizes["records"][number]
            if stream.reads_running_text:
                in_epoch = sizes["tokens"][number] / (SAMPLE_FILL * data.max_length)
            epochs = loader.recipe.train.steps * stream.samples * weight / in_epoch
            folder = ""
            if names.count(name) > 1:
                folder = f" of the folder {folder_or_url_of_source(loader.corpus.sources[number])}"
            texts.append(f"{name} {weight:.2%} ({epochs:,.2f} epochs{folder})")
        yield (
            f"stream {stream.name} reads {stream.samples:,} samples per step{unless}. The languages have these "
            f"shares of the samples (in brackets: how often the whole run reads the data): {', '.join(texts)}"
        )
