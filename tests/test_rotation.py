"""Rotary position embeddings against transformers' own, in both directions; the kernel interpreted and compiled."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers.models.modernbert.modeling_modernbert import rotate_half

from tests.triton_kernel import compiled, fenced, memory_instructions
from xscale.ops import rotation
from xscale.ops import rotation_triton as kernel
from xscale.ops.rotation import rotate_

SHAPES = [(7, 3, 8), (5, 12, 64), (1, 1, 2), (4, 5, 20), (0, 2, 8)]
"""Tokens, heads, width of a head."""
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def angles(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines as transformers has them, of every head [N, 1, 1, D]."""
    turns = torch.randint(0, 4000, (tokens, 1)) / 10_000 ** (torch.arange(0, width, 2) / width)
    wide = torch.promote_types(dtype, torch.float32)
    return tuple(turn.repeat(1, 2).to(wide)[:, None, None] for turn in (turns.cos(), turns.sin()))


def signed(sin: Tensor) -> Tensor:
    first, second = sin.chunk(2, -1)
    return torch.cat([-first, second], -1)


def by_transformers(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)
    cos, sin = cos[:, 0], sin[:, 0]
    return torch.stack([q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v], 1).flatten(1)


Turn = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""qkv, gradient, cosines, signed sines, heads -> qkv turned, and the gradient turned back."""


def by_autograd(qkv: Tensor, incoming: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    leaf = qkv.clone().requires_grad_()
    out = rotate_(leaf * 1, cos, sin, heads)
    return out.detach(), *torch.autograd.grad(out, leaf, incoming)


def check(tokens: int, heads: int, width: int, dtype: torch.dtype, turn: Turn = by_autograd) -> None:
    cos, sin = angles(tokens, width, dtype)
    qkv, incoming = (torch.randn(tokens, 3 * heads * width).to(dtype) for _ in range(2))
    wide = qkv.double().requires_grad_()
    expected = by_transformers(wide, cos.double(), sin.double(), heads)
    (gradient,) = torch.autograd.grad(expected, wide, incoming.double())
    kept = incoming.clone()
    out, ours = turn(qkv, incoming, cos, signed(sin), heads)
    for found, exact in ((out, expected.detach()), (ours, gradient)):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=ROUNDING[dtype], atol=2 * ROUNDING[dtype])
    assert torch.equal(incoming, kept), "another may read the gradient"
    values = slice(2 * heads * width, None)
    assert torch.equal(out[:, values], qkv[:, values]) and torch.equal(ours[:, values], incoming[:, values])


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotation_is_that_of_transformers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """In 16 bits computed in fp32 and rounded once; values and the incoming gradient stay as they are."""
    check(*shape, dtype)


def test_gradients_that_are_not_contiguous() -> None:
    cos, sin = angles(6, 8, torch.float64)
    leaf = torch.randn(6, 48, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(rotate_(leaf * 1, cos, signed(sin), 2).sum(), leaf)
    (exact,) = torch.autograd.grad(by_transformers(leaf, cos, sin, 2).sum(), leaf)
    torch.testing.assert_close(ours, exact)
    assert torch.autograd.gradcheck(lambda x: rotate_(x * 1, cos, signed(sin), 2), leaf)


def interpret() -> None:
    def turn(qkv: Tensor, incoming: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        out, back, *turns = map(fenced, (qkv, torch.full_like(incoming, float("nan")), cos, sin))
        kernel.rotate_into(out, out, *turns, heads)
        kernel.rotate_into(fenced(incoming), back, *turns, heads, inverse=True)
        return out, back

    torch.manual_seed(0)
    for shape in SHAPES:
        for dtype in (torch.float64, torch.float32, torch.float16):
            check(*shape, dtype, turn)
    with mock.patch.object(rotation, "_triton_module_or_none", lambda qkv: kernel):
        check(5, 12, 64, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "heads", "width", "arch"), [(torch.float16, 12, 64, 80), (torch.bfloat16, 6, 64, 90)]
)
def test_the_compiled_kernel_moves_16_bytes_a_lane(
    dtype: torch.dtype, heads: int, width: int, arch: int, tmp_path: Path
) -> None:
    """In place and back, of all heads of ModernBERT's sizes; nothing is spilled or added atomically."""
    qkv, (cos, sin) = torch.zeros(9, 3 * heads * width, dtype=dtype), angles(9, width, dtype)
    for out in (qkv, qkv.clone()):
        work = partial(kernel.rotate_into, qkv, out, cos, sin, heads, inverse=out is not qkv)
        found = memory_instructions(compiled(kernel, "rotate_heads", arch, work), tmp_path)
        assert found["LDG.E.128"] >= 2 and found["STG.E.128"] == 2
        others = {name for name in found if name.startswith(("LDG", "STG"))} - {"LDG.E.128", "STG.E.128"}
        assert others <= {"LDG.E"}, "cosines and sines of few heads"
        assert not any(name.startswith(("LDL", "STL", "ATOM", "RED")) for name in found)
