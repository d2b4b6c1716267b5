"""Companions that start from samples read them before step 1, in an order that uses up none of the stream."""

import time

import torch

from xscale import rng
from xscale.data.mixture import initial_state
from xscale.objectives import HasQueue
from xscale.ranks import Process
from xscale.run.metrics import LINE_SECONDS, LOG
from xscale.run.run_spec import RunSpec
from xscale.step.module import StepModule
from xscale.step.step import to_device


def warm_up_queues(module: StepModule, run_spec: RunSpec, process: Process, device: torch.device) -> None:
    """With the initial weights, on all ranks."""
    for name, auxiliary_state in module.auxiliary_states.items():
        if not isinstance(auxiliary_state, HasQueue) or not auxiliary_state.prefill_samples:
            continue
        warm_up = run_spec.copy_of_stream(name, f"{name}.prefill")
        wanted, have, said = auxiliary_state.prefill_samples, 0, time.monotonic()
        LOG.info(f"{name}: reading {wanted:,} samples with the initial weights before step 1")
        steps = 2 * -(-wanted // warm_up.specs[0].samples)
        for batch in warm_up.batches(process, device.type, initial_state(warm_up.specs), steps):
            for number, row in enumerate(batch.rows):
                place = (batch.step, number, process.rank)
                torch.manual_seed(rng.torch_seed(run_spec.recipe.train.seed, "prefill", name, *place))
                inputs = to_device(row.inputs, device)
                (auxiliary,), (arrays,) = inputs.auxiliary.values(), inputs.arrays.values()
                auxiliary_state.read(module.encoder, *auxiliary, arrays)
            have = auxiliary_state.finish_warmup()
            if time.monotonic() - said > LINE_SECONDS:
                said = time.monotonic()
                LOG.info(f"{name}: {have:,} of {wanted:,} samples read")
            if have >= wanted:
                break
        if have < wanted:
            LOG.warning(f"{name}: only {have:,} of {wanted:,}; more than half of what was read is over max_length")
