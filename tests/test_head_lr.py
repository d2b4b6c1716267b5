"""train.head_lr, the learning rate of heads that start from random weights."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, XLMRobertaConfig, XLMRobertaModel

from tests import launch
from xscale.checkpoint.restore import read_full_weights
from xscale.data.tokenizer import Tokenizer
from xscale.models.build import parameter_groups_by_decay
from xscale.step.module import parameter_names_with_head_lr

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
HEAD = "encoder.lm.cls.predictions."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A folder with published encoders: `body` has no masked-LM head, `untrained` was saved with the random head
    that transformers made for it, and `whole` has a trained head. `xlmr` has no head, and transformers names its tied
    embeddings after the head."""
    folder = tmp_path_factory.mktemp("models")
    config = BertConfig(**SHAPE, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_id)
    torch.manual_seed(0)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder / "body")
    model = BertForMaskedLM(config)
    model.save_pretrained(folder / "untrained")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.arange(20)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(folder / "whole")
    sizes = SHAPE | {"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.pad_id, "type_vocab_size": 1}
    XLMRobertaModel(XLMRobertaConfig(**sizes), add_pooling_layer=False).save_pretrained(folder / "xlmr")
    for name in ("body", "untrained", "whole", "xlmr"):
        tokenizer.hf.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize(
    ("init", "recipe", "heads"),
    [
        ("body", "adapt/tlm", {HEAD}),
        ("body", "adapt/alignlm", {HEAD, "heads.alignlm."}),
        ("untrained", "adapt/tlm", {HEAD}),
        ("whole", "adapt/tlm", set()),
        ("whole", "adapt/alignlm", {"heads.alignlm."}),
        (None, "tlm", {HEAD}),
        (
            "xlmr",
            "adapt/tlm",
            {"encoder.lm.lm_head.bias", "encoder.lm.lm_head.dense.", "encoder.lm.lm_head.layer_norm."},
        ),
    ],
)
def test_only_heads_with_random_weights_are_new(
    demo: Path, models: Path, init: str | None, recipe: str, heads: set[str]
) -> None:
    sets = ["train.head_lr=0.001", "data.workers=0"]
    if init:
        sets.append(f"model.init={models / init}")
    module = launch.module(launch.open_run(recipe, sets, [demo], measured=False))
    names = {name for name, _ in module.named_parameters()}
    expected = {name for name in names if name.startswith(tuple(heads))}
    assert set(parameter_names_with_head_lr(module)) == expected
    groups = parameter_groups_by_decay(module, 0.1, parameter_names_with_head_lr(module))
    parameters = [parameter for group in groups for parameter in group["params"]]
    assert sorted(map(id, parameters)) == sorted(map(id, module.parameters())), "each parameter is in one group"
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    for group in groups:
        for parameter in group["params"]:
            assert group["new_heads"] == (name_of[id(parameter)] in expected)
            assert group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0.0)


def test_without_the_field_heads_train_as_the_encoder_does(demo: Path, models: Path) -> None:
    sets = ["train.head_lr=null", "data.workers=0", f"model.init={models / 'body'}"]
    module = launch.module(launch.open_run("adapt/tlm", sets, [demo], measured=False))
    assert (
        parameter_names_with_head_lr(module) == []
        and len(parameter_groups_by_decay(module, 0.1, parameter_names_with_head_lr(module))) == 2
    )


@pytest.mark.slow
def test_new_heads_train_with_their_own_rate_at_every_stage(demo: Path, models: Path, tmp_path: Path) -> None:
    """The encoder hardly moves with its own tiny rate. Adam moves each weight of the head by about the rate of each
    step. All stages train the same weights, also after a resume at another stage, or with another
    masked-LM head in model.init."""
    recipe = [
        "--recipe",
        "adapt/alignlm",
        "--data",
        str(demo),
        "--steps",
        "4",
        "--set",
        f"model.init={models / 'body'}",
    ]
    sets = ["train.lr=1e-9", "train.head_lr=0.01", "train.warmup=0", "train.decay=0", "train.weight_decay=0"]
    sets += ["data.workers=0", "streams.alignlm.samples=8", "model.dropout=0.0", "checkpoint.every=2", "eval.tasks=[]"]
    runs = []
    for stage in (0, 1, 2, 3):
        config = json.loads(Path("ds_configs/zero2_cpu.json").read_text())
        config["zero_optimization"] = {"stage": stage}
        (tmp_path / f"zero{stage}.json").write_text(json.dumps(config))
        out = ["--ds_config", str(tmp_path / f"zero{stage}.json"), "--out", str(tmp_path / f"run{stage}")]
        runs.append([*out, *recipe, *sets])
    for stage, other in ((2, 0), (0, 2)):
        checkpoint = tmp_path / f"run{other}" / "checkpoints" / "step_00000002"
        out = ["--ds_config", str(tmp_path / f"zero{stage}.json"), "--out", str(tmp_path / f"resumed{stage}")]
        runs.append([*out, "--resume", str(checkpoint), *recipe, *sets])
    replaced = tmp_path / "init"
    shutil.copytree(models / "body", replaced)
    same = [*recipe[:-1], f"model.init={replaced}", *sets]
    begin_config = ["--ds_config", str(tmp_path / "zero2.json")]
    runs.append([*begin_config, "--out", str(tmp_path / "replaced"), *same])
    launch.run_all(2, tmp_path, runs)
    shutil.rmtree(replaced)
    shutil.copytree(models / "whole", replaced)  # its masked-LM head is trained
    checkpoint = tmp_path / "replaced" / "checkpoints" / "step_00000002"
    resume = [*begin_config, "--out", str(tmp_path / "resumed after it"), "--resume", str(checkpoint), *same]
    launch.run_all(2, tmp_path, [resume])
    ends = {}
    for name in ("run0", "run1", "run2", "run3", "resumed0", "resumed2", "replaced", "resumed after it"):
        ends[name] = read_full_weights(tmp_path / name / "checkpoints" / "step_00000004")
    begin = read_full_weights(tmp_path / "run2" / "checkpoints" / "step_00000002")
    for name, weight in ends["run2"].items():
        moved = (weight - begin[name]).abs()
        if name.startswith(("heads.", HEAD)) and "decoder.weight" not in name:
            assert 0.005 < moved.max() < 0.03, name
        else:
            assert moved.max() < 1e-7, name
        for run in ends:
            torch.testing.assert_close(ends[run][name], weight, atol=1e-5, rtol=0, msg=f"{run} {name}")
