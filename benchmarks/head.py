"""Compare the vocabulary head and its loss, forward and backward, with what PyTorch and other packages offer.

    python benchmarks/head.py [--device cuda|cpu] [--rounds N] [--tokens N] [--vocabulary N]

Width 768, 30 % of tokens predicted, most labels are low ids, as with words. The first rows of the table say which rows
(tokens) get logits: all; only the predicted. The others say how the predicted rows are computed: plain PyTorch, in
chunks (xscale's head), F.linear_cross_entropy. ms are medians over rounds, in which all take turns. MB are the peak of
a GPU's memory in addition to inputs and gradients. The losses agree to 1 %.
glibc's malloc keeps freed memory here; otherwise page faults dominate the times on a CPU.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from common import CUDA, compare, in_turns, use_allocator
from torch import Tensor

from xscale.ops.masked_ce import masked_cross_entropy

WIDTH = 768
MASKED = 0.3
GRADIENT_SCALE = 1024.0
OURS = "predicted rows, chunked: ours"
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
    OURS: ours,
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
    works = {name: partial(backward, loss, p) for name, loss in IMPLEMENTATIONS.items()}
    cells = {name: [peak_megabytes(loss, p, expected)] for name, loss in IMPLEMENTATIONS.items()}
    precision = str(p.weight.dtype).removeprefix("torch.")
    title = f"{precision}, vocabulary {len(p.weight):,}: {len(p.labels):,} of {len(p.hidden):,} rows"
    compare(title, HEADER, in_turns(works, rounds), cells)


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
