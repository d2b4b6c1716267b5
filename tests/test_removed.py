"""A flag, field or command that is no longer part of xscale is refused with a line that names the substitute."""

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_tools import command, demo_corpus
from xscale import commands, export, removed, train
from xscale.errors import UserError
from xscale.eval import run as eval_run
from xscale.eval.finetune import __main__ as finetune
from xscale.objectives import OBJECTIVES
from xscale.recipe import load_recipe
from xscale.report import __main__ as report

ROOT = Path(__file__).parent.parent
PROGRAMS: dict[str, Callable[[], Any]] = {
    "xscale/train.py": train.main,
    "xscale/export.py": export.main,
    "xscale/eval/run.py": eval_run.main,
    "xscale/eval/finetune/__main__.py": finetune.main,
    "xscale/report/__main__.py": report.main,
    "data_tools/demo_corpus.py": lambda: command.run_tool_and_exit(demo_corpus.main),
}


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: Any, program: str, word: str) -> str:
    """Return the line that `program` prints about a word of its command line, and check its exit code."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / program), word, "value"])
    try:
        code = PROGRAMS[program]()
    except SystemExit as error:
        code = error.code
    assert code == 2
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize("key", ["--not_a_flag", *(key for key in removed.FLAGS if key.startswith("--"))])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_removed_flag_names_its_substitute(monkeypatch, capsys, program: str, key: str) -> None:
    monkeypatch.setitem(removed.FLAGS, "--not_a_flag", "use --another")
    expected = f"error: {key} is no longer part of xscale: {removed.FLAGS[key]}"
    assert refusal(monkeypatch, capsys, program, key) == expected
    assert refusal(monkeypatch, capsys, program, f"{key}=value") == expected
    path = ROOT / program
    assert f'add_argument("{key}"' not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("key", ["eval.run --not_a_flag", *(key for key in removed.FLAGS if not key.startswith("--"))])
def test_a_flag_that_one_command_lost_names_its_substitute_there_only(monkeypatch, key: str) -> None:
    monkeypatch.setitem(removed.FLAGS, "eval.run --not_a_flag", "use --another")
    program, _, flag = key.partition(" ")
    monkeypatch.setattr(sys, "argv", [f"/usr/{program.replace('.', '/')}.py"])
    assert removed.message_if_removed_flag(flag) == f"{flag} is no longer part of xscale: {removed.FLAGS[key]}"
    monkeypatch.setattr(sys, "argv", ["/usr/xscale/train.py"])
    assert removed.message_if_removed_flag(flag) == ""


@pytest.mark.parametrize("key", ["streams.*.not_a_field", "train.not_a_field", *removed.FIELDS])
def test_a_removed_field_names_its_substitute(monkeypatch, key: str) -> None:
    monkeypatch.setitem(removed.FIELDS, "streams.*.not_a_field", "use another")
    monkeypatch.setitem(removed.FIELDS, "train.not_a_field", "use another")
    name = key.replace("*", "tlm")
    with pytest.raises(UserError) as error:
        load_recipe("tlm", [f"{name}=1"], OBJECTIVES)
    assert f"{name} is no longer part of xscale: {removed.FIELDS[key]}" in str(error.value)


@pytest.mark.parametrize("argument", removed.HUGGING_FACE)
@pytest.mark.parametrize("section", ["train.", "streams.tlm."])
def test_an_argument_of_hugging_face_has_our_name(section: str, argument: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe("tlm", [f"{section}{argument}=1"], OBJECTIVES)
    assert f"{section}{argument}: unknown field" in str(error.value)
    assert f"Hugging Face's {argument}, xscale has {removed.HUGGING_FACE[argument]}" in str(error.value)


def test_our_names_of_hugging_faces_arguments_exist() -> None:
    """They are flags of training, or fields of a recipe that is read; the page has them, too."""
    fields = {"streams.NAME.samples", "streams.NAME.mask_prob"}
    for section, settings in recipe_sections().items():
        fields |= {f"{section}.{field.name}" for field in dataclasses.fields(settings)}
    page = (ROOT / "docs/how-to/from-hugging-face.md").read_text(encoding="utf-8")
    for argument, ours in removed.HUGGING_FACE.items():
        assert f"`{argument}`" in page or argument == "batch_size", argument
        assert re.match(r"--[a-z_]+", ours) or re.split("[, ]", ours)[0] in fields, ours


def recipe_sections() -> dict[str, Any]:
    loaded = load_recipe("tlm", [], OBJECTIVES)
    return {name: getattr(loaded, name) for name in ("model", "data", "train", "checkpoint", "eval")}


@pytest.mark.parametrize("module", ["data_tools.not_a_tool", *removed.COMMANDS])
def test_a_removed_command_names_its_substitute(monkeypatch, capsys, module: str) -> None:
    monkeypatch.setitem(removed.COMMANDS, "data_tools.not_a_tool", "use another")
    assert not (ROOT / f"{module.replace('.', '/')}.py").exists()
    expected = f"{module} is no longer part of xscale: {removed.COMMANDS[module]}"
    assert removed.message_if_removed_corpus_key_or_command(module) == expected
    package, _, tool = module.rpartition(".")
    if package == "data_tools":
        monkeypatch.setattr(sys, "argv", ["xscale", "data", tool])
        with pytest.raises(SystemExit) as stopped:
            commands.main()
        assert stopped.value.code == 2
        assert capsys.readouterr().err.strip().splitlines()[-1] == f"error: {expected}"
