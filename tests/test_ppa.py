"""PPA's momentum encoder and queue against python lists, and keys of its own against its equations, a sentence at a
time; tests/test_reference.py has the other equations."""

import copy
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import launch
from tests.plain import ids_of, part_of, sequences_of
from tests.rows import CPU, FILLER, OneStream, PlainEngine, assert_same_gradients, gradients, sums
from tests.rows import one_thread as one_thread
from xscale import export, rng
from xscale.checkpoint.restore import read_full_weights
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state
from xscale.data.packed_row import pack_row
from xscale.data.sequences import Example
from xscale.data.shards import find_sources
from xscale.data.stream_batch import CollateContext, StreamBatch
from xscale.data.tokenizer import Tokenizer
from xscale.errors import UserError
from xscale.eval.model import ExportedModel, read_texts
from xscale.eval.retrieval import retrieval_accuracies
from xscale.metric_keys import count_key, loss_key
from xscale.models.build import build_encoder
from xscale.models.encoder import Encoder
from xscale.models.momentum import MomentumEncoder, Queue
from xscale.objectives import HasQueue, Parts, ppa
from xscale.ranks import Process
from xscale.run import start as prefilling
from xscale.run.describe import notes_before_first_step
from xscale.step.engine import build_engine
from xscale.step.module import StepModule, Sums
from xscale.step.step import compute_row_loss, optimizer_step, precompute_and_gather_states

MAX_LENGTH = 32


def build(tokenizer: Tokenizer, **changes: Any) -> Encoder:
    defaults: dict[str, Any] = {
        "init": None, "preset": "tiny", "dropout": 0.0, "max_length": 64, "vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id, "languages": ["en", "xx"], "language_embeddings": False, "reset_positions": False,
        "seed": 1,
    }  # fmt: skip
    return build_encoder(**(defaults | changes))


def make_pairs(tokenizer: Tokenizer, n: int, seed: int = 0) -> list[Example]:
    """Pairs of 1 to 12 tokens a side, with random identities."""
    chance = np.random.default_rng(seed)

    def sentence() -> list[int]:
        return chance.choice(tokenizer.ordinary_ids, chance.integers(1, 13)).tolist()

    identities = rng.hash64(rng.key("test", seed), np.arange(n))
    return [Example(("en", "xx"), (sentence(), sentence()), None, identities[i], i) for i in range(n)]


def collate(tokenizer: Tokenizer, pairs: list[Example], options: ppa.PpaOptions) -> StreamBatch:
    context = CollateContext(tokenizer, MAX_LENGTH, "drop", {"en": 0, "xx": 1})
    return ppa.collate([[pair] for pair in pairs], options, context)


def read(moco: ppa.Moco, encoder: Encoder, stream_batch: StreamBatch) -> Tensor:
    """z of the key view of each pair."""
    row = pack_row({"s": stream_batch}, FILLER)
    return moco.encode(encoder, row.auxiliary["s"].to(CPU), [row.to(CPU).arrays["s"]])


def make_parts(
    tokenizer: Tokenizer, options: ppa.PpaOptions, dtype: torch.dtype = torch.float64, **changes: Any
) -> Parts:
    """Query and key differ, the queue holds 5 keys too few."""
    encoder = build(tokenizer, **changes).to(dtype).train()
    torch.manual_seed(3)
    heads = ppa.OBJECTIVE.heads(encoder, options)
    assert heads is not None
    moco = ppa.OBJECTIVE.auxiliary_state(encoder, heads.to(dtype), options)
    assert moco is not None
    with torch.no_grad():
        for parameter in [*encoder.parameters(), *heads.parameters()]:
            parameter += 0.05 * torch.randn_like(parameter)
    if options.queue_size > 5:
        keys = torch.randn(options.queue_size - 5, options.projection, dtype=torch.float64)
        moco.queue.push_and_zero_nonfinite(torch.nn.functional.normalize(keys, dim=-1), 0)
    return Parts(encoder, heads, moco)


# Equations


def plain_z(base: Any, w1: Tensor, w2: Tensor, tokenizer: Tokenizer, ids: list[int], options: ppa.PpaOptions) -> Tensor:
    hidden = base(input_ids=torch.tensor([[tokenizer.cls_id, *ids, tokenizer.sep_id]])).last_hidden_state[0]
    x = hidden[0] if options.pooling == "cls" else hidden[1:-1].mean(0)
    z = w2 @ torch.relu(w1 @ (x / x.square().sum().sqrt()))
    return z / z.square().sum().sqrt() if options.normalize_z else z


def plain_moco(
    parts: Parts,
    tokenizer: Tokenizer,
    views: list[tuple[list[int], list[int]]],
    options: ppa.PpaOptions,
    own: dict[int, set[int]] | None = None,
) -> Tensor:
    """Equations 2 and 3, one pair and one negative at a time. own: of a pair, which keys in the queue are its own."""
    moco = parts.auxiliary_state
    key_encoder, key_projection = moco.momentum.masters
    queue = moco.queue.ring_KD[: moco.queue.filled].double()
    total = torch.zeros((), dtype=torch.float64)
    for b, (query_ids, key_ids) in enumerate(views):
        query = parts.encoder.lm.base_model, parts.heads.w1.weight, parts.heads.w2.weight
        zq = plain_z(*query, tokenizer, query_ids, options)
        key = key_encoder.lm, key_projection.w1.weight, key_projection.w2.weight
        zk = plain_z(*key, tokenizer, key_ids, options).detach()
        positive = torch.exp(zq @ zk / options.temperature)
        negatives = [k for i, k in enumerate(queue) if i not in (own or {}).get(b, ())]
        total = total - torch.log(
            positive / (positive + sum(torch.exp(zq @ k / options.temperature) for k in negatives))
        )
    return total


def queries_of(stream_batch: StreamBatch) -> list[list[int]]:
    """The query views, which stand behind the sequences of words."""
    n = len(stream_batch.sequences.lengths)
    return ids_of(part_of(stream_batch.sequences, n - stream_batch.states["query"].state_count, n))


def test_overlong_pairs_are_dropped_from_both_terms(tokenizer: Tokenizer) -> None:
    options = ppa.PpaOptions(queue_size=9)
    pairs = make_pairs(tokenizer, 3)
    pairs[1] = replace(pairs[1], ids=([7] * 20, [8] * 20))
    stream_batch = collate(tokenizer, pairs, options)
    assert stream_batch.target_counts["moco"] == 2 and stream_batch.samples == 2
    assert stream_batch.arrays["number"].tolist() == [0, 2] and len(stream_batch.sequences.lengths) == 4
    assert stream_batch.auxiliary is not None and len(stream_batch.auxiliary.sequences.lengths) == 2


# Negatives and measures


def test_a_pairs_own_keys_are_no_negatives(tokenizer: Tokenizer) -> None:
    """Keys of pairs that have a text in common with the anchor's, by brute force over the texts: the same pair earlier,
    whichever way round, the same sentence with another translation; wherever they lie in the queue."""
    options = ppa.PpaOptions(queue_size=23, tlm_weight=0.0)
    parts = make_parts(tokenizer, options)
    parts.auxiliary_state.queue = Queue(23, options.projection)
    pairs = make_pairs(tokenizer, 6)
    (a, b), (c, d), (e, f) = (pairs[i].ids for i in (0, 2, 5))
    earlier = [(a, b), (b, a), (c, e), ([*a[:-1], 99], d), (f, f), (c[::-1], [7]), ([*a, 99], [8]), ([9], c)]
    earlier = [replace(x, ids=texts) for x, texts in zip(make_pairs(tokenizer, 8, seed=7), earlier, strict=True)]
    for cut in (earlier[:3], earlier[3:]):
        read(parts.auxiliary_state, parts.encoder, collate(tokenizer, cut, options))
        parts.auxiliary_state.update(False)
    stream_batch = collate(tokenizer, pairs, options)
    found = sums("ppa", parts, stream_batch, options)
    own = {
        i: {k for k, other in enumerate(earlier) if {tuple(t) for t in pair.ids} & {tuple(t) for t in other.ids}}
        for i, pair in enumerate(pairs)
    }
    assert own == {0: {0, 1}, 1: set(), 2: {2, 3, 7}, 3: set(), 4: set(), 5: {2, 4}}
    assert stream_batch.auxiliary is not None
    both = zip(queries_of(stream_batch), ids_of(stream_batch.auxiliary.sequences), strict=True)
    views = [(query[1:-1], key[1:-1]) for query, key in both]
    expected = plain_moco(parts, tokenizer, views, options, own)
    torch.testing.assert_close(found.terms["moco"], expected, rtol=1e-9, atol=0)
    assert found.metrics["own_keys"] == (7, "moco")
    ages = 3 * [2] + 5 * [1]  # at step 2 of what the first two steps wrote
    assert found.metrics["queue_age"] == (pytest.approx(6 * sum(ages) / 8), "moco")
    modules = (parts.encoder, parts.heads)
    assert_same_gradients(gradients(found.terms["moco"], *modules), gradients(expected, *modules))
    assert abs(expected - plain_moco(parts, tokenizer, views, options)) > 1e-4

    state = copy.deepcopy(parts.auxiliary_state.queue.state_dict())
    fresh = Queue(23, options.projection)
    fresh.load_state_dict(state)
    assert (
        torch.equal(fresh.stored_text_hashes, parts.auxiliary_state.queue.stored_text_hashes)
        and fresh.stored_text_hashes.all()
    )


def test_measures_among_the_keys_of_the_step(tokenizer: Tokenizer) -> None:
    """Pair by pair, in plain PyTorch: another key of the step that is nearer than the own one, unless it is of the same
    sentence; the mean cosine of two different sentences. The same in one row and in three."""
    options = ppa.PpaOptions(queue_size=23, tlm_weight=0.0, pooling="mean")
    parts, pairs = make_parts(tokenizer, options), make_pairs(tokenizer, 9)
    parts.auxiliary_state.momentum.update(0.3)  # the two encoders are near each other then
    pairs = [replace(pair, ids=(pair.ids[0], [*pair.ids[0], 50 + pair.sample_number])) for pair in pairs]  # alike
    pairs[4] = replace(pairs[4], ids=pairs[1].ids[::-1])
    pairs[7] = replace(pairs[7], ids=(pairs[2].ids[0], pairs[7].ids[1]))
    stream_batch = collate(tokenizer, pairs, options)
    assert stream_batch.auxiliary is not None
    key_encoder, key_projection = parts.auxiliary_state.momentum.masters
    of_query = parts.encoder.lm.base_model, parts.heads.w1.weight, parts.heads.w2.weight
    of_key = key_encoder.lm, key_projection.w1.weight, key_projection.w2.weight
    zq = [plain_z(*of_query, tokenizer, ids[1:-1], options) for ids in queries_of(stream_batch)]
    zk = [plain_z(*of_key, tokenizer, ids[1:-1], options) for ids in ids_of(stream_batch.auxiliary.sequences)]
    texts = [{tuple(text) for text in pair.ids} for pair in pairs]
    right = sum(all(zq[i] @ zk[i] > zq[i] @ zk[j] for j in range(9) if not texts[i] & texts[j]) for i in range(9))
    strict = sum(all(zq[i] @ zk[i] > zq[i] @ zk[j] for j in range(9) if j != i) for i in range(9))
    cosine = sum(float(zk[i] @ zk[j]) for i in range(9) for j in range(9) if i != j) / (9 * 8)
    assert 0 < strict < right < 9, "the case tells them apart"
    for cuts in ([pairs], [pairs[5:6], pairs[:5], pairs[6:]]):
        module = OneStream("ppa", parts, options)
        rows = [pack_row({"s": collate(tokenizer, cut, options)}, FILLER).to(CPU) for cut in cuts]
        sums_of_rows = []
        for row, shared in zip(rows, precompute_and_gather_states(module, rows, [(0,)] * len(rows)), strict=True):
            sums_of_rows.append(compute_row_loss(module, row, shared, {loss_key("s", "moco"): 1.0}, (0,))[1])
        found = {key.name: value for key, value in Sums.add_rows(sums_of_rows).by_key().items()}
        assert found["contrastive_accuracy_step"] == right
        assert found["sentence_cosine"] / 9 == pytest.approx(cosine, rel=1e-9)
        parts.auxiliary_state.step_keys = None


def test_mlm_in_place_of_tlm_masks_sides_independently(tokenizer: Tokenizer) -> None:
    """Two equal sides of a pair are masked at different places; the order of sides is that of TLM."""
    options = ppa.PpaOptions(replace_tlm_with_mlm=True, mask_prob=0.5, moco_weight=0.0)
    same = [replace(pair, ids=([*range(10, 30)], [*range(10, 30)])) for pair in make_pairs(tokenizer, 4)]
    context = CollateContext(tokenizer, 64, "drop", {"en": 0, "xx": 1})
    _, targets = sequences_of(ppa.collate([[pair] for pair in same], options, context))
    assert len(targets) == 8
    assert all(targets[2 * i].keys() != targets[2 * i + 1].keys() for i in range(4))
    assert ppa.term_weights(options) == {"mlm": 1.0}


# Queue


@pytest.mark.parametrize("size", [1, 2, 7, 32, 50])
def test_queue_is_a_list_that_forgets(size: int) -> None:
    """Pushes of 0 to 2 K vectors at any K: the newest K of them, oldest first from `next` on, with their steps."""
    chance, queue = random.Random(size), Queue(size, 3)
    plain: list[tuple[list[float], int]] = []
    for step in range(40):
        keys = torch.randn(chance.randint(0, size if step % 5 else 2 * size), 3)
        queue.push_and_zero_nonfinite(keys, step)
        plain = [*plain, *((key.tolist(), step) for key in keys)][-size:]
        start = queue.next if queue.filled == size else 0
        order = [(start + i) % size for i in range(queue.filled)]
        assert [(queue.ring_KD[i].tolist(), int(queue.born_K[i])) for i in order] == plain
        assert len(queue.stored_keys) == len(plain)
        age = sum(41 - born for _, born in plain) / max(len(plain), 1)
        assert float(queue.mean_age_in_steps(41)) == pytest.approx(age)


def test_keys_that_are_not_finite_do_not_poison_the_queue() -> None:
    queue = Queue(4, 2)
    queue.push_and_zero_nonfinite(torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [3.0, -float("inf")]]), 1)
    assert queue.stored_keys.tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]


def test_keys_enter_in_global_order(tokenizer: Tokenizer) -> None:
    """Row i of the step's keys is the key of pair number i, by the key encoder of before the update."""
    options = ppa.PpaOptions(queue_size=23, projection=7, prefill=False)
    parts, pairs = make_parts(tokenizer, options, torch.float32), make_pairs(tokenizer, 8)
    moco = parts.auxiliary_state
    whole = read(moco, parts.encoder, collate(tokenizer, pairs, options))
    moco.gather_new_vectors(None)
    assert torch.equal(moco.step_keys[0], whole)
    for cut in ([5, 2, 7], [0], [6, 1, 3, 4]):
        read(moco, parts.encoder, collate(tokenizer, [pairs[i] for i in cut], options))
    start = moco.queue.next
    moco.update(True)
    rows = [(start + i) % 23 for i in range(8)]
    torch.testing.assert_close(moco.queue.ring_KD[rows], whole, rtol=0, atol=1e-6)
    assert moco.queue.born_K[rows].tolist() == [1] * 8
    assert (read(moco, parts.encoder, collate(tokenizer, pairs, options)) - whole).abs().max() > 1e-5


# Momentum encoder


def test_the_momentum_rises_over_the_run(demo: Path) -> None:
    """Of a step's number and the run's alone: through skipped steps, after a resume, and with a longer schedule."""
    ramp = ["streams.ppa.momentum=0.5", "streams.ppa.momentum_ramp=0.9", "streams.ppa.prefill=false"]
    loader = make_job(demo, "train.steps=5", *ramp)
    rising = [0.9 - 0.4 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(5)]
    assert rising[0] == 0.5 and rising[2] == pytest.approx(0.7) and rising[4] == 0.9
    module, query = StepModule(launch.encoder(loader), loader.recipe), None
    moco = module.auxiliary_states["ppa"]
    for step, m in enumerate(rising):
        before = [k.clone() for k in moco.momentum.masters.parameters()]
        with torch.no_grad():
            for q in moco.momentum.query.parameters():
                q += 0.1 * torch.randn_like(q)
        query = [q.detach().clone() for q in moco.momentum.query.parameters()]
        moco.update(step != 1)
        for k, was, q in zip(moco.momentum.masters.parameters(), before, query, strict=True):
            torch.testing.assert_close(k, was if step == 1 else m * was + (1 - m) * q, rtol=1e-5, atol=1e-6)
        if step == 2:  # a fresh companion goes on, as after a resume
            fresh = StepModule(launch.encoder(loader), loader.recipe).auxiliary_states["ppa"]
            fresh.load_state_dict(moco.state_dict())
            fresh.momentum.query = moco.momentum.query
            moco = fresh
    assert moco.options.momentum_at(9, 5) == 0.9 and moco.options.momentum_at(4, 9) == pytest.approx(0.7)
    assert ppa.PpaOptions(momentum=0.3).momentum_at(2, 5) == 0.3
    with pytest.raises(UserError, match=r"momentum_ramp: 0\.4 is below momentum: 0\.5\. Set momentum_ramp"):
        make_job(demo, *ramp, "streams.ppa.momentum_ramp=0.4")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_are_fp32_where_the_query_is_not(tokenizer: Tokenizer, dtype: torch.dtype) -> None:
    """With m = 0.999 an fp16 weight would never move; fp32 masters go where the equation says."""
    encoder = build(tokenizer)
    key = MomentumEncoder(encoder, torch.nn.Identity())
    encoder.to(dtype)
    cast, _ = key.prepare_key_modules(with_dropout=True)
    assert {p.dtype for p in cast.parameters()} == {dtype}
    assert {p.dtype for p in key.masters.parameters()} == {torch.float32}
    before = [k.double().clone() for k in key.masters.parameters()]
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += 0.02
    for _ in range(100):
        key.update(0.999)
    query = list(encoder.lm.base_model.parameters())
    for k, start, q in zip(key.masters.parameters(), before, query, strict=True):
        expected = q.double() + 0.999**100 * (start - q.double())
        torch.testing.assert_close(k.double(), expected, rtol=1e-5, atol=1e-6)
        assert ((k.double() - start).abs() > 1e-4).all()
    again, _ = key.prepare_key_modules(with_dropout=True)
    assert again is cast
    assert all(torch.equal(c, k.to(dtype)) for c, k in zip(cast.parameters(), key.masters.parameters(), strict=True))


def test_key_encoder_has_the_querys_dropout(tokenizer: Tokenizer) -> None:
    """Or none, with momentum_eval; the same seed gives the same keys."""
    pairs = make_pairs(tokenizer, 3)
    for options, expected in [
        (ppa.PpaOptions(queue_size=9), False),
        (ppa.PpaOptions(queue_size=9, momentum_eval=True), True),
    ]:
        parts = make_parts(tokenizer, options, torch.float32, dropout=0.3)
        stream_batch, keys = collate(tokenizer, pairs, options), []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            keys.append(read(parts.auxiliary_state, parts.encoder, stream_batch))
        assert torch.equal(keys[0], keys[1])
        assert torch.equal(keys[0], keys[2]) == expected


# The optimizer step


SETS = [
    "model.dropout=0.0", "streams.ppa.samples=7", "streams.ppa.queue_size=17", "streams.ppa.momentum=0.9",
    "streams.ppa.momentum_ramp=null", "streams.ppa.projection=20", "data.max_length=48", "train.max_tokens=64",
    "data.workers=0",
]  # fmt: skip


def make_job(demo: Path, *sets: str) -> Loader:
    recipe = ["--ds_config", "x.json", "--recipe", "ppa", "--data", str(demo / "pairs")]
    return launch.loader_of([*recipe, "--set", *SETS, *sets], measured=False)


def prefill_queues(engine: PlainEngine, loader: Loader, process: Process) -> list[str]:
    """Fill the queues. Returns what the run would tell the watch, which ends a run without progress."""
    notes = list[str]()
    prefilling.prefill_queues(engine.module, loader, process, torch.device("cpu"), notes.append)
    return notes


def run_steps(loader: Loader, steps: int, skip: set[int], check: Any) -> None:
    """Prefill and some steps of the recipe."""
    process = Process(0, 1, 0, 1)
    engine = PlainEngine(StepModule(launch.encoder(loader), loader.recipe), skip)
    moco = engine.module.auxiliary_states["ppa"]
    prefill_queues(engine, loader, process)
    for batch in loader.batches(process, "cpu", initial_state(loader.last_streams), steps):
        before = copy.deepcopy(moco.state_dict())
        totals = {count_key("ppa", "moco"): 7, count_key("ppa", "tlm"): 50}
        result = optimizer_step(engine, loader.recipe, batch.rows, totals, step=batch.step, rank=0, world=1)
        check(batch, before, engine)
    assert {"contrastive_accuracy_step", "sentence_cosine"} <= {key.name for key in result.sums.keys}


def test_momentum_moves_once_per_applied_step(demo: Path) -> None:
    """Several rows and one update; a skipped step enqueues its keys and leaves both encoders as they are."""
    applied = []

    def check(batch: Any, before: dict, engine: PlainEngine) -> None:
        moco: Any = engine.module.auxiliary_states["ppa"]
        projection = engine.module.heads["ppa"]
        query = [*engine.module.encoder.lm.base_model.parameters(), *projection.parameters()]
        old = list(before["momentum"].values())
        skipped = batch.step in (1, 3)
        for k, was, q in zip(moco.momentum.masters.parameters(), old, query, strict=True):
            expected = was if skipped else (0.9 * was.double() + 0.1 * q.double()).float()
            torch.testing.assert_close(k, expected, rtol=0, atol=0 if skipped else 3e-7)
        assert len(batch.rows) >= 3 and moco.step == batch.step + 1
        new = (moco.queue.born_K == batch.step + 1).sum()
        assert new == 7 and moco.queue.filled == 17
        assert moco.queue.next == (before["queue"]["next"] + 7) % 17
        applied.append(not skipped)

    run_steps(make_job(demo), 5, {1, 3}, check)
    assert applied == [True, False, True, False, True]


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_prefill_fills_the_queue_and_uses_up_nothing(demo: Path, pooling: str) -> None:
    """K keys of the key encoder, of records in another order than the stream's, before the state at step 0."""
    loader, place = make_job(demo, f"streams.ppa.pooling={pooling}"), Process(0, 1, 0, 1)
    engine = PlainEngine(StepModule(launch.encoder(loader), loader.recipe))
    moco: Any = engine.module.auxiliary_states["ppa"]
    assert isinstance(moco, HasQueue) and moco.prefill_samples == 17
    notes = prefill_queues(engine, loader, place)
    note = "filling the queue of streams.ppa, which has {} of 17 sentence vectors"
    assert notes == [note.format(7), note.format(14)], "after each batch of 7 keys, but for the last"
    prefill_loader = prefilling.make_loader_for_prefill(loader, loader.last_streams[0])
    filling, stream = (
        [
            key
            for batch in of.batches(place, "cpu", initial_state(of.last_streams), 3)
            for key in batch.record_keys[of.last_streams[0].name]
        ]
        for of in (prefill_loader, loader)
    )
    assert len(set(filling)) == 21 and len(set(filling) & set(stream)) < 7
    expected, plain = [], []
    key_encoder, projection = moco.momentum.masters
    key = key_encoder.lm, projection.w1.weight, projection.w2.weight
    for batch in prefill_loader.batches(place, "cpu", initial_state(prefill_loader.last_streams), 3):
        for row in batch.rows:
            keys = row.auxiliary["ppa.prefill"].to(CPU)
            tokens = keys.tokens
            moco.encode(engine.module.encoder, keys, [row.to(CPU).arrays["ppa.prefill"]])
            for ids in tokens.input_ids.split(tokens.lengths.tolist()):
                plain.append(plain_z(*key, loader.corpus.tokenizer, ids[1:-1].tolist(), moco.options).tolist())
        moco.gather_new_vectors(None)
        expected += moco.step_keys[0].tolist()
    torch.testing.assert_close(torch.tensor(sorted(expected)), torch.tensor(sorted(plain)), rtol=0, atol=1e-6)
    order = [(moco.queue.next + i) % 17 for i in range(17)]
    torch.testing.assert_close(moco.queue.ring_KD[order], torch.tensor(expected[-17:]), rtol=0, atol=1e-6)
    assert moco.queue.filled == 17 and moco.queue.born_K.tolist() == [0] * 17 and moco.step == 0
    torch.testing.assert_close(moco.queue.ring_KD.norm(dim=1), torch.ones(17))


def test_no_prefill_where_not_wanted(demo: Path) -> None:
    """The queue starts empty, the first loss is log 1."""
    loader = make_job(demo, "streams.ppa.prefill=false")

    def check(batch: Any, before: dict, engine: PlainEngine) -> None:
        assert before["queue"]["filled"] == min(7 * batch.step, 17)

    run_steps(loader, 3, set(), check)


def test_training_mode_whatever_the_weights_came_from(demo: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """from_pretrained gives a model in eval mode; post-pretraining needs its dropout, and that of the key encoder."""
    build(tokenizer).lm.save_pretrained(tmp_path)
    loader = make_job(demo, f"model.init={tmp_path}")
    module = StepModule(launch.encoder(loader), loader.recipe)
    assert all(part.training for part in module.modules())
    for train in (True, False, True):
        keys, _ = module.auxiliary_states["ppa"].momentum.prepare_key_modules(train)
        assert {part.training for part in keys.modules()} == {train}


# What users may get wrong


def test_queue_smaller_than_a_step_is_refused(demo: Path) -> None:
    with pytest.raises(UserError, match=r"streams\.ppa\.queue_size: 6.*Raise queue_size to 7"):
        make_job(demo, "streams.ppa.queue_size=6")
    make_job(demo, "streams.ppa.queue_size=6", "streams.ppa.moco_weight=0")


def test_zero_stage_3_is_refused(demo: Path) -> None:
    loader = make_job(demo)
    with pytest.raises(UserError, match="ZeRO stage 3"):
        build_engine(StepModule(launch.encoder(loader), loader.recipe), {"zero_optimization": {"stage": 3}})


# A whole run


@pytest.mark.slow
def test_contrast_learns_from_random_weights(demo: Path, tmp_path: Path) -> None:
    """The shipped ablation without TLM, with twice the records as queue, finds translations that it
    never saw among keys of one age, by transformers and equation 2: not the younger key, but the sentence."""
    out, sets = tmp_path / "run", ["streams.ppa.samples=64", "streams.ppa.queue_size=1200", "data.workers=0"]
    common = ["--ds_config", "ds_configs/zero2_cpu.json", "--recipe", "ppa_no_tlm", "--data", str(demo / "pairs")]
    launch.run(1, [*common, "--out", str(out), "--steps", "150", "--set", *sets])
    logged = [entry["contrastive_accuracy/ppa"] for entry in launch.metrics(out)[-20:]]
    assert sum(logged) / 20 > 0.5
    assert "hardly differ" not in (out / "run.log").read_text()
    export.export_and_return_checkpoint(out, tmp_path / "hf")
    assert not (tmp_path / "hf" / "companions.pt").exists()
    model, (source,) = ExportedModel(tmp_path / "hf"), find_sources([demo / "heldout"])
    weights = read_full_weights(out / "checkpoints" / "step_00000150")
    w1, w2, texts = weights["heads.ppa.w1.weight"], weights["heads.ppa.w2.weight"], read_texts(source, 200)

    def z_of(side: int) -> Tensor:
        base = model.encoder.lm.base_model
        sentences = model.tokenizer.encode([pair[side] for pair in texts])
        with torch.no_grad():
            return torch.stack([plain_z(base, w1, w2, model.tokenizer, ids, ppa.PpaOptions()) for ids in sentences])

    assert retrieval_accuracies(z_of(0), z_of(1), "cosine", ("en", "xx"))["accuracy"] > 0.15


def test_advice(demo: Path) -> None:
    loader = make_job(demo, "train.steps=400", "streams.ppa.momentum=0.999")
    notes = "\n".join(notes_before_first_step(loader.recipe, loader.corpus))
    assert "streams.ppa.momentum: 0.999 is too large" in notes and "1,000 steps" in notes
    loader = make_job(demo, "train.steps=400", "streams.ppa.momentum=0.99", "streams.ppa.queue_size=99")
    advised = notes_before_first_step(loader.recipe, loader.corpus)
    assert not any("streams.ppa" in line for line in advised)
    assert ppa.momentum_too_large_warnings(
        ppa.PpaOptions(momentum=0.96), 600, 40
    ) and not ppa.momentum_too_large_warnings(ppa.PpaOptions(momentum=0.95), 600, 40), (
        "the advice to lower it ends at 0.95"
    )
