"""The chunked head and loss against F.cross_entropy(F.linear(...)) and its gradients."""

import math
import re
from collections.abc import Callable
from functools import partial
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

from tests.triton_kernel import compiled, fenced, memory_instructions
from xscale.ops import masked_ce
from xscale.ops import masked_ce_triton as kernel
from xscale.ops.masked_ce import ROWS, masked_cross_entropy, max_predictions_of_chunk

V, H = 61, 16
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor]


def inputs(m: int, dtype: torch.dtype = torch.float64, v: int = V, bias: bool = True, seed: int = 0) -> Inputs:
    """features, weight, bias as leaves, labels."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [((m, H), 1.0), ((v, H), 0.5), ((v,), 0.5)]
    leaves = [(torch.randn(s, generator=generator).double() * std).to(dtype).requires_grad_() for s, std in shapes]
    return leaves[0], leaves[1], leaves[2] if bias else None, torch.randint(v, (m,), generator=generator)


def plain(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: Tensor | None = None,
    largest: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(features, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    top = logits.amax(-1, keepdim=True)
    losses = losses + z_loss * ((logits - top).exp().sum(-1).log() + top[:, 0]).square()
    weights = torch.ones_like(losses) if weights is None else weights.to(losses.dtype)
    return largest * (weights * losses).sum(), losses.detach(), logits.argmax(-1) == labels


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


def test_large_logits_and_certain_labels() -> None:
    """Probabilities of 0 and 1 in fp32, and negative logsumexp: no inf, no cancellation that plain torch has not."""
    rows, weight, bias, labels = inputs(50, torch.float32)
    with torch.no_grad():
        rows *= 1e3
        bias -= 1e4  # type: ignore[operator]
        labels[:25] = F.linear(rows, weight, bias).argmax(-1)[:25]
    loss, _, right = masked_cross_entropy(rows, weight, bias, labels)
    expected, _, best = plain(*as_fp64((rows, weight, bias, labels)))
    assert torch.equal(right, best) and right[:25].all()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def test_a_far_off_logsumexp_costs_the_loss_no_digits() -> None:
    """Whole numbers, so that fp32 logits near -1e4, which are 1e-3 apart from their neighbours, are exact."""
    rows, weight, bias, labels = inputs(300, torch.float32)
    with torch.no_grad():
        for leaf in (rows, weight):
            leaf.round_()
        bias.fill_(-10_000)  # type: ignore[union-attr]
    expected, *_ = plain(*as_fp64((rows, weight, bias, labels)))
    loss, *_ = masked_cross_entropy(rows, weight, bias, labels)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


# 2. Precision


def errors(function: Callable, arguments: Inputs, exact: list[Tensor], d_loss: float) -> list[float]:
    loss, *_ = function(*arguments)
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
    for name, mine, other in zip(("features", "weight", "bias"), ours, theirs, strict=True):
        assert 0 < mine <= slack * other, (name, mine, other)
    loss, expected = masked_cross_entropy(*arguments)[0].double(), plain(*reference)[0]
    assert abs(loss - expected) <= 1.1 * abs(plain(*arguments)[0] - expected) + 1e-6 * expected


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_means_and_logsumexps_are_not_rounded(dtype: torch.dtype) -> None:
    """Against fp64 on the same rounded logits, far from 0. Gradients of bias add up to 2 z_loss logsumexp."""
    rows, weight, bias, labels = inputs(1, dtype, v=401)
    with torch.no_grad():
        bias += 101.5  # type: ignore[operator]
    logits = F.linear(rows, weight, bias).detach().double()
    log_z = logits.exp().sum().log()
    for label_smoothing, z_loss in ((0.5, 0.0), (0.0, 0.1)):
        loss, *_ = masked_cross_entropy(rows, weight, bias, labels, label_smoothing, z_loss)
        expected = F.cross_entropy(logits, labels, label_smoothing=label_smoothing) + z_loss * log_z**2
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        total = gradients(loss, (rows, weight, bias, labels), 0.01)[2].double().sum()
        torch.testing.assert_close(total, 0.01 * 2 * z_loss * log_z, rtol=5e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_overflow_is_seen(dtype: torch.dtype) -> None:
    arguments = inputs(40, dtype)
    loss, *_ = masked_cross_entropy(*arguments)
    for d_loss in (3e38, float("inf"), float("nan")):
        if d_loss < float("inf") and dtype != torch.float16:
            continue
        for gradient in gradients(loss, arguments, d_loss):
            assert not gradient.isfinite().all()
    with torch.no_grad():
        arguments[0][3, 3] = float("inf")
    loss, *_ = masked_cross_entropy(*arguments)
    assert not loss.isfinite() and not gradients(loss, arguments)[1].isfinite().all()


# 3. Weights


def weights_of(m: int, seed: int = 0) -> Tensor:
    """From 0 to 1, a third of them 0."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(m, generator=generator)
    return torch.where(drawn < 1 / 3, 0.0, drawn)


@pytest.mark.parametrize(
    ("label_smoothing", "z_loss", "weights", "bias"),
    [(0.0, 0.0, False, True), (0.0, 0.0, True, False), (0.2, 0.0, True, True), (0.0, 0.03, False, False),
     (0.1, 1e-3, True, True)],
)  # fmt: skip
@pytest.mark.parametrize("m", [0, 1, ROWS, ROWS + 1, 4000])
def test_equals_plain_in_fp64(m: int, label_smoothing: float, z_loss: float, weights: bool, bias: bool) -> None:
    """Also of several chunks; each row's own loss is the same with weights and without."""
    arguments = inputs(m, bias=bias)
    weighted = (label_smoothing, z_loss, *((weights_of(m).double(), 250.0) if weights else ()))
    loss, losses, right = masked_cross_entropy(*arguments, *weighted)
    expected, each, best = plain(*arguments, *weighted)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(losses, each, rtol=1e-12, atol=1e-14)
    assert torch.equal(right, best) and losses.shape == right.shape == (m,) and right.dtype == torch.bool
    assert not (losses.requires_grad or right.requires_grad)
    atol = 1e-12 if not weights and (label_smoothing, z_loss) == (0.0, 0.0) else 1e-11
    for mine, other in zip(gradients(loss, arguments, 0.37), gradients(expected, arguments, 0.37), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=atol)


@pytest.mark.parametrize("bias", [True, False])
def test_columns_in_parts(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes an odd vocabulary in two parts, here in each of two chunks."""
    monkeypatch.setattr(masked_ce, "_vocabulary_slices", lambda weight_VH: [slice(0, V - 5), slice(V - 5, V)])
    arguments = inputs(ROWS + 9, bias=bias)
    (ours, *_), (exact, *_) = masked_cross_entropy(*arguments), plain(*arguments)
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=0)
    for mine, other in zip(gradients(ours, arguments), gradients(exact, arguments), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_of_weight_0_adds_exactly_nothing(dtype: torch.dtype) -> None:
    """As the rows that fill a batch up: whatever they hold, everything else has the same bits."""
    arguments = inputs(300, dtype)
    features, *_, labels = arguments
    weights = weights_of(300)
    found = []
    for number in range(2):
        with torch.no_grad():
            features[weights == 0] *= 1 - 0.5 * number
        labels[weights == 0] = number
        loss, losses, _ = masked_cross_entropy(*arguments, 0.1, 0.01, weights, 3.0)
        found.append((loss.detach(), losses[weights > 0], *gradients(loss, arguments)))
        assert found[-1][2][weights == 0].eq(0).all()
    assert all(map(torch.equal, *found))
    nothing, *_ = masked_cross_entropy(*arguments, 0.1, 0.01, torch.zeros(300), 3.0)
    assert nothing == 0 and all(gradient.eq(0).all() for gradient in gradients(nothing, arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_small_weights_cost_no_precision(dtype: torch.dtype) -> None:
    """Streams of few and of many targets in one call, down to 1e-6 of the largest: each one's gradients are as near to
    fp64, under an incoming gradient that fits it, as those of the head without weights."""
    m, largest = 3000, 1e3
    arguments = inputs(m, dtype, v=400)
    shares = [1.0, 0.25, 2.0**-10, 2.0**-20]  # powers of 2 alike are rounded alike
    weights = torch.tensor(shares).repeat_interleave(m // 4)
    reference = as_fp64(arguments)

    def relative_errors(*weighted: Any) -> Callable[[float], list[float]]:
        """Of the features of each stream, of weight and of bias, under an incoming gradient."""
        loss, exact = (
            f(*a, 0.0, 0.0, *weighted)[0] for f, a in ((masked_cross_entropy, arguments), (plain, reference))
        )
        wanted = gradients(exact, reference)

        def under(d_loss: float) -> list[float]:
            real = gradients(loss, arguments, d_loss)
            parts = [(*g[0].split(m // 4), *g[1:]) for g in (real, wanted)]
            return [rms(mine.double() / d_loss - other) / rms(other) for mine, other in zip(*parts, strict=True)]

        return under

    unit = 1024 / m
    without, mine = relative_errors()(unit), relative_errors(weights, largest)
    for stream, share in enumerate(shares):
        assert 0 < mine(unit / largest / share)[stream] <= 1.3 * without[stream], share
    for ours, other in zip(mine(unit / largest)[4:], without[4:], strict=True):
        assert 0 < ours <= 1.5 * other


# 4. Autograd


def test_nothing_is_computed_that_nobody_asked_for() -> None:
    """Without gradients only logits; with frozen weight or rows, not the other's gradient."""
    m = 1200
    logits = (m, V)
    for frozen, wanted in [((), [logits, (m, H), (V, H)]), ((1,), [logits, (m, H)]), ((0,), [logits, (V, H)])]:
        arguments = inputs(m)
        for leaf in frozen:
            arguments[leaf].requires_grad_(False)  # type: ignore[union-attr]
        with Calls() as calls:
            loss, *_ = masked_cross_entropy(*arguments)
        assert calls.products() == wanted
        expected = plain(*arguments)[0]
        for mine, other in zip(gradients(loss, arguments), gradients(expected, arguments), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    for off in (torch.no_grad, torch.inference_mode):
        arguments = inputs(m)
        with off(), Calls() as calls:
            loss, _, right = masked_cross_entropy(*arguments)
        assert calls.products() == [logits] and not loss.requires_grad
        assert not {"mul", "mul_", "sub_", "scatter_"} & {name for name, shape in calls.seen if shape[1:] == (V,)}
        expected, _, best = plain(*arguments)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        assert torch.equal(right, best)


def test_what_becomes_of_a_gradient_does_not_reach_the_next() -> None:
    """Of a leaf whose gradient is scaled or cleared in its place before the second backward pass, or added to it."""
    arguments = inputs(300, torch.float32)
    leaves = [leaf for leaf in arguments[:3] if leaf is not None]
    loss, *_ = masked_cross_entropy(*arguments)
    exact = [gradient.clone() for gradient in gradients(loss, arguments)]
    loss.backward(retain_graph=True)
    for leaf in leaves:
        leaf.grad.zero_()  # type: ignore[union-attr]
    loss.backward(retain_graph=True)
    for times in (1, 2):
        for leaf, expected in zip(leaves, exact, strict=True):
            torch.testing.assert_close(leaf.grad, times * expected)
        if times == 1:
            loss.backward()


# 5. Chunks


@pytest.mark.parametrize("m", [1, ROWS + 1, 5000])
def test_logits_never_exist_whole(m: int) -> None:
    """No tensor has more than ROWS * V numbers, and no chunk is small; nor does the host wait for a value."""
    arguments = inputs(m, torch.float32, v=300)
    with Calls() as calls:
        loss, *_ = masked_cross_entropy(*arguments, 0.1, 1e-4, weights_of(m), 2.0)
        loss.backward(torch.tensor(2.0))
    assert max(torch.Size(shape).numel() for _, shape in calls.seen) <= ROWS * 300
    chunks = [rows for rows, columns in calls.products() if columns == 300]
    assert sum(chunks) == m and min(chunks) >= min(m, ROWS // 2) and max(chunks) - min(chunks) <= 1
    waits = {"_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal"}
    assert not waits & {name for name, _ in calls.seen}


def test_a_gpu_s_chunks_are_as_large_as_its_memory_allows() -> None:
    """4,096 rows of halves at XLM-R's vocabulary; at least a CPU's, and at most 2 GiB where that is more."""
    assert 4096 <= max_predictions_of_chunk("cuda", 250_002, 2) < 4400
    assert (
        max_predictions_of_chunk("cuda", 32_000, 4) * 32_000 * 4
        <= 2**31
        < (max_predictions_of_chunk("cuda", 32_000, 4) + 1) * 32_000 * 4
    )
    assert (
        max_predictions_of_chunk("cuda", 2_000_000, 4)
        == max_predictions_of_chunk("cpu", 250_002, 4)
        == max_predictions_of_chunk("cpu", 3000, 2)
        == ROWS
    )


# 6. The CUDA kernel: interpreted in a process of its own, and compiled ahead


def interpret() -> None:
    """Losses, hits and the gradient in the logits' place; several turns of a program's loop, and any end."""
    torch.manual_seed(0)
    compute = kernel.losses_overwriting_logits
    block = kernel.LAUNCH["BLOCK"]
    for v, dtype, smoothing, z_loss in (
        (61, torch.float32, 0.0, 0.0), (block, torch.float16, 0.2, 0.0), (2 * block + 1, torch.bfloat16, 0.0, 0.03),
        (2 * block + 1, torch.float32, 0.1, 1e-4),
    ):  # fmt: skip
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
            for factors in (None, torch.tensor([512.0, 0.0, 0.5, 3.0])):
                given, fence = strided(logits), None if factors is None else fenced(factors)
                losses, right = compute(None if bias is None else fenced(bias), given, labels, fence, smoothing, z_loss)
                torch.testing.assert_close(losses.double(), expected.detach(), rtol=3e-6, atol=3e-6)
                assert torch.equal(right, wide.argmax(-1) == labels)
                if factors is None:
                    assert torch.equal(given, logits)
                    continue
                for real, wanted, factor in zip(given.double(), gradient, factors.double(), strict=True):
                    torch.testing.assert_close(real, wanted * factor, rtol=rounding, atol=1e-6 * float(factor))

    ties = torch.zeros(2, block + 9)
    ties[:, [7, 9, block + 7]] = 1.0
    assert compute(None, strided(ties), torch.tensor([7, block + 7]), None, 0.0, 0.0)[1].tolist() == [1, 0]
    for spoilt in ("inf", "nan"):
        logits = torch.randn(2, 40)
        logits[0, 7] = float(spoilt)
        losses, _ = compute(None, given := strided(logits), torch.tensor([3, 3]), torch.ones(2), 0.0, 0.0)
        assert losses.isfinite().tolist() == given.isfinite().all(1).tolist() == [False, True]
    masked = strided(torch.tensor([[0.0, -float("inf"), 1.0]]))
    torch.testing.assert_close(
        compute(None, masked, torch.tensor([2]), torch.ones(1), 0.0, 0.0)[0].exp().item(), 1 + 1 / math.e
    )
    assert len(compute(None, torch.zeros(0, 16), torch.zeros(0, dtype=torch.long), None, 0.0, 0.0)[0]) == 0

    with (
        mock.patch.object(masked_ce, "_triton_module_or_none", lambda features: kernel),
        mock.patch.object(masked_ce, "ROWS", 4),
    ):
        for m, bias, weights in product((0, 11), (True, False), (None, weights_of(11))):
            arguments = inputs(m, torch.float32, bias=bias)
            weighted = 0.1, 0.01, None if weights is None else weights[:m], 30.0
            loss, losses, right = masked_cross_entropy(*arguments, *weighted)
            expected, each, best = plain(*(reference := as_fp64(arguments)), *weighted)
            torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
            torch.testing.assert_close(losses.double(), each, rtol=1e-5, atol=1e-5)
            assert torch.equal(right, best)
            exact = gradients(expected, reference)
            for mine, other in zip(gradients(loss, arguments), exact, strict=True):
                torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-4)


def strided(logits: Tensor) -> Tensor:
    """The same among rows of NaN: [C, V] with a stride of whole `ALIGNED`s."""
    columns = logits.shape[1]
    padded = torch.full((len(logits), -(-columns // kernel.ALIGNED) * kernel.ALIGNED), float("nan"), dtype=logits.dtype)
    padded[:, :columns] = logits
    return fenced(padded)[:, :columns]


@pytest.mark.parametrize(
    ("arch", "dtype", "smooth"),
    [(80, torch.float16, True), (90, torch.float16, False), (90, torch.bfloat16, True), (90, torch.float32, False)],
)
def test_the_compiled_kernel_moves_16_bytes_a_lane(dtype: torch.dtype, arch: int, smooth: bool, tmp_path: Path) -> None:
    """Logits, bias and gradient, for an odd vocabulary; nothing is spilled or added atomically; a row's place is
    computed in 64 bits."""
    logits, bias = strided(torch.zeros(2, 119_547, dtype=dtype)), torch.zeros(119_547, dtype=dtype)
    labels, factors = torch.zeros(2, dtype=torch.long), torch.ones(2)
    for with_bias in (False, True):
        arguments = bias if with_bias else None, logits, labels, factors, 0.1 * smooth, 1e-4
        compute = partial(kernel.losses_overwriting_logits, *arguments)
        program = compiled(kernel, "softmax_losses", arch, compute)
        assert re.search(r"muli .*: i64", program.asm["ttir"])
        found = memory_instructions(program, tmp_path)
        pieces = kernel.LAUNCH["BLOCK"] // (32 * kernel.LAUNCH["num_warps"]) * dtype.itemsize // 16  # of a thread
        assert (found["LDG.E.128"], found["STG.E.128"]) == (2 * pieces * (1 + with_bias), pieces)
        others = {name for name in found if name.startswith(("LDG", "STG"))} - {"LDG.E.128", "STG.E.128"}
        assert others == {"LDG.E", "STG.E", "STG.E.U8"}  # label and factor; loss; hit
        assert not any(name.startswith(("LDL", "STL", "ATOM", "RED")) for name in found)
