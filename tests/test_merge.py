"""Merging: TIES and averages against plain numpy and by hand, whole models, and models that do not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForMaskedLM, BertConfig

from tests.test_going_on import run_spec_of, save
from xscale import export, merge
from xscale.checkpoint.store import manifest_text
from xscale.models.heads import FILE

Weights = dict[str, np.ndarray]


def plain_ties(base: np.ndarray, models: list[np.ndarray], density: float) -> np.ndarray:
    """Yadav et al. (2023), algorithm 1, number by number."""
    changes = [model.astype(np.float64) - base for model in models]
    kept = []
    for change in changes:
        largest = np.argsort(-np.abs(change), kind="stable")[: max(1, round(density * change.size))]
        kept.append({int(place): change[place] for place in largest})
    merged = base.astype(np.float64)
    for place in range(base.size):
        there = [of[place] for of in kept if place in of]
        sign = np.sign(sum(there))
        agreeing = [number for number in there if np.sign(number) == sign and number]
        if agreeing:
            merged[place] += sum(agreeing) / len(agreeing)
    return merged


@pytest.mark.parametrize("density", [0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("models", [1, 2, 5])
def test_ties_is_the_papers(density: float, models: int) -> None:
    rng = np.random.default_rng(models)
    changes = list(rng.normal(size=(models, 997)).astype(np.float32))
    found = merge.ties_change([torch.tensor(change) for change in changes], density)
    np.testing.assert_allclose(found, plain_ties(np.zeros(997, np.float32), changes, density), rtol=0, atol=1e-6)


def test_ties_by_hand() -> None:
    """Of each model the larger half stays: 3 -4 . . | . -2 1 . | 1 . . 5. Signs + - + +."""
    changes = torch.tensor([[3.0, -4.0, 1.0, 0.5], [0.0, -2.0, 1.0, -0.1], [1.0, 0.2, -0.3, 5.0]])
    assert merge.ties_change(list(changes), 0.5).tolist() == [2.0, -3.0, 1.0, 5.0]
    opposed = torch.tensor([[2.0, 1.0], [-2.0, 3.0]])
    assert merge.ties_change(list(opposed), 1.0).tolist() == [0.0, 2.0]
    outvoted = torch.tensor([[3.0], [-1.0], [-1.0]])
    assert merge.ties_change(list(outvoted), 1.0).tolist() == [3.0], (
        "the sign is that of the sum, and -1 has no part in it"
    )


@pytest.fixture(scope="module")
def parts(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run of two checkpoints, a third model of the same streams, and all of them exported."""
    path = tmp_path_factory.mktemp("parts")
    run_spec = run_spec_of(demo, "mixed", "streams.ppa.queue_size=64", "streams.ppa.projection=24")
    module, exported = run_spec.module(), []
    for number in range(3):
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        folder = path / ("run" if number < 2 else "other") / "checkpoints" / f"step_0000000{number + 1}"
        save(module, run_spec, folder)
        manifest = json.loads((folder / "manifest.json").read_text()) | {"step": number + 1}
        manifest["state"]["step"] = number + 1
        (folder / "manifest.json").write_text(manifest_text(manifest))
        exported.append(path / f"hf{number}")
        export.export(folder, exported[-1])
    return exported


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["merge", *map(str, words), "--out", str(out)])
    return merge.main()


def weights_of(path: Path) -> Weights:
    model = AutoModelForMaskedLM.from_pretrained(path)
    own = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    return own | {f"heads.{name}": weight for name, weight in load_file(path / FILE).items()}


def flat(weights: Weights) -> np.ndarray:
    return np.concatenate([weights[name].ravel() for name in sorted(weights)])


def test_models_are_averaged(parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean, named weights, and an average in which each model weighs half as much as the next."""
    a, b, c = (flat(weights_of(path)).astype(np.float64) for path in parts)
    for number, (words, expected) in enumerate([
        ([*parts], (a + b + c) / 3),
        ([*parts, "--how", "weighted", "--weights", 1, 2, 5], (a + 2 * b + 5 * c) / 8),
        ([*parts, "--how", "ema", "--decay", 0.5], (a + 2 * b + 4 * c) / 7),
        ([parts[0].parent / "run", "--how", "ema", "--decay", 0.25], (a + 4 * b) / 5),
        ([parts[0].parent / "run", parts[0].parent / "other"], (b + c) / 2),
    ]):  # fmt: skip
        assert run(monkeypatch, tmp_path / str(number), *words) == 0
        np.testing.assert_allclose(flat(weights_of(tmp_path / str(number))), expected, rtol=0, atol=1e-6)
    assert {path.name for path in (tmp_path / "0").rglob("*")} == {path.name for path in parts[0].rglob("*")}


def test_a_model_and_itself_are_itself(parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, tmp_path / "out", *[parts[1]] * 3) == 0
    assert np.array_equal(flat(weights_of(tmp_path / "out")), flat(weights_of(parts[1])))


def test_ties_of_whole_models(parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest changes are chosen among all weights of a model, in which tied ones count once."""
    assert run(monkeypatch, tmp_path / "out", *parts[1:], "--how", "ties", "--base", parts[0], "--density", 0.3) == 0
    base, b, c = (flat(weights_of(path)) for path in parts)
    np.testing.assert_allclose(flat(weights_of(tmp_path / "out")), plain_ties(base, [b, c], 0.3), rtol=0, atol=1e-6)


def test_heads_that_one_model_lacks_are_left_out(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    shutil.copytree(parts[1], tmp_path / "other")
    fields = json.dumps({"ppa": {"objective": "ppa"}})
    heads = {name: weight for name, weight in load_file(parts[1] / FILE).items() if name.startswith("ppa.")}
    save_file(heads, tmp_path / "other" / FILE, {"format": "pt", "streams": fields})
    assert run(monkeypatch, tmp_path / "out", parts[0], tmp_path / "other") == 0
    assert load_file(tmp_path / "out" / FILE).keys() == heads.keys()
    assert "stream alignlm" in capsys.readouterr().out


def change(path: Path, **fields: Any) -> None:
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | fields))


def test_models_that_do_not_fit_are_refused(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """By tokenizer, by shape, by a field of the config, by the languages of token types; and a model without a head."""
    of = {name: tmp_path / name for name in ("tokenizer", "shape", "field", "types", "headless")}
    for name in ("tokenizer", "field", "types"):
        shutil.copytree(parts[0], of[name])
    text = (of["tokenizer"] / "tokenizer.json").read_text()
    (of["tokenizer"] / "tokenizer.json").write_text(text.replace('"[UNK]"', '"[unk]"'))
    (of["tokenizer"] / "tokenizer_config.json").write_text(
        (of["tokenizer"] / "tokenizer_config.json").read_text().replace('"[UNK]"', '"[unk]"')
    )
    change(of["field"], layer_norm_eps=1e-5)
    change(of["types"], xscale={"language_embeddings": True, "languages": ["neutral", "de"], "neutral_trained": True})
    rows = AutoModelForMaskedLM.from_pretrained(parts[0]).config.vocab_size
    model = AutoModelForMaskedLM.from_config(
        BertConfig(vocab_size=rows, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    for name, saved in (("shape", model), ("headless", model.bert)):
        shutil.copytree(parts[0], of[name], ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        saved.save_pretrained(of[name])
    told = {"tokenizer": "tokenizer", "shape": "hidden_size", "field": "layer_norm_eps 1e-05",
            "types": "language_embeddings", "headless": "no masked-LM head"}  # fmt: skip
    for name, path in of.items():
        assert run(monkeypatch, tmp_path / "out", parts[0], path) == 2
        printed = capsys.readouterr().err
        assert printed.startswith(f"error: {path} ") and told[name] in printed and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a"], "two models"),
        (["a", "b", "--how", "weighted", "--weights", "1"], "2 numbers"),
        (["a", "b", "--how", "weighted", "--weights", "0", "0"], "above 0"),
        (["a", "b", "--weights", "1", "1"], "--how weighted"),
        (["a", "b", "--how", "ties"], "--base"),
        (["a", "b", "--how", "ties", "--base", "c", "--density", "0"], "--density"),
    ],
)
def test_arguments_that_do_not_go_together(words: list[str], told: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        merge.parse_arguments([*words, "--out", "out"])
    assert told in capsys.readouterr().err
