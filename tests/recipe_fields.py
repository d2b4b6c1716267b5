"""The tables of fields in docs/reference/recipe.md, from the code: `python -m tests.recipe_fields` writes them anew."""

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from xscale import recipe
from xscale.objectives import OBJECTIVES
from xscale.objectives.mlm import MaskedOptions

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "recipe.md"
SECTIONS = {
    "model": recipe.ModelConfig,
    "streams.NAME": recipe.StreamConfig,
    "data": recipe.DataConfig,
    "train": recipe.TrainConfig,
    "checkpoint": recipe.CheckpointConfig,
    "eval": recipe.EvalConfig,
    "eval.tasks[]": recipe.EvalTask,
}
HEADING = "| field | value | default | meaning |\n|---|---|---|---|\n"


def page(text: str) -> str:
    """The page with every table between `<!-- fields: NAME -->` and `<!-- end -->` as the code has it."""
    tables = {name: table(cls) for name, cls in SECTIONS.items()}
    tables |= {name: table(objective.options) for name, objective in OBJECTIVES.items()}
    named = re.findall(r"<!-- fields: (\S+) -->", text)
    assert sorted(named) == sorted(tables), f"{PAGE.name} has tables of {named}, the code of {sorted(tables)}"
    return re.sub(
        r"(<!-- fields: (\S+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{tables[found[2]]}\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


def table(cls: Any) -> str:
    """The table of a class. Fields that it takes from mlm's options without a change are one row."""
    shared = set(rows_of(MaskedOptions)) if cls is not MaskedOptions else set()
    rows = rows_of(cls)
    own = [row for row in rows if row not in shared]
    if len(shared.intersection(rows)) < 2:
        return HEADING + "".join(rows)
    names = [row.split("`")[1] for row in rows if row in shared]
    return HEADING + f"| `{'`, `'.join(names)}` | | | as in [mlm](#mlm) |\n" + "".join(own)


def rows_of(cls: Any) -> list[str]:
    hints, notes = typing.get_type_hints(cls, include_extras=True), notes_of(cls)
    return [
        f"| `{field.name}` | {values(hints[field.name])} | {default(field)} | {notes.get(field.name, '')} |\n"
        for field in dataclasses.fields(cls)
        if field.name != "options"
    ]


def notes_of(cls: Any) -> dict[str, str]:
    """Field -> the text below it in the class, or in one that it inherits from."""
    notes: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if base is not object]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, note in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant):
                notes[ast.unparse(field.target)] = " ".join(str(note.value.value).split()).replace("|", "\\|")
    return notes


def default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def values(hint: Any) -> str:
    """What a field takes, in words."""
    words = {str: "text", bool: "true or false", int: "integer", float: "number", type(None): "null"}
    if hint in words:
        return words[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(map(values, arguments))
    if origin is list:
        inner = {str: "texts", recipe.Text: "texts", recipe.EvalTask: "tasks", recipe.Count: "integers > 0"}[
            arguments[0]
        ]
        return f"list of {inner}"
    assert origin is Annotated, hint
    bounds = [bound for extra in arguments[1:] for bound in getattr(extra, "metadata", [extra])]
    signs = {"gt": "> ", "ge": "≥ ", "lt": "< ", "le": "≤ "}
    said = [
        f"{sign}{getattr(bound, name)}"
        for bound in bounds
        for name, sign in signs.items()
        if abs(getattr(bound, name, recipe.MOST)) < recipe.MOST
    ]
    return " ".join([values(arguments[0]), ", ".join(said)]).strip()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
