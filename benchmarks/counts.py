"""Count the operators and the collectives of an optimizer step, and measure its host time.

    python benchmarks/counts.py [--before DIR] [--data DIR ...] [--parts operators collectives]

  operators    the operators that compute something (no views, no allocations) in a whole step, forward and backward, as
               torch's dispatch mode counts them. One rank trains a model of 12 layers of tiny widths, with attention as
               one operator, in packed rows of 16,384 tokens. Also the host ms of a step whose sequences are so few and
               short that arithmetic takes hardly any time: CPU time of one thread, without data, median of 20 steps.
               Both are measured with and without DeepSpeed
  collectives  the collectives of a step of `mixed` with several packed rows on 2 ranks, and gradient buckets of 100,000
               numbers: the reductions of gradients, how often each number is reduced, and all other collectives
--before: also measure another checkout. The exit code is 1 if a goal is missed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

from before import HERE, answers_alone, free_port, start_python, train

SHAPE = {"num_hidden_layers": 12, "hidden_size": 48, "num_attention_heads": 12, "intermediate_size": 96}
MOST, SHARE = {"mixed": 1500}, {"tlm": 1 / 6}
"""Goals without DeepSpeed, by recipe: the most operators of a step; their largest ratio to those of --before."""
ENGINES = (("no DeepSpeed", 0, "fp32"), ("ZeRO-1", 1, "fp32"), ("ZeRO-2", 2, "fp32"), ("ZeRO-2, bf16", 2, "bf16"))
WARM, TIMED = 8, 20
"""The steps before the measurement, since batches are requested some steps ahead; the steps that are timed."""
BUCKET, BIG = 100_000, 1000
"""The numbers in a gradient bucket; the fewest numbers of a collective that counts as a reduction of gradients."""
COLLECTIVES = (
    *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor"),
    *("all_gather_object", "broadcast", "barrier", "all_to_all_single", "gather", "scatter"),
)


class Case(NamedTuple):
    """A recipe, and the fields with which it is measured."""

    recipe: str
    fields: list[str]
    few: list[str]
    """Fields for a step with few samples, but the same number of forward and backward passes."""
    few_before: list[str]
    """More such fields for an older checkout, which has micro-batches."""


MIXED = ("mlm", "tlm", "alignlm", "ppa", "contextual", "align_mlm")
CASES = [
    Case("mixed", ["streams.ppa.prefill=false"], [f"streams.{name}.samples=2" for name in MIXED], []),
    Case("tlm", ["streams.tlm.samples=256"], ["streams.tlm.samples=16"], ["train.micro_batch=2"]),
]


class Checkout(NamedTuple):
    name: str
    path: Path
    now: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout of xscale")
    parser.add_argument("--data", type=Path, nargs="+", help="directories of shards (default: of the demo world)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    checkouts = [Checkout("before", args.before.resolve(), False)] if args.before else []
    checkouts.append(Checkout("now", HERE, True))
    with tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        data = [path.resolve() for path in args.data or make_data(Path(folder) / "world")]
        missed = [goal for part in args.parts for goal in PARTS[part](checkouts, data, Path(folder))]
    sys.exit(f"goals missed: {', '.join(missed)}" if missed else 0)


def make_data(out: Path) -> list[Path]:
    from common import text_pairs, write_world

    return write_world(list(islice(text_pairs(None)[1], 4000)), 8000, out)


def operators(checkouts: list[Checkout], data: list[Path], folder: Path) -> list[str]:
    """Print the table of operators. Returns the goals that are missed."""
    from common import print_table

    rows, missed = [], []
    for case in CASES:
        for engine, stage, precision in ENGINES:
            counts, times = [], []
            for checkout in checkouts:
                rows_of = ["train.max_tokens=16384"] if checkout.now else []
                short = [*case.few, "data.max_length=16", *([] if checkout.now else case.few_before)]
                run = {"recipe": case.recipe, "stage": stage, "sets": [*case.fields, *rows_of]}
                run["sets"].append(f"train.precision={precision}")
                counts.append(run_side(checkout, run | {"kind": "operators"}, data, folder))
                run["sets"] = [*run["sets"], *short]
                times.append(run_side(checkout, run | {"kind": "seconds"}, data, folder))
            goal = MOST.get(case.recipe) or (len(counts) > 1 and SHARE.get(case.recipe, 0) * counts[0]) or None
            goal = None if stage else goal
            if goal and counts[-1] > goal:
                missed.append(f"{case.recipe}: {counts[-1]:,} operators, {goal:,.0f} at most")
            cells = [*(f"{n:,}" for n in counts), f"{goal:,.0f}" if goal else "", *(f"{1e3 * t:.1f}" for t in times)]
            rows.append([f"{case.recipe}, {engine}", *cells])
            print(*rows[-1], sep="  ", flush=True)
    names = [checkout.name for checkout in checkouts]
    header = ["", *(f"operators {name}" for name in names), "at most", *(f"host ms {name}" for name in names)]
    print_table("Operators of a step; host ms of one without arithmetic", header, rows)
    return missed


def collectives(checkouts: list[Checkout], data: list[Path], folder: Path) -> list[str]:
    """Print the table of collectives. Returns the goals that are missed."""
    from common import print_table

    rows, missed = [], []
    for stage in (1, 2):
        for precision in ("fp32", "bf16", *(["fp16"] if fp16_runs() else [])):
            for checkout in checkouts:
                sets = ["streams.ppa.prefill=false", f"train.precision={precision}"]
                sets += ["train.max_tokens=1024"] if checkout.now else []
                run = {"kind": "collectives", "recipe": "mixed", "stage": stage, "sets": sets}
                found = run_side(checkout, run, data, folder, ranks=2)
                name = f"ZeRO-{stage}, {precision}, {checkout.name}"
                cells = [f"{found['calls']}", f"{found['buckets']}", f"{found['share']:.2f}", found["others"]]
                rows.append([name, *cells])
                print(*rows[-1], sep="  ", flush=True)
                if checkout.now and not 0.99 < found["share"] < 1.01:
                    missed.append(f"{name}: gradients reduced {found['share']:.2f} times")
    header = ["", "reductions", "buckets of the gradient", "a number is reduced, times", "others"]
    print_table("Collectives of a step of `mixed` on 2 ranks", header, rows)
    return missed


def fp16_runs() -> bool:
    """True if DeepSpeed supports fp16 on this machine."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().is_fp16_supported()


PARTS: dict[str, Callable[[list[Checkout], list[Path], Path], list[str]]] = {
    "operators": operators,
    "collectives": collectives,
}


def run_side(checkout: Checkout, run: dict[str, Any], data: list[Path], folder: Path, ranks: int = 1) -> Any:
    """Train with a checkout's xscale. Returns what rank 0 has measured."""
    out = Path(tempfile.mkdtemp(dir=folder))
    ds_config = json.loads((HERE / "ds_configs/zero2_fp16.json").read_text())
    ds_config["zero_optimization"] |= {"stage": run["stage"], "reduce_bucket_size": BUCKET}
    (out / "ds_config.json").write_text(json.dumps(ds_config))
    sets = [
        "model.preset=tiny",
        "data.workers=0",
        "data.overlong=truncate",
        "train.steps=100",
        "train.measure_every=0",
        *run["sets"],
    ]
    words = ["--ds_config", str(out / "ds_config.json"), "--recipe", run["recipe"], "--out", str(out / "run")]
    words += ["--data", *map(str, data), "--set", *sets]
    ports = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(ranks):
        (out / f"{rank}").mkdir()
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        place = {name: str(number) for name, number in place.items()}
        arguments = [__file__, "--side", run["kind"], str(run["stage"]), *words]
        processes.append(start_python(checkout.path, arguments, out / f"{rank}", **ports, **place))
    lines = [process.communicate(timeout=600)[0].splitlines() for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("\n".join((out / f"{rank}" / "log.txt").read_text()[-3000:] for rank in range(ranks)))
    return json.loads(lines[0][-1])


# In a process of a run, with whatever xscale PYTHONPATH finds


def side(kind: str, stage: int, words: list[str]) -> None:
    answers = answers_alone()
    calls = watch_collectives() if kind == "collectives" else []  # before DeepSpeed keeps any of these functions
    import torch

    from xscale.models import encoder
    from xscale.step import engine

    torch.set_num_threads(1)
    presets = sys.modules.get("xscale.models.build", encoder)
    presets.PRESETS["tiny"] = SHAPE
    if kind != "collectives":
        attention_as_one_operator()
        if stage == 0:
            engine.build_engine = NoDeepSpeed
    through = {"operators": count_operators, "seconds": measure_host, "collectives": count_collectives}[kind]
    try:
        train(words, 0, lambda trainer, batches: through(trainer, batches, calls))
    except Done as done:
        print(json.dumps(done.args[0]), file=answers)


class Done(Exception):
    """Ends the training loop, and carries the measured result out of it."""


def count_operators(trainer: Any, batches: Iterator[Any], calls: list[Any]) -> Iterator[Any]:
    yield from warm(trainer, batches)
    batch = cleared(trainer, next(batches))
    counter = operator_counter()
    with counter as found:
        yield batch
    for name, count in [*found.most_common(), ("looks at a number", counter.mode.looks)]:
        print(f"{count:6} {name}", file=sys.stderr)
    raise Done(sum(found.values()))


def measure_host(trainer: Any, batches: Iterator[Any], calls: list[Any]) -> Iterator[Any]:
    yield from warm(trainer, batches)
    seconds = []
    for _ in range(TIMED):
        batch = cleared(trainer, next(batches))
        started = time.thread_time()
        yield batch
        seconds.append(time.thread_time() - started)
    raise Done(median(seconds))


def warm(trainer: Any, batches: Iterator[Any]) -> Iterator[Any]:
    trainer.synchronizer.last_flush = float("inf")  # metrics are not written
    for _ in range(WARM):
        yield cleared(trainer, next(batches))


def cleared(trainer: Any, batch: Any) -> Any:
    if isinstance(trainer.engine, NoDeepSpeed):
        trainer.engine.module.zero_grad()
    return batch


class operator_counter:
    """In `with operator_counter() as counts`, `counts` has the number of calls of each operator that computes."""

    def __enter__(self) -> Counter[str]:
        from torch.utils._python_dispatch import TorchDispatchMode

        found: Counter[str] = Counter()

        class Mode(TorchDispatchMode):
            looks = 0

            def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if computes(operator):
                    found[str(operator)] += 1
                elif operator.name().startswith("aten::_local_scalar"):
                    self.looks += 1
                return operator(*args, **(kwargs or {}))

        self.mode = Mode()
        self.mode.__enter__()
        return found

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)


def computes(operator: Any) -> bool:
    """True unless an operator is a view, an allocation, a collective, or only lets the host read a number."""
    others = ("empty", "new_empty", "_unsafe_view", "_local_scalar", "is_", "set_", "resize_", "record_")
    space, name = operator.name().split("::")
    views = [value.alias_info is not None and not value.alias_info.is_write for value in operator._schema.returns]
    return space not in ("c10d", "prim", "profiler") and not any(views) and not name.startswith(others)


class NoDeepSpeed(SimpleNamespace):
    """Replaces DeepSpeed's engine in a step: it computes gradients, and neither reduces nor applies them."""

    def __init__(self, module: Any, ds_config: Any):
        import torch

        super().__init__(
            module=module,
            device=torch.device("cpu"),
            optimizer=SimpleNamespace(param_groups=[]),
            lr_scheduler=None,
            skipped_steps=0,
        )

    def __call__(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    def backward(self, loss: Any) -> None:
        loss.backward()

    def step(self) -> None:
        pass

    def get_lr(self) -> list[float]:
        return [0.0]

    def fp16_enabled(self) -> bool:
        return False

    def zero_optimization_stage(self) -> int:
        return 0

    def no_sync(self) -> Any:
        return nullcontext()

    def allreduce_gradients(self) -> None:
        pass

    def get_global_grad_norm(self) -> None:
        return None


def attention_as_one_operator() -> None:
    """Replace attention by one operator, as a GPU's kernel is one. Earlier checkouts then work without padding too."""
    import torch

    class OneOperator(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *parts: Any) -> Any:
            """Return a copy of the values. parts: queries, keys and values, or one tensor with all three."""
            ctx.parts = len(parts)
            values = parts[-1] if ctx.parts == 3 else parts[0].chunk(3, 1)[2]
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            of_kernel = gradient.clone()
            return (of_kernel,) * 3 if ctx.parts == 3 else of_kernel.repeat(1, 3)  # as unbind's gradient is stacked

    from xscale.models import flat

    flat.attention = lambda qkv, *others, **options: OneOperator.apply(qkv)


def watch_collectives() -> list[tuple[str, int, bool]]:
    """A list to which each later collective adds (name, size of its largest tensor, whether that is floating-point)."""
    import torch
    import torch.distributed as dist

    calls: list[tuple[str, int, bool]] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            largest = max(tensors, key=torch.Tensor.numel, default=torch.zeros(0))
            calls.append((name, largest.numel(), largest.is_floating_point()))
            return function(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, watched(name, getattr(dist, name)))
    return calls


def count_collectives(trainer: Any, batches: Iterator[Any], calls: list[tuple[str, int, bool]]) -> Iterator[Any]:
    yield from warm(trainer, batches)
    while True:
        batch, skipped = next(batches), trainer.engine.skipped_steps
        calls.clear()
        yield batch
        if calls and trainer.engine.skipped_steps == skipped:
            break
    parameters = sum(p.numel() for p in trainer.engine.module.parameters())
    reduced = [n for name, n, floating in calls if "reduce" in name and floating and n >= BIG]
    others = Counter(name for name, n, floating in calls if not ("reduce" in name and floating and n >= BIG))
    said = ", ".join(f"{name} {count}" for name, count in others.most_common())
    buckets = -(-parameters // BUCKET)
    raise Done({"calls": len(reduced), "buckets": buckets, "share": sum(reduced) / parameters, "others": said})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        side(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        main()
