"""The objects that the parts of a run's loop share, and the progress of the run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xscale.files import Lock
from xscale.ranks import HostGroup, Process
from xscale.run.folder import Status
from xscale.run.watch import StopRequest, Watch
from xscale.step.ds_config import EngineConfig


@dataclass(frozen=True)
class RunContext:
    """The objects of a run on this rank."""

    config: EngineConfig
    engine: Any
    out: Path
    process: Process
    host_group: HostGroup
    status: Status
    stop: StopRequest
    watch: Watch
    locks: list[Lock]
    """The lock on `out` on rank 0; empty on the other ranks."""


@dataclass(frozen=True)
class TrainState:
    """The progress of a run between two steps."""

    step: int
    """The number of steps done."""
    data: dict[str, Any]
    """The positions of the streams in their data (data/mixture.py)."""
