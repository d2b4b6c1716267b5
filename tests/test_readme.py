"""README's commands, run one after the other in an empty folder: on made text, with few steps and a small model."""

import lzma
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from data_tools.demo_world import World
from tests import launch

README = (launch.ROOT / "README.md").read_text(encoding="utf-8")
SMALLER = {
    "--steps 10000": "--steps 3",
    "--vocab_size 32000": "--vocab_size 600",
    "model.preset=base": "model.preset=tiny data.workers=0",
    "samples=1024": "samples=8",
    "samples=256": "samples=8",
    "python -m": f"{launch.BIN / 'python'} -m",
}


def commands(section: str) -> list[str]:
    """Of the indented blocks below a heading, without comments; a line that ends in a backslash goes on."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
    lines = re.sub(r"\\\n\s+", "", text).splitlines()
    found = [line.strip().split("  #")[0].strip() for line in lines if line.startswith("    ")]
    return [line for line in found if re.match(r"(python|deepspeed) ", line)]


@pytest.mark.slow
def test_commands_of_readme(tmp_path: Path) -> None:
    for name in ("xscale", "ds_configs"):
        (tmp_path / name).symlink_to(launch.ROOT / name)
    write_texts(tmp_path)
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "ranking.py").write_text(source)
    (tmp_path / "ranking.yaml").write_text("streams: {ranking: {objective: ranking, samples: 8}}\ntrain: {steps: 2}\n")
    sections = ("Train on your text", "Fine-tune, and measure transfer", "Your own objective")
    listed = [command for section in sections for command in commands(section)]
    assert len(listed) >= 12
    environment = launch.environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{launch.ROOT}"}
    for command in listed:
        for there, instead in SMALLER.items():
            command = command.replace(there, instead)
        words = shlex.split(command)
        if words[0] == "deepspeed":
            words[1:1] = ["--master_port", str(launch.free_port())]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert (tmp_path / "hf" / "xlm" / "model.safetensors").exists()


_TAGGED, _REST = (("Anna", "PROPN"), ("comes", "VERB")), "\t_" * 6 + "\n"


def write_texts(folder: Path) -> None:
    """The demo world's sentences under the names that README uses."""
    world = World(0)
    for name, first in (("train", 0), ("test", 300)):
        pairs = [world.pair(first + n)[:2] for n in range(300 if name == "train" else 40)]
        for side, language in enumerate(("en", "de")):
            text = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{name}.{language}.xz").write_bytes(lzma.compress(text.encode()))
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
