"""Tasks of mteb on local files. The fast tests have a stand-in, by what its documentation says of tasks and encoders:
mteb itself takes seconds to import, and `make test-slow` installs it."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.rows import one_thread  # noqa: F401
from tests.test_eval import POOL, cosines, states_of
from tests.test_eval_tasks import random_model, sentences
from tests.test_readme import commands
from xscale.data.tokenizer import Tokenizer
from xscale.eval import mteb_tasks, run
from xscale.eval.model import ExportedModel

PAIRS = 60


class Metadata(SimpleNamespace):
    def model_copy(self, update: dict[str, Any]) -> "Metadata":
        return Metadata(**{**vars(self), **update})


class Tatoeba:
    """As mteb's: `sentence1`, `sentence2` and `lang` of each row; texts in batches; accuracy of the most similar."""

    metadata = Metadata(name="Tatoeba", type="BitextMining", dataset={"path": "mteb/tatoeba-bitext-mining"})
    eval_splits = ("test",)

    def __init__(self, subsets: list[str] | None):
        self.hf_subsets = [name for name in ("deu-eng", "fra-eng") if not subsets or name in subsets]

    def load_data(self) -> None:
        lines = (Path(self.metadata.dataset["path"]) / "test.jsonl").read_text().splitlines()
        self.rows = [json.loads(line) for line in lines]

    def evaluate(self, model: Any, split: str, *, encode_kwargs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        found = {}
        for subset in self.hf_subsets:
            rows, size = [row for row in self.rows if row["lang"] == subset], encode_kwargs["batch_size"]
            batches = [rows[start : start + size] for start in range(0, len(rows), size)]
            first, second = (
                model.encode(
                    [{"text": [row[f"sentence{side}"] for row in batch]} for batch in batches],
                    task_metadata=self.metadata,
                    hf_split=split,
                    hf_subset=subset,
                    **encode_kwargs,
                )
                for side in (1, 2)
            )  # fmt: skip
            right = np.asarray(model.similarity(first, second)).argmax(1) == np.arange(len(rows))
            found[subset] = {"accuracy": float(right.mean()), "main_score": float(right.mean()), "hf_subset": subset}
        return found


@pytest.fixture(params=["stand-in", pytest.param("mteb", marks=pytest.mark.slow)])
def mteb(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "stand-in":
        module = ModuleType("mteb")
        module.get_task = lambda name, hf_subsets: {"Tatoeba": Tatoeba}[name](hf_subsets)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mteb", module)
    return request.param


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return random_model(tmp_path_factory.mktemp("model") / "hf", tokenizer)


Command = Callable[..., int]


@pytest.fixture
def command(hf: Path, tmp_path: Path) -> Command:
    def command(*words: object) -> int:
        given = ("--model", hf, "--task", "mteb", "--out", tmp_path / "scores.json", *words)
        return run.main([str(word) for word in given])

    return command


def test_bitext_mining_is_that_of_cosines_by_transformers(
    mteb: str, command: Command, hf: Path, demo: Path, tmp_path: Path
) -> None:
    pairs = list(zip(sentences(demo, 0), sentences(demo, 1), strict=False))[:PAIRS]
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"sentence1": xx, "sentence2": en, "lang": "deu-eng"}) for en, xx in pairs]
    (tmp_path / "data" / "test.jsonl").write_text("\n".join(rows))
    given = ("--mteb", "Tatoeba", tmp_path / "data", "deu-eng", "--pooling", "mean", "cls", "--layer", 0, -1)
    assert command(*given) == 0
    found = json.loads((tmp_path / "scores.json").read_text())["results"]["mteb"]
    first, second = (states_of(hf, [pair[side] for pair in pairs]) for side in (1, 0))
    assert len(found) == 4
    for pooling, layer in (("mean", 0), ("mean", 2), ("cls", 2)):
        pooled = ([POOL[pooling](states[layer]) for states in side] for side in (first, second))
        right = cosines(*pooled).argmax(1) == np.arange(PAIRS)
        scores = found[f"Tatoeba BitextMining deu-eng {pooling} layer {layer}"]
        assert scores["accuracy"] == pytest.approx(right.mean()) and {"main_score", "accuracy"} <= set(scores)
    assert found["Tatoeba BitextMining deu-eng mean layer 0"]["accuracy"] > 1 / PAIRS


def test_what_mteb_asks_of_an_encoder(hf: Path) -> None:
    encoder = mteb_tasks.MtebEncoder(ExportedModel(hf))
    texts = {"task_metadata": None, "hf_split": "test", "hf_subset": "deu-eng", "prompt_type": None, "batch_size": 2}
    x = encoder.encode([{"text": ["a b", "c"]}, {"text": ["d e f"]}], **texts)
    y = encoder.encode([{"text": ["d e f", "c", "a b"]}], **texts)
    assert x.shape == (3, 32) and isinstance(x, np.ndarray)
    torch.testing.assert_close(encoder.similarity(x, y), torch.from_numpy(x @ y.T))
    torch.testing.assert_close(encoder.similarity_pairwise(x, y), torch.from_numpy((x * y).sum(1)))
    assert encoder.similarity(x[0], y).shape == (1, 3)
    assert encoder.similarity(x, y)[0, 2] == pytest.approx(1)


@pytest.mark.slow
def test_the_protocol_of_mteb_itself(hf: Path) -> None:
    import mteb

    one, other = (mteb_tasks.MtebEncoder(ExportedModel(hf), pooling) for pooling in ("mean", "cls"))
    assert isinstance(one, mteb.EncoderProtocol)
    assert one.mteb_model_meta.name == "xscale/hf" and one.mteb_model_meta.revision != other.mteb_model_meta.revision


def test_the_command_of_the_page(
    mteb: str, hf: Path, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "xlm").symlink_to(hf)
    (tmp_path / "tatoeba-bitext-mining").mkdir()
    texts = [json.dumps({"sentence1": text, "sentence2": text, "lang": "deu-eng"}) for text in sentences(demo, 0)[:9]]
    (tmp_path / "tatoeba-bitext-mining" / "test.jsonl").write_text("\n".join(texts))
    (line,) = [line for line in commands("docs/evaluation.md") if "--task mteb" in line]
    assert run.main(shlex.split(line)[3:]) == 0
    results = json.loads((tmp_path / "mteb.json").read_text())["results"]
    assert results["mteb"]["Tatoeba BitextMining deu-eng"]["accuracy"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--mteb NAME FOLDER"),
        (("--mteb", "Tatoeba"), "--mteb NAME FOLDER"),
        (("--mteb", "Tatoeba", "absent"), "--mteb Tatoeba absent"),
        (("--mteb", "Tatooba", "."), "--mteb Tatooba .: "),
        (("--mteb", "Tatoeba", ".", "deu-eng", "xx-yy"), "xx-yy"),
        (("--mteb", "Tatoeba", "tests"), "tests is not the data"),
    ],
)
def test_what_is_refused(
    mteb: str, command: Command, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*words) == 2
    assert said in capsys.readouterr().err


def test_without_mteb(command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    assert command("--mteb", "Tatoeba", ".") == 2
    assert "pip install 'xscale[mteb]'" in capsys.readouterr().err
