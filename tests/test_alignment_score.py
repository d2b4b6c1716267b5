"""The alignment score against a search by hand, and as `xscale.eval.run` prints it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import launch
from xscale.data.lexicon import load_lexicon
from xscale.data.shards import Source
from xscale.data.tokenizer import Tokenizer
from xscale.eval.alignment_score import WordPairs, word_pairs
from xscale.models.build import build_encoder


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
    assert WordPairs(np.unique(pairs, axis=0), np.array(targets)).score(table) == pytest.approx(expected)


def test_tokens_of_the_other_language_compete(demo: Path, tokenizer: Tokenizer) -> None:
    """Every token of the target language's text is a candidate, the source language's own are not."""
    source = Source(demo / "pairs")
    path = next((demo / "lexicon").glob("*.txt"))
    lexicon = load_lexicon(path, tokenizer)
    gold = word_pairs(lexicon, [source], tokenizer)
    side = source.langs.index(lexicon.langs[1])
    texts = [source.read(0, record).texts for record in range(source.shards[0].records)]
    theirs = {i for text in texts for i in tokenizer.hf(text[side], add_special_tokens=False)["input_ids"]}
    unknown = tokenizer.hf.unk_token_id
    assert set(gold.targets_C.tolist()) == (theirs - {unknown}) | {b for _, b in lexicon.single().tolist()}
    assert all(a != b for a, b in gold.pairs_P2.tolist())


def test_eval_run_prints_scores_of_a_planted_table(demo: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Where each word's row is its translation's, all are found; a random table finds next to none."""
    path = next((demo / "lexicon").glob("*.txt"))
    source = Source(demo / "pairs")
    encoder = build_encoder(
        init=None,
        preset="tiny",
        dropout=0.0,
        max_length=64,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        languages=list(source.langs),
        language_embeddings=False,
        reset_positions=False,
        seed=0,
    )
    random_out, planted_out = tmp_path / "random", tmp_path / "planted"
    encoder.lm.save_pretrained(random_out)
    with torch.no_grad():
        for a, b in load_lexicon(path, tokenizer).single().tolist():
            encoder.lm.get_input_embeddings().weight[b] = encoder.lm.get_input_embeddings().weight[a]
    encoder.lm.save_pretrained(planted_out)
    scores = {}
    for out in (random_out, planted_out):
        tokenizer.hf.save_pretrained(out)
        arguments = ["--model", out, "--task", "alignment", "--data", demo / "pairs", "--out", tmp_path / "scores.json"]
        subprocess.run(
            [sys.executable, "-m", "xscale.eval.run", *map(str, arguments)],
            check=True,
            cwd=launch.ROOT,
            env=launch.environment(),
        )
        (measured,) = json.loads((tmp_path / "scores.json").read_text())["results"]["alignment"].values()
        scores[out.name] = measured["->".join(path.name.split(".")[0].split("-"))]
        assert measured["words"] > 50
    assert scores["random"] < 0.05 and scores["planted"] > 0.8, scores
