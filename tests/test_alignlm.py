"""AlignLM's links, heads and pieces, in fp64. tests/test_reference.py has the paper's equations, with a dense A."""

import random
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForMaskedLM

from tests.plain import links_of
from tests.rows import one_thread, sums  # noqa: F401
from tests.streams import make_dataset, make_mixture
from tests.test_encoder import CONFIGS
from xscale.data import links as word_links
from xscale.data.calibration import Calibration
from xscale.data.ragged import concatenated_ranges, distinct_pairs
from xscale.data.sequences import Example, Sequences
from xscale.data.shards import Source
from xscale.data.stream import Stream
from xscale.data.stream_batch import CollateContext, Gather, StreamBatch
from xscale.data.tokenizer import Tokenizer
from xscale.data.words import split_words_and_symbols
from xscale.errors import UserError
from xscale.metric_keys import MetricKey
from xscale.models.build import build_encoder
from xscale.models.encoder import Encoder
from xscale.objectives import alignlm
from xscale.objectives.base import Parts

Pair = tuple[str, str, str]
"""Two texts and their links."""
ROOT_TEXT = "Peter will not buy the very big hammer under their green bottle tomorrow shaka vopina jaji doj koh"
ROOT_WORDS = ROOT_TEXT.split()


def random_pairs(number: int, seed: int = 0, longest: int = 14) -> list[Pair]:
    """Ragged texts with words of one to many tokens; words with no link, one and several; repeated links; no links."""
    r = random.Random(seed)

    def text() -> str:
        odd = ["".join(r.choices("abcdefghijk", k=r.randint(2, 12))) for _ in range(6)]
        return " ".join(r.choices(ROOT_WORDS + odd, k=r.randint(1, longest)))

    pairs = []
    for n in range(number):
        texts = text(), text()
        sizes = [len(side.split()) for side in texts]
        links = [f"{r.randrange(sizes[0])}-{r.randrange(sizes[1])}" for _ in range(r.randint(0, 2 * max(sizes)))]
        pairs.append((*texts, "" if n % 5 == 4 else " ".join(links)))
    return pairs


def examples_of(tokenizer: Tokenizer, pairs: list[Pair], langs: tuple[str, str] = ("en", "xx")) -> list[list[Example]]:
    samples = []
    for number, (*texts, linked) in enumerate(pairs):
        ids, words = tokenizer.encode_words(texts)
        identity = np.uint64(1000 + number)
        samples.append([Example(langs, tuple(ids), tuple(words), identity, number, f"r{number}", linked)])
    return samples


def context(tokenizer: Tokenizer, max_length: int = 128, overlong: str = "truncate") -> CollateContext:
    return CollateContext(tokenizer, max_length, overlong, {"en": 0, "xx": 1, "de": 2})


def noise(module: nn.Module, scale: float = 0.05) -> None:
    """No weight stays at a special value such as 0, 1 or its twin's."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * scale)


def tiny(tokenizer: Tokenizer, seed: int = 0) -> Encoder:
    encoder = build_encoder(
        init=None, preset="tiny", dropout=0.0, max_length=128, vocab_size=tokenizer.vocab_size, pad_id=tokenizer.pad_id,
        languages=["en", "xx"], language_embeddings=False, reset_positions=False, seed=seed,
    )  # fmt: skip
    return encoder.double()


@pytest.fixture(scope="module")
def parts(tokenizer: Tokenizer) -> Parts:
    torch.manual_seed(1)
    encoder = tiny(tokenizer)
    heads = alignlm.Heads(encoder, alignlm.AlignLMOptions()).double()
    noise(encoder)
    noise(heads)
    return Parts(encoder, heads)


# 1. Predictions


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_first_prediction_is_the_pretrained_heads(kind: str) -> None:
    """Of every model type, monolingual; and a link of one state to a token gives p~ = p of that state."""
    torch.manual_seed(0)
    config = CONFIGS[kind]
    lm = AutoModelForMaskedLM.from_config(config).double().eval()
    noise(lm)
    heads = alignlm.Heads(Encoder(lm), alignlm.AlignLMOptions()).double()
    ids, lengths = torch.randint(5, 97, (2, 7)), np.array([7, 7])
    places, labels = np.array([1, 4, 9]), torch.randint(5, 97, (3,))
    linked, partners = word_links.gather_of_tokens_linked_to_masked(np.array([[4, 9]]), places, ids.numel())
    identities = np.zeros(2, dtype=np.uint64)
    zeros = np.zeros(14, dtype=int)
    sequences = Sequences(
        ids.flatten().numpy(), lengths, concatenated_ranges(lengths), zeros, zeros, None, identities, zeros[:2]
    )
    named = {"mono": labels.numpy(), "bi": labels.numpy()[linked]}
    states = {"masked": Gather.single(places), "linked": partners}
    stream_batch = StreamBatch(sequences, states, {"mono": 3, "bi": 2}, 2, named)
    found = sums("alignlm", Parts(Encoder(lm), heads), stream_batch, alignlm.AlignLMOptions())
    logits = lm(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.flatten(0, 1)
    fp32_rotations = 1e-6 if kind == "modernbert" else 1e-12  # Hugging Face turns queries and keys in fp32
    expected = F.cross_entropy(logits[places], labels, reduction="sum")
    torch.testing.assert_close(found.terms["mono"], expected, rtol=fp32_rotations, atol=0)
    crossed = F.cross_entropy(logits[[9, 4]], labels[1:], reduction="sum")
    torch.testing.assert_close(found.terms["bi"], crossed, rtol=fp32_rotations, atol=0)
    assert all(p.requires_grad for p in heads.parameters())


# 2. The index


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12))))
def test_distinct_pairs_are_distinct_rows(pairs: list[tuple[int, int]]) -> None:
    rows = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    assert np.array_equal(distinct_pairs(rows[:, 0], rows[:, 1]), np.unique(rows, axis=0))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_linked_states_are_rows_of_A(data: st.DataObject) -> None:
    places = data.draw(st.integers(2, 12))
    half = data.draw(st.integers(1, places - 1))
    cells = [(i, j) for i in range(half) for j in range(half, places)]
    links = np.array(sorted(data.draw(st.sets(st.sampled_from(cells)))), dtype=np.int64).reshape(-1, 2)
    masked = np.array(sorted(data.draw(st.sets(st.integers(0, places - 1)))), dtype=np.int64)
    A = np.zeros((places, places), dtype=int)
    for i, j in links.tolist():
        A[i, j] = A[j, i] = 1
    linked, partners = word_links.gather_of_tokens_linked_to_masked(links, masked, places)
    assert linked.tolist() == [k for k, i in enumerate(masked) if A[i].any()]
    rows = [partners.columns[a:b].tolist() for a, b in pairwise(partners.offsets)]
    assert rows == [np.flatnonzero(A[i]).tolist() for i in masked if A[i].any()] and partners.state_count == len(linked)


def test_words_without_tokens_keep_their_number(tokenizer: Tokenizer) -> None:
    """A word that the tokenizer drops is still a word to whoever counted links: also the last one."""
    pairs = [("Peter \ufffd will \ufffd", "shaka vopina", "2-0 3-1 1-1")]
    (sample,) = examples_of(tokenizer, pairs)
    assert max(sample[0].words[0].word_of_token) == 2 and len(sample[0].words[0].is_word) == 4
    links_K2, _ = word_links.links_and_is_word_of_each_end(sample)
    text_numbers = [[0, 1]]
    sequences = alignlm.join_segments(tokenizer, word_links.segments_of_texts(sample, text_numbers), {"en": 0, "xx": 1})
    tokens = word_links.word_tokens(sample, text_numbers, sequences, "first")
    ids = [[int(sequences.ids[place]) for place in link] for link in word_links.token_links(links_K2, tokens)]
    assert ids == [[tokenizer.encode(["will"])[0][0], tokenizer.encode(["shaka"])[0][0]]]


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ("0-0 1-2", ["'1-2'", "i below 2 and j below 2"]),
        ("2-1", ["'2-1'", "i below 2 and j below 2", "counted from 0"]),
        ("0-0 99999999999999999999-0", ["'99999999999999999999-0'"]),
        ("0-0 1", ["'1'"]),
        ("0:0", ["'0:0'"]),
        ("0-0-1", ["'0-0-1'"]),
        ("-1-0", ["'-1-0'"]),
        ("0-0,1-1", ["'0-0,1-1'"]),
        (None, ["`links` is missing", "--align"]),
    ],
)
def test_links_that_do_not_fit_name_the_record(tokenizer: Tokenizer, links: str | None, words: list[str]) -> None:
    pairs: Any = [("Peter will", "shaka vopina", "0-0"), ("Peter will", "doj koh", links)]
    with pytest.raises(UserError) as caught:
        alignlm.collate(examples_of(tokenizer, pairs), alignlm.AlignLMOptions(), context(tokenizer))
    assert all(word in str(caught.value) for word in ("'r1'", *words)), caught.value


@pytest.mark.parametrize("expand", ["all", "first"])
def test_sub_words_that_a_link_expands_to(tokenizer: Tokenizer, expand: Any) -> None:
    (sample,) = examples_of(tokenizer, [("gkeikgdafo", "bidjcakhia", "0-0")])
    (first, second), options = sample[0].ids, alignlm.AlignLMOptions(mask_prob=0.99, expand=expand)
    assert len(first) > 1 and len(second) > 1
    stream_batch = alignlm.collate([sample], options, context(tokenizer))
    expected = [*first, *second] if expand == "all" else [first[0], second[0]]
    states = 2 * len(first) * len(second) if expand == "all" else 2
    assert stream_batch.labels["bi"].tolist() == expected and stream_batch.target_counts["links"] == states


def test_links_between_words_that_were_cut_are_no_error(tokenizer: Tokenizer) -> None:
    long = " ".join(ROOT_WORDS[:12])
    (sample,) = examples_of(tokenizer, [(long, long, "11-11 0-0")])
    stream_batch = alignlm.collate([sample], alignlm.AlignLMOptions(mask_prob=0.99), context(tokenizer, 16))
    assert stream_batch.target_counts["bi"] == 2 * len(tokenizer.encode(["Peter"])[0])


def test_gold_links_of_the_demo_corpus(demo: Path, tokenizer: Tokenizer) -> None:
    """From shards through the loader: what a masked word is predicted from are its gold translations."""
    source = Source(demo / "pairs")
    options = alignlm.AlignLMOptions(shuffle_sides=True)
    stream = Stream("alignlm", alignlm.OBJECTIVE, options, (0,), 40)
    dataset = make_dataset([source], [stream], context(tokenizer))
    arguments: Any = {"seed": 5, "alpha": 0.7, "max_length": 128, "max_tokens": 512, "world": 1, "rank": 0}
    plan = make_mixture([stream], [source], Calibration([(0.3, 0.0)], {}), **arguments).next_plan_of_rank()
    records = {record.key: record for record in (source.read(0, i) for i in range(source.shards[0].records))}
    examples = dataset.read_and_tokenise(stream, plan)
    seen, found = 0, dataset.collate_rows(stream, plan, examples)
    keys_left = iter([example.key for example in examples])
    for stream_batch, count in zip(found, plan.record_counts_of_rows("alignlm"), strict=True):
        keys = list(islice(keys_left, count))
        original = stream_batch.sequences.ids.copy()
        masked, partners, of_token = (
            stream_batch.states["masked"].columns,
            stream_batch.states["linked"],
            stream_batch.sequences.sequence_of_token,
        )
        original[masked] = stream_batch.labels["mono"]
        linked = [place for place in masked.tolist() if original[place] in stream_batch.labels["bi"]]
        ends = partners.offsets.tolist()
        at = iter(linked)
        for label, (a, b) in zip(stream_batch.labels["bi"].tolist(), pairwise(ends), strict=True):
            sequence = of_token[partners.columns[a]]
            place = next(p for p in at if original[p] == label and of_token[p] == sequence)
            record = records[keys[sequence]]
            texts = [found for found, _ in split_words_and_symbols(list(record.texts))]
            token = tokenizer.backend.id_to_token(int(original[place])).removeprefix("##")
            theirs = [tokenizer.backend.id_to_token(int(original[c])) for c in partners.columns[a:b]]
            links = links_of(record.links)
            translations = [(texts[0][i], texts[1][j]) for i, j in links]
            fits = [y for x, y in translations if token in x] + [x for x, y in translations if token in y]
            assert all(any(partner.removeprefix("##") in word for word in fits) for partner in theirs)
            assert set(of_token[partners.columns[a:b]]) == {sequence}
            seen += 1
        assert stream_batch.target_counts["bi"] > 0.7 * stream_batch.target_counts["mono"] > 0
    assert seen > 100 and len(found) > 1


def test_a_pair_that_is_far_too_long_is_not_tokenised_whole(
    demo: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, seen, encode = Source(demo / "pairs"), list[int](), Tokenizer.encode_words
    long = source.read(0, 0)._replace(texts=("one two " * 400_000, "three"), links="0-0 700000-0")

    def encode_words(self: Tokenizer, texts: list[str]) -> Any:
        seen.extend(map(len, texts))
        return encode(self, texts)

    monkeypatch.setattr(Source, "read", lambda self, shard, record, readahead: long)
    monkeypatch.setattr(Tokenizer, "encode_words", encode_words)
    stream = Stream("alignlm", alignlm.OBJECTIVE, alignlm.AlignLMOptions(), (0,), 4)
    dataset = make_dataset([source], [stream], replace(context(tokenizer), overlong="drop"))
    arguments: Any = {"seed": 5, "alpha": 0.7, "max_length": 128, "max_tokens": 1 << 20, "world": 1, "rank": 0}
    plan = make_mixture([stream], [source], Calibration([(0.3, 0.0)], {}), **arguments).next_plan_of_rank()
    stream_batches = dataset.collate_rows(stream, plan, dataset.read_and_tokenise(stream, plan))
    too_long = MetricKey("too_long", "alignlm")
    assert sum(stream_batch.pair_counts[too_long] for stream_batch in stream_batches) == 4 and max(seen) <= 64 * 128
