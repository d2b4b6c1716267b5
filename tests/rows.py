"""One stream's piece on the way that a step takes: a row, one pass of encoder, gather and head. Also whole steps."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from xscale.data.loader import Loader, StepBatch
from xscale.data.mixture import initial_state
from xscale.data.packed_row import Row, pack_row
from xscale.data.stream_batch import StreamBatch
from xscale.metric_keys import Counts, loss_key
from xscale.objectives import OBJECTIVES, Parts
from xscale.ranks import Process
from xscale.step.module import States, StepModule, Sums, Weights
from xscale.step.step import Seed, compute_row_loss, encode_auxiliary, precompute_and_gather_states

CPU, FILLER, LONGEST = torch.device("cpu"), 3, 128


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Of every module that imports it: two only wait for each other where tensors are as small as here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class OneStream(StepModule):
    """A StepModule of one stream with given parts."""

    def __init__(self, objective: str, parts: Parts, options: Any):
        nn.Module.__init__(self)
        self.encoder = parts.encoder
        self.heads = nn.ModuleDict({"s": parts.heads} if parts.heads is not None else {})
        self.auxiliary_states = {"s": parts.auxiliary_state} if parts.auxiliary_state is not None else {}
        self.streams = {"s": SimpleNamespace(objective=objective, options=options)}
        self.smoothing = {}


@dataclass
class TermSums:
    terms: dict[str, Tensor]
    """Sum over the targets of each term, with a graph."""
    metrics: dict[str, tuple[float, str]]
    """Sum of each metric, and the term by whose targets it is divided."""


def pass_row(module: StepModule, row: Row, weights: Weights, seed: Seed = (0,)) -> tuple[Tensor, Sums]:
    """Return the loss and the sums of a row, with the states of the auxiliary encoders."""
    on_device = row.to(next(module.parameters()).device)
    (shared,) = shared_of(module, [on_device], [seed])
    return compute_row_loss(module, on_device, shared, weights, seed)


def shared_of(module: StepModule, rows: list[Row], seeds: list[Seed]) -> list[States]:
    """Return what the losses of rows need besides their own states. The rows may lack streams."""
    if any(stream in rows[0].arrays for stream in module.streams_with_vectors()):
        return precompute_and_gather_states(module, rows, seeds)
    return encode_auxiliary(module, rows, seeds)


def sums(objective: str, parts: Parts, stream_batch: StreamBatch, options: Any, seed: int = 0) -> TermSums:
    """The auxiliary encoder runs once, and a row runs once for each term, with all other weights at 0."""
    module = OneStream(objective, parts, options)
    row = pack_row({"s": stream_batch}, FILLER).to(CPU)
    (shared,) = encode_auxiliary(module, [row], [(seed,)])
    names = list(OBJECTIVES[objective].terms(options))
    terms = {}
    for name in names:
        weights = {loss_key("s", n): float(n == name) for n in names}
        terms[name], reported = compute_row_loss(module, row, shared, weights, (seed,))
    assert not reported.values_K.requires_grad
    numbers = reported.by_key()
    for name, total in terms.items():
        losses = [value for key, value in numbers.items() if (key.name, key.term) == ("loss", name)]
        assert torch.allclose(total.detach(), total.new_tensor(losses), rtol=1e-5, atol=1e-5)
    return TermSums(terms, {key.name: (value, key.term) for key, value in numbers.items() if key.name != "loss"})


def gradients(loss: Tensor, *modules: nn.Module | None) -> dict[str, Tensor]:
    """Of all parameters that have one."""
    named = {f"{i}.{name}": p for i, m in enumerate(modules) if m is not None for name, p in m.named_parameters()}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    return {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}


def assert_same_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-9, floor: float = 1e-12
) -> None:
    """Of each parameter the difference's norm is within `rtol` of the gradient's, and `floor` of the whole's. What has
    none by `expected` is 0."""
    whole = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    assert whole > 0 and found.keys() >= expected.keys()
    for name, gradient in found.items():
        other = expected.get(name, torch.zeros_like(gradient))
        difference = float((gradient - other).norm())
        assert difference <= rtol * float(other.norm()) + floor * float(whole), (name, difference, float(other.norm()))


# Steps


def rows_of_step(
    loader: Loader, world: int = 1, max_tokens: int | None = None, steps: int = 1
) -> Iterator[list[list[Row]]]:
    """Rows of each of the first steps, by rank."""
    loader = replace(loader, recipe=replace(loader.recipe, train=replace(loader.recipe.train, max_tokens=max_tokens)))
    ranks = [
        loader.batches(Process(rank, world, rank, world), "cpu", initial_state(loader.last_streams), steps)
        for rank in range(world)
    ]
    for batches in zip(*ranks, strict=True):
        yield [batch.rows for batch in batches]


def totals_of(rows: list[Row]) -> Counts:
    return StepBatch(0, rows, {}).counts_without_languages()


class PlainEngine:
    """As much of DeepSpeed as step.optimizer_step touches: SGD, a mean over ranks, some steps skipped."""

    def __init__(self, module: StepModule, skip: frozenset[int] | set[int] = frozenset(), lr: float = 0.1):
        self.module, self.skip, self.lr, self.device = module, skip, lr, CPU
        self.steps = self.skipped_steps = 0
        self.optimizer, self.lr_scheduler = SimpleNamespace(loss_scale=1.0), "its own"

    def __call__(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    def get_lr(self) -> list[float]:
        return [self.lr]

    def zero_optimization_stage(self) -> int:
        return 0

    def no_sync(self) -> AbstractContextManager:
        return nullcontext()

    def fp16_enabled(self) -> bool:
        return False

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def allreduce_gradients(self) -> None:
        for parameter in self.module.parameters() if dist.is_initialized() else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    @torch.no_grad()
    def step(self) -> None:
        if self.steps in self.skip:
            self.skipped_steps += 1
        else:
            for parameter in self.module.parameters():
                parameter -= self.lr * parameter.grad
        self.module.zero_grad()
        self.steps += 1


def saved_bytes(module: nn.Module, call: Callable[[], Any]) -> int:
    """Bytes of all tensors that the forward pass of a call keeps for the backward pass, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return sum(storage.nbytes() for storage in kept.values())
