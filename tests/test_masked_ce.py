"""The chunked head and loss against F.cross_entropy(F.linear(...)) and its gradients."""

import math
import re
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.triton_kernel import compiled, fenced, memory_instructions, run_python
from xscale.data.mixture import initial_state
from xscale.distributed import Place
from xscale.engine import StepModule
from xscale.job import Job, prepare
from xscale.ops import masked_ce
from xscale.ops import masked_ce_triton as kernel
from xscale.ops.masked_ce import CHUNK, masked_cross_entropy

V, H = 61, 16
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]


def inputs(m: int, dtype: torch.dtype = torch.float64, v: int = V, bias: bool = True, seed: int = 0) -> Inputs:
    """rows, weight, bias as leaves, labels."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [((m, H), 1.0), ((v, H), 0.5), ((v,), 0.5)]
    leaves = [(torch.randn(s, generator=generator).double() * std).to(dtype).requires_grad_() for s, std in shapes]
    return leaves[0], leaves[1], leaves[2] if bias else None, torch.randint(v, (m,), generator=generator)


def plain(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    logits = F.linear(rows, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    squares = [(row - row.max()).exp().sum().log().add(row.max()) ** 2 for row in logits] if z_loss else []
    return loss + z_loss * sum(squares), (logits.argmax(-1) == labels).sum()


def gradients(loss: Tensor, arguments: Inputs, d_loss: float = 1.0) -> list[Tensor]:
    leaves = [leaf for leaf in arguments[:3] if leaf is not None and leaf.requires_grad]
    return list(torch.autograd.grad(loss, leaves, torch.tensor(d_loss, dtype=loss.dtype), retain_graph=True))


def as_fp64(arguments: Inputs) -> Inputs:
    leaves = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in arguments[:3]]
    return leaves[0], leaves[1], leaves[2], arguments[3]  # type: ignore[return-value]


def rms(errors: Tensor) -> float:
    return float(errors.double().square().mean().sqrt())


class Calls(TorchDispatchMode):
    """(operation, shape of a tensor that it gave), in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.seen += [(name, tuple(t.shape)) for t in tree_leaves(result) if isinstance(t, Tensor)]
        return result

    def products(self) -> list[tuple[int, ...]]:
        return [shape for name, shape in self.seen if name in ("mm", "addmm", "addmm_")]


# 1. Value and gradients


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("m", [0, 1, 1023, 1024, 1025, 3000])
def test_equals_plain_in_fp64(m: int, bias: bool) -> None:
    arguments = inputs(m, bias=bias)
    loss, correct = masked_cross_entropy(*arguments)
    expected, right = plain(*arguments)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert correct == right and not correct.requires_grad
    real, wanted = gradients(loss, arguments, 0.37), gradients(expected, arguments, 0.37)
    for name, mine, other in zip(("rows", "weight", "bias"), real, wanted, strict=False):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.1, 0.0), (0.0, 0.03), (0.3, 1e-4)])
def test_label_smoothing_and_z_loss(label_smoothing: float, z_loss: float) -> None:
    arguments = inputs(1100)
    loss, _ = masked_cross_entropy(*arguments, label_smoothing, z_loss)
    expected, _ = plain(*arguments, label_smoothing, z_loss)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert not torch.isclose(loss, plain(*arguments)[0], rtol=1e-4)
    for mine, other in zip(gradients(loss, arguments), gradients(expected, arguments), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.0, 0.0), (0.2, 0.05)])
def test_gradcheck(label_smoothing: float, z_loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite differences, with several chunks of several blocks."""
    monkeypatch.setattr(masked_ce, "CHUNK", 4)
    monkeypatch.setattr(masked_ce, "BLOCK", 3)
    rows, weight, bias, labels = inputs(9, v=5)
    leaves = [leaf[..., :3].detach().requires_grad_() for leaf in (rows, weight)]

    def loss(*leaves: Tensor) -> Tensor:
        return masked_cross_entropy(*leaves, labels, label_smoothing, z_loss)[0]

    assert torch.autograd.gradcheck(loss, (*leaves, bias))
    assert torch.autograd.gradcheck(lambda *leaves: loss(*leaves, None), leaves)


def test_large_logits_and_certain_labels() -> None:
    """Probabilities of 0 and 1 in fp32, and negative logsumexp: no inf, no cancellation that plain torch has not."""
    rows, weight, bias, labels = inputs(50, torch.float32)
    with torch.no_grad():
        rows *= 1e3
        bias -= 1e4  # type: ignore[operator]
        labels[:25] = F.linear(rows, weight, bias).argmax(-1)[:25]
    loss, correct = masked_cross_entropy(rows, weight, bias, labels)
    expected, right = plain(*as_fp64((rows, weight, bias, labels)))
    assert correct == right >= 25
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def test_a_far_off_logsumexp_costs_the_loss_no_digits() -> None:
    """Whole numbers, so that fp32 logits near -1e4, which are 1e-3 apart from their neighbours, are exact."""
    rows, weight, bias, labels = inputs(300, torch.float32)
    with torch.no_grad():
        for leaf in (rows, weight):
            leaf.round_()
        bias.fill_(-10_000)  # type: ignore[union-attr]
    expected, _ = plain(*as_fp64((rows, weight, bias, labels)))
    loss, _ = masked_cross_entropy(rows, weight, bias, labels)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


# 2. Precision


def errors(function: Callable, arguments: Inputs, exact: list[Tensor], d_loss: float) -> list[float]:
    loss, _ = function(*arguments)
    assert loss.dtype == torch.float32
    found = gradients(loss, arguments, d_loss)
    assert all(g.dtype == leaf.dtype for g, leaf in zip(found, arguments[:3], strict=True) if leaf is not None)
    return [rms(g.double() - e) for g, e in zip(found, exact, strict=True)]


@pytest.mark.parametrize(
    ("dtype", "slack"), [(torch.float32, 1.6), (torch.float16, 1.0), (torch.bfloat16, 1.2)], ids=str
)
def test_error_is_no_larger_than_that_of_plain_torch(dtype: torch.dtype, slack: float) -> None:
    """RMS error of each gradient, and the loss's, against fp64 on the same inputs. In fp32 the order of a sum decides;
    on a CPU bf16 rounds each chunk's product once more."""
    arguments = inputs(3000, dtype, v=400)
    d_loss = 1024.0 / 3000
    reference = as_fp64(arguments)
    exact = gradients(plain(*reference)[0], reference, d_loss)
    ours, theirs = (errors(f, arguments, exact, d_loss) for f in (masked_cross_entropy, plain))
    for name, mine, other in zip(("rows", "weight", "bias"), ours, theirs, strict=True):
        assert 0 < mine <= slack * other, (name, mine, other)
    loss, expected = masked_cross_entropy(*arguments)[0].double(), plain(*reference)[0]
    assert abs(loss - expected) <= 1.1 * abs(plain(*arguments)[0] - expected) + 1e-6 * expected


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16])
def test_fp16_under_loss_scaling(loss_scale: float) -> None:
    """Sum over targets / targets * loss scale: gradients are those of fp32, whatever the scale."""
    arguments: Any = inputs(3000, torch.float16)
    wide: Any = (*(t.detach().float().requires_grad_() for t in arguments[:3]), arguments[3])
    real = gradients(masked_cross_entropy(*arguments)[0], arguments, loss_scale / 3000)
    for mine, other in zip(real, gradients(plain(*wide)[0], wide, 1 / 3000), strict=True):
        error = rms(mine.double() / loss_scale - other.double()) / rms(other)
        # rows' entries are near fp16's smallest where nothing scales them
        assert error < (1e-3 if loss_scale > 1 else 5e-3), error


def test_fp16_keeps_what_would_vanish_or_overflow_before_the_loss_scale() -> None:
    """Probabilities of 1e-9, and sums over rows of 2e5, each under an incoming gradient that fits it."""
    rows = torch.full((3000, H), 70.0, dtype=torch.float16)
    weight = torch.zeros(V, H, dtype=torch.float16)
    weight[1:, 0] = -0.3  # logits 0 and -21: probabilities 1 and 8e-10
    labels = torch.ones(3000, dtype=torch.long)
    arguments: Inputs = rows.requires_grad_(), weight.requires_grad_(), None, labels
    reference = as_fp64(arguments)
    loss, exact = masked_cross_entropy(*arguments)[0], gradients(plain(*reference)[0], reference)[1]
    assert 0 < exact[5].max() < 1e-3 and exact[1].abs().min() > 2e5
    for d_loss, label in ((2.0**16, 5), (2.0**-10, 1)):
        mine = gradients(loss, arguments, d_loss)[1][label].double()
        torch.testing.assert_close(mine, exact[label] * d_loss, rtol=0.02, atol=0)


def test_fp16_bias_gets_what_would_vanish_before_the_loss_scale() -> None:
    """A probability of 8e-10, 3,000 times."""
    bias = torch.full((V,), -21.0, dtype=torch.float16)
    bias[0] = 0
    rows, weight = torch.zeros(3000, H, dtype=torch.float16), torch.zeros(V, H, dtype=torch.float16)
    arguments: Inputs = rows, weight, bias.requires_grad_(), torch.ones(3000, dtype=torch.long)
    reference = as_fp64(arguments)
    (real,) = gradients(masked_cross_entropy(*arguments)[0], arguments, 2.0**16)
    exact = gradients(plain(*reference)[0], reference, 2.0**16)[-1]
    assert 0 < exact[5] < 1
    torch.testing.assert_close(real[2:].double(), exact[2:], rtol=0.01, atol=0)


def test_fp16_holds_logits_gradients_from_2e_11_to_16() -> None:
    """A row of width 1 whose logits are its bias: z-loss makes a gradient of 15, small odds one of 2e-11."""
    bias = torch.tensor([104.0, 0.0, 79.4], dtype=torch.float16)
    rows, weight = torch.zeros(1, 1, dtype=torch.float16), torch.zeros(3, 1, dtype=torch.float16)
    for own, z_loss, d_loss in ((0, 7 / 104, 256.0), (2, 0.0, 2.0**16)):
        with torch.no_grad():
            weight.zero_()[own] = 1
        arguments: Inputs = rows.requires_grad_(), weight, bias, torch.tensor([1])
        reference = as_fp64(arguments)
        (real,) = gradients(masked_cross_entropy(*arguments, 0.0, z_loss)[0], arguments, d_loss)
        exact = gradients(plain(*reference, z_loss=z_loss)[0], reference, d_loss)[0]
        assert exact.item() / d_loss == pytest.approx({0: 15, 2: 2e-11}[own], rel=0.1)
        torch.testing.assert_close(real.double(), exact, rtol=0.01 if own == 0 else 0.35, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_means_and_logsumexps_are_not_rounded(dtype: torch.dtype) -> None:
    """Against fp64 on the same rounded logits, far from 0. Gradients of bias add up to 2 z_loss logsumexp."""
    rows, weight, bias, labels = inputs(1, dtype, v=401)
    with torch.no_grad():
        bias += 101.5  # type: ignore[operator]
    logits = F.linear(rows, weight, bias).detach().double()
    log_z = logits.exp().sum().log()
    for label_smoothing, z_loss in ((0.5, 0.0), (0.0, 0.1)):
        loss, _ = masked_cross_entropy(rows, weight, bias, labels, label_smoothing, z_loss)
        expected = F.cross_entropy(logits, labels, label_smoothing=label_smoothing) + z_loss * log_z**2
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        total = gradients(loss, (rows, weight, bias, labels), 0.01)[2].double().sum()
        torch.testing.assert_close(total, 0.01 * 2 * z_loss * log_z, rtol=5e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_overflow_is_seen(dtype: torch.dtype) -> None:
    arguments = inputs(40, dtype)
    loss, _ = masked_cross_entropy(*arguments)
    for d_loss in (3e38, float("inf"), float("nan")):
        if d_loss < float("inf") and dtype != torch.float16:
            continue
        for gradient in gradients(loss, arguments, d_loss):
            assert not gradient.isfinite().all()
    with torch.no_grad():
        arguments[0][3, 3] = float("inf")
    loss, _ = masked_cross_entropy(*arguments)
    assert not loss.isfinite() and not gradients(loss, arguments)[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.0, 0.0), (0.2, 0.01)])
def test_autocast(dtype: torch.dtype, label_smoothing: float, z_loss: float) -> None:
    """Inputs are cast as F.linear's are; loss and gradients keep fp32."""
    arguments = inputs(1500, torch.float32)
    with torch.autocast("cpu", dtype):
        loss, correct = masked_cross_entropy(*arguments, label_smoothing, z_loss)
    halves = tuple(t.to(dtype) for t in arguments[:3] if t is not None)
    expected, right = plain(*halves, arguments[3], label_smoothing, z_loss)
    assert loss.dtype == torch.float32 and correct == right
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for mine, other in zip(gradients(loss, arguments), gradients(expected, arguments), strict=True):
        assert mine.dtype == torch.float32
        assert rms(mine - other) < 0.01 * rms(other)


# 3. Autograd


def test_nothing_is_computed_that_nobody_asked_for() -> None:
    """Without gradients only logits; with frozen weight or rows, not the other's gradient."""
    m = 1200
    logits = (m, V)
    for frozen, wanted in [((), [logits, (m, H), (V, H)]), ((1,), [logits, (m, H)]), ((0,), [logits, (V, H)])]:
        arguments = inputs(m)
        for leaf in frozen:
            arguments[leaf].requires_grad_(False)  # type: ignore[union-attr]
        with Calls() as calls:
            loss, _ = masked_cross_entropy(*arguments)
        assert calls.products() == wanted
        expected = plain(*arguments)[0]
        for mine, other in zip(gradients(loss, arguments), gradients(expected, arguments), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    for off in (torch.no_grad, torch.inference_mode):
        arguments = inputs(m)
        with off(), Calls() as calls:
            loss, correct = masked_cross_entropy(*arguments)
        assert calls.products() == [logits] and not loss.requires_grad
        assert not {"mul", "mul_", "sub_", "scatter_"} & {name for name, shape in calls.seen if shape[1:] == (V,)}
        expected, right = plain(*arguments)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        assert correct == right


def test_autocast_leaves_fp64_alone() -> None:
    arguments = inputs(100)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = masked_cross_entropy(*arguments)
    torch.testing.assert_close(loss, plain(*arguments)[0], rtol=1e-12, atol=0)


def test_autocast_without_gradients_takes_none() -> None:
    """Of leaves that have autocast's type already, which casting leaves as they are."""
    arguments = inputs(100, torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Calls() as calls:
        loss, _ = masked_cross_entropy(*arguments)
    assert calls.products() == [(100, V)] and not loss.requires_grad


def test_no_second_derivative() -> None:
    """Refused, not silently 0; the first one may be asked for in a graph."""
    arguments = inputs(5)
    loss = masked_cross_entropy(*arguments)[0].square()
    first = torch.autograd.grad(loss, arguments[0], create_graph=True)[0]
    torch.testing.assert_close(first, gradients(plain(*arguments)[0].square(), arguments)[0])
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_backward_twice() -> None:
    """As where a stream's gradient norm is measured before the step's own backward pass."""
    arguments = inputs(1500, torch.float32)
    loss, _ = masked_cross_entropy(*arguments)
    first, second = gradients(loss, arguments, 2.0), gradients(loss, arguments, 6.0)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(3 * one, other)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_activation_checkpointing(reentrant: bool) -> None:
    arguments = inputs(1100)
    loss = checkpoint(lambda *a: masked_cross_entropy(*a)[0] * 3, *arguments, use_reentrant=reentrant)
    loss.backward()
    expected, _ = plain(*arguments)
    for leaf, wanted in zip(arguments[:3], gradients(expected, arguments, 3.0), strict=True):
        torch.testing.assert_close(leaf.grad, wanted, rtol=1e-12, atol=1e-12)  # type: ignore[union-attr]


def test_a_tied_weight_gets_both_gradients() -> None:
    rows, weight, bias, labels = inputs(1100)
    ids = torch.randint(V, (1100,))
    results = []
    for function in (masked_cross_entropy, plain):
        weight.grad = None
        first = function(F.embedding(ids, weight) * rows, weight, bias, labels)[0]
        second = function(rows.flip(0), weight, bias, labels)[0]
        (first + 0.5 * second).backward()
        results.append(weight.grad)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


# 4. Chunks


@pytest.mark.parametrize("m", [1, 700, 1535, 1537, 2560, 5000])
def test_logits_never_exist_whole(m: int) -> None:
    """No tensor has more than 1.5 * CHUNK * V numbers, and no chunk is small; nor does the host wait for a value."""
    arguments = inputs(m, torch.float32, v=300)
    with Calls() as calls:
        loss, _ = masked_cross_entropy(*arguments, 0.1, 1e-4)
        loss.backward()
    assert max(torch.Size(shape).numel() for _, shape in calls.seen) <= 1.5 * CHUNK * 300
    chunks = [rows for rows, columns in calls.products() if columns == 300]
    assert sum(chunks) == m and min(chunks) >= min(m, 2 * CHUNK // 3) and max(chunks) - min(chunks) <= 1
    waits = {"_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal"}
    assert not waits & {name for name, _ in calls.seen}


class Alive(TorchDispatchMode):
    """Tensors that an operation gave and that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen += [weakref.ref(t) for t in tree_leaves(result) if isinstance(t, Tensor)]
        return result

    def shapes(self) -> set[tuple[int, ...]]:
        return {tuple(t.shape) for t in (ref() for ref in self.seen) if t is not None}


def test_logits_do_not_wait_for_the_backward_pass() -> None:
    """Gradients, the loss and the hits alone outlive the forward pass."""
    arguments = inputs(700)
    with Alive() as alive:
        kept = masked_cross_entropy(*arguments)
    assert alive.shapes() == {(700, H), (V, H), (V,), ()} and len(kept) == 2


def test_reruns_are_bit_identical() -> None:
    arguments = inputs(3000, torch.bfloat16)
    first, second = (masked_cross_entropy(*arguments)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(map(torch.equal, gradients(first, arguments), gradients(second, arguments)))


# 5. The CUDA kernel: interpreted in a process of its own, and compiled ahead


def test_the_interpreted_kernel_is_plain_torch() -> None:
    run_python("import tests.test_masked_ce as t; t.interpret()", TRITON_INTERPRET="1")


def interpret() -> None:
    """Losses, hits and the gradient in the logits' place; several turns of a program's loop, and any end."""
    torch.manual_seed(0)
    block = kernel.LAUNCH["BLOCK"]
    options = [(0.0, 0.0), (0.2, 0.0), (0.0, 0.03), (0.1, 1e-4)]
    sizes, dtypes = (5, 61, block, 2 * block + 1), (torch.float32, torch.float16, torch.bfloat16)
    for number, (v, dtype) in enumerate(product(sizes, dtypes)):
        smoothing, z_loss = options[number % 4]
        for bias in (None, torch.randn(v).to(dtype)):
            logits, labels = (3 * torch.randn(4, v)).to(dtype), torch.randint(v, (4,))
            labels[:2] = torch.tensor([v - 1, int((logits[1] + (0 if bias is None else bias)).argmax())])
            wide = logits.double().add(0 if bias is None else bias.double()).requires_grad_()
            expected = F.cross_entropy(wide, labels, reduction="none", label_smoothing=smoothing)
            expected = expected + z_loss * wide.logsumexp(-1).square()
            (gradient,) = torch.autograd.grad(expected.sum(), wide)
            rounding = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}[
                dtype
            ]  # the interpreter truncates bf16
            for scale in (None, 1.0, 512.0):
                given = strided(logits)
                losses, right = kernel.losses_(
                    None if bias is None else fenced(bias), given, labels, smoothing, z_loss, scale
                )
                torch.testing.assert_close(losses.double(), expected.detach(), rtol=3e-6, atol=3e-6)
                assert torch.equal(right.bool(), wide.argmax(-1) == labels)
                if scale is None:
                    assert torch.equal(given, logits)
                else:
                    torch.testing.assert_close(given.double(), gradient * scale, rtol=rounding, atol=1e-6 * scale)

    ties = torch.zeros(2, block + 9)
    ties[:, [7, 9, block + 7]] = 1.0
    assert kernel.losses_(None, strided(ties), torch.tensor([7, block + 7]), 0.0, 0.0, None)[1].tolist() == [1, 0]
    for spoilt in ("inf", "nan"):
        logits = torch.randn(2, 40)
        logits[0, 7] = float(spoilt)
        losses, _ = kernel.losses_(None, given := strided(logits), torch.tensor([3, 3]), 0.0, 0.0, 1.0)
        assert losses.isfinite().tolist() == given.isfinite().all(1).tolist() == [False, True]
    masked = strided(torch.tensor([[0.0, -float("inf"), 1.0]]))
    torch.testing.assert_close(
        kernel.losses_(None, masked, torch.tensor([2]), 0.0, 0.0, 1.0)[0].exp().item(), 1 + 1 / math.e
    )
    assert len(kernel.losses_(None, torch.zeros(0, 16), torch.zeros(0, dtype=torch.long), 0.0, 0.0, 1.0)[0]) == 0

    with mock.patch.object(masked_ce, "_kernel", lambda rows: kernel), mock.patch.object(masked_ce, "CHUNK", 4):
        for m, bias in ((0, True), (11, True), (11, False)):
            arguments = inputs(m, torch.float32, bias=bias)
            loss, correct = masked_cross_entropy(*arguments, 0.1, 0.01)
            expected, hits = plain(*as_fp64(arguments), 0.1, 0.01)
            torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
            assert correct == hits
            exact = gradients(plain(*(wide := as_fp64(arguments)), 0.1, 0.01)[0], wide)
            for mine, other in zip(gradients(loss, arguments), exact, strict=True):
                torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)


def strided(logits: Tensor) -> Tensor:
    """The same among rows of NaN: [C, V] with a stride of whole `ALIGNED`s."""
    columns = logits.shape[1]
    padded = torch.full((len(logits), -(-columns // kernel.ALIGNED) * kernel.ALIGNED), float("nan"), dtype=logits.dtype)
    padded[:, :columns] = logits
    return fenced(padded)[:, :columns]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("smooth", [False, True])
def test_the_compiled_kernel_moves_16_bytes_a_lane(dtype: torch.dtype, arch: int, smooth: bool, tmp_path: Path) -> None:
    """Logits, bias and gradient, for an odd vocabulary; nothing is spilled or added atomically; a row's place is
    computed in 64 bits."""
    logits, bias = strided(torch.zeros(2, 119_547, dtype=dtype)), torch.zeros(119_547, dtype=dtype)
    labels = torch.zeros(2, dtype=torch.long)
    for with_bias in (False, True):
        arguments = bias if with_bias else None, logits, labels, 0.1 * smooth, 1e-4, 4096.0
        program = compiled(kernel, "softmax_losses", arch, lambda: kernel.losses_(*arguments))  # noqa: B023
        assert re.search(r"muli .*: i64", program.asm["ttir"])
        found = memory_instructions(program, tmp_path)
        pieces = kernel.LAUNCH["BLOCK"] // (32 * kernel.LAUNCH["num_warps"]) * dtype.itemsize // 16  # of a thread
        assert (found["LDG.E.128"], found["STG.E.128"]) == (2 * pieces * (1 + with_bias), pieces)
        others = {name for name in found if name.startswith(("LDG", "STG"))} - {"LDG.E.128", "STG.E.128"}
        assert others == {"LDG.E", "STG.E"}  # the label; loss and hit
        assert not any(name.startswith(("LDL", "STL", "ATOM", "RED")) for name in found)


# 6. From the recipe


def job_of(demo: Path, recipe: str, *sets: str) -> Job:
    small = ["model.dropout=0.0", "data.workers=0", "train.micro_batch=1000"]
    return prepare(recipe, [*small, *sets], [demo])


def micros_of(job: Job) -> list[Any]:
    return next(iter(job.batches(Place(0, 1, 0, 1), initial_state(job.specs), 1))).micros


def test_the_recipe_s_terms_reach_mlm(demo: Path) -> None:
    """An objective's loss and gradients against the Hugging Face model's own logits."""
    job = job_of(demo, "mlm", "streams.mlm.samples=6", "train.label_smoothing=0.1", "train.z_loss=0.01")
    module = StepModule(job.encoder(), job.recipe).double()
    lm = module.encoder.lm
    (micro,) = micros_of(job)
    batch = {name: torch.from_numpy(array) for name, array in micro.arrays.items()}
    loss = module("mlm", batch).terms["mlm"]
    fields = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
    logits = lm(**fields).logits.flatten(0, 1)[batch["rows"]]
    log_z = logits.exp().sum(-1).log()
    losses = 0.9 * (log_z - logits.gather(1, batch["labels"][:, None])[:, 0]) + 0.1 * (log_z - logits.mean(-1))
    expected = (losses + 0.01 * log_z**2).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    parameters = [p for p in lm.parameters() if p.requires_grad]
    real, wanted = (torch.autograd.grad(value, parameters, materialize_grads=True) for value in (loss, expected))
    for mine, other in zip(real, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("objective", ["tlm", "dict_mlm", "align_mlm", "alignlm"])
def test_the_recipe_s_terms_reach_every_objective_that_predicts_tokens(demo: Path, objective: str) -> None:
    """With label smoothing and z-loss, the loss of all targets is larger by what they add to plain torch's."""
    sets = [f"streams.{objective}.samples=8"]
    job = job_of(demo, objective, *sets, "train.label_smoothing=0.3", "train.z_loss=0.1")
    module, stock = (StepModule(j.encoder(), j.recipe) for j in (job, job_of(demo, objective, *sets)))
    batch = {name: torch.from_numpy(array) for name, array in micros_of(job)[0].arrays.items()}
    calls: list[tuple[Tensor, Tensor]] = []
    original = stock.encoder.vocabulary_loss

    def recorded(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        calls.append((features, labels))
        return original(features, labels)

    stock.encoder.vocabulary_loss = recorded  # type: ignore[method-assign]
    before, after = (sum(m(objective, batch).terms.values()) for m in (stock, module))
    head = stock.encoder.lm.get_output_embeddings()
    added = sum(
        plain(*call, label_smoothing=0.3, z_loss=0.1)[0] - plain(*call)[0]
        for features, labels in calls
        for call in [(features, head.weight, head.bias, labels)]
    )
    torch.testing.assert_close(after - before, added, rtol=1e-4, atol=0)  # type: ignore[operator]
    assert added > 0.05 * before.abs()  # type: ignore[operator,union-attr]


def test_they_belong_to_the_run_s_identity(demo: Path) -> None:
    changed = job_of(demo, "mlm", "train.label_smoothing=0.1", "train.z_loss=1e-4").identity()
    assert changed["recipe"]["train"]["label_smoothing"] == 0.1 and changed["recipe"]["train"]["z_loss"] == 1e-4
    assert changed != job_of(demo, "mlm").identity()
