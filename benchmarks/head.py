"""Compare the vocabulary head and its loss, forward and backward, with what PyTorch offers.

    python benchmarks/head.py [--rounds N] [--small]

30 % of the rows (tokens) are predicted, and most labels are low ids, as with words. Plain PyTorch computes the logits
of all rows, or of the predicted rows only. xscale's head computes those of the predicted rows in chunks, and so does
F.linear_cross_entropy. The times in ms are medians over rounds, in which all implementations take turns. MB are the
peak of a GPU's memory, without the inputs and gradients. The losses agree to 1 %. On a CPU, malloc keeps
freed memory, as in training.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from common import CUDA, DEVICE, DTYPES, in_turns, operator_arguments, print_comparison
from torch import Tensor

from xscale.ops.masked_ce import masked_cross_entropy

TOKENS = 16_384 if CUDA else 6_144
VOCABULARIES = [120_000, 250_000] if CUDA else [30_000]
WIDTH = 768
MASKED = 0.3
GRADIENT_SCALE = 1024.0


class Problem:
    """Random inputs of the head, in which the share MASKED of the tokens is predicted."""

    def __init__(self, tokens: int, vocabulary: int, dtype: torch.dtype):
        torch.manual_seed(0)
        self.hidden = torch.randn(tokens, WIDTH, device=DEVICE).to(dtype).requires_grad_()
        self.weight = (0.05 * torch.randn(vocabulary, WIDTH, device=DEVICE)).to(dtype).requires_grad_()
        self.bias = (0.05 * torch.randn(vocabulary, device=DEVICE)).to(dtype).requires_grad_()
        self.masked = torch.randperm(tokens, device=DEVICE)[: round(MASKED * tokens)].sort().values
        self.labels = (torch.rand(len(self.masked), device=DEVICE) ** 3 * vocabulary).long()
        self.all_labels = torch.full((tokens,), -100, device=DEVICE)
        self.all_labels[self.masked] = self.labels

    def predicted(self) -> Tensor:
        return self.hidden.index_select(0, self.masked)


# Implementations, which return the sum of the losses


def plain_loss(p: Problem, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of these rows. As xscale does, count the right predictions, too."""
    logits = F.linear(hidden, p.weight, p.bias).float()
    with torch.no_grad():
        (logits.argmax(-1) == labels).sum()
    return F.cross_entropy(logits, labels, reduction="sum")


def torch_chunked(p: Problem) -> Tensor:
    options = {"linear_bias": p.bias, "reduction": "sum", "options": torch.nn.LinearCrossEntropyOptions()}
    return F.linear_cross_entropy(p.predicted(), p.weight, p.labels, **options)


IMPLEMENTATIONS: dict[str, Callable[[Problem], Tensor]] = {
    "predicted rows, chunked: ours": lambda p: masked_cross_entropy(p.predicted(), p.weight, p.bias, p.labels)[0],
    "all rows": lambda p: plain_loss(p, p.hidden, p.all_labels),
    "predicted rows": lambda p: plain_loss(p, p.predicted(), p.labels),
    "F.linear_cross_entropy": torch_chunked,
}


def backward(loss: Callable[[Problem], Tensor], p: Problem) -> float:
    for leaf in (p.hidden, p.weight, p.bias):
        leaf.grad = None
    total = loss(p)
    (total * (GRADIENT_SCALE / len(p.labels))).backward()
    return total.item()


def peak_megabytes(work: Callable[[], float], p: Problem, expected: float) -> str:
    """Compute a loss and its gradients once, and check the loss. Returns the peak of a GPU's memory."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()  # 0 without a GPU
    assert abs(work() / expected - 1) < 0.01
    gradients = p.hidden.nbytes + p.weight.nbytes + p.bias.nbytes
    return f"{(torch.cuda.max_memory_allocated() - before - gradients) / 1e6:,.0f}" if CUDA else ""


def main() -> None:
    args = operator_arguments(__doc__, cpu_rounds=4)
    for vocabulary, dtype in product([1_500] if args.small else VOCABULARIES, DTYPES):
        p = Problem(32 if args.small else TOKENS, vocabulary, dtype)
        works = {name: partial(backward, loss, p) for name, loss in IMPLEMENTATIONS.items()}
        expected = next(iter(works.values()))()
        cells = {name: [peak_megabytes(work, p, expected)] for name, work in works.items()}
        title = f"{dtype}, vocabulary {vocabulary:,}: {len(p.labels):,} of {len(p.hidden):,} rows"
        print_comparison(title, ["MB"], in_turns(works, args.rounds), cells)


if __name__ == "__main__":
    main()
