"""recipes/paper: the papers' numbers, and that each recipe runs."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import RobertaConfig, RobertaForMaskedLM, XLMRobertaForMaskedLM

from tests import launch
from xscale.errors import UserError
from xscale.models.build import preset_config
from xscale.objectives import OBJECTIVES
from xscale.objectives.ppa import PpaOptions as PPA
from xscale.recipe import RECIPES, Recipe, load_recipe, shipped_recipe_names
from xscale.run.describe import learning_rate_warnings
from xscale.run.resolve import check_recipe_suits_starting_weights

NAMES = [name for name in shipped_recipe_names() if name.startswith("paper/")]

PAN = {
    "model.init": "bert-base-multilingual-cased",  # 2.1: "the pretrained mBERT model to initialize both"
    "streams.ppa.samples": 128,  # 3.3: batch size
    "streams.ppa.temperature": 0.05,  # 3.3
    "streams.ppa.queue_size": 32000,  # 3.3
    "streams.ppa.momentum": 0.999,  # 3.3
    "streams.ppa.projection": 300,  # 2.1: d_k
    "streams.ppa.mask_prob": 0.15,  # 2.2
    "data.max_length": 128,  # 3.3
    "data.first": 250_000,  # 3.1
    "train.epochs": 10,  # 3.3: "except for the 2M setting where 5 epochs are trained"
    "train.lr": 0.00003,  # 3.3
    "train.warmup": 0.1,  # 3.3: "the first 10% of the total iterations"
    "train.weight_decay": 0.01,  # 3.3
}
MOCO = ("temperature", "queue_size", "momentum", "projection")
YANG = {
    "model.init": "bert-base-multilingual-cased",  # 3.1, 3.2: 12 layers, 768, 12 heads, by Google
    "train.epochs": 2,  # 3.1
    "train.lr": 5e-5,  # 3.1
}
TANG = {
    "model.preset": "small",  # Table 10: 8 heads, 8 layers, 512
    "data.max_length": 512,  # G.3: H
    "train.steps": 500_000,  # Table 10
    "train.lr": 1e-4,  # Table 10
    "train.warmup": 10_000,  # Table 10
}
INFERRED = {
    "tang": {
        "model.dropout": 0.1,  # RoBERTa's, by H
        "data.lexicon_heldout": 0,  # 5: "for all tokens"; 3: B is all that is there
        "train.weight_decay": 0.01,  # RoBERTa's
        "train.max_grad_norm": 0,  # RoBERTa's
    },
    "tang_xlm": {
        "streams.mlm.samples": 102,  # G.3: TLM's data 25 % of MLM's, of 128 together
        "streams.mlm.weight": 0.8,
        "streams.tlm.samples": 26 * 512 // 64,  # G.3: instances of 256 + 256 tokens of several pairs of about 64
        "streams.tlm.weight": 0.2,
    },
}
"""What follows from the papers with a thought of ours, by recipe or the beginning of its name: no line says "paper"."""
SETTINGS: dict[str, dict[str, Any]] = {
    "pan_250k": PAN,
    "pan_600k": PAN | {"data.first": 600_000},  # 3.1
    "pan_2m": PAN | {"data.first": 2_000_000, "train.epochs": 5},  # 3.1, 3.3
    "pan_no_moco": {k: v for k, v in PAN.items() if not k.endswith(MOCO)} | {"streams.ppa.moco_weight": 0},  # Table 5
    "pan_no_tlm": {k: v for k, v in PAN.items() if "mask" not in k} | {"streams.ppa.tlm_weight": 0},  # Table 5
    "pan_mlm": PAN | {"streams.ppa.replace_tlm_with_mlm": True},  # Table 5
    "yang_alignlm": YANG
    | {
        "streams.alignlm.samples": 32,  # 3.1: batch size
        "streams.alignlm.mask_prob": 0.3,  # 3.1
        "streams.alignlm.normalize": "sum",  # (5)
        "streams.alignlm.shuffle_sides": False,  # (1)
    },
    "yang_tlm": YANG | {"streams.tlm.samples": 32, "streams.tlm.mask_prob": 0.3},  # 3.2: "the same settings"
    "tang_mlm": TANG
    | {
        "streams.mlm.samples": 128,  # Table 10: batch size
        "streams.mlm.language_embeddings": False,  # G.5: "unlike XLM and DICT-MLM", "using the MLM model"
    },
    "tang_xlm": TANG
    | {
        "streams.mlm.language_embeddings": True,  # G.3
        "streams.tlm.language_embeddings": True,
        "data.overlong": "drop",  # G.3: "thrown out"
    },
    "tang_dict_mlm": TANG
    | {
        "streams.dict_mlm.samples": 128,
        "streams.dict_mlm.synonym": "input",  # G.4: "the masked token is changed to a cross-lingual synonym"
        "streams.dict_mlm.dict_share": 0.5,  # G.4
        "streams.dict_mlm.language_embeddings": True,  # G.4: "the use of language IDs"
    },
    "tang_align_mlm": TANG
    | {
        "streams.align_mlm.samples": 128,
        "streams.align_mlm.alpha": 10,  # G.5
        "streams.align_mlm.pairs_per_step": None,  # 3: the sum is over all of B
        "streams.align_mlm.language_embeddings": False,  # G.5
    },
    "xlmr": {
        "model.preset": "xlmr-base",
        "streams.mlm.samples": 8192,
        "streams.mlm.language_embeddings": False,
        "data.alpha": 0.3,
        "train.steps": 1_500_000,
    },
}
"""What the papers print, by field, with the section."""


def load(name: str, *sets: str) -> Recipe:
    return load_recipe(f"paper/{name}", list(sets), OBJECTIVES)


def marked(name: str) -> set[str]:
    """Dotted names of the lines whose comment says that they are the paper's."""
    found, parents = set(), []
    for line in (RECIPES / "paper" / f"{name}.yaml").read_text().splitlines():
        key = re.match(r"( *)(\w+):", line)
        if key:
            parents = [*parents[: len(key[1]) // 2], key[2]]
            if re.search(r"  # paper\b", line):
                found.add(".".join(parents))
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_the_papers_own_settings(name: str) -> None:
    """Each number of the table is in the recipe, and the lines that say to be the paper's are these."""
    tree = load(name).to_dict()
    inferred = [values for start, values in INFERRED.items() if name.startswith(start)]
    for dotted, expected in {k: v for values in (SETTINGS[name], *inferred) for k, v in values.items()}.items():
        value: Any = tree
        for part in dotted.split("."):
            value = value[part]
        assert value == expected, dotted
    assert marked(name) == set(SETTINGS[name])


def test_all_of_them_are_in_the_table() -> None:
    assert sorted(f"paper/{name}" for name in SETTINGS) == NAMES
    with pytest.raises(Exception, match=r"'paper/none' not found .* mlm, .*paper/pan_250k, .*xlm\) or a file"):
        load("none")


def test_sizes_and_ablations_differ_in_what_they_say_alone() -> None:
    full = load("pan_250k")
    assert load("pan_250k", "data.first=600000", "checkpoint.every=10000") == load("pan_600k")
    more = ["data.first=2000000", "train.epochs=5.0", "checkpoint.every=10000"]
    assert load("pan_250k", *more) == load("pan_2m")
    changes = {
        "pan_no_moco": {"moco_weight": 0.0},
        "pan_no_tlm": {"tlm_weight": 0.0},
        "pan_mlm": {"replace_tlm_with_mlm": True},
    }
    assert full.streams["ppa"].options == PPA()
    for name, change in changes.items():
        stream = replace(full.streams["ppa"], options=replace(PPA(), **change))
        assert load(name) == replace(full, streams={"ppa": stream})


def test_the_small_preset_is_tang_s_roberta() -> None:
    """Table 10, and RoBERTa's of what it leaves out: 4 x 512 between, 512 positions behind the padding's."""
    config = preset_config("small", vocab_size=40_000, pad_id=1, max_length=512, dropout=0.1)
    theirs = RobertaConfig(
        vocab_size=40_000,
        num_hidden_layers=8,
        hidden_size=512,
        num_attention_heads=8,
        intermediate_size=4 * 512,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )
    with torch.device("meta"):
        expected, ours = RobertaForMaskedLM(theirs).state_dict(), XLMRobertaForMaskedLM(config).state_dict()
    assert {name: w.shape for name, w in ours.items()} == {name: w.shape for name, w in expected.items()}
    same = ("num_attention_heads", "layer_norm_eps", "hidden_act", "pad_token_id")
    same += ("hidden_dropout_prob", "attention_probs_dropout_prob")
    assert all(getattr(config, name) == getattr(theirs, name) for name in same)


@pytest.mark.slow
def test_each_trains_on_the_demo_corpus(demo: Path, tmp_path: Path) -> None:
    """A few steps of a tiny model on 2 ranks; of those that say epochs, as many as these are. Pan's sizes and ablations
    differ from the first by fields of which tests/test_recipes.py trains each."""
    listed, names = [], [name for name in NAMES if "/pan_" not in name or name.endswith("250k")]
    for name in names:
        recipe = load_recipe(name, [], OBJECTIVES)
        sets = ["model.init=null", "model.preset=tiny", "data.first=200", "data.workers=0", "train.warmup=0.3"]
        sets += [f"streams.{stream}.samples=8" for stream in recipe.streams]
        sets += ["streams.ppa.queue_size=64"] * ("ppa" in recipe.streams)
        sets += ["train.steps=3" if recipe.train.epochs is None else "train.epochs=0.12"]
        out = ["--out", str(tmp_path / name), "--data", *(str(demo / d) for d in ("mono_en", "mono_xx", "pairs"))]
        listed.append(["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", name, *out, "--set", *sets])
    launch.run_all(2, tmp_path, listed)
    for name in names:
        entries = launch.metrics(tmp_path / name)
        assert [entry["step"] for entry in entries] == [1, 2, 3], name
        assert all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in entries), name
        resolved = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        assert resolved["train"]["steps"] == 3 and resolved["data"]["first"] == 200


def sets_of_model(folder: Path, sets: list[str], trained_by_xscale: bool) -> list[str]:
    """Write the config of a model to the folder, and return the assignments with the folder in the place of DIR."""
    config = RobertaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, intermediate_size=8)
    if trained_by_xscale:
        config.xscale = {"languages": ["de", "en"]}
    config.save_pretrained(folder)
    return [assignment.replace("DIR", str(folder)) for assignment in sets]


@pytest.mark.parametrize(
    ("recipe", "sets", "trained_by_xscale", "words"),
    [
        ("ppa", ["model.init=DIR"], False, r"recipe ppa is for random weights.*0.001.*adapt/ppa\).*train.lr=5e-5"),
        ("mixed", ["model.init=DIR"], False, r"0.002.*--recipe adapt/mixed\).*train.lr=5e-5"),
        ("ppa", ["model.init=DIR", "train.lr=5e-5"], False, None),
        ("ppa", ["model.init=DIR"], True, None),
        ("align_mlm", ["model.init=DIR"], False, r"adapt/NAME\).*set a lower learning rate.*train.lr=5e-5"),
        ("mlm", ["model.init=DIR"], False, None),
        ("alignlm", ["model.init=DIR"], False, None),
        ("paper/pan_250k", ["model.init=DIR"], False, None),
        ("paper/pan_250k", ["model.init=null"], False, None),
        ("adapt/mixed", ["model.init=DIR"], False, None),
        ("adapt/mixed", [], False, r"adapt/mixed is for a pre-trained model.*--set model\.init=DIR"),
    ],
)
def test_a_recipe_starts_from_the_weights_that_it_suits(
    tmp_path: Path, recipe: str, sets: list[str], trained_by_xscale: bool, words: str | None
) -> None:
    sets = sets_of_model(tmp_path, sets, trained_by_xscale)
    if words is None:
        check_recipe_suits_starting_weights(recipe, load_recipe(recipe, sets, OBJECTIVES), sets)
    else:
        with pytest.raises(UserError, match=words):
            check_recipe_suits_starting_weights(recipe, load_recipe(recipe, sets, OBJECTIVES), sets)


@pytest.mark.parametrize(
    ("sets", "trained_by_xscale", "warned"),
    [
        (["model.init=DIR"], False, True),
        (["model.init=DIR", "train.lr=5e-5"], False, False),
        (["model.init=DIR"], True, False),
        ([], False, False),
    ],
)
def test_a_rate_for_random_weights_is_named_before_it_harms_a_public_encoder(
    tmp_path: Path, sets: list[str], trained_by_xscale: bool, warned: bool
) -> None:
    sets = sets_of_model(tmp_path, sets, trained_by_xscale)
    warnings = learning_rate_warnings(load_recipe("mlm", sets, OBJECTIVES))
    assert len(warnings) == warned
    if warned:
        assert re.search(r"train\.lr 0\.001 .*Set train\.lr=5e-5", warnings[0])
