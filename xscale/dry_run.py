"""`train.py --dry_run` makes all checks of a start, and prints what the run will read, compute, send and save."""

import argparse
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from xscale import files
from xscale.checkpoint.store import complete_steps
from xscale.data.loader import batches_of
from xscale.data.mixture import StreamSpec, initial_state
from xscale.data.sample import texts_of
from xscale.data.tokenizer import unknown_lines
from xscale.errors import UserError, redact
from xscale.eval.in_training import review_tasks
from xscale.objectives import HasQueue
from xscale.ranks import HostGroup, Process
from xscale.run import folder
from xscale.run.describe import dropped_pairs_warnings, share_lines, start_notes
from xscale.run.going_on import check_engine, find_checkpoint, resume_calibration, with_other_data
from xscale.run_spec import RunSpec, resolve_run
from xscale.step import cost
from xscale.step.ds_config import EngineConfig, Hardware, load_ds_config, read_ds_config
from xscale.step.engine import check_module
from xscale.step.module import StepModule
from xscale.step.zero import stage_of

ALONE = Process(0, 1, 0, 1)
UNKNOWN_SAMPLE = 1024
"""The number of records of each language in which unknown tokens are counted."""
READ = 512
"""The maximum number of samples of each stream that are read to estimate the work of a step."""
READ_TOKENS = 1 << 20
"""About the maximum number of tokens of running text that are read, if READ samples would have more."""


def dry_run(args: argparse.Namespace, process: Process) -> None:
    """Print what the run will do. args: the arguments of train.py. Raises UserError if the run could not start."""
    if args.ranks:
        process = Process(0, args.ranks, 0, args.ranks)
    run_spec = resolve_run(args.recipe, args.set, args.data)
    folder.check_out(args.out, run_spec.identity(), args.resume)
    checkpoint = find_checkpoint(args, run_spec.identity(), HostGroup())
    checkpoint = checkpoint and with_other_data(checkpoint, run_spec)
    hardware = planned_hardware(args.ds_config) if args.ranks else Hardware.here()
    config = load_ds_config(args.ds_config, run_spec.recipe, process.world, hardware)
    check_engine(checkpoint, config)
    task_notes = review_tasks(run_spec, config.stage, HostGroup())
    print(*config.notes, *start_notes(run_spec), *task_notes, sep="\n")
    run_spec = run_spec.calibrated(resume_calibration(run_spec, checkpoint, HostGroup()))
    module = run_spec.module()
    check_module(module, config.stage)
    print(redact(yaml.safe_dump(run_spec.recipe.to_dict(), sort_keys=False, allow_unicode=True)))
    print("ds_config:", yaml.safe_dump(config.resolved, sort_keys=False))
    print(*data_lines(run_spec), *unknown_tokens(run_spec), *share_lines(run_spec), sep="\n")
    for line in [*dropped_pairs_warnings(run_spec), *(f"heads: {note}" for note in module.notes)]:
        print(line)
    print(*cost_lines(run_spec, module, config, process, hardware.device), sep="\n")
    size = cost.checkpoint_bytes(module, config.resolved, config.precision)
    print(f"checkpoint: {size / 1e9:,.2f} GB")
    if not args.ranks:
        for warning in disk_warnings(size, run_spec.recipe.checkpoint.keep, args.out):
            print(warning)
    print(f"out: {args.out}, " + (f"going on from step {checkpoint.step}" if checkpoint else "a new run"))


def planned_hardware(ds_config: Path) -> Hardware:
    """Return the hardware to plan for: this machine's, or GPUs if it has none but the ds_config needs 16 bits."""
    here = Hardware.here()
    if here.device == "cuda" or not {"fp16", "bf16"} & read_ds_config(ds_config).keys():
        return here
    return Hardware("cuda", True, True)


def data_lines(run_spec: RunSpec) -> Iterator[str]:
    for source in run_spec.sources:
        yield (
            f"{source.pair} ({source.kind}): {source.records:,} records in {len(source.shards):,} shards, "
            f"{source.bytes / 1e6:,.1f} MB, fingerprint {source.fingerprint[:12]}, "
            f"{redact(source.remote.url) if source.remote else source.directory}"
        )
    tokenizer = run_spec.tokenizer
    yield (
        f"tokenizer: {tokenizer.vocab_size:,} ids, fingerprint {tokenizer.fingerprint[:12]}, "
        f"{tokenizer.hf.name_or_path}"
    )


def unknown_tokens(run_spec: RunSpec) -> list[str]:
    """Return lines about the share of unknown tokens in each language, with a warning if it is large."""
    shares = {}
    for language in run_spec.languages:
        texts = [text for some in texts_of(language, run_spec.sources, UNKNOWN_SAMPLE) for text in some]
        shares[language] = run_spec.tokenizer.unknown_share(run_spec.tokenizer.encode(texts))
    return unknown_lines(shares, run_spec.tokenizer.hf.name_or_path)


def cost_lines(
    run_spec: RunSpec, module: StepModule, config: EngineConfig, process: Process, device: str
) -> Iterator[str]:
    """Yield lines about the packed rows of a step, and about the memory, FLOPs and communication of a rank."""
    batch = run_spec.mixture(process, device, run_spec.specs, initial_state(run_spec.specs)).next_batch()
    rows = batch.rows
    row_tokens = int(batch.tokens_of_bins().max())
    world = process.world
    samples = {spec.name: spec.samples for spec in run_spec.specs}
    yield (
        f"ranks: {world} of {device}; a step is {rows} row(s) of about {row_tokens:,} tokens on each, "
        f"train.max_tokens {run_spec.max_tokens(device):,}; precision: {config.precision}"
    )
    total = sum(samples.values())
    if total < world:
        yield f"warning: a step has {total:,} samples: {world - total:,} ranks have nothing to do"
    yield f"parameters: {cost.parameter_count(module):,} (vocabulary {run_spec.tokenizer.vocab_size:,})"
    memory = cost.memory(module, run_spec.recipe, config.resolved, config.precision, world, device, row_tokens)
    purposes = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in memory.items())
    total_gb = sum(memory.values()) / 1e9
    yield f"memory per rank, ZeRO stage {stage_of(config.resolved)}: about {total_gb:.2f} GB: {purposes}"
    yield from work_lines(run_spec, module, world)
    found = cost.communication(module, run_spec.recipe, samples, config.resolved, config.precision, rows)
    sizes = {name: cost.bytes_sent(operation, size, world) for name, (operation, size) in found.items()}
    shown = ", ".join(f"{name} {size / 1e6:,.1f} by {found[name][0]}" for name, size in sizes.items())
    yield f"communication: each rank sends about {sum(sizes.values()) / 1e6:,.1f} MB a step: {shown}"


def work_lines(run_spec: RunSpec, module: StepModule, world: int) -> Iterator[str]:
    """Yield lines about the FLOPs and tokens of a step, and of the queue warm-up before the first step."""
    step_cost = Counter[str]()
    for spec in run_spec.specs:
        step_cost.update(stream_cost(run_spec, spec))
    parts = cost.StepFlops(module.encoder).flops(step_cost)
    total = max(sum(parts.values()), 1.0)
    shares = ", ".join(f"{name} {part / total:.0%}" for name, part in parts.items() if part)
    yield f"a step: {step_cost['tokens']:,} tokens, {total:.3g} FLOPs ({shares}); on each rank {total / world:.3g}"
    for spec in run_spec.specs:
        state = module.auxiliary_states.get(spec.name)
        if not isinstance(state, HasQueue) or not state.prefill_samples:
            continue
        yield (
            f"queue warm-up before step 1: streams.{spec.name} reads {state.prefill_samples:,} samples, the text of "
            f"{-(-state.prefill_samples // spec.samples):,} steps"
        )


def stream_cost(run_spec: RunSpec, spec: StreamSpec) -> dict[str, int]:
    """Return a stream's Row.cost in a step, summed over all ranks, estimated from some samples of the first step."""
    most = min(READ, max(READ_TOKENS // run_spec.recipe.data.max_length, 1)) if spec.packed else READ
    few = replace(spec, samples=min(spec.samples, most))
    mixture = run_spec.mixture(ALONE, "cpu", [few], initial_state([few]))
    (batch,) = batches_of(iter([mixture.next_step()]), run_spec.dataset([few]), workers=0, rank=0)
    return {name: round(number * spec.samples / few.samples) for name, number in batch.cost().items()}


def disk_warnings(size: float, keep: int, out: Path) -> Iterator[str]:
    """Yield a warning if the disk of --out lacks space for the checkpoints that are kept plus the one being written.
    Raises UserError if it lacks space for a single one. size: the bytes of a checkpoint."""
    place = files.nearest_existing(out)
    needed = max(keep + 1 - len(complete_steps(out / "checkpoints")), 1) * size
    free = shutil.disk_usage(place).free if place.is_dir() else math.inf
    problem = (
        f"--out {out} has {free / 1e9:,.2f} GB free, but checkpoints will need {needed / 1e9:,.2f} GB; free some "
        f"space, or choose another place"
    )
    if size > free:
        raise UserError(problem)
    if needed > free:
        yield f"warning: {problem}"
