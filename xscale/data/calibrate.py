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
from xscale.data.mixture import Mixture, StepPlan, StreamSpec
from xscale.data.ragged import evenly_spaced
from xscale.data.shards import Source
from xscale.data.tokenizer import Tokenizer

DRAWN, READ, BEYOND, GROUP = 2048, 512, 64, 8
"""The tokens of each stream's first DRAWN samples are estimated. Of the samples within data.max_length, at most
READ are tokenised, in groups of GROUP; of the longer ones, at most BEYOND, one by one."""
DRAWN_TOKENS = 1 << 22
"""The approximate limit of the tokens of running text that are estimated. Of long samples, fewer are drawn."""
SHARDS, SHARDS_OF_SOURCE = 256, 4
"""The number of shards of all sources together that are sampled, but at least SHARDS_OF_SOURCE of each source."""
LINE_RECORDS, LINE_SHARDS = 1024, 8
"""The fit of tokens to bytes reads at most LINE_SHARDS shards of each source, and of each shard LINE_RECORDS / (number
of sources) records, but at least 8 and at most 32."""

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
    lines = lines or divide_work(
        [partial(bytes_to_tokens, source, tokenizer, min(shards, LINE_SHARDS), sample) for source in dataset.sources]
    )
    found = Calibration(lines, {})
    settings = {"seed": seed, "alpha": alpha, "alpha_by": alpha_by, "max_length": max_length}
    estimates = divide_work([partial(estimate_stream, spec, dataset, found, settings) for spec in specs])
    return replace(found, streams={spec.name: of for spec, of in zip(specs, estimates, strict=True)})


def estimate_stream(
    spec: StreamSpec, dataset: StepDataset, calibration: Calibration, settings: dict[str, Any]
) -> Estimate:
    """Return the stream's estimate, from a tokenised sample. calibration: one that has the sources' `lines`."""
    samples = min(DRAWN, max(DRAWN_TOKENS // settings["max_length"], GROUP)) if spec.packed else DRAWN
    spec = replace(spec, samples=samples)
    mixture = Mixture([spec], dataset.sources, calibration, **settings, max_tokens=1 << 40, rank=0, world=1)
    records = mixture.next_batch().records[spec.name]
    estimated_tokens = np.bincount(records.sample, weights=records.tokens)
    longest = math.inf if spec.packed else settings["max_length"]  # running text is neither dropped nor truncated
    groups = similar_samples(estimated_tokens, longest)
    rows = [{spec.name: records.select(np.flatnonzero(np.isin(records.sample, group)))} for group in groups]
    batches = dataset.stream_batches(spec.name, StepPlan(0, rows, {}, rank=0, world=1))
    too_long = np.array([batch.too_long for batch in batches])
    found = estimate(estimated_tokens, groups, [batch.sequences.lengths for batch in batches], longest, too_long)
    return replace(found, counts=dict(sum((Counter(batch.targets) for batch in batches), Counter())))


def similar_samples(estimated_tokens: np.ndarray, max_length: float) -> list[np.ndarray]:
    """Return the indices of the samples to tokenise, in groups of similar estimates; one over max_length is alone."""
    shortest_first = np.argsort(estimated_tokens, kind="stable")
    within, beyond = np.split(shortest_first, [int((estimated_tokens <= max_length).sum())])
    some, single = within[:: DRAWN // READ], beyond[:: -(-len(beyond) // BEYOND) or 1]
    groups = np.split(some, range(GROUP, len(some), GROUP)) if len(some) else []
    return [*groups, *np.split(single, len(single))] if len(single) else groups


def estimate(
    estimated_tokens: np.ndarray,
    groups: list[np.ndarray],
    lengths: list[np.ndarray],
    max_length: float,
    too_long: np.ndarray | int = 0,
) -> Estimate:
    """Return a stream's estimate, computed from groups of samples that were tokenised.

    estimated_tokens: estimates of many samples [samples]. groups: the indices of each group's samples, of which either
    all or none are estimated over max_length. lengths: lengths of each group's sequences in a packed row. too_long:
    number of each group's samples that are longer than max_length [groups].
    """
    expected = np.array([estimated_tokens[group].sum() for group in groups])
    samples = np.array([len(group) for group in groups])
    tokens = np.array([of_group.sum() for of_group in lengths])
    over = expected > max_length * samples
    read = np.bincount(over, weights=samples, minlength=2)
    drawn = np.bincount(estimated_tokens > max_length, minlength=2)
    within, beyond = np.bincount(over, weights=tokens, minlength=2)
    stands_for = (drawn / np.maximum(read, 1))[over.astype(int)]
    share = (stands_for * too_long).sum() / len(estimated_tokens)
    return Estimate(
        ratio=round(float(within / expected[~over].sum()), 4) if read[0] else 1.0,
        beyond=round(float(beyond / read[1]), 1) if read[1] else None,
        too_long=round(float(share), 4),
    )


def bytes_to_tokens(
    source: Source, tokenizer: Tokenizer, shards: int = LINE_SHARDS, sample: int = 32
) -> tuple[float, float]:
    """Return (a, b): a record has about a * bytes + b tokens, fitted to `sample` records of each of `shards` shards."""
    places = [
        (shard, evenly_spaced(int(source.counts[shard]), sample))
        for shard in evenly_spaced(len(source.counts), shards).tolist()
    ]
    texts = [source.read(shard, record).texts for shard, records in places for record in records.tolist()]
    ids = iter(tokenizer.encode([text for of_record in texts for text in of_record]))
    tokens = np.array([sum(len(next(ids)) + 1 for _ in of_record) for of_record in texts], dtype=float)
    lengths = np.concatenate([source.lengths(*place) for place in places]).astype(float)
    return fit_line(lengths, tokens)


def fit_line(lengths: np.ndarray, tokens: np.ndarray) -> tuple[float, float]:
    """Return (a, b): a * lengths + b approximates `tokens` and has the same mean. Both arrays are [n_records]."""
    variance = lengths.var()
    slope = ((lengths - lengths.mean()) * tokens).mean() / variance if variance else 0.0
    if slope <= 0:
        slope = tokens.mean() / lengths.mean()
    slope = round(float(slope), 6)
    return slope, round(float(tokens.mean() - slope * lengths.mean()), 3)
