"""Calibration before step 1: compares the tokens of each stream's samples with the estimate from their bytes."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from xscale.data.calibration import Calibration, Estimate
from xscale.data.loader import StepDataset
from xscale.data.mixture import Mixture, SampledRecords, StepPlan, StreamSpec
from xscale.data.ragged import evenly_spaced
from xscale.data.shards import Source
from xscale.data.tokenizer import Tokenizer

DRAWN = 2048
"""The number of samples of each stream whose tokens are estimated."""
READ = 512
"""The maximum number of samples within data.max_length that are tokenised, in groups of GROUP."""
GROUP = 8
BEYOND = 64
"""The maximum number of samples beyond data.max_length that are tokenised, one by one."""
DRAWN_TOKENS = 1 << 22
"""The approximate limit of the tokens of running text that are estimated. Of long samples, fewer are drawn."""
SHARDS = 256
"""The number of shards of all sources together that are sampled, but at least SHARDS_OF_SOURCE of each source."""
SHARDS_OF_SOURCE = 4
LINE_SHARDS = 8
"""The maximum number of shards of each source that the fit of tokens to bytes reads."""
LINE_RECORDS = 1024
"""The fit reads LINE_RECORDS / (number of sources) records of each shard, but at least 8 and at most 32."""

Work = Callable[[], Any]


def run_serially(works: list[Work]) -> list[Any]:
    """Call all functions in this process and return their values. HostGroup.divide_work divides them among ranks."""
    return [work() for work in works]


def calibrate(
    specs: list[StreamSpec],
    sources: list[Source],
    dataset: StepDataset,
    *,
    seed: int,
    alpha: float,
    max_length: int,
    divide_work: Callable[[list[Work]], list[Any]] = run_serially,
    lines: list[tuple[float, float]] | None = None,
    alpha_by: str = "records",
) -> Calibration:
    """Return the calibration of a run, which is equal on every machine. divide_work: a function that calls functions
    and returns their values. lines: Calibration.lines, if another phase of the run has measured them."""
    shards = max(SHARDS // len(sources), SHARDS_OF_SOURCE)
    sample = min(max(LINE_RECORDS // len(sources), 8), 32)
    dataset = copy.copy(dataset)
    dataset.sources = [source.with_shards(shards) for source in sources]
    tokenizer = dataset.context.tokenizer
    if lines is None:
        fit_shards = min(shards, LINE_SHARDS)
        fits: list[Work] = [
            partial(bytes_to_tokens, source, tokenizer, fit_shards, sample) for source in dataset.sources
        ]
        lines = divide_work(fits)
    fitted = Calibration(lines, {})
    settings = {"seed": seed, "alpha": alpha, "alpha_by": alpha_by, "max_length": max_length}
    estimates = divide_work([partial(estimate_stream, spec, dataset, fitted, settings) for spec in specs])
    names = [spec.name for spec in specs]
    return replace(fitted, streams=dict(zip(names, estimates, strict=True)))


def estimate_stream(
    spec: StreamSpec, dataset: StepDataset, calibration: Calibration, settings: dict[str, Any]
) -> Estimate:
    """Return the stream's estimate, from a tokenised sample. calibration: one that has the sources' `lines`."""
    samples = DRAWN
    longest: float = settings["max_length"]
    if spec.packed:
        samples = min(DRAWN, max(DRAWN_TOKENS // settings["max_length"], GROUP))
        longest = math.inf  # running text is neither dropped nor truncated
    spec = replace(spec, samples=samples)
    mixture = Mixture([spec], dataset.sources, calibration, **settings, max_tokens=1 << 40, rank=0, world=1)
    records = mixture.next_batch().records[spec.name]
    estimated_tokens = np.bincount(records.sample, weights=records.tokens)
    groups = similar_samples(estimated_tokens, longest)
    rows = list[dict[str, SampledRecords]]()
    for group in groups:
        rows.append({spec.name: records.select(np.flatnonzero(np.isin(records.sample, group)))})
    batches = dataset.stream_batches(spec.name, StepPlan(0, rows, {}, rank=0, world=1))
    targets = Counter[str]()
    for batch in batches:
        targets.update(batch.target_counts)
    measured = estimate(
        estimated_tokens,
        groups,
        tokens=np.array([batch.sequences.lengths.sum() for batch in batches]),
        max_length=longest,
        too_long=np.array([batch.too_long for batch in batches]),
    )
    return replace(measured, counts=dict(targets))


def similar_samples(estimated_tokens: np.ndarray, max_length: float) -> list[np.ndarray]:
    """Return the indices of the samples to tokenise, in groups of similar estimates; one over max_length is alone."""
    shortest_first = np.argsort(estimated_tokens, kind="stable")
    count_within = int((estimated_tokens <= max_length).sum())
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


def estimate(
    estimated_tokens: np.ndarray,
    groups: list[np.ndarray],
    tokens: np.ndarray,
    max_length: float,
    too_long: np.ndarray | int = 0,
) -> Estimate:
    """Return a stream's estimate, computed from groups of samples that were tokenised.

    estimated_tokens: estimates of many samples [samples]. groups: the indices of each group's samples, of which either
    all or none are estimated over max_length. tokens: tokens of each group's sequences in a packed row [groups].
    too_long: number of each group's samples that are longer than max_length [groups].
    """
    expected = np.array([estimated_tokens[group].sum() for group in groups])
    samples = np.array([len(group) for group in groups])
    over = expected > max_length * samples
    read_within = int(samples[~over].sum())
    read_beyond = int(samples[over].sum())
    drawn_beyond = int((estimated_tokens > max_length).sum())
    drawn_within = len(estimated_tokens) - drawn_beyond
    drawn_per_read = np.where(over, drawn_beyond / max(read_beyond, 1), drawn_within / max(read_within, 1))
    ratio = 1.0
    if read_within:
        ratio = round(float(tokens[~over].sum() / expected[~over].sum()), 4)
    beyond = None
    if read_beyond:
        beyond = round(float(tokens[over].sum() / read_beyond), 1)
    too_long_share = float((drawn_per_read * too_long).sum() / len(estimated_tokens))
    return Estimate(ratio, beyond, round(too_long_share, 4))


def bytes_to_tokens(
    source: Source, tokenizer: Tokenizer, shards: int = LINE_SHARDS, sample: int = 32
) -> tuple[float, float]:
    """Return (a, b): a record has about a * bytes + b tokens, fitted to `sample` records of each of `shards` shards."""
    tokens = list[float]()
    lengths = list[np.ndarray]()
    for shard in evenly_spaced(len(source.counts), shards).tolist():
        records = evenly_spaced(int(source.counts[shard]), sample)
        lengths.append(source.lengths(shard, records))
        for record in records.tolist():
            ids = tokenizer.encode(list(source.read(shard, record).texts))
            tokens.append(sum(map(len, ids)) + len(ids))
    return fit_line(np.concatenate(lengths).astype(float), np.array(tokens, dtype=float))


def fit_line(lengths: np.ndarray, tokens: np.ndarray) -> tuple[float, float]:
    """Return (a, b): a * lengths + b approximates `tokens` and has the same mean. Both arrays are [n_records]."""
    variance = lengths.var()
    slope = ((lengths - lengths.mean()) * tokens).mean() / variance if variance else 0.0
    if slope <= 0:
        slope = tokens.mean() / lengths.mean()
    slope = round(float(slope), 6)
    return slope, round(float(tokens.mean() - slope * lengths.mean()), 3)
