"""Imports go down, nothing imports a command, and functions stay short: read from the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS = (
    {"removed"},
    {"errors", "record", "rng", "files", "metric_keys", "deepspeed_private", "strict_yaml"},
    {"plugins", "ranks"},
    {"recipe"},
    {"data"},
    {"ops"},
    {"models"},
    {"objectives"},
    {"step"},
    {"checkpoint"},
    {"run_spec"},
    {"eval"},
    {"run"},
    {"report", "dry_run"},
    {"train", "export", "commands"},
)
"""Of xscale/, from the ground up: modules and folders."""
COMMANDS = FLOORS[-1] | {"eval.run", "eval.finetune.__main__", "report.__main__"}
LONGEST = 60
"""Lines of a function."""


def modules(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST, folder: Path) -> Iterator[str]:
    """Modules of xscale that are imported anywhere in a module: "data.row" of xscale.data.packed_row."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            path = ROOT / Path(*node.module.split("."))
            names = [
                name
                if path.joinpath(name.rpartition(".")[2]).with_suffix(".py").exists()
                or (ROOT / Path(*name.split("."))).is_dir()
                else node.module
                for name in whole
            ]
        else:
            continue
        yield from (name.removeprefix("xscale.") for name in names if name.startswith("xscale."))


def floor(module: str) -> int:
    (found,) = (number for number, names in enumerate(FLOORS) if module.split(".")[0] in names)
    return found


def upward(folder: Path) -> list[str]:
    return [
        f"{name} imports {other}"
        for name, tree in modules(folder)
        if name != "__init__"
        for other in imported(tree, folder)
        if floor(other) > floor(name) or other in COMMANDS
    ]


def circles(folder: Path) -> list[str]:
    """Modules that reach themselves through imports."""
    uses = {name: set(imported(tree, folder)) - {name} for name, tree in modules(folder)}

    def reached(name: str, seen: set[str]) -> set[str]:
        for other in uses.get(name, set()) - seen:
            seen.add(other)
            reached(other, seen)
        return seen

    return [name for name in uses if name in reached(name, set())]


def test_no_import_runs_upward() -> None:
    assert upward(ROOT / "xscale") == []
    assert circles(ROOT / "xscale") == []


def test_functions_are_short() -> None:
    lengths = {
        f"{folder}/{name}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for folder in ("xscale", "data_tools")
        for name, tree in modules(ROOT / folder)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}


def test_no_class_name_stands_twice() -> None:
    names = [
        node.name
        for folder in ("xscale", "data_tools")
        for _, tree in modules(ROOT / folder)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    assert [name for name in set(names) if names.count(name) > 1] == []
