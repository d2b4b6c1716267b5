"""What stands around the code: one version and one address everywhere, workflows that call what exists."""

import re
import tomllib

import yaml

from tests.launch import ROOT
from xscale import __version__, commands

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}


def test_one_version() -> None:
    released = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = re.findall(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert {PROJECT["version"], released[0], *cited} == {__version__}


def test_programs_of_the_package() -> None:
    assert PROJECT["scripts"]["xscale"] == "xscale.commands:main"
    assert set(PROJECT["scripts"]) == {"xscale", "xscale-data", *(f"xscale-{name}" for name in commands.MODULES)}


def test_one_address() -> None:
    """A link to a file of the repository on GitHub names a file that exists."""
    address = PROJECT["urls"]["Repository"]
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.*"), ROOT / "mkdocs.yml"]
    texts = {path: path.read_text(encoding="utf-8") for path in [*paths, ROOT / "CITATION.cff"]}
    links = [(path, link) for path, text in texts.items() for link in re.findall(rf"{address}[^)\s#]*", text)]
    links += [(ROOT / "pyproject.toml", link) for link in PROJECT["urls"].values()]
    assert len(links) > 5
    for path, link in links:
        assert link.startswith(address), (path, link)
        name = re.fullmatch(r"/(?:blob|tree|raw)/main/(.*)", link.removeprefix(address))
        assert not name or (ROOT / name[1]).exists(), (path, link)


def test_workflows_call_what_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, text in WORKFLOWS.items():
        jobs = yaml.safe_load(text)["jobs"]
        assert all({"runs-on", "timeout-minutes"} <= set(job) for job in jobs.values()), name
        for target in re.findall(r"\bmake ([\w-]+)", text):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (name, target)
    pythons = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    tested = yaml.safe_load(WORKFLOWS["ci.yml"])["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert tested == pythons
