"""What the log and the dry run say about a run before its first step."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from xscale.data.mixture import PACK_FILL, StreamSpec, source_sizes, stream_weights
from xscale.data.streams import other_names, select_sources
from xscale.objectives import OBJECTIVES
from xscale.run_spec import RunSpec, epoch_stream, records_of

DROPPED = 0.03
"""A run warns if more than this share of a stream's pairs is longer than data.max_length."""


def start_notes(run_spec: RunSpec) -> list[str]:
    """Return the lines to print before the first step."""
    recipe = run_spec.recipe
    model = recipe.model
    gain = ""
    if not model.init and model.attention_gain is not None:
        gain = f", attention gain {model.attention_gain:g}"
    lines = [
        f"peak learning rate {recipe.train.lr:g}, dropout {model.dropout:g}{gain}, starting from "
        f"{model.init or 'random weights'}"
    ]
    for lexicon in run_spec.lexicons:
        lines.append(f"{lexicon.summary()}; {recipe.data.lexicon_heldout:.0%} of its words are withheld")
    lines += run_spec.left_out
    lines += other_names(run_spec.sources)
    for spec in run_spec.specs:
        lines += stream_notes(run_spec, spec)
    lines += phase_notes(run_spec)
    counted = epoch_stream(run_spec.specs)
    if recipe.train.epochs and counted:
        lines.append(
            f"train.epochs {recipe.train.epochs:g}: {recipe.train.steps:,} steps, since stream {counted.name} reads "
            f"{counted.samples:,} of its {records_of(counted, run_spec.sources):,} pairs in each"
        )
    return lines


def stream_notes(run_spec: RunSpec, spec: StreamSpec) -> list[str]:
    """Return the objective's advice about a stream, and a line about sources that it leaves out."""
    recipe = run_spec.recipe
    stream = recipe.streams[spec.name]
    objective = OBJECTIVES[stream.objective]
    records = records_of(spec, run_spec.sources)
    lines = [f"streams.{spec.name}.{line}" for line in objective.advise(stream.options, records, recipe.train.steps)]
    readable = select_sources(
        spec.name, objective.record_kind, stream.languages, run_spec.sources, recipe.data.languages
    )
    unlinked = sorted(run_spec.sources[s].directory.name for s in readable if s not in spec.sources)
    if unlinked:
        lines.append(f"streams.{spec.name} does not read {', '.join(unlinked)}, which has no word links")
    return lines


def phase_notes(run_spec: RunSpec) -> list[str]:
    """Return a line about each phase of the recipe: its steps, and the fields that it changes."""
    lines = list[str]()
    begin = 0
    for number, phase in enumerate(run_spec.recipe.phases, start=1):
        last = min(phase.end, run_spec.recipe.train.steps)
        steps = f"steps {begin + 1:,} to {last:,}" if begin < last else "no step of this run"
        fields = ", ".join(f"{name} {value}" for name, value in phase.fields.items())
        lines.append(f"phase {number}, {steps}, changes {fields or 'no field'}")
        begin = phase.end
    return lines


def dropped_pairs_warnings(run_spec: RunSpec) -> list[str]:
    """Return a warning for each stream that drops more than the share DROPPED of its pairs, those of phases first."""
    lines = list[str]()
    for phase in run_spec.phases:
        lines += [f"in a phase of the run: {line}" for line in dropped_pairs_warnings(phase)]
    data = run_spec.recipe.data
    if data.overlong != "drop":
        return lines
    for spec in run_spec.specs:
        share = run_spec.calibration.estimate_for(spec.name).too_long
        if not spec.packed and share > DROPPED:
            lines.append(
                f"warning: streams.{spec.name} drops {share:.1%} of its pairs, those longer than data.max_length: "
                f"{data.max_length}; take a larger one, or data.overlong=truncate, or leave them out when shards are "
                f"written: --max_tokens {data.max_length}"
            )
    return lines


class StepRange(NamedTuple):
    """Consecutive steps with the same recipe: those of a phase, or those after the last phase."""

    first: int
    end: int
    run_spec: RunSpec
    """The run spec of the phase, or of the run."""


def step_ranges(run_spec: RunSpec) -> list[StepRange]:
    """Return the ranges that have steps."""
    ranges = list[StepRange]()
    begin = 0
    for config, phase in zip(run_spec.recipe.phases, run_spec.phases, strict=True):
        end = min(config.end, run_spec.recipe.train.steps)
        ranges.append(StepRange(begin, end, phase))
        begin = end
    ranges.append(StepRange(begin, run_spec.recipe.train.steps, run_spec))
    return [steps for steps in ranges if steps.end > steps.first]


def share_lines(run_spec: RunSpec) -> Iterator[str]:
    """Yield lines with the languages' shares of each stream's samples, and their epochs, by range of steps. They read
    the lengths of many records."""
    sizes = {by: source_sizes(run_spec.sources, run_spec.calibration, by) for by in ("records", "tokens", "bytes")}
    for steps in step_ranges(run_spec):
        for spec in steps.run_spec.specs:
            if spec.samples:
                shares = language_shares(steps, spec, sizes)
                title = f"steps {steps.first + 1:,} to {steps.end:,}: {spec.samples:,} samples a step"
                yield f"{title} of stream {spec.name}: {', '.join(shares)}"


def language_shares(steps: StepRange, spec: StreamSpec, sizes: dict[str, list[float]]) -> list[str]:
    """Return each language's or pair's share of a stream's samples and its epochs in these steps, largest first.
    sizes: the size of every source of the run in records, tokens and bytes."""
    data = steps.run_spec.recipe.data
    sources = steps.run_spec.sources
    weights = stream_weights(spec, sources, data.alpha, sizes[data.alpha_by])
    in_epoch = np.array([sizes["records"][source] for source in spec.sources])
    if spec.packed:
        in_epoch = np.array([sizes["tokens"][source] for source in spec.sources]) / (PACK_FILL * data.max_length)
    share_of = defaultdict[str, float](float)
    samples_of = defaultdict[str, float](float)
    for source, weight, samples in zip(spec.sources, weights.tolist(), in_epoch.tolist(), strict=True):
        if weight:
            share_of[sources[source].pair] += weight
            samples_of[sources[source].pair] += samples
    drawn = (steps.end - steps.first) * spec.samples
    lines = list[str]()
    for pair, share in sorted(share_of.items(), key=lambda item: -item[1]):
        lines.append(f"{pair} {share:.2%} ({drawn * share / samples_of[pair]:,.2f} epochs)")
    return lines
