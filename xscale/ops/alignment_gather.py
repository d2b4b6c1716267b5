"""The alignment gather of AlignLM: rows of A^T H for a sparse 0/1 matrix A, without A.

Shape letters: N tokens (padding included), H hidden width, R rows that a loss reads, K links.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def alignment_gather(
    hidden_NH: Tensor, split: int, offsets_R1: Tensor, columns_K: Tensor, t_offsets_N1: Tensor, t_rows_K: Tensor
) -> tuple[Tensor, Tensor]:
    """`torch.stack([hidden[columns[a:b]].sum(0) for a, b in pairwise(offsets)]).tensor_split([split])`.

    The sum of nothing is 0. The transposed index lists for each token the rows that it is summed into: the backward
    pass is the same gather over it, and writes each row of the gradient once. Sums are taken in fp32 (fp64) and in an
    order that only the index decides: no atomics, the same bits every time. The index is int32, on the same device.
    Two tensors, not one to be split: autograd would first copy the gradients of its parts into one.
    """
    nothing = hidden_NH.new_empty(0, hidden_NH.shape[1])
    return _gather_sum(hidden_NH, nothing, offsets_R1, columns_K, t_offsets_N1, t_rows_K, split)


@torch.library.custom_op("xscale::alignment_gather", mutates_args=())
def _gather_sum(
    first: Tensor, second: Tensor, offsets: Tensor, columns: Tensor, t_offsets: Tensor, t_columns: Tensor, split: int
) -> tuple[Tensor, Tensor]:
    """The same for the rows of `torch.cat([first, second])`: its own derivative. Only here are they copied together."""
    values = torch.cat([first, second]) if len(second) else first.detach()
    middle = offsets[split]
    halves = (offsets[: split + 1], columns[:middle]), (offsets[split:] - middle, columns[middle:])
    upper, lower = (F.embedding_bag(c, values, o, mode="sum", include_last_offset=True) for o, c in halves)
    return upper, lower


@_gather_sum.register_kernel("cuda")
def _gather_sum_cuda(
    first: Tensor, second: Tensor, offsets: Tensor, columns: Tensor, t_offsets: Tensor, t_columns: Tensor, split: int
) -> tuple[Tensor, Tensor]:
    from xscale.ops import alignment_gather_triton  # Triton comes with CUDA builds of torch

    return alignment_gather_triton.gather_sum(first, second, offsets, columns, split)


@_gather_sum.register_fake
def _gather_sum_fake(
    first: Tensor, second: Tensor, offsets: Tensor, columns: Tensor, t_offsets: Tensor, t_columns: Tensor, split: int
) -> tuple[Tensor, Tensor]:
    width = first.shape[1]
    return first.new_empty(split, width), first.new_empty(len(offsets) - 1 - split, width)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[2:6])
    ctx.split = len(inputs[0])


def _backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    offsets, columns, t_offsets, t_columns = ctx.saved_tensors
    return *_gather_sum(*gradients, t_offsets, t_columns, offsets, columns, ctx.split), *(None,) * 5


_gather_sum.register_autograd(_backward, setup_context=_save)
