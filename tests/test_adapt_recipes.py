"""recipes/adapt, for going on from a public encoder. tests/test_paper_recipes.py has what a wrong start is told."""

import math
from pathlib import Path

import pytest
import yaml
from transformers import BertConfig, BertForMaskedLM, DistilBertConfig, ModernBertConfig, PreTrainedConfig

from tests import launch
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.objectives import OBJECTIVES
from xscale.recipe import load_recipe, shipped_recipe_names
from xscale.run.resolve import resolve_run

NAMES = [name for name in shipped_recipe_names() if name.startswith("adapt/")]
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.mark.parametrize("name", NAMES)
def test_an_adapt_recipe_is_gentle(name: str) -> None:
    recipe = load_recipe(name, [], OBJECTIVES)
    assert recipe.model.starts_from == "model" and recipe.model.init is None
    assert recipe.model.dropout is None and recipe.model.attention_gain is None
    assert recipe.train.lr <= 5e-5 and recipe.train.warmup > 0 and not recipe.data.segments
    for stream in recipe.streams.values():
        assert getattr(stream.options, "anchor", "en") == "en"
        pairs = stream.samples * recipe.train.steps
        assert 50_000 <= pairs <= 200_000, "about 100,000 pairs"


@pytest.mark.parametrize(
    ("config", "dropout"),
    [
        (BertConfig(**SHAPE, hidden_dropout_prob=0.3), 0.3),
        (DistilBertConfig(dropout=0.2), 0.2),
        (ModernBertConfig(), 0.0),
        (None, 0.1),
    ],
)
def test_dropout_null_is_the_model_s_own(
    demo: Path, tmp_path: Path, config: PreTrainedConfig | None, dropout: float
) -> None:
    """Also in a phase; with random weights it is 0.1."""
    sets = ["model.dropout=null", "data.workers=0", "phases=[{until: 5, train.lr: 0.0001}]"]
    if config is not None:
        config.save_pretrained(tmp_path)
        sets.append(f"model.init={tmp_path}")
    recipe, _ = resolve_run("contextual", [*sets, f"model.tokenizer={demo / 'tokenizer'}"], [demo])
    assert recipe.model.dropout == dropout
    assert [phase.recipe.model.dropout for phase in recipe.phases] == [dropout]


def test_a_phase_names_its_dropout(demo: Path) -> None:
    with pytest.raises(UserError, match=r"model.dropout is null in a phase, .* Write a number"):
        resolve_run("contextual", ["phases=[{until: 5, model.dropout: null}]", "model.dropout=0.0"], [demo])


def test_an_adapt_recipe_without_a_model_is_refused(demo: Path) -> None:
    with pytest.raises(UserError, match=r"adapt/mixed is for a pre-trained model.*--set model\.init=DIR"):
        resolve_run("adapt/mixed", [], [demo])


@pytest.mark.slow
def test_each_trains_from_a_model(demo: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = BertConfig(**SHAPE, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_id)
    BertForMaskedLM(config).save_pretrained(tmp_path / "model")
    tokenizer.hf.save_pretrained(tmp_path / "model")
    listed = []
    for name in NAMES:
        sets = [f"model.init={tmp_path / 'model'}", "data.workers=0"]
        for stream in load_recipe(name, [], OBJECTIVES).streams:
            sets.append(f"streams.{stream}.samples=8")
            if stream == "ppa":
                sets.append("streams.ppa.queue_size=64")
        common = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", name, "--data", str(demo), "--steps", "3"]
        listed.append([*common, "--out", str(tmp_path / name), "--set", *sets])
    launch.run_all(2, tmp_path, listed)
    for name in NAMES:
        entries = launch.metrics(tmp_path / name)
        assert [entry["step"] for entry in entries] == [1, 2, 3], name
        assert all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in entries), name
        resolved = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        assert resolved["model"]["dropout"] == 0.1, "BERT's own"
