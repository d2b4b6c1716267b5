"""ALIGN-MLM: every dictionary entry once a step. tests/test_reference.py has the equation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, BertConfig

from tests.plain import sequences_of
from tests.rows import assert_same_gradients, gradients, one_thread, sums  # noqa: F401
from tests.test_dict_mlm import random_samples
from xscale.data import lexicon as lexicons
from xscale.data.lexicon import Lexicon, load_lexicon
from xscale.data.sequences import Example
from xscale.data.stream_batch import CollateContext, StreamBatch
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.models.encoder import Encoder
from xscale.objectives import align_mlm, mlm
from xscale.objectives.base import Parts

LANGUAGES = {"de": 0, "en": 1, "fr": 2}
Entry = tuple[list[int], list[int]]


def random_entries(tokenizer: Tokenizer, count: int, seed: int) -> list[Entry]:
    """Distinct by their first token, so that each can be told from the others."""
    generator = np.random.default_rng(seed)
    firsts = generator.permutation(tokenizer.ordinary_ids)[:count]

    def more() -> list[int]:
        return generator.choice(tokenizer.ordinary_ids, generator.integers(0, 4) * generator.integers(0, 2)).tolist()

    return [([int(first), *more()], [int(generator.choice(tokenizer.ordinary_ids)), *more()]) for first in firsts]


def made(entries: list[Entry], langs: tuple[str, str]) -> Lexicon:
    return Lexicon(
        langs, [("a", "b")] * len(entries), ([a for a, _ in entries], [b for _, b in entries]), "", Path("x")
    )


ENTRIES = 53


@pytest.fixture(scope="module")
def entries(tokenizer: Tokenizer) -> list[Entry]:
    return random_entries(tokenizer, ENTRIES, 0)


@pytest.fixture(scope="module")
def context(entries: list[Entry], tokenizer: Tokenizer) -> Callable[..., CollateContext]:
    """context(step, part, parts): with two dictionaries of these entries."""
    lexicons = (made(entries[:20], ("en", "de")), made(entries[20:], ("fr", "en")))

    def make(step: int = 0, part: int = 0, parts: int = 1, seed: int = 0, stream: str = "align_mlm") -> CollateContext:
        return CollateContext(tokenizer, 64, "drop", LANGUAGES, seed, lexicons, stream, step, part, parts)

    return make


@pytest.fixture
def model(tokenizer: Tokenizer) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    sizes = {"vocab_size": tokenizer.vocab_size, "pad_token_id": tokenizer.pad_id}
    config = BertConfig(**shape, **sizes)
    lm = AutoModelForMaskedLM.from_config(config).double().eval()
    with torch.no_grad():
        lm.get_input_embeddings().weight.copy_(torch.randn(tokenizer.vocab_size, 16))  # cosines far from 0
    return lm


def dictionary_of(batch: StreamBatch) -> list[Entry]:
    """The entries in a piece's arrays, by loops."""
    ids, starts = batch.arrays["ids"].tolist(), batch.arrays["starts"].tolist()
    words = [ids[a:b] for a, b in zip(starts, [*starts, len(ids)][1:], strict=True)]
    return list(zip(words[: len(words) // 2], words[len(words) // 2 :], strict=True))


# 1. The equation


def cosines(table: Tensor, entries: list[Entry]) -> Tensor:
    """Sum of cos(E[b_i1], E[b_i2]), a dot product and two roots an entry."""
    total = torch.zeros((), dtype=torch.float64)
    for pair in entries:
        a, b = (sum(table[token] for token in side) / len(side) for side in pair)
        total = total + (a * b).sum() / ((a * a).sum() ** 0.5 * (b * b).sum() ** 0.5)
    return total


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cosines_are_fp32(dtype: torch.dtype, entries: list[Entry], context, model: Any) -> None:
    """Of half-precision rows nothing but the rows is rounded."""
    stream_batch = align_mlm.collate([], align_mlm.AlignMlmOptions(), context())
    arrays = {name: torch.from_numpy(array) for name, array in stream_batch.arrays.items()}
    half = Parts(Encoder(model.to(dtype)))
    states = {"masked": torch.zeros(0, 16, dtype=dtype)}
    found = align_mlm.compute_losses(half, states, arrays, align_mlm.AlignMlmOptions()).sums["align"]
    assert found.dtype == torch.float32
    exact = cosines(half.encoder.lm.get_input_embeddings().weight.detach().double(), entries)
    torch.testing.assert_close(-found.double(), exact, rtol=0, atol=1e-5)


def test_the_rest_is_mlm(context, tokenizer: Tokenizer) -> None:
    samples = random_samples(context(), 9, 2)
    plain = mlm.collate(samples, mlm.MaskedOptions(0.2), context())
    stream_batch = align_mlm.collate(samples, align_mlm.AlignMlmOptions(0.2), context())
    assert (
        sequences_of(stream_batch) == sequences_of(plain)
        and stream_batch.target_counts["mlm"] == plain.target_counts["mlm"]
    )
    assert stream_batch.samples == plain.samples and not plain.arrays


# 2. Which entries


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 60])
@pytest.mark.parametrize("wanted", [None, 20, ENTRIES, 1000])
def test_every_entry_once_a_step(wanted: int | None, parts: int, entries: list[Entry], context) -> None:
    """More parts than entries leave some empty; none is repeated, none differs from its dictionary."""
    options = align_mlm.AlignMlmOptions(pairs_per_step=wanted)
    batches = [align_mlm.collate([], options, context(5, part, parts)) for part in range(parts)]
    found = [entry for batch in batches for entry in dictionary_of(batch)]
    assert len(found) == min(wanted or ENTRIES, ENTRIES)
    assert [batch.target_counts["align"] for batch in batches] == [len(dictionary_of(batch)) for batch in batches]
    sizes = [batch.target_counts["align"] for batch in batches]
    assert max(sizes) - min(sizes) <= 1, "a part has more than its share"
    assert len({tuple(a) for a, _ in found}) == len(found) and all(entry in entries for entry in found)
    whole = dictionary_of(align_mlm.collate([], options, context(5)))
    assert sorted(found) == sorted(whole), "the sample depends on the number of parts"


def test_samples_are_of_the_step(entries: list[Entry], context) -> None:
    """A function of seed, stream and step; over many steps every entry is equally likely."""

    def sample(**place: Any) -> list[Entry]:
        return dictionary_of(align_mlm.collate([], align_mlm.AlignMlmOptions(pairs_per_step=10), context(**place)))

    assert sample(step=1) == sample(step=1)
    assert len({str(sample(**place)) for place in ({}, {"step": 1}, {"seed": 1}, {"stream": "other"})}) == 4
    counts = dict.fromkeys((tuple(a) for a, _ in entries), 0)
    steps = 600
    for step in range(steps):
        for a, _ in sample(step=step):
            counts[tuple(a)] += 1
    p = 10 / ENTRIES
    assert max(abs(n - steps * p) for n in counts.values()) < 5 * (steps * p * (1 - p)) ** 0.5


def test_single_leaves_out_longer_words(entries: list[Entry], context) -> None:
    found = dictionary_of(align_mlm.collate([], align_mlm.AlignMlmOptions(subwords="single"), context()))
    assert found == [entry for entry in entries if len(entry[0]) == len(entry[1]) == 1]


# 3. Pieces of nothing and trouble


def test_only_longer_words(tokenizer: Tokenizer) -> None:
    lexicon = made([([50, 51], [60])], ("en", "de"))
    poor = CollateContext(tokenizer, 64, "drop", LANGUAGES, lexicons=(lexicon,), stream="s")
    sample = [[Example(("en",), ([50],), None, np.uint64(0))]]
    assert align_mlm.collate(sample, align_mlm.AlignMlmOptions(), poor).target_counts["align"] == 1
    with pytest.raises(UserError, match=r"streams\.s: .* larger dictionary, or `subwords: mean`"):
        align_mlm.collate(sample, align_mlm.AlignMlmOptions(subwords="single"), poor)


def test_entries_of_the_same_tokens_are_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """MUSE has `berlin berlin`: cosine 1, no gradient. They neither count nor are drawn."""
    words = ["Peter", "will", "xx", "shaka", "doj"]
    (tmp_path / "en-xx.txt").write_text("".join(f"{w} {w}\n" for w in words) + "Peter shaka\nwill doj\n")
    lexicon = load_lexicon(tmp_path / "en-xx.txt", tokenizer)
    source, target = lexicons.ids_of_differing_entries((lexicon,), False)
    assert len(source.lengths) == len(target.lengths) == 2
    context = CollateContext(tokenizer, 64, "drop", {"en": 0, "xx": 1}, lexicons=(lexicon,))
    stream_batch = align_mlm.collate(
        [[Example(("en",), ([50],), None, np.uint64(0))]], align_mlm.AlignMlmOptions(), context
    )
    assert stream_batch.target_counts["align"] == 2
    ids = np.split(stream_batch.arrays["ids"], stream_batch.arrays["starts"][1:])
    assert [tokenizer.hf.decode(word) for word in ids] == ["Peter", "will", "shaka", "doj"]
