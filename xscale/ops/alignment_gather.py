"""Gathers all states that the losses of a packed row read. Each state is a sum of the hidden states of some tokens.

The states are rows of A^T H for a sparse 0/1 matrix A, which is never built. The state of a masked token, or of a
sequence's first token, is a sum over a single token. AlignLM sums the tokens that are linked with a masked token.

Shape letters: N tokens whose hidden states are given (in training, those at Row.places), H hidden width, S states that
losses read, K pairs (state, token in its sum).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("xscale::alignment_gather", mutates_args=())
def alignment_gather(
    hidden_NH: Tensor, offsets_S1: Tensor, columns_K: Tensor, t_offsets_N1: Tensor, t_rows_K: Tensor
) -> Tensor:
    """Return `torch.stack([hidden[columns[a:b]].sum(0) for a, b in pairwise(offsets)])`, [S, H].

    The index is a Gather of data/stream_batch.py and its transpose: `*gather, *gather.transpose(N)`, int32, on the
    device of `hidden`. A sum over no token is 0. The transpose lists, for each token, the states whose sums contain the
    token. The backward pass is the same gather with the transpose, and writes each row of the gradient once. Sums are
    computed in fp32 (fp64 for fp64), without atomics, in an order that depends on the index alone, so that the result
    has the same bits every time.
    """
    return F.embedding_bag(columns_K, hidden_NH.detach(), offsets_S1, mode="sum", include_last_offset=True)


@alignment_gather.register_kernel("cuda")
def _gather_sum_cuda(values: Tensor, offsets: Tensor, columns: Tensor, t_offsets: Tensor, t_columns: Tensor) -> Tensor:
    from xscale.ops import alignment_gather_triton  # Triton comes with CUDA builds of torch

    return alignment_gather_triton.gather_sum(values, offsets, columns)


@alignment_gather.register_fake
def _gather_sum_fake(values: Tensor, offsets: Tensor, columns: Tensor, t_offsets: Tensor, t_columns: Tensor) -> Tensor:
    return values.new_empty(len(offsets) - 1, values.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    offsets, columns, t_offsets, t_columns = ctx.saved_tensors
    return alignment_gather(gradient, t_offsets, t_columns, offsets, columns), *(None,) * 4


alignment_gather.register_autograd(_backward, setup_context=_setup_context)
