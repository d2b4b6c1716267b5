"""Objectives and model types of other packages: `--plugin MODULE`."""

import importlib
from typing import Any

from xscale.errors import UserError
from xscale.models.encoder import HEADS
from xscale.models.flat import FLAT
from xscale.objectives import OBJECTIVES

TABLES: dict[str, dict[str, Any]] = {"OBJECTIVES": OBJECTIVES, "HEADS": HEADS, "FLAT": FLAT}
"""What a module may bring: tables that are added to objectives/, models/encoder.py and models/flat.py."""


def load_plugins(names: list[str]) -> None:
    """Import modules and add their tables. Raises UserError."""
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise UserError(
                f"--plugin {name} cannot be imported ({error}); install its package, or add its folder to PYTHONPATH"
            ) from None
        found = {table: getattr(module, table) for table in TABLES if hasattr(module, table)}
        if not found:
            raise UserError(f"--plugin {name} has none of the tables {', '.join(TABLES)}")
        for table, entries in found.items():
            taken = [key for key, value in entries.items() if TABLES[table].get(key, value) is not value]
            if taken:
                raise UserError(f"--plugin {name}: {table} has {', '.join(taken)}, a name that is taken")
            TABLES[table].update(entries)
