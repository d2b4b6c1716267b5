"""The training objectives, one file each. A new objective needs a line in OBJECTIVES, or in a plug-in (plugins.py)."""

from xscale.objectives import align_mlm, alignlm, contextual, dict_mlm, mlm, ppa, tlm
from xscale.objectives.base import HasQueue, Losses, Objective, Parts, Prediction, step_loss_share

__all__ = ["OBJECTIVES", "HasQueue", "Losses", "Objective", "Parts", "Prediction", "step_loss_share"]

OBJECTIVES: dict[str, Objective] = {
    "align_mlm": align_mlm.OBJECTIVE,
    "alignlm": alignlm.OBJECTIVE,
    "contextual": contextual.OBJECTIVE,
    "dict_mlm": dict_mlm.OBJECTIVE,
    "mlm": mlm.OBJECTIVE,
    "tlm": tlm.OBJECTIVE,
    "ppa": ppa.OBJECTIVE,
}
