"""Self-attention over a packed row of sequences, and a dropout that is cheap on a CPU.

In 16 bits on CUDA, our kernel for short sequences (ops/short_attention.py) or PyTorch's flash kernel computes
attention. In all other cases, a row is cut into blocks of sequences of similar length, and each block is padded.

Shape letters: N tokens of a row, B sequences, A heads, D width of a head, H = A * D, X = 3 * H (queries, keys, values);
n sequences of a block, L tokens of its longest, R = n * A; P parts of a tensor (3 for queries, keys and values), W its
last width.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from xscale.ops.short_attention import LONGEST, WIDTHS, short_attention

SIMILAR = 0.75
"""A sequence starts a new block if it is shorter than this share of the current block's first sequence. The blocks are
then few, and have little padding."""


def attention(
    qkv_NX: Tensor,
    starts_B1: Tensor,
    lengths_B: Tensor,
    longest: int,
    seed: int,
    heads: int,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """Return `dropout(softmax(q k^T / sqrt(D))) v` within each sequence [N, H].

    starts_B1, lengths_B, longest: as in data/packed_row.py's Tokens. seed: it determines the dropout mask, so that a
    recomputed call draws the same mask; only PyTorch's flash kernel draws from CUDA's generator instead. window: a
    token attends only to positions with |i - j| <= window.
    """
    if supports_flash(qkv_NX, heads):
        if longest <= LONGEST and qkv_NX.shape[1] // (3 * heads) in WIDTHS:
            return short_attention(qkv_NX, starts_B1, longest, seed, heads, dropout, window)
        return _flash_attention(qkv_NX, starts_B1, longest, heads, dropout, window)
    return _BlockAttention.apply(qkv_NX, tuple(lengths_B.tolist()), seed, heads, dropout, window)


def supports_flash(qkv_NX: Tensor, heads: int) -> bool:
    """Return True if PyTorch's flash kernel accepts the input: 16 bits, Ampere or newer, and a head width that is a
    multiple of 8, up to 128. Our kernel for short sequences needs the same."""
    head = qkv_NX.shape[1] // (3 * heads)
    fits = qkv_NX.dtype in (torch.float16, torch.bfloat16) and head % 8 == 0 and head <= 128
    return fits and qkv_NX.is_cuda and torch.cuda.get_device_capability(qkv_NX.device) >= (8, 0)


def _flash_attention(
    qkv_NX: Tensor, starts_B1: Tensor, longest: int, heads: int, dropout: float, window: int | None
) -> Tensor:
    """Return the result of `attention` [N, H] by the operator beneath torch's varlen_attn, which has no dropout."""
    q_NAD, k_NAD, v_NAD = qkv_NX.view(len(qkv_NX), 3, heads, -1).unbind(1)
    causal = debug = False
    local = {} if window is None else {"window_size_left": window, "window_size_right": window}
    operator = torch.ops.aten._flash_attention_forward
    out_NAD = operator(q_NAD, k_NAD, v_NAD, starts_B1, starts_B1, longest, longest, dropout, causal, debug, **local)[0]
    return out_NAD.flatten(1)


class Block(NamedTuple):
    """Consecutive sequences of similar length, padded to the longest of them."""

    tokens: slice
    """The block's tokens in the row."""
    n: int
    L: int
    heads: int
    padded_position: Tensor | None
    """The padded position, in [0, n * L), of each token of the block; None if nothing is padded."""
    source_token: Tensor | None
    """The index of the block's token at each padded position [n * L]; padding repeats some token."""
    masks: list[Tensor]
    """Additive attention masks: one hides padding [R, 1, L], one hides tokens outside the sliding window [1, L, L]."""

    def pad(self, rows: Tensor, with_zeros: bool = False) -> Tensor:
        """Return the block's tokens of rows [N, P, A, W] as [P, n, A, L, W]. Padding is 0 if `with_zeros`, else
        arbitrary."""
        rows = rows[self.tokens]
        if self.padded_position is not None and self.source_token is not None:
            if with_zeros:
                rows = rows.new_zeros(self.n * self.L, *rows.shape[1:]).index_copy_(0, self.padded_position, rows)
            else:
                rows = rows.index_select(0, self.source_token)
        return rows.unflatten(0, (self.n, self.L)).permute(2, 0, 3, 1, 4)

    def saved_element_counts(self, X: int, dropout: float) -> list[int]:
        """Return the numbers of elements that the backward pass reads: padded queries, keys and values, the attention
        weights, and with dropout the dropped ones."""
        weights = self.n * self.heads * self.L * self.L
        return [self.n * self.L * X, weights, weights] if dropout else [self.n * self.L * X, weights]

    def unpad_into(self, padded: Tensor, out: Tensor) -> None:
        """Write padded [P, R, L, W] into the block's tokens of out [N, P, A, W]: the inverse of `pad`."""
        padded = padded.unflatten(1, (self.n, self.heads)).permute(1, 3, 0, 2, 4)
        if self.padded_position is None:
            out[self.tokens].unflatten(0, (self.n, self.L)).copy_(padded)
        else:
            torch.index_select(padded.flatten(0, 1), 0, self.padded_position, out=out[self.tokens])


@lru_cache(maxsize=16)
def _divide_into_blocks(
    lengths: tuple[int, ...], heads: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> list[Block]:
    """Return the packed row's non-empty sequences as blocks of consecutive sequences of similar length."""
    groups: list[list[int]] = []
    for length in filter(None, lengths):
        if not groups or length > groups[-1][0] or length < SIMILAR * groups[-1][0]:
            groups.append([])
        groups[-1].append(length)
    ends = accumulate(map(sum, groups))
    return [_make_block(end, group, heads, window, dtype, device) for end, group in zip(ends, groups, strict=True)]


def _make_block(
    end_in_row: int, lengths: list[int], heads: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Block:
    """Return the block of consecutive sequences of a row. end_in_row: the row's index after the block's last token.
    lengths: those of the sequences; the first is the longest."""
    n = len(lengths)
    L = lengths[0]
    outside = torch.finfo(dtype).min / 4  # the sum of both masks is still finite, so that no softmax is NaN
    padded_position = source_token = None
    masks = []
    places_L = torch.arange(L, device=device)
    if min(lengths) < L:
        real_nL = places_L < torch.tensor(lengths, device=device)[:, None]
        padded_position = real_nL.flatten().nonzero()[:, 0]
        source_token = real_nL.flatten().cumsum(0) - 1
        padding = torch.zeros(n, L, dtype=dtype, device=device).masked_fill_(~real_nL, outside)
        masks.append(padding.repeat_interleave(heads, 0)[:, None])
    if window is not None and window < L - 1:
        far_LL = (places_L[:, None] - places_L).abs() > window
        masks.append(torch.zeros(1, L, L, dtype=dtype, device=device).masked_fill_(far_LL, outside))
    return Block(slice(end_in_row - sum(lengths), end_in_row), n, L, heads, padded_position, source_token, masks)


class _BlockAttention(torch.autograd.Function):
    """Attention in blocks of sequences. One buffer holds what the backward pass reads of all blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv_NX: Tensor,
        lengths: tuple[int, ...],
        seed: int,
        heads: int,
        dropout: float,
        window: int | None,
    ) -> Tensor:
        N, X = qkv_NX.shape
        qkv = qkv_NX.view(N, 3, heads, -1)
        out_NH = qkv_NX.new_empty(N, X // 3)
        blocks = _divide_into_blocks(lengths, heads, window, qkv_NX.dtype, qkv_NX.device)
        assert blocks[-1].tokens.stop == N, "the number of tokens in the row is not the sum of `lengths`"
        sizes = [sum(block.saved_element_counts(X, dropout)) for block in blocks]
        keep = ctx.needs_input_grad[0]
        buffer = qkv_NX.new_empty(sum(sizes) if keep else max(sizes))
        generator = torch.Generator(qkv_NX.device).manual_seed(seed) if dropout else None
        for block, x, p, dropped in _block_views(buffer, blocks, X, dropout, keep):
            x.unflatten(1, (block.n, heads)).copy_(block.pad(qkv))
            torch.softmax(_masked_scores(x, block.masks), -1, out=p)
            if dropout:
                torch.mul(p, dropout_mask(p, dropout, generator), out=dropped)
            block.unpad_into(torch.bmm(dropped, x[2])[None], out_NH.view(N, 1, heads, -1))
        ctx.save_for_backward(out_NH, buffer)
        ctx.blocks = blocks
        ctx.dropout = dropout
        return out_NH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of qkv [N, X]: dS = dropout(P) * (g v^T) - P * delta, delta = sum(g * out), g = grad."""
        out_NH, buffer = ctx.saved_tensors
        N, H = grad_NH.shape
        grad = grad_NH.reshape(N, 1, ctx.blocks[0].heads, -1)
        delta = (grad * out_NH.view_as(grad)).sum(-1, keepdim=True)
        d_qkv = grad_NH.new_empty(N, 3, *grad.shape[2:])
        for block, (q, k, v), p, dropped in _block_views(buffer, ctx.blocks, 3 * H, ctx.dropout, keep_all=True):
            g = block.pad(grad, with_zeros=True)[0].flatten(0, 1)
            delta_RL1 = block.pad(delta, with_zeros=True)[0].flatten(0, 1)
            dx = q.new_empty(3, *q.shape)
            scale = q.shape[-1] ** -0.5
            torch.bmm(dropped.transpose(1, 2), g, out=dx[2])
            dS = torch.bmm(g, v.transpose(1, 2)).mul_(dropped).addcmul_(p, delta_RL1, value=-1)
            dx[0].baddbmm_(dS, k, beta=0, alpha=scale)
            dx[1].baddbmm_(dS.transpose(1, 2), q, beta=0, alpha=scale)
            block.unpad_into(dx, d_qkv)
        return d_qkv.view(N, 3 * H), None, None, None, None, None


def _block_views(
    buffer: Tensor, blocks: list[Block], X: int, dropout: float, keep_all: bool
) -> Iterator[tuple[Block, Tensor, Tensor, Tensor]]:
    """Yield each block with its views of the buffer: padded queries, keys and values [3, R, L, D], and attention
    weights before and after dropout [R, L, L]. Without dropout, the last two are the same view.

    If `keep_all`, the views of different blocks do not overlap, so that the backward pass can read them. Otherwise
    each block begins at the buffer's start.
    """
    start = 0
    for block in blocks:
        R = block.n * block.heads
        sizes = block.saved_element_counts(X, dropout)
        qkv, *weights = buffer[start : start + sum(sizes)].split(sizes)
        p = weights[0].view(R, block.L, block.L)
        yield block, qkv.view(3, R, block.L, -1), p, weights[-1].view_as(p)
        if keep_all:
            start += sum(sizes)


def _masked_scores(qkv: Tensor, masks: list[Tensor]) -> Tensor:
    """Return q k^T / sqrt(D) + masks [R, L, L] for qkv [3, R, L, D]."""
    q = qkv[0]
    k_transposed = qkv[1].transpose(1, 2)
    scale = q.shape[-1] ** -0.5
    if not masks:
        return torch.baddbmm(q.new_empty(1), q, k_transposed, beta=0, alpha=scale)
    scores = torch.baddbmm(masks[0], q, k_transposed, alpha=scale)
    for mask in masks[1:]:
        scores.add_(mask)
    return scores


def dropout_mask(like: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """Return a dropout mask with the shape and type of `like`: 0 with probability p, rounded to 2^-16, else 1 / (1 -
    p).

    Each 64-bit random number is used for four elements, because drawing the numbers is most of dropout's cost on a CPU.
    """
    drop = round(p * 2**16)
    draws = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    bits = draws.random_(-(2**63), None, generator=generator).view(torch.int16)[: like.numel()]
    keep = torch.ge(bits, drop - 2**15, out=like.new_empty(like.numel()))
    return keep.mul_(2**16 / (2**16 - drop)).view(like.shape)


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, p: float) -> Tensor:
        keep = dropout_mask(x, p)
        ctx.save_for_backward(keep)
        return x * keep if residual is None else torch.addcmul(residual, x, keep)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return grad * ctx.saved_tensors[0], grad if ctx.needs_input_grad[1] else None, None


def dropout(x: Tensor, p: float, residual: Tensor | None = None) -> Tensor:
    """Return `F.dropout(x, p)`, plus the residual if there is one. Masks are drawn from torch's global generator."""
    if p and x.device.type == "cpu":
        return _DropoutAdd.apply(x, residual, p)
    dropped = F.dropout(x, p) if p else x
    return dropped if residual is None else residual + dropped
