"""Streams, mixtures and data sets of one phase, for tests that need no recipe."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from xscale.data.calibration import Calibration
from xscale.data.loader import StepDataset
from xscale.data.mixture import Mixture
from xscale.data.stream import Stream
from xscale.data.stream_batch import CollateContext
from xscale.recipe import DataConfig, Schedule

MONO: Any = SimpleNamespace(record_kind="mono")
PAIR: Any = SimpleNamespace(record_kind="pair")
"""As much of an objective as a mixture needs."""


def mono(name: str, sources: tuple[int, ...], samples: int) -> Stream:
    return Stream(name, MONO, None, sources, samples)


def pairs(name: str, sources: tuple[int, ...], samples: int) -> Stream:
    return Stream(name, PAIR, None, sources, samples)


def make_mixture(
    streams: Sequence[Stream],
    sources: list[Any],
    calibration: Calibration,
    *,
    max_length: int,
    alpha: float = 0.7,
    **places: Any,
) -> Mixture:
    data = Schedule.constant(DataConfig(max_length=max_length, alpha=alpha))
    return Mixture(Schedule.constant(streams), data, calibration, sources, **places)


def make_dataset(sources: list[Any], streams: Sequence[Stream], context: CollateContext) -> StepDataset:
    return StepDataset(sources, Schedule.constant(streams), Schedule.constant(context))
