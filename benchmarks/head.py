"""Compare the vocabulary head and its loss, forward and backward, with what PyTorch and other packages offer.

    python benchmarks/head.py [--device cuda|cpu] [--rounds N] [--tokens N] [--vocabulary N]

Width 768, 30 % of tokens predicted, most labels are low ids, as with words. The first rows of the table say which rows
(tokens) get logits: all; all, of which the predicted are then selected; only the predicted. The others say how the
predicted rows are computed: plain PyTorch, in chunks (xscale's head; in one call, or in one for each of 5 streams),
F.linear_cross_entropy if this torch has it, Liger Kernel and cut-cross-entropy if they are installed.
ms are medians over rounds, in which all take turns. What takes more than five times as long as xscale's head is timed
once. Errors are relative to fp64 on the same inputs: of the loss, and of the gradient of the weight's first 1,000 rows
(RMS of the error over RMS of the gradient). MB are the peak in addition to inputs and gradients. On a GPU this is
torch.cuda.max_memory_allocated; on a CPU it is the sum of what torch.profiler saw the allocator give and take (without
the scratch memory of oneDNN and MKL).
glibc's malloc keeps freed memory here; otherwise page faults dominate the times on a CPU.
"""

import argparse
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from common import CUDA, now, print_table, spread, use_allocator
from torch import Tensor

from xscale.ops.masked_ce import masked_cross_entropy

WIDTH = 768
MASKED = 0.3
KNOWN = 1000
GRADIENT_SCALE = 1024.0
OURS = "predicted rows, chunked: ours"


class Problem:
    """Random inputs of the head, in which the share MASKED of the tokens is predicted."""

    def __init__(self, tokens: int, vocabulary: int, dtype: torch.dtype, device: str):
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, device=device)
            return (drawn * std).to(dtype).requires_grad_()

        self.hidden = normal(tokens, WIDTH)
        self.weight = normal(vocabulary, WIDTH, std=0.05)
        self.bias = normal(vocabulary, std=0.05)
        order = torch.randperm(tokens, generator=generator, device=device)
        self.masked = order[: round(MASKED * tokens)].sort().values
        skewed = torch.rand(len(self.masked), generator=generator, device=device) ** 3
        self.labels = (skewed * vocabulary).long()
        self.all_labels = torch.full((tokens,), -100, device=device)
        self.all_labels[self.masked] = self.labels
        self.leaves = (self.hidden, self.weight, self.bias)

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


def select_logits(p: Problem) -> Tensor:
    return plain_loss(F.linear(p.hidden, p.weight, p.bias).index_select(0, p.masked), p.labels)


def plain(p: Problem) -> Tensor:
    return plain_loss(F.linear(p.predicted(), p.weight, p.bias), p.labels)


def ours(p: Problem) -> Tensor:
    return masked_cross_entropy(p.predicted(), p.weight, p.bias, p.labels)[0]


def five_calls(p: Problem) -> Tensor:
    losses = []
    for rows, labels in zip(p.predicted().tensor_split(5), p.labels.tensor_split(5), strict=True):
        losses.append(masked_cross_entropy(rows, p.weight, p.bias, labels)[0])
    return torch.stack(losses).sum()


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
    cpu: float | None = None
    """The goal on a CPU: how many times as long as xscale's head it is to take, at least."""
    cuda: float | None = None


IMPLEMENTATIONS = [
    Implementation("all rows", all_rows, cpu=3.1, cuda=3.2),
    Implementation("all rows, then select logits", select_logits),
    Implementation("predicted rows", plain, cpu=0.91, cuda=0.95),
    Implementation(OURS, ours),
    Implementation("ours, 5 calls", five_calls),
    Implementation("Liger Kernel", liger),
    Implementation("cut-cross-entropy", cut_cross_entropy),
]
if hasattr(F, "linear_cross_entropy"):
    IMPLEMENTATIONS.append(Implementation("F.linear_cross_entropy", torch_chunked))


@dataclass
class Result:
    implementation: Implementation
    loss: float = 0.0
    gradient: Tensor | None = None
    peak: int = 0
    """The bytes of peak memory beyond inputs and gradients."""
    seconds: list[float] = field(default_factory=list)

    def measure(self, p: Problem) -> None:
        loss, peak = measure_peak(lambda: backward(self.implementation.loss, p), p.weight.is_cuda)
        assert p.weight.grad is not None
        self.loss = loss.item()
        self.gradient = p.weight.grad[:KNOWN].double()
        self.peak = peak - sum(leaf.grad.nbytes for leaf in p.leaves if leaf.grad is not None)

    def round(self, p: Problem) -> None:
        started = now()
        backward(self.implementation.loss, p)
        self.seconds.append(now() - started)


def backward(work: Callable[[Problem], Tensor], p: Problem) -> Tensor:
    for leaf in p.leaves:
        leaf.grad = None
    loss = work(p)
    (loss * (GRADIENT_SCALE / len(p.labels))).backward()
    return loss.detach()


def measure_peak(work: Callable[[], Tensor], on_gpu: bool) -> tuple[Tensor, int]:
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = work()
        return result, torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = work()
    events: list[Any] = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = 0
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return result, peak


def run(p: Problem, rounds: int) -> list[Result]:
    results = []
    for implementation in IMPLEMENTATIONS:
        result = Result(implementation)
        try:
            result.measure(p)
            result.round(p)
        except ImportError:
            continue
        except Exception as error:  # a peer that does not take these inputs, or too little memory
            if implementation.name == OURS:
                raise
            print(f"{implementation.name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        results.append(result)
    (base,) = [result for result in results if result.implementation.name == OURS]
    running = [result for result in results if result.seconds[0] < 5 * base.seconds[0]]
    turns = random.Random(0)
    for _ in range(rounds - 1):
        for result in turns.sample(running, len(running)):
            result.round(p)
    return results


def report(p: Problem, results: list[Result]) -> None:
    loss, gradient = p.exact()
    (base,) = [result for result in results if result.implementation.name == OURS]
    rows = []
    for result in results:
        assert result.gradient is not None
        difference = result.gradient / (GRADIENT_SCALE / len(p.labels)) - gradient
        ratios = [theirs / own for theirs, own in zip(result.seconds, base.seconds, strict=False)]
        goal = result.implementation.cuda if p.weight.is_cuda else result.implementation.cpu
        cells = [f"{1e3 * median(result.seconds):,.1f}", f"{median(ratios):.2f}", spread(ratios)]
        cells += [f">= {goal}" if goal else "", f"{abs(result.loss / loss - 1):.0e}"]
        cells += [f"{float(difference.norm() / gradient.norm()):.1e}", f"{result.peak / 1e6:,.0f}"]
        rows.append([result.implementation.name, *cells])
    precision = str(p.weight.dtype).removeprefix("torch.")
    title = f"{precision}, vocabulary {len(p.weight):,}: {len(p.labels):,} of {len(p.hidden):,} rows"
    print_table(title, ["", "ms", "of ours", "middle 80 %", "goal", "loss error", "gradient error", "MB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if CUDA else "cpu")
    parser.add_argument("--rounds", type=int, help="default: 10 on a GPU, 4 on a CPU")
    parser.add_argument("--tokens", type=int, help="default: 16,384 on a GPU, 6,144 on a CPU")
    parser.add_argument("--vocabulary", type=int, help="default: 120,000 and 250,000 on a GPU, 30,000 on a CPU")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "6"
    use_allocator("steady")
    torch.set_num_threads(args.threads)
    on_gpu = args.device == "cuda"
    print(torch.cuda.get_device_name() if on_gpu else f"{args.threads} threads")
    vocabularies = [120_000, 250_000] if on_gpu else [30_000]
    if args.vocabulary:
        vocabularies = [args.vocabulary]
    for vocabulary, dtype in product(vocabularies, (torch.float16 if on_gpu else torch.float32, torch.bfloat16)):
        p = Problem(args.tokens or (16_384 if on_gpu else 6_144), vocabulary, dtype, args.device)
        report(p, run(p, args.rounds or (10 if on_gpu else 4)))


if __name__ == "__main__":
    main()
