"""The initial tokenizer and language embeddings of a run from `model.init`, and exported models."""

import json
import os
import re
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from deepspeed.utils import zero_to_fp32
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    PreTrainedModel,
    pipeline,
)

from tests import launch
from tests.rows import one_thread  # noqa: F401
from tests.streams import pairs as stream_of_pairs
from tests.test_encoder import CONFIGS, make
from xscale import export, files, ranks
from xscale.checkpoint import restore
from xscale.checkpoint import store as checkpoints
from xscale.checkpoint.restore import load_initial_model, read_and_broadcast_model, read_full_weights
from xscale.data.corpus import find_tokenizer
from xscale.data.loader import Loader
from xscale.data.mixture import describe_sources_read
from xscale.data.packed_row import Tokens
from xscale.data.shards import find_sources
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval import retrieval
from xscale.eval.model import ExportedModel, read_texts
from xscale.eval.sentence_files import PoolingChoice, choose_pooling, read_modules_json, read_pooling
from xscale.models.build import build_encoder, max_sequence_tokens, read_xscale_field
from xscale.models.encoder import Encoder
from xscale.objectives import OBJECTIVES
from xscale.recipe import Recipe, load_recipe
from xscale.step.module import StepModule


def recipe(init: str | Path | None) -> Recipe:
    made = load_recipe("tlm", [], OBJECTIVES)
    return replace(made, model=replace(made.model, init=init and str(init)))


# Tokenizer


def test_the_models_own_tokenizer_comes_before_one_beside_the_shards(demo: Path, tmp_path: Path) -> None:
    """In tokenizers' file, or in older forms; a hub name's own; and that beside the shards where the model has none."""
    auxiliary = str(demo / "tokenizer")
    fast, slow, bare = (tmp_path / name for name in ("fast", "slow", "bare"))
    for folder in (fast, slow, bare):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (fast / "tokenizer.json").write_bytes((demo / "tokenizer" / "tokenizer.json").read_bytes())
    (slow / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n")  # as bert-base's first releases
    inits = (None, fast, slow, bare, "some/model")
    names = {init: find_tokenizer(recipe(init), init, demo) for init in inits}
    assert names == {None: auxiliary, fast: str(fast), slow: str(slow), bare: auxiliary, "some/model": "some/model"}
    with pytest.raises(UserError, match=r"model\.init /not/there does not exist"):
        find_tokenizer(recipe("/not/there"), "/not/there", demo)
    with pytest.raises(UserError, match=rf"no tokenizer in model.init {bare}, and no folder tokenizer/ in {tmp_path}"):
        find_tokenizer(recipe(bare), bare, tmp_path / "shards")
    asked = recipe(fast)
    asked = replace(asked, model=replace(asked.model, tokenizer="mine"))
    assert find_tokenizer(asked, fast, demo) == "mine"


def test_the_lines_of_the_docs_enlarge_a_vocabulary(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old tokens keep their ids and rows, text with a new word has fewer tokens, and the old tokenizer is refused."""
    lm = launch.module(loader_of(demo, "mlm")).encoder.lm
    lm.save_pretrained(tmp_path / "hf" / "xlm")
    old = Tokenizer(demo / "tokenizer")
    old.hf.save_pretrained(tmp_path / "hf" / "xlm")
    page = (launch.ROOT / "docs" / "how-to" / "add-language.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    monkeypatch.chdir(launch.ROOT)

    init = f"model.init={tmp_path / 'hf' / 'larger'}"
    loader = loader_of(demo, "mlm", init)
    new, rows = loader.corpus.tokenizer, launch.module(loader).encoder.embeddings
    assert len(rows) == new.vocab_size == old.vocab_size + 2
    assert torch.equal(rows[: old.vocab_size], lm.get_input_embeddings().weight)
    assert new.encode(["the dog"]) == old.encode(["the dog"])
    assert new.encode(["the жук"])[0] == [*old.encode(["the"])[0], old.vocab_size]
    with pytest.raises(UserError, match=rf"the tokenizer in {tmp_path / 'hf' / 'larger'}.*add-language\.md"):
        loader_of(demo, "mlm", init, f"model.tokenizer={demo / 'tokenizer'}")


# Languages


def start(init: Path | None, languages: list[str], embeddings: bool = True, **changes: object) -> Encoder:
    """As a run that begins with these languages."""
    defaults: dict = {
        "init": init and str(init), "preset": "tiny", "dropout": 0.0, "max_length": 32, "vocab_size": 97, "pad_id": 0,
        "languages": languages, "language_embeddings": embeddings, "reset_positions": False, "segments": False,
        "seed": 1,
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
    """[de, en] -> [cs, de, en]: de and en say what they said, cs what a text in no language does. With fewer, none is
    lost."""
    encoder, path = trained
    gone_on = start(path, ["cs", "de", "en"])
    assert gone_on.lm.config.xscale["languages"] == ["neutral", "cs", "de", "en"]
    for language in ("neutral", "de", "en"):
        assert torch.equal(state_of(gone_on, language), state_of(encoder, language))
    assert not torch.allclose(state_of(encoder, "de"), state_of(encoder, "en"), atol=0.1)
    assert torch.equal(table(gone_on)[1], table(encoder)[0])
    assert gone_on.lm.config.type_vocab_size == 4 and table(gone_on).requires_grad

    gone_on.lm.save_pretrained(path.parent / "second")
    fewer = start(path.parent / "second", ["en", "sv"])
    assert fewer.lm.config.xscale["languages"] == ["neutral", "en", "sv", "cs", "de"]
    for language in ("neutral", "cs", "de", "en"):
        assert torch.equal(state_of(fewer, language), state_of(gone_on, language))
    assert torch.equal(table(fewer)[2], table(gone_on)[0])
    reloaded = AutoModelForMaskedLM.from_pretrained(path.parent / "second")
    assert torch.equal(reloaded.base_model.embeddings.token_type_embeddings.weight, table(gone_on))


def test_a_model_that_counts_languages_from_0_is_refused(tmp_path: Path) -> None:
    encoder = start(None, ["de", "en"])
    encoder.lm.config.xscale = {"languages": ["cs", "de", "en"], "language_embeddings": True}
    encoder.lm.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="exported by an old version of xscale"):
        start(tmp_path, ["cs", "de", "en"])


@pytest.mark.parametrize("taught", [True, False])
def test_the_neutral_row_is_the_mean_where_training_did_not_teach_it(tmp_path: Path, taught: bool) -> None:
    encoder = start(None, ["de", "en"], neutral_trained=taught)
    with torch.no_grad():
        table(encoder).normal_()
    encoder.lm.save_pretrained(tmp_path)
    found, rows = table(start(tmp_path, ["de", "en"])), table(encoder)
    assert torch.equal(found[1:], rows[1:])
    torch.testing.assert_close(found[0], rows[0] if taught else (rows[1] + rows[2]) / 2)


def test_what_trains_the_neutral_row() -> None:
    """Sequences whose language is hidden, and streams without language embeddings."""

    def shown(*sets: str) -> bool:
        return load_recipe("paper/tang_xlm", list(sets), OBJECTIVES).has_sequences_without_language()

    none = [f"streams.{name}.language_dropout=0.0" for name in ("mlm", "tlm")]
    assert shown() and not shown(*none) and shown(none[0])
    assert shown(*none, "streams.mlm.language_embeddings=false")


def test_the_neutral_row_stands_for_languages_that_are_no_longer_told_apart(
    trained: tuple[Encoder, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Also for a segment that transformers numbers 1; the run says so."""
    encoder, path = trained
    plain = start(path, ["cs", "de", "en"], embeddings=False)
    for row in table(plain):
        assert torch.equal(row, table(encoder)[0])
    assert "model.init has language embeddings of de, en, " in caplog.text
    assert plain.lm.config.xscale == {
        "languages": ["neutral", "cs", "de", "en"],
        "language_embeddings": False,
        "neutral_trained": True,
        "reset_positions": False,
        "segments": False,
    }


def test_languages_after_a_run_that_had_none_start_as_what_it_gave_to_all(tmp_path: Path) -> None:
    first = start(None, ["de", "en"], embeddings=False)
    first.lm.save_pretrained(tmp_path)
    assert len(table(first)) == 2 and not torch.equal(*table(first))
    for row in table(start(tmp_path, ["cs", "de", "en"])):
        assert torch.equal(row, table(first)[0])


def test_languages_of_a_model_of_others_start_as_its_row_0(tmp_path: Path) -> None:
    """Without `xscale` in its config. Row 1 is that of second sentences; a run without embeddings keeps both."""
    model = AutoModelForMaskedLM.from_config(
        BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    model.save_pretrained(tmp_path)
    rows = model.base_model.embeddings.token_type_embeddings.weight
    found = table(start(tmp_path, ["cs", "de", "en"]))
    assert torch.equal(found, rows[0].repeat(4, 1)) and not torch.equal(*rows)
    assert torch.equal(table(start(tmp_path, ["cs", "de", "en"], embeddings=False)), rows)


# Runs

SETS = ("streams.ppa.queue_size=64", "streams.ppa.projection=24", "train.lr=0.003")


def loader_of(demo: Path, recipe: str | Path, *sets: str) -> Loader:
    common = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", str(recipe), "--data", str(demo)]
    return launch.loader_of([*common, "--set", "data.workers=0", *sets], measured=False)


def save(module: StepModule, loader: Loader, path: Path, **more: Any) -> Path:
    """As a run at ZeRO stage 0 keeps its step 7. more: further keys of the manifest."""
    module.encoder.lm.config.save_pretrained(path / "hf")
    loader.corpus.tokenizer.hf.save_pretrained(path / "hf")
    torch.save({"module": module.state_dict()}, path / "mp_rank_00_model_states.pt")
    sealed = {
        str(file.relative_to(path)): {"bytes": file.stat().st_size, "sha256": files.sha256_file(file)}
        for file in path.rglob("*")
        if file.is_file()
    }
    manifest = {"step": 7, "world_size": 1, "state": {"step": 7}, "files": sealed}
    manifest |= {"identity": launch.identity(loader), "calibration": asdict(loader.calibration)}
    manifest |= {"engine": {"stage": 0}} | more
    (path / "manifest.json").write_text(checkpoints.manifest_json_with_hash(manifest))
    return path


@pytest.fixture(scope="module")
def ended(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[StepModule, Path, Path]:
    """A run of all objectives with weights like no fresh ones, its checkpoint, and what was exported."""
    path = tmp_path_factory.mktemp("ended")
    loader = loader_of(demo, "mixed", *SETS)
    module = launch.module(loader)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    save(module, loader, path / "checkpoints" / "step_00000007")
    export.export_and_return_checkpoint(path, path / "hf")
    return module.eval(), path, path / "hf"


def read_on_a_rank(init: Path, folder: Path) -> None:
    """Write how often the rank has read weights, and the weights that it has."""
    process = ranks.read_launcher_and_set_environment()
    ranks.join_process_group(process)
    reads, plain = [], restore.read_full_weights
    restore.read_full_weights = lambda path: reads.append(path) or plain(path)  # type: ignore[func-returns-value]
    lm = load_initial_model(init, 0.0)
    torch.save((len(reads), lm.state_dict()), folder / f"{process.rank}.pt")


def test_one_rank_reads_the_weights_of_model_init(ended: tuple[StepModule, Path, Path], tmp_path: Path) -> None:
    """It sends them to the others, which have the same to the last bit."""
    assert launch.fork_ranks(2, read_on_a_rank, ended[1], tmp_path) == [0, 0]
    lm, found = read_and_broadcast_model(ended[1]), [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert [reads for reads, _ in found] == [1, 0]
    for _, weights in found:
        assert all(torch.equal(weights[name], weight) for name, weight in lm.state_dict().items())


def probe_tokens(lm: PreTrainedModel) -> Tokens:
    """Return a sequence of tokens from all of the model's vocabulary, and of its languages, for our encoder."""
    ids_N = torch.linspace(0, lm.config.vocab_size - 1, min(16, max_sequence_tokens(lm.config))).long()
    ids_N = ids_N[ids_N != lm.config.pad_token_id]
    n = len(ids_N)
    types_N = None
    fields = read_xscale_field(lm.config, "the model")
    if fields.get("language_embeddings"):
        types_N = torch.arange(n) % len(fields["languages"])
    return Tokens(ids_N, torch.arange(n), types_N, torch.tensor([0, n]).int(), torch.tensor([n]).int(), n)


def mlm_logits(encoder: Encoder, tokens: Tokens) -> Tensor:
    """The logits [N, V] by our encoder."""
    out = encoder.lm.get_output_embeddings()
    return F.linear(encoder.features(encoder(tokens)), out.weight, out.bias)


@torch.inference_mode()
def is_read_alike(lm: PreTrainedModel, folder: Path, layers: int | None = None) -> bool:
    """Return whether the logits, or the states after the first layers, of transformers equal ours up to rounding."""
    tokens = probe_tokens(lm)
    encoder = Encoder(lm).eval()
    inputs = {"input_ids": tokens.input_ids[None]}
    if tokens.types is not None:
        inputs["token_type_ids"] = tokens.types[None]
    if layers is None:
        read = AutoModelForMaskedLM.from_pretrained(folder).eval()(**inputs).logits[0]
        expected = mlm_logits(encoder, tokens)
    else:
        read = AutoModel.from_pretrained(folder).eval()(**inputs).last_hidden_state[0]
        expected = encoder.hidden_states(tokens)[layers]
    return torch.allclose(read, expected, rtol=0, atol=1e-3 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_model_type_is_exported_as_it_was_trained(kind: str, tmp_path: Path) -> None:
    """Weights that stand still differ by rounding alone; one that moved by 0.1 is found."""
    lm = make(kind, torch.float32).lm
    lm.save_pretrained(tmp_path)
    assert is_read_alike(lm, tmp_path)
    with torch.no_grad():
        lm.get_output_embeddings().bias[5] += 0.1
    assert not is_read_alike(lm, tmp_path)


def test_an_export_to_nowhere_is_refused_before_the_work(
    ended: tuple[StepModule, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(export, "read_and_broadcast_model", lambda path: pytest.fail("weights were read"))
    with pytest.raises(UserError, match="file/hf cannot be written"):
        export.export_and_return_checkpoint(ended[1], tmp_path / "file" / "hf")


@pytest.mark.slow
def test_a_run_goes_on_with_the_encoder_of_one_that_was_partitioned(demo: Path, tmp_path: Path) -> None:
    """ZeRO-2 on 2 ranks: step 0 of the next run has the encoder's trained weights, in fp32, and new heads."""
    common = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "alignlm", "--data", str(demo), "--steps", "3"]
    launch.run(2, [*common, "--out", str(tmp_path / "first"), "--set", "train.lr=0.01"])
    launch.run(2, [*common, "--out", str(tmp_path / "second"), "--set", f"model.init={tmp_path / 'first'}"])
    last = read_full_weights(tmp_path / "first/checkpoints/step_00000003")
    begun = read_full_weights(tmp_path / "second/checkpoints/step_00000000")
    assert {name for name in last if torch.equal(begun[name], last[name])} == {n for n in last if "heads." not in n}


# Sentence vectors, modes, the best checkpoint


def test_an_export_is_for_everyone_to_read(ended: tuple[StepModule, Path, Path]) -> None:
    """As far as the umask lets it."""
    mask = os.umask(0)
    os.umask(mask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in ended[2].rglob("*") if path.is_file()}
    assert "model.safetensors" in modes and set(modes.values()) == {0o666 & ~mask}, modes


def test_the_tokenizer_returns_the_token_types_that_were_trained(
    demo: Path, ended: tuple[StepModule, Path, Path], tmp_path: Path
) -> None:
    """Those of a pair's two sentences; none where both sentences have type 0, or types are languages."""
    with_segments = loader_of(demo, "tlm", "data.segments=true")
    save(launch.module(with_segments), with_segments, tmp_path / "segments")
    export.export_and_return_checkpoint(tmp_path / "segments", tmp_path / "hf-segments")
    loader = loader_of(demo, "tlm", "streams.tlm.language_embeddings=true", "streams.tlm.language_dropout=0.0")
    module = launch.module(loader)
    save(module, loader, tmp_path / "checkpoint")
    export.export_and_return_checkpoint(tmp_path / "checkpoint", tmp_path / "hf")
    segments = AutoTokenizer.from_pretrained(tmp_path / "hf-segments")("a cat", "a dog")["token_type_ids"]
    assert sorted(segments) == segments and set(segments) == {0, 1}
    for path in (ended[2], tmp_path / "hf"):
        assert "token_type_ids" not in AutoTokenizer.from_pretrained(path)("a cat", "a dog")
    rows = load_file(tmp_path / "hf" / "model.safetensors")["bert.embeddings.token_type_embeddings.weight"]
    torch.testing.assert_close(rows[0], rows[1:].mean(0))
    assert torch.equal(rows[1:], table(module.encoder)[1:]) and not torch.equal(rows[0], table(module.encoder)[0])


def test_a_run_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    for use in (
        lambda: export.export_and_return_checkpoint(tmp_path, tmp_path / "hf"),
        lambda: load_initial_model(tmp_path, 0),
    ):
        with pytest.raises(UserError, match=rf"the run {tmp_path} has no complete checkpoint .*status.json says how"):
            use()


def test_a_run_whose_path_has_a_pattern_s_characters_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed looks for the files of a ZeRO checkpoint by glob."""
    path = tmp_path / "lr [1e-4] *" / "best [1]"
    path.mkdir(parents=True)
    (path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    monkeypatch.setattr(
        zero_to_fp32,
        "get_fp32_state_dict_from_zero_checkpoint",
        lambda folder, tag: zero_to_fp32.get_optim_files(f"{folder}/{tag}"),
    )
    assert len(read_full_weights(path)) == 1


def test_the_best_checkpoint_is_exported(ended: tuple[StepModule, Path, Path], tmp_path: Path) -> None:
    shutil.copytree(ended[1] / "checkpoints", tmp_path / "checkpoints")
    shutil.copytree(ended[1] / "checkpoints" / "step_00000007", tmp_path / "checkpoints" / "step_00000009")
    with pytest.raises(UserError, match=rf"{tmp_path}/checkpoints/best does not exist.*checkpoint\.best"):
        export.export_and_return_checkpoint(tmp_path, tmp_path / "hf", best=True)
    (tmp_path / "checkpoints" / "best").write_text("step_00000007\n")
    assert export.export_and_return_checkpoint(tmp_path, tmp_path / "hf", best=True).name == "step_00000007"
    assert checkpoints.resolve_checkpoint(tmp_path).name == "step_00000009", "no newer one is there"


def test_the_card_is_the_hubs(ended: tuple[StepModule, Path, Path], tmp_path: Path) -> None:
    """huggingface_hub reads what was written, also after the card is written again."""
    shutil.copytree(ended[1] / "checkpoints", tmp_path / "run" / "checkpoints")
    export.export_and_return_checkpoint(tmp_path / "run", tmp_path / "hf")
    card = ModelCard.load(tmp_path / "hf" / "README.md")
    assert (card.data.language, card.data.license, card.data.model_name) == (["en", "xx", "yy"], "unknown", "hf")
    assert "does not say which sources the streams read" in card.text and "- `en-xx`, fingerprint `" in card.text
    assert {"xscale", "ppa", "alignlm"} <= set(card.data.tags) and card.data.base_model is None
    assert "7 optimizer steps from random weights" in card.text and "needs transformers 4.0 or newer" in card.text
    recipe_text = card.text.partition("```yaml\n")[2].partition("```")[0]
    identity = checkpoints.read_checkpoint(tmp_path / "run/checkpoints/step_00000007").identity
    assert yaml.safe_load(recipe_text) == identity["recipe"]
    card.save(tmp_path / "again.md")
    assert ModelCard.load(tmp_path / "again.md").data.to_dict() == card.data.to_dict()


def test_an_export_loads_with_transformers_4(ended: tuple[StepModule, Path, Path], demo: Path, tmp_path: Path) -> None:
    """It has the names that transformers 4 reads: the tokenizer's class, and the base of ModernBERT's rotary
    embeddings, for which transformers 4 would take 10,000 in local layers. Transformers 5 reads the same model."""
    written = json.loads((ended[2] / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert written != "TokenizersBackend" and hasattr(transformers, written)
    lm = make("modernbert", torch.float32).lm
    for rope in lm.config.rope_parameters.values():
        rope["rope_theta"] = 80_000.0
    export.write_exported_model(tmp_path / "hf", lm, demo / "tokenizer", PoolingChoice("mean", "asked for"))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["global_rope_theta"] == config["local_rope_theta"] == 80_000.0
    again = AutoConfig.from_pretrained(tmp_path / "hf")
    assert {rope["rope_theta"] for rope in again.rope_parameters.values()} == {80_000.0}


def test_an_export_is_pushed_to_the_hub(
    ended: tuple[StepModule, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A fake of the hub has the calls' own signatures. What the hub refuses leaves the export, and says what to do."""
    hub = create_autospec(HfApi, instance=True)
    monkeypatch.setattr(export, "HfApi", lambda **given: hub)

    def command(out: str, repo: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["export", str(ended[1]), str(tmp_path / out), "--push", repo])
        return export.main(), capsys.readouterr().err

    hub.upload_folder.side_effect = lambda **given: shutil.copytree(given["folder_path"], tmp_path / "hub")
    assert command("hf", "me/encoder") == (0, "")
    hub.create_repo.assert_called_once_with("me/encoder", private=True, exist_ok=True)
    assert (tmp_path / "hub" / "README.md").read_bytes() == (tmp_path / "hf" / "README.md").read_bytes()
    for out, error in (("second", LocalTokenNotFoundError("no token")), ("fourth", RuntimeError("no token"))):
        hub.create_repo.side_effect = error  # the second stands for an HTTP library's own error
        code, said = command(out, "me/encoder")
        assert code == 2 and re.search("me/encoder: the upload failed .no token.*hf upload --private me/encoder", said)
        assert (tmp_path / out / "model.safetensors").exists()
    code, said = command("third", "encoder")
    assert code == 2 and "--push encoder" in said and not (tmp_path / "third").exists()


def test_the_first_layers_are_exported(ended: tuple[StepModule, Path, Path], demo: Path, tmp_path: Path) -> None:
    """Their output are the whole model's states at that layer, so that retrieval is the same."""
    whole, (source,) = ExportedModel(ended[2]), find_sources([demo / "heldout"])
    export.export_and_return_checkpoint(ended[1], tmp_path / "hf", layers=1)
    cut = ExportedModel(tmp_path / "hf")
    layers = [model.encoder.lm.config.num_hidden_layers for model in (whole, cut)]
    assert layers == [2, 1] and cut.headless
    texts = read_texts(source, 50)
    (of_whole,) = retrieval.evaluate(whole, texts, source.langs, layers=[1]).values()
    (of_cut,) = retrieval.evaluate(cut, texts, source.langs).values()
    assert of_whole == of_cut
    card = ModelCard.load(tmp_path / "hf" / "README.md")
    assert card.data.pipeline_tag == "feature-extraction" and "the first 1 layers of the encoder" in card.text
    with pytest.raises(UserError, match=r"--layers 3: the model has 2 layers"):
        export.export_and_return_checkpoint(ended[1], tmp_path / "other", layers=3)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_first_layer_of_every_model_type_is_its_state_or_refused(kind: str, tmp_path: Path) -> None:
    lm = make(kind, torch.float32).lm
    if kind == "modernbert":
        with pytest.raises(UserError, match=r"--layers 1: .*modernbert"):
            export.copy_first_layers(lm, 1)
        return
    export.copy_first_layers(lm, 1).base_model.save_pretrained(tmp_path)
    assert is_read_alike(lm, tmp_path, 1)


@pytest.mark.parametrize("kind", ["mixed", "language_embeddings"])
def test_pipelines_of_transformers_read_an_export(
    demo: Path, ended: tuple[StepModule, Path, Path], tmp_path: Path, kind: str
) -> None:
    """They give the states and the tokens of our forward pass."""
    path = ended[2]
    if kind != "mixed":
        loader = loader_of(demo, "mlm", "streams.mlm.language_embeddings=true")
        save(launch.module(loader), loader, tmp_path / "checkpoint")
        path = tmp_path / "hf"
        export.export_and_return_checkpoint(tmp_path / "checkpoint", path)
    ours, text = ExportedModel(path), "the dog [MASK] a cat"
    ids = torch.tensor(ours.tokenizer.hf(text)["input_ids"])
    n, place = len(ids), (ids == ours.tokenizer.mask_id).nonzero().item()
    row = Tokens(ids, torch.arange(n), torch.zeros_like(ids), torch.tensor([0, n]).int(), torch.tensor([n]).int(), n)
    with torch.no_grad():
        states = ours.encoder(row)
        best = mlm_logits(ours.encoder, row)[place].softmax(-1).topk(3)
    found = pipeline("feature-extraction", str(path))(text, return_tensors=True)[0]
    torch.testing.assert_close(found, states, rtol=0, atol=1e-4)
    guesses = pipeline("fill-mask", str(path))(text, top_k=3)
    assert [guess["token"] for guess in guesses] == best.indices.tolist()
    assert [guess["score"] for guess in guesses] == pytest.approx(best.values.tolist(), abs=1e-4)


# Sentence vectors

PPA = {"objective": "ppa", "pooling": "cls", "moco_weight": 1.0}
POOLING = "sentence_transformers.models.Pooling"


def sentence_model(demo: Path, path: Path, *modules: str) -> Path:
    """A model with random weights, and the files of sentence-transformers if it has modules."""
    loader = loader_of(demo, "mlm")
    launch.module(loader).encoder.lm.save_pretrained(path)
    loader.corpus.tokenizer.hf.save_pretrained(path)
    listed = []
    for number, name in enumerate(["sentence_transformers.models.Transformer", *modules]):
        folder = f"{number}_{name.rpartition('.')[2]}" if number else ""
        listed.append({"idx": number, "name": str(number), "path": folder, "type": name})
        (path / folder).mkdir(exist_ok=True)
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 128, "pooling_mode": "cls"}')
    (path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "a query: "}}')
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": false}')
    return path


def test_an_export_chooses_the_vectors_that_were_asked_for_or_trained_or_came_with_model_init(
    demo: Path, tmp_path: Path, ended: tuple[StepModule, Path, Path]
) -> None:
    init = str(sentence_model(demo, tmp_path / "init", POOLING))
    foreign = str(sentence_model(demo, tmp_path / "foreign", POOLING, "my.Whitening"))
    plain = str(demo)
    tlm_stream = {"tlm": {"objective": "tlm"}}
    table: list[tuple[dict[str, Any], str | None, tuple[Any, ...], str, str]] = [
        (tlm_stream, None, (), "mean", "the default pooling, because no stream trained sentence vectors"),
        ({"ppa": PPA}, init, (), "cls", "with which streams.ppa was trained"),
        ({"ppa": PPA | {"moco_weight": 0.0}}, None, (), "mean", "the default"),
        ({"ppa": PPA}, None, ("mean",), "mean", "chosen by --pooling"),
        (
            tlm_stream,
            init,
            (),
            "cls",
            f"the pooling of model.init {init}, because no stream trained sentence vectors. The "
            "sentence-transformers modules and prompts of model.init are in the export, too",
        ),
        (tlm_stream, init, (None, 1), "cls", "because these modules need the last layer"),
        (tlm_stream, foreign, (), "cls", "the module my.Whitening is not in the package sentence-transformers"),
        (tlm_stream, plain, (), "mean", f"model.init {plain} has no modules.json"),
        (tlm_stream, str(ended[1]), (), "mean", "with which streams.ppa was trained"),
    ]
    for streams, start, asked, pooling, reason in table:
        choice = choose_pooling({"model": {"init": start}, "streams": streams}, *asked)
        assert choice.pooling == pooling and re.search(reason, choice.reason), (choice, reason)
        assert bool(choice.folder) == ("modules and prompts" in reason)
    (tmp_path / "init" / "1_Pooling" / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"init/1_Pooling/config.json is not a JSON object"):
        read_pooling(tmp_path / "init")
    (tmp_path / "init" / "modules.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"init/modules.json is damaged"):
        read_modules_json(tmp_path / "init")
    (tmp_path / "init" / "modules.json").write_text('[{"type": "a", "path": "../secret"}]')
    with pytest.raises(UserError, match=r"init/modules.json is damaged"):
        read_pooling(tmp_path / "init")


def test_an_export_keeps_modules_and_prompts_of_model_init(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = "sentence_transformers.models.Dense"
    init = sentence_model(demo, tmp_path / "init", POOLING, dense, "sentence_transformers.models.Normalize")
    (init / "3_Normalize").rmdir()
    (init / "2_Dense" / "model.safetensors").write_bytes(b"weights")
    loader = loader_of(demo, "mlm", f"model.init={init}")
    read = [{"name": "news", "languages": ["en"], "licence": "CC0", "streams": {"mlm": 1234}}]
    export.export_and_return_checkpoint(
        save(launch.module(loader), loader, tmp_path / "checkpoint", sources=read), tmp_path / "hf"
    )
    assert read_modules_json(tmp_path / "hf") == read_modules_json(init)
    for name in ("config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (init / name).read_bytes(), name
    assert (tmp_path / "hf" / "2_Dense" / "model.safetensors").read_bytes() == b"weights"
    assert ExportedModel(tmp_path / "hf").pooling == "cls"
    reason = (
        f"cls pooling, the pooling of model.init {init}, because no stream trained sentence vectors. The "
        "sentence-transformers modules and prompts of model.init are in the export, too"
    )
    card = ModelCard.load(tmp_path / "hf" / "README.md").text
    assert f"sentence vectors: {reason}" in capsys.readouterr().out and reason in card
    assert "| `news` | en | CC0 | mlm 1,234 |" in card and f"from {init}, with" in card


def test_the_sources_that_streams_read_are_counted(demo: Path) -> None:
    sources = find_sources([demo / "heldout", demo / "pairs"])
    read_by = [stream_of_pairs("tlm", (0, 1), 4), stream_of_pairs("ppa", (1,), 4)]
    state = {"positions": {"tlm": [[0, 0], [1, 5]], "ppa": [[0, 7]]}}
    (read,) = describe_sources_read(state, read_by, sources)
    assert read["name"] == sources[1].directory.name and read["languages"] == ["en", "xx"]
    assert read["streams"] == {"tlm": sources[1].records + 5, "ppa": 7} and read["licence"] is None


@pytest.mark.slow
@pytest.mark.parametrize("asked", [None, "cls"])
def test_sentence_transformers_makes_our_vectors(
    demo: Path, ended: tuple[StepModule, Path, Path], tmp_path: Path, asked: str | None
) -> None:
    """The mean, as PPA trained it, or [CLS] if asked for: vectors to 1e-5, and so retrieval."""
    from sentence_transformers import SentenceTransformer

    export.export_and_return_checkpoint(ended[1], tmp_path / "hf", pooling=asked)
    model, theirs, pooling = ExportedModel(tmp_path / "hf"), SentenceTransformer(str(tmp_path / "hf")), asked or "mean"
    (source,) = find_sources([demo / "heldout"])
    sides = []
    for side in (0, 1):
        texts = [texts[side] for texts in read_texts(source, 100)] + ["", "word " * 600]
        (vectors,) = retrieval.embed_sentences(model, texts, "en", [pooling]).values()
        ours = torch.nn.functional.normalize(vectors, dim=1)
        found = theirs.encode(texts, convert_to_tensor=True).cpu()
        torch.testing.assert_close(found, ours, rtol=0, atol=1e-5)
        sides.append(found[:100])
    expected = retrieval.evaluate(model, read_texts(source, 100), source.langs, [pooling])
    assert [retrieval.retrieval_accuracies(*sides, "cosine", source.langs)] == [*expected.values()]
