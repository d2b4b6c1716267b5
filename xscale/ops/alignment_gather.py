"""The alignment gather of AlignLM: rows of A^T H for a sparse 0/1 matrix A, without A.

Shape letters: N tokens (padding included), H hidden width, R rows that a loss reads, K links.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def alignment_gather(
    hidden_NH: Tensor, offsets_R1: Tensor, columns_K: Tensor, t_offsets_N1: Tensor, t_rows_K: Tensor
) -> Tensor:
    """`torch.stack([hidden[columns[a:b]].sum(0) for a, b in pairwise(offsets)])` [R, H]; the sum of nothing is 0.

    The transposed index lists for each token the rows that it is summed into; the backward pass is the same gather
    over it. Sums are taken in fp32 (fp64) and in the index's order: no atomics, the same bits every time.
    """
    return _GatherSum.apply(hidden_NH, offsets_R1, columns_K, t_offsets_N1, t_rows_K)


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Tensor, columns: Tensor, *transposed: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, columns, *transposed)
        if not len(columns):
            return values.new_zeros(len(offsets) - 1, values.shape[1])
        return F.embedding_bag(columns, values, offsets, mode="sum", include_last_offset=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        offsets, columns, *transposed = ctx.saved_tensors
        return _GatherSum.apply(gradient.contiguous(), *transposed, offsets, columns), None, None, None, None
