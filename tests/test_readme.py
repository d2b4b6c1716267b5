"""The commands of README and docs/: their options exist, and they run one after the other in an empty folder, on
made text, with few steps and a small model. What they name exists, and tables of fields are those of the code."""

import argparse
import importlib
import lzma
import os
import re
import shlex
import sys
from itertools import chain
from pathlib import Path

import pytest

from data_tools.corpus import load_corpus
from data_tools.demo_world import World
from tests import launch, recipe_fields
from xscale.commands import MODULES

PAGES = {
    path.relative_to(launch.ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [launch.ROOT / "README.md", *sorted((launch.ROOT / "docs").rglob("*.md"))]
}
SMALLER = {
    "--steps 10000": "--steps 3",
    "--steps 20000": "--steps 5",
    "--steps 300": "--steps 3",
    "streams.ppa.pooling=mean": "streams.ppa.pooling=mean streams.ppa.queue_size=128 data.workers=0",
    "--steps 100": "--steps 3 --set data.workers=0 streams.ppa.queue_size=64 train.measure_every=0",
    "--epochs 5": "--epochs 1",
    "--out data/demo": "--out data/demo --pairs 200 --mono 200",
    "--vocab_size 32000": "--vocab_size 600",
    "--recipe xlm --data shards --dry_run": "--recipe xlm --data shards --dry_run --set data.workers=0",
    "model.preset=base": "model.preset=tiny data.workers=0",
    "samples=1024": "samples=8",
    "samples=256": "samples=8",
    "@8000": "@0",
}
SCRIPTS = {"pretrain": "xscale.train", "container": "xscale.train", "evaluate": "xscale.eval.run"}
"""slurm/NAME.sbatch -> the module that gets its flags."""
RUN_PAGES = (
    "README.md",
    "docs/tutorials/first-run.md",
    "docs/tutorials/own-text.md",
    "docs/how-to/prepare-text.md",
    "docs/reference/commands.md",
    "docs/how-to/speed.md",
    "docs/how-to/fork.md",
    "docs/how-to/add-language.md",
    "docs/how-to/fine-tune.md",
    "docs/how-to/own-objective.md",
    "docs/reference/shards.md",
    "docs/benchmarks.md",
)
"""Pages whose commands run one after the other. Others need a cluster, a GPU or test sets: tests/test_slurm.py,
test_eval_tasks.py and test_public_encoder.py run those that they can."""


def commands(page: str) -> list[str]:
    """Lines of a page's bash blocks; a line that ends in a backslash goes on."""
    return [line for block in fenced(page, "bash") for line in re.sub(r"\\\n\s+", "", block).splitlines()]


def program(words: list[str]) -> tuple[str, list[str]] | None:
    """The Python module that a command runs, whatever starts it, and the module's arguments."""
    if words[:2] == ["xscale", "data"]:
        return f"data_tools.{words[2]}", words[3:]
    if words[0] == "xscale":
        return MODULES[words[1]], words[2:]
    for n, word in enumerate(words):
        if word.startswith("slurm/"):
            assert (launch.ROOT / word).exists(), word
            name, rest = Path(word).stem, words[n + 1 :]
            if name == "prepare":
                return f"data_tools.{rest[0]}", rest[1:]
            return SCRIPTS[name], rest
        if word in ("-m", "--module"):
            return words[n + 1], words[n + 2 :]
        if word.endswith(".py"):
            assert (launch.ROOT / word).exists(), word
            return word.removesuffix(".py").replace("/", "."), words[n + 1 :]
    return None


def fenced(page: str, language: str) -> list[str]:
    """The blocks of code of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


ALL = [(page, line) for page in PAGES for line in commands(page)]


@pytest.mark.parametrize(("page", "line"), ALL, ids=[f"{page}-{n}" for n, (page, _) in enumerate(ALL)])
def test_every_command_has_options_that_exist(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command's own parser; what is no Python is a target of make, pip, or a script that is there."""
    words = [word for word in shlex.split(line) if not re.match(r"[A-Z]+=", word)]
    found = program(words)
    if not found:
        makefile = (launch.ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
        there = words[0] != "make" or re.search(rf"^{re.escape(words[1])}:", makefile, re.MULTILINE)
        assert there and (words[0] in ("make", "pip", ".") or (launch.ROOT / words[0]).exists()), line
        return
    monkeypatch.syspath_prepend(launch.ROOT.joinpath(*found[0].split(".")).parent)  # as of a script
    module = importlib.import_module(found[0] + (".__main__" if found[0].endswith(("finetune", "report")) else ""))
    parse, parsed = argparse.ArgumentParser.parse_args, []

    def parse_and_leave(*args: object) -> None:
        parsed.append(parse(*args))
        sys.exit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_leave)
    monkeypatch.setattr(sys, "argv", [found[0], *found[1]])
    with pytest.raises(SystemExit):
        module.main()
    assert parsed, line


def test_what_the_pages_name_exists() -> None:
    """Links, files of the checkout in backticks, and the modules of each room in the table of architecture.md."""
    missing = []
    for page, text in PAGES.items() | {"CONTRIBUTING.md": (launch.ROOT / "CONTRIBUTING.md").read_text()}.items():
        text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        for link, section in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
            path = (launch.ROOT / page).parent.joinpath(link) if link else launch.ROOT / page
            if "://" in link:
                continue
            if not path.exists() or (section and section not in sections(path.read_text(encoding="utf-8"))):
                missing.append((page, f"{link}#{section}"))
        named = re.findall(r"`((?:xscale|data_tools|tests|slurm|benchmarks|ds_configs|docs)/[\w./-]*)[^`]*`", text)
        named += (
            re.findall(r"`(\w+\.(?:md|toml|yml|cff|txt)|Makefile|Dockerfile)`", text) if page == "README.md" else []
        )
        missing += [(page, path) for path in named if not any(launch.ROOT.glob(path.rstrip("/")))]
    rooms = re.findall(r"^\| `([\w/]+/)` \| (.*?) \|", PAGES["docs/architecture.md"], re.MULTILINE)
    modules = [room + name for room, names in rooms for name in re.findall(r"`(\w+)`", names)]
    missing += [("rooms", name) for name in modules if not (launch.ROOT / f"{name}.py").exists()]
    assert len(modules) > 80 and missing == []


def test_where_to_change_something_names_what_the_files_have() -> None:
    """Each function, class or constant in the table of architecture.md occurs in a file of the same cell."""
    table = PAGES["docs/architecture.md"].partition("## Where to change something")[2].partition("\n## ")[0]
    missing = []
    cells = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")]
    for cell in cells:
        quoted = re.findall(r"`([\w./]+)`", cell)
        code = ""
        for path in [launch.ROOT / name for name in quoted if "/" in name]:
            files = path.glob("*.py") if path.is_dir() else [path]
            code += "".join(file.read_text(encoding="utf-8") for file in files)
        for name in chain.from_iterable(name.split(".") for name in quoted if "/" not in name and "yaml" not in name):
            if not re.search(rf"\b{name}\b", code):
                missing.append(name)
    assert len(cells) > 30 and missing == []


def sections(text: str) -> list[str]:
    """The names by which links find the headings of a page."""
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 125
    terms = PAGES["docs/architecture.md"].partition("## Glossary")[2].count("\n| ") - 1
    assert terms <= 20


def test_examples_of_a_corpus(tmp_path: Path) -> None:
    """Each corpus.yaml of the pages is one."""
    blocks = [block for page in PAGES for block in fenced(page, "yaml") if re.search("^sources:", block, re.M)]
    for block in blocks:
        (tmp_path / "corpus.yaml").write_text(block, encoding="utf-8")
        assert load_corpus(tmp_path / "corpus.yaml").sources
    assert len(blocks) >= 4


def test_paragraphs_are_short() -> None:
    """At most 90 words in a paragraph, an item of a list or a cell of a table."""
    long = []
    for page, text in PAGES.items():
        text = re.sub(r"^```.*?^```|\]\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE)
        for part in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )|\|", text):
            if len(part.split()) > 90:
                long.append((page, part.strip()[:60]))
    assert long == []


def test_tables_of_fields_are_those_of_the_code() -> None:
    text = PAGES["docs/reference/recipe.md"]
    assert recipe_fields.page(text) == text, "python -m tests.recipe_fields writes them"


def test_shipped_names_are_in_the_pages() -> None:
    """Every shipped recipe and ds_config is in a table."""
    recipes = [path.relative_to(launch.ROOT / "xscale/recipes").with_suffix("").as_posix()
               for path in (launch.ROOT / "xscale/recipes").rglob("*.yaml")]  # fmt: skip
    text = PAGES["README.md"] + PAGES["docs/how-to/objectives.md"]
    assert [name for name in recipes if f"`{name}`" not in text] == []


def test_examples_of_several_machines_add_gradients_up_in_fp32() -> None:
    script = (launch.ROOT / "slurm/pretrain.sbatch").read_text(encoding="utf-8")
    text = re.sub(r"\\\n\s+", "", "".join(PAGES.values()) + script)
    configs = re.findall(r"--nodes=\d+ .*slurm/pretrain.sbatch --ds_config (\S+)", text)
    assert len(configs) >= 2 and all(name.endswith("_nodes.json") for name in configs), configs
    assert all((launch.ROOT / name).exists() for name in configs)


@pytest.mark.slow
def test_commands_of_the_pages(tmp_path: Path) -> None:
    """Those of RUN_PAGES, and the reports of docs/how-to/evaluate.md. tests/forked.py starts them, those of DeepSpeed's
    launcher as 2 ranks."""
    for name in ("xscale", "ds_configs", "benchmarks"):
        (tmp_path / name).symlink_to(launch.ROOT / name)
    write_texts(tmp_path)
    programs = {"ranking.py": "how-to/own-objective", "growth.py": "how-to/add-language", "read.py": "reference/shards"}
    for name, page in programs.items():
        (source,) = fenced(f"docs/{page}.md", "python")
        (tmp_path / name).write_text(source.replace("000009", "000000"))
    (tmp_path / "ranking.yaml").write_text(
        "streams: {ranking: {objective: 'ranking:OBJECTIVE', samples: 8}}\ntrain: {steps: 2}\n"
    )
    listed = [line for page in RUN_PAGES for line in commands(page)]
    listed += [line for line in commands("docs/how-to/evaluate.md") if "xscale report" in line]
    listed = list(dict.fromkeys(listed))
    listed = [line for line in listed if re.match(r"(python|deepspeed|xscale) ", line)]
    assert len(listed) >= 20
    environment = launch.environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{launch.ROOT}"}
    for command in listed:
        for there, instead in SMALLER.items():
            command = re.sub(rf"{re.escape(there)}(?!\S)", instead, command)
        if "hf/larger" in command:
            assert launch.fork(0, ["growth.py"], environment, tmp_path)[0] == 0
        words = shlex.split(command)
        if words[0] == "deepspeed":
            assert words[1:3] == ["--num_gpus", "2"], command
            started = ["-m", *words[4:]] if words[3] == "--module" else words[3:]
            code, output = launch.fork(2, started, environment, tmp_path)
        elif words[0] == "xscale":
            module, arguments = program(words) or ("", [])
            code, output = launch.fork(0, ["-m", module, *arguments], environment, tmp_path)
        else:
            code, output = launch.fork(0, words[1:], environment, tmp_path)
        assert code == 0, f"{command}\n{output[-6000:]}"
    assert (tmp_path / "hf" / "xlm" / "model.safetensors").exists()
    for page in ("README.md", "docs/tutorials/own-text.md"):
        (use,) = fenced(page, "python")
        (tmp_path / "use.py").write_text(use)
        code, output = launch.fork(0, ["use.py"], environment, tmp_path)
        assert code == 0 and "tensor" in output, output
    (tmp_path / "read.py").open("a").write("\nassert len(list(records)) > 100\n")
    code, output = launch.fork(0, ["read.py"], environment, tmp_path)
    assert code == 0, output


_TAGGED, _REST = (("Anna", "PROPN"), ("comes", "VERB")), "\t_" * 6 + "\n"


def write_texts(folder: Path) -> None:
    """The demo world's sentences under the names that README uses."""
    world = World(0)
    for name, first in (("train", 0), ("test", 300)):
        pairs = [world.pair(first + n)[:2] for n in range(300 if name == "train" else 40)]
        for side, language in enumerate(("en", "de")):
            text = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{name}.{language}.xz").write_bytes(lzma.compress(text.encode()))
            (folder / f"{name}.{language}").write_text(text)
    words = {f"{a} {b}\n" for n in range(300) for a, b in [(t.split()[0] for t in world.pair(n)[:2])]}
    (folder / "en-de.txt").write_text("".join(sorted(words)), encoding="utf-8")
    web = "".join(f"{n}\t{a} now\t{b} jetzt\n" for n in range(300) for a, b in [world.pair(n)[:2]])
    (folder / "web.tsv").write_text(web, encoding="utf-8")
    (corpus,) = fenced("docs/how-to/prepare-text.md", "yaml")
    (folder / "corpus.yaml").write_text(corpus.replace("32000", "600").replace("lid: true", "lid: false"))
    (own,) = fenced("docs/tutorials/own-text.md", "yaml")
    (folder / "own.yaml").write_text(own.replace("8000", "600"))
    (folder / "scores.json").write_text('{"model": "hf/xlm", "results": {}, "failed": {}}')
    (folder / "ner").mkdir()
    for name in ("train-en", "train-de", "dev-en", "dev-de"):
        (folder / "ner" / f"{name}.tsv.xz").write_bytes(lzma.compress(b"Anna\tB-PER\ncomes\tO\n\n" * 20))
    for name in ("en_ewt-ud-train", "en_ewt-ud-test", "de_pud-ud-test"):
        words = "".join(f"{n}\t{word}\t_\t{tag}{_REST}" for n, (word, tag) in enumerate(_TAGGED, start=1))
        (folder / f"{name}.conllu").write_text(f"{words}\n" * 20, encoding="utf-8")
    for language, of_world in (("en", "en"), ("de", "xx")):
        (folder / f"wiki_{language}").mkdir()
        documents = ["\n".join(world.document(of_world, n)) for n in range(1, 40)]
        (folder / f"wiki_{language}" / "wiki_00").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
