"""The GPU kernels of short attention and of dropout, residual and norm, interpreted and compiled."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.triton_kernel import compiled, fenced, memory_instructions
from xscale.models.attention import attention
from xscale.ops import dropout_add_norm_triton, short_attention_triton
from xscale.ops.dropout_add_norm import fused_dropout_add_norm
from xscale.ops.short_attention import short_attention

HALF = {"rtol": 0, "atol": 4e-3}
"""The rounding of a few operations in fp16 on numbers near 1."""


def starts_of(lengths: list[int]) -> Tensor:
    return fenced(F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int())


def check_attention(lengths: list[int], heads: int, width: int, window: int | None) -> None:
    """Values and gradients are those of fp64 attention in blocks."""
    tokens = sum(lengths)
    qkv = fenced(torch.randn(tokens, 3 * heads * width).half()).requires_grad_()
    incoming = fenced(torch.randn(tokens, heads * width).half())
    out = short_attention(qkv, starts_of(lengths), max(lengths), 2**61, heads, 0.0, window)
    wide = qkv.detach().double().requires_grad_()
    arguments = torch.tensor(lengths, dtype=torch.int32), max(lengths), 0, heads, 0.0, window
    expected = attention(wide, starts_of(lengths), *arguments)
    torch.testing.assert_close(out.double(), expected, **HALF)
    (ours,), (theirs,) = (
        torch.autograd.grad(of, leaf, incoming.to(of.dtype)) for of, leaf in ((out, qkv), (expected, wide))
    )
    torch.testing.assert_close(ours.double(), theirs, **HALF)


def check_attention_dropout() -> None:
    """The output is the dropped weights, since scores are equal and values one-hot. Their share is p, and two masks
    whose seed, head, sequence, query or key differ are independent. The backward pass draws the same mask."""
    n, width, heads, p = 16, 16, 2, 0.1
    qkv = torch.zeros(n, width, 3, heads, width).half()
    qkv[:, :, 2] = torch.eye(width)[:, None]
    leaf = qkv.view(n * width, -1).requires_grad_()
    starts = starts_of([width] * n)

    def weights(seed: int) -> Tensor:
        return short_attention(leaf, starts, width, seed, heads, p, None) * width

    first, again, next_seed, far_seed = (weights(seed) for seed in (1, 1, 2, 2**61))
    assert torch.equal(first, again) and len(first.unique()) == 2
    dropped = (first == 0).view(n, width, heads, width)
    assert dropped.float().mean().item() == pytest.approx(p, abs=0.01)
    assert first.max().item() == pytest.approx(1 / (1 - p), rel=1e-3)
    pairs = [(dropped, (other == 0).view_as(dropped)) for other in (next_seed, far_seed)]
    pairs += [(dropped[:, :, 0], dropped[:, :, 1]), (dropped[1:], dropped[:-1])]
    pairs += [(dropped[:, 1:], dropped[:, :-1]), (dropped[..., 1:], dropped[..., :-1])]
    for a, b in pairs:
        assert (a & b).float().mean().item() == pytest.approx(p * p, abs=0.005)
    (gradient,) = torch.autograd.grad(first.sum(), leaf)
    of_values = gradient.view(n, width, 3, heads, width)[:, :, 2]
    of_keys = first.detach().view(n, width, heads, width).sum(1).transpose(1, 2)[..., None]
    torch.testing.assert_close(of_values, of_keys.expand_as(of_values), rtol=2e-3, atol=2e-3)


def check_norm(tokens: int, width: int, p: float) -> None:
    """States and gradients are those of plain operators in fp64 with the same mask, which the gradient of x shows."""
    norm = nn.LayerNorm(width).half()
    for weight in norm.parameters():
        nn.init.normal_(weight)
    leaves = [fenced(torch.randn(tokens, width).half()).requires_grad_() for _ in range(2)] + [*norm.parameters()]
    incoming = fenced(torch.randn(tokens, width).half())
    out = fused_dropout_add_norm(leaves[0], leaves[1], p, norm, 5)
    ours = torch.autograd.grad(out, leaves, incoming)
    kept = (ours[0] != 0) | (ours[1] == 0)
    if tokens * width > 1000 and p:
        assert (~kept).float().mean().item() == pytest.approx(p, abs=0.03)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = F.layer_norm(wide[0] * kept / (1 - p) + wide[1], (width,), *wide[2:])
    theirs = torch.autograd.grad(expected, wide, incoming.double())
    for found, exact in zip([out, *ours], [expected, *theirs], strict=True):
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.double(), exact.detach(), rtol=4e-3, atol=1e-2)


def interpret() -> None:
    torch.manual_seed(0)
    with mock.patch.object(torch.cuda, "device_of", lambda tensor: nullcontext()):
        for window in (None, 0, 3):
            check_attention([13, 9, 4, 1, 0, 2, 0], 2, 16, window)
        check_attention([40, 33, 32, 5], 3, 32, None)
        check_attention([128, 65, 64, 3], 1, 64, 16)
        check_attention_dropout()
        for tokens, width, p in ((5, 48, 0.0), (7, 771, 0.0), (40, 64, 0.3)):
            check_norm(tokens, width, p)
        with mock.patch.object(dropout_add_norm_triton, "PROGRAMS", 3):  # of several turns each
            check_norm(29, 16, 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_compiled_kernels_move_16_bytes_a_lane(dtype: torch.dtype, tmp_path: Path) -> None:
    """The kernels are those for a head of 64 numbers and for BERT's width; they add nothing atomically and spill
    nothing."""
    attention_kernels, norm_kernels = short_attention_triton, dropout_add_norm_triton
    starts, qkv, out = starts_of([64, 3]), torch.zeros(67, 3 * 128, dtype=dtype), torch.zeros(67, 128, dtype=dtype)
    x, weight = torch.zeros(9, 768, dtype=dtype), torch.zeros(768, dtype=dtype)
    programs: list[tuple[ModuleType, str, Any]] = [
        (norm_kernels, "forward_rows", lambda: norm_kernels.forward(x, x, weight, weight, 0.1, 1e-5, 5)),
        (norm_kernels, "backward_rows", lambda: norm_kernels.backward(x, x, torch.zeros(9, 2), weight, 0.1, 5)),
    ]
    blocks = attention_kernels.BLOCKS if dtype == torch.float16 else attention_kernels.BLOCKS[1:2]  # the same sizes
    for block in blocks:
        attend: list[Any] = [qkv, starts, out, block[1], 5, 2, 0.1, None]
        one_block = mock.patch.object(attention_kernels, "BLOCKS", (block,))
        programs.append(
            (
                attention_kernels,
                "forward_heads",
                one_block(partial(attention_kernels.launch_attention_kernels, *attend)),
            )
        )
        backward = partial(attention_kernels.launch_attention_kernels, *attend, torch.zeros_like(qkv))
        programs.append((attention_kernels, "backward_heads", one_block(backward)))
    for module, name, work in programs:
        found = memory_instructions(compiled(module, name, 90, work), tmp_path)
        loads = {kind for kind in found if kind.startswith("LDG")}
        assert loads - {"LDG.E"} == {"LDG.E.128"}, "starts and means are single numbers"
        assert not any(kind.startswith(("LDL", "STL", "ATOM", "RED")) for kind in found), (name, found)
