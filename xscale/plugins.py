"""Imports an objective of another package, which a recipe names as MODULE:NAME."""

import importlib
from dataclasses import is_dataclass
from typing import Any

from xscale.errors import UserError


def import_objective(name: str) -> Any:
    """Return the Objective that `name` names, such as "mypackage.ranking:OBJECTIVE". Raises UserError."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing a module may raise anything
        raise UserError(
            f"{name} cannot be imported: {type(error).__name__}: {error}; write MODULE:NAME, such as "
            f"mypackage.ranking:OBJECTIVE, and install its package, or add its folder to PYTHONPATH"
        ) from None
    objective = getattr(module, attribute, None)
    if not is_dataclass(getattr(objective, "options", None)):
        raise UserError(f"{name} is not an Objective (xscale/objectives/base.py); write MODULE:NAME")
    record_kind = getattr(objective, "record_kind", None)
    if record_kind not in ("mono", "pair"):
        raise UserError(f'{name} has record_kind = {record_kind!r}; it must be "mono" or "pair"')
    return objective
