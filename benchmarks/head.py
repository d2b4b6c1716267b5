"""Compare the vocabulary head and its loss, forward and backward, with what PyTorch and other packages offer.

    python benchmarks/head.py [--device cuda|cpu] [--rounds N] [--tokens N] [--vocabulary N]

Width 768, 30 % of tokens predicted, most labels are low ids, as with words. The first rows of the table say which rows
(tokens) get logits: all; only the predicted. The others say how the predicted rows are computed: plain PyTorch, in
chunks (xscale's head), F.linear_cross_entropy if this torch has it, Liger Kernel and cut-cross-entropy if they are
installed. ms are medians over rounds, in which all take turns. Errors are relative to fp64 on the same inputs: of the
loss, and of the gradient of the weight's first 1,000 rows (RMS of the error over RMS of the gradient). MB are the peak
of a GPU's memory in addition to inputs and gradients.
glibc's malloc keeps freed memory here; otherwise page faults dominate the times on a CPU.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median

import torch
import torch.nn.functional as F
from common import CUDA, in_turns, print_table, spread, use_allocator
from torch import Tensor

from xscale.ops.masked_ce import masked_cross_entropy

WIDTH = 768
MASKED = 0.3
KNOWN = 1000
GRADIENT_SCALE = 1024.0
OURS = "predicted rows, chunked: ours"
HEADER = ["", "ms", "of ours", "middle 80 %", "goal", "loss error", "gradient error", "MB"]


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

    def exact(self) -> tuple[float, Tensor]:
        """The loss, and the gradient of the weight's first KNOWN rows, in fp64."""
        loss = 0.0
        weight = self.weight.detach().double()
        gradient = torch.zeros_like(weight[:KNOWN])
        rows = self.predicted().detach().double()
        for row, labels in zip(rows.split(512), self.labels.split(512), strict=True):
            logits = F.linear(row, weight, self.bias.detach().double())
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            error = logits.softmax(-1)[:, :KNOWN]
            known = labels < KNOWN
            error[known, labels[known]] -= 1
            gradient += error.T @ row
        return loss, gradient


# Implementations, which return the sum of the losses


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss, and xscale's count of right predictions."""
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


def liger(p: Problem) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(p.weight, p.predicted(), p.labels, p.bias)


def cut_cross_entropy(p: Problem) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(p.predicted(), p.weight, p.labels, bias=p.bias, reduction="sum")


@dataclass
class Implementation:
    name: str
    loss: Callable[[Problem], Tensor]
    cpu: str = ""
    """The goal on a CPU: how many times as long as xscale's head it is to take, at least."""
    cuda: str = ""


IMPLEMENTATIONS = [
    Implementation(OURS, ours),
    Implementation("all rows", all_rows, cpu=">= 3.1", cuda=">= 3.2"),
    Implementation("predicted rows", plain, cpu=">= 0.91", cuda=">= 0.95"),
    Implementation("F.linear_cross_entropy", torch_chunked),
    Implementation("Liger Kernel", liger),
    Implementation("cut-cross-entropy", cut_cross_entropy),
]


def backward(loss: Callable[[Problem], Tensor], p: Problem) -> float:
    for leaf in (p.hidden, p.weight, p.bias):
        leaf.grad = None
    total = loss(p)
    (total * (GRADIENT_SCALE / len(p.labels))).backward()
    return total.item()


def first_cells(implementation: Implementation, p: Problem) -> list[str]:
    """Compute loss and gradients once. Returns the errors of both, and the peak of memory."""
    exact_loss, exact_gradient = p.exact()
    if p.weight.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    loss = backward(implementation.loss, p)
    peak = ""
    if p.weight.is_cuda:
        gradients = p.hidden.nbytes + p.weight.nbytes + p.bias.nbytes
        peak = f"{(torch.cuda.max_memory_allocated() - before - gradients) / 1e6:,.0f}"
    assert p.weight.grad is not None
    difference = p.weight.grad[:KNOWN].double() / (GRADIENT_SCALE / len(p.labels)) - exact_gradient
    return [f"{abs(loss / exact_loss - 1):.0e}", f"{float(difference.norm() / exact_gradient.norm()):.1e}", peak]


def run(p: Problem, rounds: int) -> None:
    works = {}
    cells = {}
    for implementation in IMPLEMENTATIONS:
        try:
            cells[implementation.name] = first_cells(implementation, p)
        except Exception as error:  # a peer that is not installed or does not take these inputs, or too little memory
            if implementation.name == OURS:
                raise
            print(f"{implementation.name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        works[implementation.name] = partial(backward, implementation.loss, p)
    times = in_turns(works, rounds)
    rows = []
    for implementation in IMPLEMENTATIONS:
        name = implementation.name
        if name in times:
            ratios = [theirs / own for theirs, own in zip(times[name], times[OURS], strict=True)]
            goal = implementation.cuda if p.weight.is_cuda else implementation.cpu
            speed = [f"{1e3 * median(times[name]):,.1f}", f"{median(ratios):.2f}", spread(ratios), goal]
            rows.append([name, *speed, *cells[name]])
    precision = str(p.weight.dtype).removeprefix("torch.")
    title = f"{precision}, vocabulary {len(p.weight):,}: {len(p.labels):,} of {len(p.hidden):,} rows"
    print_table(title, HEADER, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if CUDA else "cpu")
    parser.add_argument("--rounds", type=int, help="default: 3 on a GPU, 4 on a CPU")
    parser.add_argument("--tokens", type=int, help="default: 16,384 on a GPU, 6,144 on a CPU")
    parser.add_argument("--vocabulary", type=int, help="default: 120,000 and 250,000 on a GPU, 30,000 on a CPU")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    use_allocator("steady")
    torch.set_num_threads(args.threads)
    on_gpu = args.device == "cuda"
    print(torch.cuda.get_device_name() if on_gpu else f"{args.threads} threads")
    vocabularies = [120_000, 250_000] if on_gpu else [30_000]
    if args.vocabulary:
        vocabularies = [args.vocabulary]
    for vocabulary, dtype in product(vocabularies, (torch.float16 if on_gpu else torch.float32, torch.bfloat16)):
        p = Problem(args.tokens or (16_384 if on_gpu else 6_144), vocabulary, dtype, args.device)
        run(p, args.rounds or (3 if on_gpu else 4))


if __name__ == "__main__":
    main()
