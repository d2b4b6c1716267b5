"""Functions that pip installs as the programs xscale-train, xscale-finetune and `xscale-data TOOL ...` (a tool of
data_tools): each runs a module as a script. pyproject.toml names the `main` of the other programs."""

import runpy
import sys
from pathlib import Path

from xscale.errors import TOOLS
from xscale.removed import removed_command


def train() -> None:
    _run("xscale.train")


def finetune() -> None:
    _run("xscale.eval.finetune")


def data() -> None:
    root = Path(__file__).parent if TOOLS.startswith("xscale.") else Path(__file__).parents[1]
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted((root / "data_tools").glob("*.py"))}
    tools = [name for name, text in texts.items() if '\nif __name__ == "__main__"' in text]
    asked = sys.argv[1:2]
    if asked and asked[0] in tools:
        del sys.argv[1]
        _run(f"{TOOLS}.{asked[0]}")
    removed = removed_command(f"data_tools.{asked[0]}") if asked else ""
    if removed:
        print(f"error: {removed}", file=sys.stderr)
        sys.exit(2)
    print(f"usage: xscale-data TOOL ...; TOOL --help shows its arguments. Tools: {', '.join(tools)}", file=sys.stderr)
    sys.exit(0 if asked in (["-h"], ["--help"]) else 2)


def _run(module: str) -> None:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)
