"""Imports go down, nothing imports a command, and statements stay plain: read from the syntax trees."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = (
    {"removed"},
    {"errors", "record", "rng", "files", "metric_keys", "deepspeed_private", "strict_yaml"},
    {"ranks"},
    {"recipe"},
    {"data"},
    {"ops"},
    {"models"},
    {"objectives"},
    {"step"},
    {"checkpoint"},
    {"eval"},
    {"run"},
    {"report", "dry_run"},
    {"train", "export", "commands"},
)
"""Of xscale/, from the ground up: modules and folders."""
COMMANDS = FLOORS[-1] | {"eval.run", "eval.finetune.__main__", "report.__main__"}
LIMITS = {"comprehensions": 40.0, "nested": 2.0, "several": 1.0, "tuple = tuple": 5.0, "ternaries": 25.0}
"""What a reader of xscale/ or data_tools/ has to unfold at most, per 1,000 statements."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@cache
def modules(folder: Path) -> list[tuple[str, ast.Module]]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        found.append((name.removesuffix(".__init__"), ast.parse(path.read_text(encoding="utf-8"))))
    return found


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


def count_packed(trees: list[ast.Module]) -> dict[str, float]:
    """Return the number of packed expressions per 1,000 statements, by kind: comprehensions, those with another
    inside or with two loops, statements with several of them, `a, b = x, y`, and `x if c else y`."""
    counts = dict.fromkeys(LIMITS, 0)
    statements = 0
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, COMPREHENSIONS):
            inside = [inner for inner in ast.walk(node) if isinstance(inner, COMPREHENSIONS)]
            counts["comprehensions"] += 1
            counts["nested"] += len(inside) > 1 or len(node.generators) > 1
        elif isinstance(node, ast.IfExp):
            counts["ternaries"] += 1
        if not isinstance(node, ast.stmt):
            continue
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        statements += not is_text
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            counts["tuple = tuple"] += 1
        if not hasattr(node, "body"):
            within = [inner for inner in ast.walk(node) if isinstance(inner, COMPREHENSIONS)]
            counts["several"] += len(within) > 1
    return {kind: 1000 * count / statements for kind, count in counts.items()}


@pytest.mark.parametrize("folder", ["xscale", "data_tools"])
def test_code_is_written_out(folder: str) -> None:
    packed = count_packed([tree for _, tree in modules(ROOT / folder)])
    assert {kind: number for kind, number in packed.items() if number > LIMITS[kind]} == {}


def test_packed_code_is_counted() -> None:
    plain = ast.parse("x = 1\n" * 999)
    packed = ast.parse("a, b = [y for x in z for y in x], {v for v in w} if c else d\n")
    counts = count_packed([plain, packed])
    assert counts == {"comprehensions": 2, "nested": 1, "several": 1, "tuple = tuple": 1, "ternaries": 1}


@pytest.mark.parametrize("folder", ["xscale", "data_tools"])
def test_no_class_name_stands_twice(folder: str) -> None:
    """A tool's corpus is what corpus.yaml says, and a run's is what it reads."""
    names = []
    for _, tree in modules(ROOT / folder):
        names += [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name in set(names) if names.count(name) > 1] == []
