"""Compare the alignment gather with what PyTorch offers for the same task, forward and backward.

    python benchmarks/gather.py [--device cuda|cpu] [--rounds N] [--tune] [--small]
        [--allocator steady|default]

Case 1 is 128 sequences of 128 tokens, 768 wide; case 2 is 32 of 512, 1024 wide. 30 % of the tokens are masked, with 1.3
links each to the other half of their sequence. All implementations are first checked against fp64, then timed in turns.
  one head   the sums of linked states, A^T H, at the masked tokens
  two heads  these sums and the masked tokens' own states, in xscale's case by one gather; the two gradients arrive
             separately, as from two heads
On a GPU, CUDA graphs are timed (*: no graph, because an operator waits for the host). A graph works in turn on as many
buffers as fill 256 MB, so that L2 is cold, or on one buffer (warm). The bytes are a vector for each link and each sum
(forward), each sum and each token (backward); `of copy` is their rate relative to a device copy of 1 GB.
--tune: also time the GPU kernel with other tile sizes.
--small: cases of a few short sequences, which show that the script works.
--allocator steady, the default, makes glibc's malloc keep freed memory; otherwise page faults dominate the times.
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
from common import print_table, use_allocator
from torch import Tensor

from xscale.ops.alignment_gather import alignment_gather

CASES = {"case 1": (128, 128, 768), "case 2": (32, 512, 1024)}
SMALL = {"case 1": (8, 32, 64), "case 2": (4, 64, 96)}
MASKED, LINKS = 0.3, 1.3
OURS = "alignment_gather"


class Problem:
    """Hidden states, and all indices and matrices that an implementation may need, made beforehand.

    Shape letters: B sequences of T tokens, N = B T tokens in all, H width, R masked tokens, K links.
    """

    def __init__(self, case: str, dtype: torch.dtype, device: str, seed: int = 0):
        B, T, H = CASES[case]
        N, (masked, row, column) = B * T, masked_and_links(B, T)
        R, token = len(masked), masked[row]

        def place(array: Any) -> Tensor:
            return torch.as_tensor(array).to(device)

        def index(row: np.ndarray, column: np.ndarray, rows: int) -> list[Tensor]:
            return [place(array) for array in (*csr(row, column, rows), *csr(column, row, N))]

        self.links, self.sums, self.tokens, self.row_bytes = len(row), R, N, H * dtype.itemsize
        self.masked, self.row, self.column = place(masked), place(row), place(column)
        self.index = index(row, column, R)
        self.both = index(np.append(np.arange(R), R + row), np.append(masked, column), 2 * R)
        self.offsets = self.index[0].long()
        drawn = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
        self.hidden = torch.randn(N, H, **drawn).to(dtype).requires_grad_()
        self.upstream = [torch.randn(R, H, **drawn).to(dtype) for _ in range(2)]
        self.A = place(torch.zeros(B, T, T, dtype=dtype))
        self.A[place(token // T), place(token % T), place(column % T)] = 1
        ones = place(torch.ones(len(row), dtype=dtype))
        self.coo = torch.sparse_coo_tensor(torch.stack([self.row, self.column]), ones, (R, N), is_coalesced=True)
        self.csr = torch.sparse_csr_tensor(self.offsets, self.column, ones, (R, N))

    def exact(self, heads: int) -> list[Tensor]:
        """The outputs and the gradient in fp64; then the same sums of absolute values, which bound rounding errors."""
        hidden = self.hidden.detach().double()
        *upstream, last = [gradient.double() for gradient in self.upstream[2 - heads :]]

        def found(hidden: Tensor, upstream: list[Tensor], last: Tensor) -> list[Tensor]:
            sums = hidden.new_zeros(len(last), hidden.shape[1]).index_add(0, self.row, hidden[self.column])
            gradient = torch.zeros_like(hidden).index_add(0, self.column, last[self.row])
            for own in upstream:
                gradient.index_add_(0, self.masked, own)
            return [*(hidden[self.masked] for _ in upstream), sums, gradient]

        bound = found(hidden.abs(), [own.abs() for own in upstream], last.abs())
        return [*found(hidden, upstream, last), *bound]


@cache
def masked_and_links(B: int, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The masked tokens [R]; for each link the number of its masked token [K], and the linked token [K]."""
    r, half = np.random.default_rng(0), T // 2
    masked = np.sort(r.permutation(B * T)[: round(MASKED * B * T)])
    R = len(masked)
    one_each = np.arange(R) * half + r.integers(0, half, R)
    others = np.setdiff1d(np.arange(R * half), one_each)
    cells = np.sort(np.append(one_each, r.choice(others, round((LINKS - 1) * R), replace=False)))
    row, place = cells // half, cells % half
    first = masked[row] // T * T
    return masked, row, first + (masked[row] - first < half) * half + place


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


def sparse_coo(p: Problem) -> list[Tensor]:
    return [torch.sparse.mm(p.coo, p.hidden)]


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
        Implementation("sparse.mm, COO", sparse_coo, cpu=(2.5, 2.5), cuda=(5, 5), graph=False),
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
        found = [*outputs, backward(p, outputs)]
    except (NotImplementedError, RuntimeError) as error:
        print(f"{implementation.name}, {p.hidden.dtype}: {str(error).splitlines()[0]}")
        return False
    exact = p.exact(len(outputs))
    for real, wanted, size in zip(found, exact, exact[len(found) :], strict=False):
        wrong = (real.double() - wanted).abs() > 4 * torch.finfo(real.dtype).eps * size
        assert not wrong.any(), f"{implementation.name} is wrong"
    return True


# CPU


def run_cpu(case: str, heads: int, dtype: torch.dtype, rounds: int) -> None:
    problem = Problem(case, dtype, "cpu")
    running = [implementation for implementation in HEADS[heads] if is_right(implementation, problem)]
    seconds: dict[str, list[float]] = {implementation.name: [] for implementation in running}
    turns = random.Random(0)
    for _ in range(rounds):
        for implementation in turns.sample(running, len(running)):
            started = time.perf_counter()
            backward(problem, implementation.forward(problem))
            seconds[implementation.name].append(time.perf_counter() - started)
    rows = []
    for implementation in HEADS[heads]:
        if implementation not in running:
            rows.append([implementation.name, "unsupported", *[""] * 3])
            continue
        taken = seconds[implementation.name]
        ratios = sorted(theirs / own for theirs, own in zip(taken, seconds[OURS], strict=True))
        goal = "" if implementation.name == OURS else f">= {implementation.cpu[list(CASES).index(case)]}"
        middle = f"{ratios[rounds // 4]:.2f}-{ratios[-1 - rounds // 4]:.2f}"
        times = f"{1e3 * median(taken):.2f}", f"{median(taken) / median(seconds[OURS]):.2f}"
        rows.append([implementation.name, *times, middle, goal])
    print_table(title(case, heads, dtype, problem), ["", "ms", "of ours", "quartiles", "goal"], rows)


def title(case: str, heads: int, dtype: torch.dtype, p: Problem) -> str:
    shape = "{} x {} x {}".format(*CASES[case])
    name = {1: "one head", 2: "two heads"}[heads]
    return f"{case}, {name}, {str(dtype).removeprefix('torch.')}: {shape}, {p.sums:,} rows, {p.links:,} links"


# GPU


class Runner:
    """Times an implementation over several problems in turn; `us` has the microseconds of forward and of backward."""

    def __init__(self, implementation: Implementation, problems: list[Problem]):
        self.implementation, self.problems, self.graph = implementation, problems, implementation.graph
        self.us: tuple[list[float], list[float]] = ([], [])
        self.sweep_forward()
        self.sweep_backward()
        torch.cuda.synchronize()
        self.works: list[Callable[[], Any]] = [self.sweep_forward, self.sweep_backward]
        if self.graph:
            graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[0], stream=torch.cuda.current_stream()):
                self.sweep_forward()
            with torch.cuda.graph(graphs[1], stream=torch.cuda.current_stream()):
                self.sweep_backward()
            self.works = [graph.replay for graph in graphs]

    def sweep_forward(self) -> None:
        self.outputs = [self.implementation.forward(p) for p in self.problems]

    def sweep_backward(self) -> None:
        self.gradients = [backward(p, outputs) for p, outputs in zip(self.problems, self.outputs, strict=True)]

    def round(self) -> None:
        for work, us in zip(self.works, self.us, strict=True):
            us.append(gpu_us(work, 1_000_000 if self.graph else 10_000_000) / len(self.problems))

    def medians(self) -> list[float]:
        return [median(us) for us in self.us]


def gpu_us(work: Callable[[], Any], busy: int = 1_000_000) -> float:
    """The microseconds of `work` on the GPU, which is kept busy for `busy` cycles while the host launches the work."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(busy)
    start.record()
    work()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def copy_us(size: int, buffers: int, rounds: int) -> float:
    """The microseconds of a device copy that reads and writes `size` bytes in all, from cold memory."""
    pairs = [torch.empty(2, size // 2, dtype=torch.uint8, device="cuda") for _ in range(buffers)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for source, target in pairs:
            target.copy_(source)
    graph.replay()
    return median(gpu_us(graph.replay) for _ in range(rounds)) / buffers


def run_gpu(case: str, heads: int, dtype: torch.dtype, rounds: int) -> None:
    first = Problem(case, dtype, "cuda")
    buffers = enough_buffers(first)
    problems = [first, *(Problem(case, dtype, "cuda", seed) for seed in range(1, buffers))]
    right = [implementation for implementation in HEADS[heads] if is_right(implementation, first)]
    cold = {implementation.name: Runner(implementation, problems) for implementation in right}
    warm = {implementation.name: Runner(implementation, [first] * buffers) for implementation in right}
    turns, runners = random.Random(0), [*cold.values(), *warm.values()]
    for _ in range(rounds):
        for runner in turns.sample(runners, len(runners)):
            runner.round()
    moved, peak = traffic(first, heads), 2**30 / copy_us(2**30, 1, rounds)

    def cells(us: list[float], *more: str) -> list[str]:
        rates = [size / t for size, t in zip(moved, us, strict=True)]
        times = [f"{t:.1f}" for t in (*us, sum(us))]
        return [*times, *more, *(f"{rate / 1e3:,.0f}" for rate in rates), *(f"{rate / peak:.0%}" for rate in rates)]

    header = ["us, L2 cold", "fwd", "bwd", "both", "warm", "of ours", "goal", "GB/s fwd", "bwd", "of copy fwd", "bwd"]
    rows = []
    for implementation in HEADS[heads]:
        if implementation not in right:
            rows.append([implementation.name, "unsupported", *[""] * (len(header) - 2)])
            continue
        goal = "85 %, 90 %" if implementation.name == OURS else f">= {implementation.cuda[list(CASES).index(case)]}"
        us, ours_us = cold[implementation.name].medians(), cold[OURS].medians()
        more = f"{sum(warm[implementation.name].medians()):.1f}", f"{sum(us) / sum(ours_us):.2f}", goal
        rows.append([implementation.name + ("" if implementation.graph else " *"), *cells(us, *more)])
    rows.append(["copy of as many bytes", *cells([copy_us(size, buffers, rounds) for size in moved], "", "", "")])
    print_table(title(case, heads, dtype, first), header, rows)


def enough_buffers(p: Problem) -> int:
    """The number of problems whose hidden states fill 256 MB."""
    return -(-(2**28) // p.hidden.nbytes)


def traffic(p: Problem, heads: int) -> tuple[int, int]:
    """The bytes that must be read and written in the forward pass, and in the backward pass."""
    own = (heads - 1) * p.sums
    return (p.links + p.sums + 2 * own) * p.row_bytes, (p.sums + own + p.tokens) * p.row_bytes


def tune(case: str, dtype: torch.dtype, rounds: int) -> None:
    from xscale.ops import alignment_gather_triton as kernel

    first = Problem(case, dtype, "cuda")
    problems = [first, *(Problem(case, dtype, "cuda", seed) for seed in range(1, enough_buffers(first)))]
    tiles = [tile for tile in product((1, 2, 4, 8), (1, 2, 4)) if 2 <= tile[0] * tile[1] <= 16]
    runners = []
    for kernel.ROWS, kernel.AHEAD in tiles:
        runners.append(Runner(HEADS[2][0], problems))
    for _ in range(rounds):
        for runner in runners:
            runner.round()
    rows = [
        [f"{tile[0]} rows, {tile[1]} links ahead", *(f"{us:.1f}" for us in runner.medians())]
        for tile, runner in zip(tiles, runners, strict=True)
    ]
    print_table(title(case, 2, dtype, first), ["us, L2 cold", "fwd", "bwd"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--allocator", choices=("steady", "default"), default="steady")
    args = parser.parse_args()
    use_allocator(args.allocator)
    torch.set_num_threads(args.threads)
    CASES.update(SMALL if args.small else {})
    warnings.filterwarnings("ignore", message="Sparse")
    on_gpu = args.device == "cuda"
    print(torch.cuda.get_device_name() if on_gpu else f"{args.threads} threads; malloc: {args.allocator}")
    dtypes = (torch.float16, torch.bfloat16) if on_gpu else (torch.float32, torch.bfloat16)
    # Autograd works on the stream of the forward pass, and the default stream cannot be captured.
    with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
        for case, dtype in product(CASES, dtypes):
            if args.tune:
                tune(case, dtype, args.rounds)
                continue
            for heads in HEADS:
                (run_gpu if on_gpu else run_cpu)(case, heads, dtype, args.rounds)


if __name__ == "__main__":
    main()
