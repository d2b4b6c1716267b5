"""What the log and the dry run say about a run before its first step."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xscale.data.corpus import Corpus, epoch_stream
from xscale.data.loader import Loader
from xscale.data.mixture import PACK_FILL, source_sizes, stream_weights
from xscale.data.stream import Stream, other_names, select_sources
from xscale.recipe import DataConfig, Recipe

DROPPED = 0.03
"""A run warns if more than this share of a stream's pairs is longer than data.max_length."""


def start_notes(recipe: Recipe, corpus: Corpus) -> list[str]:
    """Return the lines to print before the first step."""
    model = recipe.model
    gain = ""
    if not model.init and model.attention_gain is not None:
        gain = f", attention gain {model.attention_gain:g}"
    lines = [
        f"peak learning rate {recipe.train.lr:g}, dropout {model.dropout:g}{gain}, starting from "
        f"{model.init or 'random weights'}"
    ]
    for lexicon in corpus.lexicons:
        lines.append(f"{lexicon.summary()}; {recipe.data.lexicon_heldout:.0%} of its words are withheld")
    lines += other_names(corpus.sources)
    for stream in corpus.streams.last:
        lines += stream_notes(recipe, corpus, stream)
    lines += phase_notes(recipe)
    counted = epoch_stream(corpus.streams.last)
    if recipe.train.epochs and counted:
        lines.append(
            f"train.epochs {recipe.train.epochs:g}: {recipe.train.steps:,} steps, since stream {counted.name} reads "
            f"{counted.samples:,} of its {counted.records(corpus.sources):,} pairs in each"
        )
    return lines


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
        lines.append(f"streams.{stream.name} does not read {', '.join(sorted(unlinked))}, which has no word links")
    return lines


def phase_notes(recipe: Recipe) -> list[str]:
    """Return a line about each phase of the recipe: its steps, and the fields that it changes."""
    lines = list[str]()
    begin = 0
    for number, phase in enumerate(recipe.phases, start=1):
        last = min(phase.end, recipe.train.steps)
        steps = f"steps {begin + 1:,} to {last:,}" if begin < last else "no step of this run"
        fields = ", ".join(f"{name} {value}" for name, value in phase.fields.items())
        lines.append(f"phase {number}, {steps}, changes {fields or 'no field'}")
        begin = phase.end
    return lines


def dropped_pairs_warnings(loader: Loader) -> list[str]:
    """Return a warning for each stream that drops more than the share DROPPED of its pairs. Warnings about phases come
    first."""
    lines = list[str]()
    recipes = loader.recipe.schedule
    calibrations = loader.calibration.schedule(recipes.ends).values
    for recipe, streams, calibration in zip(recipes.values, loader.corpus.streams.values, calibrations, strict=True):
        data = recipe.data
        if data.overlong != "drop":
            continue
        where = "" if recipe is loader.recipe else "in a phase of the run: "
        for stream in streams:
            share = calibration.estimate_for(stream.name).too_long
            if not stream.packed and share > DROPPED:
                lines.append(
                    f"{where}warning: streams.{stream.name} drops {share:.1%} of its pairs, those longer than "
                    f"data.max_length: {data.max_length}; take a larger one, or data.overlong=truncate, or leave them "
                    f"out when shards are written: --max_tokens {data.max_length}"
                )
    return lines


class StepRange(NamedTuple):
    """Consecutive steps with the same recipe: the steps of a phase, or the steps after the last phase."""

    first: int
    end: int
    data: DataConfig
    streams: Sequence[Stream]


def step_ranges(recipe: Recipe, corpus: Corpus) -> list[StepRange]:
    """Return the ranges that have steps."""
    ranges = list[StepRange]()
    begin = 0
    ends = [*recipe.schedule.ends, recipe.train.steps]
    for end, phase, streams in zip(ends, recipe.schedule.values, corpus.streams.values, strict=True):
        end = min(end, recipe.train.steps)
        if end > begin:
            ranges.append(StepRange(begin, end, phase.data, streams))
        begin = end
    return ranges


def share_lines(loader: Loader) -> Iterator[str]:
    """Yield lines with each language's share of a stream's samples, and its epochs, for each range of steps. This reads
    the lengths of many records."""
    sources = loader.corpus.sources
    sizes = {by: source_sizes(sources, loader.calibration, by) for by in ("records", "tokens", "bytes")}
    for steps in step_ranges(loader.recipe, loader.corpus):
        for stream in steps.streams:
            if stream.samples:
                shares = language_shares(loader.corpus, steps, stream, sizes)
                title = f"steps {steps.first + 1:,} to {steps.end:,}: {stream.samples:,} samples a step"
                yield f"{title} of stream {stream.name}: {', '.join(shares)}"


def language_shares(corpus: Corpus, steps: StepRange, stream: Stream, sizes: dict[str, list[float]]) -> list[str]:
    """Return each language's or pair's share of a stream's samples and its epochs in these steps, largest first.
    sizes: the size of every source of the run in records, tokens and bytes."""
    weights = stream_weights(stream, corpus.sources, steps.data.alpha, sizes[steps.data.alpha_by])
    in_epoch = np.array([sizes["records"][source] for source in stream.sources])
    if stream.packed:
        tokens = np.array([sizes["tokens"][source] for source in stream.sources])
        in_epoch = tokens / (PACK_FILL * steps.data.max_length)
    share_of = defaultdict[str, float](float)
    samples_of = defaultdict[str, float](float)
    for source, weight, samples in zip(stream.sources, weights.tolist(), in_epoch.tolist(), strict=True):
        if weight:
            pair = corpus.sources[source].pair
            share_of[pair] += weight
            samples_of[pair] += samples
    drawn = (steps.end - steps.first) * stream.samples
    lines = list[str]()
    for pair, share in sorted(share_of.items(), key=lambda item: -item[1]):
        lines.append(f"{pair} {share:.2%} ({drawn * share / samples_of[pair]:,.2f} epochs)")
    return lines
