"""Loads plug-ins: modules of other packages, named by `--plugin MODULE`, with objectives and model types."""

import importlib
from dataclasses import fields
from typing import Any

from xscale.config import StreamConfig
from xscale.errors import UserError
from xscale.models.encoder import HEADS
from xscale.models.flat import FLAT
from xscale.objectives import OBJECTIVES, Objective

TABLES: dict[str, dict[str, Any]] = {"OBJECTIVES": OBJECTIVES, "HEADS": HEADS, "FLAT": FLAT}
"""The names of the tables that a plug-in may define, and the tables of xscale to which their entries are added."""


def load_plugins(names: list[str]) -> None:
    """Import modules and add the entries of their tables to xscale's. Raises UserError."""
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UserError(f"--plugin {name}: give a module's name, such as mypackage.ranking, not a path")
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise UserError(
                f"--plugin {name} cannot be imported ({error}); install its package, or add its folder to PYTHONPATH"
            ) from None
        except (Exception, SystemExit) as error:  # whatever a module does when it is imported
            raise UserError(f"--plugin {name} cannot be imported: {type(error).__name__}: {error}") from None
        found = {table: getattr(module, table) for table in TABLES if hasattr(module, table)}
        if not found:
            raise UserError(f"--plugin {name} defines none of {', '.join(TABLES)}; define at least one of these dicts")
        for table, entries in found.items():
            if not isinstance(entries, dict):
                raise UserError(f"--plugin {name}: {table} is not a dict")
            if table == "OBJECTIVES":
                _check_objectives(name, entries)
            taken = [key for key, value in entries.items() if TABLES[table].get(key, value) is not value]
            if taken:
                raise UserError(
                    f"--plugin {name}: {table} has {', '.join(taken)}, which exists already; choose another name"
                )
            TABLES[table].update(entries)


def _check_objectives(plugin: str, objectives: dict[str, Any]) -> None:
    own = {field.name for field in fields(StreamConfig)}
    for name, objective in objectives.items():
        where = f"--plugin {plugin}: OBJECTIVES[{name!r}]"
        if not isinstance(objective, Objective):
            raise UserError(f"{where} is not an Objective (xscale/objectives/base.py)")
        if objective.reads not in ("mono", "pair"):
            raise UserError(f'{where}.reads = {objective.reads!r}: must be "mono" or "pair"')
        clash = sorted(own & {field.name for field in fields(objective.options)})
        if clash:
            raise UserError(f"{where}: all streams already have options named {', '.join(clash)}; rename these options")
