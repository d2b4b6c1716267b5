"""Attention on a flat row against a softmax of each sequence alone, and dropout against what it states."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.models import attention as module
from xscale.models.attention import attention, dropout, supports_flash

HEADS, WIDTH = 2, 8
MIXED = [13, 13, 12, 9, 4, 4, 3, 1, 0, 2, 0]
"""Longest first, then fillers that break the order."""
LENGTHS = [MIXED, [1], [5, 5, 5], [40, 39, 2], [7, 6, 6, 6, 6]]
SEED = 7


def rows(lengths: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [N, X], starts [B + 1], lengths [B]."""
    r = torch.Generator().manual_seed(sum(lengths))
    qkv_NX = torch.randn(sum(lengths), 3 * HEADS * WIDTH, generator=r, dtype=torch.float64).to(dtype)
    lengths_B = torch.tensor(lengths, dtype=torch.int32)
    return qkv_NX.requires_grad_(), F.pad(lengths_B.cumsum(0), (1, 0)).int(), lengths_B


def attend(qkv_NX: Tensor, starts_B1: Tensor, lengths_B: Tensor, p: float = 0.0, window: int | None = None) -> Tensor:
    longest = int(lengths_B.max()) + 2
    return attention(qkv_NX, starts_B1, lengths_B, longest, SEED, HEADS, p, window)


def weights_of(q_mAD: Tensor, k_nAD: Tensor, window: int | None) -> Tensor:
    """Of one sequence [A, m, n], by the definition."""
    scores = torch.einsum("mad,nad->amn", q_mAD, k_nAD) / WIDTH**0.5
    i = torch.arange(len(q_mAD))
    far = (i[:, None] - i).abs() > (len(i) if window is None else window)
    return torch.softmax(scores.masked_fill(far, float("-inf")), -1)


def alone(qkv_NX: Tensor, starts_B1: Tensor, window: int | None = None) -> Tensor:
    """One sequence after the other."""
    found = []
    for a, b in pairwise(starts_B1.tolist()):
        q, k, v = qkv_NX[a:b].unflatten(1, (3, HEADS, WIDTH)).unbind(1)
        found.append(torch.einsum("amn,nad->mad", weights_of(q, k, window), v).flatten(1))
    return torch.cat(found)


@pytest.mark.parametrize("window", [None, 0, 3])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_states_and_gradients_are_those_of_each_sequence_alone(lengths: list[int], window: int | None) -> None:
    qkv_NX, starts_B1, lengths_B = rows(lengths)
    out, expected = attend(qkv_NX, starts_B1, lengths_B, window=window), alone(qkv_NX, starts_B1, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(out)
    found = [torch.autograd.grad((x * weights).sum(), qkv_NX)[0] for x in (out, expected)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(attend(qkv_NX, starts_B1, lengths_B, window=window), out)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("window", [None, 2])
def test_gradients_are_those_of_what_dropout_kept(p: float, window: int | None) -> None:
    """By differences along a direction, with the draws of one seed."""
    qkv_NX, *cut = rows(MIXED)
    weights, direction = torch.randn(sum(MIXED), HEADS * WIDTH).double(), torch.randn_like(qkv_NX)
    (gradient,) = torch.autograd.grad((attend(qkv_NX, *cut, p, window) * weights).sum(), qkv_NX)
    ahead, behind = (attend(qkv_NX.detach() + e * direction, *cut, p, window) for e in (1e-5, -1e-5))
    slope = ((ahead - behind) * weights).sum() / 2e-5
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-6)


def test_dropout_keeps_its_share_of_the_weights() -> None:
    """Equal scores, and values that show each weight. Draws of other seeds differ, and those of a seed do not."""
    n, p = 500, 0.1
    qkv = torch.zeros(n, WIDTH, 3, HEADS, WIDTH, dtype=torch.float64)
    qkv[:, :, 2] = torch.eye(WIDTH, dtype=torch.float64)[:, None]
    lengths_B = torch.full((n,), WIDTH, dtype=torch.int32)
    arguments = qkv.view(n * WIDTH, -1), torch.arange(n + 1).int() * WIDTH, lengths_B, WIDTH
    weights, again, other = (attention(*arguments, seed, HEADS, p) * WIDTH for seed in (1, 1, 2))
    values = weights.unique()
    assert len(values) == 2 and values[0] == 0
    assert values[1].item() == pytest.approx(1 / (1 - p), rel=1e-4)
    assert weights.mean().item() == pytest.approx(1, abs=0.01)
    assert torch.equal(weights, again)
    assert ((weights == 0) & (other == 0)).double().mean().item() == pytest.approx(p * p, abs=0.005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 3])
def test_narrow_types_are_near(dtype: torch.dtype, window: int | None) -> None:
    exact, narrow = rows(MIXED), rows(MIXED, dtype)
    outs = [attend(*arguments, window=window) for arguments in (exact, narrow)]
    weights = torch.randn_like(outs[0])
    gradients = [
        torch.autograd.grad((x * weights.to(x.dtype)).sum(), qkv)[0]
        for x, (qkv, *_) in zip(outs, (exact, narrow), strict=True)
    ]
    tolerance = 8 * torch.finfo(dtype).eps
    for wide, x in (outs, gradients):
        assert x.dtype == dtype
        assert (x - wide).abs().max() <= tolerance * wide.abs().max()


def test_large_scores_of_half_precision_stay_finite() -> None:
    """Also where all places within a padded query's window are padding."""
    qkv_NX, *cut = rows([64, 60, 57], torch.float16)
    out = attend(qkv_NX * 30, *cut, window=1)
    (gradient,) = torch.autograd.grad(out.float().sum(), qkv_NX)
    assert out.isfinite().all() and gradient.isfinite().all()


# The flash kernel


def flash_forward(q: Any, k: Any, v: Any, starts: Any, starts_k: Any, *args: Any, **more: Any) -> Any:
    """aten._flash_attention_forward, one sequence after the other [N, A, D]."""
    longest, longest_k, p, causal, debug = args
    assert torch.equal(starts, starts_k) and starts.dtype == torch.int32 and not causal and not debug
    assert longest == longest_k >= max(starts.diff()) and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    left, right = more.get("window_size_left"), more.get("window_size_right")
    assert left == right
    qkv_NX = torch.stack([q, k, v], 1).flatten(1)
    out_NAD = alone(qkv_NX, starts, left).view_as(q) * (1 - p)  # as if dropout were a factor
    zero = torch.zeros((), dtype=torch.uint64)
    return out_NAD, torch.zeros(q.shape[1::-1]), torch.stack([zero, zero]), torch.zeros(()), torch.zeros(0)


def flash_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, starts: Any, *args: Any, **more: Any) -> Any:
    """aten._flash_attention_backward."""
    found = [torch.empty_like(x) for x in (q, k, v)]
    for a, b in pairwise(starts.tolist()):
        P = weights_of(q[a:b], k[a:b], more.get("window_size_left"))
        g = grad[a:b] * (1 - args[3])
        dP = torch.einsum("mad,nad->amn", g, v[a:b])
        dS = P * (dP - (dP * P).sum(-1, keepdim=True)) / WIDTH**0.5
        found[0][a:b] = torch.einsum("amn,nad->mad", dS, k[a:b])
        found[1][a:b] = torch.einsum("amn,mad->nad", dS, q[a:b])
        found[2][a:b] = torch.einsum("amn,mad->nad", P, g)
    return tuple(found)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CUDA kernel in plain torch on the CPU, below torch's own wiring of it."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", flash_forward, "CPU")
        library.impl("_flash_attention_backward", flash_backward, "CPU")
        monkeypatch.setattr(module, "supports_flash", lambda qkv_NX, heads: True)
        yield


@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_is_told_all(p: float, window: int | None, kernel: None) -> None:
    """Sequences, window, scale, dropout: forward and backward."""
    qkv_NX, starts_B1, lengths_B = rows(MIXED)
    out, expected = attend(qkv_NX, starts_B1, lengths_B, p, window), alone(qkv_NX, starts_B1, window) * (1 - p)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(out)
    found = [torch.autograd.grad((x * weights).sum(), qkv_NX)[0] for x in (out, expected)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("runs", "dtype", "cuda", "capability", "head"),
    [
        (True, torch.float16, True, (8, 0), 64),
        (True, torch.bfloat16, True, (10, 0), 128),
        (False, torch.float32, True, (9, 0), 64),
        (False, torch.float16, False, (9, 0), 64),
        (False, torch.float16, True, (7, 0), 64),
        (False, torch.float16, True, (9, 0), 60),
        (False, torch.float16, True, (9, 0), 256),
    ],
)
def test_the_kernel_runs_where_it_can(
    runs: bool, dtype: torch.dtype, cuda: bool, capability: tuple, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rows:
        is_cuda, device, shape = cuda, None, (5, 3 * 12 * head)

    Rows.dtype = dtype
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert supports_flash(Rows(), 12) is runs  # type: ignore[arg-type]


# Dropout


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_states(dtype: torch.dtype, p: float) -> None:
    """Its share, its scale, its gradient and its residual; a seed repeats it."""
    x, residual = torch.ones(403, 251, dtype=dtype, requires_grad=True), torch.randn(403, 251, dtype=dtype)
    residual.requires_grad_()
    torch.manual_seed(1)
    out = dropout(x, p)
    kept = out != 0
    assert kept.double().mean().item() == pytest.approx(1 - p, abs=0.005)
    assert kept[:, ::4].double().mean().item() == pytest.approx(1 - p, abs=0.01)
    torch.testing.assert_close(
        out[kept].double(), torch.full((int(kept.sum()),), 1 / (1 - p)).double(), rtol=5e-3, atol=0
    )
    torch.manual_seed(1)
    added = dropout(x, p, residual)
    torch.testing.assert_close(added, residual + out)
    d_x, d_residual = torch.autograd.grad(added.sum(), (x, residual))
    assert torch.equal(d_x, out.detach()) and torch.equal(d_residual, torch.ones_like(residual))


def test_no_dropout_draws_nothing() -> None:
    x = torch.randn(5)
    state = torch.get_rng_state()
    assert dropout(x, 0.0) is x and torch.equal(dropout(x, 0.0, x), 2 * x)
    assert torch.equal(torch.get_rng_state(), state)
