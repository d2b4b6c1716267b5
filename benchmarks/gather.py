"""Compare the alignment gather with what PyTorch offers for the same task, forward and backward.

    python benchmarks/gather.py [--device cuda|cpu] [--rounds N] [--small]

Case 1 is 128 sequences of 128 tokens, 768 wide; case 2 is 32 of 512, 1024 wide. 30 % of the tokens are masked, with 1.3
links each to the other half of their sequence. All implementations are first checked against fp64, then timed in turns.
  one head   the sums of linked states, A^T H, at the masked tokens
  two heads  these sums and the masked tokens' own states, in xscale's case by one gather; the two gradients arrive
             separately, as from two heads
On a GPU, CUDA graphs are timed (*: no graph, because an operator waits for the host). A graph works in turn on as many
buffers as fill 256 MB, so that L2 is cold. `of copy` is the rate of the bytes that must be read and written (a vector
for each link and each sum forward, for each sum and each token backward) relative to a device copy of 1 GB.
--small: cases of a few short sequences, which show that the script works.
glibc's malloc keeps freed memory here; otherwise page faults dominate the times on a CPU.
"""

import argparse
import random
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import CUDA, print_table, spread, use_allocator
from torch import Tensor

from xscale.ops.alignment_gather import alignment_gather

CASES = {"case 1": (128, 128, 768), "case 2": (32, 512, 1024)}
SMALL = {"case 1": (8, 32, 64), "case 2": (4, 64, 96)}
MASKED = 0.3
LINKS = 1.3
OURS = "alignment_gather"
L2_BYTES = 2**28


class Problem:
    """Hidden states, and all indices and matrices that an implementation may need, made beforehand.

    Shape letters: B sequences of T tokens, N = B T tokens in all, H width, R masked tokens, K links.
    """

    def __init__(self, case: str, dtype: torch.dtype, device: str, seed: int = 0):
        B, T, H = CASES[case]
        N = B * T
        masked, row, column = masked_and_links(B, T)
        R = len(masked)
        token = masked[row]

        def place(array: Any) -> Tensor:
            return torch.as_tensor(array).to(device)

        def index(row: np.ndarray, column: np.ndarray, rows: int) -> list[Tensor]:
            return [place(array) for array in (*csr(row, column, rows), *csr(column, row, N))]

        self.links = len(row)
        self.sums = R
        self.tokens = N
        self.row_bytes = H * dtype.itemsize
        self.masked = place(masked)
        self.row = place(row)
        self.column = place(column)
        self.index = index(row, column, R)
        self.both = index(np.append(np.arange(R), R + row), np.append(masked, column), 2 * R)
        self.offsets = self.index[0].long()
        drawn = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
        self.hidden = torch.randn(N, H, **drawn).to(dtype).requires_grad_()
        self.upstream = [torch.randn(R, H, **drawn).to(dtype) for _ in range(2)]
        self.A = place(torch.zeros(B, T, T, dtype=dtype))
        self.A[place(token // T), place(token % T), place(column % T)] = 1
        ones = place(torch.ones(len(row), dtype=dtype))
        self.csr = torch.sparse_csr_tensor(self.offsets, self.column, ones, (R, N))

    def exact(self, heads: int) -> list[Tensor]:
        """The outputs and the gradient in fp64."""
        hidden = self.hidden.detach().double().requires_grad_()
        sums = torch.zeros_like(hidden[: self.sums]).index_add(0, self.row, hidden[self.column])
        outputs = [hidden[self.masked], sums][2 - heads :]
        upstream = [gradient.double() for gradient in self.upstream[2 - heads :]]
        return [*outputs, *torch.autograd.grad(outputs, hidden, upstream)]


@cache
def masked_and_links(B: int, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The masked tokens [R]; for each link the number of its masked token [K], and the linked token [K]."""
    r = np.random.default_rng(0)
    half = T // 2
    masked = np.sort(r.permutation(B * T)[: round(MASKED * B * T)])
    R = len(masked)
    one_each = np.arange(R) * half + r.integers(0, half, R)
    others = np.setdiff1d(np.arange(R * half), one_each)
    cells = np.sort(np.append(one_each, r.choice(others, round((LINKS - 1) * R), replace=False)))
    row = cells // half
    first = masked[row] // T * T
    other_half = np.where(masked[row] - first < half, half, 0)
    return masked, row, first + other_half + cells % half


def csr(row: np.ndarray, column: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.append(0, np.bincount(row, minlength=rows).cumsum())
    return offsets.astype(np.int32), column[np.lexsort((column, row))].astype(np.int32)


# Implementations, which return the outputs of one head, or of two heads


def ours(p: Problem) -> list[Tensor]:
    return [alignment_gather(p.hidden, *p.index)]


def dense(p: Problem) -> list[Tensor]:
    H = p.hidden.view(len(p.A), -1, p.hidden.shape[1])
    return [torch.bmm(p.A, H).flatten(0, 1).index_select(0, p.masked)]


def sparse_csr(p: Problem) -> list[Tensor]:
    return [torch.sparse.mm(p.csr, p.hidden)]


def embedding_bag(p: Problem) -> list[Tensor]:
    return [F.embedding_bag(p.index[1], p.hidden, p.index[0], mode="sum", include_last_offset=True)]


def index_add(p: Problem) -> list[Tensor]:
    out = p.hidden.new_zeros(p.sums, p.hidden.shape[1])
    return [out.index_add(0, p.row, p.hidden.index_select(0, p.column))]


def segment_reduce(p: Problem) -> list[Tensor]:
    return [torch.segment_reduce(p.hidden.index_select(0, p.column), "sum", offsets=p.offsets, axis=0, initial=0)]


def ours_both(p: Problem) -> list[Tensor]:
    return [*alignment_gather(p.hidden, *p.both).split(p.sums)]


def unfused(p: Problem) -> list[Tensor]:
    return [p.hidden.index_select(0, p.masked), *embedding_bag(p)]


def dense_both(p: Problem) -> list[Tensor]:
    return [p.hidden.index_select(0, p.masked), *dense(p)]


@dataclass
class Implementation:
    name: str
    forward: Callable[[Problem], list[Tensor]]
    cpu: tuple[float, float] = (1, 1)
    """The goals on a CPU in cases 1 and 2: the time relative to that of xscale's gather is to be at least this."""
    cuda: tuple[float, float] = (1, 1)
    graph: bool = True
    """True if a CUDA graph can hold the implementation, which never waits for the host."""


HEADS = {
    1: [
        Implementation(OURS, ours),
        Implementation("dense bmm, select", dense, cpu=(9, 28), cuda=(3, 3.5)),
        Implementation("sparse.mm, CSR", sparse_csr, cpu=(2.5, 2.5), cuda=(5, 5), graph=False),
        Implementation("embedding_bag", embedding_bag, cpu=(1.4, 1.4), cuda=(4, 4), graph=False),
        Implementation("index_select, index_add", index_add, cpu=(2, 2), cuda=(2.5, 2.5)),
        Implementation("index_select, segment_reduce", segment_reduce, cpu=(5, 5), cuda=(3, 3), graph=False),
    ],
    2: [
        Implementation(OURS, ours_both),
        Implementation("index_select; embedding_bag", unfused, cpu=(2, 2), cuda=(2.5, 2.5), graph=False),
        Implementation("index_select; dense bmm, select", dense_both, cpu=(8, 8), cuda=(4, 4)),
    ],
}


def backward(p: Problem, outputs: list[Tensor]) -> Tensor:
    return torch.autograd.grad(outputs, p.hidden, p.upstream[2 - len(outputs) :], retain_graph=True)[0]


def is_right(implementation: Implementation, p: Problem) -> bool:
    """True if an implementation supports this problem. Raises AssertionError if its results are wrong."""
    try:
        outputs = implementation.forward(p)
        results = [*outputs, backward(p, outputs)]
    except (NotImplementedError, RuntimeError) as error:
        print(f"{implementation.name}, {p.hidden.dtype}: {str(error).splitlines()[0]}")
        return False
    for result, exact in zip(results, p.exact(len(outputs)), strict=True):
        error = (result.double() - exact).norm() / exact.norm()
        assert error < 4 * torch.finfo(result.dtype).eps, f"{implementation.name} is wrong"
    return True


# Times


@dataclass
class Times:
    """The seconds of each round."""

    forward: list[float]
    backward: list[float]

    @property
    def both(self) -> list[float]:
        return [forward + backward for forward, backward in zip(self.forward, self.backward, strict=True)]


class Runner:
    """Times an implementation over several problems in turn."""

    def __init__(self, implementation: Implementation, problems: list[Problem]):
        self.implementation = implementation
        self.problems = problems
        self.times = Times([], [])
        self.outputs: list[list[Tensor]] = []
        self.forward: Callable[[], Any] = self.sweep_forward
        self.backward: Callable[[], Any] = self.sweep_backward
        self.forward()
        self.backward()
        if problems[0].hidden.is_cuda and implementation.graph:
            torch.cuda.synchronize()
            self.forward = captured(self.forward)
            self.backward = captured(self.backward)

    def sweep_forward(self) -> None:
        self.outputs = [self.implementation.forward(problem) for problem in self.problems]

    def sweep_backward(self) -> None:
        self.gradients = [backward(problem, out) for problem, out in zip(self.problems, self.outputs, strict=True)]

    def round(self) -> None:
        busy = 1_000_000 if self.implementation.graph else 10_000_000
        for work, seconds in ((self.forward, self.times.forward), (self.backward, self.times.backward)):
            seconds.append(seconds_of(work, self.problems[0].hidden.is_cuda, busy) / len(self.problems))


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of `work`."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        work()
    return graph.replay


def seconds_of(work: Callable[[], Any], on_gpu: bool, busy: int = 1_000_000) -> float:
    """The seconds of `work`. A GPU is kept busy for `busy` cycles while the host launches the work."""
    if not on_gpu:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(busy)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def copy_rate(rounds: int) -> float:
    """The bytes per second that a device copy of 1 GB reads and writes."""
    source, target = torch.empty(2, 2**29, dtype=torch.uint8, device="cuda")
    copy = captured(lambda: target.copy_(source))
    copy()
    return 2**30 / median(seconds_of(copy, True) for _ in range(rounds))


def run(case: str, heads: int, dtype: torch.dtype, device: str, rounds: int) -> None:
    problems = [Problem(case, dtype, device)]
    if device == "cuda":
        for seed in range(1, -(-L2_BYTES // problems[0].hidden.nbytes)):
            problems.append(Problem(case, dtype, device, seed))
    runners: dict[str, Runner] = {}
    for implementation in HEADS[heads]:
        if is_right(implementation, problems[0]):
            runners[implementation.name] = Runner(implementation, problems)
    turns = random.Random(0)
    for _ in range(rounds):
        for runner in turns.sample([*runners.values()], len(runners)):
            runner.round()
    rate = copy_rate(rounds) if device == "cuda" else None
    rows = []
    for implementation in HEADS[heads]:
        name = implementation.name if implementation.graph else f"{implementation.name} *"
        if implementation.name not in runners:
            rows.append([name, "unsupported", *[""] * (len(HEADER) - 2)])
            continue
        times = runners[implementation.name].times
        ratios = [theirs / own for theirs, own in zip(times.both, runners[OURS].times.both, strict=True)]
        goals = implementation.cuda if device == "cuda" else implementation.cpu
        goal = "" if implementation.name == OURS else f">= {goals[[*CASES].index(case)]}"
        cells = [f"{1e6 * median(seconds):,.1f}" for seconds in (times.forward, times.backward, times.both)]
        cells += [f"{median(ratios):.2f}", spread(ratios), goal]
        rows.append([name, *cells, *rate_cells(problems[0], heads, times, rate)])
    shape = " x ".join(map(str, CASES[case]))
    title = f"{case}, {heads} head(s), {str(dtype).removeprefix('torch.')}: {shape}"
    print_table(f"{title}, {problems[0].sums:,} rows, {problems[0].links:,} links", HEADER, rows)


HEADER = ["us", "forward", "backward", "both", "of ours", "middle 80 %", "goal", "of copy, forward", "backward"]


def rate_cells(p: Problem, heads: int, times: Times, rate: float | None) -> list[str]:
    """The rates of the bytes that must be read and written, relative to a copy's. The goals of ours: 85 %, 90 %."""
    if rate is None:
        return ["", ""]
    own = (heads - 1) * p.sums
    forward_bytes = (p.links + p.sums + 2 * own) * p.row_bytes
    backward_bytes = (p.sums + own + p.tokens) * p.row_bytes
    cells = []
    for size, seconds in ((forward_bytes, times.forward), (backward_bytes, times.backward)):
        cells.append(f"{size / median(seconds) / rate:.0%}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if CUDA else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    use_allocator("steady")
    torch.set_num_threads(args.threads)
    CASES.update(SMALL if args.small else {})
    warnings.filterwarnings("ignore", message="Sparse")
    on_gpu = args.device == "cuda"
    print(torch.cuda.get_device_name() if on_gpu else f"{args.threads} threads")
    # Autograd works on the stream of the forward pass, and the default stream cannot be captured.
    with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
        for case, dtype in product(CASES, (torch.float16 if on_gpu else torch.float32, torch.bfloat16)):
            for heads in HEADS:
                run(case, heads, dtype, args.device, args.rounds)


if __name__ == "__main__":
    main()
