"""Compare the vocabulary head and its loss, forward and backward, with what PyTorch offers.

    python benchmarks/head.py [--device cuda|cpu] [--rounds N] [--small]

Width 768, 30 % of tokens predicted, most labels are low ids, as with words: 16,384 tokens and vocabularies of 120,000
and 250,000 on a GPU, 6,144 tokens and 30,000 on a CPU. The first rows of the table say which rows (tokens) get logits:
all; only the predicted. The others say how the predicted rows are computed: plain PyTorch, in chunks (xscale's head),
F.linear_cross_entropy. ms are medians over rounds, in which all take turns. MB are the peak of a GPU's memory in
addition to inputs and gradients. The losses agree to 1 %.
glibc's malloc keeps freed memory here; otherwise page faults dominate the times on a CPU.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from common import CUDA, in_turns, operator_arguments, print_comparison
from torch import Tensor

from xscale.ops.masked_ce import masked_cross_entropy

SIZES = {"cuda": (16_384, [120_000, 250_000]), "cpu": (6_144, [30_000])}
"""The number of tokens, and the vocabularies."""
SMALL = (32, [1_500])
WIDTH = 768
MASKED = 0.3
GRADIENT_SCALE = 1024.0
HEADER = ["", "ms", "of ours", "middle 80 %", "MB"]


class Problem:
    """Random inputs of the head, in which the share MASKED of the tokens is predicted."""

    def __init__(self, tokens: int, vocabulary: int, dtype: torch.dtype, device: str):
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, WIDTH, device=device).to(dtype).requires_grad_()
        self.weight = (0.05 * torch.randn(vocabulary, WIDTH, device=device)).to(dtype).requires_grad_()
        self.bias = (0.05 * torch.randn(vocabulary, device=device)).to(dtype).requires_grad_()
        self.masked = torch.randperm(tokens, device=device)[: round(MASKED * tokens)].sort().values
        self.labels = (torch.rand(len(self.masked), device=device) ** 3 * vocabulary).long()
        self.all_labels = torch.full((tokens,), -100, device=device)
        self.all_labels[self.masked] = self.labels

    def predicted(self) -> Tensor:
        return self.hidden.index_select(0, self.masked)


# Implementations, which return the sum of the losses


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss. As xscale does, count the right predictions, too."""
    logits = logits.float()
    with torch.no_grad():
        (logits.argmax(-1) == labels).sum()
    return F.cross_entropy(logits, labels, reduction="sum")


def all_rows(p: Problem) -> Tensor:
    return plain_loss(F.linear(p.hidden, p.weight, p.bias), p.all_labels)


def plain(p: Problem) -> Tensor:
    return plain_loss(F.linear(p.predicted(), p.weight, p.bias), p.labels)


def ours(p: Problem) -> Tensor:
    return masked_cross_entropy(p.predicted(), p.weight, p.bias, p.labels)[0]


def torch_chunked(p: Problem) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(
        p.predicted(), p.weight, p.labels, linear_bias=p.bias, reduction="sum", options=options
    )


IMPLEMENTATIONS: dict[str, Callable[[Problem], Tensor]] = {
    "predicted rows, chunked: ours": ours,
    "all rows": all_rows,
    "predicted rows": plain,
    "F.linear_cross_entropy": torch_chunked,
}


def backward(loss: Callable[[Problem], Tensor], p: Problem) -> float:
    for leaf in (p.hidden, p.weight, p.bias):
        leaf.grad = None
    total = loss(p)
    (total * (GRADIENT_SCALE / len(p.labels))).backward()
    return total.item()


def peak_megabytes(loss: Callable[[Problem], Tensor], p: Problem, expected: float) -> str:
    """Compute the loss and its gradients once. Return the peak of a GPU's memory."""
    before = 0
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    total = backward(loss, p)
    assert abs(total / expected - 1) < 0.01, f"{loss.__name__} is wrong"
    gradients = p.hidden.nbytes + p.weight.nbytes + p.bias.nbytes
    return f"{(torch.cuda.max_memory_allocated() - before - gradients) / 1e6:,.0f}" if CUDA else ""


def run(p: Problem, rounds: int) -> None:
    expected = backward(ours, p)
    works = {}
    cells = {}
    for name, loss in IMPLEMENTATIONS.items():
        works[name] = partial(backward, loss, p)
        cells[name] = [peak_megabytes(loss, p, expected)]
    precision = str(p.weight.dtype).removeprefix("torch.")
    title = f"{precision}, vocabulary {len(p.weight):,}: {len(p.labels):,} of {len(p.hidden):,} rows"
    print_comparison(title, HEADER, in_turns(works, rounds), cells)


def main() -> None:
    args = operator_arguments(__doc__, cpu_rounds=4)
    tokens, vocabularies = SMALL if args.small else SIZES[args.device]
    for vocabulary, dtype in product(vocabularies, args.dtypes):
        run(Problem(tokens, vocabulary, dtype, args.device), args.rounds)


if __name__ == "__main__":
    main()
