"""Compare the alignment gather with what PyTorch offers for the same task, forward and backward.

    python benchmarks/gather.py [--rounds N] [--small]

30 % of the tokens are masked. A masked token has on average 1.3 links to the other half of its sequence. All
implementations are first checked against fp64, and then timed in turns. On a GPU, the L2 cache is cold.
  one head   the sums of linked states, A^T H, at the masked tokens
  two heads  these sums, and the masked tokens' own states. xscale computes both by one gather. The two gradients
             arrive separately, as from two heads
On a CPU, malloc keeps freed memory, as in training.
"""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import DEVICE, DTYPES, in_turns, operator_arguments, print_comparison
from torch import Tensor

from xscale.data.stream_batch import Gather
from xscale.ops.alignment_gather import alignment_gather

CASES = {"case 1": (128, 128, 768), "case 2": (32, 512, 1024)}
"""Sequences, their tokens, and the width."""
SMALL = {"case 1": (8, 32, 64), "case 2": (4, 64, 96)}
MASKED = 0.3
LINKS = 1.3


class Problem:
    """Hidden states, and all indices and matrices that an implementation may need, made beforehand.

    Shape letters: B sequences of T tokens, N = B T tokens in all, H width, R masked tokens, K links.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype):
        B, T, H = shape
        N = B * T
        random = np.random.default_rng(0)
        masked = np.sort(random.permutation(N)[: round(MASKED * N)])
        R = len(masked)
        # A cell is a masked token and a place in the other half of its sequence. Each token has one link or more.
        half = T // 2
        one_each = np.arange(R) * half + random.integers(0, half, R)
        cells = np.unique(np.append(one_each, random.integers(0, R * half, round((LINKS - 1) * R))))
        row = cells // half
        first = masked[row] // T * T
        column = first + np.where(masked[row] - first < half, half, 0) + cells % half

        one_head = Gather.sums(column, np.bincount(row, minlength=R))
        two_heads = Gather.concat([Gather.single(masked), one_head])
        self.masked = torch.from_numpy(masked).to(DEVICE)
        self.row = torch.from_numpy(row).to(DEVICE)
        self.column = torch.from_numpy(column).to(DEVICE)
        self.index = [torch.from_numpy(array).to(DEVICE) for array in (*one_head, *one_head.transpose(N))]
        self.both = [torch.from_numpy(array).to(DEVICE) for array in (*two_heads, *two_heads.transpose(N))]
        self.offsets = self.index[0].long()
        torch.manual_seed(0)
        self.hidden = torch.randn(N, H, device=DEVICE).to(dtype).requires_grad_()
        self.upstream = [torch.randn(R, H, device=DEVICE).to(dtype) for _ in range(2)]
        self.A = torch.zeros(B, T, T, dtype=dtype, device=DEVICE)
        token = self.masked[self.row]
        self.A[token // T, token % T, self.column % T] = 1
        ones = torch.ones(len(row), dtype=dtype, device=DEVICE)
        self.csr = torch.sparse_csr_tensor(self.offsets, self.column, ones, (R, N))

    def exact(self, heads: int) -> list[Tensor]:
        """Return the outputs and the gradient in fp64."""
        hidden = self.hidden.detach().double().requires_grad_()
        sums = hidden.new_zeros(len(self.masked), hidden.shape[1]).index_add(0, self.row, hidden[self.column])
        outputs = [hidden[self.masked], sums][2 - heads :]
        upstream = [gradient.double() for gradient in self.upstream[2 - heads :]]
        return [*outputs, *torch.autograd.grad(outputs, hidden, upstream)]


# Implementations, which return the outputs of one head, or of two heads


def dense(p: Problem) -> Tensor:
    H = p.hidden.view(len(p.A), -1, p.hidden.shape[1])
    return torch.bmm(p.A, H).flatten(0, 1).index_select(0, p.masked)


def embedding_bag(p: Problem) -> Tensor:
    return F.embedding_bag(p.index[1], p.hidden, p.index[0], mode="sum", include_last_offset=True)


def index_add(p: Problem) -> Tensor:
    out = p.hidden.new_zeros(len(p.masked), p.hidden.shape[1])
    return out.index_add(0, p.row, p.hidden.index_select(0, p.column))


HEADS: dict[int, dict[str, Callable[[Problem], list[Tensor]]]] = {
    1: {
        "alignment_gather": lambda p: [alignment_gather(p.hidden, *p.index)],
        "dense bmm, select": lambda p: [dense(p)],
        "sparse.mm, CSR": lambda p: [torch.sparse.mm(p.csr, p.hidden)],
        "embedding_bag": lambda p: [embedding_bag(p)],
        "index_select, index_add": lambda p: [index_add(p)],
        "index_select, segment_reduce": lambda p: [
            torch.segment_reduce(p.hidden.index_select(0, p.column), "sum", offsets=p.offsets, axis=0, initial=0)
        ],
    },
    2: {
        "alignment_gather": lambda p: [*alignment_gather(p.hidden, *p.both).split(len(p.masked))],
        "index_select; embedding_bag": lambda p: [p.hidden.index_select(0, p.masked), embedding_bag(p)],
        "index_select; dense bmm, select": lambda p: [p.hidden.index_select(0, p.masked), dense(p)],
    },
}


def backward(p: Problem, outputs: list[Tensor]) -> Tensor:
    return torch.autograd.grad(outputs, p.hidden, p.upstream[2 - len(outputs) :], retain_graph=True)[0]


def checked_outputs(name: str, forward: Callable[[Problem], list[Tensor]], p: Problem) -> list[Tensor]:
    """Return the outputs of an implementation; none if it does not support the problem. They are right."""
    try:
        outputs = forward(p)
        results = [*outputs, backward(p, outputs)]
    except (NotImplementedError, RuntimeError) as error:
        print(f"{name}, {p.hidden.dtype}: {str(error).splitlines()[0]}")
        return []
    for result, exact in zip(results, p.exact(len(outputs)), strict=True):
        error = (result.double() - exact).norm() / exact.norm()
        assert error < 4 * torch.finfo(result.dtype).eps, f"{name} is wrong"
    return outputs


def main() -> None:
    args = operator_arguments(__doc__, cpu_rounds=20)
    warnings.filterwarnings("ignore", message="Sparse")
    cases = SMALL if args.small else CASES
    for case, dtype, heads in product(cases, DTYPES, HEADS):
        p = Problem(cases[case], dtype)
        forwards: dict[str, Callable[[], Any]] = {}
        backwards: dict[str, Callable[[], Any]] = {}
        for name, forward in HEADS[heads].items():
            outputs = checked_outputs(name, forward, p)
            if outputs:
                forwards[name] = partial(forward, p)
                backwards[name] = partial(backward, p, outputs)
        both = {}
        cells = {}
        forward_times = in_turns(forwards, args.rounds)
        for name, times in in_turns(backwards, args.rounds).items():
            both[name] = [first + second for first, second in zip(forward_times[name], times, strict=True)]
            cells[name] = [f"{1e6 * median(seconds):,.1f}" for seconds in (forward_times[name], times)]
        title = f"{case}, {heads} head(s), {dtype}: {cases[case]}, {len(p.masked):,} rows, {len(p.row):,} links"
        print_comparison(title, ["forward, us", "backward, us"], both, cells)


if __name__ == "__main__":
    main()
