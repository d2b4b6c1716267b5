"""The command `xscale`: each of its names runs the module that it says, and none is imported before it is chosen."""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from xscale import __version__, commands

TOOLS = commands.DATA_TOOLS
HEAVY = ("torch", "transformers", "numpy", "deepspeed", "datasets")


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    """The exit code of `xscale WORDS`, what it prints, and the module that it runs with the words that are left."""
    started = []
    monkeypatch.setattr(sys, "argv", ["xscale", *words])
    monkeypatch.setattr("runpy.run_module", lambda module, **_: started.append(" ".join([module, *sys.argv[1:]])))
    with pytest.raises(SystemExit) as stopped:
        commands.main()
    captured = capsys.readouterr()
    return stopped.value.code, captured.out + captured.err, "".join(started)


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("train --steps 3", "xscale.train --steps 3"),
        ("eval --help", "xscale.eval.run --help"),
        ("finetune --task ner", "xscale.eval.finetune --task ner"),
        ("export runs/xlm hf", "xscale.export runs/xlm hf"),
        ("report --version", "xscale.report --version"),
        *((f"data {tool} --help", f"data_tools.{tool} --help") for tool in TOOLS),
    ],
)
def test_a_command_runs_its_module(monkeypatch, capsys, words: str, module: str) -> None:
    assert run(monkeypatch, capsys, *words.split()) == (0, "", module)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--version", 0, f"xscale {__version__}"),
        ("--help", 0, "usage: xscale COMMAND"),
        ("", 2, "usage: xscale COMMAND"),
        ("trian", 2, "error: 'trian' is unknown"),
        ("doctor", 2, "ds_report"),
        ("data", 2, "write_shards"),
        ("data --help", 0, "usage: xscale data TOOL"),
        ("data wrote_shards", 2, "error: 'wrote_shards' is unknown"),
        ("data derive", 2, "benchmarks/papers/derive.py"),
    ],
)
def test_what_it_says_itself(monkeypatch, capsys, words: str, code: int, said: str) -> None:
    ended, text, started = run(monkeypatch, capsys, *words.split())
    assert (ended, started) == (code, "") and said in text


def test_help_names_every_command_and_tool(monkeypatch, capsys) -> None:
    _, text, _ = run(monkeypatch, capsys, "--help")
    assert all(f"\n  {name} " in text for name in commands.MODULES)
    _, text, _ = run(monkeypatch, capsys, "data", "--help")
    assert all(f"\n  {tool} " in text for tool in TOOLS)


def test_no_library_is_imported_before_a_command_is_chosen() -> None:
    code = "import sys\nfrom xscale import commands\nprint(*sys.modules)\n"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "xscale.commands" in imported
    assert set(HEAVY) & set(imported) == set()


def flags_with_lists(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from flags_with_lists(command)
        elif action.option_strings and action.nargs in ("+", "*"):
            yield action


@pytest.mark.parametrize(
    "module",
    [
        *("xscale.train", "xscale.eval.run", "xscale.eval.finetune.__main__", "xscale.export"),
        *(f"data_tools.{tool}" for tool in TOOLS),
    ],
)
def test_a_repeated_flag_adds_to_the_earlier_values(monkeypatch, module: str) -> None:
    parsers = []
    monkeypatch.setattr(sys, "argv", [module])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda parser, *_: sys.exit(parsers.append(parser)))
    with pytest.raises(SystemExit):
        importlib.import_module(module).main()
    for action in flags_with_lists(parsers[0]):
        parsed = argparse.Namespace(**{action.dest: action.default})
        for value in "ab":
            action(parsers[0], parsed, [value], action.option_strings[0])
        assert getattr(parsed, action.dest) in (["a", "b"], [["a"], ["b"]]), action.option_strings


RUN_AND_EXIT = "from xscale.errors import *; run_and_exit(lambda: {call} or flush_output() or 0)"
RUN_TOOL = "from data_tools.command import run_tool_and_exit; run_tool_and_exit(lambda: {call})"


def end_of_command(command: str, call: str, stdout: int | None, **options: Any) -> tuple[int, str]:
    """Return the exit code and the standard error of a command that makes a call."""
    words = [sys.executable, "-c", command.format(call=call)]
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    ended = subprocess.run(words, stdout=stdout, stderr=subprocess.PIPE, text=True, env=buffered, **options)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("command", [RUN_AND_EXIT, RUN_TOOL])
def test_a_command_whose_output_cannot_be_written(command: str) -> None:
    """A reader that has ended, as in `xscale data inspect DIR | head`, is no error; a full disk is one."""
    reader, writer = os.pipe()
    os.close(reader)
    for length in (1, 1_000_000):
        assert end_of_command(command, f"print('x' * {length})", writer) == (141, "")
    os.close(writer)
    call = "(_ for _ in ()).throw(BrokenPipeError(32, 'a socket'))"
    code, error = end_of_command(command, call, subprocess.DEVNULL)
    assert code not in (0, 141) and "a socket" in error, "another pipe than the output"
    code, error = end_of_command(command, "None", None, preexec_fn=lambda: os.close(1))
    assert (code, error) == (0, ""), "a command without an output"
    with open("/dev/full", "w") as full:
        code, error = end_of_command(command, "print('x')", full.fileno())
    assert code != 0 and "No space left on device" in error
