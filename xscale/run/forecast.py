"""What a run will draw, compute, send and save, on as many ranks as it is planned for: the second half of a dry run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from xscale import files
from xscale.data.loader import step_batches
from xscale.data.mixture import FIT_SAMPLES, MAX_STEPS, MIN_STEPS, StreamSpec, initial_state
from xscale.data.packed_row import RowCost
from xscale.objectives import HasQueue
from xscale.ranks import Process
from xscale.run.run_spec import RunSpec
from xscale.step import cost
from xscale.step.ds_config import EngineConfig
from xscale.step.module import StepModule

ALONE = Process(0, 1, 0, 1)
READ = 512
"""Samples of each stream that are read, at most, to tell the work of a step."""
PROBE_BYTES = 16 << 20
"""Written to tell the speed of a file system."""


def forecast(
    run_spec: RunSpec, module: StepModule, config: EngineConfig, world: int, rows: int, out: Path
) -> Iterator[str]:
    """Lines. rows: of a step on a rank."""
    yield from draws(run_spec)
    yield from computed(run_spec, module, world)
    yield from communicated(run_spec, module, config, world, rows)
    whole, first = cost.checkpoint_bytes(module, config.resolved, config.precision, world)
    try:
        place = files.nearest_folder(out)
        speed = files.write_speed(place, PROBE_BYTES)
        told = f"about {first / speed:,.1f} s, at the {speed / 1e6:,.0f} MB/s that one process writes to {place} here"
    except OSError as error:
        told = f"{out} cannot be written ({error.strerror})"
    yield f"checkpoint: {whole / 1e9:,.2f} GB, of which rank 0 writes {first / 1e9:,.2f}: {told}"


def draws(run_spec: RunSpec) -> Iterator[str]:
    """What each stream takes of each source, by its first steps."""
    mixture = run_spec.mixture(ALONE, "cpu", run_spec.specs, initial_state(run_spec.specs))
    steps = min(max(FIT_SAMPLES // sum(spec.samples for spec in run_spec.specs), MIN_STEPS), MAX_STEPS)
    for _ in range(steps):
        mixture.next_batch()
    for spec, weights in zip(run_spec.specs, mixture.weights, strict=True):
        for number, share, (epoch, position) in zip(
            spec.sources, weights, mixture.state["positions"][spec.name], strict=True
        ):
            source = run_spec.sources[number]
            records = (epoch * source.records + position) / steps
            yield (
                f"draws: {spec.name} {source.pair} {share * spec.samples:,.1f} samples a step, {records:,.1f} records; "
                f"{records * run_spec.recipe.train.steps / source.records:,.2f} epochs in "
                f"{run_spec.recipe.train.steps:,} steps"
            )


def work_of(run_spec: RunSpec, spec: StreamSpec) -> RowCost:
    """Of a stream in a step of all ranks, by some samples of the first."""
    few = replace(spec, samples=min(spec.samples, READ))
    mixture = run_spec.mixture(ALONE, "cpu", [few], initial_state([few]))
    (batch,) = step_batches(mixture, run_spec.dataset([few]), workers=0, steps=1)
    return RowCost(*(round(number * spec.samples / few.samples) for number in batch.work()))


def computed(run_spec: RunSpec, module: StepModule, world: int) -> Iterator[str]:
    """FLOPs and tokens of a step, and of what companions read before the first."""
    flops, works = cost.StepFlops(module.encoder), {spec.name: work_of(run_spec, spec) for spec in run_spec.specs}
    of_parts = flops.flops(RowCost(*map(sum, zip(*works.values(), strict=True))))
    total = max(sum(of_parts.values()), 1.0)
    shares = ", ".join(f"{name} {part / total:.0%}" for name, part in of_parts.items() if part)
    tokens = sum(work.tokens for work in works.values())
    yield f"a step: {tokens:,} tokens, {total:.3g} FLOPs ({shares}); on each rank {total / world:.3g}"
    for name, auxiliary_state in module.auxiliary_states.items():
        if not isinstance(auxiliary_state, HasQueue) or not auxiliary_state.prefill_samples:
            continue
        samples = next(spec.samples for spec in run_spec.specs if spec.name == name)
        steps = -(-auxiliary_state.prefill_samples // samples)
        spent = steps * flops.flops(works[name]._replace(tokens=0, squares=0, predictions=0))["auxiliary"]
        yield (
            f"before step 1, streams.{name} reads {auxiliary_state.prefill_samples:,} samples: {spent:.3g} FLOPs, "
            f"those of {spent / total:.1f} steps, and the text of {steps:,} steps of the stream"
        )


def communicated(run_spec: RunSpec, module: StepModule, config: EngineConfig, world: int, rows: int) -> Iterator[str]:
    samples = {spec.name: spec.samples for spec in run_spec.specs}
    found = cost.communication(module, run_spec.recipe, samples, config.resolved, config.precision, rows)
    parts = {name: cost.sent(kind, size, world) for name, (kind, size) in found.items()}
    told = ", ".join(f"{name} {size / 1e6:,.1f} by {found[name][0]}" for name, size in parts.items())
    yield f"communication: each rank sends about {sum(parts.values()) / 1e6:,.1f} MB a step: {told}"
