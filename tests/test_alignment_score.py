"""The alignment score against a search by hand, and as `xscale.eval.run` prints it."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import launch
from xscale.data import shards
from xscale.data.lexicon import Lexicon, is_withheld, load_lexicon, read_entries, without_withheld
from xscale.data.shards import Source
from xscale.data.tokenizer import Tokenizer
from xscale.eval import run
from xscale.eval.alignment_score import (
    ProbeWords,
    collect_probe_words,
    distinct_token_ids_in_sample,
    gather_probe_words_on_rank_0,
    one_token_word_ids_trained_on,
)
from xscale.metric_keys import MetricKey
from xscale.models.build import build_encoder
from xscale.ranks import CpuGroup


def by_hand(table: torch.Tensor, pairs: list[tuple[int, int]], targets: list[int]) -> float:
    found = []
    for query in sorted({a for a, _ in pairs}):
        cosines = {t: torch.cosine_similarity(table[query], table[t], dim=0).item() for t in targets if t != query}
        found.append((query, max(cosines, key=cosines.__getitem__)) in pairs)
    return sum(found) / len(found)


def test_score_is_nearest_neighbour_search_by_hand() -> None:
    draw = np.random.default_rng(0)
    table = torch.from_numpy(draw.normal(size=(60, 8)))
    pairs = [(int(a), int(b)) for a, b in draw.integers(0, 60, (50, 2)) if a != b]
    for a, b in pairs[::3]:
        table[b] = 3.0 * table[a] + 0.05 * torch.from_numpy(draw.normal(size=8))  # a translation, of another length
    targets = sorted({b for _, b in pairs} | set(range(20)))
    expected = by_hand(table, pairs, targets)
    assert 0.2 < expected < 0.8
    assert ProbeWords(np.unique(pairs, axis=0), np.array(targets)).translation_accuracy(table) == pytest.approx(
        expected
    )


def plain_tokens(source: Source, language: str, tokenizer: Tokenizer) -> set[int]:
    side = source.langs.index(language)
    records = [source.read(s, r) for s, shard in enumerate(source.shards) for r in range(shard.records)]
    found = {i for r in records for i in tokenizer.hf(r.texts[side], add_special_tokens=False)["input_ids"]}
    return found - {tokenizer.hf.unk_token_id}


def test_all_tokens_of_the_other_language_compete(demo: Path, tokenizer: Tokenizer) -> None:
    """Of every record of every source; the source language's own do not."""
    sources = [Source(demo / "mono_xx"), Source(demo / "pairs")]
    lexicon = load_lexicon(demo / "lexicon" / "en-xx.txt", tokenizer)
    tokens = {language: distinct_token_ids_in_sample(language, sources, tokenizer) for language in ("en", "xx")}
    theirs = plain_tokens(sources[0], "xx", tokenizer) | plain_tokens(sources[1], "xx", tokenizer)
    assert set(tokens["xx"].tolist()) == theirs
    for words in collect_probe_words([lexicon], [], 0.2, tokens).values():
        assert set(words.targets_C.tolist()) == theirs | {b for _, b in lexicon.single_token_pairs().tolist()}
        assert all(a != b for a, b in words.pairs_P2.tolist())


def test_swapped_columns_are_noticed(
    demo: Path, tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """A run would train on words that its text does not have."""
    tokens = {"xx": distinct_token_ids_in_sample("xx", [Source(demo / "mono_xx")], tokenizer)}
    entries = read_entries(demo / "lexicon/en-xx.txt")
    swapped = tmp_path / "en-xx.txt"
    swapped.write_text("".join(f"{target}\t{source}\n" for source, target in entries))
    for path in (demo / "lexicon/en-xx.txt", swapped):
        caplog.clear()
        collect_probe_words([load_lexicon(path, tokenizer)], [], 0.2, tokens)
        assert (f"dictionary {swapped}: the first column is probably in xx" in caplog.text) == (path == swapped)
    assert "rename the file to xx-en.txt" in caplog.text


def test_of_much_text_a_sample_over_all_shards_is_counted(
    tmp_path: Path, tokenizer: Tokenizer, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of records, evenly; no record twice, first and last among them."""
    for total in (1, 99_999, 100_000, 100_001, 1_000_003, 50_000_000):
        found = shards.record_numbers_in_spaced_runs(total, shards.SAMPLE)
        assert len(found) == len(set(found.tolist())) and found[0] == 0 and found[-1] < total
        assert min(total, 99_000) <= len(found) <= 100_000
        assert np.diff(found).max(initial=1) <= 1 + total / len(found) * 64 * 1.01 and total - found[-1] <= 128
    monkeypatch.setattr(shards.sample_texts, "__defaults__", (128,))
    monkeypatch.setattr(shards, "RUN", 16)
    sources = [Source(demo / "mono_xx"), Source(demo / "pairs")]
    read: list[tuple[str, int]] = []

    def recorded(self: Source, shard: int, record: int, plain: Any = Source.read) -> Any:
        read.append((self.langs_name, sum(self.counts[:shard].tolist()) + record))
        return plain(self, shard, record)

    monkeypatch.setattr(Source, "read", recorded)
    distinct_token_ids_in_sample("xx", sources, tokenizer)
    numbers = [n + (600 if name == "en-xx" else 0) for name, n in read]
    assert numbers == shards.record_numbers_in_spaced_runs(1200, 128).tolist() and len(numbers) == 128
    assert 50 < sum(n < 600 for n in numbers) < 78


# Withheld words


def lexicon_of(langs: tuple[str, str], *entries: tuple[str, str, list[int], list[int]]) -> Lexicon:
    words, ids = [(a, b) for a, b, _, _ in entries], ([a for _, _, a, _ in entries], [b for _, _, _, b in entries])
    return Lexicon(langs, words, ids, "", Path("-".join(langs)))


def some_word(heldout: bool, start: str) -> str:
    return next(word for i in range(99) if is_withheld(word := f"{start}{i}", 0.3) == heldout)


def test_words_of_which_an_objective_saw_any_entry_are_not_withheld() -> None:
    """By loops over entries; a token is seen as soon as it stands for either side of one trained entry."""
    draw = np.random.default_rng(2)
    tokens = {language: np.arange(50) for language in ("de", "en", "fr")}
    for langs in (("de", "en"), ("en", "de"), ("en", "fr")):
        entries = [
            (f"{langs[0]}{a}", f"{langs[1]}{b}", [a] if a < 36 else [a, 49], [b] if b < 36 else [b, 49])
            for a, b in draw.integers(0, 40, (40, 2)).tolist()
        ]
        lexicon = lexicon_of(langs, *entries)
        withheld, trained = collect_probe_words([lexicon], [lexicon], 0.5, tokens).values()
        seen: set[int] = set()
        for *words, a, b in entries:
            if not any(is_withheld(word, 1 - 0.5**0.5) for word in words) and a != b:
                seen |= {side[0] for side in (a, b) if len(side) == 1}
        pairs = {(a[0], b[0]) for _, _, a, b in entries if len(a) == len(b) == 1 and a != b}
        assert set(map(tuple, withheld.pairs_P2.tolist())) == {p for p in pairs if p[0] not in seen}
        assert set(map(tuple, trained.pairs_P2.tolist())) == {p for p in pairs if p[0] in seen}
        assert seen and len(withheld.distinct_queries)


def test_a_token_that_is_trained_as_another_word_is_not_withheld() -> None:
    """Two words of one token (a tokenizer without accents), another dictionary, and what counts for neither."""
    kept, held, held2 = some_word(False, "a"), some_word(True, "a"), some_word(True, "b")
    lexicon = lexicon_of(
        ("de", "en"), (held, "x", [1], [2]), (kept, "x", [1], [3]), (held2, "y", [4], [5]), (kept, "z", [6], [6])
    )
    tokens = {language: np.arange(9) for language in ("de", "en")}

    def asked(*read: Lexicon) -> list[int]:
        probes = collect_probe_words([lexicon], read, 0.3, tokens)
        return probes[MetricKey("alignment", "de-en")].distinct_queries.tolist()

    assert asked(lexicon) == asked() == [4]
    other = lexicon_of(("de", "fr"), (kept, "u", [4], [8]), (kept, "u", [7, 4], [8]))
    assert asked(lexicon, other) == []
    assert one_token_word_ids_trained_on(lexicon, 0.3).tolist() == [1, 3]
    assert one_token_word_ids_trained_on(other, 0.3).tolist() == [4, 8]


def test_dictionaries_of_one_name_are_measured_together() -> None:
    one, two = (lexicon_of(("de", "en"), (some_word(True, "a"), "x", [a], [a + 1])) for a in (1, 5))
    found = collect_probe_words([one, two], [], 0.3, {"en": np.arange(9)})
    assert [str(metric) for metric in found] == ["alignment/de-en", "alignment_trained/de-en"]
    assert found[MetricKey("alignment", "de-en")].pairs_P2.tolist() == [[1, 2], [5, 6]]


def test_eval_run_tells_withheld_words_from_trained_ones(demo: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Rows of the words that training would not withhold are their translations': these are found, withheld words are
    not; nor any in a random table, and all where all are planted. The share is the model's."""
    path = demo / "lexicon" / "xx-en.txt"
    lexicon = load_lexicon(path, tokenizer)

    def model(name: str, planted: Lexicon | None, heldout: float | None = 0.2) -> Path:
        encoder = build_encoder(
            init=None, preset="tiny", dropout=0.0, max_length=64, vocab_size=tokenizer.vocab_size,
            pad_id=tokenizer.pad_id, languages=["en", "xx"], language_embeddings=False, reset_positions=False, seed=0,
        )  # fmt: skip
        table = encoder.lm.get_input_embeddings().weight.data
        for a, b in planted.single_token_pairs().tolist() if planted else ():
            table[a] = table[b]
        if heldout is not None:
            encoder.lm.config.xscale["lexicon_heldout"] = heldout
        encoder.lm.save_pretrained(tmp_path / name)
        tokenizer.hf.save_pretrained(tmp_path / name)
        return tmp_path / name

    def scores(model: Path) -> dict[str, float]:
        out = tmp_path / "scores.json"
        given = ["--model", model, "--task", "alignment", "--data", demo / "pairs", "--lexicons", path, "--out", out]
        assert run.main(list(map(str, given))) == 0
        (measured,) = json.loads(out.read_text())["results"]["alignment"].values()
        return measured

    found = scores(model("random", None))
    assert 50 < found["words"] < 0.3 * found["words trained"] and max(found["xx->en"], found["xx->en trained"]) < 0.05
    whole = found["words"] + found["words trained"]
    found = scores(model("planted", lexicon))
    assert min(found["xx->en"], found["xx->en trained"]) > 0.8
    found = scores(model("trained", without_withheld(lexicon, 0.2)))
    assert found["xx->en"] < 0.1 and found["xx->en trained"] > 0.8
    half = scores(model("half", without_withheld(lexicon, 0.5), heldout=0.5))
    assert half["xx->en"] < 0.1 and half["xx->en trained"] > 0.8 and half["words"] > 0.3 * whole
    none = scores(model("none", without_withheld(lexicon, 0.5), heldout=0.0))
    assert "xx->en" not in none and none["words"] == 0 and none["words trained"] == whole
    everything = scores(model("foreign", without_withheld(lexicon, 0.5), heldout=None))
    assert "xx->en trained" not in everything and everything["words"] == whole
    weighted = sum(half[f"xx->en{kind}"] * half[f"words{kind}"] for kind in ("", " trained")) / whole
    assert none["xx->en trained"] == everything["xx->en"] == pytest.approx(weighted)


# A run's


def test_ranks_divide_the_languages_and_show_progress(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long count looks like a hang. Only rank 0 has the words."""
    monkeypatch.setattr(shards, "LIST_RECORDS", 100)
    noted: list[str] = []
    sets = [f"data.lexicons=[{demo / 'lexicon' / 'en-xx.txt'}]"]
    words = ["--ds_config", "x", "--recipe", "mlm", "--data", str(demo), "--set", *sets]
    corpus = launch.loader_of(words, measured=False).corpus
    lists = sum(-(-source.records // 100) for source in corpus.sources if "xx" in source.langs)
    assert len(gather_probe_words_on_rank_0(corpus, CpuGroup(), noted.append)) == 2
    assert noted == ["counting tokens of xx"] * lists and lists > 9
    other = CpuGroup()
    other.is_main = False
    assert gather_probe_words_on_rank_0(corpus, other, noted.append) == {}


def test_too_few_words_have_no_score(
    demo: Path, tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note says so; where nothing is withheld, all words are trained ones, and none is needed."""
    lines = (demo / "lexicon" / "en-xx.txt").read_text().splitlines()
    (tmp_path / "en-xx.txt").write_text("\n".join(lines[::16]))
    monkeypatch.setattr(logging.getLogger("xscale"), "propagate", True)
    table = torch.randn(tokenizer.vocab_size, 8)
    for heldout, noted in ((0.2, True), (0.0, False)):
        sets = [f"data.lexicons=[{tmp_path / 'en-xx.txt'}]", f"data.lexicon_heldout={heldout}"]
        loader = launch.loader_of(
            ["--ds_config", "x", "--recipe", "align_mlm", "--data", str(demo), "--set", *sets], measured=False
        )
        caplog.clear()
        with caplog.at_level("INFO"):
            withheld, trained = gather_probe_words_on_rank_0(loader.corpus, CpuGroup(), lambda doing: None).values()
        left_out = f"does not read, but there are only {len(withheld.distinct_queries)}. Use a larger dictionary"
        assert (left_out in caplog.text) == noted
        assert withheld.translation_accuracy(table) is None and trained.translation_accuracy(table) is not None
