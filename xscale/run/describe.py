"""Makes the lines that the log and the dry run print about a run before its first step."""

from collections import defaultdict
from collections.abc import Iterator

from xscale.data.corpus import Corpus, first_pair_stream
from xscale.data.loader import Loader
from xscale.data.mixture import PACK_FILL, source_sizes, stream_weights
from xscale.data.shards import Source
from xscale.data.stream import Stream, describe_renamed_languages, select_sources
from xscale.models.build import xscale_field_of_init
from xscale.recipe import DataConfig, Recipe
from xscale.run.resolve import initial_directory

DROPPED = 0.03
"""A run warns if more than this share of a stream's pairs is longer than data.max_length."""
HOT = 2e-4
"""A run that starts from a public encoder warns if its peak learning rate is higher than this."""


def start_notes(recipe: Recipe, corpus: Corpus) -> list[str]:
    """Return the lines to print before the first step."""
    model = recipe.model
    lines = [
        f"peak learning rate {recipe.train.lr:g}, dropout {model.dropout:g}, starting from "
        f"{model.init or 'random weights'}"
    ]
    lines += learning_rate_warnings(recipe)
    for lexicon in corpus.lexicons:
        lines.append(f"{lexicon.summary()}; {recipe.data.lexicon_heldout:.0%} of its words are withheld")
    lines += describe_renamed_languages(corpus.sources)
    for stream in corpus.streams.last:
        lines += stream_notes(recipe, corpus, stream)
    counted = first_pair_stream(corpus.streams.last)
    if recipe.train.epochs and counted:
        lines.append(
            f"train.epochs {recipe.train.epochs:g}: {recipe.train.steps:,} steps, since stream {counted.name} reads "
            f"{counted.samples:,} of its {counted.records(corpus.sources):,} pairs in each"
        )
    return lines


def learning_rate_warnings(recipe: Recipe) -> list[str]:
    """Return a warning if a public encoder would be trained at a rate for random weights."""
    init = recipe.model.init
    if init is None or recipe.train.lr <= HOT or xscale_field_of_init(initial_directory(init)):
        return []
    return [
        f"warning: train.lr {recipe.train.lr:g} suits random weights and would harm the pre-trained model.init {init}; "
        f"set train.lr=5e-5 model.dropout=null"
    ]


def stream_notes(recipe: Recipe, corpus: Corpus, stream: Stream) -> list[str]:
    """Return the objective's advice about a stream, and a line about the sources that the stream leaves out."""
    advice = stream.objective.advise(stream.options, stream.records(corpus.sources), recipe.train.steps)
    lines = [f"streams.{stream.name}.{line}" for line in advice]
    languages = recipe.streams[stream.name].languages
    kind = stream.objective.record_kind
    unlinked = list[str]()
    for number in select_sources(stream.name, kind, languages, corpus.sources, recipe.data.languages):
        if number not in stream.sources:
            unlinked.append(corpus.sources[number].directory.name)
    if unlinked:
        lines.append(
            f"streams.{stream.name} does not read {', '.join(sorted(unlinked))}, whose first record has no word links"
        )
    return lines


def dropped_pairs_warnings(loader: Loader) -> list[str]:
    """Return a warning for each stream that drops more than the share DROPPED of its pairs. Warnings about phases come
    first."""
    lines = list[str]()
    recipes = loader.recipe.schedule
    calibrations = loader.calibration.schedule(recipes.ends).values
    for recipe, streams, calibration in zip(recipes.values, loader.corpus.streams.values, calibrations, strict=True):
        for stream in streams:
            share = calibration.estimate_for(stream.name).too_long
            if recipe.data.overlong == "drop" and not stream.packed and share > DROPPED:
                where = "" if recipe is loader.recipe else "in a phase of the run: "
                length = recipe.data.max_length
                lines.append(
                    f"{where}warning: streams.{stream.name} drops {share:.1%} of its pairs, those longer than "
                    f"data.max_length: {length}; take a larger one, or data.overlong=truncate, or leave them "
                    f"out when shards are written: --max_tokens {length}"
                )
    return lines


def language_share_lines(loader: Loader) -> Iterator[str]:
    """Yield lines with the languages' shares of each stream's samples, and their epochs, by range of steps with the
    same recipe. They read the lengths of many records."""
    sources = loader.corpus.sources
    recipe = loader.recipe
    sizes = {by: source_sizes(sources, loader.calibration, by) for by in ("records", "tokens", "bytes")}
    begin = 0
    ends = [*recipe.schedule.ends, recipe.train.steps]
    for end, phase, streams in zip(ends, recipe.schedule.values, loader.corpus.streams.values, strict=True):
        steps = min(end, recipe.train.steps) - begin
        for stream in streams:
            if stream.samples and steps > 0:
                shares = language_shares(sources, phase.data, stream, steps, sizes)
                title = f"steps {begin + 1:,} to {begin + steps:,}: {stream.samples:,} samples a step"
                yield f"{title} of stream {stream.name}: {', '.join(shares)}"
        begin = end


def language_shares(
    sources: list[Source], data: DataConfig, stream: Stream, steps: int, sizes: dict[str, list[float]]
) -> list[str]:
    """Return each language's or pair's share of a stream's samples and its epochs in these steps, largest first.
    sizes: the size of every source of the run in records, tokens and bytes."""
    weights = stream_weights(stream, sources, data.alpha, sizes[data.alpha_by])
    samples_of = defaultdict[str, float](float)
    share_of = defaultdict[str, float](float)
    for number, weight in zip(stream.sources, weights.tolist(), strict=True):
        pair = sources[number].pair
        in_epoch = sizes["records"][number]
        if stream.packed:
            in_epoch = sizes["tokens"][number] / (PACK_FILL * data.max_length)
        if weight:
            share_of[pair] += weight
            samples_of[pair] += in_epoch
    drawn = steps * stream.samples
    lines = list[str]()
    for pair, share in sorted(share_of.items(), key=lambda item: -item[1]):
        lines.append(f"{pair} {share:.2%} ({drawn * share / samples_of[pair]:,.2f} epochs)")
    return lines
