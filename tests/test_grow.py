"""Growth: a larger tokenizer keeps the smaller one's ids, and a model grown to it keeps its rows, states and logits."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from data_tools import tokenizer as tool
from data_tools.demo_world import World
from tests.test_encoder import CONFIGS, make
from tests.test_going_on import run_spec_of
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval.hf_directory import export_problem
from xscale.models.grow import extension_problem, grow_vocabulary, old_ids_of_new, piece_ids
from xscale.run_spec import tokenizer_to_extend

CYRILLIC = str.maketrans("abcdefghijklmnopqrstuvwxyz", "абцдефгхийклмнопярстувщыжз")
WORLD = World(0)
OLD = [WORLD.pair(n)[0] for n in range(300)]
NEW = [text.lower().translate(CYRILLIC) for text in OLD]


@pytest.fixture(scope="module", params=["wordpiece", "unigram", "bpe"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer of English, and one extended by English in Cyrillic letters, by the command."""
    path = tmp_path_factory.mktemp(request.param)
    for name, texts in (("old.txt", OLD), ("new.txt", NEW)):
        (path / name).write_text("\n".join(texts), encoding="utf-8")
    size = ["--vocab_size", "500"]
    tool.main(["--text", str(path / "old.txt"), "--out", str(path / "old"), "--type", request.param, *size])
    more = ["--text", str(path / "new.txt"), "--out", str(path / "new"), "--extend", str(path / "old"), *size]
    with pytest.raises(UserError, match="leave out --type"):
        tool.main([*more, "--type", "unigram"])
    tool.main(more)
    return Tokenizer(path / "old"), Tokenizer(path / "new")


def test_an_extended_tokenizer_cuts_old_text_as_before(both: tuple[Tokenizer, Tokenizer]) -> None:
    """Its old tokens have their ids, there are no gaps, and the new text has fewer tokens and none unknown."""
    old, new = both
    assert old.hf.get_vocab().items() <= new.hf.get_vocab().items() and old.special == new.special
    assert sorted(new.hf.get_vocab().values()) == list(range(new.vocab_size)) and new.vocab_size > old.vocab_size + 100
    assert old.encode(OLD) == new.encode(OLD) and new.unknown_share(new.encode(NEW)) == 0
    assert 2 * sum(map(len, new.encode(NEW))) < sum(len(text.replace(" ", "")) for text in NEW)
    assert extension_problem(old, new) is None and "lacks" in (extension_problem(new, old) or "")


def test_new_tokens_come_from_the_pieces_that_they_were(both: tuple[Tokenizer, Tokenizer]) -> None:
    """As transformers cuts the token's text inside a sentence; known ones come from themselves."""
    old, new = both
    found, known = old_ids_of_new(old, new), old.hf.get_vocab()
    assert all(found[number] == [number] for number in known.values()) and found.keys() == {*range(new.vocab_size)}
    for token, number in new.hf.get_vocab().items():
        if token in known:
            continue
        text = new.backend.decoder.decode(["a", token])[1:].lstrip()
        expected = old.encode(["a " + text])[0][len(old.encode(["a"])[0]) :]
        if "\ufffd" not in text and (
            token[0] in "▁Ġ" or old.special["unk"] in expected
        ):  # a half of a letter is no text
            assert [n for n in found[number] if old.hf.convert_ids_to_tokens(n) != "▁"] == [
                n for n in expected if old.hf.convert_ids_to_tokens(n) != "▁"
            ], token


def test_pieces_inside_a_word_are_those_inside_a_word(demo: Path) -> None:
    old = Tokenizer(demo / "tokenizer")
    of = old.hf.convert_ids_to_tokens
    found = [of(n) for n in piece_ids("##eringqq", old, False)]
    assert found[0] == "##er" and "".join(found).replace("##", "") == "eringqq" and all("##" in of for of in found)
    assert piece_ids("##ж", old, False) == []
    assert piece_ids("the dog", old, True) == old.encode(["the dog"])[0]


def resized(kind: str, rows: int) -> Any:
    """A model of so many rows, with nothing at a special value."""
    return make(kind, torch.float32, vocab_size=rows).lm.eval()


def logits(lm: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """transformers' own last hidden states and logits."""
    with torch.no_grad():
        found = lm(torch.tensor([ids]), output_hidden_states=True)
    return found.hidden_states[-1], found.logits[0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_grown_model_has_the_states_and_logits_that_it_had(kind: str, demo: Path, tmp_path: Path) -> None:
    """Of every type: for old text; new rows are means, of the output layer and its bias too; it can be saved."""
    old, new = by_added_tokens(demo, tmp_path, ["жук", "the dog", "зонт"])
    lm = resized(kind, old.vocab_size)
    before, ids = copy.deepcopy(lm), old.encode(["the dog sees a cat"])[0][:9]
    grow_vocabulary(lm, old, new)
    (states, scores), (states_before, scores_before) = logits(lm, ids), logits(before, ids)
    assert torch.equal(states, states_before) and scores.shape[1] == new.vocab_size == lm.config.vocab_size
    torch.testing.assert_close(scores[:, : old.vocab_size], scores_before, rtol=0, atol=1e-5)
    number, pieces = new.hf.get_vocab()["the dog"], old.encode(["the dog"])[0]
    for table, table_before in (
        (lm.get_input_embeddings().weight, before.get_input_embeddings().weight),
        (lm.get_output_embeddings().weight, before.get_output_embeddings().weight),
        (lm.get_output_embeddings().bias, before.get_output_embeddings().bias),
    ):
        assert torch.equal(table[: old.vocab_size], table_before)
        torch.testing.assert_close(table[number], table_before[pieces].mean(0))
        assert len(pieces) > 1 and torch.equal(table[new.hf.get_vocab()["жук"]], table_before[old.special["unk"]])
    lm.save_pretrained(tmp_path / "hf")
    assert export_problem(lm, {}, tmp_path / "hf") is None
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight


def by_added_tokens(demo: Path, folder: Path, tokens: list[str]) -> tuple[Tokenizer, Tokenizer]:
    old = Tokenizer(demo / "tokenizer")
    larger = PreTrainedTokenizerFast.from_pretrained(demo / "tokenizer")
    larger.add_tokens(tokens)
    larger.save_pretrained(folder / "larger")
    return old, Tokenizer(folder / "larger")


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert"])
def test_growing_by_nothing_changes_nothing(kind: str, demo: Path) -> None:
    old = Tokenizer(demo / "tokenizer")
    lm = resized(kind, old.vocab_size + 7)  # rows that belong to no token
    before = copy.deepcopy(lm.state_dict())
    grow_vocabulary(lm, old, old)
    assert lm.state_dict().keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in lm.state_dict().items())


def test_rows_follow_their_tokens_where_ids_move(demo: Path, tmp_path: Path) -> None:
    """All but padding get other ids; the config's follow."""
    tree = json.loads((demo / "tokenizer" / "tokenizer.json").read_text())
    old, vocab = Tokenizer(demo / "tokenizer"), tree["model"]["vocab"]
    moved = {token: number and len(vocab) - number for token, number in vocab.items()} | {"жук": len(vocab)}
    tree["model"]["vocab"] = moved
    for token in tree["added_tokens"]:
        token["id"] = moved[token["content"]]
    for entry in tree["post_processor"]["special_tokens"].values():
        entry["ids"] = [moved[token] for token in entry["tokens"]]
    old.hf.save_pretrained(tmp_path / "moved")
    (tmp_path / "moved" / "tokenizer.json").write_text(json.dumps(tree))
    new = Tokenizer(tmp_path / "moved")
    lm = resized("bert", old.vocab_size)
    lm.config.bos_token_id = old.special["cls"]
    before = copy.deepcopy(lm)
    grow_vocabulary(lm, old, new)
    texts = ["the dog sees a cat"]
    (ids,), (ids_before,) = new.encode(texts), old.encode(texts)
    assert ids != ids_before and torch.equal(logits(lm, ids)[0], logits(before, ids_before)[0])
    assert lm.config.bos_token_id == new.special["cls"] != old.special["cls"]


def test_a_run_grows_the_model_of_init(demo: Path, tmp_path: Path) -> None:
    """PPA's key encoder follows, a dictionary has the new ids, and a tokenizer that is no larger form is refused."""
    old, new = by_added_tokens(demo, tmp_path, ["жук", "zug"])
    sets = ["streams.ppa.queue_size=64", "streams.ppa.samples=8"]
    first = run_spec_of(demo, "ppa", *sets)
    lm = first.module().encoder.lm
    lm.save_pretrained(tmp_path / "hf")
    old.hf.save_pretrained(tmp_path / "hf")
    lexicon = tmp_path / "en-xx.txt"
    lexicon.write_text("".join(f"{a} zug\n" for a in ("dog", "cat", "house", "the")))
    init = [f"model.init={tmp_path / 'hf'}", f"model.tokenizer={tmp_path / 'larger'}", f"data.lexicons=[{lexicon}]"]
    run_spec = run_spec_of(demo, "ppa", *sets, *init)
    assert any(f"from {old.vocab_size:,} to {new.vocab_size:,} tokens" in line for line in run_spec.notes())
    module = run_spec.module()
    table, key = module.encoder.embeddings, module.auxiliary_states["ppa"].momentum.masters[0]  # type: ignore[attr-defined]
    assert torch.equal(table[: old.vocab_size], lm.get_input_embeddings().weight) and len(table) == new.vocab_size
    assert torch.equal(key.embeddings, table)
    assert run_spec_of(demo, "ppa", *sets, init[0]).smaller_tokenizer is None
    other = PreTrainedTokenizerFast(tokenizer_object=tool.train([("en", t) for t in OLD], "wordpiece", 300, False)
                                    .backend_tokenizer, **old.hf.special_tokens_map)  # fmt: skip
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=rf"lacks [\d,]+ of the .* tokens.*model\.tokenizer={tmp_path / 'hf'}"):
        tokenizer_to_extend(run_spec.recipe, Tokenizer(tmp_path / "other"))


def change(tree: dict[str, Any], part: str) -> None:
    if part == "normalizer":
        tree["normalizer"]["lowercase"] = not tree["normalizer"]["lowercase"]
    if part == "pre_tokenizer":
        tree["pre_tokenizer"] = {"type": "Whitespace"}


@pytest.mark.parametrize(("part", "extra"), [("normalizer", ["жук"]), ("pre_tokenizer", ["жук"]), ("normalizer", [])])
def test_a_tokenizer_that_cuts_otherwise_is_refused(demo: Path, tmp_path: Path, part: str, extra: list[str]) -> None:
    old, _ = by_added_tokens(demo, tmp_path, extra)
    path = tmp_path / "larger" / "tokenizer.json"
    tree = json.loads(path.read_text())
    change(tree, part)
    path.write_text(json.dumps(tree))
    assert (part if extra else "same tokens") in (extension_problem(old, Tokenizer(tmp_path / "larger")) or "")
