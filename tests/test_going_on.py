"""Going on from other models and runs: whose tokenizer, whose language embeddings, whose heads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, BertConfig

from tests.rows import one_thread  # noqa: F401
from xscale import config
from xscale.config import Recipe
from xscale.data.row import Tokens
from xscale.errors import UserError
from xscale.models.build import build_encoder
from xscale.models.encoder import Encoder
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


# Languages


def start(init: Path | None, languages: list[str], embeddings: bool = True, **changes: object) -> Encoder:
    """As a run that begins with these languages."""
    defaults: dict = {
        "init": init and str(init), "preset": "tiny", "dropout": 0.0, "max_length": 32, "vocab_size": 97, "pad_id": 0,
        "languages": languages, "language_embeddings": embeddings, "reset_positions": False, "seed": 1,
    }  # fmt: skip
    return build_encoder(**(defaults | changes))


def table(encoder: Encoder) -> Tensor:
    return encoder.lm.base_model.embeddings.token_type_embeddings.weight


def state_of(encoder: Encoder, language: str) -> Tensor:
    """What the encoder makes of a sentence in the language that its config names."""
    number = encoder.lm.config.xscale["languages"].index(language)
    row = Tokens(*map(torch.tensor, ([5, 6, 7], [0, 1, 2], [number] * 3, [0, 3])), torch.tensor([3]), 3)
    return encoder.eval()(row._replace(starts=row.starts.int(), lengths=row.lengths.int()))


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Encoder, Path]:
    """An encoder of [de, en] whose languages differ, exported."""
    torch.manual_seed(0)
    encoder = start(None, ["de", "en"])
    with torch.no_grad():
        table(encoder).normal_()
    encoder.lm.save_pretrained(tmp_path / "hf")
    return encoder, tmp_path / "hf"


def test_languages_keep_their_embeddings_by_name(trained: tuple[Encoder, Path]) -> None:
    """[de, en] -> [cs, de, en]: de and en say what they said, cs what their mean does. With fewer, none is lost."""
    encoder, path = trained
    gone_on = start(path, ["cs", "de", "en"])
    for language in ("de", "en"):
        assert torch.equal(state_of(gone_on, language), state_of(encoder, language))
    assert not torch.allclose(state_of(encoder, "de"), state_of(encoder, "en"), atol=0.1)
    torch.testing.assert_close(table(gone_on)[0], (table(encoder)[0] + table(encoder)[1]) / 2)
    assert gone_on.lm.config.type_vocab_size == 3 and table(gone_on).requires_grad

    gone_on.lm.save_pretrained(path.parent / "second")
    fewer = start(path.parent / "second", ["en", "sv"])
    assert fewer.lm.config.xscale["languages"] == ["en", "sv", "cs", "de"]
    for language in ("cs", "de", "en"):
        assert torch.equal(state_of(fewer, language), state_of(gone_on, language))
    torch.testing.assert_close(table(fewer)[1], table(gone_on).mean(0))
    reloaded = AutoModelForMaskedLM.from_pretrained(path.parent / "second")
    assert torch.equal(reloaded.base_model.embeddings.token_type_embeddings.weight, table(gone_on))


def test_the_mean_stands_for_languages_that_are_no_longer_told_apart(
    trained: tuple[Encoder, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Also for a segment that transformers numbers 1; the run says so."""
    encoder, path = trained
    plain = start(path, ["cs", "de", "en"], embeddings=False)
    for row in table(plain):
        torch.testing.assert_close(row, table(encoder).mean(0))
    assert "model.init has embeddings of de, en, and no stream" in caplog.text
    assert plain.lm.config.xscale == {
        "languages": ["cs", "de", "en"],
        "language_embeddings": False,
        "reset_positions": False,
    }


def test_languages_after_a_run_that_had_none_start_as_what_it_gave_to_all(tmp_path: Path) -> None:
    first = start(None, ["de", "en"], embeddings=False)
    first.lm.save_pretrained(tmp_path)
    assert len(table(first)) == 2 and not torch.equal(*table(first))
    for row in table(start(tmp_path, ["cs", "de", "en"])):
        assert torch.equal(row, table(first)[0])


def test_a_model_of_others_keeps_its_rows(tmp_path: Path) -> None:
    """Without `xscale` in its config."""
    model = AutoModelForMaskedLM.from_config(
        BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    model.save_pretrained(tmp_path)
    rows = model.base_model.embeddings.token_type_embeddings.weight
    found = table(start(tmp_path, ["cs", "de", "en"]))
    assert torch.equal(found[:2], rows) and torch.equal(found[2], rows[0])
    assert torch.equal(table(start(tmp_path, ["cs", "de", "en"], embeddings=False)), rows)
