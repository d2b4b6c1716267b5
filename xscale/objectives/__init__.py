"""One paper, one file. This table is the whole plug-in system: a new objective is a new line here."""

from xscale.objectives import mlm, tlm
from xscale.objectives.base import Companion, LossSums, Objective, Parts

OBJECTIVES: dict[str, Objective] = {
    "mlm": mlm.OBJECTIVE,
    "tlm": tlm.OBJECTIVE,
}

__all__ = ["OBJECTIVES", "Companion", "LossSums", "Objective", "Parts"]
