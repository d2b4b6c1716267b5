"""Calibration before step 1: tokenises some samples of each stream, and compares their numbers of tokens with the
estimates from their bytes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from xscale.data.calibration import Calibration, Correction
from xscale.data.corpus import Corpus
from xscale.data.loader import StepDataset, shared_collate_context
from xscale.data.mixture import Mixture, Plan
from xscale.data.ragged import evenly_spaced_indices
from xscale.data.shards import Source
from xscale.data.stream import Stream
from xscale.data.tokenizer import Tokenizer
from xscale.metric_keys import MetricKey
from xscale.ranks import CpuGroup
from xscale.recipe import Recipe, Schedule

DRAWN = 2048
"""The number of samples of each stream whose tokens are estimated."""
READ = 512
"""The maximum number of samples within data.max_length that are tokenised, in groups of GROUP."""
GROUP = 8
BEYOND = 64
"""The maximum number of samples beyond data.max_length that are tokenised, one by one."""
DRAWN_TOKENS = 1 << 22
"""The samples that are drawn from running text have together at most about this many tokens."""
SHARDS = 256
"""Samples come from this many shards of all sources together, and from at least SHARDS_OF_SOURCE of each source."""
SHARDS_OF_SOURCE = 4
LINE_SHARDS = 8
"""The maximum number of shards of each source that are read to fit tokens to bytes."""
LINE_RECORDS = 1024
"""The fit of tokens to bytes reads LINE_RECORDS / (number of sources) records of a shard: at least 8, at most 32."""


def calibrate(recipe: Recipe, corpus: Corpus, cpu_group: CpuGroup) -> Calibration:
    """Return the calibration of a run and its phases. All ranks of `cpu_group` call it together and get the same
    result."""
    shards = max(SHARDS // len(corpus.sources), SHARDS_OF_SOURCE)
    sources = [source.with_evenly_spaced_shards(shards) for source in corpus.sources]
    records = min(max(LINE_RECORDS // len(sources), 8), 32)
    fits = list[Callable[[], tuple[float, float]]]()
    for source in sources:
        fits.append(partial(fit_tokens_to_bytes, source, corpus.tokenizer, records))
    fitted = Calibration(cpu_group.divide_work_and_gather(fits), {})
    by_phase = list[dict[str, Correction]]()
    for phase, streams in zip(recipe.schedule.values, corpus.streams.values, strict=True):
        context = Schedule.constant(shared_collate_context(corpus, phase))
        dataset = StepDataset(sources, Schedule.constant(streams), context)
        works = list[Callable[[], Correction]]()
        for stream in streams:
            works.append(partial(measure_correction, stream, phase, dataset, fitted))
        names = [stream.name for stream in streams]
        by_phase.append(dict(zip(names, cpu_group.divide_work_and_gather(works), strict=True)))
    return Calibration(fitted.lines, by_phase[-1], by_phase[:-1])


def measure_correction(stream: Stream, recipe: Recipe, dataset: StepDataset, fitted: Calibration) -> Correction:
    """Return the stream's correction, from some samples that are tokenised. recipe: that of the phase. fitted: a
    calibration without streams."""
    data = recipe.data
    drawn = DRAWN
    longest: float = data.max_length
    if stream.reads_running_text:
        drawn = min(DRAWN, max(DRAWN_TOKENS // data.max_length, GROUP))
        longest = math.inf  # running text is split into samples that fit, so none is dropped or cut
    few: Sequence[Stream] = [replace(stream, samples=drawn)]
    mixture = Mixture(
        Schedule.constant(few),
        Schedule.constant(data),
        fitted,
        dataset.sources,
        seed=recipe.train.seed,
        max_tokens=1 << 40,
        rank=0,
        world=1,
    )
    table = mixture.next_plan_of_rank().tables[stream.name]
    estimated_tokens = np.bincount(table.sample, weights=table.tokens)
    groups = choose_groups_to_tokenise(estimated_tokens, longest)
    group_of_sample = np.full(drawn, -1)
    for number, group in enumerate(groups):
        group_of_sample[group] = number
    row = group_of_sample[table.sample]
    in_groups = np.argsort(row, kind="stable")[(row < 0).sum() :]
    rows = table.select_records(in_groups)._replace(row=row[in_groups])
    plan = Plan(0, {stream.name: rows}, len(groups), 1, {}, rank=0)
    batches = dataset.collate_rows(stream, plan, dataset.read_and_tokenise(stream, plan))
    return correction_from_groups(
        estimated_tokens,
        groups,
        tokens_of_groups=np.array([batch.sequences.lengths.sum() for batch in batches]),
        max_length=longest,
        too_long_of_groups=np.array([batch.pair_counts[MetricKey("too_long", stream.name)] for batch in batches]),
    )


def choose_groups_to_tokenise(estimated_tokens_of_samples: np.ndarray, max_length: float) -> list[np.ndarray]:
    """Return the indices of the samples to tokenise, in groups with similar estimates. A sample over max_length forms a
    group by itself."""
    shortest_first = np.argsort(estimated_tokens_of_samples, kind="stable")
    count_within = int((estimated_tokens_of_samples <= max_length).sum())
    within = shortest_first[:count_within]
    beyond = shortest_first[count_within:]
    groups = list[np.ndarray]()
    read = within[:: DRAWN // READ]
    for start in range(0, len(read), GROUP):
        groups.append(read[start : start + GROUP])
    if len(beyond):
        step = -(-len(beyond) // BEYOND)
        groups.extend(beyond[::step, None])
    return groups


def correction_from_groups(
    estimated_tokens_of_samples: np.ndarray,
    samples_of_groups: list[np.ndarray],
    tokens_of_groups: np.ndarray,
    max_length: float,
    too_long_of_groups: np.ndarray | int = 0,
) -> Correction:
    """Return a stream's correction, computed from groups of tokenised samples.

    estimated_tokens_of_samples: for all drawn samples [samples]. samples_of_groups: the indices of each group's
    samples, whose estimates are either all over max_length or all within it. tokens_of_groups: the number of tokens of
    each group in a packed row [groups]. too_long_of_groups: the number of each group's samples that are longer than
    max_length [groups].
    """
    expected = np.array([estimated_tokens_of_samples[group].sum() for group in samples_of_groups])
    samples = np.array(list(map(len, samples_of_groups)))
    over = expected > max_length * samples
    within = ~over
    is_beyond = estimated_tokens_of_samples > max_length
    drawn_beyond_per_read = is_beyond.sum() / max(samples[over].sum(), 1)
    drawn_within_per_read = (~is_beyond).sum() / max(samples[within].sum(), 1)
    too_long_drawn = np.where(over, drawn_beyond_per_read, drawn_within_per_read) * too_long_of_groups
    ratio = 1.0
    if within.any():
        ratio = round(float(tokens_of_groups[within].sum() / expected[within].sum()), 4)
    beyond = None
    if over.any():
        beyond = round(float(tokens_of_groups[over].sum() / samples[over].sum()), 1)
    return Correction(ratio, beyond, round(float(too_long_drawn.sum() / len(estimated_tokens_of_samples)), 4))


def fit_tokens_to_bytes(source: Source, tokenizer: Tokenizer, records_per_shard: int = 32) -> tuple[float, float]:
    """Return (a, b): a record has about a * bytes + b tokens. They are fitted to `records_per_shard` records of
    each of at most LINE_SHARDS shards."""
    tokens = list[float]()
    lengths = list[np.ndarray]()
    for shard in evenly_spaced_indices(len(source.counts), LINE_SHARDS).tolist():
        records = evenly_spaced_indices(int(source.counts[shard]), records_per_shard)
        lengths.append(source.byte_lengths(shard, records))
        for record in records.tolist():
            ids = tokenizer.encode(list(source.read(shard, record).texts))
            tokens.append(sum(map(len, ids)) + len(ids))
    return fit_slope_and_intercept(np.concatenate(lengths).astype(float), np.array(tokens, dtype=float))


def fit_slope_and_intercept(lengths: np.ndarray, tokens: np.ndarray) -> tuple[float, float]:
    """Return (a, b): a * lengths + b approximates `tokens` and has the same mean. Both arrays are [n_records]."""
    variance = lengths.var()
    slope = ((lengths - lengths.mean()) * tokens).mean() / variance if variance else 0.0
    if slope <= 0:
        slope = tokens.mean() / lengths.mean()
    slope = round(float(slope), 6)
    return slope, round(float(tokens.mean() - slope * lengths.mean()), 3)
