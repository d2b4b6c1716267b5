"""The central proof: in fp64 a step through rows equals a plain padded PyTorch reference that knows nothing of them."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, DistilBertConfig, ModernBertConfig, XLMRobertaConfig

from tests import launch, plain
from tests.rows import CPU, PlainEngine, assert_same_gradients, one_thread, pass_row, rows_of_step, shared_of, totals_of  # noqa: F401
from xscale.data.loader import Loader
from xscale.data.mixture import initial_state
from xscale.data.packed_row import Row, pack_row
from xscale.data.sequences import Example
from xscale.data.stream_batch import StreamBatch
from xscale.metric_keys import MetricKey, loss_key
from xscale.ranks import Process
from xscale.recipe import RECIPES
from xscale.step import step
from xscale.step.metrics import stream_metrics
from xscale.step.module import StepModule, Sums
from xscale.step.step import compute_row_loss, optimizer_step, weights_of_term_sums

SMALL = ["model.dropout=0.0", "data.max_length=32", "data.workers=0"]
"""For every recipe."""
PPA = ["streams.ppa.samples=7", "streams.ppa.mask_prob=0.3"]
MOCO = [*PPA, "streams.ppa.queue_size=11", "streams.ppa.projection=20"]
SIZES = {
    "align_mlm": ["streams.align_mlm.samples=6"],
    "alignlm": ["streams.alignlm.samples=9", "data.overlong=truncate"],
    "contextual": ["streams.contextual.samples=7", "streams.contextual.anchor_weight=0.7"],
    "dict_mlm": ["streams.dict_mlm.samples=6", "train.label_smoothing=0.1"],
    "mixed": [
        "streams.mlm.samples=3", "streams.tlm.samples=4", "streams.tlm.warm_in=4", "streams.alignlm.samples=5",
        "streams.alignlm.weight=2.5", "streams.ppa.samples=3", "streams.ppa.queue_size=9",
        "streams.word_contrast.samples=2", "streams.word_contrast.weight=0.5",
        "streams.align_mlm.samples=1", "streams.align_mlm.pairs_per_step=50", "train.z_loss=0.001",
    ],
    "mlm": ["streams.mlm.samples=7", "train.z_loss=0.01"],
    "ppa": [*MOCO, "streams.ppa.moco_weight=0.3"],
    "ppa_mlm": MOCO,
    "ppa_no_moco": PPA,
    "ppa_no_tlm": [*MOCO, "streams.ppa.samples=11"],
    "ranking": ["streams.translation_ranking.samples=7"],
    "tlm": ["streams.tlm.samples=11", "data.overlong=truncate"],
    "xlm": [
        *("streams.mlm.samples=5", "streams.tlm.samples=6", "streams.tlm.weight=0.3", "streams.tlm.whole_word=true"),
        *("streams.mlm.language_embeddings=true", "streams.tlm.language_embeddings=true"),  # as paper/tang_xlm
        *("streams.tlm.reset_positions=true", "streams.tlm.language_dropout=0.5"),
    ],
    "word_contrast": ["streams.word_contrast.samples=7"],
}  # fmt: skip
"""Of each shipped recipe."""
BERT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
DISTIL = {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 48}
MODERN = ["full_attention", "sliding_attention", "sliding_attention"]
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "xlm": (XLMRobertaConfig, BERT | {"max_position_embeddings": 40, "type_vocab_size": 1}),
    "mixed": (ModernBertConfig, BERT | {"local_attention": 8, "layer_types": MODERN}),
    "ppa": (DistilBertConfig, DISTIL | {"max_position_embeddings": 40}),
    "align_mlm": (XLMRobertaConfig, BERT | {"max_position_embeddings": 40, "tie_word_embeddings": False}),
}
"""Models of other types than BERT, for some recipes."""
OTHER_OPTIONS: list[tuple[str, list[str]]] = [
    ("alignlm", ["alignlm.expand=first", "alignlm.mask_prob=0.6"]),
    ("alignlm", ["alignlm.normalize=mean", "alignlm.bilingual_weight=0.3", "alignlm.shuffle_sides=true"]),
    ("alignlm", ["alignlm.expand=first", "alignlm.normalize=mean", "alignlm.mask_prob=0.8"]),
    ("contextual", ["contextual.anchor=xx", "contextual.languages=[en-xx]"]),
    ("contextual", ["contextual.anchor=null"]),
    ("align_mlm", ["align_mlm.subwords=single", "align_mlm.alpha=7"]),
    ("ppa", ["ppa.normalize_z=false"]),
    ("ranking", ["translation_ranking.pooling=cls", "translation_ranking.margin=0.1"]),
    ("word_contrast", ["word_contrast.temperature=0.5"]),
    ("ppa", ["ppa.pooling=mean", "ppa.temperature=0.5", "ppa.tlm_weight=0.7"]),
]
CUTS = {"one row": (1, 4096), "four ranks": (4, 64)}
"""(ranks, train.max_tokens)"""


def resolve_run(demo: Path, recipe: str, *sets: str) -> Loader:
    arguments = ["--ds_config", "x.json", "--recipe", recipe, "--data", str(demo)]
    return launch.loader_of([*arguments, "--set", *SMALL, *SIZES[recipe], *sets], measured=False)


def make_module(loader: Loader, dtype: torch.dtype = torch.float64) -> StepModule:
    """Companions and trained weights have moved apart, the queue holds some keys."""
    module = StepModule(launch.encoder(loader), loader.recipe).to(dtype)
    torch.manual_seed(5)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    for auxiliary_state in module.auxiliary_states.values():
        if hasattr(auxiliary_state, "queue"):
            size, width = auxiliary_state.queue.ring_KD.shape
            auxiliary_state.queue.push_and_zero_nonfinite(
                nn.functional.normalize(torch.randn(size - 4, width), dim=-1), 0
            )
    return module


# The reference


@dataclass(frozen=True)
class Case:
    loader: Loader
    module: StepModule
    model: plain.Model
    stream_batches: dict[str, StreamBatch]
    """The whole first step."""
    terms: dict[str, dict[str, plain.Term]]
    loss: Tensor
    gradients: dict[str, Tensor]
    """Of the parameters that the loss depends on."""


def make_case(loader: Loader) -> Case:
    module = make_module(loader)
    stream_batches, examples = samples_of(loader)
    model = plain_model(module, loader)
    terms = {
        name: plain.terms(
            stream.objective, model, name, stream_batches[name], examples[name], stream.options, loader.corpus.tokenizer
        )
        for name, stream in loader.recipe.streams.items()
    }
    shares = []
    for name, found in terms.items():
        stream = loader.recipe.streams[name]
        rising = 1 / stream.warm_in if stream.warm_in else 1.0
        shares += [stream.weight * rising * term.factor * term.mean for term in found.values()]
    loss: Any = sum(shares)
    names, parameters = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    kept = {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}
    return Case(loader, module, model, stream_batches, terms, loss.detach(), kept)


def plain_model(module: StepModule, loader: Loader) -> plain.Model:
    frozen: dict[str, Any] = {}
    queue = None
    for stream, auxiliary_state in module.auxiliary_states.items():
        if hasattr(auxiliary_state, "queue"):
            encoder, projection = copy.deepcopy(auxiliary_state.momentum.masters).double().train()
            frozen[stream] = encoder.lm, projection.w1.weight, projection.w2.weight
            queue = auxiliary_state.queue.stored_keys.clone()
        else:
            frozen[stream] = copy.deepcopy(auxiliary_state.initial.lm).double()
    entropy = plain.CrossEntropy(loader.recipe.train.label_smoothing, loader.recipe.train.z_loss)
    return plain.Model(module.encoder.lm, dict(module.heads.items()), frozen, queue, entropy)


def samples_of(loader: Loader) -> tuple[dict[str, StreamBatch], dict[str, list[Example]]]:
    """The first step as one piece of each stream, and its records."""
    (stream_batches,) = launch.pieces_of(loader, 1)
    mixture = loader.mixture(Process(0, 1, 0, 1), "cpu", initial_state(loader.last_streams))
    mixture.max_tokens = 1 << 40
    dataset, plan = loader.dataset(), mixture.next_plan_of_rank()
    examples = {}
    for stream in loader.last_streams:
        examples[stream.name] = dataset.read_and_tokenise(stream, plan)
    return stream_batches, examples


@pytest.fixture(scope="module")
def case(demo: Path, request: pytest.FixtureRequest) -> Case:
    return make_case(resolve_run(demo, request.param))


# 1. A step


def through_rows(case: Case, ranks: list[list[Row]]) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Loss, gradients and metrics of the first step: rows of all ranks, by the targets of all."""
    module, recipe = case.module, case.loader.recipe
    totals = totals_of([row for rows in ranks for row in rows])
    weights = weights_of_term_sums(recipe, totals, 0)
    module.zero_grad()
    loss = torch.zeros(()).double()
    sums_of_rows = []
    rows = [row.to(CPU) for rows in ranks for row in rows]
    seeds: list[step.Seed] = [(0, number) for number in range(len(rows))]
    for row, shared, seed in zip(rows, shared_of(module, rows, seeds), seeds, strict=True):
        row_loss, sums = compute_row_loss(module, row, shared, weights, seed)
        row_loss.backward()
        loss += row_loss.detach()
        sums_of_rows.append(sums)
    shares = stream_metrics(Sums.add_rows(sums_of_rows).by_key(), totals, recipe)
    return loss, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}, shares


def assert_equal_the_reference(case: Case, ranks: list[list[Row]], rtol: float = 1e-9) -> None:
    loss, gradients, shares = through_rows(case, ranks)
    torch.testing.assert_close(loss, case.loss, rtol=rtol, atol=0)
    predicts = any(row.label_counts for rows in ranks for row in rows)
    every = dict(case.module.named_parameters()).keys()
    if not case.module.encoder.lm.config.tie_word_embeddings:
        every -= {"encoder.lm.lm_head.bias"}  # Hugging Face's, used by nothing
    assert gradients.keys() == (every if predicts else case.gradients.keys())
    assert_same_gradients(gradients, case.gradients, rtol)
    for name, value in expected_metrics(case).items():
        assert shares[name] == pytest.approx(value, rel=rtol), name
    for stream, auxiliary_state in case.module.auxiliary_states.items():
        if hasattr(auxiliary_state, "queue"):
            options = case.loader.recipe.streams[stream].options
            _, keys = plain.views(case.model, stream, case.stream_batches[stream], options)
            auxiliary_state.gather_new_vectors(None)
            torch.testing.assert_close(auxiliary_state.step_keys[0], keys, rtol=0, atol=rtol)


def expected_metrics(case: Case) -> dict[str, float]:
    named = {}
    for name, found in case.terms.items():
        means = {term: float(t.mean.detach()) for term, t in found.items()}
        named[f"loss/{name}"] = sum(found[term].factor * mean for term, mean in means.items())
        named |= {f"loss/{name}.{term}": mean for term, mean in means.items() if len(found) > 1}
        objective = case.loader.recipe.streams[name].objective
        if objective == "contextual":
            continue
        if "align" in found:
            named[f"dictionary_cosine/{name}"] = -means["align"]
        if "bi" in found:
            named[f"bilingual_coverage/{name}"] = found["bi"].targets / found["mono"].targets
        accuracies = {"bi": "bilingual_accuracy"} | dict.fromkeys(("moco", "ranking", "words"), "contrastive_accuracy")
        named |= {
            f"{accuracies.get(term, 'accuracy')}/{name}": t.right / t.targets
            for term, t in found.items()
            if term != "align"
        }
    return named


def test_every_recipe_is_here() -> None:
    plans = {"phases"}  # its objective is that of mlm; tests/test_phases.py has its steps
    assert sorted(SIZES) == sorted({path.stem for path in RECIPES.glob("*.yaml")} - plans)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("case", SIZES, indirect=True)
def test_a_step_is_the_reference(case: Case, cut: str) -> None:
    """Loss, metrics, keys and the gradient of every parameter, to 1e-9 of its norm."""
    world, max_tokens = CUTS[cut]
    (ranks,) = rows_of_step(case.loader, world, max_tokens)
    assert len(ranks) == world and (cut == "one row") == (len(ranks) == len(ranks[0]) == 1)
    assert_equal_the_reference(case, ranks)


@pytest.mark.parametrize(("recipe", "options"), OTHER_OPTIONS)
def test_other_options(demo: Path, recipe: str, options: list[str]) -> None:
    """Sequences of up to 20 tokens, so that pairs are cut, but for PPA, which drops these."""
    sets = [f"streams.{option}" for option in options]
    sets += ["data.max_length=20", "data.overlong=truncate"] * (recipe != "ppa")
    case = make_case(resolve_run(demo, recipe, *sets))
    (ranks,) = rows_of_step(case.loader, 2, 100)
    assert_equal_the_reference(case, ranks)


@pytest.mark.parametrize("recipe", KINDS)
def test_models_of_other_types(demo: Path, tmp_path: Path, tokenizer: Any, recipe: str) -> None:
    """Positions that do not begin at 0, rotary ones and local attention, and a type without a flat pass."""
    torch.manual_seed(0)
    make, shape = KINDS[recipe]
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"))
    config = make(**shape, **special, vocab_size=tokenizer.vocab_size, pad_token_id=tokenizer.pad_id)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    case = make_case(resolve_run(demo, recipe, f"model.init={tmp_path}", "train.lr=0.001"))
    assert case.module.encoder.lm.config.model_type == config.model_type
    (ranks,) = rows_of_step(case.loader, 2, 100)
    turned_in_fp32 = config.model_type == "modernbert"  # by Hugging Face: queries and keys, whatever their type
    assert_equal_the_reference(case, ranks, rtol=1e-7 if turned_in_fp32 else 1e-9)


@pytest.mark.parametrize("case", ["mixed"], indirect=True)
def test_an_optimizer_step_applies_the_references_gradient(case: Case) -> None:
    """Each of two ranks multiplies by their number what a mean over them divides; SGD, to the rounding of weights."""
    (ranks,) = rows_of_step(case.loader, 2, 100)
    totals = totals_of([row for rows in ranks for row in rows])
    moved: dict[str, Tensor] = {}
    for rank, rows in enumerate(ranks):
        engine = PlainEngine(copy.deepcopy(case.module), lr=0.5)
        result = optimizer_step(engine, case.loader.recipe, rows, totals, step=0, rank=rank, world=2)
        assert result.gradient_norms == {} and engine.steps == 1
        for (name, p), before in zip(engine.module.named_parameters(), case.module.parameters(), strict=True):
            moved[name] = moved.get(name, 0) + (before - p).detach() / 2 / 0.5
    assert_same_gradients(moved, case.gradients, rtol=1e-6, floor=1e-9)


# 2. What a row touches


def piece_of_nothing(loader: Loader, name: str) -> StreamBatch:
    stream = next(stream for stream in loader.last_streams if stream.name == name)
    return stream.objective.collate([], stream.options, loader.dataset().stream_context(stream))


def row_gradients(case: Case, stream_batches: dict[str, StreamBatch]) -> tuple[Tensor, dict[str, Tensor | None]]:
    row = pack_row(stream_batches, case.loader.corpus.tokenizer.sep_id)
    weights = weights_of_term_sums(case.loader.recipe, totals_of([row]), 0)
    loss, _ = pass_row(case.module, row, weights)
    names, parameters = zip(*case.module.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))


def forget_keys(case: Case) -> None:
    for auxiliary_state in case.module.auxiliary_states.values():
        if hasattr(auxiliary_state, "queue"):
            auxiliary_state.gather_new_vectors(None)
            auxiliary_state.step_keys = None


@pytest.mark.parametrize("case", SIZES, indirect=True)
def test_every_row_touches_every_weight(case: Case) -> None:
    """Also one that has no sample of a stream, or none at all: then with a gradient of 0. A recipe that predicts
    nothing has no use for the word head."""
    nothing = {name: piece_of_nothing(case.loader, name) for name in case.stream_batches}
    assert not any(stream_batch.samples or len(stream_batch.sequences.ids) for stream_batch in nothing.values())
    predicts = any(stream_batch.labels for stream_batch in case.stream_batches.values())
    for absent in case.stream_batches:
        for stream_batches in (
            case.stream_batches | {absent: nothing[absent]},
            nothing | {absent: case.stream_batches[absent]},
        ):
            loss, gradients = row_gradients(case, stream_batches)
            touched = {name: g for name, g in gradients.items() if g is not None}
            assert touched.keys() == (gradients if predicts else case.gradients).keys()
            assert all(g.isfinite().all() for g in touched.values())
            own = [g for name, g in gradients.items() if name.startswith(f"heads.{absent}.")]
            assert all(bool(g.any()) == bool(stream_batches[absent].samples) for g in own if g is not None)
            assert bool(loss) == (
                any(stream_batch.samples for stream_batch in stream_batches.values()) or "align_mlm" in stream_batches
            )
    loss, gradients = row_gradients(case, nothing)
    touched = {name for name, g in gradients.items() if g is not None and g.any()}
    entries = {"encoder.lm.bert.embeddings.word_embeddings.weight"} if "align_mlm" in nothing else set()
    assert touched == entries and bool(loss) == bool(entries)
    forget_keys(case)


# 3. What is reported


def test_shares_by_hand(demo: Path) -> None:
    """Counts of links, ages, and a stream without targets, which the reference has not."""
    recipe = resolve_run(demo, "mixed", "streams.alignlm.bilingual_weight=3").recipe
    sums = {
        loss_key("alignlm", "bi"): 10.0,
        loss_key("alignlm", "mono"): 40.0,
        MetricKey("queue_age", "ppa", "moco"): 6.0,
        loss_key("tlm", "mlm"): 0.0,
    }
    targets = {"alignlm.mono": 20, "alignlm.bi": 2, "alignlm.links": 5, "ppa.moco": 3, "tlm.mlm": 0}
    counts = {MetricKey.parse(f"count/{name}"): count for name, count in targets.items()}
    shares = stream_metrics(sums, counts, recipe)
    assert shares == pytest.approx(
        {
            "loss/alignlm": 40 / 20 + 3 * 10 / 20,
            "loss/alignlm.bi": 0.5,
            "loss/alignlm.mono": 2.0,
            "bilingual_coverage/alignlm": 0.1,
            "bilingual_links/alignlm": 2.5,
            "queue_age/ppa": 2.0,
            "loss/tlm": 0.0,
        }
    )


@pytest.mark.parametrize("case", ["mixed", "contextual"], indirect=True)
def test_gradient_norms_are_autograds(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each stream alone, its weight included; several rows, two ranks. The step's own gradient stays as it was."""
    (ranks,) = rows_of_step(case.loader, 2, 100)
    totals = totals_of([row for rows in ranks for row in rows])
    weights = weights_of_term_sums(case.loader.recipe, totals, 0)
    engine = PlainEngine(case.module)
    case.module.zero_grad()
    others: list[Tensor] = []

    rows, seeds = list[Row](), list[step.Seed]()
    for rank, of_rank in enumerate(ranks):
        for number, row in enumerate(of_rank):
            rows.append(row.to(CPU))
            seeds.append((0, rank, number))
    shared = shared_of(case.module, rows, seeds)
    of_ranks = [slice(len(ranks[0])), slice(len(ranks[0]), None)]

    def norms_of(rank: int) -> dict[str, Tensor]:
        part = of_ranks[rank]
        return step.measure_gradient_norms(engine, rows[part], shared[part], weights, seeds[part])

    monkeypatch.setattr(step.dist, "all_reduce", lambda total: others.append(total.clone()))
    norms_of(1)
    monkeypatch.setattr(step.dist, "all_reduce", lambda total: total.add_(others.pop(0)))
    norms = norms_of(0)
    assert all(p.grad is None for p in case.module.parameters()) and not others
    assert list(norms) == [f"grad_norm/{stream}" for stream in case.stream_batches]
    parameters = list(case.module.parameters())
    model = plain_model(case.module, case.loader)
    _, examples = samples_of(case.loader)
    for name, stream in case.loader.recipe.streams.items():
        arguments = case.stream_batches[name], examples[name], stream.options, case.loader.corpus.tokenizer
        terms = plain.terms(stream.objective, model, name, *arguments)
        loss = sum(t.factor * t.mean for t in terms.values())
        loss = loss * stream.weight / max(stream.warm_in, 1)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        norm = torch.cat([g.flatten() for g in found if g is not None]).norm()
        assert norms[f"grad_norm/{name}"].item() == pytest.approx(norm.item(), rel=1e-4)  # a long sum in fp32
    forget_keys(case)
