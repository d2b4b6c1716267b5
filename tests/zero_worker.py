"""Worker of test_zero.py: trains a toy in each case of CASES.json. `torchrun ... zero_worker.py CASES.json OUT.json`.

Shape letters: N samples, S places, D width, V vocabulary.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

CALLS: list[tuple[str, int]] = []
"""Collectives of a step: name and type, bytes."""


def count(name: str, place: int) -> None:
    original = getattr(dist, name, None)
    if original is None:
        return  # torch 2.13 renamed reduce_scatter_tensor

    def counted(*args: Any, **kwargs: Any) -> Any:
        tensor = args[place] if len(args) > place else kwargs["tensor" if place == 0 else "input"]
        CALLS.append((f"{name} {str(tensor.dtype)[6:]}", tensor.nbytes))
        return original(*args, **kwargs)

    setattr(dist, name, counted)


for _name, _place in (("all_reduce", 0), ("reduce", 0), ("reduce_scatter_tensor", 1), ("reduce_scatter_single", 1)):
    count(_name, _place)  # before deepspeed takes them

LOOKS: list[str] = []
"""Norms and tests of numbers that the update takes of gradients, one after the other."""


def count_looks(module: Any, name: str) -> None:
    original = getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        LOOKS.append(name)
        return original(*args, **kwargs)

    setattr(module, name, counted)


count_looks(torch.linalg, "vector_norm")
count_looks(torch, "isfinite")

import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param  # noqa: E402

from xscale import deepspeed_private as private  # noqa: E402
from xscale import ranks  # noqa: E402
from xscale.step.engine import load_or_compile_adam  # noqa: E402
from xscale.step.zero import one_reduction, register_weights_read_directly  # noqa: E402

REDUCE_SCATTER = private.reduce_scatter_in_place
N, S, D, V = 24, 5, 16, 61
ROWS = [1, 4, 1, 1, 4, 2, 2, 1, 1, 3]
"""Rows of each step: usually one, now and then more; the overflow at step 6 leaves one of two rows that is counted."""
STEPS = len(ROWS)
LR, DECAY, EPS, CLIP = 0.3, 0.01, 1.0, 0.7
"""With so large an epsilon an update is linear in the gradient, and so is its error."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Vocabulary(torch.autograd.Function):
    """Cross-entropy of the tied projection, with a backward pass of its own, as ops/masked_ce.py has."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, labels_N: Tensor) -> Tensor:
        logits_NV = (x_ND @ weight_VD.T + bias_V).double()
        ctx.save_for_backward(x_ND, weight_VD, logits_NV.softmax(-1), labels_N)
        return F.cross_entropy(logits_NV, labels_N, reduction="sum")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_VD, p_NV, labels_N = ctx.saved_tensors
        d_NV = ((p_NV - F.one_hot(labels_N, len(weight_VD))) * gradient).to(x_ND.dtype)
        return d_NV @ weight_VD, d_NV.T @ x_ND, d_NV.sum(0), None


class Toy(nn.Module):
    """Built as a run's model is: submodules called one by one, a vocabulary head that reads the tied table and its bias
    outside of any module, two heads of which a step may have no sample, and a weight that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V, D)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(D), "up": nn.Linear(D, 4 * D), "down": nn.Linear(4 * D, D)})
            for _ in range(2)
        )
        self.out = nn.Linear(D, V)
        self.out.weight = self.table.weight
        self.heads = nn.ModuleDict({k: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 7)) for k in "AB"})
        self.never = nn.Linear(D, D)
        with torch.no_grad():
            for weight in self.parameters():
                weight.add_(0.1 * torch.randn_like(weight))

    def forward(self, row: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        x_NSD = self.table(row["x"])
        for layer in self.layers:
            x_NSD = x_NSD + layer["down"](F.gelu(layer["up"](layer["norm"](x_NSD))))  # type: ignore[index]
        x, y = (dict(zip("MAB", all_.split(row["sizes"]), strict=True)) for all_ in (x_NSD, row["y"]))
        sums = {"M": Vocabulary.apply(x["M"].flatten(0, 1), self.out.weight, self.out.bias, y["M"].flatten())}
        for name in row["heads"]:
            logits_N7 = self.heads[name](x[name].mean(1)).double()
            sums[name] = F.cross_entropy(logits_N7, y[name][:, 0] % 7, reduction="sum")
        loss = torch.stack([sums[name] / max(row["totals"][name], 1) for name in sums]).sum()
        return loss, {name: value.detach() for name, value in sums.items()}


def samples(step: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs and labels [N, S] of all ranks; now and then a head has none, A already in the first step."""
    generator = torch.Generator().manual_seed(1000 + step)
    kinds = {
        k: (torch.randint(V, (N, S), generator=generator), torch.randint(V, (N, S), generator=generator)) for k in "MAB"
    }
    for name, none in (("A", step % 7 == 0), ("B", step % 5 == 3)):
        if none:
            kinds[name] = (kinds[name][0][:0], kinds[name][1][:0])
    return kinds


def rows_of(step: int, heads: str, rows: int, rank: int, world: int) -> list[dict[str, Any]]:
    """A rank's rows. `heads`: "all" calls every head in every row, "rows" only in rows of which some rank has a sample
    of it, "ranks" only where this rank has one; then A's samples are in the last row, B's in the first."""
    kinds = samples(step)
    generator = torch.Generator().manual_seed(77 + step)
    where = {k: torch.randint(rows * world, (len(x),), generator=generator) for k, (x, _) in kinds.items()}
    if heads == "rows":
        where["A"], where["B"] = where["A"] % world + (rows - 1) * world, where["B"] % world
    if heads == "ranks":
        where["A"], where["B"] = torch.full_like(where["A"], (rows - 1) * world), torch.full_like(where["B"], world - 1)
    cut = []
    for row in range(rows):
        mine = {k: place == row * world + rank for k, place in where.items()}
        used = {"all": where, "rows": [k for k in where if (where[k] // world == row).any()]}.get(
            heads, [k for k in where if mine[k].any()]
        )
        x, y = (torch.cat([kinds[k][i][mine[k]] for k in "MAB"]) for i in (0, 1))
        sizes = [int(mine[k].sum()) for k in "MAB"]
        totals = {k: len(kinds[k][0]) * (S if k == "M" else 1) for k in kinds}
        cut.append({"x": x, "y": y, "sizes": sizes, "totals": totals, "heads": [k for k in "AB" if k in used]})
    return cut


def reference(precision: str, skipped: list[int]) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights before and after the steps, and the gradients' norms, by plain PyTorch in fp64 on one rank."""
    model = Toy().to(DTYPES[precision]).double()  # DeepSpeed's fp32 weights are those of the rounded model
    start, norms = weights_of(model), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, eps=EPS)
    for step in range(STEPS):
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        (row,) = rows_of(step, "rows", 1, 0, 1)
        model(row)[0].backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        if step not in skipped:
            optimizer.step()
    return start, weights_of(model), norms


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def config(case: dict[str, Any]) -> dict[str, Any]:
    offload = case.get("offload", False)
    params = {"lr": LR, "weight_decay": DECAY, "eps": EPS, "betas": [0.9, 0.999]}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": params if offload else params | {"torch_adam": True}},
        "fp16": {"enabled": case["precision"] == "fp16", "initial_scale_power": 10, "hysteresis": 1},
        "bf16": {"enabled": case["precision"] == "bf16"},
        "data_types": {"grad_accum_dtype": case.get("accumulate")},
        "zero_optimization": {
            "stage": case["stage"],
            "reduce_scatter": True,
            "overlap_comm": case.get("overlap", False),
            "contiguous_gradients": True,
            "reduce_bucket_size": case.get("bucket", 1_000_000),
            "stage3_param_persistence_threshold": 100,  # vectors stay whole, matrices are cut up
            "offload_optimizer": {"device": "cpu" if offload else "none"},
        },
    }


def build(case: dict[str, Any], out: Path) -> Any:
    if case.get("offload"):
        load_or_compile_adam("CPUAdamBuilder")
    model = Toy()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[{"params": matrices}, {"params": vectors}], config=config(case)
    )
    register_weights_read_directly(engine, model.out.parameters())
    private.disable_separate_overflow_check(engine)
    if case["stage"] == 3:  # after which small weights are whole before the first pass
        engine.save_checkpoint(str(out / "saved"))
    return engine


def step_once(engine: Any, case: dict[str, Any], step: int) -> None:
    rank, world, rows = dist.get_rank(), dist.get_world_size(), ROWS[step]
    with one_reduction(engine):
        for row in rows_of(step, case.get("heads", "all"), rows, rank, world):
            loss, _ = engine(row)
            if case.get("norms"):
                other, _ = engine.module(row)
                torch.autograd.grad(other, list(engine.module.parameters()), materialize_grads=True)
            if step in case.get("overflow", []) and rank == world - 1:
                loss = loss * 1e30
            engine.backward(loss * world)
            if case.get("fails"):
                raise ValueError("a row is bad")
    LOOKS.clear()
    engine.step()


def sum_as_on_a_gpu(total: Tensor, partition: Tensor, process_group: Any) -> None:
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(partition, total, group=process_group)


def train(case: dict[str, Any], out: Path) -> dict[str, Any]:
    overflow = case.get("overflow", [])
    start, expected, expected_norms = reference(case["precision"], overflow)
    engine = build(case, out)
    calls: dict[int, dict[str, list[int]]] = {}
    norms, scales, looks = [], [], []
    for step in range(STEPS):
        CALLS.clear()
        step_once(engine, case, step)
        seen = calls.setdefault(ROWS[step], {})
        if step not in overflow:  # an update that is skipped ends early
            seen.clear()
            for name, size in CALLS:
                seen.setdefault(name, []).append(size)
        norms.append(engine.get_global_grad_norm())
        looks.append(len(LOOKS))
        scales.append(float(engine.optimizer.loss_scale) if case["precision"] == "fp16" else 1.0)
    errors = {}
    for name, weight in engine.module.named_parameters():
        got = (safe_get_full_fp32_param(weight) if case["stage"] else weight.detach()).double()
        errors[name] = float((got - expected[name]).norm() / (expected[name] - start[name]).norm())
    compared = [] if case["stage"] == 0 else [step for step in range(STEPS) if step not in overflow]
    return {
        "errors": errors,
        "norm_error": max((abs(float(norms[i]) / expected_norms[i] - 1) for i in compared), default=0.0),
        "norms_skipped": [str(float(norms[i])) for i in overflow],
        "scales": scales,
        "looks": max(looks),
        "skipped": engine.skipped_steps,
        "hooks": len(getattr(engine.optimizer, "_grad_acc_hooks", [])),
        "calls": calls,
    }


def fail(case: dict[str, Any], out: Path) -> dict[str, Any]:
    """What is seen of an exception in a row, and the gradients that are reduced."""
    engine = build(case, out)
    CALLS.clear()
    try:
        step_once(engine, case, 0)
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}", "reduced": [size for _, size in CALLS if size > 8]}
    return {"raised": None}


def main() -> None:
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    ranks.join_process_group(ranks.read_launcher_and_set_environment())
    supported = {"fp16": get_accelerator().is_fp16_supported(), "bf16": get_accelerator().is_bf16_supported()}
    results = {}
    for name, case in cases.items():
        private.reduce_scatter_in_place = sum_as_on_a_gpu if case.get("scattered") else REDUCE_SCATTER
        if supported.get(case["precision"], True):
            results[name] = (fail if case.get("fails") else train)(case, out.parent)
            gc.collect()  # engines are cycles
            if dist.get_rank() == 0:
                print(name, flush=True)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an exit that tears the process group down may wait for the other ranks
