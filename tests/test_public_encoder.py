"""docs/tutorials/public-encoder.md: its commands, on a made encoder with a tokenizer of sentencepiece's kind."""

import json
import shlex
from pathlib import Path

import pytest
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from data_tools import tokenizer as tokenizers
from data_tools.demo_world import World
from tests import launch
from tests.test_readme import commands, program

PAGE = "docs/tutorials/public-encoder.md"
TAGGED = (("Anna", "PROPN"), ("comes", "VERB"))


def write_encoder(folder: Path, texts: list[str]) -> None:
    """A tiny encoder whose masked-LM head and weights are random, saved under the class of XLM-R's tokenizer."""
    tokenizer = tokenizers.train([("", text) for text in texts], "unigram", 500, lowercase=False)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | {"tokenizer_class": "XLMRobertaTokenizer"}
    path.write_text(json.dumps(fields))
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    BertForMaskedLM(BertConfig(**shape, vocab_size=len(tokenizer), pad_token_id=1)).save_pretrained(folder)


@pytest.mark.slow
def test_the_tutorial_s_commands(tmp_path: Path) -> None:
    for name in ("xscale", "ds_configs"):
        (tmp_path / name).symlink_to(launch.ROOT / name)
    world = World(0)
    pairs = [world.pair(number)[:2] for number in range(340)]
    for name, part in (("train", pairs[:300]), ("test", pairs[300:])):
        for side, language in enumerate(("en", "de")):
            lines = [pair[side] + "\n" for pair in part]
            (tmp_path / f"{name}.{language}").write_text("".join(lines), encoding="utf-8")
    write_encoder(tmp_path / "encoder", [text for pair in pairs for text in pair])
    words = [f"{n}\t{word}\t_\t{tag}" + "\t_" * 6 + "\n" for n, (word, tag) in enumerate(TAGGED, start=1)]
    for name in ("en_ewt-ud-train", "de_pud-ud-test"):
        (tmp_path / f"{name}.conllu").write_text(("".join(words) + "\n") * 20, encoding="utf-8")

    for command in commands(PAGE):
        words = shlex.split(command)
        if words[0] == "deepspeed":
            assert words[1:3] == ["--num_gpus", "2"], command
            code, output = launch.fork(2, [*words[3:], "--steps", "3"], launch.environment(), tmp_path)
        else:
            module, arguments = program(words) or ("", [])
            code, output = launch.fork(0, ["-m", module, *arguments], launch.environment(), tmp_path)
        assert code == 0, f"{command}\n{output[-6000:]}"

    page = (tmp_path / "table.html").read_text(encoding="utf-8")
    assert "adapted" in page and "retrieval" in page and "pos" in page
    before, after = (json.loads((tmp_path / f"{name}.json").read_text())["results"] for name in ("before", "after"))
    assert before["retrieval"].keys() == after["retrieval"].keys(), "the rows stand side by side"
    own, exported = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("encoder", "hf/adapted"))
    assert own.get_vocab() == exported.get_vocab()
