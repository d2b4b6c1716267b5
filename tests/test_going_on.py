"""Going on from other models and runs: whose tokenizer, whose language embeddings, whose heads."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.rows import one_thread  # noqa: F401
from xscale import config
from xscale.config import Recipe
from xscale.errors import UserError
from xscale.objectives import OBJECTIVES
from xscale.run.checks import find_tokenizer


def recipe(init: str | Path | None) -> Recipe:
    made = config.load_recipe("tlm", [], {name: o.options for name, o in OBJECTIVES.items()})
    return replace(made, model=replace(made.model, init=init and str(init)))


# Tokenizer


def test_the_models_own_tokenizer_comes_before_one_beside_the_shards(demo: Path, tmp_path: Path) -> None:
    """In tokenizers' file, or in older forms; a hub name's own; and that beside the shards where the model has none."""
    beside = str(demo / "tokenizer")
    fast, slow, bare = (tmp_path / name for name in ("fast", "slow", "bare"))
    for folder in (fast, slow, bare):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (fast / "tokenizer.json").write_bytes((demo / "tokenizer" / "tokenizer.json").read_bytes())
    (slow / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n")  # as bert-base's first releases
    names = {init: find_tokenizer(recipe(init), demo) for init in (None, fast, slow, bare, "some/model")}
    assert names == {None: beside, fast: str(fast), slow: str(slow), bare: beside, "some/model": "some/model"}
    with pytest.raises(UserError, match=r"model\.init /not/there does not exist"):
        find_tokenizer(recipe("/not/there"), demo)
    with pytest.raises(UserError, match=rf"no tokenizer in model.init {bare}, and none in {tmp_path}"):
        find_tokenizer(recipe(bare), tmp_path / "shards")
    asked = recipe(fast)
    asked = replace(asked, model=replace(asked.model, tokenizer="mine"))
    assert find_tokenizer(asked, demo) == "mine"
