"""Evaluation: what is measured, what is left out, and what a failure leaves behind."""

import json
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, BertConfig

from data_tools import tokenizer as train_tokenizer
from tests.conftest import tar_lines
from tests.rows import one_thread  # noqa: F401
from xscale.data.shards import find_sources
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval import bootstrap, heldout, retrieval, run
from xscale.eval.model import ExportedModel

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
Measure = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """An exported model of 20 positions with random weights, large enough that states differ."""
    torch.manual_seed(0)
    config = BertConfig(**SHAPE, vocab_size=tokenizer.vocab_size, max_position_embeddings=20, initializer_range=0.3)
    path = tmp_path_factory.mktemp("model") / "hf"
    AutoModelForMaskedLM.from_config(config).save_pretrained(path)
    tokenizer.hf.save_pretrained(path)
    return path


@pytest.fixture
def measure(hf: Path, demo: Path, tmp_path: Path) -> Measure:
    """measure("--task", ...): exit code and the JSON file of the command."""

    def measure(*arguments: object, out: Path = tmp_path / "scores.json") -> tuple[int, dict[str, Any]]:
        given = {"--model": hf, "--data": demo / "heldout", "--limit": 60, "--out": out}
        given = {name: value for name, value in given.items() if name not in arguments}
        words = [str(word) for pair in given.items() for word in pair] + [str(word) for word in arguments]
        code = run.main(words)
        return code, json.loads(out.read_text()) if out.is_file() else {}

    return measure


def pair_lengths(directory: Path, tokenizer: Tokenizer) -> list[int]:
    """Tokens of `[CLS] a [SEP] b [SEP]` of each pair, by tarfile and transformers alone."""
    texts = [json.loads(line)["texts"] for tar in sorted(directory.rglob("*.tar")) for line in tar_lines(tar)]
    return [len(tokenizer.hf(*pair)["input_ids"]) for pair in texts]


def test_pairs_beyond_the_models_positions_are_dropped_and_counted(
    measure: Measure, demo: Path, tokenizer: Tokenizer
) -> None:
    lengths = pair_lengths(demo / "heldout", tokenizer)[:60]
    code, found = measure("--task", "heldout")
    ((scores,),) = ([*of_task.values()] for of_task in found["results"].values())
    assert code == 0 and 0 < scores["dropped"] < 60
    assert scores["dropped"] == sum(length > 20 for length in lengths)


def test_masks_depend_on_the_number_of_a_pair_alone(
    measure: Measure, demo: Path, tmp_path: Path, write_pairs: Callable[..., None]
) -> None:
    """The same pairs in shards of another name, with other keys, have the same loss."""
    texts = [json.loads(line)["texts"] for tar in sorted((demo / "heldout").rglob("*.tar")) for line in tar_lines(tar)]
    for side in (0, 1):
        (tmp_path / str(side)).write_text("".join(f"{pair[side]}\n" for pair in texts[:60]))
    write_pairs(tmp_path / "0", tmp_path / "1", tmp_path / "again", "--langs", "en", "xx")
    _, first = measure("--task", "heldout")
    _, again = measure("--task", "heldout", "--data", tmp_path / "again")
    numbers = [results["results"]["heldout"]["en-xx"] for results in (first, again)]
    assert numbers[0]["tlm_loss"] == pytest.approx(numbers[1]["tlm_loss"], rel=1e-9)
    assert numbers[0]["targets"] == numbers[1]["targets"] and first["checksums"] == again["checksums"]
    _, other = measure("--task", "heldout", "--limit", 59)
    assert first["checksums"]["heldout"]["en-xx"] != other["checksums"]["heldout"]["en-xx"]


def test_rows_of_several_pairs_have_the_numbers_of_single_pairs(
    hf: Path, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ExportedModel(hf)
    (source,) = find_sources([demo / "heldout"])
    together = heldout.evaluate(model, source, 60)[""]
    monkeypatch.setattr(heldout, "ROW", 1)
    alone = heldout.evaluate(model, source, 60)[""]
    assert together == pytest.approx(alone, rel=1e-6)
    intervals = [bootstrap.intervals_of_scores({"heldout": {"": scores}}) for scores in (together, alone)]
    (first, second) = (list(interval["heldout"][""].values()) for interval in intervals)
    assert first == [pytest.approx(bounds, rel=1e-6) for bounds in second]


@pytest.mark.parametrize("limit", [-1, 0])
def test_a_limit_that_leaves_nothing(measure: Measure, capsys: Any, limit: int) -> None:
    assert measure("--task", "retrieval", "heldout", "--limit", limit) == (2, {})
    assert f"--limit {limit}" in capsys.readouterr().err


def test_nothing_fits(measure: Measure, hf: Path, tmp_path: Path, tokenizer: Tokenizer, capsys: Any) -> None:
    short = tmp_path / "short"
    config = BertConfig(**SHAPE, vocab_size=tokenizer.vocab_size, max_position_embeddings=6)
    AutoModelForMaskedLM.from_config(config).save_pretrained(short)
    tokenizer.hf.save_pretrained(short)
    assert measure("--task", "heldout", "--model", short)[0] == 2
    assert "6 tokens" in capsys.readouterr().err


def test_a_model_that_is_torn_or_not_finite_is_refused(measure: Measure, hf: Path, tmp_path: Path, capsys: Any) -> None:
    torn, other, nan, name = tmp_path / "torn", tmp_path / "other", tmp_path / "nan", "bert.embeddings.LayerNorm.bias"
    for path in (torn, other, nan):
        shutil.copytree(hf, path)
    (torn / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes()[:-100])
    (other / "config.json").write_text(json.dumps(json.loads((hf / "config.json").read_text()) | {"hidden_size": 64}))
    weights = load_file(hf / "model.safetensors")
    weights[name].fill_(torch.nan)
    save_file(weights, nan / "model.safetensors", {"format": "pt"})
    cannot = "cannot be loaded"
    for path, told in {torn: cannot, other: cannot, nan: f"{name} .*earlier checkpoint"}.items():
        assert measure("--task", "retrieval", "--model", path) == (2, {})
        assert re.search(f"^error: --model {path}:? .*{told}", capsys.readouterr().err, re.M), path


def test_text_in_a_language_that_the_model_lacks_is_measured(
    measure: Measure, hf: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """By every task, as transformers reads it: without token types."""
    lm = AutoModelForMaskedLM.from_pretrained(hf)
    lm.base_model.embeddings.token_type_embeddings = torch.nn.Embedding(3, SHAPE["hidden_size"])
    lm.config.type_vocab_size = 3
    lm.config.xscale = {"languages": ["neutral", "de", "en"], "language_embeddings": True, "neutral_trained": True}
    lm.save_pretrained(tmp_path / "hf")
    tokenizer.hf.save_pretrained(tmp_path / "hf")
    tasks = ("heldout", "retrieval")
    code, found = measure("--model", tmp_path / "hf", "--task", *tasks)
    assert code == 0 and tuple(found["results"]) == tasks
    model, texts = ExportedModel(tmp_path / "hf"), ["the dog sees a cat", "a house", "rain"]
    spellings = {"xx": 0, "de": 1, "deu_Latn": 1, "de-AT": 1, "en": 2, "eng": 2}
    assert model.language_ids_or_neutral(list(spellings)) == spellings
    plain = AutoModel.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        states = [plain(**tokenizer.hf(text, return_tensors="pt")).last_hidden_state[0, 1:-1] for text in texts]
    expected = torch.stack([torch.nn.functional.normalize(state.mean(0), dim=0) for state in states])
    found = [retrieval.embed_sentences(model, texts, name, ["mean"])["mean", -1] for name in ("xx", "en")]
    of_xx, of_en = (torch.nn.functional.normalize(vectors, dim=1) for vectors in found)
    torch.testing.assert_close(of_xx, expected, rtol=0, atol=1e-5)
    assert (of_en - expected).abs().max() > 0.01


def test_a_task_that_fails_loses_no_others_scores(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Without a dictionary the first fails: the others are measured, written and printed; exit code 2. A fault of ours
    ends it."""
    lexicon = tmp_path / "fr-es.txt"
    lexicon.write_text("a b\n")
    tasks = ("--lexicons", lexicon, "--task", "alignment", "heldout", "retrieval")
    code, found = measure(*tasks)
    printed = capsys.readouterr()
    assert code == 2 and list(found["results"]) == ["heldout", "retrieval"]
    assert "error: task alignment on en-xx: task alignment needs a dictionary" in printed.err
    assert "Traceback" not in printed.err and "heldout en-xx: tlm_loss" in printed.out

    def broken(*_: Any, **arguments: Any) -> dict[str, float]:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(heldout, "evaluate", broken)
    with pytest.raises(ZeroDivisionError):
        measure(*tasks)


def test_sources_of_the_same_languages_keep_their_own_scores(measure: Measure, demo: Path) -> None:
    folders = [demo / "heldout" / "pairs", demo / "pairs"]
    code, found = measure("--task", "retrieval", "--data", *folders)
    assert code == 0 and list(found["results"]["retrieval"]) == [f"en-xx ({folder})" for folder in folders]


@pytest.mark.parametrize("place", ["file/scores.json", "folder", "/proc/here/scores.json"])
def test_what_cannot_be_written_is_said_before_the_work(
    measure: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, place: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(run, "ExportedModel", lambda path: pytest.fail("the model was loaded"))
    assert measure("--task", "heldout", out=tmp_path / place)[0] == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and str(tmp_path / place) in error


def test_folders_that_others_saved(
    measure: Measure, hf: Path, tmp_path: Path, tokenizer: Tokenizer, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a masked-LM head nothing is measured that reads it; without a tokenizer, with one of more words than the
    model has, or without weights that config.json asks for, nothing at all."""
    bert = AutoModel.from_pretrained(hf)
    bert.save_pretrained(tmp_path / "hf")
    assert measure("--task", "retrieval", "--model", tmp_path / "hf")[0] == 2
    assert "tokenizer.save_pretrained" in capsys.readouterr().err
    tokenizer.hf.save_pretrained(tmp_path / "hf")
    assert measure("--task", "retrieval", "--model", tmp_path / "hf")[0] == 0
    code, found = measure("--task", "heldout", "retrieval", "--model", tmp_path / "hf")
    assert code == 2 and set(found["results"]) == {"retrieval"}
    assert "has no masked-LM head, but task heldout measures" in capsys.readouterr().err
    AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "random_head")
    tokenizer.hf.save_pretrained(tmp_path / "random_head")
    assert measure("--task", "heldout", "--model", tmp_path / "random_head")[0] == 0
    assert measure("--task", "heldout", "--model", tmp_path / "random_head")[0] == 0
    assert caplog.text.count("the masked-LM head was never trained") == 1, "once for a model"
    fields = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 4}))
    capsys.readouterr()
    assert measure("--task", "retrieval", "--model", tmp_path / "hf")[0] == 2
    assert "bert.encoder.layer.3." in capsys.readouterr().err
    bert.resize_token_embeddings(100)
    bert.save_pretrained(tmp_path / "hf")
    assert measure("--task", "retrieval", "--model", tmp_path / "hf")[0] == 2
    assert "only 100 embeddings. Save" in capsys.readouterr().err
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"none")
    assert measure("--task", "retrieval", "--model", tmp_path / "hf")[0] == 2
    assert "hf cannot be loaded" in capsys.readouterr().err


def test_a_tokenizer_of_sentencepiece_alone_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """InfoXLM and XLM-Align have no tokenizer.json; transformers' own message names tiktoken, which cannot read it."""
    (tmp_path / "config.json").write_text('{"model_type": "xlm-roberta"}')
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    monkeypatch.setattr("xscale.data.tokenizer.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"sentencepiece\.bpe\.model .*pip install sentencepiece"):
        Tokenizer(tmp_path)


# Retrieval


def states_of(path: Path, texts: list[str]) -> list[list[np.ndarray]]:
    """By transformers alone: of each text all layers' states of its tokens [L, H], [CLS] first and [SEP] last."""
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    found = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=model.config.max_position_embeddings)
        with torch.no_grad():
            hidden = model(**inputs, output_hidden_states=True).hidden_states
        found.append([layer[0].double().numpy() for layer in hidden])
    return found


def cosines(first: list[np.ndarray], second: list[np.ndarray]) -> np.ndarray:
    a, b = (np.stack(side) / np.linalg.norm(np.stack(side), axis=1, keepdims=True) for side in (first, second))
    return a @ b.T


def translation_evaluator(cosine: np.ndarray, scores: Callable[[np.ndarray], np.ndarray]) -> dict[str, float]:
    """sentence-transformers' TranslationEvaluator: src2trg, trg2src and mean accuracy, of the index of the largest."""

    def share(scores: np.ndarray) -> float:
        return sum(int(np.argmax(row)) == number for number, row in enumerate(scores)) / len(scores)

    there, back = share(scores(cosine)), share(scores(cosine.T))
    return {"there": there, "back": back, "mean": (there + back) / 2}


def by_ratio(cosine: np.ndarray, k: int = 4) -> np.ndarray:
    """LASER's margin of each sentence's 4 nearest, pair by pair; 0 of the others."""
    r_x, r_y = ([np.mean(sorted(row)[-k:]) for row in side] for side in (cosine, cosine.T))
    least = [sorted(row)[-k:][0] for row in cosine]
    return np.array(
        [[c / ((r_x[i] + r_y[j]) / 2) * (c >= least[i]) for j, c in enumerate(row)] for i, row in enumerate(cosine)]
    )


POOL = {"mean": lambda states: states[1:-1].mean(0), "cls": lambda states: states[0]}
MARGIN = {"cosine": lambda cosine: cosine, "ratio": by_ratio}
ASKED = {-4: 0, 1: 1, 0: 0}
"""{--layer: the layer's number}."""


def same_as_the_reference(
    found: dict[str, Any], path: Path, pairs: list[list[str]], langs: tuple[str, str], ties: int = 0
) -> None:
    """found: results of every pooling, margin and layer. ties: sentences that may go either way, of those that are
    there twice. As an embedding [CLS] is the same in every sentence, and any of them as near as the others."""
    first, second = (states_of(path, [pair[side] for pair in pairs]) for side in (0, 1))
    layers = len(first[0])
    assert len(found) == len(POOL) * len(MARGIN) * layers
    a, b = langs
    for pooling, margin, layer in product(POOL, MARGIN, range(layers)):
        pooled = ([POOL[pooling](states[layer]) for states in side] for side in (first, second))
        expected = translation_evaluator(cosines(*pooled), MARGIN[margin])
        scores = found[f"{a}-{b} {pooling} {margin} layer {layer}"]
        numbers, near = [scores[f"{a}->{b}"], scores[f"{b}->{a}"], scores["accuracy"]], (ties + 1e-6) / len(pairs)
        if (pooling, layer) != ("cls", 0):
            assert numbers == pytest.approx([*expected.values()], rel=0, abs=near), (pooling, margin, layer)
        assert scores["sentences"] == len(pairs)


def test_retrieval_is_that_of_sentence_transformers(measure: Measure, hf: Path, demo: Path) -> None:
    """Every layer, pooling and margin, on sentences that are cut at the model's positions, too; the default is one of
    them, and negative numbers count from the end."""
    texts = [json.loads(line)["texts"] for tar in sorted((demo / "heldout").rglob("*.tar")) for line in tar_lines(tar)]
    every = ("--pooling", "mean", "cls", "mean", "--margin", "cosine", "ratio")
    _, found = measure("--task", "retrieval", *every, "--layer", "all")
    scores = found["results"]["retrieval"]
    same_as_the_reference(scores, hf, texts[:60], ("en", "xx"))
    assert len({json.dumps(of_row) for of_row in scores.values()}) > 6
    _, default = measure("--task", "retrieval")
    assert default["results"]["retrieval"] == {"en-xx": scores["en-xx mean cosine layer 3"]}
    _, chosen = measure("--task", "retrieval", "--pooling", "cls", "--margin", "ratio", "--layer", "-4", "1", "0")
    expected = {f"en-xx cls ratio layer {asked}": scores[f"en-xx cls ratio layer {n}"] for asked, n in ASKED.items()}
    assert chosen["results"]["retrieval"] == expected


def test_layers_that_are_not_there(measure: Measure, tmp_path: Path, capsys: Any) -> None:
    """The scores of an earlier command stay."""
    (tmp_path / "scores.json").write_text('"earlier"')
    assert measure("--task", "retrieval", "--layer", "2", "-5", "4") == (2, "earlier")
    assert (
        "--layer -5: the model does not have this layer. Write a number from 0 (embeddings) to 3"
        in capsys.readouterr().err
    )


def test_the_margin_takes_from_a_hub_what_makes_it_near_to_all() -> None:
    """The second sentence is everybody's nearest neighbour by cosine, its own translation's alone by the margin."""
    cosine = torch.tensor([[0.70, 0.80, 0.10], [0.20, 0.95, 0.20], [0.10, 0.80, 0.70]])
    assert cosine.argmax(1).tolist() == [1, 1, 1]
    unit = torch.eye(3)  # whose cosines with the rows are the rows
    found = retrieval.retrieval_accuracies(cosine, unit, "ratio", ("en", "de"))
    assert found == {"en->de": 1, "de->en": 1, "accuracy": 1, "sentences": 3}
    assert retrieval.retrieval_accuracies(cosine, unit, "cosine", ("en", "de"))["en->de"] == pytest.approx(1 / 3)


def test_nearly_equal_vectors_are_compared_in_float64(hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cosines of about 1 - 1e-6, whose differences float32 cannot tell."""
    random = np.random.default_rng(0)
    center = random.normal(size=32)
    first = center + random.normal(size=(300, 32)) * 3e-4
    second = first + random.normal(size=(300, 32)) * 2e-4
    sides = []
    for side in (first, second):
        sides.append(torch.from_numpy(side / np.linalg.norm(side, axis=1, keepdims=True)).float())
    given = iter(sides)
    monkeypatch.setattr(retrieval, "embed_sentences", lambda *_: {("mean", -1): next(given)})
    found = retrieval.evaluate(ExportedModel(hf), [("a", "b")] * 300, ("de", "en"), margins=["cosine", "ratio"])
    cosine = cosines(*([*side.double().numpy()] for side in sides))
    for margin in MARGIN:
        expected = translation_evaluator(cosine, MARGIN[margin])
        assert [*found[margin].values()] == pytest.approx([*expected.values(), 300]), margin


def test_the_first_of_equally_near_sentences_is_the_match() -> None:
    twice = torch.eye(4).double()[[0, 1, 2, 2]]
    for margin in MARGIN:
        found = retrieval.retrieval_accuracies(twice, twice, margin, ("en", "de"))
        assert found["en->de"] == found["de->en"] == 0.75, margin


def test_retrieval_on_real_text(measure: Measure, real: Path, tmp_path: Path, write_pairs: Callable[..., None]) -> None:
    """Tatoeba's German and English: names, numbers and loans alone find some translations in a model of random weights,
    at its embeddings more than behind its layers."""
    sides = (real / "eval" / "tatoeba" / f"tatoeba.deu-eng.{code}.xz" for code in ("eng", "deu"))
    write_pairs(*sides, tmp_path / "pairs")
    train_tokenizer.main(["--data", str(tmp_path), "--out", str(tmp_path / "hf"), "--vocab_size", "2000"])
    config = BertConfig(**SHAPE, vocab_size=2000, max_position_embeddings=64, initializer_range=0.3)
    torch.manual_seed(0)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "hf")
    every = ("--pooling", "mean", "cls", "--margin", "cosine", "ratio", "--layer", "all", "--limit", "300")
    _, found = measure("--task", "retrieval", "--model", tmp_path / "hf", "--data", tmp_path / "pairs", *every)
    scores = found["results"]["retrieval"]
    texts = [json.loads(line)["texts"] for tar in sorted((tmp_path / "pairs").glob("*.tar")) for line in tar_lines(tar)]
    texts = [[de, en] for en, de in texts[:300]]
    same_as_the_reference(scores, tmp_path / "hf", texts, ("de", "en"), ties=2)
    accuracy = {name: of_row["accuracy"] for name, of_row in scores.items()}
    assert accuracy["de-en mean cosine layer 0"] > 0.02 > accuracy["de-en mean cosine layer 3"]
