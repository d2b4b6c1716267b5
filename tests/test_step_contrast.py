"""Word contrast and translation ranking: what rows exchange, the rules of training, and two real ranks.

tests/test_reference.py has both against plain PyTorch, in one row and in the rows of four ranks.
"""

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import launch
from tests.conformance import check_objective
from tests.rows import assert_same_gradients, one_thread, rows_of_step, totals_of  # noqa: F401
from tests.test_alignlm import context, examples_of
from tests.test_reference import make_case, make_module, resolve_run
from xscale.data.packed_row import Row
from xscale.data.tokenizer import Tokenizer
from xscale.eval.sentence_files import choose_pooling
from xscale.objectives import word_contrast
from xscale.objectives.step_contrast import (
    from_byte_columns,
    step_contrast_losses,
    to_byte_columns,
    vectors_and_text_hashes,
)
from xscale.step.module import States
from xscale.step.step import (
    add_gathered_vectors_of_step,
    compute_row_loss,
    precompute_and_gather_states,
    weights_of_term_sums,
)

MORE_SAMPLES = {
    "word_contrast": "streams.word_contrast.samples=12",
    "ranking": "streams.translation_ranking.samples=12",
}
RECIPES = list(MORE_SAMPLES)
UNREAD: Any = None
"""An argument that the function does not read."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_hashes_survive_in_every_type(dtype: torch.dtype) -> None:
    numbers = torch.randint(-(1 << 62), 1 << 62, (50, 2))
    numbers[0] = torch.tensor([-(1 << 63), (1 << 63) - 1])
    assert torch.equal(from_byte_columns(to_byte_columns(numbers).to(dtype)), numbers)


def test_samples_with_a_common_text_are_no_negatives() -> None:
    """Three samples, of which the first two share the hash 7: each contrasts with the third alone."""
    torch.manual_seed(0)
    u, v = torch.randn(2, 3, 5, dtype=torch.float64)
    texts = torch.tensor([[7, 1], [2, 7], [3, 4]])
    exchanged = vectors_and_text_hashes(UNREAD, {"first": u, "second": v}, {"texts": texts}, UNREAD)
    found = step_contrast_losses({"step": exchanged, "own": torch.arange(3)}, "t", 0.5, 0.2).sums["t"]
    s = torch.cosine_similarity(u[:, None], v[None], dim=-1)
    expected = torch.zeros((), dtype=torch.float64)
    for i, others in enumerate(([2], [2], [0, 1])):
        own = (s[i, i] - 0.2) / 0.5
        for negatives in (s[i, others], s[others, i]):
            expected += (torch.logsumexp(torch.cat([own[None], negatives / 0.5]), 0) - own) / 2
    torch.testing.assert_close(found, expected)


def test_a_step_without_links_has_no_loss() -> None:
    nothing = torch.zeros(0, 4, requires_grad=True)
    texts = torch.zeros(0, 2, dtype=torch.int64)
    exchanged = vectors_and_text_hashes(UNREAD, {"first": nothing, "second": nothing}, {"texts": texts}, UNREAD)
    losses = step_contrast_losses({"step": exchanged, "own": torch.arange(0)}, "words", 0.1)
    assert losses.sums["words"].item() == 0 and losses.metrics["contrastive_accuracy"][0].item() == 0
    losses.sums["words"].backward()
    assert nothing.grad is not None


def test_words_that_were_cut_off_have_no_link(tokenizer: Tokenizer) -> None:
    """Links are one-to-one, between words, and both words are left."""
    pairs = [("Peter sees a house .", "Peter doj sel koh .", "0-0 1-1 1-2 3-3 4-4")]
    samples = examples_of(tokenizer, pairs, ("en", "xx"))
    options = word_contrast.WordContrastOptions()
    whole = word_contrast.collate(samples, options, context(tokenizer))
    assert whole.target_counts == {"words": 2}, "1-1 and 1-2 share a word, 4-4 is punctuation"
    assert whole.states["first"].state_count == whole.states["second"].state_count == len(whole.arrays["texts"]) == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_rules_of_training_are_kept(demo: Path, recipe: str) -> None:
    stream = {"ranking": "translation_ranking"}.get(recipe, recipe)
    assert check_objective(recipe, [demo], [f"streams.{stream}.samples=9"]) == []


def test_an_export_has_the_pooling_that_ranking_trains() -> None:
    stream = {"objective": "translation_ranking", "pooling": "cls"}
    recipe = {"model": {"init": None}, "streams": {"a": {"objective": "tlm"}, "b": stream}}
    assert choose_pooling(recipe).pooling == "cls"


def test_the_vectors_of_one_row_are_computed_at_a_time(demo: Path) -> None:
    """The activations of a row are gone before the next row's: a step with many rows needs no more memory."""
    loader = resolve_run(demo, "word_contrast", MORE_SAMPLES["word_contrast"])
    module = make_module(loader)
    (ranks,) = rows_of_step(loader, 1, 40)
    rows = ranks[0]
    computed = list[weakref.ref]()
    plain = module.compute_vectors

    def vectors(stream: str, states: dict[str, torch.Tensor], row: Row) -> torch.Tensor:
        assert all(earlier() is None for earlier in computed)
        found = plain(stream, states, row)
        computed.append(weakref.ref(found))
        return found

    module.compute_vectors = vectors  # type: ignore[method-assign]
    precompute_and_gather_states(
        module, [row.to(torch.device("cpu")) for row in rows], [(0, number) for number in range(len(rows))]
    )
    assert len(computed) == len(rows) >= 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_only_row_of_a_step_has_one_forward_pass(demo: Path, recipe: str) -> None:
    """A step with one row computes no vectors beforehand. Its bits are those of a step that does, with dropout, too."""
    loader = resolve_run(demo, recipe, MORE_SAMPLES[recipe], "model.dropout=0.1")
    module = make_module(loader)
    ((rows,),) = rows_of_step(loader, 1)
    on_device = [row.to(torch.device("cpu")) for row in rows]
    seeds = [(0,)]
    weights = weights_of_term_sums(loader.recipe, totals_of(rows), 0)
    precomputed = precompute_and_gather_states(module, on_device, seeds)
    assert precomputed == [{}]
    with_vectors: list[States] = [{}]
    add_gathered_vectors_of_step(with_vectors, module, on_device, seeds)
    losses = list[float]()
    gradients = list[tuple[torch.Tensor, ...]]()
    for (states,) in (precomputed, with_vectors):
        loss, _ = compute_row_loss(module, on_device[0], states, weights, seeds[0])
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, list(module.parameters()), materialize_grads=True))
    assert losses[0] == losses[1] > 0
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def gradient_of_a_rank(folder: Path, demo: Path, recipe: str) -> None:
    """Write the gradient of one rank's rows of the first step."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    loader = resolve_run(demo, recipe, MORE_SAMPLES[recipe])
    module = make_module(loader)
    (ranks,) = rows_of_step(loader, 2, 40)
    assert all(len(rows) >= 2 for rows in ranks)
    weights = weights_of_term_sums(loader.recipe, totals_of([row for rows in ranks for row in rows]), 0)
    rows = [row.to(torch.device("cpu")) for row in ranks[rank]]
    seeds = [(0, number) for number in range(len(rows))]
    loss = 0.0
    for row, shared, seed in zip(rows, precompute_and_gather_states(module, rows, seeds), seeds, strict=True):
        row_loss, _ = compute_row_loss(module, row, shared, weights, seed)
        row_loss.backward()
        loss += row_loss.item()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    torch.save({"loss": loss, "gradients": gradients}, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_of_several_rows_are_the_reference(demo: Path, tmp_path: Path, recipe: str) -> None:
    """Two processes with gloo: the sum of their losses and gradients is plain PyTorch's, in fp64."""
    assert launch.fork_ranks(2, gradient_of_a_rank, tmp_path, demo, recipe) == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    case = make_case(resolve_run(demo, recipe, MORE_SAMPLES[recipe]))
    assert first["loss"] + second["loss"] == pytest.approx(case.loss.item(), rel=1e-9)
    both = {name: gradient + second["gradients"][name] for name, gradient in first["gradients"].items()}
    assert_same_gradients(both, case.gradients)
