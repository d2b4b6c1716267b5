"""Evaluation: what is measured, what is left out, and what a failure leaves behind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig

from tests.conftest import tar_lines
from tests.rows import one_thread  # noqa: F401
from xscale.data.tokenizer import Tokenizer
from xscale.eval import run

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


def test_nothing_fits(measure: Measure, hf: Path, tmp_path: Path, tokenizer: Tokenizer, capsys: Any) -> None:
    short = tmp_path / "short"
    config = BertConfig(**SHAPE, vocab_size=tokenizer.vocab_size, max_position_embeddings=6)
    AutoModelForMaskedLM.from_config(config).save_pretrained(short)
    tokenizer.hf.save_pretrained(short)
    assert measure("--task", "heldout", "--model", short)[0] == 2
    assert "no pair has a token to predict in the model's 6 positions" in capsys.readouterr().err


def test_a_task_that_fails_loses_no_others_scores(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Without a dictionary the first fails: the others are measured, written and printed; exit code 2. A fault of ours
    is 1, with its traceback."""
    lexicon = tmp_path / "fr-es.txt"
    lexicon.write_text("a b\n")
    tasks = ("--lexicons", lexicon, "--task", "alignment", "heldout", "retrieval")
    code, found = measure(*tasks)
    printed = capsys.readouterr()
    assert code == 2 and list(found["results"]) == ["heldout", "retrieval"]
    assert "needs a dictionary of en and xx" in found["failed"]["alignment"]["en-xx"]
    assert "error: task alignment on en-xx: task alignment needs a dictionary" in printed.err
    assert "Traceback" not in printed.err and "heldout en-xx: tlm_loss" in printed.out

    def broken(*arguments: Any) -> dict[str, float]:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(run.heldout, "evaluate", broken)
    code, found = measure(*tasks)
    assert code == 1 and list(found["results"]) == ["retrieval"] and list(found["failed"]) == ["alignment", "heldout"]
    assert "ZeroDivisionError: ours" in capsys.readouterr().err


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
    monkeypatch.setattr(run, "Exported", lambda path: pytest.fail("the model was loaded"))
    assert measure("--task", "heldout", out=tmp_path / place)[0] == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and str(tmp_path / place) in error
