"""Compare the vocabulary head and its loss, forward and backward, with what PyTorch and other packages offer.

    python benchmarks/head.py [--device cuda|cpu] [--rounds N] [--tokens N] [--vocabulary N]
        [--allocator steady|default]

Width 768, 30 % of tokens predicted, most labels are low ids, as with words. Prints for each vocabulary and precision
  1. which rows (tokens) get logits: all; all, of which the predicted are then selected; only the predicted
  2. how the predicted rows are computed: plain PyTorch, in chunks (xscale's head; in one call, or in one for each of 5
     streams), F.linear_cross_entropy if this torch has it, Liger Kernel and cut-cross-entropy if they are installed
ms are medians over rounds, in which all take turns, until the device is done; host ms (GPU), until all is launched.
What takes more than five times as long as xscale's head is timed once. Errors are relative to fp64 on the same inputs:
of the loss, and of the gradient of the weight's first 1,000 rows (RMS of the error over RMS of the gradient). MB are
the peak in addition to inputs and gradients: once with gradients as they are returned, once with fp32 gradients, in
which xscale sums 16-bit gradients. On a GPU this is torch.cuda.max_memory_allocated; on a CPU it is the sum of what
torch.profiler saw the allocator give and take (without the scratch memory of oneDNN and MKL).
--allocator steady, the default, makes glibc's malloc keep freed memory; otherwise page faults dominate the times.
"""

import argparse
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from common import print_table, use_allocator
from torch import Tensor

from xscale.ops.masked_ce import chunk_rows, masked_cross_entropy

WIDTH, MASKED, KNOWN = 768, 0.3, 1000
GRADIENT_SCALE = 1024.0
OURS, PLAIN, ALL = "predicted rows, chunked: ours", "predicted rows", "all rows"
TIMES_ALL = {"cuda": 3.2, "cpu": 3.1}
"""The goal by device: how many times faster xscale's head is than logits of all rows."""
TIMES_PLAIN = {("cuda", torch.float16): 1.05, ("cuda", torch.bfloat16): 1.05, ("cpu", torch.float32): 1.1}
LOGITS = 1.2
"""The goal on a GPU: the most memory beyond inputs and gradients, as a multiple of the logits of a chunk."""


class Problem:
    """Random inputs of the head, in which the share MASKED of the tokens is predicted."""

    def __init__(self, tokens: int, vocabulary: int, dtype: torch.dtype, device: str):
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, device=device)
            return (drawn * std).to(dtype).requires_grad_()

        self.hidden = normal(tokens, WIDTH)
        self.weight, self.bias = normal(vocabulary, WIDTH, std=0.05), normal(vocabulary, std=0.05)
        order = torch.randperm(tokens, generator=generator, device=device)
        self.masked = order[: round(MASKED * tokens)].sort().values
        skewed = torch.rand(len(self.masked), generator=generator, device=device) ** 3
        self.labels = (skewed * vocabulary).long()
        self.all_labels = torch.full((tokens,), -100, device=device)
        self.all_labels[self.masked] = self.labels
        self.rows = self.hidden.detach()[self.masked].requires_grad_()

    def exact(self) -> tuple[float, Tensor]:
        """The loss, and the gradient of the weight's first KNOWN rows, in fp64."""
        loss, gradient, weight = 0.0, 0.0, self.weight.detach().double()
        for rows, labels in zip(self.rows.detach().split(512), self.labels.split(512), strict=True):
            logits = F.linear(rows.double(), weight, self.bias.detach().double())
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            error = logits.softmax(-1)[:, :KNOWN]
            known = labels < KNOWN
            error[known, labels[known]] -= 1
            gradient = gradient + error.T @ rows.double()
        assert isinstance(gradient, Tensor)
        return loss, gradient

    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.rows, self.weight, self.bias]


# Implementations, which return the sum of the losses


def count_right(logits: Tensor, labels: Tensor) -> None:
    with torch.no_grad():
        (logits.argmax(-1) == labels).sum()


def all_rows(p: Problem) -> Tensor:
    logits = F.linear(p.hidden, p.weight, p.bias).float()
    count_right(logits, p.all_labels)
    return F.cross_entropy(logits, p.all_labels, reduction="sum")


def select_logits(p: Problem) -> Tensor:
    logits = F.linear(p.hidden, p.weight, p.bias).index_select(0, p.masked).float()
    count_right(logits, p.labels)
    return F.cross_entropy(logits, p.labels, reduction="sum")


def plain(p: Problem, rows: Tensor) -> Tensor:
    logits = F.linear(rows, p.weight, p.bias).float()
    count_right(logits, p.labels)
    return F.cross_entropy(logits, p.labels, reduction="sum")


def ours(p: Problem, rows: Tensor) -> Tensor:
    return masked_cross_entropy(rows, p.weight, p.bias, p.labels)[0]


def five_calls(p: Problem, rows: Tensor) -> Tensor:
    parts = zip(rows.tensor_split(5), p.labels.tensor_split(5), strict=True)
    return torch.stack([masked_cross_entropy(part, p.weight, p.bias, labels)[0] for part, labels in parts]).sum()


def torch_chunked(p: Problem, rows: Tensor, **options: Any) -> Tensor:
    chosen = torch.nn.LinearCrossEntropyOptions(**options)
    return F.linear_cross_entropy(rows, p.weight, p.labels, linear_bias=p.bias, reduction="sum", options=chosen)


def liger(p: Problem, rows: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(p.weight, rows, p.labels, p.bias)


def cut_cross_entropy(p: Problem, rows: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(rows, p.weight, p.labels, bias=p.bias, reduction="sum")


def selected(loss: Callable[[Problem, Tensor], Tensor], p: Problem) -> Tensor:
    return loss(p, p.hidden.index_select(0, p.masked))


def given(loss: Callable[[Problem, Tensor], Tensor], p: Problem) -> Tensor:
    return loss(p, p.rows)


WHICH_ROWS: dict[str, Callable[[Problem], Tensor]] = {
    ALL: all_rows,
    "all rows, then select logits": select_logits,
    PLAIN: partial(selected, plain),
    OURS: partial(selected, ours),
}
HOW: dict[str, Callable[[Problem], Tensor]] = {
    PLAIN: partial(given, plain),
    OURS: partial(given, ours),
    "ours, 5 calls": partial(given, five_calls),
}
if hasattr(F, "linear_cross_entropy"):
    HOW["F.linear_cross_entropy"] = partial(given, torch_chunked)
    HOW["F.linear_cross_entropy, 1,024 rows"] = partial(given, partial(torch_chunked, batch_chunk_size=1024))
HOW |= {"Liger Kernel": partial(given, liger), "cut-cross-entropy": partial(given, cut_cross_entropy)}


@dataclass
class Result:
    """An implementation's results; `seconds`: times until the device was done; `host`: until all was launched."""

    work: Callable[[Problem], Tensor]
    loss: float = 0.0
    gradient: Tensor | None = None
    peak: int = 0
    """The bytes of peak memory beyond inputs and gradients."""
    narrow: int = 0
    """The bytes by which the gradients would be larger in fp32."""
    seconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)

    def first_round(self, p: Problem) -> None:
        loss, peak = measure_peak(lambda: backward(self.work, p), p.weight.device.type)
        gradients = [leaf.grad for leaf in p.leaves() if leaf.grad is not None]
        assert p.weight.grad is not None
        self.loss, self.gradient = loss.item(), p.weight.grad[:KNOWN].double()
        self.peak = peak - sum(g.nbytes for g in gradients)
        self.narrow = sum(4 * g.numel() - g.nbytes for g in gradients)

    def round(self, p: Problem) -> None:
        for leaf in p.leaves():
            leaf.grad = None
        synchronize(p)
        started = time.perf_counter()
        backward(self.work, p)
        self.host.append(time.perf_counter() - started)
        synchronize(p)
        self.seconds.append(time.perf_counter() - started)


def backward(work: Callable[[Problem], Tensor], p: Problem) -> Tensor:
    loss = work(p)
    (loss * (GRADIENT_SCALE / len(p.labels))).backward()
    return loss.detach()


def synchronize(p: Problem) -> None:
    if p.weight.is_cuda:
        torch.cuda.synchronize()


def measure_peak(work: Callable[[], Any], device: str) -> tuple[Any, int]:
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = work()
        return result, torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return result, peak


def run(implementations: dict[str, Callable[[Problem], Tensor]], p: Problem, rounds: int) -> dict[str, Result]:
    results = {}
    for name, work in implementations.items():
        for leaf in p.leaves():
            leaf.grad = None
        result = Result(work)
        try:
            result.first_round(p)
            result.round(p)
        except ImportError:
            continue
        except Exception as error:  # a peer that does not take these inputs, or too little memory
            if name in (OURS, PLAIN):
                raise
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
            continue
        results[name] = result
    running = [result for result in results.values() if result.seconds[0] < 5 * results[OURS].seconds[0]]
    turns = random.Random(0)
    for _ in range(rounds - 1):
        for result in turns.sample(running, len(running)):
            result.round(p)
    return results


def time_cells(result: Result, p: Problem) -> list[str]:
    times = [result.seconds, result.host] if p.weight.is_cuda else [result.seconds]
    return [f"{1e3 * median(seconds):,.1f}" for seconds in times]


def ratio_cells(result: Result, base: Result) -> list[str]:
    """The median and the quartiles of the ratio of the times of `result` to those of `base`, over rounds."""
    ratios = sorted(a / b for a, b in zip(result.seconds, base.seconds, strict=False))
    quarter = len(ratios) // 4
    return [f"{median(ratios):.2f}", f"{ratios[quarter]:.2f}-{ratios[-1 - quarter]:.2f}"]


def report_rows(p: Problem, results: dict[str, Result]) -> None:
    device = p.weight.device.type
    rows = []
    for name, result in results.items():
        goal = f">= {TIMES_ALL[device]}" if name == ALL else ""
        ratios = ratio_cells(result, results[OURS])
        rows.append([name, *time_cells(result, p), *ratios, goal, f"{result.peak / 1e6:,.0f}"])
    header = ["", *time_names(device), "of ours", "quartiles", "goal", "MB"]
    print_table(f"1. Which rows, {title(p)} of {len(p.hidden):,}", header, rows)


def report_how(p: Problem, results: dict[str, Result]) -> None:
    device, dtype = p.weight.device.type, p.weight.dtype
    loss, gradient = p.exact()
    rows = []
    for name, result in results.items():
        assert result.gradient is not None
        difference = result.gradient / (GRADIENT_SCALE / len(p.labels)) - gradient
        limits = ["", ""]
        if name == OURS:
            limits = [bound(TIMES_PLAIN.get((device, dtype))), bound(most_megabytes(p) if device == "cuda" else None)]
        cells = [*time_cells(result, p), *ratio_cells(result, results[PLAIN]), limits[0]]
        cells += [f"{abs(result.loss / loss - 1):.0e}", f"{float(difference.norm() / gradient.norm()):.1e}"]
        megabytes = [result.peak / 1e6, (result.peak - result.narrow) / 1e6]
        rows.append([name, *cells, *(f"{value:,.0f}" for value in megabytes), limits[1]])
    header = ["", *time_names(device), "of plain", "quartiles", "goal", "loss error", "gradient error", "MB"]
    print_table(f"2. How, {title(p)}", [*header, "fp32 gradients", "goal"], rows)


def most_megabytes(p: Problem) -> int:
    rows = min(len(p.labels), chunk_rows(p.weight.device.type, len(p.weight), p.weight.itemsize))
    return round(LOGITS * rows * len(p.weight) * p.weight.itemsize / 1e6)


def bound(limit: float | None) -> str:
    return f"<= {limit}" if limit else ""


def time_names(device: str) -> list[str]:
    return ["ms", "host ms"] if device == "cuda" else ["ms"]


def title(p: Problem) -> str:
    precision = str(p.weight.dtype).removeprefix("torch.")
    return f"{precision}, vocabulary {len(p.weight):,}: {len(p.labels):,} rows"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, help="default: 10 on a GPU, 4 on a CPU")
    parser.add_argument("--tokens", type=int, help="default: 16,384 on a GPU, 6,144 on a CPU")
    parser.add_argument("--vocabulary", type=int, help="default: 120,000 and 250,000 on a GPU, 30,000 on a CPU")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allocator", choices=("steady", "default"), default="steady")
    args = parser.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "6"
    use_allocator(args.allocator)
    torch.set_num_threads(args.threads)
    on_gpu = args.device == "cuda"
    print(torch.cuda.get_device_name() if on_gpu else f"{args.threads} threads; malloc: {args.allocator}")
    vocabularies = [args.vocabulary] if args.vocabulary else [120_000, 250_000] if on_gpu else [30_000]
    dtypes = (torch.float16, torch.bfloat16) if on_gpu else (torch.float32, torch.bfloat16)
    for vocabulary, dtype in product(vocabularies, dtypes):
        p = Problem(args.tokens or (16_384 if on_gpu else 6_144), vocabulary, dtype, args.device)
        rounds = args.rounds or (10 if on_gpu else 4)
        report_rows(p, run(WHICH_ROWS, p, rounds))
        report_how(p, run(HOW, p, rounds))


if __name__ == "__main__":
    main()
