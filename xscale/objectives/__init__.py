"""One paper, one file. This table is the whole plug-in system: a new objective is a new line here."""

from xscale.objectives import align_mlm, alignlm, contextual, dict_mlm, mlm, ppa, tlm
from xscale.objectives.base import Companion, Losses, Objective, Parts, Prediction, Prefilled

OBJECTIVES: dict[str, Objective] = {
    "align_mlm": align_mlm.OBJECTIVE,
    "alignlm": alignlm.OBJECTIVE,
    "contextual": contextual.OBJECTIVE,
    "dict_mlm": dict_mlm.OBJECTIVE,
    "mlm": mlm.OBJECTIVE,
    "tlm": tlm.OBJECTIVE,
    "ppa": ppa.OBJECTIVE,
}

__all__ = ["OBJECTIVES", "Companion", "Losses", "Objective", "Parts", "Prediction", "Prefilled"]
