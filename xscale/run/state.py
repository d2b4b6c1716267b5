"""The objects that the parts of a run share."""

from dataclasses import dataclass
from pathlib import Path

from xscale.files import Lock
from xscale.ranks import HostGroup, Process
from xscale.run.folder import Status
from xscale.run.watch import StopRequest, Watch


@dataclass(frozen=True)
class RunContext:
    """The objects of a run on this rank, from the time when the run has locked its folder."""

    out: Path
    process: Process
    host_group: HostGroup
    status: Status
    stop: StopRequest
    watch: Watch
    locks: list[Lock]
    """The lock on `out` on rank 0; empty on the other ranks. The lock lasts as long as this object."""
