"""The command `xscale`: each of its names runs the module that it says, and none is imported before it is chosen."""

import subprocess
import sys

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
