"""The training objectives, one file each. A new objective needs a line in OBJECTIVES; a recipe names an objective of
another package as MODULE:NAME."""

import importlib
from dataclasses import is_dataclass

from xscale.errors import UserError
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
from xscale.recipe import STREAM_FIELDS, field_names

__all__ = ["OBJECTIVES", "HasQueue", "Losses", "Objective", "Parts", "Prediction", "step_loss_share"]


def import_objective(name: str) -> Objective:
    """Return the Objective of another package that `name` names, such as "mypackage.ranking:OBJECTIVE". Raises
    UserError."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing a module may raise anything
        raise UserError(
            f"{name} cannot be imported ({type(error).__name__}: {error}). Write MODULE:NAME, such as "
            "mypackage.ranking:OBJECTIVE. Install the package of MODULE, or add the folder that contains the "
            "package to PYTHONPATH"
        ) from None
    objective = getattr(module, attribute, None)
    if not isinstance(objective, Objective):
        raise UserError(
            f"{name} is not an objective. Write MODULE:NAME, where NAME is a variable of MODULE with an instance of "
            "Objective (xscale/objectives/base.py)"
        )
    if not is_dataclass(objective.options):
        raise UserError(f"{name}: the `options` of the objective must be a dataclass")
    if objective.record_kind not in ("mono", "pair"):
        raise UserError(f'{name}: record_kind is {objective.record_kind!r}, and must be "mono" or "pair"')
    taken = [field for field in field_names(objective.options) if field in STREAM_FIELDS]
    if taken:
        raise UserError(
            f"{name}: the objective has the options {', '.join(taken)}, but every stream already has fields with "
            "these names. Rename the options of the objective"
        )
    return objective


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
