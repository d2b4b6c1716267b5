"""The differences between ZeRO's stages: whole weights, and the one reduction of a step.

A step has R packed rows. R is the same on all ranks and may change from step to step. Therefore
`gradient_accumulation_steps` is 1, and DeepSpeed divides gradients by the number of ranks only:

    with one_reduction(engine):
        for row in rows:
            loss, _ = engine(row)
            engine.backward(loss * world)
    engine.step()

The module must return its loss as a tensor in a tuple, because DeepSpeed clears the gradients of the last pass in hooks
on returned tensors. These hooks work with `engine.backward` only. To differentiate for another purpose, such as a
gradient norm, call `engine.module(row)` instead of `engine(row)`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from xscale import deepspeed_private as private


def zero_stage(ds_config: dict[str, Any]) -> int:
    """Return the ZeRO stage of a ds_config."""
    return ds_config.get("zero_optimization", {}).get("stage", 0)


def offloads_optimizer(ds_config: dict[str, Any]) -> bool:
    """Return whether a ds_config moves the optimizer's state out of device memory."""
    return (ds_config.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device", "none") != "none"


def keeps_whole_weights(engine: Any) -> bool:
    """Return whether each rank has all weights whole. ZeRO stage 3 partitions them."""
    return engine.zero_optimization_stage() < 3


@contextmanager
def gathered_weight(engine: Any, weight: Tensor) -> Iterator[Tensor]:
    """Yield the whole weight, which may only be read. ZeRO stage 3 gathers it from the ranks, so all ranks call this
    together."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight], enabled=not keeps_whole_weights(engine)):
        yield weight


def register_weights_read_directly(engine: Any, weights: Iterable[nn.Parameter]) -> None:
    """At stage 3, tell DeepSpeed of weights that a pass reads without calling the module that owns them. Call it before
    the first pass.

    DeepSpeed finds such weights by itself only if they are partitioned before a pass. Small weights are partitioned
    only after a skipped step. DeepSpeed records in the first step in which order it fetches weights. A weight that it
    finds later is missing from this order, and DeepSpeed stops with "tracing error".
    """
    if keeps_whole_weights(engine):
        return
    import deepspeed

    for weight in weights:
        deepspeed.zero.register_external_parameter(engine.module, weight)


@contextmanager
def one_reduction(engine: Any) -> Iterator[None]:
    """Keep the gradients of the backward passes in this context on this rank, and reduce their sums at its end, once.

    How the gradients are reduced depends on the ZeRO stage:

    - At stages 1 and 2, the gradients of each parameter group are views of one flat tensor. All passes add to it, and
      then this tensor itself is reduced, so that no gradient is copied. `supports_flat_gradients` has the exceptions.
    - At stage 3, and in most of these exceptions, DeepSpeed's `coalesce_grad_reduction` reduces the gradients in
      buckets. Without it, stages 2 and 3 would reduce after every pass.
    - Stage 0 and BF16_Optimizer do not support `coalesce_grad_reduction`. They reduce when `allreduce_gradients` is
      called.
    """
    private.remove_gradient_hooks(engine)
    flat_gradients = None
    on_request = False
    if private.supports_flat_gradients(engine):
        flat_gradients = private.allocate_flat_gradients(engine)
        passes = private.without_gradient_reduction(engine)
    elif engine.zero_optimization_stage() == 0 or private.is_bf16_optimizer(engine):
        on_request = True
        passes = engine.no_sync()
    else:
        passes = engine.coalesce_grad_reduction()
    with passes:
        try:
            yield
            give_zero_gradients_to_unused_weights(engine)
        except BaseException:
            # coalesce_grad_reduction reduces after an exception, too. Without gradients there is nothing to reduce, so
            # that no collective waits for ranks that are elsewhere, and the exception reaches the caller.
            private.drop_gradients(engine.module)
            raise
    if flat_gradients is not None:
        private.average_and_hand_over_partitions(engine, flat_gradients)
    elif on_request:
        engine.allreduce_gradients()


def update_weights_if_finite(engine: Any) -> bool:
    """Update the weights unless the reduced gradient is not finite. Returns True if the weights have changed.

    At stages 1 to 3, DeepSpeed checks the gradient; at stage 0, this function does.
    """
    if engine.zero_optimization_stage() == 0:
        gradients = [weight.grad for weight in engine.module.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        private.set_global_norm(engine, norm)
        if not norm.isfinite():  # every rank has the same norm, since the gradient is reduced
            private.skip_step(engine)
            return False
    skipped = engine.skipped_steps
    engine.step()
    return engine.skipped_steps == skipped


def give_zero_gradients_to_unused_weights(engine: Any) -> None:
    """Give a gradient of zeros to every trainable weight that no pass of this rank has used.

    Without these zeros, a weight that only some ranks use makes the ranks' gradient buckets differ; a weight that no
    rank uses keeps the last step's gradient under offload and at stage 3; and BF16_Optimizer leaves out the
    gradients of weights that this rank has not used when it computes the norm and clips.
    """
    missing = private.weights_without_gradient(engine)
    with private.setting_gradients_by_hand(engine) if missing else nullcontext():
        for weight in missing:
            # At stage 3 the weight is an empty tensor. It gets its whole shape for a moment, since autograd accepts
            # only a gradient of the weight's shape.
            data = weight.data
            weight.data = data.new_zeros(private.whole_shape(weight))
            weight.grad = torch.zeros_like(weight.data)
            weight.data = data
