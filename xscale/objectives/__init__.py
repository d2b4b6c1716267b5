"""The training objectives, one file each. A new objective needs a line in OBJECTIVES; a recipe names an objective of
another package as MODULE:NAME."""

from xscale.objectives import (
    align_mlm,
    alignlm,
    contextual,
    dict_mlm,
    mlm,
    ppa,
    tlm,
    translation_ranking,
    word_contrast,
)
from xscale.objectives.base import HasQueue, Losses, Objective, Parts, Prediction, step_loss_share
from xscale.plugins import import_objective

__all__ = ["OBJECTIVES", "HasQueue", "Losses", "Objective", "Parts", "Prediction", "step_loss_share"]


class Objectives(dict[str, Objective]):
    """The objectives by name. A name such as "mypackage.ranking:OBJECTIVE" is imported when it is looked up."""

    def __missing__(self, name: str) -> Objective:
        if ":" not in name:
            raise KeyError(name)
        self[name] = import_objective(name)
        return self[name]


OBJECTIVES = Objectives(
    align_mlm=align_mlm.OBJECTIVE,
    alignlm=alignlm.OBJECTIVE,
    contextual=contextual.OBJECTIVE,
    dict_mlm=dict_mlm.OBJECTIVE,
    mlm=mlm.OBJECTIVE,
    tlm=tlm.OBJECTIVE,
    ppa=ppa.OBJECTIVE,
    translation_ranking=translation_ranking.OBJECTIVE,
    word_contrast=word_contrast.OBJECTIVE,
)
