"""The command `xscale`.

Each command runs a module as a script. Nothing is imported before that module, so that `xscale --help` is quick.
"""

import runpy
import sys
from pathlib import Path
from typing import NoReturn

from xscale import __version__
from xscale.errors import TOOLS
from xscale.removed import message_if_removed_corpus_key_or_command

MODULES = {
    "train": "xscale.train",
    "eval": "xscale.eval.run",
    "finetune": "xscale.eval.finetune",
    "export": "xscale.export",
    "report": "xscale.report",
}
"""Command of `xscale` -> the module that it runs. The command "data" has a module for each tool."""

USAGE = """usage: xscale COMMAND ...

commands:
  train        train a model as a recipe says, in one process; `deepspeed --module xscale.train` uses all GPUs
  data TOOL    make corpora, shards, tokenizers and dictionaries, and inspect them
  eval         evaluate an exported model: held-out losses, retrieval, word alignment
  finetune     fine-tune an exported model, and measure transfer between languages
  export       write a checkpoint as a model of transformers and sentence-transformers
  report       write an HTML page about runs, or a comparison of result files

options:
  --version    print the version
  --help       print this text; `xscale COMMAND --help` lists a command's options"""


DATA_TOOLS = ("demo_corpus", "index", "inspect", "lexicon", "prepare", "tokenizer", "write_shards")
DATA_USAGE = """usage: xscale data TOOL ...; `xscale data TOOL --help` lists a tool's options

tools:
  demo_corpus  generate the demo corpus: English and two invented languages
  index        write index.json of a folder of WebDataset tars, including tars that other tools wrote
  inspect      print statistics of shards, or verify the shards
  lexicon      make a bilingual dictionary, or join dictionaries
  prepare      make shards, a tokenizer and held-out text from the files that corpus.yaml lists
  tokenizer    train a tokenizer on shards or text
  write_shards write shards of sentence pairs or of monolingual text"""


def main() -> None:
    program = Path(sys.argv[0]).name
    if program.startswith("xscale-"):  # xscale-train and the other names of 0.1 go with 0.3
        sys.argv.insert(1, program.removeprefix("xscale-"))
    command = pop_first_word()
    if command == "--version":
        print(f"xscale {__version__}")
        sys.exit(0)
    if command == "data":
        tool = pop_first_word()
        if tool in DATA_TOOLS:
            run_module(f"{TOOLS}.{tool}")
        print_usage_and_exit(tool, f"data_tools.{tool}", DATA_USAGE)
    if command in MODULES:
        run_module(MODULES[command])
    print_usage_and_exit(command, f"xscale.{command}", USAGE)


def pop_first_word() -> str:
    """Remove the first word of the command line, and return it, or "" if there is none."""
    return sys.argv.pop(1) if len(sys.argv) > 1 else ""


def run_module(module: str) -> NoReturn:
    """Run a module as a script, with the rest of the command line, and exit."""
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def print_usage_and_exit(word: str, module_of_word: str, usage: str) -> NoReturn:
    """Print the usage and what replaces a removed command, and exit: with 0 if the word asks for help, else with 2."""
    if word in ("-h", "--help"):
        print(usage)
        sys.exit(0)
    print(usage, file=sys.stderr)
    if word:
        removed = message_if_removed_corpus_key_or_command(module_of_word)
        print(
            f"error: {removed or f'{word!r} is unknown. Use one of the names in the list above'}",
            file=sys.stderr,
        )
    sys.exit(2)
