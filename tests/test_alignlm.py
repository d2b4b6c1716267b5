"""AlignLM against the paper's equations, written out with a dense A and loops, in fp64."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM

from tests.test_encoder import CONFIGS
from xscale.data import alignment
from xscale.data.collate import Context, MicroBatch
from xscale.data.encode import Example, TextEncoder
from xscale.data.index import find_sources
from xscale.data.loader import StepDataset, StreamCollate
from xscale.data.mixture import Mixture, StreamSpec
from xscale.errors import UserError
from xscale.models.encoder import Encoder, build_encoder
from xscale.objectives import alignlm
from xscale.objectives.base import Parts

Pair = tuple[str, str, str]
"""Two texts and their links."""
ROOT_TEXT = "david will not buy the very big hammer under their green bottle tomorrow shitu vabipa zeibi naz vij"
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


def examples_of(text: TextEncoder, pairs: list[Pair], langs: tuple[str, str] = ("en", "xx")) -> list[list[Example]]:
    samples = []
    for number, (*texts, links) in enumerate(pairs):
        ids, words = text.encode_words(texts, "whitespace")
        counts = tuple(len(side.split()) for side in texts)
        identity = np.uint64(1000 + number)
        samples.append([Example(langs, tuple(ids), tuple(words), identity, number, f"r{number}", links, counts)])
    return samples


def context(text: TextEncoder, max_length: int = 128, overlong: str = "truncate") -> Context:
    return Context(text, max_length, overlong, {"en": 0, "xx": 1, "de": 2})


def noise(module: nn.Module, scale: float = 0.05) -> None:
    """No weight stays at a special value such as 0, 1 or its twin's."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * scale)


def tiny(text: TextEncoder, seed: int = 0) -> Encoder:
    encoder = build_encoder(
        init=None, preset="tiny", dropout=0.0, max_length=128, vocab_size=text.vocab_size, pad_id=text.pad_id,
        languages=["en", "xx"], language_embeddings=False, reset_positions=False, seed=seed,
    )  # fmt: skip
    return encoder.double()


@pytest.fixture(scope="module")
def parts(text_encoder: TextEncoder) -> Parts:
    torch.manual_seed(1)
    encoder = tiny(text_encoder)
    heads = alignlm.Heads(encoder, alignlm.Options()).double()
    noise(encoder)
    noise(heads)
    return Parts(encoder, heads)


def tensors(batch: MicroBatch) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.arrays.items()}


def gradients(loss: Tensor, *modules: nn.Module) -> dict[str, Tensor | None]:
    named = {f"{i}.{name}": p for i, module in enumerate(modules) for name, p in module.named_parameters()}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return dict(zip(named, found, strict=True))


def assert_same_gradients(real: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    scale = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for name, g in expected.items():
        mine = real[name]
        if g is None:
            assert mine is None or not mine.any(), name
            continue
        assert mine is not None, name
        torch.testing.assert_close(mine, g, rtol=1e-6, atol=1e-10 * scale, msg=lambda m, name=name: f"{name}: {m}")


# 1. The paper, slowly


def row_of(batch: MicroBatch, row: int, text: TextEncoder) -> tuple[list[int], list[int], dict[int, int]]:
    """Ids of a sequence as the model sees them, as they were, and its targets."""
    m = batch.arrays["input_ids"].shape[1]
    length = int(batch.arrays["attention_mask"][row].sum())
    seen = batch.arrays["input_ids"][row, :length].tolist()
    labels = dict(zip(batch.arrays["rows"].tolist(), batch.arrays["labels"].tolist(), strict=True))
    targets = {i: labels[row * m + i] for i in range(length) if row * m + i in labels}
    return seen, [targets.get(i, token) for i, token in enumerate(seen)], targets


def words_of(original: list[int], pair: Pair, text: TextEncoder) -> tuple[bool, list[tuple[int, int] | None]]:
    """Whether a sequence's sides are swapped, and for each token its (side of the pair, word); None: special.

    Words are tokenised one by one. A sequence may hold only the beginnings of the texts.
    """
    sides = [[(token, w) for w, word in enumerate(t.split()) for token in text.encode([word])[0]] for t in pair[:2]]
    first = original.index(text.sep_id) - 1
    second = len(original) - first - 3
    for swap in (False, True):
        a, b = sides[::-1] if swap else sides
        ids = [text.cls_id, *(t for t, _ in a[:first]), text.sep_id, *(t for t, _ in b[:second]), text.sep_id]
        if ids == original:
            of_a, of_b = [(int(swap), w) for _, w in a[:first]], [(1 - int(swap), w) for _, w in b[:second]]
            return swap, [None, *of_a, None, *of_b, None]
    raise AssertionError("the sequence is not made of its pair")


def dense_A(words: list[tuple[int, int] | None], links: str, expand: str) -> Tensor:
    linked = {tuple(map(int, link.split("-"))) for link in links.split()}
    m = len(words)
    A = torch.zeros(m, m, dtype=torch.float64)
    for i in range(m):
        for j in range(m):
            a, b = words[i], words[j]
            if a is None or b is None or (a[0], b[0]) == (1, 1) or (a[0], b[0]) == (0, 0):
                continue
            link = (a[1], b[1]) if a[0] == 0 else (b[1], a[1])
            first_pieces = words[i - 1] != a and words[j - 1] != b
            if link in linked and (expand == "all" or first_pieces):
                A[i, j] = 1
    return A


def paper(
    parts: Parts, batch: MicroBatch, pairs: list[Pair], text: TextEncoder, options: alignlm.Options
) -> dict[str, Any]:
    """Sums over masked tokens of L_mp and L_bp, and what is counted beside them."""
    lm, heads = parts.encoder.lm, parts.heads
    transform, decoder = lm.cls.predictions.transform, lm.cls.predictions.decoder
    W1, LN, W = transform.dense, transform.LayerNorm, lm.bert.embeddings.word_embeddings.weight

    def p(x: Tensor, first: nn.Linear) -> Tensor:
        h = F.gelu(first.weight @ x + first.bias)
        h = heads.linear.weight @ h + heads.linear.bias
        return F.log_softmax(W @ LN(h) + decoder.bias, dim=0)

    found: dict[str, Any] = {"mono": torch.zeros((), dtype=torch.float64), "bi": torch.zeros((), dtype=torch.float64)}
    found |= dict.fromkeys(("swaps", "masked", "linked", "right", "bilingual_right", "multi"), 0)
    for row, pair in enumerate(pairs):
        seen, original, targets = row_of(batch, row, text)
        swap, words = words_of(original, pair, text)
        A = dense_A(words, pair[2], options.expand)
        H = lm.bert(input_ids=torch.tensor([seen])).last_hidden_state[0]
        H_star = A.T @ H
        if options.normalize == "mean":
            H_star = H_star / A.sum(0).clamp(min=1)[:, None]
        H_tilde = H_star @ heads.W2.weight.T + heads.W2.bias
        for i, label in targets.items():
            mono = p(H[i], W1)
            found["mono"] = found["mono"] - mono[label]
            found["right"] += int(mono.argmax() == label)
            if A[:, i].any():
                bi = p(H_tilde[i], heads.W3)
                found["bi"] = found["bi"] - bi[label]
                found["bilingual_right"] += int(bi.argmax() == label)
                found["linked"] += 1
                found["multi"] += int(A[:, i].sum() > 1)
        found["masked"] += len(targets)
        found["swaps"] += swap
    return found


CASES = {
    "all": (alignlm.Options(), 128),
    "first": (alignlm.Options(expand="first", mask_prob=0.6), 128),
    "mean": (alignlm.Options(normalize="mean", bilingual_weight=0.3), 128),
    "swapped": (alignlm.Options(shuffle_sides=True), 128),
    "cut": (alignlm.Options(shuffle_sides=True, mask_prob=0.5), 24),
    "cut first": (alignlm.Options(expand="first", normalize="mean", mask_prob=0.8), 16),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradients_are_the_papers(text_encoder: TextEncoder, parts: Parts, case: str, seed: int) -> None:
    options, max_length = CASES[case]
    pairs = random_pairs(10, seed)
    batch = alignlm.collate(examples_of(text_encoder, pairs), options, context(text_encoder, max_length))
    expected = paper(parts, batch, pairs, text_encoder, options)
    assert batch.targets == {"mono": expected["masked"], "bi": expected["linked"]}
    assert 0 < expected["multi"] < expected["linked"] < expected["masked"], "the case tests too little"
    assert bool(expected["swaps"]) == options.shuffle_sides and expected["swaps"] < len(pairs)
    assert bool(batch.too_long) == (max_length < 128)

    sums = alignlm.loss(parts, tensors(batch), options)
    assert list(sums.terms) == list(batch.targets)
    for term, value in sums.terms.items():
        torch.testing.assert_close(value, expected[term], rtol=1e-6, atol=0)
    counts = {name: (int(value), term) for name, (value, term) in sums.metrics.items()}
    assert counts == {
        "accuracy": (expected["right"], "mono"),
        "bilingual_accuracy": (expected["bilingual_right"], "bi"),
        "bilingual_coverage": (expected["linked"], "mono"),
    }
    factors = alignlm.OBJECTIVE.terms(options)
    assert factors == {"mono": 1.0, "bi": options.bilingual_weight}

    def whole(terms: dict[str, Tensor]) -> Tensor:
        return sum(factors[term] * terms[term] / n for term, n in batch.targets.items())

    modules = (parts.encoder, parts.heads)
    assert_same_gradients(gradients(whole(sums.terms), *modules), gradients(whole(expected), *modules))


def test_the_two_predictions_can_be_told_apart(text_encoder: TextEncoder, parts: Parts) -> None:
    """L_mp does not reach W2, W3; L_bp does not reach W1. Both reach `linear`, W and the encoder."""
    batch = alignlm.collate(examples_of(text_encoder, random_pairs(6)), alignlm.Options(), context(text_encoder))
    sums = alignlm.loss(parts, tensors(batch), alignlm.Options())
    dense = parts.encoder.head.dense.weight
    weights = [parts.heads.W2.weight, parts.heads.W3.weight, dense, parts.heads.linear.weight]
    reached = {
        term: [
            g is not None and bool(g.any())
            for g in torch.autograd.grad(value, weights, allow_unused=True, retain_graph=True)
        ]
        for term, value in sums.terms.items()
    }
    assert reached == {"mono": [False, False, True, True], "bi": [True, True, False, True]}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_first_prediction_is_the_pretrained_heads(kind: str) -> None:
    """Of every model type, monolingual; and a link of one state to a token gives p~ = p of that state."""
    torch.manual_seed(0)
    config = CONFIGS[kind]
    lm = AutoModelForMaskedLM.from_config(config).double().eval()
    noise(lm)
    encoder = Encoder(lm)
    heads = alignlm.Heads(encoder, alignlm.Options()).double()
    ids = torch.randint(5, 97, (2, 7))
    rows, labels = torch.tensor([1, 4, 9]), torch.randint(5, 97, (3,))
    links = np.array([[4, 9]])
    index = alignment.gather_index(links, rows.numpy(), ids.numel())
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "rows": rows, "labels": labels}
    batch |= {name: torch.from_numpy(array) for name, array in index.items()}
    sums = alignlm.loss(Parts(encoder, heads), batch, alignlm.Options())
    logits = lm(input_ids=ids, attention_mask=batch["attention_mask"]).logits.flatten(0, 1)
    expected = F.cross_entropy(logits[rows], labels, reduction="sum")
    torch.testing.assert_close(sums.terms["mono"], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        sums.terms["mono"], encoder.masked_lm(encoder.hidden(batch).flatten(0, 1)[rows], labels)[0]
    )
    crossed = F.cross_entropy(logits[[9, 4]], labels[1:], reduction="sum")
    torch.testing.assert_close(sums.terms["bi"], crossed, rtol=1e-12, atol=0)
    assert all(p.requires_grad for p in heads.parameters())


# 2. Micro-batches that are cut differently, or empty


def test_the_sums_do_not_depend_on_the_cut(text_encoder: TextEncoder, parts: Parts) -> None:
    samples = examples_of(text_encoder, random_pairs(9, seed=3))
    options = alignlm.Options(shuffle_sides=True)

    def whole(size: int) -> dict[str, float]:
        totals: dict[str, float] = {}
        for start in range(0, len(samples), size):
            batch = alignlm.collate(samples[start : start + size], options, context(text_encoder, 40))
            with torch.no_grad():
                sums = alignlm.loss(parts, tensors(batch), options)
            values = {**sums.terms, **{f"count {t}": torch.tensor(float(n)) for t, n in batch.targets.items()}}
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    assert whole(2) == pytest.approx(whole(9), rel=1e-9)


EMPTY = {
    "no sample": [],
    "all dropped": [(" ".join(ROOT_WORDS * 2), "david", "0-0")],
    "no link": [("david will not buy", "shitu vabipa zeibi naz", "")],
    "links": [("david will not buy", "shitu vabipa zeibi naz", "0-0 1-1 2-2 3-3")],
}


def test_an_idle_rank_touches_the_same_parameters(text_encoder: TextEncoder, parts: Parts) -> None:
    """Zero loss, zero targets and zero gradients, for exactly the parameters that a busy one has gradients for."""
    touched = {}
    for name, pairs in EMPTY.items():
        options = alignlm.Options(mask_prob=0.9)
        batch = alignlm.collate(examples_of(text_encoder, pairs), options, context(text_encoder, 16, "drop"))
        sums = alignlm.loss(parts, tensors(batch), options)
        found = gradients(sum(sums.terms.values()), parts.encoder, parts.heads)
        touched[name] = {p for p, g in found.items() if g is not None}
        assert list(batch.targets) == ["mono", "bi"]
        if name in ("no sample", "all dropped"):
            assert batch.targets == {"mono": 0, "bi": 0} and (batch.tokens, batch.sequences) == (0, 0)
            assert batch.too_long == len(pairs)
            assert not any(v.item() for v in sums.terms.values())
            assert not any(g.any() for g in found.values() if g is not None)
            assert not any(v.item() for v, _ in sums.metrics.values())
        else:
            assert batch.targets["mono"] > 0 and bool(batch.targets["bi"]) == (name == "links")
            assert bool(sums.terms["bi"]) == (name == "links")
    assert all(names == touched["links"] for names in touched.values())


# 3. The index


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_index_is_masked_tokens_and_rows_of_A(data: st.DataObject) -> None:
    places = data.draw(st.integers(2, 12))
    half = data.draw(st.integers(1, places - 1))
    cells = [(i, j) for i in range(half) for j in range(half, places)]
    links = np.array(sorted(data.draw(st.sets(st.sampled_from(cells)))), dtype=np.int64).reshape(-1, 2)
    masked = np.array(sorted(data.draw(st.sets(st.integers(0, places - 1)))), dtype=np.int64)
    A = np.zeros((places, places), dtype=int)
    for i, j in links.tolist():
        A[i, j] = A[j, i] = 1
    index = alignment.gather_index(links, masked, places)
    assert index["linked"].tolist() == [k for k, i in enumerate(masked) if A[i].any()]
    expected = [[i] for i in masked.tolist()] + [np.flatnonzero(A[i]).tolist() for i in masked if A[i].any()]
    rows = [index["gather_columns"][a:b].tolist() for a, b in pairwise(index["gather_offsets"])]
    assert rows == expected
    transposed = [index["gather_t_rows"][a:b].tolist() for a, b in pairwise(index["gather_t_offsets"])]
    assert transposed == [[r for r, row in enumerate(expected) if place in row] for place in range(places)]
    assert all(index[name].dtype == np.int32 for name in index if name != "linked")


def test_words_without_tokens_keep_their_number(text_encoder: TextEncoder) -> None:
    """A word that the tokenizer drops is still a word to whoever counted links: also the last one."""
    pairs = [("david \u200b will \u200b", "shitu vabipa", "2-0 3-1 1-1")]
    (sample,) = examples_of(text_encoder, pairs)
    assert max(sample[0].words[0]) == 2 and sample[0].word_counts == (4, 2)
    words = alignment.read_links(sample)
    layout = [[0, 1]]
    sequences = alignlm.join_segments(text_encoder, alignment.segments(sample, layout), {"en": 0, "xx": 1})
    tokens = alignment.word_tokens(sample, layout, sequences, words.first, "first")
    ids = [[int(sequences.ids[place]) for place in link] for link in alignment.token_links(words.links, tokens)]
    assert ids == [[text_encoder.encode(["will"])[0][0], text_encoder.encode(["shitu"])[0][0]]]


@pytest.mark.parametrize(
    ("links", "words"),
    [
        ("0-0 1-2", ["'1-2'", "2 and 2"]),
        ("2-1", ["'2-1'", "2 and 2", "0-based"]),
        ("0-0 99999999999999999999-0", ["'99999999999999999999-0'"]),
        ("0-0 1", ["'1'"]),
        ("0:0", ["'0:0'"]),
        ("0-0-1", ["'0-0-1'"]),
        ("-1-0", ["'-1-0'"]),
        ("0-0,1-1", ["'0-0,1-1'"]),
        (None, ["no word links", "--align"]),
    ],
)
def test_links_that_do_not_fit_name_the_record(text_encoder: TextEncoder, links: str | None, words: list[str]) -> None:
    pairs: Any = [("david will", "shitu vabipa", "0-0"), ("david will", "naz vij", links)]
    with pytest.raises(UserError) as caught:
        alignlm.collate(examples_of(text_encoder, pairs), alignlm.Options(), context(text_encoder))
    assert all(word in str(caught.value) for word in ("'r1'", *words)), caught.value


def test_links_between_words_that_were_cut_are_no_error(text_encoder: TextEncoder) -> None:
    long = " ".join(ROOT_WORDS[:12])
    (sample,) = examples_of(text_encoder, [(long, long, "11-11 0-0")])
    batch = alignlm.collate([sample], alignlm.Options(mask_prob=0.99), context(text_encoder, 16))
    assert batch.too_long == 1 and batch.targets["bi"] == 2 * len(text_encoder.encode(["david"])[0])


def test_options_are_checked() -> None:
    with pytest.raises(UserError, match="mask_prob"):
        alignlm.Options(mask_prob=1.0)
    with pytest.raises(UserError, match="bilingual_weight"):
        alignlm.Options(bilingual_weight=-1)


def test_gold_links_of_the_demo_corpus(demo: Path, text_encoder: TextEncoder) -> None:
    """From shards through the loader: what a masked word is predicted from are its gold translations."""
    (source,) = (source for source in find_sources([demo]) if source.kind == "pair")
    objective = alignlm.OBJECTIVE
    options = alignlm.Options(shuffle_sides=True)
    stream = StreamCollate(objective.collate, options, objective.words(options))
    dataset = StepDataset([source], {"alignlm": stream}, context(text_encoder), 5)
    specs = [StreamSpec("alignlm", (0,), 40, packed=False)]
    arguments: Any = {"seed": 5, "alpha": 0.7, "max_length": 128, "micro_batch": 20, "world": 1, "rank": 0}
    step = dataset[Mixture(specs, [source], [0.3], **arguments).next_step()]
    records = {record.key: record for record in (source.read(0, i) for i in range(source.shards[0].records))}
    seen = 0
    for batch in step.micros:
        m = batch.arrays["input_ids"].shape[1]
        original = batch.arrays["input_ids"].flatten()
        original[batch.arrays["rows"]] = batch.arrays["labels"]
        bags = list(pairwise(batch.arrays["gather_offsets"]))[len(batch.arrays["rows"]) :]
        for place, (a, b) in zip(batch.arrays["rows"][batch.arrays["linked"]], bags, strict=True):
            record = records[batch.keys[place // m]]
            texts = [side.split() for side in record.texts]
            token = text_encoder.backend.id_to_token(int(original[place])).removeprefix("##")
            partners = [text_encoder.backend.id_to_token(int(original[c])) for c in batch.arrays["gather_columns"][a:b]]
            links = [tuple(map(int, link.split("-"))) for link in record.links.split()]
            translations = [(texts[0][i], texts[1][j]) for i, j in links]
            fits = [y for x, y in translations if token in x] + [x for x, y in translations if token in y]
            assert all(any(partner.removeprefix("##") in word for word in fits) for partner in partners)
            assert {c // m for c in batch.arrays["gather_columns"][a:b].tolist()} == {place // m}
            seen += 1
        assert batch.targets["bi"] > 0.8 * batch.targets["mono"] > 0
    assert seen > 100
