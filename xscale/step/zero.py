"""What ZeRO asks of a step whose gradients are summed over several backward passes and reduced once.

A step is R rows, R the same on all ranks and free to change from step to step, so `gradient_accumulation_steps` is 1
and DeepSpeed divides gradients by the number of ranks alone:

    with one_reduction(engine):
        for row in rows:
            loss, _ = engine(row)
            engine.backward(loss * world)
    engine.step()

The module returns its loss as a tensor within a tuple: from hooks on returned tensors DeepSpeed clears the last pass's
gradients. These hooks are for `engine.backward` alone; whoever differentiates for another purpose, a gradient norm,
calls `engine.module(row)` instead of `engine(row)`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def one_reduction(engine: Any) -> Iterator[None]:
    """Backward passes within keep their gradients on this rank; at its end their sums are reduced, each bucket once.

    Stages 1 to 3 have `coalesce_grad_reduction` for it (without, 2 and 3 reduce after every pass). Stage 0 and
    BF16_Optimizer do not take it: they reduce when told to.
    """
    when_told = reduces_when_told(engine)
    with engine.no_sync() if when_told else engine.coalesce_grad_reduction():
        try:
            yield
            zeros_for_missing(engine)
        except BaseException:
            # coalesce_grad_reduction reduces on the way out of an exception too. Without gradients there is nothing
            # to reduce: no collective waits for ranks that are elsewhere, and the exception is what is seen.
            for weight in engine.module.parameters():
                weight.grad = weight.grad_accum = None  # the second where DeepSpeed accumulates in fp32
            raise
    if when_told:
        engine.allreduce_gradients()


def reduces_when_told(engine: Any) -> bool:
    """Stage 0, and what DeepSpeed takes for stage 1 in bf16 with gradients accumulated in fp32."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    return engine.zero_optimization_stage() == 0 or isinstance(engine.optimizer, BF16_Optimizer)


def zeros_for_missing(engine: Any) -> None:
    """Give every trainable weight that no pass of this rank has used a gradient of zeros.

    Left out, a weight that only some ranks use shifts the buckets of the others against each other; one that no rank
    uses keeps the last step's gradient under offload and at stage 3; and BF16_Optimizer neither counts nor clips
    gradients of weights that this very rank has not used.
    """
    optimizer = engine.optimizer
    # Where gradients are accumulated in fp32, backward_epilogue has moved them into an attribute of another name.
    gradient = getattr(optimizer, "get_gradient_for_reduction", lambda weight: weight.grad)
    missing = [p for p in engine.module.parameters() if p.requires_grad and gradient(p) is None]
    if not missing:
        return
    accumulates = engine.zero_optimization_stage() in (1, 2)
    if accumulates:
        optimizer.backward_prologue()  # BF16_Optimizer's clears the last pass's gradients, which it has taken
    for weight in missing:
        set_zeros(weight)
    if accumulates:
        optimizer.backward_epilogue()


def set_zeros(weight: nn.Parameter) -> None:
    """weight.grad = zeros, also where stage 3 has left an empty tensor of the weight, which autograd would compare."""
    data = weight.data
    weight.data = torch.zeros(getattr(weight, "ds_shape", weight.shape), dtype=data.dtype, device=data.device)
    weight.grad = torch.zeros_like(weight.data)
    weight.data = data


def gather_for_every_pass(engine: Any, weights: Iterable[nn.Parameter]) -> None:
    """Tell stage 3 of weights that a pass reads without calling the module that owns them. Before the first pass.

    DeepSpeed finds them by itself, but only in a pass before which they are not whole. Small weights are whole but
    after a skipped step, and one found then is missing from the order in which DeepSpeed fetches weights: it stops
    with "tracing error".
    """
    if engine.zero_optimization_stage() < 3:
        return
    import deepspeed

    for weight in weights:
        deepspeed.zero.register_external_parameter(engine.module, weight)
